"""The family's private `torch.library` operators: what torch.compile, FakeTensor and make_fx see of a call."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..core import autograd
from ..core.checks import DTYPES
from ..core.operators import implement
from ..core.rng import Seed
from . import launching
from .function import kept_tensors
from .launching import Site, site_of
from .reference import Kind, NormRule, Rounding

__all__ = ["operator_call"]

_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")

# A call's constants in few arguments, as each costs the dispatcher time: ``call`` is what `_call_name` makes of them,
# and `_site` reads.
_CALL = "Tensor? seed, int threshold, str call, float eps, float weight_offset, int cols, int dims"
_LIBRARY.define(
    "norm_forward(Tensor x, Tensor? bias, Tensor? residual, Tensor? weight, Tensor? ln_bias, "
    f"{_CALL}) -> (Tensor, Tensor, Tensor)"
)
# ``needs`` is one digit for each gradient, 1 if it is wanted; those are returned. ``dtypes`` are those of x, bias and
# residual.
_LIBRARY.define(
    "norm_backward(Tensor? dy, Tensor? dsum, Tensor? kept, Tensor? bias, Tensor? residual, Tensor? weight, "
    f"Tensor? ln_bias, Tensor? stats, str needs, str dtypes, {_CALL}) -> Tensor[]"
)
_NAMES: dict[torch.dtype | None, str] = {None: "none", **{d: str(d).removeprefix("torch.") for d in DTYPES}}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@functools.lru_cache(maxsize=4096)
def rule_of(kind: Kind, eps: float, weight_offset: float, rounding: Rounding) -> NormRule:
    """The one rule object for these constants."""
    return NormRule(kind, eps, weight_offset, rounding)


def _dtype(t: Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def _call_name(rule: NormRule, save: str, store_sum: bool, out_dtype: torch.dtype | None) -> str:
    return f"{rule.kind} {rule.rounding} {save} {'stores' if store_sum else 'drops'} {_NAMES[out_dtype]}"


@functools.lru_cache(maxsize=4096)
def _site(call: str, eps: float, weight_offset: float, cols: int, dims: int, device_index: int,
          *dtypes: torch.dtype | None) -> tuple[Site, bool]:  # fmt: skip
    """The site, and whether the sum is stored; ``dtypes`` are those of x, bias, residual, weight and ln_bias."""
    kind, rounding, save, stored, out_dtype = call.split()
    rule = rule_of(kind, eps, weight_offset, rounding)
    x, *others = dtypes
    assert x is not None
    return site_of(rule, cols, dims, save, _DTYPES[out_dtype], device_index, x, *others), stored == "stores"


@functools.lru_cache(maxsize=4096)
def _gradients(needs: str, dtypes: str) -> tuple[tuple[bool, ...], tuple[torch.dtype | None, ...]]:
    return tuple([digit == "1" for digit in needs]), tuple([_DTYPES[name] for name in dtypes.split()])


def operator_call(x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor | None,
                  ln_bias: Tensor | None, seed: Seed | None, threshold: int, rule: NormRule, cols: int, dims: int,
                  save: str, store_sum: bool, out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The forward as one registered operator; ``(y, z)``."""
    if isinstance(seed, tuple):
        seed = torch.tensor(seed, dtype=torch.int64, device=x.device)
    y, z, _ = torch.ops.fusedops.norm_forward(x, bias, residual, weight, ln_bias, seed, threshold,
                                              _call_name(rule, save, store_sum, out_dtype), rule.eps,
                                              rule.weight_offset, cols, dims)  # fmt: skip
    return y, z if store_sum else None


def _forward(x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor | None, ln_bias: Tensor | None,
             seed: Tensor | None, threshold: int, call: str, eps: float, weight_offset: float, cols: int,
             dims: int) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    site, store_sum = _site(call, eps, weight_offset, cols, dims, x.get_device(), x.dtype, _dtype(bias),
                            _dtype(residual), _dtype(weight), _dtype(ln_bias))  # fmt: skip
    y, z, _, stats = launching.forward(site, x, bias, residual, weight, ln_bias, seed, threshold, store_sum)
    return y, x.new_empty(0) if z is None else z, x.new_empty(0) if stats is None else stats


def _fake_forward(x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor | None,
                  ln_bias: Tensor | None, seed: Tensor | None, threshold: int, call: str, eps: float,
                  weight_offset: float, cols: int, dims: int) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    site, store_sum = _site(call, eps, weight_offset, cols, dims, -1, x.dtype, _dtype(bias), _dtype(residual),
                            _dtype(weight), _dtype(ln_bias))  # fmt: skip
    y = torch.empty_like(x, dtype=site.y, memory_format=torch.contiguous_format)
    stored = store_sum and site.normalizes
    z = torch.empty_like(x, dtype=site.z, memory_format=torch.contiguous_format) if stored else x.new_empty(0)
    stats = x.new_empty((2 if site.rule.kind == "layer" else 1, x.numel() // cols), dtype=site.acc)
    return y, z, stats if site.normalizes else x.new_empty(0)


def _backward(dy: Tensor | None, dsum: Tensor | None, kept: Tensor | None, bias: Tensor | None,
              residual: Tensor | None, weight: Tensor | None, ln_bias: Tensor | None, stats: Tensor | None,
              needs: str, dtypes: str, seed: Tensor | None, threshold: int, call: str, eps: float,
              weight_offset: float, cols: int, dims: int) -> list[Tensor]:  # fmt: skip
    like: Tensor = dy if dy is not None else dsum  # type: ignore[assignment]
    needed, (x_dtype, bias_dtype, residual_dtype) = _gradients(needs, dtypes)
    site, _ = _site(call, eps, weight_offset, cols, dims, like.get_device(), x_dtype, bias_dtype, residual_dtype,
                    _dtype(weight), _dtype(ln_bias))  # fmt: skip
    grads = launching.backward(site, dy, dsum, None, kept, bias, residual, weight, ln_bias, stats, seed, threshold,
                               needed)  # type: ignore[arg-type]  # fmt: skip
    # An operator's outputs may not alias; `_autograd_backward` puts the shared gradient back.
    first = _shared(needed, seed, x_dtype, residual_dtype)
    return [grad for grad in grads[first:] if grad is not None]


def _shared(needs: tuple[bool, ...], seed: Tensor | None, x: torch.dtype | None, residual: torch.dtype | None) -> bool:
    """Whether x and residual have one gradient."""
    return needs[0] and needs[2] and seed is None and x is residual


def _fake_backward(dy: Tensor | None, dsum: Tensor | None, kept: Tensor | None, bias: Tensor | None,
                   residual: Tensor | None, weight: Tensor | None, ln_bias: Tensor | None, stats: Tensor | None,
                   needs: str, dtypes: str, seed: Tensor | None, threshold: int, call: str, eps: float,
                   weight_offset: float, cols: int, dims: int) -> list[Tensor]:  # fmt: skip
    like = dy if dy is not None else dsum
    assert like is not None
    needed, (x_dtype, bias_dtype, residual_dtype) = _gradients(needs, dtypes)

    def full(dtype: torch.dtype | None) -> Tensor:
        return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)

    grads: list[Tensor] = []
    if needed[0] and not _shared(needed, seed, x_dtype, residual_dtype):
        grads.append(full(x_dtype))
    if needed[1]:
        grads.append(like.new_empty(cols, dtype=bias_dtype))
    if needed[2]:
        grads.append(full(residual_dtype))
    for need, parameter in zip(needed[3:], (weight, ln_bias), strict=True):
        if need:
            grads.append(torch.empty_like(parameter, memory_format=torch.contiguous_format))  # type: ignore[arg-type]
    return grads


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, bias, residual, weight, ln_bias, seed, threshold, call, *constants = inputs
    y, z, stats = output
    kind, _, save, stored, _ = call.split()
    ctx.stored = stored == "stores"
    kept, kept_bias, kept_residual = kept_tensors(x, bias, residual, y, z if ctx.stored else None, kind, save)
    ctx.save_for_backward(kept, kept_bias, kept_residual, weight, ln_bias, stats if kind != "none" else None, seed)
    ctx.set_materialize_grads(False)
    ctx.dtypes = (x.dtype, _dtype(bias), _dtype(residual))
    ctx.call = (threshold, call, *constants)


def _autograd_backward(ctx: Any, dy: Tensor | None, dz: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    *saved, seed = ctx.saved_tensors
    rest = (None,) * 7
    dsum = dz if ctx.stored else None
    if dy is None and dsum is None:
        return (None,) * 5 + rest
    needs = tuple(ctx.needs_input_grad[:5])
    if dy is None:
        needs = (*needs[:3], False, False)  # only the sum has a gradient, and the norm's parameters did not make it
    names = " ".join([_NAMES[dtype] for dtype in ctx.dtypes])
    digits = "".join([str(int(need)) for need in needs])
    grads = iter(autograd.once(torch.ops.fusedops.norm_backward, dy, dsum, *saved, digits, names, seed, *ctx.call))
    x_dtype, _, residual_dtype = ctx.dtypes
    shared = _shared(needs, seed, x_dtype, residual_dtype)
    found = [next(grads) if need and not (place == 0 and shared) else None for place, need in enumerate(needs)]
    if shared:
        found[0] = found[2]
    return (*found, *rest)


implement(_LIBRARY, "norm_forward", _forward, _fake_forward)
implement(_LIBRARY, "norm_backward", _backward, _fake_backward)
torch.library.register_autograd(
    "fusedops::norm_forward", _autograd_backward, setup_context=_setup_context, lib=_LIBRARY
)
