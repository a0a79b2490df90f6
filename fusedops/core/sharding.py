"""Sharding rules: with which placements of DTensors the registered operators compute shard by shard.

Rows do not depend on one another. Sharded along any of their dimensions they need no communication, parameters are
replicated, and of a parameter's gradient each rank has a partial sum. What is placed otherwise, DTensor redistributes
first. The rules are registered when the first DTensor comes, as the import of DTensor takes seconds.

A dropout mask is that of the whole tensor: with the seed a rank's kernels get numbers that say which rows theirs are.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import compat
from .operator import Operator, Tensors

__all__ = ["add", "placed", "prepare"]

_waiting: list[Operator] = []


def add(op: Operator) -> None:
    """Remembers an operator whose rules `prepare` registers."""
    _waiting.append(op)


@compat.constant_when_traced
def prepare() -> None:
    """Registers the rules of all operators, if there may be DTensors."""
    if "torch.distributed.tensor" in sys.modules:
        while _waiting:
            _register(_waiting.pop())


def _register(op: Operator) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    from . import operators

    count, read = len(op.tensors), op.visible + len(op.saved)

    def rules(constants: Any, read: Sequence[tuple[str, Any]], rest: int, written: Sequence[tuple[str, bool]],
              dims: int) -> list[Any]:  # fmt: skip
        """For each dimension of rows, and for no sharding, the placements of what is written, and of what is read."""
        found = []
        for dim in (*range(op.leading(constants, dims)), None):

            def place(name: str, partial: bool = False, dim: int | None = dim) -> Any:
                if dim is None or name == "seed":
                    return Replicate()
                if name == "stats":
                    return Shard(dim + 1)
                if op.has_rows(constants, name):
                    return Shard(dim)
                return Partial() if partial else Replicate()

            outs = [place(name, partial=True) if there else Replicate() for name, there in written]
            ins: list[Any] = []
            for name, value in read:
                many = value if isinstance(value, (list, tuple)) else (value,)
                ins += [None if each is None else place(name) for each in many]
            found.append((outs, ins + [None] * rest))
        return found

    def of_forward(*args: Any) -> list[Any]:
        _, _, call, *numbers = args[count + 1 :]
        constants, dtypes, saves = operators.decode(op, call, tuple(numbers))
        there = op.writes(constants, dtypes, dropout=args[count] is not None, saves=saves)
        first = args[op.first]
        first = first[0] if op.variadic else first
        read = zip((*op.tensors, "seed"), args[: count + 1], strict=True)
        return rules(
            constants, list(read), len(args) - count - 1, list(zip(op.outputs, there, strict=True)), first.ndim
        )

    def of_backward(*args: Any) -> list[Any]:
        needs, _, _, call, *numbers = args[read + 1 :]
        constants, _, _ = operators.decode(op, call, tuple(numbers))
        written = [(name, digit == "1") for name, digit in zip(op.tensors, needs, strict=True)]
        names = (*op.outputs[: op.visible], *op.saved, "seed")
        given = list(zip(names, args[: read + 1], strict=True))
        dims = next(value.ndim for name, value in given if value is not None and op.has_rows(constants, name))
        return rules(constants, given, len(args) - read - 1, written, dims)

    register_sharding(getattr(torch.ops.fusedops, f"{op.name}_forward").default)(of_forward)
    register_sharding(getattr(torch.ops.fusedops, f"{op.name}_backward").default)(of_backward)


# --- dropout ------------------------------------------------------------------------------------------------------------


def placed(op: Operator, constants: Any, names: Sequence[str], tensors: Tensors, seed: Tensor | None,
           ) -> tuple[Tensors, Tensor | None]:  # fmt: skip
    """The tensors of a call and its seed: with dropout, DTensors with rows are placed alike, and the seed says how."""
    first = next(
        (t for t, name in zip(tensors, names, strict=True) if t is not None and op.has_rows(constants, name)), None
    )
    module = sys.modules.get("torch.distributed.tensor")
    if seed is None or module is None or not isinstance(first, module.DTensor):
        return tensors, seed
    mesh, replicated = first.device_mesh, module.Replicate()
    leading, placements, shards = op.leading(constants, first.ndim), [], [1] * first.ndim
    for at, placement in enumerate(first.placements):
        keeps = type(placement) is module.Shard and placement.dim < leading
        if keeps:
            shards[placement.dim] *= mesh.size(at)
            # As the rules do, and as `numbers` can tell: of no more shards than rows, and of two dimensions and the first.
            keeps = first.shape[placement.dim] >= shards[placement.dim] and sum(n > 1 for n in shards[1:]) <= 2
        placements.append(placement if keeps else replicated)
    given: list[Any] = list(tensors)
    tensors = [t.redistribute(mesh, placements) if t is not None and op.has_rows(constants, name) else t
               for t, name in zip(given, names, strict=True)]  # fmt: skip
    if isinstance(seed, module.DTensor):
        seed = seed.to_local()
    known = numbers(tuple(first.shape[:leading]), [mesh.size(i) for i in range(mesh.ndim)],
                    list(mesh.get_coordinate()), [getattr(p, "dim", None) for p in placements])  # fmt: skip
    device = first.to_local().device
    seed = torch.cat([seed[:2].to(device), torch.tensor(known, dtype=torch.int64, device=device)])
    return tensors, module.DTensor.from_local(seed, mesh, [replicated] * mesh.ndim, run_check=False)


def numbers(shape: Sequence[int], ranks: Sequence[int], place: Sequence[int], dims: Sequence[int | None]) -> list[int]:
    """What a kernel needs to tell which rows of all a shard's are.

    Row ``r`` of the shard is row ``base + r // outer * outer_apart + r % outer // inner * inner_apart + r % inner`` of the
    whole tensor: the rows of a shard lie apart where another dimension than the first is sharded.

    Args:
        shape: the whole tensor's rows.
        ranks: of each dimension of the mesh.
        place: of this rank in them.
        dims: which dimension of the tensor each shards, None for none.
    Returns:
        base, outer, outer_apart, inner, inner_apart.
    """
    sizes, starts = list(shape), [0] * len(shape)
    for count, at, dim in zip(ranks, place, dims, strict=True):
        if dim is not None:  # as `torch.chunk`
            most = -(-sizes[dim] // count)
            start = min(at * most, sizes[dim])
            starts[dim] += start
            sizes[dim] = min(most, sizes[dim] - start)
    base = sum(start * math.prod(shape[dim + 1 :]) for dim, start in enumerate(starts))
    found = [1 << 62, 0, 1 << 62, 0]
    for place_of, dim in zip((2, 0), sorted({d for d in dims if d}, reverse=True), strict=False):
        found[place_of : place_of + 2] = max(math.prod(sizes[dim:]), 1), math.prod(shape[dim:])
    return [base, *found]
