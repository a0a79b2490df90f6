"""What of a test's parameters the short suite runs.

Not their product, but a choice in which every value occurs.

A test over samples, dtypes and layouts has hundreds of cases, and a fault that only one of them
shows is nearly always one of a value or of two: this dtype, that sample in this layout. So the
short suite takes, of each test with many cases, few in which every value of every parameter occurs,
and every operator in each dtype. ``--full`` runs the product, each night.

A `Case` counts as three parameters: spec, sample and dtype; a tuple as its parts. The mark
``pairs`` names pairs of parameters of which every pair of values that occurs at all is to be
covered, as in ``@pytest.mark.pairs("spec dtype", "spec layout")`` (a pairwise covering; Kuhn,
Wallace and Gallo 2004 found it to show most faults). ``@pytest.mark.pairs`` alone shortens also a
test with few cases, and with ``of="spec dtype"`` values of other parameters need not occur.

The choice depends on the collected cases alone, so all processes of a run make the same, as does
every run.
"""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from support import Case

__all__ = ["FEW", "cover", "few_subsets", "shortened"]

# The product of a test with no more cases than this runs as it is, unless it is marked: it costs no
# time.
FEW = 8
# The pairs of a test without the mark.
_USUAL = {frozenset({"spec", "dtype"})}

Factor = tuple[str, Hashable]
Requirement = tuple[Factor, ...]
T = TypeVar("T")


def shortened(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those of ``items`` that the short suite runs, in their order."""
    tests: dict[Any, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    chosen: set[pytest.Item] = set()
    for cases in tests.values():
        mark = cases[0].get_closest_marker("pairs")
        if mark is None and len(cases) <= FEW:
            chosen.update(cases)
            continue
        pairs = _USUAL if mark is None else {frozenset(pair.split()) for pair in mark.args}
        of = None if mark is None else mark.kwargs.get("of")
        factors = [
            [(name, value) for name, value in _factors(item) if of is None or name in of.split()]
            for item in cases
        ]
        _known(cases[0], pairs - _USUAL, {name for found in factors for name, _ in found})
        chosen.update(cover(cases, [set(_requirements(found, pairs)) for found in factors]))
    return [item for item in items if item in chosen]


def cover(items: Sequence[T], covered: Sequence[set[Requirement]]) -> list[T]:
    """Few ``items`` that together cover all that all of them cover.

    The one that adds most, time and again.

    ``covered`` is what each of them covers. Of equals the one whose number, a checksum of its name,
    is least: it is the same everywhere, and favours no dtype for being the first.
    """
    missing = set().union(*covered)
    queue = [
        (-len(covered[i]), zlib.crc32(str(getattr(item, "name", item)).encode()), i)
        for i, item in enumerate(items)
    ]
    heapq.heapify(queue)
    chosen = []
    while missing:
        promised, number, i = heapq.heappop(queue)
        added = len(covered[i] & missing)
        if (
            added < -promised
        ):  # what an item adds only shrinks: its place in the queue is looked up when it comes up
            heapq.heappush(queue, (-added, number, i))
            continue
        missing -= covered[i]
        chosen.append(i)
    return [items[i] for i in sorted(chosen)]


def few_subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    """The empty subset of ``names``, and few in which any two occur in every way.

    Both, one of them, none.
    """
    subsets = [
        subset for count in range(len(names) + 1) for subset in itertools.combinations(names, count)
    ]
    found = cover(
        subsets,
        [
            set(_requirements([(name, name in subset) for name in names], None))
            for subset in subsets
        ],
    )
    return list(dict.fromkeys([(), *found]))


def _factors(item: pytest.Item) -> Iterator[Factor]:
    """The parameters of a case by name, with what stands for their values."""
    callspec = getattr(item, "callspec", None)
    for name, value in callspec.params.items() if callspec is not None else ():
        if isinstance(value, Case):
            yield from (("spec", value.spec.name), ("sample", value.name), ("dtype", value.dtype))
        elif isinstance(value, tuple) and not hasattr(value, "_fields"):
            yield from ((f"{name}.{i}", _key(part)) for i, part in enumerate(value))
        else:
            yield name, _key(value)


def _key(value: Any) -> Hashable:
    """What equals that of the same value in another case.

    Cases share their values, so the object itself will do.
    """
    return value if isinstance(value, (str, int, float, bytes)) else id(value)


def _requirements(
    factors: Iterable[Factor], pairs: set[frozenset[str]] | None
) -> Iterator[Requirement]:
    factors = list(factors)
    yield from ((factor,) for factor in factors)
    for first, second in itertools.combinations(factors, 2):
        if pairs is None or {first[0], second[0]} in pairs:
            yield first, second


def _known(item: pytest.Item, pairs: Iterable[frozenset[str]], names: set[str]) -> None:
    unknown = set().union(*pairs) - names
    if unknown:
        raise pytest.UsageError(
            f"{item.nodeid}: pairs of {sorted(unknown)}, but the parameters are {sorted(names)}"
        )
