"""A recommender in the style of DCN-v2, with a factorisation machine beside the cross network.

Wang et al. 2021, arXiv:2008.13535, and Guo et al. 2017, arXiv:1703.04247 (DeepFM).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...models.written import Output

__all__ = ["DCN"]


class CrossLayer(nn.Module):
    """A cross layer of low rank: ``x0 * (x V U + b) + x``."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        """Maps ``(batch, width)`` to the same shape."""
        out: Tensor = first * self.up(self.down(x)) + x
        return out


class DCN(nn.Module):
    """A click model of 26 tables of one width; its deep tower has BatchNorm and dropout."""

    def __init__(
        self,
        rows: int,
        dense_features: int,
        tables: int = 26,
        width: int = 64,
        rank: int = 512,
        layers: int = 3,
        deep: tuple[int, ...] = (2048, 1024, 512),
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, width) for _ in range(tables)])
        total = tables * width + dense_features
        self.cross = nn.ModuleList([CrossLayer(total, rank) for _ in range(layers)])
        tower: list[nn.Module] = []
        for wide, narrow in zip((total, *deep), deep, strict=False):
            tower += [nn.Linear(wide, narrow), nn.BatchNorm1d(narrow), nn.ReLU(), nn.Dropout(0.1)]
        self.deep = nn.Sequential(*tower)
        self.head = nn.Linear(total + deep[-1], 1)

    def forward(self, dense: Tensor, sparse: Tensor, labels: Tensor | None = None) -> Output:
        """Returns the logits of clicks, ``(batch,)``, and with labels the binary cross-entropy.

        Args:
            dense: ``(batch, dense features)`` numbers.
            sparse: ``(batch, tables)`` rows of the tables.
            labels: ``(batch,)`` ones (clicks) and zeros.
        """
        fields = torch.stack(
            [table(rows) for table, rows in zip(self.tables, sparse.unbind(1), strict=True)], dim=1
        )
        # The sum over all pairs of fields of their products.
        pairs = 0.5 * (fields.sum(1).square() - fields.square().sum(1)).sum(-1)
        first = torch.cat([dense, fields.flatten(1)], dim=1)
        x = first
        for layer in self.cross:
            x = layer(first, x)
        logits = self.head(torch.cat([x, self.deep(first)], dim=1)).squeeze(1) + pairs
        if labels is None:
            return Output(None, logits)
        return Output(F.binary_cross_entropy_with_logits(logits.float(), labels), logits)
