"""Tensors as rows: what a kernel can read in place, and outputs in the shape of an input."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

__all__ = ["as_rows", "empty"]


def as_rows(t: Tensor, dims: int, cols: int) -> tuple[Tensor, int]:
    """The tensor with its trailing ``dims`` dimensions contiguous and its rows one stride apart, and that stride."""
    sizes, strides = t.shape, t.stride()
    if dims == 1 and (strides[-1] == 1 or cols == 1):
        lead = [(size, stride) for size, stride in zip(sizes[:-1], strides[:-1], strict=True) if size != 1]
        if not lead:
            return t, cols
        if all(a[1] == b[0] * b[1] for a, b in itertools.pairwise(lead)):
            return t, lead[-1][1]
    return t.contiguous(), cols


def empty(like: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A contiguous tensor in the shape of ``like``."""
    if like.dtype is dtype and like.is_contiguous():
        return torch.empty_like(like)
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
