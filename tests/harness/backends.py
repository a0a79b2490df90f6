"""A backend whose graphs run without being compiled, and what its results are held to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

from fusedops.backend import entry, storing
from fusedops.backend.report import CompileReport
from support import DEVICE


class Backend:
    """Makes operators of a graph's regions, and runs the graph without compiling it."""

    def __init__(self) -> None:
        self.report = CompileReport()
        self.saved: list[Tensor] = []  # fake tensors
        self.backwards: list[torch.fx.Graph] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        before = len(self.report.left)
        made = entry._with_operators(gm, inputs, self.report)
        path = storing.stored_at(gm, inputs)
        if path is not None and len(self.report.left) == before:
            made = storing.write(path, gm, made, self.report.programs)

        def forward(graph: torch.fx.GraphModule, _: Any) -> Any:
            values = [
                node.meta.get("val")
                for node in graph.graph.find_nodes(op="output")[0].all_input_nodes
                if node.op == "call_function"
            ]
            self.saved += [value for value in values if isinstance(value, Tensor)]
            return make_boxed_func(graph.forward)

        def backward(graph: torch.fx.GraphModule, _: Any) -> Any:
            self.backwards.append(graph.graph)
            return make_boxed_func(graph.forward)

        with entry._autocast_of(self.report):
            compile_ = aot_autograd(
                fw_compiler=forward, bw_compiler=backward, keep_inference_input_mutations=True
            )
            return compile_(made, inputs)


class PostNorm(nn.Module):
    """A feed-forward part as BERT's."""

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
    """The output, and the gradients of parameters and inputs."""
    leaves = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    output = model(*leaves)
    wanted = [t for t in (*module.parameters(), *leaves) if t.requires_grad]
    return [output, *torch.autograd.grad(output, wanted, cotangent.to(output.dtype))]


def _moved(module: nn.Module, draw: int) -> nn.Module:
    """A copy whose parameters are moved by a unit in the last place, up or down."""
    generator, moved = torch.Generator().manual_seed(draw), copy.deepcopy(module)
    for parameter in moved.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter) * 2 - 1
        parameter.data *= 1 + torch.finfo(parameter.dtype).eps * signs
    return moved


def check(
    found: Sequence[Tensor],
    module: nn.Module,
    inputs: Sequence[Tensor],
    cotangent: Tensor,
    eps: float,
) -> None:
    """No farther from fp64 than four times what eager is, in the worst of four samples, and four units of the largest number.

    The samples are eager runs with parameters moved by a unit in the last place: each is rounded
    otherwise. A chain of roundings in another order differs by a few times what they do.
    """
    modules = [module, *[_moved(module, draw) for draw in range(3)]]
    eager = [results(other, other, inputs, cotangent) for other in modules]
    exact = copy.deepcopy(module).double()
    with torch.autocast(DEVICE.type, enabled=False):
        arguments = [t.double() if t.is_floating_point() else t for t in inputs]
        wanted = results(exact, exact, arguments, cotangent.double())
    for number, (ours, best) in enumerate(zip(found, wanted, strict=True)):
        theirs = [sample[number] for sample in eager]
        assert ours.dtype == theirs[0].dtype and ours.shape == best.shape
        allowed = max([(other.double() - best).abs().max() for other in theirs])
        assert (ours.double() - best).abs().max() <= 4 * (allowed + eps * best.abs().max()), number
