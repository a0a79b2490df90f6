"""The widths of a call's slices, and how they are assigned to the slots of tiles."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from ..core.configs.tuning_key import power_of_two

__all__ = ["Groups", "Tile", "Widths", "holding", "widths_of"]


@dataclass(frozen=True, eq=False)
class Widths:
    """The widths of all slices; `widths_of` keeps one for each tuple, so identity is equality.

    Attributes:
        sizes: the width of each slice.
        columns: the first column of each, were they side by side.
        count: the number of slices.
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
    is_uniform = len(set(sizes)) == 1
    return Widths(
        sizes,
        columns=columns[:-1],
        count=len(sizes),
        total=columns[-1],
        uniform=sizes[0] if is_uniform else 0,
        align=align,
    )


# The numbers of parts that a slice may have. More parts mean fewer idle lanes, and fewer threads to
# a row, which exchange its sums. A slice of 80 columns, in one part and in five:
#
#     one part of 128 lanes    [80 columns              |48 idle      ]
#     five parts of 16 lanes   [16][16][16][16][16]
#
# But no thread has more of a row in registers than `_MOST_EACH` elements.
_PARTS = (1, 2, 3, 4, 5, 7)
_MOST_EACH = 28
# The kernel has code for each part of each tile. Twice as many tiles take twenty seconds to
# compile, not four.
_MOST_PARTS_OF_MIXED = 4
_MOST_TILES = 4


class Tile(NamedTuple):
    """The shape ``(slots, rows, lanes)`` of tiles of slices of similar widths.

    A group has one such tile for each part of its slices.

    Attributes:
        slots: slices.
        rows: the rows of each.
        lanes: the lanes of a part.
        parts: the parts of a slice, side by side.
        full: parts without idle lanes in every slice.
        single: whether a slice has a single column.
    """

    slots: int
    rows: int
    lanes: int
    parts: int
    full: int
    single: bool


@dataclass(frozen=True)
class Groups:
    """The tiles of all slices, and the table of the slices in each.

    Attributes:
        tiles: the tiles, first those of slices with many columns. All sizes but ``parts`` are
            powers of two.
        count: the number of groups.
        shortest: the fewest rows that a tile has.
        most: the most elements that a tile has.
        table: for each group the index of its tile, then for each group its first slot, and then
            for each slot the number of its slice, its first column and its width::

                [tile of group 0, 1 ... | first slot of group 0, 1 ... | number, column, width ...]

            Empty for slices of one width, which need none. A group may have fewer slices than
            slots: its last slice then fills the slots that remain. There its number is the
            complement, which is negative, and nothing is stored. If the tile has parts without idle
            lanes, which are loaded without a mask, these slots have the slice's width, and load
            it; else their width is 0, and they load nothing.
    """

    tiles: tuple[Tile, ...]
    count: int
    shortest: int
    most: int
    table: tuple[int, ...]

    @classmethod
    def of(cls, widths: Widths, lanes: int, rows: int, vector: int, warps: int) -> Groups:
        """Groups of up to ``lanes`` lanes, in tiles of about ``lanes * rows`` elements.

        A wider slice is a group by itself. A thread of the ``warps`` loads at most ``vector``
        elements of a part at a time.
        """
        shapes = _shapes(widths, vector, warps)
        members: dict[tuple[int, int], list[int]] = {}
        for number, size in enumerate(widths.sizes):
            shape = next(shape for shape in shapes if math.prod(shape) >= size)
            members.setdefault(shape, []).append(number)
        tiles: list[Tile] = []
        firsts: list[int] = []
        kinds: list[int] = []
        slots: list[int] = []
        # The widest first: they have the most work, and no program should begin with them last.
        for shape in sorted(members, key=math.prod, reverse=True):
            part, parts = shape
            numbers = members[shape]
            together = min(power_of_two(len(numbers)), _most(lanes / (part * parts)))
            narrowest = min(widths.sizes[number] for number in numbers)
            full = min(narrowest // part, parts)
            # A quarter more elements, so that slices in five parts get the rows of slices in four:
            # of 1024 elements in 5 * 64 lanes 4 rows, and not 2.
            tile_rows = _most(1.25 * lanes * rows / (together * part * parts))
            tiles.append(Tile(together, tile_rows, part, parts, full, narrowest == 1))
            for start in range(0, len(numbers), together):
                group = numbers[start : start + together]
                firsts.append(len(slots) // 3)
                kinds.append(len(tiles) - 1)
                for number in group:
                    slots += (number, widths.columns[number], widths.sizes[number])
                # The rest of the slots, with the last slice's complement.
                last = group[-1]
                filler = (~last, widths.columns[last], widths.sizes[last] if full else 0)
                slots += filler * (together - len(group))
        table = () if widths.uniform else (*kinds, *firsts, *slots)
        most = max(math.prod(tile[:4]) for tile in tiles)
        return cls(tuple(tiles), len(kinds), min(tile.rows for tile in tiles), most, table)


def _most(n: float) -> int:
    """The largest power of two up to n; 1 if there is none."""
    return 1 << max(int(n).bit_length() - 1, 0)


def _shapes(widths: Widths, vector: int, warps: int) -> list[tuple[int, int]]:
    """The ``(lanes, parts)`` that hold all widths with the fewest idle lanes, narrowest first.

    Where elements are loaded one by one, a part has at most two per thread: its address serves all
    parts, at constant distances. There are at most `_MOST_TILES` shapes: the one whose slices cost
    the fewest lanes in the next wider shape is dropped, again and again.
    """
    widest = 64 * warps if vector == 1 else None
    if widths.uniform:
        return [holding(widths.uniform, vector, widest)]
    slices = collections.Counter(
        holding(size, vector, widest, _MOST_PARTS_OF_MIXED) for size in widths.sizes
    )
    shapes = sorted(slices, key=math.prod)
    while len(shapes) > _MOST_TILES:
        costs = [
            slices[narrow] * (math.prod(wide) - math.prod(narrow))
            for narrow, wide in itertools.pairwise(shapes)
        ]
        cheapest = costs.index(min(costs))
        dropped = shapes.pop(cheapest)
        # What was the next wider shape is now at the dropped one's index.
        slices[shapes[cheapest]] += slices[dropped]
    return shapes


def holding(
    size: int, vector: int, widest: int | None = None, most: int = _PARTS[-1]
) -> tuple[int, int]:
    """The lanes and parts with the fewest idle lanes for a slice; the fewer parts if equal.

    A part has up to ``widest`` lanes, and a slice up to ``most`` parts. A thread loads at most
    ``vector`` elements of a part at a time. A slice too wide for that is a single part, whatever
    ``widest``.
    """
    shapes = []
    for parts in _PARTS:
        lanes = power_of_two(-(-size // parts))
        fits_registers = parts <= most and parts * vector <= _MOST_EACH
        fits_threads = vector <= lanes <= (widest or lanes)
        if fits_registers and fits_threads:
            shapes.append((lanes, parts))
    return min(shapes, key=math.prod, default=(power_of_two(size), 1))
