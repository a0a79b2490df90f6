"""Compares handwritten kernels and kernels generated from the same formula with one reference.

Both must be within the bound of the functional, which `tolerances` derives. So they differ from
each other by at most twice the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops
import tolerances
from fusedops.core.spec import Sample, Spec
from support import ALL_SPECS, DEVICE, Function, Tensors, as_tuple

pytestmark = pytest.mark.kernels

_EPS = 1e-5


def _layer_norm(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = input - input.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred * torch.rsqrt(variance + _EPS) * weight + bias


def _rms_norm(input: Tensor, weight: Tensor) -> Tensor:
    return input * torch.rsqrt(input.square().mean(-1, keepdim=True) + _EPS) * weight


def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def _bias_dropout_add_ln(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, ln_bias: Tensor
) -> tuple[Tensor, Tensor]:
    z = x + bias + residual
    return _layer_norm(z, weight, ln_bias), z


_FORMULAS: dict[str, Callable[..., Any]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "bias_gelu_tanh": _bias_gelu,
    "swiglu": _swiglu,
    "bias_dropout_add_ln": _bias_dropout_add_ln,
}
_OPTIONS: dict[str, dict[str, Any]] = {"bias_dropout_add_ln": {"p": 0.0, "return_sum": True}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cols", [40, 257])
@pytest.mark.parametrize("name", _FORMULAS)
def test_handwritten_and_generated_kernels_have_the_same_bound(
    name: str, cols: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = next(spec for spec in ALL_SPECS if spec.name == name)
    original = spec.benchmark((6, cols), dtype, DEVICE)
    options = {**original.options, **_OPTIONS.get(name, {})}
    sample = Sample(original.name, original.tensors, options)
    handwritten = tolerances.check_gradients(spec, sample, values=True)

    function = fusedops.rowwise(_FORMULAS[name], strict=True)
    monkeypatch.setattr(tolerances, "call", lambda spec, sample: _positional(spec, function))
    generated = tolerances.check_gradients(spec, sample, values=True)
    assert handwritten.keys() == generated.keys()


def _positional(spec: Spec, function: Callable[..., Any]) -> Function:
    """The function with its tensors by name, as `tolerances` calls it."""

    def call(tensors: Tensors) -> tuple[Tensor, ...]:
        return as_tuple(function(*(tensors[name] for name in spec.tensors)))

    return call
