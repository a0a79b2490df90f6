"""Functions of DTensors that captured graphs call."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["OnDTensors", "from_local", "is_of_dtensors", "to_local"]


class OnDTensors:
    """A function of DTensors, as the target of a node.

    No pass takes it for an operator on plain tensors, although it may be one of PyTorch's.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        # FX writes the two names into a graph's code.
        self.__name__ = re.sub(r"\W", "_", str(getattr(function, "__name__", "call")))
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self._function(*args, **kwargs)


def is_of_dtensors(target: Any) -> bool:
    """Whether a node's target is a function of DTensors; its result may share their memory."""
    return isinstance(target, OnDTensors)


def to_local(gradients: tuple[Any, ...]) -> OnDTensors:
    """A function that returns a DTensor's local tensor, whose gradient has these placements."""

    def to_local(dtensor: Any) -> Any:
        return dtensor.to_local(grad_placements=gradients)

    return OnDTensors(to_local)


def from_local(placements: tuple[Any, ...], shape: torch.Size, stride: Sequence[int]) -> OnDTensors:
    """A function that returns a DTensor of a local tensor.

    Its second argument is a DTensor on the mesh: since PyTorch 2.13 a mesh is an input of the
    graph, and must not be another object.
    """
    from torch.distributed.tensor import DTensor

    def from_local(local: Any, reference: Any) -> Any:
        return DTensor.from_local(
            local,
            reference.device_mesh,
            placements,
            run_check=False,
            shape=shape,
            stride=tuple(stride),
        )

    return OnDTensors(from_local)
