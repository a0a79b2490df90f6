"""The losses of language models: cross-entropy and log-probabilities of tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.calls import checks
from .function import LinearRowwise, check_budget
from .operands import Operands

__all__ = ["linear_cross_entropy", "linear_log_probs"]

_REDUCTIONS = ("none", "mean", "sum")


def _scores(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Returns logits in fp32, or fp64, scaled and then capped."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if scale != 1.0:
        scores = scores * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores


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
    scores = _scores(logits, scale, softcap)
    if weight is None or weight_of_target is None:
        loss = F.cross_entropy(
            scores,
            target,
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
        )
    else:
        loss = F.cross_entropy(scores, target, ignore_index=ignore_index, reduction="none")
        loss = loss * weight_of_target
        if label_smoothing:
            smooth = -(torch.log_softmax(scores, -1) * weight).sum(-1)
            smooth = torch.where(target == ignore_index, 0.0, smooth)
            share = label_smoothing / logits.shape[-1]
            loss = (1 - label_smoothing) * loss + share * smooth
    if z_loss:
        squared = torch.logsumexp(scores, -1).square()
        loss = loss + z_loss * torch.where(target == ignore_index, 0.0, squared)
    return loss


class _CrossEntropy(LinearRowwise):
    """Cross-entropy of logits: rows whose target is ignored are left out, wrong targets raise."""

    def mask(self, operands: Operands) -> Tensor:
        """Returns which targets are not ignored."""
        target, ignore_index = operands.others[0], operands.others[3]
        return target != ignore_index  # type: ignore[no-any-return]

    def _count(self, operands: Operands, mask: Tensor) -> int:
        """Returns the number of targets that are not ignored, from the one wait for the device.

        Raises:
            IndexError: a target is no class.
        """
        target = operands.others[0]
        wrong = mask & ((target < 0) | (target >= operands.classes))
        count, wrong_count = torch.stack([mask.sum(), wrong.sum()]).tolist()
        if wrong_count:
            first = int(wrong.nonzero()[0])
            raise IndexError(
                f"{self.name}: target {int(target[first])} of row {first} is out of bounds, "
                f"expected 0 to {operands.classes - 1} or ignore_index={operands.others[3]}"
            )
        return int(count)

    def divisor(self, operands: Operands, mask: Tensor | None) -> Tensor | int:
        """Returns the sum of the targets' weights, or their number."""
        assert mask is not None
        weights = operands.others[1]
        if weights is None:
            return mask.sum()
        return torch.where(mask, weights, 0).sum(dtype=operands.acc)


_CROSS_ENTROPY = {
    reduction: _CrossEntropy(_cross_entropy, reduction=reduction, name="linear_cross_entropy")
    for reduction in _REDUCTIONS
}


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    z_loss: float = 0.0,
    chunk_mib: float | None = None,
) -> Tensor:
    """Cross-entropy of ``input @ linear_weight.T``, whose logits are never whole in memory.

    It is `torch.nn.functional.linear_cross_entropy` of targets that are classes. For a sum or mean
    the gradients are formed in the forward, chunk by chunk of rows: three products in all.

    Args:
        input: (*, D): hidden states in fp16, bf16, fp32 or fp64.
        linear_weight: (V, D), in the same dtype, or any under autocast.
        target: (*): classes from 0 to V - 1, or ``ignore_index``; int64.
        linear_bias: (V,).
        weight: (V,): a factor for each class; it gets no gradient.
        reduction: "mean", weighted as PyTorch's; "sum"; or "none", which takes a fourth product.
        ignore_index: the target of rows without a loss. They take no products.
        label_smoothing: from 0 to 1: the share of the uniform distribution in the target.
        softcap: logits become ``softcap * tanh(logits / softcap)``, as in Gemma 2; None for none.
        scale: logits are multiplied by it, before they are capped.
        z_loss: the factor of ``logsumexp(logits) ** 2``, which is added to each row's loss.
        chunk_mib: the most memory of a chunk's logits in MiB; by default 512, or 1/32 of the
            device's memory if that is less.
    Returns:
        The loss: a scalar, or ``(*)`` with ``reduction="none"``; in fp32, or fp64 for fp64 inputs.
    Raises:
        IndexError: a target is not a class. Under a CUDA graph's capture its loss is NaN.
        TypeError: a tensor is not floating point, ``target`` has no integers, or dtypes differ.
        ValueError: shapes do not go together, or a number is out of its range.
    Numerics: logits in the products' dtype, the rest in fp32; see `linear_rowwise` for the weight's
        gradient. The host waits once for the number of targets that count.
    """
    op = "linear_cross_entropy"
    checks.check_choice(op, "reduction", reduction, _REDUCTIONS)
    checks.check_number(op, "scale", scale)
    checks.check_number(op, "z_loss", z_loss)
    check_budget(op, chunk_mib)
    _check_share(op, label_smoothing)
    _check_cap(op, softcap)
    _check_tokens(op, "target", target, input)
    single = input.dim() == 1
    if single:
        input, target = input.unsqueeze(0), target.unsqueeze(0)
    weight_of_target = None
    if weight is not None:
        checks.check_tensor(op, "weight", weight, input)
        checks.check_shape(op, "weight", weight, (linear_weight.shape[0],))
        weight = weight.detach()
        known = target.clamp(0, linear_weight.shape[0] - 1)
        weight_of_target = torch.where(target == ignore_index, 0, weight[known])
    others = (
        target,
        weight_of_target,
        weight,
        ignore_index,
        float(label_smoothing),
        None if softcap is None else float(softcap),
        float(scale),
        float(z_loss),
    )
    loss: Tensor = _CROSS_ENTROPY[reduction].apply(
        input, linear_weight, others, linear_bias, chunk_mib
    )
    return loss.squeeze(0) if single and reduction == "none" else loss


def _log_probs(logits: Tensor, tokens: Tensor, temperature: float, softcap: float | None) -> Tensor:
    """Returns the log-probability of each row's token."""
    log_p = torch.log_softmax(_scores(logits, 1.0, softcap) / temperature, -1)
    return log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _log_probs_and_entropy(
    logits: Tensor, tokens: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each row's token, and the entropy of each row."""
    scores = _scores(logits, 1.0, softcap) / temperature
    # The entropy is logsumexp(x) minus the mean of x by softmax. Both sums take one pass over a
    # row, beside its maximum; the sum of p * log(p) would take another.
    largest = scores.amax(-1, keepdim=True).detach()
    exponentials = (scores - largest).exp()
    total = exponentials.sum(-1)
    mean = (exponentials * scores).sum(-1) / total
    log_total = largest.squeeze(-1) + total.log()
    log_p = scores.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - log_total
    return log_p, log_total - mean


class _OfTokens(LinearRowwise):
    """A function of logits and a token of each row: wrong tokens raise."""

    def _results(self, operands: Operands) -> Any:
        tokens = operands.others[0]
        captures = tokens.is_cuda and torch.cuda.is_current_stream_capturing()
        if not torch.compiler.is_compiling() and not captures and tokens.numel():
            low, high = torch.stack(torch.aminmax(tokens)).tolist()
            if low < 0 or high >= operands.classes:
                raise IndexError(
                    f"{self.name}: token {low if low < 0 else high} is out of bounds, expected 0 "
                    f"to {operands.classes - 1}"
                )
        return super()._results(operands)


_LOG_PROBS = {
    entropy: _OfTokens(function, reduction="none", name="linear_log_probs")
    for entropy, function in ((False, _log_probs), (True, _log_probs_and_entropy))
}


def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    tokens: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    chunk_mib: float | None = None,
) -> Any:
    """Log-probabilities of tokens under ``softmax(input @ linear_weight.T / temperature)``.

    For policy gradients: no logits are whole in memory, and the backward computes them again.

    Args:
        input: (*, D): hidden states in fp16, bf16, fp32 or fp64.
        linear_weight: (V, D), in the same dtype, or any under autocast.
        tokens: (*): from 0 to V - 1; int64.
        linear_bias: (V,).
        temperature: logits are divided by it, after they are capped.
        softcap: logits become ``softcap * tanh(logits / softcap)``; None for none.
        entropy: whether the entropy of each row is returned as well.
        chunk_mib: as in `linear_cross_entropy`.
    Returns:
        The log-probabilities, ``(*)``, in nats; with ``entropy`` a tuple of these and the
        entropies, ``(*)``; in fp32, or fp64 for fp64 inputs. All have gradients.
    Raises:
        IndexError: a token is out of bounds. In a compiled graph its log-probability is NaN.
        TypeError: a tensor is not floating point, ``tokens`` has no integers, or dtypes differ.
        ValueError: shapes do not go together, or ``temperature`` or ``softcap`` is not positive.
    """
    op = "linear_log_probs"
    checks.check_number(op, "temperature", temperature)
    if not temperature > 0:
        raise ValueError(f"{op}: temperature must be positive, got {temperature}")
    check_budget(op, chunk_mib)
    _check_cap(op, softcap)
    _check_tokens(op, "tokens", tokens, input)
    others = tokens, float(temperature), None if softcap is None else float(softcap)
    return _LOG_PROBS[bool(entropy)].apply(input, linear_weight, others, linear_bias, chunk_mib)


def _check_tokens(op: str, name: str, value: Any, input: Any) -> None:
    checks.check_tensor(op, "input", input)
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype != torch.int64:
        raise TypeError(f"{op}: {name} has dtype {value.dtype}, expected torch.int64")
    checks.check_shape(op, name, value, tuple(input.shape[:-1]))


def _check_share(op: str, label_smoothing: Any) -> None:
    checks.check_number(op, "label_smoothing", label_smoothing)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{op}: label_smoothing must be in [0, 1], got {label_smoothing}")


def _check_cap(op: str, softcap: Any) -> None:
    if softcap is None:
        return
    checks.check_number(op, "softcap", softcap)
    if not softcap > 0:
        raise ValueError(f"{op}: softcap must be positive, got {softcap}")
