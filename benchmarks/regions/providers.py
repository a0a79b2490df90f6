"""The two ways to run a region: as an operator, as `fusedops.compile` does, and by Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedops.backend.programs import source_of
from fusedops.tune.regions import operator_of

from .workloads import Workload

__all__ = ["PROVIDERS", "build"]

PROVIDERS = ("operator", "compile")


def build(provider: str, workload: Workload) -> Callable[..., Any]:
    """Returns the region as a provider runs it; it returns the results that have gradients."""
    if provider == "operator":
        call: Callable[..., Any] = _operator(workload)
    else:
        call = torch.compile(workload.graph, fullgraph=True, dynamic=False)

    def differentiable(*tensors: Tensor) -> tuple[Tensor, ...]:
        outs = call(*tensors)
        return tuple([out for out in outs if out.requires_grad]) or outs

    return differentiable


def _operator(workload: Workload) -> Callable[..., tuple[Tensor, ...]]:
    """Returns a function that calls the operator of a region."""
    tensors = workload.tensors(workload.device)
    source = source_of(workload.graph, tensors)
    call = operator_of(source, [item.requires_grad for item in workload.inputs], workload.device)

    def results(*tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = call(*tensors)
        return tuple([outputs[number] for number in source.output_numbers])

    return results
