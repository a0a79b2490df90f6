"""Llama in the style of Meta's own code (https://github.com/meta-llama/llama-models).

As in Meta's code for training, attention is PyTorch's, and pairs of neighbours are rotated with
real numbers: torch.compile does not fuse operators of complex numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .output import Output, with_loss

__all__ = ["MetaLlama"]


class RMSNorm(nn.Module):
    """An RMSNorm that normalises in fp32 and scales in the input's dtype."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises ``(..., N)``."""
        output = self._norm(x.float()).type_as(x)
        return output * self.weight


def apply_rotary_emb(x: Tensor, freqs: Tensor) -> Tensor:
    """Returns ``x``, ``(batch, length, heads, size)``, with each pair of neighbours rotated.

    ``freqs`` has cosines and sines, ``(length, size / 2, 2)``.
    """
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    freqs = freqs.view(1, pairs.size(1), 1, pairs.size(3), 2)
    real = pairs[..., 0] * freqs[..., 0] - pairs[..., 1] * freqs[..., 1]
    imaginary = pairs[..., 1] * freqs[..., 0] + pairs[..., 0] * freqs[..., 1]
    return torch.stack([real, imaginary], -1).flatten(3).type_as(x)


class Attention(nn.Module):
    """Grouped-query attention with rotary embeddings."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        """Maps ``(batch, length, width)`` to the same shape."""
        batch, length, _ = x.shape
        xq = self.wq(x).view(batch, length, self.n_heads, self.head_dim)
        xk = self.wk(x).view(batch, length, self.n_kv_heads, self.head_dim)
        xv = self.wv(x).view(batch, length, self.n_kv_heads, self.head_dim)
        xq, xk = apply_rotary_emb(xq, freqs), apply_rotary_emb(xk, freqs)
        xq, xk, xv = (t.transpose(1, 2) for t in (xq, xk, xv))
        output = F.scaled_dot_product_attention(
            xq, xk, xv, is_causal=True, enable_gqa=self.n_kv_heads < self.n_heads
        )
        out: Tensor = self.wo(output.transpose(1, 2).contiguous().view(batch, length, -1))
        return out


class FeedForward(nn.Module):
    """A gated unit."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(batch, length, width)`` to the same shape."""
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class TransformerBlock(nn.Module):
    """A pre-norm block."""

    def __init__(
        self, dim: int, n_heads: int, n_kv_heads: int, hidden_dim: int, norm_eps: float
    ) -> None:
        super().__init__()
        self.attention = Attention(dim, n_heads, n_kv_heads)
        self.feed_forward = FeedForward(dim, hidden_dim)
        self.attention_norm = RMSNorm(dim, norm_eps)
        self.ffn_norm = RMSNorm(dim, norm_eps)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        """Maps ``(batch, length, width)`` to the same shape."""
        h = x + self.attention(self.attention_norm(x), freqs)
        out: Tensor = h + self.feed_forward(self.ffn_norm(h))
        return out


class MetaLlama(nn.Module):
    """A model of the size of Llama 3.2 1B, with the vocabulary of the first Llamas."""

    def __init__(
        self,
        vocab_size: int = 32000,
        dim: int = 2048,
        n_layers: int = 16,
        n_heads: int = 32,
        n_kv_heads: int = 8,
        hidden_dim: int = 8192,
        max_seq_len: int = 4096,
        *,
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(
            [
                TransformerBlock(dim, n_heads, n_kv_heads, hidden_dim, norm_eps)
                for _ in range(n_layers)
            ]
        )
        self.norm = RMSNorm(dim, norm_eps)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        self.output.weight = self.tok_embeddings.weight
        size = dim // n_heads
        angles = torch.outer(
            torch.arange(max_seq_len), rope_theta ** -(torch.arange(0, size, 2) / size)
        )
        self.register_buffer(
            "freqs", torch.stack([angles.cos(), angles.sin()], -1), persistent=False
        )
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Output:
        """Returns logits of the next tokens, ``(batch, length, vocabulary)``, and the loss."""
        h = self.tok_embeddings(tokens)
        freqs = self.get_buffer("freqs")[: tokens.size(1)]
        for layer in self.layers:
            h = layer(h, freqs)
        return with_loss(self.output(self.norm(h)).float(), labels)
