"""Fixtures of the compile backend's tests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusedops.backend import prediction


@pytest.fixture(autouse=True)
def rates_of_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small regions are selected as large ones: by bytes, not by launches, nor by neighbours."""
    rates = replace(prediction.RATES, kernels=0.0, calls=0.0, sums=0.0, summed=3.0)
    monkeypatch.setattr(prediction, "RATES", rates)
    monkeypatch.setattr(prediction, "among_neighbours", lambda alone, *_: alone)


@pytest.fixture
def every_region(rates_of_large_tensors: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every region that may be an operator is one."""
    monkeypatch.setattr(prediction, "RATES", prediction.Work(calls=-1.0))
