"""Configs of the norm kernels: a heuristic, and the candidates to measure.

With a norm, the heuristic is that of all kernels that reduce rows: see `core.configs.rows`.
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

__all__ = ["MORE_HELD", "MORE_HELD_MATTERS", "candidates", "heuristic", "valid"]

# The part of a tuning key that marks a backward of wide rows of 16 bits with more values in
# registers than usual: parameters of 32 bits, or both parameters where the output is saved. Only
# rows of more than 8192 columns have the mark: the config of narrower ones does not depend on it.
MORE_HELD, MORE_HELD_MATTERS = "more held", 8192


def _dropout_add(cols: int, bucket: int) -> Config:
    """The config of the forward without a norm: any tile is correct; few rows get small tiles."""
    holding = block_holding(cols)
    if holding <= 256:
        block = min(holding, 128)
        return Config(block, 2048 // block, 8)
    if bucket <= SOME:
        block = min(holding, 1024)
        return Config(block, 1024 // block, 4)
    block = min(holding, 2048)
    return Config(block, 2048 // block, 8 if block == 2048 else 4)


def _backward_of_sum(cols: int, itemsize: int, bucket: int) -> Config:
    """The config of the backward without a norm: any tile is correct."""
    block = min(block_holding(cols), 512 if itemsize == 4 else 1024)
    few = bucket <= FEW
    if itemsize > 2:
        if few and block <= 256:
            return Config(block, 1024 // block, 2, 3, 8)
        narrow_and_many = bucket == MANY and cols <= 512
        return Config(block, 2048 // block, 4, 3, 2 if narrow_and_many else 4)
    if block == 1024:
        exact_and_some = bucket == SOME and cols <= block
        return Config(block, 4 if exact_and_some else 2, 4, 3, 4)
    if few:
        return Config(block, 1024 // block, 2, 3, 8)
    return Config(block, 2048 // block, 2, 3, 4)


def heuristic(key: TuningKey) -> Config:
    """The config where no measurement exists."""
    cols, itemsize, bucket, variant = key.cols, key.itemsize, key.bucket, key.variant
    if key.kernel == "norm_forward":
        return forward(cols, itemsize, bucket, "adds" in variant, "rms" in variant).config
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
    """The number of parameter gradients of a backward.

    Its key's variant is, for example, ``("layer", "dropout", "3 sums", "7 moved")``.
    """
    return int(key.variant[2].partition(" ")[0])


# --- what is measured -----------------------------------------------------------------------------


def valid(key: TuningKey, config: Config) -> bool:
    """Whether a kernel may have the config for a key.

    The tiles of a row have at most as many columns together as those that hold it with the fewest
    idle lanes. Further conditions are:

        forward    in 16 bits, above 16,384 columns: whole rows where `forward_tiles` gives several
                   tiles, two passes where it gives one
                   several tiles side by side hold the row whole
        backward   tiles of several rows that fill the registers: only without idle lanes, as they
                   were measured
                   tiles of 4096 columns and more: only for aligned rows
                   in 16 bits with fewer than three sums: no tile of 8192 columns with idle lanes
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


# `valid` also judges entries of tables for other widths: `tuning.shipped` may take that of a row up
# to twice as wide.
def _valid_forward(key: TuningKey, config: Config) -> bool:
    cols, itemsize = key.cols, key.itemsize
    block, parts = forward_tiles(cols, itemsize, "adds" in key.variant, "rms" in key.variant)
    whole = config.columns >= cols
    wide = itemsize == 2 and cols > WHOLE_FORWARD
    if wide and (parts > 1) != whole:
        return False
    if config.parts > 1 and not whole:
        return False
    return config.columns <= block * parts


def _valid_backward(key: TuningKey, config: Config) -> bool:
    cols, itemsize = key.cols, key.itemsize
    has_idle_lanes = cols % config.columns != 0
    if itemsize == 2 and config.block_n == 8192 > cols and _sums(key) < 3:
        return False
    fills_registers = config.rows > 1 and config.columns * config.rows > WHOLE_BACKWARD
    if fills_registers and has_idle_lanes:
        return False
    if is_unaligned(cols, itemsize) and config.block_n >= 4096:
        return False
    block, parts = tiles_holding(cols)
    return config.columns <= block * parts


def candidates(key: TuningKey) -> list[Config]:
    """The heuristic's config and others to measure; the same set for any number of rows."""
    heuristics = in_buckets(heuristic, key)
    # Neighbours are those of one bucket's config, so that all buckets have the same set.
    first = heuristics[MANY]
    if key.kernel == "norm_forward":
        others = _other_forwards(key)
    elif key.kernel == "dropout_add":
        others = _other_dropout_adds(first.block_n)
    else:
        normalizes = key.variant[0] != "none"
        others = around(first) + _other_backwards(key.cols, key.itemsize, normalizes)
    ordered = dict.fromkeys((heuristics[key.bucket], *heuristics, *others))
    return [config for config in ordered if valid(key, config)]


def _other_forwards(key: TuningKey) -> list[Config]:
    """Whole rows with few or many elements per thread, and tiles of wide rows."""
    cols, itemsize = key.cols, key.itemsize
    block, parts = forward_tiles(cols, itemsize, "adds" in key.variant, "rms" in key.variant)
    configs = []
    if parts > 1:
        configs += _forwards_of_parts(cols, block, parts)
    elif block <= WHOLE_FORWARD // (itemsize // 2):
        configs += _forwards_of_one_tile(block, itemsize)
    # Tiles that are passed over.
    tiles = ((2048, 4, 3), (4096, 8, 1), (4096, 8, 3), (8192, 16, 1), (8192, 8, 1), (16384, 16, 1))
    if cols > 4096:
        configs += [Config(b, 1, warps, stages) for b, warps, stages in tiles if cols > b]
    if itemsize == 2 and 4096 < cols <= WHOLE_FORWARD:
        configs += [Config(b, 1, 8, parts=-(-cols // b)) for b in (2048, 4096)]
    return configs


def _forwards_of_parts(cols: int, block: int, parts: int) -> list[Config]:
    """A whole row in several tiles, with other warps and limits of registers."""
    warps = fewest_warps(block * parts, 24)
    limits = ((warps, 0), (warps, 64), (warps // 2, 0), (2 * warps, 0))
    configs = [
        Config(block, 1, count, registers=registers, parts=parts)
        for count, registers in limits
        if 1 <= count <= 32
    ]
    if cols > WHOLE_FORWARD:
        widest = ((4096, 32), (4096, 64), (8192, 64), (32768, 64))
        configs += [
            Config(width, 1, warps, registers=registers, parts=-(-cols // width))
            for width, registers in widest
        ]
    return configs


def _forwards_of_one_tile(block: int, itemsize: int) -> list[Config]:
    """Whole rows in one tile, of one or several rows, and in persistent programs."""
    once = max(1, 1024 // block)
    four_times = 4 * once if block <= 1024 else 1
    each = (8, 16, 32) if itemsize == 2 else (4, 8, 16)
    configs = []
    for rows in dict.fromkeys((once, 2 * once, four_times, 1)):
        elements = block * rows
        counts = [count for count in each if elements >= count * 32]
        configs += [Config(block, rows, fewest_warps(elements, count)) for count in counts]
    warps = fewest_warps(block * once, each[1], MOST_WARPS)
    configs += [Config(block, once, warps, 3, per_sm) for per_sm in (1, 4)]
    if block == WHOLE_FORWARD:
        configs.append(Config(block, 1, 32, registers=64))
    return configs


def _other_dropout_adds(widest: int) -> list[Config]:
    """Tiles with 8 to 32 elements per thread, up to ``widest`` columns and with 4096."""
    block = min(widest, 1024)
    configs = []
    for columns in (block // 2, block, widest, 4096):
        for elements, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8)):
            configs.append(Config(columns, max(1, elements // columns), warps))
    return configs


def _other_backwards(cols: int, itemsize: int, normalizes: bool) -> list[Config]:
    """Tiles for any number of columns, and of wide rows those that programs share."""
    if not normalizes:
        return [Config(512, 4, 4, 3, 4), Config(2048, 1, 4, 3, 4), Config(2048, 1, 8, 3, 2)]
    if cols <= 4096:
        return []
    parts = -(-cols // 2048)
    whole = []
    if itemsize == 2 and parts <= 7:
        whole = [Config(2048, 1, 8, stages, 1, parts=parts) for stages in (3, 4)]
    return [*whole, *SHARED[itemsize], SHARED_BY_MANY, SHARED_TWO_ROWS]
