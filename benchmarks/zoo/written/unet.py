"""A U-Net of diffusion models: GroupNorm and SiLU around convolutions, and attention.

Ho et al. 2020, arXiv:2006.11239, at the widths of Stable Diffusion's first levels (Rombach et al.
2022, arXiv:2112.10752), with one block in each level.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...models.written import Output
from ...models.written.dit import TimestepEmbedder

__all__ = ["UNet"]


class ResBlock(nn.Module):
    """Two convolutions; the condition shifts and scales the second norm's output."""

    def __init__(self, wide: int, narrow: int, condition: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, wide), nn.GroupNorm(groups, narrow)
        self.conv1 = nn.Conv2d(wide, narrow, 3, padding=1)
        self.conv2 = nn.Conv2d(narrow, narrow, 3, padding=1)
        self.condition = nn.Linear(condition, 2 * narrow)
        self.skip: nn.Module = nn.Identity() if wide == narrow else nn.Conv2d(wide, narrow, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Maps ``(batch, wide, height, width)`` to ``(batch, narrow, height, width)``."""
        y = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.condition(F.silu(condition))[:, :, None, None].chunk(2, dim=1)
        y = self.norm2(y) * (1 + scale) + shift
        out: Tensor = self.conv2(F.silu(y)) + self.skip(x)
        return out


class Attention(nn.Module):
    """Attention over positions, after a GroupNorm."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(groups, width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(batch, channels, height, width)`` to the same shape."""
        batch, channels, height, width = x.shape
        y = self.norm(x).flatten(2).transpose(1, 2)
        qkv = self.qkv(y).view(batch, height * width, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = self.proj(y).transpose(1, 2)
        out: Tensor = x + y.reshape(batch, channels, height, width)
        return out


class UNet(nn.Module):
    """A model that predicts the noise in latents, with attention in all levels but the first."""

    def __init__(
        self,
        channels: int = 4,
        widths: tuple[int, ...] = (320, 640, 1280),
        heads: int = 8,
        groups: int = 32,
        classes: int = 256,
    ) -> None:
        super().__init__()
        condition = 4 * widths[0]
        self.t_embedder = TimestepEmbedder(condition)
        self.y_embedder = nn.Embedding(classes, condition)
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        self.down_attention, self.up_attention = nn.ModuleList(), nn.ModuleList()
        self.narrower, self.wider = nn.ModuleList(), nn.ModuleList()
        before = widths[0]
        for level, width in enumerate(widths):
            self.down.append(ResBlock(before, width, condition, groups))
            self.down_attention.append(_attention(level, width, heads, groups))
            self.narrower.append(nn.Conv2d(width, width, 3, 2, 1))
            before = width
        self.middle = ResBlock(before, before, condition, groups)
        for level, width in reversed(list(enumerate(widths))):
            self.wider.append(nn.Conv2d(before, width, 3, padding=1))
            self.up.append(ResBlock(2 * width, width, condition, groups))
            self.up_attention.append(_attention(level, width, heads, groups))
            before = width
        self.norm = nn.GroupNorm(groups, before)
        self.head = nn.Conv2d(before, channels, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor, y: Tensor, labels: Tensor | None = None) -> Output:
        """Returns the noise in latents, and with labels the mean squared error.

        Args:
            x: the latents, ``(batch, channels, height, width)``.
            t: ``(batch,)`` steps of the diffusion.
            y: ``(batch,)`` classes.
            labels: the true noise, in x's shape.
        """
        condition = self.t_embedder(t) + self.y_embedder(y)
        x = self.stem(x)
        skips = []
        for block, attention, narrower in zip(
            self.down, self.down_attention, self.narrower, strict=True
        ):
            x = attention(block(x, condition))
            skips.append(x)
            x = narrower(x)
        x = self.middle(x, condition)
        for block, attention, wider in zip(self.up, self.up_attention, self.wider, strict=True):
            x = wider(F.interpolate(x, scale_factor=2.0, mode="nearest"))
            x = attention(block(torch.cat([x, skips.pop()], dim=1), condition))
        x = self.head(F.silu(self.norm(x)))
        return Output(None if labels is None else F.mse_loss(x.float(), labels.float()), x)


def _attention(level: int, width: int, heads: int, groups: int) -> nn.Module:
    return Attention(width, heads, groups) if level else nn.Identity()
