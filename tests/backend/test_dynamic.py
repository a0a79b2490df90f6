"""Graphs of the compile backend whose sizes and numbers are symbols.

What is fused in them, and what each call computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from backends import Backend, randn
from fusedops.backend.report import CompileReport
from support import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]


class ScaledNorm(nn.Module):
    """A norm by hand, whose eps and scale are numbers of Python."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))
        self.eps, self.scale = 1e-2, 3.0

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return y * self.weight * (self.scale / 2.0) ** 0.5 + self.bias


def _check(
    compiled: Callable[..., Tensor],
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    dynamic: Sequence[int] = (),
) -> None:
    """The same values and gradients, of parameters and inputs, some of whose dimensions are marked as dynamic."""
    leaves = [[x.clone().requires_grad_() for x in inputs] for _ in range(2)]
    for x in leaves[0]:
        torch._dynamo.mark_dynamic(x, dynamic)
    ours, theirs = compiled(*leaves[0]), function(*leaves[1])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    cotangent = torch.randn_like(theirs)
    results = [
        torch.autograd.grad(y, [*own, *parameters], cotangent, allow_unused=True)
        for y, own in zip((ours, theirs), leaves, strict=True)
    ]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def _left(report: CompileReport) -> list[str]:
    return [region.reason for region in report.regions if region.reason]


def test_numbers_that_never_changed_are_constants_of_kernels() -> None:
    """With ``dynamic=True`` all numbers are symbols for Dynamo.

    One that changes is left, and has no graph for each value.
    """
    model, backend, made = ScaledNorm().to(DEVICE), Backend(), list[int]()

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        result = backend(
            gm, inputs
        )  # raises where Dynamo is to trace once more, without the symbol
        made.append(len(backend.report.fused))
        return result

    compiled = torch.compile(lambda x: model(x), backend=compiler, dynamic=True)
    for number, eps in enumerate((1e-2, 0.3, 0.5, 0.7)):
        model.eps = eps
        for rows in (5, 7):
            _check(compiled, model, [randn(rows, 24)], list(model.parameters()))
        assert len(made) == min(number + 1, 2)
    assert 0 < made[0] == made[1]
    assert set(_left(backend.report)) == {
        "a number in it may change from call to call; make it a tensor"
    }


def test_a_size_that_is_one_in_the_traced_call_is_no_constant() -> None:
    """As of patches, of which the first image has one."""
    patches, weight = nn.Conv2d(3, 24, 4, 4).to(DEVICE), randn(24).requires_grad_()

    def function(x: Tensor) -> Tensor:
        return F.layer_norm(patches(x).permute(0, 2, 3, 1), (24,), weight)

    backend = Backend()
    compiled = torch.compile(function, backend=backend)
    for height, width in ((4, 4), (8, 8), (4, 12)):
        _check(
            compiled,
            function,
            [randn(3, 3, height, width)],
            [weight, *patches.parameters()],
            (2, 3),
        )
    assert backend.report.graphs == len(backend.report.fused) == len(backend.report.regions)


def _flat_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    batch, length, width = x.shape
    return F.layer_norm(x.reshape(-1, width), (width,), w, b).view(
        batch, length, width
    ) * torch.sigmoid(x)


def _norm_of_heads(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    batch, length, width = x.shape
    heads = (x @ torch.outer(w, b)).view(batch * length, 4, -1)
    return F.rms_norm(heads, heads.shape[2:], w[:6]).view(batch, length, width) + x * b


def _flat_rows_returned(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, width = x.shape
    rows = F.layer_norm(x.flatten(0, 1) * w, (width,), w, b)
    return rows, rows.unflatten(0, (batch, length)) * torch.sigmoid(x)


def _all_flat(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    batch, length, width = x.shape
    rows = x.reshape(-1, width)
    rows = rows @ torch.outer(w, b) + rows * b
    return F.layer_norm(rows.view(batch, length, width), (width,), w, b) * 2


def _columns_in_memory(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, width = x.shape
    rows = F.layer_norm(torch.mm(torch.outer(w, b), x.flatten(0, 1).t()).t(), (width,), w, b)
    return rows * 2, rows.view(batch, length, width) * x


@pytest.mark.shared("function", most=2)
@pytest.mark.parametrize(
    "function", [_flat_norm, _norm_of_heads, _flat_rows_returned, _all_flat, _columns_in_memory]
)
def test_rows_that_are_one_dimension_and_several(function: Callable[..., Any]) -> None:
    """One operator at every size, as where sizes are numbers, and strides as in the model."""
    backend, parameters = Backend(), [randn(24).requires_grad_() for _ in range(2)]
    compiled = torch.compile(function, backend=backend)
    for batch, length in ((2, 6), (3, 6), (4, 8), (1, 4), (5, 1)):
        x = randn(batch, length, 24).requires_grad_()
        results = [call(x, *parameters) for call in (compiled, function)]
        ours, theirs = [y if isinstance(y, tuple) else (y,) for y in results]
        assert [y.stride() for y in ours] == [y.stride() for y in theirs]
        cotangents = list(map(torch.randn_like, theirs))
        gradients = [torch.autograd.grad(ys, [x, *parameters], cotangents) for ys in (ours, theirs)]
        for one, other in zip((*ours, *gradients[0]), (*theirs, *gradients[1]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert len(backend.report.fused) == len(backend.report.regions) == backend.report.graphs


@pytest.mark.parametrize("tokens", [0, 1])
def test_rows_whose_number_a_table_settles_are_a_constant(tokens: int) -> None:
    """An expression of an image's size, which is always the number of the positions that are added, or that less a token."""
    patches, positions, weight = (
        nn.Conv2d(3, 24, 4, 4).to(DEVICE),
        nn.Parameter(randn(1, 9 + tokens, 24)),
        nn.Parameter(randn(24)),
    )
    parameters = [positions, weight, *patches.parameters()]

    def function(x: Tensor) -> Tensor:
        rows = F.rms_norm(patches(x).flatten(2).transpose(1, 2), (24,), weight)
        if tokens:
            rows = torch.cat([weight.expand(len(x), 1, 24).cumsum(1), rows.cumsum(1)], 1)
            return F.rms_norm(rows[:, 1:] + positions[:, 1:], (24,), weight)
        return F.rms_norm(rows + positions, (24,), weight)

    backend = Backend()
    compiled = torch.compile(function, backend=backend, dynamic=True)
    for batch in (2, 3):
        _check(compiled, function, [randn(batch, 3, 12, 12)], parameters)
    assert (
        backend.report.graphs == 1
        and len(backend.report.fused) == len(backend.report.regions) == 1 + tokens
    )


def test_rows_of_a_share_are_a_constant() -> None:
    """As of the tokens that a masked autoencoder keeps: of each share PyTorch traces a graph."""
    weight, share = nn.Parameter(randn(24)), 0.75

    def function(x: Tensor) -> Tensor:
        kept = x[:, : int(16 * (1 - share))].cumsum(1)
        return F.rms_norm(kept, (24,), weight) * torch.sigmoid(kept)

    backend = Backend()
    compiled = torch.compile(function, backend=backend, dynamic=True)
    for batch, now in ((2, 0.75), (3, 0.75), (3, 0.5), (2, 0.25)):
        share = now
        _check(compiled, function, [randn(batch, 16, 24)], [weight])
    assert len(backend.report.fused) == len(backend.report.regions) == backend.report.graphs


def test_rows_of_a_number_of_the_callers_are_none() -> None:
    """One graph for all, also where a guard says that a dimension is computed of it."""
    weight = nn.Parameter(randn(24))

    def function(x: Tensor, n: int) -> Tensor:
        kept = x.cumsum(0)[: 2 * n]
        if x.shape[0] != 2 * n:
            raise ValueError("another number of rows")
        return F.rms_norm(kept, (24,), weight) * torch.sigmoid(kept)

    backend = Backend()
    compiled = torch.compile(function, backend=backend, dynamic=True)
    for n in (4, 5, 6):
        _check(
            lambda x, n=n: compiled(x, n),
            lambda x, n=n: function(x, n),
            [randn(2 * n, 24)],
            [weight],
            [0],
        )
    assert len(backend.report.fused) == len(backend.report.regions) == backend.report.graphs == 1


def test_rows_that_guards_make_as_many_as_others_are_theirs() -> None:
    """The places in the first block of rows, which is all of them."""
    weight = nn.Parameter(randn(24))

    def function(x: Tensor) -> Tensor:
        places = x.new_ones(len(x), min(32, x.shape[1]), 24).cumsum(1).cumsum(2)
        return F.rms_norm(places, (24,), weight) * torch.sigmoid(x)

    backend = Backend()
    compiled = torch.compile(function, backend=backend, dynamic=True)
    for batch, length in ((2, 9), (3, 7)):
        _check(compiled, function, [randn(batch, length, 24)], [weight])
    assert backend.report.graphs == len(backend.report.fused) == len(backend.report.regions) == 1


def test_a_tensor_of_sizes_is_captured() -> None:
    weight = nn.Parameter(randn(24))

    def function(x: Tensor) -> Tensor:
        return F.rms_norm(x, (24,), weight) * torch.tensor([x.shape[0], 3], device=x.device).sum()

    backend = Backend()
    compiled = torch.compile(function, backend=backend, dynamic=True)
    for rows in (5, 7):
        _check(compiled, function, [randn(rows, 24)], [weight])
    assert backend.report.graphs == len(backend.report.fused) == 1


def test_a_softmax_over_a_length_that_changes_is_left_by_name() -> None:
    """Also where nothing else makes it a region, as in an attention with a sink."""
    sink, weight = nn.Parameter(randn(4, 1, 1)), nn.Parameter(randn(24))

    def function(x: Tensor) -> Tensor:
        heads = F.rms_norm(x, (24,), weight).unflatten(-1, (4, 6)).transpose(1, 2)
        scores = torch.cat(
            [heads @ heads.transpose(-1, -2), sink.expand(len(x), -1, x.shape[1], -1)], -1
        )
        return scores.softmax(-1)[..., :-1] @ heads

    for dynamic, left in (
        (False, []),
        (True, ["a length that changes from call to call is one of columns"]),
    ):
        torch._dynamo.reset()
        backend = Backend()
        _check(
            torch.compile(function, backend=backend, dynamic=dynamic),
            function,
            [randn(2, 5, 24)],
            [sink, weight],
        )
        assert _left(backend.report) == left and len(backend.report.fused) == 2 - len(left)
