"""Linear layers whose number of outputs is not a multiple of eight are padded on GPUs.

Tensor cores are slow for such sizes. The results are the same.
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
from fusedops.models.rules import padding
from fusedops.models.rules.padding import padded_linear
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


def _with_gradients(layer: nn.Linear, rows: Tensor, output: Tensor) -> tuple[Tensor, ...]:
    """Return the output, and the gradients of the rows and of the layer's parameters."""
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output)
    return (output, *torch.autograd.grad(output, (rows, *layer.parameters()), cotangent))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_of_padded_layers_are_exact(dtype: torch.dtype, bias: bool) -> None:
    """Each is a sum of products in any order, rounded once, and is compared with fp64."""
    layer, rows = _layer(dtype, bias), _rows(10, dtype).requires_grad_()
    ours = _with_gradients(layer, rows, padded_linear(rows, layer.weight, layer.bias, dtype))
    fp64_layer = _layer(torch.float64, bias)
    fp64_layer.load_state_dict(layer.state_dict())
    fp64_rows = rows.detach().double().requires_grad_()
    fp64_output = F.linear(fp64_rows, fp64_layer.weight, fp64_layer.bias)
    exact_results = _with_gradients(fp64_layer, fp64_rows, fp64_output)
    assert ours[0].shape == (2, 5, OUTPUTS)
    assert ours[0].stride(-2) % 64 == 0
    for result, exact in zip(ours, exact_results, strict=True):
        assert result.dtype == dtype
        assert result.shape == exact.shape
        # The longest sum has OUTPUTS terms of at most six standard deviations each, in fp32.
        rounding = torch.finfo(dtype).eps * 8 * exact.abs().max()
        bound = rounding + OUTPUTS**0.5 * torch.finfo(torch.float32).eps * 36
        if dtype == torch.float64:
            bound = 1e-11
        assert (result.double() - exact).abs().max() <= bound


def test_second_derivatives_of_padded_layers_are_those_of_the_layer() -> None:
    layer, rows = _layer(torch.float64), _rows(4, torch.float64).requires_grad_()

    def curvature(output: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(output.tanh().sum(), rows, create_graph=True)
        return torch.autograd.grad(first.square().sum(), layer.weight)[0]

    ours = curvature(padded_linear(rows, layer.weight, layer.bias, torch.float64))
    torch.testing.assert_close(ours, curvature(layer(rows)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "outputs, fused", [(4096, False), (4104, False), (4097, True), (50257, True), (1001, False)]
)
def test_layers_with_many_outputs_that_are_not_aligned_are_fused(outputs: int, fused: bool) -> None:
    model = nn.Sequential(nn.Linear(8, outputs, device="meta"))
    assert [line.rule for line in fusedops.fuse_model(model, graph=False).replaced] == (
        ["padded_linear"] if fused else []
    )


def test_on_a_cpu_the_layer_has_the_same_bits_and_is_not_padded() -> None:
    model = nn.Sequential(_layer(device=torch.device("cpu")))
    rows = _rows(2 * LEAST_ROWS, device=torch.device("cpu"))
    before = model(rows)
    assert fusedops.fuse_model(model, graph=False)
    assert torch.equal(model(rows), before)
    assert model(rows).is_contiguous()
    assert padding._product_dtype(rows, model[0].weight, model[0].bias) is None


class _FakeGpuTensor:
    """The attributes of a GPU tensor that decide whether a product is padded."""

    is_cuda = True

    def __init__(self, dtype: torch.dtype, *shape: int) -> None:
        self.dtype, self.shape = dtype, shape

    def numel(self) -> int:
        return math.prod(self.shape)


HALF, FULL = torch.bfloat16, torch.float32


# The dtypes are those of the rows, the weight and the bias; ``expected`` is the dtype of a padded
# product, or None if it is not padded.
@pytest.mark.parametrize(
    "rows, inner, dtypes, autocast, expected",
    [
        (1024, 24, (HALF, HALF, HALF), None, HALF),
        (1024, 24, (torch.float16, torch.float16, torch.float16), None, torch.float16),
        (1023, 24, (HALF, HALF, HALF), None, None),
        (1024, 20, (HALF, HALF, HALF), None, None),  # rows of the input are not aligned either
        (1024, 24, (FULL, FULL, FULL), None, None),
        (1024, 24, (HALF, FULL, FULL), None, None),  # the layer itself raises an error for these
        (1024, 24, (HALF, HALF, FULL), None, None),
        (1024, 24, (FULL, FULL, FULL), HALF, HALF),
        (1024, 24, (HALF, FULL, HALF), torch.float16, torch.float16),
        (1024, 24, (torch.float64, FULL, FULL), HALF, None),
        (1024, 24, (FULL, FULL, torch.complex64), HALF, None),
        (1024, 24, (torch.int32, FULL, FULL), HALF, None),
    ],
)
def test_products_in_half_precision_of_many_aligned_rows_are_padded(
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
        _FakeGpuTensor(dtype, *shape)
        for dtype, shape in zip(dtypes, ((rows, inner), (OUTPUTS, inner), (OUTPUTS,)), strict=True)
    ]
    assert padding._product_dtype(*inputs) == expected
    rows_dtype, weight_dtype, bias_dtype = dtypes
    if rows_dtype == weight_dtype != bias_dtype and not autocast:
        # Without the bias, whose dtype does not fit, the product is padded.
        without_bias = padding._product_dtype(*inputs[:2], None)
        assert without_bias == (HALF if rows_dtype == HALF else None)
    if expected is not None:
        for subclass in inputs:  # such as a quantised or a distributed tensor
            monkeypatch.setattr(padding, "is_plain", lambda t, subclass=subclass: t is not subclass)
            assert padding._product_dtype(*inputs) is None
        monkeypatch.setattr(padding, "is_plain", lambda t: True)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert padding._product_dtype(*inputs) is None


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [True, False])
def test_on_a_gpu_the_layer_is_padded_with_the_same_results(autocast: bool) -> None:
    """Results differ by the order of sums. The report names the padded rows."""
    layer = _layer(torch.float32 if autocast else torch.bfloat16)
    rows = _rows(2048, layer.weight.dtype).requires_grad_()
    model = nn.Sequential(layer)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        before = _with_gradients(layer, rows, model(rows))
        report = fusedops.fuse_model(model, graph=False)
        after = _with_gradients(layer, rows, model(rows))
    assert "a product with padded rows" in report.table()
    assert before[0].is_contiguous()
    assert after[0].stride(-2) == 4160
    for original, padded in zip(before, after, strict=True):
        assert padded.dtype == original.dtype
        bound = 4 * torch.finfo(torch.bfloat16).eps * original.abs().max()
        assert (padded - original).abs().max() <= bound
