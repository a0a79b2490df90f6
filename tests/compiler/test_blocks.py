"""`fusedops.rowwise`: reductions over blocks of a row, beside those over the whole row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.core.configs.tuning import forced
from fusedops.core.configs.tuning_key import Config
from fusedops.core.launches import launch
from rowwise_checks import check, rowwise
from rowwise_functions import RowwiseFunction
from support import DEVICE

kernels = pytest.mark.kernels


def _normed(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def _scaled_blocks(x: Tensor, w: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The maximum of each block, and a row that is divided by it."""
    blocks = _normed(x, w).unflatten(-1, (-1, size))
    scale = blocks.abs().amax(-1, keepdim=True) + 0.5
    return (blocks / scale).flatten(-2), scale.squeeze(-1)


def _softmax_of_blocks(x: Tensor, w: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Sums and maxima of blocks, and the largest of the maxima; results are only along blocks."""
    blocks = _normed(x, w).unflatten(-1, (-1, size))
    total = blocks.logsumexp(-1)
    return total, total - total.amax(-1, keepdim=True)


def _indexed(x: Tensor, w: Tensor, size: int) -> Tensor:
    """The indices of blocks, and of columns in blocks."""
    blocks = _normed(x, w).unflatten(-1, (-1, size))
    block = torch.arange(blocks.shape[-2], device=x.device)
    column = torch.arange(size, device=x.device)
    means = (blocks * (column + 1)).mean(-1, keepdim=True) * (block + 1)[:, None]
    return (means + blocks).flatten(-2)


def _summed(x: Tensor, w: Tensor, size: int) -> Tensor:
    """Sums whose gradients are the same along a block."""
    blocks, weights = (tensor.unflatten(-1, (-1, size)) for tensor in (x, w))
    return (blocks.sum(-1) + weights.sum(-1)) * x.detach().square().mean(-1, keepdim=True)


_FUNCTIONS = (_scaled_blocks, _softmax_of_blocks, _indexed, _summed)


def _sample(
    function: Callable[[Tensor, Tensor, int], object], cols: int, size: int
) -> RowwiseFunction:
    def of_size(x: Tensor, w: Tensor) -> object:
        return function(x, w, size)

    return RowwiseFunction("blocks", of_size, lambda rows: {"x": (rows, cols), "w": (cols,)})


def _check(
    function: Callable[[Tensor, Tensor, int], object],
    cols: int,
    size: int,
    dtype: torch.dtype = torch.float32,
    rows: int = 5,
) -> None:
    sample = _sample(function, cols, size)
    check(sample, rowwise(sample), sample.tensors(dtype, DEVICE, rows))


@kernels
@pytest.mark.parametrize("function", _FUNCTIONS)
@pytest.mark.parametrize(
    ("cols", "size"),
    [(24, 8), (256, 128), (384, 128), (768, 256), (1000, 8)],
    ids=["idle lanes", "one tile", "several tiles", "wide blocks", "part of a tile"],
)
def test_values_and_gradients(
    function: Callable[[Tensor, Tensor, int], object], cols: int, size: int
) -> None:
    _check(function, cols, size)


@kernels
@pytest.mark.parametrize("cols", [64, 384])
def test_gradient_of_a_number_is_summed_over_blocks(cols: int) -> None:
    def scaled(x: Tensor, number: Tensor) -> Tensor:
        return x.softmax(-1).unflatten(-1, (-1, 32)).amax(-1) * number

    sample = RowwiseFunction("scaled", scaled, lambda rows: {"x": (rows, cols), "number": (1,)})
    check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE))


@kernels
@pytest.mark.parametrize("dims", [(-1, 0), (-1, -2)], ids=["first", "before the last rows"])
@pytest.mark.parametrize("shape", [(2, 3), (2, 17)], ids=["rows", "groups of rows"])
def test_numbers_of_blocks_with_rows_inside(shape: tuple[int, int], dims: tuple[int, int]) -> None:
    """Scales for products that read them column by column."""

    def moved(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        row, scale = _scaled_blocks(x, w, 16)
        return row, scale.movedim(*dims)

    sample = RowwiseFunction("moved", moved, lambda rows: {"x": (*shape, 384), "w": (2, 1, 384)})
    check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE))


def test_backward_finds_the_largest_among_its_own_sums() -> None:
    """The forward's sums may have been added in another order, so that no sum equals its largest.

    The interpreter adds in one order, so the test reads the source.
    """
    x, w = torch.randn(5, 768, device=DEVICE), torch.rand(768, device=DEVICE)
    source = fusedops.rowwise(lambda x, w: _softmax_of_blocks(x, w, 256)).source(x, w)
    _, backward = source.split("def backward_kernel")
    assert "= largest(" in backward


@kernels
@pytest.mark.parametrize("cols", [64, 384])
def test_sum_over_blocks_adds_each_number_once(cols: int) -> None:
    """Equal shares of a number in each column would each be rounded, here to zero."""

    @fusedops.rowwise(strict=True)
    def scaled(x: Tensor, number: Tensor) -> Tensor:
        blocks = x.unflatten(-1, (-1, 32))
        return blocks.amax(-1) / x.amax(-1, keepdim=True) * number

    x = torch.ones(1, cols, device=DEVICE)
    number = torch.ones(1, device=DEVICE, requires_grad=True)
    least = torch.full((1, cols // 32), 2.0**-149, device=DEVICE)
    (gradient,) = torch.autograd.grad(scaled(x, number), number, least)
    assert gradient.item() == cols // 32 * 2.0**-149


@kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    _check(_scaled_blocks, 256, 32, dtype)


@kernels
def test_tiles_are_as_wide_as_blocks() -> None:
    """A config with narrower tiles has wider ones, which hold as many columns."""
    narrow = Config(block_n=128, rows=1, warps=1, parts=6)
    with forced("rowwise_forward", narrow), forced("rowwise_backward", narrow):
        _check(_scaled_blocks, 768, 256)


@kernels
@pytest.mark.parametrize("function", _FUNCTIONS)
def test_programs_that_share_rows(
    function: Callable[[Tensor, Tensor, int], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three programs have 128 columns each, of which blocks are not exchanged."""
    monkeypatch.setattr(launch, "waits", lambda index, acc, programs: False)
    whole = Config(block_n=128, rows=2, warps=1, stages=2, per_sm=1, parts=3)
    shared = Config(block_n=128, rows=2, warps=1, stages=2, per_sm=1, parts=1)
    with forced("rowwise_forward", whole), forced("rowwise_backward", shared):
        _check(function, 384, 32)


@kernels
def test_rows_that_are_read_tile_by_tile() -> None:
    _check(_scaled_blocks, 16384 + 128, 128, rows=1)


@kernels
def test_second_derivative() -> None:
    function = fusedops.rowwise(lambda x, w: _scaled_blocks(x, w, 8), strict=True)
    x = torch.randn(2, 16, device=DEVICE, dtype=torch.float64, requires_grad=True)
    w = torch.rand(16, device=DEVICE, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(function, (x, w), fast_mode=True)


@kernels
def test_slices_run_one_by_one() -> None:
    function = fusedops.rowwise(lambda x, w: _scaled_blocks(x, w, 8))
    slices = [torch.randn(3, cols, device=DEVICE) for cols in (16, 32, 48)]
    weights = [torch.rand(cols, device=DEVICE) for cols in (16, 32, 48)]
    assert "it reduces over blocks of rows" in str(function.explain_foreach(slices, weights))
    results = function.foreach(slices, weights)
    for x, w, (row, scale) in zip(slices, weights, zip(*results, strict=True), strict=True):
        expected = _scaled_blocks(x, w, 8)
        torch.testing.assert_close((row, scale), expected)


def _of_two_sizes(x: Tensor, s: Tensor) -> Tensor:
    total = x.sum(-1, keepdim=True)
    eights, fours = x.unflatten(-1, (-1, 8)), x.unflatten(-1, (-1, 16))
    return total + eights.amax(-1).sum(-1, keepdim=True) + fours.amax(-1).sum(-1, keepdim=True)


def _of_twelve(x: Tensor, s: Tensor) -> Tensor:
    return x.softmax(-1).unflatten(-1, (-1, 12)).amax(-1)


def _of_columns_of_blocks(x: Tensor, s: Tensor) -> Tensor:
    return x.softmax(-1).unflatten(-1, (-1, 8)).amax(-2)


def _with_columns_outside_rows(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    y = x.softmax(-1)
    return y.t(), y.unflatten(-1, (-1, 8)).amax(-1)


def _with_scales(x: Tensor, s: Tensor) -> Tensor:
    return (x.softmax(-1).unflatten(-1, (-1, 8)) * s[..., None]).amax(-1)


@kernels
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_of_two_sizes, "over other dimensions than elsewhere"),
        (_of_twelve, "blocks of 12 of their columns; blocks of 8, 16, 32 and so on fit"),
        (_of_columns_of_blocks, "it reduces over other dimensions than elsewhere"),
        (_with_columns_outside_rows, "the rows are not the outer dimensions"),
        (_with_scales, "s has some of the dimensions of rows whose blocks it reduces"),
    ],
)
def test_other_reductions_are_refused(
    function: Callable[[Tensor, Tensor], Tensor], message: str
) -> None:
    with pytest.raises(fusedops.NotRowwiseError, match=message):
        fusedops.rowwise(function, strict=True)(
            torch.randn(5, 816, device=DEVICE), torch.rand(5, 102, device=DEVICE)
        )
