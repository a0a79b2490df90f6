"""Kinds of Python objects that a function may use: constants, libraries, and what may change."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterable, Iterator
from types import (
    BuiltinMethodType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import nn

__all__ = [
    "LIBRARIES",
    "MODES",
    "PLAIN",
    "inherits_a_forward",
    "is_apply",
    "is_autograd",
    "is_of_a_library",
    "is_of_python",
    "is_pure",
    "slots_of",
]

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size)

# Modules that cannot change while a program runs, so that they are no part of its state.
LIBRARIES = frozenset(
    {"torch", "einops", "math", "enum", builtins.__name__, __name__.partition(".")[0]}
)
# Functions that return a mode of PyTorch, which the trace sets.
MODES = frozenset({"is_grad_enabled", "is_inference_mode_enabled"})
# Modules of Python whose functions in C have the same result for the same arguments.
_PURE = LIBRARIES | {"cmath", "operator", "_operator", "functools", "_functools", "itertools"}
# Functions that read attributes and variables: `bytecode` finds a call of them by their names only.
_READERS = frozenset({getattr, hasattr, vars, dir, globals, locals, eval, exec, __import__})
_METHODS = (MethodType, BuiltinMethodType)
# Py_TPFLAGS_HEAPTYPE, which classes that a program creates have, and Python's built-in ones lack.
_HEAP_TYPE = 1 << 9


def is_pure(function: Any) -> bool:
    """Whether a function in C returns the same for the same arguments, judged by its module.

    A method of an object, such as a dict's ``get``, is not pure, nor is a function that draws
    random numbers, or `getattr` under another name.
    """
    if function in _READERS:
        return False
    if not isinstance(function.__self__, (ModuleType, type, type(None))):
        return False
    return _package(_home(function)) in _PURE


def _home(value: Any) -> str:
    """Return the name of the Python module of a function or class."""
    module = getattr(value, "__module__", None)
    if module:
        return str(module)
    owner = getattr(value, "__self__", None)  # a class method in C has no module, but its class has
    return str((owner if isinstance(owner, type) else type(value)).__module__)


# Values that cannot change are compared by identity, and a walk ends at them. Their ``__module__``
# alone does not show that they cannot change:
#
#   a function   that `exec` defines has the ``__name__`` of its globals, which are not the module's
#   a class      of `builtins` may be the program's: then it is a heap type
#   a method     in C has no ``__module__``, but its object or class has


def is_of_a_library(value: Any) -> bool:
    """Whether a function, class or module is PyTorch's, einops' or Python's own."""
    if isinstance(value, ModuleType):
        return _package(value.__name__) in LIBRARIES
    home = _home(value)
    if _package(home) not in LIBRARIES:
        return False
    if isinstance(value, FunctionType):
        module = sys.modules.get(home, builtins)
        return value.__globals__ is vars(module)
    if isinstance(value, type) and home == builtins.__name__:
        return not value.__flags__ & _HEAP_TYPE
    return True


def _package(module: str) -> str:
    """Return the name of the top-level package of a module."""
    return module.partition(".")[0]


def is_autograd(value: Any) -> bool:
    """Whether a value is a subclass of `torch.autograd.Function`."""
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def is_apply(value: Any) -> bool:
    """Whether a value is ``apply`` of an autograd Function.

    A trace notices only an ``apply`` that is read from its class while the trace runs.
    """
    # The types are checked first, because `__getattr__` of other objects may raise any error.
    if not isinstance(value, _METHODS) or getattr(value, "__name__", "") != "apply":
        return False
    return is_autograd(getattr(value, "__self__", None))


def slots_of(classes: Iterable[type]) -> Iterator[str]:
    """Yield the attributes of objects that classes have in slots."""
    for owner in classes:
        for key, attribute in list(vars(owner).items()):
            if isinstance(attribute, MemberDescriptorType):
                yield key


def is_of_python(kind: type) -> bool:
    """Whether objects of a class have only attributes, and no state in C.

    A generator of random numbers has such state, which shows in the size of its objects.
    """
    if kind.__itemsize__:
        return False
    slots = len(list(slots_of(kind.__mro__)))
    has_attributes = kind.__dictoffset__ != 0
    if not slots and not has_attributes:
        return False
    # One pointer for each slot, one for the attributes, and one for weak references.
    largest = object.__basicsize__ + 8 * (slots + 2)
    return kind.__basicsize__ <= largest


def inherits_a_forward(kind: type) -> bool:
    """Whether the forward of a module may be that of a library, whose code is not read."""
    for owner in kind.__mro__:
        if owner in (nn.Module, object):
            continue
        if issubclass(owner, nn.Module) and is_of_a_library(owner):
            return True
    return False
