"""`fusedops.compile` reads activations that a model returns once in the backward, with their derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd

from fusedops.backend import entry
from fusedops.backend.report import CompileReport
from support import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]

_ROWS, _COLUMNS = 6, 40


def _capped(product: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Soft-capped logits, and a loss."""
    logits = torch.tanh(product / 2) * 2
    return (logits.flatten() - 1).square().mean(), logits


def _bare(product: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The derivative reads the result itself."""
    activation = torch.tanh(product)
    return (activation - 1).square().mean(), activation


def _gated(product: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The derivative reads the product."""
    activation = torch.nn.functional.gelu(product)
    return (activation - 1).square().mean(), activation


def _multiplied(product: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix product reads what is returned: to compute it again would write it again."""
    activation = torch.nn.functional.gelu(product)
    return (activation @ other).square().mean(), activation


def _linear(product: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Nothing else of the activation is saved."""
    logits = product * 2
    return (logits - 1).square().mean(), logits


def _full(nodes: Sequence[torch.fx.Node]) -> int:
    """How many of the nodes are tensors as large as the product, or views of one, such as the transposed."""
    values = [node.meta.get("val") for node in nodes]
    return sum(isinstance(value, Tensor) and value.numel() == _ROWS * _COLUMNS for value in values)


@pytest.mark.parametrize(
    "function, written, read, again",
    [
        (_capped, 2, 1, 1),
        (_gated, 2, 1, 0),
        (_bare, 1, 1, 0),
        (_multiplied, 3, 2, 0),
        (_linear, 1, 1, 0),
    ],
)
def test_activations_that_are_returned(
    function: Callable[..., Any], written: int, read: int, again: int
) -> None:
    """The forward writes its product or what is returned or both, and the backward reads no more of them than it needs."""
    x, w = (
        torch.randn(*shape, device=DEVICE, requires_grad=True)
        for shape in ((_ROWS, 16), (16, _COLUMNS))
    )
    other = torch.randn(_COLUMNS, 8, device=DEVICE, requires_grad=True)
    graphs: list[torch.fx.Graph] = []

    def model(x: Tensor, w: Tensor) -> Any:
        return function(x @ w, other)

    def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        compiled = entry._with_operators(gm, inputs, CompileReport())
        partition = functools.partial(min_cut_rematerialization_partition, compiler="inductor")
        return aot_autograd(
            fw_compiler=keep,
            bw_compiler=keep,
            partition_fn=partition,
            decompositions=core_aten_decompositions(),
        )(compiled, inputs)

    results = []
    for call in (model, torch.compile(model, backend=backend)):
        loss, returned = call(x, w)
        total = loss + (returned * torch.linspace(0, 1, _COLUMNS, device=DEVICE)).sum()
        results.append([loss, returned, *torch.autograd.grad(total, (x, w))])
    for ours, eager in zip(*reversed(results), strict=True):
        # Sums of at most 40 products, in another order.
        torch.testing.assert_close(
            ours, eager, rtol=0, atol=40 * 2**-22 * float(eager.detach().abs().max())
        )
    forward, backward = graphs
    assert _full(forward.output_node().all_input_nodes) == written
    # The backward also reads the gradient of the returned tensor.
    assert _full(backward.find_nodes(op="placeholder")) == read + 1
    assert len(backward.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)) == again
