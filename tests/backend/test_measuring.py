"""Regions that are measured both ways: when, how often, and what follows from the times.

Made-up times stand in for the process that measures, except in the last tests.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import list_mode_options
from torch.nn import functional as F

import fusedops
from backends import PostNorm, randn
from fusedops.backend import entry, measuring, prediction, storing
from fusedops.backend.measuring import Measurer
from fusedops.backend.prediction import Times, Work, among_neighbours
from fusedops.backend.report import CompileReport
from fusedops.core import children
from fusedops.core.configs import cache, tuning
from fusedops.core.launches import launch
from fusedops.tune import regions
from support import DEVICE

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
kernels = pytest.mark.kernels

MODE = "max-autotune"
WINS, LOSES = Times(1e-6, 2e-6), Times(2e-6, 1e-6)
ROWS = 9


class Answers:
    """Answers in the place of the process that measures.

    Attributes:
        answer: the times of each region, or why there are none.
        asked: the regions.
    """

    def __init__(self) -> None:
        self.answer: Times | str | Exception = WINS
        self.asked: list[Mapping[str, Any]] = []

    def ask(self, region: Mapping[str, Any]) -> Times | str:
        self.asked.append(region)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No region is known."""
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(measuring, "_known", {})


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    result = Answers()
    monkeypatch.setattr(measuring, "why_not", lambda: "")
    monkeypatch.setattr(Measurer, "ask", lambda self, region: result.ask(region))
    return result


def explained(
    model: Callable[..., Any], *tensors: Tensor, mode: str | None = MODE
) -> CompileReport:
    return fusedops.explain(model, *tensors, mode=mode)


def _files(folder: str) -> list[Path]:
    return list(Path(str(cache.directory())).glob(f"{folder}/*.json"))


def _forget() -> None:
    """No region is known, and no graph is stored."""
    measuring._known.clear()
    for path in (*_files("measured"), *_files("graphs")):
        path.unlink()


def _norm(width: int = 16) -> nn.Module:
    return nn.LayerNorm(width).to(DEVICE)


def _predict(monkeypatch: pytest.MonkeyPatch, *, operator: bool) -> None:
    """Predict that operators of norms are faster, or slower."""
    rates = replace(prediction.RATES, summed=0.1 if operator else -0.1)
    monkeypatch.setattr(prediction, "RATES", rates)


# --- the choice -----------------------------------------------------------------------------------


@kernels
@pytest.mark.parametrize("is_predicted", [True, False])
@pytest.mark.parametrize("times", [WINS, LOSES])
def test_the_choice_follows_the_measured_times(
    times: Times, is_predicted: bool, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    _predict(monkeypatch, operator=is_predicted)
    answers.answer = times
    report = explained(_norm(), randn(ROWS, 16).requires_grad_())
    (region,) = report.regions
    assert region.reason == ("" if times is WINS else "Inductor is measured to be as fast")
    assert region.is_measured and region.times == times
    assert region.seconds == 1e-6
    by_prediction = explained(_norm(), randn(ROWS, 16).requires_grad_(), mode=None)
    assert len(by_prediction.fused) == is_predicted


@kernels
def test_measured_times_are_marked_in_the_report(answers: Answers) -> None:
    text = str(explained(nn.Sequential(_norm(), nn.Linear(16, 16)).to(DEVICE), randn(ROWS, 16)))
    assert "; measured: 1.0 µs, and 2.0 µs by Inductor\n" in text
    # The bias of the product is never measured: the product adds it.
    assert "  1 of 2 regions measured, others predicted at " in text
    assert "1.0 µs for operators instead of 2.0 µs" in text
    assert "measured" not in str(explained(_norm(), randn(ROWS, 16), mode=None))


@kernels
def test_inference_follows_its_own_times(answers: Answers) -> None:
    """By prediction it would select what training does, if that takes at most 10% longer."""
    answers.answer = Times(1.05e-6, 1e-6)
    with torch.no_grad():
        report = explained(_norm(), randn(ROWS, 16))
        assert explained(_norm(), randn(ROWS, 16), mode=None).fused
    assert not report.fused
    (region,) = answers.asked
    assert region["wanted"] == (False, False, False)


class _AfterLookUp(nn.Module):
    """A norm whose input Inductor computes: it fuses the two."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(ROWS, 16), nn.LayerNorm(16)
        self.last = nn.Linear(16, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(self.table(ids)))
        return result


@kernels
@pytest.mark.parametrize("is_fused", [True, False])
def test_fusions_with_neighbours_are_predicted(
    is_fused: bool, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor neither writes nor reads one tensor, forward and backward: 4 of 5 transfers."""
    monkeypatch.setattr(prediction, "among_neighbours", among_neighbours)
    monkeypatch.setattr(prediction, "RATES", Work(moved=1.0))
    monkeypatch.setattr("fusedops.backend.selection.machine_of", lambda index: prediction.H200)
    answers.answer = Times(1e-6, 5e-6 * (1.1 if is_fused else 0.9))
    report = explained(_AfterLookUp().to(DEVICE), torch.arange(ROWS, device=DEVICE))
    (region,) = [region for region in report.regions if region.is_measured]
    assert region.reason == ("" if is_fused else "Inductor is predicted to be as fast")


@kernels
def test_the_time_of_calls_is_added(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph does not measure what the host does."""
    monkeypatch.setattr(prediction, "RATES", Work(calls=1e-6))
    for gain, fused in ((1.9e-6, 0), (2.1e-6, 1)):
        _forget()
        answers.answer = Times(1e-6, 1e-6 + gain)
        assert len(explained(_norm(), randn(ROWS, 16).requires_grad_()).fused) == fused


# --- how often ------------------------------------------------------------------------------------


@kernels
@pytest.mark.parametrize("answer", [WINS, "no memory"])
def test_each_kind_of_region_is_measured_once(answer: Times | str, answers: Answers) -> None:
    answers.answer = answer
    model = nn.Sequential(*[PostNorm() for _ in range(4)]).to(DEVICE)
    report = explained(model, randn(6, 24).requires_grad_())
    # In each layer a norm, and a bias with an activation.
    assert len(report.fused) == 8 and len(answers.asked) == 2
    explained(model, randn(6, 24).requires_grad_())
    assert len(answers.asked) == 2


@kernels
def test_another_process_reads_the_times(answers: Answers) -> None:
    answers.answer = LOSES
    assert not explained(_norm(), randn(ROWS, 16).requires_grad_()).fused
    (path,) = _files("measured")
    answers.answer = WINS
    for content, count in ((path.read_text(), 1), ("torn", 2), (cache.sealed("[0, 1]"), 3)):
        path.write_text(content)
        measuring._known.clear()
        report = explained(_norm(), randn(ROWS, 16).requires_grad_())
        assert len(answers.asked) == count
        assert len(report.fused) == (count > 1)


@kernels
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_nothing_is_stored_where_caches_are_off(answers: Answers) -> None:
    with torch.compiler.config.patch(force_disable_caches=True):
        explained(_norm(), randn(ROWS, 16))
    assert answers.asked and not _files("measured")


@kernels
def test_regions_that_differ_are_measured_again(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(x: Tensor, model: nn.Module | None = None, *, dynamic: bool = False) -> None:
        torch.compiler.reset()  # otherwise sizes that have changed become symbols
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        explained(model or _norm(), x.requires_grad_())

    other_eps = nn.LayerNorm(16, eps=1e-3).to(DEVICE)
    calls: dict[str, Callable[[], Any]] = {
        "rows": lambda: call(randn(ROWS + 1, 16)),
        "rows that are symbols": lambda: call(randn(ROWS, 16), dynamic=True),
        "other rows that are symbols": lambda: call(randn(ROWS + 1, 16), dynamic=True),
        "strides": lambda: call(randn(ROWS, 32)[:, :16]),
        "dtype": lambda: call(randn(ROWS, 16).half(), _norm().half()),
        "a number": lambda: call(randn(ROWS, 16), other_eps),
        "gradients": lambda: call(randn(ROWS, 16), _norm().requires_grad_(False)),
        "no backward": torch.no_grad()(lambda: call(randn(ROWS, 16))),
    }
    settings = {
        "device": (tuning, "device_name"),
        "Triton": (cache, "triton_version"),
        "code": (cache, "code_of_package"),
    }
    call(randn(ROWS, 16))
    for count, (name, run) in enumerate(calls.items(), 2):
        run()
        assert len(answers.asked) == count, name
    for count, (name, (owner, function)) in enumerate(settings.items(), 2 + len(calls)):
        measuring._known.clear()
        with monkeypatch.context() as patch:
            patch.setattr(owner, function, lambda *_: "another")
            call(randn(ROWS, 16))
        assert len(answers.asked) == count, name


# --- when -----------------------------------------------------------------------------------------


def _compiled(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Compile a norm without Inductor, and run it twice."""
    monkeypatch.setattr(entry, "compile_by_inductor", lambda gm, *_: gm.forward)
    torch._dynamo.reset()
    compiled = torch.compile(_norm(), backend=entry.backend, **options)
    for _ in range(2):
        compiled(randn(ROWS, 16))


@kernels
def test_only_modes_that_tune_measure(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({}, {"mode": "default"}, {"mode": "reduce-overhead"}):
        _compiled(monkeypatch, **options)
    _compiled(monkeypatch, options={"fusedops.memory": "low"})
    fusedops.compile(_norm(), rest="eager")(randn(ROWS, 16))
    assert not answers.asked
    tuning_options = {"fusedops.memory": "low", **list_mode_options(MODE)}
    for options in ({"mode": MODE}, {"mode": f"{MODE}-no-cudagraphs"}, {"options": tuning_options}):
        answers.asked.clear()
        _forget()
        _compiled(monkeypatch, **options)
        assert len(answers.asked) == 1


@kernels
def test_nothing_is_measured_that_is_decided(answers: Answers) -> None:
    """A function of `rowwise` is an operator, and a product adds its bias."""
    function = fusedops.rowwise(lambda x: torch.tanh(F.layer_norm(x, (16,))))
    assert explained(function, randn(ROWS, 16).requires_grad_()).fused
    assert explained(nn.Linear(16, 16).to(DEVICE), randn(ROWS, 16)).regions
    assert not answers.asked


@kernels
@pytest.mark.parametrize("where", ["no GPU", "ranks", "a launcher"])
def test_where_nothing_can_be_measured_the_report_says_so(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: where != "no GPU")
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(measuring, "has_other_ranks", lambda: where == "ranks")
    if where == "a launcher":
        monkeypatch.setenv("WORLD_SIZE", "2")
    report = CompileReport()
    assert not entry._measures(entry.options_of(None, MODE), report)
    reason = "ranks of one job might choose differently"
    if where == "no GPU":
        reason = "there is no GPU"
    assert str(report).splitlines()[1] == f"no region is measured: {reason}"


@kernels
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("OutOfMemoryError: 9 GiB", "OutOfMemoryError: 9 GiB"),
        (RuntimeError("a launch\nfailed"), "RuntimeError: a launch"),
    ],
)
def test_after_an_error_the_prediction_decides(
    answer: str | Exception, reason: str, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers.answer = answer
    for is_predicted in (True, False):
        _predict(monkeypatch, operator=is_predicted)
        report = explained(_norm(), randn(ROWS, 16).requires_grad_())
        (region,) = report.regions
        assert bool(report.fused) == is_predicted and not region.is_measured
        assert f"; not measured: {reason}\n" in str(report)
    assert not _files("measured")


# --- stored graphs --------------------------------------------------------------------------------


def _captured() -> tuple[fx.GraphModule, list[Any]]:
    recorded: list[Any] = []

    def record(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        recorded[:] = gm, inputs
        return gm.forward

    torch._dynamo.reset()
    torch.compile(_norm(), backend=record, fullgraph=True)(randn(ROWS, 16).requires_grad_())
    graph_module, inputs = recorded
    return graph_module, inputs


@kernels
def test_graphs_of_measured_regions_have_files_of_their_own(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    gm, inputs = _captured()

    def files(*, measures: bool) -> int:
        entry._stored(gm, inputs, CompileReport(), measures=measures)
        return len(_files("graphs"))

    answers.answer = "no memory"
    # Another process may have the memory, so its graph must not be this one.
    assert files(measures=True) == 0
    assert files(measures=False) == 1
    answers.answer = LOSES
    measuring._known.clear()
    assert files(measures=True) == 2
    keys = [measuring.choice(measures=True)]
    monkeypatch.setattr(cache, "triton_version", lambda: "another")
    keys += [measuring.choice(measures=True), measuring.choice(measures=False)]
    assert len({storing.stored_at(gm, inputs, choice=key) for key in keys}) == 3


# --- the process that measures --------------------------------------------------------------------

_PROCESS = """
import json, subprocess, sys
from fusedops.core.children import send
print("a startup file prints")
for line in sys.stdin:
    region = json.loads(line)
    if region["device"] == 3:
        sys.exit(3)
    if region["device"] == 4:
        subprocess.run(["sleep", "60"])
    send({"seconds": [1e-6 * region["device"], 2e-6]}, sys.stdout)
"""


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Measurer]:
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(measuring, "command", (sys.executable, "-c", _PROCESS))
    with Measurer() as measurer:
        yield measurer


def test_one_process_replies_for_all_regions_and_ends(own_process: Measurer) -> None:
    assert own_process.ask({"device": 1}) == Times(1e-6, 2e-6)
    child = own_process._child
    assert own_process.ask({"device": 2}) == Times(2e-6, 2e-6)
    assert own_process._child is child and child is not None and child.process.poll() is None
    own_process.__exit__()
    assert child.process.poll() is not None


@pytest.mark.parametrize(
    ("device", "problem"),
    [(3, "ended with exit code 3"), (4, "was stopped: no reply within 2 s")],
)
def test_a_process_that_fails_is_not_asked_again(
    device: int, problem: str, own_process: Measurer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs is stopped, although a process of its own holds the pipe."""
    assert own_process.ask({"device": 1}) == Times(1e-6, 2e-6)
    child = own_process._child
    monkeypatch.setattr(measuring, "patience", 2.0)
    reason = f"the process that measures {problem}"
    assert own_process.ask({"device": device}) == reason
    monkeypatch.setattr(own_process, "_reply", lambda line: pytest.fail("asked"))
    assert own_process.ask({"device": 1}) == reason
    assert child is not None and child.process.poll() is not None


@pytest.mark.filterwarnings("ignore:fusedops predicts the times:RuntimeWarning")
def test_compilation_warns_of_a_process_that_fails(
    own_process: Measurer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "command", (sys.executable, "-c", "raise SystemExit(3)"))
    monkeypatch.setattr(measuring, "why_not", lambda: "")
    monkeypatch.setattr(measuring, "_known", {})
    model = PostNorm(64, p=0.0).to(DEVICE)
    with pytest.warns(RuntimeWarning, match="predicts the times.*ended with exit code 3"):
        report = explained(model, randn(ROWS, 64))
    assert report.regions


def test_an_error_of_a_region_is_its_reply() -> None:
    replies = io.StringIO()
    regions.serve(io.StringIO('{"device": 0}\n[]\n'), replies)
    first, second = children.replies_in(replies.getvalue().splitlines())
    assert set(first) == set(second) == {"error"}
    assert second["error"].startswith("TypeError: ")


def _expanded(x: Tensor, mask: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two results, of which one gets no gradient."""
    y = x + mask
    return F.rms_norm(y, (16,), weight), torch.sigmoid(y).detach()


def _dropped(x: Tensor, mask: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    first, second = _expanded(x, mask, weight)
    return F.dropout(first, 0.5), second


@kernels
@pytest.mark.pairs("function trains")
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("function", [_expanded, _dropped])
def test_both_ways_compute_the_region(
    function: Callable[..., tuple[Tensor, Tensor]], trains: bool, answers: Answers
) -> None:
    """An input is expanded, which none that is written to may be."""
    with torch.set_grad_enabled(trains):
        x, weight = randn(4, 6, 16).requires_grad_(), randn(16)
        explained(function, x, randn(4, 1, 16).expand(4, 6, 16), weight.requires_grad_())
    task = json.loads(json.dumps(answers.asked[0]))
    source = storing.source_in(task["program"])
    tensors = regions.inputs(source, task, DEVICE)
    assert [list(tensor.shape) for tensor in tensors] == [list(shape) for shape in task["shapes"]]
    assert [tensor.requires_grad for tensor in tensors].count(True) == 2 * trains
    results = []
    for call in regions.functions(source, task, DEVICE):
        torch.manual_seed(1)
        run = regions.step(call, tensors, task["received"])
        with torch.set_grad_enabled(trains):
            results.append(_flat(run()))
    assert sorted(task["received"]) == [False, trains]
    assert len(results[0]) == (4 if trains else 2)
    for ours, theirs in zip(*results, strict=True):
        if function is _dropped:  # the masks are others
            assert ours.shape == theirs.shape and bool(ours.isfinite().all())
            continue
        # fp32, of sums of 24 products of values of at most some units.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def _flat(results: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(results) if leaf is not None]


@pytest.mark.gpu
def test_a_gpu_measures_a_model() -> None:
    model = nn.Sequential(*[PostNorm(1024, p=0.1) for _ in range(2)]).to(DEVICE)
    x = randn(4096, 1024).requires_grad_()
    state = torch.cuda.get_rng_state()
    explained(model, x, mode=None)
    drawn = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state)
    report = explained(model, x)
    # The call of the model draws, and what measures its regions does not.
    assert torch.equal(torch.cuda.get_rng_state(), drawn)
    measured = [region for region in report.regions if region.is_measured]
    assert len(measured) >= 4, str(report)
    for region in measured:
        assert region.times is not None
        # At least the bytes of its border at twice the bandwidth, at most a hundred times as long.
        least = region.border / 10e12
        assert all(least < seconds < 100 * least for seconds in region.times), str(report)
    measuring._known.clear()
    again = explained(model, x)
    assert [region.times for region in again.regions] == [region.times for region in report.regions]
