"""Functions of DTensors that captured graphs call."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

__all__ = ["FromLocal", "OfShards", "OnDTensors", "ToLocal", "is_of_dtensors", "whole_of"]


class OnDTensors:
    """A function of DTensors, as the target of a node.

    No pass takes it for an operator on plain tensors, although it may be one of PyTorch's.

    Attributes:
        function: the function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        # FX writes the two names into a graph's code.
        self.__name__ = re.sub(r"\W", "_", str(getattr(function, "__name__", "call")))
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.function(*args, **kwargs)


def is_of_dtensors(target: Any) -> bool:
    """Whether a node's target is a function of DTensors; its result may share their memory."""
    return isinstance(target, OnDTensors)


class OfShards(OnDTensors):
    """A function that converts between DTensors and local tensors.

    Attributes:
        parameters: the arguments of its class.
    """

    def __init__(self, function: Callable[..., Any], *parameters: list[Any]) -> None:
        super().__init__(function)
        self.parameters = parameters


class ToLocal(OfShards):
    """A function that returns a DTensor's local tensor, whose gradient has these placements."""

    def __init__(self, gradients: Sequence[Any]) -> None:
        def to_local(dtensor: Any) -> Any:
            return dtensor.to_local(grad_placements=tuple(gradients))

        super().__init__(to_local, list(gradients))


def whole_of(node: fx.Node) -> fx.Node:
    """The DTensor that a node is this rank's part of; the node itself if it is no such part."""
    return node.all_input_nodes[0] if isinstance(node.target, ToLocal) else node


class FromLocal(OfShards):
    """A function that returns a DTensor of a local tensor, with these placements and sizes.

    Its second argument is a DTensor on the mesh: since PyTorch 2.13 a mesh is an input of the
    graph, and must not be another object.
    """

    def __init__(
        self, placements: Sequence[Any], shape: Sequence[int], stride: Sequence[int]
    ) -> None:
        from torch.distributed.tensor import DTensor

        def from_local(local: Any, reference: Any) -> Any:
            return DTensor.from_local(
                local,
                reference.device_mesh,
                tuple(placements),
                run_check=False,
                shape=torch.Size(shape),
                stride=tuple(stride),
            )

        super().__init__(from_local, list(placements), list(shape), list(stride))
