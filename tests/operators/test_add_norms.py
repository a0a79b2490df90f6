"""`add_layer_norm` and `add_rms_norm`, which equal longer functionals without bias and dropout."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedops
from fusedops.core.launches import launch
from fusedops.nn import FusedAddLayerNorm, FusedAddRMSNorm
from modules import close, randomise

N = 24
# The dtypes of x and of the residual.
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]


def _layer(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Any, Any]:
    """Results of `add_layer_norm`, and of the longer functional."""
    return (
        fusedops.add_layer_norm(x, residual, weight, bias, 1e-4),
        fusedops.bias_dropout_add_ln(
            x, None, residual, weight, bias, p=0.0, eps=1e-4, return_sum=True
        ),
    )


def _rms(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Any, Any]:
    """Results of `add_rms_norm`, and of the longer functional."""
    options: dict[str, Any] = {"weight_offset": 1.0, "rounding": "llama"}
    return (
        fusedops.add_rms_norm(x, residual, weight, 1e-4, **options),
        fusedops.bias_dropout_add_rms_norm(
            x, None, residual, weight, p=0.0, eps=1e-4, return_sum=True, **options
        ),
    )


@pytest.mark.parametrize("both", [_layer, _rms])
@pytest.mark.parametrize("dtype, dtype_of_residual", DTYPES, ids=str)
def test_results_equal_those_of_the_longer_functionals(
    both: Callable[..., Any],
    dtype: torch.dtype,
    dtype_of_residual: torch.dtype,
    device: torch.device,
) -> None:
    """Values and gradients are equal bit for bit. The second output is the pre-norm sum."""
    x = torch.randn(5, N).to(device, dtype)
    residual = torch.randn(5, N).to(device, dtype_of_residual)
    leaves = [t.requires_grad_() for t in (x, residual, *torch.randn(2, N, device=device))]
    ours, longer = both(*leaves)
    assert isinstance(ours, tuple)
    assert len(ours) == 2
    assert torch.equal(ours[1].detach(), (x + residual).detach())
    results = []
    for outputs in (ours, longer):
        weights = [torch.linspace(-1, 1, N, device=device) * (i + 1) for i in range(2)]
        total = sum(
            (o.float() * o.float() * w).sum() for o, w in zip(outputs, weights, strict=True)
        )
        results.append([*outputs, *torch.autograd.grad(total, leaves, allow_unused=True)])
    for result, expected in zip(*results, strict=True):
        assert result is expected is None or torch.equal(result, expected)


@pytest.mark.kernels
def test_forward_is_one_launch(device: torch.device) -> None:
    x, residual, weight = (torch.randn(s, device=device) for s in ((5, N), (5, N), (N,)))
    with launch.record() as launched:
        fusedops.add_rms_norm(x, residual, weight)
    assert len(launched) == 1


@pytest.mark.parametrize(
    "fused, native", [(FusedAddLayerNorm, nn.LayerNorm), (FusedAddRMSNorm, nn.RMSNorm)]
)
def test_modules_have_the_parameters_and_values_of_torch_nn(
    fused: type[nn.Module], native: type[nn.Module], device: torch.device
) -> None:
    """The outputs are the torch.nn module's output for the sum, and the sum itself."""
    module, original = fused(N, 1e-4), randomise(native(N, 1e-4))
    assert isinstance(module, native)
    assert repr(module) == repr(original).replace(native.__name__, fused.__name__)
    module.load_state_dict(original.state_dict())
    module, original = module.to(device), original.to(device)
    x, residual = torch.randn(2, 5, N, device=device)
    for copied in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        y, z = copied(x, residual)
        close(z, x + residual)
        close(y, original(x + residual))
    without_weight = fused(N, elementwise_affine=False).to(device)
    native_without_weight = native(N, elementwise_affine=False).to(device)
    close(without_weight(x, residual)[0], native_without_weight(x + residual))


def test_rms_module_passes_its_options_on(device: torch.device) -> None:
    module = FusedAddRMSNorm(N, weight_offset=1.0, rounding="llama", device=device)
    x, residual = torch.randn(2, 5, N, device=device)
    close(module(x, residual)[0], F.rms_norm(x + residual, (N,)))
    assert repr(module).endswith("weight_offset=1.0, rounding='llama')")


X = torch.randn(2, 4)
W = torch.ones(4)
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no residual": (
        lambda: fusedops.add_rms_norm(X, None, W),
        TypeError,
        "add_rms_norm: residual must be a torch.Tensor, got NoneType",
    ),
    "no residual, LayerNorm": (
        lambda: fusedops.add_layer_norm(X, None, W, W),
        TypeError,
        "add_layer_norm: residual must be a torch.Tensor, got NoneType",
    ),
    "residual": (
        lambda: fusedops.add_rms_norm(X, X[:1], W),
        ValueError,
        r"add_rms_norm: residual has shape \(1, 4\), expected \(2, 4\)",
    ),
    "weight": (
        lambda: fusedops.add_rms_norm(X, X, W[:3]),
        ValueError,
        r"add_rms_norm: weight has shape \(3,\), expected \(4,\)",
    ),
    "bias": (
        lambda: fusedops.add_layer_norm(X, X, W, W[:3]),
        ValueError,
        r"add_layer_norm: bias has shape \(3,\), expected \(4,\)",
    ),
    "eps": (
        lambda: fusedops.add_layer_norm(X, X, W, W, -1.0),
        ValueError,
        "add_layer_norm: eps must be at least 0",
    ),
    "rounding": (
        lambda: fusedops.add_rms_norm(X, X, W, rounding="gemma"),
        ValueError,
        "add_rms_norm: rounding must be one of 'once', 'llama', 't5', got 'gemma'",
    ),
    "several dimensions": (
        lambda: FusedAddRMSNorm((2, 4)),
        ValueError,
        r"FusedAddRMSNorm: normalized_shape must have one dimension, got \(2, 4\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_twice(name: str) -> None:
    call, error, match = BAD[name]
    for _ in range(2):
        with pytest.raises(error, match=match):
            call()
