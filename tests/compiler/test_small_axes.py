"""`fusedops.rowwise`: reductions over a small dimension beside the columns, which is unrolled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops
from fusedops.compiler.launching import chosen
from fusedops.compiler.planning import Plan, planned
from fusedops.compiler.programs import Program
from fusedops.compiler.rows import structured
from fusedops.compiler.structure import Structure
from fusedops.compiler.tracing import trace
from rowwise_checks import check, rowwise
from rowwise_functions import RowwiseFunction
from support import DEVICE

kernels = pytest.mark.kernels

Shape = tuple[int, ...]


def _streams(x: Tensor, mixing: Tensor, out: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Streams of hyper-connections (arXiv:2409.19606): their mix, a new one, and the norm."""
    mixed = (mixing.softmax(-1)[..., None] * x[:, None]).sum(-2) + out[:, None]
    return mixed, F.rms_norm(mixed.amax(-2), weight.shape, weight, 1e-6)


def _hyper_connection(x: Tensor, out: Tensor, mixing: Tensor, weights: Tensor) -> Tensor:
    """The mix alone: unlike in `_streams`, nothing reduces over the mixes."""
    mixed = (mixing[..., None] * x.unsqueeze(-3)).sum(-2)
    return mixed + weights[..., None] * out.unsqueeze(-2)


def _shapes_of_streams(rows: int, streams: int, mixes: int, cols: int) -> dict[str, Shape]:
    return {
        "x": (rows, streams, cols),
        "out": (rows, cols),
        "mixing": (rows, mixes, streams),
        "weights": (rows, mixes),
    }


def _doubly_stochastic(x: Tensor, steps: int = 3) -> Tensor:
    """Iterations of Sinkhorn and Knopp."""
    x = x.exp()
    for _ in range(steps):
        x = x / x.sum(-1, keepdim=True)
        x = x / x.sum(-2, keepdim=True)
    return x


def _attention_over_layers(a: Tensor, b: Tensor, c: Tensor, query: Tensor) -> Tensor:
    keys = torch.stack([a, b, c])
    scores = (F.rms_norm(keys, query.shape, None, 1e-6) * query).sum(-1, keepdim=True)
    return (scores.softmax(0) * keys).sum(0)


_SAMPLES = [
    RowwiseFunction(
        "streams",
        _streams,
        lambda rows: {"x": (rows, 4, 24), "mixing": (rows, 4, 4), "out": (rows, 24), "w": (24,)},
    ),
    RowwiseFunction(
        "streams of long rows",
        _streams,
        lambda rows: {"x": (rows, 4, 384), "mixing": (rows, 4, 4), "out": (rows, 384), "w": (384,)},
    ),
    RowwiseFunction(
        "hyper-connection", _hyper_connection, lambda rows: _shapes_of_streams(rows, 3, 3, 33)
    ),
    RowwiseFunction(
        "hyper-connection of 18 parts",
        _hyper_connection,
        lambda rows: _shapes_of_streams(rows, 3, 6, 24),
    ),
    RowwiseFunction("doubly stochastic", _doubly_stochastic, lambda rows: {"x": (rows, 4, 4)}),
    RowwiseFunction(
        "doubly stochastic, of three", _doubly_stochastic, lambda rows: {"x": (rows, 3, 3)}
    ),
    RowwiseFunction(
        "attention over layers",
        _attention_over_layers,
        lambda rows: {**dict.fromkeys("abc", (rows, 24)), "query": (24,)},
    ),
]


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sample", _SAMPLES, ids=lambda sample: sample.name)
def test_values_and_gradients(sample: RowwiseFunction, dtype: torch.dtype) -> None:
    check(sample, rowwise(sample), sample.tensors(dtype, DEVICE))


@kernels
def test_other_numbers_of_rows() -> None:
    function = fusedops.rowwise(_doubly_stochastic, strict=True)
    for rows in (1, 2, 40):
        x = torch.randn(rows, 4, 4, device=DEVICE)
        torch.testing.assert_close(function(x), _doubly_stochastic(x))


@kernels
def test_one_row_is_tested() -> None:
    def function(x: Tensor) -> Tensor:
        return _doubly_stochastic(x) * (2 if x.shape[0] == 1 else 1)

    with pytest.raises(fusedops.NotRowwiseError, match="depends on the number of rows"):
        fusedops.rowwise(function, strict=True)(torch.randn(5, 4, 4, device=DEVICE))


@kernels
@pytest.mark.parametrize(("shape", "dim"), [((3, 17, 24), 1), ((4, 24), 0)])
def test_large_and_outermost_dimensions_are_refused(shape: tuple[int, ...], dim: int) -> None:
    with pytest.raises(fusedops.NotRowwiseError, match="it mixes rows"):
        fusedops.rowwise(lambda x: x.softmax(dim), strict=True)(torch.randn(shape, device=DEVICE))


def _structure(function: Callable[..., Tensor], *shapes: Shape) -> Structure:
    names = [f"x{i}" for i in range(len(shapes))]
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    return structured(trace(function, tensors, function, names, lambda _: None))


def _plan(steps: int) -> Plan:
    return planned(_structure(lambda x: _doubly_stochastic(x, steps), (6, 4, 4)))


def test_streams_are_read_once_for_all_mixes() -> None:
    shapes = _shapes_of_streams(8192, 4, 4, 64).values()
    plan = planned(_structure(_hyper_connection, *shapes))
    program = Program("hyper_connection", _hyper_connection, plan)
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    kernels = chosen(program, device_index=-1, tensors=tensors)
    # In rows of 64 columns. The backward reads the gradients of mixes, and writes two gradients.
    x, out, mixes = 4, 1, 4
    rows = [moved / (64 * 4) for _, _, moved in kernels]
    assert rows == [x + out + mixes, (mixes + x + out) + (x + out)]


def test_rows_that_share_a_table_are_not_unrolled() -> None:
    structure = _structure(lambda x, table: (x[..., None] * table).sum(-2), (2, 2, 4), (4, 64))
    assert len(structure.rows) == 2


def test_sums_that_outnumber_a_row_are_not_saved() -> None:
    plan = _plan(steps=5)
    assert not plan.stats
    assert plan.saved_inputs == (0,)
    # Each step has four sums of rows, and a row has 16 elements.
    assert len(_plan(steps=1).stats) == 4


def test_small_matrices_have_one_column_in_a_thread() -> None:
    program = Program("sinkhorn", _doubly_stochastic, _plan(steps=20))
    tensors = [torch.empty(4096, 4, 4, device="meta")]
    for _, request, _ in chosen(program, device_index=-1, tensors=tensors):
        assert request.config.rows * request.config.block_n == request.config.warps * 32


def test_planning_takes_time_in_proportion_to_the_steps() -> None:
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    counts = []
    for steps in (8, 16):
        calls = 0
        sys.setprofile(count)
        try:
            _plan(steps)
        finally:
            sys.setprofile(None)
        counts.append(calls)
    assert counts[1] < 2.2 * counts[0]


@kernels
def test_many_steps_beside_columns_are_refused() -> None:
    def mixed(x: Tensor, mixing: Tensor) -> Tensor:
        return (_doubly_stochastic(mixing, 20)[..., None] * x[:, None]).sum(-2)

    x, mixing = torch.randn(3, 4, 24, device=DEVICE), torch.randn(3, 4, 4, device=DEVICE)
    with pytest.raises(fusedops.NotRowwiseError, match="400 are the most"):
        fusedops.rowwise(mixed, strict=True)(x, mixing)
