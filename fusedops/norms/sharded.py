"""Norms of rows whose columns are sharded: ranks add up two numbers of a row, and no rank gathers one.

The pre-norm sum is the dropout-add kernel's, of the rank's columns. The mean follows from the ranks' sums. Each rank's
squares about its own mean become those about the common mean as in Chan et al. 1979, "Updating formulae and a pairwise
algorithm for computing sample variances". The derivative is autograd's, which adds up the gradients of what the ranks
add up. The pre-norm sum is saved, whatever ``save`` is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..compiler.function import rowwise
from ..core import dropout
from ..core.call import with_state
from ..core.dropout import Dropout
from ..core.rng import State
from ..core.sharding import Layout
from .operator import NORM, NormConstants
from .reference import accumulator

__all__ = ["norm_over_columns"]


def norm_over_columns(
    constants: NormConstants, tensors: Any, state: State | Dropout, layout: Layout
) -> tuple[Tensor | None, ...]:
    """The output, the pre-norm sum and the low-precision copy of a norm, in this rank's columns."""
    x, bias, residual, weight, ln_bias = tensors
    rule, z, columns = constants.rule, x, layout.axes.columns
    drops = state[0] is not None if isinstance(state, tuple) else state is not dropout.none
    if bias is not None or residual is not None or drops:
        added = replace(constants, rule=replace(rule, kind="none"), shape=None, return_sum=False, out_dtype=None,
                        cast_dtype=None)  # fmt: skip
        z = with_state(NORM, added, (x, bias, residual, None, None), state)[0]
    acc, mean = accumulator(z.dtype), None
    if rule.kind == "rms":
        squares = layout.total(_squares(z, acc))
    else:
        total, own_squares = _moments(z, acc)
        mean, own = layout.total(total) / columns, z.shape[-1]
        apart = total / max(own, 1) - mean
        squares = layout.total(torch.addcmul(own_squares, apart, apart, value=own))
    rstd = torch.rsqrt(squares / columns + rule.epsilon(z.dtype))
    weight_dtype = None if weight is None else weight.dtype
    out, hat = constants.out_dtype or rule.output_dtype(z.dtype, weight_dtype), rule.hat_dtype(z.dtype, weight_dtype)
    cast = None if constants.cast_dtype == out else constants.cast_dtype
    if weight is not None and rule.weight_offset:
        weight = (weight.to(acc) if hat == acc else weight) + rule.weight_offset
    if weight is None or hat == acc:
        found = _normalized(z, mean, rstd, weight, ln_bias, out, cast)
    else:
        found = _normalized_rounded(z, rstd, weight, hat, out, cast)[1:]
    if constants.return_sum and z is x:
        z = z.clone()  # as from the kernels: never the caller's own tensor
    return found[0], z if constants.return_sum else None, found[1] if cast is not None else None


@rowwise
def _squares(z: Tensor, acc: torch.dtype) -> Tensor:
    """A row's sum of squares."""
    return z.to(acc).square().sum(-1, keepdim=True)


@rowwise
def _moments(z: Tensor, acc: torch.dtype) -> tuple[Tensor, Tensor]:
    """A row's sum, and its sum of squares about its own mean."""
    z = z.to(acc)
    total = z.sum(-1, keepdim=True)
    return total, (z - total / max(z.shape[-1], 1)).square().sum(-1, keepdim=True)


@rowwise
def _normalized(z: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, ln_bias: Tensor | None,
                out: torch.dtype, cast: torch.dtype | None) -> tuple[Tensor, ...]:  # fmt: skip
    """The output, and its low-precision copy."""
    hat = z.to(rstd.dtype)
    if mean is not None:
        hat = hat - mean
    hat = hat * rstd
    if weight is not None:
        hat = hat * weight.to(rstd.dtype)
    if ln_bias is not None:
        hat = hat + ln_bias.to(rstd.dtype)
    y = hat.to(out)
    return (y,) if cast is None else (y, y.to(cast))


@rowwise
def _normalized_rounded(z: Tensor, rstd: Tensor, weight: Tensor, hat: torch.dtype, out: torch.dtype,
                        cast: torch.dtype | None) -> tuple[Tensor, ...]:  # fmt: skip
    """RMSNorm's rows as rounded before the weight multiplies, the output, and its low-precision copy.

    Kernels round what they return, and go on from there.
    """
    rounded = (z.to(rstd.dtype) * rstd).to(hat)
    y = (rounded * weight).to(out)
    return (rounded, y) if cast is None else (rounded, y, y.to(cast))
