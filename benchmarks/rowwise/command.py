"""The command ``python -m benchmarks rowwise``.

It times users' functions with `fusedops.rowwise` and with its alternatives.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from .. import commands, results
from ..runner import Machine
from .measuring import Suite, by_case, columns, measure
from .measuring import add_options as add_shared_options
from .providers import PROVIDERS, build, offered
from .workloads import FUNCTIONS, workloads

__all__ = ["add_options", "run", "table"]

_SUITE = Suite(
    providers=PROVIDERS,
    ours=("rowwise",),
    build=build,
    offered=offered,
    modes_of=lambda workload, modes: [mode for mode in modes if mode in workload.elements],
)
_HEADING = (
    f"{'function':32}{'shape':16}{'mode':8}{'rowwise':>9}{'floor':>7}"
    f"{'compile':>9}{'faster':>8}{'eager':>9}{'by hand':>9}"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.set_defaults(command=run)
    parser.add_argument(
        "--cols",
        action="append",
        type=int,
        metavar="N",
        help="only this row length; may be repeated",
    )
    add_shared_options(parser, "rowwise", FUNCTIONS, PROVIDERS)


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
    return measure(_SUITE, chosen, options, machine, path)


def table(rows: Sequence[results.Row]) -> str:
    """Returns a line for each function, shape and mode: the times, and how rowwise compares."""
    lines = [_HEADING]
    for (op, shape, _, mode), case_rows in by_case(rows).items():
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
    return columns(
        [
            (us.get("rowwise", math.nan), 9, 1),
            (fraction, 7, 2),
            (compiled, 9, 1),
            (speed_up, 8, 2),
            (us.get("eager", math.nan), 9, 1),
            (us.get("by_hand", math.nan), 9, 1),
        ]
    )
