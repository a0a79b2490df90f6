"""Tuning keys, configs, and the interface in which each family describes its kernels' configs."""

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
        """The columns of a program."""
        return self.block_n * self.parts

    def lanes_for(self, cols: int) -> int:
        """Returns ``cols`` rounded up to a multiple of `columns`: a row's lanes, idle ones too."""
        return -(-cols // self.columns) * self.columns


# The smallest number of rows of each bucket. The number of rows changes which config is best, never
# what is compiled.
BUCKETS = (1, 16, 256, 4096, 65536)


def _bucket_of_length(bits: int) -> int:
    """Returns the bucket of all numbers of rows with a bit length."""
    fewest = 1 << bits >> 1  # 0 for a length of 0
    return sum(fewest >= least for least in BUCKETS[1:])


# Bit length of the number of rows -> index into `BUCKETS`. The length is enough, as all buckets
# begin at powers of two.
BUCKET = tuple(map(_bucket_of_length, range(65)))


def widths(*itemsizes: int) -> str:
    """Returns the widths of a call's large tensors: ``16bit``, or ``16-32bit`` if they differ."""
    bits = [size * 8 for size in itemsizes]
    if len(set(bits)) == 1:
        bits = bits[:1]
    return "-".join(map(str, bits)) + "bit"


# Every config is correct: it changes the speed and the order of sums. So a tuning key is not the
# key of the compiled code, and holds only what decides which config is fastest: dtypes by their
# widths, since bf16 and fp16 move the same bytes, and rows by their bucket. The cache adds the
# device and the versions: see `cache.path_of`.
@dataclass(frozen=True)
class TuningKey:
    """All that a choice of config depends on.

    Attributes:
        kernel: the kernel's name in tables and caches.
        variant: the family's parts: the kind of norm or activation, dropout, the number of inputs
            and of gradient sums.
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
        """Whether the kernel reads a tensor as one vector, of which ``cols`` elements are a row."""
        return self.kernel.startswith("pointwise")

    @property
    def itemsizes(self) -> list[int]:
        """Bytes per element of each width, in order."""
        return [int(bits) // 8 for bits in self.widths.removesuffix("bit").split("-")]

    @property
    def itemsize(self) -> int:
        """Bytes per element of the widest tensor."""
        return max(self.itemsizes)

    @property
    def group(self) -> str:
        """The key without kernel, columns and rows, as tables write it."""
        return "|".join((*self.variant, self.widths))

    def __str__(self) -> str:
        is_last = self.bucket + 1 == len(BUCKETS)
        end = "" if is_last else BUCKETS[self.bucket + 1] - 1
        return f"{self.kernel} {self.group} N={self.cols} M={BUCKETS[self.bucket]}..{end}"


@dataclass(frozen=True)
class Grid:
    """The shapes of a family that the shipped table covers.

    A tail is a shape without its first dimension, the rows: ``(4096,)``, ``(64, 64)``, or a name by
    which the family's spec makes the shape, as ``("R4096",)``.

    Attributes:
        tails: those to measure in fp16, bf16 and fp32.
        coarse: fewer ones, to measure in fp64.
        buckets: the buckets of rows to measure; other buckets use the nearest one's entry.
        tails_of: returns tails whose calls may have a tuning key with these ``cols``; more than one
            where different shapes share keys.
    """

    tails: tuple[tuple[int | str, ...], ...]
    coarse: tuple[tuple[int | str, ...], ...]
    buckets: tuple[int, ...]
    tails_of: Callable[[int], tuple[tuple[int | str, ...], ...]] = lambda cols: ((cols,),)


class Family(Protocol):
    """The interface of a family's ``configs`` module."""

    def heuristic(self, key: TuningKey) -> Config:
        """Returns the config where no measurement exists."""

    def candidates(self, key: TuningKey) -> list[Config]:
        """Returns the configs to measure, the heuristic's first; the same set for every bucket."""

    def valid(self, key: TuningKey, config: Config) -> bool:
        """Whether a config of a similar key is correct for this one and leaves few lanes idle."""


# The most programs that a multiprocessor runs.
_MOST_PER_SM = 32
# The most warps of a program.
_MOST_WARPS = 32

# The steps of `around`: factors of rows, warps and programs per multiprocessor, and an increment of
# the stages.
# Most move one parameter. The last ones trade rows for programs or warps, at about the same work a
# thread.
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
    """Returns a persistent config and its neighbours with enough work, but not too much, a thread.

    Args:
        config: the config.
        least: the fewest elements of a tile that a thread of a neighbour may have.
        most: the most.
    """
    configs = []
    for rows, warps, per_sm, stages in _MOVES:
        near = replace(
            config,
            rows=int(config.rows * rows),
            warps=int(config.warps * warps),
            per_sm=int(config.per_sm * per_sm),
            stages=config.stages + stages,
        )
        # The config itself comes without a condition: a heuristic may be outside of these limits.
        if near == config or (_is_launchable(near) and least <= _per_thread(near) <= most):
            configs.append(near)
    return configs


def _is_launchable(config: Config) -> bool:
    """Whether a neighbour of a persistent config is within the limits; a half of 1 is 0."""
    has_tile = config.rows > 0 and 0 < config.warps <= _MOST_WARPS
    return has_tile and 0 < config.per_sm <= _MOST_PER_SM and 1 <= config.stages <= 4


def _per_thread(config: Config) -> int:
    """Returns the elements of a tile per thread."""
    return config.columns * config.rows // (32 * config.warps)


def power_of_two(n: int) -> int:
    """Returns the least power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def fewest_warps(elements: int, each: int, most: int = 32) -> int:
    """Returns the fewest warps, at most ``most``, whose threads have at most ``each`` elements."""
    return min(power_of_two(-(-elements // (32 * each))), most)


def block_holding(cols: int) -> int:
    """Returns the narrowest block that holds a row: a power of two, at least 16."""
    return 1 << max(cols - 1, 15).bit_length()


# The numbers of tiles side by side, besides one, that `tiles_holding` chooses from: a width of
# three or five times a power of two leaves no lane idle in as many of them.
_PARTS = (3, 5)
# The narrowest of these tiles.
_LEAST_PART = 512
# The most tiles side by side in any config: families have some with other numbers than `_PARTS`.
MOST_PARTS = 8


def tiles_holding(
    cols: int, least: int = _LEAST_PART, numbers: Sequence[int] = _PARTS
) -> tuple[int, int]:
    """Returns the columns of a tile and the number of tiles that hold a row with least idle lanes.

    Of equal ones it takes the fewer tiles. Of several tiles, each has ``least`` columns or more.
    Their numbers are among those of ``numbers``.
    """
    tilings = [(block_holding(cols), 1)]
    for parts in numbers:
        block = block_holding(-(-cols // parts))
        if block >= least:
            tilings.append((block, parts))
    return min(tilings, key=math.prod)  # the first of equal ones


def config_of_sums(parts: int, cols: int) -> Config:
    """Returns the config of the kernel that adds up to ``parts`` partial sums of ``cols`` columns.

    A program has ``block_n`` columns and adds all of their partial sums, ``rows`` at a time:

        part 0      | program 0 | program 1 | ...
        part 1      |           |           |
        ...         |           |           |
    """
    if parts <= 32:
        return Config(64, 32, 4)  # all parts in one iteration
    # A program with many parts loads many at a time. Few columns would be few programs: narrow
    # tiles are more.
    if parts > 384 or cols <= 512:
        return Config(16, 256, 8)
    return Config(32, 64, 4)


def in_buckets(rule: Callable[[TuningKey], Config], key: TuningKey) -> list[Config]:
    """Returns the heuristic's config of every bucket of rows.

    With all of them, every bucket has the same candidates to compile.
    """
    return [rule(replace(key, bucket=bucket)) for bucket in range(len(BUCKETS))]


_families: dict[str, Family] = {}


def register(family: Family, *kernels: str) -> None:
    """Registers a family for its kernels' names."""
    for kernel in kernels:
        _families[kernel] = family


def family_of(kernel: str) -> Family | None:
    """Returns the family of a kernel; None for an unknown name."""
    return _families.get(kernel)


# The values that a config may have. A file may have been edited, or come from another release.
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
    """Whether the kernel may run with a config that was read from a file."""
    family = family_of(key.kernel)
    if family is None:
        return False
    for name, value in asdict(config).items():
        # True and False are integers to `isinstance`.
        if type(value) is not int or value not in _ALLOWED[name]:
            return False
    return family.valid(key, config)


def fingerprint(key: TuningKey) -> str:
    """Returns a hash of the candidates: when they change, earlier measurements are stale."""
    family = family_of(key.kernel)
    space: list[tuple[int, ...]] = []
    if family is not None:
        # In a fixed order: which candidate comes first, the heuristic's, depends on the bucket.
        space = sorted(astuple(config) for config in family.candidates(key))
    return hashlib.sha256(repr(space).encode()).hexdigest()[:16]
