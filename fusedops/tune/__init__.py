"""Measures which config is fastest: ``fusedops tune`` and ``FUSEDOPS_TUNE=1``.

Only the top-level package imports this one, and only when it tunes.
"""
