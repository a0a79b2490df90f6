"""Ranges of integers, which tell those that kernels compute in 32 bits.

The integers of a graph have 64 bits. A GPU adds, compares and selects these in two or more
instructions. Most integers along a row are columns, which are few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .ir import Node, topological, value_of

__all__ = ["Ranges"]

# The least and the largest value.
_Range = tuple[int, int]
_ANY: _Range = (-(2**63), 2**63 - 1)
_LEAST, _MOST = -(2**31), 2**31 - 1


class Ranges:
    """The ranges of a graph's integers.

    Args:
        sizes: the sizes of the axes.
        columns: the column axes, whose sizes are constants.
    """

    def __init__(self, sizes: Sequence[int], columns: Sequence[int]) -> None:
        self.sizes = sizes
        self.columns = columns
        self._ranges: dict[Node, _Range] = {}
        self._narrow: dict[Node, bool] = {}

    def are_narrow(self, node: Node) -> bool:
        """Whether these are integers that fit in 32 bits, computed from such integers."""
        if node not in self._narrow:
            for inner in topological([node], self._narrow):
                self._add(inner)
        return self._narrow[node]

    def _add(self, node: Node) -> None:
        if node.kind != "int":
            self._narrow[node] = False
            return
        integers = [arg for arg in node.args if arg.kind == "int"]
        least, most = self._ranges[node] = self._range(node, integers)
        fits = least >= _LEAST and most <= _MOST
        self._narrow[node] = fits and all(map(self._narrow.__getitem__, integers))

    def _range(self, node: Node, integers: Sequence[Node]) -> _Range:
        """Return the range of a value of these integers."""
        if node.op == "const":
            number = value_of(node)
            return number, number
        if node.op == "iota" and node.attrs[0] in self.columns:
            return 0, self.sizes[node.attrs[0]] - 1
        if node.op == "ordinal" and node.attrs == ("float32",):
            return _LEAST, _MOST
        if node.op == "cast":
            return _range_of_cast(node)
        combine = _COMBINED.get(node.op)
        if combine is None or not integers:
            return _ANY
        return combine(list(map(self._ranges.__getitem__, integers)))


def _range_of_cast(node: Node) -> _Range:
    if node.attrs:
        limits = torch.iinfo(getattr(torch, node.attrs[0]))
        return limits.min, limits.max
    return (0, 1) if node.args[0].kind == "bool" else _ANY


def _hull(ranges: Sequence[_Range]) -> _Range:
    least, most = zip(*ranges, strict=True)
    return min(least), max(most)


def _sum(ranges: Sequence[_Range]) -> _Range:
    (least, most), (other_least, other_most) = ranges
    return least + other_least, most + other_most


def _negative(ranges: Sequence[_Range]) -> _Range:
    ((least, most),) = ranges
    return -most, -least


def _difference(ranges: Sequence[_Range]) -> _Range:
    first, second = ranges
    return _sum([first, _negative([second])])


_COMBINED: dict[str, Callable[[Sequence[_Range]], _Range]] = {
    "add": _sum,
    "sub": _difference,
    "neg": _negative,
    **dict.fromkeys(("amax", "maximum", "minimum", "where"), _hull),
}
