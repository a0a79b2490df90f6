"""The table of activations: device functions against the formula, over the whole range."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.core.activations import ACTIVATIONS, Activation
from tolerances import unit_roundoff

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
device_code = pytest.importorskip("fusedops.core.device")

every = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)


def _range(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of both signs, from tiny ones to those where activations are constant or linear."""
    small = torch.logspace(-30, 2, 500, dtype=torch.float64)
    x = torch.cat([torch.linspace(-20.0, 20.0, 6000, dtype=torch.float64), small, -small])
    return x.to(device, dtype).view(-1, 100)


def _exact(activation: Activation, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the value and the first two derivatives in fp64, by autograd of the formula."""
    x = x.double().requires_grad_()
    derivatives = [activation.formula(x) + 0.0]
    for _ in range(2):
        last = derivatives[-1]
        if last.requires_grad:
            (grad,) = torch.autograd.grad(last.sum(), x, create_graph=True)
            derivatives.append(grad + 0.0 * x)
        else:
            derivatives.append(torch.zeros_like(x))
    value, first, second = (derivative.detach() for derivative in derivatives)
    return value, first, second


@every
@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_values_and_derivatives_over_the_whole_range(
    activation: Activation, dtype: torch.dtype, device: torch.device
) -> None:
    """The tolerance allows the error of an exact result for a slightly perturbed x.

    The errors of a value come from a power of two with a rounded exponent (u |x f'|), a reciprocal
    (a few u), and two or three products. Their sum is below 12 u. Some activations multiply x by a
    factor between zero and one. The factor's own error adds u |x|, if the factor is a difference
    from one or GELU's polynomial (0.13 u). A derivative is the sum of two such terms of order one,
    which may cancel. In fp64 the reference has errors from the same cancellation.
    """
    x = _range(dtype, device)
    leaf = x.clone().requires_grad_()
    y = fusedops.bias_act(leaf, None, activation.name)
    (dx,) = torch.autograd.grad(y.sum(), leaf)
    value, first, second = _exact(activation, x)
    u, x = unit_roundoff(dtype), x.double()
    error_of_reference = 64 * u if dtype == torch.float64 else 0.0
    tolerance = 12 * u * (value.abs() + (x * first).abs()) + u * x.abs() + error_of_reference
    assert ((y.detach().double() - value).abs() <= tolerance).all()
    tolerance = 12 * u * (first.abs() + (x * second).abs()) + 16 * u + error_of_reference
    assert ((dx.double() - first).abs() <= tolerance).all()


@triton.jit
def _narrow_tanh(x, y, N: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.arange(0, N)
    tl.store(y + columns, device_code.tanh_in_16_bits(tl.load(x + columns)))


@pytest.mark.kernels
def test_tanh_for_results_in_16_bits(device: torch.device) -> None:
    """The relative error is at most 1e-5.

    Up to |x| = 0.08 a truncated series has the error 2 x^4 / 15. For larger |x| another formula
    has the error 3 u / |x|.
    """
    x = _range(torch.float32, device).flatten()
    x = torch.cat([x, torch.linspace(-0.1, 0.1, 16384 - len(x), device=device)])
    y = torch.empty_like(x)
    # Without this option Triton warns from 3.9 on.
    contracted = {"enable_fp_fusion": True}
    _narrow_tanh[(1,)](x, y, len(x), **contracted)
    exact = x.double().tanh()
    assert ((y - exact).abs() <= 1e-5 * exact.abs()).all()
    ends = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0], device=device)
    y = torch.empty_like(ends)
    _narrow_tanh[(1,)](ends, y, 4, **contracted)
    assert y[:2].tolist() == [1.0, -1.0] and y[2].isnan() and y[3] == 0.0


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_derivative_of_the_identity_is_one_also_at_infinity_and_nan(
    value: float, device: torch.device
) -> None:
    x = torch.tensor([[1.0, value]], device=device, requires_grad=True)
    fusedops.bias_act(x, None, "identity").backward(torch.ones(1, 2, device=device))
    assert torch.equal(x.grad, torch.ones_like(x))
