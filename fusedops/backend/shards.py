"""Dropout masks of tensors that are sharded over ranks: the part of the mask that a rank draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from ..compiler.errors import NotRowwiseError
from ..core.calls.operator import Axes
from ..distributed.sharding import numbers
from .graphs import SHARD, are_numbers, name_of, value_of
from .programs import RegionProgram
from .regions import Region

__all__ = ["Shard", "is_of_shard", "numbers_of"]

_PERMUTING = frozenset({"permute", "transpose", "t"})


class Shard(NamedTuple):
    """The part of a tensor that a rank drops elements of.

    Attributes:
        mesh: the mesh.
        placements: the placements of the tensor on it.
        shape: the shape of the whole tensor.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[Any, ...]


def is_of_shard(node: fx.Node) -> bool:
    """Whether a node is a dropout whose mask is a part of the mask of a whole tensor."""
    return SHARD in node.meta


def numbers_of(region: Region, program: RegionProgram) -> tuple[int, ...]:
    """The numbers that locate this rank's part of the mask of a region; () for a whole mask.

    They follow the random state in the operator's seed: see `distributed.sharding.numbers`.

    Raises:
        NotRowwiseError: the part cannot be located.
    """
    dropouts = [node for node in region.nodes if name_of(node) == "native_dropout"]
    shards = {node.meta.get(SHARD) for node in dropouts}
    if len(shards) > 1:
        raise NotRowwiseError("its dropouts are of tensors that are sharded in different ways")
    shard: Shard | None = next(iter(shards), None)
    if shard is None:
        return ()
    dims = [placement.dim % len(shard.shape) for placement in shard.placements]
    axes = program.program.axes(program.program.record, list(map(value_of, program.inputs)))
    axes_of_mesh = None
    if are_numbers(shard.shape) and not _permutes(region) and not any(program.source.splits):
        axes_of_mesh = _axes_of(value_of(dropouts[0])[0], dims, program, axes)
    if axes_of_mesh is None:
        raise NotRowwiseError("this rank's part of the mask of its dropout is not known")
    rows = list(axes.rows)
    for dim, axis in zip(dims, axes_of_mesh, strict=True):
        rows[axis] = shard.shape[dim]
    ranks = list(map(shard.mesh.size, range(shard.mesh.ndim)))
    coordinate = shard.mesh.get_coordinate() or [0] * shard.mesh.ndim
    mask = (*rows, axes.parts, axes.columns)
    return tuple(numbers(mask, ranks, coordinate, axes_of_mesh))


def _permutes(region: Region) -> bool:
    """Whether dimensions of one tensor of a region may be others of another."""
    return not _PERMUTING.isdisjoint(map(name_of, region.nodes))


def _axes_of(
    dropped: Tensor, dims: Sequence[int], program: RegionProgram, axes: Axes
) -> tuple[int, ...] | None:
    """The axes of a program that dimensions of a tensor inside it are; None if unknown.

    They are those of the program's inputs and outputs with the tensor's shape.
    """
    labels = list(zip(map(value_of, program.inputs), axes.tensors, strict=True))
    labels += [(value_of(node), axes.outputs[number]) for node, number in program.outputs]
    alike = [of_dims for value, of_dims in labels if value.shape == dropped.shape]
    axes_of_dims = {tuple(map(of_dims.__getitem__, dims)) for of_dims in alike}
    if len(axes_of_dims) != 1:
        return None
    (known,) = axes_of_dims
    return None if None in known else known  # type: ignore[return-value]
