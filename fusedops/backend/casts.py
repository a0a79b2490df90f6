"""Parameters that autocast casts one by one are cast together: fewer kernels, both directions."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..core.calls.registration import implement
from ..core.launches import launch
from .regions import are_numbers, escapes, is_input, name_of, parts_of, value_of
from .report import note_change

__all__ = ["JOINED", "cast_together"]

# The mark of a tensor that joins casts, in `fx.Node.meta`.
JOINED = "fusedops_joined"
# Inductor reads up to so many tensors in one kernel that joins them. Beyond so many elements a
# launch does not matter.
_MOST_TENSORS, _MOST_ELEMENTS = 8, 2**23
# A matrix product loads 16 bytes at once: no matrix may begin between two such loads.
_ALIGNED = 8


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


def cast_together(graph: fx.Graph, receives: set[fx.Node]) -> None:
    """Concatenates parameters, several at a time, and casts each of these tensors at once.

    Args:
        graph: of operators.
        receives: the nodes whose values have gradients. They are cast separately from others, so
            that those get none.
    """
    for group in _groups(graph, receives):
        if len(group) > 1:
            _cast(graph, group)


def _groups(graph: fx.Graph, receives: set[fx.Node]) -> list[list[_Item]]:
    """The items that one cast may replace, in the order of the graph."""
    parts = parts_of(graph)
    by_key = dict[Any, list[list[_Item]]]()
    for node in graph.nodes:
        item = _Item(node, _casts_of(node))
        parts_of_item = set(map(parts.__getitem__, item.casts))
        if len(parts_of_item) != 1:  # none, or too many
            continue
        value = value_of(item.casts[0])
        trained = frozenset(map(receives.__contains__, item.casts))
        key = (value.dtype, value.device, *parts_of_item, trained)
        groups = by_key.setdefault(key, [[]])
        # Only the last group takes more: one that is full is closed.
        if not _fit([*groups[-1], item]):
            groups.append([])
        groups[-1].append(item)
    return list(itertools.chain.from_iterable(by_key.values()))


def _fit(items: list[_Item]) -> bool:
    """Whether one kernel can join the casts of the items."""
    if sum([len(item.casts) for item in items]) > _MOST_TENSORS:
        return False
    return sum([item.count for item in items]) <= _MOST_ELEMENTS


def _count(cast: fx.Node) -> int:
    return math.prod(value_of(cast).shape)


def _casts_of(node: fx.Node) -> list[fx.Node]:
    """The casts that a node is, or joins; none where they cannot be joined."""
    casts: Any = [node]
    if node.meta.get(JOINED):
        casts = node.args[0]
    elif any(user.meta.get(JOINED) for user in node.users):
        return []  # they are counted with the node that joins them
    is_weight = all(_is_of_layer(user, node) for user in node.users)
    if not is_weight or not all(map(_is_joinable, casts)) or escapes(node):
        return []
    return list(casts)


def _is_of_layer(user: fx.Node, node: fx.Node) -> bool:
    """Whether a node is used as the weight or the bias of a linear layer, and not as its rows."""
    position = {"t": 0, "mm": 1, "addmm": 2}.get(name_of(user))
    if position is None:
        return False
    is_bias = position == 2 and user.args[0] is node
    return user.args[position] is node or is_bias


def _is_joinable(cast: fx.Node) -> bool:
    """Whether a node casts a parameter from fp32 to half precision, of a size that is aligned."""
    if name_of(cast) != "_to_copy" or set(cast.kwargs) != {"dtype"}:
        return False
    if not isinstance(cast.args[0], fx.Node) or not _is_parameter(cast.args[0]):
        return False
    source, value = value_of(cast.args[0]), value_of(cast)
    if source.dtype != torch.float32 or value.dtype not in (torch.float16, torch.bfloat16):
        return False
    return _count(cast) % _ALIGNED == 0 and launch.runs_kernels(value.device.type)


def _is_parameter(node: fx.Node) -> bool:
    """Whether a node may be a weight or a bias of a layer, of a known size."""
    if not is_input(node):
        return False
    value = value_of(node)
    is_plain = value.dim() in (1, 2) and value.is_contiguous()
    return is_plain and are_numbers(value.shape)


def _cast(graph: fx.Graph, group: list[_Item]) -> None:
    """Replaces several casts by one, of which they become views.

    parameters ──▶ cast_joined ──▶ split_with_sizes ──▶ getitem ──▶ view     (one of each item)
    """
    aten = torch.ops.aten
    position = {node: position for position, node in enumerate(graph.nodes)}
    casts = [cast for item in group for cast in item.casts]
    replaced = [item.node for item in group]
    with graph.inserting_before(min([*casts, *replaced], key=position.__getitem__)):
        inputs = ([cast.args[0] for cast in casts], casts[0].kwargs["dtype"])
        whole = graph.call_function(torch.ops.fusedops.cast_joined.default, inputs)
        note_change(whole, "one cast of several parameters")
        counts = [item.count for item in group]
        parts = graph.call_function(aten.split_with_sizes.default, (whole, counts))
        for number, item in enumerate(group):
            part = graph.call_function(operator.getitem, (parts, number))
            joined = graph.call_function(aten.view.default, (part, _joined_shape(item)))
            joined.meta.update(item.node.meta)
            item.node.replace_all_uses_with(joined)


def _joined_shape(item: _Item) -> list[int]:
    """The shape of an item's casts, concatenated along their first dimension."""
    shapes = [value_of(cast).shape for cast in item.casts]
    return [sum([shape[0] for shape in shapes]), *shapes[0][1:]]


# --- the operator ---------------------------------------------------------------------------------


def _joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The elements of all tensors in another dtype, concatenated; each is read and written once."""
    return torch.cat([tensor.to(dtype).view(-1) for tensor in tensors])


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.shapes, ctx.dtype = [tensor.shape for tensor in inputs[0]], inputs[0][0].dtype


def _derivative(ctx: Any, grad: Tensor) -> tuple[list[Tensor], None]:
    """The gradients as views of one tensor that is cast at once, instead of a cast for each."""
    parts = grad.to(ctx.dtype).split([math.prod(shape) for shape in ctx.shapes])
    return [part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True)], None


_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")
_LIBRARY.define("cast_joined(Tensor[] tensors, ScalarType dtype) -> Tensor")
implement(_LIBRARY, "cast_joined", _joined, _joined, decomposed=True)
torch.library.register_autograd(
    "fusedops::cast_joined", _derivative, setup_context=_setup, lib=_LIBRARY
)
