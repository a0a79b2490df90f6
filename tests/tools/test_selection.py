"""The short suite's choice of cases.

It covers every value of each parameter, it is small, and always the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fusedops
import mutants
import selection
from support import DTYPES, Case, cases


@dataclass(frozen=True)
class _Item:
    """As much of a collected case as the choice reads."""

    name: str
    params: dict[str, Any]
    mark: pytest.Mark | None = None
    nodeid: str = "test_file.py::test"
    path: Path = Path("test_file.py")

    __hash__ = object.__hash__

    @property
    def callspec(self) -> SimpleNamespace:
        return SimpleNamespace(params=self.params)

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        if self.mark is not None and self.mark.name == name:
            yield self.mark

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(self.iter_markers(name), None)


def _items(
    mark: pytest.Mark | None = None, test: str = "test", **parameters: list[Any]
) -> list[Any]:
    nodeid = f"test_file.py::{test}"
    return [
        _Item("-".join(map(str, values)), dict(zip(parameters, values, strict=True)), mark, nodeid)
        for values in itertools.product(*parameters.values())
    ]


def _pairs(items: list[Any], *names: str) -> set[tuple[Any, ...]]:
    return {tuple(item.params[name] for name in names) for item in items}


def test_every_value_occurs_in_few_cases() -> None:
    items = _items(a=list(range(7)), b=list("xyzuv"), c=[0.5, 1.5, 2.5, 3.5], d=[True, False])
    chosen = selection.shortened(items)
    for name in "abcd":
        assert _pairs(chosen, name) == _pairs(items, name)
    assert len(chosen) == 7  # of 280


def test_every_named_pair_of_values_occurs_in_few_cases() -> None:
    mark = pytest.mark.pairs("a b", "a c", "b c").mark
    items = _items(mark, a=list(range(7)), b=list("xyzuv"), c=[0.5, 1.5, 2.5, 3.5])
    chosen = selection.shortened(items)
    for names in itertools.combinations("abc", 2):
        assert _pairs(chosen, *names) == _pairs(items, *names)
    assert 35 <= len(chosen) <= 45  # of 140; seven times five pairs of the first two are the least


def test_the_choice_depends_on_no_order() -> None:
    items = _items(a=list(range(7)), b=list("xyz"), c=[0.5, 1.5, 2.5])
    assert set(selection.shortened(items)) == set(selection.shortened(items[::-1]))


def test_every_row_of_a_short_table_occurs() -> None:
    """Rows are examples; their values occur in others too."""
    rows = [(1, 1), (1, 2), (2, 1), (2, 2)]
    mark = pytest.mark.parametrize(("a", "b"), rows).mark
    items: list[Any] = [
        _Item(f"{a}-{b}-{c}", {"a": a, "b": b, "c": c}, mark) for a, b in rows for c in (1, 2, 3)
    ]
    chosen = selection.shortened(items)
    assert len(chosen) == 4 and _pairs(chosen, "a", "b") == set(rows)
    assert _pairs(chosen, "c") == {(1,), (2,), (3,)}


def test_tests_share_the_specs() -> None:
    specs = list(range(20))
    tests = [_items(test=f"test_{i}", spec=specs, c=[1, 2]) for i in range(30)]
    shares = [_pairs(selection.shortened(test), "spec") for test in tests]
    assert {len(share) for share in shares} == {4}
    assert set().union(*shares) == {(spec,) for spec in specs}


def test_the_choice_depends_on_no_other_test() -> None:
    tests = [_items(test=f"test_{i}", spec=list(range(20)), c=[1, 2]) for i in range(3)]
    together = selection.shortened([item for test in tests for item in test])
    assert together == [item for test in tests for item in selection.shortened(test)]


def test_a_test_that_names_the_specs_takes_all() -> None:
    mark = pytest.mark.pairs("spec").mark
    tests = [_items(mark, test=f"test_{i}", spec=list(range(20))) for i in range(4)]
    assert len(selection.shortened([item for test in tests for item in test])) == 80


def test_the_mark_names_what_is_shared() -> None:
    mark = pytest.mark.shared("name", most=2).mark
    chosen = selection.shortened(_items(mark, name=list("abcdef"), c=[1, 2]))
    assert len(_pairs(chosen, "name")) == 2 == len(_pairs(chosen, "c"))


def test_the_mark_names_the_pairs_that_count() -> None:
    mark = pytest.mark.pairs("a c").mark
    parameters: dict[str, list[Any]] = {"a": [1, 2, 3], "b": list(range(6)), "c": [1, 2]}
    assert len(selection.shortened(_items(**parameters))) == 6
    chosen = selection.shortened(_items(mark, **parameters))
    assert len(_pairs(chosen, "a", "c")) == 6 and len(_pairs(chosen, "b")) == 6 and len(chosen) < 12


def test_a_mark_that_names_no_parameter_is_refused() -> None:
    with pytest.raises(pytest.UsageError, match=r"pairs of \['z'\]"):
        selection.shortened(_items(pytest.mark.pairs("a z").mark, a=[1, 2], b=[1, 2]))


def _chosen_cases(*pairs: str) -> tuple[list[Case], list[Case]]:
    """All cases of a test, and those that are chosen with this mark."""
    mark = pytest.mark.pairs(*pairs).mark if pairs else None
    every: list[Case] = list(cases().args[1])
    items: list[Any] = [_Item(case.id, {"case": case}, mark) for case in every]
    return every, [item.params["case"] for item in selection.shortened(items)]


def test_a_case_has_any_sample() -> None:
    every, chosen = _chosen_cases()
    assert {case.dtype for case in chosen} == set(DTYPES) >= {torch.float64}
    assert 3 <= len({case.spec.name for case in chosen}) <= len(chosen) == 4
    assert not any(case.is_wide for case in chosen) and any(case.is_wide for case in every)


def test_values_are_tested_of_every_sample_and_of_every_spec_in_each_dtype() -> None:
    every, chosen = _chosen_cases("spec dtype", "sample")  # as in test_values.py
    assert {case.name for case in chosen} == {case.name for case in every}
    assert {(case.spec.name, case.dtype) for case in chosen} == {
        (case.spec.name, case.dtype) for case in every
    }
    assert len(chosen) < len(every) / 5


def test_any_two_names_are_in_and_out_of_a_subset() -> None:
    names = tuple("abcdefgh")
    subsets = selection.few_subsets(names)
    assert subsets[0] == () and len(subsets) <= 12
    for first, second in itertools.combinations(names, 2):
        assert {(first in subset, second in subset) for subset in subsets} == set(
            itertools.product([False, True], repeat=2)
        )


def test_each_mutant_applies() -> None:
    """The line that a mutant changes occurs once in its file."""
    package = Path(fusedops.__file__).parent
    counts = {
        mutant.fault: (package / mutant.path).read_text(encoding="utf-8").count(mutant.before)
        for mutant in mutants.MUTANTS
    }
    assert set(counts.values()) == {1}, [fault for fault, count in counts.items() if count != 1]
