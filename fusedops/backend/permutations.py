"""Indices that are permutations, as in a mixture of experts. Their gradients put the rows back.

An index may name a row more than once. PyTorch therefore compiles its gradient to atomic additions, in any order. The indices
from a sort name each row once. Divided by k, they name each row k times.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import Tensor, fx

from ..core import launch
from ..core.registration import implement
from .regions import changed_in, name_of, overlap, tensors_of, value_of
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
        made_of = _permutation(order)
        read = [*made_of, *node.all_input_nodes[1:]]
        if made_of and not overlap(tensors_of(read), changed):
            node.target, node.args = torch.ops.fusedops.rows_in_order.default, (node.args[0], order, each)
            note_change(node, "rows in the order of a sort, whose gradients are put back")


def _order_of(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The node that may be a permutation, and how often the index names each row. None for any other index."""
    rows, places = value_of(node.args[0]), cast("Any", node.args[1])  # type: ignore[arg-type]
    is_run = isinstance(rows, Tensor) and rows.dim() > 0 and launch.runs_kernels(rows.device.type)
    if len(places) != 1 or not is_run:
        return None
    order, each = places[0], 1
    if isinstance(order, fx.Node) and name_of(order) in ("floor_divide", "div"):
        order, each = cast("Any", order.args[:2])
    if not isinstance(order, fx.Node) or type(each) is not int or each < 1:
        return None
    sizes = (*value_of(order).shape, rows.shape[0])
    is_whole = all(type(size) is int for size in sizes) and sizes[:-1] == (rows.shape[0] * each,)
    return (order, each) if is_whole else None


def _permutation(node: Any) -> list[fx.Node]:
    """The nodes from which a permutation of 0, 1, 2, … is made. Empty if the node may be something else."""
    value = value_of(node) if isinstance(node, fx.Node) else None
    if (
        not isinstance(value, Tensor)
        or value.dim() != 1
        or value.dtype != torch.int64
        or type(value.shape[0]) is not int
    ):
        return []
    (size,), name, args = value.shape, name_of(node), node.args
    if name == "arange":
        return [node] if args in ((size,), (0, size), (0, size, 1)) else []
    if node.target is operator.getitem:
        return [node] if name_of(args[0]) == "sort" and args[1] == 1 else []
    if name == "index_put" and len(args) == 3:
        parts = (*args[1], args[2])
    elif node.target is torch.ops.aten.scatter.src:
        parts = args[2:]
    else:
        return []
    # A permutation that is written to the places of another one is a permutation.
    found = [_permutation(part) for part in parts]
    is_whole = len(parts) == 2 and all(found) and all(value_of(part).shape == (size,) for part in parts)
    return [node, *found[0], *found[1]] if is_whole else []


# --- the operator -------------------------------------------------------------------------------------------------------


def _rows_in_order(rows: Tensor, order: Tensor, each: int) -> Tensor:
    return rows[order if each == 1 else order // each]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, order, ctx.each = inputs
    ctx.save_for_backward(order)


def _derivative(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (order,) = ctx.saved_tensors
    back = torch.zeros_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
    rows = grad[back]
    return rows if ctx.each == 1 else rows.unflatten(0, (-1, ctx.each)).sum(1), None, None


_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")
_LIBRARY.define("rows_in_order(Tensor rows, Tensor order, int each) -> Tensor")
implement(_LIBRARY, "rows_in_order", _rows_in_order, _rows_in_order, decomposed=True)
torch.library.register_autograd("fusedops::rows_in_order", _derivative, setup_context=_setup, lib=_LIBRARY)
