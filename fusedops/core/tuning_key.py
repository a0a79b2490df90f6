"""Tuning keys, configs, and what each family declares about its kernels' configs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Protocol

__all__ = [
    "BUCKET",
    "BUCKETS",
    "MOST_PARTS",
    "Config",
    "Family",
    "Grid",
    "TuningKey",
    "adding",
    "around",
    "block_holding",
    "family_of",
    "fewest_warps",
    "fingerprint",
    "in_buckets",
    "power_of_two",
    "register",
    "tiles_holding",
    "valid",
    "widths",
]


@dataclass(frozen=True)
class Config:
    """The launch parameters of a kernel.

    Attributes:
        block_n: columns of a tile, a power of two.
        rows: rows of a tile, a power of two.
        warps: warps per program.
        stages: depth of the pipelined loop over tiles.
        per_sm: programs per multiprocessor, for persistent kernels; 0 for one program per tile.
        registers: the limit of registers per thread; 0 for the compiler's choice.
        parts: tiles of a row side by side in a program.
    """

    block_n: int
    rows: int
    warps: int
    stages: int = 1
    per_sm: int = 0
    registers: int = 0
    parts: int = 1

    @property
    def columns(self) -> int:
        """Columns that a program has."""
        return self.block_n * self.parts

    def lanes_for(self, cols: int) -> int:
        """Lanes of all programs, or passes, that a row of ``cols`` needs, with the idle ones."""
        return -(-cols // self.columns) * self.columns


# The smallest number of rows of each bucket. The number of rows changes which config is best, never what is compiled.
BUCKETS = (1, 16, 256, 4096, 65536)
# Bit length of the number of rows -> bucket.
BUCKET = tuple(sum(1 << bits >> 1 >= least for least in BUCKETS[1:]) for bits in range(65))


def widths(*itemsizes: int) -> str:
    """The widths of a call's large tensors as a string: ``16bit``, or ``16-32bit`` for two different ones."""
    bits = [size * 8 for size in itemsizes]
    return "-".join(map(str, bits if len(set(bits)) > 1 else bits[:1])) + "bit"


@dataclass(frozen=True)
class TuningKey:
    """What a choice of config depends on.

    Attributes:
        kernel: the kernel's name in tables and caches.
        variant: the family's own parts: the kind of norm or activation, dropout, the number of inputs and of gradient sums.
        widths: the dtypes' widths, as `widths` formats them; dtypes of one width share an entry.
        cols: the hidden size N, or the family's counterpart.
        bucket: the number of rows, as an index into `BUCKETS`.
    """

    kernel: str
    variant: tuple[str, ...]
    widths: str
    cols: int
    bucket: int

    @property
    def is_vector(self) -> bool:
        """Whether the kernel takes a tensor as one vector; ``cols`` are then elements that count as a row."""
        return self.kernel.startswith("pointwise")

    @property
    def itemsize(self) -> int:
        """Bytes per element of the widest tensor."""
        return max(map(int, self.widths.removesuffix("bit").split("-"))) // 8

    @property
    def group(self) -> str:
        """All but kernel, columns and rows."""
        return "|".join((*self.variant, self.widths))

    def __str__(self) -> str:
        end = BUCKETS[self.bucket + 1] - 1 if self.bucket + 1 < len(BUCKETS) else ""
        return f"{self.kernel} {self.group} N={self.cols} M={BUCKETS[self.bucket]}..{end}"


@dataclass(frozen=True)
class Grid:
    """The shapes of a family that the shipped table covers.

    Attributes:
        tails: the shapes without the first dimension, the rows.
        coarse: a subset of them, for fp64.
        buckets: the buckets of rows to measure; other buckets use the nearest one's entry.
        tails_of: from the columns of a tuning key to the shapes, likewise, whose calls may have that key.
    """

    tails: tuple[tuple[int | str, ...], ...]
    coarse: tuple[tuple[int | str, ...], ...]
    buckets: tuple[int, ...]
    tails_of: Callable[[int], tuple[tuple[int | str, ...], ...]] = lambda cols: ((cols,),)


class Family(Protocol):
    """The interface of a family's ``configs`` module."""

    def heuristic(self, key: TuningKey) -> Config:
        """The config where no measurement exists."""

    def candidates(self, key: TuningKey) -> list[Config]:
        """The configs to measure, the heuristic's first; the same set for every bucket of rows."""

    def valid(self, key: TuningKey, config: Config) -> bool:
        """Whether a config that was measured for a similar key is correct here and leaves few lanes idle."""


# The most programs that a multiprocessor runs.
_MOST_PER_SM = 32

# The steps of `around`: factors of rows, warps and programs per multiprocessor, and an increment of the stages.
_MOVES = (
    (1, 1, 1, 0), (2, 1, 1, 0), (0.5, 1, 1, 0), (1, 2, 1, 0), (1, 0.5, 1, 0), (1, 1, 1, 1), (1, 1, 1, -1), (1, 1, 2, 0),
    (1, 1, 0.5, 0), (2, 2, 1, 0), (0.5, 0.5, 2, 0), (0.5, 0.5, 2, 1), (1, 0.5, 2, 0),
)  # fmt: skip


def around(config: Config, *, least: int = 4, most: int = 64) -> list[Config]:
    """A persistent config and its neighbours that have ``least`` to ``most`` elements of a tile per thread."""
    found = []
    for rows, warps, per_sm, stages in _MOVES:
        near = replace(config, rows=int(config.rows * rows), warps=int(config.warps * warps),
                       per_sm=int(config.per_sm * per_sm), stages=config.stages + stages)  # fmt: skip
        whole = near.rows > 0 and 0 < near.warps <= 32 and 0 < near.per_sm <= _MOST_PER_SM and 1 <= near.stages <= 4
        if near == config or (whole and least <= near.columns * near.rows // (32 * near.warps) <= most):
            found.append(near)
    return found


def power_of_two(n: int) -> int:
    """The next one."""
    return 1 << max(n - 1, 0).bit_length()


def fewest_warps(elements: int, each: int, most: int = 32) -> int:
    """The fewest warps whose threads have at most so many elements each."""
    return min(power_of_two(-(-elements // (32 * each))), most)


def block_holding(cols: int) -> int:
    """The narrowest block that holds a row: a power of two, at least 16."""
    return 1 << max(cols - 1, 15).bit_length()


# A row of three or five times a power of two columns is as many tiles side by side.
_PARTS = (1, 3, 5)
MOST_PARTS = 8
_LEAST_PART = 512


def tiles_holding(cols: int) -> tuple[int, int]:
    """The columns of a tile and the number of tiles that hold a row with the fewest idle lanes; the fewer tiles if equal."""
    found = [(block_holding(-(-cols // parts)), parts) for parts in _PARTS]
    return min((tile for tile in found if tile[1] == 1 or tile[0] >= _LEAST_PART), key=math.prod)


def adding(parts: int, cols: int) -> Config:
    """The config of the kernel that adds up to so many parts of sums over rows, of so many columns each.

    Few columns are the work of few programs, which then load many parts at a time.
    """
    if parts <= 32:
        return Config(64, 32, 4)
    return Config(16, 256, 8) if parts > 384 or cols <= 512 else Config(32, 64, 4)


def in_buckets(rule: Callable[[TuningKey], Config], key: TuningKey) -> list[Config]:
    """The heuristic's config of every bucket of rows. With all of them, every bucket has the same candidates to compile."""
    return [rule(replace(key, bucket=bucket)) for bucket in range(len(BUCKETS))]


_families: dict[str, Family] = {}


def register(family: Family, *kernels: str) -> None:
    """Registers a family for its kernels' names."""
    for kernel in kernels:
        _families[kernel] = family


def family_of(kernel: str) -> Family | None:
    """The family of a kernel; None for an unknown name."""
    return _families.get(kernel)


def valid(key: TuningKey, config: Config) -> bool:
    """Whether the kernel may run with a config that was read from a file."""
    family = family_of(key.kernel)
    if family is None or not all(type(value) is int for value in astuple(config)):
        return False
    powers = all(value > 0 and value & (value - 1) == 0 for value in (config.block_n, config.rows, config.warps))
    limits = config.warps <= 32 and 1 <= config.stages <= 8 and 0 <= config.per_sm <= _MOST_PER_SM
    registers = config.registers == 0 or (16 <= config.registers <= 255 and config.registers % 8 == 0)
    return powers and limits and registers and 1 <= config.parts <= MOST_PARTS and family.valid(key, config)


def fingerprint(key: TuningKey) -> str:
    """A hash of the candidates: when they change, earlier measurements are stale."""
    family = family_of(key.kernel)
    space = [] if family is None else sorted(astuple(config) for config in family.candidates(key))
    return hashlib.sha256(repr(space).encode()).hexdigest()[:16]
