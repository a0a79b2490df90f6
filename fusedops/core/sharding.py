"""Sharding rules: with which placements of DTensors the registered operators compute shard by shard.

Rows do not depend on one another. Sharded along any of their dimensions they need no communication, parameters are
replicated, and of a parameter's gradient each rank has a partial sum. What is placed otherwise, DTensor redistributes
first. The rules are registered when the first DTensor comes, as the import of DTensor takes seconds.

A dropout mask is that of the whole tensor: with the seed a rank's kernels get numbers that say which rows theirs are.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import compat
from .operator import Operator, Tensors

__all__ = ["add", "numbers", "placed", "prepare", "replicated"]

# Reads constants, dtypes, and whether a backward will follow, out of a registered operator's arguments.
_Decode: TypeAlias = Callable[..., tuple[Any, Any, bool]]
_waiting: list[tuple[Operator, _Decode]] = []


def add(op: Operator, decode: _Decode) -> None:
    """Remembers an operator whose rules `prepare` registers."""
    _waiting.append((op, decode))


@compat.constant_when_traced
def prepare() -> None:
    """Registers the rules of all operators, if there may be DTensors."""
    if "torch.distributed.tensor" in sys.modules:
        while _waiting:
            _register(*_waiting.pop())


def _placement(op: Operator, constants: Any, name: str, dim: int | None) -> Any:
    """The placement of the tensor of that name where rows are sharded along ``dim``, or replicated if it is None."""
    from torch.distributed.tensor import Replicate, Shard

    if dim is None or not (name == "stats" or op.has_rows(constants, name)):
        return Replicate()
    return Shard(dim + 1) if name == "stats" else Shard(dim)


def _register(op: Operator, decode: _Decode) -> None:
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor.experimental import register_sharding

    count, read = len(op.tensors), op.visible + len(op.saved)

    def rules(constants: Any, given: Sequence[tuple[str, Any]], rest: int, written: Sequence[tuple[str, bool]],
              dims: int) -> list[Any]:  # fmt: skip
        """Without sharding, and for each dimension of rows, the placements of what is written, and of what is read."""
        found = []
        for dim in (None, *range(op.leading(constants, dims))):
            outs = []
            for name, there in written:
                place = _placement(op, constants, name, dim if there else None)
                # A gradient of a tensor without rows is a sum over them.
                sums = there and dim is not None and name in op.tensors and place.is_replicate()
                outs.append(Partial() if sums else place)
            ins: list[Any] = []
            for name, value in given:
                many = value if isinstance(value, (list, tuple)) else (value,)
                ins += [None if each is None else _placement(op, constants, name, dim) for each in many]
            found.append((outs, ins + [None] * rest))
        return found

    def of_forward(*args: Any) -> list[Any]:
        _, _, call, *floats = args[count + 1 :]
        constants, dtypes, saves = decode(op, call, tuple(floats))
        there = op.writes(constants, dtypes, dropout=args[count] is not None, saves=saves)
        first = args[op.first]
        dims = first[0].ndim if op.variadic else first.ndim
        given = list(zip((*op.tensors, "seed"), args[: count + 1], strict=True))
        return rules(constants, given, len(args) - count - 1, list(zip(op.outputs, there, strict=True)), dims)

    def of_backward(*args: Any) -> list[Any]:
        _, needs, _, call, *floats = args[read + 1 :]
        constants, _, _ = decode(op, call, tuple(floats))
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
    """The tensors of a call, and its seed with `numbers` for a kernel to tell the rows of this rank.

    All DTensors are placed as one of the rules says, the one for the placement of the first tensor with rows: so nothing is
    left for DTensor to move, after which the numbers would be those of other rows.
    """
    known = zip(tensors, names, strict=True)
    first = next((t for t, name in known if t is not None and op.has_rows(constants, name)), None)
    module = sys.modules.get("torch.distributed.tensor")
    if seed is None or module is None or not isinstance(first, module.DTensor):
        return tensors, seed
    mesh, leading, shards = first.device_mesh, op.leading(constants, first.ndim), [1] * first.ndim
    dims: list[int | None] = []
    for at, placement in enumerate(first.placements):
        dim, ranks = getattr(placement, "dim", 0), mesh.size(at)
        keeps = type(placement) is module.Shard and dim < leading and first.shape[dim] >= shards[dim] * ranks
        # No more shards than rows, as in the rules; and two sharded dimensions beside the first, as in the numbers.
        keeps = keeps and (dim == 0 or ranks == 1 or sum(n > 1 for i, n in enumerate(shards) if i not in (0, dim)) < 2)
        shards[dim] *= ranks if keeps else 1
        dims.append(dim if keeps else None)
    given: list[Any] = list(tensors)
    tensors = [t.redistribute(mesh, [_placement(op, constants, name, dim) for dim in dims])
               if isinstance(t, module.DTensor) else t for t, name in zip(given, names, strict=True)]  # fmt: skip
    if isinstance(seed, module.DTensor):
        seed = seed.to_local()
    place = mesh.get_coordinate() or [0] * mesh.ndim  # None on a rank that is not in the mesh, and has no rows
    sizes = tuple([mesh.size(at) for at in range(mesh.ndim)])
    device = first.to_local().device
    rows = tuple(first.shape[:leading]), sizes, tuple(place), tuple(dims), device
    make = _numbers_on if torch.compiler.is_compiling() or compat.is_intercepted() else _kept_numbers_on
    seed = torch.cat([seed[:2].to(device), make(*rows)])
    return tensors, replicated(seed, first)


def replicated(t: Tensor, like: Any) -> Any:
    """A tensor of this rank as one that all ranks of ``like`` have; itself where ``like`` is no DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(like, module.DTensor):
        return t
    mesh = like.device_mesh
    return module.DTensor.from_local(t, mesh, [module.Replicate()] * mesh.ndim, run_check=False)


def _numbers_on(shape: Sequence[int], ranks: Sequence[int], place: Sequence[int], dims: Sequence[int | None],
                device: torch.device) -> Tensor:  # fmt: skip
    return torch.tensor(numbers(shape, ranks, place, dims), dtype=torch.int64, device=device)


# A copy to a GPU waits for it: one for each placement.
_kept_numbers_on = functools.lru_cache(maxsize=1024)(_numbers_on)


def numbers(shape: Sequence[int], ranks: Sequence[int], place: Sequence[int], dims: Sequence[int | None]) -> list[int]:
    """What a kernel needs to tell the whole tensor's index of each row of a shard.

    Row ``r`` of the shard is row ``base + r // outer * outer_apart + r % outer // inner * inner_apart + r % inner`` of the
    whole tensor: the rows of a shard lie apart where another dimension than the first is sharded.

    Args:
        shape: the whole tensor's rows.
        ranks: of each dimension of the mesh.
        place: of this rank in them.
        dims: which dimension of the tensor each shards, None for none; at most two others than the first.
    Returns:
        base, outer, outer_apart, inner, inner_apart.
    """
    sizes, starts, apart = list(shape), [0] * len(shape), set()
    for count, at, dim in zip(ranks, place, dims, strict=True):
        if dim is not None and count > 1:  # as `torch.chunk`
            most = -(-sizes[dim] // count)
            start = min(at * most, sizes[dim])
            starts[dim] += start
            sizes[dim] = min(most, sizes[dim] - start)
            apart |= {dim} - {0}
    assert len(apart) <= 2, dims
    base = sum(start * math.prod(shape[dim + 1 :]) for dim, start in enumerate(starts))
    found = [1 << 62, 0, 1 << 62, 0]
    for at, dim in zip((2, 0), sorted(apart, reverse=True), strict=False):
        found[at : at + 2] = max(math.prod(sizes[dim:]), 1), math.prod(shape[dim:])
    return [base, *found]
