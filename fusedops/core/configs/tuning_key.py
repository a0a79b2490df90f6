"""Tuning keys, configs, and the interface by which a family describes its kernels' configs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Protocol

__all__ = [
    "BUCKET",
    "BUCKETS",
    "MOST_PARTS",
    "Config",
    "Family",
    "Grid",
    "TuningKey",
    "around",
    "block_holding",
    "config_of_sums",
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
        parts: the number of tiles, side by side, in which a program holds a row.
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
        """The number of columns that a program holds at a time."""
        return self.block_n * self.parts

    def lanes_for(self, cols: int) -> int:
        """Returns ``cols`` rounded up to a multiple of `columns`, as some lanes may be idle."""
        return -(-cols // self.columns) * self.columns


# The smallest number of rows of each bucket. The bucket affects only which config is chosen:
# kernels are not compiled for a number of rows.
BUCKETS = (1, 16, 256, 4096, 65536)


def _bucket_of_length(bits: int) -> int:
    """Returns the bucket of numbers of rows with this bit length."""
    rows = 1 << bits >> 1  # the smallest number of this length: 0 for length 0
    return sum(rows >= fewest_rows for fewest_rows in BUCKETS[1:])


# The index into `BUCKETS`, by the bit length of the number of rows. The length determines the
# bucket, because all buckets begin at powers of two.
BUCKET = tuple(map(_bucket_of_length, range(65)))


def widths(*itemsizes: int) -> str:
    """Returns the widths of a call's large tensors: ``16bit``, or ``16-32bit`` if they differ."""
    bits = [size * 8 for size in itemsizes]
    if len(set(bits)) == 1:
        bits = bits[:1]
    return "-".join(map(str, bits)) + "bit"


# Every config gives correct results: it affects only the speed and the order of sums. So a tuning
# key is not the key of the compiled code. It contains only what determines which config is fastest.
# For example, it has the widths of dtypes, because bf16 and fp16 move the same bytes, and the
# bucket of the number of rows. The cache adds the device and the versions: see `cache.path_of`.
@dataclass(frozen=True)
class TuningKey:
    """Identifies a choice of config: everything that the choice depends on.

    Attributes:
        kernel: the kernel's name in tables and caches.
        variant: words that the family chooses: for the kind of norm or activation, for dropout, for
            the number of inputs and of gradient sums.
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
        """Whether the kernel reads a tensor as one vector; then ``cols`` elements are a row."""
        return self.kernel.startswith("pointwise")

    @property
    def itemsizes(self) -> list[int]:
        """The bytes per element of each width, in order."""
        return [int(bits) // 8 for bits in self.widths.removesuffix("bit").split("-")]

    @property
    def itemsize(self) -> int:
        """The bytes per element of the widest tensor."""
        return max(self.itemsizes)

    @property
    def group(self) -> str:
        """The key's variant and widths, as text: a part of the names in tables."""
        return "|".join((*self.variant, self.widths))

    def __str__(self) -> str:
        is_last = self.bucket + 1 == len(BUCKETS)
        end = "" if is_last else BUCKETS[self.bucket + 1] - 1
        return f"{self.kernel} {self.group} N={self.cols} M={BUCKETS[self.bucket]}..{end}"


@dataclass(frozen=True)
class Grid:
    """The shapes of a family that the shipped table covers.

    A tail is a shape without its first dimension, the rows: ``(4096,)``, ``(64, 64)``, or the name
    of a shape in the family's spec, such as ``("R4096",)``.

    Attributes:
        tails: the tails to measure in fp16, bf16 and fp32.
        coarse: the tails to measure in fp64, which are fewer.
        buckets: the buckets of rows to measure; other buckets use the nearest one's entry.
        tails_of: a function that returns the tails whose calls may have a tuning key with so many
            ``cols``; more than one if different shapes share keys.
    """

    tails: tuple[tuple[int | str, ...], ...]
    coarse: tuple[tuple[int | str, ...], ...]
    buckets: tuple[int, ...]
    tails_of: Callable[[int], tuple[tuple[int | str, ...], ...]] = lambda cols: ((cols,),)


class Family(Protocol):
    """The interface of a family's ``configs`` module."""

    def heuristic(self, key: TuningKey) -> Config:
        """Returns the config for a key that was not measured."""

    def candidates(self, key: TuningKey) -> list[Config]:
        """Returns the configs to measure, the heuristic's first: for each bucket the same set."""

    def valid(self, key: TuningKey, config: Config) -> bool:
        """Whether a similar key's config is correct for this key and leaves few lanes idle."""


# The most programs that a multiprocessor runs.
_MOST_PER_SM = 32
# The most warps of a program.
_MOST_WARPS = 32

# The neighbours of a config in `around`: factors of rows, of warps and of programs per
# multiprocessor, and an increment of the stages. Most neighbours differ in one parameter. The last
# four differ in several, with about the same number of elements per thread.
#
#   rows, warps, per_sm, stages
_MOVES = (
    (1, 1, 1, 0),
    (2, 1, 1, 0),
    (0.5, 1, 1, 0),
    (1, 2, 1, 0),
    (1, 0.5, 1, 0),
    (1, 1, 1, 1),
    (1, 1, 1, -1),
    (1, 1, 2, 0),
    (1, 1, 0.5, 0),
    (2, 2, 1, 0),
    (0.5, 0.5, 2, 0),
    (0.5, 0.5, 2, 1),
    (1, 0.5, 2, 0),
)


def around(config: Config, *, least: int = 4, most: int = 64) -> list[Config]:
    """Returns the config of a persistent kernel, and neighbours of it to measure.

    Args:
        config: the config.
        least: the fewest elements of a tile that a neighbour may have per thread.
        most: the most elements of a tile that a neighbour may have per thread.
    """
    configs = []
    for rows, warps, per_sm, stages in _MOVES:
        neighbour = replace(
            config,
            rows=int(config.rows * rows),
            warps=int(config.warps * warps),
            per_sm=int(config.per_sm * per_sm),
            stages=config.stages + stages,
        )
        # The config itself is always included: the heuristic's may exceed the limits.
        if neighbour == config or _is_within_limits(neighbour, least, most):
            configs.append(neighbour)
    return configs


def _is_within_limits(config: Config, least: int, most: int) -> bool:
    """Whether a persistent kernel can be launched with this neighbour of a config.

    A thread must also have ``least`` to ``most`` elements.
    """
    # Half of 1, rounded down, is 0.
    has_tile = config.rows > 0 and 0 < config.warps <= _MOST_WARPS
    if not has_tile:
        return False
    fits_threads = least <= _per_thread(config) <= most
    return fits_threads and 0 < config.per_sm <= _MOST_PER_SM and 1 <= config.stages <= 4


def _per_thread(config: Config) -> int:
    """Returns the elements of a tile per thread."""
    return config.columns * config.rows // (32 * config.warps)


def power_of_two(n: int) -> int:
    """Returns the smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def fewest_warps(elements: int, per_thread: int, most: int = 32) -> int:
    """Returns the fewest warps whose threads have at most ``per_thread`` elements.

    The number is a power of two, and at most ``most``: then a thread may have more elements.
    """
    return min(power_of_two(-(-elements // (32 * per_thread))), most)


def block_holding(cols: int) -> int:
    """Returns the columns of the narrowest block that holds a row: a power of two, at least 16."""
    return 1 << max(cols - 1, 15).bit_length()


# The numbers of tiles side by side, besides one, from which `tiles_holding` chooses by default. For
# example, three tiles leave no lane idle if a row has three times a power of two columns.
_PARTS = (3, 5)
# The fewest columns of each of these tiles.
_LEAST_PART = 512
# The most tiles side by side in any config. Families also have configs with numbers not in
# `_PARTS`.
MOST_PARTS = 8


def tiles_holding(
    cols: int, least: int = _LEAST_PART, numbers: Sequence[int] = _PARTS
) -> tuple[int, int]:
    """Returns the columns of a tile, and the number of tiles side by side that hold a row.

    It chooses the tiling with the fewest idle lanes. If several have equally few, it chooses the
    one with the fewest tiles.

    Args:
        cols: the columns of a row.
        least: the fewest columns of a tile, if there are several.
        numbers: the numbers of tiles to choose from, besides one.
    """
    tilings = [(block_holding(cols), 1)]
    for parts in numbers:
        block = block_holding(-(-cols // parts))
        if block >= least:
            tilings.append((block, parts))
    return min(tilings, key=math.prod)  # the first of equal ones


def config_of_sums(parts: int, cols: int) -> Config:
    """Returns the config of `sum_partials_kernel`, which adds up ``parts`` rows of partial sums.

    Each row has ``cols`` columns. A program has ``block_n`` of these columns, and adds up all their
    partial sums, ``rows`` at a time:

        part 0      | program 0 | program 1 | ...
        part 1      |           |           |
        ...         |           |           |
    """
    if parts <= 32:
        return Config(block_n=64, rows=32, warps=4)  # all parts in one iteration
    # With many parts, a program loads many at a time. With few columns, narrow tiles make more
    # programs.
    if parts > 384 or cols <= 512:
        return Config(block_n=16, rows=256, warps=8)
    return Config(block_n=32, rows=64, warps=4)


def in_buckets(rule: Callable[[TuningKey], Config], key: TuningKey) -> list[Config]:
    """Returns the configs that ``rule`` has for every bucket of rows.

    If all of them are candidates, every bucket has the same candidates. So compiling the candidates
    of one bucket compiles the candidates of all buckets.
    """
    return [rule(replace(key, bucket=bucket)) for bucket in range(len(BUCKETS))]


_families: dict[str, Family] = {}


def register(family: Family, *kernels: str) -> None:
    """Registers a family under the names of its kernels."""
    for kernel in kernels:
        _families[kernel] = family


def family_of(kernel: str) -> Family | None:
    """Returns the family of a kernel; None for an unknown name."""
    return _families.get(kernel)


# The values that `valid` allows for each parameter of a config.
_POWERS = frozenset(1 << bit for bit in range(64))
_ALLOWED: dict[str, Collection[int]] = {
    "block_n": _POWERS,
    "rows": _POWERS,
    "warps": frozenset({1, 2, 4, 8, 16, 32}),
    "stages": range(1, 9),
    "per_sm": range(_MOST_PER_SM + 1),
    "registers": frozenset({0, *range(16, 256, 8)}),
    "parts": range(1, MOST_PARTS + 1),
}


def valid(key: TuningKey, config: Config) -> bool:
    """Whether the kernel may run with a config that was read from a file.

    The file may have been edited, or come from another release.
    """
    family = family_of(key.kernel)
    if family is None:
        return False
    for name, value in asdict(config).items():
        # Not `isinstance`: it accepts True and False as integers.
        if type(value) is not int or value not in _ALLOWED[name]:
            return False
    return family.valid(key, config)


def fingerprint(key: TuningKey) -> str:
    """Returns a hash of a key's candidates: if it changes, earlier measurements are stale."""
    family = family_of(key.kernel)
    space: list[tuple[int, ...]] = []
    if family is not None:
        # Sorted, because the order of the candidates depends on the bucket: the heuristic's config
        # comes first.
        space = sorted(map(astuple, family.candidates(key)))
    return hashlib.sha256(repr(space).encode()).hexdigest()[:16]
