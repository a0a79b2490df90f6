"""Norms and gated units with ``quantize``: values, scales, errors; one launch for all."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops
from fusedops import quant
from fusedops.core.launches import launch
from fusedops.nn import (
    FusedAddLayerNorm,
    FusedAddRMSNorm,
    FusedGEGLU,
    FusedLayerNorm,
    FusedRMSNorm,
    FusedSwiGLU,
)
from support import DEVICE

kernels = pytest.mark.kernels

ROWS, COLS = 5, 384
FLOAT8 = torch.float8_e4m3fn
_LARGEST = {FLOAT8: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
# The bits of a float's mantissa, and the exponent of its least subnormal number.
_BITS = {FLOAT8: (3, -9), torch.float8_e5m2: (2, -16)}
_EPS = 1e-6
Inputs = dict[str, Tensor]


def _layer_norm(t: Inputs, **options: Any) -> Any:
    return fusedops.layer_norm(t["x"], COLS, t["w"], t["b"], **options)


def _rms_norm(t: Inputs, **options: Any) -> Any:
    return fusedops.rms_norm(t["x"], (COLS,), t["w"], _EPS, weight_offset=1.0, **options)


def _add_layer_norm(t: Inputs, **options: Any) -> Any:
    return fusedops.add_layer_norm(t["x"], t["z"], None, None, **options)


def _add_rms_norm(t: Inputs, **options: Any) -> Any:
    return fusedops.add_rms_norm(t["x"], t["z"], t["w"], **options)


def _swiglu(t: Inputs, **options: Any) -> Any:
    return fusedops.swiglu(torch.cat([t["x"], t["z"].to(t["x"].dtype)], -1), **options)


def _geglu(t: Inputs, **options: Any) -> Any:
    return fusedops.geglu(t["x"], t["z"], "tanh", **options)


# Each function as a module, and as a call with a module's inputs and parameters.
_MODULES: dict[Callable[..., Any], Callable[..., Any]] = {
    _layer_norm: partial(FusedLayerNorm, COLS),
    _rms_norm: partial(FusedRMSNorm, COLS, _EPS, weight_offset=1.0),
    _add_layer_norm: partial(FusedAddLayerNorm, COLS),
    _add_rms_norm: partial(FusedAddRMSNorm, COLS),
    _swiglu: FusedSwiGLU,
    _geglu: partial(FusedGEGLU, "tanh"),
}
_CALLS: dict[Callable[..., Any], Callable[..., Any]] = {
    _layer_norm: lambda x, p, **o: fusedops.layer_norm(*x, COLS, p["weight"], p["bias"], **o),
    _rms_norm: lambda x, p, **o: fusedops.rms_norm(
        *x, COLS, p["weight"], _EPS, weight_offset=1.0, **o
    ),
    _add_layer_norm: lambda x, p, **o: fusedops.add_layer_norm(*x, p["weight"], p["bias"], **o),
    _add_rms_norm: lambda x, p, **o: fusedops.add_rms_norm(*x, p["weight"], **o),
    _swiglu: lambda x, p, **o: fusedops.swiglu(*x, **o),
    _geglu: lambda x, p, **o: fusedops.geglu(*x, "tanh", **o),
}
_FUNCTIONS: list[Callable[..., Any]] = [
    _layer_norm,
    _rms_norm,
    _add_layer_norm,
    _add_rms_norm,
    _swiglu,
    _geglu,
]


def _formats() -> dict[str, quant.Format]:
    return {
        "row": quant.PerRow(),
        "row int8": quant.PerRow(torch.int8),
        "row e5m2": quant.PerRow(torch.float8_e5m2),
        "block": quant.PerBlock(),
        "block int8": quant.PerBlock(16, torch.int8),
        "block columns": quant.PerBlock(64, column_major=True),
        "static": quant.Static(torch.tensor(0.004, device=DEVICE)),
        "static int8": quant.Static(torch.tensor([0.01], device=DEVICE), torch.int8),
        "static fp16": quant.Static(torch.tensor(1.3e-5, device=DEVICE).half()),
    }


def _tensors(dtype: torch.dtype) -> Inputs:
    generator = torch.Generator().manual_seed(5)
    shapes = {"x": (ROWS, COLS), "z": (ROWS, COLS), "w": (COLS,), "b": (COLS,)}
    tensors = {name: torch.randn(s, generator=generator) for name, s in shapes.items()}
    tensors["x"][2] = 0.0  # a row of zeros in gated units
    tensors["z"] = tensors["z"].bfloat16().float()  # exact in both dtypes
    return {
        name: tensor.to(DEVICE, torch.float32 if name == "z" else dtype)
        for name, tensor in tensors.items()
    }


def _assert_quantised(values: Tensor, scales: Tensor, exact: Tensor, form: quant.Format) -> None:
    """Asserts that scales are those of the exact values, and that values are rounded once.

    The kernel computes in fp32, with some 10 roundings, among them those of sums of 384 terms.
    """
    slack = 32 * torch.finfo(torch.float32).eps
    dtype, largest = form.dtype, _LARGEST[form.dtype]
    assert values.dtype == dtype
    assert values.shape == exact.shape
    if isinstance(form, quant.Static):
        assert scales is form.scale
    else:
        assert scales.dtype == torch.float32
        blocks = exact
        if isinstance(form, quant.PerBlock):
            blocks = exact.unflatten(-1, (-1, form.size))
        expected = (blocks.abs().amax(-1, keepdim=True) / largest).clamp(min=1e-12)
        if isinstance(form, quant.PerBlock):
            expected = expected.squeeze(-1)
            strides = (1, ROWS) if form.column_major else (expected.shape[-1], 1)
            assert scales.stride() == strides
        torch.testing.assert_close(scales.double(), expected, rtol=slack, atol=0)
    if isinstance(form, quant.PerBlock):
        scales = scales.repeat_interleave(form.size, -1)
    scaled = (exact / scales.double()).clamp(-largest, largest)
    error = (values.double() - scaled).abs()
    # Half the distance of neighbours.
    bound = torch.full_like(scaled, 0.5)
    if dtype in _BITS:
        bits, least = _BITS[dtype]
        bound = (scaled.abs() * 2.0 ** -(bits + 1)).clamp(min=2.0 ** (least - 1))
    assert (error <= bound * (1 + slack) + slack * largest).all()


@kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", _formats())
@pytest.mark.parametrize("function", _FUNCTIONS)
def test_values_and_scales(function: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    form, tensors = _formats()[name], _tensors(dtype)
    with launch.record() as names:
        values, scales, *others = function(tensors, quantize=form)
    assert names == ["forward_kernel"]
    # The sum is rounded to its dtype, fp32, before it is normalised.
    exact_inputs = {key: tensor.double() for key, tensor in tensors.items()}
    exact = function(exact_inputs)
    if others:
        exact, total = exact
        torch.testing.assert_close(others[0], total.float(), rtol=1e-6, atol=1e-6)
    _assert_quantised(values, scales, exact, form)


@kernels
@pytest.mark.parametrize("function", _FUNCTIONS)
@pytest.mark.parametrize("column_major", [False, True])
def test_blocks_of_one_dimension_are_those_of_one_row(
    function: Callable[..., Any], column_major: bool
) -> None:
    tensors, form = _tensors(torch.float32), quant.PerBlock(64, column_major=column_major)
    expected = function(tensors | {name: tensors[name][1:2] for name in "xz"}, quantize=form)
    with launch.record() as names:
        results = function(tensors | {name: tensors[name][1] for name in "xz"}, quantize=form)
    assert names == ["forward_kernel"]
    for result, (row,) in zip(results, expected, strict=True):
        assert torch.equal(result.view(torch.uint8), row.view(torch.uint8))


@kernels
def test_gradient_of_the_sum() -> None:
    """A block goes on with the sum, whatever becomes of the values."""
    tensors = {name: t.requires_grad_() for name, t in _tensors(torch.float32).items()}
    *_, total = _add_rms_norm(tensors, quantize=quant.PerRow())
    cotangent = torch.randn_like(total)
    gradients = torch.autograd.grad(total, (tensors["x"], tensors["z"]), cotangent)
    for gradient in gradients:
        torch.testing.assert_close(gradient, cotangent)


@kernels
def test_packed_and_separate_halves_have_equal_bits() -> None:
    tensors = _tensors(torch.bfloat16)
    gate, up = tensors["x"], tensors["z"].bfloat16()
    packed = fusedops.swiglu(torch.cat([gate, up], -1), quantize=quant.PerBlock(64))
    separate = fusedops.swiglu(gate, up, quantize=quant.PerBlock(64))
    assert torch.equal(packed[0].view(torch.uint8), separate[0].view(torch.uint8))
    assert torch.equal(packed[1], separate[1])


@kernels
@pytest.mark.parametrize("function", [_add_rms_norm, _swiglu])
def test_torch_compile_has_one_graph(function: Callable[..., Any]) -> None:
    tensors, form = _tensors(torch.bfloat16), quant.PerBlock(32)
    compiled = torch.compile(
        lambda tensors: function(tensors, quantize=form), backend="aot_eager", fullgraph=True
    )
    with launch.record() as names:
        results = compiled(tensors)
    assert names == ["forward_kernel"]
    for result, expected in zip(results, function(tensors, quantize=form), strict=True):
        assert torch.equal(result.view(torch.uint8), expected.view(torch.uint8))


@kernels
@pytest.mark.parametrize("name", _formats())
@pytest.mark.parametrize("function", _FUNCTIONS)
def test_modules(function: Callable[..., Any], name: str) -> None:
    """The format is no parameter, and survives a copy, a pickle and a move."""
    form, tensors = _formats()[name], _tensors(torch.bfloat16)
    kind = _MODULES[function]
    plain, module = kind(), kind(quantize=form)
    module = pickle.loads(pickle.dumps(copy.deepcopy(module))).to(DEVICE)
    assert list(module.state_dict()) == list(plain.state_dict())
    if plain.state_dict():
        module.load_state_dict({"weight": tensors["w"], "bias": tensors["b"]}, strict=False)
    inputs = [tensors["x"]] + [tensors["z"]] * (function not in (_layer_norm, _rms_norm))
    parameters = {**dict(module.named_parameters()), "bias": getattr(module, "bias", None)}
    call = _CALLS[function]
    with torch.no_grad():
        results = module(*inputs)
        expected = call(inputs, parameters, quantize=form)
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(*[t.reshape(-1).view(torch.uint8) for t in (result, other)])
    assert plain.extra_repr() in repr(plain)
    assert f"quantize={type(form).__name__}(" in repr(module)
    assert "quantize" not in repr(plain)


def test_scale_of_a_module_keeps_its_dtype() -> None:
    scale = torch.tensor(0.1, dtype=torch.float32)
    module = FusedSwiGLU(quantize=quant.Static(scale)).to(torch.bfloat16)
    assert module.quantize is not None and module.quantize.scale.dtype == torch.float32
    assert module.to("meta").quantize.scale.is_meta


def test_without_kernels_the_function_runs_in_pytorch() -> None:
    tensors = {name: tensor.cpu() for name, tensor in _tensors(torch.float32).items()}
    exact = F.rms_norm(tensors["x"].double(), (COLS,), tensors["w"].double() + 1, _EPS)
    for form in (quant.PerRow(), quant.PerBlock(column_major=True)):
        _assert_quantised(*_rms_norm(tensors, quantize=form), exact, form)


_X = torch.randn(ROWS, COLS)
_ROW = quant.PerRow()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: quant.PerRow(torch.uint8), TypeError, "dtype must be one of"),
        (lambda: quant.PerBlock(12), ValueError, "size must be 8, 16, 32 or so on, got 12"),
        (
            lambda: quant.PerBlock(column_major="columns"),  # type: ignore[arg-type]
            TypeError,
            "column_major must be a bool, got str",
        ),
        (
            lambda: FusedRMSNorm(8, quantize=FLOAT8),  # type: ignore[arg-type]
            TypeError,
            "FusedRMSNorm: quantize must be a format of fusedops.quant, got dtype",
        ),
        (lambda: quant.Static(torch.ones(2)), ValueError, "scale has shape (2,)"),
        (lambda: quant.Static(1.0), TypeError, "scale must be a floating-point tensor"),  # type: ignore[arg-type]
        (
            lambda: fusedops.rms_norm(_X, COLS, quantize=quant.PerBlock(256)),
            ValueError,
            "rms_norm: rows have 384 columns, expected a multiple of 256",
        ),
        (
            lambda: fusedops.swiglu(_X, quantize=quant.PerBlock(128)),
            ValueError,
            "swiglu: rows have 192 columns, expected a multiple of 128",
        ),
        (
            lambda: fusedops.rms_norm(_X, COLS, quantize=FLOAT8),  # type: ignore[call-overload]
            TypeError,
            "quantize must be a format of fusedops.quant, got dtype",
        ),
        (
            lambda: fusedops.rms_norm(_X, COLS, rounding="llama", quantize=_ROW),
            ValueError,
            "rounding must be 'once' with quantize, got 'llama'",
        ),
        (
            lambda: fusedops.layer_norm(_X, COLS, out_dtype=torch.bfloat16, quantize=_ROW),
            ValueError,
            "out_dtype has no effect with quantize",
        ),
        (
            lambda: fusedops.layer_norm(_X, (ROWS, COLS), quantize=_ROW),
            ValueError,
            "normalized_shape must be one dimension with quantize",
        ),
        (
            lambda: fusedops.rms_norm(_X, COLS, _X[0, :1], quantize=_ROW),
            ValueError,
            "weight has shape (1,), expected (384,)",
        ),
        (
            lambda: fusedops.add_rms_norm(_X, _X[:1], None, quantize=_ROW),
            ValueError,
            "residual has shape (1, 384)",
        ),
    ],
)
def test_bad_arguments(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()
