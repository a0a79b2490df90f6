"""Models written by hand, each in the style of a well-known code base."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["WRITTEN"]

_WIDTH, _HEADS, _WORDS, _LENGTH = 32, 4, 64, 9


class LayerNorm(nn.Module):
    """A LayerNorm with an optional bias, as in nanoGPT."""

    def __init__(self, ndim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool, dropout: float) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head, self.n_embd, self.dropout = heads, width, dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (
            t.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2)
            for t in (q, k, v)
        )
        dropout = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True
        )
        y = y.transpose(1, 2).contiguous().view(batch, length, width)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, width: int, bias: bool, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        x = self.gelu(x)
        x = self.c_proj(x)
        return self.dropout(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool, dropout: float) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(width, bias)
        self.attn = CausalSelfAttention(width, heads, bias, dropout)
        self.ln_2 = LayerNorm(width, bias)
        self.mlp = MLP(width, bias, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x  # noqa: RET504


class NanoGPT(nn.Module):
    def __init__(self, bias: bool = True, dropout: float = 0.25) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(_WORDS, _WIDTH), nn.Embedding(16, _WIDTH)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList([Block(_WIDTH, _HEADS, bias, dropout) for _ in range(2)])
        self.ln_f = LayerNorm(_WIDTH, bias)
        self.lm_head = nn.Linear(_WIDTH, _WORDS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor) -> Tensor:
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device)))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class RMSNorm(nn.Module):
    """The RMSNorm of Meta's Llama."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        output = self._norm(x.float()).type_as(x)
        return output * self.weight


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.n_heads, self.head_dim = heads, dim // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            w(x).view(batch, length, self.n_heads, self.head_dim).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.head_dim) + mask
        output = torch.matmul(F.softmax(scores.float(), dim=-1).type_as(q), v)
        return self.wo(output.transpose(1, 2).contiguous().view(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(dim, heads)
        self.feed_forward = FeedForward(dim, 2 * dim)
        self.attention_norm = RMSNorm(dim)
        self.ffn_norm = RMSNorm(dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), mask)
        out = h + self.feed_forward(self.ffn_norm(h))
        return out  # noqa: RET504


class MetaLlama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(_WORDS, _WIDTH)
        self.layers = nn.ModuleList([TransformerBlock(_WIDTH, _HEADS) for _ in range(2)])
        self.norm = RMSNorm(_WIDTH)
        self.output = nn.Linear(_WIDTH, _WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        mask = torch.full(
            (tokens.shape[1],) * 2, float("-inf"), device=h.device, dtype=h.dtype
        ).triu(1)
        for layer in self.layers:
            h = layer(h, mask)
        return self.output(self.norm(h))


class MoE(nn.Module):
    """A mixture of experts: each row goes to two experts, and all rows to a shared one."""

    def __init__(self, dim: int = _WIDTH, experts: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.chosen = chosen
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList([FeedForward(dim, 2 * dim) for _ in range(experts)])
        self.shared = FeedForward(dim, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).view(-1, x.shape[-1])
        weights, chosen = self.gate(rows).softmax(-1).topk(self.chosen, dim=-1)
        y = self.shared(rows)
        for index, expert in enumerate(self.experts):
            row, rank = torch.where(chosen == index)
            y = y.index_add(0, row, expert(rows[row]) * weights[row, rank, None])
        return x + y.view_as(x)


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(0.1 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        input = x
        x = self.dwconv(x)
        x = rearrange(x, "b c h w -> b h w c")
        x = self.norm(x)
        x = self.pwconv1(x)
        x = self.act(x)
        x = self.pwconv2(x)
        x = self.gamma * x
        return input + rearrange(x, "b h w c -> b c h w")


class PostNormLayer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, dropout, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x, x, x, need_weights=False)[0]))
        return self.norm2(x + self.dropout(self.fc2(F.gelu(self.fc1(x)))))


def _words() -> Tensor:
    return torch.randint(0, _WORDS, (2, _LENGTH), generator=torch.Generator().manual_seed(5))


def _rows(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape, generator=torch.Generator().manual_seed(5))


def _encoder(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        _WIDTH, _HEADS, 64, 0.25, batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class _Decoder(nn.Module):
    """PyTorch's decoder; its memory is its own input in reverse order."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(
            _WIDTH, _HEADS, 64, 0.25, batch_first=True, norm_first=norm_first
        )
        self.decoder = nn.TransformerDecoder(layer, 2, nn.LayerNorm(_WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x, x.flip(1))


# For each name, functions that return the model and its single input.
WRITTEN: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "torch/encoder_post_norm": (lambda: _encoder(False), _rows(2, _LENGTH, _WIDTH)),
    "torch/encoder_pre_norm": (lambda: _encoder(True), _rows(2, _LENGTH, _WIDTH)),
    "torch/decoder_post_norm": (lambda: _Decoder(False), _rows(2, _LENGTH, _WIDTH)),
    "torch/decoder_pre_norm": (lambda: _Decoder(True), _rows(2, _LENGTH, _WIDTH)),
    "written/nanogpt": (NanoGPT, _words),
    "written/nanogpt_without_bias": (lambda: NanoGPT(bias=False), _words),
    "written/meta_llama": (MetaLlama, _words),
    "written/experts": (
        lambda: nn.Sequential(MoE(), MoE(), nn.LayerNorm(_WIDTH)),
        _rows(2, _LENGTH, _WIDTH),
    ),
    "written/convnext": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 4, 4), ConvNeXtBlock(16), ConvNeXtBlock(16)),
        _rows(2, 3, 32, 32),
    ),
    "written/post_norm": (
        lambda: nn.Sequential(
            PostNormLayer(_WIDTH, _HEADS, 0.25), PostNormLayer(_WIDTH, _HEADS, 0.25)
        ),
        _rows(2, _LENGTH, _WIDTH),
    ),
}
