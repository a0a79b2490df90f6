"""Replaces in-place operators by out-of-place ones: then nodes can be moved and replaced."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from ..core.compat.fake import memory_of
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
from .graphs import (
    aliased_inputs,
    is_input,
    is_tensor,
    nodes_in,
    strides_of,
    tensors_of,
    users_of,
    value_of,
)
from .symbols import have_hints

__all__ = ["NotCapturedError", "without_writes"]

# In-place operators whose out-of-place variants have another derivative, or none.
_WITHOUT_DERIVATIVE = frozenset({"copy_", "logical_not_"})
# Nodes by the memory of their values.
_ByMemory: TypeAlias = dict[Hashable, list[fx.Node]]


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

    Two kinds of writes stay as they are. Either the written memory is read elsewhere, because the
    tensor shares it with an input, or with a value that is used later. Or the result of the
    out-of-place operator would differ:

        y = x * w                  y has a gradient, before the write and after it. An operator's
        with torch.no_grad():      result would have none.
            y.mul_(2)

        y = (x * 2)[:, ::2]        y has gaps between its columns. An operator's result would have
        y.add_(1)                  other strides.

    An operator that changes the shape of an intermediate, such as `unsqueeze_`, becomes a view:
    tensors that share its memory keep their shapes.

    Raises:
        NotCapturedError: an operator changes the shape of an input, or it changes the shape of
            another tensor and no view has the same result.
    """
    # The nodes whose values autograd records.
    enabled, recorded = torch.is_grad_enabled(), set[fx.Node]()
    earlier: _ByMemory = {}
    for node in list(graph.nodes):
        if node.target in GRAD_MODES:
            enabled = bool(node.args[0])
            continue
        # The result of a write or a view is recorded if the tensor that it changes or views is.
        is_recorded = enabled or not recorded.isdisjoint(aliased_inputs(node))
        keeps_derivative = enabled or recorded.isdisjoint(node.all_input_nodes[:1])
        current = _replace_write(graph, node, earlier, keeps_derivative=keeps_derivative)
        if is_recorded:
            recorded.add(current)
        for tensor in tensors_of([current]):
            earlier.setdefault(memory_of(tensor), []).append(current)


def _replace_write(
    graph: fx.Graph, node: fx.Node, earlier: _ByMemory, *, keeps_derivative: bool
) -> fx.Node:
    """Replaces a node that changes a tensor in place, unless other values would differ.

    Args:
        graph: the graph of the node.
        node: any node.
        earlier: the nodes before it.
        keeps_derivative: whether an operator in its place would have the same derivative.
    Returns:
        The node in its place, or the node itself.
    """
    if changes_shape(node.target):
        return _replace_by_view(graph, node, keeps_derivative=keeps_derivative)
    operator = _out_of_place(node)
    if operator is None or not keeps_derivative or not _is_private(node, earlier):
        return node
    computed = _result_of(node, operator)
    if not _have_equal_strides(computed, value_of(node)):
        return node
    return _replace(graph, node, operator, computed)


def _out_of_place(node: fx.Node) -> Any:
    """The operator that returns what an in-place one writes; None if there is none."""
    if not _is_in_place(node.target) or "out" in node.kwargs:
        return None
    if not any(map(is_tensor, nodes_in(node.args[:1]))):
        return None
    # An operator may have several overloads, as `pow` has: this is the one with the same arguments.
    operator = returning(node.target)
    if operator is None or mutates(operator):
        return None
    return operator


def _is_in_place(target: Any) -> bool:
    """Whether an operator is one in place that may have an out-of-place variant."""
    name = aten_name(target)
    if not name.endswith("_") or name in _WITHOUT_DERIVATIVE:
        return False
    return mutates(target)


def _is_private(node: fx.Node, earlier: _ByMemory) -> bool:
    """Whether neither an input nor another value that is used later shares the written memory.

    a ──▶ add_ ──▶ users           private: `add` in its place writes other memory
    a ──▶ view ──▶ later users     not: the view would have to show what `add_` wrote
    """
    changed: Any = node.args[0]
    nodes = earlier.get(memory_of(value_of(changed)), ())
    sharing = [other for other in nodes if other is not changed]
    if any(map(is_input, [changed, *sharing])):
        return False
    users = users_of(sharing)
    # Used later: by the write itself, as in ``a.add_(view_of_a)``, or by a node after it.
    return node not in users and not any(node < user for user in users)


def _have_equal_strides(computed: Tensor, written: Tensor) -> bool:
    """Whether the result of an operator has the strides of the tensor that a write changes.

    It has other strides, for example, if that tensor is every second column of another one. Returns
    True if a size depends on data, because the strides are then unknown.
    """
    if not have_hints((*written.shape, *written.stride())):
        return True
    return strides_of(computed) == strides_of(written)


def _replace_by_view(graph: fx.Graph, node: fx.Node, *, keeps_derivative: bool) -> fx.Node:
    """Replaces a change of a tensor's shape by a view."""
    name, changed = aten_name(node.target), node.args[0]
    assert isinstance(changed, fx.Node)
    operator = returning(node.target)
    if is_input(changed):
        # The caller's tensor changes its shape, too: no operator of the graph does that.
        raise NotCapturedError(f"{name} changes the shape of an input")
    is_replaceable = keeps_derivative and operator is not None
    if not is_replaceable or not is_view(operator):
        raise NotCapturedError(f"{name} changes a tensor's shape in place; compute another tensor")
    # Left in place, it would change the tensor, but the node that later nodes read has the metadata
    # from before the change: kernels would write beyond the memory that is allocated.
    with graph.inserting_before(node):
        view = graph.call_function(operator, node.args, node.kwargs)
    view.meta.update(node.meta)
    _replace_later_uses(graph, node, view)
    return view


def _replace(graph: fx.Graph, node: fx.Node, operator: Any, computed: Tensor) -> fx.Node:
    """Replaces a write by an operator that returns the written value.

    Args:
        graph: the graph of the node.
        node: the write.
        operator: the operator that returns what the write stores.
        computed: the result of the operator.
    """
    changed: Any = node.args[0]
    value = changed.meta["val"]
    with graph.inserting_before(node):
        result = graph.call_function(operator, node.args, node.kwargs)
        # A write casts to the dtype of the tensor: ``half.add_(float)`` stays half. The operator
        # promotes instead.
        if computed.dtype != value.dtype:
            result.meta["val"] = computed
            result = graph.call_function(CAST, (result,), {"dtype": value.dtype})
        result.meta["val"] = value  # later views were recorded as views of this memory
    _replace_later_uses(graph, node, result)
    return result


def _result_of(node: fx.Node, operator: Any) -> Any:
    """The value of an operator with the arguments of a node."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda other: other.meta["val"])
    with recording_nothing():
        return operator(*args, **kwargs)


def _replace_later_uses(graph: fx.Graph, node: fx.Node, result: fx.Node) -> None:
    """Replaces a changed tensor by another node, in all nodes after the write that read it.

    The write itself is replaced, too, and erased.
    """
    changed: Any = node.args[0]
    for user in list(changed.users):
        if node < user:
            user.replace_input_with(changed, result)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
