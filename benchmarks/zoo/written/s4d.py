"""A diagonal state space model (Gu et al. 2022, arXiv:2206.11893), as a long convolution by FFT.

The kernel of the convolution is a sum of complex exponentials, in fp32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...models.written import Output
from ...models.written.output import with_loss

__all__ = ["S4D"]


class StateSpace(nn.Module):
    """One state space for each channel, with ``states`` complex states."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        steps = torch.linspace(math.log(0.001), math.log(0.1), width)
        self.log_step = nn.Parameter(steps)
        self.output_real = nn.Parameter(torch.randn(width, states))
        self.output_imag = nn.Parameter(torch.randn(width, states))
        self.log_decay = nn.Parameter(torch.full((width, states), math.log(0.5)))
        frequencies = math.pi * torch.arange(states, dtype=torch.float32)
        self.frequency = nn.Parameter(frequencies.repeat(width, 1))
        self.skip = nn.Parameter(torch.randn(width))

    def kernel(self, length: int) -> Tensor:
        """Returns the kernels, ``(width, length)``, in fp32."""
        step = self.log_step.float().exp().unsqueeze(1)
        pole = torch.complex(-self.log_decay.float().exp(), self.frequency.float())
        scaled = pole * step
        times = torch.arange(length, device=scaled.device)
        output = torch.complex(self.output_real.float(), self.output_imag.float())
        weights = output * (scaled.exp() - 1.0) / pole
        powers = torch.exp(scaled.unsqueeze(-1) * times)
        kernels: Tensor = 2 * torch.einsum("hn,hnl->hl", weights, powers).real
        return kernels

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(batch, width, length)`` to the same shape."""
        length = x.size(-1)
        with torch.autocast(x.device.type, enabled=False):
            spectrum = torch.fft.rfft(self.kernel(length), n=2 * length)
            product = torch.fft.rfft(x.float(), n=2 * length) * spectrum
            y = torch.fft.irfft(product, n=2 * length)[..., :length]
        out: Tensor = (y + x * self.skip.unsqueeze(-1)).to(x.dtype)
        return out


class Block(nn.Module):
    """A state space between two layers of a gated unit, with a pre-norm."""

    def __init__(self, width: int, states: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.space = nn.LayerNorm(width), StateSpace(width, states)
        self.mix = nn.Linear(width, 2 * width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(batch, length, width)`` to the same shape."""
        y = self.space(self.norm(x).transpose(1, 2)).transpose(1, 2)
        y = F.glu(self.mix(self.dropout(F.gelu(y))), dim=-1)
        out: Tensor = x + self.dropout(y)
        return out


class S4D(nn.Module):
    """A language model of state spaces."""

    def __init__(
        self,
        vocab_size: int = 8192,
        width: int = 512,
        states: int = 32,
        layers: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList([Block(width, states, dropout) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Output:
        """Returns logits, ``(batch, length, vocabulary)``, and with labels the cross-entropy."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return with_loss(self.head(self.norm(x)), labels)
