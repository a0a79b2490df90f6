"""The output of a model that is written by hand."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

__all__ = ["Output", "with_loss"]


class Output(NamedTuple):
    """A model's output: the loss, None without labels, and the logits or the prediction."""

    loss: Tensor | None
    logits: Tensor


def with_loss(logits: Tensor, labels: Tensor | None) -> Output:
    """Returns the logits and their mean cross-entropy; the labels are the next tokens."""
    if labels is None:
        return Output(None, logits)
    flat = logits.view(-1, logits.size(-1))
    return Output(F.cross_entropy(flat, labels.view(-1), ignore_index=-1), logits)
