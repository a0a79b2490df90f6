"""The providers that call a function for each slice.

They are `Rowwise.foreach`, this package's hand-written operator, and the loop: compiled by
`fusedops.compile` or torch.compile, or eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fusedops

from .workloads import Workload

__all__ = ["OURS", "PROVIDERS", "build", "offered"]

# In the order of measuring.
PROVIDERS = ("foreach", "backend", "operator", "compile", "eager")
OURS = PROVIDERS[:3]


def offered(workload: Workload, wanted: Sequence[str] = PROVIDERS) -> list[str]:
    """Returns the wanted providers that can run the function: not all have it by hand."""
    return [name for name in wanted if name != "operator" or workload.by_hand]


def build(provider: str, workload: Workload) -> Callable[..., Any]:
    """Returns a provider's callable, which takes the workload's tensors."""
    if provider == "foreach":
        return partial(_foreach, fusedops.rowwise(workload.function, strict=True), workload)
    if provider == "operator":
        return partial(_operator, workload)
    loop = workload.loop()
    if provider == "eager":
        return loop
    compiler = fusedops.compile if provider == "backend" else torch.compile
    return compiler(loop, fullgraph=True, dynamic=False)


def _foreach(function: Any, workload: Workload, *tensors: Tensor) -> Any:
    if not workload.joint:
        return function.foreach(*workload.by_argument(tensors))
    x, *vectors = tensors
    return function.foreach(x, *[v.flatten() for v in vectors], sizes=workload.widths)


def _operator(workload: Workload, *tensors: Tensor) -> Any:
    """Calls the operator, which takes the vectors of all slices as one tensor.

    Of separate slices it joins them first: the time has two copies of vectors.
    """
    operator: Any = fusedops.batched_layer_norm_tanh
    if workload.joint:
        return operator(*tensors, sizes=workload.widths)
    x, *vectors = workload.by_argument(tensors)
    return operator(x, *[torch.cat(list(v)) for v in vectors])
