"""Compiles models ahead in worker processes, as `benchmarks.warm` does operators."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool

import torch

from .. import providers as operator_providers
from .. import warm
from . import measuring
from .providers import COMPILING, contender
from .runner import Work
from .text import Text
from .workloads import Workload

__all__ = ["compile_ahead"]

_TRIES, _PAUSE_SECONDS = 3, 10.0


def compile_ahead(
    work: Sequence[Work], *, jobs: int, device: torch.device, seconds: float
) -> tuple[int, int]:
    """Compiles in ``jobs`` processes until all is done or the seconds are over.

    Each process has a whole model while it compiles, so as many should run as fit into the device's
    memory.

    Returns:
        The number of models that were compiled, and that of all. The measuring process compiles the
        others, and reports errors.
    """
    # In the other modes shapes change, so the compiled models would not be used.
    todo = []
    for item in work:
        if item.workload.mode in ("train", "infer"):
            todo += [(item.workload, name) for name in item.providers if name in COMPILING]
    if not todo:
        return 0, 0
    try:
        with warm.workers(min(jobs, len(todo)), device) as pool:
            futures = [pool.submit(_compile, workload, name, device) for workload, name in todo]
            done, _ = wait(futures, timeout=seconds)
            pool.shutdown(cancel_futures=True)  # waits for tasks that have started
    except BrokenProcessPool:
        # The processes could not start.
        return 0, len(todo)
    count = sum(not future.cancelled() and future.exception() is None for future in done)
    return count, len(todo)


def _compile(workload: Workload, name: str, device: torch.device) -> None:
    """Runs a step as the measuring process will; if memory is short, it tries again later."""
    for tries_left in reversed(range(_TRIES)):
        try:
            _step(workload, name, device)
            return
        except torch.OutOfMemoryError:
            if not tries_left:
                raise
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        time.sleep(_PAUSE_SECONDS)


def _step(workload: Workload, name: str, device: torch.device) -> None:
    operator_providers.fresh_compiler()
    built = contender(name, workload, device, Text(device))
    with built.context():
        built.step()
    measuring.synchronize(device)
