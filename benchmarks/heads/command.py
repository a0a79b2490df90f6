"""The command ``python -m benchmarks heads``.

It times losses of hidden states and a head's weight, with this package and its alternatives.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from .. import commands, results
from ..rowwise.measuring import Suite, by_case, columns, measure
from ..rowwise.measuring import add_options as add_shared_options
from ..runner import Machine
from . import errors
from .providers import OURS, PLAIN, PROVIDERS, build, gauge, offered
from .workloads import FUNCTIONS, small, workloads

__all__ = ["add_options", "run", "table"]

_MODES = ("fwd_bwd",)
_SUITE = Suite(
    providers=PROVIDERS,
    ours=OURS,
    build=build,
    offered=offered,
    modes=_MODES,
    plain=PLAIN,
    gauge=gauge,
    sets=1,
    floor="products",
)
# Each process that compiles ahead has whole logits.
_JOBS = 6
_TIMED = ("products", "fusedops", "compile", "eager", "liger", "torch")
_IN_MEMORY = ("fusedops", "compile", "eager", "liger", "torch")
_HEADING = (
    f"{'function':28}{'shape':20}{'dtype':10}"
    + "".join([f"{name:>10}" for name in _TIMED])
    + f"{'of products':>13}{'x compile':>11}{'x liger':>9}  |"
    + "".join([f"{name:>10}" for name in _IN_MEMORY])
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument(
        "--errors",
        action="store_true",
        help="only print the errors of the loss and its gradients against fp64, on a smaller head "
        "with as many chunks",
    )
    add_shared_options(parser, "heads", FUNCTIONS, PROVIDERS, _MODES, jobs=_JOBS)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Measures losses of a head: its products alone, this package, torch.compile, Liger-Kernel."""
    if not options.errors:
        return commands.run("heads", options, table, _measure)
    if commands.lacks_gpu("heads"):
        return 2
    return _print_errors(options, torch.device("cuda", torch.cuda.current_device()))


def _measure(options: argparse.Namespace, machine: Machine, path: Path) -> int:
    """Measures into the file, and returns the exit status."""
    return measure(_SUITE, workloads(options.function or ()), options, machine, path)


def _print_errors(options: argparse.Namespace, device: torch.device) -> int:
    """Prints the errors of each loss; the exit status is one if this package has none."""
    wanted = [name for name in options.provider or errors.PROVIDERS if name in errors.PROVIDERS]
    measured: list[errors.Errors] = []
    chosen = workloads(options.function or ())
    for workload in chosen:
        measured += errors.errors(small(workload), device, wanted)
    print(errors.table(measured))
    count = sum(each.provider in OURS for each in measured)
    return 0 if count == len(chosen) * sum(name in OURS for name in wanted) else 1


def table(rows: Sequence[results.Row]) -> str:
    """Returns a line for each loss, shape and dtype: milliseconds, ratios, and GiB.

    "of products" is the time of the bare products over this package's, and the next columns how
    many times faster this package is than torch.compile and Liger-Kernel. After the bar is the
    memory beyond inputs and gradients.
    """
    lines = [_HEADING]
    for (op, shape, dtype, _), by_provider in by_case(rows).items():
        ms = {provider: row.gpu_us / 1e3 for provider, row in by_provider.items()}
        gib = {provider: row.peak_mib / 1024 for provider, row in by_provider.items()}
        ours = ms.get("fusedops", math.nan)
        numbers = [(ms.get(name, math.nan), 10, 2) for name in _TIMED]
        numbers += [
            (ms.get("products", math.nan) / ours, 13, 2),
            (ms.get("compile", math.nan) / ours, 11, 2),
            (ms.get("liger", math.nan) / ours, 9, 2),
        ]
        times = columns(numbers)
        memory = columns([(gib.get(name, math.nan), 10, 2) for name in _IN_MEMORY])
        lines.append(f"{op:28}{shape:20}{dtype:10}{times:93}  |{memory}".rstrip())
    return "\n".join(lines)
