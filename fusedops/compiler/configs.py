"""Configs of generated kernels: heuristics from the columns and the bytes of an element, and the candidates to measure."""

from __future__ import annotations

from dataclasses import replace

from ..core.tuning_key import Config, TuningKey, around, block_holding, fewest_warps, in_buckets, power_of_two

__all__ = ["candidates", "heuristic", "valid"]

_LEAST_BLOCK = 512
# The most values that a thread holds in a backward of one row a program, without spilling: sums, inputs and outputs.
_MOST_HELD = 200


def heuristic(key: TuningKey) -> Config:
    """Whole rows a program: one of a thousand columns and more, several of fewer.

    On an H200 a forward is fastest with some 24 elements of a row a thread, so that many programs run at a time. A
    backward that sums over rows holds its sums: eight warps a multiprocessor, of at most 32 elements a thread, whose next
    rows are on their way. A thread of 32 elements has registers for three sums of each column.
    """
    if _is_long(key):
        return _of_long_rows(key)
    block, width = block_holding(key.cols), key.cols * _parts(key)
    half = 2 if key.itemsize == 8 else 1  # fp64 takes two registers
    if key.variant[1] == "0 sums":
        many = key.bucket >= 2
        if width <= 512:
            rows = max(1, (2048 if many else 512) // power_of_two(width))
            return Config(block, rows, fewest_warps(rows * width, (32 if many else 16) // half, 32))
        # Of one tensor in and one out a program has registers for two rows.
        rows = 2 if many and _moved(key) <= 2 and width <= 8192 else 1
        return Config(block, rows, fewest_warps(width, (24 if many else 16) // half, 32))
    two = key.variant[0] == "rows" and half == 1 and power_of_two(width) == width and 1024 <= width <= 4096
    rows = 2 if two else max(1, 1024 // power_of_two(width))
    each = (32 if _sums(key) <= 3 * rows else 16) // half
    warps = fewest_warps(rows * width, each, 16)
    lanes = block * _parts(key) // (32 * warps)  # of a thread, with the idle ones
    if rows == 1 and warps <= 4 and block >= 64 * warps and lanes * (_sums(key) + _moved(key)) * half > _MOST_HELD:
        warps *= 2
    # Where much is spilled, ptxas may take half of the registers that there are.
    return Config(block, rows, warps, 3 if width < 8192 else 2, max(8 // warps, 1), 128 if warps == 16 else 0)


def _parts(key: TuningKey) -> int:
    """Of a row, so many are unrolled."""
    return int(key.variant[2].split()[0])


def _sums(key: TuningKey) -> int:
    """Over rows, of each column."""
    return int(key.variant[1].split()[0]) // _parts(key)


def _moved(key: TuningKey) -> int:
    """Whole tensors that are read or written."""
    return int(key.variant[3].split()[0]) // _parts(key)


def _is_long(key: TuningKey) -> bool:
    """Whether a program has a part of a row, or passes over it."""
    return key.variant[0] == "tiles" or "moments" in key.kernel


def _of_long_rows(key: TuningKey) -> Config:
    """Rows that are passed over tile by tile, or a tile of columns a program."""
    if "moments" in key.kernel:
        return Config(4096, 1, 4, 4)
    return Config(1024, 4, 4, 3, 4) if key.variant[1] != "0 sums" else Config(4096, 1, 4)


def candidates(key: TuningKey) -> list[Config]:
    """The heuristic's config, those of other buckets, and their neighbours."""
    found = {heuristic(key): None}
    for config in in_buckets(heuristic, key):
        for near in around(config) if config.per_sm else _near(config):
            found[near] = None
    return list(found)


def _near(config: Config) -> list[Config]:
    tries = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (1, 0.5), (0.5, 0.5)]
    found = [replace(config, rows=int(config.rows * rows), warps=int(config.warps * warps)) for rows, warps in tries]
    if config.stages > 1:
        found += [replace(config, stages=stages) for stages in (config.stages - 1, config.stages - 2)]
    return [near for near in found if near.rows >= 1 and 1 <= near.warps <= 32 and near.stages >= 1]


def valid(key: TuningKey, config: Config) -> bool:
    """Whether a row is whole in the block, with few idle lanes."""
    return config.block_n >= _LEAST_BLOCK if _is_long(key) else config.block_n == block_holding(key.cols)
