"""The table of activations: each one's function in PyTorch, and its pair of device functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["ACTIVATIONS", "Activation", "ActivationName", "device_functions"]

# The names in `ACTIVATIONS`, for type checkers.
ActivationName = Literal[
    "gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "relu_squared", "tanh", "sigmoid", "identity"
]


@dataclass(frozen=True)
class Activation:
    """An activation function. `device_functions` returns its Triton functions.

    Attributes:
        name: its public name. The device functions in `core.device` are ``<name>`` and
            ``<name>_derivative``.
        formula: the function by PyTorch's operators, differentiable to any order, in reverse and
            forward mode.
        has_narrow: whether there is a shorter device function for results in 16 bits,
            ``<name>_in_16_bits``.
    """

    name: str
    formula: Callable[[Tensor], Tensor]
    has_narrow: bool = False


_ALL = (
    # Hendrycks and Gimpel 2016, arXiv:1606.08415: three forms, exact, by tanh, by a sigmoid.
    Activation("gelu", F.gelu),
    Activation("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
    Activation("quick_gelu", lambda x: x * torch.sigmoid(1.702 * x)),
    Activation("silu", lambda x: x * torch.sigmoid(x)),
    Activation("relu", F.relu),
    # So et al. 2021, arXiv:2109.08668.
    Activation("relu_squared", lambda x: F.relu(x).square()),
    Activation("tanh", torch.tanh, has_narrow=True),
    Activation("sigmoid", torch.sigmoid),
    Activation("identity", lambda x: x),
)

ACTIVATIONS = {activation.name: activation for activation in _ALL}


def device_functions(name: str, *, narrow: bool = False) -> tuple[Any, Any]:
    """Returns the Triton functions of an activation and its derivative, for kernels' constants.

    With ``narrow`` the first may be a shorter function, for results that are rounded to 16 bits.
    """
    # Imported here, so that importing the package does not import Triton.
    from . import device

    is_shorter = narrow and ACTIVATIONS[name].has_narrow
    function = getattr(device, f"{name}_in_16_bits" if is_shorter else name)
    return function, getattr(device, f"{name}_derivative")
