"""The functions and methods of Python that dispatch to PyTorch's operators."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .dispatch import DispatchMode, without_modes
from .lookup import find

__all__ = ["binding"]

# Where a generated function of Python may be. Without the private module, activations are called as
# operators, which is slower.
_PLACES = (torch, find("_C._nn", torch), Tensor)
# A generated function is one of these; functions written in Python may do more than dispatch.
_GENERATED = (types.BuiltinFunctionType, types.MethodDescriptorType)
_CAST: Any = find("ops.aten._to_copy.default", None)


class _DispatchedError(Exception):
    """Ends a call at the operator that it dispatches to."""


class _Ending(DispatchMode):  # type: ignore[misc]
    """Ends calls before they compute anything."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _DispatchedError(func, args, kwargs or {})


def binding(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Returns a function of Python that dispatches to an operator, and its keyword arguments.

    It takes less host time than the operator's Python object, which converts arguments by the
    operator's schema. Both are called once, to compare what they dispatch to, with which arguments:
    some functions have other defaults than their operators, such as the reduction of `mse_loss`.
    Nothing is computed. Returns None if there is none for such arguments.

    Args:
        operator: an operator, with its overload.
        args: examples of its positional arguments; their values may be wrong.
        kwargs: examples of its keyword arguments.
    """
    named = dict(kwargs)
    # An operator of another library may have the name of one of PyTorch's.
    if operator.namespace != "aten":
        return None
    name = str(operator.overloadpacket.__name__)
    if operator is _CAST:  # the method may return the tensor itself, unless it is to copy
        name, named["copy"] = "to", True
    dispatched = _dispatched(operator, args, kwargs)
    for place in _PLACES:
        function = getattr(place, name, None)
        if isinstance(function, _GENERATED) and _dispatched(function, args, named) == dispatched:
            return function, named
    return None


def _dispatched(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Returns the first call that a function dispatches to, as text, or its error."""
    with without_modes(), torch.no_grad():
        try:
            with _Ending():
                return f"no call, but {function(*args, **kwargs)}"
        # The values of the arguments may be wrong: then both raise the same error.
        except Exception as error:  # noqa: BLE001
            return repr(error)
