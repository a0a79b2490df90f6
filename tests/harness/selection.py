"""Chooses the cases of each test that the short suite runs.

A test over samples, dtypes and layouts has hundreds of cases. A fault that occurs in some of them
nearly always depends on a single value: one dtype or one sample. So the short suite reduces the
cases of each test in two steps. ``--full``, which runs each night, runs all of them.

1. *Shared specs.* Operators and models are slow to test, so each test runs with about four specs,
   chosen by the test's name. Over all tests, each spec occurs in many.
   ``@pytest.mark.pairs("spec")`` exempts a test, which then runs with all specs.
   ``@pytest.mark.shared("name", most=16)`` shares the values of another parameter than ``spec``:
   each test runs with about 16 of them.
2. *Each value once.* From the remaining cases few are chosen in which every value of every
   parameter occurs. Each element of a tuple counts as a parameter. A parametrisation of several
   parameters at once with few rows is a list of examples: each row must occur. A `Case` counts as
   two parameters, spec and dtype; any of its samples may be chosen.
   ``@pytest.mark.pairs("spec dtype", "spec sample")`` names pairs of parameters: every pair of
   their values must occur (pairwise covering: Kuhn, Wallace and Gallo 2004).
   ``@pytest.mark.pairs("sample")`` names one parameter, all of whose values must occur.

The choice depends only on the test's cases and name, so all processes of a run choose the same
cases, and so does a run of a single file. It happens before pytest creates an item for each case,
because there would be ten times as many items.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from fusedops.core.spec import Spec
from support import Case

__all__ = ["Candidate", "cover", "few_subsets", "shortened"]

# The number of specs for each test that shares them.
_MOST_SPECS = 4
# A parametrisation of several parameters with more rows is taken for a product, not for examples.
_MOST_ROWS = 12

Factor = tuple[str, Hashable]
Requirement = tuple[Factor, ...]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Candidate:
    """A case that the short suite may choose, before pytest creates an item for it.

    Attributes:
        test: the node id of the test, without the parameters of the case.
        name: the test's name with the parameters, as in the name of an item.
        params: the values of the parameters.
        marks: the marks of the test, the nearest first.
    """

    test: str
    name: str
    params: Mapping[str, Any]
    marks: Sequence[pytest.Mark] = ()

    def marked(self, name: str) -> list[pytest.Mark]:
        """The marks of this name, the nearest first."""
        return [mark for mark in self.marks if mark.name == name]


def shortened(cases: Sequence[Candidate]) -> list[Candidate]:
    """Returns those of a test's ``cases`` that the short suite runs, in their order."""
    chosen = _covering(_share(cases))
    _factors.cache_clear()
    return chosen


def _covering(cases: Sequence[Candidate]) -> list[Candidate]:
    """Returns few of a test's cases: each value occurs, and each pair that the mark names."""
    if len(cases) == 1:
        return list(cases)
    pairs = _pairs(cases[0])
    factors = list(map(_factors, cases))
    _check_names(cases[0], pairs, {name for name, _ in factors[0]})
    has_samples = any(isinstance(value, Case) for value in cases[0].params.values())
    names_samples = any("sample" in pair for pair in pairs)
    if has_samples and not names_samples:  # any of the samples may be chosen
        factors = [
            tuple((name, key) for name, key in of_case if name != "sample") for of_case in factors
        ]
    return cover(cases, [set(_requirements(of_case, pairs)) for of_case in factors])


def _pairs(case: Candidate) -> set[frozenset[str]]:
    """Returns the pairs of parameters, and single parameters, that the mark ``pairs`` names."""
    return {frozenset(pair.split()) for mark in case.marked("pairs")[:1] for pair in mark.args}


def _share(cases: Sequence[Candidate]) -> Sequence[Candidate]:
    """Returns the cases with this test's share of the values, if it shares a parameter."""
    sharing = _sharing(cases[0])
    if sharing is None:
        return cases
    name, most = sharing
    values = list(dict.fromkeys(dict(_factors(case))[name] for case in cases))
    step, start = -(-len(values) // most), zlib.crc32(cases[0].test.encode())
    chosen = {value for i, value in enumerate(values, start) if i % step == 0}
    return [case for case in cases if dict(_factors(case))[name] in chosen]


def _sharing(case: Candidate) -> tuple[str, int] | None:
    """Returns the parameter that the test shares, and the most values that it takes, or None."""
    marks = case.marked("shared")
    name, most = (marks[0].args[0], marks[0].kwargs["most"]) if marks else ("spec", _MOST_SPECS)
    may_share = {name for name, _ in _factors(case)} - frozenset().union(*_pairs(case))
    return (name, most) if name in may_share else None


def cover(items: Sequence[T], covered: Sequence[set[Requirement]]) -> list[T]:
    """Returns few ``items`` that together fulfil every requirement that any of them fulfils.

    A greedy choice: next comes the item that fulfils most of the missing requirements; among
    equals, the one with the least `_rank`.

    Args:
        items: the items to choose from.
        covered: the requirements that each item fulfils.
    """
    missing = set().union(*covered)
    queue = [(-len(covered[i]), *_rank(item), i) for i, item in enumerate(items)]
    heapq.heapify(queue)
    chosen = []
    while missing:
        previous, *rank, i = heapq.heappop(queue)
        added = len(covered[i] & missing)
        # The number that an item adds only shrinks. It is updated when the item comes first.
        if added < -previous:
            heapq.heappush(queue, (-added, *rank, i))
            continue
        missing -= covered[i]
        chosen.append(i)
    return [items[i] for i in sorted(chosen)]


def _rank(item: Any) -> tuple[bool, int]:
    """Orders equally useful items: cases with wide rows last, else by a checksum of the name.

    The checksum is the same in all processes, and does not favour the first dtype.
    """
    params = item.params.values() if isinstance(item, Candidate) else ()
    is_wide = any(isinstance(value, Case) and value.is_wide for value in params)
    return is_wide, zlib.crc32(str(getattr(item, "name", item)).encode())


def few_subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns few subsets of ``names``, among them the empty one.

    For any two names there are subsets with both, with only the one, only the other, and neither.
    """
    subsets = [
        subset for count in range(len(names) + 1) for subset in itertools.combinations(names, count)
    ]
    result = cover(
        subsets,
        [
            set(_requirements([(name, name in subset) for name in names], None))
            for subset in subsets
        ],
    )
    return list(dict.fromkeys([(), *result]))


@functools.cache
def _factors(case: Candidate) -> tuple[Factor, ...]:
    """Returns names of the case's parameters with keys for their values."""
    return tuple(_read_factors(case))


def _read_factors(case: Candidate) -> Iterator[Factor]:
    for mark in case.marked("parametrize"):
        names = _names(mark.args[0])
        if len(names) > 1 and len(mark.args[1]) <= _MOST_ROWS:
            yield " ".join(names), tuple(_key(case.params[name]) for name in names)
    for name, value in case.params.items():
        if isinstance(value, Case):
            yield from (("spec", value.spec.name), ("sample", value.name), ("dtype", value.dtype))
        elif isinstance(value, tuple) and not hasattr(value, "_fields"):
            yield from ((f"{name}.{i}", _key(part)) for i, part in enumerate(value))
        else:
            yield name, _key(value)


def _names(names: str | Sequence[str]) -> list[str]:
    """Splits the first argument of a mark ``parametrize`` into names of parameters."""
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _key(value: Any) -> Hashable:
    """Returns a key that is equal for the same value in all cases.

    Cases share the objects, so the id of a value is enough. A spec has its name, as in a `Case`.
    """
    if isinstance(value, Spec):
        return value.name
    return value if isinstance(value, (str, int, float, bytes)) else id(value)


def _requirements(
    factors: Iterable[Factor], pairs: set[frozenset[str]] | None
) -> Iterator[Requirement]:
    """Yields each single value, and each pair of values of ``pairs``: all pairs if that is None."""
    factors = list(factors)
    yield from ((factor,) for factor in factors)
    for first, second in itertools.combinations(factors, 2):
        if pairs is None or {first[0], second[0]} in pairs:
            yield first, second


def _check_names(case: Candidate, pairs: Iterable[frozenset[str]], names: set[str]) -> None:
    """Raises a usage error if ``pairs`` names a parameter that the test does not have."""
    unknown = set().union(*pairs) - names
    if unknown:
        raise pytest.UsageError(
            f"{case.test}: pairs of {sorted(unknown)}, but the parameters are {sorted(names)}"
        )
