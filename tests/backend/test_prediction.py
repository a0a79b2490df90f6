"""Predicted times of regions both ways, and the decisions that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedops
from backends import randn
from fusedops.backend import prediction, storing
from fusedops.backend.prediction import Machine, Work, Works, among_neighbours
from support import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]

_ROWS = 2048


def works(function: Callable[..., Any], *tensors: Tensor) -> Works:
    """The work of a function of rows; tensors that require gradients get them."""
    program, inputs = fusedops.rowwise(function).program_of(tensors)
    shapes = [tuple(tensor.shape) for tensor in inputs]
    strides = [tensor.stride() for tensor in inputs]
    wanted = [tensor.requires_grad for tensor in inputs]
    received = (True,) * program.count
    return prediction.works(program, tuple(shapes), tuple(strides), tuple(wanted), received)


def _tensor(*shape: int, trains: bool = True) -> Tensor:
    return torch.empty(shape, device=DEVICE).requires_grad_(trains)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def _activated(x: Tensor) -> Tensor:
    return F.gelu(x)


def _dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5) * x


@pytest.mark.parametrize(("cols", "is_long"), [(1024, False), (2048, True)])
def test_long_rows_are_read_again_by_inductor(cols: int, is_long: bool) -> None:
    operator, inductor = works(_norm, _tensor(_ROWS, cols), _tensor(cols, trains=False))
    size = _ROWS * cols * 4
    # x and y; x, dy and dx. Each pass has one reduction, over x, and over x and dy.
    assert operator == Work(5 * size, kernels=2, calls=2)
    assert inductor == Work(5 * size, kernels=2, again=3 * size if is_long else 0)


@pytest.mark.parametrize(("rows", "sums"), [(_ROWS, 1.0), (256, 0.25)])
def test_sums_over_rows_are_kernels_of_inductor(rows: int, sums: float) -> None:
    operator, inductor = works(_norm, _tensor(rows, 64), _tensor(64))
    assert operator.kernels == 3 and operator.sums == operator.summed == 0
    assert (inductor.kernels, inductor.sums, inductor.summed) == (4, sums, 2 * rows * 64 * 4)


def test_only_wanted_gradients_count() -> None:
    operator, inductor = works(_norm, _tensor(_ROWS, 64, trains=False), _tensor(64, trains=False))
    assert operator == Work(2 * _ROWS * 64 * 4, kernels=1, calls=1)
    assert inductor == Work(2 * _ROWS * 64 * 4, kernels=1)


def test_instructions_are_no_gain_without_a_whole_tensor() -> None:
    """Both run the same instructions, for products of broadcast tensors."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return (torch.exp(x) * torch.exp(y)).sum(-1)

    sizes = (64, 1, 128), (1, 64, 128)
    operator, inductor = works(function, *(_tensor(*shape, trains=False) for shape in sizes))
    assert operator.moved == inductor.moved == inductor.computed == 0


@pytest.mark.parametrize("trains", [True, False])
def test_masks_are_drawn_by_inductor_and_stored_for_a_backward(trains: bool) -> None:
    operator, inductor = works(_dropped, _tensor(_ROWS, 64, trains=trains))
    elements = _ROWS * 64
    assert operator.drawn == 0 and inductor.drawn == elements
    assert inductor.moved - operator.moved == 2 * elements * trains


def test_instructions_count_where_they_take_longer_than_the_bytes() -> None:
    """A GELU takes more than the five instructions for each of four bytes; but not of eight."""
    x = torch.empty(_ROWS, 64, device=DEVICE, dtype=torch.bfloat16)
    assert works(_activated, x).inductor.computed >= _ROWS * 64 * (24 + 2 * 3 - 4 * 5)
    assert works(_activated, x.float()).inductor.computed == 0


def test_tensors_whose_columns_are_not_side_by_side_are_copied() -> None:
    weight, x = _tensor(64, trains=False), _tensor(_ROWS, 64, trains=False)
    plain = works(_norm, x, weight).operator
    copied = works(_norm, x.view(64, _ROWS).t(), weight).operator
    assert copied == plain.plus(Work(2 * x.nbytes, kernels=1))


def test_times_are_sums_of_terms_by_their_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes depend on the bandwidth, random numbers and instructions on the processors."""
    rates = Work(2.0, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0, 19.0)
    monkeypatch.setattr(prediction, "RATES", rates)
    machine = Machine("half", bandwidth=0.5, processors=66)
    scales = {"moved": 2, "again": 2, "summed": 2, "drawn": 2, "computed": 2}
    for name, rate in vars(rates).items():
        seconds = replace(Work(), **{name: 10.0}).seconds(machine)
        assert seconds == pytest.approx(10 * rate * scales.get(name, 1)), name
    assert Works(Work(1.0), Work(3.0)).times(machine) == (4.0, 12.0)


# --- decisions ------------------------------------------------------------------------------------


class _Between(nn.Module):
    """A norm between products, behind a look-up, or before a concatenation."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.table, self.norm = where, nn.Embedding(9, 16), nn.LayerNorm(16)
        self.first, self.last = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        if self.where != "look-up":
            x = self.first(x)
        y = self.norm(x)
        return torch.cat([y, x], 0) if self.where == "cat" else self.last(y)


@pytest.mark.parametrize("where", ["products", "look-up", "cat"])
def test_regions_that_inductor_fuses_with_neighbours_are_left(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value between is neither written nor read, nor its gradient: four of five moved tensors."""
    monkeypatch.setattr(prediction, "RATES", replace(prediction.RATES, summed=1.5))
    monkeypatch.setattr(prediction, "among_neighbours", among_neighbours)
    report = fusedops.explain(_Between(where).to(DEVICE), torch.arange(9, device=DEVICE))
    (region,) = [region for region in report.regions if "native_layer_norm" in region.operators]
    assert region.reason == ("" if where == "products" else "Inductor is predicted to be as fast")
    # The report has the times of the region alone.
    assert region.times is not None and region.times.operator < region.times.inductor


@pytest.mark.parametrize(("is_moved", "fused"), [(True, 0), (False, 1)])
def test_regions_that_inductor_copies_for_convolutions_are_left(
    is_moved: bool, fused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel of the norm also writes the copy with channels first, and does not read it."""
    monkeypatch.setattr(prediction, "among_neighbours", among_neighbours)
    layers = nn.Linear(16, 16, bias=False), nn.LayerNorm(16), nn.Conv1d(16, 16, 1)
    linear, norm, convolution = nn.ModuleList(layers).to(DEVICE)

    def function(x: Tensor) -> Tensor:
        y = norm(linear(x))
        return convolution(y.transpose(1, 2) if is_moved else y)

    with torch.no_grad():
        report = fusedops.explain(function, randn(9, 16, 16))
    assert len(report.fused) == fused


@pytest.mark.parametrize(("count", "fused"), [(31, 1), (32, 0)])
def test_regions_behind_larger_reductions_are_left(count: int, fused: int) -> None:
    """Inductor has their elementwise part in a kernel with the reduction."""
    norm = nn.LayerNorm(16).to(DEVICE)
    x = torch.randn(count, 9, 16, device=DEVICE).requires_grad_()
    report = fusedops.explain(lambda x: norm(torch.exp(x.exp().sum(0))), x)
    assert len(report.fused) == fused
    assert fusedops.explain(lambda x: norm(torch.exp(x.sum(0))), x, rest="eager").fused


@pytest.mark.parametrize(("summed", "fused"), [(-0.1, 0), (0.1, 1)])
def test_the_faster_way_is_chosen(
    summed: float, fused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "RATES", replace(prediction.RATES, summed=summed))
    report = fusedops.explain(nn.LayerNorm(16).to(DEVICE), randn(9, 16).requires_grad_())
    assert len(report.fused) == fused


@pytest.mark.parametrize(("again", "fused"), [(0.0, 0), (1.0, 1)])
def test_frozen_norms_are_operators_if_rows_are_read_again(
    again: float, fused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "RATES", replace(prediction.RATES, again=again))
    norm = nn.LayerNorm(1040).to(DEVICE).requires_grad_(False)
    report = fusedops.explain(norm, randn(3, 1040).requires_grad_())
    assert len(report.fused) == fused


@pytest.mark.parametrize("form", ["norm", "softmax"])
def test_inference_selects_the_regions_of_training(form: str) -> None:
    """Forwards take as long both ways. In training only the norm has a gradient that is summed."""
    norm = nn.LayerNorm(16).to(DEVICE)
    with torch.no_grad():
        report = fusedops.explain(
            norm if form == "norm" else lambda x: torch.softmax(x, -1), randn(9, 16)
        )
    assert len(report.fused) == (form == "norm")


def test_biases_of_products_are_left_to_the_products() -> None:
    linear = nn.Linear(16, 16).to(DEVICE)
    (region,) = fusedops.explain(linear, randn(9, 16)).regions
    assert region.reason == "Inductor is predicted to be as fast"
    # Its forward is the product's, and Inductor reads dy to sum it.
    assert region.times is not None
    size = 9 * 16 * 4 / prediction.machine_of().bandwidth
    assert region.times.inductor == pytest.approx(size * prediction.RATES.summed)


def test_graphs_are_stored_for_the_figures_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = {
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": "a GPU",
        "get_device_capability": (9, 0),
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    texts = []
    for machine in (Machine("a GPU", 1e12, 66), Machine("a GPU", 2e12, 66)):
        monkeypatch.setattr(storing, "machine_of", lambda index, machine=machine: machine)
        texts.append(storing._settings())
    assert texts[0] != texts[1]
