"""Gradients of rows that are indexed by a permutation, as in a mixture of experts.

An index may name a row more than once. PyTorch therefore compiles its gradient to atomic additions,
in any order. The indices from a sort are a permutation ``order``, and name each row once. So the
gradient is ``grad`` indexed by the inverse permutation.

If each token goes to k experts, a model sorts k entries per token, and the entries i * k to
i * k + k - 1 belong to token i. The rows of tokens are then indexed by ``order // k``, which names
each row k times.

    forward     rows[order]                     rows[order // k]
    backward    grad[inverse of order]          the same, and a sum over each k adjacent rows

The backward reads each row of the gradient once.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import Tensor, fx

from ...core.calls.registration import implement
from ...core.launches import launch
from ..graphs import (
    are_numbers,
    changed_in,
    dtype_of,
    is_tensor,
    name_of,
    overlap,
    tensors_of,
    value_of,
)
from ..report import note_change
from ..rewrite import Rewrite

__all__ = ["put_rows_back"]


def put_rows_back(rewrite: Rewrite) -> None:
    """Replaces the index operators whose index is a permutation and whose gradient is wanted."""
    nodes = list(filter(rewrite.needs.__contains__, filter(_is_index, rewrite.graph.nodes)))
    changed = changed_in(rewrite.graph) if nodes else []
    for node in nodes:
        order, repeats = _order_of(node)
        sources = _permutation_sources(order)
        # The backward reads the index again. If an operator writes into it, its values may have
        # changed by then.
        read = tensors_of([*sources, *node.all_input_nodes[1:]])
        if not sources or overlap(read, changed):
            continue
        node.target = torch.ops.fusedops.rows_in_order.default
        node.args = (node.args[0], order, repeats)
        note_change(node, "rows in the order of a sort, with gradients in the former order")


def _is_index(node: fx.Node) -> bool:
    # Not `index_select`: its result is always contiguous, that of an index need not be.
    return name_of(node) == "index"


def _order_of(node: fx.Node) -> tuple[fx.Node | None, int]:
    """The node that may be a permutation, and ``repeats``: how often the index names every row.

    The index is ``order``, or ``order // repeats``. None and 1 for any other index.
    """
    order, repeats = _divided(node.args[1])
    if _runs_kernels(node.args[0]) and _names_rows(order, repeats, node.args[0]):
        return order, repeats
    return None, 1


def _runs_kernels(node: Any) -> bool:
    """Whether a node is a tensor of rows, on a device with kernels."""
    rows = value_of(node)
    if not is_tensor(node) or rows.dim() == 0:
        return False
    return launch.runs_kernels(rows.device.type)


def _names_rows(order: Any, repeats: Any, rows: Any) -> bool:
    """Whether ``order`` has ``repeats`` elements for every row, so that it may be a permutation."""
    if not isinstance(order, fx.Node) or type(repeats) is not int:
        return False
    count = value_of(rows).shape[0]
    lengths = value_of(order).shape
    # To compare a symbolic length would add a guard, and make the dimension constant.
    if repeats < 1 or not are_numbers((*lengths, count)):
        return False
    return tuple(lengths) == (count * repeats,)


def _divided(indices: Any) -> tuple[Any, Any]:
    """The dividend and the divisor of the only index; the index and 1 if it is no quotient."""
    if len(indices) != 1:
        return None, 1
    order = indices[0]
    # The quotient is an index, hence of integers. A `div` returns integers only with a rounding
    # mode. Both modes, "trunc" and "floor", are `//` for numbers >= 0.
    if not isinstance(order, fx.Node) or name_of(order) not in ("floor_divide", "div"):
        return order, 1
    dividend, divisor = cast("Any", order.args[:2])
    return dividend, divisor


def _permutation_sources(node: Any) -> list[fx.Node]:
    """The nodes from which ``node`` is computed, if it is a permutation of an arange.

    Empty if it may be something else.
    """
    size = _vector_size(node)
    if size is None:
        return []
    if _is_permutation(node, size):
        return [node]
    return _written_permutation_sources(node, size)


def _is_permutation(node: fx.Node, size: int) -> bool:
    """Whether a node is itself 0, 1, 2, …, or the indices of a sort."""
    args: Any = node.args
    if name_of(node) == "arange":
        return args in ((size,), (0, size), (0, size, 1))
    if node.target is operator.getitem:
        return name_of(args[0]) == "sort" and args[1] == 1  # sort returns values and indices
    return False


def _written_permutation_sources(node: fx.Node, size: int) -> list[fx.Node]:
    """The nodes from which ``node`` is computed, if it is ``out`` in ``out[positions] = values``.

    If positions and values are permutations, so is ``out``. If the values are 0, 1, 2, …, it is the
    inverse of the positions. Empty if the node is something else.

    Args:
        node: a vector of int64.
        size: its number of elements.
    """
    parts = _written_parts(node)
    sources = list(map(_permutation_sources, parts))
    if len(parts) != 2 or not all(sources):
        return []
    # With fewer positions than elements, some would keep their values from before.
    if not all(value_of(part).shape == (size,) for part in parts):
        return []
    return [node, *sources[0], *sources[1]]


def _written_parts(node: fx.Node) -> tuple[Any, ...]:
    """The positions to which an operator writes, and the values; empty for other operators."""
    args: Any = node.args
    if node.target is torch.ops.aten.scatter.src:
        return tuple(args[2:])
    # With a fourth argument it adds.
    if name_of(node) == "index_put" and len(args) == 3:
        return (*args[1], args[2])
    return ()


def _vector_size(node: Any) -> int | None:
    """The size of a vector of int64; None for any other value, and where the size is a symbol."""
    if not isinstance(node, fx.Node) or not is_tensor(node):
        return None
    shape = value_of(node).shape
    if dtype_of(node) != torch.int64 or len(shape) != 1:
        return None
    return shape[0] if are_numbers(shape) else None


# --- the operator ---------------------------------------------------------------------------------


def _rows_in_order(rows: Tensor, order: Tensor, repeats: int) -> Tensor:
    return rows[order if repeats == 1 else order // repeats]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, order, ctx.repeats = inputs
    ctx.save_for_backward(order)


def _derivative(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (order,) = ctx.saved_tensors
    # With repeats = 1, the row order[i] of the input is the row i of the result. So the gradient of
    # the row r is the row inverse[r] of `grad`, where inverse[order[i]] = i.
    #
    # Zeros, not uninitialised memory: if `order` were no permutation, elements that are not written
    # would be indices out of bounds.
    inverse = torch.zeros_like(order)
    inverse = inverse.scatter(0, order, torch.arange(order.shape[0], device=order.device))
    rows = grad[inverse]
    if ctx.repeats != 1:
        # The gradients of all copies of one input row are now adjacent.
        rows = rows.unflatten(0, (-1, ctx.repeats)).sum(1)
    return rows, None, None


_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")
_LIBRARY.define("rows_in_order(Tensor rows, Tensor order, int repeats) -> Tensor")
implement(_LIBRARY, "rows_in_order", _rows_in_order, _rows_in_order, decomposed=True)
torch.library.register_autograd(
    "fusedops::rows_in_order", _derivative, setup_context=_setup, lib=_LIBRARY
)
