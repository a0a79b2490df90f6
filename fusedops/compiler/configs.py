"""Configs of generated kernels: a heuristic, and the candidates to measure.

The items of the tuning key's variant are texts:

    0    how programs process rows: "rows", "shared rows", "groups" or "tiles"
    1    the number of sums over rows
    2    the number of parts of a row
    3    the number of whole tensors that are read or written
    4    the number of whole tensors that are read
    5    how many reductions follow one another
    6    what bounds the kernel: computing or memory
    7    whether random numbers are drawn
    8    how many of the sums have columns
"""

from __future__ import annotations

from dataclasses import replace

from ..core.configs import rows
from ..core.configs.tuning_key import (
    Config,
    TuningKey,
    around,
    block_holding,
    fewest_warps,
    in_buckets,
    power_of_two,
    tiles_holding,
)
from .phases import WIDEST_TILE

__all__ = ["candidates", "heuristic", "reason", "valid"]

_LEAST_BLOCK = 512
# The narrowest tile beside others, and the widest row that has a config of its own.
_LEAST_PART = 128
# The numbers of tiles of a row, besides one. For example, seven tiles of 512 columns hold a row of
# 3584 columns without idle lanes, and leave registers. On an H200 in bf16, forward and backward:
#
#   polynomial norm, one tile or seven    123.0 to 111.2 us
#   dynamic tanh                          112.9 to 100.1 us
#   gated RMSNorm                         185.5 to 120.7 us
_NUMBERS_OF_TILES = (3, 5, 7)
_WIDEST_OF_SEVEN = 4096
_NARROWEST_OF_TABLE = 1024
# The most values (sums, inputs and outputs) that a thread holds without spilling, in a backward
# whose programs take one row at a time.
_MOST_HELD = 200
# The most columns of a short row.
_SHORT_ROW = 512
# The most elements of each thread in a forward of short rows; and of long rows, by whether they are
# many. On an H200 these are fastest with some 24, so that many programs run at a time.
_SHORT_ELEMENTS = 16
_LONG_ELEMENTS = {False: 16, True: 24}
# The most columns of a backward that is bound by its instructions, not by memory, and loads its
# next rows ahead. On an H200 in bf16, forward and backward, before and with it:
#
#   softmax of capped and masked scores    1024 columns, 126.5 to 109.5 us; 4096, 150.2 to 115.2 us
#   softmax with dropout                   1024 columns, 111.7 to 102.0 us
_WIDEST_COMPUTE_BOUND = 4096
# The columns of a tile in kernels without reductions of rows. Rows of few columns are whole, and so
# are rows that would leave more than a fifth of the lanes idle, that are loaded element by element,
# or that have many sums. On an H200 in bf16, forward and backward:
#
#   columns    bias-GELU, whole rows    tiles of 1024
#   1536       88.4 us                  91.2 us
#   2560       87.5                     87.3
#   3072       90.4                     85.2
#   4500       119.4                    123.7, element by element
#   11008      93.0                     84.6
_COLUMNS = 1024
_WIDEST_WHOLE = 2048
# The most sums of a tile: three for each of 16 elements of a thread, or six for each of eight.
_MOST_SUMS_OF_TILE = 6
# The most columns of a narrow row, such as a head's, and a program of many of them in a backward
# with sums. On an H200 in bf16, heads of 64 columns, forward and backward, before and with it:
#
#   RMSNorm and rotary embedding of queries and keys    66.4 to 54.2 us
#   RMSNorm with a weight of each head                  27.3 to 27.0 us, by four programs
_NARROW_ROW = 256
_NARROW_ELEMENTS = 2048
# The most values of an element (sums, inputs and outputs) with which four such programs have
# registers on a multiprocessor.
_FEW_VALUES = 4


def heuristic(key: TuningKey) -> Config:
    """Return a config by which a program takes whole rows: one or two long ones, or several short.

    Rows that are too long for that are taken tile by tile: see `_is_long`.
    """
    return _decision(key).config


def reason(key: TuningKey) -> str:
    """Return why the heuristic chooses its config."""
    return _decision(key).why


def _decision(key: TuningKey) -> rows.Decision:
    if _is_long(key):
        return rows.Decision(_of_long_rows(key), "registers do not hold a row")
    if _is_in_tiles_of_columns(key):
        return rows.Decision(_tile_of_columns(key), "no reduction needs whole rows")
    if _is_compute_bound_backward(key):
        return rows.Decision(_compute_bound(key), "it computes while it loads its next rows")
    decision = _of_table(key) if _is_held(key) else None
    if decision is not None:
        return decision
    if key.variant[1] == "0 sums":
        return rows.Decision(_without_sums(key), "as many rows as make enough elements a thread")
    return rows.Decision(
        _with_sums(key), "as many elements a thread as its sums leave registers for"
    )


def _is_held(key: TuningKey) -> bool:
    """Whether a program has tiles of a row side by side."""
    return key.cols > WIDEST_TILE and not _is_long(key)


def _tiling(key: TuningKey) -> tuple[int, int]:
    """Return the columns of a tile, and the tiles that hold a row."""
    if _is_held(key):
        return tiles_holding(key.cols, _LEAST_PART, _NUMBERS_OF_TILES)
    return block_holding(key.cols), 1


def _of_table(key: TuningKey) -> rows.Decision | None:
    """Return the config by the tables for kernels that reduce rows; None if they have none.

    Only in kernels with "shared rows" may a config divide a row among programs.
    """
    if key.cols <= _NARROWEST_OF_TABLE or key.variant[0] == "groups" or _is_of_seven(key):
        return None
    is_forward = key.kernel == "rowwise_forward"
    if not is_forward and _takes_two_rows(key):
        return None
    if is_forward:
        adds = _count(key, 4) > _parts(key)
        rms = _count(key, 5) < 2
        decision = rows.forward(key.cols, key.itemsize, key.bucket, adds, rms, generated=True)
    else:
        block, parts = tiles_holding(key.cols)
        call = rows.Call(key.cols, key.itemsize, key.bucket, block, parts, generated=True)
        drops = key.variant[7] == "dropout"
        decision = rows.backward(replace(call, sums=_sums(key), drops=drops))
    holds_row = decision.config.columns >= key.cols
    return decision if holds_row or key.variant[0] == "shared rows" else None


def _is_of_seven(key: TuningKey) -> bool:
    """Whether seven tiles hold a row; the hand-written kernels have such rows in one tile."""
    return _tiling(key)[1] == 7 and key.cols <= _WIDEST_OF_SEVEN


def _count(key: TuningKey, part: int) -> int:
    """Return a count of the variant."""
    return int(key.variant[part].split()[0])


def _without_sums(key: TuningKey) -> Config:
    """Return the config of a forward, or of a backward that sums over no rows."""
    block, parts = _tiling(key)
    width = _width(key)
    is_short = width <= _SHORT_ROW
    are_many = key.bucket >= 2  # 256 rows or more: see `tuning_key.BUCKETS`
    if _is_of_small_matrices(key):
        return Config(block, 8, 4)
    if is_short:
        elements = 2048 if are_many else 512
        rows = max(1, elements // power_of_two(width))
        per_thread = _SHORT_ELEMENTS // _registers(key)
        return Config(block, rows, fewest_warps(rows * width, per_thread, most=32), parts=parts)
    if parts == 7:
        return _in_seven_tiles(key, block)
    per_thread = _LONG_ELEMENTS[are_many] // _registers(key)
    # With one tensor in and one out a program has registers for two rows.
    has_room = _moved(key) <= 2 and width <= 8192
    rows = 2 if has_room and are_many else 1
    return Config(block, rows, fewest_warps(width, per_thread, most=32), parts=parts)


def _is_of_small_matrices(key: TuningKey) -> bool:
    """Whether rows are small matrices of which much is computed, such as iterations on them.

    The values of one step are in registers until the backward of it, so that each thread has one
    column of each part. For sm_90, 20 iterations on 4 x 4 take 4 seconds in the assembler and spill
    96 bytes so, and 204 seconds and 14,200 bytes with 16 columns in a thread.
    """
    is_compute_bound = key.variant[6] == "compute-bound"
    return key.cols < block_holding(key.cols) == 16 and _parts(key) > 1 and is_compute_bound


def _is_in_tiles_of_columns(key: TuningKey) -> bool:
    """Whether a program has one tile of columns, and not whole rows: see `_COLUMNS`."""
    if not _is_elementwise(key) or key.cols <= _WIDEST_WHOLE or _sums(key) > _MOST_SUMS_OF_TILE:
        return False
    lanes = -(-key.cols // _COLUMNS) * _COLUMNS
    return lanes * 4 <= key.cols * 5 and not rows.is_unaligned(key.cols, key.itemsize)


def _is_elementwise(key: TuningKey) -> bool:
    """Whether programs may share the columns of rows, and exchange nothing."""
    return key.variant[0] == "shared rows" and _count(key, 5) == 0


def _tile_of_columns(key: TuningKey) -> Config:
    """Return the config of programs that have one tile of columns of each of their rows."""
    are_many = key.bucket >= 2  # 256 rows or more: see `tuning_key.BUCKETS`
    is_light = key.itemsize <= 2 and _parts(key) == 1 and 2 * _sums(key) <= _MOST_SUMS_OF_TILE
    config = Config(_COLUMNS, 2 if are_many and is_light else 1, 4)
    return config if key.variant[1] == "0 sums" else replace(config, stages=3, per_sm=4)


def _is_compute_bound_backward(key: TuningKey) -> bool:
    """Whether a backward without sums over rows computes longer than it reads and writes.

    It has a loop over tiles of rows if its programs may share rows and exchange sums.
    """
    is_backward = key.kernel == "rowwise_backward" and key.variant[1] == "0 sums"
    has_loop = key.variant[0] == "shared rows" and _count(key, 5) > 0
    is_of_width = _SHORT_ROW <= _width(key) <= _WIDEST_COMPUTE_BOUND
    return is_backward and has_loop and is_of_width and key.variant[6] == "compute-bound"


def _compute_bound(key: TuningKey) -> Config:
    """Return the config of persistent programs, which load their next rows ahead.

    Programs that are bound by memory are faster with one tile of rows each. On an H200 in bf16,
    softmax of 4096 columns, forward and backward, takes 80.2 us so, and 84.2 us with this config.
    """
    block, parts = _tiling(key)
    width = _width(key)
    rows = 2 if width <= 1024 else 1
    warps = min(fewest_warps(rows * width, 16 // _registers(key)), 4 * _registers(key))
    return Config(block, rows, warps, 3, 16 // warps if width < 4096 else 3, parts=parts)


def _in_seven_tiles(key: TuningKey, block: int) -> Config:
    """Return the config of a kernel without sums over rows whose rows are seven tiles."""
    config = Config(block, 1, fewest_warps(key.cols, 32 // _registers(key)), parts=7)
    # With one tensor in and one out, and no reduction between them, it has registers for two rows.
    is_light = _moved(key) <= 2 and _count(key, 5) == 0
    return replace(config, rows=2) if is_light else config


def _with_sums(key: TuningKey) -> Config:
    """Return the config of a backward that sums over rows, and holds its sums.

    Each multiprocessor has eight warps or more, of at most 32 elements a thread, which load their
    next rows ahead. A thread has registers for 96 sums, each of one column over the rows. With 32
    elements of one row, that is three sums for each column. With 32 elements of two rows, a thread
    has 16 columns, and six sums for each, unless the rows' sums are separate until the end: see
    `row_sums`.
    """
    block, parts = _tiling(key)
    width = _width(key)
    if width <= _NARROW_ROW:
        rows = _NARROW_ELEMENTS // (power_of_two(width) * _registers(key))
        has_few = _sums(key) + _moved(key) <= _FEW_VALUES
        return Config(block, rows, 4, 3, 4 if has_few else 2)
    rows = max(1, 1024 // power_of_two(width))
    if _takes_two_rows(key):
        rows = 2
    summed_rows = 1 if _is_elementwise(key) else rows
    elements = 32 if _sums(key) <= 3 * summed_rows else 16
    warps = fewest_warps(rows * width, elements // _registers(key), 16)
    if rows == 1 and _spills(key, warps):
        warps *= 2
    stages = 3 if width < 8192 else 2
    # Left to itself, ptxas may use half of the registers and spill much. A multiprocessor has 128
    # for each thread of 16 warps.
    max_registers = 128 if warps == 16 else 0
    # One more program is faster for seven tiles without a reduction between loads and stores:
    # dynamic tanh of 3584 columns, on an H200 in bf16, forward and backward, 88.6 to 85.5 us. For
    # other tiles it is not faster.
    is_light = parts == 7 and _count(key, 5) == 0
    per_sm = max(8 // warps, 1) + is_light
    return Config(block, rows, warps, stages, per_sm, max_registers, parts)


def _spills(key: TuningKey, warps: int) -> bool:
    """Whether a thread would hold too many values, and there is a block for twice the warps."""
    block, parts = _tiling(key)
    if warps > 4 or block < 64 * warps:
        return False
    # The elements of a row per thread, with padding.
    per_thread = block * parts * _parts(key) // (32 * warps)
    held = per_thread * (_sums(key) + _moved(key)) * _registers(key)
    return held > _MOST_HELD


def _takes_two_rows(key: TuningKey) -> bool:
    """Whether two rows fit a program that sums: rows of a power of two columns, not of fp64."""
    width = _width(key)
    if key.variant[0] == "groups" or _registers(key) != 1:
        return False
    return power_of_two(width) == width and 1024 <= width <= 4096


def _width(key: TuningKey) -> int:
    """Return the columns of all parts of a row."""
    return key.cols * _parts(key)


def _registers(key: TuningKey) -> int:
    """Return the registers of an element: fp64 takes two."""
    return 2 if key.itemsize == 8 else 1


def _parts(key: TuningKey) -> int:
    """Return how many parts of a row are unrolled."""
    return _count(key, 2)


def _sums(key: TuningKey) -> int:
    """Return how many sums over rows each column has."""
    return _count(key, 8) // _parts(key)


def _moved(key: TuningKey) -> int:
    """Return how many whole tensors are read or written."""
    return _count(key, 3) // _parts(key)


def _is_long(key: TuningKey) -> bool:
    """Whether a program takes one tile of a row's columns, or a row tile by tile."""
    return key.variant[0] == "tiles" or "moments" in key.kernel


def _of_long_rows(key: TuningKey) -> Config:
    """Return the config of a program that takes a row tile by tile, or one tile of columns."""
    # Columns and rows of a tile, warps, stages, programs per multiprocessor.
    if "moments" in key.kernel:
        return Config(4096, 1, 4, 4)
    if key.variant[1] == "0 sums":
        return Config(4096, 1, 4)
    return Config(1024, 4, 4, 3, 4)


def candidates(key: TuningKey) -> list[Config]:
    """Return the heuristic's config, those of other buckets, and their neighbours."""
    configs = {heuristic(key): None}
    for config in in_buckets(heuristic, key):
        neighbours = around(config) if config.per_sm else _neighbours(config)
        configs |= dict.fromkeys(neighbours)
    return list(configs)


# CUDA's limit: a block has at most 1024 threads.
_MOST_WARPS = 32
# The neighbours of a config: factors of its rows and its warps.
_FACTORS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (1, 0.5), (0.5, 0.5)]


def _neighbours(config: Config) -> list[Config]:
    """Return configs of about as many rows and warps, or of fewer stages."""
    neighbours: list[Config] = []
    for row_factor, warp_factor in _FACTORS:
        rows = int(config.rows * row_factor)
        warps = int(config.warps * warp_factor)
        neighbours.append(replace(config, rows=rows, warps=warps))
    if config.stages > 1:
        neighbours.append(replace(config, stages=config.stages - 1))
        neighbours.append(replace(config, stages=config.stages - 2))
    return list(filter(_is_possible, neighbours))


def _is_possible(config: Config) -> bool:
    least = min(config.rows, config.stages, config.warps)
    return least >= 1 and config.warps <= _MOST_WARPS


def valid(key: TuningKey, config: Config) -> bool:
    """Whether the block is the narrowest that holds a row; for tiles, whether it is wide enough."""
    if _is_long(key):
        return config.block_n >= _LEAST_BLOCK
    if _is_held(key):
        return key.variant[0] == "shared rows" or config.columns >= key.cols
    return config.block_n == block_holding(key.cols)
