"""`fusedops.compile`: gradients exist, and results have strides, as in eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from backends import Backend, randn
from support import DEVICE, as_tuple

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]

# A probability of dropout that drops nothing in tensors as small as these. Probabilities are
# rounded to multiples of 2**-16, and so is the scale.
_NEVER = 1e-9
_CLOSE = {"rtol": 2.0**-16 + 1e-5, "atol": 1e-4}


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _without_gradient(x: Tensor, y: Tensor, w: Tensor, frozen: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        constant = (x * w + frozen).softmax(-1)
    return F.layer_norm(x, (16,), w) - constant, constant


def _view_without_gradient(
    x: Tensor, y: Tensor, w: Tensor, frozen: Tensor
) -> tuple[Tensor, Tensor]:
    """View a tensor without gradients: the view requires a gradient, which goes no further."""
    with torch.no_grad():
        rows = x.view(8, 16)
    normed = F.layer_norm(rows, (16,), frozen)
    return normed, normed * w


def _parts_without_gradient(
    x: Tensor, y: Tensor, w: Tensor, frozen: Tensor
) -> tuple[Tensor, Tensor]:
    sums = F.layer_norm(x * 2, (16,), w)
    with torch.no_grad():
        first, _ = sums.chunk(2, -1)
    dropped = F.dropout(first * 3, _NEVER)
    return dropped * 1, dropped * w[:8]


def _changed_without_gradient(
    x: Tensor, y: Tensor, w: Tensor, frozen: Tensor
) -> tuple[Tensor, Tensor]:
    sums = x * w
    with torch.no_grad():
        sums = sums.mul_(2)
        copy = torch.empty_like(x).copy_(x)
    normed = F.layer_norm(sums, (16,), frozen)
    return normed + copy, F.layer_norm(copy, (16,), frozen)


def _product_and_mask(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return x * mask, mask


def _compared(x: Tensor, y: Tensor, w: Tensor, frozen: Tensor) -> Tensor:
    normed = _norm(x) * y
    return normed.masked_fill(torch.fmod(normed * w, 2.0) > 1, 0.0)


# Functions of x, y, w and frozen, with the number of their regions.
FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "locked dropout": (lambda x, y, w, frozen: x * F.dropout(torch.ones_like(x[:, :1]), _NEVER), 1),
    "embedding dropout": (
        lambda x, y, w, frozen: y @ (x[0] * F.dropout(torch.ones_like(x[0, :, :1]), _NEVER)).T,
        1,
    ),
    "norm of a constant": (
        lambda x, y, w, frozen: (_norm(torch.full_like(x, 2.0) * frozen), x * 2),
        1,
    ),
    "softmax of a constant": (
        lambda x, y, w, frozen: (x.new_zeros(x.shape) + frozen).softmax(-1) * x,
        1,
    ),
    "mask returned": (
        lambda x, y, w, frozen: _product_and_mask(x * w, F.dropout(torch.ones_like(x), _NEVER)),
        1,
    ),
    "norm of a comparison": (lambda x, y, w, frozen: (_norm((x > 0).float() * frozen), x * 2), 1),
    "dropout of a comparison": (
        lambda x, y, w, frozen: (F.dropout((x > 0).float(), _NEVER), x * 2),
        1,
    ),
    "comparison of another": (lambda x, y, w, frozen: _norm(x.masked_fill(y * 2 > 0, 0.0)) * w, 1),
    "power of zero": (lambda x, y, w, frozen: (F.dropout(x**0, _NEVER), y * 2), 1),
    "power of zero, with a weight": (
        lambda x, y, w, frozen: ((x**0 * w).softmax(-1) * y, x[..., 0]),
        1,
    ),
    "a result that is detached": (
        lambda x, y, w, frozen: (_norm(x) * y, (_norm(x) * w).detach()),
        1,
    ),
    "a result that is compared": (_compared, 1),
    "a region that is detached": (
        lambda x, y, w, frozen: (_norm(x * frozen), torch.fmod(_norm(y * w), 2.0).detach()),
        2,
    ),
    "without gradient": (_without_gradient, 2),
    "view without gradient": (_view_without_gradient, 1),
    "parts without gradient": (_parts_without_gradient, 2),
    "changed without gradient": (_changed_without_gradient, 2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.usefixtures("every_region")
def test_results_and_inputs_have_gradients_as_in_eager_mode(name: str) -> None:
    """The same outputs require gradients, the same inputs get some, and they are equal."""
    function, regions = FUNCTIONS[name]
    x, y, w = [randn(*shape).requires_grad_() for shape in ((2, 4, 16), (2, 4, 16), (16,))]
    frozen, first_cotangent, second_cotangent = randn(16), randn(2, 4, 16), randn(2, 4, 16)

    def outputs_and_gradients(
        call: Callable[..., Any],
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        outputs = as_tuple(call(x, y, w, frozen))
        differentiable = [output for output in outputs if output.requires_grad]
        cotangents = [
            cotangent if output.shape == cotangent.shape else torch.ones_like(output)
            for output, cotangent in zip(
                differentiable, (first_cotangent, second_cotangent), strict=False
            )
        ]
        gradients = torch.autograd.grad(differentiable, (x, y, w), cotangents, allow_unused=True)
        return outputs, gradients

    backend = Backend()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    eager_outputs, eager_gradients = outputs_and_gradients(function)
    our_outputs, our_gradients = outputs_and_gradients(compiled)
    for ours, eager in zip(our_outputs, eager_outputs, strict=True):
        assert ours.requires_grad == eager.requires_grad
        torch.testing.assert_close(ours, eager, **_CLOSE)
    for our_gradient, eager_gradient in zip(our_gradients, eager_gradients, strict=True):
        assert (our_gradient is None) == (eager_gradient is None)
        if eager_gradient is not None:
            torch.testing.assert_close(our_gradient, eager_gradient, **_CLOSE)
    assert len(backend.report.fused) >= regions


def _time_first(x: Tensor) -> Tensor:
    return F.dropout(x.transpose(0, 1), _NEVER) * 2 + 1


def _remainders(x: Tensor) -> Tensor:
    """Return remainders, by an operator that no region contains, with a region's strides."""
    return torch.fmod(_time_first(x), 64.0)


def _remainders_changed(x: Tensor) -> Tensor:
    y = _remainders(x)
    y.transpose(0, 1).view(8, 16).diagonal().mul_(2)
    return y


def _by_another_library(x: Tensor) -> Tensor:
    y = _remainders(x)
    return y + _in_memory_order(y.detach())


@torch.library.custom_op("fusedops_tests::in_memory_order", mutates_args=())
def _in_memory_order(x: Tensor) -> Tensor:
    """Return a contiguous tensor with the elements in the order in which x has them in memory."""
    return x.as_strided(x.shape, torch.empty(x.shape).stride()).clone()


@_in_memory_order.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@pytest.mark.parametrize(
    "function",
    [
        _time_first,
        _remainders,
        _remainders_changed,
        _by_another_library,
        lambda x: torch.as_strided(_remainders(x), (4, 16), (16, 1)) * 2,
        lambda x: _remainders(x).transpose(0, 1).view(8, 16).diagonal(),
        lambda x: torch.view_as_complex(_remainders(x.mT).transpose(0, 1).mT[..., :2]).real,
        lambda x: checkpoint(
            lambda y: torch.as_strided(y, (4, 16), (16, 1)), _remainders(x), use_reentrant=False
        ),
        lambda x: torch.fmod(_time_first(x), torch.full_like(x.transpose(0, 1), 64.0).contiguous()),
        lambda x: _time_first(x).sort().values,
        lambda x: _time_first(x).unsqueeze(0),
        lambda x: _time_first(x[:, :1]),
        lambda x: torch.as_strided(_time_first(x), (4, 16), (16, 1)) * 2,
        lambda x: F.dropout(x, _NEVER) * 2,
        lambda x: F.dropout(x.permute(1, 2, 0)[..., None] * 2, _NEVER).mul(3),
    ],
)
def test_results_have_the_strides_of_eager_mode(function: Callable[[Tensor], Tensor]) -> None:
    """Strides of dimensions with one element do not matter."""

    def strides(y: Tensor) -> list[int]:
        return [stride for stride, size in zip(y.stride(), y.shape, strict=True) if size > 1]

    backend = Backend()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    x = randn(2, 4, 16).requires_grad_()
    eager, ours = function(x), compiled(x)
    assert strides(ours) == strides(eager)
    torch.testing.assert_close(ours, eager, **_CLOSE)
    cotangent = randn(*eager.shape)
    (eager_dx,), (our_dx,) = [torch.autograd.grad(y, x, cotangent) for y in (eager, ours)]
    torch.testing.assert_close(our_dx, eager_dx, **_CLOSE)
    assert len(backend.report.fused) == 1


@pytest.mark.parametrize("read", [lambda y: y, lambda y: y.as_strided((4, 16), (16, 2)) * 2])
def test_every_second_column_keeps_its_stride_after_an_in_place_change(
    read: Callable[[Tensor], Tensor],
) -> None:
    """If a functional operator replaced the change, it would return adjacent columns."""

    def function(x: Tensor) -> Tensor:
        columns = torch.fmod(_norm(x), 64.0)[..., ::2]
        columns.add_(1)
        return read(columns)

    x = randn(4, 4, 32)
    ours, eager = torch.compile(function, backend=Backend(), fullgraph=True)(x), function(x)
    torch.testing.assert_close(ours, eager, **_CLOSE)
    assert ours.stride() == eager.stride()


def test_length_that_depends_on_data_is_fused() -> None:
    def function(x: Tensor, n: Tensor, w: Tensor) -> Tensor:
        size = n.item()
        torch._check(size >= 0)
        torch._check(size <= 4)
        return F.layer_norm(x.narrow(1, 0, size), (16,), w) * 2  # type: ignore[arg-type]

    x, w, backend = randn(2, 4, 16).requires_grad_(), randn(16).requires_grad_(), Backend()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        for n in (3, 2, 0):
            ours, eager = [call(x, torch.tensor(n), w) for call in (compiled, function)]
            torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)
    assert len(backend.report.fused) == 1


def test_in_place_operators_with_numbers_are_fused() -> None:
    """`pow_` with a number and `pow` with a tensor have the same overload name."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x * 2
        y.pow_(2)
        y.add_(1.0)
        return F.rms_norm(y, (16,), w)

    x, w, backend = randn(2, 4, 16), randn(16).requires_grad_(), Backend()
    torch.testing.assert_close(
        torch.compile(function, backend=backend)(x, w), function(x, w), rtol=1e-5, atol=1e-5
    )
    [region] = backend.report.fused
    assert region.operators[:2] == ("mul", "pow")


def test_fully_masked_queries_have_results_and_gradients_of_zero() -> None:
    """PyTorch's attention with dropout, without a fused kernel, defines this."""

    def function(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=_NEVER)

    inputs = [randn(1, 2, 4, 8).requires_grad_() for _ in range(3)]
    mask = torch.ones(4, 4, dtype=torch.bool, device=DEVICE)
    mask[1] = False
    cotangent, backend, results = randn(1, 2, 4, 8), Backend(), []
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for call in (function, torch.compile(function, backend=backend)):
            y = call(*inputs, mask)
            results.append([y, *torch.autograd.grad(y, inputs, cotangent)])
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, **_CLOSE)
    assert any("_safe_softmax" in region.operators for region in backend.report.fused)


# Functions of all pairs of a row's columns.
_PAIRS: dict[str, Callable[[Tensor], Tensor]] = {
    "differences": lambda x: F.softplus(x[:, None, :] - x[:, :, None]).mean((1, 2)),
    "products": lambda x: (x[:, :, None] * x[:, None, :]).sum(-1),
    "ranks": lambda x: (
        torch.sigmoid((torch.tanh(x)[:, :, None] - (x * 2)[:, None, :]) * 3).sum(-1).softmax(-1)
    ),
    "column and row": lambda x: (x.mean(-1, keepdim=True) - x.mean(-1)).softmax(-1),
}


@pytest.mark.parametrize("case", _PAIRS)
def test_all_pairs_of_columns_have_exact_values_and_gradients(case: str) -> None:
    """A dimension of the input is two dimensions of a value.

    A kernel that confused the two would compute only the diagonal.
    """

    def function(x: Tensor, w: Tensor) -> Tensor:
        return _PAIRS[case](F.layer_norm(x, (8,), w) * 0.7)

    tensors = [randn(8, 8), randn(8)]

    def results(call: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = [t.to(dtype).requires_grad_() for t in tensors]
        y = call(*inputs)
        return [t.double() for t in (y, *torch.autograd.grad(y.square().sum(), inputs))]

    backend = Backend()
    compiled = torch.compile(function, backend=backend)
    for ours, exact in zip(
        results(compiled, torch.float32), results(function, torch.float64), strict=True
    ):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)
    assert backend.report.regions
