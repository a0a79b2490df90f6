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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import compat, dropout
from .dropout import Dropout
from .operator import Axes, Operator, Tensors
from .rng import NO_DROPOUT

__all__ = ["Layout", "distributes", "layout", "numbers", "replicated"]

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

    def local(self, op: Operator, constants: Any, tensors: Tensors) -> list[Tensor | None]:
        """This rank's tensors; their gradients become DTensors again, those of parameters partial sums."""
        module = sys.modules["torch.distributed.tensor"]
        return [self._local(t, its, place in self.axes.carriers, f"{constants.op}: {op.argument(constants, place)}")
                if isinstance(t, module.DTensor) else t
                for place, (t, its) in enumerate(zip(tensors, self.axes.tensors, strict=True))]  # fmt: skip

    def _local(self, t: Any, its: tuple[int | None, ...], carries: bool, name: str) -> Tensor:
        from torch.distributed.tensor import Partial, Replicate, Shard

        placements = [Shard(its.index(dim)) if dim is not None and dim in its else Replicate() for dim in self.dims]
        gradients = [Partial() if dim is not None and dim not in its else placement
                     for dim, placement in zip(self.dims, placements, strict=True)]  # fmt: skip
        sliced: Sequence[int] = ()
        if not carries:
            # What all ranks have of a parameter is taken apart here: `redistribute` would gather its gradient.
            sliced = [at for at, placement in enumerate(placements) if placement.is_shard()]
            if not all(t.placements[at].is_replicate() for at in sliced):
                sliced = ()
        for at in sliced:
            placements[at], gradients[at] = Replicate(), Partial()
        moves = tuple(t.placements) != tuple(placements)
        if moves:
            try:
                t = t.redistribute(self.mesh, placements)
            except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
                raise ValueError(
                    f"{name} is placed {tuple(t.placements)}, which PyTorch cannot make {placements}"
                ) from error
        found: Tensor = t.to_local(grad_placements=gradients)
        if moves and found.requires_grad and not torch.compiler.is_dynamo_compiling():
            found = _Present.apply(found)  # type: ignore[no-untyped-call]
        if not self.member:
            rows = range(len(self.axes.rows))
            return found.new_empty([0 if axis in rows else size for axis, size in zip(its, t.shape, strict=True)])
        for axis in dict.fromkeys([self.dims[at] for at in sliced]):
            assert axis is not None
            dim = its.index(axis)
            found = found.narrow(dim, *self.part(axis, found.shape[dim]))
        return found

    def whole(self, outs: Tensors) -> tuple[Tensor | None, ...]:
        """DTensors of the outputs that this rank has a part of."""
        return tuple([None if out is None else self._whole(out, its)
                      for out, its in zip(outs, self.axes.outputs, strict=False)])  # fmt: skip

    def _whole(self, out: Tensor, its: tuple[int | None, ...]) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placements = [Replicate() if dim is None else Shard(its.index(dim)) for dim in self.dims]
        sizes = (*self.axes.rows, self.axes.columns)
        shape = torch.Size([size if axis is None else sizes[axis] for axis, size in zip(its, out.shape, strict=True)])
        return DTensor.from_local(out, self.mesh, placements, run_check=False, shape=shape, stride=_strides(out, shape))

    def total(self, t: Tensor) -> Tensor:
        """The sum of numbers of rows over the ranks that have the same rows."""
        columns = len(self.axes.rows)
        return _Total.apply(t, self.mesh, tuple([dim == columns for dim in self.dims])) if self.member else t  # type: ignore[no-untyped-call]

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

    def seed(self, seed: Tensor, device: torch.device) -> Tensor:
        """A call's random state with `numbers`, on the device."""
        ranks = tuple([self.mesh.size(at) for at in range(self.mesh.ndim)])
        make = _numbers_on if torch.compiler.is_compiling() or compat.is_intercepted() else _kept_numbers_on
        return torch.cat([seed.to(device), make(self.axes.mask, ranks, self.place, self.dims, device)])


class _Present(torch.autograd.Function):
    """The tensor itself. Its gradient is zero where there is none, which `redistribute` cannot move (PyTorch 2.13)."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        """A view."""
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The gradient, which autograd made zeros of if it was absent."""
        return gradient


class _Total(torch.autograd.Function):
    """The sum over ranks along some dimensions of a mesh. So is its derivative: each rank's output depends on all inputs."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, mesh: Any, along: tuple[bool, ...]) -> Tensor:
        """One collective for each dimension; along the others nothing is moved, whatever is there."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        ctx.mesh, ctx.along = mesh, along
        parts = DTensor.from_local(t, mesh, [Partial() if adds else Replicate() for adds in along], run_check=False)
        return parts.redistribute(mesh, [Replicate()] * len(along)).to_local()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """The same of the gradients."""
        return _Total.apply(gradient, ctx.mesh, ctx.along), None, None  # type: ignore[no-untyped-call]


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


def _strides(local: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor whose dimensions lie in memory in the order of ``local``'s."""
    found, step = [0] * len(shape), 1
    order = range(len(shape)) if local.is_contiguous() else sorted(range(len(shape)), key=local.stride, reverse=True)
    for dim in reversed(order):
        found[dim] = step
        step *= max(shape[dim], 1)
    return tuple(found)


# --- dropout ------------------------------------------------------------------------------------------------------------


def _numbers_on(mask: Sequence[int], ranks: Sequence[int], place: Sequence[int], dims: Sequence[int | None],
                device: torch.device) -> Tensor:  # fmt: skip
    return torch.tensor(numbers(mask, ranks, place, dims), dtype=torch.int64, device=device)


# A copy to a GPU waits for it: one for each placement.
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
