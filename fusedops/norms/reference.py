"""The norm family's reference implementation in PyTorch's operators, differentiable to any order.

It runs on devices without kernels, under torch.func transforms and in forward mode. With fp64
tensors it is the tests' oracle. Statistics and accumulation are in fp32 (fp64 for fp64 inputs).
Every function normalises over the last dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "Dropout",
    "Kind",
    "NormRule",
    "Rounding",
    "accumulator",
    "dropout_add",
    "forward",
    "normalize",
    "sum_dtype",
]

Kind = Literal["layer", "rms", "none"]
Rounding = Literal["once", "llama", "t5"]
# A function that multiplies by the keep mask and divides by the keep probability. Its second
# argument is the dtype that the input of `F.dropout` would have.
Dropout = Callable[[Tensor, torch.dtype], Tensor]

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class NormRule:
    """The norm's kind, constants and rounding.

    With ``rounding`` "once", the norm is computed in the accumulator's dtype, and rounded last.
    Another ``rounding`` names a Hugging Face module; the intermediate roundings are that module's.
    If ``eps`` is None, it is the machine epsilon of the dtype in which `F.rms_norm` computes.
    """

    kind: Kind
    eps: float | None = 1e-5
    weight_offset: float = 0.0
    rounding: Rounding = "once"

    def epsilon(self, dtype: torch.dtype) -> float:
        """Returns the number that is added to the variance of rows of ``dtype``."""
        return torch.finfo(accumulator(dtype)).eps if self.eps is None else self.eps

    def output_dtype(self, z_dtype: torch.dtype, weight_dtype: torch.dtype | None) -> torch.dtype:
        """Returns the output's dtype if the caller names none.

        Llama's and T5's modules leave fp32 before they multiply by the weight, so a wider weight
        widens the output.
        """
        if weight_dtype is None or self.kind == "none" or self.rounding == "once":
            return z_dtype
        if self.rounding == "llama":
            return torch.promote_types(weight_dtype, z_dtype)
        if weight_dtype in _HALF:
            return weight_dtype
        return torch.promote_types(weight_dtype, accumulator(z_dtype))

    def hat_dtype(self, z_dtype: torch.dtype, weight_dtype: torch.dtype | None) -> torch.dtype:
        """Returns the dtype to which normalised rows are rounded before they are scaled."""
        if self.rounding == "llama":
            return z_dtype
        if self.rounding == "t5" and weight_dtype in _HALF:
            return weight_dtype
        return accumulator(z_dtype)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of statistics and sums for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_dtype(x: Tensor, bias: Tensor | None, residual: Tensor | None) -> torch.dtype:
    """Returns the dtype to which PyTorch promotes ``dropout(x + bias) + residual``."""
    dtype = x.dtype
    for operand in (bias, residual):
        if operand is not None:
            dtype = torch.promote_types(dtype, operand.dtype)
    return dtype


def dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, dropout: Dropout
) -> Tensor:
    """Returns ``dropout(x + bias) + residual``, not yet rounded."""
    z = x.to(accumulator(sum_dtype(x, bias, residual)))
    if bias is not None:
        z = z + bias
    z = dropout(z, sum_dtype(x, bias, None))
    if residual is not None:
        # PyTorch's sum has the layout of its first operand. A block adds to its residual stream, so
        # the residual comes first.
        z = residual + z
    return z


def forward(
    tensors: Sequence[Any],
    rule: NormRule,
    *,
    dropout: Dropout = lambda h, dtype: h,
    out_dtype: torch.dtype | None = None,
    elementary: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns ``y = norm(z)`` and the pre-norm sum ``z = dropout(x + bias) + residual``.

    ``tensors`` are x, bias, residual, weight and ln_bias; all but x may be None.
    """
    x, bias, residual, weight, ln_bias = tensors
    z_dtype = sum_dtype(x, bias, residual)
    z = dropout_add(x, bias, residual, dropout)
    if rule.kind == "none":
        z = z.to(out_dtype or z_dtype)
        return z, z
    # The sum is rounded before it is normalised: the backward reads the rounded sum, so the
    # statistics must be those of the rounded sum.
    z = z.to(z_dtype)
    return normalize(z, weight, ln_bias, rule, out_dtype, elementary=elementary), z


def normalize(
    z: Tensor,
    weight: Tensor | None,
    ln_bias: Tensor | None,
    rule: NormRule,
    out_dtype: torch.dtype | None = None,
    *,
    elementary: bool = False,
) -> Tensor:
    """Returns ``norm(z) * (weight + weight_offset) + ln_bias``.

    ``elementary`` excludes PyTorch's own norms, because some of their derivatives are wrong. In
    torch 2.13, `F.layer_norm` has two wrong derivatives: reverse over forward mode, and the second
    derivative with a bias and no weight.
    """
    z_dtype = z.dtype
    rms = rule.kind == "rms"
    eps = rule.epsilon(z_dtype)
    acc = accumulator(z_dtype)
    if not elementary and _is_native(z_dtype, weight, ln_bias, rule, out_dtype):
        shape = z.shape[-1:]
        if rms:
            y = F.rms_norm(z, shape, weight, eps)
        else:
            y = F.layer_norm(z, shape, weight, ln_bias, eps)
        return y if out_dtype is None else y.to(out_dtype)
    hat = z.to(acc)
    if not rms:
        hat = hat - hat.mean(-1, keepdim=True)
    hat = hat * torch.rsqrt(hat.square().mean(-1, keepdim=True) + eps)
    weight_dtype = None
    if weight is not None:
        weight_dtype = weight.dtype
        hat_dtype = rule.hat_dtype(z_dtype, weight_dtype)
        hat = hat.to(hat_dtype)
        if hat_dtype == acc:
            weight = weight.to(acc)
        if rule.weight_offset:
            weight = weight + rule.weight_offset
        hat = hat * weight
    if ln_bias is not None:
        hat = hat + ln_bias.to(acc)
    return hat.to(out_dtype or rule.output_dtype(z_dtype, weight_dtype))


def _is_native(
    z_dtype: torch.dtype,
    weight: Tensor | None,
    ln_bias: Tensor | None,
    rule: NormRule,
    out_dtype: torch.dtype | None,
) -> bool:
    """Returns whether PyTorch's own norm computes the same as `normalize`."""
    if rule.rounding != "once" or rule.weight_offset != 0.0:
        return False
    if ln_bias is not None and (weight is None or rule.kind == "rms"):
        return False
    dtypes = {z_dtype, *(t.dtype for t in (weight, ln_bias) if t is not None)}
    if out_dtype not in (None, z_dtype):
        # PyTorch's norm rounds its output to the input's dtype, and the cast rounds it again. The
        # first rounding changes nothing only if the input's dtype is the accumulator's.
        dtypes.add(accumulator(z_dtype))
    return len(dtypes) == 1
