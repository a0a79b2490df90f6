"""Gradients of the parts of one tensor, written into one tensor by the kernels that compute them.

A packed projection has queries, keys and values. Regions read the first two, and attention the
third:

    projection ──views──▶ q, k ──▶ operators ──▶ attention        becomes   projection ──▶ packed
                     └──▶ v ─────────────────────▶                          ──▶ attention

Without the pass, the operators' kernels write the gradients of q and k to tensors of their own.
PyTorch copies these and the gradient of v into the projection's gradient: each is written, read and
written again. See `core.calls.packed`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from ...compiler.layouts import row_layout
from ...compiler.operator import Program
from ...core.calls import registration
from ...core.calls.packed import PackedCall, encode
from ..fx import namespace
from ..graphs import (
    are_numbers,
    escapes,
    hints_of,
    is_tensor,
    is_view,
    may_be_changed,
    name_of,
    parts_of,
    users_of,
    users_through,
    value_of,
)
from ..regions import DIVIDING, is_of_elements
from ..report import note_change
from ..rewrite import Rewrite

__all__ = ["pack_gradients"]

# Views in which the elements keep their order.
_ORDERED = frozenset(
    {"view", "_unsafe_view", "reshape", "_reshape_alias", "alias", "unsqueeze", "squeeze"}
)
# For views that are parts of a tensor, the position of the argument that is the divided dimension.
# The argument's default is 0.
_POSITION_OF_DIM = {"select": 1, "slice": 1, "unbind": 1, **dict.fromkeys(DIVIDING - {"unbind"}, 2)}
_OF_SIZE_ONE = frozenset({"select", "unbind"})
_FORWARD = "_forward"


class _Part(NamedTuple):
    """A view that is a range of a tensor along one dimension."""

    dim: int
    start: int
    stop: int
    node: fx.Node | None

    @property
    def size(self) -> int:
        return self.stop - self.start


class _Reader(NamedTuple):
    """The region's operator that alone reads a part, through views in which elements keep order.

    Attributes:
        call: the operator.
        argument: the last of these views, which is an argument of the operator.
    """

    call: fx.Node
    argument: fx.Node


@dataclass
class _Packed:
    """A tensor that is divided, and what reads its parts.

    Attributes:
        node: the tensor.
        parts: its parts, in their order.
        readers: the operators that can write the gradient of a part, by the part's number.
        other_parts: the other parts by their numbers.
    """

    node: fx.Node
    parts: Sequence[_Part]
    readers: dict[int, _Reader] = field(default_factory=dict)
    other_parts: dict[int, fx.Node] = field(default_factory=dict)

    @property
    def calls(self) -> list[fx.Node]:
        """The operators that read parts, each once."""
        return list(dict.fromkeys(reader.call for reader in self.readers.values()))

    def read_by(self, call: fx.Node) -> list[tuple[int, int]]:
        """The parts that an operator reads: pairs of the argument's index, and the number."""
        return [
            (call.args.index(reader.argument), number)
            for number, reader in self.readers.items()
            if reader.call is call
        ]


def pack_gradients(rewrite: Rewrite) -> None:
    """Lets kernels write gradients of parts of one tensor into one tensor.

    The gradients of other parts are copied there, as PyTorch does with all of them. Where a kernel
    of Inductor would compute one, and write it without a copy, nothing changes.
    """
    # The nodes that the loop adds are in no part, and read no other.
    part_of = parts_of(rewrite.graph)
    for node in filter(is_tensor, list(rewrite.graph.nodes)):
        packed = _read(node)
        if packed.readers and _may_pack(rewrite, packed, part_of):
            _replace(rewrite.graph, packed)


def _read(node: fx.Node) -> _Packed:
    """The parts of a tensor with what reads them; no readers where nothing divides it."""
    packed = _Packed(node, _division(node))
    for number, part in enumerate(packed.parts):
        if part.node is None:
            continue
        reader = _reader(part.node)
        if reader is not None and _can_write(node, part, reader):
            packed.readers[number] = reader
        else:
            packed.other_parts[number] = part.node
    return packed


# --- parts of a tensor ----------------------------------------------------------------------------


def _division(node: fx.Node) -> list[_Part]:
    """The parts into which views divide a tensor along one dimension, in their order.

    A part that is no view has no node. Empty where views overlap, or nothing divides the tensor.
    """
    by_dim: dict[int, list[_Part]] = {}
    for part in itertools.chain(*[_parts(node, user) for user in node.users]):
        by_dim.setdefault(part.dim, []).append(part)
    divisions = [_complete(parts, value_of(node).shape[dim]) for dim, parts in by_dim.items()]
    return next(filter(None, divisions), [])


def _parts(node: fx.Node, user: fx.Node) -> Iterator[_Part]:
    """The parts of a tensor that a user of it is, or returns."""
    name, whole = name_of(user), value_of(node)
    # A slice has a fifth argument where it has a step.
    if name not in _POSITION_OF_DIM or user.kwargs or len(user.args) > 4:
        return
    position = _POSITION_OF_DIM[name]
    arguments = (*user.args, *[0] * position)  # with the default, for a dimension that is left out
    dim: Any = arguments[position]
    dim %= whole.dim()
    results = user.users if name in DIVIDING else [user]
    for result in filter(is_tensor, results):
        view = value_of(result)
        size = 1 if name in _OF_SIZE_ONE else view.shape[dim]
        offset = view.storage_offset() - whole.storage_offset()
        # The sizes of parts are constants: a length that changes from call to call is not divided.
        numbers = (size, offset, whole.stride(dim), whole.shape[dim])
        if are_numbers(numbers) and whole.stride(dim):
            start = offset // whole.stride(dim)
            yield _Part(dim, start, start + size, result)


def _complete(parts: Sequence[_Part], size: int) -> list[_Part]:
    """The parts of a dimension, with those between them; empty where two overlap."""
    divided: list[_Part] = []
    dim, reached = parts[0].dim, 0
    # The empty part at the end is for what lies between the last part and the end.
    for part in (*sorted(parts, key=_start), _Part(dim, size, size, None)):
        if part.start < reached:
            return []
        divided += [_Part(dim, reached, part.start, None), part]
        reached = part.stop
    return [part for part in divided if part.size]


def _start(part: _Part) -> int:
    return part.start


# --- what reads them ------------------------------------------------------------------------------


def _reader(part: fx.Node) -> _Reader | None:
    """The region's operator that alone reads a part, once; None if there is none."""
    argument, users = part, list(part.users)
    while len(users) == 1 and name_of(users[0]) in _ORDERED:
        argument, users = users[0], list(users[0].users)
    # A view that a pass has added has no value.
    if len(users) != 1 or not _is_program(users[0]) or not is_tensor(argument):
        return None
    (call,) = users
    return _Reader(call, argument) if call.args.count(argument) == 1 else None


def _is_program(node: fx.Node) -> bool:
    """Whether a node is the forward of a program of the compiler."""
    if namespace(node.target) != "fusedops":
        return False
    name = _name_of_operator(node)
    return name.endswith(_FORWARD) and isinstance(_program(node), Program)


def _name_of_operator(node: fx.Node) -> str:
    """The name of a registered operator."""
    target: Any = node.target
    return str(target.overloadpacket.__name__)


def _name(call: fx.Node) -> str:
    return _name_of_operator(call).removesuffix(_FORWARD)


def _program(call: fx.Node) -> Any:
    return registration.defined(_name(call))


def _can_write(node: fx.Node, part: _Part, reader: _Reader) -> bool:
    """Whether a kernel can write the gradient of a part in its place."""
    program = _program(reader.call)
    position = reader.call.args.index(reader.argument)
    structure = program.structure
    layout = row_layout(structure, structure.inputs[position], group=())
    if not program.wanted[position] or layout != "rows":
        return False
    # The place in a contiguous gradient is a view of it, whatever the strides of the tensor.
    gradient = torch.empty(hints_of(node), device="meta")
    try:
        gradient.narrow(part.dim, part.start, part.size).view(hints_of(reader.argument))
    except RuntimeError:
        return False
    return True


# --- whether it pays, and is the same -------------------------------------------------------------


def _may_pack(rewrite: Rewrite, packed: _Packed, part_of: Mapping[fx.Node, int]) -> bool:
    """Whether the gradients of parts may be written into one tensor, and that pays.

    Args:
        rewrite: the graph.
        packed: the parts.
        part_of: see `parts_of`.
    """
    other_parts = packed.other_parts.values()
    views = [*other_parts, *[reader.argument for reader in packed.readers.values()]]
    # A single gradient needs no packing.
    if len(views) < 2 or may_be_changed(packed.node):
        return False
    if not rewrite.needs.issuperset(views):
        return False
    # A part that is returned is to have its own memory.
    obstacles = [*filter(escapes, other_parts), *filter(_is_of_inductor, other_parts)]
    if obstacles:
        return False
    # Autograd records the operators in one gradient mode.
    modes = set(map(part_of.__getitem__, (*views, *packed.calls)))
    return len(modes) == 1 and not _is_cyclic(packed.calls, other_parts)


def _is_of_inductor(part: fx.Node) -> bool:
    """Whether a kernel of Inductor computes the gradient of a part."""
    consumers = itertools.filterfalse(is_view, users_through(part, is_view))
    return any(map(is_of_elements, consumers))


def _is_cyclic(calls: Sequence[fx.Node], other_parts: Iterable[fx.Node]) -> bool:
    """Whether operators depend on one another, or on what reads the other parts.

    As one node they would be in a cycle.
    """
    # Edges lead to later nodes: no path comes back from behind the last operator.
    last, seen = max(calls), set[fx.Node]()
    todo = users_of([*calls, *other_parts])
    while todo:
        user = todo.pop()
        seen.add(user)
        if user < last:
            todo |= user.users.keys() - seen
    return not seen.isdisjoint(calls)


# --- the rewrite ----------------------------------------------------------------------------------


def _replace(graph: fx.Graph, packed: _Packed) -> None:
    """Replaces the operators, and the parts that others read, by results of one node."""
    calls, other_parts = packed.calls, list(packed.other_parts.values())
    tensors: list[Any] = list(other_parts)
    packed_calls: list[PackedCall] = []
    for call in calls:
        # The arguments are the program's tensors and the seed, then the constants.
        count = len(_program(call).tensors) + 1
        constants: Any = call.args[count:]
        tensors += call.args[:count]
        packed_calls.append(PackedCall(_name(call), packed.read_by(call), *constants))
    sizes = [part.size for part in packed.parts]
    text = encode(list(packed.other_parts), packed_calls)
    with graph.inserting_before(calls[0]):
        args = (packed.node, packed.parts[0].dim, sizes, tensors, text)
        packed_node = graph.call_function(torch.ops.fusedops.packed.default, args)
    note_change(packed_node, "gradients of parts of a tensor, written into one")
    _read_results(packed_node, calls, other_parts)


def _read_results(
    packed_node: fx.Node, calls: Sequence[fx.Node], other_parts: Sequence[fx.Node]
) -> None:
    """Makes the users of operators and parts read the results of the node in their place.

    Args:
        packed_node: the node. It returns the results of all operators, then the other parts.
        calls: the operators.
        other_parts: the parts that the operators do not read.
    """
    graph, first = packed_node.graph, 0
    for call in calls:
        for result in list(call.users):
            number: Any = result.args[1]
            result.args = (packed_node, first + number)
        first += _program(call).count
        graph.erase_node(call)
    for number, part in enumerate(other_parts, first):
        with graph.inserting_after(packed_node):
            result = graph.call_function(operator.getitem, (packed_node, number))
        result.meta.update(part.meta)
        part.replace_all_uses_with(result, lambda user: user is not packed_node)
