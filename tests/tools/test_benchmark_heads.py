"""The command that times losses of a head."""

from __future__ import annotations

import argparse
import math
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import __main__ as benchmarks
from benchmarks import results, runner, timing
from benchmarks.heads import command, errors, functions, providers
from benchmarks.heads.workloads import TINY, Workload, small, workloads
from benchmarks.rowwise import measuring
from rowwise_checks import assert_as_good, kernels
from support import DEVICE

CPU = torch.device("cpu")
MACHINE = runner.Machine(CPU, 1, 1e12, "new", "torch", "triton")


def named(workload: Workload) -> str:
    """The workload's name in the ids of tests."""
    return f"{workload.name}-{workload.shape_name}-{workload.dtype_name}"


every = pytest.mark.parametrize("workload", workloads(sizes=TINY), ids=named)


def in_chunks(workload: Workload) -> Workload:
    """The workload with about five rows in a chunk."""
    return replace(workload, chunk_mib=5 * workload.row_bytes / 2**20)


# --- what is measured -----------------------------------------------------------------------------


def outcome(provider: str, workload: Workload, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results and the gradients, of random gradients of the results of rows."""
    call = providers.build(provider, workload)
    outputs = providers.results_of(call(*tensors))
    generator = torch.Generator().manual_seed(5)
    cotangents = [
        torch.randn(out.shape, generator=generator).to(out) if out.dim() else torch.ones_like(out)
        for out in outputs
    ]
    grads = providers.gradients(outputs, tensors, cotangents)
    return [*[out.detach() for out in outputs], *grads]


@kernels
@every
def test_providers_compute_the_loss(workload: Workload) -> None:
    torch.manual_seed(3)
    workload = in_chunks(workload)
    tensors = workload.tensors(DEVICE)
    doubles = [
        t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for t in tensors
    ]
    exact = outcome("eager", replace(workload, autocast=False), doubles)
    native = outcome("eager", workload, tensors)
    for index, result in enumerate(outcome("fusedops", workload, tensors)):
        assert_as_good(result, exact[index], [native[index]], f"{workload.name} {index}")


def test_losses_of_whole_logits_are_pytorchs() -> None:
    student, teacher = (torch.randn(5, 9, dtype=torch.float64) for _ in range(2))
    tokens = torch.tensor([0, 8, 3, 3, 1])
    distribution = torch.distributions.Categorical(logits=student)
    expected: tuple[Tensor, ...] = (distribution.log_prob(tokens), distribution.entropy())
    torch.testing.assert_close(functions.log_probs(student, tokens), expected)
    of_teacher = torch.distributions.Categorical(logits=teacher)
    divergence = torch.distributions.kl_divergence(of_teacher, distribution).mean()
    torch.testing.assert_close(functions.kl_divergence(student, teacher), divergence)


def test_chunks_of_pytorch_compute_the_loss() -> None:
    workload = workloads(["cross_entropy_half_ignored"], TINY)[0]
    tensors = workload.tensors(CPU)
    native = outcome("eager", workload, tensors)
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        pytest.skip("this release of PyTorch has no chunks")
    for result, expected in zip(outcome("torch", workload, tensors), native, strict=True):
        torch.testing.assert_close(result, expected, rtol=0.05, atol=1e-3, check_dtype=False)


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the multiplications of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket is torch.ops.aten.mm:
            self.products.append(args[0].numel() * args[1].shape[1])
        return func(*args, **(kwargs or {}))


@every
def test_products_are_those_of_the_loss(workload: Workload) -> None:
    call = providers.build("products", workload)
    tensors = workload.tensors(CPU)
    run = providers.step(call, tensors)
    with Counted() as counted:
        shapes = [gradient.shape for gradient in run()]
    rows, cols, classes = workload.head
    counts = {"log_probs_entropy": 4, "kl_divergence": 4}
    rows = rows // 2 if workload.ignored else rows
    assert counted.products == [rows * cols * classes] * counts.get(workload.name, 3)
    assert shapes == [(rows, cols), (classes, cols)]


def test_half_of_the_targets_are_ignored() -> None:
    (workload,) = workloads(["cross_entropy_half_ignored"], TINY)
    *_, target = workload.tensors(CPU)
    assert int((target == -100).sum()) == 6 == workload.counted
    (first, *_) = workloads(["cross_entropy"], TINY)
    assert first.tensors(CPU)[-1].min() >= 0


def test_dtypes_and_gradients_of_tensors() -> None:
    for workload in workloads(sizes=TINY):
        floats = [t for t in workload.tensors(CPU) if t.is_floating_point()]
        assert {t.dtype for t in floats} == {torch.float32 if workload.autocast else torch.bfloat16}
        assert [t.requires_grad for t in floats] == [True, True, False, False][: len(floats)]


def test_names_of_rows_are_unique() -> None:
    names = [named(workload) for workload in workloads()]
    assert len(set(names)) == len(names) == 7
    assert "cross_entropy-8192x4096x128256-autocast" in names


def test_worker_processes_take_workloads() -> None:
    for workload in workloads():
        assert pickle.loads(pickle.dumps(workload)) == workload


def test_peers_have_cross_entropy_only() -> None:
    with_peers = {w.name for w in workloads() if "liger" in providers.offered(w)}
    assert with_peers == {"cross_entropy", "cross_entropy_half_ignored"}
    assert providers.offered(workloads(["kl_divergence"])[0]) == [
        *("products", "fusedops", "compile", "eager")
    ]


# --- measuring ------------------------------------------------------------------------------------


def options_of(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def fake_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run once instead of being timed on a GPU; products take 6 ms, other steps 8 ms."""

    def events(step: Any, rounds: int) -> list[float]:
        step()
        is_products = step.func.__qualname__.startswith("Products")
        return [100.0, *[6.0 if is_products else 8.0] * (rounds - 1)]

    monkeypatch.setattr(providers, "events", events)
    monkeypatch.setattr(timing, "peak_mib", lambda step: 1.0 if step() else math.nan)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.usefixtures("fake_timing")
def test_products_are_the_floor_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "heads.csv"
    chosen = workloads(["kl_divergence"], TINY)
    options = options_of("--jobs", "0", *["--provider", "products", "--provider", "fusedops"])
    assert measuring.measure(command._SUITE, chosen, options, MACHINE, path) == 0
    rows = {row.provider: row for row in results.read(path)}
    assert {row.key[:4] for row in rows.values()} == {
        ("kl_divergence", "12x16x40", "bf16", "fwd_bwd")
    }
    assert (rows["products"].gpu_us, rows["fusedops"].gpu_us) == (6000.0, 8000.0)
    assert (rows["products"].fraction, rows["fusedops"].fraction) == (1.0, 0.75)
    # The gradients of hidden states and weight are not counted.
    assert rows["fusedops"].peak_mib == pytest.approx(1.0 - (12 + 40) * 16 * 2 / 2**20, abs=1e-3)


@pytest.mark.usefixtures("fake_timing")
def test_missing_row_of_this_package_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(name: str, workload: Workload) -> object:
        raise ValueError("no kernel")

    chosen = workloads(["log_probs_entropy"], TINY)
    suite = replace(command._SUITE, build=build)
    for provider, status in (("fusedops", 1), ("eager", 0)):
        options = options_of("--jobs", "0", "--provider", provider)
        assert measuring.measure(suite, chosen, options, MACHINE, tmp_path / "rows.csv") == status
        assert f"{provider} fwd_bwd: left out, ValueError: no kernel" in capsys.readouterr().err


# --- errors ---------------------------------------------------------------------------------------


def test_errors_are_measured_in_as_many_chunks() -> None:
    for workload in workloads():
        assert small(workload).chunks == workload.chunks > 1
    assert [w.chunks for w in workloads(["cross_entropy"])] == [4, 5, 13, 4]


@every
def test_errors_of_the_dtype(workload: Workload) -> None:
    measured = {
        each.provider: each
        for each in errors.errors(in_chunks(workload), DEVICE, ("fusedops", "eager"))
    }
    assert {*measured} == {"fusedops", "eager"}
    for each in measured.values():
        assert all(1e-7 < error < 2e-2 for error in each.all)


def test_failing_provider_has_no_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: Any) -> None:
        raise ModuleNotFoundError("No module named 'liger_kernel'")

    monkeypatch.setitem(providers._PEERS, "liger", failing)
    workload = workloads(["cross_entropy"], TINY)[0]
    measured = errors.errors(workload, DEVICE, ("liger", "eager"))
    assert [each.provider for each in measured] == ["eager"]
    assert "liger: left out, ModuleNotFoundError: No module named" in capsys.readouterr().err


def test_relative_error_is_of_norms() -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert errors.relative(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)


def test_table_of_errors_has_ratios_to_eager() -> None:
    workload = workloads(["cross_entropy"])[0]
    measured = [
        errors.Errors(workload, "fusedops", 1e-4, 2e-3, 3e-3),
        errors.Errors(workload, "eager", 2e-4, 2e-3, 2e-3),
    ]
    _, ours, eager = errors.table(measured).splitlines()
    case = ["cross_entropy", "bf16", "4"]
    assert ours.split() == [
        *case,
        "fusedops",
        *["1.00e-04", "2.00e-03", "3.00e-03", "0.50", "1.00", "1.50"],
    ]
    assert eager.split() == [*case, "eager", "2.00e-04", "2.00e-03", "2.00e-03"]


# --- the table and the command --------------------------------------------------------------------


def row(provider: str, ms: float, gib: float) -> results.Row:
    return results.Row(
        *("cross_entropy", "8192x4096x128256", "bf16", "fwd_bwd", provider, ms * 1e3, math.nan),
        *(36e3, gib * 1024, "commit", "torch", "triton"),
    )


def test_table_has_milliseconds_ratios_and_gib() -> None:
    measured = [
        row("products", 36.0, 2.0),
        row("fusedops", 40.0, 0.5),
        row("compile", 60.0, 6.0),
        row("liger", 100.0, 0.25),
    ]
    _, line = command.table(measured).splitlines()
    times, memory = line.split("|")
    case = ["cross_entropy", "8192x4096x128256", "bf16"]
    assert times.split() == [*case, *["36.00", "40.00", "60.00", "100.00", "0.90", "1.50", "2.50"]]
    assert memory.split() == ["0.50", "6.00", "0.25"]


def test_command_prints_the_table_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "heads.csv"
    results.write(path, [row("fusedops", 40.0, 0.5)])
    assert benchmarks.main(["heads", "--table", "--output", str(path)]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert line.split() == [*("cross_entropy", "8192x4096x128256", "bf16", "40.00", "|", "0.50")]


@pytest.mark.parametrize("words", [[], ["--errors"]])
def test_command_needs_a_gpu(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmarks.main(["heads", *words]) == 2
    assert "needs a GPU" in capsys.readouterr().err
