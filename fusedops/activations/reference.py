"""The activation family's reference implementation in PyTorch's operators.

It is differentiable to any order. It runs on devices without kernels, under torch.func transforms
and in forward mode. With fp64 tensors it is the tests' oracle. It computes in fp32 (fp64 for fp64
inputs) and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Dropout", "accumulator", "bias_act", "glu", "promoted"]

Elementwise = Callable[[Tensor], Tensor]
# A function that multiplies by the keep mask and divides by the keep probability. Its second
# argument is the dtype that the input of `F.dropout` would have.
Dropout = Callable[[Tensor, torch.dtype], Tensor]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which results of ``dtype`` are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def promoted(first: Tensor, second: Tensor | None) -> torch.dtype:
    """Returns the dtype to which PyTorch promotes both."""
    return first.dtype if second is None else torch.promote_types(first.dtype, second.dtype)


def _sum(x: Tensor, bias: Tensor | None) -> Tensor:
    """Returns ``x + bias`` in the accumulator's dtype."""
    z = x.to(accumulator(promoted(x, bias)))
    return z if bias is None else z + bias


def bias_act(
    x: Tensor, bias: Tensor | None, value: Elementwise, dropout: Dropout = lambda h, dtype: h
) -> Tensor:
    """Returns ``dropout(value(x + bias))``."""
    dtype = promoted(x, bias)
    return dropout(value(_sum(x, bias)), dtype).to(dtype)


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns gate and up in the accumulator's dtype; without ``up``, the halves of ``gate``."""
    acc = accumulator(promoted(gate, up))
    first, second = gate.chunk(2, -1) if up is None else (gate, up)
    return first.to(acc), second.to(acc)


def glu(gate: Tensor, up: Tensor | None, value: Elementwise) -> Tensor:
    """Returns ``value(gate) * up``."""
    g, u = _halves(gate, up)
    return (value(g) * u).to(promoted(gate, up))
