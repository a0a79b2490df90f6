"""PyTorch's autograd: Functions without checks, and derivatives that differ between releases."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .dispatch import without_modes
from .lookup import find

__all__ = [
    "below_autograd",
    "clamp_has_gradients_at_limits",
    "fast_apply",
    "fmax_shares_ties",
    "is_batched",
    "noticing_autograd_functions",
    "reshaped_without_view",
    "unflatten",
]

# A context in which autograd does not record views. An operator's outputs may be slices of one
# buffer, created in this context. If PyTorch lacks the private name, the slices are views to
# autograd, which raises an error if one is changed in place.
below_autograd: Callable[[], AbstractContextManager[Any]] = find(
    "_C._AutoDispatchBelowADInplaceOrView", nullcontext
)


def _sliced(buffer: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = buffer.split(list(map(Tensor.numel, like)))
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]


# Splits a buffer into tensors of the shapes of others, in one call. If PyTorch lacks the private
# name, `_sliced` makes one view after the other, which is slower.
unflatten: Callable[[Tensor, list[Tensor]], Sequence[Tensor]] = (
    find("_C._nn.unflatten_dense_tensors", None) or _sliced
)

# Returns a contiguous tensor in another shape, as one that is no view to autograd or AOTAutograd.
reshaped_without_view: Callable[[Tensor, list[Any]], Tensor] = find(
    "ops.aten._unsafe_view.default", Tensor.view
)

# Returns whether a gradient is a batched tensor, which has no memory to read (``autograd.grad(…,
# is_grads_batched=True)``). Its type is Tensor, and no public function identifies it. Without the
# private name, PyTorch's operators compute every backward, which is slower.
is_batched: Callable[[Tensor], bool] = find("_C._functorch.is_legacy_batchedtensor", lambda t: True)

# --- autograd Functions ---------------------------------------------------------------------------


class _Callbacks(threading.local):
    """The callbacks of the `noticing_autograd_functions` contexts that are active in this thread.

    Only the last one is called, that of the innermost context.
    """

    def __init__(self) -> None:
        self.entered: list[Callable[[type], None]] = []


_callbacks = _Callbacks()
# All threads share `Function.apply`, and their contexts may overlap in any order. The list has the
# original method once for each active context, so its length counts them. The first context
# replaces the method, and the last one to end restores it.
_lock, _originals = threading.Lock(), list[Any]()


@contextmanager
def noticing_autograd_functions(callback: Callable[[type], None]) -> Iterator[None]:
    """Calls ``callback`` with each `torch.autograd.Function` of this thread, before it is applied.

    It replaces `Function.apply` inside the block. `sys.settrace` would not do: from PyTorch 2.15
    on, the method is not written in Python.
    """
    function = torch.autograd.Function
    with _lock:
        original = _originals[0] if _originals else vars(function)["apply"]
        _originals.append(original)

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            # Other threads call this function too. They have no callbacks.
            for innermost in _callbacks.entered[-1:]:
                innermost(cls)
            return original.__get__(None, cls)(*args, **kwargs)

        function.apply = classmethod(apply)  # type: ignore[assignment]
    _callbacks.entered.append(callback)
    try:
        yield
    finally:
        _callbacks.entered.pop()
        with _lock:
            _originals.pop()
            if not _originals:
                function.apply = original  # type: ignore[method-assign]


def fast_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Returns ``function.apply`` without its checks, for calls outside torch.func.

    It takes 10 µs instead of 15 on a CPU. The public method looks for transforms, which the caller
    has already done. Without the private names the public method is used, which is slower.
    """
    # A call's node in the graph is an instance of ``_backward_cls``, and the engine calls its
    # ``apply``. The inherited `BackwardCFunction.apply` looks up whether the Function defines
    # ``backward`` or ``vjp``, and calls that with the node as ``ctx``. All Functions passed here
    # define ``backward``. So it replaces ``apply``, which saves the look-up.
    if find("autograd.function.BackwardCFunction.apply", None) is not None:
        function._backward_cls.apply = function.backward  # type: ignore[attr-defined]
    if find("_C._FunctionBase.apply", None) is None:
        return function.apply
    # The next class in the method resolution order has the C function that `Function.apply` calls.
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


# --- derivatives that changed ---------------------------------------------------------------------
# Kernels compute the same derivatives as the installed PyTorch. Each function below determines how
# PyTorch defines one derivative: once per process, from a gradient on the CPU.


def _gradient_at_one(function: Callable[[Tensor], Tensor]) -> float:
    with without_modes(), torch.inference_mode(False), torch.enable_grad():
        x = torch.ones((), device="cpu", requires_grad=True)
        return float(torch.autograd.grad(function(x), x)[0])


@functools.cache
def clamp_has_gradients_at_limits() -> bool:
    """Returns whether an element equal to a limit of `torch.clamp` has a gradient.

    It has up to PyTorch 2.14.
    """
    return _gradient_at_one(lambda x: x.clamp(max=1.0)) == 1.0


@functools.cache
def fmax_shares_ties() -> bool:
    """Returns whether equal arguments of `torch.fmax` share the gradient.

    They do from PyTorch 2.15 on.
    """
    return _gradient_at_one(lambda x: torch.fmax(x, torch.ones_like(x))) == 0.5
