"""The autograd Function of eager calls, and its derivative, shared with the registered operators.

First-order gradients come from kernels. Under ``create_graph``, forward-mode differentiation and
batched gradients they come from the family's `Operator.derivative`, in differentiable PyTorch
operators, so that derivatives of any order exist.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat import autograd
from ..compat.dispatch import in_forward_mode, is_intercepted, transforms
from ..launches import launch
from ..optional import present_indices, without_none
from ..random import dropout, rng
from ..random.dropout import Dropout
from ..random.rng import State
from . import operators
from .operator import Operator, Site, Tensors

__all__ = [
    "PLAIN",
    "Call",
    "EmptyCall",
    "apply",
    "constant",
    "exposed",
    "forward",
    "gradients",
    "mask_of",
    "on_device",
    "reached",
    "registered",
    "vjp",
]

# Kernels are launched directly on arguments of these types. For other types, such as tensor
# subclasses, the registered operator is called.
PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})


def on_device(site: Site, work: Callable[..., None], *args: Any) -> None:
    """Calls ``work(site, *args)`` with the site's GPU as the current one."""
    index = site.device_index
    if index < 0 or index == launch.current_device():
        work(site, *args)
    else:
        with torch.cuda.device(index):
            work(site, *args)


def forward(op: Operator, site: Site, tensors: Tensors, state: State) -> tuple[Tensor | None, ...]:
    """Launches the forward; returns all outputs."""
    outs = op.allocate(site, tensors)
    # `on_device`, inlined to save a Python call.
    index = site.device_index
    if index < 0 or index == launch.current_device():
        op.forward(site, tensors, outs, state)
    else:
        on_device(site, op.forward, tensors, outs, state)
    return outs


def exposed(op: Any, site: Site, tensors: Tensors, outs: Any) -> tuple[Tensor | None, ...]:
    """Returns the outputs that the caller gets, perhaps without absent ones at the end."""
    if site.splits:
        return op.expose(site.constants, tensors, outs)  # type: ignore[no-any-return]
    return outs[: site.returned]  # type: ignore[no-any-return]


class Call(torch.autograd.Function):
    """A differentiable call.

    Its argument ``call`` consists of the operator, the site, the random state, and whether the
    registered operator computes the call.
    """

    @staticmethod
    def forward(ctx: Any, call: tuple[Operator, Site, State, bool], *tensors: Tensor | None) -> Any:
        """Computes all outputs; returns those that the caller gets."""
        op, site, state, registered = ctx.call = call
        compute = operators.forward if registered else forward
        outs = compute(op, site, tensors, state)
        # An absent cotangent stays None: it costs neither a tensor of zeros nor a kernel's read.
        ctx.set_materialize_grads(False)
        returned = exposed(op, site, tensors, outs)
        # The None at the end stands for every saved tensor that this call does not have.
        saved = site.saved((*tensors, *outs, None))
        if site.splits:
            saved = op.saved_separately(site, saved, returned)  # type: ignore[attr-defined]
        ctx.save_for_backward(*saved)
        if site.sources is not None:
            mark_constant(ctx, op, site, returned, ctx.needs_input_grad[1:])
        return returned

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Returns the `gradients`, and None for ``call``."""
        op, site, state, _ = ctx.call
        if len(grads) < op.visible:
            # The site returned fewer outputs than the operator can.
            grads = (*grads, *(None,) * (op.visible - len(grads)))
        return None, *gradients(op, site, state, ctx.saved_tensors, grads, ctx.needs_input_grad[1:])


apply: Callable[..., Any] = autograd.fast_apply(Call)


def registered(op: Operator, site: Site, tensors: Tensors, state: State) -> Any:
    """Returns the caller's outputs of a call that the registered operator computes."""
    if site.saves:
        return Call.apply((op, site, state, True), *tensors)  # type: ignore[no-untyped-call]
    return exposed(op, site, tensors, operators.forward(op, site, tensors, state))


class EmptyCall(torch.autograd.Function):
    """The call of a rank without elements: it launches nothing.

    Where other ranks have gradients, its gradients are zeros, not None: collectives may reduce the
    gradients, and this rank must take part.
    """

    @staticmethod
    def forward(ctx: Any, call: tuple[Operator, Site], *tensors: Tensor | None) -> Any:
        """Returns empty outputs, as `Call` does without a launch."""
        op, site = ctx.call = call
        ctx.shapes = [None if t is None else t.shape for t in tensors]
        outs = op.allocate(site, tensors)
        ctx.save_for_backward(*site.saved((*tensors, *outs, None)))
        ctx.set_materialize_grads(False)
        returned = exposed(op, site, tensors, outs)
        mark_constant(ctx, op, site, returned, ctx.needs_input_grad[1:])
        return returned

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Returns zeros where `gradients` has a gradient."""
        (op, site), saved, needs = ctx.call, ctx.saved_tensors, ctx.needs_input_grad[1:]
        grads = (*grads, *(None,) * (op.visible - len(grads)))
        needs = reached(op, site, grads, needs)
        if all(g is None for g in grads) or not any(needs):
            return (None,) * (1 + len(needs))
        if torch.is_grad_enabled():
            return None, *op.derivative(site, grads, saved, lambda *_: dropout.none, needs)
        if site.cols < 0:
            # This rank has rows, but none of their columns. In such a call no column depends on
            # another one: for a norm, the call computes only the pre-norm sum, and
            # `Axes.over_columns` computes the norm. So each of the call's tensors has a gradient on
            # other ranks.
            like = without_none(grads)[0]
            zeros = [
                like.new_zeros(shape, dtype=dtype) if need else None
                for shape, dtype, need in zip(ctx.shapes, site.dtypes, needs, strict=True)
            ]
            return None, *zeros
        needed = op.needed(site, grads, needs)
        allocated = op.allocate_gradients(site, grads, saved, needed)
        outs = [None if t is None else t.zero_() for t in allocated]
        if needed is needs:
            return None, *outs
        return None, *op.expose_gradients(site, grads, saved, outs, needs)


def _sources(op: Operator, site: Site, outputs: int) -> tuple[frozenset[int], ...] | None:
    """Returns the site's ``sources``, or None if each output depends on all tensors.

    ``sources`` describes the outputs that the caller gets. The registered operator of a
    `SequenceOperator` returns buffers of several of these, and a buffer depends on all tensors.
    """
    is_of_buffers = op.variadic and site.sources is not None and len(site.sources) != outputs
    return None if is_of_buffers else site.sources


def mark_constant(ctx: Any, op: Operator, site: Site, outs: Tensors, needs: Sequence[bool]) -> None:
    """Marks the outputs that have no gradient for any tensor that needs one."""
    constants = constant(op, site, outs, needs)
    if constants:
        ctx.mark_non_differentiable(*constants)


def constant(op: Operator, site: Site, outs: Tensors, needs: Sequence[bool]) -> list[Tensor]:
    """Returns the outputs that have no gradient for any tensor that needs one."""
    sources = _sources(op, site, len(outs))
    constants = () if sources is None else _constants(sources, tuple(needs))
    chosen = [outs[i] for i in constants if i < len(outs)]
    return [out for out in chosen if out is not None]


# Every call evaluates the next two functions, with few different arguments: so they are cached.
@functools.lru_cache(maxsize=4096)
def _constants(sources: tuple[frozenset[int], ...], needs: tuple[bool, ...]) -> tuple[int, ...]:
    """Returns the indices of the outputs without a gradient: none of their sources needs one."""
    needed = {i for i, need in enumerate(needs) if need}
    return tuple([i for i, inputs in enumerate(sources) if needed.isdisjoint(inputs)])


@functools.lru_cache(maxsize=4096)
def _reached(
    sources: tuple[frozenset[int], ...], present: tuple[bool, ...], needs: tuple[bool, ...]
) -> tuple[bool, ...]:
    """Returns ``needs``, but False for tensors that are no source of a ``present`` output."""
    reached = frozenset[int]().union(*itertools.compress(sources, present))
    return tuple([need and i in reached for i, need in enumerate(needs)])


def reached(op: Operator, site: Site, grads: Tensors, needs: Sequence[bool]) -> Sequence[bool]:
    """Returns ``needs``, but False for tensors on which no output with a cotangent depends.

    As in PyTorch, the gradient of such a tensor is None, not zeros.
    """
    sources = _sources(op, site, len(grads))
    if sources is None:
        return needs
    return _reached(sources, tuple([g is not None for g in grads]), tuple(needs))


def gradients(
    op: Operator, site: Site, state: State, saved: Tensors, grads: Tensors, needs: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Returns the gradients of a call's tensors.

    A gradient is None if it is not needed, or if no output with a cotangent depends on the tensor.
    """
    if torch.compiler.is_dynamo_compiling():
        # Compiled autograd traces this. `reached` would break its graph, so it is not called, and a
        # tensor on which no output with a cotangent depends gets zeros, not None.
        if all(g is None for g in grads):
            return (None,) * len(needs)
        return _registered(op, site, state, saved, grads, needs)
    if site.sources is not None:
        needs = reached(op, site, grads, needs)
    is_absent = True
    # Kernels have no derivative, so none is launched if the gradient itself is differentiated
    # (``create_graph``). Nor is one under a mode or transform, or for a subclass: these would not
    # see the launch.
    launches = not torch.is_grad_enabled() and not is_intercepted()
    for g in grads:
        if g is None:
            continue
        is_absent = False
        if type(g) is not Tensor or autograd.is_batched(g):
            launches = False
    if is_absent or not any(needs):
        return (None,) * len(needs)
    if not launches or not PLAIN.issuperset(map(type, saved)):
        return _elsewhere(op, site, state, saved, grads, needs)
    needed = op.needed(site, grads, needs)
    outs = op.allocate_gradients(site, grads, saved, needed)
    index = site.device_index  # `on_device`, inlined as in `forward`
    if index < 0 or index == launch.current_device():
        op.backward(site, grads, saved, outs, state)
    else:
        on_device(site, op.backward, grads, saved, outs, state)
    # Most operators' `needed` returns ``needs`` itself. Then ``outs`` has one gradient for each
    # tensor. Otherwise tensors share a gradient, or their gradients are parts of one buffer.
    return outs if needed is needs else op.expose_gradients(site, grads, saved, outs, needs)


def _elsewhere(
    op: Operator, site: Site, state: State, saved: Tensors, grads: Tensors, needs: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Returns gradients without a launch.

    They are differentiable, or batched, or a dispatch mode or tensor subclass intercepts them.
    """
    is_batched = any(g is not None and autograd.is_batched(g) for g in grads)
    is_differentiable = torch.is_grad_enabled() or in_forward_mode()
    if is_batched or is_differentiable or transforms():
        return op.derivative(site, grads, saved, mask_of(site, state), needs)
    return _registered(op, site, state, saved, grads, needs)


def _registered(
    op: Operator, site: Site, state: State, saved: Tensors, grads: Tensors, needs: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Returns the gradients that the registered backward computes."""
    needed = op.needed(site, grads, needs)
    outs = operators.backward(op, site, grads, saved, state, needed)
    return op.expose_gradients(site, grads, saved, outs, needs)


def mask_of(site: Site, state: State) -> Callable[[Tensor], Dropout]:
    """Returns a function that returns the forward's dropout, for a tensor like the mask.

    Only the shape and device of that tensor are read. A call with several dropouts has one random
    state; the arguments ``steps`` and ``threshold`` select the dropout: see `rng.advanced`. The row
    length ``cols`` is the site's by default.
    """

    def masked(
        like: Tensor, steps: int = 0, threshold: int | None = None, cols: int | None = None
    ) -> Dropout:
        if not site.dropout:
            return dropout.none
        # ``like`` may be batched by a transform. The mask is not: the forward ran outside any
        # transform. So its shape comes from a new tensor, not from ``torch.empty_like``.
        plain = torch.empty(like.shape, dtype=site.acc, device=like.device)
        advanced = rng.advanced(state, steps, threshold)
        mask = dropout.keep_scale(plain, advanced, site.cols if cols is None else cols)
        return dropout.fixed(mask)

    return masked


def vjp(
    function: Callable[..., Sequence[Tensor | None]],
    primals: Tensors,
    cotangents: Tensors,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Returns the product of cotangents and ``function``'s Jacobian, None where not needed.

    The result is differentiable with respect to cotangents and primals. ``function`` gets an alias
    of each tensor, so that a gradient contains only the tensor's direct effect. For example,
    ``weight`` may have been computed from ``x``: without aliases, the gradient of ``x`` would
    include the path through ``weight``, and autograd would add that path once more.
    """
    if transforms():
        return _vjp_under_transforms(function, primals, cotangents, needs)
    wanted = _needed(primals, needs)
    inputs: list[Any] = list(primals)
    outs, used_cotangents = [], []
    with torch.enable_grad():
        for i in wanted:
            inputs[i] = _alias(inputs[i])
        for out, cotangent in zip(function(*inputs), cotangents, strict=True):
            if out is None or cotangent is None:
                continue
            if out.requires_grad:
                outs.append(out)
                used_cotangents.append(cotangent)
    if not outs or not wanted:
        return [None] * len(inputs)
    # As in autograd, an input that the function does not use has no gradient.
    grads = torch.autograd.grad(
        outs,
        [inputs[i] for i in wanted],
        used_cotangents,
        create_graph=torch.is_grad_enabled(),
        allow_unused=True,
    )
    by_index = dict(zip(wanted, grads, strict=True))
    return [by_index.get(i) for i in range(len(inputs))]


def _needed(primals: Tensors, needs: Sequence[bool]) -> list[int]:
    """Returns the indices of the tensors that are present and need a gradient."""
    pairs = zip(primals, needs, strict=True)
    return [i for i, (t, need) in enumerate(pairs) if need and t is not None]


def _alias(t: Tensor) -> Tensor:
    """Returns a tensor that requires a gradient, with the memory of ``t``."""
    return t.view_as(t) if t.requires_grad else t.detach().requires_grad_()


def _vjp_under_transforms(
    function: Callable[..., Sequence[Tensor | None]],
    primals: Tensors,
    cotangents: Tensors,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Returns the `vjp` where a torch.func transform maps a backward.

    There `vjp`'s ``requires_grad_`` does not work: so `torch.func.vjp` differentiates.
    """
    wanted = _needed(primals, needs)
    present = present_indices(cotangents)

    def function_of_wanted(*values: Tensor) -> tuple[Tensor | None, ...]:
        inputs = list(primals)
        for i, t in zip(wanted, values, strict=True):
            inputs[i] = t
        outs = function(*inputs)
        return tuple([outs[i] for i in present])

    wanted_primals = [primals[i] for i in wanted]
    pullback: Callable[..., Any] = torch.func.vjp(function_of_wanted, *wanted_primals)[1]
    grads = pullback(tuple([cotangents[i] for i in present]))
    by_index = dict(zip(wanted, grads, strict=True))
    return [by_index.get(i) for i in range(len(primals))]
