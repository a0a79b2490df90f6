"""Meshes and placements of DTensors in the text of a graph, and shards that differ between ranks.

A graph is stored once for all ranks of a mesh. So a mesh is described by its shape and the names of
its dimensions, and not by its ranks.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable
from typing import Any

from torch import fx

from ..core.compat.distributed import is_dtensor, is_mesh
from .fx import conversion, leaves

__all__ = [
    "decoded_placement",
    "described",
    "encoded_placement",
    "has_equal_shards",
    "meshes_of",
    "parameters_of",
]


def described(mesh: Any) -> list[Any]:
    """The type of a mesh's devices, its shape, and the names of its dimensions."""
    return [mesh.device_type, list(mesh.shape), list(mesh.mesh_dim_names or ())]


def meshes_of(graph: fx.Graph, inputs: Iterable[Any]) -> list[Any]:
    """The meshes of a graph from Dynamo, each once: of its inputs, and of its functions."""
    values = list(inputs)
    for node in graph.nodes:
        values += leaves(parameters_of(node.target))
    meshes: list[Any] = []
    for value in values:
        mesh = value.device_mesh if is_dtensor(value) else value
        if is_mesh(mesh) and mesh not in meshes:
            meshes.append(mesh)
    return meshes


def parameters_of(target: Any) -> list[Any]:
    """The arguments that a function of DTensors holds, positional ones and those by keyword.

    Up to PyTorch 2.12 Dynamo puts meshes and placements into functions of its own.
    """
    if not conversion(target) or getattr(target, "__closure__", None) is None:
        return []
    held = inspect.getclosurevars(target).nonlocals
    return [held["args_as_value"], held["kwargs_as_value"]]


# --- placements -----------------------------------------------------------------------------------


def encoded_placement(placement: Any) -> list[Any] | None:
    """A placement as JSON; None for other values, and for placements of other classes."""
    name = type(placement).__name__
    if _PLACEMENTS.keys().isdisjoint((name,)) or type(placement) is not _class_of(name):
        return None
    return [name, *map(functools.partial(getattr, placement), _PLACEMENTS[name])]


def decoded_placement(name: str, *values: Any) -> Any:
    """A placement from JSON."""
    if name not in _PLACEMENTS:
        raise KeyError(name)
    return _class_of(name)(*values)


# The classes of placements, and the attributes that their constructors take.
_PLACEMENTS: dict[str, tuple[str, ...]] = {
    "Replicate": (),
    "Shard": ("dim",),
    "Partial": ("reduce_op",),
}


def _class_of(name: str) -> Any:
    from torch.distributed import tensor

    return getattr(tensor, name)


def has_equal_shards(dtensor: Any) -> bool:
    """Whether the local tensors of a DTensor have one shape on all ranks."""
    parts = [1] * dtensor.dim()
    for size, placement in zip(dtensor.device_mesh.shape, dtensor.placements, strict=True):
        if encoded_placement(placement) is None:
            return False
        if placement.is_shard():
            parts[placement.dim] *= size
    return not any(map(math.fmod, dtensor.shape, parts))
