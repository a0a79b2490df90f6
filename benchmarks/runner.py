"""Measures cases: checks every provider's values, and times the providers that are correct."""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import floors, providers, sweep, timing, warm
from .cases import Case
from .results import Book, Row, commit
from .values import oracle_of

__all__ = ["Machine", "Plan", "measure_all", "run_case", "this_machine"]


@dataclass(frozen=True)
class Machine:
    """The GPU and the versions with which rows are measured."""

    device: torch.device
    l2_bytes: int
    bandwidth: float  # bytes a second
    commit: str
    torch: str
    triton: str

    def described(self, name: str) -> str:
        """Returns a line for the terminal."""
        return (
            f"{name}, torch {self.torch}, Triton {self.triton}, commit {self.commit}: copies at "
            f"{self.bandwidth / 1e12:.3f} TB/s, L2 {self.l2_bytes / 2**20:.0f} MiB"
        )


def this_machine() -> tuple[str, Machine]:
    """Returns the name of the current GPU, and its machine; measures the copy bandwidth."""
    import triton

    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    bandwidth = timing.copy_bandwidth(device, gib=4.0)
    torch.cuda.empty_cache()
    machine = Machine(
        device=device,
        l2_bytes=properties.L2_cache_size,
        bandwidth=bandwidth,
        commit=commit(),
        torch=torch.__version__,
        triton=triton.__version__,
    )
    return properties.name, machine


@dataclass(frozen=True)
class Plan:
    """The modes and providers to measure, and with which effort.

    With ``split``, all forwards are timed before all backwards: see `timing.gpu_us`.
    """

    wanted: tuple[tuple[str, str], ...]  # (mode, provider)
    effort: timing.Effort
    split: bool = False

    def modes(self) -> dict[str, tuple[str, ...]]:
        """Returns the modes in which each provider is measured."""
        names = dict.fromkeys(provider for _, provider in self.wanted)
        return {
            name: tuple(mode for mode, provider in self.wanted if provider == name)
            for name in names
        }


@dataclass(frozen=True)
class _Contender:
    """A provider of a case, with its `Verdict`."""

    call: providers.Call
    wrong: dict[str, str]
    overwrites: bool


@dataclass(frozen=True)
class _Inputs:
    """Several sets of inputs: keyword arguments, the tensors with gradients, and the cotangents."""

    arguments: list[dict[str, Any]]
    leaves: list[tuple[Tensor, ...]]
    cotangents: list[tuple[Tensor, ...]]


@dataclass(frozen=True)
class _Measured:
    gpu_us: float
    peak_mib: float
    seconds: float


def run_case(case: Case, plan: Plan, machine: Machine) -> list[Row]:
    """Returns the rows of all modes and providers of the plan.

    A provider that fails or is wrong has no row; the reason is printed to stderr.
    """
    # Not in other runs: this imports the compiler, which takes time.
    if any(name.startswith("compile") for name in plan.modes()):
        providers.fresh_compiler()
    contenders = _judged(case, plan, machine)
    _free()
    inputs = _inputs(case, machine)
    rows: list[Row] = []
    for mode in dict.fromkeys(mode for mode, _ in plan.wanted):
        correct = {}
        for wanted_mode, name in plan.wanted:
            contender = contenders.get(name)
            if wanted_mode == mode and contender is not None and mode not in contender.wrong:
                correct[name] = contender
        with timing.mode_context(mode):
            rows += _run_mode(case, mode, correct, inputs, plan, machine)
    return rows


def measure_all(
    work: Sequence[sweep.Work], machine: Machine, book: Book, *, jobs: int, deadline: float
) -> tuple[int, int]:
    """Measures cases into the book until all are done, or `time.perf_counter` is past ``deadline``.

    It measures them in chunks. First ``jobs`` processes compile a chunk and end, so that they do
    not disturb measurements. Then this process measures it.

    Returns:
        The number of measured cases, and how many rows of fusedops are missing.
    """
    warm.settle_compiler()
    count = missing = 0
    for chunk in sweep.chunks(work, 8 * max(1, jobs)):
        started = time.perf_counter()
        if jobs and started < deadline:
            todo = warm.tasks(chunk)
            done = warm.compile_ahead(
                todo, jobs=jobs, device=machine.device, seconds=min(deadline - started, 3600.0)
            )
            seconds = time.perf_counter() - started
            print(f"compiled {done} of {len(todo)} cases ahead in {seconds:.0f} s", flush=True)
        gc.collect()
        # Each case collects garbage, and skips frozen objects. The compiler has created many.
        gc.freeze()
        for item in chunk:
            if time.perf_counter() > deadline:
                return count, missing
            print(item.case, flush=True)
            rows = run_case(item.case, Plan(item.pairs, sweep.EFFORT), machine)
            book.add(rows)
            expected = sum(provider == "fusedops" for _, provider in item.pairs)
            missing += expected - sum(row.provider == "fusedops" for row in rows)
            count += 1
        print(f"torch.compile: {warm.loaded()}", flush=True)
    return count, missing


def _judged(case: Case, plan: Plan, machine: Machine) -> dict[str, _Contender]:
    """Returns the providers that run, with what is wrong with their values."""
    oracle = oracle_of(case, machine.device)
    contenders: dict[str, _Contender] = {}
    for name, modes in plan.modes().items():
        start = time.perf_counter()
        call = providers.build(name, case.spec)
        if call is None:
            continue
        try:
            verdict = oracle.judge(name, call, modes)
        # Whatever a peer raises, the others must be timed.
        except Exception as error:  # noqa: BLE001
            _say(f"{case} {name}: left out, {type(error).__name__}: {_first_line(error)}")
            continue
        for mode, problem in verdict.wrong.items():
            _say(f"{case} {mode} {name}: REFUSED, wrong values: {problem}")
        if verdict.overwrites:
            _say(
                f"{case} {name}: writes into its output's gradient; it is restored for each replay"
            )
        contenders[name] = _Contender(call, verdict.wrong, verdict.overwrites)
        seconds = time.perf_counter() - start
        if seconds > 2.0:
            print(f"  {name}: {seconds:.1f} s to compile and check", flush=True)
    return contenders


def _inputs(case: Case, machine: Machine) -> _Inputs:
    """Returns sets of inputs that together are several times as large as the L2."""
    sample = case.spec.benchmark(case.sides, case.dtype, machine.device)
    size = sum(t.nbytes for t in sample.tensors.values() if t is not None)
    sets = _Inputs([], [], [])
    for index in range(timing.set_count(size, machine.l2_bytes)):
        if index:
            sample = case.spec.benchmark(case.sides, case.dtype, machine.device)
        leaves = tuple(
            t.requires_grad_()
            for t in sample.tensors.values()
            if t is not None and t.is_floating_point()
        )
        arguments = {**sample.tensors, **sample.options}
        with torch.no_grad():
            out = case.spec.eager(**arguments)
        sets.arguments.append(arguments)
        sets.leaves.append(leaves)
        sets.cotangents.append(tuple(torch.randn_like(o) for o in out))
    return sets


def _run_mode(
    case: Case,
    mode: str,
    contenders: dict[str, _Contender],
    inputs: _Inputs,
    plan: Plan,
    machine: Machine,
) -> list[Row]:
    """Times the providers of a case in one mode."""
    steps: dict[str, Sequence[timing.Step]] = {}
    measured: dict[str, _Measured] = {}
    for name, contender in contenders.items():
        start = time.perf_counter()
        provider_steps, restore = _steps(contender, mode, inputs)
        try:
            provider_steps[0]()  # compiles and loads the kernels, before memory is measured
            peak = timing.peak_mib(provider_steps[0])
            gpu = _gpu_us(f"{case} {mode} {name}", provider_steps, plan, restore)
        # As in `_judged`.
        except Exception as error:  # noqa: BLE001
            _say(f"{case} {mode} {name}: left out, {type(error).__name__}: {_first_line(error)}")
            continue
        steps[name] = provider_steps
        measured[name] = _Measured(gpu, peak, time.perf_counter() - start)
    loops = timing.loop_us(steps, plan.effort, launch_bound=case.launch_bound)
    floor = floors.floor_us(
        floors.bytes_moved(case.spec, case.elements, case.dtype, mode), machine.bandwidth
    )
    rows = []
    for name, figures in measured.items():
        row = Row(
            op=case.op,
            shape=case.shape,
            dtype=case.dtype_name,
            mode=mode,
            provider=name,
            gpu_us=figures.gpu_us,
            loop_us=loops[name],
            floor_us=floor,
            peak_mib=figures.peak_mib,
            commit=machine.commit,
            torch=machine.torch,
            triton=machine.triton,
        )
        print(
            f"  {mode:<8}{name:<22}{row.gpu_us:9.1f} us {row.fraction:6.3f} of floor {floor:8.1f}"
            f"  loop {row.loop_us:9.1f} us  peak {row.peak_mib:8.1f} MiB  ({figures.seconds:.1f} s)",
            flush=True,
        )
        rows.append(row)
    return rows


def _steps(
    contender: _Contender, mode: str, inputs: _Inputs
) -> tuple[list[timing.Step], Callable[[], object] | None]:
    """Returns a step for each set of inputs, and what must run before each replay, or None."""
    if mode == "fwd":
        return [timing.Forward(contender.call, arguments) for arguments in inputs.arguments], None
    cotangents = inputs.cotangents
    restore: Callable[[], object] | None = None
    if contender.overwrites:
        # The provider gets copies, which are restored before each replay.
        cotangents = [tuple(c.clone() for c in one_set) for one_set in inputs.cotangents]
        copies = list(itertools.chain.from_iterable(cotangents))
        originals = list(itertools.chain.from_iterable(inputs.cotangents))
        restore = partial(torch._foreach_copy_, copies, originals)
    triples = zip(inputs.arguments, inputs.leaves, cotangents, strict=True)
    return [timing.Train(contender.call, *triple) for triple in triples], restore


def _gpu_us(
    name: str, steps: Sequence[timing.Step], plan: Plan, restore: Callable[[], object] | None
) -> float:
    """Returns the GPU time of a step, from a graph if it can be captured."""
    try:
        return timing.gpu_us(steps, plan.effort, between=restore, split=plan.split)
    except RuntimeError as error:
        _say(f"{name}: no graph ({_first_line(error)}); timed with events around a loop instead")
        torch.cuda.synchronize()
        return timing.uncaptured_us(steps, plan.effort)


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
