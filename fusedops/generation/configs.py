"""The config of the generation kernel."""

from __future__ import annotations

from ..core.tuning import Config

__all__ = ["CONFIG"]

# The columns of a tile are windows: eight per thread, so that enough loads are in flight.
CONFIG = Config(2048, 1, 8)
