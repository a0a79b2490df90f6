"""The config of the generation kernel."""

from __future__ import annotations

from ..core.configs.tuning import Config

__all__ = ["CONFIG"]

# The columns count windows, four per thread: many short programs hide latency better than few long
# ones.
CONFIG = Config(1024, 1, 8)
