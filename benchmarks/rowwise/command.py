"""The command ``python -m benchmarks rowwise``.

Users' functions under `fusedops.rowwise`, and what else runs them.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from .. import commands, results, timing, warm
from .. import providers as operator_providers
from ..cases import MODES
from ..floors import floor_us
from ..runner import Machine
from . import ahead
from .providers import COMPILING, PROVIDERS, build, offered, step
from .workloads import FUNCTIONS, Workload, workloads

__all__ = ["add_options", "run", "table"]

_HEADING = (
    f"{'function':32}{'shape':16}{'mode':8}{'rowwise':>9}{'floor':>7}"
    f"{'compile':>9}{'faster':>8}{'eager':>9}{'by hand':>9}"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.set_defaults(command=run)
    parser.add_argument(
        "--function",
        action="append",
        choices=FUNCTIONS,
        metavar="NAME",
        help=f"only this one of {', '.join(FUNCTIONS)}; may be repeated",
    )
    parser.add_argument(
        "--provider", action="append", choices=PROVIDERS, help="only this one; may be repeated"
    )
    parser.add_argument(
        "--mode", action="append", choices=MODES, help="only this one; may be repeated"
    )
    parser.add_argument(
        "--cols",
        action="append",
        type=int,
        metavar="N",
        help="only this row length; may be repeated",
    )
    commands.add_options(parser, "rowwise")


def run(options: argparse.Namespace) -> int:
    """Measures users' functions: under `fusedops.rowwise`, by hand, in eager PyTorch, and by torch.compile."""
    return commands.run("rowwise", options, table, _measure)


def _measure(options: argparse.Namespace, machine: Machine, path: Path) -> int:
    chosen = [
        workload
        for workload in workloads(options.function or ())
        if not options.cols or workload.shape[1] in options.cols
    ]
    wanted = options.provider or PROVIDERS
    modes = options.mode or MODES
    jobs = commands.jobs(options)
    if jobs:
        _compile_ahead(chosen, wanted, jobs, machine.device)
    missing = 0
    for workload in chosen:
        print(f"{workload.name} {workload.shape_name}", flush=True)
        rows = list(_measured(workload, wanted, modes, machine))
        results.write(path, rows)
        torch.cuda.empty_cache()
        if "rowwise" in wanted:
            missing += len(modes) - sum(row.provider == "rowwise" for row in rows)
    # What we failed to time is our fault; a peer's is not.
    return 1 if missing else 0


def _compile_ahead(
    chosen: Sequence[Workload], wanted: Sequence[str], jobs: int, device: torch.device
) -> None:
    begun = time.perf_counter()
    work = [
        (workload, provider)
        for workload in chosen
        for provider in offered(workload, wanted)
        if provider in COMPILING
    ]
    warm.settle_compiler()
    done, todo = ahead.compile_ahead(work, jobs=jobs, device=device)
    print(f"compiled {done} of {todo} ahead in {time.perf_counter() - begun:.0f} s", flush=True)


def _measured(
    workload: Workload, wanted: Sequence[str], modes: Sequence[str], machine: Machine
) -> Iterator[results.Row]:
    """The rows of a workload; stderr names a provider that fails."""
    operator_providers.fresh_compiler()
    tensors = workload.tensors(machine.device)
    size = sum(tensor.nbytes for tensor in tensors)
    count = timing.set_count(size, machine.l2_bytes)
    sets = [tensors, *[workload.tensors(machine.device) for _ in range(count - 1)]]
    for provider in offered(workload, wanted):
        for mode in modes:
            row = _timed_or_left_out(workload, provider, mode, sets, machine)
            if row is not None:
                yield row


def _timed_or_left_out(
    workload: Workload,
    provider: str,
    mode: str,
    sets: Sequence[tuple[Tensor, ...]],
    machine: Machine,
) -> results.Row | None:
    try:
        return _timed(workload, provider, mode, sets, machine)
    except Exception as error:  # noqa: BLE001 - a peer may fail in any way
        what = f"{type(error).__name__}: {str(error).strip()[:300]}"
        print(f"  {provider} {mode}: left out, {what}", file=sys.stderr, flush=True)
        return None


def _timed(
    workload: Workload,
    provider: str,
    mode: str,
    sets: Sequence[tuple[Tensor, ...]],
    machine: Machine,
) -> results.Row:
    call = build(provider, workload)
    with timing.mode_context(mode):
        steps = [step(call, tensors, mode) for tensors in sets]
        gpu = timing.gpu_us(steps, timing.Effort())
        peak = timing.peak_mib(steps[0])
    row = results.Row(
        workload.name,
        workload.shape_name,
        "bfloat16",
        mode,
        provider,
        gpu,
        math.nan,
        floor_us(workload.moved(mode), machine.bandwidth),
        peak,
        machine.commit,
        machine.torch,
        machine.triton,
    )
    print(
        f"  {provider:22}{mode:8}{gpu:9.1f} us  {row.fraction:.2f} of the floor  {peak:8.0f} MiB",
        flush=True,
    )
    return row


def table(rows: Sequence[results.Row]) -> str:
    """A line for each function, shape and mode: the times, and how rowwise compares."""
    lines = [_HEADING]
    for op, shape, mode in dict.fromkeys((row.op, row.shape, row.mode) for row in rows):
        place = (op, shape, mode)
        times = {row.provider: row for row in rows if (row.op, row.shape, row.mode) == place}
        lines.append(f"{op:32}{shape:16}{mode:8}{_compared(times)}")
    return "\n".join(lines)


def _compared(times: dict[str, results.Row]) -> str:
    """The columns of a line: of torch.compile its faster mode; empty where nothing was measured."""
    us = {provider: row.gpu_us for provider, row in times.items()}
    ours = times.get("rowwise")
    compiled = min(
        (us[provider] for provider in us if provider.startswith("compile")), default=math.nan
    )
    ratios = (math.nan, math.nan) if ours is None else (ours.fraction, compiled / ours.gpu_us)
    columns = [
        (us.get("rowwise", math.nan), 9, 1),
        (ratios[0], 7, 2),
        (compiled, 9, 1),
        (ratios[1], 8, 2),
        (us.get("eager", math.nan), 9, 1),
        (us.get("by_hand", math.nan), 9, 1),
    ]
    return "".join(
        [
            " " * width if math.isnan(number) else f"{number:{width}.{digits}f}"
            for number, width, digits in columns
        ]
    ).rstrip()
