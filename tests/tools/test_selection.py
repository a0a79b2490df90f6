"""The choice of cases for the short suite.

It is small, always the same, and has every value of each parameter.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import fusedops
import mutants
import selection
from selection import Candidate
from support import DTYPES, Case, cases


def _cases(
    mark: pytest.Mark | None = None, test: str = "test", **parameters: list[Any]
) -> list[Candidate]:
    """All cases of a test: the product of its parameters."""
    marks = [] if mark is None else [mark]
    return [
        Candidate(
            f"test_file.py::{test}",
            "-".join(map(str, values)),
            dict(zip(parameters, values, strict=True)),
            marks,
        )
        for values in itertools.product(*parameters.values())
    ]


def _pairs(cases: list[Candidate], *names: str) -> set[tuple[Any, ...]]:
    return {tuple(case.params[name] for name in names) for case in cases}


def test_every_value_occurs_in_few_cases() -> None:
    every = _cases(a=list(range(7)), b=list("xyzuv"), c=[0.5, 1.5, 2.5, 3.5], d=[True, False])
    chosen = selection.shortened(every)
    for name in "abcd":
        assert _pairs(chosen, name) == _pairs(every, name)
    assert len(chosen) == 7  # of 280


def test_every_named_pair_of_values_occurs_in_few_cases() -> None:
    mark = pytest.mark.pairs("a b", "a c", "b c").mark
    every = _cases(mark, a=list(range(7)), b=list("xyzuv"), c=[0.5, 1.5, 2.5, 3.5])
    chosen = selection.shortened(every)
    for names in itertools.combinations("abc", 2):
        assert _pairs(chosen, *names) == _pairs(every, *names)
    assert 35 <= len(chosen) <= 45  # of 140; a and b alone have 35 pairs


def test_choice_does_not_depend_on_the_order() -> None:
    every = _cases(a=list(range(7)), b=list("xyz"), c=[0.5, 1.5, 2.5])
    assert set(selection.shortened(every)) == set(selection.shortened(every[::-1]))


def test_every_row_of_a_short_table_occurs() -> None:
    """Each row is an example, so it must run even if each of its values occurs in another row."""
    rows = [(1, 1), (1, 2), (2, 1), (2, 2)]
    mark = pytest.mark.parametrize(("a", "b"), rows).mark
    every = [
        Candidate("test_file.py::test", f"{a}-{b}-{c}", {"a": a, "b": b, "c": c}, [mark])
        for a, b in rows
        for c in (1, 2, 3)
    ]
    chosen = selection.shortened(every)
    assert len(chosen) == 4 and _pairs(chosen, "a", "b") == set(rows)
    assert _pairs(chosen, "c") == {(1,), (2,), (3,)}


def test_tests_share_the_specs() -> None:
    specs = list(range(20))
    tests = [_cases(test=f"test_{i}", spec=specs, c=[1, 2]) for i in range(30)]
    shares = [_pairs(selection.shortened(test), "spec") for test in tests]
    assert {len(share) for share in shares} == {4}
    assert set().union(*shares) == {(spec,) for spec in specs}


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("letter", "abc")
def test_cases_are_chosen_while_they_are_collected(
    request: pytest.FixtureRequest, full: bool, number: int, letter: str
) -> None:
    """Five of the 15 cases of this test are items, unless the command line names one."""
    items = [item for item in request.session.items if item.path == Path(__file__)]
    own = [item for item in items if item.originalname == request.node.originalname]
    names_a_case = any("::" in argument for argument in request.config.args)
    assert full or names_a_case or len(own) <= 5


def test_mark_pairs_of_spec_chooses_all_specs() -> None:
    mark = pytest.mark.pairs("spec").mark
    assert len(selection.shortened(_cases(mark, spec=list(range(20))))) == 20


def test_mark_shared_limits_the_values_of_a_parameter() -> None:
    mark = pytest.mark.shared("name", most=2).mark
    chosen = selection.shortened(_cases(mark, name=list("abcdef"), c=[1, 2]))
    assert len(_pairs(chosen, "name")) == 2 == len(_pairs(chosen, "c"))


def test_only_pairs_that_the_mark_names_are_covered() -> None:
    mark = pytest.mark.pairs("a c").mark
    parameters: dict[str, list[Any]] = {"a": [1, 2, 3], "b": list(range(6)), "c": [1, 2]}
    assert len(selection.shortened(_cases(**parameters))) == 6
    chosen = selection.shortened(_cases(mark, **parameters))
    assert len(_pairs(chosen, "a", "c")) == 6 and len(_pairs(chosen, "b")) == 6 and len(chosen) < 12


def test_mark_that_names_no_parameter_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match=r"pairs of \['z'\]"):
        selection.shortened(_cases(pytest.mark.pairs("a z").mark, a=[1, 2], b=[1, 2]))


def _chosen_cases(*pairs: str) -> tuple[list[Case], list[Case]]:
    """All cases of a test with the mark ``pairs``, or without a mark, and those that are chosen."""
    mark = pytest.mark.pairs(*pairs).mark if pairs else None
    every: list[Case] = list(cases().args[1])
    marks = [] if mark is None else [mark]
    candidates = [Candidate("test_file.py::test", case.id, {"case": case}, marks) for case in every]
    return every, [chosen.params["case"] for chosen in selection.shortened(candidates)]


def test_choice_without_a_mark() -> None:
    """All dtypes, some specs and some samples are chosen. Wide samples are the last choice."""
    every, chosen = _chosen_cases()
    assert len(chosen) == 4
    assert {case.dtype for case in chosen} == set(DTYPES)
    assert len({case.spec.name for case in chosen}) >= 3
    assert any(case.is_wide for case in every)
    assert not any(case.is_wide for case in chosen)


def test_choice_for_test_values() -> None:
    """Every sample, and every spec in each dtype."""
    every, chosen = _chosen_cases("spec dtype", "sample")  # as in test_values.py
    assert {case.name for case in chosen} == {case.name for case in every}
    assert {(case.spec.name, case.dtype) for case in chosen} == {
        (case.spec.name, case.dtype) for case in every
    }
    assert len(chosen) < len(every) / 5


def test_few_subsets_have_each_combination_of_two_names() -> None:
    names = tuple("abcdefgh")
    subsets = selection.few_subsets(names)
    assert subsets[0] == () and len(subsets) <= 12
    for first, second in itertools.combinations(names, 2):
        assert {(first in subset, second in subset) for subset in subsets} == set(
            itertools.product([False, True], repeat=2)
        )


def test_text_that_a_mutant_changes_occurs_once() -> None:
    package = Path(fusedops.__file__).parent
    counts = {
        mutant.fault: (package / mutant.path).read_text(encoding="utf-8").count(mutant.before)
        for mutant in mutants.MUTANTS
    }
    assert set(counts.values()) == {1}, [fault for fault, count in counts.items() if count != 1]
