"""Benchmarks of whole models with random weights: `fuse_model` and its alternatives."""
