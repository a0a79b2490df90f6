"""The package's version. It is in core because tuning keys and exported constants contain it."""

__all__ = ["__version__"]

__version__ = "0.1.0"
