"""Gives results the strides that the model gives them, wherever something can see them.

A region's operator returns contiguous tensors. PyTorch's operators give results strides in the
order of their arguments', so the strides of a tensor that the graph returns may depend on a region
many operators before. Where nothing sees strides, nothing is copied.

    model    mul (channels last) ──▶ norm ──▶ gelu ──▶ output, channels last
    graph    operator, contiguous ──────────▶ gelu ──▶ copy ──▶ output, channels last
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ...core.compat.fake import hints
from ..fx import OVERLOAD, leaves, namespace, recording_nothing
from ..graphs import (
    VIEWS,
    aliased_inputs,
    escapes,
    must_keep_strides,
    name_of,
    reshapes,
    strides_of,
    tensors_in,
    value_of,
)
from ..rewrite import Rewrite
from ..symbols import have_hints

__all__ = ["restore_strides"]

# The namespaces whose operators compute the same for any strides of their arguments.
_OF_ANY_STRIDES = frozenset({"aten", "prims", "fusedops"})


def restore_strides(rewrite: Rewrite) -> None:
    """Copies tensors that would have other strides than in the model, where something sees them.

    The graph's caller sees the strides of what it returns. So do a change in place, `as_strided`,
    an operator of another library, and an operator that accepts some strides only.
    """
    # The graph is walked once. Other strides begin at the result of a region, or of an attention. A
    # node passes them on to its users, until a copy restores the model's strides, or an operator's
    # result has them.
    contiguous = set(rewrite.results)
    # The values of nodes whose strides are no longer the model's.
    restrided = dict[fx.Node, Any]()
    with recording_nothing(), torch.no_grad():
        for node in list(rewrite.graph.nodes):
            wanted = value_of(node)  # with the strides of the model
            if node in rewrite.restrided:
                value: Any = rewrite.restrided[node]
            elif node in contiguous:
                value = torch.empty_like(wanted, memory_format=torch.contiguous_format)
            else:
                value = _restrided_value(rewrite.graph, node, restrided)
            if value is None or _have_equal_strides(value, wanted):
                continue
            # No view is copied: its base was, as `_are_strides_visible` considers users of views.
            is_new = node in contiguous or node in rewrite.restrided
            has_memory = is_new or not _shares_memory(node)
            if has_memory and _are_strides_visible(node) and isinstance(value, Tensor):
                _copy(rewrite.graph, node)
            else:
                restrided[node] = value


def _are_strides_visible(node: fx.Node) -> bool:
    return escapes(node) or must_keep_strides(node)


def _restrided_value(graph: fx.Graph, node: fx.Node, restrided: dict[fx.Node, Any]) -> Any:
    """The value of a node, computed from inputs that have other strides than in the model.

    None if the value is the model's. Then no input has other strides, or the node's operator does
    not accept them, and the inputs were copied.
    """
    changed = restrided.keys() & node.all_input_nodes
    if not changed or not _has_known_strides(node):
        return None
    value = _computed(node, restrided) if _accepts_any_strides(node) else None
    if value is None:
        for arg in changed:
            _copy(graph, arg, node)
    return value


def _has_known_strides(node: fx.Node) -> bool:
    """Whether a node has tensors, and no size of them depends on data."""
    tensors = tensors_in(value_of(node))
    shapes = [tensor.shape for tensor in tensors]
    return bool(shapes) and all(map(have_hints, shapes))


def _computed(node: fx.Node, restrided: dict[fx.Node, Any]) -> Any:
    """The value of a node with the strides that its inputs have now; None if it has none."""
    # A view in another shape may be impossible with the strides that the input has now.
    called: Any = torch.ops.aten.reshape.default if reshapes(node) else node.target
    args, kwargs = map_arg((node.args, node.kwargs), lambda arg: restrided.get(arg, value_of(arg)))
    try:
        # On fake tensors: their strides are computed, and no elements.
        return called(*args, **kwargs)
    except Exception:  # noqa: BLE001 - the operator accepts other strides only
        return None


def _accepts_any_strides(node: fx.Node) -> bool:
    """Whether a node is no operator of another library, which may depend on strides."""
    if not isinstance(node.target, OVERLOAD):
        return True
    return namespace(node.target) in _OF_ANY_STRIDES


def _shares_memory(node: fx.Node) -> bool:
    """Whether a node has no memory of its own."""
    source = node.all_input_nodes[0] if node.target is operator.getitem else node
    return name_of(source) in VIEWS or bool(aliased_inputs(source))


def _have_equal_strides(value: Any, wanted: Any) -> bool:
    """Whether the dimensions of tensors have the same strides, except those of one element."""
    pairs = zip(leaves(value), leaves(wanted), strict=True)
    tensors = [pair for pair in pairs if isinstance(pair[0], Tensor)]
    return all(strides_of(tensor) == strides_of(other) for tensor, other in tensors)


def _is_not_one(size: int) -> bool:
    return size != 1


def _copy(graph: fx.Graph, node: fx.Node, user: fx.Node | None = None) -> None:
    """Gives the users of a tensor, or one of them, a copy with the model's order of dimensions.

    node ──▶ permute to the model's order ──▶ contiguous clone ──▶ permute back ──▶ users
    """
    aten = torch.ops.aten
    order = _memory_order(value_of(node))
    back = list(map(order.index, range(len(order))))
    with graph.inserting_after(node):
        permuted = graph.call_function(aten.permute.default, (node, order))
    with graph.inserting_after(permuted):
        dense: dict[str, Any] = {"memory_format": torch.contiguous_format}
        clone = graph.call_function(aten.clone.default, (permuted,), dense)
    with graph.inserting_after(clone):
        copy = graph.call_function(aten.permute.default, (clone, back))
    copy.meta["val"] = value_of(node)
    node.replace_all_uses_with(copy, lambda other: other is not permuted and user in (None, other))


def _memory_order(value: Tensor) -> list[int]:
    """The dimensions of a tensor by their strides, the longest first.

    Dimensions of one element keep their positions: their strides mean nothing.
    """
    strides, sizes = hints(value.stride()), hints(value.shape)
    # The dimensions that may move, in the model's order and in that of their strides.
    movable = list(itertools.compress(range(value.dim()), map(_is_not_one, sizes)))
    by_stride = sorted(movable, key=strides.__getitem__, reverse=True)
    order = list(range(value.dim()))
    for position, dim in zip(movable, by_stride, strict=True):
        order[position] = dim
    return order
