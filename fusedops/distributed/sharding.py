"""Calls on DTensors: redistribute the inputs, compute on each rank's tensors, wrap the outputs.

A call has *axes*: one for each of the n dimensions of its rows, and one for the columns.

    axis             if it is sharded
    0 ... n - 1      each rank computes its own rows; parameters are replicated, and their
                     gradients are partial sums
    n, the columns   each rank computes its own columns, if columns do not depend on one another;
                     in a norm they do, and two numbers of each row are summed over the ranks

A rank's dropout mask is its part of the mask of the whole tensor. So its kernels get, besides the
seed, the `numbers` that locate this part.
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
from ..core.random.rng import NO_DROPOUT, State, draw_or_record_state, record_state
from .conversion import ShardSpec, sum_over_ranks, to_dtensors, to_local_tensors

__all__ = ["Layout", "distributes", "layout", "numbers", "planned", "replicated", "run"]

# The number of columns whose keep decisions are drawn at once.
_LANES = 8

# For each dimension of a tensor, its axis; or for each dimension of a mesh, the axis that it
# shards. None for a dimension without an axis.
_AxisOfDim = tuple[int | None, ...]


def distributes(tensors: Tensors) -> bool:
    """Whether one of the tensors is a DTensor."""
    # The module is not imported here: until something imports it, there is no DTensor.
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
        tensors: its tensors; `layout` raises unless they are DTensors.
        p: the drop probability.
        compute: a function that computes a call of the operator, from constants, a rank's own
            tensors and the state of its dropout. It is an argument because it is in `call`, which
            imports this module.
    """
    tensors = replicated(tensors)
    plan = planned(op, constants, tensors, dropout=p > 0.0)
    local = plan.local_tensors(tensors)
    first = local[op.first]
    assert first is not None
    state = _state_of_shard(plan.layout, p, local, first.device)
    axes = plan.layout.axes
    if plan.layout.splits_columns and axes.over_columns is not None:
        outs = axes.over_columns(constants, local, state, plan.layout, compute)
    else:
        outs = compute(constants, local, state)
    # AOTAutograd loses DTensors that are views of one tensor (PyTorch 2.13). The outputs of
    # a `SequenceOperator` are such views: its kernels write one buffer for all outputs.
    if torch.compiler.is_dynamo_compiling() and len(axes.outputs) > op.visible:
        outs = [out.clone() for out in outs]
    return plan.dtensors(outs)


def _state_of_shard(
    layout: Layout, p: float, local: Tensors, device: torch.device
) -> State | Dropout:
    """Returns the random state of a rank's kernels.

    If no kernels run on the device, it returns a function instead: PyTorch's dropout with the
    rank's part of the mask.
    """
    if not launch.runs_kernels(device.type):
        return layout.dropout(p)
    if layout.axes.rows.count(0):  # without elements nothing is drawn, as in one process
        return NO_DROPOUT
    is_traced = torch.compiler.is_dynamo_compiling()
    state = record_state(p, device) if is_traced else draw_or_record_state(p, local, device)
    seed, offset, threshold = state
    if seed is None:
        return state
    state_of_call: Any = seed if isinstance(seed, Tensor) else (seed, offset)
    shard_seed = layout.seed(state_of_call, device)
    # A shard's state has this tensor twice: see `rng.State`.
    return shard_seed, shard_seed, threshold


def replicated(tensors: Tensors) -> Tensors:
    """Converts plain tensors to replicated DTensors if PyTorch's ``implicit_replication`` is on."""
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
    """The conversion of a DTensor to this rank's tensor.

    Attributes:
        name: the name of the argument, for messages.
        placements: the placements to which it is redistributed; None if it has them already.
        gradient: how its gradient is distributed.
        slices: the part that this rank takes of a parameter that is replicated: the dimension,
            first index and size of each slice.
    """

    name: str
    placements: tuple[Any, ...] | None
    gradient: ShardSpec
    slices: tuple[tuple[int, int, int], ...]


class Layout(NamedTuple):
    """The distribution of a call's axes over a mesh.

    Attributes:
        mesh: the mesh of all DTensors.
        axes: the axes of the call.
        dims: for each dimension of the mesh, the axis that it shards; None for none.
        coordinate: this rank's coordinate in the mesh; zeros on a rank that is not in the mesh.
        is_member: whether this rank is in the mesh.
    """

    mesh: Any
    axes: Axes
    dims: _AxisOfDim
    coordinate: tuple[int, ...]
    is_member: bool

    @property
    def splits_columns(self) -> bool:
        """Whether columns are sharded, so that a rank has only a part of each row."""
        return len(self.axes.rows) in self.dims

    def part(self, axis: int, size: int) -> tuple[int, int]:
        """Returns the first index and the size of this rank's part of an axis with ``size``."""
        if not self.is_member and axis < len(self.axes.rows):
            return 0, 0
        start = 0
        for mesh_dim, sharded_axis in enumerate(self.dims):
            if sharded_axis == axis:
                first, size = _chunk(size, self.mesh.size(mesh_dim), self.coordinate[mesh_dim])
                start += first
        return start, size

    def moves(self, op: Operator, constants: Any, tensors: Tensors) -> dict[int, Move]:
        """Returns the move of each DTensor, by its index among the tensors."""
        module = sys.modules["torch.distributed.tensor"]
        moves = {}
        for i, (t, axes) in enumerate(zip(tensors, self.axes.tensors, strict=True)):
            if isinstance(t, module.DTensor):
                name = f"{constants.op}: {op.argument(constants, i)}"
                has_rows = i in self.axes.carriers
                moves[i] = self._move(t, axes, has_rows=has_rows, name=name)
        return moves

    def _move(self, t: Any, axes: _AxisOfDim, *, has_rows: bool, name: str) -> Move:
        """Returns the move of a DTensor whose dimensions are these axes."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        # The placements along a dimension of the mesh depend on the axis that it shards:
        #
        #     axis                              tensor       gradient
        #     an axis of this tensor            sharded      sharded
        #     an axis of other tensors alone    replicated   partial sum
        #     none                              replicated   replicated
        placements: list[Any] = []
        gradients: list[Any] = []
        for axis in self.dims:
            is_sharded = axis is not None and axis in axes
            placements.append(Shard(axes.index(axis)) if is_sharded else Replicate())
            # The gradient of a parameter without that axis is a sum along the axis, and each rank
            # has only its part of the sum.
            is_summed = axis is not None and not is_sharded
            gradients.append(Partial() if is_summed else placements[-1])
        # A parameter that is replicated already stays so, and this rank takes a slice of it.
        sliced_dims = [] if has_rows else self._sliced_dims(t, placements)
        for mesh_dim in sliced_dims:
            placements[mesh_dim], gradients[mesh_dim] = Replicate(), Partial()
        is_moved = tuple(t.placements) != tuple(placements)
        slices = []
        # Several dimensions of the mesh may shard one axis: the rank has one slice of that axis.
        for axis in dict.fromkeys([self.dims[mesh_dim] for mesh_dim in sliced_dims]):
            assert axis is not None
            dim = axes.index(axis)
            slices.append((dim, *self.part(axis, t.shape[dim])))
        return Move(
            name=name,
            placements=tuple(placements) if is_moved else None,
            gradient=ShardSpec(self.mesh, tuple(gradients), t.shape, moved=is_moved),
            slices=tuple(slices),
        )

    def _sliced_dims(self, parameter: Any, placements: Sequence[Any]) -> list[int]:
        """Returns the dimensions of the mesh along which a replicated parameter is sliced.

        Each rank takes a slice of its own copy. `redistribute` would do so too, but its backward
        would gather the gradient, while the backward of a slice gives a partial sum. The result is
        empty if the parameter is not replicated along all dimensions that shard it here: then it is
        redistributed.
        """
        dims = [i for i, placement in enumerate(placements) if placement.is_shard()]
        is_replicated = all(parameter.placements[i].is_replicate() for i in dims)
        return dims if is_replicated else []

    def output_specs(self, outs: Tensors) -> list[ShardSpec]:
        """Returns how the outputs are distributed, from this rank's parts ``outs`` of them."""
        pairs = zip(outs, self.axes.outputs, strict=False)
        return [self._output_spec(out, axes) for out, axes in pairs]

    def _output_spec(self, out: Tensor | None, axes: _AxisOfDim) -> ShardSpec:
        """Returns how an output whose dimensions are these axes is distributed."""
        from torch.distributed.tensor import Replicate, Shard

        placements = [
            Replicate() if axis is None else Shard(axes.index(axis)) for axis in self.dims
        ]
        if out is None:
            return ShardSpec(self.mesh, tuple(placements), torch.Size([]))
        axis_sizes = (*self.axes.rows, self.axes.columns)
        whole_shape = [
            size if axis is None else axis_sizes[axis]
            for axis, size in zip(axes, out.shape, strict=True)
        ]
        return ShardSpec(self.mesh, tuple(placements), torch.Size(whole_shape))

    def sum_over_ranks(self, t: Tensor) -> Tensor:
        """Returns the sum of one number per row, over the ranks with parts of the same rows."""
        if not self.is_member:
            return t
        columns = len(self.axes.rows)
        return sum_over_ranks(t, self.mesh, tuple([axis == columns for axis in self.dims]))

    def dropout(self, p: float) -> Dropout:
        """Returns PyTorch's dropout with this rank's part of the mask that one process draws."""
        if p <= 0.0:
            return dropout.none
        shape = (*self.axes.rows, self.axes.columns)

        def masked(h: Tensor, dtype: torch.dtype) -> Tensor:
            # All ranks draw the mask of the whole tensor, and use their part of it. The dropout of
            # ones is the mask, divided by the keep probability.
            whole = torch.ones(shape, dtype=h.dtype, device=h.device)
            scale = dropout.dropout_of(p, NO_DROPOUT, self.axes.columns)(whole, dtype)
            for axis, size in enumerate(shape):
                scale = scale.narrow(axis, *self.part(axis, size))
            return h * scale.reshape(h.shape)  # if h is a scalar, ``scale`` has one column

        return masked

    def seed(self, seed: Tensor | tuple[int, int], device: torch.device) -> Tensor:
        """Returns a tensor of a call's random state and this shard's `numbers`, on the device."""
        ranks = tuple([self.mesh.size(mesh_dim) for mesh_dim in range(self.mesh.ndim)])
        shard = (self.axes.mask, ranks, self.coordinate, self.dims)
        if isinstance(seed, tuple):
            # A blocking copy would wait for all work that is queued on the GPU.
            values = torch.tensor([*seed, *_cached_numbers(*shard)], dtype=torch.int64)
            return values.to(device, non_blocking=True)
        is_recorded = torch.compiler.is_compiling() or is_intercepted()
        numbers_on = _numbers_on if is_recorded else _cached_numbers_on
        return torch.cat([seed, numbers_on(*shard, device)])


@dataclass(frozen=True, eq=False)
class Plan:
    """The plan of calls with the same shapes and placements.

    Attributes:
        layout: how the axes are distributed.
        moves: the move of each DTensor, by its index among the tensors.
        output_specs: how the outputs are distributed, by the shapes of this rank's parts.
    """

    layout: Layout
    moves: dict[int, Move]
    output_specs: dict[Any, list[ShardSpec]] = field(default_factory=dict)

    def local_tensors(self, tensors: Tensors) -> list[Tensor | None]:
        """Returns this rank's tensors.

        Their gradients are converted back to DTensors. Those of parameters are partial sums.
        """
        moves = self.moves
        redistributed = [_redistributed(tensors[i], move) for i, move in moves.items()]
        gradients = [move.gradient for move in moves.values()]
        local_parts = to_local_tensors(redistributed, gradients)
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

    def dtensors(self, outs: Tensors) -> tuple[Tensor | None, ...]:
        """Returns the outputs as DTensors, from this rank's parts ``outs``."""
        if torch.compiler.is_dynamo_compiling():
            return to_dtensors(outs, self.layout.output_specs(outs))
        shapes = tuple([None if out is None else out.shape for out in outs])
        specs = self.output_specs.get(shapes)
        if specs is None:
            specs = self.output_specs[shapes] = self.layout.output_specs(outs)
        return to_dtensors(outs, specs)


def _redistributed(t: Any, move: Move) -> Any:
    """Returns a DTensor, redistributed to the placements of its move."""
    if move.placements is None:
        return t
    try:
        return t.redistribute(t.device_mesh, move.placements)
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{move.name} is placed {tuple(t.placements)}, which PyTorch cannot make "
            f"{list(move.placements)}"
        ) from error


# The most cached plans, more than a program usually needs. At this size the cache is cleared.
_MOST_PLANS = 4096
_plans: dict[Any, Plan] = {}


def planned(op: Operator, constants: Any, tensors: Tensors, *, dropout: bool) -> Plan:
    """Returns the plan of a call, one for each operator, placements, shapes and mesh."""
    try:
        key = _key(op, constants, tensors, dropout)
        plan = None if key is None else _plans.get(key)
    except TypeError:  # a symbolic size has no hash
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
    """Returns everything that a plan depends on; None for a call whose plan is not cached."""
    if torch.compiler.is_dynamo_compiling():
        return None
    module = sys.modules["torch.distributed.tensor"]
    mesh: Any = None
    descriptions: list[Any] = []
    for t in tensors:
        if t is None:
            descriptions.append(None)
            continue
        if not isinstance(t, module.DTensor):
            return None
        if mesh is not None and t.device_mesh is not mesh:
            return None
        mesh = t.device_mesh
        descriptions.append((t.placements, t.shape, t.dtype))
    # The key has the id of the mesh, because the mesh may equal one whose process group has ended.
    # The plan holds a reference to the mesh, so no other mesh gets this id.
    coordinate = tuple(mesh.get_coordinate() or ())
    return op, constants, dropout, id(mesh), coordinate, tuple(descriptions)


def layout(op: Operator, constants: Any, tensors: Tensors, *, dropout: bool) -> Layout:
    """Returns how a call's axes are distributed.

    For each dimension of the mesh, the first tensor with rows that is sharded along this dimension
    determines the axis. If no such tensor is sharded along it, or if `numbers` could not locate the
    shards of the dropout mask, the dimension shards no axis.

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
    """Returns the mesh of all tensors; raises an error if they have no common mesh."""
    module = sys.modules["torch.distributed.tensor"]
    dtensors = [i for i, t in enumerate(tensors) if isinstance(t, module.DTensor)]
    first = dtensors[0]
    mesh: Any = tensors[first].device_mesh  # type: ignore[union-attr]
    for i, t in enumerate(tensors):
        if t is None:
            continue
        is_dtensor = i in dtensors
        # A plain scalar is accepted, as it is the same on all ranks; but not if it requires a
        # gradient, which would differ between ranks.
        is_constant = not t.dim() and not t.requires_grad
        if is_constant and not is_dtensor:
            continue
        name, first_name = op.argument(constants, i), op.argument(constants, first)
        if not is_dtensor:
            raise TypeError(
                f"{constants.op}: {name} is a tensor of one rank, expected a DTensor as "
                f"{first_name} is; see DTensor.from_local and distribute_tensor"
            )
        own_mesh: Any = t.device_mesh  # type: ignore[attr-defined]
        if own_mesh != mesh:
            raise ValueError(
                f"{constants.op}: {name} is on {own_mesh}, expected {mesh} as {first_name}"
            )
    return mesh


def _first_sharded_axis(tensors: Sequence[tuple[Any, _AxisOfDim]], mesh_dim: int) -> int | None:
    """Returns the axis that a dimension of the mesh shards, in the first tensor that has one."""
    for t, axes in tensors:
        axis = _sharded_axis(t, axes, mesh_dim)
        if axis is not None:
            return axis
    return None


def _sharded_axis(t: Any, axes: _AxisOfDim, mesh_dim: int) -> int | None:
    """Returns the axis along which a dimension of the mesh shards a tensor; None for none."""
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(t, DTensor):
        return None
    placement = t.placements[mesh_dim]
    return axes[placement.dim] if type(placement) is Shard else None


def _can_locate(axes: Axes, mesh: Any, dims: Sequence[int | None]) -> bool:
    """Whether `numbers` can locate the shards of a mask.

    ``dims`` are the axes that the first dimensions of the mesh shard. At most two of the rows' axes
    may be sharded besides the first axis.

    Several dimensions of the mesh may split the columns, one after the other. Each split must give
    parts of whole groups of lanes. Only the last split may be uneven: it gives parts of different
    sizes, and a split of these would not begin at the same columns.
    """
    columns = len(axes.rows)
    size, is_even = axes.columns, True
    sharded_row_axes = set()
    for mesh_dim, axis in enumerate(dims):
        ranks = mesh.size(mesh_dim)
        if axis is None or ranks <= 1:
            continue
        if axis != columns:
            sharded_row_axes.add(axis)
            continue
        chunk = -(-size // ranks)
        if not is_even or chunk % _LANES:
            return False
        is_even, size = size % ranks == 0, chunk
    return len(sharded_row_axes - {0}) <= 2


def _chunk(size: int, count: int, index: int) -> tuple[int, int]:
    """Returns the first index and the size of one of `torch.chunk`'s chunks."""
    chunk_size = -(-size // count)
    start = min(index * chunk_size, size)
    return start, min(chunk_size, size - start)


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


# Cached, so that there is one copy to the GPU for each shard: a copy waits for the GPU, and
# CUDA-graph capture would record it.
_cached_numbers_on = functools.lru_cache(maxsize=1024)(_numbers_on)


def numbers(
    mask: Sequence[int], ranks: Sequence[int], coordinate: Sequence[int], dims: Sequence[int | None]
) -> list[int]:
    """Returns the numbers that locate the rows and columns of a shard in the whole mask.

    Row ``r`` of the shard is this row of the whole mask:

        base + r // outer * outer_stride + r % outer // inner * inner_stride + r % inner

    The rows of a shard are not contiguous if a dimension other than the first is sharded. The
    formula has one term for such a dimension, and at most two terms. For example, for rank 1 of 2,
    with rows of shape (2, 4) whose second dimension is sharded:

        rows of the whole mask    0 1 2 3 | 4 5 6 7      base 2, inner 2, inner_stride 4
        rows of the shard             0 1       2 3      row 2 -> 2 + 2 // 2 * 4 + 2 % 2 = 6

    A row of the whole mask has ``groups`` groups of eight columns. The shard's columns begin with
    group ``first``.

    Args:
        mask: the shape of the whole mask: the rows' dimensions, the parts of a row, the columns.
        ranks: the size of each dimension of the mesh.
        coordinate: this rank's coordinate in the mesh.
        dims: for each dimension of the mesh, the axis of the call that it shards; None for none.
            Besides the first, at most two axes of the rows are sharded.
    Returns:
        base, outer, outer_stride, inner, inner_stride, groups, first.
    """
    *shape, columns = mask
    row_dims = len(shape) - 1  # without the parts
    column_dim = len(shape)
    sizes, starts = [*shape, columns], [0] * len(mask)
    split_dims = set()  # the sharded dimensions of the rows besides the first
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
    # ``terms`` is outer, outer_stride, inner, inner_stride. An unused term divides by 1 << 62,
    # which is more than any row index: the quotient is 0, and the remainder is the index itself.
    # The innermost split dimension is the inner term, which begins at position 2.
    terms = [1 << 62, 0, 1 << 62, 0]
    for position, dim in zip((2, 0), sorted(split_dims, reverse=True), strict=False):
        terms[position] = max(math.prod(sizes[dim:-1]), 1)
        terms[position + 1] = math.prod(shape[dim:])
    return [base, *terms, -(-columns // _LANES), starts[-1] // _LANES]


_cached_numbers = functools.lru_cache(maxsize=1024)(numbers)
