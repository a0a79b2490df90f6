"""Products that are added to logits: those of low-rank adapters (LoRA)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.calls import checks
from .operands import has_autocast

__all__ = ["Added", "Pair", "added_products", "dtypes_beside", "pairs_of"]

# Rows (*, R) and a weight (V, R).
Pair = tuple[Tensor, Tensor]


class Added(NamedTuple):
    """The products that are added to logits.

    Attributes:
        inputs: the rows of each, (*, R).
        weights: the weight of each, (V, R).
        heads: the head of each, by position.
    """

    inputs: list[Tensor]
    weights: list[Tensor]
    heads: tuple[int, ...]


def dtypes_beside(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Returns the dtypes that a pair may have beside an input of a dtype, without autocast."""
    # Adapters of a model in 16 bits are often in fp32.
    return (dtype, torch.float32) if dtype.itemsize < 4 else (dtype,)


def pairs_of(op: str, lora: Any, is_single: bool) -> list[Pair | None]:
    """Returns the pair of each head that an argument ``lora`` has; an empty list for None.

    Args:
        op: the function's name, for messages.
        lora: a pair if there is a single head, or else a pair or None for each head; None for none.
        is_single: whether there is a single head.
    Raises:
        TypeError: it has another form.
    """
    if lora is None:
        return []
    pairs = [lora] if is_single else list(lora)
    for pair in pairs:
        if pair is not None:
            _check_form(op, pair)
    return pairs


def _check_form(op: str, pair: Any) -> None:
    """Raises unless this is a tuple or list of two tensors."""
    is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
    if not is_pair or not all(isinstance(t, Tensor) for t in pair):
        raise TypeError(
            f"{op}: lora is {_described(pair)}, expected a tuple of two tensors: rows (*, R) and a "
            "weight (V, R)"
        )


def _described(value: Any) -> str:
    """Returns the type of a value, or the types of its elements."""
    if not isinstance(value, (tuple, list)):
        return f"a {type(value).__name__}"
    names = [type(element).__name__ for element in value]
    return f"({', '.join(names)})"


def added_products(
    op: str, pairs: Sequence[Pair | None], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> Added:
    """Returns the products of the pairs of heads, without those that are None.

    Args:
        op: the function's name, for messages.
        pairs: what `pairs_of` returns.
        inputs: the rows of each head, (*, D).
        weights: the weight of each head, (V, D).
    Raises:
        TypeError: a tensor is not one of floating-point numbers, or dtypes differ.
        ValueError: shapes do not go together, or there are fewer or more pairs than heads.
    """
    if pairs and len(pairs) != len(inputs):
        raise ValueError(
            f"{op}: lora has {len(pairs)} elements, expected a pair or None for each of "
            f"{len(inputs)} heads"
        )
    added = [(head, *pair) for head, pair in enumerate(pairs) if pair is not None]
    for head, rows, weight in added:
        _check(op, rows, weight, inputs[head], weights[head].shape[0])
    heads, of_rows, of_weights = zip(*added, strict=True) if added else ((), (), ())
    return Added(list(of_rows), list(of_weights), heads)


def _check(op: str, rows: Tensor, weight: Tensor, input: Tensor, classes: int) -> None:
    """Raises unless the product of these rows and this weight can be added to a head's logits."""
    checks.check_tensor(op, "the rows of lora", rows, input)
    checks.check_tensor(op, "the weight of lora", weight, input)
    if rows.dim() != input.dim() or rows.shape[:-1] != input.shape[:-1]:
        raise ValueError(
            f"{op}: the rows of lora have shape {tuple(rows.shape)}, expected (*, R) with the rows "
            f"of input, {tuple(input.shape[:-1])}"
        )
    checks.check_shape(op, "the weight of lora", weight, (classes, rows.shape[-1]))
    allowed = dtypes_beside(input.dtype)
    is_allowed = rows.dtype == weight.dtype and rows.dtype in allowed
    if not is_allowed and not has_autocast(input.device.type):
        raise TypeError(
            f"{op}: the rows of lora have dtype {rows.dtype} and its weight {weight.dtype}, "
            f"expected {' or '.join(map(str, allowed))} for both, or autocast"
        )
