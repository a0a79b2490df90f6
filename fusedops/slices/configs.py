"""Configs of the slices kernels: heuristics by dtype and widest slice, and candidates."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NamedTuple

from ..core.configs.tuning_key import Config, TuningKey, around, in_buckets, power_of_two
from .widths import holding

__all__ = ["candidates", "heuristic", "valid", "widest"]

# Buckets of rows: up to 255; up to 4095; up to 65535.
_FEW, _SOME, _MANY = 1, 2, 3

# Configs for slices whose elements are loaded one by one. Their sums take the most exchanges
# between threads. A program is one warp with a row of several slices, or of one slice if it is
# wider than the tile. Its registers are limited so that all programs run at once: 3595xD9333 takes
# 187 µs forward + backward on an H100. With tiles of 256 lanes, a fourth of the programs waited,
# and it took 404 µs. Slices of equal widths do have 256 lanes, as several slices fit in such a
# tile, and 24 programs per multiprocessor instead of 32.
_ONE_BY_ONE = Config(128, 1, 1, stages=3, per_sm=32, registers=64)
_ONE_BY_ONE_EQUAL = Config(256, 1, 1, stages=3, per_sm=24, registers=80)


class _Case(NamedTuple):
    """What the heuristics depend on.

    Attributes:
        itemsize: bytes of an element.
        width: the width of the widest slice.
        bucket: the bucket of the number of rows.
        equal: whether all widths are equal.
        vectors: whether the widths have a common factor, so that loads are of several elements.
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
        return cls(
            key.itemsize,
            key.cols,
            key.bucket,
            equal="equal" in key.variant,
            vectors="vectors" in key.variant,
            separate="sequence" in key.variant,
        )

    @property
    def is_one_by_one(self) -> bool:
        """Whether elements of 16 bits are loaded one by one, and `_one_by_one` has the config."""
        if self.itemsize != 2 or self.vectors:
            return False
        return not self.equal or 1 < self.width <= 256


def widest(itemsize: int) -> int:
    """The widest slice that a program holds whole."""
    return 4096 if itemsize < 8 else 2048


def _tile(itemsize: int, width: int, elements: int, warps: int, *, equal: bool) -> Config:
    """A tile with ``elements`` per thread, which loads 16 bytes at a time.

    The lanes are the elements that all threads load at a time if the slices are of equal width, and
    fill the tile. Otherwise they are the elements that one warp loads: then fewer lanes are idle,
    the tile has more rows, and slices of ordinary width stay within a warp.
    """
    vector = max(16 // itemsize, 2)
    while width > 32 * warps * elements:
        warps *= 2
    lanes = 32 * vector * (warps if equal else 1)
    return Config(lanes, max(1, 32 * warps * elements // lanes), warps)


def _forward(case: _Case) -> Config:
    """The forward: one tile per program, small ones for few rows."""
    if case.is_one_by_one:
        return _one_by_one(case.width, equal=case.equal)
    if case.equal and _is_of_one_warp(case.itemsize, case.width, forward=True):
        return _of_one_warp(1024 // case.itemsize)
    is_half = case.itemsize == 2
    has_few_rows = case.bucket <= (_SOME if case.equal else _FEW)
    loads_equal_vectors = case.equal and case.vectors
    is_narrow = case.width <= 64 and (not case.vectors or (case.separate and case.equal))
    is_small = has_few_rows or is_narrow
    # The first row whose condition holds.
    elements_per_thread = (
        (case.itemsize == 8 and not case.equal, 4),  # a kernel for several widths spills with more
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
    """The backward: few programs, each with a loop over tiles.

    Widths without a common factor load single elements, whose addresses and masks take the
    registers of half a tile. A kernel for several widths has the registers of its largest part.
    """
    width = case.width
    if case.is_one_by_one:
        return _one_by_one(width, equal=case.equal)
    if case.equal and _is_of_one_warp(case.itemsize, width, forward=False):
        return _of_one_warp(512 // case.itemsize)
    if case.itemsize > 2:
        elements, warps = (8 if case.vectors else 4), (4 if case.equal else 2)
        return _persistent(case, elements, warps, warps_per_sm=16)
    if case.equal:
        return _backward_of_equal(case)
    if width <= 256:
        return Config(256, 1, 1, 3, 16)
    return _persistent(case, 16, 2, warps_per_sm=8)


def _backward_of_equal(case: _Case) -> Config:
    """The backward of slices of equal width in 16 bits."""
    width = case.width
    # The first row whose condition holds: elements per thread, warps, and warps of all programs of
    # a multiprocessor.
    rows = (
        (width > 1024, 32, 2, 8),
        (width > 256, 16, 2, 16),
        (case.bucket <= _FEW, 8, 2, 16),
        (width <= 16, 16, 4, 8),
        (True, 16, 4, 16),
    )
    _, elements, warps, warps_per_sm = next(row for row in rows if row[0])
    if not case.vectors:
        elements = 4
    return _persistent(case, elements, warps, warps_per_sm=warps_per_sm)


def _persistent(case: _Case, elements: int, warps: int, *, warps_per_sm: int) -> Config:
    """A tile in a pipelined loop; a multiprocessor's programs have ``warps_per_sm`` in all."""
    tile = _tile(case.itemsize, case.width, elements, warps, equal=case.equal)
    return replace(tile, stages=3, per_sm=max(1, warps_per_sm // tile.warps))


def _one_by_one(width: int, *, equal: bool) -> Config:
    """The config where elements of 16 bits are loaded one by one: a warp for each 256 columns."""
    if equal:
        return _ONE_BY_ONE_EQUAL
    warps = power_of_two(width) // 256
    if warps <= 1:
        return _ONE_BY_ONE
    return replace(_ONE_BY_ONE, block_n=128 * warps, warps=warps, per_sm=28 // warps, registers=72)


def _is_of_one_warp(itemsize: int, width: int, *, forward: bool) -> bool:
    """Whether slices of equal width are best in programs of one warp.

    Only slices of at most 256 columns and 1 KiB are: in the forward those that a tile holds in
    several parts, and in the backward those whose width is not a power of two.
    """
    if width > min(256, 1024 // itemsize):
        return False
    if not forward:
        return width != power_of_two(width)
    _, parts = holding(width, min(width & -width, 16 // itemsize))
    return parts > 1


def _of_one_warp(lanes: int) -> Config:
    # With more registers fewer of a multiprocessor's programs would run at a time: 80 columns took
    # 59 µs, not 45.
    return Config(lanes, 2, 1, 3, 16, 128)


def heuristic(key: TuningKey) -> Config:
    """The config where no measurement exists."""
    case = _Case.of(key)
    return _forward(case) if key.kernel == "slices_forward" else _backward(case)


def valid(key: TuningKey, config: Config) -> bool:
    """Whether a tile holds a row of the widest slice, in one warp where that is best.

    A table may offer a config that was measured for a wider slice. For slices that are best in one
    warp, a config with more warps is of that kind, and not valid. If elements of 16 bits and
    unequal widths are loaded one by one, a slice wider than the tile gets a tile of its own, with
    at most eight elements per thread, which are 256 columns per warp.
    """
    case = _Case.of(key)
    if config.block_n < 16:
        return False
    if case.itemsize == 2 and not case.equal and not case.vectors:
        return case.width <= 256 * config.warps
    if case.equal and config.warps > 1:
        forward = key.kernel == "slices_forward"
        if _is_of_one_warp(case.itemsize, case.width, forward=forward):
            return False
    return config.block_n * config.rows >= power_of_two(case.width)


def candidates(key: TuningKey) -> list[Config]:
    """The heuristic's config and others to measure; the same set for any number of rows."""
    heuristics = in_buckets(heuristic, key)
    first = heuristics[_MANY]
    tiles = _tiles_around(key, first)
    if key.kernel == "slices_forward":
        # Also the loop over tiles, with the loads of the next rows ahead.
        others = [*tiles, *[replace(first, stages=3, per_sm=per_sm) for per_sm in (4, 8)]]
    else:
        loops = [replace(tile, stages=3, per_sm=max(1, 16 // tile.warps)) for tile in tiles]
        others = around(first, least=2) + loops
    configs = dict.fromkeys([heuristics[key.bucket], *heuristics, *others])
    return [
        config
        for config in configs
        if config in heuristics or (config.warps <= 16 and valid(key, config))
    ]


def _tiles_around(key: TuningKey, first: Config) -> list[Config]:
    """Tiles with half, as many, and twice the elements per thread and warps of ``first``."""
    elements = first.block_n * first.rows // (32 * first.warps)
    equal = _Case.of(key).equal
    counts = [count for count in (elements // 2, elements, elements * 2) if count >= 2]
    choices = list(filter(None, (first.warps // 2, first.warps, first.warps * 2)))
    return [
        _tile(key.itemsize, key.cols, count, warps, equal=equal)
        for count, warps in itertools.product(counts, choices)
    ]
