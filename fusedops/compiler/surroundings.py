"""What a function uses beside its arguments: variables around it and around the functions that it calls.

Tensors among them, and in modules there, are arguments of the kernels, found again at each call. Numbers, and a module's
mode and numbers, are constants of the kernels: they are looked at in each call, and other ones are traced anew. What may
change without being seen is refused.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..core import compat
from .errors import NotRowwiseError

__all__ = [
    "PLAIN",
    "Captured",
    "Variable",
    "captures",
    "checked",
    "function_in",
    "is_code",
    "is_of_a_library",
    "origin",
    "state_of",
    "unseen",
    "variables",
]

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size)


# Modules that are a part of the program, and functions that return what a scope has.
_LIBRARIES = frozenset({"torch", "einops", "math"})
_SCOPES = frozenset({"globals", "locals", "vars", "eval", "exec", "__import__"})
# Functions that say how PyTorch runs, which the trace decides for itself.
_MODES = frozenset({"is_grad_enabled", "is_inference_mode_enabled"})
# Modules of Python whose functions in C have the same result for the same arguments.
_PURE = frozenset(
    {"torch", "einops", "math", "cmath", "operator", "_operator", "functools", "_functools", builtins.__name__}
)


@dataclass(frozen=True)
class Variable:
    """Something that a function uses: its name, and how it is found, given the arguments of a call."""

    name: str
    find: Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Captured:
    """A tensor that a function does not take but uses, and how it is found again, given the arguments of a call."""

    name: str
    find: Callable[[Sequence[Any]], Tensor]


def variables(function: Callable[..., Any]) -> list[Variable]:
    """Those around a function, and around the functions among them; modules of Python and builtins are left out."""
    return list(_around(function, set()))


def _around(function: Any, seen: set[int]) -> Iterator[Variable]:
    function = getattr(function, "function", function) if type(function).__name__ == "Rowwise" else function
    if not isinstance(function, FunctionType) or id(function) in seen or is_of_a_library(function):
        return
    seen.add(id(function))
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name, *attributes in chains(function.__code__):
        if name in cells:
            find: Callable[[Sequence[Any]], Any] = functools.partial(_in_cell, cells[name])
        elif name in function.__globals__:
            find = functools.partial(_in_scope, function.__globals__, name)
        else:
            continue
        root = value = find(())
        # Of a Python module, a class and the like only what the function names of it is used.
        while attributes and not isinstance(value, (Tensor, nn.Module, *PLAIN)) and hasattr(value, attributes[0]):
            if is_code(value) and not isinstance(value, (ModuleType, type)):
                break
            find = functools.partial(_attribute, find, attributes[0])
            name, value = f"{name}.{attributes.pop(0)}", find(())
        # What PyTorch's own modules have is a part of PyTorch; a function in a variable may be another's tomorrow.
        if not _is_constant(root) and not _is_constant(value):
            yield Variable(name, find)
            yield from _around(value, seen)


def chains(code: CodeType) -> list[tuple[str, ...]]:
    """The variables from elsewhere that code names, each with the attributes that it takes of them: ``ops.SCALE``."""
    found: dict[tuple[str, ...], None] = {}
    current: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and current:
            current.append(str(instruction.argval))
            continue
        if current:
            found[tuple(current)] = None
        starts = instruction.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"))
        current = [str(instruction.argval)] if starts else []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= dict.fromkeys(chains(constant))
    return list(found)


def unseen(code: CodeType) -> str:
    """What code does to get at numbers that `variables` does not follow; "" for nothing."""
    for instruction in dis.get_instructions(code):
        name = str(instruction.argval)
        if instruction.opname == "IMPORT_NAME" and name.partition(".")[0] not in _LIBRARIES:
            return f"it imports {name} in its body, whose numbers may change unseen; import it outside of the function"
        if instruction.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME")) and name in _SCOPES:
            return f"it calls {name}, which may change unseen; name the variables"
        if instruction.opname.startswith("LOAD") and name in _MODES:
            return f"it calls {name}, whose result may change unseen; call it outside, and pass it as a number"
    inner = (unseen(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return next(filter(None, inner), "")


def _in_cell(cell: Any, args: Sequence[Any]) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _in_scope(scope: dict[str, Any], name: str, args: Sequence[Any]) -> Any:
    return scope.get(name)


def _attribute(find: Callable[[Sequence[Any]], Any], name: str, args: Sequence[Any]) -> Any:
    return getattr(find(args), name, None)


def _is_constant(value: Any) -> bool:
    """Whether this is a part of the program, not of its state."""
    return isinstance(value, ModuleType) and value.__name__.partition(".")[0] in _LIBRARIES


def is_code(value: Any) -> bool:
    """Whether this is something that does not change: a function of a library's, a class."""
    if isinstance(value, (ModuleType, type, enum.Enum)):
        return True
    if inspect.isbuiltin(value):  # one in C: not of an object, such as a dict's get or what draws random numbers
        owner = value.__self__
        return isinstance(owner, (ModuleType, type, type(None))) and _home(value).partition(".")[0] in _PURE
    return callable(value) and not isinstance(value, nn.Module) and is_of_a_library(value)


def _home(value: Any) -> str:
    """The Python module of a function or class."""
    owner = getattr(value, "__self__", None)  # a class, for its methods in C
    return str(getattr(value, "__module__", None) or (owner if isinstance(owner, type) else type(value)).__module__)


def is_of_a_library(value: Any) -> bool:
    """Whether a function or class is PyTorch's, einops' or Python's own: one that was made by `exec` only says so."""
    home = _home(value)
    if isinstance(value, FunctionType) and value.__globals__ is not vars(sys.modules.get(home, builtins)):
        return False
    return home.partition(".")[0] in ("torch", "einops", "math", builtins.__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Identity:
    """An object as a part of a key, which is held so that no later object has its address."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def function_in(value: Any) -> FunctionType | None:
    """The function of Python that a variable has, of which other variables are known; None for other values."""
    value = value.function if type(value).__name__ == "Rowwise" and not isinstance(value, nn.Module) else value
    return value if isinstance(value, FunctionType) else None


def state_of(value: Any) -> Any:
    """What of a value the trace hangs on, hashable."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise TypeError("a symbol")
    if isinstance(value, float):
        return value.hex()  # zeros have a sign
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, Tensor):
        return value.dtype, value.device, value.shape
    if isinstance(value, nn.Module):
        return tuple([(type(m), compat.has_backward_hooks(m), *map(_part_of_state, vars(m).values()))
                      for m in value.modules()])  # fmt: skip
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(state_of, value))
    return Identity(value)


def _part_of_state(value: Any) -> Any:
    """The same of a module's attribute, and of an object there, such as a configuration, its numbers."""
    if isinstance(value, PLAIN) or (isinstance(value, (tuple, list)) and all(isinstance(v, PLAIN) for v in value)):
        return state_of(value)
    inner = getattr(value, "__dict__", None)
    if inner is None or isinstance(value, (Tensor, nn.Module)) or callable(value):
        return None
    return tuple([state_of(v) for v in inner.values() if isinstance(v, PLAIN)])


def checked(name: str, value: Any, what: str) -> None:
    """Raises where a value may change unseen."""
    if isinstance(value, nn.Module) and any(map(compat.has_backward_hooks, value.modules())):
        raise NotRowwiseError(f"{what} {name} is a module with backward hooks, which no kernel calls; call it outside")
    if isinstance(value, FunctionType) and what == "its argument" and not is_code(value):
        raise NotRowwiseError(f"{what} {name} is a function; call it in one that is decorated")
    if isinstance(value, ModuleType) and not _is_constant(value):
        raise NotRowwiseError(
            f"{what} {name} is a module of Python, whose numbers may change unseen; name them: {name}.NAME"
        )
    if getattr(value, "__name__", "") in _MODES and is_of_a_library(value):
        raise NotRowwiseError(f"{what} {name} is a function whose result may change unseen; pass what it returns")
    if inspect.isbuiltin(value) and not is_code(value):
        raise NotRowwiseError(f"it calls {name}, whose result may change from call to call; pass what it returns")
    if (
        isinstance(value, (*PLAIN, nn.Module, Tensor, FunctionType))
        or type(value).__name__ == "Rowwise"
        or is_code(value)
    ):
        return
    if isinstance(value, (tuple, list)) and all(isinstance(v, PLAIN) for v in value):
        return
    if isinstance(value, (tuple, list, dict)) and any(
        isinstance(v, Tensor) for v in (value.values() if isinstance(value, dict) else value)
    ):
        raise NotRowwiseError(f"{what} {name} is a {type(value).__name__} of tensors; pass them one by one")
    raise NotRowwiseError(
        f"{what} {name} is a {type(value).__name__}, which may change unseen; pass what is needed of it"
    )


def origin(tensor: Tensor, around: Sequence[Variable], names: Sequence[str], args: Sequence[Any]) -> Captured | None:
    """Where a function has a tensor from: a variable, or a parameter of a module among these or the arguments."""
    given = [Variable(name, functools.partial(_argument, place)) for place, name in enumerate(names)
             if isinstance(args[place], nn.Module)]  # fmt: skip
    for variable in (*given, *around):
        value = variable.find(args)
        if value is tensor:
            return Captured(variable.name, variable.find)
        if isinstance(value, nn.Module):
            for path, inner in (*value.named_parameters(), *value.named_buffers()):
                if inner is tensor:
                    return Captured(path.replace(".", "_"), functools.partial(_at_path, variable.find, path))
    return None


def _argument(place: int, args: Sequence[Any]) -> Any:
    return args[place]


def _at_path(find: Callable[[Sequence[Any]], Any], path: str, args: Sequence[Any]) -> Tensor:
    found: Tensor = functools.reduce(getattr, path.split("."), find(args))
    return found


@compat.constant_when_traced
def captures(function: Callable[..., Any]) -> bool:
    """Whether tensors, or modules, are among the variables around a function."""
    return any(isinstance(variable.find(()), (Tensor, nn.Module)) for variable in variables(function))
