"""The providers that run a function.

They are `fusedops.rowwise`, this package's hand-written operator, eager PyTorch and torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import fusedops

from .. import timing
from .workloads import Workload

__all__ = ["PROVIDERS", "build", "offered", "step"]

# In the order of measuring.
PROVIDERS = ("rowwise", "by_hand", "eager", "compile", "compile_max_autotune")
_MODES = {"compile": None, "compile_max_autotune": "max-autotune-no-cudagraphs"}


def offered(workload: Workload, wanted: Sequence[str] = PROVIDERS) -> list[str]:
    """Returns the wanted providers that can run the function: not all have it by hand."""
    return [name for name in wanted if name != "by_hand" or workload.by_hand is not None]


def build(provider: str, workload: Workload) -> Callable[..., Any]:
    """Returns the function as a provider runs it."""
    if provider == "rowwise":
        return workload.called(fusedops.rowwise(workload.function, strict=True))
    if provider == "by_hand":
        assert workload.by_hand is not None
        return workload.by_hand
    call = workload.called(workload.function)
    if provider == "eager":
        return call
    return torch.compile(call, fullgraph=True, dynamic=False, mode=_MODES[provider])


def step(call: Callable[..., Any], tensors: tuple[Tensor, ...], mode: str) -> timing.Step:
    """Returns a step: a forward, and in the mode "fwd_bwd" a backward with random cotangents."""
    # `timing` passes arguments by name, and the functions take them by position.
    named = {f"t{i}": tensor for i, tensor in enumerate(tensors)}

    def positional(**arguments: Tensor) -> Any:
        return call(*arguments.values())

    if mode == "fwd":
        return timing.Forward(positional, named)
    outputs = call(*tensors)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    cotangents = tuple([torch.randn_like(out) for out in outputs])
    inputs = tuple([tensor for tensor in tensors if tensor.requires_grad])
    return timing.Train(positional, named, inputs, cotangents)
