"""`add_rms_norm` and `add_layer_norm` with ``out``: the sum in a tensor of the caller's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops import quant
from fusedops.compiler.operator import Program
from fusedops.core.calls.operator import Operator
from fusedops.core.launches import launch
from support import DEVICE

kernels = pytest.mark.kernels

COLS = 96


def _rms(x: Tensor, residual: Tensor, weight: Tensor, **options: Any) -> Any:
    return fusedops.add_rms_norm(x, residual, weight, 1e-6, **options)


def _layer(x: Tensor, residual: Tensor, weight: Tensor, **options: Any) -> Any:
    return fusedops.add_layer_norm(x, residual, weight, weight * 0.5, 1e-6, **options)


_FORMATS: dict[str, quant.Format | None] = {
    "plain": None,
    "row": quant.PerRow(),
    "columns of blocks": quant.PerBlock(32, column_major=True),
    "static": quant.Static(torch.tensor(0.01, device=DEVICE), torch.int8),
}


def _tensors(
    rows: int = 5, cols: int = COLS, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = (rows, cols), (rows, cols), (cols,)
    x, residual, weight = (torch.randn(shape, generator=generator) for shape in shapes)
    return x.to(DEVICE, dtype), residual.to(DEVICE, dtype), weight.to(DEVICE)


def _assert_same(results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert len(results) == len(expected)
    for result, other in zip(results, expected, strict=True):
        assert result.dtype == other.dtype and result.stride() == other.stride()
        assert torch.equal(*[t.reshape(-1).view(torch.uint8) for t in (result, other)])


@kernels
@pytest.mark.parametrize("place", ["residual", "x", "new"])
@pytest.mark.parametrize("form", _FORMATS)
@pytest.mark.parametrize("call", [_rms, _layer])
def test_results_have_the_bits_of_a_call_without_out(
    call: Callable[..., Any], form: str, place: str
) -> None:
    x, residual, weight = _tensors()
    expected = call(x, residual, weight, quantize=_FORMATS[form])
    out = {"residual": residual, "x": x, "new": torch.empty_like(x)}[place]
    version = out._version
    with launch.record() as names:
        results = call(x, residual, weight, quantize=_FORMATS[form], out=out)
    assert len(names) == 1
    assert results[-1] is out
    assert out._version > version
    _assert_same(results, expected)


@kernels
@pytest.mark.parametrize("form", ["plain", "row"])
def test_residual_of_rows_that_are_read_twice(form: str) -> None:
    """The first pass writes no sum that the second would add again."""
    x, residual, weight = _tensors(1, 16512, torch.float32)
    expected = _rms(x, residual, weight, quantize=_FORMATS[form])
    _assert_same(_rms(x, residual, weight, quantize=_FORMATS[form], out=residual), expected)


@kernels
@pytest.mark.parametrize("form", _FORMATS)
def test_torch_compile_updates_the_residual(form: str) -> None:
    """The graph also reads the residual before the sum, and after it."""
    x, residual, weight = _tensors()
    first, second = residual.clone(), residual.clone()

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        before = residual * 2.0
        results = _rms(x, residual, weight, quantize=_FORMATS[form], out=residual)
        return (*results[:-1], before, residual + 1.0)

    expected = block(x, first)
    with launch.record() as names:
        results = torch.compile(block, backend="aot_eager", fullgraph=True)(x, second)
    assert len(names) == 1
    _assert_same((*results, second), (*expected, first))


@kernels
@pytest.mark.parametrize("form", _FORMATS)
def test_registered_operator(form: str) -> None:
    """What tracers see of its results is true, down to the strides."""
    calls: list[tuple[Any, ...]] = []
    operator = torch.ops.fusedops.add_norm_into.default

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is operator:
                calls.append(args)
            return func(*args, **(kwargs or {}))

    x, residual, weight = _tensors()
    with Calls():
        _rms(x, residual, weight, quantize=_FORMATS[form], out=torch.empty_like(x))
    (arguments,) = calls
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@kernels
@pytest.mark.parametrize("form", ["plain", "row"])
def test_no_memory_is_allocated_for_the_sum(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[tuple[Tensor | None, ...]] = []
    for operator in (Operator, Program):
        allocate = operator.allocate_except

        def recorded(*args: Any, allocate: Any = allocate) -> Any:
            allocated.append(allocate(*args))
            return allocated[-1]

        monkeypatch.setattr(operator, "allocate_except", recorded)
    x, residual, weight = _tensors()
    _rms(x, residual, weight, quantize=_FORMATS[form], out=residual)
    (tensors,) = allocated
    assert [t.shape for t in tensors if t is not None].count(x.shape) == 1


def test_without_kernels_pytorch_writes_the_sum() -> None:
    x, residual, weight = (tensor.cpu() for tensor in _tensors())
    expected = _rms(x, residual, weight)
    _assert_same(_rms(x, residual, weight, out=residual), expected)
    empty = torch.empty(0, COLS)
    assert _rms(empty, empty.clone(), weight, out=empty)[1] is empty


@kernels
def test_inference_mode() -> None:
    with torch.inference_mode():
        x, residual, weight = _tensors()
        expected = _rms(x, residual, weight)
        _assert_same(_rms(x, residual, weight, out=residual), expected)


_X = torch.randn(4, 8)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        ("sum", TypeError, "out must be a torch.Tensor, got str"),
        (_X[:2].clone(), ValueError, "out has shape (2, 8), expected (4, 8)"),
        (_X.double(), TypeError, "out has dtype torch.float64, expected torch.float32, the sum's"),
        (torch.empty(8, 4).t(), ValueError, "out has strides (1, 4), expected a contiguous tensor"),
        (torch.empty(4, 8, requires_grad=True), RuntimeError, "call it under torch.no_grad()"),
    ],
)
def test_bad_out(out: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        fusedops.add_rms_norm(_X, _X.clone(), None, out=out)


@pytest.mark.parametrize("name", ["x", "residual", "weight"])
@pytest.mark.parametrize("form", [None, quant.PerRow()])
def test_memory_in_another_order_is_refused(name: str, form: quant.Format | None) -> None:
    """The last rows of ``out`` are the first of x, or of the residual, or have the weight."""
    memory = torch.randn(6, 8)
    tensors = {"x": _X, "residual": _X.clone(), "weight": _X[0].clone()}
    tensors[name] = memory[3] if name == "weight" else memory[2:]
    with pytest.raises(ValueError, match=f"add_rms_norm: out shares memory with {name}"):
        fusedops.add_rms_norm(**tensors, quantize=form, out=memory[:4])


def test_a_weight_is_no_place_for_the_sum_of_one_row() -> None:
    """Kernels read the weight after they have written the sum."""
    weight = torch.randn(8)
    with pytest.raises(ValueError, match="out shares memory with weight"):
        fusedops.add_rms_norm(_X[0], _X[1].clone(), weight, out=weight)


def test_memory_in_another_order_is_refused_in_a_compiled_graph() -> None:
    memory = torch.randn(6, 8)

    @torch.compile(backend="eager", fullgraph=True)
    def call(residual: Tensor, out: Tensor) -> Any:
        return fusedops.add_rms_norm(_X, residual, None, out=out)

    with pytest.raises(ValueError, match="out shares memory with residual"):
        call(memory[2:], memory[:4])


def test_rows_of_one_memory_in_another_order_are_refused() -> None:
    residual = torch.randn(8, 8)
    with pytest.raises(ValueError, match="out shares memory with residual"):
        fusedops.add_rms_norm(residual, residual.t(), None, out=residual)
