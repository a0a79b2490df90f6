"""The command that times users' functions under `fusedops.rowwise`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import commands, results, runner
from benchmarks.rowwise import command, functions, providers
from benchmarks.rowwise.workloads import TINY, Workload, workloads
from rowwise_checks import assert_as_good, cotangents_of, kernels
from support import DEVICE, as_tuple

TRAINED = [workload for workload in workloads(sizes=TINY) if "fwd_bwd" in workload.elements]
QUANTISED = [workload for workload in workloads(sizes=TINY) if "fwd_bwd" not in workload.elements]
every = pytest.mark.parametrize("workload", TRAINED, ids=lambda w: w.name)
STRIDED = workloads(
    [
        "qk_norm_rotary_halves",
        "qk_norm_rotary_interleaved",
        "qk_norm_rotary_partial",
        "qk_norm_rotary_grouped",
    ],
    TINY,
)


def run(call: Any, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The outputs and the gradients."""
    outputs = as_tuple(call(*tensors))
    inputs = [tensor for tensor in tensors if tensor.requires_grad]
    grads = torch.autograd.grad(outputs, inputs, cotangents_of(outputs))
    return [*[out.detach() for out in outputs], *grads]


def as_doubles(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(
        [
            t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
            for t in tensors
        ]
    )


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every
def test_rowwise_computes_the_function(
    workload: Workload, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "_P", 0.0)
    torch.manual_seed(3)
    tensors = workload.tensors(torch.device(DEVICE), dtype)
    eager = providers.build("eager", workload)
    exact = run(eager, as_doubles(tensors))
    native = run(eager, tensors)
    for index, result in enumerate(run(providers.build("rowwise", workload), tensors)):
        assert_as_good(result, exact[index], [native[index]], f"{workload.name} {index}")


@kernels
@pytest.mark.parametrize("provider", ["rowwise", "by_hand"])
@pytest.mark.parametrize("workload", QUANTISED, ids=lambda w: w.name)
def test_quantised_results_are_those_of_the_function(workload: Workload, provider: str) -> None:
    """Values differ by one step at most, because of other roundings before the last."""
    tensors = workload.tensors(torch.device(DEVICE), torch.bfloat16)
    expected = as_tuple(workload.function(*tensors))
    results = as_tuple(providers.build(provider, workload)(*tensors))
    assert [result.dtype for result in results] == [value.dtype for value in expected]
    values, exact = results[0].float(), expected[0].float()
    assert ((values - exact).abs() <= exact.abs() * 2.0**-3 + 2.0**-9).all()
    assert (values == exact).float().mean() > 0.99
    for result, value in zip(results[1:], expected[1:], strict=True):
        torch.testing.assert_close(result, value, rtol=2.0**-20, atol=0)


@kernels
@pytest.mark.parametrize("workload", STRIDED, ids=lambda w: w.name)
def test_heads_of_a_packed_projection_are_not_copied(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = workload.tensors(torch.device(DEVICE), torch.float32)
    assert not any(tensor.is_contiguous() for tensor in tensors[:2])
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors[:2]}) == 1
    copied = []
    contiguous = Tensor.contiguous

    def recording(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        if not tensor.is_contiguous():
            copied.append(tensor.shape)
        return contiguous(tensor, *args, **options)

    monkeypatch.setattr(Tensor, "contiguous", recording)
    run(providers.build("rowwise", workload), tensors)
    assert not copied


def test_names_of_rows_are_unique() -> None:
    names = [(workload.name, workload.shape_name) for workload in workloads()]
    assert len(set(names)) == len(names)
    assert {cols for workload in workloads(["layer_scale"]) for cols in workload.shape[1:]} == {
        *(1536, 3072, 4096, 5120, 6144)
    }


def test_moved_bytes_of_each_direction() -> None:
    (workload,) = workloads(["qk_norm_rotary_halves"])
    tensor = 8 * 1024 * 16 * 64 * 2
    assert workload.moved("fwd") == 4 * tensor
    assert workload.moved("fwd_bwd") == 10 * tensor


def test_moved_bytes_of_quantised_results() -> None:
    (workload, _) = workloads(["add_rms_norm_to_fp8_blocks"])
    elements = 8192 * 4096
    assert workload.moved("fwd") == 2 * 2 * elements + elements + 2 * elements + elements // 32


def row(provider: str, us: float, mode: str = "fwd", commit: str = "commit") -> results.Row:
    return results.Row(
        *("dynamic_tanh", "8x64", "bfloat16", mode, provider, us, math.nan, 30.0, 1.0),
        *(commit, "torch", "triton"),
    )


def test_table_compares_with_the_faster_mode_of_torch_compile() -> None:
    measured = [
        row("rowwise", 40.0),
        row("eager", 200.0),
        row("compile", 60.0),
        row("compile_max_autotune", 50.0),
        row("rowwise", 60.0, "fwd_bwd"),
    ]
    _, forward, both = command.table(measured).splitlines()
    times = ["40.0", "0.75", "50.0", "1.25", "200.0"]
    assert forward.split() == ["dynamic_tanh", "8x64", "fwd", *times]
    assert both.split() == ["dynamic_tanh", "8x64", "fwd_bwd", "60.0", "0.50"]


def test_command_prints_rows_of_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = runner.Machine(torch.device("cpu"), 1, 1e12, "new", "torch", "triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(commands, "this_machine", lambda: ("a GPU", machine))
    options = argparse.Namespace(table=False, output=tmp_path / "rowwise.csv")
    results.write(options.output, [row("eager", 200.0, commit="old")])

    def measure(_: argparse.Namespace, machine: runner.Machine, path: Path) -> int:
        results.write(path, [row("rowwise", 40.0, commit=machine.commit)])
        return 1

    assert commands.run("rowwise", options, command.table, measure) == 1
    *_, line = capsys.readouterr().out.splitlines()
    assert line.split()[3:] == ["40.0", "0.75"]
