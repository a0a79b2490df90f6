"""A recommender in the style of DLRM (https://github.com/facebookresearch/dlrm).

Naumov et al. 2019, arXiv:1906.00091. DLRM's tables have one width, and it multiplies each pair of
looked-up vectors (slices). Here the widths differ, each slice has a LayerNorm and a tanh, and the
slices are concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedops.nn import FusedBatchedLayerNormTanh

from .output import Output

__all__ = ["DLRM"]

_TABLES = 26  # the number of categorical features in Criteo's logs
_WIDTHS = tuple([(16, 24, 32, 48, 64, 96, 128)[table % 7] for table in range(_TABLES)])


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Returns linear layers with ReLUs between them."""
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """A recommender that predicts clicks, with 26 embedding tables of 16 to 128 columns.

    The gradients of the tables are dense.
    """

    def __init__(
        self,
        rows: int,
        dense_features: int,
        widths: Sequence[int] = _WIDTHS,
        bottom: Sequence[int] = (512, 256, 128),
        top: Sequence[int] = (1024, 512),
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, width) for width in widths])
        self.norms: nn.Module = nn.ModuleList([nn.LayerNorm(width) for width in widths])
        self.bottom = mlp((dense_features, *bottom))
        self.top = mlp((bottom[-1] + sum(widths), *top, 1))

    def use_operators(self) -> None:
        """Replaces the norms by one module, which normalises and activates all slices."""
        layers = cast("list[nn.LayerNorm]", list(self.norms.children()))
        self.norms = FusedBatchedLayerNormTanh.from_layers(layers, concat=True)

    def forward(self, dense: Tensor, sparse: Tensor, labels: Tensor | None = None) -> Output:
        """Returns the logits of clicks, ``(batch,)``, and with labels the binary cross-entropy.

        Args:
            dense: ``(batch, dense features)`` numbers.
            sparse: ``(batch, tables)`` rows of the tables.
            labels: ``(batch,)`` ones (clicks) and zeros.
        """
        slices = [table(rows) for table, rows in zip(self.tables, sparse.unbind(1), strict=True)]
        x = torch.cat([self.bottom(dense), *self.normalised(slices)], dim=1)
        logits = self.top(x).squeeze(1)
        if labels is None:
            return Output(None, logits)
        return Output(F.binary_cross_entropy_with_logits(logits.float(), labels), logits)

    def normalised(self, slices: list[Tensor]) -> list[Tensor]:
        """Returns the slices normalised and activated, one by one or concatenated."""
        if isinstance(self.norms, nn.ModuleList):
            return [torch.tanh(norm(x)) for norm, x in zip(self.norms, slices, strict=True)]
        return [self.norms(slices)]
