"""Indices that are permutations, as in a mixture of experts: their gradients put the rows back.

An index may name a row more than once. PyTorch therefore compiles its gradient to atomic additions,
in any order. The indices from a sort name each row once. Divided by k, they name each row k times.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import Tensor, fx

from ..core.calls.registration import implement
from ..core.launches import launch
from .regions import are_numbers, changed_in, name_of, overlap, tensors_of, value_of
from .report import note_change

__all__ = ["with_rows_put_back"]


def with_rows_put_back(graph: fx.Graph, needs: set[fx.Node]) -> None:
    """Replaces the index operators whose index is a permutation and whose gradient is wanted.

    Args:
        graph: of operators.
        needs: the nodes whose values have gradients.
    """
    nodes = [node for node in graph.nodes if name_of(node) == "index" and node in needs]
    changed = changed_in(graph) if nodes else []
    for node in nodes:
        order, each = _order_of(node) or (None, 1)
        sources = _permutation(order)
        # An index that something writes into may be another by the time of the backward.
        read = [*sources, *node.all_input_nodes[1:]]
        if not sources or overlap(tensors_of(read), changed):
            continue
        node.target = torch.ops.fusedops.rows_in_order.default
        node.args = (node.args[0], order, each)
        note_change(node, "rows in the order of a sort, whose gradients are put back")


def _order_of(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The node that may be a permutation, and how often the index names each row.

    None for any other index.
    """
    rows = value_of(node.args[0])  # type: ignore[arg-type]
    if not isinstance(rows, Tensor) or rows.dim() == 0:
        return None
    if not launch.runs_kernels(rows.device.type):
        return None
    order, each = _divided(node.args[1])
    if not isinstance(order, fx.Node) or type(each) is not int or each < 1:
        return None
    sizes = (*value_of(order).shape, rows.shape[0])
    is_whole = are_numbers(sizes) and sizes[:-1] == (rows.shape[0] * each,)
    return (order, each) if is_whole else None


def _divided(indices: Any) -> tuple[Any, Any]:
    """The dividend and the divisor of the only index; the index and 1 if it is no quotient."""
    if len(indices) != 1:
        return None, 1
    order = indices[0]
    if isinstance(order, fx.Node) and name_of(order) in ("floor_divide", "div"):
        dividend, divisor = cast("Any", order.args[:2])
        return dividend, divisor
    return order, 1


def _permutation(node: Any) -> list[fx.Node]:
    """The nodes from which a permutation of 0, 1, 2, … is computed.

    Empty if the node may be something else.
    """
    size = _vector_size(node)
    if size is None:
        return []
    name, args = name_of(node), node.args
    if name == "arange":
        return [node] if args in ((size,), (0, size), (0, size, 1)) else []
    if node.target is operator.getitem:
        is_index = name_of(args[0]) == "sort" and args[1] == 1  # sort returns values and indices
        return [node] if is_index else []
    if name == "index_put" and len(args) == 3:
        parts = (*args[1], args[2])
    elif node.target is torch.ops.aten.scatter.src:
        parts = args[2:]
    else:
        return []
    return _inverted(node, parts, size)


def _inverted(node: fx.Node, parts: Any, size: int) -> list[fx.Node]:
    """The sources of a permutation that is written to the indices of another: a permutation, too.

    Args:
        node: the operator that writes.
        parts: the indices to which it writes, and the values.
        size: of the permutations.
    """
    sources = [_permutation(part) for part in parts]
    if len(parts) != 2 or not all(sources):
        return []
    if not all(value_of(part).shape == (size,) for part in parts):
        return []
    return [node, *sources[0], *sources[1]]


def _vector_size(node: Any) -> int | None:
    """The size of a vector of int64; None for any other value, and where the size is a symbol."""
    value = value_of(node) if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.dim() != 1 or value.dtype != torch.int64:
        return None
    size = value.shape[0]
    return size if type(size) is int else None


# --- the operator ---------------------------------------------------------------------------------


def _rows_in_order(rows: Tensor, order: Tensor, each: int) -> Tensor:
    return rows[order if each == 1 else order // each]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, order, ctx.each = inputs
    ctx.save_for_backward(order)


def _derivative(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (order,) = ctx.saved_tensors
    # The inverse permutation: the row order[i] of the input is the row i of the result.
    inverse = torch.zeros_like(order)
    inverse = inverse.scatter(0, order, torch.arange(order.shape[0], device=order.device))
    rows = grad[inverse]
    if ctx.each != 1:
        # The results of one row are now adjacent.
        rows = rows.unflatten(0, (-1, ctx.each)).sum(1)
    return rows, None, None


_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")
_LIBRARY.define("rows_in_order(Tensor rows, Tensor order, int each) -> Tensor")
implement(_LIBRARY, "rows_in_order", _rows_in_order, _rows_in_order, decomposed=True)
torch.library.register_autograd(
    "fusedops::rows_in_order", _derivative, setup_context=_setup, lib=_LIBRARY
)
