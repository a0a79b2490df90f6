"""Generated kernels with several tiles for a row, or several programs for a row, against fp64.

The allowed error is 64 roundings of the largest magnitude in fp32. A sum of 900 terms of order one
has lanes of at most eight terms and a tree of at most eight levels; some thirty operators follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops
from fusedops.compiler import launching
from fusedops.compiler.function import Rowwise
from fusedops.core.configs.tuning import forced
from fusedops.core.configs.tuning_key import Config
from fusedops.core.launches import launch
from fusedops.norms.operator import NORM
from support import DEVICE, INTERPRETED
from waiting_programs import launch_twice

pytestmark = pytest.mark.kernels

_ROWS, _COLS = 5, 900
# Each program has three tiles of 128 columns. Three programs share 900 columns; the last has idle
# lanes.
_SHARED = Config(block_n=128, rows=2, warps=1, stages=2, per_sm=1, parts=3)
# One program has whole rows, in eight tiles.
_WHOLE = Config(block_n=128, rows=2, warps=1, stages=2, per_sm=1, parts=8)


def _layer_norm(x: Tensor, weight: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Two sums, and a second output; its gradient is read after programs exchanged the sums."""
    return F.layer_norm(x, x.shape[-1:], 1 + weight, shift), x * 2


def _plain_layer_norm(x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, shift)


def _layer_norm_by_hand(x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    return fusedops.layer_norm(x, x.shape[-1:], weight, shift)


def _polynomial_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Three norms of one row, so three sums, which take two words to exchange."""

    def norm(v: Tensor) -> Tensor:
        return v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)

    return norm(x * x * x) * weight + norm(x * x) + norm(x)


def _scaled_softmax(x: Tensor, scale: Tensor) -> Tensor:
    """One sum in the backward, one number of each row with a gradient, and no sum over rows."""
    return torch.softmax(x, -1) * scale


def _gate(x: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """No reduction: programs share columns and exchange nothing."""
    return torch.tanh(x + bias) * gate


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Tensor:
    """Two parts alternate in memory: in a vector, in loads and stores of rows, and in two sums."""
    y = F.rms_norm(x, x.shape[-1:], weight, 1e-6)
    even, odd = y[..., ::2], y[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def _dynamic_tanh(x: Tensor, alpha: Tensor, weight: Tensor) -> Tensor:
    """The gradient of ``alpha``, a single number, is summed over rows first, then over columns."""
    return torch.tanh(alpha * x) * weight


def _quotient(x: Tensor, bias: Tensor) -> Tensor:
    """Absent rows are loaded as zeros, for which the gradient of the bias is NaN."""
    return bias / x


def _quotient_of_number(x: Tensor, number: Tensor) -> Tensor:
    """As `_quotient`, with a sum over rows and columns."""
    return number / x


def _weights_of_group(x: Tensor, residual: Tensor, vector: Tensor, number: Tensor) -> Tensor:
    """A vector of each group, which needs the group's number and a sum of the vector.

    Two norms are before it, so that there are phases in which the sum is not yet computed.
    """
    size = x.shape[-1:]
    weights = vector.square() * number
    normalized = F.rms_norm(torch.tanh(F.rms_norm(x + residual, size)), size)
    return normalized * (weights / (1.0 + weights.sum(-1, keepdim=True)))


def _own_names(
    sum: Tensor,  # noqa: A002
    step: Tensor,
    _: Tensor,
    EARLY: Tensor,
    INDEX: Tensor,
    PERSISTENT: Tensor,
) -> Tensor:
    """The arguments have names that the kernels use too; the third sum over rows is ``sum2``."""
    sum = torch.tanh(sum + EARLY) * step + _  # noqa: A001
    return F.rms_norm(sum, sum.shape[-1:], INDEX, 1e-6) + PERSISTENT


def _shapes(function: Callable[..., Any], rows: int, cols: int) -> tuple[tuple[int, ...], ...]:
    row, vector = (rows, cols), (cols,)
    return {
        _layer_norm: (row, vector, vector),
        _polynomial_norm: (row, vector),
        _scaled_softmax: (row, (rows, 1)),
        _gate: (row, row, vector),
        _quotient: (row, vector),
        _quotient_of_number: (row, (1,)),
        _weights_of_group: ((2, 20, cols), (2, 20, cols), (2, 1, cols), (2, 1, 1)),
        _own_names: (row, row, row, vector, vector, vector),
        _dynamic_tanh: (row, (1,), vector),
        _rotated: ((rows, 2 * cols), vector, vector, (2 * cols,)),
        _plain_layer_norm: (row, vector, vector),
        _layer_norm_by_hand: (row, vector, vector),
    }[function]


def _check(function: Callable[..., Any], rows: int = _ROWS, cols: int = _COLS) -> None:
    """Compares outputs and gradients of the fused function with those of fp64."""
    generator = torch.Generator().manual_seed(3)
    exact = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in _shapes(function, rows, cols)
    ]
    tensors = [t.detach().float().to(DEVICE).requires_grad_() for t in exact]
    for t, reference in zip(tensors, exact, strict=True):
        reference.data = t.detach().double().cpu()
    results, expected = _tuple(_fused(function)(*tensors)), _tuple(function(*exact))
    cotangents = [torch.randn(e.shape, generator=generator, dtype=torch.float64) for e in expected]
    cotangents = [c.float().double() for c in cotangents]
    results += torch.autograd.grad(results, tensors, [c.float().to(DEVICE) for c in cotangents])
    expected += torch.autograd.grad(expected, exact, cotangents)
    for result, reference in zip(results, expected, strict=True):
        bound = 64 * torch.finfo(torch.float32).eps * reference.detach().abs().max().clamp(min=1.0)
        torch.testing.assert_close(
            result.detach().cpu().double(), reference.detach(), rtol=0.0, atol=float(bound)
        )


def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as generated kernels, or itself if its kernels are handwritten."""
    if function is _layer_norm_by_hand:
        return function
    return fusedops.rowwise(function, strict=True)


def _tuple(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, tuple) else [value]


_FUNCTIONS = (
    _layer_norm,
    _polynomial_norm,
    _scaled_softmax,
    _own_names,
    _rotated,
    _gate,
    _quotient,
    _quotient_of_number,
    _weights_of_group,
    _dynamic_tanh,
)
# These reduce no rows, so each program may have some of the columns and exchange nothing.
_ELEMENTWISE = (_gate, _quotient)
# In the last ones a program has the whole row: it sums a number's gradient, or rows are in groups.
_OF_ONE_LAUNCH = (*_ELEMENTWISE, _dynamic_tanh, _quotient_of_number, _weights_of_group)


@pytest.mark.parametrize("function", _FUNCTIONS)
def test_tiles_side_by_side(function: Callable[..., Any]) -> None:
    with forced("rowwise_forward", _WHOLE), forced("rowwise_backward", _WHOLE):
        _check(function)


@pytest.mark.parametrize("function", _FUNCTIONS)
def test_rows_that_programs_share(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "waits", lambda index, acc, programs: False)
    with (
        forced("rowwise_forward", _WHOLE),
        forced("rowwise_backward", _SHARED),
        launch.record() as names,
    ):
        _check(function)
    # Two launches exchange sums: in the first, programs write their sums; in the second, they read
    # the sums of the other programs.
    assert names.count("backward_kernel") == (1 if function in _OF_ONE_LAUNCH else 2)


@pytest.mark.parametrize("function", _ELEMENTWISE)
def test_forward_whose_programs_share_columns(function: Callable[..., Any]) -> None:
    with forced("rowwise_forward", _SHARED), forced("rowwise_backward", _WHOLE):
        _check(function)


@pytest.mark.parametrize("function", _ELEMENTWISE)
def test_partial_sums_of_programs_that_share_columns(function: Callable[..., Any]) -> None:
    """Twelve tiles of rows: several programs have partial sums of each column."""
    config = dataclasses.replace(_SHARED, per_sm=6)
    with (
        forced("rowwise_forward", _WHOLE),
        forced("rowwise_backward", config),
        launch.record() as names,
    ):
        _check(function, rows=24)
    assert names.count("reduce_kernel") == 1


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU programs run at the same time")
@pytest.mark.parametrize("function", _FUNCTIONS[:5])
def test_rows_whose_programs_wait(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the interpreter programs run one after another: see `launch_twice`."""
    waiting = launch_twice(monkeypatch)
    with forced("rowwise_forward", _WHOLE), forced("rowwise_backward", _SHARED):
        _check(function)
    assert waiting


@pytest.mark.gpu
@pytest.mark.parametrize("function", _FUNCTIONS[:5])
def test_programs_wait_on_a_gpu(function: Callable[..., Any]) -> None:
    assert launch.waits(0, torch.float32, programs=3)
    with forced("rowwise_forward", _WHOLE), forced("rowwise_backward", _SHARED):
        _check(function)


def _capped_softmax(x: Tensor) -> Tensor:
    return torch.softmax(50.0 * torch.tanh(x / 50.0), -1)


def _biased_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def _softmax_of_softmax(x: Tensor) -> Tensor:
    return torch.softmax(_capped_softmax(torch.tanh(x)), -1)


def _seven_vectors(
    x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor
) -> Tensor:
    for vector in (a, b, c, d, e, f, g):
        x = torch.tanh(x * vector)
    return x


_PERSISTENT_TILE = Config(block_n=1024, rows=2, warps=4, stages=3, per_sm=4)


# In bf16, on an H200: see `compiler.configs`.
@pytest.mark.parametrize(
    ("function", "cols", "vectors", "config"),
    [
        pytest.param(_capped_softmax, 1024, 0, _PERSISTENT_TILE, id="bound by instructions"),
        pytest.param(
            lambda x: torch.softmax(x, -1),
            1024,
            0,
            Config(block_n=1024, rows=1, warps=2),
            id="bound by memory",
        ),
        pytest.param(
            _softmax_of_softmax,
            4096,
            0,
            Config(block_n=4096, rows=1, warps=8),
            id="bound by instructions, without a loop",
        ),
        pytest.param(_biased_gelu, 11008, 1, _PERSISTENT_TILE, id="tiles of columns"),
        pytest.param(
            _biased_gelu,
            4500,
            1,
            Config(block_n=1024, rows=1, warps=4, stages=4, per_sm=2, parts=5),
            id="elements loaded one by one",
        ),
        pytest.param(
            _seven_vectors,
            4096,
            7,
            Config(block_n=4096, rows=2, warps=16, stages=3, per_sm=1, registers=128),
            id="many sums",
        ),
    ],
)
def test_config_of_a_backward(
    function: Callable[..., Any], cols: int, vectors: int, config: Config
) -> None:
    shapes = [(8192, cols), *[(cols,)] * vectors]
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    leaves = [tensor.requires_grad_() for tensor in tensors]
    program = Rowwise(function)._programs.find(leaves, autocast=False).program
    _, (_, request, _) = launching.chosen(program, device_index=-1, tensors=leaves)
    assert request.config == config


def test_backward_without_sums_over_rows_has_a_program_for_each_tile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build, grids = launch.build, list[int]()

    def build_recorded(kernel: Any, *args: Any, **kwargs: Any) -> launch.Variant:
        variant = build(kernel, *args, **kwargs)

        def launch_recorded(grid_x: int, *arguments: Any) -> None:
            grids.append(grid_x)
            variant(grid_x, *arguments)

        return launch_recorded

    monkeypatch.setattr(launch, "build", build_recorded)
    rows = 4 * launch.processors(0 if DEVICE.type == "cuda" else -1) + 1
    x = torch.randn(rows, 300, device=DEVICE, requires_grad=True)
    with (
        forced("rowwise_forward", Config(block_n=512, rows=1, warps=4)),
        forced("rowwise_backward", Config(block_n=512, rows=1, warps=4)),
    ):
        fusedops.rowwise(lambda x: torch.softmax(x, -1), strict=True)(x).sum().backward()
    assert grids == [rows, rows]


@pytest.mark.parametrize(
    ("function", "kernel"),
    [(_plain_layer_norm, "rowwise_backward"), (_layer_norm_by_hand, "norm_backward")],
)
def test_wide_programs_load_parameters_for_each_row(
    function: Callable[..., Any], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For more than 8192 columns, registers hold two sums of each column, and no parameters."""
    monkeypatch.setattr(NORM, "native_elements", 0)
    with forced(kernel, Config(block_n=1024, rows=1, warps=4, per_sm=1, parts=9)):
        _check(function, cols=8200)
