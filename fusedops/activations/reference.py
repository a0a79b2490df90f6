"""The activation family in plain torch: the formulas, their backward, and their derivative along a direction.

Runs on any device. The formula is the CPU path and, fed fp64 tensors, the tests' oracle; the backward and the
tangent, written in differentiable torch operators, serve higher-order derivatives and forward mode. All is computed in
fp32, in fp64 for fp64 inputs, and rounded once. ``value`` and ``derivative`` are an activation's two functions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "accumulator",
    "bias_act",
    "bias_act_backward",
    "bias_act_tangent",
    "glu",
    "glu_backward",
    "glu_tangent",
    "keep_scale",
    "promoted",
]

Elementwise = Callable[[Tensor], Tensor]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which results of ``dtype`` are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def promoted(first: Tensor, second: Tensor | None) -> torch.dtype:
    """PyTorch's promotion of both."""
    return first.dtype if second is None else torch.promote_types(first.dtype, second.dtype)


def keep_scale(keep: Tensor, keep_probability: float, dtype: torch.dtype) -> Tensor:
    """What dropout multiplies by: one over the keep probability where kept, zero elsewhere."""
    return keep.to(dtype) * (1.0 / keep_probability if keep_probability > 0.0 else 0.0)


def _sum(x: Tensor, bias: Tensor | None) -> Tensor:
    z = x.to(accumulator(promoted(x, bias)))
    return z if bias is None else z + bias


def bias_act(x: Tensor, bias: Tensor | None, value: Elementwise, scale: Tensor | None = None) -> Tensor:
    """``value(x + bias) * scale``; ``scale`` is a keep mask over its probability, or None."""
    y = value(_sum(x, bias))
    if scale is not None:
        y = y * scale
    return y.to(promoted(x, bias))


def bias_act_backward(dy: Tensor, x: Tensor, bias: Tensor | None, derivative: Elementwise,
                      scale: Tensor | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(dx, dbias)`` in the accumulator's dtype."""
    z = _sum(x, bias)
    dx = dy.to(z.dtype) * derivative(z)
    if scale is not None:
        dx = dx * scale
    return dx, dx.sum(tuple(range(dx.dim() - 1))) if dx.dim() > 1 else dx


def bias_act_tangent(dx: Tensor | None, dbias: Tensor | None, x: Tensor, bias: Tensor | None, derivative: Elementwise,
                     scale: Tensor | None) -> Tensor:  # fmt: skip
    """The output's derivative along ``(dx, dbias)``, in the accumulator's dtype."""
    z = _sum(x, bias)
    dz = torch.zeros_like(z) if dx is None else dx.to(z.dtype)
    if dbias is not None:
        dz = dz + dbias
    dy = dz * derivative(z)
    return dy if scale is None else dy * scale


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both in the accumulator's dtype; without ``up`` they are the halves of ``gate``."""
    first, second = gate.chunk(2, -1) if up is None else (gate, up)
    acc = accumulator(promoted(gate, up))
    return first.to(acc), second.to(acc)


def glu(gate: Tensor, up: Tensor | None, value: Elementwise) -> Tensor:
    """``value(gate) * up``."""
    g, u = _halves(gate, up)
    return (value(g) * u).to(promoted(gate, up))


def glu_backward(dy: Tensor, gate: Tensor, up: Tensor | None, value: Elementwise,
                 derivative: Elementwise) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(dgate, dup)`` in the accumulator's dtype, of the halves where ``up`` is None."""
    g, u = _halves(gate, up)
    dy = dy.to(g.dtype)
    return dy * u * derivative(g), dy * value(g)


def glu_tangent(dgate: Tensor | None, dup: Tensor | None, gate: Tensor, up: Tensor | None, value: Elementwise,
                derivative: Elementwise) -> Tensor:  # fmt: skip
    """The output's derivative along ``(dgate, dup)``, in the accumulator's dtype."""
    g, u = _halves(gate, up)
    if up is None and dgate is not None:
        dgate, dup = dgate.chunk(2, -1)
    dy = torch.zeros_like(g)
    if dgate is not None:
        dy = dy + dgate.to(g.dtype) * u * derivative(g)
    if dup is not None:
        dy = dy + dup.to(g.dtype) * value(g)
    return dy
