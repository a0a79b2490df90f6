"""Configs of kernels that reduce rows, hand-written and generated, as tables of rules.

The rules of a table are tried from first to last, and the first that matches determines the config.
Each rule states the reason for its config. If one change to the table was timed, it also states the
times before and after, and on which GPU. The positional arguments of a `Config` are the columns and
rows of a tile, the warps, the stages, and the programs per multiprocessor.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from .tuning_key import (
    Config,
    block_holding,
    fewest_warps,
    tiles_holding,
)

__all__ = [
    "FEW",
    "MANY",
    "MOST_WARPS",
    "SHARED",
    "SHARED_BY_MANY",
    "SHARED_TWO_ROWS",
    "SOME",
    "WHOLE_BACKWARD",
    "WHOLE_FORWARD",
    "Call",
    "Decision",
    "backward",
    "forward",
    "forward_tiles",
    "is_unaligned",
]

# The most columns of a row that a forward program holds whole, in 32 and 64 bits, and in 16 bits.
WHOLE_FORWARD = 16384
_WHOLE_FORWARD_16BIT = 32768
# The most columns of a LayerNorm with a residual that runs in 32 warps. Wider rows run in 16 warps,
# because each warp then has twice the registers.
_WIDEST_IN_32_WARPS = 24576
# The most columns of a row that a backward program holds whole, in 16 and 32 bits, and in 64 bits.
WHOLE_BACKWARD = 8192
_WHOLE_BACKWARD_64BIT = 2048
# Buckets of rows (indices into `BUCKETS`): 16 to 255, 256 to 4095, 4096 to 65535.
FEW, SOME, MANY = 1, 2, 3
# The most warps of a forward program whose rows are one tile each.
MOST_WARPS = 16


# --- rules ----------------------------------------------------------------------------------------


# A multiprocessor has 65,536 registers, which its resident programs share. If W warps hold a row of
# N columns, each thread holds N / (32 W) elements of it, in fp32 one per register:
#
#     warps         threads    registers per thread, if the program is alone
#     8             256        255, the most that a thread may have
#     16            512        128
#     32            1024       64
#
# More warps can hold wider rows. Fewer warps exchange a row's sums in fewer steps, and leave
# registers for another program, which loads while this one computes or stores. With a limit of 64
# registers per thread, two programs of 16 warps are resident.
@dataclass(frozen=True)
class Call:
    """The properties of a call that rules test.

    Attributes:
        cols: the hidden size.
        itemsize: bytes per element of the widest tensor.
        bucket: the bucket of the number of rows.
        block: columns of a tile, a power of two.
        parts: the number of tiles that hold a row.
        adds: whether there is a residual, a second input.
        rms: whether the norm is an RMSNorm, not a LayerNorm.
        sums: the number of parameter gradients of a backward, each a sum over rows.
        drops: whether a backward draws a mask.
        holds_more: whether a backward holds more values per element than usual: `MORE_HELD` in
            `norms.configs`.
        generated: whether the kernel is generated. It needs more registers than a hand-written one.
    """

    cols: int
    itemsize: int
    bucket: int
    block: int
    parts: int = 1
    adds: bool = False
    rms: bool = False
    sums: int = 0
    drops: bool = False
    holds_more: bool = False
    generated: bool = False

    @property
    def width(self) -> int:
        """The columns of all tiles that hold a row, idle ones too."""
        return self.block * self.parts

    @property
    def aligned(self) -> bool:
        """Whether rows are loaded in vectors."""
        return not is_unaligned(self.cols, self.itemsize)

    @property
    def odd(self) -> bool:
        """Whether a pipelined loop cannot copy rows of 16 bits: it copies at least four bytes."""
        return self.cols % 2 != 0

    @property
    def spare(self) -> bool:
        """Whether a backward has registers to spare: no mask, and at most two sums."""
        return self.sums < 3 and not self.drops


@dataclass(frozen=True)
class _Tile:
    """Returns the config of a forward from the number of elements per thread and per tile.

    Attributes:
        per_thread: the most elements per thread, which determine the number of warps.
        elements: the elements of a tile, which determine the number of rows.
        rows: the fewest rows of a tile.
        most_warps: the most warps.
        registers: the limit of registers per thread, in programs of 16 warps or more; 0 for none.
        block: columns of a tile; 0 for the call's ``block``.
    """

    per_thread: int
    elements: int = 0
    rows: int = 1
    most_warps: int = MOST_WARPS
    registers: int = 0
    block: int = 0

    def __call__(self, call: Call) -> Config:
        block = self.block or call.block
        parts = -(-call.cols // block)
        rows = max(self.rows, self.elements // block)
        warps = fewest_warps(block * parts * rows, self.per_thread, self.most_warps)
        registers = self.registers if warps >= 16 else 0
        return Config(block, rows, warps, registers=registers, parts=parts)


@dataclass(frozen=True)
class _NarrowTile:
    """Returns the config of a backward whose tiles have several narrow rows.

    For each element of a tile, a thread holds three numbers: dy, the row's element, and a sum.

    Attributes:
        of_row: elements of a row per thread, which determine the number of warps.
        of_tile: elements of a tile per thread, which determine the number of rows.
        per_sm: programs per multiprocessor.
    """

    of_row: int
    of_tile: int
    per_sm: int

    def __call__(self, call: Call) -> Config:
        warps = fewest_warps(call.block, self.of_row)
        rows = min(max(self.of_tile * 32 * warps // call.block, 1), 16)
        return Config(call.block, rows, warps, stages=3, per_sm=self.per_sm)


@dataclass(frozen=True)
class _Rule:
    """One rule of a table.

    Attributes:
        when: for some properties of `Call`, by name, the values for which the rule matches.
        config: the config, or a function that returns it for a call.
        why: the reason for the config.
        measured: the times before and after this rule was added. If empty, the config was chosen by
            timing candidates on an H200.
    """

    when: Mapping[str, Container[object]]
    config: Config | Callable[[Call], Config]
    why: str
    measured: str = ""

    def matches(self, call: Call) -> bool:
        """Whether every property in ``when`` has one of its values."""
        return all(getattr(call, name) in values for name, values in self.when.items())


@dataclass(frozen=True)
class Decision:
    """A config and the reason for it."""

    config: Config
    why: str


def _decide(rules: Sequence[_Rule], call: Call) -> Decision:
    """Returns the config of the first rule that matches."""
    for rule in rules:
        if rule.matches(call):
            config = rule.config if isinstance(rule.config, Config) else rule.config(call)
            return Decision(config, rule.why)
    raise AssertionError(f"no rule for {call}")


def _above(limit: int) -> range:
    """Returns all numbers above ``limit``."""
    return range(limit + 1, 1 << 62)


def _up_to(limit: int) -> range:
    """Returns the numbers from 0 to ``limit``."""
    return range(limit + 1)


_YES, _NO = (True,), (False,)
_HALF, _FP32, _FP64 = (2,), (4,), (8,)
_FEW_ROWS, _SOME_ROWS, _UP_TO_SOME_ROWS = _up_to(FEW), (SOME,), _up_to(SOME)
_FROM_SOME_ROWS, _MANY_ROWS = _above(FEW), _above(SOME)


# --- the forward ----------------------------------------------------------------------------------


# A program holds a row in one tile or in several tiles side by side (parts), and reads x once. Or
# it makes two passes over tiles, and reads x twice. `forward` first chooses among these three
# layouts, and then applies the layout's table.


def _widest_filled(configs: Sequence[Config], cols: int, otherwise: Config) -> Config:
    """Returns the first config that leaves few lanes idle: at most a tenth of ``cols``."""
    for config in configs:
        if config.lanes_for(cols) <= 1.1 * cols:
            return config
    return otherwise


def _two_passes(call: Call) -> Config:
    """Returns the widest config with few idle lanes, for rows that are read twice."""
    configs = (Config(16384, 1, 16), Config(8192, 1, 8), Config(4096, 1, 8))
    return _widest_filled(configs, call.cols, configs[-1])


# 16 bits, a whole row in several tiles. Usually a thread has at most 24 elements. With 56, a row
# has fewer warps: for 5120 columns, 4 instead of 8.
_FORWARD_PARTS = (
    _Rule(
        {"generated": _YES, "adds": _YES, "rms": _NO, "cols": _above(28672)},
        _Tile(per_thread=24, most_warps=32, block=8192),
        "more warps, because a generated kernel needs more registers",
        "H200, dropout-add-LN, 32768 columns, with its backward: 207 to 193 us",
    ),
    _Rule(
        {"adds": _YES, "width": (8192,)},
        _Tile(per_thread=32),
        "programs of eight warps: several are resident on a multiprocessor",
        "H200, dropout-add-LN, 7168 and 8192 columns: 75.8 to 58.3 and 59.9 to 54.3 us",
    ),
    _Rule(
        {
            "generated": _YES,
            "adds": _YES,
            "rms": _YES,
            "parts": (5,),
            "width": _up_to(5120),
            "aligned": _YES,
        },
        _Tile(per_thread=24),
        "more warps, because a generated kernel needs more registers",
        "H200, dropout-add-RMSNorm, 5120 columns: 57.4 to 54.8 us",
    ),
    _Rule(
        {"adds": _YES, "rms": _NO, "cols": _above(_WIDEST_IN_32_WARPS)},
        _Tile(per_thread=24, block=4096),
        "16 warps have enough registers for the sum, the weight and the shift",
        "H100, 1024x32768: 94.5 to 85.4 us",
    ),
    _Rule(
        {"parts": (7,), "adds": _YES, "width": _up_to(WHOLE_FORWARD), "aligned": _YES},
        _Tile(per_thread=56),
        "fewer warps, with more elements per thread",
        "H200, dropout-add-LN, 13824 columns, with its backward: 186 to 174 us",
    ),
    _Rule(
        {"parts": (5,), "adds": _YES, "width": _up_to(5120), "aligned": _YES},
        _Tile(per_thread=56),
        "fewer warps; for wider rows these are slower if the sum is written",
        "H200, with and without a sum that is written",
    ),
    _Rule(
        {"adds": _NO, "width": _up_to(WHOLE_FORWARD), "aligned": _YES},
        _Tile(per_thread=24, most_warps=8),
        "tiles without idle lanes are loaded without a mask",
        "H200, with the backward: LayerNorm, 12288 columns, 112.6 to 99.9 us",
    ),
    _Rule(
        {"adds": _YES},
        _Tile(per_thread=24, most_warps=32, registers=64),
        "without the limit the compiler would use more registers for two inputs, and only one "
        "program of 16 warps would be resident",
        "H100, RMSNorm with a residual, 1024x32768: 114.7 to 74.1 us",
    ),
    _Rule(
        {},
        _Tile(per_thread=24, most_warps=32),
        "one input",
        "H100, LayerNorm, 1024x32768: 55.6 to 51.1 us",
    ),
)

# fp32 and fp64: fewer elements per thread than in 16 bits, and two passes for narrower rows
# already.
_FORWARD_WIDE_DTYPES = (
    _Rule(
        {"itemsize": _FP32, "block": _above(WHOLE_FORWARD), "adds": _YES},
        Config(4096, 1, 8, 3),
        "two passes: registers hold no such row",
    ),
    _Rule(
        {"itemsize": _FP32, "block": _above(WHOLE_FORWARD)},
        Config(16384, 1, 16),
        "two passes: registers hold no such row",
    ),
    _Rule(
        {"itemsize": _FP64, "block": _above(4096), "adds": _YES},
        Config(2048, 1, 4, 3),
        "two passes: registers hold no such row",
    ),
    _Rule(
        {"itemsize": _FP64, "block": _above(4096)},
        Config(8192, 1, 16),
        "two passes: registers hold no such row",
    ),
    _Rule(
        {"itemsize": _FP32, "block": (WHOLE_FORWARD,), "adds": _YES},
        _Tile(per_thread=16, most_warps=32, registers=64),
        "the program needs all registers of a multiprocessor",
    ),
    _Rule({"itemsize": _FP32, "block": (WHOLE_FORWARD,)}, _Tile(per_thread=32), "one input"),
    _Rule(
        {"block": _up_to(256), "bucket": _MANY_ROWS, "adds": _YES},
        _Tile(per_thread=4, rows=8),
        "a program has several narrow rows, if there are many rows",
    ),
    _Rule(
        {"block": _up_to(256), "bucket": _MANY_ROWS},
        _Tile(per_thread=1, rows=8, most_warps=4),
        "a program of up to four warps has several narrow rows, if there are many rows",
    ),
    _Rule(
        {"block": _up_to(256), "bucket": _UP_TO_SOME_ROWS, "adds": _YES},
        _Tile(per_thread=8),
        "few rows need short programs",
    ),
    _Rule(
        {"block": _up_to(2048), "bucket": _UP_TO_SOME_ROWS, "adds": _YES},
        _Tile(per_thread=4),
        "few rows need short programs",
    ),
    _Rule(
        {"block": _up_to(2048), "bucket": _SOME_ROWS},
        _Tile(per_thread=8),
        "few rows need short programs",
    ),
    _Rule(
        {"itemsize": _FP32, "bucket": _MANY_ROWS, "adds": _NO},
        _Tile(per_thread=16, elements=2048),
        "a program has two rows of up to 1024 columns",
        "H100, LayerNorm, 8192x1024: 25.2 to 24.2 us",
    ),
    _Rule({}, _Tile(per_thread=16, elements=1024), "all others"),
)

# 16 bits, rows that are read twice, in tiles.
_FORWARD_TWO_PASSES = (
    _Rule(
        {"adds": _YES, "bucket": _FROM_SOME_ROWS, "aligned": _YES},
        Config(4096, 1, 8, 3),
        "narrow tiles, whose loads are pipelined",
    ),
    _Rule(
        {},
        _two_passes,
        "two inputs that are loaded element by element take too many registers for whole rows",
        "H100: 344 us whole, 257 in tiles of 4096, 225 of 16384",
    ),
)

# 16 bits, a whole row in one tile.
_FORWARD_ONE_TILE = (
    _Rule(
        {"adds": _YES, "cols": (WHOLE_FORWARD,)},
        _Tile(per_thread=16, most_warps=32, registers=64),
        "the program needs all registers of a multiprocessor, but leaves no lane idle",
    ),
    _Rule(
        {"block": (WHOLE_FORWARD,)},
        _Tile(per_thread=32),
        "16 warps, and no persistent programs",
        "H100, RMSNorm, 2048x16384: 51.1 to 47.0 us",
    ),
    _Rule(
        {"block": _above(1023), "adds": _YES, "rms": _YES, "bucket": _FEW_ROWS},
        _Tile(per_thread=8),
        "few rows need short programs",
    ),
    _Rule(
        {"block": _above(1023), "adds": _YES, "bucket": _FEW_ROWS},
        _Tile(per_thread=16),
        "few rows need short programs",
    ),
    _Rule(
        {"block": (4096,), "adds": _YES, "bucket": _MANY_ROWS},
        _Tile(per_thread=32),
        "more elements per thread are faster with many rows and a residual",
    ),
    _Rule(
        {"block": (8192,), "adds": _NO, "bucket": _UP_TO_SOME_ROWS},
        _Tile(per_thread=32),
        "a thread has more elements",
    ),
    _Rule(
        {"block": _above(2047)},
        _Tile(per_thread=16),
        "more warps, for many rows",
        "H100, LayerNorm, 8192x4096: 48.0 to 47.0 us",
    ),
    _Rule(
        {"block": _up_to(128), "adds": _YES},
        _Tile(per_thread=8, elements=2048),
        "a program of eight warps has 16 rows or more",
    ),
    _Rule(
        {"block": _up_to(512), "adds": _YES, "bucket": _UP_TO_SOME_ROWS},
        _Tile(per_thread=8),
        "few rows need short programs",
    ),
    _Rule(
        {"block": _up_to(512), "adds": _YES},
        _Tile(per_thread=32, elements=1024),
        "more elements per thread are faster with many rows and a residual",
    ),
    # Of the calls with a residual, only those with a block of 1024 columns get here.
    _Rule({"adds": _YES}, _Tile(per_thread=16), "1024 columns"),
    # The rules below get calls without a residual, with blocks of at most 1024 columns.
    _Rule(
        {"bucket": _FEW_ROWS}, _Tile(per_thread=16, elements=1024), "few rows need short programs"
    ),
    _Rule(
        {"block": _up_to(512), "bucket": _SOME_ROWS},
        _Tile(per_thread=32, elements=1024),
        "a thread has more elements",
    ),
    _Rule({"bucket": _SOME_ROWS}, _Tile(per_thread=16), "1024 columns"),
    _Rule(
        {"block": (1024,), "aligned": _YES},
        _Tile(per_thread=16, elements=2048),
        "two rows of 1024 columns; unaligned rows were measured with the next rule's config",
    ),
    _Rule({}, _Tile(per_thread=32, elements=2048), "a thread has more elements"),
)


def forward(
    cols: int, itemsize: int, bucket: int, adds: bool, rms: bool, generated: bool = False
) -> Decision:
    """Returns the config of a forward: whole rows if they fit in registers, else tiles of rows."""
    block, parts = forward_tiles(cols, itemsize, adds, rms)
    # With few rows one tile of 8192 columns is faster, with many rows several tiles. An RMSNorm
    # without a residual has several tiles for any number of rows.
    is_rms_alone = rms and not adds
    is_one_tile_faster = bucket <= SOME and not is_rms_alone
    if block * parts == 8192 and is_one_tile_faster:
        block, parts = 8192, 1
    # The tiles select a table. The other properties of the call select a rule in the table.
    if parts > 1:
        rules: Sequence[_Rule] = _FORWARD_PARTS
    elif itemsize > 2:
        rules = _FORWARD_WIDE_DTYPES
    elif block > WHOLE_FORWARD:
        rules = _FORWARD_TWO_PASSES
    else:
        rules = _FORWARD_ONE_TILE
    call = Call(cols, itemsize, bucket, block, parts, adds, rms, generated=generated)
    return _decide(rules, call)


def forward_tiles(cols: int, itemsize: int, adds: bool, rms: bool) -> tuple[int, int]:
    """Returns the columns of a tile, and the number of tiles that hold a row.

    There are several tiles only in 16 bits: in wider dtypes they are not faster.

    Only tiles with idle lanes are loaded with a mask, and only the last tile of a row has any:

        6560 columns   |  2048  |  2048  |  2048  | 416, masked |

    A row of more than 16,384 columns needs all registers of a multiprocessor, usually in 32 warps.
    Then a tile has 4096 columns, four for each of 1024 threads. With a residual it has 8192, eight
    for each thread, because one draw of the dropout mask is for eight columns. Unaligned rows with
    a residual are read twice: to load two inputs element by element takes too many registers.
    """
    if itemsize > 2:
        return block_holding(cols), 1
    unaligned = is_unaligned(cols, itemsize)
    if cols > WHOLE_FORWARD:
        if cols > _WHOLE_FORWARD_16BIT or (adds and unaligned):
            return block_holding(cols), 1
        block = 8192 if adds else 4096
        return block, -(-cols // block)
    block, _ = tiles_holding(cols)
    # Narrower tiles leave fewer lanes idle: up to four tiles of 2048 columns instead of one of
    # 8192, and seven instead of one of 16,384.
    fits_four_tiles = block == 8192
    fits_seven_tiles = 6 * 2048 < cols <= 7 * 2048
    uses_seven_tiles = fits_seven_tiles and not (adds and rms)
    if (fits_four_tiles or uses_seven_tiles) and not unaligned:
        block = 2048
    return block, -(-cols // block)


# A thread loads 16 bytes at a time if rows begin at multiples of 16 bytes: eight columns of 16
# bits.
def is_unaligned(cols: int, itemsize: int) -> bool:
    """Whether rows of 16 bits are loaded element by element.

    This takes more registers: with a tile of 4096 columns they would spill. So such rows are in
    narrower tiles.
    """
    return itemsize == 2 and cols % 8 != 0


# --- the backward ---------------------------------------------------------------------------------

# A backward program holds a row and its gradient. For each column it also holds up to three sums
# over rows, in fp32, and its pipelined loop holds the next rows in shared memory. So it can hold
# only narrower rows than a forward program, and several programs share a wide row: see
# `norms.kernels.backward`.
#
# `SHARED` has the configs of programs that share rows, by bytes per element, the widest first.
_SHARED_NARROW = Config(1024, rows=1, warps=4, stages=3, per_sm=2, parts=3)
SHARED_TWO_ROWS = Config(4096, rows=2, warps=8, stages=3, per_sm=1)
SHARED = {
    2: (
        Config(8192, 1, 8, 3, 1),
        Config(2048, 1, 8, 3, 1, parts=3),
        Config(4096, 1, 4, 3, 2),
        _SHARED_NARROW,
    ),
    4: (Config(4096, 1, 8, 3, 1), Config(1024, 1, 8, 3, 1, parts=3), Config(2048, 1, 4, 3, 2)),
    8: (Config(2048, 1, 8, 1, 1), Config(1024, 1, 8, 1, 1)),
}
# The same for three sums in 16 bits. A program also holds the rows whose sums it still needs from
# the other programs. Registers then hold 6144 columns of one row, or 4096 columns of two rows.
_SHARED_THREE_SUMS = (
    Config(2048, 1, 8, 3, 1, parts=3),
    SHARED_TWO_ROWS,
    Config(2048, 1, 4, 3, 2),
    _SHARED_NARROW,
)
# Narrow programs, for rows in which wider programs would leave too many lanes idle.
SHARED_BY_MANY = Config(512, rows=1, warps=2, stages=3, per_sm=4, parts=3)
# Narrow programs were measured only if at most so many of them share a row.
_MOST_SHARING = 8


def _shared_backward(call: Call) -> Config:
    """Returns the config of programs that share rows: usually the widest with few idle lanes.

    There are two exceptions, both for aligned rows of 16 bits that are not too wide. With three
    sums, the config with the fewest idle lanes is returned. And if the number of idle lanes would
    exceed an eighth of the columns, the config of many narrow programs is returned.
    """
    cols = call.cols

    def lanes(config: Config) -> int:
        return config.lanes_for(cols)

    three_sums = call.itemsize == 2 and call.sums > 2
    configs = _SHARED_THREE_SUMS if three_sums else SHARED[call.itemsize]
    best = _widest_filled(configs, cols, min(configs, key=lanes))
    if call.itemsize > 2 or not call.aligned:
        return best
    if three_sums and cols <= _MOST_SHARING * _SHARED_NARROW.columns:
        best = min((_SHARED_NARROW, SHARED_TWO_ROWS), key=lanes)
    are_many_idle = 8 * lanes(best) > 9 * cols
    if are_many_idle and cols <= _MOST_SHARING * SHARED_BY_MANY.columns:
        return SHARED_BY_MANY
    return best


# Calls for which the registers of eight warps hold a whole row, the next row, and the sums. Calls
# that hold more values would spill 96 to 384 bytes per thread.
_LIGHT: dict[str, Container[object]] = {
    "drops": _NO,
    "holds_more": _NO,
    "bucket": _FROM_SOME_ROWS,
}
_REGISTERS_LEFT = "whole rows: beside the parameter gradients, registers hold so many columns"

# 16 bits, aligned rows of more than 4096 columns. (The positional arguments of `Config`: columns of
# a tile, rows, warps, stages, programs per multiprocessor.)
_BACKWARD_ALIGNED = (
    _Rule(
        {"generated": _YES, "sums": (3,), "cols": range(6145, 7169)},
        Config(1024, 1, 8, 4, 1, parts=7),
        "seven tiles leave no lanes idle, and four of 2048 columns would spill",
    ),
    _Rule(
        {"generated": _YES, "sums": (3,), "cols": range(7169, 8193)},
        Config(2048, 1, 8, 4, 1, parts=4),
        "16 warps would spill; eight warps need more stages, so that loads start earlier",
        "H200, dropout-add-LN, 8192 columns, with its forward: 172.2 to 145.9 us",
    ),
    _Rule(
        {"generated": _YES, "sums": (3,), "cols": range(9217, 10241)},
        Config(2048, 1, 8, 4, 1, parts=5),
        "whole rows fit if parameters are not held, but loaded again",
        "H200, dropout-add-LN, 10240 columns, with its forward: 169.7 to 150.0 us",
    ),
    _Rule(
        {
            "generated": _YES,
            "sums": _above(2),
            "cols": range(8193, 8 * _SHARED_NARROW.columns + 1),
        },
        _SHARED_NARROW,
        "two rows would spill",
        "H200, dropout-add-LN, 16384 columns, with its forward: 204.6 to 174.4 us",
    ),
    _Rule(
        {"generated": _YES, "sums": _above(2), "cols": _above(8 * _SHARED_NARROW.columns)},
        Config(2048, 1, 8, 3, 1, parts=3),
        "two rows would spill, and no more than eight programs of a row may wait for one another",
        "H200, dropout-add-LN, 32768 columns, with its forward: 226.8 to 199.6 us",
    ),
    _Rule(
        {**_LIGHT, "generated": _YES, "sums": (2,), "cols": range(12289, 14337)},
        Config(2048, 1, 8, 3, 1, parts=7),
        "whole rows fit if parameters are not held, but loaded again",
        "H200, LayerNorm, 14336 columns, with its forward: 115.3 to 98.3 us",
    ),
    _Rule(
        {"sums": _up_to(2), "drops": _YES, "cols": range(6145, 8192)},
        Config(2048, 1, 8, 3, 1, parts=4),
        "four tiles; 8192 columns are left out, as they spill 8 bytes and are not faster",
        "H200, dropout-add-RMSNorm, 7168 columns: 166.5 to 148.7 us",
    ),
    _Rule(
        {"sums": _up_to(2), "drops": _NO, "cols": range(6145, 8193)},
        Config(2048, 1, 8, 4, 1, parts=4),
        _REGISTERS_LEFT,
        "H200, LayerNorm, 6560 columns: 104.2 to 95.2 us",
    ),
    _Rule(
        {**_LIGHT, "sums": _up_to(2), "cols": range(8193, 10241)},
        Config(2048, 1, 8, 3, 1, parts=5),
        _REGISTERS_LEFT,
        "H200, bf16, forced configs: RMSNorm, 9216 columns, 99.1 to 88.3 us",
    ),
    _Rule(
        {**_LIGHT, "sums": _up_to(2), "cols": range(10241, 12289)},
        Config(2048, 1, 8, 3, 1, parts=6),
        _REGISTERS_LEFT,
        "H200, LayerNorm, 12288 columns: 112.6 to 99.9 us",
    ),
    _Rule(
        {**_LIGHT, "sums": _up_to(1), "cols": range(12289, 14337)},
        Config(2048, 1, 8, 3, 1, parts=7),
        _REGISTERS_LEFT,
        "H200, RMSNorm, 14336 columns: 106.4 to 90.8 us",
    ),
    _Rule(
        {
            "sums": (3,),
            "bucket": _FROM_SOME_ROWS,
            "cols": range(4097, 3 * SHARED_BY_MANY.columns + 1),
        },
        SHARED_BY_MANY,
        "with three gradients many programs of two warps are faster",
        "H200, dropout-add-LN, 4608 columns: 167.3 to 156.5 us",
    ),
)

# Rows that several programs share.
_BACKWARD_SHARED = (
    _Rule(
        {"itemsize": _FP64, "width": _above(_WHOLE_BACKWARD_64BIT)},
        _shared_backward,
        "registers do not hold the row and its column sums",
    ),
    _Rule(
        {"width": _above(WHOLE_BACKWARD)},
        _shared_backward,
        "registers do not hold the row and its column sums",
        "H200, dropout-add-LN, 32768 columns: .483 to .538 of a copy's speed",
    ),
)

# 16 bits, unaligned rows (whose elements are loaded one or two at a time) that programs share.
# Tiles of 8192 columns spill up to 536 bytes per thread, and configs of three parts up to 696.
_SHARED_UNALIGNED = Config(2048, rows=1, warps=4, stages=3, per_sm=2)


def _shared_unaligned(call: Call) -> Config:
    """Returns the config with the fewest idle lanes, for calls with registers for three parts."""
    configs = (_SHARED_UNALIGNED, _SHARED_NARROW)
    return min(configs, key=lambda config: config.lanes_for(call.cols))


_BACKWARD_UNALIGNED_SHARED = (
    _Rule(
        {"cols": range(8193, 16385), "sums": _up_to(1), "drops": _NO, "holds_more": _NO},
        _shared_unaligned,
        "the fewest idle lanes",
        "H200, RMSNorm, 15132 columns: 216.7 to 182.3 us",
    ),
    _Rule(
        {"cols": range(8193, 16385)},
        _SHARED_UNALIGNED,
        "wider parts spill registers",
        "H200, dropout-add-LN, 15132 columns: 482.1 to 288.4 us",
    ),
    _Rule(
        {"cols": _above(16384), "spare": _NO},
        Config(4096, 1, 8, 3, 1),
        "wider parts, and more elements per thread, spill registers",
        "H200, dropout-add-LN, 20001 columns: 621.7 to 427.8 us",
    ),
)

# 16 bits, unaligned rows of at most 8192 columns.
_BACKWARD_UNALIGNED = (
    _Rule(
        {"spare": _NO, "width": _above(4096)},
        Config(512, 1, 4, 1, 2, parts=3),
        "programs share the row; wider parts spill registers",
        "H200, dropout-add-LN, 4097 columns: 378.7 to 333.6 us",
    ),
    _Rule({"block": (8192,)}, Config(1024, 1, 8, 1, 1, parts=8), "wider parts spill registers"),
    _Rule(
        {"block": (4096,), "odd": _YES, "spare": _YES},
        Config(1024, 1, 16, 3, 1, parts=4),
        "the next rows are held in registers",
        "H100, RMSNorm, 8194x4095: 152.5 to 144.7 us",
    ),
    _Rule(
        {"block": (4096,), "odd": _YES},
        Config(1024, 1, 8, 3, 1, parts=4),
        "the next rows are held in registers",
        "H100, dropout-add-LN, 8194x4095: 295.7 to 259.8 us",
    ),
    _Rule(
        {"block": (4096,), "spare": _YES},
        Config(1024, 1, 4, 3, 2, parts=4),
        "wider parts spill registers",
    ),
    _Rule({"block": (4096,)}, Config(512, 1, 4, 1, 2, parts=8), "wider parts spill registers"),
)

# Whole rows in several tiles. On a multiprocessor, usually eight warps are resident.
_BACKWARD_PARTS = (
    _Rule(
        {"itemsize": _HALF, "width": (2560,), "parts": (5,), "spare": _YES, "aligned": _YES},
        Config(512, 1, 2, 4, 4, parts=5),
        "more programs, because registers are left",
    ),
    _Rule(
        {"itemsize": _HALF, "width": (5120,), "parts": (5,), "spare": _YES},
        Config(1024, 1, 4, 4, 2, parts=5),
        "more programs, because registers are left",
    ),
    _Rule(
        {"itemsize": _HALF, "width": (2560,), "parts": (5,)},
        Config(512, 1, 4, 4, 2, parts=5),
        "eight warps per multiprocessor",
    ),
    _Rule(
        {"itemsize": _HALF, "width": (5120,), "parts": (5,)},
        Config(1024, 1, 8, 4, 1, parts=5),
        "eight warps per multiprocessor",
        "H200, dropout-add-LN, 5120 columns: .651 to .709 of a copy's speed",
    ),
    _Rule(
        {"itemsize": _HALF, "width": (6144,), "parts": (3,)},
        Config(2048, 1, 8, 4, 1, parts=3),
        "eight warps per multiprocessor",
        "H200, dropout-add-LN, 6144 columns: .715 to .745 of a copy's speed",
    ),
    _Rule(
        {"width": (1536,), "parts": (3,)},
        Config(512, 1, 2, 3, 4, parts=3),
        "eight warps per multiprocessor",
    ),
    _Rule(
        {"width": (2560,), "parts": (5,)},
        Config(512, 1, 4, 3, 2, parts=5),
        "eight warps per multiprocessor",
    ),
    _Rule(
        {"width": (3072,), "parts": (3,)},
        Config(1024, 1, 4, 3, 2, parts=3),
        "eight warps per multiprocessor",
    ),
    _Rule(
        {"width": (5120,), "parts": (5,)},
        Config(1024, 1, 8, 3, 1, parts=5),
        "eight warps per multiprocessor",
    ),
    _Rule(
        {"width": (6144,), "parts": (3,)},
        Config(2048, 1, 8, 3, 1, parts=3),
        "eight warps per multiprocessor",
    ),
)

# fp32 and fp64, whole rows in one tile: programs have half as many elements as in 16 bits.
_BACKWARD_WIDE_DTYPES = (
    _Rule(
        {"itemsize": _FP32, "block": (2048,), "bucket": _MANY_ROWS},
        Config(2048, 1, 4, 3, 2),
        "half as many elements as in 16 bits",
    ),
    _Rule(
        {"itemsize": _FP32, "block": (2048,), "bucket": _SOME_ROWS},
        Config(2048, 2, 8, 3, 1),
        "half as many elements as in 16 bits",
    ),
    _Rule({"block": (2048,)}, Config(2048, 1, 8, 3, 1), "half as many elements as in 16 bits"),
    _Rule({"block": (4096,)}, Config(4096, 1, 8, 3, 1), "half as many elements as in 16 bits"),
    _Rule(
        {"itemsize": _FP32, "block": (8192,)},
        Config(8192, 1, 8, 3, 1),
        "half as many elements as in 16 bits",
    ),
    _Rule(
        {"block": _up_to(512), "bucket": _above(MANY)},
        _NarrowTile(of_row=8, of_tile=16, per_sm=4),
        "more programs for the most rows",
    ),
    _Rule(
        {"block": _up_to(512), "bucket": (FEW,)},
        _NarrowTile(of_row=4, of_tile=8, per_sm=2),
        "few rows need small tiles",
    ),
    _Rule(
        {"block": _up_to(512)},
        _NarrowTile(of_row=4, of_tile=16, per_sm=2),
        "half as many elements as in 16 bits",
    ),
    _Rule(
        {"itemsize": _FP64, "block": (1024,), "bucket": _FROM_SOME_ROWS},
        _NarrowTile(of_row=8, of_tile=16, per_sm=1),
        "an element takes two registers",
    ),
    _Rule(
        {"block": (1024,)},
        _NarrowTile(of_row=8, of_tile=16, per_sm=2),
        "half as many elements as in 16 bits",
    ),
)

# 16 bits, whole rows in one tile.
_BACKWARD_ONE_TILE = (
    _Rule(
        {"block": (8192,), "sums": (3,)},
        Config(8192, 1, 16, 3, 1),
        "three sums take more registers",
    ),
    _Rule({"block": (8192,)}, Config(8192, 1, 8, 3, 1), "two sums or fewer"),
    _Rule(
        {"block": (4096,), "bucket": _MANY_ROWS},
        Config(4096, 1, 4, 3, 2),
        "two programs per multiprocessor, for many rows",
    ),
    _Rule(
        {"block": (2048,), "bucket": _MANY_ROWS},
        Config(2048, 2, 4, 3, 2),
        "two programs per multiprocessor, for many rows",
    ),
    _Rule(
        {"block": (4096,), "bucket": _FEW_ROWS},
        Config(4096, 1, 8, 3, 1),
        "few rows need small tiles",
    ),
    _Rule({"block": (4096,)}, Config(4096, 2, 8, 3, 1), "one program per multiprocessor"),
    _Rule({"block": (2048,)}, Config(2048, 2, 8, 3, 1), "one program per multiprocessor"),
    _Rule(
        {"bucket": (FEW,)}, _NarrowTile(of_row=8, of_tile=16, per_sm=2), "few rows need small tiles"
    ),
    _Rule(
        {"block": _up_to(512), "bucket": _above(MANY)},
        _NarrowTile(of_row=8, of_tile=32, per_sm=4),
        "more programs for the most rows",
    ),
    _Rule(
        {"block": (256,), "bucket": (MANY,)},
        _NarrowTile(of_row=8, of_tile=32, per_sm=4),
        "more programs for the most rows",
    ),
    _Rule({}, _NarrowTile(of_row=8, of_tile=32, per_sm=2), "all others"),
)


# The tables in the order in which they are tried.
_BACKWARD_32_64BIT = (*_BACKWARD_SHARED, *_BACKWARD_PARTS, *_BACKWARD_WIDE_DTYPES)
_BACKWARD_16BIT = (
    *_BACKWARD_ALIGNED,
    *_BACKWARD_SHARED,
    *_BACKWARD_PARTS,
    *_BACKWARD_ONE_TILE,
)
_BACKWARD_16BIT_UNALIGNED = (
    *_BACKWARD_UNALIGNED_SHARED,
    *_BACKWARD_SHARED,
    *_BACKWARD_UNALIGNED,
    *_BACKWARD_PARTS,
    *_BACKWARD_ONE_TILE,
)


def backward(call: Call) -> Decision:
    """Returns the config of a backward.

    A program has whole rows if registers hold them and their column sums. Otherwise several
    programs share rows:

        whole rows                       shared rows
        +-----------------+              +-------+-------+-----+
        | program 0       |              | 0     | 1     | 2   |   exchange the sums
        +-----------------+              +-------+-------+-----+   of each row
        | program 1       |              | 3     | 4     | 5   |
        +-----------------+              +-------+-------+-----+
              columns                            columns
    """
    if call.itemsize > 2:
        return _decide(_BACKWARD_32_64BIT, call)
    return _decide(_BACKWARD_16BIT if call.aligned else _BACKWARD_16BIT_UNALIGNED, call)
