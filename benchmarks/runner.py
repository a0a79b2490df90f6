"""One case from inputs to rows: check every provider's values, then time those that are right."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """Where and on what the rows are measured."""

    device: torch.device
    l2_bytes: int
    bandwidth: float  # bytes a second
    commit: str
    torch: str
    triton: str

    def described(self, name: str) -> str:
        """One line for the terminal."""
        return (
            f"{name}, torch {self.torch}, Triton {self.triton}, commit {self.commit}: copies at "
            f"{self.bandwidth / 1e12:.3f} TB/s, L2 {self.l2_bytes / 2**20:.0f} MiB"
        )


def this_machine() -> tuple[str, Machine]:
    """The name of the current GPU, and the machine around it, its copy bandwidth measured."""
    import triton

    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    bandwidth = timing.copy_bandwidth(device, gib=4.0)
    torch.cuda.empty_cache()
    return properties.name, Machine(
        device, properties.L2_cache_size, bandwidth, commit(), torch.__version__, triton.__version__
    )


@dataclass(frozen=True)
class Plan:
    """The wanted modes and providers, and the effort of measuring."""

    wanted: tuple[tuple[str, str], ...]  # (mode, provider)
    effort: timing.Effort
    split: bool = False

    def modes(self) -> dict[str, tuple[str, ...]]:
        """The modes in which each provider is wanted."""
        names = dict.fromkeys(provider for _, provider in self.wanted)
        return {
            name: tuple(mode for mode, provider in self.wanted if provider == name)
            for name in names
        }


@dataclass(frozen=True)
class _Contender:
    call: providers.Call
    wrong: dict[str, str]
    overwrites: bool


@dataclass(frozen=True)
class _Inputs:
    """The rotated sets: keyword arguments, those that take gradients, and the cotangents."""

    arguments: list[dict[str, Any]]
    leaves: list[tuple[Tensor, ...]]
    cotangents: list[tuple[Tensor, ...]]


@dataclass(frozen=True)
class _Measured:
    gpu_us: float
    peak_mib: float
    seconds: float


def run_case(case: Case, plan: Plan, machine: Machine) -> list[Row]:
    """The rows of all wanted modes and providers.

    A provider that fails or is wrong has none, and stderr says why.
    """
    # Otherwise a quick run need not import the compiler.
    if any(name.startswith("compile") for name in plan.modes()):
        providers.fresh_compiler()
    contenders = _judged(case, plan, machine)
    _free()
    inputs = _inputs(case, machine)
    rows: list[Row] = []
    for mode in dict.fromkeys(mode for mode, _ in plan.wanted):
        names = [name for m, name in plan.wanted if m == mode and name in contenders]
        right = {name: contenders[name] for name in names if mode not in contenders[name].wrong}
        with timing.mode_context(mode):
            rows += _run_mode(case, mode, right, inputs, plan, machine)
    return rows


def measure_all(
    work: Sequence[sweep.Work], machine: Machine, book: Book, *, jobs: int, ends: float
) -> tuple[int, int]:
    """Measures a sweep's cases into the book until all are done, or until the time ``ends``.

    In chunks: ``jobs`` processes compile a chunk and end, so that they disturb no measurement; then
    this process measures it. The clock is `time.perf_counter`.

    Returns:
        the number of measured cases, and the number of rows of fusedops that they lack.
    """
    warm.settle_compiler()
    count = missing = 0
    for chunk in sweep.chunks(work, 8 * max(1, jobs)):
        begun = time.perf_counter()
        if jobs and begun < ends:
            todo = warm.tasks(chunk)
            done = warm.compile_ahead(
                todo, jobs=jobs, device=machine.device, seconds=min(ends - begun, 3600.0)
            )
            print(
                f"compiled {done} of {len(todo)} cases ahead in {time.perf_counter() - begun:.0f} s",
                flush=True,
            )
        gc.collect()
        # Each case collects its garbage, which would go through all of the compiler's objects too.
        gc.freeze()
        for item in chunk:
            if time.perf_counter() > ends:
                return count, missing
            print(item.case, flush=True)
            rows = run_case(item.case, Plan(item.pairs, sweep.EFFORT), machine)
            book.add(rows)
            missing += sum(p == "fusedops" for _, p in item.pairs) - sum(
                row.provider == "fusedops" for row in rows
            )
            count += 1
        print(f"torch.compile: {warm.loaded()}", flush=True)
    return count, missing


def _judged(case: Case, plan: Plan, machine: Machine) -> dict[str, _Contender]:
    oracle = oracle_of(case, machine.device)
    contenders: dict[str, _Contender] = {}
    for name, modes in plan.modes().items():
        start = time.perf_counter()
        call = providers.build(name, case.spec)
        if call is None:
            continue
        try:
            verdict = oracle.judge(name, call, modes)
        # A peer may fail in any way; the others are still to be timed.
        except Exception as error:  # noqa: BLE001
            _say(f"{case} {name}: left out, {type(error).__name__}: {_first_line(error)}")
            continue
        for mode, problem in verdict.wrong.items():
            _say(f"{case} {mode} {name}: REFUSED, wrong values: {problem}")
        if verdict.overwrites:
            _say(
                f"{case} {name}: writes into the gradient it is given; each replay gets it restored"
            )
        contenders[name] = _Contender(call, verdict.wrong, verdict.overwrites)
        seconds = time.perf_counter() - start
        if seconds > 2.0:
            print(f"  {name}: {seconds:.1f} s to compile and check", flush=True)
    return contenders


def _inputs(case: Case, machine: Machine) -> _Inputs:
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
    steps: dict[str, Sequence[timing.Step]] = {}
    measured: dict[str, _Measured] = {}
    for name, contender in contenders.items():
        start = time.perf_counter()
        own, restore = _steps(contender, mode, inputs)
        try:
            own[0]()  # compiled and loaded before memory is read
            peak = timing.peak_mib(own[0])
            gpu = _gpu_us(f"{case} {mode} {name}", own, plan, restore)
        except Exception as error:  # noqa: BLE001 - as above
            _say(f"{case} {mode} {name}: left out, {type(error).__name__}: {_first_line(error)}")
            continue
        steps[name] = own
        measured[name] = _Measured(gpu, peak, time.perf_counter() - start)
    loops = timing.loop_us(steps, plan.effort, launch_bound=case.launch_bound)
    floor = floors.floor_us(
        floors.bytes_moved(case.spec, case.elements, case.dtype, mode), machine.bandwidth
    )
    rows = []
    for name, seen in measured.items():
        row = Row(
            case.op,
            case.shape,
            case.dtype_name,
            mode,
            name,
            seen.gpu_us,
            loops[name],
            floor,
            seen.peak_mib,
            machine.commit,
            machine.torch,
            machine.triton,
        )
        print(
            f"  {mode:<8}{name:<22}{row.gpu_us:9.1f} us {row.fraction:6.3f} of floor {floor:8.1f}"
            f"  loop {row.loop_us:9.1f} us  peak {row.peak_mib:8.1f} MiB  ({seen.seconds:.1f} s)",
            flush=True,
        )
        rows.append(row)
    return rows


def _steps(
    contender: _Contender, mode: str, inputs: _Inputs
) -> tuple[list[timing.Step], Callable[[], object] | None]:
    if mode == "fwd":
        return [timing.Forward(contender.call, arguments) for arguments in inputs.arguments], None
    cotangents, restore = inputs.cotangents, None
    if contender.overwrites:
        originals, cotangents = cotangents, [tuple(c.clone() for c in cs) for cs in cotangents]
        theirs = [c for cs in cotangents for c in cs]
        ours = [c for cs in originals for c in cs]

        def restore_all() -> None:
            torch._foreach_copy_(theirs, ours)

        restore = restore_all
    triples = zip(inputs.arguments, inputs.leaves, cotangents, strict=True)
    return [timing.Train(contender.call, *triple) for triple in triples], restore


def _gpu_us(
    what: str, steps: Sequence[timing.Step], plan: Plan, restore: Callable[[], object] | None
) -> float:
    try:
        return timing.gpu_us(steps, plan.effort, between=restore, split=plan.split)
    except RuntimeError as error:
        _say(f"{what}: no graph ({_first_line(error)}); timed with events around a loop instead")
        torch.cuda.synchronize()
        return timing.uncaptured_us(steps, plan.effort)


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
