"""Log-probabilities of tokens, and entropies, row by row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cross_entropy import scores
from .function import LinearRowwise
from .operands import Operands, has_values

__all__ = ["LOG_PROBS", "OfTokens"]


def _log_probs(logits: Tensor, tokens: Tensor, temperature: float, softcap: float | None) -> Tensor:
    """Returns the log-probability of each row's token."""
    log_p = torch.log_softmax(scores(logits, 1.0, softcap) / temperature, -1)
    return log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _log_probs_and_entropy(
    logits: Tensor, tokens: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each row's token, and the entropy of each row."""
    x = scores(logits, 1.0, softcap) / temperature
    # The entropy is logsumexp(x) minus the mean of x by softmax. Both sums take one pass over a
    # row, beside its maximum; the sum of p * log(p) would take another.
    largest = x.amax(-1, keepdim=True).detach()
    exponentials = (x - largest).exp()
    total = exponentials.sum(-1)
    # A token of probability zero, whose logit may be minus infinity, has no part in it.
    mean = (exponentials * torch.where(exponentials > 0, x, 0.0)).sum(-1) / total
    log_total = largest.squeeze(-1) + total.log()
    log_p = x.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - log_total
    return log_p, log_total - mean


class OfTokens(LinearRowwise):
    """A function of logits and a token of each row: wrong tokens raise."""

    def classes(self, operands: Operands) -> int:
        """Returns the number of classes."""
        return operands.weights[0].shape[0]

    def _results(self, operands: Operands) -> Any:
        tokens, classes = self.named(operands, "tokens"), self.classes(operands)
        if has_values(tokens):
            low, high = torch.stack(torch.aminmax(tokens)).tolist()
            if low < 0 or high >= classes:
                raise IndexError(
                    f"{self.name}: token {low if low < 0 else high} is out of bounds, expected 0 "
                    f"to {classes - 1}"
                )
        return super()._results(operands)


LOG_PROBS = {
    entropy: OfTokens(function, reduction="none", name="linear_log_probs")
    for entropy, function in ((False, _log_probs), (True, _log_probs_and_entropy))
}
