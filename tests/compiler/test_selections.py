"""`fusedops.rowwise`: the largest elements of a row, and columns that indices name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops
from rowwise_checks import check, rowwise
from rowwise_functions import RowwiseFunction
from support import DEVICE

kernels = pytest.mark.kernels


def _softmax_router(x: Tensor, bias: Tensor, k: int) -> Tensor:
    """Weights of the k experts of the largest probabilities."""
    values, _ = (x + bias).softmax(-1).topk(k, dim=-1)
    return values / values.sum(-1, keepdim=True)


def _sigmoid_router(x: Tensor, bias: Tensor, k: int) -> Tensor:
    """The same of scores, chosen with a bias that is no part of the weights."""
    scores = x.sigmoid()
    indices = (scores + bias).topk(k, dim=-1).indices
    chosen = scores.gather(-1, indices)
    return chosen / chosen.sum(-1, keepdim=True) + bias.mean()


@pytest.mark.parametrize("function", [_softmax_router, _sigmoid_router])
@pytest.mark.parametrize(
    ("cols", "k"), [(8, 8), (24, 5), (128, 1), (300, 3)], ids=["all", "some", "one", "in tiles"]
)
def test_values_and_gradients(
    function: Callable[[Tensor, Tensor, int], Tensor], cols: int, k: int
) -> None:
    def of_size(x: Tensor, bias: Tensor) -> Tensor:
        return function(x, bias, k)

    sample = RowwiseFunction("router", of_size, lambda rows: {"x": (rows, cols), "bias": (cols,)})
    check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE))


@kernels
def test_gradients_in_fp64() -> None:
    def router(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return _softmax_router(x, bias, 3), _sigmoid_router(x, bias, 2)

    function = fusedops.rowwise(router, strict=True)
    x = torch.randn(2, 7, device=DEVICE, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(7, device=DEVICE, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x, bias), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (x, bias), fast_mode=True)


def _rows_with_ties(dtype: torch.dtype) -> Tensor:
    """Rows of few different numbers, and where the dtype has them of NaN and infinities."""
    x = torch.randint(-4, 5, (8, 24), generator=torch.Generator().manual_seed(3)) * 2 + 1
    x = x.to(dtype)
    if dtype.is_floating_point:
        x[1, 3::4] = torch.nan
        x[2, 5::6] = -torch.nan
        x[3] = -torch.inf
        x[4, ::5] = torch.inf
        x[5, 2:] = -torch.inf
        x[6] = torch.nan
    else:
        x[1, ::3], x[2, 1::3] = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return x.to(DEVICE)


@kernels
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int32]
)
def test_first_of_equal_elements_is_first(dtype: torch.dtype) -> None:
    x = _rows_with_ties(dtype)

    @fusedops.rowwise(strict=True)
    def top(x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = torch.topk(x, 9, dim=-1)
        return values, indices

    values, indices = top(x)
    # On a CPU, since GPUs sort NaN by its sign, which `topk` ignores.
    expected, order = (y.to(DEVICE) for y in torch.sort(x.cpu(), descending=True, stable=True))
    assert values.dtype == dtype and torch.equal(indices, order[:, :9])
    torch.testing.assert_close(values, expected[:, :9], rtol=0, atol=0, equal_nan=True)


@kernels
def test_numbers_computed_in_more_bits_are_compared_in_their_dtype() -> None:
    """Numbers that differ in fp32, and are equal in bf16."""

    @fusedops.rowwise(strict=True)
    def top(x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = (x * 3).topk(4, dim=-1)
        return values, indices

    x = (1 + torch.arange(32).flip(0) / 128).bfloat16().expand(2, 32).contiguous().to(DEVICE)
    values, indices = top(x)
    expected, order = torch.sort(x * 3, dim=-1, descending=True, stable=True)
    assert torch.equal(indices, order[:, :4]) and torch.equal(values, expected[:, :4])


@kernels
def test_mask_of_elements_as_large_as_the_last() -> None:
    @fusedops.rowwise(strict=True)
    def masked(x: Tensor) -> Tensor:
        p = x.softmax(-1)
        return torch.where(p >= p.topk(4, dim=-1).values[..., -1:], p, 0)

    x = torch.randn(6, 40, device=DEVICE)
    assert (masked(x) > 0).sum(-1).eq(4).all()


@kernels
def test_map_of_chosen_columns() -> None:
    @fusedops.rowwise(strict=True)
    def routed(x: Tensor) -> Tensor:
        weights, indices = x.softmax(-1).topk(3, dim=-1)
        return (F.one_hot(indices, 16) * weights[..., None]).sum(-2)

    x = torch.randn(6, 16, device=DEVICE)
    p = x.softmax(-1)
    expected = torch.zeros_like(p).scatter(-1, p.topk(3).indices, p.topk(3).values)
    torch.testing.assert_close(routed(x), expected)


@kernels
def test_columns_of_given_indices() -> None:
    def gathered(x: Tensor, indices: Tensor) -> Tensor:
        return x.log_softmax(-1).gather(-1, indices) * x.square().gather(-1, indices)

    x = torch.randn(6, 24, device=DEVICE, requires_grad=True)
    indices = torch.randint(0, 24, (6, 5), device=DEVICE)
    indices[:, 4] = indices[:, 0]
    result, expected = fusedops.rowwise(gathered, strict=True)(x, indices), gathered(x, indices)
    torch.testing.assert_close(result, expected)
    cotangent = torch.randn_like(result)
    (gradient,) = torch.autograd.grad(result, x, cotangent)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, x, cotangent)[0])


@kernels
def test_backward_reads_the_indices() -> None:
    x, bias = torch.randn(5, 24, device=DEVICE), torch.randn(24, device=DEVICE)
    for router in (_softmax_router, _sigmoid_router):
        source = fusedops.rowwise(lambda x, bias, router=router: router(x, bias, 3)).source(x, bias)
        forward, backward = source.split("def backward_kernel")
        assert "ordinal(" in forward and "ordinal(" not in backward


@kernels
def test_integers_of_32_and_64_bits_together() -> None:
    """A column has 32 bits, and what is computed of it may have more."""

    def computed(x: Tensor) -> tuple[Tensor, Tensor]:
        column = torch.arange(24, device=x.device)
        most = x.argmax(-1, keepdim=True)
        return most * 2**33 + (column - 5) * 2**30 * 8, torch.where(x > 0, column, most - 2**40)

    x = torch.randn(6, 24, device=DEVICE)
    results = fusedops.rowwise(computed, strict=True)(x)
    for result, expected in zip(results, computed(x), strict=True):
        assert torch.equal(result, expected)


@kernels
@pytest.mark.parametrize(
    ("function", "cols", "dtype", "message"),
    [
        (lambda x: x.topk(3, -1).values, 1025, torch.float32, "1025 columns; 1024 is the most"),
        (lambda x: x.topk(33, -1).values, 40, torch.float32, "33 elements; one to 32"),
        (lambda x: x.topk(3, -1).values, 40, torch.int64, "topk of int64"),
        (lambda x: x.gather(-1, x.long()), 40, torch.float32, "40 columns of a row, and 32"),
    ],
)
def test_refused(
    function: Callable[[Tensor], Tensor], cols: int, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(fusedops.NotRowwiseError, match=message):
        fusedops.rowwise(function, strict=True)(torch.ones(5, cols, device=DEVICE, dtype=dtype))
