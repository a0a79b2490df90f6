"""Benchmarks of every operator that a ``fusedops.*.spec`` describes.

``python -m benchmarks run`` times them; ``python -m benchmarks --help`` lists all commands.
"""
