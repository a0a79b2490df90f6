"""What a model written by hand returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

__all__ = ["Output", "with_loss"]


class Output(NamedTuple):
    """A model's result: the loss, if there were labels, and the logits or the prediction."""

    loss: Tensor | None
    logits: Tensor


def with_loss(logits: Tensor, labels: Tensor | None) -> Output:
    """The logits with the mean cross-entropy of the next tokens, which are the labels."""
    if labels is None:
        return Output(None, logits)
    return Output(
        F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-1), logits
    )
