"""Configs of the slices kernels: heuristics from dtype and widest slice, and the candidates to measure."""

from __future__ import annotations

from dataclasses import replace

from ..core.tuning_key import Config, TuningKey, around, in_buckets, power_of_two
from .widths import holding

__all__ = ["candidates", "heuristic", "valid", "widest"]

# Buckets of rows: up to 255; up to 4095; up to 65535.
_FEW, _SOME, _MANY = 1, 2, 3

# Elements are loaded one by one, and their sums take the most exchanges between threads. So a program is one warp with one
# row, of wider slices one slice's. Its registers are limited so that all programs run at once: 3595xD9333 takes 187 µs forward
# + backward on an H100; with tiles of 256 lanes, where a fourth of the programs waited, it took 404.
# Slices of one width, of which several fit in a tile, have three quarters of the programs.
_OF_ELEMENTS = Config(128, 1, 1, 3, 32, 64)
_OF_ELEMENTS_ALIKE = Config(256, 1, 1, 3, 24, 80)


def widest(itemsize: int) -> int:
    """The widest slice that a program holds whole."""
    return 4096 if itemsize < 8 else 2048


def _tile(itemsize: int, width: int, each: int, warps: int, *, equal: bool) -> Config:
    """A tile with ``each`` elements per thread.

    Its lanes are what one row of threads loads with 16 bytes each: slices of ordinary width then stay within a warp,
    and slices of equal width fill the lanes. For unequal widths it has fewer lanes, of which fewer are idle, and more
    rows.
    """
    vector = max(16 // itemsize, 2)
    while width > 32 * warps * each:
        warps *= 2
    lanes = 32 * vector * (warps if equal else 1)
    return Config(lanes, max(1, 32 * warps * each // lanes), warps)


def _forward(itemsize: int, width: int, bucket: int, *, equal: bool, vectors: bool, apart: bool) -> Config:
    """The forward: one tile per program, small ones for few rows.

    ``width`` is the widest slice's; ``equal``: all widths are equal; ``vectors``: the widths have a common factor;
    ``apart``: the slices are separate tensors.
    """
    if itemsize == 2 and not vectors and (1 < width <= 256 or not equal):
        return _of_elements(width, equal=equal)
    if equal and _is_of_one_warp(itemsize, width, forward=True):
        return _of_one_warp(1024 // itemsize)
    few = bucket <= (_SOME if equal else _FEW)
    each = 32 if equal and vectors else 16
    if itemsize > 2:
        each = 8 if itemsize == 4 or equal else 4  # in fp64 a kernel for several widths spills with more
    if itemsize == 2 and (few or (apart and equal and width <= 64) or (not vectors and width <= 64)):
        each = 16 if equal and vectors else 8
    return _tile(itemsize, width, each, 2 if few and equal and itemsize == 2 else 4, equal=equal)


def _backward(itemsize: int, width: int, bucket: int, *, equal: bool, vectors: bool) -> Config:
    """The backward: few programs, each with a loop over tiles.

    Widths without a common factor load single elements, whose addresses and masks take the registers of half a tile. A
    kernel for several widths has the registers of its largest part.
    """
    if itemsize == 2 and not vectors and (1 < width <= 256 or not equal):
        return _of_elements(width, equal=equal)
    if equal and _is_of_one_warp(itemsize, width, forward=False):
        return _of_one_warp(512 // itemsize)
    if itemsize > 2:
        tile = _tile(itemsize, width, 8 if vectors else 4, 4 if equal else 2, equal=equal)
        return replace(tile, stages=3, per_sm=max(1, 16 // tile.warps))
    if equal:
        each, warps = (32 if width > 1024 else 16, 2) if width > 256 else (16, 4)
        if bucket <= _FEW and width <= 256:
            each, warps = 8, 2
        tile = _tile(itemsize, width, each if vectors else 4, warps, equal=True)
        crowd = 8 if (bucket > _FEW and width <= 16) or each == 32 else 16
        return replace(tile, stages=3, per_sm=max(1, crowd // tile.warps))
    if width <= 256:
        return Config(256, 1, 1, 3, 16)
    tile = _tile(itemsize, width, 16, 2, equal=False)
    return replace(tile, stages=3, per_sm=max(1, 8 // tile.warps))


def _of_elements(width: int, *, equal: bool) -> Config:
    """In 16 bits, where no 16 bytes are aligned; a warp for each 256 columns."""
    if equal:
        return _OF_ELEMENTS_ALIKE
    warps = power_of_two(width) // 256
    if warps <= 1:
        return _OF_ELEMENTS
    return replace(_OF_ELEMENTS, block_n=128 * warps, warps=warps, per_sm=28 // warps, registers=72)


def _is_of_one_warp(itemsize: int, width: int, *, forward: bool) -> bool:
    """Whether slices of one width are best in programs of one warp.

    Forward those in parts, backward all but those of a power of two lanes; up to 256 columns, or 1 KiB.
    """
    _, parts = holding(width, min(width & -width, 16 // itemsize))
    return width <= min(256, 1024 // itemsize) and (parts > 1 if forward else width != power_of_two(width))


def _of_one_warp(lanes: int) -> Config:
    # With more registers fewer of a multiprocessor's programs would run at a time: 80 columns took 59 µs, not 45.
    return Config(lanes, 2, 1, 3, 16, 128)


def heuristic(key: TuningKey) -> Config:
    """The config where no measurement exists."""
    width, bucket, variant = key.cols, key.bucket, key.variant
    equal, vectors = "equal" in variant, "vectors" in variant
    if key.kernel == "slices_forward":
        return _forward(key.itemsize, width, bucket, equal=equal, vectors=vectors, apart="sequence" in variant)
    return _backward(key.itemsize, width, bucket, equal=equal, vectors=vectors)


def valid(key: TuningKey, config: Config) -> bool:
    """A tile holds a row of the widest slice, in one warp where that is best: more were measured for a wider slice.

    Where elements are loaded one by one, a slice wider than the tile gets one of its own: at most eight elements per thread.
    """
    equal = "equal" in key.variant
    if key.itemsize == 2 and not equal and "vectors" not in key.variant:
        return config.block_n >= 16 and key.cols <= 256 * config.warps
    if equal and config.warps > 1 and _is_of_one_warp(key.itemsize, key.cols, forward=key.kernel == "slices_forward"):
        return False
    return config.block_n >= 16 and config.block_n * config.rows >= power_of_two(key.cols)


def candidates(key: TuningKey) -> list[Config]:
    """The heuristic's config and others to measure; the same set for any number of rows."""
    heuristics = in_buckets(heuristic, key)
    first = heuristics[_MANY]
    each, equal = first.block_n * first.rows // (32 * first.warps), "equal" in key.variant
    sizes = [
        (e, warps) for e in (each // 2, each, each * 2) for warps in (first.warps // 2, first.warps, first.warps * 2)
    ]
    tiles = [_tile(key.itemsize, key.cols, e, warps, equal=equal) for e, warps in sizes if e >= 2 and warps]
    if key.kernel == "slices_forward":
        others = [*tiles, *[replace(first, stages=3, per_sm=per_sm) for per_sm in (4, 8)]]
    else:
        others = around(first, least=2) + [replace(t, stages=3, per_sm=max(1, 16 // t.warps)) for t in tiles]
    return list(
        dict.fromkeys(c for c in (heuristics[key.bucket], *heuristics, *others) if c.warps <= 16 and valid(key, c))
    )
