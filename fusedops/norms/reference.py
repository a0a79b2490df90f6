"""The norm family in plain torch: the formula, its backward, and its derivative along a direction.

Runs on any device. The formula is the CPU path and, fed fp64 tensors, the tests' oracle; the backward and the
tangent, written in differentiable torch operators, serve higher-order derivatives and forward mode.
Statistics and accumulation are in fp32, in fp64 for fp64 inputs. Every function works over the last dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Kind", "NormRule", "Rounding", "accumulator", "backward", "dropout_add", "forward", "normalize", "tangent"]

Kind = Literal["layer", "rms", "none"]
Rounding = Literal["once", "llama", "t5", "gemma"]

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class NormRule:
    """What is computed after the sum: the norm's kind and constants, and where it rounds.

    ``rounding`` is "once" (from the sum on all in the accumulator's dtype, one rounding at the end) or names the
    Hugging Face module whose intermediate roundings are reproduced.
    """

    kind: Kind
    eps: float = 1e-5
    weight_offset: float = 0.0
    rounding: Rounding = "once"

    def output_dtype(self, z_dtype: torch.dtype, weight_dtype: torch.dtype | None) -> torch.dtype:
        """The output's dtype where the caller names none.

        Llama's and T5's modules multiply by the weight outside their fp32 island, so a wider weight widens the output.
        """
        if weight_dtype is None or self.kind == "none" or self.rounding in ("once", "gemma"):
            return z_dtype
        if self.rounding == "llama":
            return torch.promote_types(weight_dtype, z_dtype)
        return weight_dtype if weight_dtype in _HALF else torch.promote_types(weight_dtype, accumulator(z_dtype))

    def hat_dtype(self, z_dtype: torch.dtype, weight_dtype: torch.dtype | None) -> torch.dtype:
        """The dtype to which the normalised rows are rounded before the weight multiplies them."""
        if self.rounding == "llama":
            return z_dtype
        if self.rounding == "t5" and weight_dtype in _HALF:
            return weight_dtype
        return accumulator(z_dtype)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics and sums are held for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_dtype(x: Tensor, bias: Tensor | None, residual: Tensor | None) -> torch.dtype:
    """PyTorch's promotion of ``dropout(x + bias) + residual``."""
    dtype = x.dtype
    for other in (bias, residual):
        if other is not None:
            dtype = torch.promote_types(dtype, other.dtype)
    return dtype


def keep_scale(keep: Tensor, keep_probability: float, dtype: torch.dtype) -> Tensor:
    """What dropout multiplies by: one over the keep probability where kept, zero elsewhere."""
    return keep.to(dtype) * (1.0 / keep_probability if keep_probability > 0.0 else 0.0)


def dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor | None, scale: Tensor | None) -> Tensor:
    """``(x + bias) * scale + residual``, not yet rounded; ``scale`` is a keep mask over its probability."""
    z = x.to(accumulator(sum_dtype(x, bias, residual)))
    if bias is not None:
        z = z + bias
    if scale is not None:
        z = z * scale
    if residual is not None:
        z = z + residual
    return z


def forward(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    ln_bias: Tensor | None,
    rule: NormRule,
    *,
    keep: Tensor | None = None,
    keep_probability: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``(y, z)`` with ``z = dropout(x + bias) + residual`` and ``y = norm(z)``.

    ``keep`` is the boolean keep mask in x's shape, or None for no dropout.
    """
    z_dtype = sum_dtype(x, bias, residual)
    scale = None if keep is None else keep_scale(keep, keep_probability, accumulator(z_dtype))
    z = dropout_add(x, bias, residual, scale)
    if rule.kind == "none":
        z = z.to(out_dtype or z_dtype)
        return z, z
    # The norm is that of the sum as it is kept: its statistics then belong to what the backward sees.
    z = z.to(z_dtype)
    return normalize(z, weight, ln_bias, rule, out_dtype), z


def normalize(z: Tensor, weight: Tensor | None, ln_bias: Tensor | None, rule: NormRule,
              out_dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    """``norm(z) * (weight + weight_offset) + ln_bias``."""
    z_dtype = z.dtype
    rms = rule.kind == "rms"
    acc = accumulator(z_dtype)
    weight_dtype = None if weight is None else weight.dtype
    dtypes = {z_dtype, *(t.dtype for t in (weight, ln_bias) if t is not None)}
    if out_dtype not in (None, z_dtype):
        dtypes.add(acc)  # only then is there one rounding, the last
    # A bias without a weight has a wrong second derivative in F.layer_norm (torch 2.13).
    native = len(dtypes) == 1 and (ln_bias is None or (weight is not None and not rms))
    # Under vmap the parameters may carry batch dimensions, which F.layer_norm does not take.
    native = native and all(t is None or t.dim() == 1 for t in (weight, ln_bias))
    if native and rule.rounding == "once" and rule.weight_offset == 0.0:
        shape = z.shape[-1:]
        y = F.rms_norm(z, shape, weight, rule.eps) if rms else F.layer_norm(z, shape, weight, ln_bias, rule.eps)
        return y if out_dtype is None else y.to(out_dtype)
    hat, _ = _standardize(z.to(acc), rule)
    if weight is not None:
        hat_dtype = rule.hat_dtype(z_dtype, weight_dtype)
        hat = hat.to(hat_dtype)
        if hat_dtype == acc:
            weight = weight.to(acc)
        hat = hat * (weight + rule.weight_offset if rule.weight_offset else weight)
    if ln_bias is not None:
        hat = hat + ln_bias.to(acc)
    return hat.to(out_dtype or rule.output_dtype(z_dtype, weight_dtype))


def backward(
    dy: Tensor | None,
    dsum: Tensor | None,
    z: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    rule: NormRule,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """``(dx, dz, dweight, dln_bias)`` in the accumulator's dtype; bias takes dx's sum over rows, residual takes dz.

    ``dy`` is the output's gradient, ``dsum`` the gradient that reaches the sum itself; ``scale`` as in `dropout_add`.
    """
    acc = accumulator(z.dtype)
    dz = torch.zeros_like(z, dtype=acc) if dsum is None else dsum.to(acc)
    dweight = dln_bias = None
    if dy is not None:
        dy = dy.to(acc)
        if rule.kind == "none":
            dz = dz + dy
        else:
            hat, rstd = _standardize(z.to(acc), rule)
            rows = tuple(range(dy.dim() - 1))
            dweight = (dy * hat).sum(rows) if rows else dy * hat
            dln_bias = dy.sum(rows) if rows else dy
            dz = dz + _project(_weighted(dy, weight, rule), hat, rstd, rule)
    return dz if scale is None else dz * scale, dz, dweight, dln_bias


def tangent(
    dz: Tensor,
    dweight: Tensor | None,
    dln_bias: Tensor | None,
    z: Tensor,
    weight: Tensor | None,
    rule: NormRule,
) -> Tensor:
    """The output's derivative along ``(dz, dweight, dln_bias)``, in the accumulator's dtype (forward mode)."""
    acc = accumulator(z.dtype)
    dz = dz.to(acc)
    if rule.kind == "none":
        return dz
    hat, rstd = _standardize(z.to(acc), rule)
    dy = _weighted(_project(dz, hat, rstd, rule), weight, rule)
    if dweight is not None:
        dy = dy + hat * dweight.to(acc)
    if dln_bias is not None:
        dy = dy + dln_bias.to(acc)
    return dy


def _standardize(z: Tensor, rule: NormRule) -> tuple[Tensor, Tensor]:
    """The rows with their mean (LayerNorm) and scale taken out, and the reciprocal of that scale."""
    if rule.kind == "layer":
        z = z - z.mean(-1, keepdim=True)
    rstd = torch.rsqrt(z.square().mean(-1, keepdim=True) + rule.eps)
    return z * rstd, rstd


def _weighted(value: Tensor, weight: Tensor | None, rule: NormRule) -> Tensor:
    if weight is None:
        return value
    return value * (weight.to(value.dtype) + rule.weight_offset)


def _project(value: Tensor, hat: Tensor, rstd: Tensor, rule: NormRule) -> Tensor:
    """The norm's Jacobian, which is symmetric, applied to ``value``: it serves backward and forward mode alike."""
    out = value - hat * (value * hat).mean(-1, keepdim=True)
    if rule.kind == "layer":
        out = out - value.mean(-1, keepdim=True)
    return out * rstd
