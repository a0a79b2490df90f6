"""The roofline: the least time in which the bytes that must move can move."""

from __future__ import annotations

import torch

from fusedops.core.spec import Spec

__all__ = ["bytes_moved", "floor_us"]


def bytes_moved(spec: Spec, elements: int, dtype: torch.dtype, mode: str) -> int:
    """Bytes of the ``(M, N)`` tensors of so many elements that one call must read or write.

    Parameters and row statistics are left out, for every provider alike: they are O(M + N).
    """
    return spec.passes[mode] * elements * dtype.itemsize


def floor_us(moved: int, bandwidth: float) -> float:
    """Microseconds to move so many bytes at ``bandwidth`` bytes a second."""
    return moved / bandwidth * 1e6
