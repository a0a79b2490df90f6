"""Fixtures of the compile backend's tests."""

from __future__ import annotations

import re

import pytest

from backends import select_as_large
from fusedops.backend import prediction, selection


@pytest.fixture(autouse=True)
def rates_of_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small regions are selected as large ones: by bytes, not by launches, nor by neighbours."""
    select_as_large(monkeypatch.setattr)


@pytest.fixture
def every_region(rates_of_large_tensors: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every region that may be an operator is one."""
    monkeypatch.setattr(prediction, "RATES", prediction.Work(calls=-1.0))


@pytest.fixture(autouse=True)
def errors_of_regions_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region that is left because of an error of Python's, a bug, fails the test."""
    reason_of = selection._reason_of

    def checked(error: Exception) -> str:
        reason = reason_of(error)
        assert not re.match(r"\w*(Error|Exception): ", reason), reason
        return reason

    monkeypatch.setattr(selection, "_reason_of", checked)
