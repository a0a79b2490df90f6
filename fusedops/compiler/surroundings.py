"""What code reads beside its arguments, as far as its instructions tell; and what is PyTorch's or Python's own."""

from __future__ import annotations

import builtins
import dis
import functools
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import nn

__all__ = [
    "MODES",
    "PLAIN",
    "Reads",
    "inherits_a_forward",
    "is_apply",
    "is_autograd",
    "is_of_a_library",
    "is_of_python",
    "is_pure",
    "reads_of",
    "slots_of",
]

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size)

# Modules that are a part of the program, not of its state.
_LIBRARIES = frozenset({"torch", "einops", "math", builtins.__name__, __name__.partition(".")[0]})
# Functions that say how PyTorch runs, which the trace decides for itself.
MODES = frozenset({"is_grad_enabled", "is_inference_mode_enabled"})
# Functions that return what a scope has, or attributes by names that no instruction has.
_SCOPES = frozenset({"globals", "locals", "vars", "eval", "exec", "__import__", "attrgetter", "methodcaller"})
# Modules of Python whose functions in C have the same result for the same arguments.
_PURE = _LIBRARIES | {"cmath", "operator", "_operator", "functools", "_functools", "itertools"}


# Of classes that are made as a program runs; Python's own are not.
_MADE = 1 << 9


@dataclass(frozen=True)
class Reads:
    """What a function's code, and that of functions within it, reads.

    Attributes:
        chains: variables from elsewhere, each with the attributes that are taken of it at once: ``ops.SCALE``.
        names: of all attributes that it takes of anything.
        optional: of those that it takes by `getattr` or `hasattr`, which need not be there.
        everything: whether it takes attributes by names that it computes.
        called: variables from elsewhere that it calls.
        calls: whether it calls what a variable of its own has.
        refusal: what it does to get at numbers that cannot be followed; "" for nothing.
    """

    chains: tuple[tuple[str, ...], ...]
    names: frozenset[str]
    optional: frozenset[str]
    everything: bool
    called: frozenset[str]
    calls: bool
    refusal: str


@functools.lru_cache(4096)
def reads_of(code: CodeType) -> Reads:
    """What code reads."""
    instructions = list(_instructions(code))
    chains: dict[tuple[str, ...], None] = {}
    names: set[str] = set()
    current: list[str] = []
    for instruction in instructions:
        name = str(instruction.argval)
        if instruction.opname in _ATTRIBUTES:
            names.add(name)
            if current:
                current.append(name)
            continue
        if current:
            chains[tuple(current)] = None
        current = [name] if instruction.opname.startswith(_ELSEWHERE) else []
    taken = [place for place, one in enumerate(instructions) if one.argval in ("getattr", "hasattr")]
    words = [_attribute_after(instructions[place:]) for place in taken]
    optional = frozenset(filter(None, words))
    called = list(_called(instructions))
    calls = any(own for _, own in called) or sys.version_info < (3, 11)  # before, no instruction tells
    refusal = next(filter(None, map(_refusal, instructions)), "")
    around = frozenset([name for name, own in called if not own])
    return Reads(tuple(chains), frozenset(names) | optional, optional, None in words, around, calls, refusal)


_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_ELSEWHERE = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR")


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)


def _called(instructions: list[dis.Instruction]) -> Iterator[tuple[str, bool]]:
    """Variables that are called, and whether they are the function's own."""
    for one, other in itertools.pairwise(instructions):
        load = other if one.opname == "PUSH_NULL" else one
        called = "PUSH_NULL" in (one.opname, other.opname)
        if load.opname == "LOAD_GLOBAL":
            called = called or "NULL" in load.argrepr
        if called and load.opname.startswith(("LOAD_FAST", *_ELSEWHERE)):
            yield str(load.argval), load.opname.startswith("LOAD_FAST")


def _attribute_after(instructions: list[dis.Instruction]) -> str | None:
    """The name that a call of `getattr` has; None where it is computed."""
    names = [
        place for place, one in enumerate(instructions) if one.opname == "LOAD_CONST" and isinstance(one.argval, str)
    ]
    end = next((place for place, one in enumerate(instructions) if one.opname.startswith(("CALL", "PRECALL"))), 0)
    for place in [place for place in names if place < end]:
        if all(one.opname.startswith("LOAD") for one in instructions[place:end]):  # nothing is made of it
            return str(instructions[place].argval)
    return None


def _refusal(instruction: dis.Instruction) -> str:
    name = str(instruction.argval)
    if instruction.opname == "IMPORT_NAME" and name.partition(".")[0] not in _LIBRARIES:
        return f"it imports {name} in its body, whose numbers may change unseen; import it outside of the function"
    if instruction.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME", *_ATTRIBUTES)) and name in (*_SCOPES, "__dict__"):
        return f"it reads {name}, which may change unseen; name the variables and attributes"
    if instruction.opname.startswith("LOAD") and name in MODES:
        return f"it calls {name}, whose result may change unseen; call it outside, and pass it as a number"
    return ""


def is_pure(function: Any) -> bool:
    """Whether a function in C has the same result for the same arguments, as far as its home tells.

    Not one of an object, such as a dict's ``get``, or what draws random numbers.
    """
    owner = function.__self__
    return isinstance(owner, (ModuleType, type, type(None))) and _home(function).partition(".")[0] in _PURE


def _home(value: Any) -> str:
    """The Python module of a function or class."""
    owner = getattr(value, "__self__", None)  # a class, for its methods in C
    return str(getattr(value, "__module__", None) or (owner if isinstance(owner, type) else type(value)).__module__)


def is_of_a_library(value: Any) -> bool:
    """Whether a function, class or module is PyTorch's, einops' or Python's own: what `exec` made only says so."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in _LIBRARIES
    home = _home(value)
    if isinstance(value, type) and home == builtins.__name__ and value.__flags__ & _MADE:
        return False
    if isinstance(value, FunctionType) and value.__globals__ is not vars(sys.modules.get(home, builtins)):
        return False
    return home.partition(".")[0] in _LIBRARIES


def is_autograd(value: Any) -> bool:
    """Whether this is a class of autograd Functions."""
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def is_apply(value: Any) -> bool:
    """Whether this applies an autograd Function, which a trace notices only where it is looked up at the class."""
    return getattr(value, "__name__", "") == "apply" and is_autograd(getattr(value, "__self__", None))


def slots_of(kind: type) -> Iterator[str]:
    """Attributes of a class's objects that are in no dict."""
    for owner in kind.__mro__:
        yield from [key for key, one in vars(owner).items() if isinstance(one, MemberDescriptorType)]


def is_of_python(kind: type) -> bool:
    """Whether objects of a class have nothing but attributes: no state in C, such as a generator of random numbers."""
    slots = len(list(slots_of(kind)))
    most = object.__basicsize__ + 8 * (slots + 2)  # with one for the attributes and one for weak references
    return not kind.__itemsize__ and kind.__basicsize__ <= most and (bool(slots) or kind.__dictoffset__ != 0)


def inherits_a_forward(kind: type) -> bool:
    """Whether PyTorch's code, which is not read, may be what computes with a module."""
    plain: Iterable[type] = (nn.Module, object)
    return any(is_of_a_library(one) and one not in plain and issubclass(one, nn.Module) for one in kind.__mro__)
