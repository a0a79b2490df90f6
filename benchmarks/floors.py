"""The roofline: the least time in which the unavoidable bytes can be read and written."""

from __future__ import annotations

import torch

from fusedops.core.spec import Spec

__all__ = ["bytes_moved", "floor_us"]


def bytes_moved(spec: Spec, elements: int, dtype: torch.dtype, mode: str) -> int:
    """Returns the bytes that one call must read or write, of tensors ``(M, N)`` with ``elements``.

    Parameters and row statistics are not counted, for any provider: they are O(M + N).
    """
    return spec.passes[mode] * elements * dtype.itemsize


def floor_us(moved: int, bandwidth: float) -> float:
    """Returns the microseconds to move this many bytes at ``bandwidth`` bytes per second."""
    return moved / bandwidth * 1e6
