"""Cross-entropy of logits, row by row, and the rows whose targets are ignored."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .function import LinearRowwise
from .operands import Operands
from .registration import identified, written

__all__ = ["CROSS_ENTROPY", "CrossEntropy", "encoded", "scale_and_cap", "scores"]


def scores(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Returns logits in fp32, or fp64, scaled and then capped."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    if scale != 1.0:
        x = x * scale
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight_of_target: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    scale: float,
    z_loss: float,
) -> Tensor:
    """Returns the loss of each row: cross-entropy, and ``z_loss`` times ``logsumexp ** 2``."""
    x = scores(logits, scale, softcap)
    if weight is None or weight_of_target is None:
        loss = F.cross_entropy(
            x,
            target,
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
        )
    else:
        loss = F.cross_entropy(x, target, ignore_index=ignore_index, reduction="none")
        loss = loss * weight_of_target
        if label_smoothing:
            smooth = -(torch.log_softmax(x, -1) * weight).sum(-1)
            smooth = torch.where(target == ignore_index, 0.0, smooth)
            share = label_smoothing / logits.shape[-1]
            loss = (1 - label_smoothing) * loss + share * smooth
    if z_loss:
        squared = torch.logsumexp(x, -1).square()
        loss = loss + z_loss * torch.where(target == ignore_index, 0.0, squared)
    return loss


class CrossEntropy(LinearRowwise):
    """Cross-entropy of logits: rows whose target is ignored are left out, wrong targets raise."""

    def mask(self, operands: Operands) -> Tensor:
        """Returns which targets are not ignored."""
        ignored = self.named(operands, "ignore_index")
        return self.named(operands, "target") != ignored  # type: ignore[no-any-return]

    def _count(self, operands: Operands, mask: Tensor) -> int:
        """Returns the number of targets that are not ignored, from the one wait for the device.

        Raises:
            IndexError: a target is no class.
        """
        target = self.named(operands, "target")
        wrong = mask & ((target < 0) | (target >= self.classes(operands)))
        count, wrong_count = torch.stack([mask.sum(), wrong.sum()]).tolist()
        if wrong_count:
            first = int(wrong.nonzero()[0])
            raise IndexError(
                f"{self.name}: target {int(target[first])} of row {first} is out of bounds, "
                f"expected 0 to {self.classes(operands) - 1} or "
                f"ignore_index={self.named(operands, 'ignore_index')}"
            )
        return int(count)

    def classes(self, operands: Operands) -> int:
        """Returns the number of classes."""
        return operands.weights[0].shape[0]

    def divisor(self, operands: Operands, mask: Tensor | None) -> Tensor | int:
        """Returns the sum of the targets' weights, or their number."""
        assert mask is not None
        weights = self.named(operands, "weight_of_target")
        if weights is None:
            return mask.sum()
        return torch.where(mask, weights, 0).sum(dtype=operands.acc)


CROSS_ENTROPY = {
    reduction: CrossEntropy(
        _cross_entropy, reduction=reduction, shared=("weight",), name="linear_cross_entropy"
    )
    for reduction in ("none", "mean", "sum")
}


def encoded(
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None],
    needs: tuple[bool, bool, bool],
    *,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    scale: float,
    dtype: torch.dtype,
) -> str:
    """Returns the string of a call of ``fusedops::linear_rowwise`` that is a cross-entropy.

    For graphs that call the operator by itself: its tensors may be fake.

    Args:
        tensors: rows (M, D), a weight (V, D), a bias (V,) or None, and targets (M,); the weights of
            targets (M,) and of classes (V,), or None for both.
        needs: whether the gradients of rows, weight and bias are wanted.
        reduction, ignore_index, label_smoothing, softcap, scale: as in `linear_cross_entropy`.
        dtype: the dtype of the products.
    Raises:
        NotRowwiseError: the operator has no kernel for them.
    """
    rows, weight, bias, target, *weights = tensors
    others = target, *weights, ignore_index, label_smoothing, softcap, scale, 0.0
    by_row = True, weights[0] is not None, *[False] * (len(others) - 2)
    operands = Operands((rows,), (weight,), (bias,), others, by_row, dtype, None)
    flags = (*needs, *[False] * len(others))
    with torch.autocast(rows.device.type, enabled=False):
        loss = CROSS_ENTROPY[reduction]
        return identified(written(loss, operands, flags), loss, operands)


def scale_and_cap(steps: Iterable[tuple[str, Any]]) -> tuple[float, float | None] | None:
    """Returns the scale and the soft cap of `linear_cross_entropy` that do what some steps do.

    ``b * tanh(a * x)`` is ``cap * tanh(scale * x / cap)`` with the cap b and the scale a * b.

    Args:
        steps: what is done to logits, in order: ``("*", number)``, ``("/", number)`` and
            ``("tanh", 1)``.
    Returns:
        None if the operator has no such function: for two caps, say, or one that is not positive.
    """
    factors = [(1.0, 1.0)]  # before each tanh, and after the last
    for kind, number in steps:
        if not isinstance(number, (int, float)):
            return None
        if kind == "tanh":
            factors.append((1.0, 1.0))
        else:
            times, over = factors[-1]
            factors[-1] = (times * number, over) if kind == "*" else (times, over * number)
    # A cap of 30 after a division by 30 is a scale of exactly 1.
    times, over = [math.prod(numbers) for numbers in zip(*factors, strict=True)]
    last_times, last_over = factors[-1]
    if over == 0 or not math.isfinite(times / over) or len(factors) > 2:
        return None
    if len(factors) == 1:
        return times / over, None
    cap = last_times / last_over
    return (times / over, cap) if 0 < cap < math.inf else None
