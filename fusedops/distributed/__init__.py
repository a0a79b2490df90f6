"""Support of DTensors, and `check_seeds`."""

from __future__ import annotations

from .seeds import check_seeds

__all__ = ["check_seeds"]
