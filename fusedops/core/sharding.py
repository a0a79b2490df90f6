"""Calls on DTensors: placed as the call needs them, computed on each rank's tensors, and put together again.

A call has *axes*: those of its rows, and the columns. Rows do not depend on one another, so that a rank that has some of
them needs nothing of the others'; parameters are replicated, and of their gradients each rank has a partial sum. Where
columns do not depend on one another either they are sharded likewise; a norm adds up two numbers of a row.

A dropout mask is that of the whole tensor: with the seed a rank's kernels get numbers that say which part is theirs.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import compat, dropout
from .dropout import Dropout
from .operator import Axes, Operator, Tensors
from .parts import Place, parts, total, wholes
from .rng import NO_DROPOUT

__all__ = ["Layout", "distributes", "layout", "numbers", "planned", "replicated"]

# Columns whose keep decisions are drawn at once.
_LANES = 8


def distributes(tensors: Tensors) -> bool:
    """Whether one of them is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(t, module.DTensor) for t in tensors)


def replicated(tensors: Tensors) -> Tensors:
    """The tensors, with replicated DTensors of those that are none, where PyTorch's ``implicit_replication`` is on."""
    if torch.compiler.is_dynamo_compiling() or not compat.replicates_implicitly():
        return tensors
    from torch.distributed.tensor import DTensor, Replicate

    mesh = next(t.device_mesh for t in tensors if isinstance(t, DTensor))
    return [t if t is None or isinstance(t, DTensor)
            else DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False) for t in tensors]  # fmt: skip


class Move(NamedTuple):
    """How a tensor becomes this rank's.

    Attributes:
        name: of the argument, for messages.
        placements: what it is redistributed to; None if it is placed so already.
        gradient: the place of its gradient.
        sliced: of what each rank has all of: dimension, first index and number of those that this rank takes.
    """

    name: str
    placements: tuple[Any, ...] | None
    gradient: Place
    sliced: tuple[tuple[int, int, int], ...]


class Layout(NamedTuple):
    """How a call's axes are placed on a mesh.

    Attributes:
        mesh: all DTensors' mesh.
        axes: the call's.
        dims: of each dimension of the mesh, the axis that it shards; None for none.
        place: of this rank in the dimensions of the mesh, zeros on a rank that is not in it.
        member: whether it is.
    """

    mesh: Any
    axes: Axes
    dims: tuple[int | None, ...]
    place: tuple[int, ...]
    member: bool

    @property
    def splits_columns(self) -> bool:
        """Whether a rank has a part of each row."""
        return len(self.axes.rows) in self.dims

    def part(self, axis: int, size: int) -> tuple[int, int]:
        """The first index, and the number, of those that this rank has of an axis of ``size``."""
        if not self.member and axis < len(self.axes.rows):
            return 0, 0
        start = 0
        for at, dim in enumerate(self.dims):
            if dim == axis:
                first, size = _chunk(size, self.mesh.size(at), self.place[at])
                start += first
        return start, size

    def moves(self, op: Operator, constants: Any, tensors: Tensors) -> tuple[Move | None, ...]:
        """What happens to each DTensor."""
        module = sys.modules["torch.distributed.tensor"]
        return tuple([self._move(t, its, place in self.axes.carriers, f"{constants.op}: {op.argument(constants, place)}")
                      if isinstance(t, module.DTensor) else None
                      for place, (t, its) in enumerate(zip(tensors, self.axes.tensors, strict=True))])  # fmt: skip

    def _move(self, t: Any, its: tuple[int | None, ...], carries: bool, name: str) -> Move:
        from torch.distributed.tensor import Partial, Replicate, Shard

        placements = [Shard(its.index(dim)) if dim is not None and dim in its else Replicate() for dim in self.dims]
        gradients = [Partial() if dim is not None and dim not in its else placement
                     for dim, placement in zip(self.dims, placements, strict=True)]  # fmt: skip
        taken: list[int] = []
        if not carries:
            # What all ranks have of a parameter is taken apart here: `redistribute` would gather its gradient.
            taken = [at for at, placement in enumerate(placements) if placement.is_shard()]
            if not all(t.placements[at].is_replicate() for at in taken):
                taken = []
        for at in taken:
            placements[at], gradients[at] = Replicate(), Partial()
        moves = tuple(t.placements) != tuple(placements)
        sliced = []
        for axis in dict.fromkeys([self.dims[at] for at in taken]):
            assert axis is not None
            dim = its.index(axis)
            sliced.append((dim, *self.part(axis, t.shape[dim])))
        return Move(name, tuple(placements) if moves else None, Place(self.mesh, tuple(gradients), t.shape, moves),
                    tuple(sliced))  # fmt: skip

    def places(self, outs: Tensors) -> list[Place]:
        """Where the outputs are that this rank has a part of."""
        return [self._place(out, its) for out, its in zip(outs, self.axes.outputs, strict=False)]

    def _place(self, out: Tensor | None, its: tuple[int | None, ...]) -> Place:
        from torch.distributed.tensor import Replicate, Shard

        placements = tuple([Replicate() if dim is None else Shard(its.index(dim)) for dim in self.dims])
        sizes = (*self.axes.rows, self.axes.columns)
        shape = () if out is None else out.shape
        whole = [size if axis is None else sizes[axis] for axis, size in zip(its, shape, strict=out is not None)]
        return Place(self.mesh, placements, torch.Size(whole))

    def total(self, t: Tensor) -> Tensor:
        """The sum of numbers of rows over the ranks that have the same rows."""
        columns = len(self.axes.rows)
        return total(t, self.mesh, tuple([dim == columns for dim in self.dims])) if self.member else t

    def dropout(self, p: float) -> Dropout:
        """PyTorch's dropout of the whole tensor, as one process draws it, in this rank's part."""
        shape = (*self.axes.rows, self.axes.columns)

        def masked(h: Tensor, dtype: torch.dtype) -> Tensor:
            whole = torch.ones(shape, dtype=h.dtype, device=h.device)
            scale = dropout.dropout_of(p, NO_DROPOUT, self.axes.columns)(whole, dtype)
            for axis, size in enumerate(shape):
                scale = scale.narrow(axis, *self.part(axis, size))
            return h * scale.reshape(h.shape)  # of a scalar too

        return masked if p > 0.0 else dropout.none

    def seed(self, seed: Tensor | tuple[int, int], device: torch.device) -> Tensor:
        """A call's random state with `numbers`, on the device."""
        where = self.axes.mask, tuple([self.mesh.size(at) for at in range(self.mesh.ndim)]), self.place, self.dims
        if isinstance(seed, tuple):
            # A copy that blocks would wait for all that the GPU has still to do.
            return torch.tensor([*seed, *_kept_numbers(*where)], dtype=torch.int64).to(device, non_blocking=True)
        make = _numbers_on if torch.compiler.is_compiling() or compat.is_intercepted() else _kept_numbers_on
        return torch.cat([seed, make(*where, device)])


@dataclass(frozen=True, eq=False)
class Plan:
    """What calls with the same shapes and placements have in common.

    Attributes:
        layout: how the axes are placed.
        moves: what happens to each tensor that is a DTensor.
        places: where the outputs are, by their shapes on this rank.
    """

    layout: Layout
    moves: tuple[Move | None, ...]
    places: dict[Any, list[Place]] = field(default_factory=dict)

    def local(self, tensors: Tensors) -> list[Tensor | None]:
        """This rank's tensors; their gradients become DTensors again, those of parameters partial sums."""
        moved = [(_moved(t, move), move) for t, move in zip(tensors, self.moves, strict=True) if move is not None]
        own = iter(parts([t for t, _ in moved], [move.gradient for _, move in moved]))
        return [t if move is None else self._sliced(next(own), t, move, its)
                for t, move, its in zip(tensors, self.moves, self.layout.axes.tensors, strict=True)]  # fmt: skip

    def _sliced(self, found: Tensor, t: Any, move: Move, its: tuple[int | None, ...]) -> Tensor:
        if not self.layout.member:
            rows = range(len(self.layout.axes.rows))
            return found.new_empty([0 if axis in rows else size for axis, size in zip(its, t.shape, strict=True)])
        for dim, start, size in move.sliced:
            found = found.narrow(dim, start, size)
        return found

    def whole(self, outs: Tensors) -> tuple[Tensor | None, ...]:
        """DTensors of the outputs that this rank has a part of."""
        if torch.compiler.is_dynamo_compiling():
            return wholes(outs, self.layout.places(outs))
        shapes = tuple([None if out is None else out.shape for out in outs])
        places = self.places.get(shapes)
        if places is None:
            places = self.places[shapes] = self.layout.places(outs)
        return wholes(outs, places)


def _moved(t: Any, move: Move) -> Any:
    if move.placements is None:
        return t
    try:
        return t.redistribute(t.device_mesh, move.placements)
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ValueError(f"{move.name} is placed {tuple(t.placements)}, which PyTorch cannot make "
                         f"{list(move.placements)}") from error  # fmt: skip


# More than a program has calls with other shapes and placements.
_MOST_PLANS = 4096
_plans: dict[Any, Plan] = {}


def planned(op: Operator, constants: Any, tensors: Tensors, *, dropout: bool) -> Plan:
    """`layout` and `Layout.moves`; made once for each operator, placements, shapes and mesh."""
    try:
        key = _key(op, constants, tensors, dropout)
        plan = None if key is None else _plans.get(key)
    except TypeError:  # of symbols
        key = plan = None
    if plan is None:
        made = layout(op, constants, tensors, dropout=dropout)
        plan = Plan(made, made.moves(op, constants, tensors))
        if key is not None:
            if len(_plans) >= _MOST_PLANS:
                _plans.clear()
            _plans[key] = plan
    return plan


def _key(op: Operator, constants: Any, tensors: Tensors, dropout: bool) -> Any:
    """All that a plan depends on; None for a call whose plan is not kept.

    A mesh may equal one whose process group has ended: hence its number, which is no other's as the plan keeps the mesh.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    module = sys.modules["torch.distributed.tensor"]
    mesh: Any = None
    found: list[Any] = []
    for t in tensors:
        if t is None:
            found.append(None)
            continue
        if not isinstance(t, module.DTensor) or (mesh is not None and t.device_mesh is not mesh):
            return None
        mesh = t.device_mesh
        found.append((t.placements, t.shape, t.dtype))
    return op, constants, dropout, id(mesh), tuple(mesh.get_coordinate() or ()), tuple(found)


def layout(op: Operator, constants: Any, tensors: Tensors, *, dropout: bool) -> Layout:
    """Where a call is computed: each dimension of the mesh shards what it shards of the first tensor with rows that it shards.

    Raises:
        TypeError: not all tensors are DTensors.
        ValueError: they are on several meshes.
    """
    mesh = _mesh(op, constants, tensors)
    axes = op.axes(constants, tensors)
    dims: list[int | None] = []
    for at in range(mesh.ndim):
        votes = [_axis(t, its, at) for place, (t, its) in enumerate(zip(tensors, axes.tensors, strict=True))
                 if place in axes.carriers]  # fmt: skip
        dim = next((vote for vote in votes if vote is not None), None)
        dims.append(dim if not dropout or dim is None or _numbered(axes, mesh, dims, dim) else None)
    place = mesh.get_coordinate()
    return Layout(mesh, axes, tuple(dims), tuple(place or [0] * mesh.ndim), place is not None)


def _mesh(op: Operator, constants: Any, tensors: Tensors) -> Any:
    """The mesh of all tensors."""
    module = sys.modules["torch.distributed.tensor"]
    places = [place for place, t in enumerate(tensors) if isinstance(t, module.DTensor)]
    first, *_ = places
    mesh: Any = tensors[first].device_mesh  # type: ignore[union-attr]
    for place, t in enumerate(tensors):
        # A number in a tensor is one for all ranks, but its gradient would not be.
        if t is None or (place not in places and not t.dim() and not t.requires_grad):
            continue
        names = op.argument(constants, place), op.argument(constants, first)
        if place not in places:
            raise TypeError(f"{constants.op}: {names[0]} is a tensor of one rank, expected a DTensor as {names[1]} is; "
                            f"see DTensor.from_local and distribute_tensor")  # fmt: skip
        if t.device_mesh != mesh:  # type: ignore[attr-defined]
            raise ValueError(f"{constants.op}: {names[0]} is on {t.device_mesh}, expected {mesh} as {names[1]}")  # type: ignore[attr-defined]
    return mesh


def _axis(t: Any, its: tuple[int | None, ...], at: int) -> int | None:
    """The axis that a dimension of the mesh shards of a tensor."""
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(t, DTensor):
        return None
    placement = t.placements[at]
    return its[placement.dim] if type(placement) is Shard else None


def _numbered(axes: Axes, mesh: Any, dims: Sequence[int | None], dim: int) -> bool:
    """Whether `numbers` can tell the parts of a mask with one more dimension sharded."""
    ranks, columns = [mesh.size(at) for at in range(len(dims) + 1)], len(axes.rows)
    sharded = {axis for axis, count in zip((*dims, dim), ranks, strict=True) if axis is not None and count > 1}
    size, even = axes.columns, True
    for axis, count in zip((*dims, dim), ranks, strict=True):
        if axis == columns and count > 1:
            if not even or -(-size // count) % _LANES:
                return False
            even, size = size % count == 0, -(-size // count)
    return len(sharded - {0, columns}) <= 2


def _chunk(size: int, count: int, at: int) -> tuple[int, int]:
    """The first index and the size of a chunk, as `torch.chunk`."""
    most = -(-size // count)
    start = min(at * most, size)
    return start, min(most, size - start)


# --- dropout ------------------------------------------------------------------------------------------------------------


def _numbers_on(mask: Sequence[int], ranks: Sequence[int], place: Sequence[int], dims: Sequence[int | None],
                device: torch.device) -> Tensor:  # fmt: skip
    return torch.tensor(numbers(mask, ranks, place, dims), dtype=torch.int64, device=device)


# A copy to a GPU waits for it, and is recorded under graph capture: one for each placement.
_kept_numbers_on = functools.lru_cache(maxsize=1024)(_numbers_on)


def numbers(mask: Sequence[int], ranks: Sequence[int], place: Sequence[int], dims: Sequence[int | None]) -> list[int]:
    """What a kernel needs to tell where in the whole mask the rows and columns of a shard are.

    Row ``r`` of the shard is row ``base + r // outer * outer_apart + r % outer // inner * inner_apart + r % inner`` of the
    whole mask: the rows of a shard lie apart where another dimension than the first is sharded. Its columns begin with
    group ``first`` of the ``groups`` of eight that the whole mask's rows have.

    Args:
        mask: the whole mask's shape: rows, then the parts of each, and columns.
        ranks: of each dimension of the mesh.
        place: of this rank in them.
        dims: which dimension of the call each shards, None for none; of rows at most two others than the first. The
            columns are the one after the rows.
    Returns:
        base, outer, outer_apart, inner, inner_apart, groups, first.
    """
    *shape, columns = mask
    count = len(shape) - 1  # of rows, without the parts
    sizes, starts, apart = [*shape, columns], [0] * len(mask), set()
    for ranks_along, at, dim in zip(ranks, place, dims, strict=True):
        if dim is not None and ranks_along > 1:
            axis = dim if dim < count else len(shape)
            start, sizes[axis] = _chunk(sizes[axis], ranks_along, at)
            starts[axis] += start
            apart |= {axis} - {0, len(shape)}
    assert len(apart) <= 2 and (starts[-1] % _LANES == 0 or starts[-1] == columns), dims
    base = sum(start * math.prod(shape[dim + 1 :]) for dim, start in enumerate(starts[:-1]))
    found = [1 << 62, 0, 1 << 62, 0]
    for at, dim in zip((2, 0), sorted(apart, reverse=True), strict=False):
        found[at : at + 2] = max(math.prod(sizes[dim:-1]), 1), math.prod(shape[dim:])
    return [base, *found, -(-columns // _LANES), starts[-1] // _LANES]


_kept_numbers = functools.lru_cache(maxsize=1024)(numbers)
