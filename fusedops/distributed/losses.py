"""Cross-entropy and log-probabilities of logits whose classes are sharded over ranks.

Each rank has the logits of its classes. Three numbers of each row go between ranks, four with label
smoothing or an entropy, in chunks of rows; no logits do:

    rank 0   | classes 0 ... |     its logsumexp, the target's logit if it has it   -+
    rank 1   | ...     V - 1 |     its logsumexp, the target's logit if it has it   -+-> reduced

The gradient of a rank's logsumexp is the share of its classes in the softmax. The gradient of the
input is a sum over ranks, which the DTensor of the input says (`Partial`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.compat.distributed import group_of, waited
from ..core.launches import launch
from ..losses.cross_entropy import CROSS_ENTROPY, CrossEntropy, scores
from ..losses.function import LinearRowwise
from ..losses.log_probs import LOG_PROBS, OfTokens
from ..losses.operands import Operands
from ..losses.registration import identified, written

__all__ = ["cross_entropy_of_shards", "encoded", "log_probs_of_shards", "shard_of"]


def _numbers(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    scale: float,
    z_loss: float,
    group: str,
    offset: int,
    classes: int,
    most: int,
) -> tuple[Tensor, ...]:
    """Returns the logsumexp of a rank's logits, the target's logit or zero, and perhaps a sum."""
    x = scores(logits, scale, softcap)
    picked = _picked(x, target, offset)
    if not label_smoothing:
        return torch.logsumexp(x, -1), picked
    return torch.logsumexp(x, -1), picked, x.sum(-1)


def _picked(x: Tensor, target: Tensor, offset: int) -> Tensor:
    """Returns the logits of targets; zero for those that another rank has."""
    own = target - offset
    is_own = (own >= 0) & (own < x.shape[-1])
    picked = x.gather(-1, torch.where(is_own, own, 0).unsqueeze(-1)).squeeze(-1)
    return torch.where(is_own, picked, 0.0)


def _numbers_of_tokens(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    softcap: float | None,
    group: str,
    offset: int,
    classes: int,
    most: int,
) -> tuple[Tensor, ...]:
    """Returns the logsumexp of a rank's logits, and the token's logit or zero."""
    x = scores(logits, 1.0, softcap) / temperature
    return torch.logsumexp(x, -1), _picked(x, tokens, offset)


def _numbers_and_mean(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    softcap: float | None,
    group: str,
    offset: int,
    classes: int,
    most: int,
) -> tuple[Tensor, ...]:
    """Returns these numbers, and the mean of a rank's logits by their softmax."""
    x = scores(logits, 1.0, softcap) / temperature
    # As in `losses.log_probs`.
    largest = x.amax(-1, keepdim=True).detach()
    exponentials = (x - largest).exp()
    total = exponentials.sum(-1)
    mean = (exponentials * torch.where(exponentials > 0, x, 0.0)).sum(-1) / total
    return largest.squeeze(-1) + total.log(), _picked(x, tokens, offset), mean


class _Sharded(LinearRowwise):
    """A function of a rank's logits, whose results are combined from the numbers of all ranks."""

    combines = True

    def classes(self, operands: Operands) -> int:
        """Returns the number of all ranks' classes."""
        return int(self.named(operands, "classes"))

    def columns(self, operands: Operands) -> int:
        """Returns the most classes of a rank, so that all ranks have the same chunks."""
        return int(self.named(operands, "most"))


class _OfShards(_Sharded, CrossEntropy):
    """Cross-entropy of a rank's logits, from the numbers of all ranks."""

    def combined(
        self, operands: Operands, results: Sequence[Tensor], cotangents: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Returns the loss of each row, and the gradients of this rank's numbers."""
        smoothing = self.named(operands, "label_smoothing")
        z_loss, group = self.named(operands, "z_loss"), self.named(operands, "group")
        own, picked, *sums = results
        largest = _largest(own, group)
        share = torch.exp(own - largest)
        packed = _summed_over(group, [share, picked, *sums])
        log_total = largest + packed[0].log()
        loss = log_total - (1 - smoothing) * packed[1]
        smooth = smoothing / self.classes(operands)
        if sums:
            loss = loss - smooth * packed[2]
        if z_loss:
            loss = loss + z_loss * log_total.square()
        if not cotangents:
            return [loss], []
        (g,) = cotangents
        of_total = g * (share / packed[0]) * (1 + 2 * z_loss * log_total)
        of_sums = [-smooth * g for _ in sums]
        return [loss], [of_total, (smoothing - 1) * g, *of_sums]


class _TokensOfShards(_Sharded, OfTokens):
    """Log-probabilities of tokens, and perhaps entropies, from the numbers of all ranks."""

    def combined(
        self, operands: Operands, results: Sequence[Tensor], cotangents: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Returns the results of each row, and the gradients of this rank's numbers."""
        group = self.named(operands, "group")
        own, picked, *means = results
        largest = _largest(own, group)
        exponential = torch.exp(own - largest)
        packed = _summed_over(group, [exponential, picked, *[exponential * m for m in means]])
        log_total = largest + packed[0].log()
        share = exponential / packed[0]
        mean = packed[2:] / packed[0]
        combined = [packed[1] - log_total, *(log_total - mean)]
        if not cotangents:
            return combined, []
        # The log-probability is picked - log_total, the entropy log_total - mean. The mean of all
        # ranks is a sum of share * m, whose shares depend on the ranks' logsumexp.
        of_log_p, *of_entropies = cotangents
        of_own = -share * of_log_p
        for g, m, of_all in zip(of_entropies, means, mean, strict=True):
            of_own = of_own + g * share * (1 - m + of_all)
        return combined, [of_own, of_log_p, *[-share * g for g in of_entropies]]


class _EntropiesOfShards(_TokensOfShards):
    """Log-probabilities of tokens and entropies."""

    count = 2


def _largest(own: Tensor, group: str) -> Tensor:
    """Returns the largest number of all ranks, for each row."""
    largest = own.clone()
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group_of(group))
    return largest


def _summed_over(group: str, numbers: Sequence[Tensor]) -> Tensor:
    """Returns the sums over all ranks of some numbers of each row, (numbers, R)."""
    packed = torch.stack(list(numbers))
    torch.distributed.all_reduce(packed, group=group_of(group))
    return packed


_LOG_PROBS_OF_SHARDS = {
    False: _TokensOfShards(_numbers_of_tokens, reduction="none", name="linear_log_probs"),
    True: _EntropiesOfShards(_numbers_and_mean, reduction="none", name="linear_log_probs"),
}
_OF_SHARDS = {
    reduction: _OfShards(_numbers, reduction=reduction, name="linear_cross_entropy")
    for reduction in ("none", "sum")
}


@dataclass
class _Placed:
    """This rank's part of a call for DTensors.

    Attributes:
        input, weight, bias: the tensors of this rank.
        shard: the arguments of a function of shards, see `shard_of`; () if classes are not sharded.
        mesh: the mesh of ranks.
        rows: the placements of rows.
        over_rows: for each dimension of the mesh, whether rows are sharded along it.
        is_plain: whether the caller's input is no DTensor.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    shard: tuple[Any, ...]
    mesh: Any
    rows: list[Any]
    over_rows: list[bool]
    is_plain: bool

    def local(self, t: Any) -> Any:
        """Returns this rank's rows of a tensor without a gradient; None for None."""
        return _local(t, self.mesh, self.rows)

    def whole(self, result: Tensor, placements: list[Any]) -> Any:
        """Returns the caller's result: a DTensor if the input is one."""
        from torch.distributed.tensor import DTensor

        placed = DTensor.from_local(result, self.mesh, placements, run_check=False)
        return placed.full_tensor() if self.is_plain else placed


def _placed(op: str, input: Any, linear_weight: Any, linear_bias: Any) -> _Placed:
    """Returns this rank's part of a call; a plain tensor counts as one that all ranks have.

    The classes of the weight may be sharded along one dimension of the mesh, and the rows of the
    input along others.
    """
    from torch.distributed.tensor import DTensor, Shard

    dim = _dim_of_classes(op, linear_weight)
    mesh = linear_weight.device_mesh
    if dim is not None and not launch.runs_kernels(linear_weight.device.type):
        # PyTorch's operators take whole logits.
        linear_weight, dim = linear_weight.redistribute(mesh, _replicated(mesh)), None
    is_plain = not isinstance(input, DTensor)
    input = _distributed(input, mesh)
    rows = _placements_of_rows(input, dim)
    of_rows = _summed([other == dim for other in range(mesh.ndim)], rows)
    x = waited(input.redistribute(mesh, rows).to_local(grad_placements=of_rows))
    over_rows = [isinstance(p, Shard) for p in rows]
    weight, bias = _local_parameters(linear_weight, linear_bias, over_rows)
    shard = () if dim is None else shard_of(op, linear_weight.shape[0], mesh, dim)
    return _Placed(x, weight, bias, shard, mesh, rows, over_rows, is_plain)


def cross_entropy_of_shards(
    input: Any,
    linear_weight: Any,
    others: tuple[Any, ...],
    linear_bias: Any,
    chunk_mib: float | None,
    reduction: str,
) -> Any:
    """Returns the loss for DTensors; the result is a DTensor if the input is one."""
    target, weight_of_target, weight, *numbers = others
    placed = _placed("linear_cross_entropy", input, linear_weight, linear_bias)
    if weight is not None and _dim_of_classes("linear_cross_entropy", linear_weight) is not None:
        raise ValueError("linear_cross_entropy: weight is not supported with sharded classes")
    target, weight_of_target = placed.local(target), placed.local(weight_of_target)
    is_mean = reduction == "mean"
    called: CrossEntropy = CROSS_ENTROPY["sum" if is_mean else reduction]
    arguments = target, weight_of_target, weight, *numbers
    if placed.shard:
        called = _OF_SHARDS[called.reduction]
        arguments = target, *numbers, *placed.shard
    loss = called.apply(placed.input, placed.weight, arguments, placed.bias, chunk_mib)
    if is_mean:
        counts = target != numbers[0]  # `ignore_index`
        counted = counts if weight_of_target is None else weight_of_target * counts
        loss = loss / _divisor(counted, placed.mesh, placed.over_rows)
    if reduction == "none":
        return placed.whole(loss, placed.rows)
    return placed.whole(loss, _summed(placed.over_rows, _replicated(placed.mesh)))


def encoded(
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor],
    needs: tuple[bool, bool, bool],
    shard: tuple[str, int, int, int],
    *,
    reduction: str,
    ignore_index: int,
    softcap: float | None,
    scale: float,
    dtype: torch.dtype,
) -> str:
    """Returns the string of a call of ``fusedops::linear_rowwise`` of a rank's classes.

    As `losses.cross_entropy.encoded`, for a sum of rows or each row.

    Args:
        tensors: rows (M, D), this rank's weight and bias or None, and targets (M,).
        needs: whether the gradients of rows, weight and bias are wanted.
        shard: what `shard_of` returns.
        reduction, ignore_index, softcap, scale: as in `linear_cross_entropy`.
        dtype: the dtype of the products.
    Raises:
        NotRowwiseError: the operator has no kernel for them.
    """
    rows, weight, bias, target = tensors
    others = target, ignore_index, 0.0, softcap, scale, 0.0, *shard
    by_row = True, *[False] * (len(others) - 1)
    operands = Operands((rows,), (weight,), (bias,), others, by_row, dtype, None)
    flags = (*needs, *[False] * len(others))
    with torch.autocast(rows.device.type, enabled=False):
        loss = _OF_SHARDS[reduction]
        return identified(written(loss, operands, flags), loss, operands)


def log_probs_of_shards(
    input: Any,
    linear_weight: Any,
    others: tuple[Any, ...],
    linear_bias: Any,
    chunk_mib: float | None,
    entropy: bool,
) -> Any:
    """Returns the results of `linear_log_probs` for DTensors, DTensors if the input is one."""
    tokens, *numbers = others
    placed = _placed("linear_log_probs", input, linear_weight, linear_bias)
    called: OfTokens = LOG_PROBS[entropy]
    if placed.shard:
        called = _LOG_PROBS_OF_SHARDS[entropy]
    arguments = placed.local(tokens), *numbers, *placed.shard
    results = called.apply(placed.input, placed.weight, arguments, placed.bias, chunk_mib)
    if not entropy:
        return placed.whole(results, placed.rows)
    return tuple([placed.whole(result, placed.rows) for result in results])


def _dim_of_classes(op: str, linear_weight: Any) -> int | None:
    """Returns the dimension of the mesh along which the classes are sharded; None without one.

    Raises:
        TypeError: the weight is no DTensor.
        ValueError: it has other placements.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(linear_weight, DTensor):
        raise TypeError(f"{op}: input is a DTensor and linear_weight is not; distribute both")
    placements = linear_weight.placements
    sharded = placements.count(Shard(0))
    if sharded > 1 or sharded + placements.count(Replicate()) < len(placements):
        raise ValueError(
            f"{op}: linear_weight has placements {placements}, expected its classes sharded along "
            "one dimension of the mesh at most, Shard(0), and Replicate() along others"
        )
    return placements.index(Shard(0)) if sharded else None


def _replicated(mesh: Any) -> list[Any]:
    """Returns the placements of a tensor that all ranks have."""
    from torch.distributed.tensor import Replicate

    return [Replicate()] * mesh.ndim


def _distributed(t: Any, mesh: Any) -> Any:
    """Returns a DTensor as it is, and a plain tensor as one that all ranks have."""
    from torch.distributed.tensor import DTensor

    if isinstance(t, DTensor):
        return t
    return DTensor.from_local(t, mesh, _replicated(mesh), run_check=False)


def _placements_of_rows(input: Any, dim_of_classes: int | None) -> list[Any]:
    """Returns the input's placements without those of columns, and of the classes' dimension."""
    from torch.distributed.tensor import Shard

    placements = _replicated(input.device_mesh)
    for dim, placement in enumerate(input.placements):
        is_of_rows = isinstance(placement, Shard) and placement.dim < input.dim() - 1
        if is_of_rows and dim != dim_of_classes:
            placements[dim] = placement
    return placements


def _summed(dims: Sequence[bool], placements: Sequence[Any]) -> list[Any]:
    """Returns placements with `Partial`, a sum over ranks, along some dimensions of the mesh."""
    from torch.distributed.tensor import Partial

    return [Partial() if is_sum else p for is_sum, p in zip(dims, placements, strict=True)]


def _local_parameters(weight: Any, bias: Any, over_rows: Sequence[bool]) -> tuple[Tensor, Any]:
    """Returns this rank's weight and bias, whose gradients are sums over the ranks of rows."""
    from torch.distributed.tensor import DTensor

    gradients = _summed(over_rows, weight.placements)
    if isinstance(bias, DTensor):
        bias = bias.redistribute(weight.device_mesh, weight.placements)
        bias = waited(bias.to_local(grad_placements=gradients))
    return waited(weight.to_local(grad_placements=gradients)), bias


def _local(t: Any, mesh: Any, rows: Sequence[Any]) -> Any:
    """Returns this rank's rows of a tensor without a gradient; None for None."""
    if t is None:
        return None
    return waited(_distributed(t, mesh).redistribute(mesh, rows).to_local())


def shard_of(op: str, classes: int, mesh: Any, dim: int) -> tuple[str, int, int, int]:
    """Returns the group's name, the first class of this rank, all classes, and the most of a rank.

    A sharded dimension has shards of one size, and the last are smaller, or empty.
    """
    most = -(-classes // mesh.size(dim))
    if most * (mesh.size(dim) - 1) >= classes:
        raise ValueError(f"{op}: {classes} classes leave a rank of {mesh.size(dim)} without any")
    return mesh.get_group(dim).group_name, most * mesh.get_local_rank(dim), classes, most


def _divisor(counted: Tensor, mesh: Any, over_rows: Sequence[bool]) -> Tensor:
    """Returns the sum over all ranks of which targets count, or of their weights."""
    summed = counted.sum()
    total: Tensor = summed.to(torch.float64 if summed.dtype == torch.float64 else torch.float32)
    for dim, is_over in enumerate(over_rows):
        if is_over:
            torch.distributed.all_reduce(total, group=mesh.get_group(dim))
    return total
