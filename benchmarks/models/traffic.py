"""The collectives of a step, counted, and the bytes that they move."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Traffic"]


class Traffic(TorchDispatchMode):
    """Counts the collectives of a block by name, and the bytes of the larger side of each, on this process."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """DTensor's own operators are left to it: what it calls comes by again."""
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if func.namespace in ("_c10d_functional", "c10d") and not name.startswith(
            ("wait_", "_wrap_", "barrier")
        ):
            self.counts[name] += 1
            self.bytes += max(
                _bytes(args), _bytes(result if func.namespace == "_c10d_functional" else ())
            )
        return result

    def minus(self, other: Traffic) -> Traffic:
        """Subtracts the traffic of another block from this one, and returns this one."""
        self.counts.subtract(other.counts)
        self.bytes -= other.bytes
        return self

    def __str__(self) -> str:
        return " ".join(f"{name}:{count}" for name, count in sorted(self.counts.items()) if count)


def _bytes(values: Any) -> int:
    """The bytes of the largest of several values, each a tensor or a list of tensors."""
    values = (values,) if isinstance(values, torch.Tensor) else values
    return max([0, *map(_all_bytes, values)])


def _all_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.itemsize
    return sum(map(_all_bytes, value)) if isinstance(value, list | tuple) else 0
