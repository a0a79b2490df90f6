"""Compiling kernels and launching them."""
