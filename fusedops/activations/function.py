"""The activation family's autograd Function: first order through the kernels, everything else through the formula.

Under ``create_graph``, forward mode and torch.func transforms the derivative is written in differentiable PyTorch
operators (`reference`), so every order works; the keep mask comes from a kernel in each case.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor

from ..core import autograd
from ..core.rng import Seed
from . import launching, reference
from .launching import Packed, Site, site_of

__all__ = ["ActivationFunction", "Call", "anchor", "packing"]


class Call:
    """What a call of `ActivationFunction` is besides its tensors.

    ``packed`` says which half of ``base`` the gate is, where gate and up are the halves of one tensor; "" elsewhere.
    """

    __slots__ = ("packed", "seed", "site", "threshold")

    def __init__(self, site: Site, seed: Seed | None, threshold: int, packed: Packed = "") -> None:
        self.site = site
        self.seed = seed
        self.threshold = threshold
        self.packed = packed


# --- halves of one tensor -------------------------------------------------------------------------------------------


def packing(gate: Tensor, up: Tensor) -> Packed:
    """Which half of one contiguous tensor ``gate`` is, where ``up`` is the other and both were cut straight from it.

    "" wherever a gradient for that tensor, in place of gradients for the halves, could be told from these.
    """
    base = gate._base
    if base is None or base is not up._base or not (gate.requires_grad and up.requires_grad and base.requires_grad):
        return ""
    cols = gate.shape[-1]
    near, far = gate.storage_offset(), up.storage_offset()
    if base.dtype is not gate.dtype or base.dtype is not up.dtype or not base.is_contiguous():
        return ""
    if base.shape != (*gate.shape[:-1], 2 * cols) or near - far not in (cols, -cols):
        return ""
    if gate.stride() != base.stride() or up.stride() != base.stride():
        return ""
    if _observed(gate) or _observed(up) or not (_cut_from(gate, base) and _cut_from(up, base)):
        return ""
    return "gate" if near < far else "up"


def _observed(half: Tensor) -> bool:
    """Whether somebody waits for this tensor's own gradient."""
    return bool(half._backward_hooks) or half.retains_grad


_CUTS = frozenset({"SplitBackward0", "SplitWithSizesBackward0", "SliceBackward0", "NarrowBackward0"})


def _cut_from(half: Tensor, base: Tensor) -> bool:
    """Whether nothing stands between them in the graph: another view, or the node of a module's hook, would be missed."""
    node = half.grad_fn
    if node is None or node.name() not in _CUTS:
        return False
    (parent, index), *others = node.next_functions
    if others:
        return False
    if base.grad_fn is None:
        return getattr(parent, "variable", None) is base
    return parent is base.grad_fn and index == base.output_nr


@functools.cache
def anchor() -> tuple[Tensor, Any]:
    """A leaf of nobody's, and its node in the graph, which the engine visits when it visits all leaves."""
    with torch.enable_grad():
        leaf = torch.zeros((), requires_grad=True, device="cpu")
        return leaf, leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _whole_graph_runs() -> bool:
    """Whether this backward is for all leaves, not for chosen tensors: then the engine visits the anchor too."""
    if torch.compiler.is_compiling():
        return False
    try:
        return bool(torch._C._will_engine_execute_node(anchor()[1]))
    except RuntimeError:  # the engine is not the one that runs
        return False


class ActivationFunction(torch.autograd.Function):
    """The output of `launching.forward`.

    Where gate and up are the halves of ``base`` (`packing`), base is an input too, though it is not read: a backward
    that nobody can tell from the ordinary one writes one gradient for base, which else autograd would put together
    from two, at the cost of a copy. ``anchor`` is there for that backward to know what it is asked for.
    """

    @staticmethod
    def forward(x: Tensor, other: Tensor | None, base: Tensor | None, anchor: Tensor | None, call: Call) -> Any:
        """One launch."""
        return launching.forward(call.site, x, other, call.seed, call.threshold)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps the inputs, which the caller holds anyway."""
        x, other, _, _, call = inputs
        # Under transforms the mask is drawn again for a tensor that is batched as the forward was: the output.
        like = output if call.seed is not None and autograd.transforms_active() else None
        ctx.save_for_backward(x, other, like)
        ctx.set_materialize_grads(False)
        ctx.call = call
        if call.packed:
            ctx.halves = weakref.ref(x), weakref.ref(other)
        if autograd.forward_mode():
            ctx.save_for_forward(x, other, output)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        """Kernels at first order, the formula where the gradient is itself differentiated or batched."""
        if dy is None:
            return (None,) * 5
        call: Call = ctx.call
        x, other, like = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled() or autograd.batched(dy):
            return (*_formula(dy, x, other, like, call, needs), None, None, None)
        dy = autograd.settled(dy)
        if call.packed and all(needs[:3]) and _unobserved(ctx, x, other) and _whole_graph_runs():
            dbase, _ = launching.backward(call.site, dy, x, other, None, 0, (True, True), call.packed)
            return None, None, dbase, None, None
        packed: Packed = "gate" if call.site.kind == "packed" else ""
        dx, dother = launching.backward(call.site, dy, x, other, call.seed, call.threshold, needs[:2], packed)
        return dx, dother, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Forward mode, by the formula."""
        call: Call = ctx.call
        x, other, y = ctx.saved_tensors
        dx, dother, *_ = tangents
        act = call.site.activation
        if call.site.kind == "bias":
            scale = _keep_scale(y, call)
            dy = reference.bias_act_tangent(dx, dother, x, other, act.derivative, scale)
        else:
            dy = reference.glu_tangent(dx, dother, x, other, act.formula, act.derivative)
        return dy.to(call.site.y)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        """Batches rows: the kernels take any number of leading dimensions. A batched bias takes the formula."""
        x, other, _, _, call = args
        x_dim, other_dim = in_dims[:2]
        bias = call.site.kind == "bias"
        draws = call.seed is not None and call.threshold < 65536
        if draws and info.randomness == "error":
            raise RuntimeError(
                "fusedops: dropout was called under torch.vmap; pass randomness='different' or randomness='same'"
            )
        x = x.movedim(x_dim, 0) if x_dim is not None else x.expand(info.batch_size, *x.shape)
        if other_dim is not None:
            other = other.movedim(other_dim, 0)
        elif other is not None and not bias:
            other = other.expand(info.batch_size, *other.shape)
        same = draws and info.randomness == "same"
        if not bias or (not same and other_dim is None):
            return autograd.apply(ActivationFunction, x, other, None, None, call), 0
        scale = _keep_scale(x[0] if same else x, call)
        if other_dim is not None:
            other = other.view(other.shape[0], *(1,) * (x.dim() - 2), other.shape[-1])
        return reference.bias_act(x, other, call.site.activation.formula, scale).to(call.site.y), 0


def _unobserved(ctx: Any, gate: Tensor, up: Tensor) -> bool:
    """Whether still nobody waits for the halves' own gradients.

    What hooks for saved tensors gave back are other tensors than the caller's, which may have gained a hook unseen.
    """
    first, second = ctx.halves
    return first() is gate and second() is up and not _observed(gate) and not _observed(up)


def _keep_scale(like: Tensor, call: Call) -> Tensor | None:
    """The call's keep mask over its probability, as a tensor in the shape of ``like``; None without dropout."""
    if call.seed is None:
        return None
    dtype = reference.accumulator(like.dtype)
    site = site_of("bias", "identity", call.site.cols, call.site.device_index, dtype, None)
    ones = torch.ones_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    return autograd.apply(ActivationFunction, ones, None, None, None, Call(site, call.seed, call.threshold))  # type: ignore[no-any-return]


def _formula(dy: Tensor, x: Tensor, other: Tensor | None, like: Tensor | None, call: Call,
             needs: tuple[bool, ...]) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients in differentiable operators."""
    site = call.site
    act = site.activation
    if site.kind == "bias":
        if like is None and call.seed is not None:
            # Not batched, whatever the gradient is: the forward was outside any transform.
            like = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        scale = None if like is None else _keep_scale(like, call)
        dx, dother = reference.bias_act_backward(dy, x, other, act.derivative, scale)
    else:
        dx, dother = reference.glu_backward(dy, x, other, act.formula, act.derivative)
        if site.kind == "packed":
            dx = torch.cat((dx, dother), -1)
    return (
        dx.to(site.x) if needs[0] else None,
        dother.to(site.other) if needs[1] and site.other is not None else None,
    )
