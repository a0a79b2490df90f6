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
    mask = loss.mask(operands)
    # The function may raise for rows that do not count, or have no finite gradient.
    index = loss.index(mask)
    inputs, others = _with_rows(operands, index)
    triples = zip(inputs, *operands.parameters(), strict=True)
    products = [F.linear(t.to(operands.dtype), weight, bias) for t, weight, bias in triples]
    logits = products[: operands.heads]
    for of_head, added in zip(operands.added, products[operands.heads :], strict=True):
        logits[of_head] = logits[of_head] + added
    returned = loss.function(*logits, *others)
    results = (returned,) if isinstance(returned, Tensor) else tuple(returned)
    if loss.reduction != "none" and len(results) != 1:
        raise TypeError(
            f"{loss.name}: it returns {len(results)} results, and their sum has more than one "
            'gradient; use reduction="none"'
        )
    results = tuple([_of_all_rows(result, operands.rows, index, mask) for result in results])
    if loss.reduction == "none":
        return results
    scale = loss.scale(operands, mask)
    return tuple([result.sum(dtype=scale.dtype) * scale for result in results])


def _with_rows(operands: Any, index: Tensor | None) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """Returns the inputs and the other arguments with the rows at ``index``; None for all rows."""
    inputs, others = operands.inputs, operands.others
    if index is None:
        return inputs, others
    pairs = zip(others, operands.by_row, strict=True)
    others = tuple([t.index_select(0, index) if by_row else t for t, by_row in pairs])
    return tuple([t.index_select(0, index) for t in inputs]), others


def _of_all_rows(result: Tensor, rows: int, index: Tensor | None, mask: Tensor | None) -> Tensor:
    """Returns a result with zeros for the rows that do not count.

    Args:
        result: the result of the rows at ``index``, or of all.
        rows: the number of all rows.
        index: the rows that count; None if the result has all rows.
        mask: which rows count, (rows,); None if all do.
    """
    if index is not None:
        return result.new_zeros(rows).index_copy(0, index, result)
    return result if mask is None else torch.where(mask, result, 0)
