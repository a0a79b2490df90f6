"""Gated units whose results are quantised: a row-wise function, and calls of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..compiler.function import rowwise
from ..compiler.quantising import Format, called_by_row, form_of, quantised
from .operator import ACTIVATION
from .reference import accumulator
from .site import ActivationConstants

__all__ = ["quantised_unit"]


def quantised_unit(
    constants: ActivationConstants, gate: Tensor, up: Tensor | None, quantize: Format[Any, Any]
) -> tuple[Tensor, Tensor]:
    """Returns the values of a gated unit, and their scales.

    Args:
        constants: those of the call without ``quantize``.
        gate: the gate, or the packed tensor.
        up: the other factor; None for a packed tensor.
        quantize: the format.
    """
    tensors = gate, up
    ACTIVATION.check(constants, tensors, nested=False)
    form, scale = form_of(constants.op, quantize, ACTIVATION.cols(constants, tensors))
    values, *scales = called_by_row(_unit, tensors, (scale, constants.activation), form)
    return values, (scales[0] if scale is None else scale)


@rowwise
def _unit(
    gate: Tensor,
    up: Tensor | None,
    scale: Tensor | None,
    activation: str,
    dtype: torch.dtype,
    size: int,
) -> tuple[Tensor, ...]:
    """Returns the values, and their scales unless they are static."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    acc = accumulator(torch.promote_types(gate.dtype, up.dtype))
    gate, up = gate.to(acc), up.to(acc)
    if activation == "silu":
        gate = F.silu(gate)
    else:
        gate = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return quantised(gate * up, 1.0, scale, dtype, size)
