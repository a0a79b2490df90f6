"""The norm family's autograd Function: first order through the kernels, everything else through the formula.

Under ``create_graph``, forward mode and torch.func transforms the derivative is written in differentiable PyTorch
operators (`reference`), so every order works; the keep mask comes from a kernel in each case.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core import autograd
from ..core.rng import Seed
from . import launching, reference
from .launching import Dtypes, Needs, Options
from .reference import NormRule

__all__ = ["Call", "NormFunction", "dtypes_of", "gradients", "needs_of"]

_MASK_RULE = NormRule("none")


class Call:
    """What a call of `NormFunction` is besides its tensors."""

    __slots__ = ("options", "seed", "threshold")

    def __init__(self, seed: Seed | None, threshold: int, options: Options) -> None:
        self.seed = seed
        self.threshold = threshold
        self.options = options


class _Stats:
    """Carries the statistics from ``forward`` to ``setup_context`` unseen by autograd: the sum determines them."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor = tensor


@functools.cache
def needs_of(x: bool, bias: bool, residual: bool, weight: bool, ln_bias: bool) -> Needs:
    """The one `Needs` object for a combination."""
    return Needs(x, bias, residual, weight, ln_bias)


@functools.cache
def dtypes_of(x: torch.dtype, bias: torch.dtype | None, residual: torch.dtype | None) -> Dtypes:
    """The one `Dtypes` object for a combination."""
    return Dtypes(x, bias, residual)


def kept_tensors(x: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor, z: Tensor | None,
                 options: Options) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """What stays alive for the backward, as ``(kept, bias, residual)``."""
    if options.rule.kind == "none":
        return None, None, None
    if options.save == "inputs":
        return x, bias, residual
    if options.save == "output":
        return y, None, None
    return (x if z is None else z), None, None


class NormFunction(torch.autograd.Function):
    """``(y, z, statistics)`` of `launching.forward`; z is an output so that it is differentiable in its own right."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor | None,
                ln_bias: Tensor | None, call: Call) -> Any:  # fmt: skip
        y, z, stats = launching.forward(x, bias, residual, weight, ln_bias, call.seed, call.threshold, call.options)
        return y, z, _Stats(stats)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, bias, residual, weight, ln_bias, call = inputs
        y, z, stats = output
        kept, kept_bias, kept_residual = kept_tensors(x, bias, residual, y, z, call.options)
        ctx.save_for_backward(kept, kept_bias, kept_residual, weight, ln_bias, stats.tensor)
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.dtypes = dtypes_of(
            x.dtype, None if bias is None else bias.dtype, None if residual is None else residual.dtype
        )
        if autograd.forward_mode():
            ctx.save_for_forward(x, bias, residual, weight, ln_bias)
            ctx.y_dtype = y.dtype

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None, _: Any) -> Any:
        if dy is None and dsum is None:
            return (None,) * 6
        call: Call = ctx.call
        kept, bias, residual, weight, ln_bias, stats = ctx.saved_tensors
        needs = needs_of(*ctx.needs_input_grad[:5])
        if torch.is_grad_enabled() or autograd.transforms_active():
            return (*_formula(dy, dsum, kept, bias, residual, weight, ln_bias, call, needs, ctx.dtypes), None)
        return (*launching.backward(dy, dsum, kept, bias, residual, weight, ln_bias, stats, call.seed,
                                    call.threshold, needs, ctx.dtypes, call.options), None)  # fmt: skip

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        call: Call = ctx.call
        x, bias, residual, weight, ln_bias = ctx.saved_tensors
        dx, dbias, dresidual, dweight, dln_bias, _ = tangents
        scale = _keep_scale(x, call)
        z = reference.dropout_add(x, bias, residual, scale)
        dz = torch.zeros_like(z) if dx is None else dx.to(z.dtype)
        if dbias is not None:
            dz = dz + dbias
        if scale is not None:
            dz = dz * scale
        if dresidual is not None:
            dz = dz + dresidual
        flat = functools.partial(_flat, dims=call.options.dims)
        dy = reference.tangent(flat(dz), flat(dweight), flat(dln_bias), flat(z), flat(weight), call.options.rule)
        z_dtype = reference.sum_dtype(x, bias, residual)
        return dy.view(x.shape).to(ctx.y_dtype), dz.to(z_dtype) if call.options.store_sum else None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        """Batches rows: the kernels take any number of leading dimensions. Batched parameters take the formula."""
        *tensors, call = args
        options: Options = call.options
        draws = call.seed is not None and call.threshold < 65536
        if draws and info.randomness == "error":
            raise RuntimeError(
                "fusedops: dropout was called under torch.vmap; pass randomness='different' or randomness='same'"
            )
        moved = [t if d is None else t.movedim(d, 0) for t, d in zip(tensors, in_dims, strict=False)]
        x, bias, residual, weight, ln_bias = moved
        x_dim, bias_dim, residual_dim, weight_dim, ln_bias_dim = in_dims[:5]
        x = x if x_dim is not None else x.expand(info.batch_size, *x.shape)
        if residual is not None and residual_dim is None:
            residual = residual.expand(info.batch_size, *residual.shape)
        same = draws and info.randomness == "same"
        if not same and bias_dim is None and weight_dim is None and ln_bias_dim is None:
            y, z, stats = autograd.apply(NormFunction, x, bias, residual, weight, ln_bias, call)
            return (y, z, stats), (0, None if z is None else 0, None)
        scale = _keep_scale(x[0] if same else x, call)
        dims = options.dims
        bias, weight, ln_bias = (
            t if t is None or d is None else t.view(t.shape[0], *(1,) * (x.dim() - 1 - dims), *t.shape[1:])
            for t, d in ((bias, bias_dim), (weight, weight_dim), (ln_bias, ln_bias_dim))
        )
        z = reference.dropout_add(x, bias, residual, scale)
        z_dtype = reference.sum_dtype(x, bias, residual)
        rule, rounded = options.rule, z.to(z_dtype)
        if rule.kind != "none":
            y = reference.normalize(_flat(z if rule.rounding == "once" else rounded, dims), _flat(weight, dims),
                                    _flat(ln_bias, dims), rule, z_dtype, options.out_dtype).view(x.shape)  # fmt: skip
        else:
            y = z.to(options.out_dtype or z_dtype)
        return (y, rounded if options.store_sum else None, _Stats(None)), (0, 0 if options.store_sum else None, None)


def _flat(t: Any, dims: int) -> Any:
    return t if t is None or dims == 1 else t.flatten(-dims)


def _keep_scale(like: Tensor, call: Call) -> Tensor | None:
    """The call's keep mask over its probability, as a tensor in the shape of ``like``; None without dropout."""
    if call.seed is None:
        return None
    options = _mask_options(call.options)
    ones = torch.ones_like(like, dtype=reference.accumulator(like.dtype), memory_format=torch.contiguous_format)
    y, _, _ = autograd.apply(NormFunction, ones, None, None, None, None, Call(call.seed, call.threshold, options))
    return y  # type: ignore[no-any-return]


@functools.cache
def _mask_options(options: Options) -> Options:
    return replace(options, rule=_MASK_RULE, save="sum", store_sum=False, out_dtype=None)


def _formula(dy: Tensor | None, dsum: Tensor | None, kept: Tensor | None, bias: Tensor | None,
             residual: Tensor | None, weight: Tensor | None, ln_bias: Tensor | None, call: Call, needs: Needs,
             dtypes: Dtypes) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients in differentiable operators."""
    options = call.options
    like = dy if dy is not None else dsum
    assert like is not None
    scale = _keep_scale(like, call)
    if options.rule.kind == "none":
        z = like
    elif options.save == "output":
        raise RuntimeError("fusedops: save='output' has no double backward; use save='sum'")
    elif options.save == "inputs":
        assert kept is not None
        z = reference.dropout_add(kept, bias, residual, scale)
    else:
        assert kept is not None
        z = kept
    flat = functools.partial(_flat, dims=options.dims)
    dx, dz, dweight, dln_bias = reference.backward(flat(dy), flat(dsum), flat(z), flat(weight), flat(scale),
                                                   options.rule)  # fmt: skip
    dbias = dx.sum(tuple(range(dx.dim() - 1))) if needs.bias else None
    return (
        dx.view(like.shape).to(dtypes.x) if needs.x else None,
        dbias.to(dtypes.bias) if dbias is not None and dtypes.bias else None,
        dz.view(like.shape).to(dtypes.residual) if needs.residual and dtypes.residual else None,
        dweight.view(weight.shape).to(weight.dtype) if needs.weight and dweight is not None and weight is not None
        else None,
        dln_bias.view(ln_bias.shape).to(ln_bias.dtype)
        if needs.ln_bias and dln_bias is not None and ln_bias is not None else None,
    )  # fmt: skip
