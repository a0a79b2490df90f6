"""Tensors as rows: what a kernel can read in place, and outputs in the shape of an input."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

__all__ = ["allocate", "as_rows", "empty"]

# What the code that torch.compile generates allocates with: it takes the host less time than `torch.empty_like`.
_strided_on_gpu = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


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
    """A contiguous tensor in the shape of ``like``, which is on the current device; None for its dtype too."""
    dtype = dtype or like.dtype
    if not like.is_contiguous():
        return allocate(like, tuple(like.shape), dtype)
    if _strided_on_gpu is not None and like.is_cuda:
        return _strided_on_gpu(tuple(like.shape), like.stride(), dtype)  # type: ignore[no-any-return]
    return torch.empty_like(like, dtype=dtype)


def allocate(like: Tensor, sizes: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
    """A contiguous tensor of these sizes where ``like`` is, which is the current device; None for its dtype too."""
    if _strided_on_gpu is None or not like.is_cuda:
        return like.new_empty(sizes, dtype=dtype)
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size or 1
    return _strided_on_gpu(sizes, tuple(reversed(strides)), dtype or like.dtype)  # type: ignore[no-any-return]
