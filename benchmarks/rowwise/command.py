"""The command ``python -m benchmarks rowwise``.

It times users' functions with `fusedops.rowwise` and with its alternatives.
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
    """Adds the command's options."""
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
    """Measures users' functions: `fusedops.rowwise`, eager PyTorch, torch.compile, by hand."""
    return commands.run("rowwise", options, table, _measure)


def _measure(options: argparse.Namespace, machine: Machine, path: Path) -> int:
    """Measures into the file, and returns the exit status."""
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
    # A missing row of rowwise is an error; a missing row of a peer is not.
    return 1 if missing else 0


def _compile_ahead(
    chosen: Sequence[Workload], wanted: Sequence[str], jobs: int, device: torch.device
) -> None:
    started = time.perf_counter()
    work = []
    for workload in chosen:
        names = [name for name in offered(workload, wanted) if name in COMPILING]
        work += [(workload, name) for name in names]
    warm.settle_compiler()
    done, todo = ahead.compile_ahead(work, jobs=jobs, device=device)
    print(f"compiled {done} of {todo} ahead in {time.perf_counter() - started:.0f} s", flush=True)


def _measured(
    workload: Workload, wanted: Sequence[str], modes: Sequence[str], machine: Machine
) -> Iterator[results.Row]:
    """Yields the rows of a workload; the error of a provider that fails is printed to stderr."""
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
    # Whatever a provider raises, the others must be timed.
    except Exception as error:  # noqa: BLE001
        described = f"{type(error).__name__}: {str(error).strip()[:300]}"
        print(f"  {provider} {mode}: left out, {described}", file=sys.stderr, flush=True)
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
        op=workload.name,
        shape=workload.shape_name,
        dtype="bfloat16",
        mode=mode,
        provider=provider,
        gpu_us=gpu,
        loop_us=math.nan,
        floor_us=floor_us(workload.moved(mode), machine.bandwidth),
        peak_mib=peak,
        commit=machine.commit,
        torch=machine.torch,
        triton=machine.triton,
    )
    print(
        f"  {provider:22}{mode:8}{gpu:9.1f} us  {row.fraction:.2f} of the floor  {peak:8.0f} MiB",
        flush=True,
    )
    return row


def table(rows: Sequence[results.Row]) -> str:
    """Returns a line for each function, shape and mode: the times, and how rowwise compares."""
    by_provider: dict[tuple[str, str, str], dict[str, results.Row]] = {}
    for row in rows:
        by_provider.setdefault((row.op, row.shape, row.mode), {})[row.provider] = row
    lines = [_HEADING]
    for (op, shape, mode), case_rows in by_provider.items():
        lines.append(f"{op:32}{shape:16}{mode:8}{_compared(case_rows)}")
    return "\n".join(lines)


def _compared(by_provider: dict[str, results.Row]) -> str:
    """Returns the columns of a line; a column is empty if it was not measured.

    The column of torch.compile is the faster of its modes.
    """
    us = {provider: row.gpu_us for provider, row in by_provider.items()}
    compiled_us = [us[provider] for provider in us if provider.startswith("compile")]
    compiled = min(compiled_us, default=math.nan)
    fraction = speed_up = math.nan
    ours = by_provider.get("rowwise")
    if ours is not None:
        fraction, speed_up = ours.fraction, compiled / ours.gpu_us
    # Each number with its width and digits, as in `_HEADING`.
    columns = [
        (us.get("rowwise", math.nan), 9, 1),
        (fraction, 7, 2),
        (compiled, 9, 1),
        (speed_up, 8, 2),
        (us.get("eager", math.nan), 9, 1),
        (us.get("by_hand", math.nan), 9, 1),
    ]
    line = ""
    for number, width, digits in columns:
        line += " " * width if math.isnan(number) else f"{number:{width}.{digits}f}"
    return line.rstrip()
