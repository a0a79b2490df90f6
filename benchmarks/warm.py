"""Compiles ahead: worker processes fill the caches on disk, and the measuring process only loads.

torch.compile takes seconds a shape and mode on one core, and a machine with a GPU has many. The
workers end before anything is timed.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from fusedops.core.spec import Shape, Spec

from . import timing
from .cases import DTYPES, Case, discover
from .providers import build, fresh_compiler
from .sweep import Work

__all__ = ["Task", "compile_ahead", "loaded", "settle_compiler", "tasks", "workers"]

_NOTHING_TO_COMPILE = ("eager", "eager_combined")


@dataclass(frozen=True)
class Task:
    """A case as a worker process is told of it, and what to call there."""

    op: str
    sides: Shape
    dtype: str
    pairs: tuple[tuple[str, str], ...]  # (mode, provider)


def tasks(work: Iterable[Work]) -> list[Task]:
    """The tasks of compiling that this work needs."""
    results = []
    for item in work:
        pairs = tuple((mode, name) for mode, name in item.pairs if name not in _NOTHING_TO_COMPILE)
        if pairs:
            results.append(Task(item.case.op, item.case.sides, item.case.dtype_name, pairs))
    return results


def settle_compiler() -> None:
    """Makes the settings on which the keys of the compilers' caches depend, in each process alike.

    Inductor chooses among its configs by timing them, and writes the choice down. A choice made
    while many workers share the GPU would be a poor one, so it is not written, and the measuring
    process times them itself.
    """
    # Inductor moves Triton's cache once it has compiled; kernels from before would not be found
    # after.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    # Both caches' keys are pickles, and pickle names a constant of torch after the first module
    # that holds it. In a worker that would be this process's main module under another name.
    sys.modules.pop("__mp_main__", None)
    # The environment too, as a worker may import Inductor, which starts as many processes as this
    # says, before.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch._inductor.config as config

    config.compile_threads = 1
    config.autotune_local_cache = False


def compile_ahead(todo: Sequence[Task], *, jobs: int, device: torch.device, seconds: float) -> int:
    """Compiles in ``jobs`` processes until all is done or the seconds are over.

    Returns how many cases were done.

    What a worker cannot compile, or all of them if they cannot start, the measuring process meets
    again, and reports.
    """
    if not todo:
        return 0
    try:
        with workers(min(jobs, len(todo)), device) as pool:
            done, _ = wait([pool.submit(_compile, task, device) for task in todo], timeout=seconds)
            pool.shutdown(cancel_futures=True)  # what has begun is let finish
    except BrokenProcessPool:
        return 0
    return sum(future.exception() is None for future in done)


def loaded() -> str:
    """How many graphs this process found compiled so far, and how many it did not, for the terminal."""
    from torch._dynamo.utils import counters

    seen = counters["inductor"]
    return f"{seen['fxgraph_cache_hit']} graphs found compiled, {seen['fxgraph_cache_miss']} compiled here"


def workers(jobs: int, device: torch.device) -> ProcessPoolExecutor:
    """Processes that compile as this one does.

    Each imports torch for itself: importing Inductor may touch CUDA, which no fork survives.
    """
    settle_compiler()
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin, (device,))


def _begin(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    settle_compiler()


@cache
def _specs() -> dict[str, Spec]:
    return {spec.name: spec for spec in discover()}


def _compile(task: Task, device: torch.device) -> None:
    """Calls each provider as the gate will: with autograd, and without it for the forward alone."""
    fresh_compiler()
    case = Case(_specs()[task.op], task.sides, DTYPES[task.dtype])
    sample = case.spec.benchmark(case.sides, case.dtype, device)
    leaves = tuple(
        t.requires_grad_()
        for t in sample.tensors.values()
        if t is not None and t.is_floating_point()
    )
    arguments = {**sample.tensors, **sample.options}
    for name in dict.fromkeys(name for _, name in task.pairs):
        with suppress(Exception):
            call = build(name, case.spec)
            if call is None:
                continue
            out = call(**arguments)
            outputs = out if isinstance(out, tuple) else (out,)
            torch.autograd.grad(outputs, leaves, tuple(torch.randn_like(o) for o in outputs))
            del out, outputs
            if ("fwd", name) in task.pairs:
                with timing.mode_context("fwd"):
                    call(**arguments)
    if device.type == "cuda":
        torch.cuda.synchronize()
        del sample, leaves, arguments
        torch.cuda.empty_cache()
