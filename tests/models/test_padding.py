"""Linear layers whose number of outputs is no multiple of eight.

Padded where tensor cores want it, with the same results.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedops
from fusedops.core.alignment import LEAST_ROWS
from fusedops.models import parts
from fusedops.models.tricks import padding
from fusedops.models.tricks.padding import padded_linear
from support import DEVICE

OUTPUTS = 4099


def _layer(
    dtype: torch.dtype = torch.float32, bias: bool = True, device: torch.device = DEVICE
) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(24, OUTPUTS, bias=bias, device=device, dtype=dtype)


def _rows(count: int, dtype: torch.dtype = torch.float32, device: torch.device = DEVICE) -> Tensor:
    return torch.randn(2, count // 2, 24, generator=torch.Generator().manual_seed(4)).to(
        device, dtype
    )


def _step(layer: nn.Linear, rows: Tensor, output: Tensor) -> tuple[Tensor, ...]:
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output)
    return (output, *torch.autograd.grad(output, (rows, *layer.parameters()), cotangent))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients(dtype: torch.dtype, bias: bool) -> None:
    """As in fp64: each is a sum of K (for the gradients N or M) products, whatever their order, rounded once."""
    layer, rows = _layer(dtype, bias), _rows(10, dtype).requires_grad_()
    ours = _step(layer, rows, padded_linear(rows, layer.weight, layer.bias, dtype))
    exact = _layer(torch.float64, bias)
    exact.load_state_dict(layer.state_dict())
    wide = rows.detach().double().requires_grad_()
    theirs = _step(exact, wide, F.linear(wide, exact.weight, exact.bias))
    assert ours[0].shape == (2, 5, OUTPUTS) and ours[0].stride(-2) % 64 == 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == dtype and one.shape == other.shape
        # The longest sum has N terms of up to six times unit size; sums are in fp32 at least.
        bound = (
            torch.finfo(dtype).eps * 8 * other.abs().max()
            + OUTPUTS**0.5 * torch.finfo(torch.float32).eps * 36
        )
        assert (one.double() - other).abs().max() <= (bound if dtype != torch.float64 else 1e-11)


def test_second_derivatives() -> None:
    layer, rows = _layer(torch.float64), _rows(4, torch.float64).requires_grad_()

    def curvature(output: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(output.tanh().sum(), rows, create_graph=True)
        return torch.autograd.grad(first.square().sum(), layer.weight)[0]

    ours = curvature(padded_linear(rows, layer.weight, layer.bias, torch.float64))
    torch.testing.assert_close(ours, curvature(layer(rows)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "outputs, fused", [(4096, False), (4104, False), (4097, True), (50257, True), (1001, False)]
)
def test_which_layers(outputs: int, fused: bool) -> None:
    """Those that are not aligned already, and long enough to matter."""
    model = nn.Sequential(nn.Linear(8, outputs, device="meta"))
    assert [line.rule for line in fusedops.fuse_model(model).replaced] == (
        ["padded_linear"] if fused else []
    )


def test_elsewhere_it_is_the_layer_that_it_was() -> None:
    """On the CPU: bit for bit, and contiguous."""
    model = nn.Sequential(_layer(device=torch.device("cpu")))
    rows = _rows(2 * LEAST_ROWS, device=torch.device("cpu"))
    before = model(rows)
    assert fusedops.fuse_model(model)
    assert torch.equal(model(rows), before) and model(rows).is_contiguous()
    assert padding._product_dtype(rows, model[0].weight, model[0].bias) is None


class _Somewhere:
    """The attributes of a tensor that are read before anything is computed, as if it were on a GPU."""

    is_cuda = True

    def __init__(self, dtype: torch.dtype, *shape: int) -> None:
        self.dtype, self.shape = dtype, shape

    def numel(self) -> int:
        return math.prod(self.shape)


HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    "rows, inner, dtypes, autocast, expected",
    [
        (1024, 24, (HALF, HALF, HALF), None, HALF),
        (1024, 24, (torch.float16, torch.float16, torch.float16), None, torch.float16),
        (1023, 24, (HALF, HALF, HALF), None, None),
        (1024, 20, (HALF, HALF, HALF), None, None),  # rows of the input are not aligned either
        (1024, 24, (FULL, FULL, FULL), None, None),
        (1024, 24, (HALF, FULL, FULL), None, None),  # an error, which is the layer's to raise
        (1024, 24, (HALF, HALF, FULL), None, None),
        (1024, 24, (FULL, FULL, FULL), HALF, HALF),
        (1024, 24, (HALF, FULL, HALF), torch.float16, torch.float16),
        (1024, 24, (torch.float64, FULL, FULL), HALF, None),
        (1024, 24, (FULL, FULL, torch.complex64), HALF, None),
        (1024, 24, (torch.int32, FULL, FULL), HALF, None),
    ],
)
def test_when_it_pads(
    rows: int,
    inner: int,
    dtypes: tuple[torch.dtype, ...],
    autocast: torch.dtype | None,
    expected: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: autocast is not None)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: autocast)
    monkeypatch.setattr(padding, "is_plain", lambda t: True)
    inputs: list[Any] = [
        _Somewhere(dtype, *shape)
        for dtype, shape in zip(dtypes, ((rows, inner), (OUTPUTS, inner), (OUTPUTS,)), strict=True)
    ]
    assert padding._product_dtype(*inputs) == expected
    if len({*dtypes[:2]}) == 1 and dtypes[2] != dtypes[0] and not autocast:
        assert padding._product_dtype(*inputs[:2], None) == (
            dtypes[0] if dtypes[0] == HALF else None
        )
    if expected is not None:
        for special in range(3):  # quantised, distributed: tensors with ways of their own
            monkeypatch.setattr(padding, "is_plain", lambda t, one=inputs[special]: t is not one)
            assert padding._product_dtype(*inputs) is None
        monkeypatch.setattr(padding, "is_plain", lambda t: True)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert padding._product_dtype(*inputs) is None


def test_in_a_block_it_is_the_linear_layer_that_it_was() -> None:
    """The block takes its bias along, as it takes any linear layer's."""
    model = nn.TransformerEncoderLayer(16, 2, OUTPUTS, norm_first=True)
    fusedops.fuse_model(model)
    end = parts.linear(model.linear1, torch.randn(3, 16))
    assert end.bias is model.linear1.bias and end.product.shape == (3, OUTPUTS)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [True, False])
def test_on_the_gpu(autocast: bool) -> None:
    """Padded in training and without gradients; the same numbers up to the order of sums.

    The report says so.
    """
    layer = _layer(torch.float32 if autocast else torch.bfloat16)
    rows = _rows(2048, layer.weight.dtype).requires_grad_()
    model = nn.Sequential(layer)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        before = _step(layer, rows, model(rows))
        report = fusedops.fuse_model(model)
        after = _step(layer, rows, model(rows))
    assert "a view of padded rows" in report.table()
    assert before[0].is_contiguous()
    assert after[0].stride(-2) == 4160
    for one, other in zip(before, after, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * one.abs().max()
