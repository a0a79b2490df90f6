"""Tensors that hold all slices, one after the other or side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.compat.autograd import below_autograd
from .forms import JOINT

__all__ = ["empty", "separated", "with_zeros"]


def empty(
    like: Tensor, form: str, rows: int | None, sizes: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return an uninitialised tensor of all slices; ``rows`` is None for vectors.

    It is the joint tensor, or a buffer of one dimension.
    """
    total = sum(sizes)
    if form == JOINT and rows is not None:
        return like.new_empty((rows, total), dtype=dtype)
    return like.new_empty(total if rows is None else rows * total, dtype=dtype)


def separated(buffer: Tensor, rows: int | None, sizes: Sequence[int]) -> list[Tensor]:
    """Return the tensors of all slices that a buffer holds; ``rows`` is None for vectors.

    They share the buffer's memory and do not overlap. For autograd they must not be views: it would
    refuse a change of one in place, or treat it as a change of all.
    """
    if torch.compiler.is_dynamo_compiling():
        return _views(buffer, rows, sizes)
    with below_autograd():
        return _views(buffer, rows, sizes)


def _views(buffer: Tensor, rows: int | None, sizes: Sequence[int]) -> list[Tensor]:
    buffer = buffer.view(-1)
    if len(set(sizes)) == 1:
        shape = (sizes[0],) if rows is None else (rows, sizes[0])
        return list(buffer.view(len(sizes), *shape).unbind(0))
    if rows is None:
        return list(buffer.split(list(sizes)))
    parts = buffer.split([rows * size for size in sizes])
    return [part.view(rows, size) for part, size in zip(parts, sizes, strict=True)]


def with_zeros(tensors: Sequence[Any], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the tensors, and zeros of these shapes in place of None; one is no None."""
    like: Tensor = next(tensor for tensor in tensors if tensor is not None)
    return [
        like.new_zeros(shape) if tensor is None else tensor
        for tensor, shape in zip(tensors, shapes, strict=True)
    ]
