"""Operators of slices that are rows of tables: derivatives, and checks of indices."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops
from fusedops.compiler.horizontal import launching
from fusedops.compiler.horizontal.lookups import Lookup
from fusedops.compiler.horizontal.operator import SliceGroup, group_of
from fusedops.core.calls.words import encode
from fusedops.core.launches import launch
from fusedops.core.launches.usage import usage_of
from support import DEVICE

WIDTHS, TABLES, ROWS = (16, 24, 40, 7), (100, 10, 1000, 3), 37
EPS = torch.finfo(torch.float32).eps


def _norm(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(F.layer_norm(x, x.shape[-1:], w))


def _group(widths: Sequence[int] = WIDTHS) -> SliceGroup:
    """Return the operator of norms of looked-up rows, side by side."""
    function = fusedops.rowwise(_norm)
    slices = [(torch.randn(8, width), torch.ones(width)) for width in widths]
    programs = [function._programs.find(list(pair), autocast=False).program for pair in slices]
    lookup = Lookup(0, "int64", TABLES, (-1,) * len(TABLES))
    return group_of(programs, ("lookup", "separate"), ("joint",), [lookup])


@pytest.mark.kernels
@pytest.mark.parametrize("rows", [ROWS, 0])
def test_derivatives(rows: int) -> None:
    """The second derivatives are computed by PyTorch's operators."""
    group = _group()
    call = getattr(torch.ops.fusedops, f"{group.name}_forward")
    pairs = list(zip(TABLES, WIDTHS, strict=True))
    tables = [torch.randn(*pair, device=DEVICE, requires_grad=True) for pair in pairs]
    weights = [torch.randn(width, device=DEVICE, requires_grad=True) for width in WIDTHS]
    indices = [torch.randint(count, (rows,), device=DEVICE) for count in TABLES]
    encoded = encode(group.record, (torch.float32,), True)

    def fused(*leaves: Tensor) -> Tensor:
        tensors = [*leaves[:4], *indices, *leaves[4:]]
        y: Tensor = call(tensors, None, 0, group.cols(None, ()), encoded)[0]
        return y

    def plain(*leaves: Tensor) -> Tensor:
        slices = zip(indices, leaves[:4], leaves[4:], strict=True)
        return torch.cat([_norm(F.embedding(i, table), w) for i, table, w in slices], -1)

    leaves = [*tables, *weights]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    values = []
    for function, own in ((fused, leaves), (plain, exact)):
        y = function(*own)
        first = torch.autograd.grad(y.sin().sum(), own, retain_graph=True)
        again = torch.autograd.grad(y.sin().sum(), own, create_graph=True)
        second: Sequence[Tensor] = ()
        if rows:  # PyTorch has no second derivative of an embedding without lookups
            second = torch.autograd.grad(sum(g.square().sum() for g in again), own)
        values.append([y, *first, *again, *second])
    for actual, expected in zip(*values, strict=True):
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [3, 64, 65])
@pytest.mark.parametrize("padding", [-1, 1])
def test_gradients_of_tables(rows: int, padding: int) -> None:
    """Sums of rows in fp64, of few rows and of many."""
    count, width = 4100, 5
    indices = torch.randint(rows, (count,), device=DEVICE)
    grad = torch.randn(count, width, device=DEVICE)
    lookup = Lookup(0, "int64", (rows, 7), (padding, -1))
    found, absent = lookup.gradients_of_tables([grad, None], [indices, indices])
    assert absent is None and found is not None
    exact = torch.zeros(rows, width, dtype=torch.float64, device=DEVICE)
    exact.index_add_(0, indices, grad.double())
    if padding >= 0:
        exact[padding] = 0
    # A sum of n numbers is off by at most n units of the sum of their absolute values.
    magnitudes = torch.zeros_like(exact).index_add_(0, indices, grad.double().abs())
    bound = indices.bincount(minlength=rows)[:, None] * EPS * magnitudes
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.compiled
def test_forwards_check_indices() -> None:
    """Compiles, without a GPU, kernels that read by index; the forward has assertions."""
    compiler = pytest.importorskip("triton.backends.compiler")
    hopper = compiler.GPUTarget("cuda", arch=90, warp_size=32)
    group = _group((16, 64, 128, 32))
    with launch.collecting() as requests:
        launching.prepare(group, torch.device("cpu"), 4096, (True, True), (True,))
    kernels = [launch.compile_fitting(request, 232_448, hopper) for request in requests]
    assert ["__assertfail" in kernel.asm["ptx"] for kernel in kernels] == [True, *[False] * 5]
    for compiled in kernels:
        usage = usage_of(compiled)
        assert usage.registers and not usage.spills
