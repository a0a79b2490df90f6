"""A graph transformer in the style of Graphormer (Ying et al. 2021, arXiv:2106.05234).

All nodes attend to all nodes. The attention's bias is looked up by the distance of two nodes, and
is the same in all layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...models.written import Output

__all__ = ["GraphTransformer"]


class Layer(nn.Module):
    """A pre-norm layer whose attention takes a bias."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Maps ``(batch, nodes, width)`` to the same shape; the bias is per head."""
        batch, nodes, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, nodes, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        y = self.proj(y.transpose(1, 2).reshape(batch, nodes, width))
        x = x + F.dropout(y, self.dropout, self.training)
        y = self.fc2(F.gelu(self.fc1(self.norm(x))))
        return x + F.dropout(y, self.dropout, self.training)


class GraphTransformer(nn.Module):
    """A model that predicts a number for a graph."""

    def __init__(
        self,
        kinds: int = 512,
        distances: int = 32,
        width: int = 768,
        heads: int = 32,
        layers: int = 6,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.kinds, self.degrees = nn.Embedding(kinds, width), nn.Embedding(kinds, width)
        self.distances = nn.Embedding(distances, heads)
        self.layers = nn.ModuleList([Layer(width, heads, dropout) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1)
        for table in (self.kinds, self.degrees, self.distances):
            nn.init.normal_(table.weight, std=0.02)

    def forward(
        self, nodes: Tensor, degrees: Tensor, distances: Tensor, labels: Tensor | None = None
    ) -> Output:
        """Returns a number for each graph, ``(batch,)``, and with labels the mean absolute error.

        Args:
            nodes: ``(batch, nodes)`` kinds of nodes.
            degrees: ``(batch, nodes)`` numbers of neighbours.
            distances: ``(batch, nodes, nodes)`` lengths of shortest paths.
            labels: ``(batch,)`` numbers.
        """
        x = self.kinds(nodes) + self.degrees(degrees)
        bias = self.distances(distances).permute(0, 3, 1, 2).contiguous()
        for layer in self.layers:
            x = layer(x, bias)
        result = self.head(self.norm(x).mean(1)).squeeze(1)
        if labels is None:
            return Output(None, result)
        return Output(torch.abs(result.float() - labels).mean(), result)
