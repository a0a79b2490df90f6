"""Measures the first call of a loop over slices: forward and backward, with empty caches.

The caches are Inductor's, Triton's and fusedops'.
"""

from __future__ import annotations

import tempfile
import time
from importlib import import_module
from pathlib import Path

import torch

from .. import fresh
from ..rowwise.providers import step
from .providers import build
from .workloads import Workload

__all__ = ["LIMIT", "PROVIDERS", "seconds_of"]

PROVIDERS = ("backend", "foreach", "compile")
LIMIT = 200.0  # seconds of the process


def seconds_of(
    workload: Workload, provider: str, device: torch.device, limit: float = LIMIT
) -> float:
    """Returns the seconds of the first call in a new process.

    Raises:
        TimeoutError: the process did not end within the limit.
        RuntimeError: the call failed.
    """
    with (
        tempfile.TemporaryDirectory(prefix="fusedops-benchmark-") as folder,
        fresh.caches(Path(folder)),
    ):
        return fresh.in_a_new_process(_first_call, workload, provider, device, limit=limit)


def _first_call(workload: Workload, provider: str, device: torch.device) -> float:
    """Returns the seconds of the first call.

    The first use of a device and the import of Inductor are not timed, because some providers
    import Inductor before their first call.
    """
    import_module("torch._inductor.compile_fx")
    tensors = workload.tensors(device)
    step(build("eager", workload), tensors, "fwd_bwd")()
    call = build(provider, workload)
    _synchronize(device)
    started = time.perf_counter()
    out = call(*tensors)
    outs = (out,) if isinstance(out, torch.Tensor) else tuple(out)
    torch.autograd.grad(outs, tensors, tuple([torch.ones_like(o) for o in outs]))
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
