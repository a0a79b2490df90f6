"""A decoder with features of recent models, in the style of research code.

Queries and keys are normalised (Henry et al. 2020, arXiv:2010.04245), a gate follows attention (Qiu
et al. 2025, arXiv:2505.06708), norms follow attention and the MLP as in OLMo 2 (2024,
arXiv:2501.00656), and the MLP squares its ReLU (So et al. 2021, arXiv:2109.08668).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .output import Output, with_loss

__all__ = ["GatedDecoder"]


class RMSNorm(nn.Module):
    """An RMSNorm that normalises and scales in fp32."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises ``(..., N)``; returns x's dtype."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).type_as(x)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns ``x``, ``(batch, length, heads, size)``, with each pair of neighbours rotated.

    Cosines and sines are ``(length, 1, size / 2)``.
    """
    even, odd = x[..., ::2], x[..., 1::2]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).type_as(x)


class Attention(nn.Module):
    """Attention with query, key, value and gate from one linear layer."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.qkvg = nn.Linear(dim, 4 * dim, bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.head_dim), RMSNorm(self.head_dim)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps ``(batch, length, width)`` to the same shape."""
        q, k, v, gate = self.qkvg(x).chunk(4, dim=-1)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        q = apply_rotary(self.q_norm(q), cos, sin)
        k = apply_rotary(self.k_norm(k), cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).flatten(2)
        out: Tensor = self.proj(y * torch.sigmoid(gate))
        return out


class MLP(nn.Module):
    """Two layers with a squared ReLU between them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc = nn.Linear(dim, 4 * dim, bias=False)
        self.proj = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(batch, length, width)`` to the same shape."""
        out: Tensor = self.proj(F.relu(self.fc(x)).square())
        return out


class Block(nn.Module):
    """A block with norms after attention and the MLP, before the sums."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(dim, n_heads), MLP(dim)
        self.attn_norm, self.mlp_norm = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps ``(batch, length, width)`` to the same shape."""
        x = x + self.attn_norm(self.attn(x, cos, sin))
        x = x + self.mlp_norm(self.mlp(x))
        return x  # noqa: RET504, as in such code


class GatedDecoder(nn.Module):
    """A decoder; by default twelve layers of width 1024, with heads of 64."""

    def __init__(
        self,
        vocab_size: int = 32000,
        dim: int = 1024,
        n_layers: int = 12,
        n_heads: int = 16,
        max_seq_len: int = 2048,
        rope_theta: float = 10000.0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList([Block(dim, n_heads) for _ in range(n_layers)])
        self.norm = RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)
        self.lm_head.weight = self.embed.weight
        size = dim // n_heads
        frequencies = rope_theta ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(max_seq_len), frequencies).unsqueeze(1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Output:
        """Returns logits of the next tokens, ``(batch, length, vocabulary)``, and the loss."""
        x = self.embed(tokens)
        cos = self.get_buffer("cos")[: tokens.size(1)]
        sin = self.get_buffer("sin")[: tokens.size(1)]
        for block in self.blocks:
            x = block(x, cos, sin)
        return with_loss(self.lm_head(self.norm(x)), labels)
