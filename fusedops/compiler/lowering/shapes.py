"""Views, and parts of rows.

A dimension's label is a tuple of axes, slowest first. A view changes labels alone; a part of a row
is a node, ``select``, of one position along an axis, and ``stack`` is the inverse::

    row of 24        label (a,)
    split in 4 x 6   a -> (b, c), 4 and 6 long
    columns 6 to 11  select(b, 1), label (c,)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..axes import Label
from ..errors import NotRowwiseError
from ..ir import REDUCTIONS, Node, topological
from ..structure import MOST_PARTS
from ..traced import Value, kind_of
from .common import as_kind, joined, lowers, picked

# --- views ----------------------------------------------------------------------------------------


def _afresh(r: Any, x: Value) -> Value:
    """The value with new axes, if it is computed from indices and numbers alone.

    ``i[:, None] < i`` has two dimensions. Without new axes both would have the axis of ``i``.
    """
    if not _is_made_of_indices(x.node):
        return x
    fresh: dict[int, int] = {}
    for axis in dict.fromkeys(r.axes.leaves(_flat(x.labels))):
        (fresh[axis],) = r.axes.new(r.axes.sizes[axis])

    def renamed(label: Label) -> Label:
        return tuple([fresh.get(axis, axis) for axis in r.axes.leaves(label)])

    copies: dict[Node, Node] = {}
    for node in topological([x.node]):
        attrs = renamed(node.attrs) if node.op == "iota" else node.attrs
        arguments = map(copies.__getitem__, node.args)
        axes_of_copy = renamed(tuple(node.axes))
        copies[node] = r.graph.make(
            node.op, *arguments, attrs=attrs, axes=axes_of_copy, kind=node.kind
        )
    return Value(copies[x.node], tuple(map(renamed, x.labels)), x.dtype)


# Nodes of tensors' elements, and of operations across elements.
_NOT_OF_INDICES = frozenset({"input", "keep", "select", "stack", *REDUCTIONS})


def _is_made_of_indices(node: Node) -> bool:
    """Whether a value is computed element by element of indices and numbers."""
    pending = [node]
    while pending:
        node = pending.pop()
        if node.op in _NOT_OF_INDICES:
            return False
        pending += node.args
    return True


def _relabeled(x: Value, dim: int, label: Label, node: Node) -> Value:
    """A value of ``node``, with the labels of ``x`` except for dimension ``dim``."""
    return Value(node, (*x.labels[:dim], label, *x.labels[dim + 1 :]), x.dtype)


def _size_of(r: Any, label: Label) -> int:
    return r.axes.size(r.axes.leaves(label))  # type: ignore[no-any-return]


@lowers("view", "_unsafe_view", "reshape", "_reshape_alias")
def _view(r: Any, out: Any, x: Value, *_: Any, **__: Any) -> Value:
    x = _afresh(r, x)
    return Value(x.node, tuple(_split_label(r, _flat(x.labels), out.shape)), out.dtype)


def _flat(labels: Sequence[Label]) -> Label:
    """All dimensions as one, the outermost first."""
    return tuple(itertools.chain.from_iterable(labels))


def _split_label(r: Any, label: Label, sizes: Sequence[int]) -> list[Label]:
    """The labels of dimensions of these sizes that ``label`` is split into."""
    # A dimension of one element has no axis.
    larger = [size for size in sizes if size != 1]
    split = iter(r.axes.split(label, larger))
    return [() if size == 1 else next(split) for size in sizes]


@lowers("expand")
def _expand(r: Any, out: Any, x: Value, *_: Any, **__: Any) -> Value:
    labels = [()] * (out.dim() - len(x.labels)) + list(x.labels)
    for dim, size in enumerate(out.shape):
        if not labels[dim] and size != 1:
            labels[dim] = r.axes.new(size)
    return Value(x.node, tuple(labels), out.dtype)


@lowers("unsqueeze")
def _unsqueeze(r: Any, out: Any, x: Value, dim: int) -> Value:
    x, dim = _afresh(r, x), dim % out.dim()
    return Value(x.node, (*x.labels[:dim], (), *x.labels[dim:]), out.dtype)


@lowers("squeeze")
def _squeeze(r: Any, out: Any, x: Value, dim: Any = None) -> Value:
    rank = len(x.labels)
    if rank == 0:
        return Value(x.node, (), out.dtype)
    named = [dim] if isinstance(dim, int) else dim
    if named is None:
        named = range(rank)
    dims = {d % rank for d in named}
    labels: list[Label] = []
    for d, label in enumerate(x.labels):
        # Dimensions of more than one element stay.
        if label or d not in dims:
            labels.append(label)
    return Value(x.node, tuple(labels), out.dtype)


@lowers("permute")
def _permute(r: Any, out: Any, x: Value, dims: Sequence[int]) -> Value:
    x = _afresh(r, x)
    return Value(x.node, tuple([x.labels[d] for d in dims]), out.dtype)


@lowers("transpose")
def _transpose(r: Any, out: Any, x: Value, first: int, second: int) -> Value:
    x = _afresh(r, x)
    labels = list(x.labels)
    if labels:
        labels[first], labels[second] = labels[second], labels[first]
    return Value(x.node, tuple(labels), out.dtype)


@lowers("t")
def _t(r: Any, out: Any, x: Value) -> Value:
    x = _afresh(r, x)
    return Value(x.node, tuple(reversed(x.labels)), out.dtype)


# --- parts of a dimension -------------------------------------------------------------------------


# A row of 24 columns as 4 parts of 6. ``x[..., 6:12]`` and ``x[..., 1::4]`` select part 1:
#
#   neighbours    a -> (parts, columns)    part 1 is columns 6 to 11
#   interleaved   a -> (columns, parts)    part 1 is columns 1, 5, 9, 13, 17, 21
#
# Only equal parts are axes. Other slices are put together from parts of the greatest common width.


def _part(
    r: Any, x: Value, dim: int, count: int, position: int, interleaved: bool
) -> tuple[Node, Label]:
    """One of ``count`` equal parts of a dimension, and the part's label.

    The columns of a part are neighbours, or, ``interleaved``, ``count`` apart.
    """
    label = x.labels[dim]
    inner = _size_of(r, label) // count
    if interleaved:
        part_label, axis = _split_label(r, label, (inner, count))
    else:
        axis, part_label = _split_label(r, label, (count, inner))
    return selected_part(r, x.node, axis, position), part_label


def selected_part(r: Any, node: Node, axis: Label, position: int) -> Node:
    """One part of a value along an axis, which is unrolled."""
    leaves = r.axes.leaves_of(node.axes)
    remaining_axes = frozenset(leaves) - set(axis)
    if len(remaining_axes) == len(leaves):  # all its parts are the same
        return node
    return r.graph.make("select", node, attrs=(axis, position), axes=remaining_axes)


@lowers("slice")
def _slice(
    r: Any, out: Any, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    dim %= len(x.labels)
    size = _size_of(r, x.labels[dim])
    count = out.shape[dim]
    if count == size:
        return x
    first = _first_column(start, size)
    if step > 1:
        if size % step or count != size // step:
            raise NotRowwiseError(
                f"a step of {step} through {size} columns, which are no equal parts"
            )
        node, part_label = _part(r, x, dim, step, first, True)
    else:
        node, part_label = _columns(r, x, dim, first, count)
    return Value(node, (*x.labels[:dim], part_label, *x.labels[dim + 1 :]), out.dtype)


def _first_column(start: int | None, size: int) -> int:
    """The first column of a slice from ``start``, as Python counts."""
    if start is None:
        return 0
    return slice(start, None).indices(size)[0]


def _columns(r: Any, x: Value, dim: int, first: int, count: int) -> tuple[Node, Label]:
    """Neighbouring columns that are one or some of equal parts of a row, and their label."""
    size = _size_of(r, x.labels[dim])
    if not count:
        raise NotRowwiseError("an empty slice of columns")
    if count == 1 and size > MOST_PARTS:
        return picked(r, x, dim, r.graph.const(first)), ()
    # The widest parts of the row at whose bounds the slice begins and ends: columns 4 to 11 of 24
    # are parts 1 and 2 of six parts of 4.
    width = math.gcd(size, first, count)
    parts = size // width
    if width != count and parts > MOST_PARTS:
        raise NotRowwiseError(f"columns {first} to {first + count} of {size} {_too_many(parts)}")
    positions = range(first // width, (first + count) // width)
    pieces = [_part(r, x, dim, parts, position, False) for position in positions]
    if len(pieces) == 1:
        return pieces[0]
    nodes = [node for node, _ in pieces]
    _, part_label = pieces[0]
    axis = r.axes.new(len(nodes))
    return stacked_parts(r, nodes, axis, x.node.kind), (*axis, *part_label)


def _too_many(parts: int) -> str:
    return (
        f"need {parts} equal parts of a row; {MOST_PARTS} is the most. "
        "Pass the parts as arguments of their own"
    )


def _moved(dims: Iterable[int], rank: int) -> NotRowwiseError:
    """Return the error of a function that moves elements along dimensions of a tensor."""
    if any(dim % rank != rank - 1 for dim in dims):
        return NotRowwiseError(
            "it moves rows; do so before the call, and pass the result as an argument"
        )
    return NotRowwiseError(
        "it moves columns; do so before the call, or name the parts with chunk and cat"
    )


def _side_by_side(r: Any, out: Any, x: Value, dim: int, pieces: Sequence[tuple[int, int]]) -> Value:
    """A concatenation of pieces of a dimension, each with its first column and its width."""
    numbers = [number for piece in pieces for number in piece]
    part = math.gcd(_size_of(r, x.labels[dim]), *numbers)
    if out.shape[dim] // part > MOST_PARTS:
        raise _moved([dim], out.dim())
    values = []
    for first, count in pieces:
        node, part_label = _columns(r, x, dim, first, count)
        values.append(_relabeled(x, dim, part_label, node))
    return _cat(r, out, values, dim)


@lowers("roll")
def _roll(r: Any, out: Any, x: Value, shifts: Any, dims: Any = ()) -> Value:
    """Columns moved by a multiple of one of at most `MOST_PARTS` equal parts of a row."""
    along = [dims] if isinstance(dims, int) else list(dims)
    if len(along) != 1:
        raise _moved(along, out.dim())
    dim = along[0] % out.dim()
    size = out.shape[along[0]]
    columns = shifts if isinstance(shifts, int) else shifts[0]
    shift = columns % size
    if not shift:
        return x
    return _side_by_side(r, out, x, dim, [(size - shift, shift), (0, size - shift)])


@lowers("flip")
def _flip(r: Any, out: Any, x: Value, dims: Sequence[int]) -> Value:
    rank = len(x.labels)
    if not rank:
        return x
    for dim in [d % rank for d in dims]:
        if x.labels[dim]:
            columns = [(column, 1) for column in reversed(range(out.shape[dim]))]
            x = _side_by_side(r, out, x, dim, columns)
    return x


@lowers("constant_pad_nd")
def _pad(r: Any, out: Any, x: Value, pad: Sequence[int], value: float = 0) -> Value:
    """The columns with numbers before and behind them."""
    before, behind, *others = pad
    cuts = min(before, behind) < 0
    if cuts or any(others):
        raise NotRowwiseError(
            "it adds or cuts rows; pad the last dimension alone, or outside of the function"
        )
    number = as_kind(r, r.graph.const(value), kind_of(out.dtype))
    dim = out.dim() - 1

    def padding(count: int) -> list[Value]:
        if not count:
            return []
        return [Value(number, (*x.labels[:dim], r.axes.new(count)), out.dtype)]

    first = padding(before)
    last = padding(behind)
    return _cat(r, out, [*first, x, *last], dim)


@lowers("select")
def _select(r: Any, out: Any, x: Value, dim: int, index: int) -> Value:
    dim %= len(x.labels)
    size = _size_of(r, x.labels[dim])
    node = x.node
    if size != 1:
        node, _ = _columns(r, x, dim, index % size, 1)
    return Value(node, (*x.labels[:dim], *x.labels[dim + 1 :]), out.dtype)


@lowers("split", "split_with_sizes", "unsafe_split", "chunk")
def _split(r: Any, out: Any, x: Value, sizes: Any, dim: int = 0) -> list[Value]:
    dim %= len(x.labels)
    if len(out) == 1:
        return [x]
    values = []
    first = 0
    for part in out:
        count = part.shape[dim]
        node, part_label = _columns(r, x, dim, first, count)
        values.append(Value(node, (*x.labels[:dim], part_label, *x.labels[dim + 1 :]), part.dtype))
        first += count
    return values


@lowers("unbind")
def _unbind(r: Any, out: Any, x: Value, dim: int = 0) -> list[Value]:
    return [_select(r, part, x, dim, position) for position, part in enumerate(out)]


# --- parts put together ---------------------------------------------------------------------------


def _stacked(r: Any, values: Sequence[Value], kind: str) -> tuple[Node, tuple[Label, ...], Label]:
    """Values of the same dimensions along a new axis; these dimensions, and the axis."""
    labels = joined(r, *[value.labels for value in values])
    axis = _axis_of(r, values)
    varying = _varying(r, [value.node for value in values])
    # In stack([x, a part of x]) the first value has the part's axis already, which would be two
    # dimensions of the result.
    if axis is None or not varying.isdisjoint(r.axes.leaves(axis)):
        axis = r.axes.new(len(values))
    nodes = [as_kind(r, value.node, kind) for value in values]
    return stacked_parts(r, nodes, axis, kind), labels, axis


def stacked_parts(r: Any, nodes: Sequence[Node], axis: Label, kind: str) -> Node:
    """Values as the parts of one value along an axis, which is unrolled."""
    axes = _varying(r, nodes) | set(axis)
    return r.graph.make("stack", *nodes, attrs=(axis,), axes=axes, kind=kind)


def _varying(r: Any, nodes: Sequence[Node]) -> frozenset[int]:
    """The axes along which any of these values varies."""
    axes: frozenset[int] = frozenset()
    for node in nodes:
        axes |= node.axes
    return frozenset(r.axes.leaves_of(axes))


# Operators that a part of a row goes through before it is put back, as in a rotary embedding.
_KEEPS_PART = frozenset({"neg", "mul", "add", "sub", "cast"})


def _axis_of(r: Any, values: Sequence[Value]) -> Label | None:
    """The axis that these values are parts of, if it has as many parts as there are values.

    A rotary embedding puts two halves of ``x`` back together. Along the axis that ``x`` was split
    by, the result has the columns of ``x``.
    """
    for value in values:
        for node in _selections(value.node):
            if r.axes.size(node.attrs[0]) == len(values):
                return node.attrs[0]
    return None


def _selections(node: Node) -> Iterator[Node]:
    """The parts of rows that a value is computed from, the last argument first."""
    pending = [node]
    while pending:
        node = pending.pop()
        if node.op == "select":
            yield node
        if node.op in _KEEPS_PART:
            pending.extend(node.args)


@lowers("stack")
def _stack(r: Any, out: Any, values: Sequence[Value], dim: int = 0) -> Value:
    if len(values) == 1:
        return _unsqueeze(r, out, values[0], dim)
    dim %= out.dim()
    node, labels, axis = _stacked(r, values, kind_of(out.dtype))
    return Value(node, (*labels[:dim], axis, *labels[dim:]), out.dtype)


_SINK = "; a column that a softmax has for a sink is a term of its sum: exp(sink - largest)"


@lowers("cat")
def _cat(r: Any, out: Any, values: Sequence[Value], dim: int = 0) -> Value:
    dim %= out.dim()
    if len(values) == 1:
        return values[0]
    sizes = [_size_of(r, value.labels[dim]) for value in values]
    width = math.gcd(*sizes)
    count = sum(sizes) // width
    if count > MOST_PARTS and len(set(sizes)) > 1:
        hint = _SINK if 1 in sizes else ""
        raise NotRowwiseError(f"columns put together as {sizes} {_too_many(count)}{hint}")
    # The values' parts of the common width, stacked: their axis is the slower one of the result.
    parts: list[Value] = []
    for value, size in zip(values, sizes, strict=True):
        parts += _equal_parts(r, value, dim, size // width)
    node, labels, axis = _stacked(r, parts, kind_of(out.dtype))
    return Value(node, (*labels[:dim], (*axis, *labels[dim]), *labels[dim + 1 :]), out.dtype)


def _equal_parts(r: Any, x: Value, dim: int, count: int) -> list[Value]:
    if count == 1:
        return [x]
    parts = []
    for position in range(count):
        node, part_label = _part(r, x, dim, count, position, False)
        parts.append(_relabeled(x, dim, part_label, node))
    return parts
