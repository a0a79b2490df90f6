"""What lowerings share: the table, and values that are broadcast together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..axes import Label
from ..errors import NotRowwiseError
from ..ir import Node
from ..tracing import Value, kind_of

__all__ = [
    "TABLE",
    "Lower",
    "as_kind",
    "as_value",
    "differentiated",
    "joined",
    "lowers",
    "picked",
    "pointwise",
    "where_within",
]

Lower = Callable[..., Any]
TABLE: dict[str, Lower] = {}


def lowers(*names: str) -> Callable[[Lower], Lower]:
    """Registers a function for PyTorch's operators of these names."""

    def register(lower: Lower) -> Lower:
        for name in names:
            TABLE[name] = lower
        return lower

    return register


def joined(r: Any, *labels: tuple[Label, ...]) -> tuple[Label, ...]:
    """The labels of tensors that are broadcast together."""
    rank = max(map(len, labels))
    found: list[Label] = []
    for place in range(-rank, 0):
        there = [label[place] for label in labels if len(label) >= -place and label[place]]
        for other in there[1:]:
            r.axes.unify(there[0], other)
        found.append(there[0] if there else ())
    return tuple(found)


def picked(r: Any, x: Value, dim: int, index: Node) -> Node:
    """One element along a dimension, by its number."""
    label, varies = x.labels[dim], set(r.axes.of(x.node.axes))
    leaves = set(r.axes.leaves(label))
    if leaves.isdisjoint(varies):  # all elements are the same
        return x.node
    axes = (varies | set(r.axes.of(index.axes))) - leaves
    return r.graph.make("pick", x.node, index, attrs=(label,), axes=axes, kind=x.node.kind)


def as_value(r: Any, value: Any, kind: str | None = None) -> Value:
    """A tensor or number; converted to a kind where that is given."""
    if not isinstance(value, Value):
        dtype = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float32
        if not isinstance(value, (bool, int, float)):
            raise NotRowwiseError(f"a number of type {type(value).__name__}")
        value = Value(r.graph.const(value), (), dtype)
    return value if kind is None else Value(as_kind(r, value.node, kind), value.labels, value.dtype)


# Marks the constant that stands for an element beside a row among integers, which have no NaN.
_BESIDE = ("beside",)


def as_kind(r: Any, node: Node, kind: str) -> Node:
    """The node as a float, int or bool."""
    if node.kind == kind:
        return node
    if kind == "float" and node.op == "where" and node.args[2].attrs[1:] == _BESIDE:
        return r.graph.where(node.args[0], as_kind(r, node.args[1], kind), r.graph.const(math.nan))  # type: ignore[no-any-return]
    if node.op == "const":
        return r.graph.const({"float": float, "int": int, "bool": bool}[kind](_number(node)))
    return r.graph.make("cast", node, kind=kind)


def _number(node: Node) -> Any:
    return float(node.attrs[0]) if node.kind == "float" else node.attrs[0]


def pointwise(r: Any, out: Any, function: Callable[..., Node], *values: Any, kind: str | None = None) -> Value:
    """A function of tensors and numbers, element by element; in the kind of what comes out."""
    kind = kind or kind_of(out.dtype)
    if kind == "int" and kind_of(out.dtype) == "int" and out.dtype != torch.int64:
        raise NotRowwiseError(f"arithmetic of {str(out.dtype).removeprefix('torch.')}, which wraps around")
    given = [as_value(r, value, kind) for value in values]
    return Value(function(*[value.node for value in given]), joined(r, *[v.labels for v in given]), out.dtype)


def where_within(r: Any, index: Node, size: int, node: Node, dtype: torch.dtype) -> Node:
    """A value where an index is one of a row's elements, and elsewhere none that is to be mistaken for one: NaN, among floats.

    Raises:
        NotRowwiseError: the dtype has no such value.
    """
    graph, place = r.graph, as_kind(r, index, "int")
    if node.kind != "float" and dtype not in (torch.int32, torch.int64):
        raise NotRowwiseError(
            f"of {str(dtype).removeprefix('torch.')} it reads what an index may be beside; convert it to floats"
        )
    within = graph.binary("and", graph.make("ge", place, graph.const(0)), graph.make("lt", place, graph.const(size)))
    beside = graph.const(math.nan)
    if node.kind != "float":
        beside = graph.make("const", attrs=(torch.iinfo(dtype).min, *_BESIDE), kind="int")
    return graph.where(within, node, beside)  # type: ignore[no-any-return]


def differentiated(r: Any, node: Node, *partials: tuple[Node, Node]) -> Node:
    """A value with a derivative of its own, in the place of that of what it is computed of.

    Args:
        r: the recorder.
        node: the value.
        partials: of each argument that has a gradient, the argument and the derivative by it.
    """
    graph, found = r.graph, None
    for argument, partial in partials:
        term = graph.binary("mul", argument, graph.make("constant_to_gradients", partial))
        found = term if found is None else graph.binary("add", found, term)
    return graph.make("instead", node, found)  # type: ignore[no-any-return]
