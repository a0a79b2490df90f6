"""Replaces in-place operators by out-of-place ones: then nodes can be moved and replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ..core.compat.fake import share_memory
from .fx import (
    CAST,
    GRAD_MODES,
    aten_name,
    changes_shape,
    is_view,
    mutates,
    recording_nothing,
    returning,
)
from .regions import is_input, tensors_in, users_of, value_of

__all__ = ["NotCapturedError", "without_writes"]

# In-place operators whose out-of-place variants have another derivative, or none.
_WITHOUT_DERIVATIVE = frozenset({"copy_", "logical_not_"})


class NotCapturedError(Exception):
    """A graph that cannot be captured without a loss.

    Attributes:
        reason: why; `fx.Interpreter` adds to the message.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def without_writes(graph: fx.Graph) -> None:
    """Replaces in-place operators on intermediates of the graph by out-of-place ones.

    A tensor that shares memory with an input, or with another that is used later, is left as it is.
    So is one that was computed where gradients are recorded and is changed where they are not: it
    keeps its gradient, and the result of an operator would have none. A change of an intermediate's
    shape is a view: tensors that share its memory keep theirs.

    Raises:
        NotCapturedError: a shape is changed of an input, or in a way that is no view.
    """
    enabled, recorded = torch.is_grad_enabled(), set[fx.Node]()
    for node in list(graph.nodes):
        if node.target in GRAD_MODES:
            enabled = bool(node.args[0])
        elif changes_shape(node.target):
            keeps_derivative = enabled or node.args[0] not in recorded
            _replace_by_view(graph, node, keeps_derivative=keeps_derivative)
        else:
            operator = _out_of_place(node)
            keeps_derivative = operator is not None and (enabled or node.args[0] not in recorded)
            if keeps_derivative and _is_private(node):
                _replace(graph, node, operator)
        if enabled:
            recorded.add(node)


def _out_of_place(node: fx.Node) -> Any:
    """The operator that returns what an in-place one writes; None if there is none."""
    name = aten_name(node.target)
    if not name.endswith("_") or not mutates(node.target) or name in _WITHOUT_DERIVATIVE:
        return None
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node) or "out" in node.kwargs:
        return None
    if not isinstance(value_of(first), Tensor):
        return None
    operator = returning(node.target)
    return None if operator is None or mutates(operator) else operator


def _is_private(node: fx.Node) -> bool:
    """Whether neither an input nor another value that is used later shares the written memory."""
    changed: Any = node.args[0]
    sharing = [other for other in node.graph.nodes if _share_memory(other, changed, node)]
    if is_input(changed) or any(map(is_input, sharing)):
        return False
    users = users_of(sharing)
    return node not in users and not any(node < user for user in users)


def _share_memory(other: fx.Node, changed: fx.Node, node: fx.Node) -> bool:
    """Whether a node before a write, other than the changed one, shares the changed memory."""
    if other is changed or not other < node:
        return False
    written = changed.meta["val"]
    return any(share_memory(tensor, written) for tensor in tensors_in(value_of(other)))


def _replace_by_view(graph: fx.Graph, node: fx.Node, *, keeps_derivative: bool) -> None:
    """Replaces a change of a tensor's shape by a view."""
    name, changed = aten_name(node.target), node.args[0]
    assert isinstance(changed, fx.Node)
    operator = returning(node.target)
    if is_input(changed):
        raise NotCapturedError(f"{name} changes the shape of an input")
    if operator is None or not is_view(operator) or not keeps_derivative:
        raise NotCapturedError(f"{name} changes a tensor's shape in place; compute another tensor")
    with graph.inserting_before(node):
        view = graph.call_function(operator, node.args, node.kwargs)
    view.meta.update(node.meta)
    _replace_later_uses(graph, node, view)


def _replace(graph: fx.Graph, node: fx.Node, operator: Any) -> None:
    """Replaces a write by an operator that returns the written value."""
    changed: Any = node.args[0]
    value = changed.meta["val"]
    with graph.inserting_before(node):
        result = graph.call_function(operator, node.args, node.kwargs)
        with recording_nothing():
            args, kwargs = fx.node.map_arg(
                (node.args, node.kwargs), lambda other: other.meta["val"]
            )
            result.meta["val"] = operator(*args, **kwargs)
        # A write casts to the dtype of the tensor; the operator promotes instead.
        if result.meta["val"].dtype != value.dtype:
            result = graph.call_function(CAST, (result,), {"dtype": value.dtype})
        result.meta["val"] = value  # later views were recorded as ones of this memory
    _replace_later_uses(graph, node, result)


def _replace_later_uses(graph: fx.Graph, node: fx.Node, result: fx.Node) -> None:
    """Has all that reads a tensor after a write, or the write's result, read another node."""
    changed: Any = node.args[0]
    for user in [user for user in changed.users if node < user]:
        user.replace_input_with(changed, result)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
