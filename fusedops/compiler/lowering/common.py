"""Functions that the lowerings share: the table of lowerings, conversions, and broadcasting.

A lowering is called with ``r``, ``out`` and the operator's own arguments. ``r`` is the recorder.
``out`` is what PyTorch's operator returned for tensors without memory: it has the result's dtype
and shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..axes import Label
from ..errors import NotRowwiseError
from ..ir import Node
from ..traced import Value, kind_of

__all__ = [
    "TABLE",
    "Lower",
    "as_integer",
    "as_kind",
    "as_value",
    "check_computes",
    "differentiated",
    "joined",
    "lowers",
    "picked",
    "pointwise",
    "where_within",
]

Lower = Callable[..., Any]
TABLE: dict[str, Lower] = {}

# Python's type for the numbers of each kind of node.
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {"float": float, "int": int, "bool": bool}


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
    result: list[Label] = []
    # Dimensions are aligned at the last one. A tensor of a lower rank does not have the first
    # dimensions, and a dimension of one element has the empty label.
    for dim in range(-rank, 0):
        aligned = [label[dim] for label in labels if len(label) >= -dim]
        result.append(_unified(r, list(filter(None, aligned))))
    return tuple(result)


def _unified(r: Any, labels: list[Label]) -> Label:
    """One label for dimensions of equal size; the empty label if there are no dimensions."""
    if not labels:
        return ()
    for label in labels[1:]:
        r.axes.unify(labels[0], label)
    return labels[0]


def picked(r: Any, x: Value, dim: int, index: Node) -> Node:
    """One element along a dimension, by its number."""
    label = x.labels[dim]
    varies = set(r.axes.leaves_of(x.node.axes))
    leaves = set(r.axes.leaves(label))
    if leaves.isdisjoint(varies):  # all elements are the same
        return x.node
    axes = (varies | set(r.axes.leaves_of(index.axes))) - leaves
    return r.graph.make("pick", x.node, index, attrs=(label,), axes=axes, kind=x.node.kind)


def as_value(r: Any, value: Any, kind: str | None = None) -> Value:
    """A tensor or number as a value, converted to ``kind`` unless that is None."""
    if not isinstance(value, Value):
        value = _number_value(r, value)
    if kind is None:
        return value
    return Value(as_kind(r, value.node, kind), value.labels, value.dtype)


def _number_value(r: Any, number: Any) -> Value:
    # The order matters: a bool is an int.
    for python_type, dtype in (
        (bool, torch.bool),
        (int, torch.int64),
        (float, torch.float32),
    ):
        if isinstance(number, python_type):
            return Value(r.graph.const(number), (), dtype)
    raise NotRowwiseError(f"a number of type {type(number).__name__}")


# `where_within` returns an integer constant for an index out of range. This attribute distinguishes
# the constant from an equal number of the user's.
_OUT_OF_RANGE = ("beside",)


def as_kind(r: Any, node: Node, kind: str) -> Node:
    """The node as a float, int or bool."""
    if node.kind == kind:
        return node
    graph = r.graph
    if kind == "float" and _marks_out_of_range(node):
        # For floats the mark of an index out of range is NaN.
        within, element, _ = node.args
        converted: Node = graph.where(within, as_kind(r, element, kind), graph.const(math.nan))
        return converted
    if node.op == "const":
        return graph.const(_CONVERSIONS[kind](_number(node)))
    return graph.make("cast", node, kind=kind)


def _marks_out_of_range(node: Node) -> bool:
    """Whether this is a result of `where_within` in integers."""
    return node.op == "where" and node.args[2].attrs[1:] == _OUT_OF_RANGE


def _number(node: Node) -> Any:
    return float(node.attrs[0]) if node.kind == "float" else node.attrs[0]


# Floats in which PyTorch computes nothing, beside casts.
_ONLY_CAST = (torch.float8_e4m3fn, torch.float8_e5m2)


def check_computes(*values: Any) -> None:
    """Raises if a value has a dtype in which PyTorch does not compute."""
    for value in values:
        if isinstance(value, Value) and value.dtype in _ONLY_CAST:
            name = str(value.dtype).removeprefix("torch.")
            raise NotRowwiseError(
                f"arithmetic of {name}, which PyTorch does not have; convert it to floats of more "
                "bits"
            )


def as_integer(r: Any, node: Node, source: torch.dtype, target: torch.dtype) -> Node:
    """The node of a value of dtype ``source`` as integers of ``target``, which wrap around.

    The graph has integers of 64 bits; those of fewer are wrapped where they may overflow.
    """
    integers = torch.iinfo(target)
    if source is torch.bool or target == torch.int64:
        return as_kind(r, node, "int")
    if kind_of(source) == "int":
        limits = torch.iinfo(source)
        if integers.min <= limits.min and limits.max <= integers.max:
            return node
    name = str(target).removeprefix("torch.")
    return r.graph.make("cast", node, attrs=(name,), kind="int")  # type: ignore[no-any-return]


def pointwise(
    r: Any, out: Any, function: Callable[..., Node], *values: Any, kind: str | None = None
) -> Value:
    """A function of tensors and numbers, element by element.

    The inputs are converted to ``kind``, by default the output's.
    """
    out_kind = kind_of(out.dtype)
    if kind is None:
        kind = out_kind
    check_computes(*values)
    inputs = [as_value(r, value, kind) for value in values]
    node = function(*[value.node for value in inputs])
    if kind == out_kind == "int":
        node = as_integer(r, node, torch.int64, out.dtype)
    return Value(node, joined(r, *[value.labels for value in inputs]), out.dtype)


def where_within(r: Any, index: Node, size: int, node: Node, dtype: torch.dtype) -> Node:
    """A value where an index is one of a row's ``size`` elements, and elsewhere a mark.

    PyTorch raises an error for an index out of range, which a kernel cannot. The mark shows it:
    NaN for floats; for integers the smallest of the dtype, which `as_kind` turns into NaN in a cast
    to floats.

    Raises:
        NotRowwiseError: the dtype has no such value.
    """
    graph = r.graph
    position = as_kind(r, index, "int")
    if node.kind != "float" and dtype not in (torch.int32, torch.int64):
        name = str(dtype).removeprefix("torch.")
        raise NotRowwiseError(
            f"of {name} it reads what an index may be beside; convert it to floats"
        )
    not_before = graph.make("ge", position, graph.const(0))
    not_after = graph.make("lt", position, graph.const(size))
    within = graph.binary("and", not_before, not_after)
    mark = graph.const(math.nan)
    if node.kind != "float":
        mark = graph.make("const", attrs=(torch.iinfo(dtype).min, *_OUT_OF_RANGE), kind="int")
    return graph.where(within, node, mark)  # type: ignore[no-any-return]


def differentiated(r: Any, node: Node, *partials: tuple[Node, Node]) -> Node:
    """A value with a derivative of its own, instead of the derivative of its formula.

    The gradient goes through the sum of ``argument * constant(partial)``, whose derivative by each
    argument is that partial.

    Args:
        r: the recorder.
        node: the value.
        partials: for each argument that has a gradient, the argument and the derivative by it.
    """
    graph = r.graph
    linear = None
    for argument, partial in partials:
        constant = graph.make("constant_to_gradients", partial)
        term = graph.binary("mul", argument, constant)
        linear = term if linear is None else graph.binary("add", linear, term)
    return graph.make("instead", node, linear)  # type: ignore[no-any-return]
