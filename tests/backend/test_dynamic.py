"""`fusedops.compile` with dynamic shapes: which regions are fused, and the results of each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from backends import Backend, randn
from fusedops.backend.report import CompileReport
from support import DEVICE, as_tuple

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]


class ScaledNorm(nn.Module):
    """An RMSNorm of elementary operators, whose eps and scale are Python numbers."""

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
    """Check that a compiled function has the values and gradients of the function.

    Args:
        compiled: the compiled function.
        function: the function, called eagerly.
        inputs: the arguments, which get gradients.
        parameters: other tensors that get gradients.
        dynamic: dimensions of the inputs that are marked as dynamic.
    """
    our_inputs, eager_inputs = [[x.clone().requires_grad_() for x in inputs] for _ in range(2)]
    for x in our_inputs:
        torch._dynamo.mark_dynamic(x, dynamic)
    our_output, eager_output = compiled(*our_inputs), function(*eager_inputs)
    torch.testing.assert_close(our_output, eager_output, rtol=1e-4, atol=1e-4)
    cotangent = torch.randn_like(eager_output)

    def gradients(output: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return torch.autograd.grad(output, [*leaves, *parameters], cotangent, allow_unused=True)

    for ours, eager in zip(
        gradients(our_output, our_inputs), gradients(eager_output, eager_inputs), strict=True
    ):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)


def _left(report: CompileReport) -> list[str]:
    """Return the reasons of the regions that are not fused."""
    return [region.reason for region in report.regions if region.reason]


def test_python_number_is_a_constant_of_kernels_until_it_changes() -> None:
    """With ``dynamic=True`` Dynamo makes all Python numbers symbols.

    The region of a number that has changed is left to Inductor, so that further values need no
    further graphs.
    """
    model, backend = ScaledNorm().to(DEVICE), Backend()
    fused_counts: list[int] = []  # after each graph

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        # Raises an error if Dynamo has to trace once more, with the number as a constant.
        result = backend(gm, inputs)
        fused_counts.append(len(backend.report.fused))
        return result

    compiled = torch.compile(lambda x: model(x), backend=compiler, dynamic=True)
    for changes, eps in enumerate((1e-2, 0.3, 0.5, 0.7)):
        model.eps = eps
        for rows in (5, 7):
            _check(compiled, model, [randn(rows, 24)], list(model.parameters()))
        assert len(fused_counts) == min(changes + 1, 2)
    assert 0 < fused_counts[0] == fused_counts[1]
    assert set(_left(backend.report)) == {
        "a number in it may change from call to call; make it a tensor"
    }


def test_size_that_is_one_in_the_traced_call_stays_dynamic() -> None:
    """An example is the number of patches, if the first image has a single patch."""
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
            dynamic=(2, 3),
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
def test_rows_that_are_flattened_in_between_are_fused_at_every_size(
    function: Callable[..., Any],
) -> None:
    """Each graph has one fused region, and results have the strides of eager mode."""
    backend, parameters = Backend(), [randn(24).requires_grad_() for _ in range(2)]
    compiled = torch.compile(function, backend=backend)
    for batch, length in ((2, 6), (3, 6), (4, 8), (1, 4), (5, 1)):
        x = randn(batch, length, 24).requires_grad_()
        our_outputs = as_tuple(compiled(x, *parameters))
        eager_outputs = as_tuple(function(x, *parameters))
        assert [y.stride() for y in our_outputs] == [y.stride() for y in eager_outputs]
        cotangents = list(map(torch.randn_like, eager_outputs))
        results = [
            [*outputs, *torch.autograd.grad(outputs, [x, *parameters], cotangents)]
            for outputs in (our_outputs, eager_outputs)
        ]
        for ours, eager in zip(*results, strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-3)
    assert len(backend.report.fused) == len(backend.report.regions) == backend.report.graphs


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.usefixtures("every_region")
def test_number_of_rows_that_a_position_table_fixes_is_a_constant(tokens: int) -> None:
    """The number of patches is an expression of the image's size.

    The patches are added to a table of positions, so their number must be that of its rows, or one
    less if a token comes before the patches.
    """
    patches = nn.Conv2d(3, 24, 4, 4).to(DEVICE)
    positions, weight = nn.Parameter(randn(1, 9 + tokens, 24)), nn.Parameter(randn(24))
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
    assert backend.report.graphs == 1
    assert len(backend.report.fused) == len(backend.report.regions) == 1 + tokens


def test_number_of_rows_that_depends_on_a_ratio_is_a_constant() -> None:
    """A masked autoencoder keeps a share of its tokens. PyTorch traces a graph for each ratio."""
    weight, share = nn.Parameter(randn(24)), 0.75

    def function(x: Tensor) -> Tensor:
        visible = x[:, : int(16 * (1 - share))].cumsum(1)
        return F.rms_norm(visible, (24,), weight) * torch.sigmoid(visible)

    backend = Backend()
    compiled = torch.compile(function, backend=backend, dynamic=True)
    for batch, next_share in ((2, 0.75), (3, 0.75), (3, 0.5), (2, 0.25)):
        share = next_share
        _check(compiled, function, [randn(batch, 16, 24)], [weight])
    assert len(backend.report.fused) == len(backend.report.regions) == backend.report.graphs


def test_number_of_rows_that_the_caller_passes_is_not_a_constant() -> None:
    """One graph serves all its values, although a guard relates it to a dimension."""
    weight = nn.Parameter(randn(24))

    def function(x: Tensor, n: int) -> Tensor:
        rows = x.cumsum(0)[: 2 * n]
        if x.shape[0] != 2 * n:
            raise ValueError("another number of rows")
        return F.rms_norm(rows, (24,), weight) * torch.sigmoid(rows)

    backend = Backend()
    compiled = torch.compile(function, backend=backend, dynamic=True)
    for n in (4, 5, 6):
        _check(
            lambda x, n=n: compiled(x, n),
            lambda x, n=n: function(x, n),
            [randn(2 * n, 24)],
            [weight],
            dynamic=[0],
        )
    assert len(backend.report.fused) == len(backend.report.regions) == backend.report.graphs == 1


def test_sizes_that_a_guard_makes_equal_are_one_dimension() -> None:
    """The guard is that ``min(32, length)`` is the length."""
    weight = nn.Parameter(randn(24))

    def function(x: Tensor) -> Tensor:
        positions = x.new_ones(len(x), min(32, x.shape[1]), 24).cumsum(1).cumsum(2)
        return F.rms_norm(positions, (24,), weight) * torch.sigmoid(x)

    backend = Backend()
    compiled = torch.compile(function, backend=backend, dynamic=True)
    for batch, length in ((2, 9), (3, 7)):
        _check(compiled, function, [randn(batch, length, 24)], [weight])
    assert backend.report.graphs == len(backend.report.fused) == len(backend.report.regions) == 1


def test_graph_with_a_tensor_of_sizes_is_captured_once() -> None:
    weight = nn.Parameter(randn(24))

    def function(x: Tensor) -> Tensor:
        return F.rms_norm(x, (24,), weight) * torch.tensor([x.shape[0], 3], device=x.device).sum()

    backend = Backend()
    compiled = torch.compile(function, backend=backend, dynamic=True)
    for rows in (5, 7):
        _check(compiled, function, [randn(rows, 24)], [weight])
    assert backend.report.graphs == len(backend.report.fused) == 1


@pytest.mark.usefixtures("every_region")
def test_softmax_over_a_dynamic_length_is_reported_as_left() -> None:
    """It is reported although it has no dropout, as in an attention with a sink."""
    sink, weight = nn.Parameter(randn(4, 1, 1)), nn.Parameter(randn(24))

    def function(x: Tensor) -> Tensor:
        heads = F.rms_norm(x, (24,), weight).unflatten(-1, (4, 6)).transpose(1, 2)
        sinks = sink.expand(len(x), -1, x.shape[1], -1)
        scores = torch.cat([heads @ heads.transpose(-1, -2), sinks], -1)
        return scores.softmax(-1)[..., :-1] @ heads

    for dynamic, left in (
        (False, []),
        (True, ["a length that changes from call to call is one of columns"]),
    ):
        torch._dynamo.reset()
        backend = Backend()
        compiled = torch.compile(function, backend=backend, dynamic=dynamic)
        _check(compiled, function, [randn(2, 5, 24)], [sink, weight])
        assert _left(backend.report) == left
        assert len(backend.report.fused) == 2 - len(left)
