"""Masks that PyTorch's fused attention takes, in compiled code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import compiling
from ..hooks import is_plain

__all__ = ["laid_out", "made_contiguous"]


def laid_out(mask: Any) -> Any:
    """An attention's mask, contiguous along the keys, where torch.compile makes kernels."""
    if not isinstance(mask, Tensor) or not compiling.makes_kernels(mask) or not is_plain(mask):
        return mask
    return made_contiguous(mask)


def made_contiguous(mask: Tensor) -> Tensor:
    """A mask of truth values that is not expanded over the keys, or of numbers that lie behind one another along them.

    On GPUs PyTorch's fused attention takes no mask whose last dimension has another stride than one, and what it falls back
    to multiplies in fp32. Compiled with PyTorch 2.11, or Transformers before 5.23, models make masks of truth values that are
    expanded where nothing is masked, and T5 hands on the transposed table of its biases.

    Lengths of 64 more than a multiple of 128 are left: with a mask, cuDNN's backward may give NaN there (PyTorch's issue
    196678).
    """
    if mask.layout != torch.strided or mask.is_nested or not mask.dim():
        return mask
    stride = mask.stride(-1)
    is_apart = stride == 0 if mask.dtype == torch.bool else mask.is_floating_point() and stride > 1
    if not is_apart or mask.shape[-1] % 128 == 64:  # asked last: of a length that may change it is a guard
        return mask
    if mask.dtype == torch.bool:
        return mask.contiguous()
    once = tuple([slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride()])
    return mask[once].contiguous().expand(mask.shape)
