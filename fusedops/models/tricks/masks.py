"""Masks that PyTorch's fused attention takes, in compiled code."""

from __future__ import annotations

from typing import Any

from ...core.alignment import contiguous_along_keys
from .. import compiling
from ..hooks import is_plain

__all__ = ["laid_out"]


def laid_out(mask: Any) -> Any:
    """An attention's mask, contiguous along the keys, where torch.compile makes kernels."""
    if not is_plain(mask) or not compiling.makes_kernels(mask):
        return mask
    return contiguous_along_keys(mask)
