"""Reductions over channels that come before pixels, of tensors in channels-last memory.

A norm over dimension 1 of such an image reads adjacent elements, but its rows are not the outer
dimensions of the tensor, and no region grows from it. The reduction, and the elementwise operators
around it, are written for a permuted view. Its rows are the outer dimensions, as in memory:

    conv ──▶ mean over 1 ──▶ rsqrt ──▶ mul ──▶ conv
    conv ──permute──▶ mean over the last ──▶ rsqrt ──▶ mul ──permute back──▶ conv

Nothing is copied, and all tensors keep their strides. Images in contiguous memory are left: a row
of channels is then not adjacent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ...core.compat.fake import hints
from ..fx import is_pointwise
from ..graphs import (
    are_numbers,
    drop_unused,
    hints_of,
    is_fixed,
    is_tensor,
    name_of,
    parts_of,
    value_of,
)
from ..regions import reduced_dims, set_dim
from ..rewrite import Rewrite
from ..symbols import have_hints

__all__ = ["move_channels_last", "to_last"]

_PERMUTE = torch.ops.aten.permute.default
_UNSQUEEZE = torch.ops.aten.unsqueeze.default
_VIEW = torch.ops.aten.view.default


def move_channels_last(rewrite: Rewrite) -> None:
    """Writes reductions over dimension 1 of channels-last tensors for permuted views."""
    graph, part = rewrite.graph, parts_of(rewrite.graph)
    moved = dict[fx.Node, fx.Node]()
    # A region that read two views of a tensor would read it twice. A view is in one part of the
    # graph only: without gradients it would have none in the next.
    views = defaultdict[int, dict[tuple[fx.Node, int], fx.Node]](dict)
    for node in _nodes_to_move(graph):
        with graph.inserting_before(node):
            _move(graph, node, moved, views[part[node]])
    # A view back that only moved nodes would read has no users.
    drop_unused(graph)


# --- what is moved --------------------------------------------------------------------------------


def _nodes_to_move(graph: fx.Graph) -> list[fx.Node]:
    """The reductions over channels and the elementwise operators around, in the graph's order."""
    members = dict[fx.Node, None]()
    todo = list(filter(_reduces_channels, graph.nodes))
    while todo:
        node = todo.pop()
        if node not in members:
            members[node] = None
            todo += _neighbours(node)
    return sorted(members)


def _neighbours(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments and users of a node that are elementwise in the same pixels."""
    pixels = _pixels(node.all_input_nodes[0] if _reduces_channels(node) else node)
    for other in (*node.all_input_nodes, *node.users):
        if _is_elementwise(other) and _pixels(other) == pixels:
            yield other


def _pixels(image: fx.Node) -> tuple[int, ...]:
    """The sizes of all dimensions but the channels, in the traced call."""
    batch, _, *rest = hints_of(image)
    return (batch, *rest)


def _reduces_channels(node: fx.Node) -> bool:
    """Whether a node reduces dimension 1 of a channels-last tensor, and nothing else."""
    if node.op != "call_function" or not is_tensor(node) or not node.args:
        return False
    source: Any = node.args[0]
    if not isinstance(source, fx.Node) or not _is_channels_last(source):
        return False
    return reduced_dims(node, value_of(source).dim()) == [1]


def _is_elementwise(node: fx.Node) -> bool:
    """Whether a node computes each pixel of a channels-last tensor from the same pixel."""
    if node.op != "call_function" or is_fixed(node):
        return False
    if name_of(node) == "expand":
        return _is_expanded_image(node)
    # A cast has no tag "pointwise".
    if not is_pointwise(node.target) and name_of(node) != "_to_copy":
        return False
    # A permuted view has another memory format: one that is named would mean other strides.
    if node.kwargs.get("memory_format") not in (None, torch.preserve_format):
        return False
    return _is_channels_last(node)


def _is_expanded_image(node: fx.Node) -> bool:
    """Whether a node expands a tensor of as many dimensions, such as the results of reductions."""
    source: Any = node.args[0]
    return _is_channels_last(source) and value_of(source).dim() == value_of(node).dim()


def _is_channels_last(node: fx.Node) -> bool:
    """Whether a value is a tensor whose pixels, each with its channels, are adjacent in memory."""
    if not is_tensor(node):
        return False
    value = value_of(node)
    if value.dim() < 3 or value.layout is not torch.strided or not have_hints(value.shape):
        return False
    sizes, strides = map(hints, (value.shape, value.stride()))
    expected = 1
    # From the innermost dimension of the memory. Strides of one element mean nothing.
    for dim in reversed(to_last(value.dim())):
        if sizes[dim] != 1 and strides[dim] != expected:
            return False
        expected *= sizes[dim]
    return True


# --- how it is moved ------------------------------------------------------------------------------


def to_last(rank: int) -> list[int]:
    """The order of dimensions that puts the channels last: 0, 2, 3, 1."""
    return [0, *range(2, rank), 1]


def _from_last(rank: int) -> list[int]:
    """The inverse order: 0, 3, 1, 2."""
    return [0, rank - 1, *range(1, rank - 1)]


def _move(
    graph: fx.Graph,
    node: fx.Node,
    moved: dict[fx.Node, fx.Node],
    views: dict[tuple[fx.Node, int], fx.Node],
) -> None:
    """Replaces a node by one that computes a permuted view of its value.

    Args:
        graph: the graph; nodes are inserted before ``node``.
        node: a reduction or an elementwise operator.
        moved: from each value that replaces one of the model to the permuted value that it views.
            It is extended.
        views: from other values, and ranks, to their permuted views. It is extended.
    """
    is_reduction = _reduces_channels(node)
    source: Any = node.args[0]
    rank = value_of(source if is_reduction else node).dim()

    def permuted(arg: fx.Node) -> fx.Node:
        if arg in moved:
            return moved[arg]
        if (arg, rank) not in views:
            views[arg, rank] = _permuted(graph, arg, rank)
        return views[arg, rank]

    args, kwargs = cast("Any", map_arg((node.args, node.kwargs), permuted))
    if name_of(node) == "expand":
        args = (args[0], [args[1][dim] for dim in to_last(rank)])
    result = graph.call_function(cast("Any", node.target), args, kwargs)
    result.meta.update(node.meta)
    if is_reduction:
        set_dim(result, rank - 1)
    value = value_of(node)
    new = result
    # A value without the reduced dimension has the model's order already.
    if value.dim() == rank:
        result.meta["val"] = value.permute(to_last(rank))
        new = graph.call_function(_PERMUTE, (result, _from_last(rank)))
        new.meta["val"] = value
        moved[new] = result
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _permuted(graph: fx.Graph, node: fx.Node, rank: int) -> fx.Node:
    """A view of an argument that is broadcast to permuted tensors as it was to the model's.

    Args:
        graph: the graph.
        node: the argument; numbers and tensors of no dimensions stay as they are.
        rank: the dimensions of the tensors.
    """
    if not is_tensor(node) or value_of(node).dim() == 0:
        return node
    channels = _channels_alone(value_of(node), rank)
    # Channels alone are a vector, such as a norm's weight.
    if channels:
        return _view(graph, _VIEW, node, [channels])
    for _ in range(rank - value_of(node).dim()):
        node = _view(graph, _UNSQUEEZE, node, 0)
    return _view(graph, _PERMUTE, node, to_last(rank))


def _channels_alone(value: Tensor, rank: int) -> int:
    """The number of channels of a tensor that has no other elements; 0 for other tensors."""
    # A size that is one in the traced call only is a symbol.
    if not are_numbers(value.shape) or value.dim() < rank - 1:
        return 0
    channels = value.shape[1 - rank]
    return channels if channels == value.numel() else 0


def _view(graph: fx.Graph, view: Any, node: fx.Node, argument: Any) -> fx.Node:
    """A view of a node, with its value."""
    result = graph.call_function(view, (node, argument))
    result.meta["val"] = view(value_of(node), argument)
    return result
