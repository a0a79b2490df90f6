"""Tensors as kernels read them: their memory, their row strides, and the alignment of both.

Every tensor that reaches a kernel passes through this module: rows, parameters, statistics, saved
tensors and cotangents. Each function returns the tensor's ``bits``: its address, or-ed with twice
the row stride. A launch ors the bits of all its tensors, and tests the lowest four:

    address      multiple of 16 if its lowest four bits are 0
    stride << 1  multiple of 16 if the stride is a multiple of 8

So one test shows whether every address is a multiple of 16 and every row stride of 8. A kernel that
is compiled for this case relies on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Spacing",
    "dense",
    "empty",
    "empty_dense",
    "has_adjacent_columns",
    "is_dense",
    "rows",
    "spacing",
    "spacing_of",
    "spacing_written",
    "vector",
]

# How a tensor's rows are spaced, if they have no common stride. Adjacent leading dimensions form a
# group if they could be flattened to one dimension: its stride is that of the group's last
# dimension. A group is written as its first and last dimension, the outermost group first:
#
#     shape  (2, 5, 3, cols), strides (45 * cols, 9 * cols, cols, 1):  ((0, 1), (2, 2))
#
# Dimensions 0 and 1 are a group of stride 9 * cols, because 45 is 5 * 9. Dimension 2 does not
# belong to it, because 9 is not 3 * 1.
Spacing = tuple[tuple[int, int], ...]


def rows(t: Any, cols: int, dims: int = 1) -> tuple[Any, int, int]:
    """Returns a tensor of contiguous, evenly spaced rows, its row stride, and its bits.

    Args:
        t: a tensor of any strides, or None, whose bits are 0. If its rows cannot be read in place,
            a copy is returned.
        cols: the number of elements of a row.
        dims: the number of trailing dimensions that make up a row.
    """
    stride = cols
    if t is None:
        return t, stride, 0
    if not t.is_contiguous():
        t, stride = _evenly_spaced(t, cols, dims)
    address = t.data_ptr()
    # Kernels read memory. The memory of a negative view has the opposite signs, and a ZeroTensor
    # has no memory.
    if t.is_neg() or not address:
        t, stride = _materialized(t), cols
        address = t.data_ptr()
    return t, stride, address | stride << 1


def spacing(t: Tensor, leading: int) -> Spacing | None:
    """Returns how the rows of a strided tensor are spaced, for a kernel that reads them.

    Returns None if the rows have one stride, so that `rows` suffices, or if no kernel can read them
    in place: because elements of a row are not adjacent, or memory does not hold the values.

    Args:
        t: a tensor.
        leading: the number of dimensions before those that make up a row.
    """
    if t.is_contiguous() or t.is_neg() or not t.data_ptr():
        return None
    return spacing_of(t.shape, t.stride(), leading)


def spacing_written(t: Tensor, leading: int) -> Spacing | None:
    """Returns how the rows of a strided tensor are spaced, for a kernel that writes them.

    Returns None if the tensor is contiguous, or if no kernel can write to it.

    Args:
        t: a tensor.
        leading: the number of dimensions before those that make up a row.
    """
    return None if t.is_contiguous() else _groups(t.shape, t.stride(), leading)


def spacing_of(shape: Sequence[int], strides: Sequence[int], leading: int) -> Spacing | None:
    """Returns the `spacing` of a tensor with this shape and these strides."""
    groups = _groups(shape, strides, leading)
    if groups is None:
        return None
    is_even = len(groups) <= 1 and len(shape) == leading + 1
    return None if is_even else groups


def _groups(shape: Sequence[int], strides: Sequence[int], leading: int) -> Spacing | None:
    """Returns the groups of leading dimensions; None if elements of a row are not adjacent."""
    expected = 1
    for size, step in zip(reversed(shape[leading:]), reversed(strides[leading:]), strict=True):
        if size != 1 and step != expected:
            return None
        expected *= size
    groups: list[tuple[int, int]] = []
    # The stride with which the next outer dimension belongs to the current group: the size times
    # the stride of the dimension inside it.
    expected_step = 0
    for dim in range(leading - 1, -1, -1):
        size, step = shape[dim], strides[dim]
        if size == 1:  # its stride is never used
            continue
        if groups and step == expected_step:
            groups[-1] = dim, groups[-1][1]
        else:
            groups.append((dim, dim))
        expected_step = size * step
    return tuple(reversed(groups))


def vector(t: Any) -> tuple[Any, int]:
    """Returns ``t``, or a contiguous copy if it is not, and its bits; 0 for None."""
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
    """Returns ``t``, which must be dense, in its own layout, and its bits; 0 for None."""
    if t is None:
        return t, 0
    address = t.data_ptr()
    if t.is_neg() or not address:
        t = _materialized(t)
        address = t.data_ptr()
    return t, address


def _is_contiguous(t: Tensor) -> bool:
    """Whether a tensor is known to be contiguous.

    While tracing, that may be unknown: for example, if a size is the result of `Tensor.item`.
    """
    try:
        return t.is_contiguous()
    except RuntimeError:  # raised for a guard on an unknown size
        return False


def is_dense(t: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, whatever their order."""
    if _is_contiguous(t):
        return True
    strides = t.stride()
    # Comparing symbolic sizes would specialise the traced graph for their values.
    if any(type(number) is not int for number in (*t.shape, *strides)):
        return False
    expected = 1
    for stride, size in sorted(zip(strides, t.shape, strict=True)):
        if size == 1:  # its stride is never used
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def has_adjacent_columns(t: Tensor) -> bool:
    """Whether the elements of the last dimension are adjacent in memory.

    Kernels that process rows read no others in place. While tracing, a size or stride that is a
    symbol is not one.
    """
    numbers = (t.shape[-1], t.stride(-1)) if t.dim() else (1,)
    return any(type(number) is int and number == 1 for number in numbers)


def empty(like: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Returns a contiguous, uninitialised tensor in the shape of ``like``."""
    if like.dtype is dtype and _is_contiguous(like):
        return torch.empty_like(like)
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def empty_dense(like: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Returns an uninitialised tensor in the shape of ``like``.

    It has the layout of ``like`` if that is dense, and is contiguous otherwise.
    """
    if not (_is_contiguous(like) or is_dense(like)):
        return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    if like.dtype is dtype:
        return torch.empty_like(like)
    return torch.empty_like(like, dtype=dtype)


def _evenly_spaced(t: Tensor, cols: int, dims: int) -> tuple[Tensor, int]:
    """Returns a tensor whose rows are evenly spaced, and their stride: ``t`` itself or a copy."""
    strides = t.stride()
    has_contiguous_rows = dims == 1 and (strides[-1] == 1 or cols == 1)
    if not has_contiguous_rows:
        return t.contiguous(), cols
    # The loop visits the leading dimensions from the outermost. The rows have one stride if each
    # dimension's stride is the product of the next inner one's size and stride:
    #
    #     shape  (2, 3, cols), strides (3 * s, s, 1):  row (i, j) is at (3 * i + j) * s
    stride = None
    for size, step in zip(t.shape, strides[:-1], strict=False):
        if size == 1:
            continue
        if stride is not None and stride != size * step:
            return t.contiguous(), cols
        stride = step
    return t, cols if stride is None else stride


def _materialized(t: Tensor) -> Tensor:
    """Returns a copy without gaps, whose memory holds the values.

    The memory of a negative view (such as the imaginary part after ``conj``) holds the negatives of
    its values. A ZeroTensor has no memory.
    """
    if not t.numel():
        return t
    if is_dense(t):
        return torch.empty_like(t).copy_(t)
    return t.contiguous().clone()
