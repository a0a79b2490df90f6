"""Compiles ahead: worker processes fill the caches on disk, from which the measuring process loads.

For each shape and mode torch.compile takes seconds on one core, and a machine with a GPU has many
cores. The workers end before anything is timed.
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

__all__ = ["Task", "compile_ahead", "initialize", "loaded", "settle_compiler", "tasks", "workers"]

_NOTHING_TO_COMPILE = ("eager", "eager_combined")


@dataclass(frozen=True)
class Task:
    """A case to compile in a worker process: names instead of objects, and what to call."""

    op: str
    sides: Shape
    dtype: str
    pairs: tuple[tuple[str, str], ...]  # (mode, provider)


def tasks(work: Iterable[Work]) -> list[Task]:
    """Returns the tasks of compiling that this work needs."""
    results = []
    for item in work:
        pairs = tuple((mode, name) for mode, name in item.pairs if name not in _NOTHING_TO_COMPILE)
        if pairs:
            results.append(Task(item.case.op, item.case.sides, item.case.dtype_name, pairs))
    return results


def settle_compiler() -> None:
    """Gives each process the settings on which the keys of the compilers' caches depend.

    With equal keys, one process loads what another has compiled. Inductor also times its configs and caches the fastest. While many workers share the GPU the
    choice would be poor. So it is not cached, and the measuring process times the configs itself.
    """
    # Inductor changes Triton's cache directory when it first compiles. Without a fixed one, kernels
    # that were compiled before would be compiled again after.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    # The keys of both caches are pickles. Pickle names a constant of torch after the first module
    # that has it. In a worker that would be ``__mp_main__``, the parent's main module.
    sys.modules.pop("__mp_main__", None)
    # One compile thread. The variable is set too, because a worker may import Inductor before it
    # calls this function, and Inductor then starts as many processes as the variable says.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch._inductor.config as config

    config.compile_threads = 1
    config.autotune_local_cache = False


def compile_ahead(todo: Sequence[Task], *, jobs: int, device: torch.device, seconds: float) -> int:
    """Compiles in ``jobs`` processes until all is done or the seconds are over.

    If a worker cannot compile a case, or no worker can start, the measuring process compiles the
    case and reports the error.

    Returns:
        The number of compiled cases.
    """
    if not todo:
        return 0
    try:
        with workers(min(jobs, len(todo)), device) as pool:
            done, _ = wait([pool.submit(_compile, task, device) for task in todo], timeout=seconds)
            pool.shutdown(cancel_futures=True)  # waits for tasks that have started
    except BrokenProcessPool:
        return 0
    return sum(future.exception() is None for future in done)


def loaded() -> str:
    """Returns the numbers of graphs that this process loaded and compiled, for the terminal."""
    from torch._dynamo.utils import counters

    counts = counters["inductor"]
    loads, compilations = counts["fxgraph_cache_hit"], counts["fxgraph_cache_miss"]
    return f"{loads} graphs loaded from the cache, {compilations} compiled here"


def workers(jobs: int, device: torch.device) -> ProcessPoolExecutor:
    """Returns a pool of processes that compile with the same settings as this one.

    They are spawned: importing Inductor may initialise CUDA, which does not work in a forked child.
    """
    settle_compiler()
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initialize, (device,))


def initialize(device: torch.device) -> None:
    """Prepares a worker process."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    settle_compiler()


@cache
def _specs() -> dict[str, Spec]:
    return {spec.name: spec for spec in discover()}


def _compile(task: Task, device: torch.device) -> None:
    """Calls each provider as the check of its values will: with and without autograd."""
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
        # The measuring process meets the same error and reports it.
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
