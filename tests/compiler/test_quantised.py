"""`fusedops.rowwise`: casts to few bits have PyTorch's bits, and PyTorch's derivative."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusedops
from support import DEVICE

kernels = pytest.mark.kernels
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32]


def _named(dtypes: list[torch.dtype]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dtype", dtypes, ids=lambda dtype: str(dtype)[6:])


def _every_bfloat16() -> Tensor:
    """Returns all numbers of bf16, NaNs of both signs among them."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    return numbers.view(torch.bfloat16).view(64, 1024)


def _near_roundings() -> Tensor:
    """Returns fp32 numbers at and beside all ties and numbers of both floats of 8 bits."""
    codes = torch.arange(1 << 8, dtype=torch.int32).to(torch.uint8)
    exact = torch.cat([codes.view(dtype).float() for dtype in FLOAT8])
    exact = exact[exact.isfinite()].unique()
    ties = (exact[1:] + exact[:-1]) / 2
    limits = torch.tensor([464.0, 480.0, 61440.0, 65536.0, 3e38, math.inf, 1e-45, 2.0**-17])
    numbers = torch.cat([exact, ties, limits, -limits])
    infinity = torch.tensor(math.inf)
    beside = [torch.nextafter(numbers, infinity), torch.nextafter(numbers, -infinity)]
    nan = torch.tensor([math.nan, -math.nan])
    flat = torch.cat([numbers, *beside, nan])
    return torch.cat([flat, flat.new_zeros(-len(flat) % 48)]).view(-1, 48)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().view(torch.uint8)


@kernels
@_named(FLOAT8)
@pytest.mark.parametrize("numbers", [_every_bfloat16, _near_roundings])
def test_cast_to_8_bits_has_the_bits_of_pytorch(
    numbers: Callable[[], Tensor], dtype: torch.dtype
) -> None:
    """Numbers out of range are NaN or saturate, as in the release of PyTorch; NaNs keep signs."""
    x = numbers()
    expected = x.to(dtype)
    result = fusedops.rowwise(lambda x: x.to(dtype), strict=True)(x.to(DEVICE))
    assert result.dtype == dtype
    assert torch.equal(_bits(result), _bits(expected))


@kernels
@_named(FLOAT8)
@pytest.mark.parametrize("computed", [torch.float32, torch.float64])
def test_computed_number_out_of_range_is_that_of_pytorch(
    computed: torch.dtype, dtype: torch.dtype
) -> None:
    x = torch.cat([_near_roundings(), _every_bfloat16()[:, :48].float()]).to(computed)
    expected = (x * 0.5).to(dtype).float()
    result = fusedops.rowwise(lambda x: (x * 0.5).to(dtype), strict=True)(x.to(DEVICE))
    torch.testing.assert_close(result.float().cpu(), expected, rtol=0, atol=0, equal_nan=True)


@kernels
@_named(FLOAT8)
def test_input_of_8_bits_is_read_as_pytorch_reads_it(dtype: torch.dtype) -> None:
    """Every number, with a scale for each row; rows of 24 columns leave lanes idle."""
    codes = torch.arange(1 << 8, dtype=torch.int32).to(torch.uint8)
    q = codes.repeat(3).view(dtype).view(32, 24).to(DEVICE)
    scale = torch.rand(32, 1, device=DEVICE)
    result = fusedops.rowwise(lambda q, s: q.float() * s, strict=True)(q, scale)
    torch.testing.assert_close(result, q.float() * scale, rtol=0, atol=0, equal_nan=True)


@kernels
@_named(INTEGERS)
def test_cast_to_integers_has_the_bits_of_pytorch(dtype: torch.dtype) -> None:
    """Floats in range are truncated; those of unsigned integers wrap around, as integers do."""
    limits = torch.iinfo(dtype)
    largest = min(limits.max, 2**24)  # fp32 has all integers up to here
    halves = torch.linspace(max(limits.min, -(2**24)), largest, 120).view(5, 24)
    if dtype == torch.uint8:
        halves = halves * 8 - 600.0
    x = halves.to(DEVICE)
    long = (halves * 1000).long().to(DEVICE)
    function = fusedops.rowwise(lambda x, i: (x.to(dtype), i.to(dtype)), strict=True)
    floats, integers = function(x, long)
    assert torch.equal(floats.cpu(), halves.to(dtype))
    assert torch.equal(integers, long.to(dtype))


@kernels
@_named([torch.float32, torch.float64])
@pytest.mark.parametrize("decimals", [0, 1, 2, -1, -3])
def test_round_is_to_even_and_keeps_the_sign_of_zero(dtype: torch.dtype, decimals: int) -> None:
    ends = [2.0**22 + 0.5, 2.0**23 - 0.5, 2.0**23 + 1, 1e30, math.inf, math.nan]
    numbers = torch.tensor([-0.5, -0.2, 0.5, 1.5, 2.5, -2.5, 0.49999997, 25.0, *ends], dtype=dtype)
    step = 10.0**-decimals
    halves = (torch.arange(64, dtype=dtype) + 0.5) * step
    numbers = torch.cat([numbers, halves, torch.rand(178, dtype=dtype) * 100 * step])
    x = torch.cat([numbers, -numbers]).view(2, -1)
    expected = x.round(decimals=decimals)
    result = fusedops.rowwise(lambda x: x.round(decimals=decimals), strict=True)(x.to(DEVICE))
    torch.testing.assert_close(result.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    # A GPU computes NaNs without a sign.
    assert ((result.cpu().signbit() == expected.signbit()) | expected.isnan()).all()


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    # A product with the reciprocal, as a GPU computes a quotient by a number.
    scale = (x.float().abs().amax(-1, keepdim=True) * (1 / 448)).clamp(min=1e-12)
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


@kernels
def test_scale_of_a_row_and_quantised_row() -> None:
    """The scales are PyTorch's, bit for bit, in bf16 as well as in fp32."""
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(7, 96).to(dtype).to(DEVICE)
        q, scale = fusedops.rowwise(_quantised, strict=True)(x)
        assert torch.equal(scale, _quantised(x)[1])
        # A GPU's quotient has an error of two units: the result is a rounding of one so near.
        error = 4 * torch.finfo(torch.float32).eps
        exact = x.double() / scale.double()
        ends = [
            (exact * factor).to(torch.float8_e4m3fn).float() for factor in (1 - error, 1 + error)
        ]
        between = (torch.minimum(*ends) <= q.float()) & (q.float() <= torch.maximum(*ends))
        assert between.all()


@kernels
def test_straight_through_estimator_has_the_gradient_of_its_input() -> None:
    def estimated(x: Tensor, scale: Tensor) -> Tensor:
        q = (x / scale).round().clamp(-8, 7) * scale
        return x + (q - x).detach()

    x = torch.randn(5, 24, device=DEVICE, requires_grad=True)
    scale = torch.full((24,), 0.25, device=DEVICE)
    result = fusedops.rowwise(estimated, strict=True)(x, scale)
    assert torch.equal(result, estimated(x, scale))
    cotangent = torch.randn_like(x)
    (gradient,) = torch.autograd.grad(result, x, cotangent)
    assert torch.equal(gradient, cotangent)


@kernels
def test_gradient_through_casts_to_8_bits_is_that_of_casts() -> None:
    """The backward reads what the forward read: values in 8 bits, beside the weight's gradient."""

    def weighted(x: Tensor, w: Tensor) -> Tensor:
        return (x * 3).to(torch.float8_e4m3fn).float() * w

    x = torch.randn(5, 24, device=DEVICE, requires_grad=True)
    w = torch.randn(24, device=DEVICE, requires_grad=True)
    cotangent = torch.randn_like(x)
    results = torch.autograd.grad(fusedops.rowwise(weighted, strict=True)(x, w), (x, w), cotangent)
    # PyTorch rounds the gradient of a cast to the dtype of its result.
    expected = torch.autograd.grad(weighted(x, w), (x, w), cotangent)
    torch.testing.assert_close(results[0], 3 * cotangent * w.detach())
    torch.testing.assert_close(results[1], expected[1])


@kernels
@_named(FLOAT8)
@pytest.mark.parametrize("name", ["neg", "sum", "add", "lt"])
def test_arithmetic_of_8_bits_is_refused(name: str, dtype: torch.dtype) -> None:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "neg": lambda q: -q,
        "sum": lambda q: q.sum(-1),
        "add": lambda q: q + q,
        "lt": lambda q: q < q,
    }
    q = torch.zeros(5, 24, device=DEVICE).to(dtype)
    with pytest.raises(fusedops.NotRowwiseError, match=r"arithmetic of float8|not have"):
        fusedops.rowwise(functions[name], strict=True)(q)
