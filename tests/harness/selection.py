"""Which cases of a test the short suite runs.

A test over samples, dtypes and layouts has hundreds of cases, and a fault that only some of them
show is nearly always one of a single value: this dtype, that sample. So the short suite runs two
choices, one after the other, and ``--full`` the product, each night:

1. *Each value once.* Of each test it takes few cases in which every value of every parameter
   occurs. A tuple counts as its parts. A short table of several parameters is a list of examples,
   of which each row occurs. A `Case` counts as spec and dtype, and has any of its samples.
   ``@pytest.mark.pairs("spec dtype", "spec sample")`` names pairs of parameters of which every pair
   of values must occur too (pairwise covering: Kuhn, Wallace and Gallo 2004), ``pairs("sample")``
   a parameter of which every value must.
2. *Shared specs.* Operators and models cost much. The tests share them: each takes about four,
   another test others, so that each spec occurs in many tests.
   ``@pytest.mark.pairs("spec")`` is for a test that needs all of them, and
   ``@pytest.mark.shared("name", most=16)`` shares the values of another parameter.

The choice for a test depends on its own cases and its name alone, so all processes of a run make
the same, as does a run of its file. It is made before pytest makes an item of each case, of which
there would be ten times as many.
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

# How many specs a test takes that shares them.
_MOST_SPECS = 4
# A longer table is a product that was written out.
_MOST_ROWS = 12

Factor = tuple[str, Hashable]
Requirement = tuple[Factor, ...]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Candidate:
    """A case that a test may have: what the choice reads, before pytest makes an item of it.

    Attributes:
        test: the node id of the test, without the parameters of the case.
        name: the test's name with the parameters, as that of an item.
        params: the values of the parameters.
        marks: those of the test, the nearest first.
    """

    test: str
    name: str
    params: Mapping[str, Any]
    marks: Sequence[pytest.Mark] = ()

    def marked(self, name: str) -> list[pytest.Mark]:
        """The marks of this name, the nearest first."""
        return [mark for mark in self.marks if mark.name == name]


def shortened(cases: Sequence[Candidate]) -> list[Candidate]:
    """Those of a test's ``cases`` that the short suite runs, in their order."""
    chosen = _covering(_share(cases))
    _factors.cache_clear()
    return chosen


def _covering(cases: Sequence[Candidate]) -> list[Candidate]:
    """Few of a test's cases in which each value occurs, and each pair that its mark names."""
    if len(cases) == 1:
        return list(cases)
    pairs = _pairs(cases[0])
    factors = list(map(_factors, cases))
    _known(cases[0], pairs, {name for name, _ in factors[0]})
    values = cases[0].params.values()
    if any(isinstance(v, Case) for v in values) and not any("sample" in pair for pair in pairs):
        factors = [tuple(factor for factor in each if factor[0] != "sample") for each in factors]
    return cover(cases, [set(_requirements(each, pairs)) for each in factors])


def _pairs(case: Candidate) -> set[frozenset[str]]:
    """The pairs of parameters, and the parameters, that the mark of the case's test names."""
    return {frozenset(pair.split()) for mark in case.marked("pairs")[:1] for pair in mark.args}


def _share(cases: Sequence[Candidate]) -> Sequence[Candidate]:
    """A test's cases, of those values alone that it takes if tests share the values of a parameter."""
    sharing = _sharing(cases[0])
    if sharing is None:
        return cases
    name, most = sharing
    values = list(dict.fromkeys(dict(_factors(case))[name] for case in cases))
    step, start = -(-len(values) // most), zlib.crc32(cases[0].test.encode())
    taken = {value for i, value in enumerate(values, start) if i % step == 0}
    return [case for case in cases if dict(_factors(case))[name] in taken]


def _sharing(case: Candidate) -> tuple[str, int] | None:
    """The parameter whose values the case's test shares, and how many of them it takes."""
    marks = case.marked("shared")
    name, most = (marks[0].args[0], marks[0].kwargs["most"]) if marks else ("spec", _MOST_SPECS)
    may_share = {name for name, _ in _factors(case)} - frozenset().union(*_pairs(case))
    return (name, most) if name in may_share else None


def cover(items: Sequence[T], covered: Sequence[set[Requirement]]) -> list[T]:
    """Few ``items`` that together cover all that all of them cover.

    The one that adds most, time and again.

    ``covered`` is what each of them covers. Of equals the one of least rank.
    """
    missing = set().union(*covered)
    queue = [(-len(covered[i]), *_rank(item), i) for i, item in enumerate(items)]
    heapq.heapify(queue)
    chosen = []
    while missing:
        promised, *rank, i = heapq.heappop(queue)
        added = len(covered[i] & missing)
        # What an item adds only shrinks, so its position is updated when it is the first.
        if added < -promised:
            heapq.heappush(queue, (-added, *rank, i))
            continue
        missing -= covered[i]
        chosen.append(i)
    return [items[i] for i in sorted(chosen)]


def _rank(item: Any) -> tuple[bool, int]:
    """Cases with wide rows last; else by a checksum of the name.

    It is the same everywhere, and favours no dtype for being the first.
    """
    params = item.params.values() if isinstance(item, Candidate) else ()
    is_wide = any(isinstance(value, Case) and value.is_wide for value in params)
    return is_wide, zlib.crc32(str(getattr(item, "name", item)).encode())


def few_subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    """The empty subset of ``names``, and few in which any two occur in every way.

    Both, one of them, none.
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
    """The parameters of a case by name, with what stands for their values."""
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
    """The parameters that a mark ``parametrize`` names."""
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _key(value: Any) -> Hashable:
    """A key that is equal for the same value in another case.

    Cases share their values, so the object itself will do; a spec has a name, as in a `Case`.
    """
    if isinstance(value, Spec):
        return value.name
    return value if isinstance(value, (str, int, float, bytes)) else id(value)


def _requirements(
    factors: Iterable[Factor], pairs: set[frozenset[str]] | None
) -> Iterator[Requirement]:
    factors = list(factors)
    yield from ((factor,) for factor in factors)
    for first, second in itertools.combinations(factors, 2):
        if pairs is None or {first[0], second[0]} in pairs:
            yield first, second


def _known(case: Candidate, pairs: Iterable[frozenset[str]], names: set[str]) -> None:
    unknown = set().union(*pairs) - names
    if unknown:
        raise pytest.UsageError(
            f"{case.test}: pairs of {sorted(unknown)}, but the parameters are {sorted(names)}"
        )
