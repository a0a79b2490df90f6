"""Tensors that hold all slices, one after the other or side by side."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import Any

import torch
from torch import Tensor

from ...core.optional import without_none
from .forms import JOINT
from .rows import Rows

__all__ = ["empty", "with_zeros"]


def empty(
    like: Tensor, form: str, rows: Rows | None, sizes: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return an uninitialised tensor of all slices; ``rows`` is None for vectors.

    It is the joint tensor, or a buffer of one dimension.
    """
    if isinstance(rows, tuple):
        return like.new_empty(sum(map(mul, rows, sizes)), dtype=dtype)
    total = sum(sizes)
    if form == JOINT and rows is not None:
        return like.new_empty((rows, total), dtype=dtype)
    return like.new_empty(total if rows is None else rows * total, dtype=dtype)


def with_zeros(tensors: Sequence[Any], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the tensors, and zeros of these shapes in place of None; one is no None."""
    like: Tensor = without_none(tensors)[0]
    return [
        like.new_zeros(shape) if tensor is None else tensor
        for tensor, shape in zip(tensors, shapes, strict=True)
    ]
