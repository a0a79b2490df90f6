"""Calls of registered operators on parts of one tensor, with one tensor for the parts' gradients.

For example, the parts are query, key and value of one projection. Here the value is *passed on*: it
is returned as it is, and no operator reads it.

    forward     packed ──views──▶ q, k ──▶ registered operators ──▶ results
                            └───▶ v ──▶ v

    backward    gradient of packed  [ dq | dk | dv ]
                                       ▲    ▲    ▲
                        written by kernels      copied

PyTorch would allocate a gradient for each part, and then copy all of them into one tensor. Here
that tensor is allocated first, and kernels write into it.

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
from ..optional import without_none
from . import registration
from .function import constant, reached
from .operator import Tensors
from .operators import present, site_from

__all__ = ["PackedCall", "encode"]


class PackedCall(NamedTuple):
    """A call of a registered operator on parts, and perhaps on other tensors.

    Attributes:
        name: the name of the operator, without ``_forward``.
        parts: a pair for each argument that is a part: the argument's index, and the part's number.
        threshold: the threshold of dropout.
        cols: the width of a row.
        call: the other constants, as `words.encode` writes them.
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
    """The division of a tensor into parts, and the calls that read the parts.

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
        """Returns whether each part is passed on or read by a call."""
        return len(self.sizes) == len(self.passed) + sum(len(call.parts) for call in self.calls)


class _Run:
    """Runs a call, and holds what its backward needs.

    Attributes:
        call: the call.
        outs: the outputs that the caller gets; empty once `_take_outs` took them.
        returned: the number of these outputs.
        saved: the saved tensors, then the seed; empty once `_take_saved` took them.
        count: the number of saved tensors, with the seed.
        constants: the outputs without a gradient; empty once `_take_constants` took them.
        needs: for each of the call's tensors, whether it needs a gradient.
        shapes: the shapes of the parts, by their indices among the call's tensors.
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
        """Returns the cotangents of all visible outputs: ``grads``, then None for the rest."""
        return (*grads, *[None] * (self.call.op.visible - self.returned))

    def write_gradients(
        self, grads: Tensors, saved: Tensors, part_grads: Mapping[int, Tensor]
    ) -> Any:
        """Writes the gradients of parts; returns those of the other tensors, None for parts.

        Args:
            grads: the `cotangents`.
            saved: the saved tensors, then the seed.
            part_grads: the tensors to write the parts' gradients into, by the parts' indices among
                the call's tensors.
        """
        call, op = self.call, self.call.op
        *tensors, seed = saved
        site = call.site(seed)
        needs = reached(op, site, grads, self.needs)
        if not any(needs) or not without_none(grads):
            return [None] * len(needs)
        needed = op.needed(site, grads, needs)
        digits = "".join(map(str, map(int, needed)))
        arguments = (*grads, *tensors, seed)
        constants = (call.threshold, digits, call.cols, call.call)
        written = {index: grad for index, grad in part_grads.items() if needed[index]}
        if registration.is_planned(arguments):
            allocated = op.allocate_gradients(site, grads, tensors, needed)
            # ``written`` replaces what is allocated for parts. The compiler removes the unused
            # allocations.
            outs = dict(enumerate(allocated)) | written
            operator = getattr(torch.ops.fusedops, f"{call.name}_backward_out")
            read = registration.in_rows(op, arguments)
            operator(*read, *outs.values(), registration.as_text(constants))
        else:
            operator = getattr(torch.ops.fusedops, f"{call.name}_backward")
            outs = dict(enumerate(present(_listed(operator(*arguments, *constants)), needed)))
            for index, grad in written.items():
                grad.copy_(outs[index])
        # None for parts: the gradient of ``packed`` already contains their gradients, and autograd
        # would add a returned one to it.
        return (outs | dict.fromkeys(written)).values()


class _Packed(torch.autograd.Function):
    """Returns the results of the calls, then the parts that are passed on.

    ``tensors`` are the parts that are passed on, then for each call its tensors and its seed. Parts
    are views of ``packed``. Their gradients are returned as the gradient of ``packed`` alone.
    """

    @staticmethod
    def forward(ctx: Any, layout: _Layout, packed: Tensor, *tensors: Tensor | None) -> Any:
        """See `_Packed`."""
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.shape, ctx.dtype = layout, packed.shape, packed.dtype
        count = len(layout.passed)
        passed: Any = tensors[:count]
        # ``needs_input_grad`` begins with ``layout``, ``packed`` and the parts that are passed on.
        remaining, needs = iter(tensors[count:]), iter(ctx.needs_input_grad[2 + count :])
        ctx.runs = []
        for call in layout.calls:
            *call_tensors, seed = islice(remaining, len(call.op.tensors) + 1)
            *call_needs, _ = islice(needs, len(call.op.tensors) + 1)
            ctx.runs.append(_Run(call, call_tensors, seed, call_needs))
        ctx.save_for_backward(*chain(*map(_take_saved, ctx.runs)))
        ctx.mark_non_differentiable(*chain(*map(_take_constants, ctx.runs)))
        return (*chain(*map(_take_outs, ctx.runs)), *map(_alias, passed))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Returns the gradient of ``packed``, and those of the calls' other tensors."""
        layout: _Layout = ctx.layout
        present_grads = without_none(grads)
        if not present_grads:
            return (None,) * len(ctx.needs_input_grad)
        # A part has a gradient of zeros if it has no cotangent, or if nothing reads it.
        are_all_written = len(present_grads) == len(grads) and layout.are_all_read
        like = present_grads[0]
        allocate = like.new_empty if are_all_written else like.new_zeros
        packed = allocate(ctx.shape, dtype=ctx.dtype)
        parts = packed.split(list(layout.sizes), layout.dim)
        cotangents, saved = iter(grads), iter(ctx.saved_tensors)
        results: list[Tensor | None] = []
        for run in ctx.runs:
            part_grads = {i: parts[number].view(run.shapes[i]) for i, number in run.call.parts}
            call_grads = run.cotangents(islice(cotangents, run.returned))
            call_saved = tuple(islice(saved, run.count))
            results += run.write_gradients(call_grads, call_saved, part_grads)
            results.append(None)  # the seed has no gradient
        for number, grad in zip(layout.passed, cotangents, strict=True):
            if grad is not None:
                _copy(grad, parts[number].view(grad.shape))
        return None, packed, *[None] * len(layout.passed), *results


def _take_saved(run: _Run) -> Tensors:
    """Returns the saved tensors of a call, and drops its references to them."""
    saved, run.saved = run.saved, ()
    return saved


def _take_constants(run: _Run) -> Tensors:
    """Returns the outputs without a gradient, and drops the call's references to them."""
    constants, run.constants = run.constants, []
    return constants


def _take_outs(run: _Run) -> Tensors:
    """Returns the outputs of a call, and drops its references to them."""
    outs: Tensors = run.outs
    run.outs = ()
    return outs


def _alias(part: Tensor) -> Tensor:
    return part.view_as(part)


def _listed(outs: Any) -> Any:
    """Returns an operator's outputs as a tuple, also if there is only one."""
    return (outs,) if isinstance(outs, Tensor) else outs


def _copy(source: Tensor, out: Tensor) -> None:
    """Copies a tensor into a part of another one."""
    if registration.is_planned((source,)):
        # An operator of this package copies: for ``out.copy_``, Inductor would generate a kernel
        # that reads and writes the whole tensor.
        torch.ops.fusedops.copy_into(source, out)
    else:
        out.copy_(source)


def _packed(
    packed: Tensor, dim: int, sizes: Sequence[int], tensors: Tensors, text: str
) -> list[Tensor]:
    """Implements ``fusedops::packed``; ``text`` is the string that `encode` returns."""
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
    lambda dispatched: registration.shortened(dispatched, _write_copy, read=1),
)
