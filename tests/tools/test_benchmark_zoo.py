"""The benchmark of many architectures, with tiny models and without a compiler."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as benchmarks
from benchmarks.fresh import Worker, together
from benchmarks.models import ahead, text
from benchmarks.models.measuring import Effort
from benchmarks.models.providers import PROVIDERS, Contender, contender
from benchmarks.models.results import Row as ModelRow
from benchmarks.models.runner import Work
from benchmarks.zoo import command, gate, measuring, page, registry, results, scheduling
from benchmarks.zoo.registry import MODELS, workloads
from benchmarks.zoo.results import Row
from zoo import transformers_only

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.plain
CPU = torch.device("cpu")
TEXT = text.Text(CPU)
LIGHT = Effort(rounds=1, block_s=0.001, singles=1, most=1)


def tiny(name, mode):
    (workload,) = workloads([name], [mode], tiny=True)
    return workload


def row(model="bert", provider="backend", ms=10.0, peak=1000.0, *, mode="train", **more):
    head = (model, mode, provider, ms, peak, None, "abc1234", "2.11.0", "3.6.0", "32x512")
    return Row(*head, **{"spread": 0.1, "host_ms": 5.0, "gpu_ms": 8.0, **more})


# --- architectures --------------------------------------------------------------------------------


@transformers_only
@pytest.mark.parametrize("workload", workloads(tiny=True), ids=str)
def test_tiny_model_runs_a_step(workload):
    built = contender("eager", workload, CPU, TEXT.reseeded(0))
    result = built.step()
    if workload.mode == "infer":
        outputs = list(gate._floating(result))
        assert outputs
        assert all(output.isfinite().all() for output in outputs)
        return
    assert result.isfinite()
    gradients = [p.grad for p in built.model.parameters() if p.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)
    # All layers contribute to the loss.
    assert len(gradients) > 0.9 * len(list(built.model.parameters()))
    assert sum(bool(gradient.any()) for gradient in gradients) > 0.8 * len(gradients)


def test_parts_have_each_model_once_and_equal_costs():
    everything = workloads()
    parts = [registry.part(everything, index, 3) for index in (1, 2, 3)]
    names = [{workload.name for workload in part} for part in parts]
    assert Counter(workload for part in parts for workload in part) == Counter(everything)
    assert sum(map(len, names)) == len(MODELS) >= 40
    costs = [sum(MODELS[name].cost for name in part) for part in names]
    assert max(costs) - min(costs) <= min(model.cost for model in MODELS.values())


# --- processes ------------------------------------------------------------------------------------


def test_worker_keeps_its_process_until_that_ends():
    with Worker() as worker:
        first = worker.run(os.getpid)
        assert worker.run(os.getpid) == first != os.getpid()
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            worker.run(divmod, 1, 0)
        assert worker.run(os.getpid) == first
        with pytest.raises(RuntimeError, match="ended with status -9"):
            worker.run(signal.raise_signal, signal.SIGKILL)
        assert worker.run(os.getpid) != first
        with pytest.raises(TimeoutError, match="no result after 0 s"):
            worker.run(time.sleep, 600.0, limit=0.2)
        assert worker.run(os.getpid, limit=60.0) != first


def test_paused_worker_runs_nothing_until_it_resumes():
    with Worker() as worker:
        worker.run(os.getpid)
        worker.pause()
        resumes = threading.Timer(0.5, worker.resume)
        resumes.start()
        started = time.perf_counter()
        worker.run(os.getpid)
        assert time.perf_counter() - started > 0.3


def test_workers_run_together_and_an_error_in_one_ends_all():
    with Worker() as one, Worker() as other:
        assert together([one, other], divmod, [(7, 2), (9, 4)]) == [(3, 1), (2, 1)]
        with pytest.raises(RuntimeError, match="TypeError"):
            together([one, other], time.sleep, [(600.0,), ("a minute",)])


@dataclass(eq=False)
class Process:
    """Instead of a worker's process: runs ``function(work, call)`` for each call in this one."""

    function: object
    paused: bool = False

    def start(self):
        pass

    def kill(self):
        pass

    def pause(self):
        self.paused = True

    def resume(self):
        self.paused = False

    def run(self, call, *arguments, limit):
        return self.function(self, call, *arguments)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


@pytest.fixture
def processes(monkeypatch):
    """Returns ``use(function)``: all workers call it, ``function(process, call, *arguments)``."""

    def use(function):
        for module in (scheduling, ahead):
            monkeypatch.setattr(module, "Worker", lambda *_: Process(function))

    return use


def plan(**options):
    settings = {"processes": 1, "limit": 60.0, "deadline": time.perf_counter() + 60.0}
    return scheduling.Plan(CPU, LIGHT, **{**settings, **options})


def works(*names):
    return [Work(tiny(name, "infer"), ("compile", "backend")) for name in names]


def test_model_that_crashes_fails_alone_and_only_its_provider(processes):
    preparing = []

    def call(process, function, work=None, *_):
        if function is measuring.timed:
            work = preparing.pop()
            names = work.providers
            return [row(work.workload.name, name, mode="infer") for name in names]
        if work.workload.name == "mixer" and "backend" in work.providers:
            raise RuntimeError("Traceback\n  ...\nthe process ended with status -11")
        preparing.append(work)
        return []

    rows = list[Row]()
    processes(call)
    left = scheduling.measure_all(works("mixer", "dcn"), plan(), rows.extend)
    assert left == 0
    failures = {(r.model, r.provider): r.failure for r in rows}
    assert failures == {
        ("mixer", "compile"): "",
        ("mixer", "backend"): "the process ended with status -11",
        ("dcn", "compile"): "",
        ("dcn", "backend"): "",
    }


def test_one_process_is_timed_while_the_others_are_stopped(processes):
    started, states = [], []

    def call(process, function, *_):
        if process not in started:
            started.append(process)
        if function is measuring.timed:
            for _ in range(3):
                others = [other.paused for other in started if other is not process]
                states.append((process.paused, others))
                time.sleep(0.01)
        return []

    processes(call)
    scheduling.measure_all(works("mixer", "dcn", "s4d", "dlrm"), plan(processes=2), list)
    assert len(states) == 12
    assert not any(own for own, _ in states)
    assert all(all(others) for _, others in states)
    assert any(others for _, others in states)
    assert not any(process.paused for process in started)


def test_workloads_after_the_deadline_are_left(processes):
    def call(process, function, *_):
        now[0] += 40.0
        if now[0] > 100.0:
            raise TimeoutError("no result after 20 s")
        return [row()] if function is measuring.timed else []

    now, rows = [0.0], list[Row]()
    processes(call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduling.time, "perf_counter", lambda: now[0])
        left = scheduling.measure_all(
            works("mixer", "dcn", "s4d"), plan(deadline=100.0), rows.extend
        )
    assert (left, len(rows)) == (2, 1)


def test_crash_of_a_compilation_does_not_stop_the_others(processes):
    def call(process, function, workload, name, device):
        done.append((workload.name, name))
        if name == "compile":
            raise RuntimeError("the process ended with status -11")

    done = []
    processes(call)
    counts = ahead.compile_ahead(works("mixer", "dcn"), jobs=1, device=CPU, seconds=60.0)
    assert counts == (2, 4) == (2, len(done))


# --- correctness ----------------------------------------------------------------------------------


def changed(built, change):
    """Returns the contender with ``change(model)`` after each step, or before if in inference."""

    def step():
        if not built.model.training:
            change(built.model)
        result = built.step()
        if built.model.training:
            change(built.model)
        return result

    return replace(built, step=step)


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_gate_accepts_eager_and_rejects_a_wrong_layer(mode):
    workload = tiny("gated_decoder", mode)
    reference = gate.reference_of(workload, CPU, TEXT)

    def enlarge(model):
        parameter = max(model.parameters(), key=torch.numel)
        tensor = parameter.grad if mode == "train" else parameter
        tensor.data.mul_(1.1)

    built = contender("eager", workload, CPU, TEXT.reseeded(0))
    assert gate.judged(built, reference).wrong == ""
    assert gate.judged(changed(built, enlarge), reference).wrong.startswith("wrong: differs by ")


def text_of(seed):
    """Returns a text that does not depend on the release of Python."""
    text, generator = TEXT.reseeded(0), torch.Generator().manual_seed(seed)
    text._bytes = torch.randint(256, (4096,), dtype=torch.uint8, generator=generator)
    return text


# Means over 8 steps make the yardstick narrow with the first text, and not with the second.
@pytest.mark.parametrize(("seed", "steps"), [(0, 8), (2, 32)])
def test_gate_accepts_other_masks_of_dropout_and_rejects_gradients_of_half_the_size(seed, steps):
    workload, text = tiny("graph_transformer", "train"), text_of(seed)

    def halve(model):
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)

    torch.manual_seed(1)
    reference = gate.reference_of(workload, CPU, text)
    assert reference.steps == steps
    built = contender("eager", workload, CPU, text.reseeded(0))
    assert gate.judged(built, reference).wrong == ""
    assert gate.judged(changed(built, halve), reference).wrong.startswith("wrong: differs by ")


def test_gate_does_not_judge_by_a_wide_yardstick(monkeypatch):
    workload, text = tiny("graph_transformer", "train"), text_of(2)
    monkeypatch.setattr(gate, "_STEPS", (8,))
    reference = gate.reference_of(workload, CPU, text)
    built = contender("eager", workload, CPU, text.reseeded(0))
    assert gate.judged(built, reference).wrong.startswith("not judged: ")


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_gate_rejects_nan(mode):
    workload = tiny("gated_decoder", mode)
    reference = gate.reference_of(workload, CPU, TEXT)
    built = contender("eager", workload, CPU, TEXT.reseeded(0))

    def poison(model):
        parameter = next(model.parameters())
        (parameter.grad if mode == "train" else parameter).data[0] = float("nan")

    assert gate.judged(changed(built, poison), reference).wrong.startswith("wrong: differs by nan")


def test_gate_rejects_a_wrong_loss():
    workload = tiny("gated_decoder", "train")
    reference = gate.reference_of(workload, CPU, TEXT)
    built = contender("eager", workload, CPU, TEXT.reseeded(0))
    wrong = replace(built, step=lambda: built.step() * 1.05)
    assert gate.judged(wrong, reference).wrong.startswith("wrong: loss differs by 0.05")
    assert gate.judged(built, reference).wrong == ""


def test_only_correct_providers_are_timed(monkeypatch):
    def broken(model):
        raise RuntimeError("no such thing\nand more")

    def wrong(model):
        next(model.parameters()).data.mul_(2.0)
        return contextlib.nullcontext

    monkeypatch.setitem(PROVIDERS, "compile", broken)
    monkeypatch.setitem(PROVIDERS, "backend", wrong)
    work = Work(tiny("gated_decoder", "infer"), ("eager", "compile", "backend"))
    failures = measuring.prepare(work, CPU, LIGHT)
    assert [r.provider for r in failures] == ["compile", "backend"]
    assert failures[0].failure == "RuntimeError: no such thing"
    assert failures[1].failure.startswith("wrong: differs by ")
    assert failures[1].difference > failures[1].allowed > 0
    assert all(r.ms is None for r in failures)
    (only,) = measuring.timed()
    assert (only.provider, only.failure, only.regions, only.breaks) == ("eager", "", 0, 0)
    assert only.ms > 0 and only.host_ms > 0 and only.first_s > 0
    assert not measuring._prepared


def test_regions_and_breaks_of_compiled_graphs_are_counted(monkeypatch, fresh_dynamo):
    from fusedops.backend import entry

    def broken(x):
        torch._dynamo.graph_break()
        return x + 1

    def step():
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        y = graph.call_function(torch.ops.fusedops.cast_joined.default, (x,))
        graph.output(graph.call_function(torch.ops.aten.neg.default, (y,)))
        entry.compile_by_inductor(torch.fx.GraphModule(torch.nn.Module(), graph), [])
        return torch.compile(broken, backend="eager")(torch.ones(2))

    built = Contender(torch.nn.Linear(1, 1), contextlib.nullcontext, step)
    monkeypatch.setattr(measuring, "compile_by_inductor", lambda *_: None)
    monkeypatch.setattr(measuring, "contender", lambda *_: built)
    monkeypatch.setattr(gate, "judged", lambda *_: gate.Verdict(difference=0.1, allowed=0.2))
    setting, work = measuring._setting(CPU, LIGHT), works("mixer")[0]
    _, result = measuring._started("backend", work, setting, row(ms=None), None)
    assert (result.regions, result.breaks) == (2, 1)  # two steps with an operator each


# --- results --------------------------------------------------------------------------------------


def test_results_file_has_numbers_and_failures(tmp_path):
    path = tmp_path / "zoo_nvidia_h200.csv"
    rows = [
        row("bert", "compile", regions=0, breaks=0, difference=0.01, allowed=0.03, first_s=9.0),
        row("bert", "backend", None, None, spread=None, host_ms=None, gpu_ms=None, failure="x,\ny"),
    ]
    results.write(path, rows)
    assert results.read(path) == sorted(rows, key=lambda r: r.key)
    newer = replace(rows[1], ms=5.0, failure="")
    results.write(path, [newer])
    assert newer in results.read(path)
    assert len(results.read(path)) == 2
    assert isinstance(newer, ModelRow)


def test_rows_of_several_processes_are_all_in_the_file(tmp_path):
    path = tmp_path / "zoo_nvidia_h200.csv"
    rows = [row(name) for name in MODELS]
    threads = [threading.Thread(target=results.write, args=(path, [new])) for new in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {r.model for r in results.read(path)} == MODELS.keys()


def test_tables_have_speeds_and_list_what_is_slower_larger_or_failed(tmp_path):
    path = tmp_path / "zoo_nvidia_h200.csv"
    results.write(
        path,
        [
            row("bert", "compile", 10.0),
            row("bert", "backend", 5.0, 1005.0, regions=14, breaks=2),
            row("t5", "compile", 9.0),
            row("t5", "backend", 10.0, 1100.0, gpu_ms=16.0),
            row("gpt2", "compile", 9.0),
            row("gpt2", "backend", None, None, failure="wrong: differs by 1, allowed 0.1"),
            row("vit", "compile", 7.0, mode="infer"),
        ],
    )
    plain = page.table(results.read(path))
    line = next(line for line in plain.splitlines() if line.startswith("bert")).split()
    assert line == [
        "bert",
        "32x512",
        "10.00",
        "±",
        "0.10",
        "5.00",
        "±",
        "0.10",
        "2.000",
        "1.000",
        "1.000",
        "1000",
        "/",
        "1005",
        "14",
        "2",
    ]
    assert "Geometric mean of the speeds of 2 models: 1.342." in plain
    assert "Slower than torch.compile, below 0.98: t5 0.900." in plain
    assert "More memory than torch.compile, above 1.01: t5 1.100." in plain
    assert "Not timed: gpt2 with fusedops.compile: wrong: differs by 1, allowed 0.1." in plain
    text = page.markdown(path)
    assert "| bert | 32\u00a0\u00d7\u00a0512 | 10.00 ± 0.10 | 5.00 ± 0.10 | 2.000 |" in text
    assert (
        "| t5 | 32\u00a0\u00d7\u00a0512 | 9.00 ± 0.10 | 10.00 ± 0.10 | 0.900 | 1.000 | 0.500 |"
        in text
    )
    assert "| vit | 32\u00a0\u00d7\u00a0512 | 7.00 ± 0.10 |  |" in text


def test_rows_of_two_commits_are_not_compared(tmp_path):
    ours = replace(row("bert", "backend", 5.0), commit="other")
    pairs = page._pairs([row("bert", "compile"), ours], "train")
    assert pairs[0].ratio("ms") is None


def test_committed_page_is_what_its_results_give():
    """If this fails, run ``python -m benchmarks zoo --page`` and commit the page."""
    text = page.markdown(ROOT / "benchmarks" / "results" / "zoo_nvidia_h200.csv")
    assert (ROOT / "docs" / "zoo.md").read_text(encoding="utf-8") == text


# --- the command ----------------------------------------------------------------------------------


def run(*arguments):
    return benchmarks.main(["zoo", "--tiny", "--device", "cpu", *map(str, arguments)])


def test_command_writes_rows_resumes_and_fails_if_ours_fails(tmp_path, monkeypatch, capsys):
    path = tmp_path / "zoo.csv"
    monkeypatch.setenv("FUSEDOPS_COMMIT", "abc1234")
    measured = []

    def measure_all(work, plan, write):
        measured.append([item.workload.name for item in work])
        for item in work:
            for name in item.providers:
                new = row(item.workload.name, name, mode=item.workload.mode)
                write([replace(new, shape=item.workload.shape, failure=failure)])
        return 0

    monkeypatch.setattr(command, "measure_all", measure_all)
    failure = ""
    words = ("--model", "mixer", "--model", "dcn", "--mode", "infer", "--output", path)
    assert run(*words) == 0
    assert "Geometric mean of the speeds of 2 models: 1.000." in capsys.readouterr().out
    results.write(path, [replace(r, commit="old") for r in results.read(path)[:1]])
    failure = "wrong"
    assert run(*words, "--resume") == 1
    assert measured == [["mixer", "dcn"], [results.read(path)[0].model]]
    assert run(*words, "--table") == 0
    assert "Not timed: " in capsys.readouterr().out


def test_bad_options_are_named(capsys):
    for words in (("--part", "3/2"), ("--part", "x")):
        with pytest.raises(SystemExit):
            run(*words)
        assert "is not I/N with I from 1 to N" in capsys.readouterr().err
    assert run("--model", "burt") == 2
    assert "no model 'burt'; did you mean bert" in capsys.readouterr().err
