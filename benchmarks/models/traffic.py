"""Counts the collectives of a step and the bytes that they move."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Traffic"]


class Traffic(TorchDispatchMode):
    """Context manager: counts the collectives of a block on this process, by name, and their bytes.

    The bytes of a collective are those of its input or its output, whichever is larger. The
    functions that torch.compile compiles must have been compiled before.
    """

    # Checkpointed blocks that are compiled save the random state by an operator of this kind.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.bytes = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True: compiled functions run as they do without this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts a collective. DTensor's operators are counted when it calls them on shards."""
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        is_functional = func.namespace == "_c10d_functional"
        is_collective = is_functional or func.namespace == "c10d"
        if is_collective and not name.startswith(("wait_", "_wrap_", "barrier")):
            self.counts[name] += 1
            # Only a functional collective returns its output; others write to an argument.
            outputs = result if is_functional else ()
            self.bytes += max(_bytes(args), _bytes(outputs))
        return result

    def minus(self, other: Traffic) -> Traffic:
        """Subtracts the traffic of another block from this one, and returns this one."""
        self.counts.subtract(other.counts)
        self.bytes -= other.bytes
        return self

    def __str__(self) -> str:
        return " ".join(f"{name}:{count}" for name, count in sorted(self.counts.items()) if count)


def _bytes(values: Any) -> int:
    """Returns the bytes of the largest of several values, each a tensor or a list of tensors."""
    if isinstance(values, torch.Tensor):
        values = (values,)
    return max([0, *map(_all_bytes, values)])


def _all_bytes(value: Any) -> int:
    """Returns the bytes of a tensor or of all tensors in a list; 0 for another value."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.itemsize
    if isinstance(value, list | tuple):
        return sum(map(_all_bytes, value))
    return 0
