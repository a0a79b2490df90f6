"""Checks of structures that were read from a file.

A structure becomes the source of kernels, which is executed. So its words are checked before: operators come from the
table, with their number of arguments; values are computed of earlier ones; axes, parts and numbers are in range; names are
identifiers. Nothing that passes can be more than a row-wise function.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..core.activations import ACTIVATIONS
from ..core.operators import NAMES
from .ir import BINARY, COMPARISONS, REDUCTIONS, UNARY

__all__ = ["GrammarError", "check"]

# More values, or values of values of values, than any function that is traced in reasonable time.
_MOST_NODES, _DEEPEST = 20_000, 800
_KINDS = ("float", "int", "bool")
_CONTAINERS = ("tensor", "tuple", "list")
_DTYPES = frozenset(name for dtype, name in NAMES.items() if dtype is not None)
# The number of arguments of each operator.
_ARITIES = {
    **dict.fromkeys(("input", "const", "iota", "keep"), 0),
    **dict.fromkeys((*UNARY, *ACTIVATIONS, "cast", "rounded", "narrowed", "detached", "constant_to_gradients"), 1),
    **dict.fromkeys((*BINARY, *COMPARISONS, "instead"), 2),
    **{op: 2 if op == "pick" else 1 for op in REDUCTIONS},
    "where": 3,
}
_NAME = re.compile(r"[^\W\d]\w*(\.\w+)*")


class GrammarError(ValueError):
    """What was read is no structure."""


def check(found: Any) -> None:
    """Raises `GrammarError`, or an error of types, where this is no structure as `storing.encoded` writes it."""
    _Checker(found).run()


def _require(condition: object, what: str) -> None:
    if not condition:
        raise GrammarError(what)


def _is_number(value: Any, end: float = math.inf) -> bool:
    return type(value) is int and 0 <= value < end


def _kind_of(dtype: str) -> str:
    return "bool" if dtype == "bool" else "float" if "float" in dtype else "int"


class _Checker:
    def __init__(self, found: Any) -> None:
        self.found = found
        self.sizes: list[int] = found["sizes"]
        self.unrolled: list[int] = found["unrolled"]

    def run(self) -> None:
        """Check everything."""
        found, count = self.found, len(self.sizes)
        _require(all(_is_number(size) and size > 0 for size in self.sizes), "sizes")
        axes = [*found["rows"], *found["columns"], *self.unrolled]
        _require(all(_is_number(axis, count) for axis in axes) and len(set(axes)) == len(axes), "axes")
        _require(set(found["fixed"]) <= set(found["rows"]), "fixed")
        _require(found["container"] in _CONTAINERS, "container")
        _require(all(type(p) is float and 0.0 <= p <= 1.0 for p in found["drops"]), "drops")
        _require(all(_is_number(number) for pair in found["lines"] for number in pair), "lines")
        _require(len(found["used"]) == len(found["inputs"]), "used")
        for (labels, *_), used, loose in zip(found["inputs"], found["used"], found["loose"], strict=True):
            _require(_is_number(loose, 1 if used else len(labels) + 1), "loose")
        for operand, used in zip(found["inputs"], found["used"], strict=True):
            self._operand(*operand, used=used)
        for operand in found["outputs"]:
            self._operand(*operand, used=True)
        self._nodes()
        _require(len(found["results"]) == len(found["outputs"]) > 0, "results")
        for (labels, *_), parts in zip(found["outputs"], found["results"], strict=True):
            its = {axis for label in labels for axis in label}
            _require(its.issuperset(found["rows"]), "an output without rows")
            self._parts(parts, its)
            _require(all(its.issuperset(self.found["nodes"][number][3]) for _, number in parts), "results")
        for parts, dtype in found["values"]:
            _require(dtype in _DTYPES, "dtype")
            self._parts(parts, None)
        # Whatever else there is has no words.
        read = {"nodes", "sizes", "rows", "columns", "unrolled", "drops", "container", "inputs", "outputs", "results",
                "lines", "loose", "fixed", "values"}  # fmt: skip
        for key in found.keys() - read:
            rest = found[key] if isinstance(found[key], list) else [found[key]]
            _require(all(type(value) in (int, bool) for value in rest), key)

    def _operand(self, labels: Any, dtype: Any, kind: Any, name: Any, *, used: bool) -> None:
        axes = [axis for label in labels for axis in label]
        _require(all(_is_number(axis, len(self.sizes)) for axis in axes), "labels")
        rows = [axis in self.found["rows"] for axis in axes if axis not in self.unrolled]
        # As `structure` has them: each dimension once, and those of the rows before columns.
        _require(not used or (len(set(axes)) == len(axes) and rows == sorted(rows, reverse=True)), "labels")
        _require(dtype in _DTYPES and kind == _kind_of(dtype) and (name == "" or _NAME.fullmatch(name)), "operand")

    def _nodes(self) -> None:
        depths, axes = list[int](), list[set[int]]()
        _require(len(self.found["nodes"]) <= _MOST_NODES, "too many values")
        for op, args, attrs, own, kind, names in self.found["nodes"]:
            _require(len(args) == _ARITIES[op], f"arguments of {op}")
            _require(all(_is_number(arg, len(depths)) for arg in args), "arguments")
            depths.append(1 + max([depths[arg] for arg in args], default=0))
            _require(depths[-1] <= _DEEPEST, "too deep")
            _require(all(_is_number(axis, len(self.sizes)) for axis in own), "axes")
            _require(set(own) == self._axes(op, attrs, kind, [axes[arg] for arg in args]), f"axes of {op}")
            _require(kind == "bool" if op in COMPARISONS else kind in _KINDS, "kind")
            _require(all(_NAME.fullmatch(name) for name in names), "names")
            axes.append(set(own))

    def _axes(self, op: str, attrs: Any, kind: str, given: Sequence[set[int]]) -> set[int]:
        """The axes that a value has, after a check of its attributes."""
        if op in _LEAVES:
            return _LEAVES[op](self, attrs, kind)
        found = set[int]().union(*given)
        if op in REDUCTIONS:
            over, *rest = attrs
            _require(rest in ([], ["first"]) and set(over) <= set(self.found["columns"]), "reduction")
            return found - set(over)
        _require(all(type(value) is float or value in _DTYPES for value in attrs), "attributes")
        _require(op != "pow" or [type(value) for value in attrs] == [float], "exponent")
        return found

    def _input(self, attrs: Any, kind: str) -> set[int]:
        place, part = attrs
        _require(_is_number(place, len(self.found["inputs"])), "input")
        labels, _, its, _ = self.found["inputs"][place]
        self._part(part)
        _require(its == kind, "kind")
        return {axis for label in labels for axis in label} - set(self.unrolled)

    def _const(self, attrs: Any, kind: str) -> set[int]:
        (value,) = attrs
        if kind == "float":
            _require(type(value) is str and repr(float(value)) == value, "number")
        else:
            _require(type(value) is {"int": int, "bool": bool}[kind], "number")
        return set()

    def _iota(self, attrs: Any, kind: str) -> set[int]:
        (axis,) = attrs
        _require(axis in (*self.found["rows"], *self.found["columns"]) and kind == "int", "index")
        return {axis}

    def _keep(self, attrs: Any, kind: str) -> set[int]:
        number, part = attrs
        _require(_is_number(number, len(self.found["drops"])) and kind == "float", "dropout")
        self._part(part)
        return {*self.found["rows"], *self.found["columns"]}

    def _part(self, part: Any) -> None:
        for axis, place in part:
            _require(axis in self.unrolled and _is_number(place, self.sizes[axis]), "part")

    def _parts(self, parts: Any, axes: Collection[int] | None) -> None:
        """Of a tensor that has these axes: each part once."""
        for part, number in parts:
            self._part(part)
            _require(_is_number(number, len(self.found["nodes"])), "value")
        places = [tuple(map(tuple, part)) for part, _ in parts]
        if axes is None:
            axes = {axis for axis, _ in itertools.chain(*places)}
        of = [axis for axis in self.unrolled if axis in axes]
        wanted = itertools.product(*[[(axis, place) for place in range(self.sizes[axis])] for axis in of])
        # Sorted: a value's parts go by its axes' numbers, a tensor's by those of the structure.
        given = sorted(tuple(sorted(part)) for part in places)
        _require(given == sorted(tuple(sorted(part)) for part in wanted), "parts")


_LEAVES: Mapping[str, Callable[[_Checker, Any, str], set[int]]] = {
    "input": _Checker._input,
    "const": _Checker._const,
    "iota": _Checker._iota,
    "keep": _Checker._keep,
}
