"""The command ``python -m benchmarks zoo``."""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from .. import results as operator_results
from ..models import ahead
from ..models.command import device_of
from ..models.measuring import Effort
from ..models.providers import OURS
from ..models.runner import Work, without
from . import page, results
from .registry import MODELS, MODES, part, workloads
from .scheduling import Plan, measure_all

__all__ = ["add_options", "run"]

_ROOT = Path(__file__).resolve().parent.parent.parent
_RESULTS = _ROOT / "benchmarks" / "results"
_DEFAULT = _RESULTS / "zoo_nvidia_h200.csv"
_PROVIDERS = ("compile", "backend")
_EFFORT = Effort(rounds=5, block_s=0.15, singles=5, most=20)
_TINY = Effort(rounds=2, block_s=0.01, singles=1, most=2)
_LIMIT_SECONDS = 180.0
_OF_COMPILING = 0.55  # the part of the budget in which models are compiled ahead


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.set_defaults(command=run)
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help=f"only this one of {', '.join(MODELS)}; may be repeated",
    )
    parser.add_argument(
        "--mode", action="append", choices=MODES, help="only this mode; may be repeated"
    )
    parser.add_argument(
        "--part",
        type=_part,
        metavar="I/N",
        help="only the I-th of N shares of the models, which take about as long",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=8,
        metavar="J",
        help="processes that compile ahead, 0 for none; each holds a model (default: 8)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=3,
        metavar="P",
        help="processes that prepare models; while one is timed, the others are stopped "
        "(default: 3)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=_LIMIT_SECONDS,
        metavar="SECONDS",
        help=f"of a model, to compile and to measure (default: {_LIMIT_SECONDS:.0f})",
    )
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="measure nothing after this long"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="skip what the file has at this commit, failures too",
    )
    parser.add_argument(
        "--device", default="auto", help="cpu or cuda[:index] (default: a GPU where there is one)"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="shrunken models, to try the command; writes no file unless --output names one",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="CSV",
        help="default: results/zoo_<device>.csv; on a CPU none",
    )
    parser.add_argument(
        "--table", action="store_true", help="only print the tables of the results file"
    )
    parser.add_argument(
        "--page",
        type=Path,
        nargs="?",
        const=_ROOT / "docs" / "zoo.md",
        help="only write the page of the results file (default: docs/zoo.md)",
    )


def run(options: argparse.Namespace) -> int:
    """Measures many architectures, with torch.compile and with fusedops.compile.

    Fails if one is wrong or cannot be compiled with fusedops.compile.
    """
    try:
        if options.table or options.page is not None:
            return _show(options)
        return _measure(options)
    except (OSError, ValueError, operator_results.UnreadableError) as error:
        print(f"zoo: {error}", file=sys.stderr)
        return 2


def _part(text: str) -> tuple[int, int]:
    """Returns the two numbers of ``I/N``."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 1 to N")
    return int(match[1]), int(match[2])


def _show(options: argparse.Namespace) -> int:
    """Prints the tables of the results file, or writes its page. Measures nothing."""
    path = options.output or _DEFAULT
    if options.page is None:
        print(page.table(results.read(path)))
    else:
        options.page.write_text(page.markdown(path), encoding="utf-8")
        print(f"wrote {options.page}")
    return 0


def _measure(options: argparse.Namespace) -> int:
    """Measures what the options ask for, and returns the exit status."""
    started = time.perf_counter()
    device = device_of(options)
    path = _output(options, device)
    work = _work(options, path)
    budget = math.inf if options.budget is None else options.budget
    print(
        f"torch {torch.__version__}, {len(work)} workloads; "
        f"results to {path or 'the terminal only'}",
        flush=True,
    )
    if options.jobs and device.type == "cuda":
        _compile_ahead(work, options, device, budget * _OF_COMPILING)
    plan = Plan(
        device=device,
        effort=_TINY if options.tiny else _EFFORT,
        processes=max(1, min(options.processes, len(work))),
        limit=options.limit,
        deadline=started + budget,
    )
    rows = list[results.Row]()

    def write(new: list[results.Row]) -> None:
        rows.extend(new)
        if path is not None:
            results.write(path, new)

    left = measure_all(work, plan, write)
    print(page.table(rows if path is None else results.read(path)))
    print(f"{time.perf_counter() - started:.0f} s; {left} workloads are left for --resume")
    # A missing row of fusedops is an error; a missing row of torch.compile is not.
    return 1 if any(row.failure and row.provider in OURS for row in rows) else 0


def _work(options: argparse.Namespace, path: Path | None) -> list[Work]:
    """Returns the workloads of the options, without those that are done."""
    chosen = workloads(options.model or (), options.mode or (), tiny=options.tiny)
    if options.part is not None:
        chosen = part(chosen, *options.part)
    work = [Work(workload, _PROVIDERS) for workload in chosen]
    if not options.resume or path is None:
        return work
    commit = operator_results.commit()
    done = {row.key for row in results.read(path) if row.commit == commit}
    # Both are timed in turns, so that neither is measured without the other.
    remaining = {item.workload for item in without(work, done)}
    return [item for item in work if item.workload in remaining]


def _compile_ahead(
    work: Sequence[Work], options: argparse.Namespace, device: torch.device, seconds: float
) -> None:
    started = time.perf_counter()
    done, todo = ahead.compile_ahead(
        work,
        jobs=options.jobs,
        device=device,
        seconds=min(seconds, 3600.0),
        limit=options.limit,
    )
    print(f"compiled {done} of {todo} ahead in {time.perf_counter() - started:.0f} s", flush=True)


def _output(options: argparse.Namespace, device: torch.device) -> Path | None:
    """Returns the results file; by default a CPU and tiny models have none."""
    if options.output is not None or device.type != "cuda" or options.tiny:
        path: Path | None = options.output
        return path
    slug = operator_results.device_slug(torch.cuda.get_device_name(device))
    return _RESULTS / f"zoo_{slug}.csv"
