"""Configs of kernels that reduce rows: tables of rules, for kernels by hand and generated ones.

A table's rules are tried from first to last, and the first that matches decides. Each holds the
reason for its config and, where one change was timed, where.
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

# The widest row that a forward program holds whole, and the widest in 16 bits.
WHOLE_FORWARD = 16384
_WHOLE_FORWARD_16BIT = 32768
# The widest LayerNorm with a residual that runs in 32 warps; wider ones run in 16, which have twice
# the registers each.
_WITH_VECTORS = 24576
# The widest that a backward program holds whole in 16 and 32 bits, and in 64 bits.
WHOLE_BACKWARD = 8192
_WHOLE_BACKWARD_64BIT = 2048
# Buckets of rows: up to 255; up to 4095; up to 65535.
FEW, SOME, MANY = 1, 2, 3
# The most warps of a forward program with a row in one tile.
MOST_WARPS = 16


# --- rules ----------------------------------------------------------------------------------------


# A multiprocessor has 65,536 registers, which its resident programs share. A program with a row of
# N columns in W warps has N / (32 W) elements of it in each thread, of one register each in fp32:
#
#     warps         threads    registers per thread, if the program is alone
#     8             256        255, the most that a thread may have
#     16            512        128
#     32            1024       64
#
# More warps hold wider rows; fewer exchange a row's sums in fewer steps, and leave room for another
# program, which loads while this one computes or stores. A limit of 64 registers lets two programs
# of 16 warps run at a time.
@dataclass(frozen=True)
class Call:
    """The properties of a call that rules test.

    Attributes:
        cols: the hidden size.
        itemsize: bytes per element of the widest tensor.
        bucket: the bucket of the number of rows.
        block: columns of a tile, a power of two.
        parts: tiles that hold a row.
        adds: whether a residual is a second input.
        rms: whether the norm is an RMSNorm.
        sums: parameter gradients of a backward.
        drops: whether a backward draws a mask.
        holds_more: whether `MORE_HELD` is in the key.
        generated: whether the kernel is generated. It has more values at a time than one by hand.
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
        """Lanes of the tiles that hold a row."""
        return self.block * self.parts

    @property
    def aligned(self) -> bool:
        """Whether rows are loaded in vectors."""
        return not is_unaligned(self.cols, self.itemsize)

    @property
    def odd(self) -> bool:
        """Whether the pipeline cannot copy rows of 16 bits: it copies four bytes or more."""
        return self.cols % 2 != 0

    @property
    def spare(self) -> bool:
        """Whether a backward has registers to spare: no mask, and at most two sums."""
        return self.sums < 3 and not self.drops


@dataclass(frozen=True)
class _Tile:
    """A forward tile, whose config follows from the call's block.

    Attributes:
        each: at most so many elements per thread.
        elements: a tile has as many rows as make so many elements.
        rows: a tile has at least so many rows.
        most: the most warps.
        registers: the limit of registers per thread in programs of 16 warps and more; 0 for none.
        block: columns of a tile, 0 for those of the call.
    """

    each: int
    elements: int = 0
    rows: int = 1
    most: int = MOST_WARPS
    registers: int = 0
    block: int = 0

    def __call__(self, call: Call) -> Config:
        block = self.block or call.block
        parts = -(-call.cols // block)
        rows = max(self.rows, self.elements // block)
        warps = fewest_warps(block * parts * rows, self.each, self.most)
        registers = self.registers if warps >= 16 else 0
        return Config(block, rows, warps, registers=registers, parts=parts)


@dataclass(frozen=True)
class _NarrowTile:
    """A backward tile of several narrow rows.

    A thread holds the elements of a tile three times: dy, the row, and their sums.

    Attributes:
        of_row: elements of a row per thread, which give the warps.
        of_tile: elements of a tile per thread, which give the rows.
        per_sm: programs per multiprocessor.
    """

    of_row: int
    of_tile: int
    per_sm: int

    def __call__(self, call: Call) -> Config:
        warps = fewest_warps(call.block, self.of_row)
        rows = min(max(self.of_tile * 32 * warps // call.block, 1), 16)
        return Config(call.block, rows, warps, 3, self.per_sm)


@dataclass(frozen=True)
class _Rule:
    """A row of a table.

    Attributes:
        when: the values that match, by property of `Call`.
        config: the config, or what makes it for a call.
        why: the reason.
        measured: the times before and after one change; without them the config was chosen by
            timing candidates on an H200.
    """

    when: Mapping[str, Container[object]]
    config: Config | Callable[[Call], Config]
    why: str
    measured: str = ""

    def matches(self, call: Call) -> bool:
        """Whether all properties have one of their values."""
        return all(getattr(call, name) in values for name, values in self.when.items())


@dataclass(frozen=True)
class Decision:
    """A config, and why it was chosen."""

    config: Config
    why: str


def _decide(rules: Sequence[_Rule], call: Call) -> Decision:
    """The config of the first rule that matches."""
    for rule in rules:
        if rule.matches(call):
            config = rule.config if isinstance(rule.config, Config) else rule.config(call)
            return Decision(config, rule.why)
    raise AssertionError(f"no rule for {call}")


def _above(limit: int) -> range:
    return range(limit + 1, 1 << 62)


def _up_to(limit: int) -> range:
    return range(limit + 1)


_YES, _NO = (True,), (False,)
_HALF, _FP32, _FP64 = (2,), (4,), (8,)
_FEW_ROWS, _SOME_ROWS, _UP_TO_SOME_ROWS = _up_to(FEW), (SOME,), _up_to(SOME)
_FROM_SOME_ROWS, _MANY_ROWS = _above(FEW), _above(SOME)


# --- the forward ----------------------------------------------------------------------------------


# Whatever the call, the forward reads x once if a program holds the row. What differs is how a row
# is laid out: in one tile, in parts, or in passes over tiles. `forward` chooses this first, then a
# table.
def _widest_filled(configs: Sequence[Config], cols: int, otherwise: Config) -> Config:
    """The first config that leaves at most a tenth of its lanes idle."""
    for config in configs:
        if config.lanes_for(cols) <= 1.1 * cols:
            return config
    return otherwise


def _two_passes(call: Call) -> Config:
    """The widest tile with few idle lanes, for rows that are read twice."""
    configs = (Config(16384, 1, 16), Config(8192, 1, 8), Config(4096, 1, 8))
    return _widest_filled(configs, call.cols, configs[-1])


# 16 bits, a whole row in several tiles. 24 elements per thread are usual; with 56 a row has fewer
# warps: 4, not 8, for 5120 columns.
_FORWARD_PARTS = (
    _Rule(
        {"generated": _YES, "adds": _YES, "rms": _NO, "cols": _above(28672)},
        _Tile(24, most=32, block=8192),
        "more warps, as a generated kernel has more values at a time",
        "H200, dropout-add-LN, 32768 columns, with its backward: 207 to 193 us",
    ),
    _Rule(
        {"adds": _YES, "width": (8192,)},
        _Tile(32),
        "programs of eight warps, of which a multiprocessor has several",
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
        _Tile(24),
        "more warps, as a generated kernel has more values at a time",
        "H200, dropout-add-RMSNorm, 5120 columns: 57.4 to 54.8 us",
    ),
    _Rule(
        {"adds": _YES, "rms": _NO, "cols": _above(_WITH_VECTORS)},
        _Tile(24, block=4096),
        "16 warps have registers for the sum, the weight and the shift",
        "H100, 1024x32768: 94.5 to 85.4 us",
    ),
    _Rule(
        {"parts": (7,), "adds": _YES, "width": _up_to(WHOLE_FORWARD), "aligned": _YES},
        _Tile(56),
        "a thread has more elements",
        "H200, dropout-add-LN, 13824 columns, with its backward: 186 to 174 us",
    ),
    _Rule(
        {"parts": (5,), "adds": _YES, "width": _up_to(5120), "aligned": _YES},
        _Tile(56),
        "wider rows lose by few warps where the sum is written",
        "H200, with and without a sum that is written",
    ),
    _Rule(
        {"adds": _NO, "width": _up_to(WHOLE_FORWARD), "aligned": _YES},
        _Tile(24, most=8),
        "tiles without idle lanes are loaded without a mask",
        "H200, with the backward: LayerNorm, 12288 columns, 112.6 to 99.9 us",
    ),
    _Rule(
        {"adds": _YES},
        _Tile(24, most=32, registers=64),
        "with two inputs the compiler would take more registers, and only one program of sixteen "
        "warps be resident",
        "H100, RMSNorm with a residual, 1024x32768: 114.7 to 74.1 us",
    ),
    _Rule({}, _Tile(24, most=32), "one input", "H100, LayerNorm, 1024x32768: 55.6 to 51.1 us"),
)

# fp32 and fp64: fewer elements per thread, and two passes from narrower rows on.
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
        _Tile(16, most=32, registers=64),
        "all registers of a multiprocessor",
    ),
    _Rule({"itemsize": _FP32, "block": (WHOLE_FORWARD,)}, _Tile(32), "one input"),
    _Rule(
        {"block": _up_to(256), "bucket": _MANY_ROWS, "adds": _YES},
        _Tile(4, rows=8),
        "narrow rows share programs where there are many",
    ),
    _Rule(
        {"block": _up_to(256), "bucket": _MANY_ROWS},
        _Tile(1, rows=8, most=4),
        "narrow rows share programs, of four warps, where there are many",
    ),
    _Rule(
        {"block": _up_to(256), "bucket": _UP_TO_SOME_ROWS, "adds": _YES},
        _Tile(8),
        "few rows need short programs",
    ),
    _Rule(
        {"block": _up_to(2048), "bucket": _UP_TO_SOME_ROWS, "adds": _YES},
        _Tile(4),
        "few rows need short programs",
    ),
    _Rule({"block": _up_to(2048), "bucket": _SOME_ROWS}, _Tile(8), "few rows need short programs"),
    _Rule(
        {"itemsize": _FP32, "bucket": _MANY_ROWS, "adds": _NO},
        _Tile(16, elements=2048),
        "two rows up to 1024 columns",
        "H100, LayerNorm, 8192x1024: 25.2 to 24.2 us",
    ),
    _Rule({}, _Tile(16, elements=1024), "all others"),
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
        _Tile(16, most=32, registers=64),
        "all registers of a multiprocessor, where no lane is idle",
    ),
    _Rule(
        {"block": (WHOLE_FORWARD,)},
        _Tile(32),
        "sixteen warps, and no persistent programs",
        "H100, RMSNorm, 2048x16384: 51.1 to 47.0 us",
    ),
    _Rule(
        {"block": _above(1023), "adds": _YES, "rms": _YES, "bucket": _FEW_ROWS},
        _Tile(8),
        "few rows need short programs",
    ),
    _Rule(
        {"block": _above(1023), "adds": _YES, "bucket": _FEW_ROWS},
        _Tile(16),
        "few rows need short programs",
    ),
    _Rule(
        {"block": (4096,), "adds": _YES, "bucket": _MANY_ROWS},
        _Tile(32),
        "with many rows and a residual a thread has more elements",
    ),
    _Rule(
        {"block": (8192,), "adds": _NO, "bucket": _UP_TO_SOME_ROWS},
        _Tile(32),
        "a thread has more elements",
    ),
    _Rule(
        {"block": _above(2047)},
        _Tile(16),
        "more warps where rows are many",
        "H100, LayerNorm, 8192x4096: 48.0 to 47.0 us",
    ),
    _Rule(
        {"block": _up_to(128), "adds": _YES},
        _Tile(8, elements=2048),
        "sixteen rows or more share eight warps",
    ),
    _Rule(
        {"block": _up_to(512), "adds": _YES, "bucket": _UP_TO_SOME_ROWS},
        _Tile(8),
        "few rows need short programs",
    ),
    _Rule(
        {"block": _up_to(512), "adds": _YES},
        _Tile(32, elements=1024),
        "with many rows and a residual a thread has more elements",
    ),
    # The rules above have all other blocks of calls with a residual.
    _Rule({"adds": _YES}, _Tile(16), "1024 columns"),
    # From here on there is no residual, and a block has 1024 columns or fewer.
    _Rule({"bucket": _FEW_ROWS}, _Tile(16, elements=1024), "few rows need short programs"),
    _Rule(
        {"block": _up_to(512), "bucket": _SOME_ROWS},
        _Tile(32, elements=1024),
        "a thread has more elements",
    ),
    _Rule({"bucket": _SOME_ROWS}, _Tile(16), "1024 columns"),
    _Rule(
        {"block": (1024,), "aligned": _YES},
        _Tile(16, elements=2048),
        "rows that are loaded element by element keep the config with which they were measured",
    ),
    _Rule({}, _Tile(32, elements=2048), "a thread has more elements"),
)


def forward(
    cols: int, itemsize: int, bucket: int, adds: bool, rms: bool, generated: bool = False
) -> Decision:
    """The config of the forward: a whole row per program where it fits, tiles beyond."""
    block, parts = forward_tiles(cols, itemsize, adds, rms)
    # The tiles decide which table applies. The rest of the call decides within the table.
    if block * parts == 8192 and (adds or not rms) and bucket <= SOME:
        block, parts = 8192, 1  # few rows alone are faster in one tile
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
    """The columns and the number of tiles that hold a row.

    Several in 16 bits alone: in fp32 they gain nothing.

    Tiles without idle lanes are loaded without a mask. In a row with idle lanes only the last tile
    needs one:

        6560 columns   |  2048  |  2048  |  2048  | 416, masked |

    Rows of more than 16,384 columns take all registers of a multiprocessor, most of them in 32
    warps. A tile has 4096 columns, four for each of 1024 threads. With a residual it has 8192,
    eight for each: one draw of the mask is for eight columns. Two inputs that are loaded element by
    element take too many registers: such rows are read twice.
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
    # Narrower tiles leave fewer lanes idle: four of 2048 columns for a row that one tile of 8192
    # would hold, seven for one of 16,384.
    wide = block == 8192
    seven_tiles = 6 * 2048 < cols <= 7 * 2048 and not (adds and rms)
    if (wide or seven_tiles) and not unaligned:
        block = 2048
    return block, -(-cols // block)


# A thread loads 16 bytes at a time if rows begin at multiples of 16 bytes: eight columns of 16
# bits.
def is_unaligned(cols: int, itemsize: int) -> bool:
    """Whether rows of 16 bits are loaded element by element.

    That takes more registers: a tile of 4096 columns spills them, so the parts of a row are
    narrower.
    """
    return itemsize == 2 and cols % 8 != 0


# --- the backward ---------------------------------------------------------------------------------

# Configs of programs that share rows, by bytes per element, the widest first.
# The backward holds, beside the row and its gradient, up to three sums over rows, in fp32 for each
# column, and the next rows, which the pipeline has in shared memory. So a program holds narrower
# rows than in the forward, and wide rows are shared: see `kernels.backward`.
_SHARED_NARROW = Config(1024, 1, 4, 3, 2, parts=3)
SHARED_TWO_ROWS = Config(4096, 2, 8, 3, 1)
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
# With three sums, and the rows that wait for the others' sums, registers hold six thousand columns
# of one row, or four thousand of two.
_SHARED_THREE_SUMS = (
    Config(2048, 1, 8, 3, 1, parts=3),
    SHARED_TWO_ROWS,
    Config(2048, 1, 4, 3, 2),
    _SHARED_NARROW,
)
# Short programs, for rows in which wider ones leave too many lanes idle.
SHARED_BY_MANY = Config(512, 1, 2, 3, 4, parts=3)
# Narrow programs were measured with at most so many that share a row.
_MOST_SHARING = 8


def _shared_backward(call: Call) -> Config:
    """The config of programs that share rows: the widest with at most a tenth of its lanes idle.

    With three sums in 16 bits the fewest idle lanes are best; where an eighth of the lanes would be
    idle, many short programs are.
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
    eighth_idle = 8 * lanes(best) > 9 * cols
    if eighth_idle and cols <= _MOST_SHARING * SHARED_BY_MANY.columns:
        return SHARED_BY_MANY
    return best


# Rows that registers hold whole in eight warps, with the next row and the sums. Calls that hold
# more spill 96 to 384 bytes per thread.
_LIGHT: dict[str, Container[object]] = {
    "drops": _NO,
    "holds_more": _NO,
    "bucket": _FROM_SOME_ROWS,
}
_REGISTERS_LEFT = "as many columns as the parameter gradients leave registers for"
_FORCED = "H200, bf16, forced configs: RMSNorm, 9216 columns, 99.1 to 88.3 us"

# 16 bits, aligned rows of more than 4096 columns.
_BACKWARD_ALIGNED = (
    _Rule(
        {"generated": _YES, "sums": (3,), "cols": range(6145, 7169)},
        Config(1024, 1, 8, 4, 1, parts=7),
        "seven tiles leave no lanes idle, and four of 2048 columns would spill",
    ),
    _Rule(
        {"generated": _YES, "sums": (3,), "cols": range(7169, 8193)},
        Config(2048, 1, 8, 4, 1, parts=4),
        "16 warps would spill, and the loads of eight have to be further ahead",
        "H200, dropout-add-LN, 8192 columns, with its forward: 172.2 to 145.9 us",
    ),
    _Rule(
        {"generated": _YES, "sums": (3,), "cols": range(9217, 10241)},
        Config(2048, 1, 8, 4, 1, parts=5),
        "whole rows, whose parameters are loaded again",
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
        "two rows would spill, and more than eight programs of a row cannot wait",
        "H200, dropout-add-LN, 32768 columns, with its forward: 226.8 to 199.6 us",
    ),
    _Rule(
        {**_LIGHT, "generated": _YES, "sums": (2,), "cols": range(12289, 14337)},
        Config(2048, 1, 8, 3, 1, parts=7),
        "whole rows, whose parameters are loaded again",
        "H200, LayerNorm, 14336 columns, with its forward: 115.3 to 98.3 us",
    ),
    _Rule(
        {"sums": _up_to(2), "drops": _YES, "cols": range(6145, 8192)},
        Config(2048, 1, 8, 3, 1, parts=4),
        "8192 columns spill 8 bytes in four tiles, and are not faster",
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
        _FORCED,
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
        "three gradients are faster in many programs of two warps",
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

# 16 bits, shared rows whose elements are loaded one or two at a time. Tiles of 8192 columns spill
# up to 536 bytes per thread, and those of three parts up to 696.
_SHARED_UNALIGNED = Config(2048, 1, 4, 3, 2)


def _shared_unaligned(call: Call) -> Config:
    """The config with the fewest idle lanes, where registers are left for three parts."""
    configs = (_SHARED_UNALIGNED, _SHARED_NARROW)
    return min(configs, key=lambda config: config.lanes_for(call.cols))


_BACKWARD_UNALIGNED_SHARED = (
    _Rule(
        {"cols": range(8193, 16385), "sums": _up_to(1), "drops": _NO, "holds_more": _NO},
        _shared_unaligned,
        "few lanes are idle",
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

# The same of narrower rows, with at most 8192 columns: wider parts spill registers.
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

# Whole rows in several tiles: eight warps a multiprocessor.
_BACKWARD_PARTS = (
    _Rule(
        {"itemsize": _HALF, "width": (2560,), "parts": (5,), "spare": _YES, "aligned": _YES},
        Config(512, 1, 2, 4, 4, parts=5),
        "more programs, as registers are left",
    ),
    _Rule(
        {"itemsize": _HALF, "width": (5120,), "parts": (5,), "spare": _YES},
        Config(1024, 1, 4, 4, 2, parts=5),
        "more programs, as registers are left",
    ),
    _Rule(
        {"itemsize": _HALF, "width": (2560,), "parts": (5,)},
        Config(512, 1, 4, 4, 2, parts=5),
        "eight warps a multiprocessor",
    ),
    _Rule(
        {"itemsize": _HALF, "width": (5120,), "parts": (5,)},
        Config(1024, 1, 8, 4, 1, parts=5),
        "eight warps a multiprocessor",
        "H200, dropout-add-LN, 5120 columns: .651 to .709 of a copy's speed",
    ),
    _Rule(
        {"itemsize": _HALF, "width": (6144,), "parts": (3,)},
        Config(2048, 1, 8, 4, 1, parts=3),
        "eight warps a multiprocessor",
        "H200, dropout-add-LN, 6144 columns: .715 to .745 of a copy's speed",
    ),
    _Rule(
        {"width": (1536,), "parts": (3,)},
        Config(512, 1, 2, 3, 4, parts=3),
        "eight warps a multiprocessor",
    ),
    _Rule(
        {"width": (2560,), "parts": (5,)},
        Config(512, 1, 4, 3, 2, parts=5),
        "eight warps a multiprocessor",
    ),
    _Rule(
        {"width": (3072,), "parts": (3,)},
        Config(1024, 1, 4, 3, 2, parts=3),
        "eight warps a multiprocessor",
    ),
    _Rule(
        {"width": (5120,), "parts": (5,)},
        Config(1024, 1, 8, 3, 1, parts=5),
        "eight warps a multiprocessor",
    ),
    _Rule(
        {"width": (6144,), "parts": (3,)},
        Config(2048, 1, 8, 3, 1, parts=3),
        "eight warps a multiprocessor",
    ),
)

# fp32 and fp64, in one tile: half as many elements as in 16 bits.
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
        _NarrowTile(8, 16, 4),
        "more programs for the most rows",
    ),
    _Rule(
        {"block": _up_to(512), "bucket": (FEW,)}, _NarrowTile(4, 8, 2), "few rows need small tiles"
    ),
    _Rule({"block": _up_to(512)}, _NarrowTile(4, 16, 2), "half as many elements as in 16 bits"),
    _Rule(
        {"itemsize": _FP64, "block": (1024,), "bucket": _FROM_SOME_ROWS},
        _NarrowTile(8, 16, 1),
        "an element takes two registers",
    ),
    _Rule({"block": (1024,)}, _NarrowTile(8, 16, 2), "half as many elements as in 16 bits"),
)

# 16 bits, in one tile.
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
        "two programs a multiprocessor where rows are many",
    ),
    _Rule(
        {"block": (2048,), "bucket": _MANY_ROWS},
        Config(2048, 2, 4, 3, 2),
        "two programs a multiprocessor where rows are many",
    ),
    _Rule(
        {"block": (4096,), "bucket": _FEW_ROWS},
        Config(4096, 1, 8, 3, 1),
        "few rows need small tiles",
    ),
    _Rule({"block": (4096,)}, Config(4096, 2, 8, 3, 1), "one program a multiprocessor"),
    _Rule({"block": (2048,)}, Config(2048, 2, 8, 3, 1), "one program a multiprocessor"),
    _Rule({"bucket": (FEW,)}, _NarrowTile(8, 16, 2), "few rows need small tiles"),
    _Rule(
        {"block": _up_to(512), "bucket": _above(MANY)},
        _NarrowTile(8, 32, 4),
        "more programs for the most rows",
    ),
    _Rule(
        {"block": (256,), "bucket": (MANY,)},
        _NarrowTile(8, 32, 4),
        "more programs for the most rows",
    ),
    _Rule({}, _NarrowTile(8, 32, 2), "all others"),
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

    A program has whole rows if their column sums fit in registers. Else several share rows.

        Rows that one program has        Rows that programs share
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
