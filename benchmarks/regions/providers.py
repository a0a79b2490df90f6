"""The two ways to run a region: as an operator, as `fusedops.compile` does, and by Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fusedops.backend.programs import source_of
from fusedops.backend.replacing import call_operator, results_of

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


def _operator(workload: Workload) -> fx.GraphModule:
    """Returns a graph that calls the operator of a region."""
    tensors = workload.tensors(workload.device)
    source = source_of(workload.graph, tensors)
    graph = fx.Graph()
    inputs = [_placeholder(graph, index, tensor) for index, tensor in enumerate(tensors)]
    dtypes = [tensor.dtype for tensor in tensors]
    reached = [tensor.requires_grad for tensor in tensors]
    call = call_operator(graph, source.program, inputs, inputs, dtypes, reached)
    results = results_of(graph, call, 0, source.program.count)
    graph.output(tuple([results[number] for number in source.output_numbers]))
    for node in graph.nodes:
        node.meta.clear()
    return fx.GraphModule(torch.nn.Module(), graph)


def _placeholder(graph: fx.Graph, index: int, tensor: Tensor) -> fx.Node:
    node = graph.placeholder(f"t{index}")
    node.meta["val"] = tensor
    return node
