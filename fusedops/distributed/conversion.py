"""Converts DTensors to this rank's tensors, and back: one autograd node per call and direction.

``DTensor.to_local`` and ``DTensor.from_local`` create a node for each tensor, and check and infer
properties that are known here. For a small call this costs the CPU several times as much as the
kernels. torch.compile has rules for these two methods, so a traced call uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.calls.operator import Tensors
from ..core.compat import distributed
from ..core.compat.autograd import fast_apply

__all__ = ["ShardSpec", "strides", "sum_over_ranks", "to_dtensors", "to_local_tensors"]


@dataclass(frozen=True, eq=False)
class ShardSpec:
    """The distribution of a tensor over a mesh.

    Attributes:
        mesh: the mesh.
        placements: the placements of the DTensor, or of its gradient.
        shape: the shape of the whole tensor.
        moved: whether the tensor was redistributed before the call. The backward of `redistribute`
            cannot handle a gradient that is None (PyTorch 2.13), so it gets zeros.
        dtensor_specs: PyTorch's own records of this distribution, by strides and dtype.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    moved: bool = False
    dtensor_specs: dict[Any, Any] = field(default_factory=dict)


def to_local_tensors(tensors: Sequence[Any], gradients: Sequence[ShardSpec]) -> list[Tensor]:
    """Returns this rank's tensors of DTensors; ``gradients`` are the specs of their gradients."""
    if torch.compiler.is_dynamo_compiling() or not _is_member(gradients):
        return [
            t.to_local(grad_placements=spec.placements)
            for t, spec in zip(tensors, gradients, strict=True)
        ]
    if _needs_graph(tensors):
        return list(_apply_to_local_tensors(tuple(gradients), *tensors))
    with torch.no_grad():
        return [distributed.waited(t.to_local()) for t in tensors]


def to_dtensors(tensors: Tensors, specs: Sequence[ShardSpec]) -> tuple[Tensor | None, ...]:
    """Returns DTensors with these specs, from this rank's tensors."""
    if torch.compiler.is_dynamo_compiling() or not _is_member(specs):
        return _for_each(_from_local, tensors, specs)
    if _needs_graph(tensors):
        return tuple(_apply_to_dtensors(tuple(specs), *tensors))
    with torch.no_grad():
        return _for_each(_constant_dtensor, tensors, specs)


def sum_over_ranks(t: Tensor, mesh: Any, along: tuple[bool, ...]) -> Tensor:
    """Returns the sum over the ranks along some dimensions of a mesh."""
    return _SumOverRanks.apply(t, mesh, along)  # type: ignore[no-any-return, no-untyped-call]


def strides(local: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a dense tensor of ``shape``.

    Its dimensions have the same order in memory as those of ``local``.
    """
    order = list(range(len(shape)))
    if not local.is_contiguous():
        order.sort(key=local.stride, reverse=True)
    result, step = [0] * len(shape), 1
    for dim in reversed(order):
        result[dim] = step
        step *= max(shape[dim], 1)
    return tuple(result)


def _is_member(specs: Sequence[ShardSpec]) -> bool:
    """Whether this rank is in the mesh."""
    return not specs or specs[0].mesh.get_coordinate() is not None


def _needs_graph(tensors: Sequence[Any]) -> bool:
    """Whether autograd records a conversion of these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _for_each(
    function: Callable[[Any, ShardSpec], Any], tensors: Sequence[Any], specs: Sequence[ShardSpec]
) -> tuple[Any, ...]:
    """Returns ``function(tensor, spec)`` for each tensor, None for None."""
    pairs = zip(tensors, specs, strict=False)
    return tuple([None if t is None else function(t, spec) for t, spec in pairs])


def _from_local(t: Tensor, spec: ShardSpec) -> Any:
    """Returns a DTensor that is differentiable in ``t``."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        t,
        spec.mesh,
        spec.placements,
        run_check=False,
        shape=spec.shape,
        stride=strides(t, spec.shape),
    )


def _constant_dtensor(t: Tensor, spec: ShardSpec) -> Any:
    """Returns a DTensor without a gradient."""
    stride = strides(t, spec.shape)
    key = stride, t.dtype
    dtensor_spec = spec.dtensor_specs.get(key)
    if dtensor_spec is None:
        dtensor_spec = distributed.dtensor_spec(
            spec.mesh, spec.placements, spec.shape, stride, t.dtype
        )
        if dtensor_spec is None:
            return _from_local(t, spec)
        spec.dtensor_specs[key] = dtensor_spec
    return distributed.dtensor(t.detach() if t.requires_grad else t, dtensor_spec)


class _ToLocalTensors(torch.autograd.Function):
    """Returns views of this rank's tensors, for DTensors."""

    @staticmethod
    def forward(ctx: Any, gradients: tuple[ShardSpec, ...], *tensors: Any) -> tuple[Tensor, ...]:
        """Returns the views; no data is moved."""
        local = [distributed.waited(t.to_local()) for t in tensors]
        views = [t.view_as(t) for t in local]
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        ctx.zeros_like = [
            (t.shape, t.dtype, t.device) if spec.moved else None
            for t, spec in zip(views, gradients, strict=True)
        ]
        constant = [view for view, t in zip(views, tensors, strict=True) if not t.requires_grad]
        ctx.mark_non_differentiable(*constant)
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Returns the gradients as DTensors: zeros for None if `redistribute` needs a gradient."""
        to_dtensor = _from_local if torch.is_grad_enabled() else _constant_dtensor
        needs = ctx.needs_input_grad[1:]
        results = []
        for grad, spec, zeros_like, need in zip(
            grads, ctx.gradients, ctx.zeros_like, needs, strict=True
        ):
            if grad is None and need and zeros_like is not None:
                shape, dtype, device = zeros_like
                grad = torch.zeros(shape, dtype=dtype, device=device)
            results.append(None if grad is None else to_dtensor(grad, spec))
        return None, *results


class _ToDTensors(torch.autograd.Function):
    """Returns DTensors, for this rank's tensors."""

    @staticmethod
    def forward(ctx: Any, specs: tuple[ShardSpec, ...], *tensors: Tensor | None) -> tuple[Any, ...]:
        """Returns the DTensors; no data is moved."""
        ctx.specs = specs
        ctx.set_materialize_grads(False)
        views = [None if t is None else t.view_as(t) for t in tensors]
        dtensors = _for_each(_constant_dtensor, views, specs)
        constant = [
            dtensor
            for dtensor, t in zip(dtensors, tensors, strict=True)
            if t is not None and not t.requires_grad
        ]
        ctx.mark_non_differentiable(*constant)
        return dtensors

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Returns this rank's tensors of the gradients, redistributed to the specs' placements."""
        return None, *_for_each(_local_gradient, grads, ctx.specs)


def _local_gradient(grad: Any, spec: ShardSpec) -> Tensor:
    """Returns this rank's tensor of a gradient, in the placements of ``spec``."""
    if tuple(grad.placements) != spec.placements:
        grad = grad.redistribute(spec.mesh, spec.placements)
    return distributed.waited(grad.to_local())


_apply_to_local_tensors: Any = fast_apply(_ToLocalTensors)
_apply_to_dtensors: Any = fast_apply(_ToDTensors)


class _SumOverRanks(torch.autograd.Function):
    """Sums over ranks along some dimensions of a mesh.

    The derivative is the same sum of gradients, because each rank's output depends on the inputs of
    all ranks.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, mesh: Any, along: tuple[bool, ...]) -> Tensor:
        """Returns the sum; there is one collective for each dimension in ``along``."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        ctx.mesh, ctx.along = mesh, along
        # Along a dimension that is not summed, ranks may have different tensors. It is declared as
        # replicated all the same, so that `redistribute` moves nothing along it.
        placements = [Partial() if is_summed else Replicate() for is_summed in along]
        dtensor = DTensor.from_local(t, mesh, placements, run_check=False)
        return dtensor.redistribute(mesh, [Replicate()] * len(along)).to_local()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Returns the sum of the gradients."""
        return sum_over_ranks(gradient, ctx.mesh, ctx.along), None, None
