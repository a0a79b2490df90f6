"""Strides of results: as the model has them, wherever something can see them.

A region's operator returns contiguous tensors. PyTorch's operators give results strides in the order of their arguments', so the
strides of a tensor that the graph returns may depend on a region many operators before.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ..core import compat
from .regions import VIEWS, escapes, is_laid_out, name_of, named_again, reshapes, value_of

__all__ = ["laid_out"]

# The namespaces whose operators compute the same of any strides.
_OF_ANY_STRIDES = frozenset({"aten", "prims", "fusedops"})


def laid_out(graph: fx.Graph, results: Iterable[fx.Node]) -> None:
    """Copies tensors that would have other strides than in the model, where something sees them.

    The graph's caller sees what it returns. A change in place, `as_strided` and an operator of another library see what they
    are given, and so does an operator that takes some strides only.

    Args:
        graph: with operators in the place of regions.
        results: of these operators. Their values have the strides of the model.
    """
    first, now = set(results), dict[fx.Node, Any]()
    with compat.recording_nothing(), compat.casts_recorded(), torch.no_grad():
        for node in list(graph.nodes):
            if node in first:
                found: Any = torch.empty_like(value_of(node), memory_format=torch.contiguous_format)
            elif now.keys().isdisjoint(node.all_input_nodes) or (found := _value_now(graph, node, now)) is None:
                continue
            if _have_equal_strides(found, value_of(node)):
                continue
            has_memory = node in first or not _is_view(node)
            if isinstance(found, Tensor) and has_memory and (escapes(node) or is_laid_out(node)):
                _copied(graph, node)
            else:
                now[node] = found


def _value_now(graph: fx.Graph, node: fx.Node, now: dict[fx.Node, Any]) -> Any:
    """The value of a node whose inputs have other strides than in the model; None if it has the model's.

    Inputs are copied for an operator that takes no other strides.
    """
    tensors = [value for value in compat.leaves(value_of(node)) if isinstance(value, Tensor)]
    if not tensors or not all(compat.have_hints(tensor.shape) for tensor in tensors):
        return None
    found = None
    if not isinstance(node.target, compat.OVERLOAD) or compat.namespace(node.target) in _OF_ANY_STRIDES:
        called: Any = torch.ops.aten.reshape.default if reshapes(node) else node.target
        args, kwargs = map_arg((node.args, node.kwargs), lambda one: now.get(one, value_of(one)))
        with contextlib.suppress(Exception):
            found = called(*args, **kwargs)
    if found is None:
        for one in now.keys() & node.all_input_nodes:
            _copied(graph, one, node)
    return found


def _is_view(node: fx.Node) -> bool:
    """Whether a node has no memory of its own."""
    made = node.all_input_nodes[0] if node.target is operator.getitem else node
    return name_of(made) in VIEWS or bool(named_again(made))


def _have_equal_strides(found: Any, wanted: Any) -> bool:
    """Whether the dimensions of tensors have the same strides, except those of one element."""
    pairs = zip(compat.leaves(found), compat.leaves(wanted), strict=True)
    return all(_strides(one) == _strides(other) for one, other in pairs if isinstance(one, Tensor))


def _strides(tensor: Tensor) -> list[int]:
    sizes, strides = compat.hints(tensor.shape), compat.hints(tensor.stride())
    return [stride for size, stride in zip(sizes, strides, strict=True) if size != 1]


def _copied(graph: fx.Graph, node: fx.Node, user: fx.Node | None = None) -> None:
    """Gives those who read a tensor, or one of them, a copy whose dimensions are in memory in the order of the model's."""
    value = value_of(node)
    strides, sizes = compat.hints(value.stride()), compat.hints(value.shape)
    long = [dim for dim, size in enumerate(sizes) if size != 1]
    order = list(range(value.dim()))
    for dim, other in zip(long, sorted(long, key=strides.__getitem__, reverse=True), strict=True):
        order[dim] = other
    back = [order.index(dim) for dim in range(value.dim())]
    with graph.inserting_after(node):
        turned = graph.call_function(torch.ops.aten.permute.default, (node, order))
    with graph.inserting_after(turned):
        dense: dict[str, Any] = {"memory_format": torch.contiguous_format}
        copy = graph.call_function(torch.ops.aten.clone.default, (turned,), dense)
    with graph.inserting_after(copy):
        made = graph.call_function(torch.ops.aten.permute.default, (copy, back))
    made.meta["val"] = value
    node.replace_all_uses_with(made, lambda other: other is not turned and user in (None, other))
