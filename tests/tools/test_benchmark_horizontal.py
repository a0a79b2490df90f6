"""The command that times functions of many slices."""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as benchmarks
from benchmarks import commands, fresh, results, runner, timing
from benchmarks.horizontal import command, first_calls, functions, providers
from benchmarks.horizontal.workloads import FULL, TINY, Workload, workloads
from benchmarks.rowwise import ahead, measuring
from benchmarks.rowwise.providers import step
from rowwise_checks import assert_as_good, kernels
from support import DEVICE

CPU = torch.device("cpu")
MACHINE = runner.Machine(CPU, 1, 1e12, "new", "torch", "triton")


def named(workload: Workload) -> str:
    """The workload's name in the ids of tests."""
    return f"{workload.name}-{workload.shape_name}-{workload.dtype_name}"


def run(provider: str, workload: Workload, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The outputs, and the gradients for equal random cotangents."""
    torch.manual_seed(5)
    call = step(providers.build(provider, workload), tensors, "fwd_bwd")
    out, grads = call()
    outputs = [out] if isinstance(out, torch.Tensor) else list(out)
    return [*[output.detach() for output in outputs], *grads]


@kernels
@pytest.mark.parametrize("workload", workloads(sizes=TINY), ids=named)
def test_providers_compute_the_loop(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_P", 0.0)
    torch.manual_seed(3)
    tensors = workload.tensors(DEVICE)
    doubles = tuple([tensor.detach().double().requires_grad_() for tensor in tensors])
    native = run("eager", workload, tensors)
    # The cotangents of fp64 outputs are those of the others.
    out = providers.build("eager", workload)(*doubles)
    outputs = [out] if isinstance(out, torch.Tensor) else list(out)
    torch.manual_seed(5)
    like = native[: len(outputs)]
    cotangents = [torch.randn_like(output).double() for output in like]
    exact = [*outputs, *torch.autograd.grad(outputs, doubles, cotangents)]
    for provider in providers.offered(workload, ("foreach", "operator")):
        for index, result in enumerate(run(provider, workload, tensors)):
            assert_as_good(
                result,
                exact[index].detach(),
                [native[index]],
                f"{provider} {workload.name} {index}",
            )


def test_names_of_rows_are_unique() -> None:
    names = [named(workload) for workload in workloads()]
    assert len(set(names)) == len(names) == 10
    assert "layer_norm_tanh-4096x16x128-fp32" in names
    assert "layer_norm_tanh-4096x64x64-bf16" in names


def test_widths_of_slices() -> None:
    assert (len(FULL.ragged), len(FULL.separate)) == (60, 40)
    assert 1 <= min(FULL.ragged) < max(FULL.ragged) <= 256
    assert 8 <= min(FULL.separate) < max(FULL.separate) <= 256
    assert not any(width % 8 for width in FULL.separate)


def test_moved_bytes_of_each_direction() -> None:
    (workload,) = workloads(["gate"])
    tensor = 4096 * sum(FULL.separate) * 2
    assert workload.moved("fwd") == 3 * tensor
    assert workload.moved("fwd_bwd") == 8 * tensor
    assert workloads()[0].moved("fwd") == 2 * 4096 * 16 * 128 * 4


def test_only_layer_norms_have_an_operator() -> None:
    with_operator = {w.name for w in workloads() if "operator" in providers.offered(w)}
    assert with_operator == {"layer_norm_tanh"}


# --- measuring ------------------------------------------------------------------------------------


def options_of(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def fake_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run once instead of being timed on a GPU."""

    def gpu_us(steps: list[timing.Step], _: timing.Effort) -> float:
        steps[0]()
        return 8.0

    monkeypatch.setattr(timing, "gpu_us", gpu_us)
    monkeypatch.setattr(timing, "peak_mib", lambda _: 1.0)
    monkeypatch.setattr(timing, "set_count", lambda *_: 2)


@pytest.mark.usefixtures("fake_timing")
def test_rows_of_all_modes_and_providers(tmp_path: Path) -> None:
    path = tmp_path / "horizontal.csv"
    chosen = workloads(["softmax"], TINY)
    options = options_of("--jobs", "0", "--provider", "foreach", "--provider", "eager")
    assert measuring.measure(command._SUITE, chosen, options, MACHINE, path) == 0
    rows = results.read(path)
    assert {row.key for row in rows} == {
        ("softmax", "6xS48", "bf16", mode, provider)
        for mode in ("fwd", "fwd_bwd")
        for provider in ("foreach", "eager")
    }
    assert {row.gpu_us for row in rows} == {8.0}


@pytest.mark.usefixtures("fake_timing")
def test_missing_row_of_this_package_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(provider: str) -> measuring.Suite:
        def build(name: str, workload: Workload) -> object:
            if name == provider:
                raise ValueError("no kernel")
            return providers.build("eager", workload)

        return replace(command._SUITE, build=build)

    chosen = workloads(["softmax"], TINY)
    options = options_of("--jobs", "0", "--provider", "foreach", "--provider", "compile")
    for provider, status in (("foreach", 1), ("compile", 0)):
        path = tmp_path / provider
        assert measuring.measure(failing(provider), chosen, options, MACHINE, path) == status
        assert f"{provider} fwd: left out, ValueError: no kernel" in capsys.readouterr().err


def test_no_workload_starts_after_the_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = options_of("--jobs", "0", "--budget", "0")
    path = tmp_path / "horizontal.csv"
    chosen = workloads(["softmax"], TINY)
    assert measuring.measure(command._SUITE, chosen, options, MACHINE, path) == 0
    assert "stopped before softmax 6xS48" in capsys.readouterr().out
    assert not path.exists()


def test_worker_processes_take_workloads() -> None:
    chosen = workloads(["softmax"], TINY)
    todo = [(chosen[0], "foreach", mode) for mode in ("fwd", "fwd_bwd")]
    assert ahead.compile_ahead(todo, providers.build, jobs=1, device=CPU) == 2


# --- the table and the command --------------------------------------------------------------------


def row(provider: str, us: float, mode: str = "fwd", commit: str = "commit") -> results.Row:
    return results.Row(
        *("gate", "8xS64", "bf16", mode, provider, us, math.nan, 30.0, 1.0),
        *(commit, "torch", "triton"),
    )


def test_table_compares_the_faster_provider_with_torch_compile() -> None:
    measured = [
        row("foreach", 50.0),
        row("backend", 40.0),
        row("compile", 60.0),
        row("eager", 200.0),
        row("backend", 60.0, "fwd_bwd"),
    ]
    _, forward, both = command.table(measured).splitlines()
    case = ["gate", "8xS64", "bf16"]
    assert forward.split() == [*case, "fwd", "50.0", "40.0", "60.0", "0.75", "1.50"]
    assert both.split() == [*case, "fwd_bwd", "60.0", "0.50"]


def test_command_prints_the_table_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "horizontal.csv"
    results.write(path, [row("foreach", 50.0)])
    assert benchmarks.main(["horizontal", "--table", "--output", str(path)]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert line.split() == ["gate", "8xS64", "bf16", "fwd", "50.0", "0.60"]


def test_first_calls_need_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmarks.main(["horizontal", "--first-calls"]) == 2
    assert "needs a GPU" in capsys.readouterr().err
    assert commands.lacks_gpu("horizontal")


# --- first calls ----------------------------------------------------------------------------------


def test_first_call_runs_in_a_new_process() -> None:
    chosen = workloads(["softmax"], TINY)
    assert 0.0 < first_calls.seconds_of(chosen[0], "foreach", CPU) < first_calls.LIMIT


def test_first_calls_are_printed_and_failures_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def seconds_of(workload: Workload, provider: str, device: torch.device) -> float:
        if provider == "compile":
            raise TimeoutError("no result after 200 s")
        return 12.0

    monkeypatch.setattr(first_calls, "seconds_of", seconds_of)
    (ragged,) = [w for w in workloads() if command._is_ragged(w)]
    assert command._print_first_calls(ragged, ("foreach", "compile"), CPU) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[1].split() == ["foreach", "12.0", "s"]
    assert "compile: left out, no result after 200 s" in captured.err


def test_new_process_has_its_caches_in_the_folder(tmp_path: Path) -> None:
    with fresh.caches(tmp_path):
        folder = fresh.in_a_new_process(os.getenv, "TRITON_CACHE_DIR")
    assert folder == str(tmp_path / "triton_cache_dir")


def test_new_process_is_killed_after_the_limit() -> None:
    with pytest.raises(TimeoutError, match="no result after 0 s"):
        fresh.in_a_new_process(time.sleep, 600.0, limit=0.2)


def test_error_and_end_of_a_new_process_are_raised() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        fresh.in_a_new_process(divmod, 1, 0)
    with pytest.raises(RuntimeError, match="ended with status 3"):
        fresh.in_a_new_process(os._exit, 3)
