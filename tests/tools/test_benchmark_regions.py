"""The command that times regions as operators and by torch.compile."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.models.workloads import MODELS
from benchmarks.models.workloads import Workload as ModelWorkload
from benchmarks.regions import providers, results, workloads
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
        moved_mib=1.0,
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
    assert text.endswith("2 of 5 kinds are slower as chosen: 12 us in all")
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
