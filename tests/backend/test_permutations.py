"""`fusedops.compile` computes gradients of permuted rows by the inverse order, without additions.

Gradients of other indexed rows are left to PyTorch, which adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from backends import randn
from fusedops.backend import entry
from fusedops.backend.fx import aten_name
from fusedops.backend.report import CompileReport
from support import DEVICE, KERNEL_PATH

ROWS = 12
TIMES = 3  # experts of each row, so that there are ROWS * TIMES ids


# Functions whose indices are permutations, or quotients of permutations and a number.
def _experts(x: Tensor, ids: Tensor) -> Tensor:
    """Compute a mixture of experts: sort copies of rows by expert, scale them, and sort back."""
    order = ids.argsort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=x.device)
    scale = torch.linspace(1.0, 2.0, order.shape[0], device=x.device, dtype=x.dtype)
    return (x[order // TIMES] * scale[:, None])[back].view(ROWS, TIMES, -1).sum(1)


def _scattered(x: Tensor, ids: Tensor) -> Tensor:
    _, order = ids[:ROWS].sort()
    back = torch.zeros_like(order).scatter_(0, order, torch.arange(0, ROWS, device=x.device))
    return x[order].exp()[back] * x[order.div(1, rounding_mode="floor")]


def _ranks(x: Tensor, ids: Tensor) -> Tensor:
    return x.flatten()[ids.repeat(2)[: 2 * ROWS].argsort().argsort()]


# Functions whose indices are not permutations, or may not be.
def _repeated(x: Tensor, ids: Tensor) -> Tensor:
    return x[ids[:ROWS]]


def _by_value(x: Tensor, ids: Tensor) -> Tensor:
    return x[ids[:ROWS].sort()[0]]


def _of_the_largest(x: Tensor, ids: Tensor) -> Tensor:
    return x[ids.view(ROWS, TIMES).max(1)[1]]


def _half_of_the_rows_twice(x: Tensor, ids: Tensor) -> Tensor:
    return x[ids[:ROWS].argsort() // 2]


def _inverse_with_repeated_values(x: Tensor, ids: Tensor) -> Tensor:
    order = ids[:ROWS].argsort()
    back = torch.zeros_like(order)
    back[order] = torch.arange(ROWS, device=x.device) // 2
    return x[back]


def _inverse_by_accumulation(x: Tensor, ids: Tensor) -> Tensor:
    order, positions = ids[:ROWS].argsort(), torch.arange(ROWS, device=x.device)
    return x[torch.full_like(order, -ROWS).index_put([order], positions, accumulate=True)]


def _inverse_of_a_matrix(x: Tensor, ids: Tensor) -> Tensor:
    positions = torch.arange(ROWS, device=x.device).view(2, -1)
    return x[torch.zeros_like(ids[:ROWS]).index_put([positions], positions)]


def _inverse_with_negative_values(x: Tensor, ids: Tensor) -> Tensor:
    order = ids[:ROWS].argsort()
    return x[torch.zeros_like(order).scatter(0, order, torch.arange(-ROWS, 0, device=x.device))]


def _incomplete_inverse(x: Tensor, ids: Tensor) -> Tensor:
    positions = torch.arange(5, device=x.device)
    return x[torch.zeros_like(ids[:ROWS]).scatter(0, positions, positions)]


def _empty_divided_by_zero(x: Tensor, ids: Tensor) -> Tensor:
    return x[ids[:0].argsort() // 0]


def _changed(x: Tensor, ids: Tensor) -> Tensor:
    """Change the order in place, through a view."""
    order = ids[:ROWS].argsort()
    order[:3].zero_()
    return x[order]


def _changed_after_division(x: Tensor, ids: Tensor) -> Tensor:
    indices = ids.argsort() // TIMES
    indices[:2].zero_()
    return x[indices]


def _changed_before_division(x: Tensor, ids: Tensor) -> Tensor:
    order = ids.argsort()
    order[:2].zero_()
    return x[order // TIMES]


def _changed_in_a_body(x: Tensor, ids: Tensor) -> Tensor:
    """Change the order in place in a checkpointed body."""

    def body(x: Tensor, order: Tensor) -> Tensor:
        order[:3].zero_()
        return x * 2

    order = ids[:ROWS].argsort()
    y = checkpoint(body, x, order, use_reentrant=False)
    return x[order] + y


def _index_select(x: Tensor, ids: Tensor) -> Tensor:
    """Select rows of a transposed tensor: the result is contiguous, an indexed one would not be."""
    return x[:2].t().index_select(0, ids[:2].argsort()).view(-1)


def _int32_indices(x: Tensor, ids: Tensor) -> Tensor:
    return x[torch.arange(ROWS, device=x.device, dtype=torch.int32)]


def _order_of_a_matrix(x: Tensor, ids: Tensor) -> Tensor:
    return x[ids[:ROWS].view(2, -1).argsort(-1)]


def _compiled(
    function: Callable[..., Tensor], x: Tensor, ids: Tensor
) -> tuple[Tensor, int, list[str]]:
    """Return the result, the number of replaced indices, and the operators of the backward."""
    names, replaced = list[str](), list[int]()

    def backward(gm: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(aten_name(node.target) for node in gm.graph.nodes)
        return make_boxed_func(gm.forward)

    def compiler(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        report = CompileReport()
        compiled = entry._with_operators(gm, inputs, report)
        assert not report.left
        replaced.append(str(compiled.code).count("rows_in_order"))
        return aot_autograd(
            fw_compiler=lambda gm, _: make_boxed_func(gm.forward), bw_compiler=backward
        )(compiled, inputs)

    return torch.compile(function, backend=compiler, dynamic=False)(x, ids), replaced[0], names


@pytest.mark.parametrize(
    ("function", "is_permutation"),
    [
        (_experts, True),
        (_scattered, True),
        (_ranks, True),
        (_repeated, False),
        (_by_value, False),
        (_of_the_largest, False),
        (_half_of_the_rows_twice, False),
        (_inverse_with_repeated_values, False),
        (_inverse_by_accumulation, False),
        (_inverse_with_negative_values, False),
        (_inverse_of_a_matrix, False),
        (_incomplete_inverse, False),
        (_empty_divided_by_zero, False),
        (_changed, False),
        (_changed_after_division, False),
        (_changed_in_a_body, False),
        (_changed_before_division, False),
        (_index_select, False),
        (_int32_indices, False),
        (_order_of_a_matrix, False),
    ],
)
def test_gradients_of_permuted_rows_are_put_back(
    function: Callable[..., Tensor], is_permutation: bool
) -> None:
    """Values and gradients are right; the backward adds atomically only without permutations."""
    x = randn(ROWS, 2).requires_grad_()
    ids = torch.randint(0, 4, (ROWS * TIMES,), device=DEVICE)
    y, replaced, names = _compiled(function, x, ids)
    assert torch.equal(y, function(x.detach(), ids))
    cotangent = randn(*y.shape)
    (result,) = torch.autograd.grad(y, x, cotangent)

    def gradient(rows: Tensor, dy: Tensor) -> Tensor:
        leaf = rows.detach().double().requires_grad_()
        (dx,) = torch.autograd.grad(function(leaf, ids), leaf, dy.double())
        return dx

    exact = gradient(x, cotangent)
    magnitude = gradient(x.abs(), cotangent.abs())  # the sum of the terms' magnitudes
    # The gradient of a row is a sum of at most ROWS terms, with three factors each.
    bound = (ROWS + 4) * torch.finfo(torch.float32).eps * magnitude
    assert ((result.double() - exact).abs() <= bound).all()
    adding = {"index_put", "index_add", "embedding_dense_backward", "index_select_backward"}
    is_replaced = is_permutation and KERNEL_PATH
    assert bool(replaced) == is_replaced
    assert adding.isdisjoint(names) == is_replaced
    _, replaced_without_gradient, _ = _compiled(function, x.detach(), ids)
    assert replaced_without_gradient == 0


def test_rows_of_a_region_are_put_back() -> None:
    """The captured graph shows that the rows need a gradient; the region's operator does not."""

    def function(x: Tensor, ids: Tensor) -> Tensor:
        return F.layer_norm(x, (4,), weight)[ids.argsort() // TIMES]

    x, weight = randn(ROWS, 4).requires_grad_(), randn(4).requires_grad_()
    ids = torch.randint(0, 4, (ROWS * TIMES,), device=DEVICE)
    y, replaced, _ = _compiled(function, x, ids)
    assert replaced == KERNEL_PATH
    torch.testing.assert_close(y, function(x, ids))


def test_dynamic_sizes_get_no_guards() -> None:
    """An order of dynamic length is scattered into one of constant length."""

    def function(x: Tensor, ids: Tensor) -> Tensor:
        positions = torch.arange(ROWS, device=DEVICE)
        return x[torch.zeros_like(positions).scatter(0, ids.argsort(), positions)]

    x, graphs = randn(ROWS, 2).requires_grad_(), []

    def compiler(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        report = CompileReport()
        graphs.append(entry._with_operators(gm, inputs, report))
        assert not report.left
        return graphs[-1].forward

    compiled = torch.compile(function, backend=compiler)
    for length in (5, 7, ROWS):
        ids = torch.randint(0, 4, (length,), device=DEVICE)
        torch._dynamo.mark_dynamic(ids, 0)
        assert torch.equal(compiled(x, ids), function(x, ids))
    assert len(graphs) == 1
