"""The benchmark's own arithmetic and its gate; the timing itself needs a GPU."""

from dataclasses import replace

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import floors, providers, results, runner, targets, timing
from benchmarks.cases import Case, cases, discover
from benchmarks.results import Row
from benchmarks.values import ExactOracle, Oracle, oracle_of

pytestmark = pytest.mark.once

CPU = torch.device("cpu")
SPECS = {spec.name: spec for spec in discover()}
EXACT = sorted(name for name, spec in SPECS.items() if spec.exact)


def row(
    provider="fusedops",
    gpu=100.0,
    loop=200.0,
    *,
    op="layer_norm",
    shape="8192x4096",
    mode="fwd_bwd",
    **changes,
):
    base = Row(
        op, shape, "bf16", mode, provider, gpu, loop, 80.0, 64.0, "abc1234", "2.11.0", "3.6.0"
    )
    return replace(base, **changes)


def case_of(op, rows=64, cols=96, dtype=torch.float32):
    return Case(SPECS[op], (rows, cols), dtype)


# --- cases and floors -----------------------------------------------------------------------------


def test_every_target_has_a_case():
    timed = {(case.op, case.shape, case.dtype_name) for case in cases(SPECS.values())}
    assert {(t.op, t.shape, t.dtype) for t in targets.TARGETS} <= timed


@pytest.mark.parametrize(
    ("op", "shape", "mode", "published"),
    [
        # Microseconds at 4.25 TB/s, by hand: passes * M * N * bytes / bandwidth.
        ("bias_dropout_add_ln", (8192, 4096, torch.bfloat16), "fwd_bwd", 110.5),
        ("bias_dropout_add_ln", (8192, 1024, torch.float32), "fwd_bwd", 55.3),
        ("bias_dropout_add_ln", (8192, 4096, torch.bfloat16), "fwd", 47.4),
        ("layer_norm", (8192, 4096, torch.bfloat16), "fwd_bwd", 79.0),
        ("rms_norm", (8192, 1024, torch.bfloat16), "fwd", 7.9),
    ],
)
def test_floor(op, shape, mode, published):
    rows, cols, dtype = shape
    assert floors.floor_us(
        floors.bytes_moved(SPECS[op], rows * cols, dtype, mode), 4.25e12
    ) == pytest.approx(published, rel=1e-2)


def test_sets_are_several_times_the_cache_but_bounded():
    assert timing.set_count(16 << 20, 60 << 20) * (16 << 20) >= 4 * (60 << 20)
    assert timing.set_count(1 << 30, 60 << 20) == 3
    assert timing.set_count(4096, 60 << 20) == 64


def test_a_training_step_returns_gradients_and_accumulates_none():
    x = torch.randn(4, 8, requires_grad=True)
    cotangent = torch.randn(4, 8)
    step = timing.Train(lambda x: (x.square(),), {"x": x}, (x,), (cotangent,))
    torch.testing.assert_close(step()[1][0], 2 * x * cotangent)
    torch.testing.assert_close(step.backward(step.forward())[0], 2 * x * cotangent)
    assert x.grad is None


# --- results --------------------------------------------------------------------------------------


def test_new_rows_replace_old_ones_of_the_same_key(tmp_path):
    path = tmp_path / "deep" / "device.csv"
    results.write(path, [row(gpu=100.0), row("eager", gpu=300.0)])
    results.write(path, [row(gpu=90.0), row(gpu=40.0, mode="fwd")])
    seen = {(r.mode, r.provider): r.gpu_us for r in results.read(path)}
    assert seen == {
        ("fwd", "fusedops"): 40.0,
        ("fwd_bwd", "eager"): 300.0,
        ("fwd_bwd", "fusedops"): 90.0,
    }
    assert [p.name for p in path.parent.iterdir()] == ["device.csv"]


def test_a_file_with_other_columns_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "device.csv"
    path.write_text("op,time\nlayer_norm,3\n")
    with pytest.raises(
        results.UnreadableError, match=r"has the columns \['op', 'time'\], expected \['op', 'shape'"
    ):
        results.write(path, [row()])
    assert path.read_text() == "op,time\nlayer_norm,3\n"


# --- targets --------------------------------------------------------------------------------------


def test_fractions_and_loop_ratios_are_compared_the_right_way_round():
    figures = (
        targets.Target("layer_norm", "8192x4096", "bf16", "fwd_bwd", 0.80),
        targets.Target("layer_norm", "8x256", "bf16", "fwd_bwd", 1.15, "loop"),
    )
    rows = [
        row(gpu=99.0),
        row("eager", gpu=200.0),
        row("liger", gpu=150.0),
        row(shape="8x256", loop=60.0),
        row("eager", shape="8x256", loop=50.0),
        row("liger", shape="8x256", loop=300.0),
    ]
    fraction, loop = targets.compare(rows, figures)
    assert fraction.result == pytest.approx(80 / 99)
    assert fraction.met
    assert fraction.best_peer == "0.53 liger"
    assert loop.result == pytest.approx(1.2)
    assert not loop.met
    assert loop.best_peer == "6.00 liger"


def test_times_and_multiples_of_another_operator():
    figures = (
        targets.Target("layer_norm", "8192x4096", "bf16", "fwd_bwd", 95.0, "us"),
        targets.Target("layer_norm", "8192x4096", "bf16", "fwd_bwd", 1.2, "times", "rms_norm"),
    )
    rows = [row(gpu=90.0), row("liger", gpu=150.0), row(op="rms_norm", gpu=60.0)]
    microseconds, multiple = targets.compare(rows, figures)
    assert microseconds.result == pytest.approx(90.0)
    assert microseconds.met
    assert multiple.result == pytest.approx(1.5)
    assert not multiple.met
    assert multiple.best_peer == "2.50 liger"
    assert [verdict.result for verdict in targets.compare(rows[:1], figures)] == [
        pytest.approx(90.0),
        None,
    ]


def test_an_absent_figure_is_not_met():
    (verdict,) = targets.compare(
        [row("eager")], [targets.Target("layer_norm", "8192x4096", "bf16", "fwd_bwd", 0.8)]
    )
    assert verdict.result is None
    assert not verdict.met


def test_check_fails_until_every_figure_is_met(tmp_path, capsys):
    path = tmp_path / "device.csv"
    results.write(path, [row(op="layer_norm", shape="3x5")])
    assert command.main(["check", "--output", str(path)]) == 1
    # Ten microseconds of a floor of 9.5, and a hundredth of eager's loop.
    good = [
        replace(
            row(op=t.op, shape=t.shape, dtype=t.dtype, mode=t.mode, gpu=10.0, loop=20.0),
            floor_us=9.5,
        )
        for t in targets.TARGETS
    ]
    results.write(path, [*good, *(replace(r, provider="eager", loop_us=2000.0) for r in good)])
    assert command.main(["check", "--output", str(path)]) == 0
    results.write(path, [replace(good[0], gpu_us=400.0)])
    capsys.readouterr()
    assert command.main(["check", "--output", str(path)]) == 1
    assert capsys.readouterr().out.count("MISSED") == 1


# --- which providers are timed --------------------------------------------------------------------


def test_max_autotune_is_spared_where_nothing_asks_for_it():
    with_target, without = (
        case_of("layer_norm", 8192, 4096, torch.bfloat16),
        case_of("layer_norm", 77, 4096),
    )
    wanted = providers.worthwhile
    assert wanted("compile_max_autotune", with_target, "fwd_bwd", named=False)
    assert not wanted("compile_max_autotune", with_target, "fwd", named=False)
    assert not wanted("compile_max_autotune", without, "fwd_bwd", named=False)
    assert wanted("compile_max_autotune", without, "fwd_bwd", named=True)
    assert wanted("compile", without, "fwd", named=False)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run", "--budget", "-1"], "run: --budget must be at least 0 seconds, got -1"),
        (["run", "--budget", "nan"], "run: --budget must be at least 0 seconds, got nan"),
        (["sweep", "--budget", "-0.5"], "sweep: --budget must be at least 0 seconds, got -0.5"),
        (["sweep", "--jobs", "-3"], "sweep: --jobs must be at least 0, got -3"),
        (
            ["compare", "old.csv", "new.csv", "--threshold", "-5"],
            "compare: --threshold must be at least 0 percent, got -5",
        ),
    ],
)
def test_numbers_that_mean_nothing(arguments, message, capsys):
    """Said in one line before a GPU or a file is looked for."""
    assert command.main(arguments) == 2
    said = capsys.readouterr()
    assert said.err == f"{message}\n" and not said.out


def test_running_without_a_gpu_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["run"]) == 2
    assert "needs a GPU" in capsys.readouterr().err


# --- the gate: wrong values are not timed ---------------------------------------------------------

DROPOUT = ("bias_dropout_add", "bias_dropout_add_ln", "bias_dropout_add_rms_norm")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("op", sorted(SPECS))
def test_right_providers_pass(op, dtype):
    oracle = oracle_of(case_of(op, dtype=dtype), CPU)
    for name in ("fusedops", "eager"):
        verdict = oracle.judge(name, providers.build(name, SPECS[op]))
        assert not verdict.wrong
        assert not verdict.overwrites


def altered(spec, change):
    """Eager with its outputs changed."""
    return lambda **kwargs: tuple(change(out) for out in spec.eager(**kwargs))


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
    verdict = Oracle(case_of(op), CPU).judge("eager", altered(SPECS[op], change))
    assert set(verdict.wrong) == {"fwd", "fwd_bwd"}
    assert message in verdict.wrong["fwd_bwd"]


class _Skewed(torch.autograd.Function):
    """The identity, with a gradient that is too large in one element."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        dy = dy.clone()
        dy[0] *= 1.5
        return dy


@pytest.mark.parametrize("op", sorted(SPECS.keys() - EXACT))
def test_wrong_gradients_are_refused_and_right_outputs_still_timed(op):
    spec = SPECS[op]

    def skewed(**kwargs):
        name = next((name for name in ("weight", "bias") if name in kwargs), spec.tensors[-1])
        return spec.eager(**kwargs | {name: _Skewed.apply(kwargs[name])})

    verdict = Oracle(case_of(op), CPU).judge("eager", skewed)
    assert set(verdict.wrong) == {"fwd_bwd"}
    assert "gradient of" in verdict.wrong["fwd_bwd"]


@pytest.mark.parametrize("op", DROPOUT)
def test_another_keep_rate_is_refused(op):
    spec = SPECS[op]
    verdict = Oracle(case_of(op), CPU).judge(
        "eager", lambda **kwargs: spec.eager(**kwargs | {"p": 0.15})
    )
    assert "of the elements, expected 0.90000" in verdict.wrong["fwd_bwd"]


@pytest.mark.parametrize("op", DROPOUT)
def test_a_biased_scale_is_refused(op):
    """The expectation off by a quarter of a percent, as from p rounded to a byte but not its scale."""
    spec = SPECS[op]

    def biased(**kwargs):
        return spec.eager(**kwargs | {name: kwargs[name] * 1.0026 for name in ("x", "bias")})

    assert "is off by" in Oracle(case_of(op), CPU).judge("eager", biased).wrong["fwd_bwd"]


@pytest.mark.parametrize("op", DROPOUT)
def test_a_backward_with_another_mask_is_refused(op):
    """The forward under one mask and the gradients under another.

    Neither gate alone would see it.
    """
    spec = SPECS[op]

    def two_masks(**kwargs):
        with torch.no_grad():
            shown = spec.eager(**kwargs)
        hidden = spec.eager(**kwargs)
        return tuple(h + (s - h).detach() for s, h in zip(shown, hidden, strict=True))

    assert (
        "output 0 is off by" in Oracle(case_of(op), CPU).judge("eager", two_masks).wrong["fwd_bwd"]
    )


def test_a_provider_that_writes_into_the_gradient_is_noticed():
    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            kept = dy.clone()
            dy.zero_()
            return kept

    spec = SPECS["layer_norm"]
    verdict = Oracle(case_of("layer_norm"), CPU).judge("eager", altered(spec, InPlace.apply))
    assert verdict.overwrites
    assert not verdict.wrong


def test_a_vanishing_gradient_does_not_hide_the_mask():
    """Where dz underflows to zero the gradients cannot tell kept from dropped; the output does."""
    case = case_of("bias_dropout_add", 64, 512, torch.float16)
    oracle = Oracle(case, CPU)
    oracle.cotangents = tuple(
        c.masked_fill(torch.rand_like(c) < 0.01, 0.0) for c in oracle.cotangents
    )
    assert not oracle.judge("eager", case.spec.eager).wrong


@pytest.mark.parametrize("op", EXACT)
def test_exact_operators_are_held_to_the_bit(op):
    """One wrong element, a last bit, another dtype.

    What writes to its inputs does not spoil them for the next.
    """
    oracle = oracle_of(case_of(op), CPU)
    assert isinstance(oracle, ExactOracle)
    for change in (
        lambda out: out.index_fill(1, torch.tensor([5]), -torch.inf),
        lambda out: out.double(),
        lambda out: torch.nextafter(out, out + 1.0),
    ):
        assert oracle.judge("eager", altered(SPECS[op], change)).wrong == {
            "fwd": "output 0 is not the reference's"
        }
    for name in providers.PROVIDERS:
        call = providers.build(name, SPECS[op]) if not name.startswith("compile") else None
        assert call is None or not oracle.judge(name, call).wrong, name


@pytest.mark.parametrize("op", EXACT)
def test_exact_operators_have_no_backward_to_time(op):
    (case, *_) = cases([SPECS[op]])
    assert case.modes == ("fwd",)
    options = command._parser().parse_args(["run", "--provider", "fusedops"])
    assert command._wanted(case, options) == (("fwd", "fusedops"),)
    assert case_of("layer_norm").modes == ("fwd", "fwd_bwd")


# --- one case, its timing replaced ----------------------------------------------------------------


@pytest.fixture
def untimed(monkeypatch):
    """Every measurement returns a constant, so that a case runs without a GPU."""
    monkeypatch.setattr(
        timing, "gpu_us", lambda steps, effort, **kwargs: [step() for step in steps] and 50.0
    )
    monkeypatch.setattr(timing, "peak_mib", lambda step: 1.0)
    monkeypatch.setattr(
        timing, "loop_us", lambda steps, effort, **kwargs: dict.fromkeys(steps, 70.0)
    )
    return runner.Machine(CPU, 1 << 16, 1e9, "abc1234", "2.11.0", "3.6.0")


def test_a_case_gives_a_row_for_every_mode_and_right_provider(untimed, monkeypatch, capsys):
    monkeypatch.setitem(
        providers.PROVIDERS, "wrong", lambda spec: altered(spec, lambda out: out * 1.01)
    )
    monkeypatch.setitem(providers.PROVIDERS, "broken", lambda spec: lambda **kwargs: 1 / 0)
    monkeypatch.setitem(providers.PROVIDERS, "absent", lambda spec: None)
    names = ("fusedops", "eager", "wrong", "broken", "absent")
    plan = runner.Plan(
        tuple((mode, name) for mode in ("fwd", "fwd_bwd") for name in names), timing.Effort()
    )
    rows = runner.run_case(case_of("bias_dropout_add_ln"), plan, untimed)
    assert {(r.mode, r.provider) for r in rows} == {
        (m, n) for m in ("fwd", "fwd_bwd") for n in ("fusedops", "eager")
    }
    floor = {"fwd": 3 * 64 * 96 * 4 / 1e9 * 1e6, "fwd_bwd": 7 * 64 * 96 * 4 / 1e9 * 1e6}
    assert all(
        (r.shape, r.dtype, r.gpu_us, r.loop_us) == ("64x96", "fp32", 50.0, 70.0) for r in rows
    )
    assert all(r.floor_us == pytest.approx(floor[r.mode]) for r in rows)
    said = capsys.readouterr().err
    assert "fwd_bwd wrong: REFUSED, wrong values: output 0 is off by" in said
    assert "broken: left out, ZeroDivisionError" in said


def test_a_provider_that_cannot_be_captured_is_timed_in_a_loop_and_said_so(
    untimed, monkeypatch, capsys
):
    def uncapturable(steps, effort, **kwargs):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(timing, "gpu_us", uncapturable)
    monkeypatch.setattr(timing, "uncaptured_us", lambda steps, effort: 60.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    (only,) = runner.run_case(
        case_of("layer_norm"), runner.Plan((("fwd", "fusedops"),), timing.Effort()), untimed
    )
    assert only.gpu_us == 60.0
    assert (
        "no graph (operation not permitted when stream is capturing); timed with"
        in capsys.readouterr().err
    )
