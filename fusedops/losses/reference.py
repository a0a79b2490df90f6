"""The same computation in PyTorch's operators, with whole logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["reference"]


def reference(loss: Any, operands: Any) -> tuple[Tensor, ...]:
    """Returns the results of a call, differentiable any number of times.

    Args:
        loss: the function, an `operands.Loss`.
        operands: its arguments, `operands.Operands`.
    Raises:
        RuntimeError: the classes are sharded over ranks.
    """
    if loss.combines:
        raise RuntimeError(
            f"{loss.name}: with sharded classes it has neither second derivatives nor torch.func "
            "transforms, and cannot be exported"
        )
    dtype = operands.dtype
    mask = loss.mask(operands)
    # The function may raise for rows that do not count, or have no finite gradient.
    index = loss.index(mask)
    inputs, others = operands.inputs, operands.others
    if index is not None:
        inputs = tuple([t.index_select(0, index) for t in inputs])
        pairs = zip(others, operands.by_row, strict=True)
        others = tuple([t.index_select(0, index) if by_row else t for t, by_row in pairs])
    logits = [
        F.linear(t.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        for t, weight, bias in zip(inputs, operands.weights, operands.biases, strict=True)
    ]
    returned = loss.function(*logits, *others)
    results = (returned,) if isinstance(returned, Tensor) else tuple(returned)
    if loss.reduction != "none" and len(results) != 1:
        raise TypeError(
            f"{loss.name}: it returns {len(results)} results, and their sum has more than one "
            'gradient; use reduction="none"'
        )
    if index is not None:
        zeros = [result.new_zeros(operands.rows) for result in results]
        results = tuple([z.index_copy(0, index, r) for z, r in zip(zeros, results, strict=True)])
    elif mask is not None:
        results = tuple([torch.where(mask, result, 0) for result in results])
    if loss.reduction == "none":
        return results
    scale = loss.scale(operands, mask)
    return tuple([result.sum(dtype=scale.dtype) * scale for result in results])
