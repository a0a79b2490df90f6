"""What all autograd Functions of the library share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

__all__ = [
    "apply",
    "autocast_dtype",
    "batched",
    "forward_mode",
    "once",
    "plain",
    "settled",
    "transforming",
    "transforms_active",
]

_Gradient = TypeVar("_Gradient", bound=Tensor | None)

_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})


def plain(*tensors: Tensor | None) -> bool:
    """Whether the call may launch kernels by itself: ordinary tensors, and nobody tracing or intercepting operators."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(type(t) in _PLAIN for t in tensors)


# Whether a torch.func transform (grad, vmap, …) is in force.
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def forward_mode() -> bool:
    """Whether forward-mode differentiation is in force."""
    return forward_ad._current_level >= 0


def transforming() -> bool:
    """Whether a call must go through its autograd Function although no argument requires a gradient."""
    return transforms_active() or forward_ad._current_level >= 0


def batched(*gradients: Tensor) -> bool:
    """Whether one of the gradients is, or may be, a batch in disguise, with no memory that a kernel could read.

    Besides torch.func, ``torch.autograd.grad(…, is_grads_batched=True)`` maps, in an older way.
    """
    return transforms_active() or any(map(torch._C._functorch.is_legacy_batchedtensor, gradients))


def settled(gradient: _Gradient) -> _Gradient:
    """The gradient with the sign that a view of PyTorch's may leave to be flipped: in memory are other numbers.

    Imaginary parts of conjugated tensors are such views.
    """
    return gradient.resolve_neg() if gradient is not None and gradient.is_neg() else gradient  # type: ignore[return-value]


class _Once(torch.autograd.Function):
    """What an operator computes from the tensors, with a derivative that is an error."""

    @staticmethod
    def forward(ctx: Any, operator: Callable[..., Any], args: tuple[Any, ...], *tensors: Tensor) -> Any:
        return tuple(operator(*args))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("fusedops: no double backward under torch.compile, dispatch modes or tensor subclasses; "
                           "call outside of them")  # fmt: skip


def once(operator: Callable[..., Any], *args: Any) -> tuple[Tensor, ...]:
    """The gradients that a registered operator gives, which is not differentiable itself: an error if that is asked.

    An autograd formula of the operator's own that only raises it would take every call through the dispatcher twice.
    """
    if not torch.is_grad_enabled():
        return tuple(operator(*args))
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return _Once.apply(operator, args, *tensors)  # type: ignore[no-any-return, no-untyped-call]


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply`` without its binding of default arguments, which costs more than the rest of a small call.

    `torch.autograd.Function.apply` inspects the signature of ``forward`` at every call of a Function that has
    ``setup_context``; outside torch.func transforms nothing needs that, as all arguments are given here.
    """
    if transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def _has_autocast(operator: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, "AutocastCUDA"))


# The operators that this PyTorch's GPU autocast has on its fp32 list (rms_norm: from 2.12 on). A constant, as
# torch.compile cannot look into the question.
_WIDENED = frozenset(name for name in ("aten::layer_norm", "aten::rms_norm") if _has_autocast(name))


def _on_gpu(t: Tensor) -> bool:
    return bool(getattr(t, "is_cuda", False))


def autocast_dtype(operator: str, *tensors: Tensor | None) -> torch.dtype | None:
    """The output dtype that GPU autocast asks of PyTorch's operator: fp32, never of fp64; None leaves it alone."""
    given = [t for t in tensors if t is not None]
    if all(_on_gpu(t) and t.dtype != torch.float64 for t in given) and operator in _WIDENED:
        return torch.float32
    return None
