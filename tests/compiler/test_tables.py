"""Gradients of many tables: values, the order of additions, launches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from fusedops.compiler.horizontal import tables
from fusedops.compiler.horizontal.lookups import Lookup
from fusedops.core.launches import launch
from support import DEVICE

pytestmark = pytest.mark.kernels

ROWS, WIDTHS = (9, 3, 70, 1, 20), (16, 24, 7, 40, 16)
COUNT = 100
LAUNCHES = ["key_lookups_kernel", "sum_runs_kernel", "sum_crossing_runs_kernel"]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Let PyTorch fill memory that is not initialised with NaN, so that no kernel may read it."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _random(rows: int, count: int) -> Tensor:
    return torch.randint(rows, (count,), device=DEVICE)


def _equal(rows: int, count: int) -> Tensor:
    return torch.full((count,), rows - 1, device=DEVICE)


def _unique(rows: int, count: int) -> Tensor:
    return torch.randperm(rows, device=DEVICE)[:count]


def _strided(rows: int, count: int) -> Tensor:
    return torch.randint(rows, (count, 3), device=DEVICE)[:, 1]


def _expanded(rows: int, count: int) -> Tensor:
    return torch.randint(rows, (1,), device=DEVICE).expand(count)


def _gradients(
    rows: Sequence[int],
    indices: Sequence[Tensor],
    grads: Sequence[Tensor],
    padding: Sequence[int] | None = None,
    needed: Sequence[bool] | None = None,
) -> list[Tensor | None]:
    dtype = str(indices[0].dtype).removeprefix("torch.")
    lookup = Lookup(0, dtype, tuple(rows), tuple(padding or [-1] * len(rows)))
    buffer = torch.cat([grad.reshape(-1) for grad in grads])
    widths = [grad.shape[1] for grad in grads]
    wanted = needed or [True] * len(rows)
    return tables.gradients_of_tables(lookup, widths, buffer, wanted, indices)


def _check(actual: Tensor | None, index: Tensor, grad: Tensor, rows: int, padding: int) -> None:
    """Compare with sums in fp64.

    A sum of n numbers is off by at most n units of the sum of their absolute values, in fp32 or
    wider, and by half a unit of itself, in its own dtype.
    """
    assert actual is not None and actual.shape == (rows, grad.shape[1])
    assert actual.dtype == grad.dtype and actual.is_contiguous()
    index, wide = index.long(), grad.double()
    exact = wide.new_zeros(rows, wide.shape[1]).index_add(0, index, wide)
    magnitudes = torch.zeros_like(exact).index_add(0, index, wide.abs())
    if padding >= 0:
        exact[padding] = 0
    acc = torch.promote_types(grad.dtype, torch.float32)
    counts = index.bincount(minlength=rows)[:, None]
    # The reference is of fp64, too.
    bound = 2 * counts * torch.finfo(acc).eps * magnitudes
    bound += torch.finfo(grad.dtype).eps * exact.abs()
    assert ((actual.double() - exact).abs() <= bound).all()


_Pattern = Callable[[int, int], Tensor]
CASES: dict[str, tuple[_Pattern, int, torch.dtype, torch.dtype]] = {
    "random": (_random, COUNT, torch.float32, torch.int64),
    "int32": (_random, COUNT, torch.float32, torch.int32),
    "equal": (_equal, COUNT, torch.float32, torch.int64),
    # A run of more chunks than a tile of the second launch has rows.
    "many equal": (_equal, 1100, torch.float32, torch.int64),
    "strided": (_strided, COUNT, torch.float32, torch.int64),
    "expanded": (_expanded, COUNT, torch.float32, torch.int64),
    "whole chunks": (_random, 64, torch.float32, torch.int64),
    "one lookup": (_random, 1, torch.float32, torch.int64),
    "no lookups": (_random, 0, torch.float32, torch.int64),
    "bf16": (_random, COUNT, torch.bfloat16, torch.int64),
    "fp16": (_random, COUNT, torch.float16, torch.int64),
    "fp64": (_random, COUNT, torch.float64, torch.int64),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_sums_in_few_launches(name: str) -> None:
    pattern, count, dtype, index_dtype = CASES[name]
    torch.manual_seed(0)
    rows, widths = (ROWS, WIDTHS) if name != "many equal" else ((5, 1), (4, 3))
    # The last row of the first table is looked up, and has no gradient.
    padding = [-1 if name == "equal" else rows[0] - 1, *[-1] * (len(rows) - 1)]
    indices = [pattern(number, count).to(index_dtype) for number in rows]
    grads = [torch.randn(count, width, device=DEVICE).to(dtype) for width in widths]
    with launch.record() as launched:
        actual = _gradients(rows, indices, grads, padding)
    assert launched == (LAUNCHES if count else [])
    for values in zip(actual, indices, grads, rows, padding, strict=True):
        _check(*values)
    again = _gradients(rows, indices, grads, padding)
    for first, second in zip(actual, again, strict=True):
        assert first is not None and second is not None and first.equal(second)


def test_unique_rows_get_the_gradient_itself() -> None:
    """Also of tables whose rows are wider than a tile."""
    rows, widths = (40, 33, 50), (70, 16, 33)
    indices = [_unique(number, 33) for number in rows]
    grads = [torch.randn(33, width, device=DEVICE) for width in widths]
    for actual, index, grad, number in zip(
        _gradients(rows, indices, grads), indices, grads, rows, strict=True
    ):
        assert actual is not None
        assert actual.equal(grad.new_zeros(number, grad.shape[1]).index_copy(0, index, grad))


def test_keys_of_large_tables_are_int64() -> None:
    site = tables._site_of((2**30, 8, 0, -1) * 2, torch.float32, torch.int64, -1)
    with launch.collecting():
        plan = tables._new_plan(site, True, torch.device("cpu"))
    assert plan.key_dtype == torch.int64


def test_tables_without_a_gradient_are_left_out() -> None:
    needed = [True, False, True, True, False]
    indices = [_random(number, COUNT) for number in ROWS]
    grads = [torch.randn(COUNT, width, device=DEVICE) for width in WIDTHS]
    actual = _gradients(ROWS, indices, grads, needed=needed)
    assert [gradient is not None for gradient in actual] == needed
    for values in itertools.compress(
        zip(actual, indices, grads, ROWS, [-1] * len(ROWS), strict=True), needed
    ):
        _check(*values)


def _in_order(index: Tensor, grad: Tensor, rows: int) -> Tensor:
    """Return sums of runs that have at most three chunks, in the order of the kernels."""
    order = index.argsort(stable=True)
    chunks = torch.arange(len(order)) // tables._LENGTH
    partials: dict[tuple[int, int], Tensor] = {}
    for place, chunk in zip(order.tolist(), chunks.tolist(), strict=True):
        key = int(index[place]), chunk
        partials[key] = partials.get(key, torch.zeros_like(grad[0])) + grad[place]
    result = torch.zeros(rows, grad.shape[1])
    for row in range(rows):
        sums = [value for (key, _), value in partials.items() if key == row]
        if sums:
            assert len(sums) <= 3
            # The partial sums after the first are added up, and then to the first.
            result[row] = sums[0] + sum(sums[1:], torch.zeros(grad.shape[1]))
    return result


def test_order_of_additions_is_fixed() -> None:
    """The bits are those of sums in the order of lookups and chunks.

    Numbers of very different magnitude make each other order visible.
    """
    torch.manual_seed(0)
    rows, width = (3, 9, 30), 8
    # A run of the first table has three chunks.
    frequent = torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor([20, 60, 10]))
    drawn = [torch.randint(number, (90,)) for number in rows[1:]]
    indices = [frequent[torch.randperm(90)], *drawn]
    grads = [torch.randn(90, width) * torch.randn(90, width).mul(4).exp() for _ in rows]
    on_device = [index.to(DEVICE) for index in indices], [grad.to(DEVICE) for grad in grads]
    for actual, index, grad, number in zip(
        _gradients(rows, *on_device), indices, grads, rows, strict=True
    ):
        assert actual is not None and actual.cpu().equal(_in_order(index, grad, number))
