"""`fusedops.compile`: regions that end in a quantisation are one operator each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from backends import Backend
from fusedops.core.launches import launch
from support import DEVICE

pytestmark = pytest.mark.kernels

_FLOAT8 = torch.float8_e4m3fn


def _quantised(y: Tensor) -> tuple[Tensor, Tensor]:
    scales = (y.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
    return (y.float() / scales).to(_FLOAT8), scales


def _product(x: Tensor, weight: Tensor, values: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    """A norm, and a product of what it is quantised to."""
    q, s = _quantised(F.rms_norm(x, x.shape[-1:], weight, 1e-6))
    return ((q.float() @ values.float().t()) * s * scales.t(),)


def _blocks(x: Tensor, weight: Tensor, values: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    """A sum and its norm, with scales of blocks."""
    z = x + scales[0]
    q, s = _quantised(F.rms_norm(z, x.shape[-1:], weight, 1e-6).unflatten(-1, (-1, 32)))
    return q.flatten(-2), s.squeeze(-1), z


@pytest.mark.parametrize("function", [_product, _blocks])
def test_region_that_ends_in_a_quantisation(function: Callable[..., tuple[Tensor, ...]]) -> None:
    x, weight = torch.randn(64, 128, device=DEVICE), torch.randn(128, device=DEVICE)
    values, scales = _quantised(torch.randn(16, 128, device=DEVICE))
    compiled = torch.compile(function, backend=Backend(), fullgraph=True)
    with torch.no_grad():
        expected = function(x, weight, values, scales)
        compiled(x, weight, values, scales)
        with launch.record() as names:
            results = compiled(x, weight, values, scales)
    assert names == ["forward_kernel"]
    for result, value in zip(results, expected, strict=True):
        # A few values in 8 bits may be one step off, where the quotient is next to a tie.
        difference = (result.float() - value.float()).norm()
        assert difference <= 2.0**-7 * value.float().norm()
