"""Gives results the strides that the model gives them, wherever something can see them.

A region's operator returns contiguous tensors. PyTorch's operators give results strides in the
order of their arguments', so the strides of a tensor that the graph returns may depend on a region
many operators before.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ..core.compat.fake import hints
from .fx import OVERLOAD, casts_recorded, leaves, namespace, recording_nothing
from .regions import (
    VIEWS,
    aliased_inputs,
    escapes,
    is_laid_out,
    name_of,
    reshapes,
    tensors_in,
    value_of,
)
from .symbols import have_hints

__all__ = ["restore_strides"]

# The namespaces whose operators compute the same of any strides.
_OF_ANY_STRIDES = frozenset({"aten", "prims", "fusedops"})


def restore_strides(graph: fx.Graph, results: Iterable[fx.Node]) -> None:
    """Copies tensors that would have other strides than in the model, where something sees them.

    The graph's caller sees the strides of what it returns. So do a change in place, `as_strided`,
    an operator of another library, and an operator that accepts some strides only.

    Args:
        graph: with operators in the place of regions.
        results: of these operators. Their values have the strides of the model.
    """
    contiguous = set(results)
    # The values of nodes whose strides are no longer the model's.
    now = dict[fx.Node, Any]()
    with recording_nothing(), casts_recorded(), torch.no_grad():
        for node in list(graph.nodes):
            wanted = value_of(node)
            if node in contiguous:
                value: Any = torch.empty_like(wanted, memory_format=torch.contiguous_format)
            elif now.keys().isdisjoint(node.all_input_nodes):
                continue
            else:
                value = _value_now(graph, node, now)
            if value is None or _have_equal_strides(value, wanted):
                continue
            has_memory = node in contiguous or not _shares_memory(node)
            if isinstance(value, Tensor) and has_memory and _are_strides_visible(node):
                _copy(graph, node)
            else:
                now[node] = value


def _are_strides_visible(node: fx.Node) -> bool:
    return escapes(node) or is_laid_out(node)


def _value_now(graph: fx.Graph, node: fx.Node, now: dict[fx.Node, Any]) -> Any:
    """The value of a node whose inputs have other strides than in the model.

    Inputs are copied for an operator that accepts no other strides; then its value is the model's,
    and the result is None.
    """
    tensors = tensors_in(value_of(node))
    if not tensors or not all(have_hints(tensor.shape) for tensor in tensors):
        return None
    value = None
    if _accepts_any_strides(node):
        # A view in another shape may be impossible with the strides that the input has now.
        called: Any = torch.ops.aten.reshape.default if reshapes(node) else node.target
        args, kwargs = map_arg((node.args, node.kwargs), lambda arg: now.get(arg, value_of(arg)))
        with contextlib.suppress(Exception):
            value = called(*args, **kwargs)
    if value is None:
        for arg in now.keys() & node.all_input_nodes:
            _copy(graph, arg, node)
    return value


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
    return all(_strides(own) == _strides(other) for own, other in pairs if isinstance(own, Tensor))


def _strides(tensor: Tensor) -> list[int]:
    sizes, strides = hints(tensor.shape), hints(tensor.stride())
    return [stride for size, stride in zip(sizes, strides, strict=True) if size != 1]


def _copy(graph: fx.Graph, node: fx.Node, user: fx.Node | None = None) -> None:
    """Gives the users of a tensor, or one of them, a copy with the model's order of dimensions.

    node ──▶ permute to the model's order ──▶ contiguous clone ──▶ permute back ──▶ users
    """
    aten = torch.ops.aten
    order = _memory_order(value_of(node))
    back = [order.index(dim) for dim in range(len(order))]
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
    long = [dim for dim, size in enumerate(sizes) if size != 1]
    order = list(range(value.dim()))
    by_stride = sorted(long, key=strides.__getitem__, reverse=True)
    for dim, other in zip(long, by_stride, strict=True):
        order[dim] = other
    return order
