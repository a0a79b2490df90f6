"""`fusedops.explain` counts what `fusedops.compile` changes besides regions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedops
from backends import randn
from support import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]

_ROWS = 1024


class Changed(nn.Module):
    """Two attentions with a causal mask and one with a mask of nothing, of keys and values for groups of queries; a sorted batch,
    a small table, and logits that are capped."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 32), nn.Linear(16, 16), nn.Linear(16, 16)
        self.few, self.head = nn.Embedding(4, 16), nn.Linear(32, 4099, bias=False)

    def forward(self, x: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.few(torch.arange(x.numel(), device=x.device) % 4)[: x.shape[0]]
        rows = x[order.argsort()]
        q, k, v = (layer(rows).view(8, 128, -1, 8).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (heads.repeat_interleave(2, 1) for heads in (k, v))
        places = torch.arange(128, device=x.device)
        causal, nothing = places <= places[:, None], (places >= 0).expand(128, 128)
        asked = rows[:, :1].view(8, 1, 128, 1) < 9  # depends on an input
        for mask in (causal, causal, nothing, asked.expand(8, 1, 128, 128)):
            q = F.scaled_dot_product_attention(q, k, v, mask)
        logits = self.head(q.transpose(1, 2).reshape(_ROWS, 32))
        capped = torch.tanh(logits / 9) * 9
        return F.cross_entropy(capped.float(), order), capped


def test_changes_are_counted() -> None:
    model, order = Changed().to(DEVICE), torch.randperm(_ROWS, device=DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        report = fusedops.explain(model, randn(_ROWS, 16).requires_grad_(), order)
    assert report.changes == {
        "an attention that is causal in the place of its mask": 2,
        "an attention without its mask, which masks nothing": 1,
        "an attention whose mask is made contiguous": 1,
        "an attention of keys and values that are not repeated for groups of queries": 3,
        "one product of the same rows in the place of several": 1,
        "one cast of several parameters": 1,
        "a product with columns padded to a multiple of 64": 1,
        "a returned activation that is computed again in the backward": 1,
        "an embedding of few rows, whose gradient is a matrix product": 1,
        "rows in the order of a sort, whose gradients are put back": 1,
    }
    assert "  changed: 2 x an attention that is causal in the place of its mask\n" in str(report)
