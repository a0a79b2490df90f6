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
# Whether PyTorch computes an operator by others, to which its function dispatches at once.
_is_composite: Any = find("_C._dispatch_has_kernel_for_dispatch_key", lambda name, key: False)


class _DispatchedError(Exception):
    """Ends a call at the operator that it dispatches to."""

    def __init__(self, operator: Any) -> None:
        super().__init__(operator)
        self.operator = operator


class _Ending(DispatchMode):  # type: ignore[misc]
    """Ends calls before they compute anything."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _DispatchedError(func)


def binding(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Returns a function of Python that dispatches to an operator, and its keyword arguments.

    It takes half of the host time of the operator's Python object, which converts arguments by the
    operator's schema. It is called once, to see which operator it dispatches to; nothing is
    computed. Returns None if there is none for such arguments.

    Args:
        operator: an operator, with its overload.
        args: examples of its positional arguments; only their types count.
        kwargs: examples of its keyword arguments.
    """
    named = dict(kwargs)
    # An operator of another library may have the name of one of PyTorch's.
    if operator.namespace != "aten":
        return None
    name = str(operator.overloadpacket.__name__)
    if operator is _CAST:  # the method may return the tensor itself, unless it is to copy
        name, named["copy"] = "to", True
    for place in _PLACES:
        function = getattr(place, name, None)
        if isinstance(function, _GENERATED) and _dispatches(function, operator, args, named):
            return function, named
    return None


def _dispatches(
    function: Any, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Returns whether a call dispatches to an operator, or to those that it consists of."""
    is_composite = _is_composite(operator.name(), "CompositeImplicitAutograd")
    try:
        with without_modes(), torch.no_grad(), _Ending():
            function(*args, **kwargs)
    except _DispatchedError as end:
        return is_composite or end.operator is operator
    # The function does not take such arguments; or it takes them, and their values are wrong.
    except Exception as error:  # noqa: BLE001
        return is_composite and not isinstance(error, TypeError)
    return False
