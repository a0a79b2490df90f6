"""Replaces in-place operators by out-of-place ones, so that parts of the graph can be moved and replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ..core import compat

__all__ = ["NotCapturedError", "without_changes"]


# The derivative of their out-of-place variants is missing, or another.
_WITHOUT_DERIVATIVE = frozenset({"copy_", "logical_not_"})


class NotCapturedError(Exception):
    """A graph that cannot be captured without a loss.

    Attributes:
        reason: why; `fx.Interpreter` adds to the message.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def without_changes(graph: fx.Graph) -> None:
    """Replaces in-place operators by out-of-place ones, where the tensor is an intermediate of the graph.

    A tensor that shares memory with an input, or with another that is used later, is left as it is. So is one that was made
    where gradients are recorded and is changed where they are not: it keeps its gradient, and the result of an operator would
    have none. A change of an intermediate's shape is a view: tensors that share its memory keep theirs.

    Raises:
        NotCapturedError: a shape is changed of an input, or in a way that is no view.
    """
    enabled, recorded = torch.is_grad_enabled(), set[fx.Node]()
    for node in list(graph.nodes):
        if node.target in compat.GRAD_MODES:
            enabled = bool(node.args[0])
        elif compat.changes_shape(node.target):
            _view(graph, node, keeps_derivative=enabled or node.args[0] not in recorded)
        elif (operator := _returning(node)) is not None and (enabled or node.args[0] not in recorded) and _is_own(node):
            _replace(graph, node, operator)
        if enabled:
            recorded.add(node)


def _returning(node: fx.Node) -> Any:
    """The operator that returns what another writes, None if there is none."""
    name, first = compat.aten_name(node.target), node.args[0] if node.args else None
    if (
        not name.endswith("_")
        or not compat.mutates(node.target)
        or not isinstance(first, fx.Node)
        or "out" in node.kwargs
    ):
        return None
    found = compat.returning(node.target)
    value = first.meta.get("val")
    if name in _WITHOUT_DERIVATIVE:
        return None
    return found if isinstance(value, Tensor) and found is not None and not compat.mutates(found) else None


def _is_own(node: fx.Node) -> bool:
    """Whether no input shares the memory that is written to, and nothing that is used later but the tensor itself."""
    changed: Any = node.args[0]
    others = [other for other in node.graph.nodes if other is not changed and other < node]
    sharing = [other for other in others if any(isinstance(value, Tensor) and compat.share_memory(value, changed.meta["val"])
                                                for value in compat.leaves(other.meta.get("val")))]  # fmt: skip
    if changed.op in ("placeholder", "get_attr") or any(other.op in ("placeholder", "get_attr") for other in sharing):
        return False
    return not any(user is node or node < user for other in sharing for user in other.users)


def _view(graph: fx.Graph, node: fx.Node, *, keeps_derivative: bool) -> None:
    """Replaces a change of a tensor's shape by the view that it is."""
    name, changed = compat.aten_name(node.target), node.args[0]
    assert isinstance(changed, fx.Node)
    operator = compat.returning(node.target)
    if changed.op in ("placeholder", "get_attr"):
        raise NotCapturedError(f"{name} changes the shape of an input")
    if operator is None or not compat.is_view(operator) or not keeps_derivative:
        raise NotCapturedError(f"{name} changes a tensor's shape in place; compute another tensor")
    with graph.inserting_before(node):
        made = graph.call_function(operator, node.args, node.kwargs)
    made.meta.update(node.meta)
    for user in [user for user in changed.users if node < user]:
        user.replace_input_with(changed, made)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _replace(graph: fx.Graph, node: fx.Node, operator: Any) -> None:
    changed: Any = node.args[0]
    value = changed.meta["val"]
    with graph.inserting_before(node):
        made = graph.call_function(operator, node.args, node.kwargs)
        with compat.recording_nothing():
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda other: other.meta["val"])
            made.meta["val"] = operator(*args, **kwargs)
        if made.meta["val"].dtype != value.dtype:
            made = graph.call_function(compat.CAST, (made,), {"dtype": value.dtype})
        made.meta["val"] = value  # later views were recorded as ones of this memory
    for user in [user for user in changed.users if node < user]:
        user.replace_input_with(changed, made)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
