"""Axes of the tensors in a traced function: which dimensions are the same, and which are several in one.

Every dimension of an input begins as an axis of its own. Operators that combine two tensors say that their dimensions
are the same (`Axes.unify`); a view says that a dimension is several (`Axes.split`). What is left in the end are the
axes of the whole function. A *label* is a dimension as a tuple of axes, the outermost first; () for one of size 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

__all__ = ["Axes", "AxisError", "Label"]

Label = tuple[int, ...]


_ACROSS = (
    "a view joins parts of two dimensions, or cuts through one; take it outside, and pass the result as an argument"
)


class AxisError(Exception):
    """Dimensions that do not fit."""


class Axes:
    """Axes by number, with what is known of them."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._same: list[int] = []  # a forest: the same axis, nearer to its root
        self._parts: dict[int, Label] = {}

    def new(self, size: int) -> Label:
        """The label of a new dimension."""
        if size == 1:
            return ()
        self.sizes.append(size)
        self._same.append(len(self._same))
        return (len(self.sizes) - 1,)

    def leaves(self, label: Label) -> Label:
        """The label in axes that are neither others nor split."""
        found: list[int] = []
        for axis in label:
            root = self._root(axis)
            found += self.leaves(self._parts[root]) if root in self._parts else (root,)
        return tuple(found)

    def of(self, axes: Iterable[int]) -> Label:
        """The leaves of a value's axes, each once."""
        return tuple(dict.fromkeys(self.leaves(tuple(sorted(axes)))))

    def size(self, label: Label) -> int:
        """Of the dimension."""
        return math.prod([self.sizes[axis] for axis in label])

    def unify(self, one: Label, other: Label) -> None:
        """Both labels are of the same dimension."""
        if self.size(self.leaves(one)) != self.size(self.leaves(other)):
            raise AxisError(f"dimensions of {self.size(self.leaves(one))} and {self.size(self.leaves(other))} meet")
        while True:
            first, second = self.leaves(one), self.leaves(other)
            pair = next(((a, b) for a, b in zip(first, second, strict=False) if a != b), None)
            if pair is None:
                return
            small, large = sorted(pair, key=lambda axis: self.sizes[axis])
            if self.sizes[small] == self.sizes[large]:
                self._same[max(pair)] = min(pair)
            else:
                self._divide(large, self.sizes[small])

    def split(self, label: Label, sizes: Sequence[int]) -> list[Label]:
        """The label of one dimension as several, of these sizes."""
        rest = self.leaves(label)
        found: list[Label] = []
        for size in sizes:
            taken: Label = ()
            while self.size(taken) < size:
                if not rest or size % self.size(taken):
                    raise AxisError(_ACROSS)
                axis, needed = rest[0], size // self.size(taken)
                if self.sizes[axis] <= needed:
                    if needed % self.sizes[axis]:
                        raise AxisError(_ACROSS)
                    taken, rest = (*taken, axis), rest[1:]
                else:
                    self._divide(axis, needed)
                    rest = self.leaves(rest)
            found.append(taken)
        if rest:
            raise AxisError(_ACROSS)
        return found

    def _root(self, axis: int) -> int:
        while self._same[axis] != axis:
            axis = self._same[axis]
        return axis

    def _divide(self, axis: int, first: int) -> None:
        """Split an axis in two, the outer one of this size."""
        if self.sizes[axis] % first:
            raise AxisError(
                f"it takes {self.sizes[axis]} columns or rows apart in two ways, one of them into {first}, as where a tensor meets "
                "itself in another order; pass one of the two as an argument"
            )
        self._parts[axis] = (*self.new(first), *self.new(self.sizes[axis] // first))
