"""PyTorch's dispatcher: modes, `torch.func` transforms, profilers, autocast, registered operators.

A call that nothing observes skips the dispatcher. Without one of the names that tell so, something
is taken to observe it: slower.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad

from .lookup import find, imported

__all__ = [
    "DispatchMode",
    "any_autocast_enabled",
    "cast_by_autocast",
    "decompositions",
    "dispatch_modes",
    "function_modes",
    "in_forward_mode",
    "is_intercepted",
    "jit_tracing",
    "out_of_place",
    "profiling",
    "replace_call",
    "transforms",
    "undefine",
    "without_modes",
    "without_transforms",
]

# --- what observes a call -------------------------------------------------------------------------

# How many dispatch modes are on (FakeTensor, `make_fx`, a user's own). PyTorch has public modes,
# and no public question. Without it every eager call goes through the registered operators: slower.
dispatch_modes: Callable[[], int] = find("_C._len_torch_dispatch_stack", lambda: 1)

# Whether a function mode is on, as `torch.device` is as a context: it sees the call of a registered
# operator before the dispatcher does. Without it operators go through the dispatcher: slower.
function_modes: Callable[[], bool] = find("_C._is_torch_function_mode_enabled", lambda: True)

# Whether `torch.jit.trace` records, which sees only what the dispatcher sees. The public
# `torch.jit.is_tracing` is a function of Python around it. Without it operators go through the
# dispatcher: slower.
jit_tracing: Callable[[], bool] = find("_C._is_tracing", lambda: True)

# Whether a profiler runs in this thread.
_profiling: Callable[[], bool] = find("_C._autograd._profiler_enabled", lambda: True)


def profiling() -> bool:
    """Returns whether a profiler runs, in this thread or of all threads.

    Profilers see the dispatcher's calls. Without the private names operators go through it: slower.
    """
    # The first is this thread's state; the second is PyTorch's mark that any profiler runs.
    return _profiling() or getattr(torch.autograd.profiler, "_is_profiler_enabled", True)


# Whether a torch.func transform is on. Kernels cannot read the wrapped tensors of a transform.
# Without it every call runs the reference implementation: slower.
transforms: Callable[[], bool] = find("_C._are_functorch_transforms_active", lambda: True)


def in_forward_mode() -> bool:
    """Returns whether forward-mode differentiation is on.

    The level is -1 outside `forward_ad.dual_level`. Without the private name it is taken to be on,
    and the reference implementation runs: slower.
    """
    return getattr(forward_ad, "_current_level", 0) >= 0


def is_intercepted() -> bool:
    """Returns whether a dispatch mode, a torch.func transform or forward mode is on."""
    # The host asks this in every call: `in_forward_mode` is written out.
    return dispatch_modes() > 0 or transforms() or getattr(forward_ad, "_current_level", 0) >= 0


# --- blocks that nothing observes -----------------------------------------------------------------

# Turns all torch.func transforms off for a block. A random state is one for the whole call,
# whatever `vmap` maps over. Without it a draw under vmap is refused by PyTorch, with its message.
without_transforms: Callable[[], AbstractContextManager[Any]] = find(
    "_C._DisableFuncTorch", nullcontext
)


@contextmanager
def without_modes() -> Iterator[None]:
    """Turns all dispatch modes off for a block.

    Without the private name they see what the block calls.
    """
    disable = imported("torch.utils._python_dispatch", "_disable_current_modes")
    with disable() if disable is not None else nullcontext():
        yield


# The base of modes that see every operator; it has no public name. Without it nothing can be
# traced.
DispatchMode: Any = imported("torch.utils._python_dispatch", "TorchDispatchMode") or object

# --- autocast -------------------------------------------------------------------------------------

# Whether autocast is on for any device, in one question. The public `torch.is_autocast_enabled`
# takes a device's kind. Without it every call of a fused model asks for its own device: slower.
any_autocast_enabled: Callable[[], bool] = find("_C._is_any_autocast_enabled", lambda: True)

_has_kernel: Callable[[str, str], bool] = find(
    "_C._dispatch_has_kernel_for_dispatch_key", lambda name, key: False
)


def cast_by_autocast(operator: str) -> bool:
    """Returns whether GPU autocast runs PyTorch's ``operator`` in fp32.

    The list differs between releases: `rms_norm` is in it from PyTorch 2.12 on. Without the private
    name the operator's dtypes are left alone.
    """
    try:
        return bool(_has_kernel(operator, "AutocastCUDA"))
    except RuntimeError:  # no such operator
        return False


# --- registered operators -------------------------------------------------------------------------


def replace_call(operator: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces what a registered operator's Python object calls by ``wrap`` of it.

    Inductor's code calls that object. Without the private attribute nothing changes: compiled code
    goes through the dispatcher, slower.
    """
    if hasattr(operator, "_op"):
        operator._op = wrap(operator._op)


def undefine(library: torch.library.Library) -> None:
    """Removes a library's registrations, as where PyTorch refused one of them.

    Without the private method PyTorch removes them at the library's last reference.
    """
    destroy = getattr(library, "_destroy", None)
    if destroy is not None:
        destroy()


@functools.cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Returns PyTorch's operators in terms of others.

    Without the private name the compiler traces only operators that it has a lowering for.
    """
    table = imported("torch._decomp", "decomposition_table")
    return {} if table is None else table


def out_of_place(operator: Any) -> Any:
    """Returns the operator that returns what this one writes into its first tensor, or None."""
    # ``aten::add_.Tensor`` is ``torch.ops.aten.add_.Tensor``; one without a suffix is the overload
    # "default".
    name, _, overload = operator.name().partition("::")[2].partition(".")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    return getattr(packet, overload or "default", None)
