"""Fixtures of the compile backend's tests."""

from __future__ import annotations

import pytest

from fusedops.backend import selection


@pytest.fixture(autouse=True)
def operators_of_small_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions of the tests' small tensors become operators in inference, too."""
    monkeypatch.setattr(selection, "BYTES_OF_LAUNCH", 0)
