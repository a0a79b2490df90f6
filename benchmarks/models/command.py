"""The command ``python -m benchmarks models``."""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .. import results as operator_results
from . import ahead, first_calls, page, profiling, rest, results
from .measuring import Effort
from .providers import OURS, PROVIDERS
from .runner import Setting, Work, run_work, stages, without
from .text import Text
from .workloads import MODELS, MODES, Workload, loss_workloads, named, workloads

__all__ = ["add_options", "device_of", "run"]

_ROOT = Path(__file__).resolve().parent.parent.parent
_RESULTS = _ROOT / "benchmarks" / "results"
_DEFAULT = _RESULTS / "models_nvidia_h200.csv"
_DEFAULT_OF_REST = _RESULTS / "rest_nvidia_h200.csv"
_TINY = Effort(rounds=3, block_s=0.01, singles=1, most=3)


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
        "--mode",
        action="append",
        metavar="MODE",
        help=f"only this one of {', '.join(MODES)}; may be repeated",
    )
    parser.add_argument(
        "--provider",
        action="append",
        metavar="NAME",
        help=f"only this one of {', '.join(PROVIDERS)}; may be repeated",
    )
    parser.add_argument(
        "--loss", action="store_true", help="instead of timing, train for a short while"
    )
    parser.add_argument(
        "--first-calls",
        action="store_true",
        help="instead of timing steps, time how long each provider "
        f"compiles (default: {' and '.join(first_calls.DEFAULT)}), cold and in a second process",
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=0,
        metavar="N",
        help="of --first-calls: the layers of each model, 0 for all (default: 0); otherwise writes "
        "no file unless --output names one",
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="of --loss: how many trainings (default: 3)"
    )
    parser.add_argument(
        "--steps", type=int, default=100, help="of --loss: the steps of each (default: 100)"
    )
    parser.add_argument(
        "--rest",
        action="store_true",
        help="compare fuse_model with fusedops.compile(rest='eager'), on models of this command and "
        "of the zoo; results and page are files of their own",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="instead of timing, print the kernels with the most time",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=6,
        metavar="J",
        help="processes that compile ahead on a GPU, 0 for none; each holds a model (default: 6)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=Effort.most,
        metavar="N",
        help="the most rounds of blocks of steps; there are fewer where medians are exact before "
        f"(default: {Effort.most})",
    )
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="start no new workload after this long"
    )
    parser.add_argument(
        "--resume", action="store_true", help="skip what the file has at this commit"
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
        help="default: results/models_<device>.csv; on a CPU none",
    )
    parser.add_argument(
        "--table", action="store_true", help="only print the table of the results file"
    )
    parser.add_argument(
        "--page",
        type=Path,
        nargs="?",
        const=Path(),
        help="only write the page of the results file (default: docs/model_figures.md, or "
        "rest_figures.md)",
    )


def run(options: argparse.Namespace) -> int:
    """Measures whole models: eager, fused, compiled, by hand, and Liger-Kernel's patch."""
    try:
        if options.table or options.page is not None:
            return _show(options)
        return _work(options)
    except (OSError, ValueError, operator_results.UnreadableError) as error:
        print(f"models: {error}", file=sys.stderr)
        return 2


def _show(options: argparse.Namespace) -> int:
    """Prints the table of the results file, or writes its page. Measures nothing."""
    path = options.output or (_DEFAULT_OF_REST if options.rest else _DEFAULT)
    if not path.is_file():
        raise operator_results.UnreadableError(f"no such file: {path}")
    pages = rest if options.rest else page
    if options.page is None:
        print(pages.table(results.read(path)))
        return 0
    name = "rest_figures.md" if options.rest else "model_figures.md"
    target = _ROOT / "docs" / name if options.page == Path() else options.page
    target.write_text(pages.markdown(path), encoding="utf-8")
    print(f"wrote {target}")
    return 0


def _work(options: argparse.Namespace) -> int:
    """Measures what the options ask for, and returns the exit status."""
    models, modes = options.model or (), options.mode or ()
    wanted = [named("provider", name, PROVIDERS) for name in options.provider or ()]
    if options.loss:
        chosen = loss_workloads(models, tiny=options.tiny)
    elif options.rest:
        chosen = rest.workloads_of(modes, models, tiny=options.tiny)
    else:
        chosen = workloads(models, modes, tiny=options.tiny)
    device = device_of(options)
    setting = Setting(
        device=device,
        text=Text(device),
        effort=_TINY if options.tiny else Effort(most=options.rounds),
        seeds=tuple(range(options.seeds)),
        steps=options.steps,
    )
    if options.first_calls:
        return _time_first_calls(chosen, wanted or first_calls.DEFAULT, setting, options)
    if options.profile:
        return _profile(chosen, wanted or ["eager", "fused"], setting)
    plan = rest.stages(chosen, wanted) if options.rest else stages(chosen, wanted)
    return _measure(plan, setting, options)


def device_of(options: argparse.Namespace) -> torch.device:
    """Returns the device of the command line; by default a GPU, or for tiny models also a CPU.

    Raises:
        ValueError: there is no such device.
    """
    name, has_gpu = options.device, torch.cuda.is_available()
    if name == "auto":
        if not has_gpu and not options.tiny:
            raise ValueError("needs a GPU; on a CPU try --tiny, or --device cpu if it is meant")
        name = "cuda" if has_gpu else "cpu"
    is_gpu = has_gpu and re.fullmatch(r"cuda(:\d)?", name)
    if name != "cpu" and not is_gpu:
        others = ", and cuda[:index]" if has_gpu else ""
        raise ValueError(f"no device {name!r} here; there is cpu{others}")
    if name == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(name)


def _profile(chosen: list[Workload], wanted: list[str], setting: Setting) -> int:
    for workload in chosen:
        for name in wanted:
            print(f"{workload} {name}\n{profiling.profiled(name, workload, setting)}\n", flush=True)
    return 0


def _time_first_calls(
    chosen: list[Workload], wanted: Sequence[str], setting: Setting, options: argparse.Namespace
) -> int:
    path = options.output if options.layers else _output(options, setting.device, "compile")
    rows = []
    timed = [replace(one, layers=options.layers) for one in chosen if one.mode != "generate"]
    for workload in timed:
        for name in wanted:
            rows.append(first_calls.measured(workload, name, setting.device))
            print(
                f"{workload} {name}: {rows[-1].cold_s:.1f} s, {rows[-1].warm_s:.1f} s", flush=True
            )
            if path is not None:
                first_calls.write(path, rows[-1:])
    print(first_calls.table(rows))
    return 0


def _output(options: argparse.Namespace, device: torch.device, kind: str) -> Path | None:
    """Returns the results file: that of the command line, or by default that of the GPU.

    By default a CPU and tiny models have none.
    """
    if options.output is not None or device.type != "cuda" or options.tiny:
        path: Path | None = options.output
        return path
    slug = operator_results.device_slug(torch.cuda.get_device_name(device))
    return _RESULTS / f"{kind}_{slug}.csv"


def _measure(plan: list[list[Work]], setting: Setting, options: argparse.Namespace) -> int:
    name = torch.cuda.get_device_name(setting.device) if setting.device.type == "cuda" else "CPU"
    path = _output(options, setting.device, "rest" if options.rest else "models")
    print(
        f"{name}, torch {torch.__version__}; results to {path or 'the terminal only'}", flush=True
    )
    rows, missing = _run_all(plan, setting, options, path)
    table = rest.table if options.rest else page.table
    print(table(rows if path is None else results.read(path)))
    # A missing row of fusedops is an error; a missing row of a peer is not.
    return 1 if missing else 0


def _run_all(
    plan: list[list[Work]], setting: Setting, options: argparse.Namespace, path: Path | None
) -> tuple[list[results.Row], int]:
    """Measures into the file; returns the rows, and how many of fusedops are missing."""
    deadline = time.perf_counter() + (math.inf if options.budget is None else options.budget)
    rows: list[results.Row] = []
    missing = 0
    for stage in plan:
        work = without(stage, _done(path)) if options.resume and path is not None else stage
        if setting.device.type == "cuda" and options.jobs:
            _compile_ahead(work, setting.device, options.jobs, deadline)
        for item in work:
            started = time.perf_counter()
            if started > deadline:
                print(
                    f"stopped before {item.workload}: the budget of {options.budget:.0f} s is spent; --resume goes on"
                )
                return rows, missing
            print(item.workload, flush=True)
            new = run_work(item, setting)
            rows += new
            expected = sum(name in OURS for name in item.providers)
            missing += expected - sum(row.provider in OURS for row in new)
            if path is not None:
                results.write(path, new)
            print(f"  {time.perf_counter() - started:.1f} s", flush=True)
    return rows, missing


def _compile_ahead(work: Sequence[Work], device: torch.device, jobs: int, deadline: float) -> None:
    started = time.perf_counter()
    if started > deadline:
        return
    # Half of the time is left to measure what was compiled.
    seconds = min((deadline - started) / 2, 3600.0)
    done, todo = ahead.compile_ahead(work, jobs=jobs, device=device, seconds=seconds)
    if todo:
        print(
            f"compiled {done} of {todo} ahead in {time.perf_counter() - started:.0f} s", flush=True
        )


def _done(path: Path) -> set[results.Key]:
    """Returns the keys of the file's rows at this commit."""
    commit = operator_results.commit()
    return {row.key for row in results.read(path) if row.commit == commit}
