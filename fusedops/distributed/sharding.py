"""Calls on DTensors: redistribute the inputs, compute on each rank's tensors, wrap the outputs.

A call has *axes*: one for each dimension of its rows, and one for the columns.

    axis     0 ... n - 1                        n
    is       the rows' dimensions               the columns
    sharded  each rank computes its own rows;   independent columns likewise; a norm sums two
             parameters are replicated, their   numbers of each row over the ranks that share it
             gradients are partial sums

The dropout mask is that of the whole tensor: besides the seed, a rank's kernels get the `numbers`
that locate their part of it.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.calls.operator import Axes, Operator, Tensors
from ..core.compat.dispatch import is_intercepted
from ..core.compat.distributed import replicates_implicitly
from ..core.launches import launch
from ..core.random import dropout
from ..core.random.dropout import Dropout
from ..core.random.rng import NO_DROPOUT, State, drawn, recorded_state
from .conversion import ShardSpec, parts, total, wholes

__all__ = ["Layout", "distributes", "layout", "numbers", "planned", "replicated", "run"]

# Columns whose keep decisions are drawn at once.
_LANES = 8

# The axis that each dimension of a tensor is, or of a mesh shards; None for none.
_AxisOfDim = tuple[int | None, ...]


def distributes(tensors: Tensors) -> bool:
    """Whether one of the tensors is a DTensor."""
    # Without an import: before the module is imported there is no DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(t, module.DTensor) for t in tensors)


def run(
    op: Operator, constants: Any, tensors: Tensors, p: float, compute: Callable[..., Any]
) -> Any:
    """Returns the outputs of a call, as DTensors.

    The caller has checked the call, and that kernels fit its width (`Operator.cols`).

    Args:
        op: the operator.
        constants: the call's constants.
        tensors: its tensors, all DTensors.
        p: the drop probability.
        compute: computes a call of the operator from constants, a rank's own tensors and the state
            of its dropout. It is an argument because `call`, which has it, imports this module.
    """
    tensors = replicated(tensors)
    plan = planned(op, constants, tensors, dropout=p > 0.0)
    local = plan.local(tensors)
    first = local[op.first]
    assert first is not None
    state = _of_shard(plan.layout, p, local, first.device)
    axes = plan.layout.axes
    if plan.layout.splits_columns and axes.over_columns is not None:
        outs = axes.over_columns(constants, local, state, plan.layout, compute)
    else:
        outs = compute(constants, local, state)
    # AOTAutograd loses DTensors that are views of one tensor (PyTorch 2.13). A `SequenceOperator`
    # returns such views: its kernels write one buffer for all outputs.
    if torch.compiler.is_dynamo_compiling() and len(axes.outputs) > op.visible:
        outs = [out.clone() for out in outs]
    return plan.whole(outs)


def _of_shard(layout: Layout, p: float, local: Tensors, device: torch.device) -> State | Dropout:
    """Returns the random state of a rank's kernels.

    Where no kernels run, it is dropout with the rank's part of PyTorch's mask.
    """
    if not launch.runs_kernels(device.type):
        return layout.dropout(p)
    if layout.axes.rows.count(0):  # one process draws nothing for no elements either
        return NO_DROPOUT
    is_traced = torch.compiler.is_dynamo_compiling()
    state = recorded_state(p, device) if is_traced else drawn(p, local, device)
    first, second, threshold = state
    if first is None:
        return state
    own: Any = first if isinstance(first, Tensor) else (first, second)
    seed = layout.seed(own, device)
    # Only a shard's state has a tensor as its second element: see `rng.State`.
    return seed, seed, threshold


def replicated(tensors: Tensors) -> Tensors:
    """Returns the tensors, replicated DTensors where PyTorch's ``implicit_replication`` is on."""
    if torch.compiler.is_dynamo_compiling() or not replicates_implicitly():
        return tensors
    from torch.distributed.tensor import DTensor, Replicate

    mesh = next(t.device_mesh for t in tensors if isinstance(t, DTensor))
    placements = [Replicate()] * mesh.ndim
    results = []
    for t in tensors:
        if t is not None and not isinstance(t, DTensor):
            t = DTensor.from_local(t, mesh, placements, run_check=False)
        results.append(t)
    return results


class Move(NamedTuple):
    """How a DTensor becomes this rank's tensor.

    Attributes:
        name: the argument's, for messages.
        placements: what it is redistributed to; None if it has these placements already.
        gradient: how its gradient is distributed.
        slices: the part that this rank takes of what all ranks have: dimension, first index and
            size of each slice.
    """

    name: str
    placements: tuple[Any, ...] | None
    gradient: ShardSpec
    slices: tuple[tuple[int, int, int], ...]


class Layout(NamedTuple):
    """How a call's axes are distributed over a mesh.

    Attributes:
        mesh: the mesh of all DTensors.
        axes: the call's.
        dims: the axis that each dimension of the mesh shards; None for none.
        coordinate: this rank's in the mesh; zeros on a rank that is not in it.
        is_member: whether this rank is in the mesh.
    """

    mesh: Any
    axes: Axes
    dims: _AxisOfDim
    coordinate: tuple[int, ...]
    is_member: bool

    @property
    def splits_columns(self) -> bool:
        """Whether a rank has a part of each row."""
        return len(self.axes.rows) in self.dims

    def part(self, axis: int, size: int) -> tuple[int, int]:
        """Returns the first index and the size of this rank's part of an axis of ``size``."""
        if not self.is_member and axis < len(self.axes.rows):
            return 0, 0
        start = 0
        for mesh_dim, sharded_axis in enumerate(self.dims):
            if sharded_axis == axis:
                first, size = _chunk(size, self.mesh.size(mesh_dim), self.coordinate[mesh_dim])
                start += first
        return start, size

    def moves(self, op: Operator, constants: Any, tensors: Tensors) -> dict[int, Move]:
        """Returns the move of each DTensor by its index among the tensors."""
        module = sys.modules["torch.distributed.tensor"]
        moves = {}
        for i, (t, axes) in enumerate(zip(tensors, self.axes.tensors, strict=True)):
            if isinstance(t, module.DTensor):
                name = f"{constants.op}: {op.argument(constants, i)}"
                moves[i] = self._move(t, axes, i in self.axes.carriers, name)
        return moves

    def _move(self, t: Any, axes: _AxisOfDim, has_rows: bool, name: str) -> Move:
        from torch.distributed.tensor import Partial, Replicate, Shard

        # Per dimension of the mesh, with the axis that it shards:
        #
        #     axis                        tensor       gradient
        #     one of the tensor's         sharded      sharded
        #     one that it does not have   replicated   partial sum
        #     none                        replicated   replicated
        placements: list[Any] = []
        gradients: list[Any] = []
        for axis in self.dims:
            sharded = axis is not None and axis in axes
            placements.append(Shard(axes.index(axis)) if sharded else Replicate())
            # Ranks with different rows or columns each have a part of the sum that is the gradient
            # of a parameter without that axis.
            is_summed = axis is not None and not sharded
            gradients.append(Partial() if is_summed else placements[-1])
        sliced_dims = [] if has_rows else self._sliced_dims(t, placements)
        for mesh_dim in sliced_dims:
            placements[mesh_dim], gradients[mesh_dim] = Replicate(), Partial()
        is_moved = tuple(t.placements) != tuple(placements)
        slices = []
        for axis in dict.fromkeys([self.dims[mesh_dim] for mesh_dim in sliced_dims]):
            assert axis is not None
            dim = axes.index(axis)
            slices.append((dim, *self.part(axis, t.shape[dim])))
        return Move(
            name,
            tuple(placements) if is_moved else None,
            ShardSpec(self.mesh, tuple(gradients), t.shape, is_moved),
            tuple(slices),
        )

    def _sliced_dims(self, parameter: Any, placements: Sequence[Any]) -> list[int]:
        """Returns the dimensions of the mesh along which a replicated parameter is sliced.

        Each rank takes its slice of its own copy. `redistribute` would do so too, but its backward
        would gather the gradient; that of a slice is a partial sum. Empty if the parameter is not
        replicated along all of these dimensions: then it is redistributed.
        """
        dims = [i for i, placement in enumerate(placements) if placement.is_shard()]
        return dims if all(parameter.placements[i].is_replicate() for i in dims) else []

    def output_specs(self, outs: Tensors) -> list[ShardSpec]:
        """Returns how the outputs are distributed that this rank has a part of."""
        pairs = zip(outs, self.axes.outputs, strict=False)
        return [self._output_spec(out, axes) for out, axes in pairs]

    def _output_spec(self, out: Tensor | None, axes: _AxisOfDim) -> ShardSpec:
        from torch.distributed.tensor import Replicate, Shard

        placements = [
            Replicate() if axis is None else Shard(axes.index(axis)) for axis in self.dims
        ]
        if out is None:
            return ShardSpec(self.mesh, tuple(placements), torch.Size([]))
        axis_sizes = (*self.axes.rows, self.axes.columns)
        whole = [
            size if axis is None else axis_sizes[axis]
            for axis, size in zip(axes, out.shape, strict=True)
        ]
        return ShardSpec(self.mesh, tuple(placements), torch.Size(whole))

    def total(self, t: Tensor) -> Tensor:
        """Returns the sum of one number per row over the ranks that have the same rows."""
        if not self.is_member:
            return t
        columns = len(self.axes.rows)
        return total(t, self.mesh, tuple([axis == columns for axis in self.dims]))

    def dropout(self, p: float) -> Dropout:
        """Returns PyTorch's dropout with this rank's part of the mask that one process draws."""
        if p <= 0.0:
            return dropout.none
        shape = (*self.axes.rows, self.axes.columns)

        def masked(h: Tensor, dtype: torch.dtype) -> Tensor:
            # The dropout of ones is the mask, divided by the keep probability.
            whole = torch.ones(shape, dtype=h.dtype, device=h.device)
            scale = dropout.dropout_of(p, NO_DROPOUT, self.axes.columns)(whole, dtype)
            for axis, size in enumerate(shape):
                scale = scale.narrow(axis, *self.part(axis, size))
            return h * scale.reshape(h.shape)  # of a scalar too

        return masked

    def seed(self, seed: Tensor | tuple[int, int], device: torch.device) -> Tensor:
        """Returns a call's random state followed by its `numbers`, on the device."""
        ranks = tuple([self.mesh.size(mesh_dim) for mesh_dim in range(self.mesh.ndim)])
        shard = (self.axes.mask, ranks, self.coordinate, self.dims)
        if isinstance(seed, tuple):
            # A copy that blocks would wait for all work that the GPU still has to do.
            values = torch.tensor([*seed, *_cached_numbers(*shard)], dtype=torch.int64)
            return values.to(device, non_blocking=True)
        is_recorded = torch.compiler.is_compiling() or is_intercepted()
        numbers_on = _numbers_on if is_recorded else _cached_numbers_on
        return torch.cat([seed, numbers_on(*shard, device)])


@dataclass(frozen=True, eq=False)
class Plan:
    """The common part of all calls with the same shapes and placements.

    Attributes:
        layout: how the axes are distributed.
        moves: the move of each DTensor by its index among the tensors.
        output_specs: how the outputs are distributed, by their shapes on this rank.
    """

    layout: Layout
    moves: dict[int, Move]
    output_specs: dict[Any, list[ShardSpec]] = field(default_factory=dict)

    def local(self, tensors: Tensors) -> list[Tensor | None]:
        """Returns this rank's tensors.

        Their gradients become DTensors again, those of parameters partial sums.
        """
        moves = self.moves
        moved = [_moved(tensors[i], move) for i, move in moves.items()]
        local_parts = parts(moved, [move.gradient for move in moves.values()])
        results = list(tensors)
        for (i, move), part in zip(moves.items(), local_parts, strict=True):
            results[i] = self._sliced(part, tensors[i], move, self.layout.axes.tensors[i])
        return results

    def _sliced(self, part: Tensor, t: Any, move: Move, axes: _AxisOfDim) -> Tensor:
        """Returns this rank's slices; an empty tensor on a rank that is not in the mesh."""
        if not self.layout.is_member:
            rows = range(len(self.layout.axes.rows))
            sizes = [0 if axis in rows else size for axis, size in zip(axes, t.shape, strict=True)]
            return part.new_empty(sizes)
        for dim, start, size in move.slices:
            part = part.narrow(dim, start, size)
        return part

    def whole(self, outs: Tensors) -> tuple[Tensor | None, ...]:
        """Returns the DTensors of the outputs that this rank has a part of."""
        if torch.compiler.is_dynamo_compiling():
            return wholes(outs, self.layout.output_specs(outs))
        shapes = tuple([None if out is None else out.shape for out in outs])
        specs = self.output_specs.get(shapes)
        if specs is None:
            specs = self.output_specs[shapes] = self.layout.output_specs(outs)
        return wholes(outs, specs)


def _moved(t: Any, move: Move) -> Any:
    """Returns a DTensor with the placements of its move."""
    if move.placements is None:
        return t
    try:
        return t.redistribute(t.device_mesh, move.placements)
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{move.name} is placed {tuple(t.placements)}, which PyTorch cannot make "
            f"{list(move.placements)}"
        ) from error


# A program has fewer calls with different shapes and placements. One with ever new ones starts with
# an empty cache again.
_MOST_PLANS = 4096
_plans: dict[Any, Plan] = {}


def planned(op: Operator, constants: Any, tensors: Tensors, *, dropout: bool) -> Plan:
    """Returns the plan of a call, one for each operator, placements, shapes and mesh."""
    try:
        key = _key(op, constants, tensors, dropout)
        plan = None if key is None else _plans.get(key)
    except TypeError:  # a symbol has no hash
        key = plan = None
    if plan is not None:
        return plan
    call_layout = layout(op, constants, tensors, dropout=dropout)
    plan = Plan(call_layout, call_layout.moves(op, constants, tensors))
    if key is not None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan


def _key(op: Operator, constants: Any, tensors: Tensors, dropout: bool) -> Any:
    """Returns all that a plan depends on; None for a call whose plan is not cached."""
    if torch.compiler.is_dynamo_compiling():
        return None
    module = sys.modules["torch.distributed.tensor"]
    mesh: Any = None
    described: list[Any] = []
    for t in tensors:
        if t is None:
            described.append(None)
            continue
        if not isinstance(t, module.DTensor):
            return None
        if mesh is not None and t.device_mesh is not mesh:
            return None
        mesh = t.device_mesh
        described.append((t.placements, t.shape, t.dtype))
    # A mesh may equal one whose process group has ended: hence its id, which no other mesh gets as
    # the plan holds a reference to it.
    coordinate = tuple(mesh.get_coordinate() or ())
    return op, constants, dropout, id(mesh), coordinate, tuple(described)


def layout(op: Operator, constants: Any, tensors: Tensors, *, dropout: bool) -> Layout:
    """Returns how a call's axes are distributed.

    For each dimension of the mesh, the first tensor with rows that is sharded along it determines
    the axis. No axis is sharded if there is no such tensor, or if dropout could not locate the
    parts of its mask.

    Raises:
        TypeError: not all tensors are DTensors.
        ValueError: they are on several meshes.
    """
    mesh = _mesh(op, constants, tensors)
    axes = op.axes(constants, tensors)
    carriers = [(tensors[i], axes.tensors[i]) for i in range(len(tensors)) if i in axes.carriers]
    dims: list[int | None] = []
    for mesh_dim in range(mesh.ndim):
        axis = _first_sharded_axis(carriers, mesh_dim)
        if dropout and axis is not None and not _can_locate(axes, mesh, [*dims, axis]):
            axis = None
        dims.append(axis)
    coordinate = mesh.get_coordinate()
    is_member = coordinate is not None
    return Layout(mesh, axes, tuple(dims), tuple(coordinate or [0] * mesh.ndim), is_member)


def _mesh(op: Operator, constants: Any, tensors: Tensors) -> Any:
    """Returns the mesh of all tensors; raises an error where they have no common one."""
    module = sys.modules["torch.distributed.tensor"]
    dtensors = [i for i, t in enumerate(tensors) if isinstance(t, module.DTensor)]
    first = dtensors[0]
    mesh: Any = tensors[first].device_mesh  # type: ignore[union-attr]
    for i, t in enumerate(tensors):
        if t is None:
            continue
        is_dtensor = i in dtensors
        # A number in a tensor is the same on all ranks, but its gradient would not be.
        is_constant = not t.dim() and not t.requires_grad
        if is_constant and not is_dtensor:
            continue
        name, first_name = op.argument(constants, i), op.argument(constants, first)
        if not is_dtensor:
            raise TypeError(
                f"{constants.op}: {name} is a tensor of one rank, expected a DTensor as "
                f"{first_name} is; see DTensor.from_local and distribute_tensor"
            )
        own: Any = t.device_mesh  # type: ignore[attr-defined]
        if own != mesh:
            raise ValueError(f"{constants.op}: {name} is on {own}, expected {mesh} as {first_name}")
    return mesh


def _first_sharded_axis(tensors: Sequence[tuple[Any, _AxisOfDim]], mesh_dim: int) -> int | None:
    """Returns the axis that a dimension of the mesh shards of the first tensor that it shards."""
    for t, axes in tensors:
        axis = _sharded_axis(t, axes, mesh_dim)
        if axis is not None:
            return axis
    return None


def _sharded_axis(t: Any, axes: _AxisOfDim, mesh_dim: int) -> int | None:
    """Returns the axis of a tensor that a dimension of the mesh shards; None for none."""
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(t, DTensor):
        return None
    placement = t.placements[mesh_dim]
    return axes[placement.dim] if type(placement) is Shard else None


def _can_locate(axes: Axes, mesh: Any, dims: Sequence[int | None]) -> bool:
    """Whether `numbers` can locate the parts of a mask; ``dims`` are the mesh's first dimensions.

    It takes at most two sharded axes of the rows besides the first.

    Several dimensions of the mesh may cut the columns, one after the other. Each cut has to give
    whole groups of lanes, and only the last may be uneven: then the parts differ in size, and a
    further cut of them would begin at other columns.
    """
    columns = len(axes.rows)
    size, is_even = axes.columns, True
    sharded_rows = set()
    for mesh_dim, axis in enumerate(dims):
        ranks = mesh.size(mesh_dim)
        if axis is None or ranks <= 1:
            continue
        if axis != columns:
            sharded_rows.add(axis)
            continue
        chunk = -(-size // ranks)
        if not is_even or chunk % _LANES:
            return False
        is_even, size = size % ranks == 0, chunk
    return len(sharded_rows - {0}) <= 2


def _chunk(size: int, count: int, index: int) -> tuple[int, int]:
    """Returns the first index and the size of a chunk, as `torch.chunk` cuts it."""
    most = -(-size // count)
    start = min(index * most, size)
    return start, min(most, size - start)


# --- dropout --------------------------------------------------------------------------------------


def _numbers_on(
    mask: Sequence[int],
    ranks: Sequence[int],
    coordinate: Sequence[int],
    dims: Sequence[int | None],
    device: torch.device,
) -> Tensor:
    """Returns the `numbers` as a tensor on a device."""
    return torch.tensor(numbers(mask, ranks, coordinate, dims), dtype=torch.int64, device=device)


# A copy to a GPU waits for it, and graph capture records it: one for each shard.
_cached_numbers_on = functools.lru_cache(maxsize=1024)(_numbers_on)


def numbers(
    mask: Sequence[int], ranks: Sequence[int], coordinate: Sequence[int], dims: Sequence[int | None]
) -> list[int]:
    """Returns what locates the rows and columns of a shard in the whole mask.

    Row ``r`` of the shard is this row of the whole mask:

        base + r // outer * outer_stride + r % outer // inner * inner_stride + r % inner

    The rows of a shard are not contiguous if another dimension than the first is sharded: each
    such dimension is one of the two terms. For example, rank 1 of 2, with rows of (2, 4) of which
    the second dimension is sharded:

        whole   0 1 2 3 | 4 5 6 7      base 2, inner 2, inner_stride 4
        shard       0 1       2 3      2 -> 2 + 2 // 2 * 4 + 2 % 2 = 6

    The columns of the shard begin with group ``first`` of the ``groups`` of eight that a row of the
    whole mask has.

    Args:
        mask: the whole mask's shape: rows, then the parts of each, and columns.
        ranks: the size of each dimension of the mesh.
        coordinate: this rank's in the mesh.
        dims: the dimension of the call that each dimension of the mesh shards, None for none; of
            rows at most two others than the first. The columns are the one after the rows.
    Returns:
        base, outer, outer_stride, inner, inner_stride, groups, first.
    """
    *shape, columns = mask
    row_dims = len(shape) - 1  # without the parts
    column_dim = len(shape)
    sizes, starts = [*shape, columns], [0] * len(mask)
    split_dims = set()  # which make the shard's rows not contiguous
    for rank_count, index, dim in zip(ranks, coordinate, dims, strict=True):
        if dim is None or rank_count <= 1:
            continue
        axis = dim if dim < row_dims else column_dim
        start, sizes[axis] = _chunk(sizes[axis], rank_count, index)
        starts[axis] += start
        if axis not in (0, column_dim):
            split_dims.add(axis)
    begins_with_group = starts[-1] % _LANES == 0 or starts[-1] == columns
    assert len(split_dims) <= 2 and begins_with_group, dims
    base = sum(start * math.prod(shape[dim + 1 :]) for dim, start in enumerate(starts[:-1]))
    # Outer, its stride, inner, its stride. An unused term divides by 1 << 62, which is above every
    # row index: its quotient is zero, and its remainder the index itself. The innermost split
    # dimension is the inner term, at position 2.
    terms = [1 << 62, 0, 1 << 62, 0]
    for position, dim in zip((2, 0), sorted(split_dims, reverse=True), strict=False):
        terms[position] = max(math.prod(sizes[dim:-1]), 1)
        terms[position + 1] = math.prod(shape[dim:])
    return [base, *terms, -(-columns // _LANES), starts[-1] // _LANES]


_cached_numbers = functools.lru_cache(maxsize=1024)(numbers)
