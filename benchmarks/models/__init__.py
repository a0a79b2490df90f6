"""Whole models, from config with random weights.

What `fuse_model` gains, beside what else a user could do to them.
"""
