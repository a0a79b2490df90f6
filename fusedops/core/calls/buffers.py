"""Tensors that are the parts of one buffer, one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat.autograd import below_autograd, reshaped_without_view, unflatten

__all__ = ["separated"]


def separated(
    buffer: Tensor, shapes: Sequence[Sequence[Any]], like: Sequence[Tensor] = ()
) -> Sequence[Tensor]:
    """Returns the contiguous tensors of these shapes that a buffer holds, one after the other.

    They share the buffer's memory and do not overlap. For autograd they must not be views: it would
    refuse a change of one in place, or treat it as a change of all.

    Args:
        buffer: contiguous, of any shape.
        shapes: the shapes.
        like: tensors of these shapes, if there are any: with them the call takes less host time.
    """
    if torch.compiler.is_dynamo_compiling():
        return _views(buffer, shapes)
    with below_autograd():
        if type(buffer) is not Tensor:
            return _views(buffer, shapes)
        if len(set(shapes)) == 1:
            return buffer.view(len(shapes), *shapes[0]).unbind(0)
        if like:
            return unflatten(buffer.view(-1), list(like))
        parts = buffer.view(-1).split(list(map(math.prod, shapes)))
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _views(buffer: Tensor, shapes: Sequence[Sequence[Any]]) -> list[Tensor]:
    # A tracer gets tensors that are no views, to autograd and to AOTAutograd's functionalisation:
    # that would replay the views of an output on the part instead of the buffer. Inductor copies
    # nothing.
    views, start = [], 0
    buffer = buffer.view(-1)
    for shape in shapes:
        size = math.prod(shape)
        part = buffer.narrow(0, start, size)
        views.append(reshaped_without_view(part, list(shape)))
        start += size
    return views
