"""The command that times regions as operators and by torch.compile."""

from __future__ import annotations

import math
import pickle
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.models.workloads import MODELS
from benchmarks.models.workloads import Workload as ModelWorkload
from benchmarks.regions import fitting, providers, results, workloads
from fusedops.backend import prediction
from fusedops.backend.prediction import Work
from pages import ROOT
from rowwise_checks import assert_as_good, cotangents_of, kernels
from support import DEVICE


def regions() -> list[workloads.Workload]:
    model = ModelWorkload("bert", "train", MODELS["bert"].tiny_sizes, tiny=True)
    return workloads.regions_of(model, torch.device(DEVICE))


def run(call: object, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    outs = call(*tensors)  # type: ignore[operator]
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    return [*outs, *torch.autograd.grad(outs, wanted, cotangents_of(outs))]


@kernels
def test_operator_of_a_region_computes_the_region() -> None:
    found = [region for region in regions() if "native_dropout" not in region.operators]
    chosen = {not region.reason for region in found}
    assert chosen == {True, False}
    for region in found:
        # Worker processes get the region as a pickle.
        region = pickle.loads(pickle.dumps(region))
        tensors = region.tensors(region.device)
        doubles = tuple([t.detach().double().requires_grad_(t.requires_grad) for t in tensors])
        exact, native = run(region.graph, doubles), run(region.graph, tensors)
        for index, result in enumerate(run(providers.build("operator", region), tensors)):
            assert_as_good(result, exact[index], [native[index]], f"{region.operators} {index}")


@kernels
def test_regions_of_repeated_layers_are_counted() -> None:
    counts = {region.operators: region.count for region in regions()}
    layers = MODELS["bert"].tiny["num_hidden_layers"]
    assert counts["_safe_softmax+native_dropout"] == layers
    assert counts["_to_copy+add+gelu"] == layers


def row(model: str = "bert", key: str = "a", **changes: object) -> results.Row:
    made = results.Row(
        model=model,
        mode="train",
        operators="add",
        key=key,
        shape="8x4",
        dtypes="float32",
        count=3,
        reason="",
        operator_us=2.0,
        compile_us=5.0,
        operator=Work(moved=8e6),
        compile=Work(moved=8e6, summed=2.0),
        commit="c",
        torch="2",
        triton="3",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_new_rows_of_a_model_replace_its_old_rows(tmp_path: Path) -> None:
    path = tmp_path / "regions.csv"
    results.write(path, [row(key="old"), row("gpt2")])
    results.write(path, [row(key="new")])
    assert [(item.model, item.key) for item in results.read(path)] == [
        ("bert", "new"),
        ("gpt2", "a"),
    ]
    assert results.read(path)[0] == row(key="new")


def test_table_counts_the_regions_for_which_the_choice_is_wrong() -> None:
    right, slower = row(), row(operator_us=6.0)
    left, faster = row(reason="left", operator_us=6.0), row(reason="left")
    failed = row(operator_us=math.nan)
    text = results.table([right, slower, left, faster, failed])
    assert "2 of 5 kinds are slower as chosen: 12 us in all" in text.splitlines()
    assert math.isclose(right.gain_us, 9.0)
    first = text.splitlines()[1]
    assert "compile" in first and "9" in first


@kernels
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_gradients_are_those_of_the_mode(mode: str) -> None:
    model = ModelWorkload("bert", mode, MODELS["bert"].tiny_sizes, tiny=True)
    found = workloads.regions_of(model, torch.device(DEVICE))
    wanted = {item.requires_grad for region in found for item in region.inputs}
    assert wanted == ({True} if mode == "train" else {False})


@kernels
def test_work_is_that_of_the_region() -> None:
    (region,) = [region for region in regions() if region.operators == "_to_copy+add+gelu"]
    operator, inductor = region.works(has_backward=True)
    rows, cols = 32, 64
    # Both read x, and write y. The backward reads dy and x, and writes dx, all in bf16.
    assert operator.moved == inductor.moved == 5 * 2 * rows * cols
    assert (operator.kernels, operator.calls, operator.summed) == (3, 2, 0)
    assert (inductor.kernels, inductor.calls, inductor.summed) == (4, 0, 2 * 2 * rows * cols)
    operator, inductor = region.works(has_backward=False)
    assert operator.moved == inductor.moved == 2 * 2 * rows * cols


def test_table_lists_losses_that_were_predicted_as_gains() -> None:
    gain = Work(moved=1e9, again=1e9)
    lost = row(operator_us=6.0, compile=gain)
    close, won = row(operator_us=5.2, compile=gain), row(compile=gain)
    expected = row(operator_us=6.0, operator=gain)
    text = results.table([lost, close, won, expected, row(operator_us=math.nan)])
    assert "1 of 4 kinds lose over 5% though a gain was predicted" in text
    assert text.splitlines()[-1].startswith("  0.83  bert")


def test_rates_are_those_that_fit_the_committed_times_best() -> None:
    fitted = fitting.fitted(results.read(ROOT / "benchmarks/results/regions_nvidia_h200.csv"))
    assert astuple(prediction.RATES) == pytest.approx(astuple(fitted), rel=0.1)


def test_median_errors_are_of_the_predictions() -> None:
    """The operator is predicted right, and Inductor at half of its time."""
    measured = row()
    machine = prediction.H200
    us = [work.seconds(machine) * 1e6 for work in (measured.operator, measured.compile)]
    (line, _) = results.errors([replace(measured, operator_us=us[0], compile_us=2 * us[1])])
    assert line == "median error of predictions: gain 50.0%, operator 0.0%, compile 50.0%"


def test_rates_that_have_caused_the_times_are_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time that no rates explain changes them little, and no rate is negative."""
    monkeypatch.setattr(prediction, "RATES", replace(prediction.RATES, summed=2.0, again=0.0))
    generator = torch.Generator().manual_seed(0)

    def made(scale: float) -> results.Row:
        numbers = torch.rand(8, generator=generator).tolist()
        units = (1e9, 5.0, 0.0, 1e9, 3.0, 1e9, 1e8, 1e9)
        works = [Work(*[x * unit for x, unit in zip(numbers, units, strict=True)]) for _ in "ab"]
        us = [work.seconds(prediction.H200) * 1e6 * scale for work in works]
        return row(operator=works[0], compile=works[1], operator_us=us[0], compile_us=us[1])

    rows = [made(1.0) for _ in range(40)]
    rates = fitting.fitted([*rows, made(3.0)])
    for rate, expected in zip(astuple(rates), astuple(prediction.RATES), strict=True):
        assert math.isclose(rate, expected, rel_tol=0.1, abs_tol=1e-3 * expected)
