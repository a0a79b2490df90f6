"""A detector in the style of DETR: PyTorch's encoder and decoder on patches, with object queries.

Carion et al. 2020, arXiv:2005.12872. Patches replace the convolutional backbone, and each query has
a fixed target, so there is no matching on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...models.written import Output

__all__ = ["DETR"]


class DETR(nn.Module):
    """A detector with post-norm layers of torch.nn, whose attention has dropout."""

    def __init__(
        self,
        image_size: int = 512,
        patch: int = 16,
        width: int = 256,
        heads: int = 8,
        layers: int = 3,
        feed_forward: int = 2048,
        queries: int = 100,
        classes: int = 256,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.randn(1, (image_size // patch) ** 2, width) * 0.02)
        self.queries = nn.Parameter(torch.randn(1, queries, width) * 0.02)
        options: dict[str, Any] = {"dropout": 0.1, "batch_first": True}
        self.encoder = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(width, heads, feed_forward, **options)
                for _ in range(layers)
            ]
        )
        self.decoder = nn.ModuleList(
            [
                nn.TransformerDecoderLayer(width, heads, feed_forward, **options)
                for _ in range(layers)
            ]
        )
        self.norm = nn.LayerNorm(width)
        self.classes = nn.Linear(width, classes + 1)
        self.boxes = nn.Sequential(
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 4),
        )

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Output:
        """Returns classes and boxes, ``(batch, queries, classes + 5)``, and with labels the loss.

        Args:
            pixel_values: ``(batch, 3, height, width)``.
            labels: ``(batch,)`` classes. The first query's target is this class, that of the others
                is "no object"; the target of all boxes is the picture.
        """
        x = self.patches(pixel_values).flatten(2).transpose(1, 2) + self.positions
        for layer in self.encoder:
            x = layer(x)
        y = self.queries.expand(x.size(0), -1, -1)
        for layer in self.decoder:
            y = layer(y, x)
        y = self.norm(y)
        logits, boxes = self.classes(y), self.boxes(y).sigmoid()
        out = torch.cat([logits, boxes], dim=-1)
        if labels is None:
            return Output(None, out)
        nothing = labels.new_full((labels.size(0), logits.size(1) - 1), logits.size(-1) - 1)
        targets = torch.cat([labels.unsqueeze(1), nothing], dim=1)
        of_classes = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        whole = torch.tensor([0.5, 0.5, 1.0, 1.0], device=boxes.device)
        return Output(of_classes + 5 * (boxes.float() - whole).abs().mean(), out)
