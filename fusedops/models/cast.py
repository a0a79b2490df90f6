"""A linear layer whose weight is already in autocast's dtype, as tricks pass it to a block."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

__all__ = ["Cast"]


class Cast:
    """A linear layer with a weight in autocast's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        return F.linear(x, self.weight, self.bias)
