"""The table of activations: each by its formula and derivative in torch, and by a pair of device functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["ACTIVATIONS", "Activation", "device_functions"]


@dataclass(frozen=True)
class Activation:
    """An elementwise function; `device_functions` finds its kernels' side by the name.

    Attributes:
        name: what users call it, and the device functions in `core.device`: ``name`` and ``name_derivative``.
        formula: the function in torch.
        derivative: its derivative, in differentiable operators.
    """

    name: str
    formula: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]


def _gelu_derivative(x: Tensor) -> Tensor:
    return 0.5 + 0.5 * torch.erf(x * math.sqrt(0.5)) + x * torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def _gelu_tanh_derivative(x: Tensor) -> Tensor:
    # 0.5 (1 + tanh(u)) = sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3)
    slope = 2.0 * math.sqrt(2.0 / math.pi)
    s = torch.sigmoid(slope * (x + 0.044715 * x * x * x))
    return s + x * s * (1.0 - s) * slope * (1.0 + 3.0 * 0.044715 * x * x)


def _scaled_sigmoid_derivative(x: Tensor, scale: float) -> Tensor:
    """Of ``x sigmoid(scale x)``."""
    s = torch.sigmoid(scale * x)
    return s + scale * x * s * (1.0 - s)


def _sigmoid_derivative(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1.0 - s)


_ALL = (
    # Hendrycks and Gimpel 2016, arXiv:1606.08415: exact, by tanh, and by a logistic sigmoid.
    Activation("gelu", F.gelu, _gelu_derivative),
    Activation("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), _gelu_tanh_derivative),
    Activation("quick_gelu", lambda x: x * torch.sigmoid(1.702 * x), lambda x: _scaled_sigmoid_derivative(x, 1.702)),
    Activation("silu", F.silu, lambda x: _scaled_sigmoid_derivative(x, 1.0)),
    Activation("relu", F.relu, lambda x: 1.0 - (x <= 0).to(x.dtype)),
    # So et al. 2021, arXiv:2109.08668.
    Activation("relu_squared", lambda x: F.relu(x).square(), lambda x: 2.0 * F.relu(x)),
    Activation("tanh", torch.tanh, lambda x: 1.0 - torch.tanh(x).square()),
    Activation("sigmoid", torch.sigmoid, _sigmoid_derivative),
    Activation("identity", lambda x: x, torch.ones_like),
)

ACTIVATIONS = {activation.name: activation for activation in _ALL}


def device_functions(name: str) -> tuple[Any, Any]:
    """The activation's value and derivative as Triton functions, to be handed to kernels as constants."""
    from . import device

    return getattr(device, name), getattr(device, f"{name}_derivative")
