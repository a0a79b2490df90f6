"""Activations: with a bias and dropout, and gated."""
