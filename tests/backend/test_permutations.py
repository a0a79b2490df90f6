"""Rows in the order of a permutation: their gradients are put back, not added.

Other indices are PyTorch's.
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

ROWS, TIMES = 12, 3


def _experts(x: Tensor, ids: Tensor) -> Tensor:
    """A mixture of experts: each row to several, in the order of the experts, and back."""
    order = ids.argsort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=x.device)
    scale = torch.linspace(1.0, 2.0, order.shape[0], device=x.device, dtype=x.dtype)
    return (x[order // TIMES] * scale[:, None])[back].view(ROWS, TIMES, -1).sum(1)


def _scattered(x: Tensor, ids: Tensor) -> Tensor:
    _, order = ids[:ROWS].sort()
    back = torch.zeros_like(order).scatter_(0, order, torch.arange(0, ROWS, device=x.device))
    return x[order].exp()[back] * x[order.div(1, rounding_mode="floor")]


def _of_places(x: Tensor, ids: Tensor) -> Tensor:
    return x.flatten()[ids.repeat(2)[: 2 * ROWS].argsort().argsort()]


def _repeated(x: Tensor, ids: Tensor) -> Tensor:
    return x[ids[:ROWS]]


def _by_value(x: Tensor, ids: Tensor) -> Tensor:
    return x[ids[:ROWS].sort()[0]]


def _of_the_largest(x: Tensor, ids: Tensor) -> Tensor:
    return x[ids.view(ROWS, TIMES).max(1)[1]]


def _of_more_rows(x: Tensor, ids: Tensor) -> Tensor:
    """Half of the rows are named twice, and the others not at all."""
    return x[ids[:ROWS].argsort() // 2]


def _of_half(x: Tensor, ids: Tensor) -> Tensor:
    order = ids[:ROWS].argsort()
    back = torch.zeros_like(order)
    back[order] = torch.arange(ROWS, device=x.device) // 2
    return x[back]


def _added(x: Tensor, ids: Tensor) -> Tensor:
    order, places = ids[:ROWS].argsort(), torch.arange(ROWS, device=x.device)
    return x[torch.full_like(order, -ROWS).index_put([order], places, accumulate=True)]


def _put_by_a_matrix(x: Tensor, ids: Tensor) -> Tensor:
    places = torch.arange(ROWS, device=x.device).view(2, -1)
    return x[torch.zeros_like(ids[:ROWS]).index_put([places], places)]


def _from_the_end(x: Tensor, ids: Tensor) -> Tensor:
    order = ids[:ROWS].argsort()
    return x[torch.zeros_like(order).scatter(0, order, torch.arange(-ROWS, 0, device=x.device))]


def _of_few_places(x: Tensor, ids: Tensor) -> Tensor:
    places = torch.arange(5, device=x.device)
    return x[torch.zeros_like(ids[:ROWS]).scatter(0, places, places)]


def _of_none(x: Tensor, ids: Tensor) -> Tensor:
    return x[ids[:0].argsort() // 0]


def _changed(x: Tensor, ids: Tensor) -> Tensor:
    """The order by way of a view."""
    order = ids[:ROWS].argsort()
    order[:3].zero_()
    return x[order]


def _changed_when_divided(x: Tensor, ids: Tensor) -> Tensor:
    places = ids.argsort() // TIMES
    places[:2].zero_()
    return x[places]


def _changed_before_it_is_divided(x: Tensor, ids: Tensor) -> Tensor:
    order = ids.argsort()
    order[:2].zero_()
    return x[order // TIMES]


def _changed_in_a_body(x: Tensor, ids: Tensor) -> Tensor:
    """A checkpointed body changes the order in place."""

    def body(x: Tensor, order: Tensor) -> Tensor:
        order[:3].zero_()
        return x * 2

    order = ids[:ROWS].argsort()
    y = checkpoint(body, x, order, use_reentrant=False)
    return x[order] + y


def _selected(x: Tensor, ids: Tensor) -> Tensor:
    """Its rows are contiguous, also where those of an index would lie as `x` does."""
    return x[:2].t().index_select(0, ids[:2].argsort()).view(-1)


def _short(x: Tensor, ids: Tensor) -> Tensor:
    return x[torch.arange(ROWS, device=x.device, dtype=torch.int32)]


def _of_a_matrix(x: Tensor, ids: Tensor) -> Tensor:
    return x[ids[:ROWS].view(2, -1).argsort(-1)]


def _compiled(
    function: Callable[..., Tensor], x: Tensor, ids: Tensor
) -> tuple[Tensor, int, list[str]]:
    """The result, how many indices were replaced, and the operators of the backward."""
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
    ("function", "moved"),
    [
        (_experts, True),
        (_scattered, True),
        (_of_places, True),
        (_repeated, False),
        (_by_value, False),
        (_of_the_largest, False),
        (_of_more_rows, False),
        (_of_half, False),
        (_added, False),
        (_from_the_end, False),
        (_put_by_a_matrix, False),
        (_of_few_places, False),
        (_of_none, False),
        (_changed, False),
        (_changed_when_divided, False),
        (_changed_in_a_body, False),
        (_changed_before_it_is_divided, False),
        (_selected, False),
        (_short, False),
        (_of_a_matrix, False),
    ],
)
def test_gradients_of_permuted_rows_are_put_back(
    function: Callable[..., Tensor], moved: bool
) -> None:
    x = randn(ROWS, 2).requires_grad_()
    ids = torch.randint(0, 4, (ROWS * TIMES,), device=DEVICE)
    y, replaced, names = _compiled(function, x, ids)
    assert torch.equal(y, function(x.detach(), ids))
    cotangent = randn(*y.shape)
    (result,) = torch.autograd.grad(y, x, cotangent)
    exact, size = [
        torch.autograd.grad(function(rows, ids), rows, its)[0]
        for rows, its in (
            (x.detach().double().requires_grad_(), cotangent.double()),
            (x.detach().double().abs().requires_grad_(), cotangent.double().abs()),
        )
    ]
    # A row's gradient is a sum of at most all rows', of three factors each.
    assert (
        (result.double() - exact).abs() <= (ROWS + 4) * torch.finfo(torch.float32).eps * size
    ).all()
    added = {
        "index_put",
        "index_add",
        "embedding_dense_backward",
        "index_select_backward",
    }.intersection(names)
    assert bool(replaced) == (moved and KERNEL_PATH) != bool(added)
    assert _compiled(function, x.detach(), ids)[1] == 0


def test_rows_of_a_region_are_put_back() -> None:
    """Whether a gradient is wanted is known of the graph as it was captured."""

    def function(x: Tensor, ids: Tensor) -> Tensor:
        return F.layer_norm(x, (4,), weight)[ids.argsort() // TIMES]

    x, weight = randn(ROWS, 4).requires_grad_(), randn(4).requires_grad_()
    ids = torch.randint(0, 4, (ROWS * TIMES,), device=DEVICE)
    y, replaced, _ = _compiled(function, x, ids)
    assert replaced == KERNEL_PATH
    torch.testing.assert_close(y, function(x, ids))


def test_sizes_that_change_are_not_guarded_on() -> None:
    """An order of any length, put into one of a known length."""

    def function(x: Tensor, ids: Tensor) -> Tensor:
        return x[
            torch.zeros(ROWS, dtype=torch.int64, device=DEVICE).scatter(
                0, ids.argsort(), torch.arange(ROWS, device=DEVICE)
            )
        ]

    x, calls = randn(ROWS, 2).requires_grad_(), []

    def compiler(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        report = CompileReport()
        calls.append(entry._with_operators(gm, inputs, report))
        assert not report.left
        return calls[-1].forward

    compiled = torch.compile(function, backend=compiler)
    for length in (5, 7, ROWS):
        ids = torch.randint(0, 4, (length,), device=DEVICE)
        torch._dynamo.mark_dynamic(ids, 0)
        assert torch.equal(compiled(x, ids), function(x, ids))
    assert len(calls) == 1
