"""Compiles functions ahead in worker processes, as `benchmarks.warm` does operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from .. import providers as operator_providers
from .. import timing, warm
from .providers import step

__all__ = ["Task", "compile_ahead"]

# A workload, and the provider and the mode to compile.
Task = tuple[Any, str, str]
Build = Callable[[str, Any], Callable[..., Any]]


def compile_ahead(
    todo: Sequence[Task],
    build: Build,
    *,
    jobs: int,
    device: torch.device,
    seconds: float | None = None,
) -> int:
    """Compiles in ``jobs`` processes until all is done or the seconds are over.

    Args:
        todo: what to compile.
        build: returns the callable of a provider for a workload.
        jobs: the number of processes.
        device: the device of the tensors.
        seconds: no task starts after this long; None for no limit.

    Returns:
        The number of compiled tasks. The measuring process compiles the others, and reports errors.
    """
    if not todo:
        return 0
    try:
        with warm.workers(min(jobs, len(todo)), device) as pool:
            futures = [pool.submit(_compile, task, build, device) for task in todo]
            done, _ = wait(futures, timeout=seconds)
            pool.shutdown(cancel_futures=True)  # waits for tasks that have started
    except BrokenProcessPool:
        # The processes could not start.
        return 0
    return sum(future.exception() is None for future in done)


def _compile(task: Task, build: Build, device: torch.device) -> None:
    """Calls the provider in the mode, as the measuring process will."""
    workload, provider, mode = task
    operator_providers.fresh_compiler()
    call = build(provider, workload)
    tensors = workload.tensors(device)
    with timing.mode_context(mode):
        step(call, tensors, mode)()
    if device.type == "cuda":
        torch.cuda.synchronize()
        del tensors
        torch.cuda.empty_cache()
