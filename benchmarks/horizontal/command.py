"""The command ``python -m benchmarks horizontal``.

It times functions that are called for each of many slices, with this package and its alternatives.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from .. import commands, results
from ..rowwise.measuring import Suite, by_case, columns, measure
from ..rowwise.measuring import add_options as add_shared_options
from ..runner import Machine
from . import first_calls
from .providers import OURS, PROVIDERS, build, offered
from .workloads import FUNCTIONS, Workload, workloads

__all__ = ["add_options", "run", "table"]

_SUITE = Suite(providers=PROVIDERS, ours=OURS, build=build, offered=offered)
_HEADING = (
    f"{'function':24}{'shape':14}{'dtype':6}{'mode':8}{'foreach':>9}{'backend':>9}"
    f"{'operator':>9}{'compile':>9}{'of the floor':>14}{'x compile':>11}"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.set_defaults(command=run)
    parser.add_argument(
        "--first-calls",
        action="store_true",
        help="only print the seconds of the first call of the loop over ragged slices "
        f"(default: {', '.join(first_calls.PROVIDERS)}), each in a new process with empty caches",
    )
    add_shared_options(parser, "horizontal", FUNCTIONS, PROVIDERS)


def run(options: argparse.Namespace) -> int:
    """Measures functions of many slices: `Rowwise.foreach`, `fusedops.compile`, and others."""
    if not options.first_calls:
        return commands.run("horizontal", options, table, _measure)
    if commands.lacks_gpu("horizontal"):
        return 2
    wanted = options.provider or first_calls.PROVIDERS
    (ragged,) = [w for w in workloads(["layer_norm_tanh"]) if _is_ragged(w)]
    return _print_first_calls(ragged, wanted, torch.device("cuda", torch.cuda.current_device()))


def _is_ragged(workload: Workload) -> bool:
    """Returns whether a workload is that of the first calls."""
    return workload.joint and not workload.is_uniform and workload.dtype == torch.bfloat16


def _print_first_calls(workload: Workload, wanted: Sequence[str], device: torch.device) -> int:
    """Prints the seconds of each provider, and returns the exit status."""
    print(f"{workload.name} {workload.shape_name} {workload.dtype_name}", flush=True)
    status = 0
    for provider in wanted:
        seconds = _seconds_or_nothing(workload, provider, device)
        if seconds is not None:
            print(f"  {provider:22}{seconds:8.1f} s", flush=True)
        elif provider in OURS:
            status = 1
    return status


def _seconds_or_nothing(workload: Workload, provider: str, device: torch.device) -> float | None:
    """Returns the seconds of the first call; prints the error if it fails."""
    try:
        return first_calls.seconds_of(workload, provider, device)
    except (RuntimeError, TimeoutError) as error:
        print(f"  {provider}: left out, {error}", file=sys.stderr, flush=True)
        return None


def _measure(options: argparse.Namespace, machine: Machine, path: Path) -> int:
    """Measures into the file, and returns the exit status."""
    return measure(_SUITE, workloads(options.function or ()), options, machine, path)


def table(rows: Sequence[results.Row]) -> str:
    """Returns a line for each function, shape, dtype and mode, with times in microseconds.

    The fraction of the floor, and how many times faster than torch.compile, are those of the faster
    of `Rowwise.foreach` and `fusedops.compile`.
    """
    lines = [_HEADING]
    for (op, shape, dtype, mode), by_provider in by_case(rows).items():
        us = {provider: row.gpu_us for provider, row in by_provider.items()}
        times = [us.get(name, math.nan) for name in ("foreach", "backend", "operator", "compile")]
        generated = [by_provider[name] for name in ("foreach", "backend") if name in by_provider]
        fraction = max((row.fraction for row in generated), default=math.nan)
        ours = min((row.gpu_us for row in generated), default=math.nan)
        numbers = [(time, 9, 1) for time in times]
        numbers += [(fraction, 14, 2), (times[-1] / ours, 11, 2)]
        lines.append(f"{op:24}{shape:14}{dtype:6}{mode:8}{columns(numbers)}")
    return "\n".join(lines)
