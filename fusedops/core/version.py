"""The package's version: part of every tuning key, so in core."""

__all__ = ["__version__"]

__version__ = "0.1.0"
