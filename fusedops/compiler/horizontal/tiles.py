"""The tiles of slices of several lengths, and the programs that process them.

Slices whose lengths have the same power of two above them have the same tile. All tiles have about
as many elements, so that a tile of short rows has more of them. Axis 0 of the grid is *units*, axis
1 is *places*. A slice has one or more units, so that all programs have about as much to do.

Without sums over rows a program has one tile. A slice has as many units as its tiles are shorter
than the longest, whatever the number of rows is::

    slice of 16 columns     tiles of 128 rows, one unit       programs 0, 1, 2, ...
    slice of 64 columns     tiles of 32 rows, four units      programs 0, 4, 8, ...
                                                                       1, 5, 9, ...
                                                                       2, 6, 10, ...
                                                                       3, 7, 11, ...

With sums there are as many units as programs that run at a time, in the ratio of the slices'
columns, and one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...core.configs.tuning_key import Config, block_holding

__all__ = ["Tile", "Tiling"]


class Tile(NamedTuple):
    """The tile of slices of similar lengths: its columns and rows."""

    columns: int
    rows: int


@dataclass(frozen=True)
class Tiling:
    """The tiles of all slices.

    Attributes:
        tiles: the different tiles, the widest first.
        most_rows: the most rows of a tile.
        units: for each unit, its tile's index, its slice, its index among the slice's units, and
            their number. Wide slices come first, so that they do not start last.
        parts: for each slice, the number of its units.
    """

    tiles: tuple[Tile, ...]
    most_rows: int
    units: tuple[tuple[int, int, int, int], ...]
    parts: tuple[int, ...]

    @property
    def is_even(self) -> bool:
        """Whether all slices have one tile, and as many units, in their order."""
        return len(self.tiles) == len(set(self.parts)) == 1

    @classmethod
    def of(cls, lengths: Sequence[int], config: Config, programs: int = 0, rows: int = 0) -> Tiling:
        """Return the tiles of slices of these lengths.

        Args:
            lengths: the columns of each slice.
            config: the config; its rows are those of a tile of ``config.block_n`` columns.
            programs: with sums over rows, the number of programs that run at a time; 1 if each
                slice has one program, for all its rows.
            rows: with sums over rows, the most rows of a slice; 0 for any number.
        """
        elements = config.block_n * config.rows
        widths = [block_holding(length) for length in lengths]
        tiles = [Tile(width, max(elements // width, 1)) for width in sorted(set(widths))[::-1]]
        rows_of = {tile.columns: tile.rows for tile in tiles}
        most = max(rows_of.values())
        if not programs:
            parts = [most // rows_of[width] for width in widths]
        elif programs == 1:
            parts = [1] * len(widths)
        else:
            total = sum(widths)
            parts = [max(round(programs * width / total), 2) for width in widths]
            if rows:
                limits = [max(-(-rows // rows_of[width]), 2) for width in widths]
                parts = list(map(min, parts, limits))
        index = {tile.columns: number for number, tile in enumerate(tiles)}
        order = sorted(range(len(lengths)), key=lambda k: -widths[k])
        units = [(index[widths[k]], k, part, parts[k]) for k in order for part in range(parts[k])]
        return cls(tuple(tiles), most, tuple(units), tuple(parts))
