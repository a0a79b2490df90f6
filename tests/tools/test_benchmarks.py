"""The benchmark of operators: what it measures, writes and refuses. Times are made up."""

import math
from dataclasses import fields, replace
from typing import get_type_hints

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import floors, providers, results, runner, sweep, targets, timing, warm
from benchmarks.cases import Case, discover
from benchmarks.models import distributed_results, first_calls, shared_caches
from benchmarks.models import results as model_results
from benchmarks.values import oracle_of

CPU = torch.device("cpu")
SPECS = {spec.name: spec for spec in discover()}
EXACT = sorted(name for name, spec in SPECS.items() if spec.exact)
DROPOUT = ("bias_dropout_add", "bias_dropout_add_ln", "bias_dropout_add_rms_norm")
CASE = ("layer_norm", "8192x4096", "bf16", "fwd_bwd")


def row(provider="fusedops", gpu=100.0, loop=200.0, **changes):
    versions = ("abc1234", "2.11.0", "3.6.0")
    return replace(results.Row(*CASE, provider, gpu, loop, 80.0, 64.0, *versions), **changes)


def case_of(op, rows=64, cols=96, dtype=torch.float32):
    return Case(SPECS[op], (rows, cols), dtype)


def test_floor_is_the_passes_bytes_in_microseconds():
    moved = floors.bytes_moved(SPECS["layer_norm"], 8192 * 4096, torch.bfloat16, "fwd_bwd")
    assert moved == 5 * 8192 * 4096 * 2
    assert floors.floor_us(moved, 4.25e12) == pytest.approx(79.0, rel=1e-2)


def test_sets_of_inputs_exceed_the_cache():
    assert timing.set_count(16 << 20, 60 << 20) * (16 << 20) >= 4 * (60 << 20)
    assert timing.set_count(1 << 30, 60 << 20) == 3


def test_training_step_returns_gradients_and_accumulates_none():
    x, cotangent = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    step = timing.Train(lambda x: (x.square(),), {"x": x}, (x,), (cotangent,))
    torch.testing.assert_close(step()[1][0], 2 * x * cotangent)
    torch.testing.assert_close(step.backward(step.forward())[0], 2 * x * cotangent)
    assert x.grad is None


# --- results files --------------------------------------------------------------------------------

STORES = {
    "operators": (results, ("op", "shape", "dtype", "mode", "provider")),
    "models": (model_results, ("model", "mode", "shape", "provider")),
    "several ranks' first calls": (
        shared_caches,
        ("model", "shape", "layout", "ranks", "provider"),
    ),
    "several GPUs": (distributed_results, ("model", "shape", "layout", "ranks", "provider")),
    "first calls": (first_calls, ("model", "mode", "shape", "provider")),
}


def stored_row(store, number, optional):
    """A row with ``number`` in each measured column, ``optional`` in those that may be empty."""
    hints = get_type_hints(store.Row)
    kinds = {str: "1x2", int: 1, float: number, float | None: optional}
    return store.Row(**{field.name: kinds[hints[field.name]] for field in fields(store.Row)})


@pytest.mark.parametrize(("store", "key"), STORES.values(), ids=STORES)
def test_row_replaces_only_the_older_one_of_its_key(store, key, tmp_path):
    path = tmp_path / "deep" / "device.csv"
    old, new = stored_row(store, 0.5, None), stored_row(store, 1.25, 2.5)
    others = [replace(old, **{name: 2 if name == "ranks" else "3x4"}) for name in key]
    for rows, expected in (([old, *others], [old, *others]), ([new], [new, *others])):
        store.write(path, rows)
        assert sorted(store.read(path), key=repr) == sorted(expected, key=repr)


@pytest.mark.parametrize(
    ("kind", "result", "met", "missed", "best_peer"),
    [
        ("fraction", 80 / 99, 0.80, 0.82, "0.53 liger"),
        ("loop", 1.2, 1.25, 1.15, "6.00 liger"),
        ("us", 99.0, 100.0, 95.0, "150.00 liger"),
        ("times", 1.65, 1.7, 1.2, "2.50 liger"),
    ],
)
def test_larger_or_smaller_results_meet_a_target(kind, result, met, missed, best_peer):
    rows = [
        row(gpu=99.0, loop=60.0),
        row("eager", gpu=200.0, loop=50.0),
        row("liger", gpu=150.0, loop=300.0),
        row(gpu=60.0, op="rms_norm"),
    ]
    figures = [targets.Target(*CASE, value, kind, "rms_norm") for value in (met, missed)]
    verdicts = targets.compare(rows, figures)
    assert [verdict.met for verdict in verdicts] == [True, False]
    assert [verdict.result for verdict in verdicts] == pytest.approx([result] * 2)
    assert verdicts[0].best_peer == best_peer


@pytest.mark.parametrize(("provider", "kind"), [("eager", "us"), ("fusedops", "loop")])
def test_target_without_its_rows_is_not_met(provider, kind):
    (verdict,) = targets.compare([row(provider)], [targets.Target(*CASE, 1e9, kind)])
    assert (verdict.result, verdict.met) == (None, False)


@pytest.mark.parametrize(("gpu", "missed"), [(10.0, 0), (400.0, 1)])
def test_check_fails_until_every_target_is_met(gpu, missed, tmp_path, capsys):
    path, base = tmp_path / "device.csv", row(gpu=10.0, loop=20.0, floor_us=9.5)
    ours = [
        replace(base, op=t.op, shape=t.shape, dtype=t.dtype, mode=t.mode) for t in targets.TARGETS
    ]
    peers = [replace(r, provider="eager", loop_us=2000.0) for r in ours]
    results.write(path, [*ours, *peers, replace(ours[0], gpu_us=gpu)])
    assert command.main(["check", "--output", str(path)]) == missed
    assert capsys.readouterr().out.count("MISSED") == missed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run --budget nan", "run: --budget must be at least 0 seconds, got nan"),
        ("run", "benchmarks: needs a GPU"),
        ("sweep", "benchmarks: needs a GPU"),
        ("rowwise", "rowwise: needs a GPU"),
        ("generated", "generated: needs a GPU"),
        ("rowwise --jobs -1", "rowwise: --jobs must be at least 0, got -1"),
        ("rowwise --table --output none.csv", "benchmarks: no such file: none.csv"),
        ("models", "models: needs a GPU; on a CPU try --tiny"),
        ("models --device cuda", "models: no device 'cuda' here"),
        ("models --page page.md --output none.csv", "models: no such file: none.csv"),
        ("check --output none.csv", "benchmarks: no such file: none.csv"),
        ("report --output other.csv --page page.md", "benchmarks: other.csv has the columns"),
    ],
)
def test_bad_input_is_refused(arguments, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert command.main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith(message) and err.count("\n") == 1 and not out
    assert [path.name for path in tmp_path.iterdir()] == ["other.csv"]


# --- the gate: wrong values are not timed ---------------------------------------------------------


@pytest.mark.parametrize("op", sorted(SPECS))
def test_correct_providers_pass(op):
    oracle = oracle_of(case_of(op, dtype=torch.bfloat16), CPU)
    for name in ("fusedops", "eager"):
        verdict = oracle.judge(name, providers.build(name, SPECS[op]))
        assert not verdict.wrong
        assert not verdict.overwrites


def judged(op, cheat):
    """The verdict on a provider that calls ``cheat`` with the eager function and its arguments."""
    eager = SPECS[op].eager
    return oracle_of(case_of(op), CPU).judge("eager", lambda **kwargs: cheat(eager, kwargs))


def each_output(change):
    return lambda eager, kwargs: tuple(change(out) for out in eager(**kwargs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: out * 1.001, "output 0 is off by"),
        (lambda out: out.index_fill(0, torch.tensor([1]), float("nan")), "output 0 is off by nan"),
        (lambda out: out.double(), "output 0 is torch.float64"),
    ],
    ids=["scaled", "nan", "dtype"],
)
@pytest.mark.parametrize("op", ["layer_norm", "bias_dropout_add_ln"])
def test_wrong_outputs_are_refused(op, change, message):
    wrong = judged(op, each_output(change)).wrong
    assert set(wrong) == {"fwd", "fwd_bwd"}
    assert message in wrong["fwd_bwd"]


@pytest.mark.parametrize("op", EXACT)
def test_exact_operators_are_refused_if_the_last_bit_differs(op):
    wrong = judged(op, each_output(lambda out: torch.nextafter(out, out + 1.0))).wrong
    assert wrong == {"fwd": "output 0 is not the reference's"}


class Backward(torch.autograd.Function):
    """The identity. Its backward scales one row of the gradient, and overwrites its argument."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        dx = dy.clone()
        dx[0] *= ctx.scale
        dy.zero_()
        return dx, None


@pytest.mark.parametrize("op", sorted(SPECS.keys() - EXACT))
def test_only_the_backward_is_refused_for_wrong_gradients(op):
    def skewed(eager, kwargs):
        name = next((n for n in ("weight", "bias") if n in kwargs), SPECS[op].tensors[-1])
        return eager(**kwargs | {name: Backward.apply(kwargs[name], 1.5)})

    wrong = judged(op, skewed).wrong
    assert set(wrong) == {"fwd_bwd"}
    assert "gradient of" in wrong["fwd_bwd"]


def test_backward_that_overwrites_the_given_gradient():
    verdict = judged("layer_norm", each_output(lambda out: Backward.apply(out, 1.0)))
    assert verdict.overwrites
    assert not verdict.wrong


def two_masks(eager, kwargs):
    """Outputs have one mask and gradients another. Each would be right without the other."""
    with torch.no_grad():
        values = eager(**kwargs)
    differentiated = eager(**kwargs)
    return tuple(d + (v - d).detach() for v, d in zip(values, differentiated, strict=True))


def biased_scale(eager, kwargs):
    """A scale that is off by a quarter of a percent, as if only the mask had a rounded p."""
    return eager(**kwargs | {name: kwargs[name] * 1.0026 for name in ("x", "bias")})


@pytest.mark.parametrize(
    ("cheat", "message"),
    [
        (lambda eager, kwargs: eager(**kwargs | {"p": 0.15}), "elements, expected 0.90000"),
        (biased_scale, "is off by"),
        (two_masks, "output 0 is off by"),
    ],
    ids=["rate", "scale", "two masks"],
)
@pytest.mark.parametrize("op", DROPOUT)
def test_wrong_dropout_is_refused(op, cheat, message):
    assert message in judged(op, cheat).wrong["fwd_bwd"]


@pytest.fixture
def machine(monkeypatch):
    """A machine on which every measurement returns a constant."""
    monkeypatch.setattr(timing, "gpu_us", lambda steps, *_, **__: [s() for s in steps] and 50.0)
    monkeypatch.setattr(timing, "peak_mib", lambda step: 1.0)
    monkeypatch.setattr(timing, "loop_us", lambda steps, *_, **__: dict.fromkeys(steps, 70.0))
    return runner.Machine(CPU, 1 << 16, 1e9, "abc1234", "2.11.0", "3.6.0")


def test_only_correct_providers_have_rows(machine, monkeypatch, capsys):
    case, passes = case_of("bias_dropout_add_ln"), {"fwd": 3, "fwd_bwd": 7}
    eager, cheat = case.spec.eager, each_output(lambda out: out * 1.01)
    monkeypatch.setitem(providers.PROVIDERS, "wrong", lambda _: lambda **kw: cheat(eager, kw))
    monkeypatch.setitem(providers.PROVIDERS, "broken", lambda _: lambda **kw: 1 / 0)
    names = ("fusedops", "eager", "wrong", "broken")
    plan = runner.Plan(tuple((mode, n) for mode in passes for n in names), timing.Effort())
    rows = runner.run_case(case, plan, machine)
    expected = [(mode, name) for mode in passes for name in ("fusedops", "eager")]
    assert [(r.mode, r.provider) for r in rows] == expected
    for r in rows:
        assert (r.shape, r.dtype, r.gpu_us, r.loop_us) == ("64x96", "fp32", 50.0, 70.0)
        assert r.floor_us == pytest.approx(passes[r.mode] * 64 * 96 * 4 / 1e9 * 1e6)
    errors = capsys.readouterr().err
    assert "fwd_bwd wrong: REFUSED, wrong values: output 0 is off by" in errors
    assert "broken: left out, ZeroDivisionError" in errors


# --- sweeps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", sorted(SPECS.keys() - EXACT))
def test_lines_vary_along_their_axis(op):
    """Points of a line that varies the width have the same number of bytes."""
    for line in sweep.lines(SPECS[op], ("hidden", "slices", "rows")):
        for x, sides in line.points:
            assert x == sides[{"hidden": -1, "slices": 1, "rows": 0}[line.axis]]
            if line.axis == "rows":
                assert sides[1:] == line.tail
            else:
                assert 0 <= sweep.ELEMENTS - math.prod(sides) < math.prod(sides[1:])


@pytest.mark.parametrize("op", sorted(SPECS.keys() - EXACT))
def test_case_counts_the_elements_of_outputs(op):
    for case in sweep.plan([SPECS[op]], ("rows",), ("fp32",)):
        if case.elements <= 1 << 14:
            sample = case.spec.benchmark(case.sides, case.dtype, CPU)
            outputs = case.spec.eager(**sample.tensors, **sample.options)
            assert sum(out.numel() for out in outputs) == case.elements


def test_pairs_with_a_row_are_not_timed_again():
    cases = [case_of("layer_norm", 8192, 4096, torch.bfloat16), case_of("layer_norm")]
    remaining = sweep.remaining(cases, ("fwd_bwd", "fwd"), ("fusedops", "eager"), [row("eager")])
    assert [work.case for work in remaining] == cases
    assert remaining[0].pairs == (("fwd_bwd", "fusedops"), ("fwd", "fusedops"), ("fwd", "eager"))


def test_sweep_ends_with_its_budget_and_counts_missing_rows(machine, monkeypatch, tmp_path):
    now, path = [0.0], tmp_path / "sweep.csv"

    def run_case(case, plan, machine):
        now[0] += 60.0
        return [row("eager", shape=case.shape)]

    monkeypatch.setattr(runner.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(runner, "run_case", run_case)
    monkeypatch.setattr(warm, "settle_compiler", lambda: None)  # only measuring needs it
    cases = [case_of("layer_norm", rows) for rows in (1, 2, 3, 4)]
    work = sweep.remaining(cases, ("fwd_bwd",), ("fusedops", "eager"), [])
    with results.Book(path) as book:
        assert runner.measure_all(work, machine, book, jobs=0, deadline=90.0) == (2, 2)
    assert [r.shape for r in results.read(path)] == ["1x96", "2x96"]


def test_resume_skips_rows_of_this_and_of_named_commits(machine, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sweep, "_ROWS", (1, 4))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runner, "this_machine", lambda: ("CPU", machine))
    words = "sweep --op gelu --axis rows --dtype fp32 --jobs 0 --provider fusedops --output"
    arguments = [*words.split(), str(tmp_path / "sweep.csv")]

    def printed(*more):
        assert command.main([*arguments, *more]) == 0
        return capsys.readouterr().out

    assert "2 of 2 cases" in printed()
    assert "0 of 2 cases" in printed("--resume")
    monkeypatch.setattr(runner, "this_machine", lambda: ("CPU", replace(machine, commit="fedcba9")))
    for commit in ("abc1234", "abc1", "abc12340123"):
        assert "0 of 2 cases" in printed("--resume", commit)
    for commit in ("0a0a0a0", "abc1234+dirty", ""):
        assert command.main([*arguments, "--resume", commit]) == 2
        assert f"has no rows at commit {commit!r}; it has abc1234" in capsys.readouterr().err
    assert "2 of 2 cases" in printed("--resume")
