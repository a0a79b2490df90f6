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

A tile of short rows of one tensor may have several *neighbouring* slices, so that its accesses are
contiguous beyond a slice. Axis 0 of the tile is rows of slices. Each program has those slices::

    tile of 64 columns, 2 rows, 3 slices    row 0: [slice 3      ][slice 4      ][slice 5      ]
                                            row 1: [slice 3      ][slice 4      ][slice 5      ]

*Ragged* slices have lengths of which some are no multiple of the elements of a vector load, 16
bytes. Their elements are loaded one by one or in short vectors, so that instructions and not bytes
take the time, and each idle lane costs as much as a used one. So a long row is divided into *parts*
side by side. All but the last are full, and need no masks::

    one tile of 256 lanes      [130 columns                 |126 idle                  ]
    three parts of 64 lanes    [64          ][64          ][2 |62 idle  ]

A program has few warps, so that the sums of a row are exchanged within a warp, and loops over the
tiles of its unit, forward and backward.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch

from ...core.configs.tuning_key import Config, block_holding

__all__ = ["Tile", "Tiling", "is_ragged"]

# The bytes of a vector load, and the most elements that count for it: see `is_ragged`.
_VECTOR_BYTES, _VECTOR_ELEMENTS = 16, 8
# The lanes of a part for each warp of a program: two elements of each thread.
_LANES_OF_WARP = 64
# The most tiles of a kind: a kernel has code for each, and compiles in seconds.
_MOST_TILES = 4
# The cost of a tile of a row beside that of its lanes, in lanes: its sums and addresses. It is the
# difference between the instructions of rows of one part and of several, compiled for sm_90.
_LANES_OF_ROW = 32
# The rows of a tile of slices of one column, which take one lane each.
_ROWS_OF_COLUMN = 64


def is_ragged(lengths: Sequence[int], dtypes: Sequence[torch.dtype]) -> bool:
    """Return whether a length is no multiple of the elements that a vector load has.

    Args:
        lengths: the columns of each slice.
        dtypes: the dtypes of the inputs.
    """
    itemsize: int = min(map(attrgetter("itemsize"), dtypes))
    elements = min(_VECTOR_BYTES // itemsize, _VECTOR_ELEMENTS)
    factor: int = math.gcd(*lengths)
    return factor % elements > 0


class Tile(NamedTuple):
    """The tile of slices of similar lengths.

    Attributes:
        columns: its columns; of ragged slices those of a part.
        rows: its rows.
        parts: the number of parts of a row, side by side.
        full: the number of parts without idle lanes in any of the slices.
        kind: the index of the slices' kind: see `source.kernel_of_slices`.
        slices: the number of neighbouring slices, a power of two.
    """

    columns: int
    rows: int
    parts: int = 1
    full: int = 0
    kind: int = 0
    slices: int = 1


@dataclass(frozen=True)
class Tiling:
    """The tiles of all slices.

    Attributes:
        tiles: the different tiles, the widest first.
        most_rows: the most rows of a tile.
        units: for each unit, its tile's index, its first slice, its index among the slice's units,
            and their number. Wide slices come first, so that they do not start last.
        parts: for each slice, the number of its units.
        cost_of_row: the cost of a tile of a row beside that of its lanes, in lanes.
    """

    tiles: tuple[Tile, ...]
    most_rows: int
    units: tuple[tuple[int, int, int, int], ...]
    parts: tuple[int, ...]
    cost_of_row: int = 0

    @property
    def tile_of(self) -> tuple[int, ...]:
        """The index of each slice's tile."""
        tiles = {k: tile for tile, k, _, _ in self.units}
        return tuple([tiles[k] for k in range(len(self.parts))])

    def cost_of(self, tile: Tile) -> int:
        """Return the time that a row of a tile takes, in lanes."""
        return tile.columns * tile.parts + self.cost_of_row

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
        widths = list(map(block_holding, lengths))
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

    @classmethod
    def of_neighbours(
        cls, lengths: Sequence[int], config: Config, programs: int = 0, rows: int = 0
    ) -> Tiling:
        """Return the tiles of slices of equal lengths that are side by side.

        Args:
            lengths: the columns of each slice.
            config: the config; a tile has the slices that ``config.block_n`` columns hold, or
                fewer, so that all tiles have as many.
            programs: as for `of`.
            rows: as for `of`.
        """
        width = block_holding(lengths[0])
        slices = math.gcd(config.block_n // width, len(lengths))
        tile_rows = max(config.block_n * config.rows // (width * slices), 1)
        groups = len(lengths) // slices
        parts = 1
        if programs > 1:
            parts = max(round(programs / groups), 2)
            if rows:
                parts = min(parts, max(-(-rows // tile_rows), 2))
        firsts = range(0, len(lengths), slices)
        units = [(0, first, part, parts) for first in firsts for part in range(parts)]
        tile = Tile(width, tile_rows, slices=slices)
        return cls((tile,), tile_rows, tuple(units), (parts,) * len(lengths))

    @classmethod
    def of_ragged(
        cls,
        lengths: Sequence[int],
        kinds: Sequence[int],
        config: Config,
        programs: int,
        rows: int = 0,
        least: int = 1,
    ) -> Tiling:
        """Return the tiles of ragged slices.

        Args:
            lengths: the columns of each slice.
            kinds: the index of each slice's kind.
            config: the config; a tile has ``config.block_n * config.rows`` elements.
            programs: the number of programs that run at a time.
            rows: the most rows of a slice; 0 for any number.
            least: the least number of units of a slice.
        """
        shapes = _shapes(lengths, kinds, config.warps)
        members: dict[_Shape, list[int]] = {}
        for k, shape in enumerate(shapes):
            members.setdefault(shape, []).append(k)
        order = sorted(members, reverse=True)
        # The programs run at the same time if they are not more than ``programs``: one that waits
        # for another's end would take as long again.
        share = programs / sum(map(attrgetter("cost"), shapes))
        tiles = []
        most_rows = 1
        units: list[tuple[int, int, int, int]] = []
        units_of = [0] * len(lengths)
        for number, shape in enumerate(order):
            shortest = min(map(lengths.__getitem__, members[shape]))
            count = _rows(shape, shortest, config)
            most_rows = max(most_rows, count)
            full = shortest // shape.columns
            tiles.append(Tile(shape.columns, count, shape.parts, full, shape.kind))
            most = -(-rows // count) if rows else programs
            of_slice = max(min(int(share * shape.cost), most), least)
            for k in members[shape]:
                units_of[k] = of_slice
                units += [(number, k, unit, of_slice) for unit in range(of_slice)]
        return cls(tuple(tiles), most_rows, tuple(units), tuple(units_of), _LANES_OF_ROW)


class _Shape(NamedTuple):
    """The shape of a ragged slice's tiles, and the kind of the slice; shapes are in order.

    Attributes:
        lanes: those of a row.
        columns: the lanes of a part.
        kind: the index of the slice's kind.
    """

    lanes: int
    columns: int
    kind: int

    @property
    def cost(self) -> int:
        """The time that a row takes, in lanes."""
        return self.lanes + _LANES_OF_ROW

    @property
    def parts(self) -> int:
        """The number of parts of a row."""
        return self.lanes // self.columns


def _shapes(lengths: Sequence[int], kinds: Sequence[int], warps: int) -> list[_Shape]:
    """Return the shape of each slice.

    If a kind has more than `_MOST_TILES` shapes, shapes are dropped one by one. The slices of a
    dropped shape get the next wider one. The shape for which this adds the fewest lanes is dropped
    first.
    """
    shapes = [_shape(*of_slice, warps) for of_slice in zip(lengths, kinds, strict=True)]
    counts = collections.Counter(shapes)
    wider: dict[_Shape, _Shape] = {}
    for kind in sorted(set(kinds)):
        remaining = sorted([shape for shape in counts if shape.kind == kind])
        while len(remaining) > _MOST_TILES:
            added = [
                counts[narrow] * (wide.lanes - narrow.lanes)
                for narrow, wide in itertools.pairwise(remaining)
            ]
            place = added.index(min(added))
            dropped = remaining.pop(place)
            wider[dropped] = remaining[place]
            counts[remaining[place]] += counts[dropped]
    for k, shape in enumerate(shapes):
        while shape in wider:
            shape = wider[shape]
        shapes[k] = shape
    return shapes


def _shape(length: int, kind: int, warps: int) -> _Shape:
    """Return the shape with the fewest lanes."""
    columns = _LANES_OF_WARP * warps
    if length > columns:
        return _Shape(-(-length // columns) * columns, columns, kind)
    columns = block_holding(length)
    return _Shape(columns, columns, kind)


def _rows(shape: _Shape, shortest: int, config: Config) -> int:
    """Return the rows of a tile: a power of two.

    Several rows have at most half the elements of a config's tile, because registers hold the
    addresses of each.
    """
    if shortest == 1:
        return _ROWS_OF_COLUMN
    rows = config.block_n * config.rows // (2 * shape.lanes)
    return 1 << max(rows.bit_length() - 1, 0)
