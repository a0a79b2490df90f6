"""Configs of the norm kernels: a heuristic, and the candidates to measure.

With a norm, the heuristic is in `core.configs.rows`, which all kernels that reduce rows share.
Without a norm it is here. `FEW`, `SOME` and `MANY` are buckets of the number of rows.
"""

from __future__ import annotations

from ..core.configs.rows import (
    FEW,
    MANY,
    MOST_WARPS,
    SHARED,
    SHARED_BY_MANY,
    SHARED_TWO_ROWS,
    SOME,
    WHOLE_BACKWARD,
    WHOLE_FORWARD,
    Call,
    backward,
    forward,
    forward_tiles,
    is_unaligned,
)
from ..core.configs.tuning_key import (
    Config,
    TuningKey,
    around,
    block_holding,
    fewest_warps,
    in_buckets,
    tiles_holding,
)

__all__ = ["MORE_HELD", "MORE_HELD_ABOVE", "candidates", "heuristic", "valid"]

# This part of a tuning key marks a backward of wide rows of 16 bits that holds more values in
# registers than usual: parameters of 32 bits, or weight and bias where the output is saved.
MORE_HELD = "more held"
# Only wider rows have the mark: the config of narrower ones does not depend on it.
MORE_HELD_ABOVE = 8192


def _dropout_add(cols: int, bucket: int) -> Config:
    """Returns the config of the forward without a norm.

    Nothing is summed over a row, so any tile is correct. Few rows get small tiles.
    """
    row_block = block_holding(cols)
    if row_block <= 256:
        block = min(row_block, 128)
        return Config(block, rows=2048 // block, warps=8)
    if bucket <= SOME:
        block = min(row_block, 1024)
        return Config(block, rows=1024 // block, warps=4)
    block = min(row_block, 2048)
    return Config(block, rows=2048 // block, warps=8 if block == 2048 else 4)


def _backward_of_sum(cols: int, itemsize: int, bucket: int) -> Config:
    """Returns the config of the backward without a norm: any tile is correct."""
    block = min(block_holding(cols), 512 if itemsize == 4 else 1024)
    few = bucket <= FEW
    if itemsize > 2:
        if few and block <= 256:
            return Config(block, rows=1024 // block, warps=2, stages=3, per_sm=8)
        narrow_and_many = bucket == MANY and cols <= 512
        per_sm = 2 if narrow_and_many else 4
        return Config(block, rows=2048 // block, warps=4, stages=3, per_sm=per_sm)
    if block == 1024:
        whole_and_some = bucket == SOME and cols <= block
        rows = 4 if whole_and_some else 2
        return Config(block, rows, warps=4, stages=3, per_sm=4)
    if few:
        return Config(block, rows=1024 // block, warps=2, stages=3, per_sm=8)
    return Config(block, rows=2048 // block, warps=2, stages=3, per_sm=4)


def heuristic(key: TuningKey) -> Config:
    """Returns the config for a key that was not measured."""
    cols, itemsize, bucket, variant = key.cols, key.itemsize, key.bucket, key.variant
    if key.kernel == "norm_forward":
        adds, rms = "adds" in variant, "rms" in variant
        return forward(cols, itemsize, bucket, adds=adds, rms=rms).config
    if key.kernel == "dropout_add":
        return _dropout_add(cols, bucket)
    if "none" in variant:
        return _backward_of_sum(cols, itemsize, bucket)
    block, parts = tiles_holding(cols)
    call = Call(
        cols,
        itemsize,
        bucket,
        block,
        parts,
        sums=_sums(key),
        drops="dropout" in variant,
        holds_more=MORE_HELD in variant,
    )
    return backward(call).config


def _sums(key: TuningKey) -> int:
    """Returns the number of parameter gradients of a backward.

    The variant of its key is, for example, ``("layer", "dropout", "3 sums", "7 moved")``.
    """
    return int(key.variant[2].partition(" ")[0])


# --- what is measured -----------------------------------------------------------------------------


def valid(key: TuningKey, config: Config) -> bool:
    """Returns whether a kernel may have the config for a key.

    Side by side, a program's tiles are at most as wide as the tiles that hold a row with the fewest
    idle lanes. Further conditions are:

        forward    if a program has several tiles side by side, they hold a whole row
                   16 bits and more than 16,384 columns: rows are whole if `forward_tiles` returns
                   several tiles, and read in two passes if it returns one
        backward   tiles of several rows that fill the registers have no idle lanes, because only
                   such tiles were measured
                   tiles of 4096 columns and more are for aligned rows only
                   16 bits and fewer than three sums: no tile of 8192 columns has idle lanes
    """
    if config.block_n < 16:
        return False
    if config in in_buckets(heuristic, key):
        return True
    if key.kernel == "norm_forward":
        return _valid_forward(key, config)
    if key.kernel == "norm_backward" and "none" not in key.variant:
        return _valid_backward(key, config)
    return config.columns <= block_holding(key.cols)


# A config may be one that was measured for another width: `tuning.shipped` may return the table's
# entry for rows up to twice as wide.
def _valid_forward(key: TuningKey, config: Config) -> bool:
    cols, itemsize = key.cols, key.itemsize
    block, parts = _forward_tiles(key)
    whole = config.columns >= cols
    is_wide = itemsize == 2 and cols > WHOLE_FORWARD
    must_be_whole = parts > 1
    if is_wide and whole != must_be_whole:
        return False
    if config.parts > 1 and not whole:
        return False
    return config.columns <= block * parts


def _forward_tiles(key: TuningKey) -> tuple[int, int]:
    """Returns the columns of a tile, and the number of tiles of a row, in a forward."""
    adds, rms = "adds" in key.variant, "rms" in key.variant
    return forward_tiles(key.cols, key.itemsize, adds=adds, rms=rms)


def _valid_backward(key: TuningKey, config: Config) -> bool:
    cols, itemsize = key.cols, key.itemsize
    has_idle_lanes = cols % config.columns != 0
    is_wide_tile = config.block_n == 8192 and cols < 8192
    if itemsize == 2 and is_wide_tile and _sums(key) < 3:
        return False
    fills_registers = config.rows > 1 and config.columns * config.rows > WHOLE_BACKWARD
    if fills_registers and has_idle_lanes:
        return False
    if is_unaligned(cols, itemsize) and config.block_n >= 4096:
        return False
    block, parts = tiles_holding(cols)
    return config.columns <= block * parts


def candidates(key: TuningKey) -> list[Config]:
    """Returns the heuristic's config and others to measure: one set for all numbers of rows."""
    heuristics = in_buckets(heuristic, key)
    # The neighbours of this bucket's config are candidates for all buckets, so that all buckets
    # have the same set.
    center = heuristics[MANY]
    if key.kernel == "norm_forward":
        others = _other_forwards(key)
    elif key.kernel == "dropout_add":
        others = _other_dropout_adds(center.block_n)
    else:
        normalizes = key.variant[0] != "none"
        others = around(center) + _other_backwards(key.cols, key.itemsize, normalizes)
    ordered = dict.fromkeys((heuristics[key.bucket], *heuristics, *others))
    return [config for config in ordered if valid(key, config)]


def _other_forwards(key: TuningKey) -> list[Config]:
    """Returns whole rows with few or many elements per thread, and tiles for two passes."""
    cols, itemsize = key.cols, key.itemsize
    block, parts = _forward_tiles(key)
    configs = []
    if parts > 1:
        configs += _forwards_of_parts(cols, block, parts)
    elif block <= WHOLE_FORWARD // (itemsize // 2):
        configs += _forwards_of_one_tile(block, itemsize)
    # Rows that are read in two passes: columns of a tile, warps and stages.
    tiles = ((2048, 4, 3), (4096, 8, 1), (4096, 8, 3), (8192, 16, 1), (8192, 8, 1), (16384, 16, 1))
    if cols > 4096:
        configs += [
            Config(width, rows=1, warps=warps, stages=stages)
            for width, warps, stages in tiles
            if cols > width
        ]
    if itemsize == 2 and 4096 < cols <= WHOLE_FORWARD:
        configs += [
            Config(width, rows=1, warps=8, parts=-(-cols // width)) for width in (2048, 4096)
        ]
    return configs


def _forwards_of_parts(cols: int, block: int, parts: int) -> list[Config]:
    """Returns configs with a whole row in several tiles, and other warps and register limits."""
    warps = fewest_warps(block * parts, 24)
    limits = ((warps, 0), (warps, 64), (warps // 2, 0), (2 * warps, 0))
    configs = [
        Config(block, rows=1, warps=count, registers=registers, parts=parts)
        for count, registers in limits
        if 1 <= count <= 32
    ]
    if cols > WHOLE_FORWARD:
        # Columns of a tile, and the limit of registers.
        widest = ((4096, 32), (4096, 64), (8192, 64), (32768, 64))
        configs += [
            Config(width, rows=1, warps=warps, registers=registers, parts=-(-cols // width))
            for width, registers in widest
        ]
    return configs


def _forwards_of_one_tile(block: int, itemsize: int) -> list[Config]:
    """Returns configs with whole rows in one tile, of one or several rows; some are persistent."""
    # The rows that make a tile of 1024 elements.
    usual_rows = max(1, 1024 // block)
    most_rows = 4 * usual_rows if block <= 1024 else 1
    elements_per_thread = (8, 16, 32) if itemsize == 2 else (4, 8, 16)
    configs = []
    for rows in dict.fromkeys((usual_rows, 2 * usual_rows, most_rows, 1)):
        elements = block * rows
        # A warp has 32 threads.
        fitting = [per_thread for per_thread in elements_per_thread if elements >= per_thread * 32]
        configs += [
            Config(block, rows, fewest_warps(elements, per_thread)) for per_thread in fitting
        ]
    warps = fewest_warps(block * usual_rows, elements_per_thread[1], MOST_WARPS)
    configs += [Config(block, usual_rows, warps, stages=3, per_sm=per_sm) for per_sm in (1, 4)]
    if block == WHOLE_FORWARD:
        configs.append(Config(block, rows=1, warps=32, registers=64))
    return configs


def _other_dropout_adds(widest: int) -> list[Config]:
    """Returns tiles of 8 to 32 elements per thread: up to ``widest`` columns wide, and 4096."""
    block = min(widest, 1024)
    configs = []
    for columns in (block // 2, block, widest, 4096):
        for elements, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8)):
            configs.append(Config(columns, max(1, elements // columns), warps))
    return configs


def _other_backwards(cols: int, itemsize: int, normalizes: bool) -> list[Config]:
    """Returns further configs of a backward.

    Without a norm these are a few tiles. With a norm they are tiles of wide rows: a program
    processes a whole row, or several programs share it.
    """
    if not normalizes:
        return [
            Config(512, rows=4, warps=4, stages=3, per_sm=4),
            Config(2048, rows=1, warps=4, stages=3, per_sm=4),
            Config(2048, rows=1, warps=8, stages=3, per_sm=2),
        ]
    if cols <= 4096:
        return []
    parts = -(-cols // 2048)
    whole = []
    if itemsize == 2 and parts <= 7:
        whole = [
            Config(2048, rows=1, warps=8, stages=stages, per_sm=1, parts=parts) for stages in (3, 4)
        ]
    return [*whole, *SHARED[itemsize], SHARED_BY_MANY, SHARED_TWO_ROWS]
