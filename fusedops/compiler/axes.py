"""The axes of the tensors in a traced function.

Every dimension of an input begins as an axis of its own. Operators that combine two tensors unify
their dimensions (`Axes.unify`); a view that splits a dimension splits its axis (`Axes.split`). The
axes that remain in the end are those of the whole function.

A *label* is a dimension as a tuple of axes, the outermost first; () for one of size 1. The labels
of ``x``, with 64 columns, and ``y`` in ``x.view(n, 4, 16) * y[:, :, None]``:

                  at first     after the view   after the product
    x             (0,) (1,)    (0,) (4, 5)      (0,) (3, 5)          1 is split into 4 and 5
    x.view(...)                (0,) (4,) (5,)   (0,) (3,) (5,)
    y             (2,) (3,)    (2,) (3,)        (0,) (3,)            2 is 0, and 4 is 3
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

__all__ = ["Axes", "AxisError", "Label"]

Label = tuple[int, ...]


_ACROSS = (
    "a view joins parts of two dimensions, or cuts through one; take it outside, and pass the "
    "result as an argument"
)


class AxisError(Exception):
    """Dimensions that do not fit."""


class Axes:
    """All axes, by number: their sizes, which of them are the same, and how they are split."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        # A forest: an axis points to one that is the same, and a root to itself. Only roots have
        # parts:
        #
        #   _same    0 -> 0   1 -> 1   3 -> 1      axis 3 is axis 1
        #   _parts   1 -> (4, 5)                   which is split: the leaves of (3,) are (4, 5)
        self._same: list[int] = []
        self._parts: dict[int, Label] = {}

    def new(self, size: int) -> Label:
        """Return the label of a new dimension."""
        if size == 1:
            return ()
        self.sizes.append(size)
        self._same.append(len(self._same))
        return (len(self.sizes) - 1,)

    def leaves(self, label: Label) -> Label:
        """Return the label in axes that are roots and not split."""
        leaves: list[int] = []
        for axis in label:
            root = self._root(axis)
            leaves += self.leaves(self._parts[root]) if root in self._parts else (root,)
        return tuple(leaves)

    def leaves_of(self, axes: Iterable[int]) -> Label:
        """Return the leaves of a value's axes, each once."""
        return tuple(dict.fromkeys(self.leaves(tuple(sorted(axes)))))

    def size(self, label: Label) -> int:
        """Return the size of a dimension."""
        return math.prod([self.sizes[axis] for axis in label])

    def unify(self, first: Label, second: Label) -> None:
        """Make two labels the same dimension."""
        first_size = self.size(self.leaves(first))
        second_size = self.size(self.leaves(second))
        if first_size != second_size:
            raise AxisError(f"dimensions of {first_size} and {second_size} meet")
        # From the outermost axis on, the first two axes that differ are joined. If their sizes
        # differ, the larger one is split first. Its outer part is compared in the next turn.
        while True:
            pairs = zip(self.leaves(first), self.leaves(second), strict=False)
            pair = next(((a, b) for a, b in pairs if a != b), None)
            if pair is None:
                return
            small, large = sorted(pair, key=lambda axis: self.sizes[axis])
            if self.sizes[small] == self.sizes[large]:
                self._same[max(pair)] = min(pair)
            else:
                self._divide(large, self.sizes[small])

    def split(self, label: Label, sizes: Sequence[int]) -> list[Label]:
        """Return the label of one dimension as several, of these sizes."""
        remaining = self.leaves(label)
        labels: list[Label] = []
        for size in sizes:
            part: Label = ()
            while self.size(part) < size:
                if not remaining or size % self.size(part):
                    raise AxisError(_ACROSS)
                axis = remaining[0]
                needed = size // self.size(part)
                # A larger axis is split, and its outer part is used in the next turn.
                if self.sizes[axis] > needed:
                    self._divide(axis, needed)
                    remaining = self.leaves(remaining)
                    continue
                if needed % self.sizes[axis]:
                    raise AxisError(_ACROSS)
                part, remaining = (*part, axis), remaining[1:]
            labels.append(part)
        if remaining:
            raise AxisError(_ACROSS)
        return labels

    def _root(self, axis: int) -> int:
        while self._same[axis] != axis:
            axis = self._same[axis]
        return axis

    def _divide(self, axis: int, first: int) -> None:
        """Split an axis in two, the outer one of this size."""
        if self.sizes[axis] % first:
            raise AxisError(
                f"it takes {self.sizes[axis]} columns or rows apart in two ways, one of them into "
                f"{first}, as where a tensor meets itself in another order; pass one of the two as "
                "an argument"
            )
        self._parts[axis] = (*self.new(first), *self.new(self.sizes[axis] // first))
