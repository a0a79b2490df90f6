"""The widths of a call's slices, and how slots of a tile are dealt out to them."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from ..core.tuning_key import power_of_two

__all__ = ["Groups", "Tile", "Widths", "holding", "widths_of"]


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


# Parts of a slice. More parts mean fewer idle lanes, and fewer threads to a row, which exchange its sums. But no thread has
# more of a row in registers than so many elements.
_PARTS = (1, 2, 3, 4, 5, 7)
_MOST_EACH = 28
# The kernel has code for each part of each tile. Twice as many tiles take twenty seconds to compile, not four.
_MOST_PARTS_OF_MIXED = 4
_MOST_TILES = 4


class Tile(NamedTuple):
    """The shape of tiles of slices of similar widths: ``(slots, rows, lanes)``, as many times as a slice has parts.

    Attributes:
        slots: slices.
        rows: of each.
        lanes: of a part.
        parts: of a slice, side by side.
        full: parts without idle lanes in every slice.
    """

    slots: int
    rows: int
    lanes: int
    parts: int
    full: int


@dataclass(frozen=True)
class Groups:
    """Which slices share a tile.

    Attributes:
        tiles: of slices with many columns first; all powers of two but the parts.
        count: how many groups.
        shortest: the fewest rows that a tile has.
        most: the most elements that a tile has.
        table: for each group the index of its tile and its first slot, and then for each slot the number of its slice, its
            first column and its width; empty for slices of one width, which need none. A group's last slice fills the slots
            that remain, with its number's complement. Where a part has no idle lanes and so no mask, they load as it does,
            but do not store; else they have no columns.
    """

    tiles: tuple[Tile, ...]
    count: int
    shortest: int
    most: int
    table: tuple[int, ...]

    @classmethod
    def of(cls, widths: Widths, lanes: int, rows: int, vector: int, warps: int) -> Groups:
        """Groups of up to ``lanes`` lanes, in tiles of about ``lanes * rows`` elements; a wider slice is a group by itself.

        A thread of the ``warps`` loads at most ``vector`` elements of a part at a time.
        """
        held = _held(widths, vector, warps)
        members: dict[tuple[int, int], list[int]] = {}
        for number, size in enumerate(widths.sizes):
            members.setdefault(next(each for each in held if math.prod(each) >= size), []).append(number)
        tiles: list[Tile] = []
        firsts: list[int] = []
        kinds: list[int] = []
        slots: list[int] = []
        # The widest first: they have the most work, and no program should begin with them last.
        for each in sorted(members, key=math.prod, reverse=True):
            part, parts = each
            numbers = members[each]
            together = min(power_of_two(len(numbers)), _most(lanes / (part * parts)))
            full = min(min(widths.sizes[number] for number in numbers) // part, parts)
            several = _most(1.25 * lanes * rows / (together * part * parts))
            tiles.append(Tile(together, several, part, parts, full))
            for start in range(0, len(numbers), together):
                firsts.append(len(slots) // 3)
                kinds.append(len(tiles) - 1)
                for slot in range(start, start + together):
                    number = numbers[min(slot, len(numbers) - 1)]
                    name, size = number, widths.sizes[number]
                    if slot >= len(numbers):
                        name, size = ~number, size if full else 0
                    slots += (name, widths.columns[number], size)
        table = () if widths.uniform else (*kinds, *firsts, *slots)
        most = max(math.prod(tile[:4]) for tile in tiles)
        return cls(tuple(tiles), len(kinds), min(tile.rows for tile in tiles), most, table)


def _most(n: float) -> int:
    """The largest power of two up to n; 1 if there is none."""
    return 1 << max(int(n).bit_length() - 1, 0)


def _held(widths: Widths, vector: int, warps: int) -> list[tuple[int, int]]:
    """The lanes and parts that hold all widths, the narrowest first: for each those with the fewest idle lanes.

    Where elements are loaded one by one, a part has at most two per thread: its address serves all parts, at constant
    distances. With more than `_MOST_TILES` shapes, the one whose slices cost the fewest lanes in the next wider is dropped,
    again and again.
    """
    widest = 64 * warps if vector == 1 else None
    if widths.uniform:
        return [holding(widths.uniform, vector, widest)]
    held = collections.Counter(holding(size, vector, widest, _MOST_PARTS_OF_MIXED) for size in widths.sizes)
    found = sorted(held, key=math.prod)
    while len(found) > _MOST_TILES:
        more = [held[narrow] * (math.prod(wide) - math.prod(narrow)) for narrow, wide in itertools.pairwise(found)]
        place = more.index(min(more))
        held[found[place + 1]] += held[found[place]]
        del found[place]
    return found


def holding(size: int, vector: int, widest: int | None = None, most: int = _PARTS[-1]) -> tuple[int, int]:
    """Lanes, up to ``widest``, and parts, up to ``most``, with the fewest idle lanes for a slice; the fewer parts if equal.

    A thread loads at most ``vector`` elements of a part at a time. A slice too wide for that is a single part, whatever
    ``widest``.
    """
    found = [
        (power_of_two(-(-size // parts)), parts) for parts in _PARTS if parts <= most and parts * vector <= _MOST_EACH
    ]
    held = [(lanes, parts) for lanes, parts in found if vector <= lanes <= (widest or lanes)]
    return min(held, key=math.prod, default=(power_of_two(size), 1))
