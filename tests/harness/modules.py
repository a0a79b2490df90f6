"""What the tests of modules share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["N", "close", "randomise"]

N = 24


def randomise(module: nn.Module) -> nn.Module:
    """Weights of one and biases of zero hide what a module leaves out."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return module


def close(actual: Tensor, expected: Tensor) -> None:
    # Both round the same few fp32 operations on values of order one; 24-term sums stay within some
    # ten ulps.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
