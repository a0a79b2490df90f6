"""Cross-entropy of sharded classes and rows: losses and gradients are those of one process."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import fusedops
from ranks import run_ranks
from support import INTERPRETED

RANKS = 2
# 101 classes are 51 of one rank and 50 of the other.
LENGTH, COLUMNS, CLASSES = 12, 16, 101
# The sums of ranks are added in another order, in fp64.
TOLERANCE = 1e-13
# Reduction, label smoothing and z-loss.
OPTIONS = (("mean", 0.0, 0.0), ("mean", 0.1, 0.01), ("sum", 0.1, 0.0), ("none", 0.1, 0.01))
# How input, weight and targets are distributed: see `_distributed`.
KINDS = ("plain", "whole", "sequence", "data")


def _tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return input, weight, bias and targets, the same on each rank."""
    torch.manual_seed(0)
    x = torch.randn(2, LENGTH, COLUMNS, dtype=torch.float64)
    weight = torch.randn(CLASSES, COLUMNS, dtype=torch.float64)
    bias = torch.randn(CLASSES, dtype=torch.float64)
    target = torch.randint(0, CLASSES, (2, LENGTH))
    target[0, :5] = -100  # the ranks' rows have different numbers of targets
    return x, weight, bias, target


def _expected(reduction: str, smoothing: float, z_loss: float) -> tuple[Tensor, ...]:
    """Return the loss and its gradients by PyTorch."""
    x, weight, bias, target = _tensors()
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    logits = F.linear(*leaves).flatten(0, 1)
    flat = target.flatten()
    loss = F.cross_entropy(logits, flat, reduction=reduction, label_smoothing=smoothing)
    squares = torch.where(flat == -100, 0, z_loss * logits.logsumexp(-1).square())
    count = (flat != -100).sum()
    of_z = {"mean": squares.sum() / count, "sum": squares.sum(), "none": squares}[reduction]
    loss = loss + of_z
    return loss.detach(), *torch.autograd.grad(loss, leaves, _cotangent(loss))


def _cotangent(loss: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view(loss.shape)


def _distributed(kind: str, mesh: Any) -> tuple[Any, ...]:
    """Return input, weight, bias and targets as they meet in a model."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x, weight, bias, target = _tensors()
    rows = {"whole": Replicate(), "sequence": Shard(1), "data": Shard(0)}.get(kind)
    classes = Replicate() if kind == "data" else Shard(0)
    given_x: Any = x if rows is None else distribute_tensor(x, mesh, [rows])
    given_target: Any = distribute_tensor(target, mesh, [rows]) if kind == "data" else target
    parameters = [distribute_tensor(t, mesh, [classes]) for t in (weight, bias)]
    return *[t.requires_grad_() for t in (given_x, *parameters)], given_target


def _whole(t: Any) -> Tensor:
    whole: Tensor = t.full_tensor() if hasattr(t, "full_tensor") else t
    return whole


def _check(rank: int, store: str) -> None:
    """Compare all kinds, in one process of a rank."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    from torch.distributed.tensor import init_device_mesh

    mesh = init_device_mesh("cpu", (RANKS,))
    for reduction, smoothing, z_loss in OPTIONS:
        expected = _expected(reduction, smoothing, z_loss)
        for kind in KINDS:
            *leaves, target = _distributed(kind, mesh)
            x, weight, bias = leaves
            loss = fusedops.linear_cross_entropy(
                x,
                weight,
                target,
                linear_bias=bias,
                reduction=reduction,
                label_smoothing=smoothing,
                z_loss=z_loss,
                chunk_mib=0.006,  # chunks of 15 rows
            )
            whole = _whole(loss).flatten() if reduction == "none" else _whole(loss)
            whole.backward(_cotangent(whole))
            results = whole.detach(), *[_whole(leaf.grad) for leaf in leaves]
            for name, result, value in zip(
                ("loss", "x", "weight", "bias"), results, expected, strict=True
            ):
                torch.testing.assert_close(
                    result,
                    value,
                    rtol=TOLERANCE,
                    atol=TOLERANCE,
                    msg=functools.partial("{}: {}".format, f"{kind} {reduction} {name}"),
                )
    for temperature, softcap in ((1.0, None), (0.7, 3.0)):
        for kind in KINDS:
            _check_log_probs(mesh, kind, temperature, softcap)
    _check_numbers(mesh)
    _check_errors(mesh)
    dist.destroy_process_group()


def _check_log_probs(mesh: Any, kind: str, temperature: float, softcap: float | None) -> None:
    """Compare log-probabilities, entropies and gradients, without entropies, too."""
    x, weight, bias, target = _tensors()
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    logits = F.linear(*leaves)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, -1)
    picked = log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    expected = picked, -(log_p.exp() * log_p).sum(-1)
    cotangents = [_cotangent(expected[0]), 2 - _cotangent(expected[0]).square()]
    for count in (1, 2):
        gradients = torch.autograd.grad(
            expected[:count], leaves, cotangents[:count], retain_graph=True
        )
        *ours, tokens = _distributed(kind, mesh)
        results = fusedops.linear_log_probs(
            *ours[:2],
            tokens.clamp(min=0),
            linear_bias=ours[2],
            temperature=temperature,
            softcap=softcap,
            entropy=count == 2,
            chunk_mib=0.006,
        )
        whole = [_whole(result) for result in (results if count == 2 else [results])]
        torch.autograd.backward(whole, cotangents[:count])
        pairs = zip(
            [*whole, *[_whole(leaf.grad) for leaf in ours]],
            [*expected[:count], *gradients],
            strict=True,
        )
        for result, value in pairs:
            torch.testing.assert_close(result, value, rtol=TOLERANCE, atol=10 * TOLERANCE)


def _check_numbers(mesh: Any) -> None:
    """Check that at most 16 bytes of a row are reduced for the loss, and no logits."""
    if not INTERPRETED:
        return
    from torch.distributed.tensor import Shard, distribute_tensor

    x, weight, _, target = _tensors()
    sharded = distribute_tensor(weight.float(), mesh, [Shard(0)])
    sizes = []

    def counted(t: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(t.numel() * t.element_size())
        return reduced(t, *args, **kwargs)

    reduced = dist.all_reduce
    with mock.patch.object(dist, "all_reduce", counted):
        fusedops.linear_cross_entropy(x.float(), sharded, target, label_smoothing=0.1)
        rows = int((target != -100).sum())
        assert 0 < sum(sizes) <= 16 * rows
        sizes.clear()
        fusedops.linear_log_probs(x.float(), sharded, target.clamp(min=0), entropy=True)
        assert 0 < sum(sizes) <= 16 * target.numel()


def _check_errors(mesh: Any) -> None:
    """Check the errors of what is not supported."""
    from torch.distributed.tensor import Shard, distribute_tensor

    x, weight, _, target = _tensors()
    columns = distribute_tensor(weight, mesh, [Shard(1)])
    with pytest.raises(ValueError, match=r"placements .*expected its classes"):
        fusedops.linear_cross_entropy(x, columns, target)
    with pytest.raises(TypeError, match="linear_weight is not"):
        fusedops.linear_cross_entropy(distribute_tensor(x, mesh, [Shard(0)]), weight, target)
    sharded = distribute_tensor(weight, mesh, [Shard(0)])
    with pytest.raises(ValueError, match="weight is not supported"):
        fusedops.linear_cross_entropy(x, sharded, target, weight=torch.rand(CLASSES).double())
    own = fusedops.linear_rowwise(lambda logits: logits.logsumexp(-1))
    with pytest.raises(TypeError, match="linear_weight or lora is a DTensor"):
        own(x, sharded)
    pair = x[..., :2], weight[:, :2]
    for of_weight in (sharded, weight):
        lora = pair if of_weight is sharded else (pair[0], sharded[:, :2])
        with pytest.raises(TypeError, match="lora is not supported with DTensors"):
            fusedops.linear_cross_entropy(x, of_weight, target, lora=lora)
        with pytest.raises(TypeError, match="lora is not supported with DTensors"):
            fusedops.linear_log_probs(x, of_weight, target, lora=lora)
    if INTERPRETED:
        with pytest.raises(IndexError, match=f"token {CLASSES} is out"):
            fusedops.linear_log_probs(x, sharded, torch.full_like(target, CLASSES))
        target[1, 1] = CLASSES
        with pytest.raises(IndexError, match=f"target {CLASSES} of row {LENGTH + 1}"):
            fusedops.linear_cross_entropy(x, sharded, target)


def test_sharded_losses_are_those_of_one_process(tmp_path: Path) -> None:
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        run_ranks(_check, (str(tmp_path / "store"),), RANKS, "torch.distributed.tensor")
