"""The numbers of a traced function's axes in its structure, the outermost first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from .axes import Label
from .ir import Node
from .structure import Part, parts_along, within, without
from .traced import Traced, Value

__all__ = ["Numbering"]

# Operators of parts of a row, along axes that are unrolled.
_UNROLLING = ("select", "stack")


# The order of axes is that of memory in the tensor with the most. Axes that it lacks are put before
# what follows them in another tensor:
#
#   first tensor    batch  sequence         columns
#   second tensor          sequence  heads  columns
#   order           batch  sequence  heads  columns
#
# A part's index is written in this order, and so are rows, whose last axis is counted fastest.


class Numbering:
    """The axes of a traced function, numbered.

    Args:
        traced: the function.
        nodes: the nodes that outputs depend on.
        used: the inputs among these.
    Attributes:
        order: the traced axes, the outermost first; a structure's axis is an index into it.
        sizes: the sizes of the structure's axes.
        count: the number of axes of values; further axes belong to unused inputs alone.
        unrolled: the axes along which each part is a value of its own.
    """

    def __init__(
        self,
        traced: Traced,
        nodes: Sequence[Node],
        used: Sequence[Value],
    ) -> None:
        self._axes = traced.axes
        self.order: list[int] = []
        self._add_values([*used, *traced.outputs])
        self._add_nodes(nodes)
        self.count = len(self.order)
        # Axes of unused inputs come last.
        for value in traced.inputs:
            self._append_new(_flat(value.labels))
        self._numbers = {axis: number for number, axis in enumerate(self.order)}
        self.sizes = tuple([self._axes.sizes[axis] for axis in self.order])
        parts = [self.of_label(node.attrs[0]) for node in nodes if node.op in _UNROLLING]
        self._of_parts = frozenset(itertools.chain(*parts))
        self.unroll(())

    def unroll(self, axes: Iterable[int]) -> None:
        """Unroll axes of the structure, beside those of parts that are selected or stacked."""
        self.unrolled = tuple(sorted(self._of_parts.union(axes)))

    def of_label(self, label: Label) -> Label:
        """Return the axes of a dimension."""
        return tuple([self._numbers[axis] for axis in self._axes.leaves(label)])

    def of(self, axes: Iterable[int]) -> Label:
        """Return the axes of a value, each once."""
        return tuple([self._numbers[axis] for axis in self._axes.leaves_of(axes)])

    def rolled(self, node: Node) -> list[int]:
        """Return the axes of a value without unrolled ones."""
        return without(self.of(node.axes), self.unrolled)

    def size(self, axes: Iterable[int]) -> int:
        """Return the number of elements along axes."""
        return math.prod([self.sizes[axis] for axis in axes])

    def count_of_parts(self, node: Node) -> int:
        """Return the number of parts of a value."""
        return self.size(within(self.of(node.axes), self.unrolled))

    def parts(self, node: Node) -> Iterator[Part]:
        """Yield the parts of a value."""
        axes = within(self.of(node.axes), self.unrolled)
        for part in parts_along(axes, self.sizes):
            yield tuple(sorted(part))

    def _add_values(self, values: Sequence[Value]) -> None:
        """Add the axes of tensors, in the order of those that have the most."""
        tensors = [self._axes.leaves(_flat(value.labels)) for value in values]
        for axes in sorted(tensors, key=len, reverse=True):
            for position, axis in enumerate(axes):
                if axis not in self.order:
                    point = _insertion_point(self.order, axes[position + 1 :])
                    self.order.insert(point, axis)

    def _add_nodes(self, nodes: Sequence[Node]) -> None:
        """Add the axes of values inside the function, which no tensor has."""
        for node in nodes:
            selected = node.attrs[0] if node.op in ("select", "pick") else ()
            self._append_new((*node.axes, *selected))

    def _append_new(self, axes: Iterable[int]) -> None:
        self.order += without(self._axes.leaves_of(axes), self.order)


def _flat(labels: Sequence[Label]) -> Label:
    return tuple(itertools.chain.from_iterable(labels))


def _insertion_point(order: Sequence[int], following: Iterable[int]) -> int:
    """Return the position in an order before the first known axis of those that follow."""
    for axis in following:
        if axis in order:
            return order.index(axis)
    return len(order)
