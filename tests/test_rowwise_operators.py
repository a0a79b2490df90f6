"""`fusedops.rowwise`: each operator of the table, and its derivative, at kinks and ends, as PyTorch has them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.compiler import launching
from fusedops.compiler.operator import Program
from fusedops.compiler.planning import planned
from fusedops.compiler.structure import structured
from fusedops.compiler.tracing import trace
from fusedops.core import launch
from rowwise_operators import BINARY, ROWS, UNARY, numbers, pairs, rows
from support import DEVICE

_DTYPES = [torch.float32, torch.float64, torch.bfloat16]
compiler = pytest.importorskip("triton.backends.compiler")
kernels = pytest.mark.kernels
every_dtype = pytest.mark.parametrize("dtype", _DTYPES, ids=lambda dtype: str(dtype)[6:])
# An exponential of a number up to 88, in fp64 up to 709, has a relative error of as many units.
_RTOL = {torch.float32: 1e-5, torch.float64: 2e-13, torch.bfloat16: 2.0**-7}
# Beyond the smallest results that a logistic function in fp32 tells from zero.
_ATOL = {torch.float32: 1e-16, torch.float64: 1e-20, torch.bfloat16: 1e-16}
# Differences of near numbers, in which PyTorch, the kernel or both have lost all but some units of one.
_CANCELS = {"tanh", "sigmoid", "tanhshrink", "binary_cross_entropy_with_logits", "gelu", "gelu_tanh", "sinc", "cosine"}
# PyTorch's kernels for fp64 have constants in fp32.
_IN_FP32 = {"hardsigmoid", "binary_cross_entropy"}
# Of NaN as an input PyTorch's kernels have a gradient of one or of zero, by dtype and device.
_NOT_OF_NAN = {"relu6", "hardtanh", "hardshrink", "hardswish", "softshrink"}


def _results(function: Callable[..., Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """The output, and the gradients of all inputs."""
    leaves = [t.clone().requires_grad_() for t in given]
    out = function(*leaves)
    if not out.requires_grad:
        return [out]
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0], device=out.device).repeat(-(-out.shape[-1] // 4))[: out.shape[-1]]
    grads = torch.autograd.grad(out, leaves, weights.to(out.dtype).expand_as(out), allow_unused=True)
    return [out.detach(), *[torch.zeros_like(x) if g is None else g for g, x in zip(grads, given, strict=True)]]


def _differs(got: Tensor, want: Tensor, name: str, by_row: bool) -> Tensor:
    """Where two results differ, by more than roundings of an element, or of the largest in its row."""
    got, wide = got.double(), want.double()
    rtol, atol = _RTOL.get(want.dtype, 0.0), _ATOL.get(want.dtype, 0.0)
    if name in _CANCELS:
        atol = max(atol, 4 * torch.finfo(torch.float64 if want.dtype == torch.float64 else torch.float32).eps)
        rtol *= 10
    if name in _IN_FP32 and want.dtype == torch.float64:
        rtol = 1e-7
    size = wide.abs().nan_to_num(0.0, 0.0, 0.0)
    room = rtol * (size.amax(-1, keepdim=True) if by_row else size) + atol
    return ~((got == wide) | (got.isnan() & wide.isnan()) | ((got - wide).abs() <= room))


def _check(name: str, function: Callable[..., Tensor], given: Sequence[Tensor], *, by_row: bool = False) -> None:
    """As in PyTorch, or as in PyTorch in fp64."""
    named: Any = (lambda x: function(x)) if len(given) == 1 else (lambda x, y: function(x, y))
    got = _results(fusedops.rowwise(named, strict=True), given)
    want = _results(function, given)
    exact = [t.to(like.dtype) for t, like in zip(_results(function, [t.double() for t in given]), want, strict=True)]
    assert len(got) == len(want)
    for place, (one, two, three) in enumerate(zip(got, want, exact, strict=True)):
        assert one.dtype == two.dtype
        wrong = _differs(one, two, name, by_row) & _differs(one, three, name, by_row)
        if place:  # a gradient of what is no number may be none
            wrong &= ~(one.isnan() & want[0].isnan())
        if name in _NOT_OF_NAN:
            wrong &= ~given[0].isnan()
        found = [(*[t[tuple(at)].item() for t in (*given, one, two)],) for at in wrong.nonzero().tolist()[:4]]
        assert not found, f"{'gradient' if place else 'output'} {place}: inputs, found, expected: {found}"


@kernels
@every_dtype
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_number(name: str, dtype: torch.dtype) -> None:
    _check(name, UNARY[name], [numbers(dtype).to(DEVICE)])


@kernels
@every_dtype
@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_numbers(name: str, dtype: torch.dtype) -> None:
    _check(name, BINARY[name], [t.to(DEVICE) for t in pairs(dtype)])


@kernels
@every_dtype
@pytest.mark.parametrize("name", ROWS)
def test_functions_of_a_row(name: str, dtype: torch.dtype) -> None:
    _check(name, ROWS[name], [rows(dtype).to(DEVICE)], by_row=True)


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("some", range(6))
def test_operators_compile(some: int, dtype: torch.dtype) -> None:
    """In kernels of many operators each."""
    table: dict[str, Callable[..., Tensor]] = {**UNARY, **BINARY, **ROWS}
    chosen = [(function, name in BINARY) for name, function in list(table.items())[some::6]]

    def function(x: Tensor, y: Tensor) -> Tensor:
        found = [(inner(x, y) if takes_two else inner(x)).to(x.dtype) for inner, takes_two in chosen]
        return functools.reduce(torch.add, found)

    given = [torch.empty(64, 256, dtype=dtype, device="meta") for _ in range(2)]
    structure = structured(trace(function, given, function, ["x", "y"], lambda _: None))
    program = Program("function", function, planned(structure))
    for _, request, _ in launching.chosen(program, -1, given):
        launch.compile_kernel(request, compiler.GPUTarget("cuda", 90, 32))
