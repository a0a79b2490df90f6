"""The autograd Function of every eager call, and the derivative that it shares with the registered operators.

To first order gradients come from kernels. Under ``create_graph``, forward-mode differentiation and batched gradients
they come from the family's `Operator.derivative` in differentiable PyTorch operators, so every order works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import compat, dropout, launch, operators, rng
from .dropout import Dropout
from .operator import Operator, Site, Tensors
from .rng import State

__all__ = ["PLAIN", "Call", "Nothing", "apply", "forward", "gradients", "mask_of", "on_device", "vjp"]

# Types of arguments that kernels read themselves; others see registered operators.
PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})


def on_device(site: Site, work: Callable[..., None], *args: Any) -> None:
    """``work(site, *args)`` with the site's GPU as the current one."""
    index = site.device_index
    if index < 0 or index == launch.current_device():
        work(site, *args)
    else:
        with torch.cuda.device(index):
            work(site, *args)


def forward(op: Operator, site: Site, tensors: Tensors, state: State) -> tuple[Tensor | None, ...]:
    """All outputs, from kernels."""
    outs = op.allocate(site, tensors)
    index = site.device_index  # `on_device` without its call, as every step comes here
    if index < 0 or index == launch.current_device():
        op.forward(site, tensors, outs, state)
    else:
        on_device(site, op.forward, tensors, outs, state)
    return outs


class Call(torch.autograd.Function):
    """The outputs that the caller asked for; ``call`` says last whether from the registered operator or a launch."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Operator, Site, State, bool], *tensors: Tensor | None) -> Any:
        """One launch."""
        op, site, state, registered = ctx.call = call
        launched = operators.forward if registered else forward
        outs = launched(op, site, tensors, state)
        ctx.save_for_backward(*site.saved((*tensors, *outs, None)))
        ctx.set_materialize_grads(False)
        given = op.expose(site.constants, tensors, outs) if op.variadic else outs[: site.returned]
        mark_constant(ctx, op, site, given, ctx.needs_input_grad[1:])
        return given

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """See `gradients`."""
        op, site, state, _ = ctx.call
        if len(grads) < op.visible:
            grads = (*grads, *(None,) * (op.visible - len(grads)))
        return None, *gradients(op, site, state, ctx.saved_tensors, grads, ctx.needs_input_grad[1:])


apply: Callable[..., Any] = compat.fast_apply(Call)


class Nothing(torch.autograd.Function):
    """A call of no elements beside ranks that have some: no launch, and a gradient, of zeros, where those have one.

    Collectives that a gradient goes through would wait for a rank that has none.
    """

    @staticmethod
    def forward(ctx: Any, call: tuple[Operator, Site], *tensors: Tensor | None) -> Any:
        """See `Call`."""
        op, site = ctx.call = call
        ctx.shapes = [None if t is None else t.shape for t in tensors]
        outs = op.allocate(site, tensors)
        ctx.save_for_backward(*site.saved((*tensors, *outs, None)))
        ctx.set_materialize_grads(False)
        given = op.expose(site.constants, tensors, outs) if op.variadic else outs[: site.returned]
        mark_constant(ctx, op, site, given, ctx.needs_input_grad[1:])
        return given

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """As `gradients`."""
        (op, site), saved, needs = ctx.call, ctx.saved_tensors, ctx.needs_input_grad[1:]
        grads = (*grads, *(None,) * (op.visible - len(grads)))
        needs = _reached(op, site, grads, needs)
        if all(g is None for g in grads) or not any(needs):
            return (None,) * (1 + len(needs))
        if torch.is_grad_enabled():
            return None, *op.derivative(site, grads, saved, lambda *_: dropout.none, needs)
        if site.cols < 0:  # without columns, which do not depend on one another: all have a gradient
            like = next(g for g in grads if g is not None)
            return None, *[like.new_zeros(shape, dtype=dtype) if need else None
                           for shape, dtype, need in zip(ctx.shapes, site.dtypes, needs, strict=True)]  # fmt: skip
        needed = op.needed(site, grads, needs)
        outs = [None if t is None else t.zero_() for t in op.allocate_gradients(site, grads, saved, needed)]
        return None, *(outs if needed is needs else op.expose_gradients(site, grads, saved, outs, needs))


def mark_constant(ctx: Any, op: Operator, site: Site, outs: Tensors, needs: Sequence[bool]) -> None:
    """Tell autograd which outputs of an autograd Function have no gradient for any tensor that needs one."""
    sources = op.sources(site.constants, len(outs))
    if sources is not None:
        needed = {place for place, need in enumerate(needs) if need}
        ctx.mark_non_differentiable(*[out for out, its in zip(outs, sources, strict=False)
                                      if out is not None and needed.isdisjoint(its)])  # fmt: skip


def _reached(op: Operator, site: Site, grads: Tensors, needs: Sequence[bool]) -> Sequence[bool]:
    """Which of the needed gradients there are: PyTorch has none, not zeros, where no differentiated output depends on it."""
    sources = op.sources(site.constants, len(grads))
    if sources is None:
        return needs
    reached = frozenset[int]().union(*[its for its, g in zip(sources, grads, strict=True) if g is not None])
    return tuple([need and place in reached for place, need in enumerate(needs)])


def gradients(op: Operator, site: Site, state: State, saved: Tensors, grads: Tensors,
              needs: Sequence[bool]) -> Sequence[Tensor | None]:  # fmt: skip
    """The gradients of a call's tensors, None where not needed, and where no output with a cotangent depends on one."""
    if (
        torch.compiler.is_dynamo_compiling()
    ):  # compiled autograd, whose graph the question below would break: zeros instead
        if all(g is None for g in grads):
            return (None,) * len(needs)
        return _registered(op, site, state, saved, grads, needs)
    needs = _reached(op, site, grads, needs)
    absent, kernels = True, not torch.is_grad_enabled() and not compat.is_intercepted()
    for g in grads:
        if g is not None:
            absent = False
            if type(g) is not Tensor or compat.is_batched(g):
                kernels = False
    if absent or not any(needs):
        return (None,) * len(needs)
    if not kernels or not PLAIN.issuperset(map(type, saved)):
        return _elsewhere(op, site, state, saved, grads, needs)
    needed = op.needed(site, grads, needs)
    outs = op.allocate_gradients(site, grads, saved, needed)
    index = site.device_index
    if index < 0 or index == launch.current_device():
        op.backward(site, grads, saved, outs, state)
    else:
        on_device(site, op.backward, grads, saved, outs, state)
    return outs if needed is needs else op.expose_gradients(site, grads, saved, outs, needs)


def _elsewhere(op: Operator, site: Site, state: State, saved: Tensors, grads: Tensors,
               needs: Sequence[bool]) -> Sequence[Tensor | None]:  # fmt: skip
    """Gradients that are no launch: differentiable, batched, or seen by a dispatch mode or a tensor subclass."""
    batched = any(g is not None and compat.is_batched(g) for g in grads)
    if torch.is_grad_enabled() or batched or compat.transforms() or compat.in_forward_mode():
        return op.derivative(site, grads, saved, mask_of(site, state), needs)
    return _registered(op, site, state, saved, grads, needs)


def _registered(op: Operator, site: Site, state: State, saved: Tensors, grads: Tensors,
                needs: Sequence[bool]) -> Sequence[Tensor | None]:  # fmt: skip
    needed = op.needed(site, grads, needs)
    outs = operators.backward(op, site, op.joined(site.constants, grads, saved), saved, state, needed)
    return op.expose_gradients(site, grads, saved, outs, needs)


def mask_of(site: Site, state: State) -> Callable[[Tensor], Dropout]:
    """The forward's mask, for a tensor of its shape and device.

    Not batched, whatever the gradients are: the forward was outside any transform.
    """

    def masked(like: Tensor, further: int = 0, threshold: int | None = None) -> Dropout:
        if not site.dropout:
            return dropout.none
        plain = torch.empty(like.shape, dtype=site.acc, device=like.device)
        mask = dropout.keep_scale(plain, rng.beyond(state, further, threshold), site.cols)
        return dropout.fixed(mask)

    return masked


def vjp(function: Callable[..., Sequence[Tensor | None]], primals: Tensors, cotangents: Tensors,
        needs: Sequence[bool]) -> list[Tensor | None]:  # fmt: skip
    """The product of cotangents and ``function``'s Jacobian, differentiable in both; None where not needed.

    An alias of each tensor stands in for it, so that one which depends on another has no part in the other's gradient.
    """
    if compat.transforms():
        return _vjp_under_transforms(function, primals, cotangents, needs)
    with torch.enable_grad():
        inputs = [t if t is None or not need else t.view_as(t) if t.requires_grad else t.detach().requires_grad_()
                  for t, need in zip(primals, needs, strict=True)]  # fmt: skip
        along = [(out, cotangent) for out, cotangent in zip(function(*inputs), cotangents, strict=True)
                 if out is not None and cotangent is not None and out.requires_grad]  # fmt: skip
    wanted = [t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
    if not along or not wanted:
        return [None] * len(inputs)
    outs, cotangents = zip(*along, strict=True)
    found = iter(torch.autograd.grad(outs, wanted, cotangents, create_graph=torch.is_grad_enabled(), allow_unused=True))
    return [next(found) if need and t is not None else None for t, need in zip(inputs, needs, strict=True)]


def _vjp_under_transforms(function: Callable[..., Sequence[Tensor | None]], primals: Tensors, cotangents: Tensors,
                          needs: Sequence[bool]) -> list[Tensor | None]:  # fmt: skip
    """`vjp` while a torch.func transform maps a backward, in which no tensor can be made to require a gradient."""
    places = [i for i, (t, need) in enumerate(zip(primals, needs, strict=True)) if need and t is not None]
    given = [i for i, cotangent in enumerate(cotangents) if cotangent is not None]

    def of_needed(*needed: Tensor) -> tuple[Tensor | None, ...]:
        filled = list(primals)
        for place, t in zip(places, needed, strict=True):
            filled[place] = t
        outs = function(*filled)
        return tuple([outs[i] for i in given])

    pull: Callable[..., Any] = torch.func.vjp(of_needed, *[primals[place] for place in places])[1]
    found = dict(zip(places, pull(tuple([cotangents[i] for i in given])), strict=True))
    return [found.get(i) for i in range(len(primals))]
