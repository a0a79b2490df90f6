"""The sweeps' cases, their order, what is left of them, and compiling ahead.

Nothing here needs a GPU.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import made_up_results as made_up
from benchmarks import __main__ as command
from benchmarks import results, runner, sweep, timing, warm
from benchmarks.cases import DTYPES, Case

pytestmark = pytest.mark.once

SPECS = {name: spec for name, spec in made_up.SPECS.items() if not spec.exact}
CPU = torch.device("cpu")


def keys(cases):
    return [(case.op, case.shape, case.dtype_name) for case in cases]


# --- which cases ----------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["hidden", "rows"])
def test_every_operator_is_swept_in_every_dtype(axis):
    found = {(case.op, case.dtype_name) for case in sweep.plan(SPECS.values(), (axis,))}
    assert found == {(op, dtype) for op in SPECS for dtype in ("bf16", "fp16", "fp32")}


def test_no_case_comes_twice():
    every = keys(sweep.plan(SPECS.values()))
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("op", sorted(SPECS))
def test_lines_of_hidden_sizes_and_of_slices_move_the_same_bytes(op):
    for line in sweep.lines(SPECS[op], ("hidden", "slices")):
        for x, sides in line.points:
            assert 0 <= sweep.ELEMENTS - math.prod(sides) < math.prod(sides[1:])
            assert x == sides[-1 if line.axis == "hidden" else 1]
        assert len({sides for _, sides in line.points}) == len(line.points) > 1


@pytest.mark.parametrize("op", sorted(SPECS))
def test_lines_of_rows_go_from_one_to_as_many_as_fit(op):
    found = list(sweep.lines(SPECS[op], ("rows",)))
    assert found
    for line in found:
        rows = [x for x, _ in line.points]
        assert rows == [4**k for k in range(len(rows))]
        most = rows[-1] * math.prod(line.tail)
        assert most <= 1 << 28 and (rows[-1] == 262144 or most * 4 > 1 << 28)


def test_a_run_cut_short_leaves_coarse_lines_whole():
    every = keys(sweep.plan(SPECS.values()))
    coarse = {
        (256, "hidden"),
        (4096, "hidden"),
        (65536, "hidden"),
        (1, "rows"),
        (256, "rows"),
        (65536, "rows"),
    }
    fine = {(512, "hidden"), (8192, "hidden"), (4, "rows"), (1024, "rows")}
    places = {}
    for line in sweep.lines(SPECS["rms_norm"]):
        for x, sides in line.points:
            rank = (
                0
                if (x, line.axis) in coarse
                else 1
                if (x, line.axis) in fine
                else 2
                if x in (768, 11008)
                else None
            )
            for dtype in ("bf16", "fp16", "fp32"):
                places.setdefault(rank, []).append(
                    every.index(("rms_norm", "x".join(map(str, sides)), dtype))
                )
    assert max(places[0]) < min(places[1]) and max(places[1]) < min(places[2])
    # Within a rank, one dtype after the other.
    assert [key[2] for key in every[:100]] == ["bf16"] * 100


@pytest.mark.parametrize("op", sorted(SPECS))
def test_small_cases_run(op):
    for case in sweep.plan([SPECS[op]], ("rows",), ("fp32",)):
        if case.elements <= 1 << 14:
            sample = case.spec.benchmark(case.sides, case.dtype, CPU)
            assert (
                sum(out.numel() for out in case.spec.eager(**sample.tensors, **sample.options))
                == case.elements
            )


# --- what is left of them -------------------------------------------------------------------------


def test_what_has_a_row_is_not_timed_again():
    cases = sweep.plan([SPECS["layer_norm"]], ("hidden",), ("bf16",))[:2]
    names = ["fusedops", "eager"]
    done = [
        made_up.row(cases[0], "fusedops"),
        made_up.row(cases[0], "eager"),
        made_up.row(cases[1], "eager"),
    ]
    (left,) = sweep.remaining(cases, ("fwd_bwd",), names, done)
    assert (left.case, left.pairs) == (cases[1], (("fwd_bwd", "fusedops"),))
    both = sweep.remaining(cases, ("fwd_bwd", "fwd"), names, done)
    assert both[0].pairs == (("fwd", "fusedops"), ("fwd", "eager"))
    assert not sweep.remaining(
        cases, ("fwd_bwd",), names, [*done, made_up.row(cases[1], "fusedops")]
    )


@pytest.fixture
def measuring(monkeypatch, tmp_path):
    """A machine and a book for runs whose every measurement is a constant."""
    monkeypatch.setattr(
        timing, "gpu_us", lambda steps, effort, **kwargs: [step() for step in steps] and 50.0
    )
    monkeypatch.setattr(timing, "peak_mib", lambda step: 1.0)
    monkeypatch.setattr(
        timing, "loop_us", lambda steps, effort, **kwargs: dict.fromkeys(steps, 70.0)
    )
    monkeypatch.setattr(
        warm, "settle_compiler", lambda: None
    )  # this process is not the measuring one
    return runner.Machine(CPU, 1 << 16, 1e9, "abc1234", "2.11.0", "3.6.0"), tmp_path / "sweep.csv"


def small_work(names=("fusedops", "eager")):
    cases = [
        Case(SPECS[op], (rows, 64), torch.float32)
        for op in ("layer_norm", "rms_norm")
        for rows in (4, 16)
    ]
    return cases, sweep.remaining(cases, ("fwd_bwd",), names, [])


def test_a_sweep_goes_on_where_the_budget_ended_it(measuring, monkeypatch):
    machine, path = measuring
    cases, work = small_work()
    clock = iter(range(1000))
    monkeypatch.setattr(runner.time, "perf_counter", lambda: float(next(clock)))
    run_case = runner.run_case
    monkeypatch.setattr(
        runner, "run_case", lambda *a: [next(clock) for _ in range(100)] and run_case(*a)
    )
    with results.Book(path) as book:
        assert runner.measure_all(work, machine, book, jobs=0, ends=150.0) == (2, 0)
    rest = sweep.remaining(cases, ("fwd_bwd",), ("fusedops", "eager"), results.read(path))
    assert [item.case for item in rest] == cases[2:]
    with results.Book(path) as book:
        assert runner.measure_all(rest, machine, book, jobs=0, ends=math.inf) == (2, 0)
    assert not sweep.remaining(cases, ("fwd_bwd",), ("fusedops", "eager"), results.read(path))


def test_a_row_that_is_missing_from_our_own_is_counted(measuring, monkeypatch):
    machine, path = measuring
    _, work = small_work()
    run_case = runner.run_case
    monkeypatch.setattr(
        runner, "run_case", lambda *a: [r for r in run_case(*a) if r.provider != "fusedops"]
    )
    with results.Book(path) as book:
        assert runner.measure_all(work, machine, book, jobs=0, ends=math.inf) == (4, 4)


def test_what_was_measured_is_written_though_a_later_case_breaks(measuring):
    machine, path = measuring
    _, work = small_work()
    broken = sweep.Work(Case(SPECS["layer_norm"], (4, -1), torch.float32), work[0].pairs)
    with pytest.raises(RuntimeError), results.Book(path) as book:
        runner.measure_all([work[0], broken], machine, book, jobs=0, ends=math.inf)
    assert {row.shape for row in results.read(path)} == {work[0].case.shape}


def test_sweep_command(measuring, monkeypatch, capsys):
    machine, path = measuring
    monkeypatch.setattr(sweep, "_ROWS", (1, 4))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runner, "this_machine", lambda: ("CPU", machine))
    every = [
        "sweep",
        "--op",
        "gelu",
        "--op",
        "rms_norm",
        "--axis",
        "rows",
        "--dtype",
        "fp32",
        "--provider",
        "fusedops",
        "--jobs",
        "0",
        "--output",
        str(path),
    ]
    assert command.main([*every, "--budget", "0"]) == 0
    assert "0 cases in" in capsys.readouterr().out and not path.exists()
    assert command.main(every) == 0
    shapes = {(row.op, row.shape) for row in results.read(path)}
    assert shapes == {("gelu", f"{m}x4096") for m in (1, 4)} | {
        ("rms_norm", f"{m}x{n}") for m in (1, 4) for n in (1024, 4096)
    }
    capsys.readouterr()
    assert command.main([*every, "--resume"]) == 0
    assert "0 of 6 cases" in capsys.readouterr().out
    assert command.main([*every, "--resume", "--provider", "eager"]) == 0
    assert "6 of 6 cases" in capsys.readouterr().out
    monkeypatch.setattr(runner, "this_machine", lambda: ("CPU", replace(machine, commit="fedcba9")))
    for before in (machine.commit, machine.commit[:4], machine.commit + "0123"):
        assert command.main([*every, "--resume", before]) == 0
        assert "0 of 6 cases" in capsys.readouterr().out
    for other in ("0a0a0a0", machine.commit + "+dirty", ""):
        assert command.main([*every, "--resume", other]) == 2
        said = capsys.readouterr()
        assert (
            f"has no rows at commit {other!r}; it has {machine.commit}" in said.err and not said.out
        )
    assert command.main([*every, "--resume"]) == 0
    assert "6 of 6 cases" in capsys.readouterr().out


# --- compiling ahead ------------------------------------------------------------------------------


def test_only_what_compiles_is_compiled_ahead():
    cases, _ = small_work()
    work = sweep.remaining(cases, ("fwd_bwd", "fwd"), ("fusedops", "eager", "compile"), [])
    todo = warm.tasks(work)
    assert {(t.op, t.sides, t.dtype) for t in todo} == {
        (c.op, c.sides, c.dtype_name) for c in cases
    }
    assert all(
        set(t.pairs) == {(m, n) for m in ("fwd", "fwd_bwd") for n in ("fusedops", "compile")}
        for t in todo
    )
    assert not warm.tasks(sweep.remaining(cases, ("fwd",), ("eager", "eager_combined"), []))


def test_workers_do_not_meet_in_the_gpus_memory():
    """Of any 16 tasks in a row, at most 5 are of the largest.

    Some ten tensors of a gibibyte each.
    """
    cases = sweep.plan(SPECS.values())
    todo = warm.tasks(sweep.Work(case, (("fwd_bwd", "compile"),)) for case in cases)
    sizes = [results.elements("x".join(map(str, t.sides))) * DTYPES[t.dtype].itemsize for t in todo]
    largest = [size >= 1 << 30 for size in sizes]
    assert sum(largest) > 8
    assert max(sum(largest[i : i + 16]) for i in range(len(largest))) <= 5


_WORKERS = """
import torch
import probe
from benchmarks import warm

if __name__ == "__main__":
    with warm.workers(1, torch.device("cpu")) as pool:
        theirs = pool.submit(probe.key).result()
    print("same" if theirs == probe.key() else "different")
    todo = [warm.Task("layer_norm", (4, 8), "fp32", (("fwd", "fusedops"),)), warm.Task("gone", (4, 8), "fp32", ())]
    print(warm.compile_ahead(todo, jobs=2, device=torch.device("cpu"), seconds=300.0))
    print(warm.compile_ahead(todo, jobs=1, device=torch.device("cpu"), seconds=0.0))
"""
_PROBE = """
import torch


def key():
    from torch._inductor import config
    from torch._inductor.codecache import FxGraphCachePickler

    pickler = FxGraphCachePickler(torch.fx.GraphModule({}, torch.fx.Graph()))
    return pickler.get_hash([torch.contiguous_format, torch.strided, torch.float32, config.save_config_portable()])
"""


@pytest.mark.full  # half a minute, in several processes
def test_workers_make_the_keys_that_the_measuring_process_looks_for(tmp_path):
    """As a program of its own, as the key depends on which modules a process has, in which order.

    And a task that fails, or has no time, is not counted, and stops nothing.
    """
    (tmp_path / "probe.py").write_text(_PROBE)
    (tmp_path / "program.py").write_text(_WORKERS)
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    run = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert run.stdout.split() == ["same", "1", "0"], run.stdout + run.stderr
