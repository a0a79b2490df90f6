"""Norms are recognised by what they compute.

Norms that the operators compute are fused. Modules that only look like norms are left.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pickle
import pkgutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import fusedops
from fusedops.models import probe
from fusedops.models.fingerprint import digest
from fusedops.models.probe import Form, forms
from fusedops.models.rules.norms import RULES, _computed
from modules import randomise
from zoo import transformers_only

pytestmark = pytest.mark.once  # what is fused does not depend on the kernels

_N = 24
_NO_NORM = "it computes no LayerNorm or RMSNorm of the last dimension"
_BRANCHES = "its forward branches on its input"


class _Norm(nn.Module):
    """The base of norms with a weight and an eps."""

    def __init__(self, size: int = _N, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps


# --- norms that are fused -------------------------------------------------------------------------


class NanoGptNorm(nn.Module):
    def __init__(self, size: int = _N, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class MetaNorm(_Norm):
    """Meta's RMSNorm in Llama."""

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight


class RoundsOnce(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (
            wide
            * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
            * self.weight.float()
        ).to(x.dtype)


class T5Norm(_Norm):
    def forward(self, hidden: Tensor) -> Tensor:
        variance = hidden.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + self.eps)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden = hidden.to(self.weight.dtype)
        return self.weight * hidden


class GemmaNorm(MetaNorm):
    def forward(self, x: Tensor) -> Tensor:
        return (self._norm(x.float()) * (1.0 + self.weight.float())).type_as(x)


class WithoutScale(MetaNorm):
    """A norm like Gemma 3n's, in which an attribute decides whether the weight is used."""

    def __init__(self, with_scale: bool = False) -> None:
        super().__init__()
        self.with_scale = with_scale

    def forward(self, x: Tensor) -> Tensor:
        y = self._norm(x.float())
        if self.with_scale:
            y = y * self.weight.float()
        return y.type_as(x)


class PowerAttribute(nn.Module):
    """An RMSNorm without a weight, whose attribute ``power`` is not a size."""

    power, eps = 2, 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        mean = wide.pow(self.power).mean(-1, keepdim=True)
        return (wide * torch.rsqrt(mean + self.eps)).type_as(x)


class DebertaNorm(_Norm):
    """A LayerNorm that rounds before it multiplies by the weight, which may widen the output."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(_N))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        x = ((x - mean) / torch.sqrt(variance + self.eps)).to(dtype)
        return self.weight * x + self.shift


class CallsBase(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class FunctionalRms(nn.RMSNorm):
    def forward(self, rows: Tensor) -> Tensor:
        return F.rms_norm(rows, self.normalized_shape, self.weight, self.eps)


class TwoAttributes(_Norm):
    """A norm with two attributes of the same value, of which one is its eps."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.real = 1e-6, 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(
            x.float(), self.weight.shape, self.weight.float(), 0.0 * self.unused + self.real
        ).to(x.dtype)


class OnePlus(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight + 1.0, self.bias, self.eps)


# Autocast on a GPU computes `F.rms_norm` in fp32 in newer releases, but not in PyTorch 2.11.
_RMS_WIDENED = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")
# Each norm with the first fields of its form: kind, rounding, weight offset, eps or the name of its
# attribute, names of weight, bias and argument, and whether autocast on a GPU computes in fp32.
_FUSED: tuple[tuple[Any, Any], ...] = (
    (NanoGptNorm, ("layer", "once", 0.0, 1e-5, "weight", "bias", "input", True)),
    (
        functools.partial(NanoGptNorm, bias=False),
        ("layer", "once", 0.0, 1e-5, "weight", None, "input", True),
    ),
    (MetaNorm, ("rms", "llama", 0.0, "eps", "weight", None, "x", False)),
    (RoundsOnce, ("rms", "once", 0.0, "eps", "weight", None, "x", False)),
    (T5Norm, ("rms", "t5", 0.0, "eps", "weight", None, "hidden", False)),
    (GemmaNorm, ("rms", "once", 1.0, "eps", "weight", None, "x", False)),
    (WithoutScale, ("rms", "once", 0.0, "eps", None, None, "x", False)),
    (
        functools.partial(WithoutScale, with_scale=True),
        ("rms", "once", 0.0, "eps", "weight", None, "x", False),
    ),
    (PowerAttribute, ("rms", "once", 0.0, "eps", None, None, "x", False)),
    (DebertaNorm, ("layer", "llama", 0.0, "eps", "weight", "shift", "x", False)),
    (functools.partial(CallsBase, _N), ("layer", "once", 0.0, "eps", "weight", "bias", "x", True)),
    (
        functools.partial(FunctionalRms, _N, 1e-5),
        ("rms", "once", 0.0, "eps", "weight", None, "rows", _RMS_WIDENED),
    ),
    (
        functools.partial(FunctionalRms, _N),
        ("rms", "once", 0.0, None, "weight", None, "rows", _RMS_WIDENED),
    ),
    (functools.partial(OnePlus, _N), ("layer", "once", 1.0, "eps", "weight", "bias", "x", True)),
    (TwoAttributes, ("rms", "once", 0.0, "real", "weight", None, "x", False)),
)
fused_norms = pytest.mark.parametrize(
    "make, expected", _FUSED, ids=lambda value: getattr(value, "__name__", None)
)


@fused_norms
def test_form_of_a_norm_is_recognised(make: Any, expected: tuple[Any, ...]) -> None:
    module = make()
    (line,) = fusedops.fuse_model(module, graph=False).modules
    assert (line.rule, line.reason) == ("norm", "")
    assert line.calls.startswith(f"{expected[0]}_norm")
    assert type(module)._fusedops_rule.origin[1][:8] == expected


@fused_norms
def test_fused_norms_have_the_values_and_gradients_of_the_originals(
    make: Any, expected: tuple[Any, ...]
) -> None:
    kind, rounding, *_ = expected
    _compare(make(), rounding, same_bits=kind == "rms")


@fused_norms
def test_eps_attribute_is_read_in_each_call(make: Any, expected: tuple[Any, ...]) -> None:
    """The eps of some norms is a number in the code instead."""
    module = make()
    eps = expected[3]
    if not isinstance(eps, str):
        return
    fusedops.fuse_model(module, graph=False)
    setattr(module, eps, 0.5)
    x = torch.randn(3, _N)
    fused = module(x)
    fusedops.unfuse_model(module)
    torch.testing.assert_close(fused, module(x))


_DTYPES = (  # of rows and of parameters
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float64),
    (torch.float64, torch.float32),
)


def _run(module: nn.Module, x: Tensor, dtype: torch.dtype) -> list[Tensor] | None:
    """Return the output and the gradients, or None if PyTorch's norm does not take these dtypes."""
    module = copy.deepcopy(module).to(dtype)
    x = x.detach().requires_grad_()
    try:
        y = module(x)
    except RuntimeError:
        return None
    weights = torch.linspace(-1, 2, x.shape[-1], dtype=torch.float64)
    gradients = torch.autograd.grad(
        (y.double() * weights).sum(), [x, *module.parameters()], allow_unused=True
    )
    return [y.detach(), *[g for g in gradients if g is not None]]


def _compare(module: nn.Module, name: str, *, same_bits: bool) -> None:
    """Fuse a module, and check that dtypes stay the same and errors do not grow.

    Args:
        module: the norm.
        name: named if a check fails.
        same_bits: whether almost all outputs must have the same bits as before.
    """
    randomise(module)
    width = _width(module)
    rows = torch.cat([torch.randn(96, width) + 0.5, 1e-3 * torch.randn(32, width)])
    cases = [(rows.to(rows_dtype), weight_dtype) for rows_dtype, weight_dtype in _DTYPES]
    before = [_run(module, x, w) for x, w in cases]
    exact = [_run(copy.deepcopy(module).to(w), x.double(), torch.float64) for x, w in cases]
    assert fusedops.fuse_model(module, graph=False)
    for (x, w), originals, truths in zip(cases, before, exact, strict=True):
        if originals is None or truths is None:
            continue
        case = (name, x.dtype, w)
        results = _run(module, x, w)
        assert results is not None
        for i, (ours, original, truth) in enumerate(zip(results, originals, truths, strict=True)):
            assert ours.dtype == original.dtype, case
            # PyTorch's LayerNorm on CPUs adds the gradients of half-precision weights in half
            # precision.
            is_gradient = i > 0
            units = 16 if is_gradient else 1
            relative = units * torch.finfo(_narrower(x.dtype, w)).eps + 1e-5
            original_error = float((original - truth).abs().max())
            allowed = original_error + relative * float(truth.abs().max())
            assert float((ours - truth).abs().max()) <= allowed, case
        if same_bits:
            (ours, *_), (original, *_) = results, originals
            limit = 1e-5 * original.abs().amax(-1, keepdim=True)
            differs = (ours - original).abs() > limit
            assert float(differs.float().mean()) < 0.01, case


def _narrower(*dtypes: torch.dtype) -> torch.dtype:
    return max(dtypes, key=lambda d: torch.finfo(d).eps)


def _width(module: nn.Module) -> int:
    return next((p.shape[0] for p in module.parameters()), 16)


def test_roundings_differ_in_bits_or_dtypes() -> None:
    """For each two roundings there is a dtype in which they differ."""
    forms = {
        rounding: Form("rms", rounding, 0.0, "eps", "weight", None, "x", False, (), "")  # type: ignore[arg-type]
        for rounding in ("once", "llama", "t5")
    }
    module: Any = randomise(_Norm())
    x = torch.randn(64, _N).bfloat16()
    for rounding, others in {
        "once": ("llama", "t5"),
        "llama": ("once", "t5"),
        "t5": ("once", "llama"),
    }.items():
        for other in others:
            differ = False
            for dtype in (torch.bfloat16, torch.float32):
                a, b = (_computed(forms[name], module.to(dtype), x) for name in (rounding, other))
                differ |= a.dtype != b.dtype or float((a != b).float().mean()) > 0.1
            assert differ, (rounding, other)


# --- modules that only look like norms, or cannot be read -----------------------------------------


class EpsOutside(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class SampleVariance(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (
            (x - x.mean(-1, keepdim=True))
            * torch.rsqrt(x.var(-1, keepdim=True) + self.eps)
            * self.weight
        )


class OtherDimension(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps) * self.weight


class ThirdDimension(_Norm):
    """A norm of the third dimension, which is the last only in tensors of three."""

    def forward(self, x: Tensor) -> Tensor:
        return (
            x.float() * torch.rsqrt(x.float().pow(2).mean(2, keepdim=True) + self.eps) * self.weight
        ).to(x.dtype)


class ScaledInHalfPrecision(RoundsOnce):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        y = (
            wide
            * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
            * self.weight.float()
        )
        if self.weight.dtype == torch.bfloat16:
            y = 1.1 * y
        return y.to(x.dtype)


class AlwaysReturnsFp32(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (
            wide
            * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
            * self.weight.float()
        )


class AllDimensions(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[1:])


class WeightFirst(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        x = x.float() * self.weight.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class WeightRoundedFirst(_Norm):
    """A norm that rounds the weight to bf16, also if the weight is fp32."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.to(torch.bfloat16).float()).to(x.dtype)


class MoreThanOneRounding(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide.to(torch.float16).float() * self.weight.float()).to(x.dtype)


class Clamps(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)).clamp(
            -50, 50
        ) * self.weight


class Magnitudes(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.abs().pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Detached(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.detach().pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight.float()).to(x.dtype)


class BranchOnShape(MetaNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = self._norm(x.float()).type_as(x) * self.weight
        if x.shape[0] > 10000:
            return 2.0 * y
        return y


class BranchOnValues(MetaNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight if x.sum() < 1e30 else x


class BranchInMethod(MetaNorm):
    def _norm(self, x: Tensor) -> Tensor:
        if x.ndim > 6:
            return x
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Selects(MetaNorm):
    """A norm with a branch that is written as arithmetic."""

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight * (1.0 + (x.shape[0] > 10000))


class SizeOfTheBatch(MetaNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight * (1 + 0 * x.shape[0] ** 9)


class BranchOnMode(MetaNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = self._norm(x.float()).type_as(x) * self.weight
        return y if self.training else 2.0 * y


class BranchOnAutocast(MetaNorm):
    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled():
            return x
        return self._norm(x.float()).type_as(x) * self.weight


class BranchOnSettings(MetaNorm):
    def forward(self, x: Tensor) -> Tensor:
        return (
            self._norm(x.float()).type_as(x) * self.weight * (2.0 - 1.0 * torch.is_grad_enabled())
        )


class DependsOnAutocast(_Norm):
    """A norm in half precision with a power, which autocast on a GPU computes in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return (
            x
            * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps).to(x.dtype)
            * self.weight.to(x.dtype).pow(1)
        )


class Counts(MetaNorm):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self._norm(x.float()).type_as(x) * self.weight


class WritesInPlace(MetaNorm):
    def forward(self, x: Tensor) -> Tensor:
        x *= 1.0
        return self._norm(x.float()).type_as(x) * self.weight


class Loops(MetaNorm):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1):
            x = x + 0.0
        return self._norm(x.float()).type_as(x) * self.weight


class WithoutGradients(MetaNorm):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (x.float() * scale).type_as(x) * self.weight


class Gated(MetaNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight


class ThreeVectors(_Norm):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(_N))
        self.register_buffer("mean", torch.zeros(_N))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x - self.mean, self.weight.shape, self.weight, self.bias, self.eps)


class Matrix(_Norm):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, _N))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, None, self.eps)


class BiasedRms(MetaNorm):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(_N))

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight + self.bias


class Decorated(MetaNorm):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight


class Property(MetaNorm):
    @property
    def eps(self) -> float:  # type: ignore[override]
        return 1e-6

    @eps.setter
    def eps(self, value: float) -> None:
        pass


class OwnSuper(GemmaNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class WithoutBase(MetaNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().rescale(x)  # type: ignore[misc, no-any-return]


class ConditionOnVector(GemmaNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x) if self.weight else x


class ConditionOnMeta(MetaNorm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scales", torch.tensor(True, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x) * self.weight if self.scales else self._norm(x)


class DividesByZero(MetaNorm):
    scale = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x) * self.weight * (1.0 / self.scale)


class WritesToWeight(MetaNorm):
    """A norm that replaces its weight by its magnitudes; later calls do not change it again."""

    def forward(self, x: Tensor) -> Tensor:
        torch.sqrt(torch.square(self.weight), out=self.weight)
        return self._norm(x.float()).type_as(x) * self.weight


class CalledThis(MetaNorm):
    def forward(this, x: Tensor) -> Tensor:  # noqa: N805
        return this._norm(x.float()).type_as(x) * this.weight


# Each class with a part of the reason for which it is left.
_LEFT = {
    EpsOutside: _NO_NORM,
    SampleVariance: _NO_NORM,
    OtherDimension: _NO_NORM,
    ThirdDimension: _NO_NORM,
    ScaledInHalfPrecision: "rounds as none",
    AlwaysReturnsFp32: "rounds as none",
    WeightFirst: _NO_NORM,
    AllDimensions: "uses",
    WeightRoundedFirst: _NO_NORM,
    MoreThanOneRounding: _NO_NORM,
    Clamps: "its forward calls clamp",
    Magnitudes: "its forward calls abs",
    Detached: "its forward calls detach",
    BranchOnShape: _BRANCHES,
    BranchOnValues: _BRANCHES,
    BranchInMethod: _BRANCHES,
    Selects: "branches",
    SizeOfTheBatch: "uses",
    BranchOnMode: "its forward depends on its mode",
    BranchOnAutocast: "branches",
    BranchOnSettings: "calls is_grad_enabled",
    DependsOnAutocast: "autocast changes",
    Counts: "writes to the module",
    WritesInPlace: "does more than arithmetic",
    Loops: "branches",
    WithoutGradients: "changes what others see",
    Gated: "takes more than one tensor",
    CalledThis: "calls its first argument this; name it self",
    ThreeVectors: "more than a weight and a bias",
    Matrix: "its weight is no vector",
    BiasedRms: _NO_NORM,
    Decorated: "is wrapped",
    Property: "reads its eps",
    OwnSuper: "calls that of GemmaNorm",
    WithoutBase: "calls rescale of super(), which has none",
    ConditionOnVector: "no truth value",
    ConditionOnMeta: "no truth value",
    DividesByZero: _NO_NORM,
    WritesToWeight: "writes in place",
}


@pytest.mark.parametrize("cls", _LEFT, ids=lambda cls: cls.__name__)
def test_modules_that_only_look_like_norms_are_left(cls: Any) -> None:
    """The report gives the reason for a class that is a norm in fp32 or has "Norm" in its name.

    For other classes, the reason is "no rule".
    """
    (named_norm,) = fusedops.fuse_model(
        type(f"{cls.__name__}Norm", (cls,), {})(), graph=False
    ).modules
    assert not named_norm.rule
    assert _LEFT[cls] in named_norm.reason
    (line,) = fusedops.fuse_model(cls(), graph=False).modules
    is_norm_in_fp32 = _LEFT[cls] in ("rounds as none", "autocast changes")
    assert not line.rule
    assert line.reason == (named_norm.reason if is_norm_in_fp32 else "no rule")


def test_class_with_a_patched_method_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds although the class was fused before it was patched."""
    assert fusedops.fuse_model(MetaNorm(), graph=False)
    forward = MetaNorm.forward
    monkeypatch.setattr(
        MetaNorm, "forward", functools.wraps(forward)(lambda self, x: 2.0 * forward(self, x))
    )
    assert not fusedops.fuse_model(MetaNorm(), graph=False)
    monkeypatch.undo()
    monkeypatch.setattr(MetaNorm, "_norm", lambda self, x: 2.0 * x)
    assert not fusedops.fuse_model(MetaNorm(), graph=False)


@pytest.mark.parametrize("name", ["forward", "_norm"])
def test_instance_with_a_replaced_method_is_left(name: str) -> None:
    module = MetaNorm()
    setattr(module, name, lambda x: x)
    assert not fusedops.fuse_model(module, graph=False)
    assert fusedops.fuse_model(MetaNorm(), graph=False)


@fused_norms
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fused_norms_have_the_dtype_and_values_of_the_originals_under_autocast(
    make: Any, expected: tuple[Any, ...], stream: torch.dtype, device: torch.device
) -> None:
    """On a GPU PyTorch's norms return fp32, and norms of elementary operators do not."""
    module = randomise(make()).to(device)
    x = torch.randn(64, _N, device=device).to(stream)
    with torch.autocast(device.type, torch.bfloat16):
        before = module(x)
        fusedops.fuse_model(module, graph=False)
        after = module(x)
    assert after.dtype == before.dtype
    bound = 3 * torch.finfo(_narrower(stream, torch.float32)).eps
    torch.testing.assert_close(after.float(), before.float(), rtol=bound, atol=bound)


# --- side effects of a probe, and copies ----------------------------------------------------------


def test_probe_has_no_side_effects() -> None:
    """The module, its parameters, the random state and autograd do not change, and no hook runs."""
    module = MetaNorm().to(torch.bfloat16).train()
    calls: list[int] = []
    module.register_forward_hook(lambda *args: calls.append(1))
    module.note = object()  # type: ignore[assignment]
    before, weight, version = dict(vars(module)), module.weight.clone(), module.weight._version
    forms._fitted.cache_clear()
    state = torch.get_rng_state()
    with FakeTensorMode(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        assert probe.form(module, _computed) is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert {k: v for k, v in vars(module).items() if k != "weight"} == before
    assert torch.equal(module.weight, weight)
    assert module.weight._version == version
    assert module.weight.grad is None
    assert not calls


def test_norm_on_the_meta_device_is_fused() -> None:
    with torch.device("meta"):
        module = MetaNorm()
    assert fusedops.fuse_model(module, graph=False)


def test_probe_runs_once_for_each_class_size_and_configuration() -> None:
    forms._fitted.cache_clear()
    for model, runs in (
        (nn.Sequential(*[MetaNorm(eps=1e-6) for _ in range(50)]), 1),
        (nn.Sequential(*[MetaNorm(16) for _ in range(5)]), 2),
        (WithoutScale(with_scale=True), 3),
        (WithoutScale(with_scale=False), 5),  # without a weight, of two sizes in one run
    ):
        assert fusedops.fuse_model(model, graph=False)
        assert forms._fitted.cache_info().misses <= runs


@fused_norms
def test_copies_are_fused_and_unfused_norms_have_the_same_bits(
    make: Any, expected: tuple[Any, ...]
) -> None:
    module = randomise(make())
    x, cls = torch.randn(3, _N), type(module)
    before = module(x)
    fusedops.fuse_model(module, graph=False)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is type(module)
        assert torch.equal(other(x), module(x))
    fusedops.unfuse_model(module)
    assert type(module) is cls
    assert torch.equal(module(x), before)


def test_pickle_of_a_class_that_has_changed_loads_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = MetaNorm()
    fusedops.fuse_model(module, graph=False)
    data = pickle.dumps(module)
    monkeypatch.setattr(MetaNorm, "_norm", lambda self, x: 2.0 * x)
    with pytest.warns(UserWarning, match="no rule norm"):
        assert type(pickle.loads(data)) is MetaNorm


@fused_norms
def test_fused_forward_has_the_argument_name_of_the_original(
    make: Any, expected: tuple[Any, ...]
) -> None:
    module = randomise(make())
    fusedops.fuse_model(module, graph=False)
    x = torch.randn(3, _N)
    argument = expected[6]
    assert list(inspect.signature(type(module).forward).parameters) == ["self", argument]
    assert torch.equal(module(**{argument: x}), module(x))


# --- all of Transformers --------------------------------------------------------------------------


def _classes() -> Iterator[type[nn.Module]]:
    """Yield all modules of Transformers with "Norm" in the name of their class."""
    models = importlib.import_module("transformers.models")
    for package in pkgutil.iter_modules(models.__path__):
        for file in pkgutil.iter_modules([str(Path(models.__path__[0]) / package.name)]):
            if not file.name.startswith("modeling_"):
                continue
            try:
                module = importlib.import_module(f"transformers.models.{package.name}.{file.name}")
            except ImportError:  # the file needs a package that is not installed
                continue
            for name, cls in vars(module).items():
                is_module = isinstance(cls, type) and issubclass(cls, nn.Module)
                if is_module and cls.__module__ == module.__name__ and "Norm" in name:
                    yield cls


def _instance(cls: Any) -> nn.Module | None:
    """Return an instance with 16 columns, or None if the class needs a configuration."""
    names = list(inspect.signature(cls).parameters)
    candidates: list[dict[str, int]] = [{}]
    if names:
        with_size = {names[0]: 16}
        candidates = [{}, with_size] if names[0] == "eps" else [with_size, {}]
    for arguments in candidates:
        try:
            instance: nn.Module = cls(**arguments)
            return instance
        except Exception:  # noqa: BLE001, PERF203 the class needs a configuration
            continue
    return None


# Classes with "RMSNorm" in their name that compute something else: the reciprocal of the root mean
# square, a weight before the norm, or a norm and an MLP.
_NO_NORMS = {
    "HYV4UnweightedRMSNorm",
    "HYV4VLUnweightedRMSNorm",
    "MuseSparkTextInputScaledRMSNorm",
    "AXK2GatedRMSNorm",
}


@transformers_only
@pytest.mark.plain
@pytest.mark.full
def test_all_rmsnorms_of_transformers_are_fused_with_the_same_results() -> None:
    """Other norms of Transformers that are fused have the same results, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        classes = list(_classes())
    left, fused_rms_norms, compared = set(), 0, set()
    for cls in classes:
        module = _instance(cls)
        rule = None
        if module is not None and not module._modules:
            norm_rule = RULES[-1]
            rule = norm_rule(module)  # type: ignore[operator]
        if cls.__name__.endswith("RMSNorm"):
            if rule is None:
                left.add(cls.__name__)
            else:
                fused_rms_norms += 1
        if rule is None:
            continue
        code = (rule, digest(cls.forward))
        if code not in compared:
            compared.add(code)
            assert module is not None
            _compare(module, cls.__name__, same_bits=False)
    assert left <= _NO_NORMS
    assert fused_rms_norms >= 150
