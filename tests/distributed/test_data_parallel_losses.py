"""Losses of matrix products in data parallel training: gradients are those of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fusedops
import interpreter
from fusedops.core.launches import launch
from ranks import run_ranks
from support import INTERPRETED

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not INTERPRETED, reason="gloo's processes have CPUs"),
]
RANKS = 2


class _Model(nn.Module):
    """An embedding, a layer, and a head, whose weight may be the embedding's."""

    def __init__(self, *, tied: bool, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction
        self.embedding, self.layer = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 11)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, target: Tensor, *, eager: bool = False) -> Tensor:
        x = torch.tanh(self.layer(self.embedding(ids)))
        if eager:
            logits = self.head(x).flatten(0, 1)
            return F.cross_entropy(logits, target.flatten(), reduction=self.reduction).mean()
        return fusedops.linear_cross_entropy(
            x, self.head.weight, target, linear_bias=self.head.bias, reduction=self.reduction
        ).mean()


def _model(**options: Any) -> _Model:
    torch.manual_seed(1)
    return _Model(**options)


def _check(model: nn.Module, ids: Tensor, target: Tensor, **options: Any) -> None:
    """Compares the gradients of a rank's backward with those of one process."""
    rank = dist.get_rank()
    with launch.record() as kernels:
        loss = model(ids[rank], target[rank])
    assert kernels == ["forward_kernel", "backward_kernel"][: 1 + (options["reduction"] == "mean")]
    loss.backward()
    expected = _model(**options)
    losses = [expected(ids[r], target[r], eager=True) for r in range(RANKS)]
    (sum(losses) / RANKS).backward()
    of_one = {name: p.grad for name, p in expected.named_parameters()}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        torch.testing.assert_close(gradient, of_one[name.removeprefix("module.")])


def _work(rank: int, store: str) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    interpreter.install()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(5)
    ids, target = (torch.randint(11, (RANKS, 2, 3)) for _ in range(2))
    target[1, 0, 1] = -100
    for tied, reduction in ((False, "mean"), (True, "mean"), (True, "none")):
        options = {"tied": tied, "reduction": reduction}
        replicated = DistributedDataParallel(_model(**options))
        with replicated.no_sync():
            replicated(ids[rank], target[rank]).backward()
        replicated.zero_grad(set_to_none=False)
        _check(replicated, ids, target, **options)
        for reshards in (True, False):
            sharded = _model(**options)
            if not tied:
                fully_shard(sharded.embedding, mesh=mesh)
            fully_shard(sharded, mesh=mesh, reshard_after_forward=reshards)
            _check(sharded, ids, target, **options)
    dist.destroy_process_group()


def test_gradients_of_two_processes(tmp_path: Path) -> None:
    """DistributedDataParallel after `no_sync`, and FSDP2, with tied weights and without."""
    run_ranks(_work, (str(tmp_path / "store"),), RANKS)
