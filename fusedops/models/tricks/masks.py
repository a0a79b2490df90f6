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
    if not is_plain(mask) or not compiling.makes_kernels(mask):
        return mask
    return made_contiguous(mask)


def made_contiguous(mask: Tensor) -> Tensor:
    """The mask with the layout that PyTorch's fused attention takes: contiguous along the keys.

    On GPUs PyTorch's fused attention takes no mask whose last dimension has another stride than
    one, and its fallback multiplies in fp32. Compiled with PyTorch 2.11, or Transformers before
    5.23, models make boolean masks that are expanded where nothing is masked, and T5 passes on the
    transposed table of its biases.

    Lengths of 64 more than a multiple of 128 are left: with a mask, cuDNN's backward may give NaN
    there (PyTorch's issue 196678).
    """
    if not _has_strides(mask) or not _is_strided_along_keys(mask):
        return mask
    # The last condition: for a length that may change, Dynamo makes it a guard.
    if mask.shape[-1] % 128 == 64:
        return mask
    if mask.dtype == torch.bool:
        return mask.contiguous()
    # Copy each number once, and expand again.
    unexpanded = tuple([slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride()])
    return mask[unexpanded].contiguous().expand(mask.shape)


def _has_strides(mask: Tensor) -> bool:
    """Whether this is a dense tensor of at least one dimension."""
    if mask.layout != torch.strided or mask.is_nested:
        return False
    return mask.dim() > 0


def _is_strided_along_keys(mask: Tensor) -> bool:
    """Whether a boolean mask is expanded over the keys, or numbers have gaps between them."""
    stride = mask.stride(-1)
    if mask.dtype == torch.bool:
        return stride == 0
    return mask.is_floating_point() and stride > 1
