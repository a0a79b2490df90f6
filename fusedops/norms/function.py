"""The norm family's autograd Function: first order through the kernels, everything else through the formula.

Under ``create_graph``, forward mode and torch.func transforms the derivative is written in differentiable PyTorch
operators (`reference`), so every order works; the keep mask comes from a kernel in each case.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..core import autograd
from ..core.rng import Seed
from . import launching, reference
from .launching import Site, site_of
from .reference import NormRule

__all__ = ["Call", "NormFunction", "kept_tensors"]

_MASK_RULE = NormRule("none")


class Call:
    """What a call of `NormFunction` is besides its tensors."""

    __slots__ = ("seed", "site", "store_sum", "threshold")

    def __init__(self, site: Site, seed: Seed | None, threshold: int, store_sum: bool) -> None:
        self.site = site
        self.seed = seed
        self.threshold = threshold
        self.store_sum = store_sum


class _Stats:
    """Carries the statistics from ``forward`` to ``setup_context`` unseen by autograd: the sum determines them."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor = tensor


def kept_tensors(x: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor, z: Tensor | None, kind: str,
                 save: str) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """What stays alive for the backward, as ``(kept, bias, residual)``."""
    if kind == "none":
        return None, None, None
    if save == "inputs":
        return x, bias, residual
    if save == "output":
        return y, None, None
    return (x if z is None else z), None, None


class NormFunction(torch.autograd.Function):
    """``(y, z, twin, statistics)`` of `launching.forward`; z is an output to be differentiable in its own right."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor | None,
                ln_bias: Tensor | None, call: Call) -> Any:  # fmt: skip
        """One launch."""
        y, z, twin, stats = launching.forward(call.site, x, bias, residual, weight, ln_bias, call.seed, call.threshold,
                                              call.store_sum)  # fmt: skip
        return y, z, twin, _Stats(stats)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps what the backward needs, as `kept_tensors` says."""
        x, bias, residual, weight, ln_bias, call = inputs
        y, z, _, stats = output
        site = call.site
        kept, kept_bias, kept_residual = kept_tensors(x, bias, residual, y, z, site.rule.kind, site.save)
        # Under transforms the mask is drawn again for a tensor that is batched as the forward was: the output.
        like = y if call.seed is not None and autograd.transforms_active() else None
        ctx.save_for_backward(kept, kept_bias, kept_residual, weight, ln_bias, stats.tensor, like)
        ctx.set_materialize_grads(False)
        ctx.call = call
        if autograd.forward_mode():
            ctx.save_for_forward(x, bias, residual, weight, ln_bias, y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None, dtwin: Tensor | None, _: Any) -> Any:
        """Kernels at first order, the formula where the gradient is itself differentiated or batched."""
        given = [d for d in (dy, dsum, dtwin) if d is not None]
        if not given:
            return (None,) * 6
        call: Call = ctx.call
        kept, bias, residual, weight, ln_bias, stats, like = ctx.saved_tensors
        needs = ctx.needs_input_grad[:5]
        if torch.is_grad_enabled() or autograd.batched(*given):
            if dtwin is not None:
                dy = dtwin if dy is None else dy + dtwin
            return (*_formula(dy, dsum, kept, bias, residual, weight, ln_bias, like, call, needs), None)
        dy, dsum, dtwin = autograd.settled(dy), autograd.settled(dsum), autograd.settled(dtwin)
        return (*launching.backward(call.site, dy, dsum, dtwin, kept, bias, residual, weight, ln_bias, stats, call.seed,
                                    call.threshold, needs), None)  # fmt: skip

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Forward mode, by the formula."""
        call: Call = ctx.call
        x, bias, residual, weight, _, y = ctx.saved_tensors
        dx, dbias, dresidual, dweight, dln_bias, _ = tangents
        scale = _keep_scale(y, call)
        z = reference.dropout_add(x, bias, residual, scale)
        dz = torch.zeros_like(z) if dx is None else dx.to(z.dtype)
        if dbias is not None:
            dz = dz + dbias
        if scale is not None:
            dz = dz * scale
        if dresidual is not None:
            dz = dz + dresidual
        site = call.site
        flat = functools.partial(_flat, dims=site.dims)
        dy = reference.tangent(flat(dz), flat(dweight), flat(dln_bias), flat(z), flat(weight), site.rule)
        dy = dy.view(y.shape).to(site.y)
        return dy, dz.to(site.z) if call.store_sum else None, None if site.twin is None else dy.to(site.twin), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        """Batches rows: the kernels take any number of leading dimensions. Batched parameters take the formula."""
        *tensors, call = args
        site: Site = call.site
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
            outputs = autograd.apply(NormFunction, x, bias, residual, weight, ln_bias, call)
            return outputs, tuple(0 if isinstance(output, Tensor) else None for output in outputs)
        scale = _keep_scale(x[0] if same else x, call)
        dims = site.dims
        bias, weight, ln_bias = (
            t if t is None or d is None else t.view(t.shape[0], *(1,) * (x.dim() - 1 - dims), *t.shape[1:])
            for t, d in ((bias, bias_dim), (weight, weight_dim), (ln_bias, ln_bias_dim))
        )
        z = reference.dropout_add(x, bias, residual, scale)
        rounded = z.to(site.z)
        y = z.to(site.y)
        if site.normalizes:
            y = reference.normalize(_flat(rounded, dims), _flat(weight, dims), _flat(ln_bias, dims), site.rule,
                                    site.y).view(x.shape)  # fmt: skip
        outputs = (y, rounded if call.store_sum else None, None if site.twin is None else y.to(site.twin), _Stats(None))
        return outputs, tuple(0 if isinstance(output, Tensor) else None for output in outputs)


def _flat(t: Any, dims: int) -> Any:
    return t if t is None or dims == 1 else t.flatten(-dims)


def _keep_scale(like: Tensor, call: Call) -> Tensor | None:
    """The call's keep mask over its probability, as a tensor in the shape of ``like``; None without dropout."""
    if call.seed is None:
        return None
    dtype = reference.accumulator(like.dtype)
    site = site_of(_MASK_RULE, call.site.cols, call.site.dims, "sum", None, call.site.device_index, dtype, None, None,
                   None, None)  # fmt: skip
    ones = torch.ones_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    y, *_ = autograd.apply(NormFunction, ones, None, None, None, None, Call(site, call.seed, call.threshold, False))
    return y  # type: ignore[no-any-return]


def _formula(dy: Tensor | None, dsum: Tensor | None, kept: Tensor | None, bias: Tensor | None,
             residual: Tensor | None, weight: Tensor | None, ln_bias: Tensor | None, like: Tensor | None, call: Call,
             needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients in differentiable operators."""
    site = call.site
    given: Tensor = dy if dy is not None else dsum  # type: ignore[assignment]
    if like is None and call.seed is not None:
        # Not batched, whatever the gradient is: the forward was outside any transform.
        like = torch.empty(given.shape, dtype=given.dtype, device=given.device)
    scale = None if like is None else _keep_scale(like, call)
    if not site.normalizes:
        z = given
    elif site.save == "output":
        raise RuntimeError("fusedops: save='output' has no double backward; use save='sum'")
    elif site.save == "inputs":
        z = reference.dropout_add(kept, bias, residual, scale).to(site.z)  # type: ignore[arg-type]
    else:
        z = kept  # type: ignore[assignment]
    flat = functools.partial(_flat, dims=site.dims)
    dx, dz, dweight, dln_bias = reference.backward(flat(dy), flat(dsum), flat(z), flat(weight), flat(scale), site.rule)
    dbias = dx.sum(tuple(range(dx.dim() - 1))) if dx.dim() > 1 else dx
    grads = (dx, dbias, dz, dweight, dln_bias)
    shapes = (given.shape, dbias.shape, given.shape, *(None if t is None else t.shape for t in (weight, ln_bias)))
    dtypes = (site.x, site.bias, site.residual, site.weight, site.ln_bias)
    return tuple(
        grad.reshape(shape).to(dtype) if needed and grad is not None and shape is not None else None
        for grad, shape, dtype, needed in zip(grads, shapes, dtypes, needs, strict=True)
    )
