"""The norm family's reference implementation in PyTorch's operators, differentiable to any order.

It runs on any device: where there are no kernels, under torch.func transforms and in forward mode, and, fed fp64
tensors, as the tests' oracle. Statistics and accumulation are in fp32, in fp64 for fp64 inputs. Every function works
over the last dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Dropout", "Kind", "NormRule", "Rounding", "accumulator", "dropout_add", "forward", "normalize", "sum_dtype"]

Kind = Literal["layer", "rms", "none"]
Rounding = Literal["once", "llama", "t5"]
# Multiplies by the keep mask over its probability; the second argument is the dtype of `F.dropout`'s input.
Dropout = Callable[[Tensor, torch.dtype], Tensor]

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class NormRule:
    """What is computed after the sum: the norm's kind and constants, and where it rounds.

    ``rounding`` is "once" (from the sum on all in the accumulator's dtype, one rounding at the end) or names the
    Hugging Face module whose intermediate roundings are reproduced. ``eps`` None is the machine epsilon of the dtype in
    which `F.rms_norm` computes.
    """

    kind: Kind
    eps: float | None = 1e-5
    weight_offset: float = 0.0
    rounding: Rounding = "once"

    def epsilon(self, dtype: torch.dtype) -> float:
        """What is added to the variance of rows of ``dtype``."""
        return torch.finfo(accumulator(dtype)).eps if self.eps is None else self.eps

    def output_dtype(self, z_dtype: torch.dtype, weight_dtype: torch.dtype | None) -> torch.dtype:
        """The output's dtype where the caller names none.

        Llama's and T5's modules multiply by the weight outside their fp32 island, so a wider weight widens the output.
        """
        if weight_dtype is None or self.kind == "none" or self.rounding == "once":
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


def dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor | None, dropout: Dropout) -> Tensor:
    """``dropout(x + bias) + residual``, not yet rounded."""
    z = x.to(accumulator(sum_dtype(x, bias, residual)))
    if bias is not None:
        z = z + bias
    z = dropout(z, sum_dtype(x, bias, None))
    if residual is not None:
        z = residual + z  # whose layout the sum has, as where a block adds to its residual stream
    return z


def forward(
    tensors: Sequence[Any],
    rule: NormRule,
    *,
    dropout: Dropout = lambda h, dtype: h,
    out_dtype: torch.dtype | None = None,
    elementary: bool = False,
) -> tuple[Tensor, Tensor]:
    """``(y, z)`` with the pre-norm sum ``z = dropout(x + bias) + residual`` and ``y = norm(z)``.

    ``tensors`` are x, bias, residual, weight and ln_bias, all but the first None where absent.
    """
    x, bias, residual, weight, ln_bias = tensors
    z_dtype = sum_dtype(x, bias, residual)
    z = dropout_add(x, bias, residual, dropout)
    if rule.kind == "none":
        z = z.to(out_dtype or z_dtype)
        return z, z
    # The norm is that of the pre-norm sum as it is saved: its statistics then belong to what the backward sees.
    z = z.to(z_dtype)
    return normalize(z, weight, ln_bias, rule, out_dtype, elementary=elementary), z


def normalize(z: Tensor, weight: Tensor | None, ln_bias: Tensor | None, rule: NormRule,
              out_dtype: torch.dtype | None = None, *, elementary: bool = False) -> Tensor:  # fmt: skip
    """``norm(z) * (weight + weight_offset) + ln_bias``.

    With ``elementary`` without PyTorch's own norms, of whose derivatives some are wrong: of `F.layer_norm` the reverse
    of the forward mode, and the second one with a bias and no weight (torch 2.13).
    """
    z_dtype = z.dtype
    rms = rule.kind == "rms"
    eps = rule.epsilon(z_dtype)
    acc = accumulator(z_dtype)
    weight_dtype = None if weight is None else weight.dtype
    dtypes = {z_dtype, *(t.dtype for t in (weight, ln_bias) if t is not None)}
    if out_dtype not in (None, z_dtype):
        dtypes.add(acc)  # only then is there one rounding, the last
    native = not elementary and len(dtypes) == 1 and (ln_bias is None or (weight is not None and not rms))
    if native and rule.rounding == "once" and rule.weight_offset == 0.0:
        shape = z.shape[-1:]
        y = F.rms_norm(z, shape, weight, eps) if rms else F.layer_norm(z, shape, weight, ln_bias, eps)
        return y if out_dtype is None else y.to(out_dtype)
    hat = z.to(acc)
    if not rms:
        hat = hat - hat.mean(-1, keepdim=True)
    hat = hat * torch.rsqrt(hat.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        hat_dtype = rule.hat_dtype(z_dtype, weight_dtype)
        hat = hat.to(hat_dtype)
        if hat_dtype == acc:
            weight = weight.to(acc)
        hat = hat * (weight + rule.weight_offset if rule.weight_offset else weight)
    if ln_bias is not None:
        hat = hat + ln_bias.to(acc)
    return hat.to(out_dtype or rule.output_dtype(z_dtype, weight_dtype))
