"""The sweep with made-up times: which candidates are compiled, dropped, timed and chosen.

The shipped table is tested here too.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import made_up
from fusedops.core.configs import tuning
from fusedops.core.configs.tuning_key import BUCKETS, Config, TuningKey, family_of
from fusedops.core.launches import launch
from fusedops.core.launches.usage import Usage
from fusedops.core.spec import Spec
from fusedops.tune import compiling, timing
from fusedops.tune import table as tables
from fusedops.tune.compiling import Pool
from fusedops.tune.sweep import Measured, Outcome
from fusedops.tune.usage import Limits, reason_to_drop
from fusedops.tune.worker import decode, encode
from fusedops.tune.workloads import (
    DTYPES,
    Workload,
    discover,
    elements_per_row,
    grid,
    kernels_alone,
    keys_of,
    workload_for,
)
from support import ALL_SPECS, DEVICE, triton_version
from tuning_keys import every_key, plans

every = pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)
LIMITS = Limits(shared=232_448, shared_in_all=233_472)
KEY = TuningKey("norm_forward", ("rms", "plain", "alone"), "16bit", 1024, 3)
# The first key of the made-up workload of 20 rows.
FIRST_KEY = replace(KEY, cols=64, widths="32bit", bucket=1)


@pytest.fixture(autouse=True)
def no_measurements(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The cache and table of this machine are not used."""
    monkeypatch.setattr(tuning, "device_name", lambda index: "")
    tuning.forget()
    yield
    tuning.forget()


def family(key: TuningKey) -> object:
    result = family_of(key.kernel)
    assert result is not None
    return result


def workload_of(name: str, **options: object) -> Workload:
    (workload,) = made_up.workloads(name, **options)  # type: ignore[arg-type]
    return workload


def sweep_one(timer: made_up.Timer, pool: object = None, name: str = "rms_norm") -> list[Outcome]:
    return list(made_up.sweeper(pool, timer).sweep([workload_of(name)]))


# --- keys and workloads ---------------------------------------------------------------------------


@every
@pytest.mark.kernels
def test_every_key_has_a_workload(spec: object) -> None:
    """An operator's key can be tuned without its call, for any number of rows."""
    workload = workload_of(spec.name)  # type: ignore[attr-defined]
    for rows in (3, 20, 9000):
        keys = keys_of(workload.at(rows), DEVICE)
        assert keys
        for key in keys:
            result = workload_for(key, DEVICE)
            assert result is not None, key
            assert key in keys_of(result, DEVICE)


@every
@pytest.mark.kernels
def test_inference_and_training_have_the_same_keys(spec: Spec) -> None:
    """Equal keys make their outputs equal bit for bit, also if rows are read twice."""
    for shape in [(4, 64), (4, 20000)] if len(spec.shapes[0][0]) == 2 else [(4, 2, 64)]:
        step = Workload(spec, shape, torch.float32).step(DEVICE)
        with kernels_alone(), tuning.collected_keys() as trained, launch.collecting():
            step.forward()
        tuning.forget()
        with kernels_alone(), tuning.collected_keys() as inferred, launch.collecting():
            assert not any(out.requires_grad for out in step.infer())
        tuning.forget()
        assert trained and inferred == trained


def test_training_and_inference_are_timed() -> None:
    """Calls of all training steps precede those of inference, so no inputs stay in the L2."""
    calls: list[str] = []

    class _Step:
        def __init__(self, name: str) -> None:
            self.forward = lambda: calls.append(f"forward {name}")
            self.infer = lambda: calls.append(f"infer {name}")

    bench = timing._GraphBench([_Step("a"), _Step("b")], None, None)  # type: ignore[arg-type, list-item]
    for call in bench._calls(backward=False):
        call()
    assert calls == ["forward a", "forward b", "infer a", "infer b"]


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("result", "expected", "close"),
    [
        (torch.tensor([1.0, 64.0]), torch.tensor([1.00005, 64.0]), True),
        (torch.tensor([1.0, 64.0]), torch.tensor([1.0001, 64.0]), False),
        (torch.tensor([1.0, -INF, INF, NAN]), torch.tensor([1.0, -INF, INF, NAN]), True),
        (torch.tensor([1.0, -INF]), torch.tensor([1.0, 0.0]), False),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, NAN]), False),
        (torch.tensor([3, -7]), torch.tensor([3, -7]), True),
        (torch.tensor([3, 1 << 40]), torch.tensor([3, (1 << 40) + 1]), False),
        (torch.tensor([True, False]), torch.tensor([True, False]), True),
        (torch.tensor([True, False]), torch.tensor([True, True]), False),
        (torch.empty(0), torch.empty(0), True),
    ],
)
def test_close_results(result: torch.Tensor, expected: torch.Tensor, close: bool) -> None:
    assert timing._close(result, expected) is close


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("kernel", "variant", "widths"),
    [
        ("norm_forward", ("rms", "plain", "adds"), "16bit"),
        ("norm_backward", ("layer", "plain", "3 sums", "3 moved"), "16bit"),
        ("norm_backward", ("rms", "dropout", "1 sums", "4 moved"), "32bit"),
        ("norm_backward", ("layer", "dropout", "3 sums", "5 moved"), "16-32bit"),  # with cast_dtype
        ("norm_forward", ("layer", "dropout", "adds"), "16-32-32bit"),
        ("norm_forward", ("layer", "plain", "alone"), "16-16-32bit"),
        ("bias_act_backward", ("gelu", "dropout", "bias", "1 sums"), "16bit"),
    ],
)
def test_keys_of_calls_that_no_benchmark_makes(
    kernel: str, variant: tuple[str, ...], widths: str
) -> None:
    """Calls without some tensors, without dropout, and of mixed dtypes."""
    assert workload_for(TuningKey(kernel, variant, widths, 64, 2), DEVICE) is not None


@pytest.mark.kernels
def test_no_workload_for_unknown_key() -> None:
    assert workload_for(replace(KEY, variant=("rms", "sideways")), DEVICE) is None


def test_grid_covers_every_operator_in_order() -> None:
    result = grid(discover(), [DTYPES[name] for name in ("bf16", "fp32", "fp64")])
    assert len(set(map(str, result))) == len(result)
    assert {workload.spec.name for workload in result} == {spec.name for spec in ALL_SPECS}
    assert result[0].dtype == torch.bfloat16 and 4096 <= result[0].rows < 65536
    assert result[-1].dtype == torch.float64
    for workload in result:
        assert workload.rows * elements_per_row(workload.spec, workload.shape[1:]) <= 2**28
    norms = [w for w in result if w.spec.name == "layer_norm" and w.dtype == torch.bfloat16]
    assert {w.shape[1] for w in norms} >= {128, 768, 1024, 4096, 6144, 65536}
    assert {tuning.BUCKET[w.rows.bit_length()] for w in norms} == set(range(len(BUCKETS)))


def test_floor_counts_the_passes_over_rows() -> None:
    """The floor is 2 passes forward and 3 backward over 8192 x 4096 x 2 bytes, at 4 TB/s."""
    workload = replace(workload_of("layer_norm", shape=(8192, 4096)), dtype=torch.bfloat16)
    assert workload.floor_us(KEY, 4e12) == pytest.approx(2 * 8192 * 4096 * 2 / 4e6)
    backward = replace(KEY, kernel="norm_backward")
    assert workload.floor_us(backward, 4e12) == pytest.approx(3 * 8192 * 4096 * 2 / 4e6)


# --- the sweep ------------------------------------------------------------------------------------


@every
@pytest.mark.kernels
def test_fastest_is_chosen(spec: object) -> None:
    """Each key is tuned once, that of the forward first."""
    timer = made_up.Timer()
    outcomes = sweep_one(timer, name=spec.name)  # type: ignore[attr-defined]
    workload = workload_of(spec.name)  # type: ignore[attr-defined]
    assert [outcome.key for outcome in outcomes] == keys_of(workload, DEVICE)
    for outcome in outcomes:
        key = outcome.key
        configs = [measured.config for measured in outcome.measured]
        times = {config: made_up.cost(key, config) for config in configs}
        assert list(times) == family(key).candidates(key)  # type: ignore[attr-defined]
        fastest, heuristic = min(times, key=lambda config: times[config]), outcome.heuristic
        is_faster = times[fastest] < 0.99 * times[heuristic]
        assert outcome.best == (fastest if is_faster else heuristic)
        assert outcome.gain == pytest.approx(times[heuristic] / times[outcome.best] - 1.0)


@pytest.mark.kernels
@pytest.mark.parametrize(("ratio", "replaced"), [(0.995, False), (0.985, True)])
def test_heuristic_is_replaced_beyond_noise(ratio: float, replaced: bool) -> None:
    candidates = family(FIRST_KEY).candidates(FIRST_KEY)  # type: ignore[attr-defined]
    costs = dict.fromkeys(candidates, 20.0) | {candidates[0]: 10.0, candidates[-1]: 10.0 * ratio}
    outcome = sweep_one(made_up.Timer(costs))[0]
    assert outcome.best == (candidates[-1] if replaced else candidates[0])


@pytest.mark.kernels
def test_best_candidates_are_timed_carefully() -> None:
    timer = made_up.Timer()
    outcomes = sweep_one(timer)
    for outcome in outcomes:
        timed = [(config, careful) for key, config, careful in timer.timed if key == outcome.key]
        timed_quickly = [config for config, careful in timed if not careful]
        timed_carefully = [config for config, careful in timed if careful]
        assert timed_quickly == [measured.config for measured in outcome.measured]
        assert len(timed_carefully) <= 3
        assert timed_carefully[:1] in ([], [outcome.heuristic])


@pytest.mark.kernels
def test_config_with_other_results_is_not_chosen() -> None:
    winner = sweep_one(made_up.Timer())[0].best
    assert sweep_one(made_up.Timer(wrong=(winner,)))[0].best != winner


@pytest.mark.kernels
def test_config_that_does_not_fit_is_not_timed() -> None:
    candidates = family(FIRST_KEY).candidates(FIRST_KEY)  # type: ignore[attr-defined]
    spills = made_up.Pool(dict.fromkeys(candidates, Usage(registers=32, spills=999)))
    timer = made_up.Timer()
    outcome = sweep_one(timer, spills)[0]
    # If the heuristic's config spills, configs that spill as much are timed. If it does not spill,
    # configs that do are dropped.
    assert not any(one.dropped for one in outcome.measured)
    spills.usages[candidates[0]] = Usage(registers=32)
    timer.timed.clear()
    outcome = sweep_one(timer, spills)[0]
    assert [config for key, config, _ in timer.timed if key == outcome.key] == [candidates[0]]
    assert [bool(one.dropped) for one in outcome.measured] == [False] + [True] * (
        len(candidates) - 1
    )


@pytest.mark.parametrize(
    ("config", "usage", "reason"),
    [
        (Config(block_n=1024, rows=4, warps=4), Usage(64), ""),
        (Config(block_n=1024, rows=4, warps=4), Usage(64, spills=128), ""),
        (Config(block_n=1024, rows=4, warps=4), Usage(64, spills=136), "spills 136"),
        (Config(block_n=1024, rows=4, warps=4), Usage(64, shared=232_448), ""),
        (Config(block_n=1024, rows=4, warps=4), Usage(64, shared=232_449), "shared memory"),
        (Config(block_n=1024, rows=4, warps=4, stages=3, per_sm=2), Usage(64, shared=116_736), ""),
        (
            Config(block_n=1024, rows=4, warps=4, stages=3, per_sm=2),
            Usage(64, shared=116_737),
            "shared memory for 2 programs",
        ),
        (Config(block_n=1024, rows=4, warps=8, stages=3, per_sm=2), Usage(128), ""),
        # A thread's registers are allocated in multiples of eight.
        (
            Config(block_n=1024, rows=4, warps=8, stages=3, per_sm=2),
            Usage(129),
            "69632 registers for 2 programs",
        ),
        (
            Config(block_n=1024, rows=4, warps=4),
            Usage(error="does not compile: X"),
            "does not compile",
        ),
    ],
)
def test_reasons_to_drop(config: Config, usage: Usage, reason: str) -> None:
    result = reason_to_drop(config, [usage], [Usage(64)], LIMITS)
    assert reason in result and bool(result) == bool(reason)


@pytest.mark.kernels
def test_failing_workload_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, original = made_up.Timer(), made_up.Timer.open

    def failing(self: made_up.Timer, workload: Workload) -> made_up.Bench:
        if workload.spec.name == "rms_norm":
            raise torch.OutOfMemoryError("out of memory\nand more")
        return original(self, workload)

    monkeypatch.setattr(made_up.Timer, "open", failing)
    sweeper = made_up.sweeper(timer=timer)
    results = {
        outcome.workload.spec.name
        for outcome in sweeper.sweep(made_up.workloads("rms_norm", "layer_norm"))
    }
    assert results == {"layer_norm"}
    assert sweeper.failures == ["rms_norm 20x64 fp32: OutOfMemoryError: out of memory"]
    # The next sweep begins without failures.
    assert list(sweeper.sweep(made_up.workloads("layer_norm")))
    assert sweeper.failures == []


@pytest.mark.kernels
def test_failure_without_a_message_has_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: made_up.Timer, workload: Workload) -> made_up.Bench:
        raise NotImplementedError

    monkeypatch.setattr(made_up.Timer, "open", fail)
    sweeper = made_up.sweeper()
    assert not list(sweeper.sweep(made_up.workloads("rms_norm")))
    assert sweeper.failures == ["rms_norm 20x64 fp32: NotImplementedError: "]


@pytest.mark.kernels
def test_sweep_stops_between_keys() -> None:
    """Keys that are not wanted are neither compiled nor timed."""
    answers = iter([True, True, False])
    results = list(
        made_up.sweeper().sweep(
            made_up.workloads("rms_norm", "layer_norm"), goes_on=lambda: next(answers)
        )
    )
    assert len(results) == 2
    pool = made_up.Pool()
    assert not list(made_up.sweeper(pool).sweep(made_up.workloads(), wanted=lambda key: False))
    assert not pool.requests


# --- compiling ------------------------------------------------------------------------------------


def test_requests_are_encoded_and_decoded() -> None:
    count = 0
    for cols, dtype in ((1024, torch.bfloat16), (256, torch.float64)):
        for plan in plans(cols, dtype).values():
            with tuning.collected_keys(), launch.collecting() as requests:
                plan()
            tuning.forget()
            for request in requests:
                decoded = decode(json.loads(json.dumps(encode(request))))
                assert decoded.kernel is request.kernel and decoded.key == request.key
                count += 1
    assert count > 30


# One for each kernel, with as many tensors as it takes.
COMPILED = {
    "bias_dropout_add_ln": (1024, torch.bfloat16),
    "bias_dropout_add": (1024, torch.bfloat16),
    "bias_gelu_erf": (1024, torch.float32),
    "slices of one width": (64, torch.bfloat16),
}


@pytest.mark.compiled
@pytest.mark.parametrize(
    "member",
    [
        pytest.param(name, marks=[] if name == "bias_gelu_erf" else pytest.mark.full)
        for name in COMPILED
    ],
)
def test_candidates_compile_or_are_dropped(member: str, request: pytest.FixtureRequest) -> None:
    """Worker processes compile for sm_90, without a GPU.

    The heuristic's config and several others remain to be timed.
    """
    compiler = pytest.importorskip("triton.backends.compiler")
    if member == "slices of one width" and triton_version() >= (3, 8):
        reason = (
            "three programs fit a multiprocessor, as Triton 3.8 uses 147 registers, 3.6 uses 96"
        )
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    plan = plans(*COMPILED[member])[member]
    with tuning.collected_keys() as keys, launch.collecting():
        plan()
    with Pool(2, compiler.GPUTarget("cuda", 90, 32), LIMITS.shared) as pool:
        for key in keys:
            candidates = family(key).candidates(key)  # type: ignore[attr-defined]
            pending = {}
            for config in candidates:
                with tuning.forced(key.kernel, config), launch.collecting() as requests:
                    plan()
                pending[config] = [
                    pool.submit(r, fit=not pending) for r in requests if r.config == config
                ]
                assert pending[config]
            usages = {
                config: [future.result() for future in futures]
                for config, futures in pending.items()
            }
            for usage in itertools.chain.from_iterable(usages.values()):
                assert usage.registers and not usage.error, (key, usages)
            of_heuristic = usages[candidates[0]]
            remaining = [
                config
                for config in candidates
                if not reason_to_drop(config, usages[config], of_heuristic, LIMITS)
            ]
            assert remaining[0] == candidates[0] and len(remaining) >= 3, key


def _target_and_requests() -> tuple[Any, list[Any]]:
    """A GPU to compile for, and the kernels that an RMSNorm requests."""
    compiler = pytest.importorskip("triton.backends.compiler")
    with launch.collecting() as requests:
        plans(256, torch.bfloat16)["rms_norm"]()
    tuning.forget()
    return compiler.GPUTarget("cuda", 90, 32), requests


@pytest.mark.compiled
def test_worker_that_dies_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target, requests = _target_and_requests()
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, pathlib, sys\nfrom fusedops.core.children import send\nfor line in sys.stdin:\n"
        f"    flag = pathlib.Path({str(tmp_path / 'died')!r})\n"
        "    if not flag.exists():\n        flag.touch()\n        os.kill(os.getpid(), 9)\n"
        "    send({'registers': 7}, sys.stdout)\n"
    )
    monkeypatch.setattr(Pool, "command", (Pool.command[0], str(script)))
    with Pool(1, target, LIMITS.shared) as pool:
        first, second = pool.submit(requests[0]), pool.submit(requests[1])
        assert first.result().error == "the compiler died by signal 9"
        assert second.result() == Usage(registers=7)
        assert pool.submit(requests[0]) is first


@pytest.mark.compiled
def test_prints_of_a_worker_are_no_replies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A startup file and C code print; the latter does not use ``sys.stdout``."""
    target, requests = _target_and_requests()
    (tmp_path / "sitecustomize.py").write_text("import os\nos.write(1, b'{}\\n3\\n\\xff')\n")
    environment = compiling.child_environment()
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), environment["PYTHONPATH"]))
    monkeypatch.setattr(compiling, "child_environment", lambda: environment)
    with Pool(1, target, LIMITS.shared) as pool:
        usage = pool.submit(requests[0]).result()
    assert usage.registers and not usage.error


# --- the shipped table ----------------------------------------------------------------------------


def outcome(key: TuningKey, *times: float) -> Outcome:
    """An outcome with these times of the candidates, of which the heuristic's is the first.

    A candidate with an infinite time is dropped.
    """
    configs = family(key).candidates(key)[: len(times)]  # type: ignore[attr-defined]
    measured = tuple(
        Measured(config, 32, 0, us, "spills" if math.isinf(us) else "")
        for config, us in zip(configs, times, strict=True)
    )
    best = min(measured, key=lambda one: one.us).config
    return Outcome(key, workload_of("rms_norm", shape=(8192, 1024)), configs[0], best, measured)


def test_table_is_written_merged_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "test_gpu.json"
    table = tables.Table(path)
    table.about = {"device": "Test GPU", "commit": "abc"}
    wide = replace(KEY, cols=16384)
    for key, config in (
        (KEY, Config(block_n=1024, rows=2, warps=2)),
        (wide, Config(block_n=4096, rows=1, warps=8)),
    ):
        assert key not in table
        table.put(key, config)
    table.save()
    text = path.read_text()
    assert json.loads(text)["device"] == "Test GPU"
    assert [line.strip()[:22] for line in text.splitlines() if "[[" in line or "[null" in line] == [
        '"rms|plain|alone|16bit',
        '"rms|plain|alone|16bit',
    ]
    reread = tables.Table(path)
    assert KEY in reread and wide in reread and replace(KEY, bucket=1) not in reread
    reread.put(replace(KEY, bucket=1), Config(block_n=1024, rows=1, warps=2))
    reread.save()
    assert len(path.read_text().splitlines()) == len(text.splitlines())
    # Entries measured with other kernels or candidates are not used. The first new entry replaces
    # their whole row.
    monkeypatch.setattr(tables, "fingerprint", lambda key: "another")
    outdated = tables.Table(path)
    assert KEY not in outdated
    outdated.put(KEY, Config(block_n=1024, rows=4, warps=4))
    outdated.save()
    row = json.loads(path.read_text())["configs"]["norm_forward"]["rms|plain|alone|16bit|1024"]
    assert row[:5] == [None, None, None, [1024, 4, 4, 1, 0, 0, 1], None]


def test_raw_timings_and_the_distance_of_the_heuristic(tmp_path: Path) -> None:
    path = tmp_path / "raw.csv"
    other = replace(KEY, kernel="norm_backward", variant=("rms", "plain", "1 sums", "3 moved"))
    for one in (
        outcome(KEY, 11.0, 10.0, math.inf),
        outcome(replace(KEY, cols=2048), 40.0, 10.0),
        outcome(other, 10.0, 12.0),
    ):
        tables.write_raw(path, tables.raw_rows(one))
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7 and list(rows[0]) == list(tables.RAW_COLUMNS)
    assert [row["us"] for row in rows[:3]] == ["11.000", "10.000", ""]
    result = tables.summary(tables.read_raw(path))
    assert result["norm_forward"]["geometric_mean"] == pytest.approx(math.sqrt(1.1 * 4.0), abs=1e-3)
    assert result["norm_forward"]["worst"] == 4.0 and "N=2048" in result["norm_forward"]["worst_at"]
    assert result["norm_backward"]["geometric_mean"] == 1.0
    assert result["all"]["keys"] == 3
    # If a key was measured twice, the last times count.
    tables.write_raw(path, tables.raw_rows(outcome(replace(KEY, cols=2048), 20.0, 10.0)))
    assert tables.summary(tables.read_raw(path))["norm_forward"]["worst"] == 2.0
    assert "geometric mean" in tables.compare(tables.read_raw(path))


def test_incomplete_line_of_raw_timings_is_skipped(tmp_path: Path) -> None:
    """A sweep that was killed while it wrote a line can be resumed with the same file."""
    path = tmp_path / "raw.csv"
    path.touch()
    tables.write_raw(path, tables.raw_rows(outcome(KEY, 11.0, 10.0)))
    whole, later = path.read_bytes(), outcome(replace(KEY, cols=2048), 40.0, 10.0)
    last = whole.splitlines(keepends=True)[-1]
    # All of the line except its line break would be complete.
    for length in range(1, len(last) - 2):
        path.write_bytes(whole[: length - len(last)])
        tables.write_raw(path, tables.raw_rows(later))
        with pytest.warns(RuntimeWarning, match="line 3 of .*raw.csv is not complete"):
            rows = tables.read_raw(path)
        assert [row["us"] for row in rows] == ["11.000", "40.000", "10.000"]
        assert tables.summary(rows)["all"]["keys"] == 2


def test_every_family_has_sources_for_its_mark() -> None:
    marks = {key: tables.mark(key) for key in every_key() if key.bucket == 0}
    assert len(set(marks.values())) > 10


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("acc * scale", "acc  *  scale  # why", True),
        ('    """Doc."""\n', "", True),
        ("f(x, n)", "f(\n    x,\n    n,\n)", True),
        ("acc * scale", "scale * acc", False),
        ("16", "16.0", False),
        ("'mean'", "'sum'", False),
        ("if n:", "if not n:", False),
    ],
)
def test_comments_and_layout_do_not_change_the_digest(old: str, new: str, same: bool) -> None:
    lines = (
        "def f(x, n):",
        '    """Doc."""',
        "    if n:",
        "        x = load(x, 16, 'mean')",
        "    return acc * scale",
        "f(x, n)",
    )
    source = "\n".join((*lines, ""))
    assert source.count(old)
    assert (tables.code(source.replace(old, new)) == tables.code(source)) is same


def test_comments_do_not_change_a_mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A change of code in any file of kernels changes the mark."""
    package = Path(tables.__file__).parent.parent
    sources = [*sorted(package.glob("norms/kernels/*.py")), package / "core" / "device.py"]
    assert len(sources) > 2
    files = [tmp_path / source.relative_to(package) for source in sources]
    for source, file in zip(sources, files, strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(source.read_bytes())

    def mark() -> str:
        tables._sources.cache_clear()
        return tables.mark(KEY)

    marks = [mark()]
    monkeypatch.setattr(tables.resources, "files", lambda name: tmp_path)
    try:
        for file in files:
            text = file.read_text()
            file.write_text(text.replace(":\n", ":  # comment\n"))
            assert mark() == marks[-1], file
            file.write_text(text + "\nMORE = 1\n")
            marks.append(mark())
    finally:
        tables._sources.cache_clear()
    assert len(set(marks)) == len(marks) == len(files) + 1
