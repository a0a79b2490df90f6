"""Benchmarks of every operator that a ``fusedops.*.spec`` describes.

``python -m benchmarks run``.
"""
