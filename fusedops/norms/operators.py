"""The family's private `torch.library` operators: what torch.compile, FakeTensor and make_fx see of a call."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..core.rng import Seed
from . import launching
from .function import kept_tensors
from .launching import site_of
from .reference import Kind, NormRule, Rounding, accumulator, sum_dtype

__all__ = ["operator_call"]

_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")

_CALL = (
    "Tensor? seed, int threshold, str kind, float eps, float weight_offset, str rounding, int cols, int dims, "
    "str save, bool store_sum, ScalarType? out_dtype"
)
_LIBRARY.define(
    "norm_forward(Tensor x, Tensor? bias, Tensor? residual, Tensor? weight, Tensor? ln_bias, "
    f"{_CALL}) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "norm_backward(Tensor? dy, Tensor? dsum, Tensor? kept, Tensor? bias, Tensor? residual, Tensor? weight, "
    "Tensor? ln_bias, Tensor? stats, bool[] needs, ScalarType x_dtype, ScalarType? bias_dtype, "
    f"ScalarType? residual_dtype, {_CALL}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@functools.lru_cache(maxsize=4096)
def rule_of(kind: Kind, eps: float, weight_offset: float, rounding: Rounding) -> NormRule:
    """The one rule object for these constants."""
    return NormRule(kind, eps, weight_offset, rounding)


def _dtype(t: Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def _absent(like: Tensor) -> Tensor:
    return like.new_empty(0)


def operator_call(x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor | None,
                  ln_bias: Tensor | None, seed: Seed | None, threshold: int, rule: NormRule, cols: int, dims: int,
                  save: str, store_sum: bool, out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The forward as one registered operator; ``(y, z)``."""
    if isinstance(seed, tuple):
        seed = torch.tensor(seed, dtype=torch.int64, device=x.device)
    y, z, _ = torch.ops.fusedops.norm_forward(x, bias, residual, weight, ln_bias, seed, threshold, rule.kind, rule.eps,
                                              rule.weight_offset, rule.rounding, cols, dims, save, store_sum,
                                              out_dtype)  # fmt: skip
    return y, z if store_sum else None


def _forward(x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor | None, ln_bias: Tensor | None,
             seed: Tensor | None, threshold: int, kind: Any, eps: float, weight_offset: float, rounding: Any,
             cols: int, dims: int, save: str, store_sum: bool,
             out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    site = site_of(rule_of(kind, eps, weight_offset, rounding), cols, dims, save, out_dtype, x.get_device(), x.dtype,
                   _dtype(bias), _dtype(residual), _dtype(weight), _dtype(ln_bias))  # fmt: skip
    y, z, _, stats = launching.forward(site, x, bias, residual, weight, ln_bias, seed, threshold, store_sum)
    return y, _absent(x) if z is None else z, _absent(x) if stats is None else stats


def _fake_forward(x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor | None,
                  ln_bias: Tensor | None, seed: Tensor | None, threshold: int, kind: Any, eps: float,
                  weight_offset: float, rounding: Any, cols: int, dims: int, save: str, store_sum: bool,
                  out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rule = NormRule(kind, eps, weight_offset, rounding)
    z_dtype = sum_dtype(x, bias, residual)
    y_dtype = out_dtype or rule.output_dtype(z_dtype, None if weight is None else weight.dtype)
    y = torch.empty_like(x, dtype=y_dtype, memory_format=torch.contiguous_format)
    stored = store_sum and kind != "none"
    z = torch.empty_like(x, dtype=z_dtype, memory_format=torch.contiguous_format) if stored else _absent(x)
    rows = x.numel() // cols
    stats = x.new_empty((2 if kind == "layer" else 1, rows), dtype=accumulator(z_dtype))
    return y, z, _absent(x) if kind == "none" else stats


def _backward(dy: Tensor | None, dsum: Tensor | None, kept: Tensor | None, bias: Tensor | None,
              residual: Tensor | None, weight: Tensor | None, ln_bias: Tensor | None, stats: Tensor | None,
              needs: list[bool], x_dtype: torch.dtype, bias_dtype: torch.dtype | None,
              residual_dtype: torch.dtype | None, seed: Tensor | None, threshold: int, kind: Any, eps: float,
              weight_offset: float, rounding: Any, cols: int, dims: int, save: str, store_sum: bool,
              out_dtype: torch.dtype | None) -> tuple[Tensor, ...]:  # fmt: skip
    like: Tensor = dy if dy is not None else dsum  # type: ignore[assignment]
    site = site_of(rule_of(kind, eps, weight_offset, rounding), cols, dims, save, out_dtype, like.get_device(), x_dtype,
                   bias_dtype, residual_dtype, _dtype(weight), _dtype(ln_bias))  # fmt: skip
    grads = launching.backward(site, dy, dsum, None, kept, bias, residual, weight, ln_bias, stats, seed, threshold,
                               tuple(needs))  # type: ignore[arg-type]  # fmt: skip
    dx, *others = (_absent(like) if grad is None else grad for grad in grads)
    if needs[0] and needs[2] and dx is others[1]:
        dx = _absent(like)  # an operator's outputs may not alias; `_autograd_backward` puts the shared gradient back
    return (dx, *others)


def _fake_backward(dy: Tensor | None, dsum: Tensor | None, kept: Tensor | None, bias: Tensor | None,
                   residual: Tensor | None, weight: Tensor | None, ln_bias: Tensor | None, stats: Tensor | None,
                   needs: list[bool], x_dtype: torch.dtype, bias_dtype: torch.dtype | None,
                   residual_dtype: torch.dtype | None, seed: Tensor | None, threshold: int, kind: str, eps: float,
                   weight_offset: float, rounding: str, cols: int, *_: Any) -> tuple[Tensor, ...]:  # fmt: skip
    like = dy if dy is not None else dsum
    assert like is not None
    shared = needs[0] and needs[2] and seed is None and x_dtype == residual_dtype

    def full(dtype: torch.dtype | None) -> Tensor:
        return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)

    return (
        full(x_dtype) if needs[0] and not shared else _absent(like),
        like.new_empty(cols, dtype=bias_dtype) if needs[1] else _absent(like),
        full(residual_dtype) if needs[2] else _absent(like),
        torch.empty_like(weight, memory_format=torch.contiguous_format) if needs[3] else _absent(like),  # type: ignore[arg-type]
        torch.empty_like(ln_bias, memory_format=torch.contiguous_format) if needs[4] else _absent(like),  # type: ignore[arg-type]
    )


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, bias, residual, weight, ln_bias, seed, threshold, *call = inputs
    y, z, stats = output
    kind, save, store_sum = call[0], call[6], call[7]
    kept, kept_bias, kept_residual = kept_tensors(x, bias, residual, y, z if store_sum else None, kind, save)
    ctx.save_for_backward(kept, kept_bias, kept_residual, weight, ln_bias, stats if kind != "none" else None, seed)
    ctx.set_materialize_grads(False)
    ctx.dtypes = (x.dtype, None if bias is None else bias.dtype, None if residual is None else residual.dtype)
    ctx.call = (threshold, *call)


def _autograd_backward(ctx: Any, dy: Tensor | None, dz: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    *saved, seed = ctx.saved_tensors
    rest = (None,) * 11
    dsum = dz if ctx.call[8] else None
    if dy is None and dsum is None:
        return (None,) * 5 + rest
    needs = list(ctx.needs_input_grad[:5])
    if dy is None:
        needs[3] = needs[4] = False  # only the sum has a gradient, and the norm's parameters did not make it
    grads = torch.ops.fusedops.norm_backward(dy, dsum, *saved, needs, *ctx.dtypes, seed, *ctx.call)
    dx, dbias, dresidual, dweight, dln_bias = (
        grad if needed else None for grad, needed in zip(grads, needs, strict=True)
    )
    if needs[0] and needs[2] and seed is None and ctx.dtypes[0] == ctx.dtypes[2]:
        dx = dresidual
    return (dx, dbias, dresidual, dweight, dln_bias, *rest)


def _no_double_backward(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        "fusedops: no double backward under torch.compile, dispatch modes or tensor subclasses; call outside of them"
    )


_LIBRARY.impl("norm_forward", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("norm_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("fusedops::norm_forward", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("fusedops::norm_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd(
    "fusedops::norm_forward", _autograd_backward, setup_context=_setup_context, lib=_LIBRARY
)
torch.library.register_autograd("fusedops::norm_backward", _no_double_backward, lib=_LIBRARY)
