"""Tensors as kernels read them: where they are, how far apart their rows are, and how well both are aligned.

Every tensor that reaches a kernel passes through here: rows, parameters, statistics, saved tensors and cotangents. A
launch collects the ``bits`` of all of them; where none of the lowest four is set, every address is a multiple of 16
and every row stride of 8, which the compiled kernel then relies on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["dense", "empty", "empty_dense", "is_dense", "rows", "vector"]


def rows(t: Any, cols: int, dims: int = 1) -> tuple[Any, int, int]:
    """A tensor whose rows of ``cols`` elements are contiguous and evenly spaced, the row stride, and the bits.

    Args:
        t: any strides; it is copied where the rows cannot be read in place. None for none, which has no bits.
        cols: elements of a row.
        dims: trailing dimensions that make up a row.
    """
    stride = cols
    if t is None:
        return t, stride, 0
    if not t.is_contiguous():
        t, stride = _evenly_spaced(t, cols, dims)
    address = t.data_ptr()
    if t.is_neg() or not address:
        t, stride = _materialized(t), cols
        address = t.data_ptr()
    return t, stride, address | stride << 1


def vector(t: Any) -> tuple[Any, int]:
    """A contiguous tensor, and the bits; None for none, which has no bits."""
    if t is None:
        return t, 0
    if not t.is_contiguous():
        t = t.contiguous()
    address = t.data_ptr()
    if t.is_neg() or not address:
        t = _materialized(t)
        address = t.data_ptr()
    return t, address


def dense(t: Any) -> tuple[Any, int]:
    """A dense tensor in its layout, and the bits; None for none, which has no bits."""
    if t is None:
        return t, 0
    address = t.data_ptr()
    if t.is_neg() or not address:
        t = _materialized(t)
        address = t.data_ptr()
    return t, address


def _is_contiguous(t: Tensor) -> bool:
    """Whether a tensor is known to be contiguous: where a size depends on data, as of `Tensor.item`, it is not."""
    try:
        return t.is_contiguous()
    except RuntimeError:  # a guard on such a size
        return False


def is_dense(t: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    if _is_contiguous(t):
        return True
    if not all(type(stride) is int for stride in (*t.shape, *t.stride())):
        return False  # symbols of a traced graph, which a comparison would fix
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(t.shape, t.stride(), strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def empty(like: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A contiguous, uninitialised tensor in the shape of ``like``."""
    if like.dtype is dtype and _is_contiguous(like):
        return torch.empty_like(like)
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def empty_dense(like: Tensor, dtype: torch.dtype | None) -> Tensor:
    """An uninitialised tensor in the shape of ``like``, and in its layout if that is dense; else contiguous."""
    if _is_contiguous(like) or is_dense(like):
        return torch.empty_like(like) if like.dtype is dtype else torch.empty_like(like, dtype=dtype)
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def _evenly_spaced(t: Tensor, cols: int, dims: int) -> tuple[Tensor, int]:
    strides = t.stride()
    if dims == 1 and (strides[-1] == 1 or cols == 1):
        stride = None
        for size, step in zip(t.shape, strides[:-1], strict=False):  # but the last dimension's
            if size != 1:
                if stride is not None and stride != size * step:
                    break
                stride = step
        else:
            return t, cols if stride is None else stride
    return t.contiguous(), cols


def _materialized(t: Tensor) -> Tensor:
    """The values in memory, without gaps: of a negative view (imaginary parts after ``conj``), or of a ZeroTensor."""
    if not t.numel():
        return t
    return torch.empty_like(t).copy_(t) if is_dense(t) else t.contiguous().clone()
