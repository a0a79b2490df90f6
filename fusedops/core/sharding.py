"""Sharding rules: with which placements of DTensors the registered operators compute shard by shard.

Rows do not depend on one another. Sharded along any of their dimensions they need no communication, parameters are
replicated, and of a parameter's gradient each rank has a partial sum. What is placed otherwise, DTensor redistributes
first. The rules are registered when the first DTensor comes, as the import of DTensor takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from . import compat, operators
from .operator import Operator

__all__ = ["add", "prepare"]

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
