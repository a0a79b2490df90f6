"""Slices with numbers of rows of their own.

Where all slices have equal rows, a kernel gets their number as an argument. Where they differ, it
reads them from a table of the call, and so does it the units of each slice: see `tiles`. A program
finds its slice by the first unit of each::

    table    [the first unit of each slice, and the number of all | the rows of each slice
              | for each `Offsets`: that of each slice]

    3 slices of 70, 0 and 5 rows, in tiles of 32 rows, without sums:
             [0, 3, 3, 4 | 70, 0, 5 | ...]      program 3 has all rows of slice 2

Neither the source nor a constant of a kernel depends on the table, so other numbers of rows compile
no kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from ...core.configs.tuning_key import block_holding
from .tiles import Tiling

__all__ = ["Offsets", "RowTable", "Rows", "RowsInTable", "row_table"]

# The number of rows of all slices if it is one, else those of each slice.
Rows = int | tuple[int, ...]
# The most elements that an offset is known to be a multiple of.
_MOST_ALIGNED = 16


class Offsets(NamedTuple):
    """Where the slices begin in a buffer with all slices, one after the other.

    Attributes:
        by_unit: whether a slice has elements for each of its units, else for each of its rows.
        sizes: for each slice, the elements of a row, or of a unit.
    """

    by_unit: bool
    sizes: tuple[int, ...]

    @property
    def factor(self) -> int:
        """A power of two that divides all sizes; the table has offsets in units of it."""
        factor = _MOST_ALIGNED
        while any(size % factor for size in self.sizes):
            factor //= 2
        return factor


class RowsInTable:
    """The expressions of what a kernel reads from a table of rows.

    Attributes:
        offsets: the offsets that the table has, in their order.
    """

    def __init__(self, offsets: Sequence[Offsets] = ()) -> None:
        self.offsets = list(offsets)

    @property
    def rows(self) -> str:
        """The number of rows of the slice."""
        return "tl.load(slice_rows + SLICES + 1 + slice_number)"

    def slice_of_unit(self, count: int) -> list[str]:
        """Return the lines that count the slices whose first unit is not after this one."""
        return [
            f"slice_places = tl.arange(0, {block_holding(count)})",
            "slice_exists = slice_places < SLICES",
            "slice_firsts = tl.load(slice_rows + slice_places, mask=slice_exists, other=0)",
            "slice_begins = slice_exists & (slice_firsts <= slice_unit)",
            "slice_number = tl.sum(slice_begins.to(tl.int64), axis=0) - 1",
        ]

    def units(self) -> list[str]:
        """Return the lines that read the first unit of the slice, and the number of its units."""
        return [
            "slice_first = tl.load(slice_rows + slice_number)",
            "programs = (tl.load(slice_rows + 1 + slice_number) - slice_first).to(tl.int32)",
        ]

    def offset(self, sizes: Sequence[int], *, by_unit: bool = False) -> str:
        """Return the expression of the slice's offset in a buffer."""
        offsets = Offsets(by_unit, tuple(sizes))
        if offsets not in self.offsets:
            self.offsets.append(offsets)
        column = self.offsets.index(offsets) + 2
        text = f"tl.load(slice_rows + {column} * SLICES + 1 + slice_number)"
        return f"{text} * {offsets.factor}"


@dataclass(frozen=True)
class RowTable:
    """The table of some numbers of rows.

    Attributes:
        numbers: those of the table.
        units: the number of all units, which is the number of programs.
        partials: the number of elements that have offsets by unit, of all slices.
    """

    numbers: tuple[int, ...]
    units: int
    partials: int


def row_table(
    rows: Sequence[int],
    tiling: Tiling,
    offsets: Sequence[Offsets],
    *,
    programs: int,
    least: int,
) -> RowTable:
    """Return the table of the slices' rows.

    Args:
        rows: the rows of each slice.
        tiling: the tiles of the slices.
        offsets: those that the kernels read.
        programs: the number of programs that run at a time, and loop over tiles; 0 if each program
            has one tile; 1 if each slice has one program.
        least: the least number of units of a slice, where programs loop.
    """
    units = _units(rows, tiling, programs, least)
    firsts = list(itertools.accumulate(units, initial=0))
    numbers = [*firsts, *rows]
    partials = 0
    for offset in offsets:
        counts = units if offset.by_unit else rows
        ends = list(itertools.accumulate(map(mul, counts, offset.sizes), initial=0))
        numbers += [end // offset.factor for end in ends[:-1]]
        if offset.by_unit:
            partials = ends[-1]
    return RowTable(tuple(numbers), firsts[-1], partials)


def _units(rows: Sequence[int], tiling: Tiling, programs: int, least: int) -> list[int]:
    """Return the number of units of each slice; the arguments are those of `row_table`."""
    if programs == 1:
        return [1] * len(rows)
    tiles = [tiling.tiles[index] for index in tiling.tile_of]
    counts = [-(-count // tile.rows) for count, tile in zip(rows, tiles, strict=True)]
    if not programs:
        return counts
    costs = [count * tiling.cost_of(tile) for count, tile in zip(rows, tiles, strict=True)]
    total = max(sum(costs), 1)
    shares = [max(programs * cost // total, least) for cost in costs]
    return [min(share, max(count, least)) for share, count in zip(shares, counts, strict=True)]
