"""Sizes and layouts with which PyTorch's matrix products and its fused attention are fast.

`fuse_model` and the compile backend both change a model's own products and masks by these rules.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ALIGNED", "HALF", "LEAST_OUTPUTS", "LEAST_ROWS", "MULTIPLE", "made_contiguous"]

# In half precision, a matrix product loads 16 bytes at once: rows of a multiple of eight elements.
HALF = (torch.float16, torch.bfloat16)
ALIGNED = 8
# Products with other numbers of columns are padded to the next multiple of this one.
MULTIPLE = 64
# With fewer outputs, or fewer rows of input, padding gains nothing.
LEAST_OUTPUTS = 4096
LEAST_ROWS = 1024


def made_contiguous(mask: Tensor) -> Tensor:
    """The mask with the layout that PyTorch's fused attention takes: contiguous along the keys.

    On GPUs PyTorch's fused attention takes no mask whose last dimension has another stride than
    one. Its fallback multiplies in fp32. Two kinds of masks have such a stride:

        boolean, stride 0     nothing is masked: one value per query, expanded over the keys.
                              Compiled models have it with PyTorch 2.11 or Transformers before 5.23
        numbers, stride > 1   T5's table of biases, transposed

    A mask is not changed if its number of keys is 64 more than a multiple of 128 (64, 192, 320,
    ...): with a mask of this length, cuDNN's backward may give NaN (PyTorch's issue 196678).
    """
    if mask.layout != torch.strided or mask.is_nested or not mask.dim():
        return mask
    if not _is_strided_along_keys(mask):
        return mask
    # The last condition: for a length that may change, Dynamo makes it a guard.
    if mask.shape[-1] % 128 == 64:
        return mask
    if mask.dtype == torch.bool:
        return mask.contiguous()
    # Copy each number once, and expand again.
    unexpanded = tuple([slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride()])
    return mask[unexpanded].contiguous().expand(mask.shape)


def _is_strided_along_keys(mask: Tensor) -> bool:
    """Whether a boolean mask is expanded over the keys, or numbers have gaps between them."""
    stride = mask.stride(-1)
    if mask.dtype == torch.bool:
        return stride == 0
    return mask.is_floating_point() and stride > 1
