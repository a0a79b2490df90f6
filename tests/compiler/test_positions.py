"""`fusedops.rowwise`: functions that use the index of a row, such as causal masks and positions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.compiler import programs
from fusedops.compiler.storing import decoded, encoded
from rowwise_checks import check, kernels, randn
from rowwise_functions import RowwiseFunction
from support import DEVICE


def indices(x: Tensor) -> tuple[Tensor, Tensor]:
    """The index of each row, and of each column."""
    return torch.arange(x.shape[-2], device=x.device)[:, None], torch.arange(
        x.shape[-1], device=x.device
    )


def causal(x: Tensor) -> Tensor:
    row, column = indices(x)
    return x.masked_fill(column > row, -math.inf).softmax(-1)


def causal_square(x: Tensor) -> Tensor:
    """A causal mask of square scores: one index, of one size, serves rows and columns."""
    index = torch.arange(x.shape[-1], device=x.device)
    return x.masked_fill(index > index[:, None], -math.inf).softmax(-1)


def symmetric_window(x: Tensor) -> Tensor:
    """A window of square scores: one index serves rows and columns, and the mask is transposed."""
    position = torch.arange(x.shape[-1], device=x.device) * 2
    far = position[None] - position[:, None] > 4
    return x.masked_fill(far | far.T, -math.inf).softmax(-1)


def triangle(x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril()
    return torch.where(mask, x, -math.inf).softmax(-1)


def upper(x: Tensor) -> Tensor:
    return x.triu(1) * 2


def rotated(x: Tensor) -> Tensor:
    """Rotates by the angle of each position. The dimension of the positions precedes the heads."""
    steps = torch.exp(torch.arange(x.shape[-1] // 2, device=x.device) * -0.7)
    angles = torch.arange(x.shape[1], device=x.device)[:, None, None] * steps
    first, second = x.chunk(2, -1)
    return torch.cat(
        (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ),
        -1,
    )


def from_the_end(x: Tensor) -> Tensor:
    """Counts rows from the end, so the number of rows is a constant of the kernel."""
    return (x * torch.arange(x.shape[-2] - 1, -1, -1, device=x.device)[:, None]).softmax(-1)


def of_two_dimensions(x: Tensor) -> Tensor:
    """One index counts the elements of two dimensions; the softmax reduces over the last."""
    index = torch.arange(x.shape[-2] * x.shape[-1], device=x.device).view(x.shape[-2:])
    return (x + 0.1 * index).softmax(-1)


def without_a_reduction(x: Tensor) -> Tensor:
    row, column = indices(x)
    return x * (row - column)


_FUNCTIONS = (
    causal,
    causal_square,
    symmetric_window,
    triangle,
    upper,
    rotated,
    from_the_end,
    of_two_dimensions,
    without_a_reduction,
)
# Functions of square scores. Their kernels, and those of `from_the_end`, have the number of rows as
# a constant.
_SQUARE = (causal_square, symmetric_window)
_OF_FIXED_ROWS = (*_SQUARE, from_the_end)
_each = pytest.mark.parametrize("function", _FUNCTIONS, ids=lambda function: function.__name__)


def _scores(
    function: Callable[..., Any], *shape: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Attention scores of this shape, with as many rows as columns if the function requires it."""
    rows, cols = shape[-2:]
    if function in _SQUARE:
        rows = cols
    return randn(*shape[:-2], rows, cols, dtype=dtype)


@kernels
@_each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_and_gradients(function: Callable[..., Any], dtype: torch.dtype) -> None:
    """There are fewer rows than columns, as many, more, or one."""
    sample = RowwiseFunction(function.__name__, function, lambda rows: {})
    fused = fusedops.rowwise(function, strict=True)
    for shape in ((2, 3, 5, 8), (2, 3, 8, 8), (1, 2, 11, 8), (2, 3, 1, 8), (1, 1, 4, 8)):
        check(sample, fused, {"x": _scores(function, *shape, dtype=dtype)})


@_each
def test_programs_serve_any_number_of_rows(function: Callable[..., Any]) -> None:
    """If the function uses the number of rows itself, each number has its own program."""
    fused = fusedops.rowwise(function, strict=True)
    for rows in (5, 8, 13):
        fused.source(_scores(function, 2, 3, rows, rows if function in _SQUARE else 8))
    (programs,) = fused._programs.known.values()
    assert len(programs) == (3 if function in _OF_FIXED_ROWS else 1)


@kernels
def test_index_of_a_long_row() -> None:
    sample = RowwiseFunction("causal", causal, lambda rows: {})
    check(sample, fusedops.rowwise(causal, strict=True), {"x": randn(2, 2, 16400)})


@pytest.mark.parametrize("function", [causal, causal_square])
def test_stored_structure_has_indexed_and_fixed_dimensions(function: Callable[..., Any]) -> None:
    """The function uses the index of dimension 1; `causal_square` also fixes the size of it."""
    fused, args = fusedops.rowwise(function)._programs, [torch.empty(2, 6, 6, device=DEVICE)]
    look, _, around = fused.looks(args).at(args)
    _, structure = fused._structure(programs._Call(args, look, around, None))
    restored = decoded(json.loads(json.dumps(encoded(structure))))
    assert restored.text() == structure.text()
    assert restored.fixed == structure.fixed == ((1,) if function is causal_square else ())
    assert restored.indexed == structure.indexed == {1}


@kernels
def test_second_derivative() -> None:
    fused, x = fusedops.rowwise(causal, strict=True), randn(2, 3, 5, 8)
    seconds = []
    for function, scores in ((fused, x), (causal, x.double())):
        leaf = scores.requires_grad_()
        (first,) = torch.autograd.grad(function(leaf).square().sum(), leaf, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), leaf)[0].double())
    torch.testing.assert_close(*seconds, rtol=1e-5, atol=1e-5)


@kernels
@pytest.mark.filterwarnings("ignore:fusedops.rowwise does not fuse:RuntimeWarning")
def test_branch_on_a_single_row() -> None:
    """The program for several rows does not run for one row."""

    def function(x: Tensor) -> Tensor:
        return torch.tanh(x) if x.shape[-2] == 1 else causal(x)

    fused = fusedops.rowwise(function)
    for rows in (5, 1, 4):
        x = randn(2, rows, 8)
        torch.testing.assert_close(fused(x), function(x), rtol=1e-5, atol=1e-5)
