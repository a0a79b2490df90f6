"""How a state was looked at: a function of Python, which a walk through the state writes as it goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import Tensor

from .errors import NotRowwiseError

__all__ = ["Look", "Writer"]


@dataclass(frozen=True, eq=False)
class Look:
    """How to look at a state of one structure.

    Attributes:
        read: for the arguments of a call the numbers, which tensors are one, and the tensors; None for another structure.
        tensors: names of the tensors.
        codes: of the functions.
        words: all that the state is made of, but for the numbers and tensors, and the structure of objects.
        storable: whether it is the same in another process.
        reason: why the function is refused; "" if it is not.
    """

    read: Callable[[Sequence[Any]], tuple[Any, Any, list[Tensor]] | None]
    tensors: tuple[str, ...]
    codes: tuple[CodeType, ...]
    words: tuple[Any, ...]
    storable: bool
    reason: str


class Writer:
    """Writes the function that takes the same way as a walk.

    Attributes:
        leaves: the expressions of numbers.
        tensors: the variables of tensors, and their names.
        codes: of functions.
        words: see `Look`.
        storable: see `Look`.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.variables: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        self.named: dict[int, str] = {}
        self.visited: set[str] = set()
        self.leaves: list[str] = []
        self.tensors: list[tuple[str, str]] = []
        self.codes: list[CodeType] = []
        self.words: list[Any] = []
        self.storable = True

    def look(self, reason: str) -> Look:
        """The way as a function of Python."""
        which = ", ".join([variable for variable, _ in self.tensors])
        same = f"_ones([{which}])" if len(self.tensors) > 1 else "None"
        lines = [*self.lines, f"return ({''.join(f'{leaf}, ' for leaf in self.leaves)}), {same}, [{which}]"]
        body = "\n".join(f"        {line}" for line in lines)
        text = f"def read(args):\n    try:\n{body}\n    except _ERRORS:\n        return None\n"
        errors = (AttributeError, KeyError, IndexError, TypeError, ValueError)
        scope = {**self.constants, "_ones": _ones, "_ERRORS": errors, "Tensor": Tensor}
        exec(text, scope)
        return Look(scope["read"], tuple([name for _, name in self.tensors]), tuple(self.codes), tuple(self.words),
                    self.storable, reason)  # fmt: skip

    def at(self, expression: str) -> str:
        """The variable that has the value of an expression."""
        if expression.isidentifier():
            return expression
        if expression not in self.variables:
            self.variables[expression] = f"v{len(self.variables)}"
            self.lines.append(f"{self.variables[expression]} = {expression}")
        return self.variables[expression]

    def constant(self, value: Any) -> str:
        """The name of something that is held."""
        known = self.named.setdefault(id(value), f"c{len(self.constants)}")  # held, so that no other has its address
        self.constants.setdefault(known, value)
        return known

    def expect(self, condition: str) -> None:
        """Where this does not hold there is another structure."""
        line = f"if not ({condition}): return None"
        if line not in self.visited:
            self.visited.add(line)
            self.lines.append(line)

    def expect_type(self, variable: str, value: Any) -> None:
        """The value's class."""
        self.expect(f"type({variable}) is {self.constant(type(value))}")
        self.words.append(f"{type(value).__module__}.{type(value).__qualname__}")

    def refuse(self, variable: str, value: Any, why: str) -> None:
        """Ends the walk: the function is refused as long as such a value is there."""
        self.expect_type(variable, value)
        raise NotRowwiseError(why)


def _ones(tensors: list[Tensor]) -> tuple[int, ...] | None:
    """Which tensors are one; None where none are."""
    places: dict[int, int] = {}
    found = tuple([places.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)])  # the list holds them
    return found if len(places) < len(tensors) else None
