"""Read from the bytecode of a function what it uses beside its arguments.

The module also tells the code and objects of libraries from those of the user.
"""

from __future__ import annotations

import builtins
import dis
import functools
import itertools
import sys
from collections.abc import Iterator
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

# Modules that cannot change while a program runs, so that they are no part of its state.
_LIBRARIES = frozenset({"torch", "einops", "math", builtins.__name__, __name__.partition(".")[0]})
# Functions that return a mode of PyTorch, which the trace sets.
MODES = frozenset({"is_grad_enabled", "is_inference_mode_enabled"})
# Functions that return the variables of a scope, or attributes whose names are in no instruction.
_SCOPES = frozenset(
    {"globals", "locals", "vars", "eval", "exec", "__import__", "attrgetter", "methodcaller"}
)
# Modules of Python whose functions in C have the same result for the same arguments.
_PURE = _LIBRARIES | {"cmath", "operator", "_operator", "functools", "_functools", "itertools"}
# Py_TPFLAGS_HEAPTYPE, which classes that a program creates have, and Python's built-in ones lack.
_HEAP_TYPE = 1 << 9


@dataclass(frozen=True)
class Reads:
    """The variables and attributes that the code of a function, and of its inner ones, reads.

    Attributes:
        chains: global variables and those of closures, each with the attributes that are read
            directly from it: ``ops.SCALE``.
        names: the names of all attributes that it reads.
        optional: those that it reads by `getattr` or `hasattr`, which may be missing.
        everything: whether it reads attributes by computed names.
        called: global variables and those of closures that it calls.
        calls: whether it calls the value of a local variable.
        refusal: why the code is refused, because it reads what a walk cannot visit; "" if not.
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
    """Return what code reads."""
    instructions = list(_instructions(code))
    chains: dict[tuple[str, ...], None] = {}  # as an ordered set
    names: set[str] = set()
    # The instructions of ``ops.table.SCALE`` follow one another:
    #
    #   LOAD_GLOBAL ops   LOAD_ATTR table   LOAD_ATTR SCALE
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
        current = [name] if instruction.opname.startswith(_OUTER) else []
    attributes: set[str | None] = set()
    for i, instruction in enumerate(instructions):
        if instruction.argval in ("getattr", "hasattr"):
            attributes.add(_attribute_after(instructions[i:]))
    optional = frozenset(filter(None, attributes))
    called = list(_called(instructions))
    # Before Python 3.11 no instruction tells which value is called.
    calls = any(is_local for _, is_local in called) or sys.version_info < (3, 11)
    return Reads(
        chains=tuple(chains),
        names=frozenset(names) | optional,
        optional=optional,
        everything=None in attributes,
        called=frozenset([name for name, is_local in called if not is_local]),
        calls=calls,
        refusal=next(filter(None, map(_refusal, instructions)), ""),
    )


_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_OUTER = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR")


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of code, and of functions and classes that it defines."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)


def _called(instructions: list[dis.Instruction]) -> Iterator[tuple[str, bool]]:
    """Yield the variables that are called, and whether they are local.

    A call of a function that is no method pushes a NULL beside it: before the function or after
    it, depending on the version of Python, or within LOAD_GLOBAL.
    """
    for one, following in itertools.pairwise(instructions):
        load = following if one.opname == "PUSH_NULL" else one
        called = "PUSH_NULL" in (one.opname, following.opname)
        if load.opname == "LOAD_GLOBAL":
            called = called or "NULL" in load.argrepr
        if called and load.opname.startswith(("LOAD_FAST", *_OUTER)):
            yield str(load.argval), load.opname.startswith("LOAD_FAST")


def _attribute_after(instructions: list[dis.Instruction]) -> str | None:
    """Return the attribute's name in a call of `getattr`; None where it is computed.

    Args:
        instructions: those from the load of `getattr` on.
    """
    calls = [i for i, one in enumerate(instructions) if one.opname.startswith(("CALL", "PRECALL"))]
    end = calls[0] if calls else 0
    for i, instruction in enumerate(instructions[:end]):
        if instruction.opname != "LOAD_CONST" or not isinstance(instruction.argval, str):
            continue
        # Nothing but loads up to the call: the string is an argument as it is.
        if all(one.opname.startswith("LOAD") for one in instructions[i:end]):
            return str(instruction.argval)
    return None


def _refusal(instruction: dis.Instruction) -> str:
    """Return why code with this instruction is refused; "" if it is not."""
    name, opname = str(instruction.argval), instruction.opname
    if opname == "IMPORT_NAME" and name.partition(".")[0] not in _LIBRARIES:
        return (
            f"it imports {name} in its body, whose numbers may change unseen; import it outside of "
            "the function"
        )
    loads_name = opname.startswith(("LOAD_GLOBAL", "LOAD_NAME", *_ATTRIBUTES))
    if loads_name and (name in _SCOPES or name == "__dict__"):
        return f"it reads {name}, which may change unseen; name the variables and attributes"
    if opname.startswith("LOAD") and name in MODES:
        return (
            f"it calls {name}, whose result may change unseen; call it outside, and pass it as a "
            "number"
        )
    return ""


def is_pure(function: Any) -> bool:
    """Whether a function in C returns the same for the same arguments, judged by its module.

    A method of an object, such as a dict's ``get``, is not pure, nor is a function that draws
    random numbers.
    """
    if not isinstance(function.__self__, (ModuleType, type, type(None))):
        return False
    return _home(function).partition(".")[0] in _PURE


def _home(value: Any) -> str:
    """Return the name of the Python module of a function or class."""
    module = getattr(value, "__module__", None)
    if module:
        return str(module)
    owner = getattr(value, "__self__", None)  # a class method in C has no module, but its class has
    return str((owner if isinstance(owner, type) else type(value)).__module__)


def is_of_a_library(value: Any) -> bool:
    """Whether a function, class or module is PyTorch's, einops' or Python's own.

    The name of a module alone proves nothing: code that `exec` runs has that of its globals.
    """
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in _LIBRARIES
    home = _home(value)
    if isinstance(value, type) and home == builtins.__name__ and value.__flags__ & _HEAP_TYPE:
        return False
    if isinstance(value, FunctionType):
        module = sys.modules.get(home, builtins)
        if value.__globals__ is not vars(module):
            return False
    return home.partition(".")[0] in _LIBRARIES


def is_autograd(value: Any) -> bool:
    """Whether a value is a subclass of `torch.autograd.Function`."""
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def is_apply(value: Any) -> bool:
    """Whether a value is ``apply`` of an autograd Function.

    A trace notices only an ``apply`` that is read from its class while the trace runs.
    """
    if getattr(value, "__name__", "") != "apply":
        return False
    return is_autograd(getattr(value, "__self__", None))


def slots_of(kind: type) -> Iterator[str]:
    """Yield the attributes of a class's objects that are in slots."""
    for owner in kind.__mro__:
        for key, attribute in list(vars(owner).items()):
            if isinstance(attribute, MemberDescriptorType):
                yield key


def is_of_python(kind: type) -> bool:
    """Whether objects of a class have only attributes, and no state in C.

    A generator of random numbers has such state, which shows in the size of its objects.
    """
    if kind.__itemsize__:
        return False
    slots = len(list(slots_of(kind)))
    # One pointer for each slot, one for the attributes, and one for weak references.
    largest = object.__basicsize__ + 8 * (slots + 2)
    has_attributes = bool(slots) or kind.__dictoffset__ != 0
    return kind.__basicsize__ <= largest and has_attributes


def inherits_a_forward(kind: type) -> bool:
    """Whether the forward of a module may be that of a library, whose code is not read."""
    for owner in kind.__mro__:
        is_plain = owner in (nn.Module, object)
        if not is_plain and issubclass(owner, nn.Module) and is_of_a_library(owner):
            return True
    return False
