"""The widths of a call's slices, and how slots of a tile are dealt out to them."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

__all__ = ["Groups", "Widths", "widths_of"]


@dataclass(frozen=True, eq=False)
class Widths:
    """The widths of all slices; `widths_of` keeps one for each tuple, so identity is equality.

    Attributes:
        sizes: the width of each slice.
        columns: the first column of each, were they side by side.
        count: how many there are.
        total: the sum of all.
        uniform: the width that all have, or 0.
        align: the largest power of two up to 8 that divides every width.
    """

    sizes: tuple[int, ...]
    columns: tuple[int, ...]
    count: int
    total: int
    uniform: int
    align: int

    @property
    def widest(self) -> int:
        """The largest width."""
        return max(self.sizes)


@functools.lru_cache(maxsize=1024)
def widths_of(sizes: tuple[int, ...]) -> Widths:
    """The one object for these widths."""
    columns = (0, *itertools.accumulate(sizes))
    align = 8
    while any(size % align for size in sizes):
        align //= 2
    return Widths(sizes, columns[:-1], len(sizes), columns[-1], sizes[0] if len(set(sizes)) == 1 else 0, align)


@dataclass(frozen=True)
class Groups:
    """Which slices share a tile.

    Attributes:
        classes: the kernels' ``CLASSES``.
        count: how many groups.
        shortest: the fewest rows that a tile of any group has.
        table: the kernels' ``table``; empty for slices of one width, which need none.
    """

    classes: int
    count: int
    shortest: int
    table: tuple[int, ...]

    @classmethod
    def of(cls, widths: Widths, lanes: int, rows: int) -> Groups:
        """Groups of up to ``lanes`` lanes, in tiles of ``lanes * rows`` elements; a wider slice is a group by itself."""
        members: dict[int, list[int]] = {}
        for number, size in enumerate(widths.sizes):
            members.setdefault((size - 1).bit_length(), []).append(number)
        classes, shortest = 0, lanes * rows
        powers: list[int] = []
        slots: list[int] = []
        firsts: list[int] = []
        # The widest first: they have the most work, and no program should begin with them last.
        for power in sorted(members, reverse=True):
            numbers = members[power]
            depth = min((len(numbers) - 1).bit_length(), max(lanes >> power, 1).bit_length() - 1)
            classes |= (depth + 1) << (4 * power)
            shortest = min(shortest, max(1, lanes * rows >> (depth + power)))
            for start in range(0, len(numbers), 1 << depth):
                firsts.append(len(slots) // 3)
                powers.append(power)
                for slot in range(start, start + (1 << depth)):
                    number = numbers[slot] if slot < len(numbers) else -1
                    slots += (number, widths.columns[number], widths.sizes[number]) if number >= 0 else (0, 0, 0)
        table = () if widths.uniform else (*powers, *firsts, *slots)
        return cls(classes, len(powers), shortest, table)
