"""Norms of rows whose columns are sharded over ranks.

Ranks add two numbers per row, and no rank gathers a row:

    rank 0   | columns 0 ... |   sum, squares about its own mean   -+
    rank 1   | columns ...   |   sum, squares about its own mean   -+-> all-reduced
    rank 2   | ... N - 1     |   sum, squares about its own mean   -+

The pre-norm sum is the dropout-add kernel's, of the rank's columns. The mean follows from the
ranks' sums. Each rank's squares about its own mean become those about the common mean as in Chan et
al. 1979, "Updating formulae and a pairwise algorithm for computing sample variances". The
derivative is autograd's, which all-reduces the gradients of all-reduced values. So the functions
below save the pre-norm sum for it, also where the operator's ``save`` is "output" or "inputs".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..compiler.function import rowwise
from ..core.random import dropout
from ..core.random.dropout import Dropout
from ..core.random.rng import State
from ..norms.reference import accumulator
from ..norms.site import NormConstants
from .sharding import Layout

__all__ = ["norm_over_columns"]


def norm_over_columns(
    constants: NormConstants,
    tensors: Any,
    state: State | Dropout,
    layout: Layout,
    compute: Callable[..., Any],
) -> tuple[Tensor | None, ...]:
    """The output, the pre-norm sum and the low-precision copy of a norm, in this rank's columns.

    Args:
        constants: the constants of the call.
        tensors: this rank's parts, in the operator's order.
        state: the random state of the dropout.
        layout: how the rows and columns are sharded.
        compute: computes a call of the operator of the norms on this rank's tensors: here the
            pre-norm sum.
    """
    x, bias, residual, weight, ln_bias = tensors
    rule, z, columns = constants.rule(), x, layout.axes.columns
    if bias is not None or residual is not None or _drops(state):
        added = NormConstants(
            constants.op, "none", rule.rounding, rule.eps, rule.weight_offset, None, constants.save
        )
        z = compute(added, (x, bias, residual, None, None), state)[0]
    acc, mean = accumulator(z.dtype), None
    if rule.kind == "rms":
        squares = layout.total(_squares(z, acc))
    else:
        total, own_squares = _moments(z, acc)
        mean, own = layout.total(total) / columns, z.shape[-1]
        # Squares about the common mean: own_squares + own * (own mean - mean)**2. A rank without
        # columns has no mean of its own, but there ``value`` is 0.
        difference = total / max(own, 1) - mean
        squares = layout.total(torch.addcmul(own_squares, difference, difference, value=own))
    rstd = torch.rsqrt(squares / columns + rule.epsilon(z.dtype))
    weight_dtype = None if weight is None else weight.dtype
    out = constants.out_dtype or rule.output_dtype(z.dtype, weight_dtype)
    hat = rule.hat_dtype(z.dtype, weight_dtype)
    cast = None if constants.cast_dtype == out else constants.cast_dtype
    # ``hat`` is the dtype of the normalised rows when the weight multiplies them: that of the
    # accumulator, or a lower one, to which Llama's and T5's norms round. Only then does the weight,
    # with its offset, keep its own dtype.
    if weight is not None and rule.weight_offset:
        if hat == acc:
            weight = weight.to(acc)
        weight = weight + rule.weight_offset
    if weight is None or hat == acc:
        outputs = _normalized(z, mean, rstd, weight, ln_bias, out, cast)
    else:
        outputs = _normalized_rounded(z, rstd, weight, hat, out, cast)[1:]
    returned = None
    if constants.return_sum:
        # The kernels never return the caller's own tensor, so neither does this.
        returned = z.clone() if z is x else z
    return outputs[0], returned, outputs[1] if cast is not None else None


def _drops(state: State | Dropout) -> bool:
    """Whether there is dropout, of kernels by a `State`, or else of PyTorch by a function."""
    if isinstance(state, tuple):
        return state[0] is not None
    return state is not dropout.none


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
def _normalized(
    z: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    ln_bias: Tensor | None,
    out: torch.dtype,
    cast: torch.dtype | None,
) -> tuple[Tensor, ...]:
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
def _normalized_rounded(
    z: Tensor,
    rstd: Tensor,
    weight: Tensor,
    hat: torch.dtype,
    out: torch.dtype,
    cast: torch.dtype | None,
) -> tuple[Tensor, ...]:
    """RMSNorm's rounded rows, the output, and its low-precision copy.

    The rows are an output, rounded before the weight multiplies them, because a generated kernel
    rounds a value only where it stores it, and computes with the rounded value from there on.
    """
    rounded = (z.to(rstd.dtype) * rstd).to(hat)
    y = (rounded * weight).to(out)
    return (rounded, y) if cast is None else (rounded, y, y.to(cast))
