"""The config of the generation kernel."""

from __future__ import annotations

from ..core.configs.tuning import Config

__all__ = ["CONFIG"]

# A program has 1024 windows, four per thread. Many short programs hide latency better than few long
# ones.
CONFIG = Config(block_n=1024, rows=1, warps=8)
