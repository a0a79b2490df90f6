"""Checks of structures that were read from a file.

A structure becomes the source of kernels, which is executed. So its fields are checked first:
operators are in the table, with their number of arguments; the arguments of a value are earlier
values; axes, parts and numbers are in range; names are identifiers. What passes is a row-wise
function, and can be nothing else.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ..core.activations import ACTIVATIONS
from ..core.calls.words import NAMES
from .ir import BINARY, COMPARISONS, REDUCTIONS, UNARY

__all__ = ["GrammarError", "check"]

# The most values, and the longest chain of values. Functions that are traced in reasonable time
# have fewer.
_MOST_NODES, _DEEPEST = 20_000, 800
_KINDS = ("float", "int", "bool")
_CONTAINERS = ("tensor", "tuple", "list")
_DTYPES = frozenset(name for dtype, name in NAMES.items() if dtype is not None)
# The number of arguments of each operator.
_ARITIES = {
    **dict.fromkeys(("input", "const", "iota", "keep"), 0),
    **dict.fromkeys(
        (*UNARY, *ACTIVATIONS, "cast", "rounded", "narrowed", "detached", "constant_to_gradients"),
        1,
    ),
    **dict.fromkeys((*BINARY, *COMPARISONS, "instead"), 2),
    **{op: 2 if op == "pick" else 1 for op in REDUCTIONS},
    "where": 3,
}
_NAME = re.compile(r"[^\W\d]\w*(\.\w+)*")


# A structure as JSON, here of ``x * w + 2.0`` for 64 columns. Nodes are numbered by their place in
# the list, axes by their place among the sizes:
#
#   node       operator, arguments, attributes, axes, kind, names
#     is 0     ["input", [], [0, []], [0, 1], "float", ["x"]]     input 0, of no part
#     is 1     ["input", [], [1, []], [1], "float", ["w"]]
#     is 2     ["mul", [0, 1], [], [0, 1], "float", []]
#     is 3     ["const", [], ["2.0"], [], "float", []]            as text: JSON has no NaN
#     is 4     ["add", [2, 3], [], [0, 1], "float", []]
#   sizes      of axes 0 and 1: [5, 64]; rows are [0], columns [1], unrolled [], fixed []
#   inputs     labels, dtype, kind, name: [[[0], [1]], "float32", "float", "x"] and so on
#   outputs    in the same form
#   results    for each output its parts, each with its node: [[[], 4]]
#   values     the same for each tensor that may be saved, with its dtype
#   lines      a node and its line in the user's file
#   flags      "used" of each input, "wide"; for "loose", "drops", "container" see `Structure`
#
# Names become variables of generated code, and attributes its numbers: neither may be other text.


class GrammarError(ValueError):
    """A value that was read is no structure."""


def check(fields: Any) -> None:
    """Check that a value is a structure as `storing.encoded` writes it.

    Raises:
        GrammarError: it is not; where types differ, the error may also be one of Python's.
    """
    _Checker(fields).run()


def _require(condition: object, what: str) -> None:
    if not condition:
        raise GrammarError(what)


def _is_number(value: Any, end: float = math.inf) -> bool:
    """Whether a value is an int (and no bool) of a range that begins at zero."""
    return type(value) is int and 0 <= value < end


def _are_numbers(values: Iterable[Any], end: float = math.inf) -> bool:
    return all(_is_number(value, end) for value in values)


def _is_attribute(value: Any) -> bool:
    """Whether a value is a number or the name of a dtype."""
    return type(value) is float or value in _DTYPES


def _is_probability(value: Any) -> bool:
    return type(value) is float and 0.0 <= value <= 1.0


def _kind_of(dtype: str) -> str:
    if "float" in dtype:
        return "float"
    return "bool" if dtype == "bool" else "int"


_FIELDS = frozenset(
    {
        "nodes",
        "sizes",
        "rows",
        "columns",
        "unrolled",
        "drops",
        "container",
        "inputs",
        "outputs",
        "results",
        "lines",
        "used",
        "wide",
        "loose",
        "fixed",
        "values",
    }
)


class _Checker:
    def __init__(self, fields: Any) -> None:
        self.fields = fields
        self.sizes: list[int] = fields["sizes"]
        self.unrolled: list[int] = fields["unrolled"]

    def run(self) -> None:
        """Check everything."""
        # Later checks index by numbers that earlier ones checked to be in range.
        _require(self.fields.keys() == _FIELDS, "fields")
        self._flags()
        self._scalars()
        self._operands()
        self._nodes()
        self._results()

    def _flags(self) -> None:
        """Check which inputs are used, and whether anything is computed in fp64.

        The shape of an unused input is not compared with the structure in a call, so that a node
        which read it could read out of bounds: `_input` refuses such nodes. Values in fp64 require
        "wide", without which a program computes in fp32.
        """
        fields = self.fields
        _require(len(fields["used"]) == len(fields["inputs"]), "used")
        _require(all(type(flag) is bool for flag in fields["used"]), "used")
        _require(type(fields["wide"]) is bool, "wide")
        dtypes = [dtype for _, dtype in fields["values"]]
        _require(fields["wide"] or "float64" not in dtypes, "wide")

    def _scalars(self) -> None:
        """Check sizes, axes and other numbers."""
        fields = self.fields
        _require(_are_numbers(self.sizes) and all(self.sizes), "sizes")
        axes = [*fields["rows"], *fields["columns"], *self.unrolled]
        _require(_are_numbers(axes, len(self.sizes)), "axes")
        _require(len(set(axes)) == len(axes), "axes")
        _require(set(fields["fixed"]) <= set(fields["rows"]), "fixed")
        _require(fields["container"] in _CONTAINERS, "container")
        _require(all(map(_is_probability, fields["drops"])), "drops")
        _require(_are_numbers(itertools.chain.from_iterable(fields["lines"])), "lines")

    def _operands(self) -> None:
        """Check the inputs and outputs."""
        fields = self.fields
        inputs = zip(fields["inputs"], fields["used"], fields["loose"], strict=True)
        for operand, used, loose in inputs:
            # Only dimensions of unused inputs may have any size.
            dims = 0 if used else len(operand[0])
            _require(_is_number(loose, dims + 1), "loose")
            self._operand(*operand, used=used)
        for operand in fields["outputs"]:
            self._operand(*operand, used=True)

    def _results(self) -> None:
        """Check the nodes of each output, and those that may be saved."""
        fields = self.fields
        _require(len(fields["results"]) == len(fields["outputs"]) > 0, "results")
        for (labels, *_), parts in zip(fields["outputs"], fields["results"], strict=True):
            axes = set(itertools.chain.from_iterable(labels))
            _require(axes.issuperset(fields["rows"]), "an output without rows")
            self._parts(parts, axes)
            for _, number in parts:
                _require(axes.issuperset(fields["nodes"][number][3]), "results")
        for parts, dtype in fields["values"]:
            _require(dtype in _DTYPES, "dtype")
            self._parts(parts, None)

    def _operand(self, labels: Any, dtype: Any, kind: Any, name: Any, *, used: bool) -> None:
        axes = list(itertools.chain.from_iterable(labels))
        _require(_are_numbers(axes, len(self.sizes)), "labels")
        if used:
            # Each axis once, and row axes before column axes: True before False. Unrolled axes may
            # be anywhere.
            rows = [axis in self.fields["rows"] for axis in axes if axis not in self.unrolled]
            _require(len(set(axes)) == len(axes), "labels")
            _require(rows == sorted(rows, reverse=True), "labels")
        _require(dtype in _DTYPES and kind == _kind_of(dtype), "operand")
        _require(name == "" or _NAME.fullmatch(name), "operand")

    def _nodes(self) -> None:
        depths = list[int]()
        axes = list[set[int]]()
        _require(len(self.fields["nodes"]) <= _MOST_NODES, "too many values")
        for op, args, attrs, node_axes, kind, names in self.fields["nodes"]:
            _require(len(args) == _ARITIES[op], f"arguments of {op}")
            # A node's arguments come before it, so that there are no cycles.
            _require(_are_numbers(args, len(depths)), "arguments")
            depths.append(1 + max([depths[arg] for arg in args], default=0))
            _require(depths[-1] <= _DEEPEST, "too deep")
            _require(_are_numbers(node_axes, len(self.sizes)), "axes")
            expected = self._axes(op, attrs, kind, [axes[arg] for arg in args])
            _require(set(node_axes) == expected, f"axes of {op}")
            _require(kind == "bool" if op in COMPARISONS else kind in _KINDS, "kind")
            _require(all(map(_NAME.fullmatch, names)), "names")
            axes.append(set(node_axes))

    def _axes(self, op: str, attrs: Any, kind: str, arguments: Sequence[set[int]]) -> set[int]:
        """Check a value's attributes, and return the axes that it has."""
        if op in _LEAVES:
            return _LEAVES[op](self, attrs, kind)
        axes = set[int]().union(*arguments)
        if op in REDUCTIONS:
            over, *options = attrs
            _require(options in ([], ["first"]), "reduction")
            _require(set(over) <= set(self.fields["columns"]), "reduction")
            return axes - set(over)
        _require(all(map(_is_attribute, attrs)), "attributes")
        if op in ("ordinal", "of_ordinal"):
            _require(attrs in (["float32"], ["float64"]), "attributes")
            _require(kind == ("int" if op == "ordinal" else "float"), "kind")
        if op == "pow":
            (exponent,) = attrs
            _require(type(exponent) is float, "exponent")
        return axes

    def _input(self, attrs: Any, kind: str) -> set[int]:
        position, part = attrs
        _require(_is_number(position, len(self.fields["inputs"])), "input")
        _require(self.fields["used"][position], "used")
        labels, _, input_kind, _ = self.fields["inputs"][position]
        self._part(part)
        _require(input_kind == kind, "kind")
        return set(itertools.chain.from_iterable(labels)) - set(self.unrolled)

    def _const(self, attrs: Any, kind: str) -> set[int]:
        (value,) = attrs
        if kind == "float":
            _require(type(value) is str and repr(float(value)) == value, "number")
        else:
            _require(type(value) is {"int": int, "bool": bool}[kind], "number")
        return set()

    def _iota(self, attrs: Any, kind: str) -> set[int]:
        (axis,) = attrs
        axes = (*self.fields["rows"], *self.fields["columns"])
        _require(axis in axes and kind == "int", "index")
        return {axis}

    def _keep(self, attrs: Any, kind: str) -> set[int]:
        number, part = attrs
        _require(_is_number(number, len(self.fields["drops"])) and kind == "float", "dropout")
        self._part(part)
        return {*self.fields["rows"], *self.fields["columns"]}

    def _part(self, part: Any) -> None:
        for axis, index in part:
            _require(axis in self.unrolled and _is_number(index, self.sizes[axis]), "part")

    def _parts(self, parts: Any, axes: Collection[int] | None) -> None:
        """Check that there is one node for each part of a tensor.

        Args:
            parts: the parts and the numbers of their nodes.
            axes: the tensor's axes; None for a value, whose axes are those that the parts name.
        """
        for part, number in parts:
            self._part(part)
            _require(_is_number(number, len(self.fields["nodes"])), "value")
        keys = [tuple(map(tuple, part)) for part, _ in parts]
        if axes is None:
            axes = {axis for axis, _ in itertools.chain(*keys)}
        split = filter(axes.__contains__, self.unrolled)
        # A part is an index along each unrolled axis of the tensor.
        expected = itertools.product(*map(self._indices, split))
        # Both are sorted: the pairs in a part are in the order of axis numbers for a value
        # (`Numbering.parts`), and in that of the unrolled axes for an operand (`Structure.parts`).
        _require(_sorted(keys) == _sorted(expected), "parts")

    def _indices(self, axis: int) -> list[tuple[int, int]]:
        """Return the index of each part along an axis."""
        return [(axis, index) for index in range(self.sizes[axis])]


def _sorted(parts: Iterable[Any]) -> list[Any]:
    return sorted(map(tuple, map(sorted, parts)))


_LEAVES: Mapping[str, Callable[[_Checker, Any, str], set[int]]] = {
    "input": _Checker._input,
    "const": _Checker._const,
    "iota": _Checker._iota,
    "keep": _Checker._keep,
}
