"""Norms known by what they compute.

Those that the operators compute are taken, and look-alikes are left.
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
    """A norm with a weight, and an eps of whatever name."""

    def __init__(self, size: int = _N, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps


# --- those that are taken -------------------------------------------------------------------------


class NanoGpts(nn.Module):
    def __init__(self, size: int = _N, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class Metas(_Norm):
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


class T5s(_Norm):
    def forward(self, hidden: Tensor) -> Tensor:
        variance = hidden.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + self.eps)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden = hidden.to(self.weight.dtype)
        return self.weight * hidden


class Gemmas(Metas):
    def forward(self, x: Tensor) -> Tensor:
        return (self._norm(x.float()) * (1.0 + self.weight.float())).type_as(x)


class WithoutScale(Metas):
    """As Gemma 3n's: whether it has a weight is an attribute."""

    def __init__(self, with_scale: bool = False) -> None:
        super().__init__()
        self.with_scale = with_scale

    def forward(self, x: Tensor) -> Tensor:
        y = self._norm(x.float())
        if self.with_scale:
            y = y * self.weight.float()
        return y.type_as(x)


class AnyPower(nn.Module):
    """A module with a small number that is not a size."""

    power, eps = 2, 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        mean = wide.pow(self.power).mean(-1, keepdim=True)
        return (wide * torch.rsqrt(mean + self.eps)).type_as(x)


class Debertas(_Norm):
    """Rounds before its weight, which widens its output; more often than the operator."""

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


class AsItsBase(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class FunctionalRms(nn.RMSNorm):
    def forward(self, rows: Tensor) -> Tensor:
        return F.rms_norm(rows, self.normalized_shape, self.weight, self.eps)


class TwoAttributes(_Norm):
    """Two of one value; one counts."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead, self.real = 1e-6, 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(
            x.float(), self.weight.shape, self.weight.float(), 0.0 * self.ahead + self.real
        ).to(x.dtype)


class OnePlus(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight + 1.0, self.bias, self.eps)


# Autocast on a GPU takes `F.rms_norm` in fp32 in newer releases; in PyTorch 2.11 it does not.
_RMS_WIDENED = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")
_TAKEN: tuple[tuple[Any, Any], ...] = (
    (NanoGpts, ("layer", "once", 0.0, 1e-5, "weight", "bias", "input", True)),
    (
        functools.partial(NanoGpts, bias=False),
        ("layer", "once", 0.0, 1e-5, "weight", None, "input", True),
    ),
    (Metas, ("rms", "llama", 0.0, "eps", "weight", None, "x", False)),
    (RoundsOnce, ("rms", "once", 0.0, "eps", "weight", None, "x", False)),
    (T5s, ("rms", "t5", 0.0, "eps", "weight", None, "hidden", False)),
    (Gemmas, ("rms", "once", 1.0, "eps", "weight", None, "x", False)),
    (WithoutScale, ("rms", "once", 0.0, "eps", None, None, "x", False)),
    (
        functools.partial(WithoutScale, True),
        ("rms", "once", 0.0, "eps", "weight", None, "x", False),
    ),
    (AnyPower, ("rms", "once", 0.0, "eps", None, None, "x", False)),
    (Debertas, ("layer", "llama", 0.0, "eps", "weight", "shift", "x", False)),
    (functools.partial(AsItsBase, _N), ("layer", "once", 0.0, "eps", "weight", "bias", "x", True)),
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
taken = pytest.mark.parametrize(
    "make, expected", _TAKEN, ids=lambda value: getattr(value, "__name__", None)
)


@taken
def test_the_form_is_found(make: Any, expected: tuple[Any, ...]) -> None:
    module = make()
    (line,) = fusedops.fuse_model(module).modules
    assert (line.rule, line.reason) == ("norm", "")
    assert line.calls.startswith(f"{expected[0]}_norm")
    assert type(module)._fusedops_rule.origin[1][:8] == expected


@taken
def test_values_and_gradients_stay(make: Any, expected: tuple[Any, ...]) -> None:
    _compared(make(), expected[1], same_bits=expected[0] == "rms")


@taken
def test_eps_is_read_when_it_is_called(make: Any, expected: tuple[Any, ...]) -> None:
    """An attribute of the module, that is; a number in the code stays."""
    module = make()
    if not isinstance(expected[3], str):
        return
    fusedops.fuse_model(module)
    setattr(module, expected[3], 0.5)
    fused = module(x := torch.randn(3, _N))
    fusedops.unfuse_model(module)
    torch.testing.assert_close(fused, module(x))


_DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float64),
    (torch.float64, torch.float32),
)


def _run(module: nn.Module, x: Tensor, dtype: torch.dtype) -> list[Tensor] | None:
    """The output and the gradients; None where PyTorch's own norm takes no such dtypes."""
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


def _compared(module: nn.Module, name: str, *, same_bits: bool) -> None:
    """The module before and after fusing: the same dtypes, and no further from fp64 than it was."""
    randomise(module)
    rows = torch.cat(
        [torch.randn(96, _width(module)) + 0.5, 1e-3 * torch.randn(32, _width(module))]
    )
    cases = [(rows.to(x), w) for x, w in _DTYPES]
    before = [_run(module, x, w) for x, w in cases]
    exact = [_run(copy.deepcopy(module).to(w), x.double(), torch.float64) for x, w in cases]
    assert fusedops.fuse_model(module)
    for (x, w), theirs, truths in zip(cases, before, exact, strict=True):
        if theirs is None or truths is None:
            continue
        ours = _run(module, x, w)
        assert ours is not None
        for i, (our, their, truth) in enumerate(zip(ours, theirs, truths, strict=True)):
            assert our.dtype == their.dtype, (name, x.dtype, w)
            size = float(truth.abs().max())
            # PyTorch's LayerNorm on CPUs adds the gradients of half-precision weights in half
            # precision.
            units = 16 if i else 1
            allowed = (
                float((their - truth).abs().max())
                + (units * torch.finfo(_narrower(x.dtype, w)).eps + 1e-5) * size
            )
            assert float((our - truth).abs().max()) <= allowed, (name, x.dtype, w)
        if same_bits:
            apart = (ours[0] - theirs[0]).abs() > 1e-5 * theirs[0].abs().amax(-1, keepdim=True)
            assert float(apart.float().mean()) < 0.01, (name, x.dtype, w)


def _narrower(*dtypes: torch.dtype) -> torch.dtype:
    return max(dtypes, key=lambda d: torch.finfo(d).eps)


def _width(module: nn.Module) -> int:
    return next((p.shape[0] for p in module.parameters()), 16)


def test_roundings_are_told_apart() -> None:
    """No rounding gives the bits of another, in some dtypes."""
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


# --- look-alikes ----------------------------------------------------------------------------------


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
    """The last one of three."""

    def forward(self, x: Tensor) -> Tensor:
        return (
            x.float() * torch.rsqrt(x.float().pow(2).mean(2, keepdim=True) + self.eps) * self.weight
        ).to(x.dtype)


class OtherwiseInHalf(RoundsOnce):
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


class AlwaysWide(_Norm):
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
    """Rounds the weight to a dtype that is not the weight's, and has too few bits."""

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


class BranchOnShape(Metas):
    def forward(self, x: Tensor) -> Tensor:
        y = self._norm(x.float()).type_as(x) * self.weight
        if x.shape[0] > 10000:
            return 2.0 * y
        return y


class BranchOnValues(Metas):
    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight if x.sum() < 1e30 else x


class BranchInMethod(Metas):
    def _norm(self, x: Tensor) -> Tensor:
        if x.ndim > 6:
            return x
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Selects(Metas):
    """A branch in arithmetic."""

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight * (1.0 + (x.shape[0] > 10000))


class SizeOfTheBatch(Metas):
    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight * (1 + 0 * x.shape[0] ** 9)


class BranchOnMode(Metas):
    def forward(self, x: Tensor) -> Tensor:
        y = self._norm(x.float()).type_as(x) * self.weight
        return y if self.training else 2.0 * y


class BranchOnAutocast(Metas):
    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled():
            return x
        return self._norm(x.float()).type_as(x) * self.weight


class BranchOnSettings(Metas):
    def forward(self, x: Tensor) -> Tensor:
        return (
            self._norm(x.float()).type_as(x) * self.weight * (2.0 - 1.0 * torch.is_grad_enabled())
        )


class UnderAutocastOtherwise(_Norm):
    """In half precision: autocast on a GPU takes the power in fp32, so that the output is fp32 there."""

    def forward(self, x: Tensor) -> Tensor:
        return (
            x
            * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps).to(x.dtype)
            * self.weight.to(x.dtype).pow(1)
        )


class Counts(Metas):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self._norm(x.float()).type_as(x) * self.weight


class WritesInPlace(Metas):
    def forward(self, x: Tensor) -> Tensor:
        x *= 1.0
        return self._norm(x.float()).type_as(x) * self.weight


class Loops(Metas):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1):
            x = x + 0.0
        return self._norm(x.float()).type_as(x) * self.weight


class WithoutGradients(Metas):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (x.float() * scale).type_as(x) * self.weight


class Gated(Metas):
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


class BiasedRms(Metas):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(_N))

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight + self.bias


class Decorated(Metas):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight


class Property(Metas):
    @property
    def eps(self) -> float:  # type: ignore[override]
        return 1e-6

    @eps.setter
    def eps(self, value: float) -> None:
        pass


class OwnSuper(Gemmas):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class WithoutBase(Metas):
    def forward(self, x: Tensor) -> Tensor:
        return super().rescale(x)  # type: ignore[misc, no-any-return]


class ConditionOnVector(Gemmas):
    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x) if self.weight else x


class ConditionOnMeta(Metas):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scales", torch.tensor(True, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x) * self.weight if self.scales else self._norm(x)


class DividesByZero(Metas):
    scale = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x) * self.weight * (1.0 / self.scale)


class WritesToWeight(Metas):
    """Again and again the same: the weight's magnitudes."""

    def forward(self, x: Tensor) -> Tensor:
        torch.sqrt(torch.square(self.weight), out=self.weight)
        return self._norm(x.float()).type_as(x) * self.weight


_LEFT = {
    EpsOutside: _NO_NORM,
    SampleVariance: _NO_NORM,
    OtherDimension: _NO_NORM,
    ThirdDimension: _NO_NORM,
    OtherwiseInHalf: "rounds as none",
    AlwaysWide: "rounds as none",
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
    UnderAutocastOtherwise: "autocast changes",
    Counts: "writes to the module",
    WritesInPlace: "does more than arithmetic",
    Loops: "branches",
    WithoutGradients: "changes what others see",
    Gated: "takes more than one tensor",
    ThreeVectors: "more than a weight and a bias",
    Matrix: "its weight is no vector",
    BiasedRms: _NO_NORM,
    Decorated: "is wrapped",
    Property: "reads its eps",
    OwnSuper: "calls that of Gemmas",
    WithoutBase: "calls rescale of super(), which has none",
    ConditionOnVector: "no truth value",
    ConditionOnMeta: "no truth value",
    DividesByZero: _NO_NORM,
    WritesToWeight: "writes in place",
}


@pytest.mark.parametrize("cls", _LEFT, ids=lambda cls: cls.__name__)
def test_look_alikes_are_left(cls: Any) -> None:
    """If a class is no norm in fp32 and not called one, the reason is "no rule"."""
    (called,) = fusedops.fuse_model(type(f"{cls.__name__}Norm", (cls,), {})()).modules
    assert not called.rule and _LEFT[cls] in called.reason
    (line,) = fusedops.fuse_model(cls()).modules
    is_norm = _LEFT[cls] in ("rounds as none", "autocast changes")
    assert (line.rule, line.reason) == ("", called.reason if is_norm else "no rule")


def test_a_wrapper_of_the_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the class was fused before it was put there."""
    assert fusedops.fuse_model(Metas())
    forward = Metas.forward
    monkeypatch.setattr(
        Metas, "forward", functools.wraps(forward)(lambda self, x: 2.0 * forward(self, x))
    )
    assert not fusedops.fuse_model(Metas())
    monkeypatch.undo()
    monkeypatch.setattr(Metas, "_norm", lambda self, x: 2.0 * x)
    assert not fusedops.fuse_model(Metas())


@pytest.mark.parametrize("name", ["forward", "_norm"])
def test_a_method_of_the_instance_is_seen(name: str) -> None:
    module = Metas()
    setattr(module, name, lambda x: x)
    assert not fusedops.fuse_model(module)
    assert fusedops.fuse_model(Metas())


@taken
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_under_autocast(
    make: Any, expected: tuple[Any, ...], stream: torch.dtype, device: torch.device
) -> None:
    """On a GPU PyTorch's norms give fp32 there, and those that are written out do not."""
    module = randomise(make()).to(device)
    x = torch.randn(64, _N, device=device).to(stream)
    with torch.autocast(device.type, torch.bfloat16):
        before = module(x)
        fusedops.fuse_model(module)
        after = module(x)
    assert after.dtype == before.dtype
    bound = 3 * torch.finfo(_narrower(stream, torch.float32)).eps
    torch.testing.assert_close(after.float(), before.float(), rtol=bound, atol=bound)


# --- what a probe leaves behind -------------------------------------------------------------------


def test_nothing_is_touched() -> None:
    """Neither the module, its parameters and hooks, nor the random numbers, nor autograd."""
    module = Metas().to(torch.bfloat16).train()
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


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        module = Metas()
    assert fusedops.fuse_model(module)


def test_a_class_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run is for all modules of a size. Each other size or configuration is run, too."""
    forms._fitted.cache_clear()
    for model, runs in (
        (nn.Sequential(*[Metas(eps=1e-6) for _ in range(50)]), 1),
        (nn.Sequential(*[Metas(16) for _ in range(5)]), 2),
        (WithoutScale(True), 3),
        (WithoutScale(False), 5),  # without a weight, of two sizes in one run
    ):
        assert fusedops.fuse_model(model)
        assert forms._fitted.cache_info().misses <= runs


@taken
def test_pickled_copied_and_given_back(make: Any, expected: tuple[Any, ...]) -> None:
    module = randomise(make())
    x, cls = torch.randn(3, _N), type(module)
    before = module(x)
    fusedops.fuse_model(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is type(module)
        assert torch.equal(other(x), module(x))
    fusedops.unfuse_model(module)
    assert type(module) is cls
    assert torch.equal(module(x), before)


def test_loaded_where_the_class_reads_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Metas()
    fusedops.fuse_model(module)
    data = pickle.dumps(module)
    monkeypatch.setattr(Metas, "_norm", lambda self, x: 2.0 * x)
    with pytest.warns(UserWarning, match="no rule norm"):
        assert type(pickle.loads(data)) is Metas


@taken
def test_keyword_and_compiled(make: Any, expected: tuple[Any, ...]) -> None:
    """The argument has its name still."""
    module = randomise(make())
    fusedops.fuse_model(module)
    x = torch.randn(3, _N)
    assert list(inspect.signature(type(module).forward).parameters) == ["self", expected[6]]
    assert torch.equal(module(**{expected[6]: x}), module(x))


def test_behind_a_branch() -> None:
    """The method by which a block joins its sum with the norm gives what both do apart, in all dtypes."""
    from fusedops.models.parts import Branch

    for make, _ in _TAKEN:
        module: Any = randomise(make())
        fusedops.fuse_model(module)
        for d, w in _DTYPES[:5]:
            fused = copy.deepcopy(module).to(w)
            x, residual = torch.randn(8, _N).to(d), torch.randn(8, _N).to(d)
            y, z = fused._fusedops_add_norm(Branch(x), residual, True, None)
            torch.testing.assert_close(z, x + residual)
            torch.testing.assert_close(y, fused(z), rtol=0.02, atol=1e-3)
            for low in (torch.bfloat16, torch.float16):
                narrow = fused._fusedops_add_norm(Branch(x), residual, False, low)
                assert narrow.dtype == (low if y.dtype == torch.float32 else y.dtype)
                both = fused._fusedops_add_norm(Branch(x), residual, False, low, with_cast=True)
                wide, cast = both if isinstance(both, tuple) else (both, both)
                assert (wide.dtype, cast.dtype) == (y.dtype, narrow.dtype)
                assert torch.equal(cast, narrow)


# --- all of Transformers --------------------------------------------------------------------------


def _classes() -> Iterator[type[nn.Module]]:
    """All classes of Transformers whose name says norm."""
    models = importlib.import_module("transformers.models")
    for package in pkgutil.iter_modules(models.__path__):
        for file in pkgutil.iter_modules([str(Path(models.__path__[0]) / package.name)]):
            if file.name.startswith("modeling_"):
                try:
                    module = importlib.import_module(
                        f"transformers.models.{package.name}.{file.name}"
                    )
                except ImportError:  # of what else it needs
                    continue
                for name, cls in vars(module).items():
                    own = getattr(cls, "__module__", "") == module.__name__ and "Norm" in name
                    if own and isinstance(cls, type) and issubclass(cls, nn.Module):
                        yield cls


def _instance(cls: Any) -> nn.Module | None:
    names = list(inspect.signature(cls).parameters)
    for arguments in (
        ({}, {names[0]: 16}) if names[:1] == ["eps"] else ({names[0]: 16}, {}) if names else ({},)
    ):
        try:
            made: nn.Module = cls(**arguments)
            return made
        except Exception:  # noqa: BLE001, PERF203 it wants a configuration
            continue
    return None


# Called norms, and none: the reciprocal of the root mean square; a weight before the norm; a norm
# and an MLP.
_NO_NORMS = {
    "HYV4UnweightedRMSNorm",
    "HYV4VLUnweightedRMSNorm",
    "MuseSparkTextInputScaledRMSNorm",
    "AXK2GatedRMSNorm",
}


@transformers_only
@pytest.mark.plain
@pytest.mark.full
def test_every_norm_of_transformers() -> None:
    """Those that are taken compute what they did; of RMSNorms, these are all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        classes = list(_classes())
    left, known, met = set(), 0, set()
    for cls in classes:
        module = _instance(cls)
        result = None if module is None or module._modules else RULES[-1](module)  # type: ignore[operator]
        if cls.__name__.endswith("RMSNorm"):
            known += result is not None
            left |= {cls.__name__} if result is None else set()
        if result is not None and (result, digest(cls.forward)) not in met:
            met.add((result, digest(cls.forward)))
            assert module is not None
            _compared(module, cls.__name__, same_bits=False)
    assert left <= _NO_NORMS
    assert known >= 150
