"""Dropout masks of sharded tensors against one process's, on the processes of the command ``distributed``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import fusedops
from fusedops.core.launches.launch import runs_kernels

__all__ = ["SHAPE", "differences"]

_SIZES = (16, 24, 128)  # batch, sequence and features
SHAPE = "x".join(map(str, _SIZES))


@fusedops.rowwise(strict=True)
def _function(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


# Of ones, they give what they keep. Without kernels a row-wise function is PyTorch's own operators.
_OPERATORS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: fusedops.bias_dropout_add(x, None, None, p=0.5),
    lambda x: fusedops.bias_dropout_add_ln(x, None, None, None, None, p=0.5, return_sum=True)[1],
    lambda x: fusedops.bias_dropout_add_rms_norm(x, None, None, None, p=0.5, return_sum=True)[1],
    lambda x: fusedops.bias_act(x, None, "relu", p=0.5),
    _function,
)


def differences(device: torch.device) -> Iterator[tuple[str, int]]:
    """Yields each mesh, and in how many elements its masks differ from those of one process.

    The elements are those of outputs and gradients.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    ranks = dist.get_world_size()
    x = torch.ones(_SIZES, device=device)
    operators = _OPERATORS if runs_kernels(device.type) else _OPERATORS[:-1]
    alone = [_kept(operator, x.clone().requires_grad_()) for operator in operators]
    for sides in ((ranks,), *([(ranks // 2, 2)] if ranks > 2 and ranks % 2 == 0 else [])):
        mesh, differ = init_device_mesh(device.type, sides), 0
        for dims in itertools.permutations(range(3), len(sides)):
            placed = distribute_tensor(x, mesh, [Shard(dim) for dim in dims])
            for operator, expected in zip(operators, alone, strict=True):
                result: list[Any] = _kept(operator, placed.detach().requires_grad_())
                differ += sum(
                    int((t.full_tensor() != one).sum())
                    for t, one in zip(result, expected, strict=True)
                )
        yield "x".join(map(str, sides)), differ


def _kept(operator: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The output of a call and its gradient, which are zero where an element is dropped."""
    torch.manual_seed(1)
    out = operator(x)
    return [out.detach(), *torch.autograd.grad(out.sum(), x)]
