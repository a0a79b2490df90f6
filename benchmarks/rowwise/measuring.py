"""Measures workloads: the parts that ``rowwise``, ``horizontal`` and ``heads`` share."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import commands, results, timing, warm
from .. import providers as operator_providers
from ..cases import MODES
from ..floors import floor_us
from ..runner import Machine
from .ahead import compile_ahead
from .providers import step

__all__ = ["Measurable", "Suite", "add_options", "by_case", "columns", "measure", "replayed"]

Call = Callable[..., Any]
Sets = Sequence[tuple[Tensor, ...]]


class Measurable(Protocol):
    """A workload."""

    @property
    def name(self) -> str:
        """The function's name."""

    @property
    def shape_name(self) -> str:
        """The shape's name in the results file."""

    @property
    def dtype_name(self) -> str:
        """The dtype's name in the results file."""

    def tensors(self, device: torch.device) -> tuple[Tensor, ...]:
        """Returns random tensors for a call."""

    def moved(self, mode: str) -> int:
        """Returns the bytes that one call must read or write."""


def replayed(call: Call, sets: Sets, mode: str) -> tuple[float, float]:
    """Returns the microseconds of a call in a CUDA graph, and its peak memory in MiB."""
    steps = [step(call, tensors, mode) for tensors in sets]
    return timing.gpu_us(steps, timing.Effort()), timing.peak_mib(steps[0])


@dataclass(frozen=True)
class Suite:
    """The providers of a command.

    Attributes:
        providers: their names, in the order of measuring.
        ours: those whose missing rows are errors; a missing row of a peer is not.
        build: returns the callable of a provider for a workload. It is sent to worker processes.
        offered: returns those of the named providers that can run a workload.
        modes: the modes to measure.
        plain: the providers that have nothing to compile ahead.
        gauge: returns the microseconds and MiB of a callable, for sets of tensors and a mode.
        modes_of: returns those of some modes that a workload has.
        sets: the number of sets of tensors; None for as many as exceed the L2.
        floor: the provider whose time is the floor of the others, which come after it. None: the
            floor is the time to move the bytes of `Measurable.moved`.
    """

    providers: tuple[str, ...]
    ours: tuple[str, ...]
    build: Callable[[str, Any], Call]
    offered: Callable[[Any, Sequence[str]], list[str]]
    modes: tuple[str, ...] = MODES
    plain: tuple[str, ...] = ("eager",)
    gauge: Callable[[Call, Sets, str], tuple[float, float]] = replayed
    modes_of: Callable[[Any, Sequence[str]], Sequence[str]] = lambda workload, modes: modes
    sets: int | None = None
    floor: str | None = None


def add_options(
    parser: argparse.ArgumentParser,
    name: str,
    functions: Sequence[str],
    providers: Sequence[str],
    modes: Sequence[str] = MODES,
    jobs: int | None = None,
) -> None:
    """Adds the options that these commands share.

    Args:
        parser: the command's parser.
        name: the command's name.
        functions: the names of its functions.
        providers: the names of its providers.
        modes: its modes.
        jobs: the default number of processes that compile ahead; None for one a core.
    """
    parser.add_argument(
        "--function",
        action="append",
        choices=functions,
        metavar="NAME",
        help=f"only this one of {', '.join(functions)}; may be repeated",
    )
    parser.add_argument(
        "--provider", action="append", choices=providers, help="only this one; may be repeated"
    )
    parser.add_argument(
        "--mode", action="append", choices=modes, help="only this one; may be repeated"
    )
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="start no new workload after this long"
    )
    commands.add_options(parser, name, jobs)


def measure(
    suite: Suite,
    workloads: Sequence[Measurable],
    options: argparse.Namespace,
    machine: Machine,
    path: Path,
) -> int:
    """Measures workloads into the file, and returns the exit status."""
    deadline = time.perf_counter() + (math.inf if options.budget is None else options.budget)
    wanted = options.provider or suite.providers
    modes = options.mode or suite.modes
    jobs = commands.jobs(options)
    if jobs:
        _compile_ahead(suite, workloads, wanted, modes, jobs, machine.device, deadline)
    missing = 0
    for workload in workloads:
        if time.perf_counter() > deadline:
            print(f"stopped before {workload.name} {workload.shape_name}: the budget is spent")
            break
        print(f"{workload.name} {workload.shape_name} {workload.dtype_name}", flush=True)
        own = suite.modes_of(workload, modes)
        rows = list(_measured(suite, workload, wanted, own, machine))
        results.write(path, rows)
        torch.cuda.empty_cache()
        ours = [name for name in suite.offered(workload, wanted) if name in suite.ours]
        missing += len(own) * len(ours) - sum(row.provider in ours for row in rows)
    return 1 if missing else 0


def _compile_ahead(
    suite: Suite,
    workloads: Sequence[Measurable],
    wanted: Sequence[str],
    modes: Sequence[str],
    jobs: int,
    device: torch.device,
    deadline: float,
) -> None:
    started = time.perf_counter()
    todo = [
        (workload, name, mode)
        for workload in workloads
        for name in suite.offered(workload, wanted)
        for mode in suite.modes_of(workload, modes)
        if name not in suite.plain
    ]
    # torch.compile takes the longest, so it starts first.
    todo.sort(key=lambda task: not task[1].startswith("compile"))
    # Half of the time is left to measure what was compiled.
    seconds = None if math.isinf(deadline) else (deadline - started) / 2
    warm.settle_compiler()
    done = compile_ahead(todo, suite.build, jobs=jobs, device=device, seconds=seconds)
    taken = time.perf_counter() - started
    print(f"compiled {done} of {len(todo)} ahead in {taken:.0f} s", flush=True)


def _measured(
    suite: Suite,
    workload: Measurable,
    wanted: Sequence[str],
    modes: Sequence[str],
    machine: Machine,
) -> Iterator[results.Row]:
    """Yields the rows of a workload; the error of a provider that fails is printed to stderr."""
    operator_providers.fresh_compiler()
    tensors = workload.tensors(machine.device)
    size = sum(tensor.nbytes for tensor in tensors)
    count = suite.sets or timing.set_count(size, machine.l2_bytes)
    sets = [tensors, *[workload.tensors(machine.device) for _ in range(count - 1)]]
    floors = {
        mode: math.nan if suite.floor else floor_us(workload.moved(mode), machine.bandwidth)
        for mode in modes
    }
    for provider in suite.offered(workload, wanted):
        for mode in modes:
            row = _timed_or_left_out(suite, workload, provider, mode, sets, machine)
            if row is None:
                continue
            if provider == suite.floor:
                floors[mode] = row.gpu_us
            row = replace(row, floor_us=floors[mode])
            print(
                f"  {provider:22}{mode:8}{row.gpu_us:9.1f} us  {row.fraction:.2f} of the floor"
                f"  {row.peak_mib:8.0f} MiB",
                flush=True,
            )
            yield row


def _timed_or_left_out(
    suite: Suite,
    workload: Measurable,
    provider: str,
    mode: str,
    sets: Sets,
    machine: Machine,
) -> results.Row | None:
    try:
        return _timed(suite, workload, provider, mode, sets, machine)
    # Whatever a provider raises, the others must be timed.
    except Exception as error:  # noqa: BLE001
        described = f"{type(error).__name__}: {str(error).strip()[:300]}"
        print(f"  {provider} {mode}: left out, {described}", file=sys.stderr, flush=True)
        return None


def _timed(
    suite: Suite,
    workload: Measurable,
    provider: str,
    mode: str,
    sets: Sets,
    machine: Machine,
) -> results.Row:
    call = suite.build(provider, workload)
    with timing.mode_context(mode):
        gpu, peak = suite.gauge(call, sets, mode)
    return results.Row(
        op=workload.name,
        shape=workload.shape_name,
        dtype=workload.dtype_name,
        mode=mode,
        provider=provider,
        gpu_us=gpu,
        loop_us=math.nan,
        floor_us=math.nan,
        peak_mib=peak,
        commit=machine.commit,
        torch=machine.torch,
        triton=machine.triton,
    )


# --- tables ---------------------------------------------------------------------------------------

Case = tuple[str, str, str, str]


def by_case(rows: Sequence[results.Row]) -> dict[Case, dict[str, results.Row]]:
    """Returns, by function, shape, dtype and mode, the row of each provider."""
    cases: dict[Case, dict[str, results.Row]] = {}
    for row in rows:
        cases.setdefault((row.op, row.shape, row.dtype, row.mode), {})[row.provider] = row
    return cases


def columns(numbers: Sequence[tuple[float, int, int]]) -> str:
    """Returns numbers, each with its width and digits, side by side; empty columns for NaN."""
    line = ""
    for number, width, digits in numbers:
        line += " " * width if math.isnan(number) else f"{number:{width}.{digits}f}"
    return line.rstrip()
