"""Calls return the types that type checkers infer.

`make lint` runs mypy on the file with these calls.
"""

from __future__ import annotations

import builtins
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from torch import Tensor

import typed_client
from fusedops.activations.ops import APPROXIMATIONS, Approximate
from fusedops.core.activations import ACTIVATIONS, ActivationName
from fusedops.norms import operator
from fusedops.norms.ops import Save
from fusedops.norms.reference import Rounding

CLIENT = Path(typed_client.__file__)


def _has_type(value: Any, expected: Any) -> bool:
    if get_origin(expected) is not tuple:
        return isinstance(value, expected)
    items = get_args(expected)
    length = len(value) if items[-1] is Ellipsis else len(items)
    return (
        type(value) is tuple
        and len(value) == length
        and all(isinstance(item, Tensor) for item in value)
    )


@pytest.mark.parametrize("check", typed_client.CHECKS, ids=lambda check: check.__name__)
def test_values_have_the_inferred_types(
    check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[bool] = []
    monkeypatch.setattr(
        typed_client,
        "assert_type",
        lambda value, expected: results.append(_has_type(value, expected)),
    )
    check()
    assert results and all(results)


@pytest.mark.parametrize(
    "literal, names",
    [
        (ActivationName, ACTIVATIONS),
        (Approximate, APPROXIMATIONS),
        (Rounding, operator._ROUNDINGS),
        (Save, operator._SAVES),
    ],
)
def test_literals_have_the_names(literal: Any, names: Any) -> None:
    assert get_args(literal) == tuple(names)


def test_star_import_shadows_neither_builtins_nor_torch() -> None:
    names: dict[str, Any] = {}
    exec("from fusedops import *", names)
    assert {"rms_norm", "rowwise", "fuse_model"} <= names.keys()
    assert not names.keys() & (vars(builtins).keys() | {"nn", "torch", "F"})


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_mypy_on_the_client() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(CLIENT)],
        cwd=CLIENT.parent.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout
