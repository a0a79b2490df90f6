"""The functions of one slice, written as users write them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "bias_gelu",
    "dropout_add_layer_norm",
    "gate",
    "layer_norm_tanh",
    "rms_norm_silu",
    "softmax",
]

_P = 0.1
_EPS = 1e-6
_SCALE = 1.25


def layer_norm_tanh(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Computes the norm and the activation of a slice of embeddings."""
    return torch.tanh(F.layer_norm(x, x.shape[-1:], weight, bias))


def rms_norm_silu(x: Tensor, weight: Tensor) -> Tensor:
    """Computes an RMSNorm and its SiLU."""
    return F.silu(F.rms_norm(x, x.shape[-1:], weight, _EPS))


def dropout_add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Computes the end of a post-norm block, without a bias before the dropout."""
    return F.layer_norm(F.dropout(x, _P) + residual, x.shape[-1:], weight, bias)


def softmax(x: Tensor) -> Tensor:
    """Computes a softmax."""
    return torch.softmax(x, -1)


def gate(x: Tensor, u: Tensor, scale: Tensor) -> Tensor:
    """Computes a gated unit whose columns have scales."""
    return torch.sigmoid(x) * u * scale


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Computes a scaled tanh-GELU after a bias."""
    return F.gelu(x + bias, approximate="tanh") * _SCALE
