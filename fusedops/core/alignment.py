"""Sizes and layouts with which PyTorch's matrix products and its fused attention are fast.

`fuse_model` and the compile backend change a model's matrix products and masks by these rules.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ALIGNED", "HALF", "LEAST_OUTPUTS", "LEAST_ROWS", "MULTIPLE", "contiguous_along_keys"]

# In half precision a matrix product loads 16 bytes at once, if rows have a multiple of eight
# elements.
HALF = (torch.float16, torch.bfloat16)
ALIGNED = 8
# Products whose number of columns is not such a multiple are padded to a multiple of this number.
MULTIPLE = 64
# Padding is no faster with fewer output columns, or with fewer rows of input.
LEAST_OUTPUTS = 4096
LEAST_ROWS = 1024


def contiguous_along_keys(mask: Tensor) -> Tensor:
    """Returns the mask in the layout that PyTorch's fused attention accepts.

    On GPUs it accepts only masks whose last dimension, the keys, has stride 1. For others PyTorch
    falls back to products in fp32. Two kinds of masks have another stride:

        boolean, stride 0     nothing is masked: one value per query, expanded over the keys.
                              Compiled models have it with PyTorch 2.11 or Transformers before 5.23
        floats, stride > 1    T5's table of biases, transposed

    A mask is returned as it is if its number of keys is 64 more than a multiple of 128 (64, 192,
    320, ...): with such a mask, cuDNN's backward may return NaN (PyTorch's issue 196678).
    """
    if mask.layout != torch.strided or mask.is_nested or not mask.dim():
        return mask
    if not _is_strided_along_keys(mask):
        return mask
    # This condition comes last: if the number of keys is dynamic, Dynamo adds a guard for it.
    if mask.shape[-1] % 128 == 64:
        return mask
    if mask.dtype == torch.bool:
        return mask.contiguous()
    # Copy each number once, and expand again.
    unexpanded = tuple([slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride()])
    return mask[unexpanded].contiguous().expand(mask.shape)


def _is_strided_along_keys(mask: Tensor) -> bool:
    """Whether a boolean mask is expanded over the keys, or a float mask has a stride above 1."""
    stride = mask.stride(-1)
    if mask.dtype == torch.bool:
        return stride == 0
    return mask.is_floating_point() and stride > 1
