"""The command ``python -m benchmarks regions``."""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from .. import commands, timing, warm
from .. import providers as operator_providers
from ..models.workloads import MODELS, named
from ..models.workloads import Workload as ModelWorkload
from ..models.workloads import workloads as model_workloads
from ..results import device_slug
from ..rowwise.ahead import compile_ahead
from ..rowwise.measuring import replayed
from ..runner import Machine, this_machine
from ..zoo import registry
from . import results
from .fitting import fitted
from .providers import PROVIDERS, build
from .workloads import Workload, regions_of

__all__ = ["add_options", "run"]

_RESULTS = Path(__file__).resolve().parent.parent / "results"
_MODES = ("train", "infer")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.set_defaults(command=run)
    parser.add_argument(
        "model",
        nargs="*",
        metavar="MODEL",
        help=f"also of the zoo; default: all of {', '.join(MODELS)}",
    )
    parser.add_argument("--mode", choices=_MODES, default="train", help="default: train")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="start no new model after this long"
    )
    parser.add_argument(
        "--predict",
        action="store_true",
        help="only print the table of the results file, and the rates that fit it best",
    )
    commands.add_options(parser, "regions")


def run(options: argparse.Namespace) -> int:
    """Times each kind of region of models both ways: as an operator, and by torch.compile."""
    path = options.output or _RESULTS / "regions_nvidia_h200.csv"
    if options.table or options.predict:
        rows = results.read(path)
        print(results.table(rows))
        if options.predict:
            print(fitted(rows))
        return 0
    if commands.lacks_gpu("regions"):
        return 2
    try:
        models = _workloads(options.model, options.mode)
    except ValueError as error:
        print(f"regions: {error}", file=sys.stderr)
        return 2
    device, machine = this_machine()
    path = options.output or _RESULTS / f"regions_{device_slug(device)}.csv"
    print(f"{machine.described(device)}; results to {path}", flush=True)
    found = _found(models, options, machine.device)
    status = _measure(found, options, machine, path)
    print(results.table([row for row in results.read(path) if row.commit == machine.commit]))
    return status


def _workloads(names: Sequence[str], mode: str) -> list[ModelWorkload]:
    """Returns the workloads of some models, which may be of the zoo; by default all others.

    Raises:
        ValueError: a model is not known.
    """
    if not names:
        return model_workloads((), [mode])
    workloads: list[ModelWorkload] = []
    for name in names:
        named("model", name, [*MODELS, *registry.MODELS])
        workloads += (model_workloads if name in MODELS else registry.workloads)([name], [mode])
    return workloads


Found = dict[ModelWorkload, list[Workload]]


def _found(
    models: Sequence[ModelWorkload], options: argparse.Namespace, device: torch.device
) -> Found:
    """Returns the regions of the models, each at its most important sizes."""
    warm.settle_compiler()
    first = {workload.name: workload for workload in reversed(models)}
    result: Found = {}
    for workload in reversed(first.values()):
        started = time.perf_counter()
        try:
            result[workload] = regions_of(workload, device)
        # The other models are measured, whatever a model raises.
        except Exception as error:  # noqa: BLE001
            print(f"{workload}: left out, {_described(error)}", file=sys.stderr, flush=True)
            continue
        finally:
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
        seconds = time.perf_counter() - started
        print(f"{workload}: {len(result[workload])} kinds of regions, {seconds:.0f} s", flush=True)
    return result


def _measure(found: Found, options: argparse.Namespace, machine: Machine, path: Path) -> int:
    """Measures into the file, and returns the exit status: one if an operator fails."""
    started = time.perf_counter()
    deadline = started + (math.inf if options.budget is None else options.budget)
    mode = "fwd_bwd" if options.mode == "train" else "fwd"
    # A function of several models is compiled once.
    distinct = {region.key: region for regions in found.values() for region in regions}
    todo = [(region, name, mode) for name in reversed(PROVIDERS) for region in distinct.values()]
    jobs = commands.jobs(options)
    if jobs:
        seconds = None if math.isinf(deadline) else (deadline - started) / 2
        done = compile_ahead(todo, build, jobs=jobs, device=machine.device, seconds=seconds)
        taken = time.perf_counter() - started
        print(f"compiled {done} of {len(todo)} ahead in {taken:.0f} s", flush=True)
    times: dict[str, dict[str, float]] = {}
    failed = 0
    for workload, regions in found.items():
        if time.perf_counter() > deadline:
            print(f"stopped before {workload}: the budget is spent")
            break
        for region in regions:
            if region.key not in times:
                times[region.key] = {name: _us(name, region, mode, machine) for name in PROVIDERS}
            failed += not region.reason and math.isnan(times[region.key]["operator"])
        rows = [_row(workload, region, times[region.key], machine) for region in regions]
        results.write(path, rows)
    return 1 if failed else 0


def _us(provider: str, region: Workload, mode: str, machine: Machine) -> float:
    """Returns the microseconds of a call; NaN if it fails, with the error on stderr."""
    operator_providers.fresh_compiler()
    try:
        sizes = sum([tensor.nbytes for tensor in region.tensors(machine.device)])
        count = timing.set_count(sizes, machine.l2_bytes)
        sets = [region.tensors(machine.device) for _ in range(count)]
        with timing.mode_context(mode):
            return replayed(build(provider, region), sets, mode)[0]
    # Whatever one raises, the others must be timed.
    except Exception as error:  # noqa: BLE001
        print(f"  {region.operators} {provider}: {_described(error)}", file=sys.stderr, flush=True)
        return math.nan
    finally:
        torch.cuda.empty_cache()


def _row(
    workload: ModelWorkload, region: Workload, us: dict[str, float], machine: Machine
) -> results.Row:
    works = region.works(has_backward=workload.mode == "train")
    return results.Row(
        model=workload.name,
        mode=workload.mode,
        operators=region.operators,
        key=region.key,
        shape=region.shape_name,
        dtypes=region.dtype_name,
        count=region.count,
        reason=region.reason,
        operator_us=us["operator"],
        compile_us=us["compile"],
        operator=works.operator,
        compile=works.inductor,
        commit=machine.commit,
        torch=machine.torch,
        triton=machine.triton,
    )


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300]}"
