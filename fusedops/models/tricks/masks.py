"""Masks that PyTorch's fused attention takes, in compiled code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import compiling
from ..hooks import is_plain

__all__ = ["laid_out", "not_expanded"]


def laid_out(mask: Any) -> Any:
    """An attention's mask, not expanded over the keys, where torch.compile makes kernels."""
    if not isinstance(mask, Tensor) or not compiling.makes_kernels(mask) or not is_plain(mask):
        return mask
    return not_expanded(mask)


def not_expanded(mask: Tensor) -> Tensor:
    """A mask of truth values that is not expanded over the keys.

    On GPUs PyTorch's fused attention takes no mask whose last dimension is expanded, and what it falls back to multiplies
    in fp32. Compiled with PyTorch 2.11, or Transformers before 5.23, models make such masks where nothing is masked.

    Lengths of 64 more than a multiple of 128 are left: with a mask, cuDNN's backward may give NaN there (PyTorch's issue
    196678).
    """
    if mask.dtype != torch.bool or mask.layout != torch.strided or mask.is_nested:
        return mask
    return mask.contiguous() if mask.dim() and mask.stride(-1) == 0 and mask.shape[-1] % 128 != 64 else mask
