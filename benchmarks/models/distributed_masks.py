"""Compares the dropout masks of sharded tensors with those of one process.

The command ``python -m benchmarks distributed`` calls `differences` in each of its processes.
"""

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
def _rowwise_dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


# For an input of ones, outputs and gradients are zero where an element is dropped. The row-wise
# function comes last, and is compared only where kernels run: elsewhere it is PyTorch's own dropout,
# whose masks are not those of this package.
_OPERATORS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: fusedops.bias_dropout_add(x, None, None, p=0.5),
    lambda x: fusedops.bias_dropout_add_ln(x, None, None, None, None, p=0.5, return_sum=True)[1],
    lambda x: fusedops.bias_dropout_add_rms_norm(x, None, None, None, p=0.5, return_sum=True)[1],
    lambda x: fusedops.bias_act(x, None, "relu", p=0.5),
    _rowwise_dropout,
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
    of_one_process = [_results(operator, x.clone().requires_grad_()) for operator in operators]
    meshes: list[tuple[int, ...]] = [(ranks,)]
    if ranks > 2 and ranks % 2 == 0:
        meshes.append((ranks // 2, 2))
    for sides in meshes:
        mesh, count = init_device_mesh(device.type, sides), 0
        for dims in itertools.permutations(range(3), len(sides)):
            sharded = distribute_tensor(x, mesh, [Shard(dim) for dim in dims])
            for operator, expected in zip(operators, of_one_process, strict=True):
                results: list[Any] = _results(operator, sharded.detach().requires_grad_())
                for result, expected_result in zip(results, expected, strict=True):
                    count += int((result.full_tensor() != expected_result).sum())
        yield "x".join(map(str, sides)), count


def _results(operator: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Returns the output and the gradient of a call, always with the same seed."""
    torch.manual_seed(1)
    out = operator(x)
    return [out.detach(), *torch.autograd.grad(out.sum(), x)]
