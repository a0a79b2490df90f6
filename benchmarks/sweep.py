"""The sweeps: each operator along lines of hidden sizes, slices, rows and widths.

This module lists what to time and in which order. `runner` times it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from fusedops.core.spec import Shape, Spec

from . import timing
from .cases import DTYPES, Case
from .providers import build
from .results import Row, elements

__all__ = [
    "AXES",
    "DEFAULT_DTYPES",
    "EFFORT",
    "ELEMENTS",
    "Line",
    "Work",
    "chunks",
    "lines",
    "plan",
    "remaining",
]

AXES = ("hidden", "slices", "rows", "widths")
DEFAULT_DTYPES = ("bf16", "fp32", "fp16")  # in the order of measuring
PROVIDERS = ("fusedops", "eager", "eager_combined", "compile", "liger")
# The elements of each shape along a line of hidden sizes, so that all have the same floor. In 16
# bits they are 64 MiB.
ELEMENTS = 1 << 25
EFFORT = timing.Effort(replay_ms=8.0, warmup_ms=3.0, blocks=3, block_ms=3.0, launch_bound_calls=80)
_ROWS = tuple(4**k for k in range(10))  # 1 to 262,144
_MOST_ELEMENTS = 1 << 28  # along a line of rows
_RANDOM_WIDTHS = 5  # the number of widths besides those of the specs
_SEED = 20
_ODD = 2  # the rank of sizes that are no power of two

Pairs = tuple[tuple[str, str], ...]  # (mode, provider)


@dataclass(frozen=True)
class Line:
    """An operator's shapes along one axis.

    Attributes:
        op: the operator.
        axis: which of `AXES` it is.
        tail: the sizes besides the rows and the size that varies, such as the number of slices;
            along "rows", the shape without the rows. It may be empty.
        points: pairs of the size that varies and the shape.
    """

    op: str
    axis: str
    tail: tuple[int, ...]
    points: tuple[tuple[int, Shape], ...]


@dataclass(frozen=True)
class Work:
    """One case, and the modes and providers to time."""

    case: Case
    pairs: Pairs


def lines(spec: Spec, axes: Collection[str] = AXES) -> Iterator[Line]:
    """Yields the lines along which an operator is swept."""
    # A tail is a shape without rows; `_filled` adds as many rows as make `ELEMENTS`.
    sweep = spec.sweep
    if "hidden" in axes and sweep.hidden:
        yield Line(
            spec.name,
            "hidden",
            sweep.hidden[0][:-1],
            tuple((tail[-1], _filled(tail)) for tail in sweep.hidden),
        )
    if "slices" in axes and sweep.slices:
        yield Line(
            spec.name,
            "slices",
            sweep.slices[0][1:],
            tuple((tail[0], _filled(tail)) for tail in sweep.slices),
        )
    if "rows" in axes:
        for tail in sweep.rows:
            counts = (rows for rows in _ROWS if rows * math.prod(tail) <= _MOST_ELEMENTS)
            yield Line(spec.name, "rows", tail, tuple((rows, (rows, *tail)) for rows in counts))
    if "widths" in axes and sweep.widths:
        tails = (*sweep.widths, *_random_tails(sweep.widths))
        for size in (ELEMENTS, ELEMENTS // 4):
            points = tuple((tail[-1], _filled(tail, size)) for tail in tails)
            yield Line(spec.name, "widths", tails[0][:-1], points)
    if "widths" in axes and sweep.ragged:
        columns = [(elements(name), name) for name in sweep.ragged]
        yield Line(
            spec.name,
            "widths",
            (),
            tuple((cols, (ELEMENTS // cols, name)) for cols, name in columns),
        )


def plan(
    specs: Iterable[Spec], axes: Collection[str] = AXES, dtypes: Sequence[str] = DEFAULT_DTYPES
) -> list[Case]:
    """Returns every case once, in three rounds, so that an interrupted run has some of each line.

    The first round has numbers of rows that are powers of sixteen, and hidden sizes and numbers of
    slices that are powers of four. The second has the other powers of two, and the third the rest.
    Within a round the cases are sorted by dtype.
    """
    ranked: dict[tuple[str, str, str], tuple[int, int, Case]] = {}
    for spec in specs:
        for line in lines(spec, axes):
            for x, sides in line.points:
                for position, dtype in enumerate(dtypes):
                    case = Case(spec, sides, DTYPES[dtype])
                    ranked.setdefault(
                        (case.op, case.shape, dtype), (_rank(line.axis, x), position, case)
                    )
    return [case for _, _, case in sorted(ranked.values(), key=lambda entry: entry[:2])]


def remaining(
    cases: Iterable[Case], modes: Sequence[str], names: Sequence[str] | None, done: Iterable[Row]
) -> list[Work]:
    """Returns what is still to be timed: modes and providers without a row in ``done``.

    ``names`` are the providers, None for the default ones. An operator may not have all of them.
    """
    keys = {row.key for row in done}
    present: dict[str, list[str]] = {}
    work = []
    for case in cases:
        if case.op not in present:
            present[case.op] = [
                name for name in names or PROVIDERS if build(name, case.spec) is not None
            ]
        wanted = ((mode, name) for mode in modes for name in present[case.op])
        pairs = tuple(
            pair for pair in wanted if (case.op, case.shape, case.dtype_name, *pair) not in keys
        )
        if pairs:
            work.append(Work(case, pairs))
    return work


def chunks(work: Sequence[Work], size: int) -> Iterator[Sequence[Work]]:
    """Yields the work in its order, in parts of up to ``size`` cases."""
    for start in range(0, len(work), size):
        yield work[start : start + size]


def _random_tails(tails: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Yields tails of other widths in the same range: random multiples of eight.

    So the results do not only show widths that were chosen.
    """
    widths = [tail[-1] for tail in tails]
    multiples = range(min(widths) // 8 * 8, max(widths), 8)
    other_widths = [width for width in multiples if width not in widths]
    for width in random.Random(_SEED).sample(other_widths, _RANDOM_WIDTHS):
        yield (*tails[0][:-1], width)


def _filled(tail: tuple[int, ...], elements: int = ELEMENTS) -> tuple[int, ...]:
    """Returns the shape with this tail and at most this many elements."""
    return (elements // math.prod(tail), *tail)


def _rank(axis: str, x: int) -> int:
    """Returns the round of a size along an axis: see `plan`."""
    power = x.bit_length() - 1
    if x != 1 << power:
        return _ODD
    return int(power % (4 if axis == "rows" else 2) != 0)
