"""Norms whose results are quantised: row-wise functions, and calls of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..compiler.function import rowwise
from ..compiler.quantising import Format, called_by_row, form_of, quantised
from .operator import NORM
from .reference import accumulator
from .site import NormConstants

__all__ = ["check_quantised", "quantised_norm"]


def check_quantised(constants: NormConstants, tensors: Sequence[Any]) -> None:
    """Raises if a call is invalid, or has an option that its format replaces."""
    op = constants.op
    NORM.check(constants, tensors, nested=False)
    if constants.rounding != "once":
        raise ValueError(f"{op}: rounding must be 'once' with quantize, got {constants.rounding!r}")
    if constants.out_dtype is not None:
        raise ValueError(f"{op}: out_dtype has no effect with quantize, whose format has the dtype")
    if constants.shape is not None and len(constants.shape) != 1:
        raise ValueError(f"{op}: normalized_shape must be one dimension with quantize")


def quantised_norm(
    constants: NormConstants,
    tensors: Sequence[Any],
    quantize: Format[Any, Any],
    out: Tensor | None = None,
) -> tuple[Any, ...]:
    """Returns the values, their scales, and the pre-norm sum if the call has a residual.

    Args:
        constants: those of the call without ``quantize``.
        tensors: x, None, the residual, the weight and the norm's bias; all but x may be None.
        quantize: the format.
        out: the tensor that the sum is written to, in a call without gradients; None for a new one.
    """
    check_quantised(constants, tensors)
    x, _, residual, weight, bias = tensors
    form, scale = form_of(constants.op, quantize, x.shape[-1])
    if constants.kind == "rms":
        arguments = weight, scale, constants.eps, constants.weight_offset
        values, *others = called_by_row(_rms_norm, (x, residual), arguments, form, out)
    else:
        assert constants.eps is not None  # checked: a LayerNorm has one
        values, *others = called_by_row(
            _layer_norm, (x, residual), (weight, bias, scale, constants.eps), form, out
        )
    if scale is not None:
        others.insert(0, scale)
    return (values, *others)


@rowwise
def _rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    scale: Tensor | None,
    eps: float | None,
    weight_offset: float,
    dtype: torch.dtype,
    size: int,
) -> tuple[Tensor, ...]:
    """Returns the values, their scales unless ``scale`` is theirs, and the sum with a residual."""
    z = x if residual is None else residual + x
    row = z.to(accumulator(z.dtype))
    square = row.square().mean(-1, keepdim=True)
    rstd = torch.rsqrt(square + (torch.finfo(row.dtype).eps if eps is None else eps))
    if weight is not None:
        row = row * (weight.to(row.dtype) + weight_offset)
    results = quantised(row, rstd, scale, dtype, size)
    return results if residual is None else (*results, z)


@rowwise
def _layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    size: int,
) -> tuple[Tensor, ...]:
    """Returns the same of a LayerNorm."""
    z = x if residual is None else residual + x
    acc = accumulator(z.dtype)
    weight = None if weight is None else weight.to(acc)
    bias = None if bias is None else bias.to(acc)
    y = F.layer_norm(z.to(acc), z.shape[-1:], weight, bias, eps)
    results = quantised(y, 1.0, scale, dtype, size)
    return results if residual is None else (*results, z)
