"""A gated linear recurrence whose scan is a cumulative sum of logarithms.

Feng et al. 2024, arXiv:2410.01201 (minGRU), in the parallel form, with a short causal convolution
before it as in Mamba (Gu and Dao 2023, arXiv:2312.00752).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...models.written import Output
from ...models.written.output import with_loss

__all__ = ["GatedRecurrence"]


def _log_of_positive(x: Tensor) -> Tensor:
    """Returns ``log(g(x))``, where g is x + 1/2 above zero, and the sigmoid below."""
    return torch.where(x >= 0, (F.relu(x) + 0.5).log(), -F.softplus(-x))


class Recurrence(nn.Module):
    """``h[t] = (1 - z[t]) h[t-1] + z[t] g(y[t])``, computed for all t at once."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.hidden_and_gate = nn.Linear(width, 2 * inner, bias=False)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(batch, length, width)`` to the same shape."""
        hidden, gate = self.hidden_and_gate(x).float().chunk(2, dim=-1)
        carried = (-F.softplus(gate)).cumsum(1)
        values = -F.softplus(-gate) + _log_of_positive(hidden)
        state = (carried + torch.logcumsumexp(values - carried, dim=1)).exp()
        out: Tensor = self.out(state.to(x.dtype))
        return out


class Block(nn.Module):
    """Convolution, recurrence and an MLP, each after an RMSNorm."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(width, eps=1e-6) for _ in range(3)])
        self.conv = nn.Conv1d(width, width, 4, padding=3, groups=width)
        self.recurrence = Recurrence(width, inner)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(batch, length, width)`` to the same shape."""
        y = self.conv(self.norms[0](x).transpose(1, 2))[..., : x.size(1)]
        x = x + F.silu(y).transpose(1, 2)
        x = x + self.recurrence(self.norms[1](x))
        y = self.down(F.gelu(self.up(self.norms[2](x))))
        out: Tensor = x + y
        return out


class GatedRecurrence(nn.Module):
    """A language model without attention."""

    def __init__(
        self, vocab_size: int = 32_000, width: int = 1024, inner: int = 1536, layers: int = 4
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList([Block(width, inner) for _ in range(layers)])
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocab_size, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Output:
        """Returns logits, ``(batch, length, vocabulary)``, and with labels the cross-entropy."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return with_loss(self.head(self.norm(x)), labels)
