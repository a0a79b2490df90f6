"""A diffusion transformer in the style of DiT (https://github.com/facebookresearch/DiT).

Peebles and Xie 2023, arXiv:2212.09748. Its blocks are adaLN-Zero: from a condition, each computes a
shift, a scale and a gate for attention and for the MLP. In DiT the gates start as zeros. Here they
are small numbers, as after some training: products with zeros take less power, and would be faster.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from .output import Output

__all__ = ["DiT"]

_FREQUENCIES, _MAX_PERIOD = 256, 10000.0


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Returns ``x``, ``(batch, length, width)``, scaled and shifted by ``(batch, width)``."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class Attention(nn.Module):
    """Attention as in timm."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(batch, length, width)`` to the same shape."""
        batch, length, width = x.shape
        qkv = (
            self.qkv(x)
            .reshape(batch, length, 3, self.num_heads, width // self.num_heads)
            .permute(2, 0, 3, 1, 4)
        )
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.proj(x.transpose(1, 2).reshape(batch, length, width))
        return out


class Mlp(nn.Module):
    """The MLP as in timm."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU(approximate="tanh")
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(batch, length, width)`` to the same shape."""
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class TimestepEmbedder(nn.Module):
    """Embeds a step of the diffusion."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(_FREQUENCIES, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )

    def forward(self, t: Tensor) -> Tensor:
        """Maps ``(batch,)`` to ``(batch, width)``."""
        half = _FREQUENCIES // 2
        freqs = torch.exp(
            -math.log(_MAX_PERIOD) * torch.arange(half, dtype=torch.float32, device=t.device) / half
        )
        args = t[:, None].float() * freqs[None]
        embedding = torch.cat([torch.cos(args), torch.sin(args)], dim=-1)
        out: Tensor = self.mlp(embedding.to(self.get_parameter("mlp.0.weight").dtype))
        return out


class DiTBlock(nn.Module):
    """A block with adaptive norms and gates."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(hidden_size, num_heads)
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(hidden_size, 4 * hidden_size)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Maps ``(batch, length, width)`` to the same shape, given ``(batch, width)``."""
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(
            c
        ).chunk(6, dim=1)
        x = x + gate_msa.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_msa, scale_msa))
        x = x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))
        return x  # noqa: RET504, as in DiT


class FinalLayer(nn.Module):
    """An adaptive norm and a linear layer."""

    def __init__(self, hidden_size: int, patch: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(hidden_size, patch)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Maps ``(batch, length, width)`` to ``(batch, length, patch)``."""
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        out: Tensor = self.linear(modulate(self.norm_final(x), shift, scale))
        return out


class DiT(nn.Module):
    """A model of the size of DiT-L/2 that predicts the noise in latents of 32 x 32 x 4."""

    def __init__(
        self,
        input_size: int = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        hidden_size: int = 1024,
        depth: int = 24,
        num_heads: int = 16,
        num_classes: int = 1000,
    ) -> None:
        super().__init__()
        self.patch_size, tokens = patch_size, (input_size // patch_size) ** 2
        self.x_embedder = nn.Conv2d(in_channels, hidden_size, patch_size, patch_size)
        self.t_embedder = TimestepEmbedder(hidden_size)
        self.y_embedder = nn.Embedding(num_classes, hidden_size)
        self.pos_embed = nn.Parameter(
            torch.randn(1, tokens, hidden_size) * 0.02, requires_grad=False
        )
        self.blocks = nn.ModuleList([DiTBlock(hidden_size, num_heads) for _ in range(depth)])
        self.final_layer = FinalLayer(hidden_size, patch_size**2 * in_channels)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, t: Tensor, y: Tensor, labels: Tensor | None = None) -> Output:
        """Returns the noise in latents, ``(batch, channels, height, width)``, and the loss.

        Args:
            x: the latents.
            t: ``(batch,)`` steps of the diffusion.
            y: ``(batch,)`` classes.
            labels: the true noise, in x's shape; without it there is no loss.
        """
        rows = x.size(2) // self.patch_size
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.t_embedder(t) + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        x = self.final_layer(x, c)
        x = rearrange(
            x, "b (h w) (p q c) -> b c (h p) (w q)", h=rows, p=self.patch_size, q=self.patch_size
        )
        return Output(None if labels is None else F.mse_loss(x.float(), labels.float()), x)
