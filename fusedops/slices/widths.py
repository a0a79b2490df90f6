"""The widths of a call's slices, and their assignment to the slots of tiles."""

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
    """The widths of all slices.

    `widths_of` returns one object for equal sizes, so identity is equality.

    Attributes:
        sizes: the width of each slice.
        columns: the first column of each slice if the slices are side by side.
        count: the number of slices.
        total: the sum of the widths.
        uniform: the width of all slices if they are equal, else 0.
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
    """Returns the object for these widths, always the same for equal sizes."""
    columns = (0, *itertools.accumulate(sizes))
    align = 8
    while any(size % align for size in sizes):
        align //= 2
    is_uniform = len(set(sizes)) == 1
    return Widths(
        sizes=sizes,
        columns=columns[:-1],
        count=len(sizes),
        total=columns[-1],
        uniform=sizes[0] if is_uniform else 0,
        align=align,
    )


# The numbers of parts that a slice may have. With more parts fewer lanes are idle, and fewer
# threads have a row and exchange its sums. A slice of 80 columns, in one part and in five:
#
#     one part of 128 lanes    [80 columns              |48 idle      ]
#     five parts of 16 lanes   [16][16][16][16][16]
_PARTS = (1, 2, 3, 4, 5, 7)
# The most elements of a row that a thread has in registers.
_MOST_EACH = 28
# If widths differ, the most parts of a slice and the most tiles. The kernel has code for each part
# of each tile: with twice as many tiles it takes twenty seconds to compile, not four.
_MOST_PARTS_OF_MIXED = 4
_MOST_TILES = 4


class Tile(NamedTuple):
    """The shape ``(slots, rows, lanes)`` of the tiles of slices with similar widths.

    A program has one such tensor for each part of its slices.

    Attributes:
        slots: the slices of a tile.
        rows: the rows of each slice.
        lanes: the lanes of a part.
        parts: the parts of a slice, side by side.
        full: the number of parts that have no idle lanes in any slice.
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
    """The groups of slices that programs share, and their tiles.

    A group has at most as many slices as its tile has slots.

    Attributes:
        tiles: the shapes of tiles, shapes for wide slices first. All sizes but ``parts`` are powers
            of two.
        count: the number of groups.
        shortest: the fewest rows of a tile.
        most: the most elements of a tile.
        table: for each group the index of its tile, then for each group its first slot, and then
            for each slot the number of its slice, its first column and its width::

                [tile of group 0, 1 ... | first slot of group 0, 1 ... | number, column, width ...]

            The table is empty if all slices have one width. A group may have fewer slices than
            slots. The slots that remain repeat its last slice, with the bitwise complement of its
            number, which is negative: nothing is stored for such a slot. If the tile has parts
            without idle lanes, which are loaded without a mask, the slot has the slice's width and
            loads it; else its width is 0 and it loads nothing.
    """

    tiles: tuple[Tile, ...]
    count: int
    shortest: int
    most: int
    table: tuple[int, ...]

    @classmethod
    def of(cls, widths: Widths, lanes: int, rows: int, vector: int, warps: int) -> Groups:
        """Returns groups of up to ``lanes`` lanes, with tiles of about ``lanes * rows`` elements.

        A wider slice is a group by itself. A program has ``warps``. A thread loads at most
        ``vector`` elements of a part at a time.
        """
        shapes = _shapes(widths, vector, warps)
        members: dict[tuple[int, int], list[int]] = {}
        for number, size in enumerate(widths.sizes):
            shape = next(shape for shape in shapes if math.prod(shape) >= size)
            members.setdefault(shape, []).append(number)
        tiles: list[Tile] = []
        # The three parts of the table.
        tile_indices: list[int] = []
        first_slots: list[int] = []
        slots: list[int] = []
        # Wide slices come first: they have the most work, and should not start last.
        for shape in sorted(members, key=math.prod, reverse=True):
            part_lanes, parts = shape
            numbers = members[shape]
            count = min(power_of_two(len(numbers)), _most(lanes / (part_lanes * parts)))
            narrowest = min(widths.sizes[number] for number in numbers)
            # A quarter more elements, so that slices in five parts have as many rows as slices in
            # four: for 1024 elements in 5 * 64 lanes 4 rows, not 2.
            tile = Tile(
                slots=count,
                rows=_most(1.25 * lanes * rows / (count * part_lanes * parts)),
                lanes=part_lanes,
                parts=parts,
                full=min(narrowest // part_lanes, parts),
                single=narrowest == 1,
            )
            tiles.append(tile)
            for start in range(0, len(numbers), count):
                group = numbers[start : start + count]
                first_slots.append(len(slots) // 3)
                tile_indices.append(len(tiles) - 1)
                for number in group:
                    slots += (number, widths.columns[number], widths.sizes[number])
                # The slots that remain, with the complement of the last slice's number.
                last = group[-1]
                loaded_width = widths.sizes[last] if tile.full else 0
                filler = (~last, widths.columns[last], loaded_width)
                slots += filler * (count - len(group))
        return cls(
            tiles=tuple(tiles),
            count=len(tile_indices),
            shortest=min(tile.rows for tile in tiles),
            most=max(tile.slots * tile.rows * tile.lanes * tile.parts for tile in tiles),
            table=() if widths.uniform else (*tile_indices, *first_slots, *slots),
        )


def _most(n: float) -> int:
    """Returns the largest power of two up to n; 1 if there is none."""
    return 1 << max(int(n).bit_length() - 1, 0)


def _shapes(widths: Widths, vector: int, warps: int) -> list[tuple[int, int]]:
    """Returns the ``(lanes, parts)`` that hold all widths with fewest idle lanes, narrowest first.

    If elements are loaded one by one (``vector`` is 1), a part has at most two per thread: a thread
    computes the addresses of one part, and reaches the other parts at constant distances.

    If there are more than `_MOST_TILES` shapes, shapes are dropped one by one. The slices of a
    dropped shape get the next wider shape. The shape for which this adds the fewest lanes is
    dropped first.
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
        # The next wider shape now has the index of the dropped one.
        slices[shapes[cheapest]] += slices[dropped]
    return shapes


def holding(
    size: int, vector: int, widest: int | None = None, most: int = _PARTS[-1]
) -> tuple[int, int]:
    """Returns the lanes and parts that hold a slice with the fewest idle lanes.

    If several shapes have equally few, the one with the fewest parts is returned. A part has up to
    ``widest`` lanes, and a slice up to ``most`` parts. A thread loads at most ``vector`` elements
    of a part at a time. A slice too wide for these limits is a single part.
    """
    shapes = []
    for parts in _PARTS:
        lanes = power_of_two(-(-size // parts))
        fits_registers = parts <= most and parts * vector <= _MOST_EACH
        fits_threads = vector <= lanes <= (widest or lanes)
        if fits_registers and fits_threads:
            shapes.append((lanes, parts))
    return min(shapes, key=math.prod, default=(power_of_two(size), 1))
