"""``fusedops tune``: tunes the workloads of the command line.

The configs go to the user's cache, or with ``--ship`` to the shipped table.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import difflib
import itertools
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

from ..core.compat.triton import current_target
from ..core.configs import cache, tuning
from ..core.configs.tuning_key import Config, TuningKey
from ..core.spec import Shape, Spec
from ..core.version import __version__
from . import table as tables
from .compiling import Pool
from .functions import FunctionError, FunctionWorkload, parsed, planned, sides_of
from .progress import Progress
from .sweep import Outcome, Sweeper
from .timing import GraphTimer, Timer, copy_bandwidth
from .usage import limits_of
from .workloads import (
    DTYPES,
    NO_DROPOUT,
    Tunable,
    Workload,
    discover,
    grid,
    kernels_alone,
    operators,
    runs_natively,
)

__all__ = ["UsageError", "add_parser", "line", "run", "sweeper_for"]

_SHIPPED_DTYPES = ("bf16", "fp32", "fp64")


class UsageError(Exception):
    """An invalid command line."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``tune`` and its options."""
    parser = commands.add_parser(
        "tune",
        help="measure which configs are fastest on this GPU",
        description=(
            "Measures which configs are fastest on this GPU and stores them in the user's cache."
        ),
    )
    parser.set_defaults(command=run)
    parser.add_argument(
        "--op",
        action="append",
        metavar="NAME",
        help=f"only this operator; may be repeated; one of {_listed(discover())}",
    )
    parser.add_argument(
        "--shape",
        action="append",
        metavar="MxN",
        help=(
            "rows and columns (slices: rows, slices and columns); may be repeated; "
            "by default the benchmark's shapes"
        ),
    )
    parser.add_argument(
        "--dtype", action="append", metavar="D", help=f"one of {', '.join(DTYPES)}; may be repeated"
    )
    parser.add_argument(
        "--function",
        metavar="FILE:NAME",
        help=(
            "this function under fusedops.rowwise instead of operators; "
            "its arguments follow by --arg"
        ),
    )
    parser.add_argument(
        "--arg",
        action="append",
        metavar="SHAPE[:D]",
        help=(
            "with --function: its next argument: the shape of a tensor, such as 8192x4096, "
            "4096:fp32, 1x1024:bool or 8192:int64, or =0.1 for a number"
        ),
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="number of processes that compile"
    )
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="SECONDS", help="stop after this long"
    )
    parser.add_argument(
        "--ship",
        action="store_true",
        help="measure the whole grid of shapes and write the package's table instead of the cache",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="with --ship: skip entries that were measured with these sources",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="JSON",
        help="with --ship: the table (default: the package's)",
    )
    parser.add_argument(
        "--raw", type=Path, metavar="CSV", help="append the time of every candidate to this file"
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="CSV",
        help=(
            "measure nothing; print the heuristics' distance from the best in a file written by "
            "--raw"
        ),
    )


def run(options: argparse.Namespace) -> int:
    """Tune, and return the exit code."""
    specs = _specs(options.op or ())
    shapes = list(map(_shape, options.shape or ()))
    dtypes = list(map(_dtype, options.dtype or ()))
    _check_limits(options)
    if options.compare is not None:
        return _print_comparison(options.compare)
    _check_files(options)
    if _has_content(options.raw):
        # Raises for a file of another kind, to which rows must not be appended.
        _read_raw(options.raw)
    # Before the GPU is used, so that errors of the command line are reported first.
    function = _function(options, dtypes)
    if not torch.cuda.is_available():
        raise UsageError("needs a GPU; without one nothing can be timed")
    device = torch.device("cuda", torch.cuda.current_device())
    workloads: Sequence[Tunable]
    if function is None:
        workloads = _workloads(options, specs, shapes, dtypes, device)
    else:
        workloads = [_planned(function, device)]
    with ExitStack() as stack:
        pool = stack.enter_context(pool_for(device, options.jobs))
        # Otherwise small workloads would run PyTorch's own operators, whatever the config.
        stack.enter_context(kernels_alone())
        sweeper = sweeper_for(device, pool, GraphTimer(device))
        bandwidth = copy_bandwidth(device)
        print(
            f"{tuning.device_name(device.index)}: {len(workloads)} workloads, "
            f"copies at {bandwidth / 1e12:.2f} TB/s"
        )
        store = _Ship(options, device) if options.ship else _Cache(options, device)

        def describe(outcome: Outcome) -> str:
            return line(outcome, bandwidth)

        return _sweep(sweeper, workloads, store, options.budget, describe)


def _check_limits(options: argparse.Namespace) -> None:
    if options.jobs < 1:
        raise UsageError(f"--jobs must be at least 1, got {options.jobs}")
    # Not ``<``, so that NaN is an error too.
    if not options.budget >= 0.0:
        raise UsageError(f"--budget must be at least 0 seconds, got {options.budget:g}")


def _check_files(options: argparse.Namespace) -> None:
    """Raise if files could not be written at the end, or if options would have no effect."""
    for name in ("raw", "output"):
        path: Path | None = getattr(options, name)
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"--{name}: no such folder: {path.parent}")
    takes_ship = options.resume or options.output is not None
    if takes_ship and not options.ship:
        raise UsageError("--resume and --output take --ship")


def _print_comparison(path: Path) -> int:
    if not path.is_file():
        raise UsageError(f"no such file: {path}")
    print(tables.compare(_read_raw(path)))
    return 0


def pool_for(device: torch.device, jobs: int) -> Pool:
    """Create a pool of compilers for a GPU."""
    return Pool(jobs, current_target(), limits_of(device).shared)


def sweeper_for(device: torch.device, pool: Pool, timer: Timer) -> Sweeper:
    """Create a sweeper for a GPU."""
    return Sweeper(
        pool, timer, device, name=tuning.device_name(device.index), limits=limits_of(device)
    )


class _Cache:
    """Writes each best config to the user's cache at once, so that a killed run loses none.

    `_Cache` and `_Ship` have the same methods. ``wanted`` returns whether to tune a key, ``put``
    stores an outcome, and ``close`` returns a message for the end of the run.
    """

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

    # The table has thousands of entries, so it is not written for each one. A sweep that is killed
    # loses the entries since the last write.
    _SECONDS_BETWEEN_WRITES = 5.0

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        import triton

        name = tuning.device_name(device.index)
        package = Path(str(resources.files("fusedops")))
        path = options.output or package / "tuned" / f"{tuning.slug(name)}.json"
        self._table, self._resume = tables.Table(path), options.resume
        self._raw = options.raw
        # The summary includes the rows of the earlier runs that this one resumes.
        self._rows = _read_raw(options.raw) if _has_content(options.raw) else []
        self._table.about = {
            "device": name,
            "fusedops": __version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": tables.commit(),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        }
        self._saved = time.monotonic()

    def wanted(self, key: TuningKey) -> bool:
        return not self._resume or key not in self._table

    def put(self, outcome: Outcome) -> None:
        self._table.put(outcome.key, outcome.best)
        rows = list(tables.raw_rows(outcome))
        self._rows += rows
        if self._raw is not None:
            tables.write_raw(self._raw, rows)
        if time.monotonic() - self._saved > self._SECONDS_BETWEEN_WRITES:
            self._table.save()
            self._saved = time.monotonic()

    def close(self) -> str:
        self._table.summary = tables.summary(self._rows)
        self._table.save()
        return f"the table is {self._table.path}\n{tables.compare(self._rows)}"


def _read_raw(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file that ``--raw`` wrote."""
    try:
        return tables.read_raw(path)
    except (ValueError, csv.Error) as error:
        raise UsageError(f"{path} was not written by --raw: {error}") from None


def _has_content(path: Path | None) -> bool:
    """Return whether the path is that of a file that is not empty."""
    return path is not None and path.is_file() and path.stat().st_size > 0


def _sweep(
    sweeper: Sweeper,
    workloads: Sequence[Tunable],
    store: _Cache | _Ship,
    budget: float,
    describe: Callable[[Outcome], str],
) -> int:
    """Tune the workloads within the budget, and return the exit code."""
    indices = {str(workload): index for index, workload in enumerate(workloads)}
    progress = Progress(len(workloads))
    # The budget ends the sweep between two keys: a key that is being measured is completed.
    deadline, count = time.monotonic() + budget, 0

    def has_budget() -> bool:
        return time.monotonic() < deadline

    outcomes = sweeper.sweep(workloads, wanted=store.wanted, goes_on=has_budget)
    try:
        for outcome in outcomes:
            store.put(outcome)
            count += 1
            progress.line(describe(outcome))
            progress.at(indices[str(outcome.workload)], str(outcome.workload))
    finally:
        progress.close()
        # After an interrupt too: the measurements until then are stored.
        print(f"{count} keys tuned; {store.close()}")
    if not has_budget():
        print(f"stopped: the budget of {budget:.0f} s is spent")
    for failure in sweeper.failures:
        print(f"fusedops: left out {failure}", file=sys.stderr)
    # The keys that were tuned are stored in any case. The exit code tells a script whether some
    # were left out.
    return 1 if sweeper.failures else 0


def line(outcome: Outcome, bandwidth: float) -> str:
    """Return a line of output for an outcome.

    The line has the predicted floor, the times of the best and of the heuristic's config, and the
    gain.
    """
    best, heuristic = outcome.us_of(outcome.best), outcome.us_of(outcome.heuristic)
    floor = outcome.workload.floor_us(outcome.key, bandwidth)
    timed = sum(not candidate.dropped for candidate in outcome.measured)
    return (
        f"{outcome.key}: floor {floor:.1f} us, best {best:.1f} {_short(outcome.best)}, "
        f"heuristic {heuristic:.1f} {_short(outcome.heuristic)}, "
        f"gain {100 * outcome.gain:.1f}%, {timed} of {len(outcome.measured)} timed"
    )


def _short(config: Config) -> str:
    """Return a config's fields as text, without those that are 0."""
    fields = [f"{config.rows}x{config.block_n}", f"{config.warps}w", f"{config.stages}s"]
    if config.per_sm:
        fields.append(f"{config.per_sm}/sm")
    if config.registers:
        fields.append(f"{config.registers}r")
    return f"({' '.join(fields)})"


def _listed(specs: Sequence[Spec]) -> str:
    """Return the operators' public names as text; the names of specs are accepted too."""
    return ", ".join(sorted({spec.public_name for spec in specs}))


def _specs(names: Sequence[str]) -> list[Spec]:
    """Return the specs of the named operators or functionals; all specs if there are no names."""
    every = discover()
    if not names:
        return list(every)
    accepted = {spec.name for spec in every} | {spec.public_name for spec in every}
    for name in names:
        if name in accepted:
            continue
        if name in operators():
            raise UsageError(f"{name} cannot be tuned: its kernel has one config for all sizes")
        # Names of specs are accepted, but only functionals are listed: these are public.
        hint = _hint(difflib.get_close_matches(name, accepted, 3), _listed(every))
        raise UsageError(f"no operator {name!r}; {hint}")
    return [spec for spec in every if not {spec.name, spec.public_name}.isdisjoint(names)]


def _hint(similar_names: Sequence[str], all_names: str) -> str:
    """Return the end of an error about an unknown name: similar names, or else all names."""
    if similar_names:
        return f"did you mean {' or '.join(similar_names)}?"
    return f"there are: {all_names}"


def _shape(text: str) -> Shape:
    sides = sides_of(text)
    if len(sides) not in (2, 3) or min(sides) < 1:
        raise UsageError(f"--shape must be rows x columns, such as 8192x4096, got {text!r}")
    return sides


def _dtype(name: str) -> torch.dtype:
    if name in DTYPES:
        return DTYPES[name]
    # PyTorch's names, such as float32, are not accepted. The error suggests the short ones.
    short_names = {str(dtype).removeprefix("torch."): short for short, dtype in DTYPES.items()}
    matches = difflib.get_close_matches(name, [*DTYPES, *short_names], 1)
    hint = _hint([short_names.get(match, match) for match in matches], ", ".join(DTYPES))
    raise UsageError(f"no dtype {name!r}; {hint}")


def _workloads(
    options: argparse.Namespace,
    specs: Sequence[Spec],
    shapes: Sequence[Shape],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> list[Workload]:
    """Return the workloads to tune, with and without dropout."""
    if options.ship:
        shipped_dtypes = [DTYPES[name] for name in _SHIPPED_DTYPES]
        workloads = grid(specs, dtypes or shipped_dtypes)
    else:
        workloads, without_dropout = [], []
        for spec in specs:
            for shape, dtype in _pairs(spec, shapes, dtypes):
                workloads.append(Workload(spec, shape, dtype))
                if spec.has_dropout:
                    without_dropout.append(Workload(spec, shape, dtype, NO_DROPOUT))
        workloads += without_dropout
    if not workloads:
        raise UsageError("none of these operators takes this shape")
    return [workload for workload in workloads if not runs_natively(workload, device)]


def _function(
    options: argparse.Namespace, dtypes: Sequence[torch.dtype]
) -> FunctionWorkload | None:
    """Return the workload of ``--function``, or None without that option."""
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
    """Return the workload of ``--function`` with the sizes of its kernels."""
    try:
        return planned(function, device)
    except FunctionError as error:
        raise UsageError(str(error)) from None


def _pairs(
    spec: Spec, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]
) -> list[tuple[Shape, torch.dtype]]:
    """Return the shapes and dtypes to tune: those of the command line, or the benchmark's."""
    benchmarked = list(dict(spec.shapes))  # without their dtypes, each once
    if shapes:
        # The shapes of the command line are for all operators. A shape is skipped if this
        # operator's shapes have another number of dimensions.
        dimensions = set(map(len, benchmarked))
        fitting = [shape for shape in shapes if len(shape) in dimensions]
        return list(itertools.product(fitting, dtypes or [torch.bfloat16]))
    if dtypes:
        return list(itertools.product(benchmarked, dtypes))
    return list(spec.shapes)
