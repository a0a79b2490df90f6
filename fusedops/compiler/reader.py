"""The function that reads a state: Python source, which a walk through the state writes.

For ``scale`` in ``x * scale * config.gain`` it looks like this:

    def read(args):
        try:
            v0 = c1['scale']                            # c1: the function's globals
            if not (type(v0) is c2): return None        # c2: float
            v1 = c1['config']
            if not (type(v1) is c3): return None        # c3: the class of config
            v2 = v1.__dict__
            v3 = v2['gain']
            if not (type(v3) is c2): return None
            return (v0.hex(), v3.hex(), ), None, []     # numbers, identical tensors, tensors
        except _ERRORS:
            return None
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NoReturn

from torch import Tensor

from .errors import NotRowwiseError
from .text import indented, tuple_of

__all__ = ["Look", "Writer"]


@dataclass(frozen=True, eq=False)
class Look:
    """A function that reads states of one structure.

    Attributes:
        read: returns, for the arguments of a call, the numbers, which tensors are identical, and
            the tensors; None for a state of another structure.
        tensors: the names of the tensors.
        codes: the code of the functions.
        fingerprint: all that makes up the state except the numbers, the tensors and the structure
            of objects: names, classes, code. It is for the key of a file.
        storable: whether the fingerprint identifies the state in another process.
        reason: why the function is refused; "" if it is not.
        lines: the source of ``read``.
        constants: the constants that the source names.
    """

    read: Callable[[Sequence[Any]], tuple[Any, Any, list[Tensor]] | None]
    tensors: tuple[str, ...]
    codes: tuple[CodeType, ...]
    fingerprint: tuple[Any, ...]
    storable: bool
    reason: str
    lines: tuple[str, ...]
    constants: tuple[Any, ...]

    def reads_as(self, other: Look) -> bool:
        """Whether another walk wrote the same function."""
        if (self.lines, self.tensors, self.reason) != (other.lines, other.tensors, other.reason):
            return False
        return all(map(_is_same, self.constants, other.constants))


class Writer:
    """The writer of a function that reads the values which a walk visits.

    Attributes:
        leaves: the expressions of numbers.
        tensors: the variables of tensors, and their names.
        codes: the code of the functions.
        fingerprint: see `Look`.
        storable: see `Look`.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.variables: dict[str, str] = {}  # by expression
        self.constants: dict[str, Any] = {}
        self.named: dict[int, str] = {}  # the names of constants, by their ids
        self.visited: set[str] = set()
        self.leaves: list[str] = []
        self.tensors: list[tuple[str, str]] = []
        self.codes: list[CodeType] = []
        self.fingerprint: list[Any] = []
        self.storable = True

    def look(self, reason: str) -> Look:
        """Return the function of the lines that were written, compiled."""
        tensors = ", ".join([variable for variable, _ in self.tensors])
        identical = f"_identical([{tensors}])" if len(self.tensors) > 1 else "None"
        lines = [*self.lines, f"return {tuple_of(self.leaves)}, {identical}, [{tensors}]"]
        body = "\n".join(indented(lines, 2))
        text = f"def read(args):\n    try:\n{body}\n    except _ERRORS:\n        return None\n"
        # If an attribute, a key or an element is missing, the structure has changed, as if a value
        # had another class. The function returns None in both cases.
        errors = (AttributeError, KeyError, IndexError, TypeError, ValueError)
        known = {"_identical": _identical, "_ERRORS": errors, "Tensor": Tensor}
        scope = {**self.constants, **known}
        exec(text, scope)
        return Look(
            scope["read"],
            tuple([name for _, name in self.tensors]),
            tuple(self.codes),
            tuple(self.fingerprint),
            self.storable,
            reason,
            tuple(lines),
            tuple(self.constants.values()),
        )

    # Each expression is read once, in the order of the walk, and each check comes before what it
    # protects: `v1.__dict__` is read after the class of `v1` was compared.

    def at(self, expression: str) -> str:
        """Return the variable with the value of an expression, after a line that assigns it."""
        if expression.isidentifier():
            return expression
        if expression not in self.variables:
            self.variables[expression] = f"v{len(self.variables)}"
            self.lines.append(f"{self.variables[expression]} = {expression}")
        return self.variables[expression]

    def constant(self, value: Any) -> str:
        """Return the name of a value in the scope of the written function, which holds it."""
        name = self.named.setdefault(id(value), f"c{len(self.constants)}")
        self.constants.setdefault(name, value)  # held, so that its id is not reused
        return name

    def expect(self, condition: str) -> None:
        """Write a condition, without which the state has another structure."""
        line = f"if not ({condition}): return None"
        if line not in self.visited:
            self.visited.add(line)
            self.lines.append(line)

    def expect_type(self, variable: str, value: Any) -> None:
        """Write that a variable has the value's class."""
        self.expect(f"type({variable}) is {self.constant(type(value))}")
        self.fingerprint.append(f"{type(value).__module__}.{type(value).__qualname__}")

    def refuse(
        self, variable: str, value: Any, why: str, is_refused: Callable[[Any], bool]
    ) -> NoReturn:
        """End the walk: the function is refused as long as the variable has such a value.

        Args:
            variable: the variable with the value.
            value: the value.
            why: the reason, which names the value's class.
            is_refused: whether a value of that class is a reason to refuse the function.
        Raises:
            NotRowwiseError: always.
        """
        self.expect_type(variable, value)
        self.expect(f"{self.constant(is_refused)}({variable})")
        raise NotRowwiseError(why)


def _is_same(constant: Any, other: Any) -> bool:
    """Whether two constants are one object, or the same keys of a dict."""
    if constant is other:
        return True
    return type(constant) is type(other) is tuple and bool(constant == other)


def _identical(tensors: list[Tensor]) -> tuple[int, ...] | None:
    """Return the first index of each tensor in the list; None if all are different objects."""
    first: dict[int, int] = {}
    indices = tuple([first.setdefault(id(tensor), i) for i, tensor in enumerate(tensors)])
    return indices if len(first) < len(tensors) else None
