"""Compiles functions ahead in worker processes, as `benchmarks.warm` does operators."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool

import torch

from .. import providers as operator_providers
from .. import timing, warm
from ..cases import MODES
from .providers import build, step
from .workloads import Workload, workloads

__all__ = ["compile_ahead"]

# The function's name, its shape, and the provider, by which a worker looks up the workload.
_Task = tuple[str, tuple[int, int], str]


def compile_ahead(
    work: Sequence[tuple[Workload, str]], *, jobs: int, device: torch.device
) -> tuple[int, int]:
    """Compiles pairs of workload and provider in ``jobs`` processes.

    Returns:
        The number of pairs that were compiled, and that of all. The measuring process compiles the
        others, and reports errors.
    """
    todo = [(workload.name, workload.shape, provider) for workload, provider in work]
    if not todo:
        return 0, 0
    try:
        with warm.workers(min(jobs, len(todo)), device) as pool:
            done, _ = wait([pool.submit(_compile, task, device) for task in todo])
    except BrokenProcessPool:
        # The processes could not start.
        return 0, len(todo)
    return sum(future.exception() is None for future in done), len(todo)


def _compile(task: _Task, device: torch.device) -> None:
    """Calls the provider in each mode, as the measuring process will."""
    name, shape, provider = task
    operator_providers.fresh_compiler()
    (workload,) = [candidate for candidate in workloads([name]) if candidate.shape == shape]
    call = build(provider, workload)
    tensors = workload.tensors(device)
    for mode in MODES:
        with timing.mode_context(mode):
            step(call, tensors, mode)()
    if device.type == "cuda":
        torch.cuda.synchronize()
        del tensors
        torch.cuda.empty_cache()
