"""``fusedops tune``: parses the command line, tunes the workloads, and writes the cache or the shipped table."""

from __future__ import annotations

import argparse
import datetime
import difflib
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from ..core import cache, compat, tuning
from ..core.spec import Shape, Spec
from ..core.tuning_key import Config, TuningKey
from ..core.version import __version__
from . import table as tables
from .compiling import Pool
from .functions import FunctionError, FunctionWorkload, parsed, planned
from .progress import Progress
from .sweep import Outcome, Sweeper
from .timing import GraphTimer, Timer, copy_bandwidth
from .usage import limits_of
from .workloads import DTYPES, Tunable, Workload, discover, grid, kernels_alone, operators, runs_natively

__all__ = ["UsageError", "add_parser", "line", "run", "sweeper_for"]

_SHIPPED_DTYPES = ("bf16", "fp32", "fp64")


class UsageError(Exception):
    """An invalid command line."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``tune`` and its options."""
    parser = commands.add_parser(
        "tune", help="measure which configs are fastest on this GPU",
        description="Measures which configs are fastest on this GPU and stores them in the user's cache.",
    )  # fmt: skip
    parser.set_defaults(command=run)
    parser.add_argument("--op", action="append", metavar="NAME", help="only this operator; may be repeated; one of "
                        f"{_listed(discover())}")  # fmt: skip
    parser.add_argument("--shape", action="append", metavar="MxN", help="rows and columns (slices: rows, slices and "
                        "columns); may be repeated; by default the benchmark's shapes")  # fmt: skip
    parser.add_argument("--dtype", action="append", metavar="D", help=f"one of {', '.join(DTYPES)}; may be repeated")
    parser.add_argument("--function", metavar="FILE:NAME", help="this function under fusedops.rowwise instead of operators; "
                        "its arguments follow by --arg")  # fmt: skip
    parser.add_argument("--arg", action="append", metavar="SHAPE[:D]", help="with --function: its next argument: the shape "
                        "of a tensor, such as 8192x4096, 4096:fp32, 1x1024:bool or 8192:int64, or =0.1 for a number")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of processes that compile")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="stop after this long")
    parser.add_argument("--ship", action="store_true", help="measure the whole grid of shapes and write the package's "
                        "table instead of the cache")  # fmt: skip
    parser.add_argument(
        "--resume", action="store_true", help="with --ship: skip entries that were measured with these sources"
    )
    parser.add_argument("--output", type=Path, metavar="JSON", help="with --ship: the table (default: the package's)")
    parser.add_argument("--raw", type=Path, metavar="CSV", help="append the time of every candidate to this file")
    parser.add_argument("--compare", type=Path, metavar="CSV", help="measure nothing; print the heuristics' distance "
                        "from the best in a file written by --raw")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Tunes; returns the exit code."""
    specs = _specs(options.op or ())
    shapes, dtypes = [_shape(text) for text in options.shape or ()], [_dtype(name) for name in options.dtype or ()]
    if options.jobs < 1:
        raise UsageError(f"--jobs must be at least 1, got {options.jobs}")
    if not options.budget >= 0.0:
        raise UsageError(f"--budget must be at least 0 seconds, got {options.budget:g}")
    if options.compare is not None:
        if not options.compare.is_file():
            raise UsageError(f"no such file: {options.compare}")
        print(tables.compare(_raw(options.compare)))
        return 0
    if _is_file(options.raw):
        _raw(options.raw)  # rows must not be appended to another kind of file
    function = _function(options, dtypes)
    if not torch.cuda.is_available():
        raise UsageError("needs a GPU; without one nothing can be timed")
    device = torch.device("cuda", torch.cuda.current_device())
    workloads: Sequence[Tunable]
    workloads = _workloads(options, specs, shapes, dtypes, device) if function is None else [_planned(function, device)]
    with ExitStack() as stack:
        pool = stack.enter_context(pool_for(device, options.jobs))
        stack.enter_context(kernels_alone())
        sweeper = sweeper_for(device, pool, GraphTimer(device))
        bandwidth = copy_bandwidth(device)
        print(f"{tuning.device_name(device.index)}: {len(workloads)} workloads, copies at {bandwidth / 1e12:.2f} TB/s")
        keep = _Ship(options, device) if options.ship else _Cache(options, device)
        return _sweep(sweeper, workloads, keep, options.budget, lambda outcome: line(outcome, bandwidth))


def pool_for(device: torch.device, jobs: int) -> Pool:
    """A pool of compilers for a GPU."""
    return Pool(jobs, compat.current_target(), limits_of(device).shared)


def sweeper_for(device: torch.device, pool: Pool, timer: Timer) -> Sweeper:
    """A sweeper for a GPU."""
    return Sweeper(pool, timer, device, name=tuning.device_name(device.index), limits=limits_of(device))


class _Cache:
    """Writes each best config to the user's cache at once, so that a run that is killed loses none."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._raw, self._device = options.raw, tuning.device_name(device.index)

    def wanted(self, key: TuningKey) -> bool:
        return True

    def put(self, outcome: Outcome) -> None:
        times = {"best": outcome.us_of(outcome.best), "heuristic": outcome.us_of(outcome.heuristic)}
        cache.write(outcome.key, self._device, outcome.best, times)
        if self._raw is not None:
            tables.write_raw(self._raw, tables.raw_rows(outcome))

    def close(self) -> str:
        return f"the cache is {cache.directory()}"


class _Ship:
    """Collects the best configs in the shipped table, which is written every few seconds."""

    _EVERY = 5.0

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        import triton

        name = tuning.device_name(device.index)
        path = options.output or Path(str(resources.files("fusedops"))) / "tuned" / f"{tuning.slug(name)}.json"
        self._table, self._resume = tables.Table(path), options.resume
        self._raw, self._rows = options.raw, _raw(options.raw) if _is_file(options.raw) else []
        self._table.about = {
            "device": name, "fusedops": __version__, "torch": torch.__version__, "triton": triton.__version__,
            "commit": tables.commit(), "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        }  # fmt: skip
        self._saved = time.monotonic()

    def wanted(self, key: TuningKey) -> bool:
        return not self._resume or key not in self._table

    def put(self, outcome: Outcome) -> None:
        self._table.put(outcome.key, outcome.best)
        rows = list(tables.raw_rows(outcome))
        self._rows += rows
        if self._raw is not None:
            tables.write_raw(self._raw, rows)
        if time.monotonic() - self._saved > self._EVERY:
            self._table.save()
            self._saved = time.monotonic()

    def close(self) -> str:
        self._table.summary = tables.summary(self._rows)
        self._table.save()
        return f"the table is {self._table.path}\n{tables.compare(self._rows)}"


def _raw(path: Path) -> list[dict[str, Any]]:
    try:
        return tables.read_raw(path)
    except ValueError as error:
        raise UsageError(f"{path} was not written by --raw: {error}") from None


def _is_file(path: Path | None) -> bool:
    return path is not None and path.is_file()


def _sweep(sweeper: Sweeper, workloads: Sequence[Tunable], keep: _Cache | _Ship, budget: float,
           describe: Callable[[Outcome], str]) -> int:  # fmt: skip
    places = {str(workload): place for place, workload in enumerate(workloads)}
    progress, ends, count = Progress(len(workloads)), time.monotonic() + budget, 0
    try:
        for outcome in sweeper.sweep(workloads, wanted=keep.wanted, goes_on=lambda: time.monotonic() < ends):
            keep.put(outcome)
            count += 1
            progress.line(describe(outcome))
            progress.at(places[str(outcome.workload)], str(outcome.workload))
    finally:
        progress.close()
        print(f"{count} keys tuned; {keep.close()}")
    if time.monotonic() >= ends:
        print(f"stopped: the budget of {budget:.0f} s is spent")
    for failure in sweeper.failures:
        print(f"fusedops: left out {failure}", file=sys.stderr)
    return 1 if sweeper.failures else 0


def line(outcome: Outcome, bandwidth: float) -> str:
    """A line for an outcome: the predicted floor, the best config, the heuristic's, and the gain."""
    best, heuristic = outcome.us_of(outcome.best), outcome.us_of(outcome.heuristic)
    timed = sum(not one.dropped for one in outcome.measured)
    return (f"{outcome.key}: floor {outcome.workload.floor_us(outcome.key, bandwidth):.1f} us, "
            f"best {best:.1f} {_short(outcome.best)}, heuristic {heuristic:.1f} {_short(outcome.heuristic)}, "
            f"gain {100 * outcome.gain:.1f}%, {timed} of {len(outcome.measured)} timed")  # fmt: skip


def _short(config: Config) -> str:
    text = f"{config.rows}x{config.block_n} {config.warps}w {config.stages}s"
    text += f" {config.per_sm}/sm" if config.per_sm else ""
    return f"({text}{f' {config.registers}r' if config.registers else ''})"


def _listed(specs: Sequence[Spec]) -> str:
    """The operators by their public names; the names of specs are accepted too."""
    return ", ".join(sorted({spec.functional or spec.name for spec in specs}))


def _specs(names: Sequence[str]) -> list[Spec]:
    """The specs of the named operators or functionals; all without names."""
    every = discover()
    known = {spec.name for spec in every} | {spec.functional for spec in every if spec.functional}
    for name in names:
        if name not in known:
            if name in operators():
                raise UsageError(f"{name} cannot be tuned: its kernel has one config for all sizes")
            near = difflib.get_close_matches(name, known, 3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {_listed(every)}"
            raise UsageError(f"no operator {name!r}; {hint}")
    return [spec for spec in every if not names or spec.name in names or spec.functional in names]


def _shape(text: str) -> Shape:
    sides = text.lower().replace("×", "x").split("x")  # noqa: RUF001 - as the documentation writes it
    numbers = [int(side) if side.isdecimal() else 0 for side in sides]
    if len(sides) not in (2, 3) or min(numbers) < 1:
        raise UsageError(f"--shape must be rows x columns, such as 8192x4096, got {text!r}")
    return tuple(numbers)


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        near = difflib.get_close_matches(name, [*DTYPES, "bfloat16", "float16", "float32", "float64"], 1)
        long = {str(dtype).removeprefix("torch."): short for short, dtype in DTYPES.items()}
        hint = f"did you mean {long.get(near[0], near[0])}?" if near else f"there are: {', '.join(DTYPES)}"
        raise UsageError(f"no dtype {name!r}; {hint}")
    return DTYPES[name]


def _workloads(options: argparse.Namespace, specs: Sequence[Spec], shapes: Sequence[Shape],
               dtypes: Sequence[torch.dtype], device: torch.device) -> list[Workload]:  # fmt: skip
    if options.ship:
        found = grid(specs, dtypes or [DTYPES[name] for name in _SHIPPED_DTYPES])
    else:
        pairs = [(spec, shape, dtype) for spec in specs for shape, dtype in _pairs(spec, shapes, dtypes)]
        found = [Workload(*pair) for pair in pairs]
        found += [Workload(*pair, (("p", 0.0),)) for pair in pairs if pair[0].has_dropout]
    if not found:
        raise UsageError("none of these operators takes this shape")
    return [workload for workload in found if not runs_natively(workload, device)]


def _function(options: argparse.Namespace, dtypes: Sequence[torch.dtype]) -> FunctionWorkload | None:
    if options.function is None:
        if options.arg:
            raise UsageError("--arg is an argument of --function")
        return None
    if options.op or options.shape or options.ship:
        raise UsageError("--function takes --arg and --dtype, and neither --op, --shape nor --ship")
    if len(dtypes) > 1:
        raise UsageError("--function takes one --dtype, that of the tensors whose --arg names none")
    try:
        return parsed(options.function, options.arg or (), dtypes[0] if dtypes else torch.bfloat16)
    except FunctionError as error:
        raise UsageError(str(error)) from None


def _planned(function: FunctionWorkload, device: torch.device) -> FunctionWorkload:
    try:
        return planned(function, device)
    except FunctionError as error:
        raise UsageError(str(error)) from None


def _pairs(spec: Spec, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> list[tuple[Shape, torch.dtype]]:
    """Shapes and dtypes to tune: those of the command line, or the benchmark's."""
    if shapes:
        sides = {len(shape) for shape, _ in spec.shapes}
        return [(shape, dtype) for shape in shapes if len(shape) in sides for dtype in dtypes or [torch.bfloat16]]
    timed = [shape for shape, _ in spec.shapes]
    return [(s, d) for s in dict.fromkeys(timed) for d in dtypes] if dtypes else list(spec.shapes)
