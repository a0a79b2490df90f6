"""Fixtures of the compile backend's tests."""

from __future__ import annotations

import pytest

from backends import select_as_large
from fusedops.backend import prediction


@pytest.fixture(autouse=True)
def rates_of_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small regions are selected as large ones: by bytes, not by launches, nor by neighbours."""
    select_as_large(monkeypatch.setattr)


@pytest.fixture
def every_region(rates_of_large_tensors: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every region that may be an operator is one."""
    monkeypatch.setattr(prediction, "RATES", prediction.Work(calls=-1.0))
