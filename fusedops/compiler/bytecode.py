"""The variables and attributes that a function reads beside its arguments, by its bytecode."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

from .objects import LIBRARIES, MODES

__all__ = ["Reads", "reads_of"]

# Functions that return the variables of a scope, or attributes whose names are in no instruction.
_SCOPES = frozenset(
    {
        "globals",
        "locals",
        "vars",
        "dir",
        "eval",
        "exec",
        "__import__",
        "attrgetter",
        "methodcaller",
    }
)
# Methods that take the name of an attribute.
_BY_NAME = frozenset({"__getattr__", "__getattribute__"})
# Functions in C that call what they are passed, or return what calls it.
_CALLERS = frozenset({"map", "filter", "reduce", "starmap", "accumulate", "partial"})
# Instructions of a block whose errors may be caught. In Python 3.10 they come before the block,
# later at the start of the handler. A ``with`` has one too: `contextlib.suppress` catches.
_CATCHING = frozenset({"SETUP_FINALLY", "SETUP_WITH", "PUSH_EXC_INFO"})
_WITH = frozenset({"SETUP_WITH", "BEFORE_WITH"})


@dataclass(frozen=True)
class Reads:
    """The variables and attributes that the code of a function, and of its inner ones, reads.

    Attributes:
        chains: variables of globals and closures, each with the attributes that are read directly
            from it: ``ops.SCALE``.
        names: the names of all attributes that it reads.
        optional: the names of attributes that it reads by `getattr` or `hasattr`; these may be
            missing.
        everything: whether it reads attributes by computed names.
        catches: whether it may catch the error of an attribute or variable that is missing.
        alone: variables of globals and closures that it calls or passes on, and so may be called:
            it does not only read attributes of them.
        calls: whether it may call the value of a local variable.
        refusal: why the code is refused, because it reads what a walk cannot visit; "" if not.
    """

    chains: tuple[tuple[str, ...], ...]
    names: frozenset[str]
    optional: frozenset[str]
    everything: bool
    catches: bool
    alone: frozenset[str]
    calls: bool
    refusal: str

    @property
    def supers(self) -> bool:
        """Whether it reads attributes that a class overrides, by `super`."""
        return ("super",) in self.chains


@functools.lru_cache(4096)
def reads_of(code: CodeType) -> Reads:
    """Return what code reads."""
    instructions = list(_instructions(code))
    attributes = _attributes_by_name(instructions)
    optional = frozenset(filter(None, attributes))
    operations = {instruction.opname for instruction in instructions}
    reads = [instruction for instruction in instructions if instruction.opname in _ATTRIBUTES]
    named = frozenset([str(read.argval) for read in reads])
    # A class in a `match` statement names attributes, or takes their names from the class.
    by_name = "MATCH_CLASS" in operations or not _BY_NAME.isdisjoint(named)
    return Reads(
        chains=tuple(_chains(instructions)),
        names=named | optional,
        optional=optional,
        everything=None in attributes or by_name,
        catches=_catches(instructions),
        alone=frozenset(_alone(instructions)),
        # A call of a local variable calls what the function was passed, or has computed: a module,
        # perhaps. Before Python 3.11 no instruction tells which value is called.
        calls=sys.version_info < (3, 11) or _calls_a_local(instructions),
        refusal=next(filter(None, map(_refusal, instructions)), ""),
    )


def _catches(instructions: list[dis.Instruction]) -> bool:
    """Whether errors may be caught: by ``try``, or by a ``with`` of other managers than torch's."""
    blocks = [instruction for instruction in instructions if instruction.opname in _CATCHING]
    operations = [instruction.opname for instruction in instructions]
    positions = [i for i, operation in enumerate(operations) if operation in _WITH]
    of_torch = [i for i in positions if _is_of_torch(instructions[:i])]
    return len(blocks) > len(of_torch)


def _is_of_torch(instructions: list[dis.Instruction]) -> bool:
    """Whether instructions end in a call such as ``torch.no_grad()``, with constant arguments."""
    # The instructions of the call, in reverse, the CALL first. Before them `torch` is loaded.
    call = list(itertools.takewhile(_is_of_a_call, reversed(instructions)))
    constants = [instruction for instruction in call if instruction.opname == "LOAD_CONST"]
    preceding = instructions[: len(instructions) - len(call)]
    if not call or not preceding:
        return False
    # The argument of a CALL is the number of values that it passes.
    is_whole = call[0].arg == len(constants)
    return is_whole and bool(preceding[-1].argval == "torch")


def _is_of_a_call(instruction: dis.Instruction) -> bool:
    return instruction.opname.startswith(_OF_A_CALL)


def _chains(instructions: list[dis.Instruction]) -> dict[tuple[str, ...], None]:
    """Return the outer variables, each with the attributes that are read from it, in order.

    The instructions of ``ops.table.SCALE`` follow one another::

        LOAD_GLOBAL ops   LOAD_ATTR table   LOAD_ATTR SCALE
    """
    chains: dict[tuple[str, ...], None] = {}  # as an ordered set
    current: list[str] = []
    for instruction in instructions:
        name = str(instruction.argval)
        is_attribute = instruction.opname in _ATTRIBUTES
        if is_attribute and current:
            current.append(name)
        if is_attribute:
            continue
        if current:
            chains[tuple(current)] = None
        current = [name] if instruction.opname.startswith(_OUTER) else []
    return chains


def _attributes_by_name(instructions: list[dis.Instruction]) -> set[str | None]:
    """Return the attributes that `getattr` and `hasattr` read; None for a computed name."""
    attributes: set[str | None] = set()
    for i, instruction in enumerate(instructions):
        if instruction.argval in ("getattr", "hasattr"):
            name = _second_argument(instructions[i:])
            text = name.argval if name is not None and name.opname == "LOAD_CONST" else None
            attributes.add(text if isinstance(text, str) else None)
    return attributes


# Instructions that read an attribute, and those that read a variable from outside of the function.
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_NULL_IS_LAST = sys.version_info >= (3, 13)
# The instruction of a call with its arguments on the stack, which Python 3.11 splits in two.
_CALL = "PRECALL" if sys.version_info[:2] == (3, 11) else "CALL"
_OF_A_CALL = ("PRECALL", "CALL", "KW_NAMES", "PUSH_NULL", "LOAD_CONST", *_ATTRIBUTES)
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_OUTER = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR")


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of code, and of functions and classes that it defines."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)


def _alone(instructions: list[dis.Instruction]) -> Iterator[str]:
    """Yield the outer variables that are loaded for another purpose than one of their attributes.

    What is called or passed on is among them. A class is not called in ``super(Class, self)``,
    which is also what ``super()`` is compiled to, and in ``isinstance(x, Class)``.
    """
    tests = [i for i, one in enumerate(instructions) if one.argval in ("isinstance", "issubclass")]
    tested = [_second_argument(instructions[i:]) for i in tests]
    before = instructions[:1] + instructions
    for previous, load, following in zip(before, instructions, instructions[1:], strict=False):
        is_named = following.opname in _ATTRIBUTES or previous.argval == "super"
        is_tested = any(load is one for one in tested)
        if load.opname.startswith(_OUTER) and not (is_named or is_tested):
            yield str(load.argval)


def _calls_a_local(instructions: list[dis.Instruction]) -> bool:
    """Whether the value of a local variable is called, or may be passed to a function that does so.

    A call of a function that is no method pushes a NULL beside it::

        PUSH_NULL  LOAD_FAST f      up to Python 3.12
        LOAD_FAST f  PUSH_NULL      from Python 3.13 on
    """
    for instruction, following in itertools.pairwise(instructions):
        names = instruction.opname, following.opname
        if "PUSH_NULL" in names and any(name.startswith("LOAD_FAST") for name in names):
            return True
    return any(instruction.argval in _CALLERS for instruction in instructions)


def _second_argument(instructions: list[dis.Instruction]) -> dis.Instruction | None:
    """Return the instruction that pushes the second argument of a call; None if it is computed.

    The name that `getattr` reads is such an argument. It is known if one instruction pushes it, and
    it remains on the stack until the call::

        LOAD_GLOBAL getattr   LOAD_FAST cfg   LOAD_CONST "scale"   LOAD_FAST other   CALL 3
        arguments             1               2                    3

    Args:
        instructions: the instructions from the load of the function on.
    """
    second = None
    count = 0  # of arguments on the stack
    for previous, instruction in itertools.pairwise(instructions):
        opname = instruction.opname
        if opname.startswith(_CALL) and instruction.arg == count:
            return second
        if opname == "PUSH_NULL" and previous is instructions[0] and _NULL_IS_LAST:
            continue  # a part of the function
        previous_count = count
        count += dis.stack_effect(instruction.opcode, instruction.arg)
        if count <= 2:
            second = instruction if (previous_count, count) == (1, 2) else None
        if count < 0 or instruction.opcode in _JUMPS:
            return None
    return None


def _refusal(instruction: dis.Instruction) -> str:
    """Return why code with this instruction is refused; "" if it is not."""
    name = str(instruction.argval)
    opname = instruction.opname
    if opname == "IMPORT_NAME" and name.partition(".")[0] not in LIBRARIES:
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
