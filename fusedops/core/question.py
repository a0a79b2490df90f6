"""What a choice of config depends on, what the choice is, and how a family answers for its kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Protocol

__all__ = [
    "BUCKET",
    "BUCKETS",
    "Config",
    "Family",
    "Grid",
    "Question",
    "around",
    "block_holding",
    "family_of",
    "fingerprint",
    "in_buckets",
    "register",
    "valid",
    "widths",
]


@dataclass(frozen=True)
class Config:
    """How a kernel cuts its work.

    Attributes:
        block_n: columns of a tile, a power of two.
        rows: rows of a tile, a power of two.
        warps: warps a program.
        stages: depth of the pipelined loop over tiles.
        per_sm: programs a multiprocessor, for persistent kernels; 0 for one program a tile.
        registers: most registers a thread may take; 0 for the compiler's choice.
    """

    block_n: int
    rows: int
    warps: int
    stages: int = 1
    per_sm: int = 0
    registers: int = 0


# The least number of rows in each bucket. What is compiled does not depend on the rows, only which config is best.
BUCKETS = (1, 16, 256, 4096, 65536)
# The bucket of a number of rows, by its bit length.
BUCKET = tuple(sum(1 << bits >> 1 >= least for least in BUCKETS[1:]) for bits in range(65))


def widths(*itemsizes: int) -> str:
    """The dtypes of a call's large tensors, as far as a choice depends on them: ``16bit``, or ``16-32bit`` for two."""
    bits = [size * 8 for size in itemsizes]
    return "-".join(map(str, bits if len(set(bits)) > 1 else bits[:1])) + "bit"


@dataclass(frozen=True)
class Question:
    """What a choice of config depends on.

    Attributes:
        kernel: the kernel's name in tables and caches.
        variant: what the family counts in: formula, dropout, how many tensors come in and sums go out.
        widths: the dtypes' widths, as `widths` writes them; dtypes of one width share an entry.
        cols: the hidden size N, or what the family has in its place.
        bucket: the number of rows, as an index into `BUCKETS`.
    """

    kernel: str
    variant: tuple[str, ...]
    widths: str
    cols: int
    bucket: int

    @property
    def itemsize(self) -> int:
        """Bytes an element of the widest tensor."""
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
    """What a shipped table holds of a family.

    Attributes:
        tails: the shapes, without their first side, the rows.
        coarse: fewer of them, for fp64.
        buckets: the buckets of rows to measure; others take the nearest's entry.
        asking: the shapes, likewise, that may ask a question with so many columns.
    """

    tails: tuple[tuple[int | str, ...], ...]
    coarse: tuple[tuple[int | str, ...], ...]
    buckets: tuple[int, ...]
    asking: Callable[[int], tuple[tuple[int | str, ...], ...]] = lambda cols: ((cols,),)


class Family(Protocol):
    """What a family's ``configs`` module says of its kernels."""

    def heuristic(self, question: Question) -> Config:
        """The config where nobody measured."""

    def candidates(self, question: Question) -> list[Config]:
        """The configs worth measuring, the heuristic's first; the same for every bucket of rows."""

    def valid(self, question: Question, config: Config) -> bool:
        """Whether a config, measured for a similar question, gives right results here and wastes little."""


# What `around` varies: factors of rows, warps and programs a multiprocessor, and what is added to the stages.
_MOVES = (
    (1, 1, 1, 0), (2, 1, 1, 0), (0.5, 1, 1, 0), (1, 2, 1, 0), (1, 0.5, 1, 0), (1, 1, 1, 1), (1, 1, 1, -1), (1, 1, 2, 0),
    (1, 1, 0.5, 0), (2, 2, 1, 0), (0.5, 0.5, 2, 0), (0.5, 0.5, 2, 1), (1, 0.5, 2, 0),
)  # fmt: skip


def around(config: Config, *, least: int = 4, most: int = 64) -> list[Config]:
    """A persistent config and its neighbours, with ``least`` to ``most`` elements of a tile for each thread."""
    found = []
    for rows, warps, per_sm, stages in _MOVES:
        near = replace(config, rows=int(config.rows * rows), warps=int(config.warps * warps),
                       per_sm=int(config.per_sm * per_sm), stages=config.stages + stages)  # fmt: skip
        whole = near.rows > 0 and 0 < near.warps <= 32 and near.per_sm > 0 and 1 <= near.stages <= 4
        if near == config or (whole and least <= near.block_n * near.rows // (32 * near.warps) <= most):
            found.append(near)
    return found


def block_holding(cols: int) -> int:
    """The narrowest block that holds a row: a power of two, at least 16."""
    return 1 << max(cols - 1, 15).bit_length()


def in_buckets(rule: Callable[[Question], Config], question: Question) -> list[Config]:
    """A heuristic's config for each bucket of rows: candidates that are the same for all are compiled once."""
    return [rule(replace(question, bucket=bucket)) for bucket in range(len(BUCKETS))]


_families: dict[str, Family] = {}


def register(family: Family, *kernels: str) -> None:
    """Makes a family answer for its kernels."""
    for kernel in kernels:
        _families[kernel] = family


def family_of(kernel: str) -> Family | None:
    """Who answers for a kernel; None for a name that no family knows."""
    return _families.get(kernel)


def valid(question: Question, config: Config) -> bool:
    """Whether a config read from a file is one that the kernel may run with."""
    family = family_of(question.kernel)
    if family is None or not all(isinstance(value, int) for value in astuple(config)):
        return False
    powers = all(value > 0 and value & (value - 1) == 0 for value in (config.block_n, config.rows, config.warps))
    limits = config.warps <= 32 and 1 <= config.stages <= 8 and 0 <= config.per_sm <= 32
    registers = config.registers == 0 or (16 <= config.registers <= 255 and config.registers % 8 == 0)
    return powers and limits and registers and family.valid(question, config)


def fingerprint(question: Question) -> str:
    """Of the configs that were there to choose from: where these change, what was measured no longer holds."""
    family = family_of(question.kernel)
    space = [] if family is None else sorted(astuple(config) for config in family.candidates(question))
    return hashlib.sha256(repr(space).encode()).hexdigest()[:16]
