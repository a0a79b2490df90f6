"""Norms of rows whose columns are sharded over ranks.

Each rank computes two numbers per row, which are summed over ranks. No rank gathers a row:

    rank 0   | columns 0 ... |   sum, squares about its own mean   -+
    rank 1   | columns ...   |   sum, squares about its own mean   -+-> all-reduced
    rank 2   | ... N - 1     |   sum, squares about its own mean   -+

The dropout-add kernel computes the pre-norm sum of the rank's columns. The ranks' sums give the
common mean. The squares about a rank's own mean are converted to squares about the common mean, by
the formula of Chan et al. 1979, "Updating formulae and a pairwise algorithm for computing sample
variances". Autograd differentiates all this, and all-reduces the gradients of all-reduced values.
For autograd, the functions below save the pre-norm sum, even if the operator's ``save`` is "output"
or "inputs".
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
    """Returns the output, pre-norm sum and low-precision copy of a norm, for this rank's columns.

    Args:
        constants: the constants of the call.
        tensors: this rank's parts, in the operator's order.
        state: the random state of the dropout.
        layout: how the rows and columns are sharded.
        compute: a function that computes a call of the norms' operator on this rank's tensors. Here
            it computes the pre-norm sum.
    """
    x, bias, residual, weight, ln_bias = tensors
    rule, z, columns = constants.rule(), x, layout.axes.columns
    if bias is not None or residual is not None or _drops(state):
        constants_of_sum = NormConstants(
            op=constants.op,
            kind="none",
            rounding=rule.rounding,
            eps=rule.eps,
            weight_offset=rule.weight_offset,
            shape=None,
            save=constants.save,
        )
        z = compute(constants_of_sum, (x, bias, residual, None, None), state)[0]
    acc, mean = accumulator(z.dtype), None
    if rule.kind == "rms":
        squares = layout.sum_over_ranks(_squares(z, acc))
    else:
        own_sum, own_squares = _moments(z, acc)
        own_columns = z.shape[-1]
        mean = layout.sum_over_ranks(own_sum) / columns
        # Squares about the common mean: own_squares + own_columns * (own mean - mean)**2. On a rank
        # without columns, ``value`` is 0, so its own mean does not matter.
        difference = own_sum / max(own_columns, 1) - mean
        squares = layout.sum_over_ranks(
            torch.addcmul(own_squares, difference, difference, value=own_columns)
        )
    rstd = torch.rsqrt(squares / columns + rule.epsilon(z.dtype))
    weight_dtype = None if weight is None else weight.dtype
    out_dtype = constants.out_dtype or rule.output_dtype(z.dtype, weight_dtype)
    hat_dtype = rule.hat_dtype(z.dtype, weight_dtype)
    cast_dtype = None if constants.cast_dtype == out_dtype else constants.cast_dtype
    # ``hat_dtype`` is the dtype of the normalised rows when the weight multiplies them. It is the
    # accumulator's dtype, except that Llama's and T5's norms round the rows to a lower one. If they
    # do, the offset is added to the weight in the weight's own dtype.
    if weight is not None and rule.weight_offset:
        if hat_dtype == acc:
            weight = weight.to(acc)
        weight = weight + rule.weight_offset
    if weight is None or hat_dtype == acc:
        outputs = _normalized(z, mean, rstd, weight, ln_bias, out_dtype, cast_dtype)
    else:
        outputs = _normalized_rounded(z, rstd, weight, hat_dtype, out_dtype, cast_dtype)[1:]
    returned_sum = None
    if constants.return_sum:
        # The result must not be the caller's own tensor, as it never is where kernels run.
        returned_sum = z.clone() if z is x else z
    return outputs[0], returned_sum, None if cast_dtype is None else outputs[1]


def _drops(state: State | Dropout) -> bool:
    """Whether elements are dropped: by kernels with a `State`, or by a function of PyTorch."""
    if isinstance(state, tuple):
        return state[0] is not None
    return state is not dropout.none


@rowwise
def _squares(z: Tensor, acc: torch.dtype) -> Tensor:
    """Returns each row's sum of squares."""
    return z.to(acc).square().sum(-1, keepdim=True)


@rowwise
def _moments(z: Tensor, acc: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns each row's sum, and its sum of squares about its mean over these columns."""
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
    out_dtype: torch.dtype,
    cast_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:
    """Returns the output, and its low-precision copy if ``cast_dtype`` is not None."""
    hat = z.to(rstd.dtype)
    if mean is not None:
        hat = hat - mean
    hat = hat * rstd
    if weight is not None:
        hat = hat * weight.to(rstd.dtype)
    if ln_bias is not None:
        hat = hat + ln_bias.to(rstd.dtype)
    y = hat.to(out_dtype)
    return (y,) if cast_dtype is None else (y, y.to(cast_dtype))


@rowwise
def _normalized_rounded(
    z: Tensor,
    rstd: Tensor,
    weight: Tensor,
    hat_dtype: torch.dtype,
    out_dtype: torch.dtype,
    cast_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:
    """Returns RMSNorm's rounded rows, the output, and its low-precision copy.

    The weight multiplies the rounded rows. A generated kernel rounds a value only if it stores the
    value, and then computes with the rounded one. So the rounded rows are an output here, which the
    caller does not use.
    """
    rounded = (z.to(rstd.dtype) * rstd).to(hat_dtype)
    y = (rounded * weight).to(out_dtype)
    return (rounded, y) if cast_dtype is None else (rounded, y, y.to(cast_dtype))
