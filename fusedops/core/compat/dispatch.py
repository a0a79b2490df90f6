"""PyTorch's dispatcher: modes, `torch.func` transforms, profilers, autocast, registered operators.

A call that nothing observes can bypass the dispatcher. If a release lacks a private name by which
this is queried, the call counts as observed, and is slower.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from .lookup import find, imported

__all__ = [
    "DispatchMode",
    "above_autograd",
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

_T = TypeVar("_T")

# --- what observes a call -------------------------------------------------------------------------

# Returns how many dispatch modes are active (FakeTensor, `make_fx`, a user's own). No public
# function does. Without it every eager call goes through the registered operators, which is slower.
dispatch_modes: Callable[[], int] = find("_C._len_torch_dispatch_stack", lambda: 1)

# Returns whether a function mode is active, such as ``with torch.device(...)``. A function mode
# sees the call of a registered operator before the dispatcher does. Without the private name
# operators go through the dispatcher, which is slower.
function_modes: Callable[[], bool] = find("_C._is_torch_function_mode_enabled", lambda: True)

# Returns whether `torch.jit.trace` records. It records only calls of the dispatcher. The public
# `torch.jit.is_tracing` is a Python function that calls this one. Without the private name
# operators go through the dispatcher, which is slower.
jit_tracing: Callable[[], bool] = find("_C._is_tracing", lambda: True)

# Returns whether a profiler runs in this thread.
_profiling: Callable[[], bool] = find("_C._autograd._profiler_enabled", lambda: True)


def profiling() -> bool:
    """Returns whether a profiler runs, of this thread or of all threads.

    Profilers see only calls of the dispatcher. Without the private names operators go through the
    dispatcher, which is slower.
    """
    # `_profiling` queries this thread. The attribute is True while any profiler runs.
    return _profiling() or getattr(torch.autograd.profiler, "_is_profiler_enabled", True)


# Returns whether a torch.func transform is active. Kernels cannot read a transform's wrapped
# tensors. Without the private name every call runs the reference implementation, which is slower.
transforms: Callable[[], bool] = find("_C._are_functorch_transforms_active", lambda: True)


def in_forward_mode() -> bool:
    """Returns whether forward-mode differentiation is active.

    The level is -1 outside `forward_ad.dual_level`. Without the private name the result is True,
    and the reference implementation runs, which is slower.
    """
    return getattr(forward_ad, "_current_level", 0) >= 0


def is_intercepted() -> bool:
    """Returns whether a dispatch mode, a torch.func transform or forward mode is active."""
    # `in_forward_mode` is inlined, because every call evaluates this.
    return dispatch_modes() > 0 or transforms() or getattr(forward_ad, "_current_level", 0) >= 0


# --- blocks that nothing observes -----------------------------------------------------------------

# A context in which all torch.func transforms are off. It is used to draw the random state of a
# call, which is one state even if `vmap` maps the call. Without the private name a draw under
# `vmap` raises PyTorch's error.
without_transforms: Callable[[], AbstractContextManager[Any]] = find(
    "_C._DisableFuncTorch", nullcontext
)


@contextmanager
def without_modes() -> Iterator[None]:
    """Turns all dispatch modes off for a block.

    Without the private name the modes stay on, and see the operators that the block calls.
    """
    disable = imported("torch.utils._python_dispatch", "_disable_current_modes")
    with disable() if disable is not None else nullcontext():
        yield


# Returns whether this thread leaves out a dispatch key. Without the private name the result is
# True, and `above_autograd` always starts a thread, which is slower.
_excludes: Callable[[Any], bool] = find(
    "_C._dispatch_tls_is_dispatch_key_excluded", lambda key: True
)
_AUTOGRAD: Any = find("_C.DispatchKey.AutogradCPU", None)


def above_autograd(
    function: Callable[[], _T], autocast: Sequence[tuple[str, torch.dtype]] = ()
) -> _T:
    """Returns ``function()``, with calls of PyTorch's operators that autograd sees.

    Within a registered operator PyTorch dispatches below autograd, where a trace would see other
    operators. There the function runs in a new thread, which dispatches as usual.

    Args:
        function: the function.
        autocast: the kinds of devices for which autocast is enabled, each with its dtype.
    """
    if _AUTOGRAD is not None and not _excludes(_AUTOGRAD):
        return function()

    def call() -> _T:
        with ExitStack() as stack:
            for kind, dtype in autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


# The base class of dispatch modes, which has no public name. Without it functions cannot be traced.
DispatchMode: Any = imported("torch.utils._python_dispatch", "TorchDispatchMode") or object

# --- autocast -------------------------------------------------------------------------------------

# Returns whether autocast is on for any type of device. The public `torch.is_autocast_enabled`
# takes one type. Without the private name every call of a fused model queries its own device's
# type, which is slower.
any_autocast_enabled: Callable[[], bool] = find("_C._is_any_autocast_enabled", lambda: True)

_has_kernel: Callable[[str, str], bool] = find(
    "_C._dispatch_has_kernel_for_dispatch_key", lambda name, key: False
)


def cast_by_autocast(operator: str) -> bool:
    """Returns whether GPU autocast runs PyTorch's ``operator`` in fp32.

    Releases differ: for example, `rms_norm` runs in fp32 from PyTorch 2.12 on. Without the private
    name the result is False.
    """
    try:
        return bool(_has_kernel(operator, "AutocastCUDA"))
    except RuntimeError:  # no such operator
        return False


# --- registered operators -------------------------------------------------------------------------


def replace_call(operator: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces the function that a registered operator's Python object calls.

    ``wrap`` takes this function and returns the new one. Inductor's code calls the Python object.
    Without the private attribute nothing is replaced, and compiled code goes through the
    dispatcher, which is slower.
    """
    if hasattr(operator, "_op"):
        operator._op = wrap(operator._op)


def undefine(library: torch.library.Library) -> None:
    """Removes a library's registrations, for example after PyTorch refused one of them.

    Without the private method PyTorch removes them when the library is garbage-collected.
    """
    destroy = getattr(library, "_destroy", None)
    if destroy is not None:
        destroy()


@functools.cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Returns PyTorch's decompositions: functions that compute an operator by other operators.

    Without the private name there are none, and the compiler can trace only operators for which it
    has a lowering.
    """
    table = imported("torch._decomp", "decomposition_table")
    return {} if table is None else table


def out_of_place(operator: Any) -> Any:
    """Returns the out-of-place form of an in-place operator (of ``add_``: ``add``), or None."""
    # For example, the name of ``torch.ops.aten.add_.Tensor`` is ``aten::add_.Tensor``. A name
    # without a suffix is that of the overload "default".
    name, _, overload = operator.name().partition("::")[2].partition(".")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    return getattr(packet, overload or "default", None)
