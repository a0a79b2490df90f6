"""The compile backend without Inductor, and a check of its results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

from fusedops.backend import entry, prediction, storing
from fusedops.backend.report import CompileReport
from support import DEVICE


class Backend:
    """Replaces the regions of a graph by operators, and runs the graph without compiling it.

    Args:
        memory: what the backwards compute again: see `fusedops.compile`. By default PyTorch's
            partitioner without heuristics divides the graphs, and nothing is.
    Attributes:
        report: the report on all graphs.
        saved: the results of the forwards and the tensors that they save, as fake tensors.
        forwards: the graphs of the forwards.
        backwards: the graphs of the backwards.
    """

    def __init__(self, memory: str | None = None) -> None:
        self.memory = memory
        self.report = CompileReport()
        self.saved: list[Tensor] = []
        self.forwards: list[torch.fx.Graph] = []
        self.backwards: list[torch.fx.Graph] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        before = len(self.report.left)
        graph_module = entry._with_operators(gm, inputs, self.report)
        path = storing.stored_at(gm, inputs)
        if path is not None and len(self.report.left) == before:
            graph_module = storing.write(path, gm, graph_module, self.report.programs)

        def forward(graph: torch.fx.GraphModule, _: Any) -> Any:
            values = [
                node.meta.get("val")
                for node in graph.graph.find_nodes(op="output")[0].all_input_nodes
                if node.op == "call_function"
            ]
            self.forwards.append(graph.graph)
            self.saved += [value for value in values if isinstance(value, Tensor)]
            return make_boxed_func(graph.forward)

        def backward(graph: torch.fx.GraphModule, _: Any) -> Any:
            self.backwards.append(graph.graph)
            return make_boxed_func(graph.forward)

        def partition(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            entry._joint_pass(inputs, str(self.memory)).apply(graph.graph)
            graph.graph.lint()
            return min_cut_rematerialization_partition(graph, *args, **kwargs)

        options: dict[str, Any] = {} if self.memory is None else {"partition_fn": partition}
        with entry._autocast_of(self.report):
            compile_ = aot_autograd(
                fw_compiler=forward,
                bw_compiler=backward,
                keep_inference_input_mutations=True,
                **options,
            )
            return compile_(graph_module, inputs)


class PostNorm(nn.Module):
    """A feed-forward part with dropout, residual and norm, as in BERT."""

    def __init__(self, width: int = 24, p: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.dropout(self.down(F.gelu(self.up(x)))) + x)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def results(
    model: Callable[..., Any], module: nn.Module, inputs: Sequence[Tensor], cotangent: Tensor
) -> list[Tensor]:
    """Returns the output, and the gradients of parameters and inputs."""
    leaves = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    output = model(*leaves)
    variables = [t for t in (*module.parameters(), *leaves) if t.requires_grad]
    return [output, *torch.autograd.grad(output, variables, cotangent.to(output.dtype))]


def _moved(module: nn.Module, draw: int) -> nn.Module:
    """A copy with each parameter moved up or down by a unit in the last place, at random."""
    generator, moved = torch.Generator().manual_seed(draw), copy.deepcopy(module)
    for parameter in moved.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter) * 2 - 1
        parameter.data *= 1 + torch.finfo(parameter.dtype).eps * signs
    return moved


def check(
    actual: Sequence[Tensor],
    module: nn.Module,
    inputs: Sequence[Tensor],
    cotangent: Tensor,
    eps: float,
) -> None:
    """Asserts that errors are at most four times eager's, plus four units of the largest value.

    Eager's error is the largest of four runs: one of the module, and three with all parameters
    moved by a unit in the last place, which changes all roundings. The same operations in another
    order may be off by a few times as much.

    Args:
        actual: the output and gradients, as `results` returns them.
        module: the module in eager PyTorch.
        inputs: its inputs.
        cotangent: of the output.
        eps: the unit, relative to the largest value.
    """
    modules = [module, *[_moved(module, draw) for draw in range(3)]]
    eager = [results(sample, sample, inputs, cotangent) for sample in modules]
    exact = copy.deepcopy(module).double()
    with torch.autocast(DEVICE.type, enabled=False):
        arguments = [t.double() if t.is_floating_point() else t for t in inputs]
        expected = results(exact, exact, arguments, cotangent.double())
    for number, (ours, want) in enumerate(zip(actual, expected, strict=True)):
        theirs = [sample[number] for sample in eager]
        assert ours.dtype == theirs[0].dtype
        assert ours.shape == want.shape
        eager_error = max([(sample.double() - want).abs().max() for sample in theirs])
        error = (ours.double() - want).abs().max()
        assert error <= 4 * (eager_error + eps * want.abs().max()), number


def select_as_large(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Selects small regions as large ones: by bytes, not by launches, nor by neighbours.

    Args:
        set_attribute: sets an attribute of a module.
    """
    rates = replace(prediction.RATES, kernels=0.0, calls=0.0, sums=0.0, summed=3.0)
    set_attribute(prediction, "RATES", rates)
    set_attribute(prediction, "among_neighbours", lambda alone, *_: alone)
