"""Guards of torch.compile on what a function reads, where a call of it is one node of the graph.

Dynamo does not look into the node. It traces a function beside it, which compares the same variables with the values that
they have, and guards on them: a call with others is compiled anew.
"""

from __future__ import annotations

import math
from types import FunctionType
from typing import Any

from .state import simple_variables
from .surroundings import PLAIN

__all__ = ["Watching"]


class Watching:
    """The comparisons of a function's variables; an attribute for each set of values, which Dynamo finds again."""

    def __init__(self, function: FunctionType) -> None:
        self._function = function
        self._names: dict[Any, str] = {}

    def name(self) -> str:
        """The attribute that has functions for the values now; "" where Dynamo is to trace the function itself."""
        found = simple_variables(self._function)
        if found is None:
            return ""
        made = [_comparing(function, variables) for function, variables in found if variables]
        key = tuple([(text, id(one.__globals__)) for text, one in made])  # which are held below
        if key not in self._names:
            self._names[key] = f"values{len(self._names)}"
            setattr(self, self._names[key], tuple([one for _, one in made]))
        return self._names[key]


def _comparing(function: FunctionType, variables: list[tuple[str, Any]]) -> tuple[str, FunctionType]:
    """A function with the variables of another, which compares them."""
    free = sorted({name for name, _ in variables} & set(function.__code__.co_freevars))
    lines = dict.fromkeys(f"if {name} {_same(name, value)}: pass" for name, value in variables)
    body = "\n".join(f"        {line}" for line in lines)
    text = f"def around({', '.join(free)}):\n    def compare():\n{body}\n    return compare\n"
    scope: dict[str, Any] = {}
    exec(text, scope)
    compare = scope["around"](*free)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple([cells[name] for name in compare.__code__.co_freevars])
    return text, FunctionType(compare.__code__, function.__globals__, "compare", None, closure)


def _same(name: str, value: Any) -> str:
    """A comparison with a value, which makes Dynamo guard on it where a branch depends on it."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"!= {name}" if math.isnan(value) else f"== {'-' * (value < 0)}1e999"
    return f"== {value!r}" if isinstance(value, (int, float, str)) and isinstance(value, PLAIN) else "is None"
