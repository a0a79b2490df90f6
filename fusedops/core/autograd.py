"""What all autograd Functions of the library share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["apply", "autocast_dtype", "differentiates", "forward_mode", "plain", "transforms_active"]

_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})


def plain(*tensors: Tensor | None) -> bool:
    """Whether the call may launch kernels by itself: ordinary tensors, and nobody tracing or intercepting operators."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(type(t) in _PLAIN for t in tensors)


def transforms_active() -> bool:
    """Whether a torch.func transform (grad, vmap, …) is in force."""
    return bool(torch._C._are_functorch_transforms_active())


def forward_mode() -> bool:
    """Whether forward-mode differentiation is in force."""
    return forward_ad._current_level >= 0


def differentiates(*tensors: Tensor | None) -> bool:
    """Whether the call must go through an autograd Function, rather than straight to the kernel."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return True
    return forward_mode() or transforms_active()


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply`` without its binding of default arguments, which costs more than the rest of a small call.

    `torch.autograd.Function.apply` inspects the signature of ``forward`` at every call of a Function that has
    ``setup_context``; outside torch.func transforms nothing needs that, as all arguments are given here.
    """
    if transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)


def autocast_dtype(device_type: str, dtype: torch.dtype) -> torch.dtype | None:
    """The output dtype that autocast asks of a norm: fp32 on GPUs, as for `F.layer_norm`; None leaves it alone."""
    if device_type == "cuda" and dtype != torch.float64 and torch.is_autocast_enabled("cuda"):
        return torch.float32
    return None
