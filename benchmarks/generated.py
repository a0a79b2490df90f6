"""The command ``python -m benchmarks generated``.

It times hand-written operators and the kernels generated from the same expressions, at many widths.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from . import commands, results
from .cases import DTYPES, MODES, Case, discover
from .runner import Machine, measure_all
from .sweep import ELEMENTS, Work

__all__ = ["add_options", "run", "table", "work"]

_OPERATORS = (
    "bias_dropout_add_ln",
    "bias_dropout_add_rms_norm",
    "layer_norm",
    "rms_norm",
    "bias_gelu_tanh",
    "swiglu",
)
_WIDTHS = {
    "bf16": (1024, 1536, 2560, 4096, 5120, 8192, 11008, 12288, 16384, 28672, 32768),
    "fp32": (1024, 4096, 8192),
}
_PROVIDERS = ("fusedops", "rowwise")


def work(
    ops: Iterable[str] = (), cols: Iterable[int] = (), dtypes: Iterable[str] = ()
) -> list[Work]:
    """Returns the work to time: 2**25 elements for each operator, width and dtype.

    If operators, widths or dtypes are named, it has only these.
    """
    named_ops, named_cols, named_dtypes = set(ops), set(cols), set(dtypes)
    specs = {spec.name: spec for spec in discover()}
    pairs = tuple([(mode, provider) for mode in MODES for provider in _PROVIDERS])
    result = []
    for dtype, widths in _WIDTHS.items():
        if named_dtypes and dtype not in named_dtypes:
            continue
        for width, op in itertools.product(widths, _OPERATORS):
            is_named_width = not named_cols or width in named_cols
            is_named_op = not named_ops or op in named_ops
            if is_named_width and is_named_op:
                case = Case(specs[op], (ELEMENTS // width, width), DTYPES[dtype])
                result.append(Work(case, pairs))
    return result


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.set_defaults(command=run)
    parser.add_argument("--op", action="append", choices=_OPERATORS, help="may be repeated")
    parser.add_argument("--cols", action="append", type=int, metavar="N", help="may be repeated")
    parser.add_argument("--dtype", action="append", choices=list(_WIDTHS), help="may be repeated")
    parser.add_argument(
        "--budget", type=float, default=3600.0, metavar="SECONDS", help="default: 3600"
    )
    commands.add_options(parser, "generated")


def run(options: argparse.Namespace) -> int:
    """Measures hand-written operators and the kernels generated from the same expressions."""
    return commands.run("generated", options, table, _measure)


def _measure(options: argparse.Namespace, machine: Machine, path: Path) -> int:
    """Measures into the file, and returns the exit status."""
    with results.Book(path) as book:
        _, missing = measure_all(
            work(options.op or (), options.cols or (), options.dtype or ()),
            machine,
            book,
            jobs=commands.jobs(options),
            deadline=time.perf_counter() + options.budget,
        )
    return 1 if missing else 0


def table(rows: Sequence[results.Row]) -> str:
    """Returns a line for each case: both times, and the generated kernels' over the other."""
    times = {row.key: row.gpu_us for row in rows}
    floors = {row.key: row.floor_us for row in rows}
    lines = []
    for op, shape, dtype, mode, provider in times:
        if provider != "rowwise" or (op, shape, dtype, mode, "fusedops") not in times:
            continue
        by_hand = times[op, shape, dtype, mode, "fusedops"]
        generated = times[op, shape, dtype, mode, "rowwise"]
        floor = floors[op, shape, dtype, mode, "rowwise"]
        lines.append(
            f"{op:26}{shape:14}{dtype:6}{mode:8}{by_hand:9.1f}{generated:9.1f}"
            f"{generated / by_hand:7.2f}{floor / generated:7.2f} of the floor"
        )
    return "\n".join(lines)
