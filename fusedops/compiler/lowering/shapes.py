"""Views, and parts of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..axes import Label
from ..errors import NotRowwiseError
from ..ir import REDUCTIONS, Node, topological
from ..structure import MOST_PARTS
from ..tracing import Value, kind_of
from .common import as_kind, joined, lowers, picked


def _afresh(r: Any, x: Value) -> Value:
    """The value, of axes of its own where it is made of indices and numbers alone: ``i[:, None] < i`` has two dimensions."""
    if not _is_made_of_indices(x.node):
        return x
    known = r.axes.leaves(tuple([axis for label in x.labels for axis in label]))
    fresh = {axis: new for axis in dict.fromkeys(known) for new in r.axes.new(r.axes.sizes[axis])}

    def renamed(label: Label) -> Label:
        return tuple([fresh.get(axis, axis) for axis in r.axes.leaves(label)])

    done: dict[Node, Node] = {}
    for node in topological([x.node]):
        attrs = renamed(node.attrs) if node.op == "iota" else node.attrs
        done[node] = r.graph.make(node.op, *[done[arg] for arg in node.args], attrs=attrs, axes=renamed(tuple(node.axes)),
                                  kind=node.kind)  # fmt: skip
    return Value(done[x.node], tuple(map(renamed, x.labels)), x.dtype)


def _is_made_of_indices(node: Node) -> bool:
    """Whether a value is computed element by element of indices and numbers."""
    todo = [node]
    while todo:
        node = todo.pop()
        if node.op in ("input", "keep", "select", "stack", *REDUCTIONS):
            return False
        todo += node.args
    return True


@lowers("view", "_unsafe_view", "reshape", "_reshape_alias")
def _view(r: Any, out: Any, x: Value, *_: Any, **__: Any) -> Value:
    x = _afresh(r, x)
    flat = tuple([axis for label in x.labels for axis in label])
    sizes = [size for size in out.shape if size != 1]
    split = iter(r.axes.split(flat, sizes))
    return Value(x.node, tuple([next(split) if size != 1 else () for size in out.shape]), out.dtype)


@lowers("expand")
def _expand(r: Any, out: Any, x: Value, *_: Any, **__: Any) -> Value:
    labels = list(x.labels)
    labels = [()] * (out.dim() - len(labels)) + labels
    for place, size in enumerate(out.shape):
        if not labels[place] and size != 1:
            labels[place] = r.axes.new(size)
    return Value(x.node, tuple(labels), out.dtype)


@lowers("unsqueeze")
def _unsqueeze(r: Any, out: Any, x: Value, dim: int) -> Value:
    x, place = _afresh(r, x), dim % out.dim()
    return Value(x.node, (*x.labels[:place], (), *x.labels[place:]), out.dtype)


@lowers("squeeze")
def _squeeze(r: Any, out: Any, x: Value, dim: Any = None) -> Value:
    rank = len(x.labels)
    dims = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d % rank for d in dims if not x.labels[d % rank]} if rank else set[int]()
    return Value(x.node, tuple([label for d, label in enumerate(x.labels) if d not in gone]), out.dtype)


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


def _part(r: Any, x: Value, dim: int, outer: int, which: int, interleaved: bool) -> tuple[Node, Label]:
    """One of equal parts of a dimension, and the label of what is left of it."""
    label = x.labels[dim]
    inner = r.axes.size(r.axes.leaves(label)) // outer
    sizes = (inner, outer) if interleaved else (outer, inner)
    # A dimension that is cut into parts of one element has none left.
    named = [size for size in sizes if size != 1]
    found = iter(r.axes.split(label, named))
    labels = [next(found) if size != 1 else () for size in sizes]
    part, rest = (labels[1], labels[0]) if interleaved else (labels[0], labels[1])
    return _select_node(r, x.node, part, which), rest


def _select_node(r: Any, node: Node, axis: Label, which: int) -> Node:
    rest = _rest(r, node, axis)
    if len(rest) == len(r.axes.of(node.axes)):  # all its parts are the same
        return node
    return r.graph.make("select", node, attrs=(axis, which), axes=rest)


def _rest(r: Any, node: Node, axis: Label) -> frozenset[int]:
    leaves = set(r.axes.of(node.axes))
    return frozenset(leaves - set(axis))


@lowers("slice")
def _slice(r: Any, out: Any, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    dim %= len(x.labels)
    size, taken = r.axes.size(r.axes.leaves(x.labels[dim])), out.shape[dim]
    if taken == size:
        return x
    first = 0 if start is None else min(max(start + size if start < 0 else start, 0), size)
    if step > 1:
        if size % step or taken != size // step:
            raise NotRowwiseError(f"a step of {step} through {size} columns, which are no equal parts")
        node, rest = _part(r, x, dim, step, first, True)
    else:
        node, rest = _columns(r, x, dim, first, taken)
    return Value(node, (*x.labels[:dim], rest, *x.labels[dim + 1 :]), out.dtype)


def _columns(r: Any, x: Value, dim: int, first: int, taken: int) -> tuple[Node, Label]:
    """Neighbouring columns that are one or some of equal parts of a row, and their label."""
    size = r.axes.size(r.axes.leaves(x.labels[dim]))
    if not taken:
        raise NotRowwiseError("an empty slice of columns")
    part = math.gcd(size, first, taken)
    if taken == 1 and size > MOST_PARTS:
        return picked(r, x, dim, r.graph.const(first)), ()
    if part != taken and size // part > MOST_PARTS:
        raise NotRowwiseError(f"columns {first} to {first + taken} of {size} {_too_many(size // part)}")
    found = [_part(r, x, dim, size // part, which, False) for which in range(first // part, (first + taken) // part)]
    if len(found) == 1:
        return found[0]
    axis = r.axes.new(len(found))
    return _stack_node(r, [node for node, _ in found], axis, x.node.kind), (*axis, *found[0][1])


def _too_many(parts: int) -> str:
    return f"need {parts} equal parts of a row; {MOST_PARTS} is the most. Pass the parts as arguments of their own"


_MOVED = "it moves columns; do so before the call, or name the parts with chunk and cat"


def _side_by_side(r: Any, out: Any, x: Value, dim: int, pieces: Sequence[tuple[int, int]]) -> Value:
    """Pieces of a dimension put together: the first column of each, and how many it has."""
    size, label = out.shape[dim], x.labels[dim]
    part = math.gcd(r.axes.size(r.axes.leaves(label)), *[number for piece in pieces for number in piece])
    if size // part > MOST_PARTS:
        raise NotRowwiseError(_MOVED)
    found = []
    for first, count in pieces:
        node, rest = _columns(r, x, dim, first, count)
        found.append(Value(node, (*x.labels[:dim], rest, *x.labels[dim + 1 :]), x.dtype))
    return _cat(r, out, found, dim)


@lowers("roll")
def _roll(r: Any, out: Any, x: Value, shifts: Any, dims: Any = ()) -> Value:
    """By half of a row, as of a rotary embedding, or by a sixteenth at least."""
    dims = [dims] if isinstance(dims, int) else list(dims)
    if len(dims) != 1:
        raise NotRowwiseError(_MOVED)
    dim, size = dims[0] % out.dim(), out.shape[dims[0]]
    shift = (shifts if isinstance(shifts, int) else shifts[0]) % size
    return x if not shift else _side_by_side(r, out, x, dim, [(size - shift, shift), (0, size - shift)])


@lowers("flip")
def _flip(r: Any, out: Any, x: Value, dims: Sequence[int]) -> Value:
    for dim in [d % len(x.labels) for d in dims if x.labels]:
        if x.labels[dim]:
            x = _side_by_side(r, out, x, dim, [(place, 1) for place in reversed(range(out.shape[dim]))])
    return x


@lowers("constant_pad_nd")
def _pad(r: Any, out: Any, x: Value, pad: Sequence[int], value: float = 0) -> Value:
    """Numbers put before and behind the columns."""
    before, behind, *others = pad
    if any(others) or min(before, behind) < 0:
        raise NotRowwiseError("it adds or cuts rows; pad the last dimension alone, or outside of the function")
    number = as_kind(r, r.graph.const(value), kind_of(out.dtype))
    dim = out.dim() - 1
    pieces = [
        Value(number, (*x.labels[:dim], r.axes.new(count)), out.dtype) if count else None for count in (before, behind)
    ]
    return _cat(r, out, [piece for piece in (pieces[0], x, pieces[1]) if piece is not None], dim)


@lowers("select")
def _select(r: Any, out: Any, x: Value, dim: int, which: int) -> Value:
    dim %= len(x.labels)
    size = r.axes.size(r.axes.leaves(x.labels[dim]))
    if size == 1:
        return Value(x.node, (*x.labels[:dim], *x.labels[dim + 1 :]), out.dtype)
    node, _ = _columns(r, x, dim, which % size, 1)
    return Value(node, (*x.labels[:dim], *x.labels[dim + 1 :]), out.dtype)


@lowers("split", "split_with_sizes", "unsafe_split", "chunk")
def _split(r: Any, out: Any, x: Value, sizes: Any, dim: int = 0) -> list[Value]:
    dim %= len(x.labels)
    if len(out) == 1:
        return [x]
    found, first = [], 0
    for part in out:
        node, rest = _columns(r, x, dim, first, part.shape[dim])
        found.append(Value(node, (*x.labels[:dim], rest, *x.labels[dim + 1 :]), part.dtype))
        first += part.shape[dim]
    return found


@lowers("unbind")
def _unbind(r: Any, out: Any, x: Value, dim: int = 0) -> list[Value]:
    return [_select(r, part, x, dim, which) for which, part in enumerate(out)]


def _stacked(r: Any, values: Sequence[Value], kind: str) -> tuple[Node, tuple[Label, ...], Label]:
    """Values of the same dimensions along a new axis; these dimensions, and the axis."""
    labels = joined(r, *[value.labels for value in values])
    axis = _axis_of(r, values)
    if axis is None or set(r.axes.leaves(axis)) & set(r.axes.of([a for value in values for a in value.node.axes])):
        axis = r.axes.new(len(values))
    return _stack_node(r, [as_kind(r, value.node, kind) for value in values], axis, kind), labels, axis


def _stack_node(r: Any, nodes: Sequence[Node], axis: Label, kind: str) -> Node:
    axes = frozenset(r.axes.of(frozenset().union(*[node.axes for node in nodes]))) | set(axis)
    return r.graph.make("stack", *nodes, attrs=(axis,), axes=axes, kind=kind)


def _axis_of(r: Any, values: Sequence[Value]) -> Label | None:
    """The axis of which these are parts, if it has as many."""
    for value in values:
        todo = [value.node]
        while todo:
            node = todo.pop()
            if node.op == "select" and r.axes.size(node.attrs[0]) == len(values):
                return node.attrs[0]
            if node.op in ("neg", "mul", "add", "sub", "cast"):
                todo.extend(node.args)
    return None


@lowers("stack")
def _stack(r: Any, out: Any, values: Sequence[Value], dim: int = 0) -> Value:
    if len(values) == 1:
        return _unsqueeze(r, out, values[0], dim)
    dim %= out.dim()
    node, labels, axis = _stacked(r, values, kind_of(out.dtype))
    return Value(node, (*labels[:dim], axis, *labels[dim:]), out.dtype)


@lowers("cat")
def _cat(r: Any, out: Any, values: Sequence[Value], dim: int = 0) -> Value:
    dim %= out.dim()
    if len(values) == 1:
        return values[0]
    sizes = [r.axes.size(r.axes.leaves(value.labels[dim])) for value in values]
    part = math.gcd(*sizes)
    if sum(sizes) // part > MOST_PARTS and len(set(sizes)) > 1:
        term = (
            "; a column that a softmax has for a sink is a term of its sum: exp(sink - largest)" if 1 in sizes else ""
        )
        raise NotRowwiseError(f"columns put together as {sizes} {_too_many(sum(sizes) // part)}{term}")
    values = [
        one for value, size in zip(values, sizes, strict=True) for one in _equal_parts(r, value, dim, size // part)
    ]
    node, labels, axis = _stacked(r, values, kind_of(out.dtype))
    return Value(node, (*labels[:dim], (*axis, *labels[dim]), *labels[dim + 1 :]), out.dtype)


def _equal_parts(r: Any, x: Value, dim: int, count: int) -> list[Value]:
    if count == 1:
        return [x]
    found = [_part(r, x, dim, count, which, False) for which in range(count)]
    return [Value(node, (*x.labels[:dim], rest, *x.labels[dim + 1 :]), x.dtype) for node, rest in found]
