"""Calls of registered operators on parts of one tensor, whose gradients are written into one.

The parts may be query, key and value of one projection, where the value is *passed on*:

    forward     packed ──views──▶ q, k ──▶ registered operators ──▶ results
                            └───▶ v ──▶ v

    backward    gradient of packed  [ dq | dk | dv ]
                                       ▲    ▲    ▲
                        written by kernels      copied

PyTorch allocates a gradient for each part, and copies all of them into one tensor. Here that tensor
comes first, and kernels write into it.

``fusedops::packed`` has no implementation of its own: a tracer sees the operators that it calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..compat import dispatch
from . import registration
from .function import constant, reached
from .operator import Tensors
from .operators import present, site_from

__all__ = ["PackedCall", "encode"]


class PackedCall(NamedTuple):
    """A call of a registered operator, some of whose tensors are parts.

    Attributes:
        name: the name of the operator, without ``_forward``.
        parts: which of its tensors are parts: pairs of an index, and the number of the part.
        threshold: the threshold of dropout.
        cols: the width of a row.
        call: the other constants, as text.
    """

    name: str
    parts: Sequence[tuple[int, int]]
    threshold: int
    cols: int
    call: str

    @property
    def op(self) -> Any:
        """The operator."""
        return registration.defined(self.name)

    def site(self, seed: Tensor | None) -> Any:
        """Returns the site."""
        return site_from(self.op, -1, seed is not None, self.cols, self.call, ())


def encode(passed: Sequence[int], calls: Sequence[PackedCall]) -> str:
    """Returns the numbers of the parts that are passed on, and the calls, as one string."""
    return json.dumps([passed, calls])


class _Layout(NamedTuple):
    """How a tensor is divided, and what reads the parts.

    Attributes:
        dim: the dimension that is divided.
        sizes: the sizes of all parts.
        passed: the numbers of the parts that are passed on.
        calls: the calls that read the other parts.
    """

    dim: int
    sizes: Sequence[int]
    passed: Sequence[int]
    calls: Sequence[PackedCall]

    @property
    def are_all_read(self) -> bool:
        """Whether each part is passed on, or read by a call."""
        return len(self.sizes) == len(self.passed) + sum(len(call.parts) for call in self.calls)


class _Run:
    """A call that has run, for its backward.

    Attributes:
        call: the call.
        outs: the function's results, until autograd has them.
        returned: their number.
        saved: the tensors that it saves, then the seed, until autograd has them.
        count: the number of saved tensors.
        constants: the outputs without a gradient.
        needs: for each tensor whether it needs a gradient.
        shapes: the shapes of the parts, by the indices of the tensors.
    """

    def __init__(
        self, call: PackedCall, tensors: Tensors, seed: Tensor | None, needs: Sequence[bool]
    ) -> None:
        op, site = call.op, call.site(seed)
        operator = getattr(torch.ops.fusedops, f"{call.name}_forward")
        outs = _listed(operator(*tensors, seed, call.threshold, call.cols, call.call))
        self.call = call
        self.needs = needs
        self.outs = outs[: op.count]
        self.returned = op.count
        self.saved = (*site.saved((*tensors, *present(outs, site.outs), None)), seed)
        self.count = len(self.saved)
        self.constants: Tensors = constant(op, site, self.outs, needs)
        self.shapes = {index: tensors[index].shape for index, _ in call.parts}  # type: ignore[union-attr]

    def cotangents(self, grads: Iterable[Tensor | None]) -> Tensors:
        """Returns the cotangents of all outputs, of which the caller gets the first."""
        return (*grads, *[None] * (self.call.op.visible - self.returned))

    def write_gradients(self, grads: Tensors, saved: Tensors, places: Mapping[int, Tensor]) -> Any:
        """Writes the gradients of parts; returns those of the other tensors.

        Args:
            grads: the `cotangents`.
            saved: as in ``saved``.
            places: where the gradients of parts belong.
        """
        call, op = self.call, self.call.op
        *tensors, seed = saved
        site = call.site(seed)
        needs = reached(op, site, grads, self.needs)
        if not any(needs) or not _present(grads):
            return [None] * len(needs)
        needed = op.needed(site, grads, needs)
        digits = "".join(map(str, map(int, needed)))
        arguments = (*grads, *tensors, seed)
        constants = (call.threshold, digits, call.cols, call.call)
        written = {index: place for index, place in places.items() if needed[index]}
        if registration.is_planned(arguments):
            allocated = op.allocate_gradients(site, grads, tensors, needed)
            # Those that are allocated for parts are not used: the compiler leaves them out.
            outs = dict(enumerate(allocated)) | written
            operator = getattr(torch.ops.fusedops, f"{call.name}_backward_out")
            operator(*arguments, *outs.values(), registration.as_text(constants))
        else:
            operator = getattr(torch.ops.fusedops, f"{call.name}_backward")
            outs = dict(enumerate(present(_listed(operator(*arguments, *constants)), needed)))
            for index, place in written.items():
                place.copy_(outs[index])
        # Not those of parts: autograd would add them to the tensor that they are in.
        return (outs | dict.fromkeys(written)).values()


class _Packed(torch.autograd.Function):
    """The results of the calls, then the parts that are passed on.

    Its tensors are, in this order: those parts, and for each call its tensors and its seed. Parts
    are views of ``packed``, which alone has their gradient.
    """

    @staticmethod
    def forward(ctx: Any, layout: _Layout, packed: Tensor, *tensors: Tensor | None) -> Any:
        """See `_Packed`."""
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.shape, ctx.dtype = layout, packed.shape, packed.dtype
        count = len(layout.passed)
        passed: Any = tensors[:count]
        rest, needs = iter(tensors[count:]), iter(ctx.needs_input_grad[2 + count :])
        ctx.runs = []
        for call in layout.calls:
            *own, seed = islice(rest, len(call.op.tensors) + 1)
            *needed, _ = islice(needs, len(call.op.tensors) + 1)
            ctx.runs.append(_Run(call, own, seed, needed))
        ctx.save_for_backward(*chain(*map(_take_saved, ctx.runs)))
        ctx.mark_non_differentiable(*chain(*map(_take_constants, ctx.runs)))
        return (*chain(*map(_take_outs, ctx.runs)), *map(_alias, passed))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Returns the gradient of ``packed``, and those of the calls' other tensors."""
        layout: _Layout = ctx.layout
        likes = _present(grads)
        if not likes:
            return (None,) * len(ctx.needs_input_grad)
        # A part without a cotangent, or that nothing reads, has a gradient of zeros.
        is_complete = len(likes) == len(grads) and layout.are_all_read
        allocate = likes[0].new_empty if is_complete else likes[0].new_zeros
        packed = allocate(ctx.shape, dtype=ctx.dtype)
        parts = packed.split(list(layout.sizes), layout.dim)
        cotangents, saved = iter(grads), iter(ctx.saved_tensors)
        results: list[Tensor | None] = []
        for run in ctx.runs:
            places = {i: parts[number].view(run.shapes[i]) for i, number in run.call.parts}
            own = run.cotangents(islice(cotangents, run.returned))
            gradients = run.write_gradients(own, tuple(islice(saved, run.count)), places)
            results += [*gradients, None]  # of the seed
        for number, grad in zip(layout.passed, cotangents, strict=True):
            if grad is not None:
                _copy(grad, parts[number].view(grad.shape))
        return None, packed, *[None] * len(layout.passed), *results


def _take_saved(run: _Run) -> Tensors:
    """Returns the saved tensors of a call, which then does not hold them."""
    saved, run.saved = run.saved, ()
    return saved


def _take_constants(run: _Run) -> Tensors:
    """Returns the results without a gradient, as `_take_saved` does."""
    constants, run.constants = run.constants, []
    return constants


def _take_outs(run: _Run) -> Tensors:
    """Returns the results, as `_take_saved` does."""
    outs: Tensors = run.outs
    run.outs = ()
    return outs


def _alias(part: Tensor) -> Tensor:
    return part.view_as(part)


def _present(tensors: Tensors) -> list[Tensor]:
    """Returns the tensors that are not None."""
    return [tensor for tensor in tensors if tensor is not None]


def _listed(outs: Any) -> Any:
    """Returns an operator's outputs as a tuple, also a single one."""
    return (outs,) if isinstance(outs, Tensor) else outs


def _copy(source: Tensor, out: Tensor) -> None:
    """Copies a tensor into a part of another one."""
    if registration.is_planned((source,)):
        # As an operator of its own: Inductor would write a copy as a kernel that reads and writes
        # the whole tensor.
        torch.ops.fusedops.copy_into(source, out)
    else:
        out.copy_(source)


def _packed(
    packed: Tensor, dim: int, sizes: Sequence[int], tensors: Tensors, text: str
) -> list[Tensor]:
    """Calls the operators that `encode` wrote."""
    passed, calls = json.loads(text)
    layout = _Layout(dim, tuple(sizes), passed, [PackedCall(*call) for call in calls])
    results: Any = _Packed.apply(layout, packed, *tensors)  # type: ignore[no-untyped-call]
    return list(results)


def _write_copy(source: Tensor, out: Tensor) -> None:
    out.copy_(source)


_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")
_LIBRARY.define(
    "packed(Tensor packed, int dim, int[] sizes, Tensor?[] tensors, str calls) -> Tensor[]"
)
_LIBRARY.impl("packed", _packed, "CompositeImplicitAutograd")
_LIBRARY.define("copy_into(Tensor source, Tensor(a!) out) -> ()")
_LIBRARY.impl("copy_into", _write_copy, "CompositeExplicitAutograd")
torch.library.register_fake("fusedops::copy_into", lambda *_: None, lib=_LIBRARY)
dispatch.replace_call(
    torch.ops.fusedops.copy_into.default,
    lambda dispatched: registration.shortened(dispatched, _write_copy, 1),
)
