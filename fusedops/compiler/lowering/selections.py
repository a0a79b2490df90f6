"""Selections of several columns of each row: the largest ones, and those that indices name.

Their number is small, so that each is a number of the row, and a part along an axis of its own. No
tile has that axis: ``values / values.sum(-1, keepdim=True)`` is a few operators on numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import NotRowwiseError
from ..ir import Node
from ..structure import MOST_NUMBERS
from ..traced import Value
from .common import as_kind, lowers, picked
from .elementwise import as_represented
from .reductions import gather, length, reduced
from .shapes import selected_part, stacked_parts

# The longest rows whose largest elements fit. For each of these a program passes twice over
# the row, which it holds in registers.
_LONGEST_ROW = 1024


@lowers("topk")
def _topk(
    r: Any, out: Any, x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    """The largest elements of each row, in descending order, and their indices."""
    if not largest:
        raise NotRowwiseError("topk of the smallest elements")
    dim, label = _axis(x, dim)
    size = length(r, label)
    _check(k, size, x.dtype)
    x = as_represented(r, x)
    if set(r.axes.leaves(label)).isdisjoint(r.axes.leaves_of(x.node.axes)):  # all are equal
        numbers = [(x.node, r.graph.const(index)) for index in range(k)]
    else:
        numbers = _Largest(r, x, dim).elements(k)
    axis = r.axes.new(k)
    labels = x.labels
    if labels:
        labels = (*labels[:dim], axis, *labels[dim + 1 :])
    values, indices = zip(*numbers, strict=True)
    return [
        Value(_joined(r, nodes, axis), labels, result.dtype)
        for nodes, result in zip((values, indices), out, strict=True)
    ]


def _axis(value: Value, dim: int) -> tuple[int, Any]:
    """A dimension from zero on, and its axis; a number has none."""
    if not value.labels:
        return 0, ()
    dim %= len(value.labels)
    return dim, value.labels[dim]


def _check(k: int, size: int, dtype: torch.dtype) -> None:
    if dtype in (torch.bool, torch.int64):
        raise NotRowwiseError(f"topk of {dtype}".replace("torch.", ""))
    if size > _LONGEST_ROW:
        raise NotRowwiseError(f"topk of {size} columns; {_LONGEST_ROW} is the most")
    if not 0 < k <= MOST_NUMBERS:
        raise NotRowwiseError(f"topk of {k} elements; one to {MOST_NUMBERS} of them fit")


def _joined(r: Any, nodes: Any, axis: Any) -> Node:
    """Numbers of a row as one value along an axis, which a single number does not have."""
    if not axis:
        return nodes[0]  # type: ignore[no-any-return]
    return stacked_parts(r, nodes, axis, nodes[0].kind)


class _Largest:
    """The elements of a row in descending order; of equal ones, the first column is first.

    Floats are compared by their `ordinal`, an integer: NaN is above infinity, and -0.0 below 0.0,
    as in PyTorch on GPUs. Each element takes two reductions, and then has the least integer, which
    is no ordinal::

        ordinals        7  9  2  9
        largest         9
        column          1, the first whose ordinal is 9
        the next ones   7  least  2  9

    Args:
        r: the recorder.
        x: the rows.
        dim: the dimension of columns.
    """

    def __init__(self, r: Any, x: Value, dim: int) -> None:
        self.r, self.graph, self.x, self.dim = r, r.graph, x, dim
        self.dtype = "float64" if x.dtype == torch.float64 else "float32"

    def elements(self, k: int) -> list[tuple[Node, Node]]:
        """The first ``k`` in this order, each with its index."""
        graph = self.graph
        label = self.x.labels[self.dim]
        column = graph.make("iota", attrs=label, axes=label, kind="int")
        last = graph.const(length(self.r, label) - 1)
        is_long = self.x.node.kind != "float" or self.dtype == "float64"
        least = graph.const(-(2**63) if is_long else -(2**31))
        left = self._ordinals()
        elements = []
        for _ in range(k):
            ordinal = self._amax(left)
            # The first column is the largest one, counted from the end.
            from_end = graph.binary("sub", last, column)
            is_largest = graph.make("eq", left, ordinal)
            from_end = self._amax(graph.where(is_largest, from_end, graph.const(-1)))
            index = graph.binary("sub", last, from_end)
            elements.append(self._element(ordinal, index))
            left = graph.where(graph.make("eq", column, index), least, left)
        return elements

    def _ordinals(self) -> Node:
        node = self.x.node
        if node.kind == "float":
            node = self.graph.make("ordinal", node, attrs=(self.dtype,), kind="int")
        return node

    def _amax(self, node: Node) -> Node:
        value = Value(node, self.x.labels, torch.int64)
        return reduced(self.r, "amax", value, self.dim, False, "int")[0]

    def _element(self, ordinal: Node, index: Node) -> tuple[Node, Node]:
        """An element and its index, from its ordinal.

        The element has the gradient of a column that is picked by the index. A backward reads
        floating-point numbers of rows, so the index is one of these.
        """
        graph = self.graph
        if self.x.node.kind != "float":
            return ordinal, index
        number = as_kind(self.r, index, "float")
        index = graph.make("cast", number, attrs=("int32",), kind="int")
        value = graph.make("of_ordinal", ordinal, attrs=(self.dtype,), kind="float")
        gradient = picked(self.r, self.x, self.dim, index)
        return graph.make("instead", graph.make("detached", value), gradient), index


@lowers("gather")
def _gather(r: Any, out: Any, x: Value, dim: int, index: Value, **_: Any) -> Value:
    """Columns of each row, by their numbers."""
    dim, axis = _axis(index, dim)
    count = length(r, axis)
    if count > MOST_NUMBERS:
        raise NotRowwiseError(
            f"gather takes {count} columns of a row, and {MOST_NUMBERS} are the most"
        )
    if not axis:
        return gather(r, out, x, dim, index)
    labels = (*index.labels[:dim], (), *index.labels[dim + 1 :])
    nodes = []
    for position in range(count):
        node = selected_part(r, index.node, axis, position)
        element = gather(r, out, x, dim, Value(node, labels, index.dtype))
        nodes.append(element.node)
    labels = (*element.labels[:dim], axis, *element.labels[dim + 1 :])
    return Value(_joined(r, nodes, axis), labels, out.dtype)
