"""Compiles models ahead in worker processes, as `benchmarks.warm` does operators."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from .. import providers as operator_providers
from .. import warm
from ..fresh import Worker
from . import measuring
from .providers import STARTING, contender
from .runner import Work, free
from .text import Text
from .workloads import Workload

__all__ = ["compile_ahead", "waiting_for_memory"]

_R = TypeVar("_R")

_TRIES, _PAUSE_SECONDS = 3, 10.0

Task = tuple[Workload, str]  # the model, and the provider that compiles it


def compile_ahead(
    work: Sequence[Work], *, jobs: int, device: torch.device, seconds: float, limit: float = 3600.0
) -> tuple[int, int]:
    """Compiles in ``jobs`` processes until all is done or the seconds are over.

    Each process has a whole model while it compiles, so as many should run as fit into the device's
    memory. A process that crashes, or needs more than ``limit`` seconds for a model, is replaced.

    Returns:
        The number of models that were compiled, and that of all. The measuring process compiles the
        others, and reports errors.
    """
    todo = list[Task]()
    for item in work:
        # In these modes shapes change, so the compiled models would not be used.
        if item.workload.mode not in ("generate", "loss"):
            todo += [(item.workload, name) for name in item.providers if name in STARTING]
    if not todo:
        return 0, 0
    warm.settle_compiler()
    queue, count, deadline = deque(todo), min(jobs, len(todo)), time.perf_counter() + seconds
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(_compile_from, queue, device, deadline, limit) for _ in range(count)]
    return sum(future.result() for future in futures), len(todo)


def _compile_from(queue: deque[Task], device: torch.device, deadline: float, limit: float) -> int:
    """Compiles tasks of the queue in a process, and returns how many."""
    count = 0
    with Worker(warm.initialize, device) as worker:
        while queue:
            try:
                workload, name = queue.popleft()
            except IndexError:  # another thread has taken it
                break
            seconds = min(limit, deadline - time.perf_counter())
            if seconds <= 0:
                break
            try:
                worker.run(_compile, workload, name, device, limit=seconds)
                count += 1
            except (RuntimeError, TimeoutError):
                # After an error on the device, its process can compile nothing else.
                worker.kill()
    return count


def _compile(workload: Workload, name: str, device: torch.device) -> None:
    """Runs a step as the measuring process will."""
    waiting_for_memory(lambda: _step(workload, name, device), device)


def waiting_for_memory(function: Callable[[], _R], device: torch.device) -> _R:
    """Returns the function's result; if memory is short, it calls the function again later."""
    for _ in range(_TRIES - 1):
        try:
            return function()
        except torch.OutOfMemoryError:
            pass
        finally:
            free(device)
        time.sleep(_PAUSE_SECONDS)
    try:
        return function()
    finally:
        free(device)


def _step(workload: Workload, name: str, device: torch.device) -> None:
    operator_providers.fresh_compiler()
    built = contender(name, workload, device, Text(device))
    with built.context():
        built.step()
    measuring.synchronize(device)
