"""The losses: of whole logits as users write them, and of hidden states with this package."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops

__all__ = [
    "cross_entropy",
    "fused_cross_entropy",
    "fused_kl_divergence",
    "fused_log_probs",
    "kl_divergence",
    "liger_cross_entropy",
    "log_probs",
    "torch_cross_entropy",
]


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


# --- losses of logits -----------------------------------------------------------------------------


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Computes the mean cross-entropy of the targets that are not ignored."""
    return F.cross_entropy(_wide(logits), target)


def log_probs(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the log-probability of each row's token, and the entropy of each row."""
    log_p = torch.log_softmax(_wide(logits), -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropy


def _kl_divergence_of_rows(student: Tensor, teacher: Tensor) -> Tensor:
    log_p, log_q = torch.log_softmax(_wide(student), -1), torch.log_softmax(_wide(teacher), -1)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def kl_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Computes the mean divergence of a student from its teacher, as in distillation."""
    return _kl_divergence_of_rows(student, teacher).mean()


# --- losses of hidden states ----------------------------------------------------------------------


@functools.cache
def _fused_kl_divergence(chunk_mib: float | None) -> Any:
    return fusedops.linear_rowwise(
        _kl_divergence_of_rows, reduction="mean", chunk_mib=chunk_mib, strict=True
    )


def fused_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, chunk_mib: float | None = None
) -> Tensor:
    """Computes `cross_entropy` of ``x @ weight.T`` in chunks of rows."""
    return fusedops.linear_cross_entropy(x, weight, target, chunk_mib=chunk_mib)


def fused_log_probs(
    x: Tensor, weight: Tensor, tokens: Tensor, chunk_mib: float | None = None
) -> Any:
    """Computes `log_probs` in chunks of rows."""
    return fusedops.linear_log_probs(x, weight, tokens, entropy=True, chunk_mib=chunk_mib)


def fused_kl_divergence(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    chunk_mib: float | None = None,
) -> Any:
    """Computes `kl_divergence` in chunks of rows."""
    return _fused_kl_divergence(chunk_mib)((x, teacher_x), (weight, teacher_weight))


def liger_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Any:
    """Computes `cross_entropy` by Liger-Kernel."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(weight, x, target)


def torch_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Any:
    """Computes `cross_entropy` by PyTorch in chunks of rows; releases before 2.13 lack it."""
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(x, weight, target, options=options)
