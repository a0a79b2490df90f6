"""A transformer of tables in the style of FT-Transformer (Gorishniy et al. 2021, arXiv:2106.11959).

Each column, a number or a category, is a token. The gated units of its MLPs are ReGLU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...models.written import Output

__all__ = ["TabTransformer"]


class Layer(nn.Module):
    """A pre-norm layer with ReGLU."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, dropout, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * inner), nn.Linear(inner, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(batch, columns, width)`` to the same shape."""
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y, y, need_weights=False)[0])
        value, gate = self.up(self.norm2(x)).chunk(2, dim=-1)
        out: Tensor = x + self.dropout(self.down(self.dropout(value * F.relu(gate))))
        return out


class TabTransformer(nn.Module):
    """A classifier of rows with numbers and categories."""

    def __init__(
        self,
        rows: int,
        dense_features: int,
        tables: int = 26,
        width: int = 192,
        heads: int = 8,
        inner: int = 256,
        layers: int = 3,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(tables * rows, width)
        self.register_buffer("starts", rows * torch.arange(tables), persistent=False)
        self.scales = nn.Parameter(torch.randn(dense_features, width) * 0.1)
        self.shifts = nn.Parameter(torch.randn(dense_features, width) * 0.1)
        self.first = nn.Parameter(torch.randn(1, 1, width) * 0.1)
        self.layers = nn.ModuleList([Layer(width, heads, inner, dropout) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, dense: Tensor, sparse: Tensor, labels: Tensor | None = None) -> Output:
        """Returns the logits, ``(batch,)``, and with labels the binary cross-entropy.

        Args:
            dense: ``(batch, dense features)`` numbers.
            sparse: ``(batch, tables)`` categories.
            labels: ``(batch,)`` ones and zeros.
        """
        numbers = dense.unsqueeze(-1) * self.scales + self.shifts
        categories = self.table(sparse + self.get_buffer("starts"))
        x = torch.cat([self.first.expand(dense.size(0), -1, -1), numbers, categories], dim=1)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(F.relu(self.norm(x[:, 0]))).squeeze(1)
        if labels is None:
            return Output(None, logits)
        return Output(F.binary_cross_entropy_with_logits(logits.float(), labels), logits)
