"""Special cases in which results were once wrong, compared with PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops

N = 8


def _close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "lazy",
    [torch._neg_view, lambda t: torch._efficientzerotensor(t.shape, device=t.device)],
    ids=["negative", "zeros"],
)
def test_strided_rows_with_a_lazy_negation_or_of_lazy_zeros(
    lazy: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    x = lazy(torch.randn(4, 2 * N, device=device))[:, :N]
    plain = torch.empty(4, N, device=device).copy_(x)
    weight, bias = torch.randn(2, N, device=device)
    _close(fusedops.layer_norm(x, N, weight, bias), F.layer_norm(plain, (N,), weight, bias))
    _close(fusedops.swiglu(x, x), F.silu(plain) * plain)
    _close(fusedops.bias_dropout_add(x, bias, x, p=0.0), plain + bias + plain)
    leaf = torch.randn(4, N, device=device, requires_grad=True)
    ours, theirs = (
        torch.autograd.grad(f(leaf, (N,), weight), leaf, x)
        for f in (fusedops.layer_norm, F.layer_norm)
    )
    _close(ours[0], theirs[0])


def test_randomness_of_vmap_with_an_input_that_is_not_batched(device: torch.device) -> None:
    x, weights = torch.randn(4, 32, device=device), torch.ones(3, 32, device=device)
    call = lambda w: fusedops.bias_dropout_add_ln(x, None, None, w, None, p=0.5)  # noqa: E731
    different = torch.vmap(call, randomness="different")(weights)
    assert not torch.equal(different[0], different[1])
    same = torch.vmap(call, randomness="same")(weights)
    assert torch.equal(same[0], same[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(call)(weights)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: fusedops.layer_norm(x, N, w),
        lambda x, w: fusedops.rms_norm(x, N, w),
        lambda x, w: fusedops.bias_act(x, w),
    ],
    ids=["layer", "rms", "act"],
)
def test_vmap_of_autograd_grad(
    call: Callable[[Tensor, Tensor], Tensor], device: torch.device
) -> None:
    """The forward runs before vmap, in eager PyTorch."""
    x, weight = (torch.randn(shape, device=device, requires_grad=True) for shape in ((4, N), (N,)))
    y, cotangents = call(x, weight), torch.randn(5, 4, N, device=device)
    mapped = torch.vmap(lambda v: torch.autograd.grad(y, (x, weight), v, retain_graph=True))(
        cotangents
    )
    for i, cotangent in enumerate(cotangents):
        for ours, theirs in zip(
            mapped, torch.autograd.grad(y, (x, weight), cotangent, retain_graph=True), strict=True
        ):
            _close(ours[i], theirs)


def test_transforms_inside_compiled_code(device: torch.device, fresh_dynamo: None) -> None:
    x, weight = torch.randn(4, N, device=device), torch.randn(N, device=device)
    loss = lambda norm: lambda t: norm(t, (N,), weight).square().sum()  # noqa: E731
    compiled = torch.compile(torch.func.grad(loss(fusedops.layer_norm)), backend="eager")
    _close(compiled(x), torch.func.grad(loss(F.layer_norm))(x))
    drop = torch.vmap(
        lambda t: fusedops.bias_dropout_add(t, None, None, p=0.5), randomness="different"
    )
    masks = torch.compile(drop, backend="eager")(torch.ones(2, 64, device=device))
    assert not torch.equal(masks[0], masks[1])


def test_jagged_tensors(device: torch.device) -> None:
    n = torch.nested.nested_tensor(
        [torch.randn(2, N), torch.randn(3, N)], layout=torch.jagged, device=device
    )
    bias, weight = torch.randn(2, N, device=device)
    rows = n.values()
    _close(fusedops.bias_gelu(n, bias).values(), F.gelu(rows + bias))
    _close(fusedops.swiglu(n, n).values(), F.silu(rows) * rows)
    _close(
        fusedops.rms_norm(n, N, weight, weight_offset=1.0).values(),
        F.rms_norm(rows, (N,), weight + 1.0),
    )
    _close(fusedops.layer_norm(n, N, weight).values(), F.layer_norm(rows, (N,), weight))
    with pytest.raises(ValueError, match="eps must be at least 0"):
        fusedops.layer_norm(n, N, weight, eps=-1.0)
