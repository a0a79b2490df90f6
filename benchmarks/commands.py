"""The parts that commands with a results file of their own share.

Such a command measures on the GPU and prints the file's table, or only prints the table.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from . import results
from .runner import Machine, this_machine

__all__ = ["add_jobs", "add_options", "jobs", "lacks_gpu", "run"]

_RESULTS = Path(__file__).resolve().parent / "results"

Measure = Callable[[argparse.Namespace, Machine, Path], int]
Table = Callable[[Sequence[results.Row]], str]


def add_options(parser: argparse.ArgumentParser, name: str, jobs: int | None = None) -> None:
    """Adds the options that these commands share."""
    add_jobs(parser, jobs)
    parser.add_argument(
        "--output", type=Path, metavar="CSV", help=f"default: results/{name}_<device>.csv"
    )
    parser.add_argument(
        "--table", action="store_true", help="only print the table of the results file"
    )


def add_jobs(parser: argparse.ArgumentParser, default: int | None = None) -> None:
    """Adds the option for the number of processes that compile ahead; None is one a core."""
    parser.add_argument(
        "--jobs",
        type=int,
        default=default,
        metavar="J",
        help="processes that compile ahead, 0 for none "
        f"(default: {'one a core' if default is None else default})",
    )


def jobs(options: argparse.Namespace) -> int:
    """Returns the number of processes that compile ahead."""
    return (os.cpu_count() or 1) if options.jobs is None else int(options.jobs)


def lacks_gpu(name: str) -> bool:
    """Returns whether there is no GPU, and prints an error of the command if so."""
    if torch.cuda.is_available():
        return False
    print(f"{name}: needs a GPU; without one nothing is timed", file=sys.stderr)
    return True


def run(name: str, options: argparse.Namespace, table: Table, measure: Measure) -> int:
    """Measures, unless the options ask only for the table, and prints the table of the file.

    Args:
        name: the command's name; the default file's name starts with it.
        options: the command line's options.
        table: returns the table of rows.
        measure: writes rows into the file, and returns the exit status.

    Returns:
        The exit status: 2 without a GPU.
    """
    if options.table:
        print(table(results.load(options.output or _RESULTS / f"{name}_nvidia_h200.csv")))
        return 0
    if lacks_gpu(name):
        return 2
    device, machine = this_machine()
    path = options.output or _RESULTS / f"{name}_{results.device_slug(device)}.csv"
    print(f"{machine.described(device)}; results to {path}", flush=True)
    status = measure(options, machine, path)
    print(table([row for row in results.read(path) if row.commit == machine.commit]))
    return status
