"""DTensors to this rank's tensors and back: one autograd node for all tensors of a call, each way.

``DTensor.to_local`` and ``DTensor.from_local`` make a node for each tensor, and check and infer for each what is known
here: on the host they cost a small call several times what its kernels do. torch.compile, which knows these two, has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import compat
from .operator import Tensors

__all__ = ["Place", "parts", "strides", "total", "wholes"]


@dataclass(frozen=True, eq=False)
class Place:
    """Where a tensor is.

    Attributes:
        mesh: the mesh.
        placements: of the DTensor, or of its gradient.
        shape: of the whole tensor.
        moved: whether it was redistributed, which requires a gradient on the way back (PyTorch 2.13).
        specs: PyTorch's records of it, by strides and dtype.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    moved: bool = False
    specs: dict[Any, Any] = field(default_factory=dict)


def parts(tensors: Sequence[Any], gradients: Sequence[Place]) -> list[Tensor]:
    """This rank's tensors of DTensors; their gradients become DTensors with these places."""
    if torch.compiler.is_dynamo_compiling() or not _is_member(gradients):
        return [t.to_local(grad_placements=place.placements) for t, place in zip(tensors, gradients, strict=True)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return list(_apply_parts(tuple(gradients), *tensors))
    with torch.no_grad():
        return [compat.waited(t.to_local()) for t in tensors]


def wholes(tensors: Tensors, places: Sequence[Place]) -> tuple[Tensor | None, ...]:
    """DTensors with these places, of this rank's tensors."""
    if torch.compiler.is_dynamo_compiling() or not _is_member(places):
        return tuple([None if t is None else _from_local(t, place) for t, place in zip(tensors, places, strict=False)])
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return tuple(_apply_wholes(tuple(places), *tensors))
    with torch.no_grad():
        return tuple([None if t is None else _whole(t, place) for t, place in zip(tensors, places, strict=False)])


def total(t: Tensor, mesh: Any, along: tuple[bool, ...]) -> Tensor:
    """The sum over ranks along some dimensions of a mesh."""
    return _Total.apply(t, mesh, along)  # type: ignore[no-any-return, no-untyped-call]


def strides(local: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor whose dimensions lie in memory in the order of ``local``'s."""
    found, step = [0] * len(shape), 1
    order = range(len(shape)) if local.is_contiguous() else sorted(range(len(shape)), key=local.stride, reverse=True)
    for dim in reversed(order):
        found[dim] = step
        step *= max(shape[dim], 1)
    return tuple(found)


def _is_member(places: Sequence[Place]) -> bool:
    return not places or places[0].mesh.get_coordinate() is not None


def _from_local(t: Tensor, place: Place) -> Any:
    """Differentiable."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(t, place.mesh, place.placements, run_check=False, shape=place.shape,
                              stride=strides(t, place.shape))  # fmt: skip


def _whole(t: Tensor, place: Place) -> Any:
    """Without a gradient."""
    stride = strides(t, place.shape)
    spec = place.specs.get((stride, t.dtype))
    if spec is None:
        spec = compat.dtensor_spec(place.mesh, place.placements, place.shape, stride, t.dtype)
        if spec is None:
            return _from_local(t, place)
        place.specs[stride, t.dtype] = spec
    return compat.dtensor(t.detach() if t.requires_grad else t, spec)


class _Parts(torch.autograd.Function):
    """Views of this rank's tensors."""

    @staticmethod
    def forward(ctx: Any, gradients: tuple[Place, ...], *tensors: Any) -> tuple[Tensor, ...]:
        """Nothing moves."""
        own = [compat.waited(t.to_local()) for t in tensors]
        own = [t.view_as(t) for t in own]
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        ctx.like = [(t.shape, t.dtype, t.device) if place.moved else None
                    for t, place in zip(own, gradients, strict=True)]  # fmt: skip
        ctx.mark_non_differentiable(*[part for part, t in zip(own, tensors, strict=True) if not t.requires_grad])
        return tuple(own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """DTensors; zeros where there is none that `redistribute` could move."""
        make, found = _from_local if torch.is_grad_enabled() else _whole, []
        for grad, place, like, needed in zip(grads, ctx.gradients, ctx.like, ctx.needs_input_grad[1:], strict=True):
            if grad is None and like is not None and needed:
                shape, dtype, device = like
                grad = torch.zeros(shape, dtype=dtype, device=device)
            found.append(None if grad is None else make(grad, place))
        return None, *found


class _Wholes(torch.autograd.Function):
    """DTensors of this rank's tensors."""

    @staticmethod
    def forward(ctx: Any, places: tuple[Place, ...], *tensors: Tensor | None) -> tuple[Any, ...]:
        """Nothing moves."""
        ctx.places = places
        ctx.set_materialize_grads(False)
        found = [None if t is None else _whole(t.view_as(t), place) for t, place in zip(tensors, places, strict=False)]
        ctx.mark_non_differentiable(*[whole for whole, t in zip(found, tensors, strict=True)
                                      if t is not None and not t.requires_grad])  # fmt: skip
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """This rank's parts, after a gradient that is placed otherwise was moved."""
        return None, *[None if grad is None else _part(grad, place)
                       for grad, place in zip(grads, ctx.places, strict=False)]  # fmt: skip


def _part(grad: Any, place: Place) -> Tensor:
    if tuple(grad.placements) != place.placements:
        grad = grad.redistribute(place.mesh, place.placements)
    return compat.waited(grad.to_local())


_apply_parts: Any = compat.fast_apply(_Parts)
_apply_wholes: Any = compat.fast_apply(_Wholes)


class _Total(torch.autograd.Function):
    """The sum over ranks along some dimensions of a mesh. So is its derivative: each rank's output depends on all inputs."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, mesh: Any, along: tuple[bool, ...]) -> Tensor:
        """One collective for each dimension; along the others nothing is moved, whatever is there."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        ctx.mesh, ctx.along = mesh, along
        placed = DTensor.from_local(t, mesh, [Partial() if adds else Replicate() for adds in along], run_check=False)
        return placed.redistribute(mesh, [Replicate()] * len(along)).to_local()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """The same of the gradients."""
        return total(gradient, ctx.mesh, ctx.along), None, None
