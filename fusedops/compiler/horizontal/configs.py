"""Configs of kernels of many slices: a heuristic, and the candidates to measure.

The items of the tuning key's variant are texts:

    0    the number of sums over rows
    1    the number of whole tensors that are read or written
    2    whether random numbers are drawn
    3    "mixed" or "equal" lengths, or the most slices that a tile may have: "16 neighbours"
    4    "elements" if the slices are ragged, else "vectors": see `tiles.is_ragged`
    5    the digest of the function

The key's columns are those of the longest slice.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from ...core.configs.tuning_key import Config, TuningKey, around, block_holding, in_buckets

__all__ = ["candidates", "heuristic", "valid"]

# The bytes of a program's tile in a forward, by whether there are 256 rows or more. On an H200,
# LayerNorm and tanh, forward:
#
#   elements, warps             1024, 4    2048, 4    4096, 4
#   16 x 128 columns, fp32      18.8 us    19.4       20.5
#   64 x 64 columns, bf16       25.8       26.3       25.3
#   40 of 8 to 256, bf16        46.6       43.0       41.2
_BYTES = {True: 8192, False: 1024}
_HALF_BYTES = {True: 4096, False: 2048}
# The elements of a tile in a backward that sums over rows, and loads its next rows ahead. The same,
# forward and backward:
#
#   elements, warps, programs of a multiprocessor    512, 2, 8    1024, 2, 8    1024, 4, 4
#   16 x 128 columns, fp32                           53.9 us      62.2          55.2
#   64 x 64 columns, bf16                            68.0         74.8          69.3
#   40 of 8 to 256, bf16                             125.1        137.9         149.7
_ELEMENTS_WITH_SUMS = 512
# Neighbouring slices whose rows have at most so many bytes are in one tile, if it then has at least
# so many contiguous bytes, and at most so many. The tiles are those of `fusedops.slices`: a thread
# of a backward has 16 elements of 2 bytes, and a multiprocessor 16 warps.
_SHORT_ROW = 256
_CONTIGUOUS = 1024, 2048
_WARPS_OF_NEIGHBOURS = 4
_ELEMENTS_OF_NEIGHBOURS = {True: 2048, False: 1024}
# The elements of a ragged tile for each warp, of a 4-byte accumulator, the registers of a thread,
# and the most programs of a multiprocessor, which CUDA limits.
_RAGGED_ELEMENTS = 256
_MOST_PROGRAMS = 32
_REGISTERS = 65536


def heuristic(key: TuningKey) -> Config:
    """Return a config of about as many elements for each slice, whatever its length is."""
    block = block_holding(key.cols)
    registers = 2 if key.itemsize == 8 else 1
    are_many = key.bucket >= 2  # 256 rows or more: see `tuning_key.BUCKETS`
    if key.variant[4] == "elements":
        return _ragged(key, block, registers)
    lanes = min(block * _most_slices(key), _CONTIGUOUS[1] // key.itemsize)
    is_short = block * key.itemsize <= _SHORT_ROW and lanes * key.itemsize >= _CONTIGUOUS[0]
    if are_many and is_short:
        return _of_neighbours(key, lanes)
    if key.variant[0] == "0 sums":
        bytes_of_tile = _BYTES if key.itemsize <= 2 else _HALF_BYTES
        elements = max(bytes_of_tile[are_many] // key.itemsize, block)
        return Config(block, elements // block, max(elements * registers // 1024, 1, 4 * are_many))
    elements = max(_ELEMENTS_WITH_SUMS, block)
    warps = min(elements * registers // 256, 16)
    return Config(block, elements // block, warps, 3, max(16 // warps, 1))


def _most_slices(key: TuningKey) -> int:
    """Return the most slices that a tile may have."""
    count, _, word = key.variant[3].partition(" ")
    return int(count) if word else 1


def _of_neighbours(key: TuningKey, lanes: int) -> Config:
    """Return the config of tiles of several slices, which have so many lanes."""
    is_half = key.itemsize <= 2
    if key.variant[0] == "0 sums":
        bytes_of_tile = _BYTES if is_half else _HALF_BYTES
        elements = bytes_of_tile[True] // key.itemsize
        return Config(lanes, max(elements // lanes, 1), _WARPS_OF_NEIGHBOURS)
    rows = max(_ELEMENTS_OF_NEIGHBOURS[is_half] // lanes, 1)
    return Config(lanes, rows, _WARPS_OF_NEIGHBOURS, 3, 16 // _WARPS_OF_NEIGHBOURS)


def _ragged(key: TuningKey, block: int, registers: int) -> Config:
    """Return the config of programs that hold rows in parts, and loop over tiles."""
    elements = max(_RAGGED_ELEMENTS // registers, block)
    warps = elements * registers // _RAGGED_ELEMENTS
    sums = int(key.variant[0].split()[0])
    moved = int(key.variant[1].split()[0])
    limit = 64 + 8 * max(sums - 1, 0) + 8 * (moved > 4)
    if key.variant[2] == "dropout":
        limit += 8 + 8 * sums
    limit = min(limit, 128)
    per_sm = min(_REGISTERS // (32 * warps * limit), _MOST_PROGRAMS)
    return Config(block, elements // block, warps, per_sm=max(per_sm, 1), registers=limit)


def candidates(key: TuningKey) -> list[Config]:
    """Return the heuristic's config, those of other buckets, and their neighbours."""
    configs = [heuristic(key)]
    for config in in_buckets(heuristic, key):
        configs += around(config) if config.per_sm else _neighbours(config)
    return [config for config in dict.fromkeys(configs) if valid(key, config)]


def _neighbours(config: Config) -> list[Config]:
    """Return the config with half, as many and twice the rows and warps."""
    rows, warps = ([number // 2, number, number * 2] for number in (config.rows, config.warps))
    pairs = filter(all, itertools.product(rows, warps))
    return [replace(config, rows=rows, warps=warps) for rows, warps in pairs]


def valid(key: TuningKey, config: Config) -> bool:
    """Return whether a tile holds a row of the longest slice, or of several slices."""
    block = block_holding(key.cols)
    return block <= config.block_n <= block * _most_slices(key) and config.parts == 1
