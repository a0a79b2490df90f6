"""`fusedops.compile`: which results and inputs have gradients, and how results lie in memory, is as in eager PyTorch."""

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

# A dropout that drops nothing of so few elements. Probabilities are multiples of 2**-16, and so is
# its scale.
_SURE = 1e-9
_CLOSE = {"rtol": 2.0**-16 + 1e-5, "atol": 1e-4}


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _without_gradient(x: Tensor, y: Tensor, w: Tensor, frozen: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        known = (x * w + frozen).softmax(-1)
    return F.layer_norm(x, (16,), w) - known, known


def _view_without_gradient(
    x: Tensor, y: Tensor, w: Tensor, frozen: Tensor
) -> tuple[Tensor, Tensor]:
    """A view requires a gradient where its tensor does, which goes no farther."""
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
    dropped = F.dropout(first * 3, _SURE)
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


def _compared(x: Tensor, y: Tensor, w: Tensor, frozen: Tensor) -> Tensor:
    normed = _norm(x) * y
    return normed.masked_fill(torch.fmod(normed * w, 2.0) > 1, 0.0)


# Each with the number of its regions.
FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "locked dropout": (lambda x, y, w, frozen: x * F.dropout(torch.ones_like(x[:, :1]), _SURE), 1),
    "embedding dropout": (
        lambda x, y, w, frozen: y @ (x[0] * F.dropout(torch.ones_like(x[0, :, :1]), _SURE)).T,
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
        lambda x, y, w, frozen: (lambda mask: (x * w * mask, mask))(
            F.dropout(torch.ones_like(x), _SURE)
        ),
        1,
    ),
    "norm of a comparison": (lambda x, y, w, frozen: (_norm((x > 0).float() * frozen), x * 2), 1),
    "dropout of a comparison": (
        lambda x, y, w, frozen: (F.dropout((x > 0).float(), _SURE), x * 2),
        1,
    ),
    "comparison of another": (lambda x, y, w, frozen: _norm(x.masked_fill(y * 2 > 0, 0.0)) * w, 1),
    "of a number's power": (lambda x, y, w, frozen: (F.dropout(x**0, _SURE), y * 2), 1),
    "of a number's power, with a weight": (
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
def test_what_has_gradients(name: str) -> None:
    function, regions = FUNCTIONS[name]
    x, y, w = (
        randn(2, 4, 16).requires_grad_(),
        randn(2, 4, 16).requires_grad_(),
        randn(16).requires_grad_(),
    )
    frozen, cotangents, result = randn(16), [randn(2, 4, 16), randn(2, 4, 16)], []
    backend = Backend()
    for call in (function, torch.compile(function, backend=backend, fullgraph=True)):
        outs = as_tuple(call(x, y, w, frozen))
        trained = [out for out in outs if out.requires_grad]
        weights = [
            cotangent.expand_as(out) if out.shape == cotangent.shape else torch.ones_like(out)
            for out, cotangent in zip(trained, cotangents, strict=False)
        ]
        gradients = torch.autograd.grad(trained, (x, y, w), weights, allow_unused=True)
        result.append(
            (
                [out.requires_grad for out in outs],
                [g is None for g in gradients],
                [*outs, *[g for g in gradients if g is not None]],
            )
        )
    (eager, none, expected), (ours, none_of_ours, values) = result
    assert ours == eager and none_of_ours == none
    for value, wanted in zip(values, expected, strict=True):
        torch.testing.assert_close(value, wanted, **_CLOSE)
    assert len(backend.report.fused) == regions


def _time_first(x: Tensor) -> Tensor:
    return F.dropout(x.transpose(0, 1), _SURE) * 2 + 1


def _remainders(x: Tensor) -> Tensor:
    """Calls an operator that no region has; its result has the strides of a region's."""
    return torch.fmod(_time_first(x), 64.0)


def _remainders_changed(x: Tensor) -> Tensor:
    y = _remainders(x)
    y.transpose(0, 1).view(8, 16).diagonal().mul_(2)
    return y


def _by_another_library(x: Tensor) -> Tensor:
    y = _remainders(x)
    return y + _in_memory(y.detach())


@torch.library.custom_op("fusedops_tests::in_memory", mutates_args=())
def _in_memory(x: Tensor) -> Tensor:
    """The elements in their order in memory."""
    return x.as_strided(x.shape, torch.empty(x.shape).stride()).clone()


@_in_memory.register_fake
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
        lambda x: F.dropout(x, _SURE) * 2,
        lambda x: F.dropout(x.permute(1, 2, 0)[..., None] * 2, _SURE).mul(3),
    ],
)
def test_results_lie_in_memory_as_they_did(function: Callable[[Tensor], Tensor]) -> None:
    x, cotangent = randn(2, 4, 16).requires_grad_(), None
    result, backend = [], Backend()
    for call in (function, torch.compile(function, backend=backend, fullgraph=True)):
        y = call(x)
        cotangent = randn(*y.shape) if cotangent is None else cotangent
        result.append((y, *torch.autograd.grad(y, x, cotangent)))
    strides = [
        [step for step, size in zip(y.stride(), y.shape, strict=True) if size > 1]
        for y, _ in result
    ]
    assert strides[0] == strides[1]
    for ours, eager in zip(*reversed(result), strict=True):
        torch.testing.assert_close(ours, eager, **_CLOSE)
    assert len(backend.report.fused) == 1


@pytest.mark.parametrize("read", [lambda y: y, lambda y: y.as_strided((4, 16), (16, 2)) * 2])
def test_columns_that_are_changed_in_place_stay_where_they_are(
    read: Callable[[Tensor], Tensor],
) -> None:
    """An operator in place of the in-place change would return adjacent columns."""

    def function(x: Tensor) -> Tensor:
        columns = torch.fmod(_norm(x), 64.0)[..., ::2]
        columns.add_(1)
        return read(columns)

    x = randn(4, 4, 32)
    ours, eager = torch.compile(function, backend=Backend(), fullgraph=True)(x), function(x)
    torch.testing.assert_close(ours, eager, **_CLOSE)
    assert ours.stride() == eager.stride()


def test_a_length_that_depends_on_data() -> None:
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


def test_changes_with_a_number() -> None:
    """`pow_` has its number where `pow` has a tensor, by the same overload's name."""

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


def test_queries_that_see_no_key() -> None:
    """Their results are zero, and so are their gradients, where PyTorch drops weights without a fused kernel."""

    def function(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=_SURE)

    inputs = [randn(1, 2, 4, 8).requires_grad_() for _ in range(3)]
    mask, cotangent, backend = (
        torch.ones(4, 4, dtype=torch.bool, device=DEVICE),
        randn(1, 2, 4, 8),
        Backend(),
    )
    mask[1] = False
    results = []
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for call in (function, torch.compile(function, backend=backend)):
            y = call(*inputs, mask)
            results.append([y, *torch.autograd.grad(y, inputs, cotangent)])
    for ours, eager in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, eager, **_CLOSE)
    assert any("_safe_softmax" in region.operators for region in backend.report.fused)


_OUTER: dict[str, Callable[[Tensor], Tensor]] = {
    "differences": lambda x: F.softplus(x[:, None, :] - x[:, :, None]).mean((1, 2)),
    "products": lambda x: (x[:, :, None] * x[:, None, :]).sum(-1),
    "ranks": lambda x: (
        torch.sigmoid((torch.tanh(x)[:, :, None] - (x * 2)[:, None, :]) * 3).sum(-1).softmax(-1)
    ),
    "a column beside a row": lambda x: (x.mean(-1, keepdim=True) - x.mean(-1)).softmax(-1),
}


@pytest.mark.parametrize("case", _OUTER)
def test_rows_beside_themselves(case: str) -> None:
    """One dimension of the input in two of a value, of which a kernel would have the diagonal.

    Values and gradients.
    """

    def function(x: Tensor, w: Tensor) -> Tensor:
        return _OUTER[case](F.layer_norm(x, (8,), w) * 0.7)

    result, backend, tensors = [], Backend(), [randn(8, 8), randn(8)]
    for call, dtype in (
        (torch.compile(function, backend=backend), torch.float32),
        (function, torch.float64),
    ):
        inputs = [t.to(dtype).requires_grad_() for t in tensors]
        y = call(*inputs)
        result.append([t.double() for t in (y, *torch.autograd.grad(y.square().sum(), inputs))])
    for ours, want in zip(*result, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-5)
    assert backend.report.regions
