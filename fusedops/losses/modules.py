"""The losses as modules: `torch.nn.LinearCrossEntropyLoss`'s parameters, and one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .ops import linear_cross_entropy

__all__ = ["FusedLinearCrossEntropy"]


class FusedLinearCrossEntropy(nn.Module):
    """A linear layer and the cross-entropy of its logits, which are never whole in memory.

    Parameters, their names and initial values are those of `torch.nn.LinearCrossEntropyLoss`:
    ``linear.weight``, ``linear.bias``, and the buffer ``weight``.

    Args:
        in_features: D, the size of a row.
        num_classes: V, the number of classes.
        bias: whether there is a bias of logits.
        device: the parameters' device.
        dtype: the parameters' dtype.
        weight: (V,): a factor for each class.
        reduction: "mean", "sum" or "none".
        ignore_index: the target of rows without a loss.
        label_smoothing: the share of the uniform distribution in the target.
        softcap: the soft cap of logits, as in `fusedops.linear_cross_entropy`.
        scale: the factor of logits.
        z_loss: the factor of ``logsumexp(logits) ** 2``.
        chunk_mib: the most memory of a chunk's logits in MiB.
    Shape:
        input: ``(*, D)``; target: ``(*)``; output: a scalar, or ``(*)`` with ``reduction="none"``.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        weight: Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        scale: float = 1.0,
        z_loss: float = 0.0,
        chunk_mib: float | None = None,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self.weight: Tensor | None
        self.in_features, self.num_classes = in_features, num_classes
        self.reduction, self.ignore_index = reduction, ignore_index
        self.label_smoothing = label_smoothing
        self.softcap, self.scale, self.z_loss = softcap, scale, z_loss
        self.chunk_mib = chunk_mib

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Returns the loss of hidden states and their targets."""
        return linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            linear_bias=self.linear.bias,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            scale=self.scale,
            z_loss=self.z_loss,
            chunk_mib=self.chunk_mib,
        )

    def extra_repr(self) -> str:
        """Returns the options for the module's text."""
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}"
