"""Configs of the slices kernels: heuristics by dtype and widest slice, and candidates."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NamedTuple

from ..core.configs.tuning_key import Config, TuningKey, around, in_buckets, power_of_two
from .widths import holding

__all__ = ["candidates", "heuristic", "valid", "widest"]

# Buckets of the number of rows: up to 255; up to 4095; up to 65535.
_FEW, _SOME, _MANY = 1, 2, 3

# Configs for slices whose elements are loaded one by one. Their sums need the most exchanges
# between threads. A program is one warp, with a row of several slices, or of one slice that is
# wider than the tile. Its registers are limited so that all programs run at once: 3595xD9333 takes
# 187 µs forward + backward on an H100. With tiles of 256 lanes it took 404 µs, because a fourth of
# the programs did not run at once. Slices of equal widths have tiles of 256 lanes all the same,
# because several slices fit in such a tile; they have 24 programs per multiprocessor, not 32.
_ONE_BY_ONE = Config(128, rows=1, warps=1, stages=3, per_sm=32, registers=64)
_ONE_BY_ONE_EQUAL = Config(256, rows=1, warps=1, stages=3, per_sm=24, registers=80)


class _Case(NamedTuple):
    """The properties of a call on which the heuristics depend.

    Attributes:
        itemsize: bytes of an element.
        width: the width of the widest slice.
        bucket: the bucket of the number of rows.
        equal: whether all widths are equal.
        vectors: whether the widths have a common factor, so that a load has several elements.
        separate: whether the slices are separate tensors.
    """

    itemsize: int
    width: int
    bucket: int
    equal: bool
    vectors: bool
    separate: bool

    @classmethod
    def of(cls, key: TuningKey) -> _Case:
        """Returns the properties of a key's calls."""
        return cls(
            itemsize=key.itemsize,
            width=key.cols,
            bucket=key.bucket,
            equal="equal" in key.variant,
            vectors="vectors" in key.variant,
            separate="sequence" in key.variant,
        )

    @property
    def is_one_by_one(self) -> bool:
        """Whether the config is `_one_by_one`'s: elements of 16 bits are loaded one by one."""
        if self.itemsize != 2 or self.vectors:
            return False
        return not self.equal or 1 < self.width <= 256


def widest(itemsize: int) -> int:
    """Returns the width of the widest slice that a program holds whole."""
    return 4096 if itemsize < 8 else 2048


def _tile(itemsize: int, width: int, elements: int, warps: int, *, equal: bool) -> Config:
    """Returns a tile with ``elements`` per thread; a thread loads 16 bytes at a time.

    For slices of equal width, the tile has a lane for each element that all threads load at a time.
    For other slices, it has a lane for each element that one warp loads at a time. So fewer lanes
    are idle, the tile has more rows, and slices of ordinary width stay within a warp.
    """
    vector = max(16 // itemsize, 2)
    while width > 32 * warps * elements:
        warps *= 2
    lanes = 32 * vector * (warps if equal else 1)
    return Config(lanes, max(1, 32 * warps * elements // lanes), warps)


def _forward(case: _Case) -> Config:
    """Returns the forward's config: one tile per program, and a small one for few rows."""
    if case.is_one_by_one:
        return _one_by_one(case.width, equal=case.equal)
    if case.equal and _is_of_one_warp(case.itemsize, case.width, forward=True):
        return _of_one_warp(1024 // case.itemsize)
    is_half = case.itemsize == 2
    most_of_few = _SOME if case.equal else _FEW
    has_few_rows = case.bucket <= most_of_few
    loads_equal_vectors = case.equal and case.vectors
    is_small_if_narrow = not case.vectors or (case.separate and case.equal)
    is_narrow = case.width <= 64
    is_small = has_few_rows or (is_narrow and is_small_if_narrow)
    # Conditions with numbers of elements per thread: the first condition that holds determines it.
    elements_per_thread = (
        # With more elements a kernel for several widths spills.
        (case.itemsize == 8 and not case.equal, 4),
        (not is_half, 8),
        (is_small and loads_equal_vectors, 16),
        (is_small, 8),
        (loads_equal_vectors, 32),
        (True, 16),
    )
    elements = next(count for holds, count in elements_per_thread if holds)
    has_two_warps = has_few_rows and case.equal and is_half
    warps = 2 if has_two_warps else 4
    return _tile(case.itemsize, case.width, elements, warps, equal=case.equal)


def _backward(case: _Case) -> Config:
    """Returns the backward's config: few programs, each with a loop over tiles.

    With widths without a common factor, elements are loaded one by one. Their addresses and masks
    take as many registers as half a tile. A kernel for several widths needs the registers of its
    largest part.
    """
    width = case.width
    if case.is_one_by_one:
        return _one_by_one(width, equal=case.equal)
    if case.equal and _is_of_one_warp(case.itemsize, width, forward=False):
        return _of_one_warp(512 // case.itemsize)
    if case.itemsize > 2:
        elements = 8 if case.vectors else 4
        warps = 4 if case.equal else 2
        return _persistent(case, elements, warps, warps_per_sm=16)
    if case.equal:
        return _backward_of_equal(case)
    if width <= 256:
        return Config(256, rows=1, warps=1, stages=3, per_sm=16)
    return _persistent(case, elements=16, warps=2, warps_per_sm=8)


def _backward_of_equal(case: _Case) -> Config:
    """Returns the backward's config for slices of equal width in 16 bits."""
    width = case.width
    # The first condition that holds determines three numbers: elements per thread, warps of a
    # program, and warps of all programs of a multiprocessor.
    rules = (
        (width > 1024, 32, 2, 8),
        (width > 256, 16, 2, 16),
        (case.bucket <= _FEW, 8, 2, 16),
        (width <= 16, 16, 4, 8),
        (True, 16, 4, 16),
    )
    _, elements, warps, warps_per_sm = next(rule for rule in rules if rule[0])
    if not case.vectors:
        elements = 4
    return _persistent(case, elements, warps, warps_per_sm=warps_per_sm)


def _persistent(case: _Case, elements: int, warps: int, *, warps_per_sm: int) -> Config:
    """Returns a tile for a pipelined loop, in programs with ``warps_per_sm`` warps in all."""
    tile = _tile(case.itemsize, case.width, elements, warps, equal=case.equal)
    return replace(tile, stages=3, per_sm=max(1, warps_per_sm // tile.warps))


def _one_by_one(width: int, *, equal: bool) -> Config:
    """Returns the config for elements of 16 bits that are loaded one by one.

    A program has one warp for each 256 columns.
    """
    if equal:
        return _ONE_BY_ONE_EQUAL
    warps = power_of_two(width) // 256
    if warps <= 1:
        return _ONE_BY_ONE
    return replace(_ONE_BY_ONE, block_n=128 * warps, warps=warps, per_sm=28 // warps, registers=72)


def _is_of_one_warp(itemsize: int, width: int, *, forward: bool) -> bool:
    """Returns whether programs of one warp are fastest for slices of equal width.

    Only slices of at most 256 columns and 1 KiB have such programs: in the forward, if a tile holds
    them in several parts, and in the backward, if their width is not a power of two.
    """
    if width > min(256, 1024 // itemsize):
        return False
    if not forward:
        return width != power_of_two(width)
    largest_factor = width & -width  # the largest power of two that divides the width
    _, parts = holding(width, vector=min(largest_factor, 16 // itemsize))
    return parts > 1


def _of_one_warp(lanes: int) -> Config:
    # Without the limit of registers fewer programs of a multiprocessor would run at a time: 80
    # columns took 59 µs, not 45.
    return Config(lanes, rows=2, warps=1, stages=3, per_sm=16, registers=128)


def heuristic(key: TuningKey) -> Config:
    """Returns the config for a key that was not measured."""
    case = _Case.of(key)
    return _forward(case) if key.kernel == "slices_forward" else _backward(case)


def valid(key: TuningKey, config: Config) -> bool:
    """Returns whether a kernel may have the config: its tile holds a row of the widest slice.

    The config may come from a table's entry for wider slices. So a config of several warps is not
    valid for slices for which one warp is fastest. If elements of 16 bits and unequal widths are
    loaded one by one, a slice wider than the tile gets a tile of its own, with at most eight
    elements per thread: 256 columns per warp.
    """
    case = _Case.of(key)
    if config.block_n < 16:
        return False
    is_mixed_without_vectors = not (case.equal or case.vectors)
    if case.itemsize == 2 and is_mixed_without_vectors:
        return case.width <= 256 * config.warps
    if case.equal and config.warps > 1:
        forward = key.kernel == "slices_forward"
        if _is_of_one_warp(case.itemsize, case.width, forward=forward):
            return False
    return config.block_n * config.rows >= power_of_two(case.width)


def candidates(key: TuningKey) -> list[Config]:
    """Returns the heuristic's config and others to measure: one set for all numbers of rows."""
    heuristics = in_buckets(heuristic, key)
    # The neighbours of this bucket's config are candidates for all buckets, so that all buckets
    # have the same set.
    center = heuristics[_MANY]
    tiles = _tiles_around(key, center)
    if key.kernel == "slices_forward":
        # Also persistent programs, which load the next rows ahead.
        loops = [replace(center, stages=3, per_sm=per_sm) for per_sm in (4, 8)]
        others = tiles + loops
    else:
        loops = [replace(tile, stages=3, per_sm=max(1, 16 // tile.warps)) for tile in tiles]
        others = around(center, least=2) + loops
    chosen = [config for config in others if config.warps <= 16 and valid(key, config)]
    return list(dict.fromkeys([heuristics[key.bucket], *heuristics, *chosen]))


def _tiles_around(key: TuningKey, center: Config) -> list[Config]:
    """Returns ``center`` with half, as many, and twice the elements per thread and the warps."""
    elements = center.block_n * center.rows // (32 * center.warps)
    equal = _Case.of(key).equal
    counts = [count for count in (elements // 2, elements, elements * 2) if count >= 2]
    warp_counts = [warps for warps in (center.warps // 2, center.warps, center.warps * 2) if warps]
    return [
        _tile(key.itemsize, key.cols, count, warps, equal=equal)
        for count, warps in itertools.product(counts, warp_counts)
    ]
