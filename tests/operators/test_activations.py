"""The table of activations: formula and device functions are one function, over the whole range."""

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
    """Numbers without kinks: from the smallest to where every activation is flat or straight."""
    small = torch.logspace(-30, 2, 500, dtype=torch.float64)
    x = torch.cat([torch.linspace(-20.0, 20.0, 6000, dtype=torch.float64), small, -small])
    return x.to(device, dtype).view(-1, 100)


def _exact(activation: Activation, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Value and first two derivatives in fp64, by autograd of the formula."""
    x = x.double().requires_grad_()
    derivatives = [activation.formula(x) + 0.0]
    for _ in range(2):
        last = derivatives[-1]
        grad = (
            torch.autograd.grad(last.sum(), x, create_graph=True)[0] if last.requires_grad else None
        )
        derivatives.append(torch.zeros_like(x) if grad is None else grad + 0.0 * x)
    value, slope, bend = (d.detach() for d in derivatives)
    return value, slope, bend


@every
@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_over_the_whole_range(
    activation: Activation, dtype: torch.dtype, device: torch.device
) -> None:
    """Backward error: the exact result for an x that is moved by a few units in the last place, and rounded so.

    A value takes a power of two of a rounded exponent (u |x f'|), a reciprocal of a few u, and two
    or three products: 12 u in all. Where a mass near zero is one less another, and in the fit
    behind GELU (0.13 u), the error is one of the mass: u |x|. A derivative is the sum of two such
    terms of order one, which may cancel. In fp64 the formula to compare with has errors of its own,
    from such differences.
    """
    x = _range(dtype, device)
    leaf = x.clone().requires_grad_()
    y = fusedops.bias_act(leaf, None, activation.name)
    (dx,) = torch.autograd.grad(y.sum(), leaf)
    value, slope, bend = _exact(activation, x)
    u, x = unit_roundoff(dtype), x.double()
    own = 64 * u if dtype == torch.float64 else 0.0
    tolerance = 12 * u * (value.abs() + (x * slope).abs()) + u * x.abs() + own
    assert ((y.detach().double() - value).abs() <= tolerance).all()
    tolerance = 12 * u * (slope.abs() + (x * bend).abs()) + 16 * u + own
    assert ((dx.double() - slope).abs() <= tolerance).all()


@triton.jit
def _narrow_tanh(x, y, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(y + at, device_code.tanh_in_16_bits(tl.load(x + at)))


@pytest.mark.kernels
def test_tanh_for_results_in_16_bits(device: torch.device) -> None:
    """Relative error: of the series 2 x^4 / 15 up to 0.08, of the other form three u over x from there on."""
    x = _range(torch.float32, device).flatten()
    x = torch.cat([x, torch.linspace(-0.1, 0.1, 16384 - len(x), device=device)])
    y = torch.empty_like(x)
    # Since Triton 3.9 a warning is raised without this option.
    contracted = {"enable_fp_fusion": True}
    _narrow_tanh[(1,)](x, y, len(x), **contracted)
    exact = x.double().tanh()
    assert ((y - exact).abs() <= 1e-5 * exact.abs()).all()
    ends = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0], device=device)
    y = torch.empty_like(ends)
    _narrow_tanh[(1,)](ends, y, 4, **contracted)
    assert y[:2].tolist() == [1.0, -1.0] and y[2].isnan() and y[3] == 0.0


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_the_identitys_derivative_is_one_everywhere(value: float, device: torch.device) -> None:
    x = torch.tensor([[1.0, value]], device=device, requires_grad=True)
    fusedops.bias_act(x, None, "identity").backward(torch.ones(1, 2, device=device))
    assert torch.equal(x.grad, torch.ones_like(x))
