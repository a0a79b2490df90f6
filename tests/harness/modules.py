"""Helpers of the tests of modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["N", "close", "randomise"]

N = 24


def randomise(module: nn.Module) -> nn.Module:
    """Draws random parameters: weights of one and biases of zero would hide errors."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return module


def close(actual: Tensor, expected: Tensor) -> None:
    # Both round few fp32 operations on values of order one. The errors of sums of 24 terms are
    # some ten units in the last place.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
