"""Cross-entropy of logits whose classes are sharded over ranks.

Each rank has the logits of its classes. Three numbers of each row go between ranks, four with label
smoothing, in chunks of rows; no logits do:

    rank 0   | classes 0 ... |     its logsumexp, the target's logit if it has it   -+
    rank 1   | ...     V - 1 |     its logsumexp, the target's logit if it has it   -+-> reduced

The gradient of a rank's logsumexp is the share of its classes in the softmax. The gradient of the
input is a sum over ranks, which the DTensor of the input says (`Partial`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.compat.distributed import waited
from ..core.launches import launch
from ..losses.cross_entropy import CROSS_ENTROPY, CrossEntropy, scores
from ..losses.operands import Operands

__all__ = ["cross_entropy_of_shards"]

# The groups of ranks that have the shards of one weight, by name.
_GROUPS: dict[str, Any] = {}


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
    own = target - offset
    is_own = (own >= 0) & (own < logits.shape[-1])
    picked = x.gather(-1, torch.where(is_own, own, 0).unsqueeze(-1)).squeeze(-1)
    picked = torch.where(is_own, picked, 0.0)
    if not label_smoothing:
        return torch.logsumexp(x, -1), picked
    return torch.logsumexp(x, -1), picked, x.sum(-1)


class _OfShards(CrossEntropy):
    """Cross-entropy of a rank's logits, from the numbers of all ranks."""

    combines = True

    def classes(self, operands: Operands) -> int:
        """Returns the number of all ranks' classes."""
        return int(self.named(operands, "classes"))

    def columns(self, operands: Operands) -> int:
        """Returns the most classes of a rank, so that all ranks have the same chunks."""
        return int(self.named(operands, "most"))

    def combined(
        self, operands: Operands, results: Sequence[Tensor], cotangents: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Returns the loss of each row, and the gradients of this rank's numbers."""
        smoothing = self.named(operands, "label_smoothing")
        z_loss, group = self.named(operands, "z_loss"), self.named(operands, "group")
        own, picked, *sums = results
        largest = own.clone()
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, _GROUPS[group])
        share = torch.exp(own - largest)
        packed = torch.stack([share, picked, *sums])
        torch.distributed.all_reduce(packed, group=_GROUPS[group])
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


_OF_SHARDS = {
    reduction: _OfShards(_numbers, reduction=reduction, name="linear_cross_entropy")
    for reduction in ("none", "sum")
}


def cross_entropy_of_shards(
    input: Any,
    linear_weight: Any,
    others: tuple[Any, ...],
    linear_bias: Any,
    chunk_mib: float | None,
    reduction: str,
) -> Any:
    """Returns the loss for DTensors; a plain tensor counts as one that all ranks have.

    The classes of the weight may be sharded along one dimension of the mesh, and the rows of the
    input along others. The result is a DTensor if the input is one.
    """
    from torch.distributed.tensor import DTensor, Shard

    target, weight_of_target, weight, *numbers = others
    dim = _dim_of_classes(linear_weight)
    mesh = linear_weight.device_mesh
    if weight is not None and dim is not None:
        raise ValueError("linear_cross_entropy: weight is not supported with sharded classes")
    if dim is not None and not launch.runs_kernels(linear_weight.device.type):
        # PyTorch's operators take whole logits.
        linear_weight, dim = linear_weight.redistribute(mesh, _replicated(mesh)), None
    is_plain = not isinstance(input, DTensor)
    input = _distributed(input, mesh)
    rows = _placements_of_rows(input, dim)
    over_rows = [isinstance(p, Shard) for p in rows]
    of_rows = _summed([other == dim for other in range(mesh.ndim)], rows)
    x = waited(input.redistribute(mesh, rows).to_local(grad_placements=of_rows))
    w, b = _local_parameters(linear_weight, linear_bias, over_rows)
    target = _local(target, mesh, rows)
    weight_of_target = _local(weight_of_target, mesh, rows)
    is_mean = reduction == "mean"
    called: CrossEntropy = CROSS_ENTROPY["sum" if is_mean else reduction]
    arguments = target, weight_of_target, weight, *numbers
    if dim is not None:
        called = _OF_SHARDS[called.reduction]
        arguments = target, *numbers, *_shard(linear_weight, mesh, dim)
    loss = called.apply(x, w, arguments, b, chunk_mib)
    if is_mean:
        counts = target != numbers[0]  # `ignore_index`
        counted = counts if weight_of_target is None else weight_of_target * counts
        loss = loss / _divisor(counted, mesh, over_rows)
    placed = rows if reduction == "none" else _summed(over_rows, _replicated(mesh))
    result = DTensor.from_local(loss, mesh, placed, run_check=False)
    return result.full_tensor() if is_plain else result


def _dim_of_classes(linear_weight: Any) -> int | None:
    """Returns the dimension of the mesh along which the classes are sharded; None without one.

    Raises:
        TypeError: the weight is no DTensor.
        ValueError: it has other placements.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    op = "linear_cross_entropy"
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


def _shard(weight: Any, mesh: Any, dim: int) -> tuple[str, int, int, int]:
    """Returns the group's name, the first class of this rank, all classes, and the most of a rank.

    A sharded dimension has shards of one size, and the last are smaller, or empty.
    """
    group = mesh.get_group(dim)
    _GROUPS[group.group_name] = group
    classes = weight.shape[0]
    most = -(-classes // mesh.size(dim))
    if most * (mesh.size(dim) - 1) >= classes:
        raise ValueError(
            f"linear_cross_entropy: {classes} classes leave a rank of {mesh.size(dim)} without any"
        )
    return group.group_name, most * mesh.get_local_rank(dim), classes, most


def _divisor(counted: Tensor, mesh: Any, over_rows: Sequence[bool]) -> Tensor:
    """Returns the sum over all ranks of which targets count, or of their weights."""
    summed = counted.sum()
    total: Tensor = summed.to(torch.float64 if summed.dtype == torch.float64 else torch.float32)
    for dim, is_over in enumerate(over_rows):
        if is_over:
            torch.distributed.all_reduce(total, group=mesh.get_group(dim))
    return total
