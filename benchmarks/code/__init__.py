"""Counts what compiled code does, without a GPU: its kernels, and the bytes that they move."""
