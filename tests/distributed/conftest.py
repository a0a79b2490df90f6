"""Fixtures of the tests of several processes."""

from __future__ import annotations

import pytest

from backends import select_as_large


@pytest.fixture(autouse=True)
def rates_of_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the compile backend's tests. A spawned process calls `select_as_large` itself."""
    select_as_large(monkeypatch.setattr)
