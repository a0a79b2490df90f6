"""Parameters that autocast casts one by one are cast together: fewer kernels, both directions.

    parameters ──▶ cast_joined ──▶ split_with_sizes ──▶ getitem ──▶ view     (one of each item)

An item is a single cast, or several that a joined product already concatenates.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx

from ...core.alignment import ALIGNED, HALF
from ...core.calls.registration import implement
from ...core.launches import launch
from ..graphs import (
    are_numbers,
    dtype_of,
    escapes,
    hints_of,
    is_input,
    name_of,
    parts_of,
    value_of,
)
from ..report import note_change
from ..rewrite import Rewrite
from ..targets import whole_of

__all__ = ["JOINED", "cast_together"]

# The mark of a tensor that joins casts, in `fx.Node.meta`.
JOINED = "fusedops_joined"
# Launches of small kernels are host time. With a cast for each parameter, a step of T5-base on an
# H200 took 40.1 ms, and the GPU was busy for 30.0 ms of them.
# The most tensors that one kernel of Inductor joins, and the most elements: with more of these, the
# time of a launch does not matter.
_MOST_TENSORS, _MOST_ELEMENTS = 8, 2**23
# The dtypes that are cast, and to which.
_CASTS = frozenset(itertools.product((torch.float32,), HALF))
# The arguments of linear layers that are their weights and biases.
_POSITIONS = {"t": (0,), "mm": (1,), "addmm": (2, 0)}


@dataclass(frozen=True)
class _Item:
    """A node that is a cast, or that joins casts.

    Attributes:
        node: the node.
        casts: the casts that it is, or joins.
    """

    node: fx.Node
    casts: list[fx.Node]

    @property
    def count(self) -> int:
        """The number of elements."""
        return sum(map(_count, self.casts))

    @property
    def shape(self) -> list[int]:
        """The shape of the casts, concatenated along their first dimension."""
        shapes = list(map(hints_of, self.casts))
        return [sum([shape[0] for shape in shapes]), *shapes[0][1:]]


def cast_together(rewrite: Rewrite) -> None:
    """Concatenates parameters, several at a time, and casts each of these tensors at once.

    Parameters that receive gradients are cast separately from others, so that those get none.
    """
    for group in _groups(rewrite):
        if len(group) > 1:
            _cast(rewrite.graph, group)


def _groups(rewrite: Rewrite) -> list[list[_Item]]:
    """The items that one cast may replace, in the order of the graph."""
    parts = parts_of(rewrite.graph)
    by_key = dict[Any, list[list[_Item]]]()
    for node in rewrite.graph.nodes:
        item = _Item(node, _casts_of(node))
        # An item with casts in several parts is left out. Its joined cast would be in one of them,
        # where gradients may be off, or before a later part changes a parameter.
        parts_of_item = set(map(parts.__getitem__, item.casts))
        if len(parts_of_item) != 1:  # none, or too many
            continue
        value = value_of(item.casts[0])
        trained = frozenset(map(rewrite.receives.__contains__, item.casts))
        key = (value.dtype, value.device, *parts_of_item, trained)
        groups = by_key.setdefault(key, [[]])
        # Only the last group takes more: one that is full is closed.
        if not _fit([*groups[-1], item]):
            groups.append([])
        groups[-1].append(item)
    return list(itertools.chain.from_iterable(by_key.values()))


def _fit(items: list[_Item]) -> bool:
    """Whether one kernel can join the casts of the items."""
    casts = _casts_in(items)
    return len(casts) <= _MOST_TENSORS and sum(map(_count, casts)) <= _MOST_ELEMENTS


def _casts_in(items: list[_Item]) -> list[fx.Node]:
    """The casts of several items."""
    return list(itertools.chain.from_iterable(item.casts for item in items))


def _count(cast: fx.Node) -> int:
    return math.prod(value_of(cast).shape)


def _casts_of(node: fx.Node) -> list[fx.Node]:
    """The casts that a node is, or joins; none where they cannot be joined."""
    casts: Any = [node]
    if _is_joined(node):
        casts = node.args[0]
    elif any(map(_is_joined, node.users)):
        return []  # they are counted with the node that joins them
    if not all(map(_is_joinable, casts)):
        return []
    if not _is_parameter_of_layers(node) or escapes(node):
        return []
    return list(casts)


def _is_joined(node: fx.Node) -> bool:
    return bool(node.meta.get(JOINED))


def _is_parameter_of_layers(node: fx.Node) -> bool:
    """Whether only linear layers use a node, as a weight or a bias and not as their rows."""
    return all(_is_of_layer(user, node) for user in node.users)


def _is_of_layer(user: fx.Node, node: fx.Node) -> bool:
    """Whether a node is used as the weight or the bias of a linear layer, and not as its rows."""
    positions = _POSITIONS.get(name_of(user), ())
    arguments = list(map(user.args.__getitem__, positions))
    return node in arguments


def _is_joinable(cast: fx.Node) -> bool:
    """Whether a node casts a parameter from fp32 to half precision, of a size that is aligned."""
    if name_of(cast) != "_to_copy" or set(cast.kwargs) != {"dtype"}:
        return False
    source = cast.args[0]
    if not _is_parameter(source):
        return False
    value = value_of(cast)
    dtypes = (dtype_of(source), value.dtype)
    if dtypes not in _CASTS:
        return False
    # A matrix product loads 16 bytes at once: no matrix may begin between two such loads.
    is_aligned = _count(cast) % ALIGNED == 0
    return is_aligned and launch.runs_kernels(value.device.type)


def _is_parameter(node: Any) -> TypeGuard[fx.Node]:
    """Whether a node may be a weight or a bias of a layer, or a rank's part, of a known size."""
    if not isinstance(node, fx.Node) or not is_input(whole_of(node)):
        return False
    value = value_of(node)
    if value.dim() not in (1, 2) or not value.is_contiguous():
        return False
    return are_numbers(value.shape)


def _cast(graph: fx.Graph, group: list[_Item]) -> None:
    """Replaces several casts by views of one cast."""
    aten = torch.ops.aten
    casts = _casts_in(group)
    replaced = [item.node for item in group]
    with graph.inserting_before(min([*casts, *replaced])):
        inputs = ([cast.args[0] for cast in casts], casts[0].kwargs["dtype"])
        whole = graph.call_function(torch.ops.fusedops.cast_joined.default, inputs)
        note_change(whole, "one cast of several parameters")
        counts = [item.count for item in group]
        parts = graph.call_function(aten.split_with_sizes.default, (whole, counts))
        for number, item in enumerate(group):
            part = graph.call_function(operator.getitem, (parts, number))
            joined = graph.call_function(aten.view.default, (part, item.shape))
            joined.meta.update(item.node.meta)
            item.node.replace_all_uses_with(joined)


# --- the operator ---------------------------------------------------------------------------------


def _joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The elements of all tensors in another dtype, concatenated; each is read and written once."""
    return torch.cat([tensor.to(dtype).view(-1) for tensor in tensors])


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.shapes, ctx.dtype = [tensor.shape for tensor in inputs[0]], inputs[0][0].dtype


def _derivative(ctx: Any, grad: Tensor) -> tuple[list[Tensor], None]:
    """The gradients as views of one tensor that is cast at once, instead of a cast for each."""
    parts = grad.to(ctx.dtype).split(list(map(math.prod, ctx.shapes)))
    return [part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True)], None


_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")
_LIBRARY.define("cast_joined(Tensor[] tensors, ScalarType dtype) -> Tensor")
implement(_LIBRARY, "cast_joined", _joined, _joined, decomposed=True)
torch.library.register_autograd(
    "fusedops::cast_joined", _derivative, setup_context=_setup, lib=_LIBRARY
)
