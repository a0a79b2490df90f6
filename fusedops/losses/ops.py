"""The losses of language models: cross-entropy and log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.calls import checks
from ..distributed.losses import cross_entropy_of_shards, log_probs_of_shards
from ..distributed.sharding import distributes
from .adapters import Pair, pairs_of
from .cross_entropy import CROSS_ENTROPY
from .function import check_budget
from .log_probs import LOG_PROBS

__all__ = ["linear_cross_entropy", "linear_log_probs"]


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    lora: Pair | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
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
        lora: rows (*, R) and a weight (V, R), whose product is added to the logits, as a low-rank
            adapter does: ``(scaling * lora_A(dropout(input)), lora_B.weight)``. Their dtype is that
            of ``input``, or fp32 beside 16 bits; the product is in the dtype of the others.
        weight: (V,): a factor for each class; it gets no gradient.
        reduction: "mean", weighted as PyTorch's; "sum"; or "none", which takes a fourth product.
        ignore_index: the target of rows without a loss. They take no products. None is -100.
        label_smoothing: from 0 to 1: the share of the uniform distribution in the target.
        softcap: logits become ``softcap * tanh(logits / softcap)``, as in Gemma 2; None for none.
        scale: logits are multiplied by it, before they are capped.
        z_loss: the factor of ``logsumexp(logits) ** 2``, which is added to each row's loss.
        chunk_mib: the most memory of a chunk's logits in MiB; by default 512, or 1/32 of the
            device's memory if that is less, or more where sums in fp32 would take more.
    Returns:
        The loss: a scalar, or ``(*)`` with ``reduction="none"``; in fp32, or fp64 for fp64 inputs.
    Raises:
        IndexError: a target is not a class. Under a CUDA graph's capture its loss is NaN.
        TypeError: a tensor is not floating point, ``target`` is not int64, or dtypes differ.
        ValueError: shapes do not go together, or a number is out of its range.
    Numerics: logits in the products' dtype, the rest in fp32; see `linear_rowwise` for the weight's
        gradient. The host waits once for the number of targets that count.
    """
    op = "linear_cross_entropy"
    checks.check_choice(op, "reduction", reduction, tuple(CROSS_ENTROPY))
    checks.check_number(op, "scale", scale)
    checks.check_number(op, "z_loss", z_loss)
    ignore_index = -100 if ignore_index is None else ignore_index  # PyTorch's default is None
    if not isinstance(ignore_index, int):
        raise TypeError(f"{op}: ignore_index has type {type(ignore_index).__name__}, expected int")
    check_budget(op, chunk_mib)
    _check_share(op, label_smoothing)
    _check_cap(op, softcap)
    _check_tokens(op, "target", target, input)
    single = input.dim() == 1
    pairs = pairs_of(op, lora, is_single=True)
    if single:
        input, target = input.unsqueeze(0), target.unsqueeze(0)
        pairs = [(rows.unsqueeze(0), of_rows) for rows, of_rows in filter(None, pairs)]
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
    loss: Tensor
    if _distributes(op, input, linear_weight, pairs):
        loss = cross_entropy_of_shards(
            input, linear_weight, others, linear_bias, chunk_mib, reduction
        )
    else:
        called = CROSS_ENTROPY[reduction]
        loss = called.apply(input, linear_weight, others, linear_bias, chunk_mib, pairs)
    return loss.squeeze(0) if single and reduction == "none" else loss


def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    tokens: Tensor,
    *,
    linear_bias: Tensor | None = None,
    lora: Pair | None = None,
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
        lora: as in `linear_cross_entropy`.
        temperature: logits are divided by it, after they are capped.
        softcap: logits become ``softcap * tanh(logits / softcap)``; None for none.
        entropy: whether the entropy of each row is returned as well.
        chunk_mib: as in `linear_cross_entropy`.
    Returns:
        The log-probabilities, ``(*)``, in nats; with ``entropy`` a tuple of these and the
        entropies, ``(*)``; in fp32, or fp64 for fp64 inputs. All have gradients.
    Raises:
        IndexError: a token is out of bounds. In a compiled graph its log-probability is NaN.
        TypeError: a tensor is not floating point, ``tokens`` is not int64, or dtypes differ.
        ValueError: shapes do not go together, or ``temperature`` or ``softcap`` is not positive.
    """
    op = "linear_log_probs"
    checks.check_number(op, "temperature", temperature)
    if not temperature > 0:
        raise ValueError(f"{op}: temperature must be positive, got {temperature}")
    check_budget(op, chunk_mib)
    _check_cap(op, softcap)
    _check_tokens(op, "tokens", tokens, input)
    pairs = pairs_of(op, lora, is_single=True)
    others = tokens, float(temperature), None if softcap is None else float(softcap)
    arguments = input, linear_weight, others, linear_bias, chunk_mib
    if _distributes(op, input, linear_weight, pairs):
        return log_probs_of_shards(*arguments, bool(entropy))
    return LOG_PROBS[bool(entropy)].apply(*arguments, pairs)


def _distributes(op: str, input: Any, linear_weight: Any, pairs: Sequence[Any]) -> bool:
    """Whether the input or weight is a DTensor.

    Raises:
        TypeError: one of them is, or one of an adapter, and there is an adapter.
    """
    tensors = [t for pair in pairs for t in pair]
    if not distributes((input, linear_weight, *tensors)):
        return False
    if pairs:
        raise TypeError(f"{op}: lora is not supported with DTensors; merge the adapter")
    return True


def _check_tokens(op: str, name: str, value: Any, input: Any) -> None:
    checks.check_jit(op)
    checks.check_tensor(op, "input", input)
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype != torch.int64:
        raise TypeError(f"{op}: {name} has dtype {value.dtype}, expected torch.int64")
    if value.device != input.device:
        raise RuntimeError(
            f"{op}: {name} is on {value.device}, expected {input.device} as the first argument"
        )
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
