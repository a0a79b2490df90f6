"""Guards of torch.compile on the variables of a function whose call is one node of the graph.

Dynamo does not trace into the node. Before the node it traces a function that compares the same
variables with their present values. So it guards on them, and compiles a call with other values
again.
"""

from __future__ import annotations

import math
from types import FunctionType
from typing import Any

from .state import simple_variables
from .text import indented

__all__ = ["Guards"]


class Guards:
    """The comparisons of a function's variables.

    Each set of values has an attribute of its own, with the functions that compare the values:
    Dynamo reads an attribute by its name, and guards on it. Code that was compiled for one set
    reads the functions of that set, also after another set was added::

        values0 = (compare,)      if SCALE == 2.0: pass
        values1 = (compare,)      if SCALE == 3.0: pass
    """

    def __init__(self, function: FunctionType) -> None:
        self._function = function
        self._names: dict[Any, str] = {}

    def attribute(self) -> str:
        """Return the attribute with the functions that compare the present values.

        "" if the function reads more than numbers: then Dynamo has to trace the function.
        """
        functions = simple_variables(self._function)
        if functions is None:
            return ""
        texts: list[Any] = []
        comparisons: list[FunctionType] = []
        for function, variables in functions:
            if not variables:
                continue
            text, compare = _comparing(function, variables)
            # The attribute holds the function and so its globals, whose id is not reused.
            texts.append((text, id(compare.__globals__)))
            comparisons.append(compare)
        key = tuple(texts)
        if key not in self._names:
            self._names[key] = f"values{len(self._names)}"
            setattr(self, self._names[key], tuple(comparisons))
        return self._names[key]


def _comparing(
    function: FunctionType, variables: list[tuple[str, Any]]
) -> tuple[str, FunctionType]:
    """Return a function that compares the variables of another, in its scope, and the source."""
    free = sorted({name for name, _ in variables} & set(function.__code__.co_freevars))
    lines = dict.fromkeys(f"if {name} {_same(name, value)}: pass" for name, value in variables)
    body = "\n".join(indented(lines, 2))
    text = f"def around({', '.join(free)}):\n    def compare():\n{body}\n    return compare\n"
    scope: dict[str, Any] = {}
    exec(text, scope)
    # Only the code of `compare` is used. With the other function's globals and cells it reads the
    # same variables as that function.
    compare = scope["around"](*free)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple([cells[name] for name in compare.__code__.co_freevars])
    return text, FunctionType(compare.__code__, function.__globals__, "compare", None, closure)


def _same(name: str, value: Any) -> str:
    """Return a comparison with a value; Dynamo guards on a value on which a branch depends."""
    if isinstance(value, float):
        return _same_float(name, value)
    if isinstance(value, (int, str)):
        return f"== {value!r}"
    return "is None"


def _same_float(name: str, value: float) -> str:
    if math.isnan(value):
        return f"!= {name}"  # NaN alone differs from itself
    if math.isinf(value):
        sign = "-" if value < 0 else ""
        return f"== {sign}1e999"  # `inf` is no literal
    return f"== {value!r}"
