"""The operators that the compiler lowers, as functions of rows, and special inputs for them.

At some of these inputs, derivatives are conventions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["BINARY", "ROWS", "UNARY", "numbers", "pairs", "rows"]

_INF, _NAN = math.inf, math.nan
# Zeros, kinks of the operators below and numbers next to them, arguments near which exponentials
# overflow, infinities.
_NUMBERS = (
    0.0,
    1.0,
    2.0,
    3.0,
    6.0,
    0.5,
    0.25,
    2.75,
    3.25,
    20.0,
    20.5,
    10.5,
    88.5,
    89.5,
    710.5,
    1e-3,
    1e-30,
    0.7,
    1e30,
    _INF,
)
# Quotients of 100.1, 0.7 and 0.1 may be rounded to integers. Half of 8388609 is not an integer.
_PAIRED = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    2.0,
    -2.5,
    0.5,
    0.1,
    0.7,
    100.1,
    8388609.0,
    1e-30,
    1e30,
    -1e30,
    _INF,
    -_INF,
    _NAN,
)


def numbers(dtype: torch.dtype) -> Tensor:
    """Returns rows of 24 elements with all numbers, of either sign, and NaN.

    The smallest number of the dtype is among them, and nearly the largest.
    """
    ends = (torch.finfo(dtype).tiny, torch.finfo(dtype).max / 8)
    signed = [sign * value for value in (*_NUMBERS, *ends) for sign in (1.0, -1.0)]
    signed += [_NAN] * (-len(signed) % 24)
    return torch.tensor(signed, dtype=torch.float64).view(-1, 24).to(dtype)


def pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns two tensors that pair each number with each."""
    values = torch.tensor(_PAIRED, dtype=torch.float64).to(dtype)
    x, y = torch.meshgrid(values, values, indexing="ij")
    return x.contiguous(), y.contiguous()


def rows(dtype: torch.dtype) -> Tensor:
    """Returns rows with ties, equal numbers, zeros, infinities, NaN, and large numbers."""
    values = torch.linspace(-2.0, 3.0, 16 * 8, dtype=torch.float64).view(16, 8).sin() * 3
    values[1], values[2], values[3] = 0.0, 0.7, 1.0
    values[4, 2] = values[4, 5] = values[4, 6] = 4.0
    values[5, 2:4] = -4.0
    values[6, 3], values[7, 3], values[8, 3] = _INF, -_INF, _NAN
    values[9, 2], values[9, 4] = _INF, -_INF
    values[10], values[11] = -_INF, 1e2
    values[12, 1:3], values[13] = _NAN, _NAN
    values[14, 2] = values[14, 3] = _INF
    values[15, ::2] = 0.0
    return values.to(dtype)


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in (
            "neg",
            "exp",
            "exp2",
            "log2",
            "log",
            "log1p",
            "expm1",
            "sqrt",
            "rsqrt",
            "reciprocal",
            "abs",
            "sign",
            "sin",
            "cos",
            "erf",
            "floor",
            "ceil",
            "square",
            "sinc",
            "sgn",
            "tanh",
            "sigmoid",
            "logit",
            "isnan",
            "isinf",
            "isfinite",
            "log10",
            "asinh",
            "acosh",
            "atanh",
            "sinh",
            "cosh",
            "tan",
            "trunc",
            "frac",
        )
    },
    **{
        name: getattr(F, name)
        for name in (
            "relu",
            "relu6",
            "silu",
            "gelu",
            "mish",
            "elu",
            "selu",
            "celu",
            "softplus",
            "softsign",
            "tanhshrink",
            "logsigmoid",
            "hardswish",
            "hardsigmoid",
            "hardtanh",
            "leaky_relu",
            "hardshrink",
            "softshrink",
        )
    },
    "root of relu": lambda x: F.relu(x).sqrt(),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu_of": lambda x: F.elu(x, 2.0),
    "celu_of": lambda x: F.celu(x, 0.5),
    "softplus_of": lambda x: F.softplus(x, 2.0, 1.0),
    "threshold": lambda x: F.threshold(x, 0.5, -1.0),
    "clamp": lambda x: x.clamp(-1.0, 2.0),
    "clamp_min": lambda x: x.clamp(min=0.0),
    "clamp_max": lambda x: x.clamp(max=1.0),
    **{
        f"pow {n}": lambda x, n=n: x**n
        for n in (-0.5, -1, -2, -3, 0, 0.5, 1, 1.5, 2, 3, 4, 3.7, -1.3, 0.3)
    },
    "where": lambda x: torch.where(x > 0.5, x.log(), x),
    "masked_fill": lambda x: x.masked_fill(x < 0, 2.0),
    "nan_to_num": torch.nan_to_num,
    "comparison": lambda x: x * ((x > 0.7) | (x == 0.25)),
}


def _column_indices(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1], device=x.device)


BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in (
            "add",
            "sub",
            "mul",
            "div",
            "maximum",
            "minimum",
            "fmax",
            "fmin",
            "xlogy",
            "logaddexp",
            "hypot",
        )
    },
    **{
        name: lambda x, y, name=name: getattr(F, name)(x, y, reduction="none")
        for name in (
            "mse_loss",
            "l1_loss",
            "huber_loss",
            "smooth_l1_loss",
            "binary_cross_entropy_with_logits",
        )
    },
    "soft_margin_loss": lambda x, y: F.soft_margin_loss(x, y.detach(), reduction="none"),
    "huber_of": lambda x, y: F.huber_loss(x, y, reduction="none", delta=0.5),
    "smooth_l1_of": lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.5),
    "smooth_l1_of_zero": lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.0),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(
        torch.where(x.isnan(), 0.5, x).clamp(0.0, 1.0),
        torch.where(y.isnan(), 0.5, y).clamp(0.0, 1.0),
        reduction="none",
    ),
    "kl_div": lambda x, y: F.kl_div(x, y, reduction="none"),
    "kl_div_log": lambda x, y: F.kl_div(x, y, reduction="none", log_target=True),
    "clamp_by": lambda x, y: torch.clamp(x, min=y),
    "clamp_between": lambda x, y: torch.clamp(x, min=-1.0, max=1.0) * torch.clamp(x, y, y + 1.0),
    "where_greater": lambda x, y: torch.where(x > y, x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.5),
    "relu_beside": lambda x, y: F.relu(x) * y,
    "silu_beside": lambda x, y: F.silu(x) * y,
    **{name: getattr(torch, name) for name in ("remainder", "fmod")},
    "floor_divide": lambda x, y: x + (x.detach() // y.detach()),
    "quotient rounded down": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "quotient": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "quotient of integers": lambda x, y: (
        x * (_column_indices(x) // 3) - (_column_indices(x) - 6) % 4
    ),
    "power": lambda x, y: x**y,
    "power_of_two": lambda x, y: 2.0**x * y,
    "power_of_three": lambda x, y: 3.0**x * y,
    "sum_alpha": lambda x, y: torch.sub(x, y, alpha=2.0),
}


ROWS: dict[str, Callable[[Tensor], Any]] = {
    **{
        name: lambda x, name=name: getattr(torch, name)(x, -1, keepdim=True)
        for name in ("sum", "mean", "var", "std", "amax", "amin", "logsumexp")
    },
    **{
        name: lambda x, name=name: getattr(torch, name)(x, -1)
        for name in ("softmax", "log_softmax")
    },
    "softmin": lambda x: F.softmin(x, -1),
    "min_max": lambda x: torch.sub(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)),
    "min": lambda x: x.min(-1, keepdim=True).values,
    "argmax": lambda x: x.argmax(-1, keepdim=True),
    "argmin": lambda x: x.argmin(-1, keepdim=True),
    "max_indices": lambda x: x.max(-1, keepdim=True).indices,
    "any": lambda x: torch.where((x > 1.0).any(-1, keepdim=True), x, 0.0),
    "all": lambda x: torch.where(x.isfinite().all(-1, keepdim=True), x, 0.0),
    "max": lambda x: x.max(-1, keepdim=True).values,
    "norm": lambda x: x.norm(dim=-1, keepdim=True),
    "norm_1": lambda x: x.norm(p=1, dim=-1, keepdim=True),
    "norm_inf": lambda x: x.norm(p=_INF, dim=-1, keepdim=True),
    **{f"norm_{p}": lambda x, p=p: x.norm(p=p, dim=-1, keepdim=True) for p in (3, 0.5, -_INF)},
    "in_place": lambda x: (
        (x * 1.0).nan_to_num_(1.0).clamp_(-2.0, 2.0).lerp_(torch.ones_like(x), 0.3).softmax(-1)
    ),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6),
    "std_mean": lambda x: torch.sub(*torch.std_mean(x, -1, keepdim=True)),
    "cosine": lambda x: F.cosine_similarity(x, torch.ones_like(x), -1).unsqueeze(-1),
    "distance": lambda x: F.pairwise_distance(x, torch.ones_like(x)).unsqueeze(-1),
}
