"""Registered operators: what torch.compile and other tracers see of a call, and a short way for compiled code.

A compiled graph calls an operator through the dispatcher, which looks for somebody who wants to observe the call, and
in the end comes back to Python: in the midst of a step that costs several times what a launch costs. Where nobody
observes, the operator's Python object calls the implementation at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

__all__ = ["implement"]

_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_PLAIN = _TENSORS | {type(None), str, int, float, bool}


def implement(
    library: torch.library.Library, name: str, function: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Gives the operator ``fusedops::name`` its implementation for every device, and the fake one for tracers."""
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusedops::{name}", fake, lib=library)
    operator = getattr(torch.ops.fusedops, name).default
    if not operator._schema.is_mutable:  # else the dispatcher also counts the versions of what is written
        operator._op = _shortened(operator._op, function)


def _shortened(dispatched: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """``dispatched``, or ``function`` where the dispatcher would do nothing but call that.

    The questions are in one flat function: each is asked at every call. What cannot be asked is missed: an execution
    trace that is taken without a profiler, and what others register for these operators, which are private.
    """
    modes, function_mode = torch._C._len_torch_dispatch_stack, torch._C._is_torch_function_mode_enabled
    grad_mode, transforms = torch.is_grad_enabled, torch._C._are_functorch_transforms_active
    profiled, traced = torch._C._autograd._profiler_enabled, torch._C._is_tracing

    def call(*args: Any, **named: Any) -> Any:
        watched = (
            grad_mode() or modes() or function_mode() or transforms() or profiled() or traced()
            or forward_ad._current_level >= 0
            or profiler._is_profiler_enabled  # perhaps by another thread, of all threads
        )  # fmt: skip
        if watched or named or not _PLAIN.issuperset(map(type, args)):
            return dispatched(*args, **named)
        try:
            for arg in args:
                # Without memory, or with other numbers in it than the tensor's.
                if type(arg) in _TENSORS and (not arg.data_ptr() or arg.is_neg()):
                    watched = True
        except RuntimeError:  # no storage either: batches in disguise, what a transform has left, sparse layouts
            watched = True
        return dispatched(*args) if watched else function(*args)

    return call
