"""Compiling ahead in worker processes, as `benchmarks.warm` does for operators."""

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

_TRIES, _PAUSE_S = 3, 10.0


def compile_ahead(
    work: Sequence[Work], *, jobs: int, device: torch.device, seconds: float
) -> tuple[int, int]:
    """Compiles in ``jobs`` processes until all is done or the seconds are over.

    Each holds a whole model while it compiles: as many should run as fit into the device's memory.

    Returns:
        how many were compiled, of how many. The measuring process compiles the others, and reports
        what fails.
    """
    # Only in these modes do shapes stay the same.
    timed = [item for item in work if item.workload.mode in ("train", "infer")]
    todo = [(item.workload, name) for item in timed for name in item.providers if name in COMPILING]
    if not todo:
        return 0, 0
    try:
        with warm.workers(min(jobs, len(todo)), device) as pool:
            futures = [pool.submit(_compile, workload, name, device) for workload, name in todo]
            done, _ = wait(futures, timeout=seconds)
            pool.shutdown(cancel_futures=True)  # what has begun is let finish
    except BrokenProcessPool:  # they could not start: the measuring process compiles
        return 0, len(todo)
    return sum(not future.cancelled() and future.exception() is None for future in done), len(todo)


def _compile(workload: Workload, name: str, device: torch.device) -> None:
    """One step as the measuring process will run it; where memory is short, later again."""
    for left in reversed(range(_TRIES)):
        try:
            _step(workload, name, device)
            return
        except torch.OutOfMemoryError:
            if not left:
                raise
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        time.sleep(_PAUSE_S)


def _step(workload: Workload, name: str, device: torch.device) -> None:
    operator_providers.fresh_compiler()
    built = contender(name, workload, device, Text(device))
    with built.in_force():
        built.step()
    measuring.synchronize(device)
