"""`fusedops.compile` saves one tensor for an activation that the model returns, not two."""

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
    """Return a loss and soft-capped logits: the logits can be computed again from the tanh."""
    logits = torch.tanh(product / 2) * 2
    return (logits.flatten() - 1).square().mean(), logits


def _bare(product: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss and a tanh, whose derivative reads the result itself."""
    activation = torch.tanh(product)
    return (activation - 1).square().mean(), activation


def _gated(product: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss and a GELU, whose derivative reads the product."""
    activation = torch.nn.functional.gelu(product)
    return (activation - 1).square().mean(), activation


def _multiplied(product: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss and a GELU that a matrix product reads, so that recomputing would write it."""
    activation = torch.nn.functional.gelu(product)
    return (activation @ other).square().mean(), activation


def _linear(product: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss and scaled logits, for whose derivative nothing else is saved."""
    logits = product * 2
    return (logits - 1).square().mean(), logits


def _count_full(nodes: Sequence[torch.fx.Node]) -> int:
    """Return how many of the nodes are tensors as large as the product, or views of such."""
    values = [node.meta.get("val") for node in nodes]
    return sum(isinstance(value, Tensor) and value.numel() == _ROWS * _COLUMNS for value in values)


@pytest.mark.parametrize(
    "function, written, read, recomputed",
    [
        (_capped, 2, 1, 1),
        (_gated, 2, 1, 0),
        (_bare, 1, 1, 0),
        (_multiplied, 3, 2, 0),
        (_linear, 1, 1, 0),
    ],
)
def test_returned_activations_are_recomputed_if_that_saves_a_read(
    function: Callable[..., Any], written: int, read: int, recomputed: int
) -> None:
    """The test counts full tensors.

    Args:
        function: the loss and the returned activation of a product.
        written: tensors that the forward writes.
        read: tensors that the backward reads.
        recomputed: calls of tanh in the backward.
    """
    x, w = (
        torch.randn(*shape, device=DEVICE, requires_grad=True)
        for shape in ((_ROWS, 16), (16, _COLUMNS))
    )
    other = torch.randn(_COLUMNS, 8, device=DEVICE, requires_grad=True)
    graphs: list[torch.fx.Graph] = []

    def model(x: Tensor, w: Tensor) -> Any:
        return function(x @ w, other)

    def record(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        compiled = entry._with_operators(gm, inputs, CompileReport())
        partition = functools.partial(min_cut_rematerialization_partition, compiler="inductor")
        return aot_autograd(
            fw_compiler=record,
            bw_compiler=record,
            partition_fn=partition,
            decompositions=core_aten_decompositions(),
        )(compiled, inputs)

    results = []
    for call in (model, torch.compile(model, backend=backend)):
        loss, returned = call(x, w)
        total = loss + (returned * torch.linspace(0, 1, _COLUMNS, device=DEVICE)).sum()
        results.append([loss, returned, *torch.autograd.grad(total, (x, w))])
    for eager, ours in zip(*results, strict=True):
        # Sums of at most 40 products, in another order.
        torch.testing.assert_close(
            ours, eager, rtol=0, atol=40 * 2**-22 * float(eager.detach().abs().max())
        )
    forward, backward = graphs
    assert _count_full(forward.output_node().all_input_nodes) == written
    # The backward also reads the gradient of the returned tensor.
    assert _count_full(backward.find_nodes(op="placeholder")) == read + 1
    tanh_calls = backward.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    assert len(tanh_calls) == recomputed
