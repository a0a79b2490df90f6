"""Triton code of values: one line each, with the user's names.

A program has a tile of ROWS rows and BLOCK_N columns. A value is ``(ROWS, BLOCK_N)``, ``(ROWS, 1)``, ``(1, BLOCK_N)`` or
``(1, 1)``, by whether it varies along rows and columns. A line goes where it is computed least often: before all tiles,
once for a tile of rows, or once for a tile of columns.
"""

from __future__ import annotations

import itertools
import keyword
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ..core.activations import ACTIVATIONS
from .ir import BINARY, COMPARISONS, REDUCTIONS, Node, computed_of, value_of
from .planning import Plan
from .structure import Operand, Part, Structure

__all__ = ["HEADER", "Argument", "Emitter", "Place", "group_of", "offsets_along", "place_of", "strides_of", "whole"]

# How an operand's rows are those of the call: all of them, none, those of a group of rows, or some in some order.
Place = Literal["rows", "vector", "group", "indexed"]

_DEVICE = ("await_predecessor", "gelu", "gelu_derivative", "gelu_tanh", "gelu_tanh_derivative", "keep_scale", "load_seed",
           "relu", "relu_derivative", "rows_of", "sigmoid", "sigmoid_derivative", "silu", "silu_derivative", "tanh",
           "tanh_derivative")  # fmt: skip
_OWN = ("expm1", "fmod", "largest", "log1p", "negative_zero", "power", "xlogy")
HEADER = f"""import triton
import triton.language as tl

from fusedops.core.device import {", ".join(_DEVICE)}
from fusedops.compiler.device import {", ".join(_OWN)}
"""
_TAKEN = {"tl", "triton", "ACC", "N", "BLOCK_N", "ROWS", "VECTOR", "STAGES", "OVERLAP", "M", "rows", "cols", "tile", "tiles",
          "group", "groups", "mask", "in_rows", "in_cols", "in_groups", "in_group", "places", "seed", "offset", "partials",
          "program", "start", "float", "range", *_DEVICE, *_OWN, *keyword.kwlist}  # fmt: skip

_UNARY = {"neg": "-{}", "exp": "tl.exp({})", "exp2": "tl.exp2({})", "log2": "tl.log2({})",
          "log": "tl.log({})", "log1p": "log1p({})", "expm1": "expm1({})",
          "sqrt": "tl.sqrt({})", "root": "tl.sqrt({})", "rsqrt": "tl.rsqrt({})", "reciprocal": "1.0 / {}", "abs": "tl.abs({})",
          "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0)).to(ACC)", "sin": "tl.sin({})",
          "cos": "tl.cos({})", "erf": "tl.erf({})", "floor": "tl.floor({})", "ceil": "tl.ceil({})", "not": "{} == 0",
          "isnan": "{0} != {0}"}  # fmt: skip
_BINARY = {"power": "", "fmod": "{} % {}", "quotient": "{} // {}", "xlogy": "",
           "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}", "and": "{} & {}", "or": "{} | {}",
           "xor": "{} ^ {}", "lt": "{} < {}", "le": "{} <= {}", "gt": "{} > {}", "ge": "{} >= {}", "eq": "{} == {}",
           "ne": "{} != {}",
           # A NaN stays, as in PyTorch.
           "maximum": "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
           "minimum": "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)"}  # fmt: skip
_TYPES = {torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16", torch.float32: "tl.float32",
          torch.float64: "tl.float64"}  # fmt: skip
assert set(BINARY | COMPARISONS) == set(_BINARY)
_MASKS = {(True, True): "mask", (True, False): "in_rows", (False, True): "in_cols", (False, False): ""}


@dataclass(frozen=True)
class Argument:
    """A run-time argument of a kernel.

    Attributes:
        name: in the source.
        kind: "input", "output", "intermediate", "stats", "moments", "cotangent", "gradient", "partials", "seed", "offset",
            "threshold", "stride" (of the tensor that ``of`` names), "size" (of a row axis), "rows", "chunks" or "programs".
        place: of which input, output, dropout or axis.
        of: for a stride: the kind of its tensor.
    """

    name: str
    kind: str
    place: int = 0
    of: str = ""


def place_of(structure: Structure, operand: Operand, grouped: bool) -> Place:
    """How an operand's rows are those of the call."""
    rows = tuple([axis for axis in operand.axes if axis in structure.rows])
    static = tuple([axis for axis in operand.axes if axis not in structure.rows])
    innermost = operand.axes[len(rows) :] == static
    if innermost and rows == structure.rows:  # without any there is one row
        return "rows"
    if not rows:
        return "vector"
    return "group" if innermost and grouped and rows == group_of(structure) else "indexed"


def group_of(structure: Structure) -> tuple[int, ...]:
    """The row axes of the groups of rows that have a vector each; () where there are none.

    Of several kinds of groups those that are most: the others are read by index.
    """
    found: tuple[int, ...] = ()
    for operand in structure.inputs:
        rows = tuple([axis for axis in operand.axes if axis in structure.rows])
        if operand.kind == "float" and rows == structure.rows[: len(rows)] and len(rows) < len(structure.rows):
            found = max(found, rows, key=len)
    return found


def strides_of(structure: Structure, operand: Operand) -> tuple[dict[int, int], int]:
    """Of an operand's axes within a row, how far apart their elements are; and the elements of a row."""
    static = [axis for axis in operand.axes if axis not in structure.rows]
    strides = {axis: math.prod([structure.sizes[a] for a in static[i + 1 :]]) for i, axis in enumerate(static)}
    return strides, math.prod([structure.sizes[axis] for axis in static])


def offsets_along(structure: Structure, strides: Mapping[int, int]) -> str:
    """Where the elements of an operand's columns are within its row, whatever their order there; "" where it has none."""
    columns, sizes = [axis for axis in structure.columns if axis in strides], structure.sizes
    adjacent = all(strides[a] == strides[b] * sizes[b] for a, b in itertools.pairwise(columns))
    if columns and tuple(columns) == structure.columns and adjacent:
        return _times("cols", strides[columns[-1]])
    return " + ".join([_times(column_index(structure, axis), strides[axis]) for axis in columns])


def column_index(structure: Structure, axis: int) -> str:
    """The index along one of the axes that make up a row."""
    columns, sizes = structure.columns, structure.sizes
    inner = math.prod([sizes[a] for a in columns[columns.index(axis) + 1 :]])
    text = "cols" if inner == 1 else f"(cols // {inner})"
    return text if axis == columns[0] else f"({text} % {sizes[axis]})"


def whole(structure: Structure, operand: Operand, acc: torch.dtype) -> Operand:
    """An operand with all rows, and all columns if it has any: for a gradient that is summed later, in ``acc``."""
    unrolled = [axis for axis in structure.unrolled if axis in operand.axes]
    columns = structure.columns if set(structure.columns) & set(operand.axes) else ()
    axes = (*structure.rows, *unrolled, *columns)
    return Operand(tuple([(axis,) for axis in axes]), acc, "float", operand.name)


class Emitter:
    """Writes values of a function, and the arguments that they are read from.

    Attributes:
        flat: whether nothing goes before all tiles: a program has one, or its registers hold no more.
        invariant: the lines before all tiles.
        lines: those of a tile of rows.
        body: those of a tile of columns, where rows are passed over tile by tile; None where one program has one tile.
        whole: whether that tile has all its columns.
        leaves: values that are not computed but read: "intermediate" or "stat 3".
        moved: the dtypes of whole tensors that are read or written.
        behind: stores of numbers of rows, which follow the line that computes the number. Triton 3.6 to 3.9 cannot compile
            some kernels that compute more of a number before it is stored: the pass that removes layout conversions
            uses a value ahead of its definition.
    """

    def __init__(self, plan: Plan, acc: torch.dtype, *, grouped: bool) -> None:
        self.plan, self.structure, self.acc, self.grouped = plan, plan.structure, acc, grouped
        self.arguments: dict[tuple[str, int, str], Argument] = {}
        self.flat = False
        self.invariant: list[str] = []
        self.lines: list[str] = []
        self.body: list[str] | None = None
        self.whole = False
        self.leaves: dict[Node, str] = {}
        self.intermediate_parts: dict[Node, Part] = {}
        self.moved: list[torch.dtype] = []
        self.named: dict[Node, str] = {}
        self.behind: dict[Node, list[Callable[[], None]]] = {}
        self._literals: set[str] = set()  # values that stand in the source as numbers, whatever node they are of
        self._taken = set(_TAKEN)
        self._by_row: dict[Node, bool] = {}
        self._known: dict[str, str] = {}  # from an expression to its name
        self._indices: set[int] = set()  # the row axes whose index is asked for

    # --- values -------------------------------------------------------------------------------------------------------

    def value(self, root: Node) -> str:
        """The name of a value, after the lines that compute it."""
        todo = [root]
        while todo:
            node = todo[-1]
            missing = [arg for arg in self._arguments(node) if arg not in self.named]
            missing.sort(key=self.has_rows, reverse=True)  # vectors last: they are in cache, and take registers
            if node in self.named or not missing:
                if node not in self.named:
                    self.named[node] = self._computed(node)
                    for store in self.behind.pop(node, ()):
                        store()
                todo.pop()
            else:
                todo.extend(reversed(missing))
        return self.named[root]

    def _arguments(self, node: Node) -> Sequence[Node]:
        """What has to be there before a value is computed."""
        if node in self.leaves:
            return ()
        return node.args[1:] if self._is_loaded(node) else computed_of(node)

    def open_columns(self, *, whole: bool) -> None:
        """From here on what varies along columns is computed for a tile of them."""
        self.body, self.whole = [], whole

    def close_columns(self, *header: str) -> None:
        """The end of what is done for each tile of columns: ``header`` is how it begins."""
        assert self.body is not None
        self.lines += [header[0], *[f"    {line}" for line in (*header[1:], *self.body)]]
        gone = {name for node, name in self.named.items() if self.has_columns(node)}
        self.named = {node: name for node, name in self.named.items() if name not in gone}
        self._known = {text: name for text, name in self._known.items() if name not in gone}
        self.body, self.whole = None, False

    def live(self) -> int:
        """How many values along columns exist at a time, in the order of the lines; vectors before all tiles count always."""
        wide = {name for node, name in self.named.items() if self.has_columns(node)}
        names = [_NAME.findall(line.partition("  # line ")[0]) for line in self.lines]
        last = {name: at for at, found in enumerate(names) for name in found}
        most, now = 0, set[str]()
        for at, found in enumerate(names):
            now |= wide & set(found[:1])
            most = max(most, len(now))
            now = {name for name in now if last[name] > at}
        return most + sum(line.partition(" = ")[0] in wide for line in self.invariant)

    def is_reduced(self, node: Node) -> bool:
        """Whether a reduction passes over the columns of rows."""
        return node not in self.leaves and self.has_columns(node.args[0]) and not self._is_loaded(node)

    def _is_loaded(self, node: Node) -> bool:
        """Whether this is one element of each row of an input: it is loaded from its place."""
        if node.op != "pick" or node.args[0].op != "input" or node.args[0] in self.leaves:
            return False
        return bool(node.attrs[0] == self.structure.columns)

    def has_columns(self, node: Node) -> bool:
        """Whether a value varies along a row."""
        return bool(node.axes & set(self.structure.columns))

    def has_rows(self, node: Node) -> bool:
        """Whether a value is another in each tile of rows: all that is computed of what is read by row."""
        found = self._by_row.get(node)
        if found is None:
            if node.op == "input" and node not in self.leaves:
                found = place_of(self.structure, self.structure.inputs[node.attrs[0]], self.grouped) in (
                    "rows",
                    "indexed",
                )
            elif node in self.leaves or node.op in ("cotangent", "keep"):
                found = True
            elif node.op == "iota":
                found = node.attrs[0] in self.structure.rows
            else:
                found = any(map(self.has_rows, node.args))
            self._by_row[node] = found
        return found

    def _computed(self, node: Node) -> str:
        if node not in self.leaves:
            if node.op == "const":
                text = _literal(node, self.acc)
                self._literals.add(text)
                return text
            if node.op in ("constant_to_gradients", "detached", "instead", "narrowed"):
                return self.named[node.args[0]]
        text = self._expression(node)
        known = self._known.get(text)
        if known is not None:
            return known
        name = self._known[text] = self.free(node.names[-1] if node.names else f"v{len(self._known)}")
        line = self.structure.lines.get(node.number)
        self._into(node).append(f"{name} = {text}" + (f"  # line {line}" if line else ""))
        return name

    def _into(self, node: Node) -> list[str]:
        if self.body is not None and self.has_columns(node):
            return self.body
        return self.lines if self.flat or self.has_rows(node) else self.invariant

    def _expression(self, node: Node) -> str:
        op = node.op
        if node in self.leaves:
            return self._leaf(node, self.leaves[node])
        args = [self.named[arg] for arg in self._arguments(node)]
        if args and self._literals.issuperset(args) and op != "where":
            args = [_filled(arg, inner.kind) for arg, inner in zip(args, self._arguments(node), strict=True)]
        if op in _LEAVES:
            return self._read(node)
        if op == "cast":
            return {"float": f"{args[0]}.to(ACC)", "int": f"{args[0]}.to(tl.int64)", "bool": f"{args[0]} != 0"}[
                node.kind
            ]
        if op in ("round", "rounded"):
            dtype = node.attrs[0] if op == "round" else getattr(torch, node.attrs[0])
            return args[0] if dtype == self.acc else f"{args[0]}.to({_TYPES[dtype]}).to(ACC)"
        if op == "where":
            both = self._literals.issuperset(args[1:]) and node.kind == "float"
            return f"tl.where({', '.join(args)})" + (".to(ACC)" if both else "")
        if op in ("fmod", "pow", "power", "xlogy"):
            return self._called(node, args)
        if op in REDUCTIONS:
            return self._reduction(node)
        if op in ACTIVATIONS:
            return f"{op}({args[0]})"
        if op.startswith("d:"):
            return f"{op[2:]}_derivative({args[0]})"
        if op == "neg" and node.kind == "float":
            return f"{args[0]} * -1.0"  # Triton subtracts from zero, which has another zero
        return (_UNARY.get(op) or _BINARY[op]).format(*args)

    def _called(self, node: Node, args: Sequence[str]) -> str:
        """A call of a function of two numbers, of which the second may be an attribute."""
        if node.kind != "float":
            return _BINARY[node.op].format(*args)
        exponents = [_literal(self.structure.graph.const(number), self.acc) for number in node.attrs]
        name = "power" if node.op == "pow" else node.op
        return f"{name}({', '.join(map(_as_tensor, (*args, *exponents)))})"

    def _reduction(self, node: Node) -> str:
        if self._is_loaded(node):
            return self._element(node)
        return self.reduced(node, self.reducible(node)) if self.is_reduced(node) else self.named[node.args[0]]

    def reducible(self, node: Node) -> str:
        """What a reduction sums or compares, with what is no column left out."""
        value = self.value(node.args[0])
        if node.op == "pick":
            return (
                f"tl.where({column_index(self.structure, node.attrs[0][0])} == {self.value(node.args[1])}, {value}, 0)"
            )
        padded = self.structure.cols & (self.structure.cols - 1) or self.structure.cols < 16 or self.body is not None
        if not padded or self.whole:
            return value
        neutral = _LEAST if node.op == "amax" and node.kind == "int" else _NEUTRAL[node.op]
        return f"tl.where(in_cols, {value}, {neutral})"

    def reduced(self, node: Node, value: str) -> str:
        """The reduction of a tile."""
        return f"largest({value})" if node.op == "amax" else f"tl.sum({value}, axis=1, keep_dims=True)"

    # --- leaves -------------------------------------------------------------------------------------------------------

    def _leaf(self, node: Node, what: str) -> str:
        if what == "intermediate":
            assert self.plan.intermediate_operand is not None
            return self._load("intermediate", 0, self.plan.intermediate_operand, self.intermediate_parts[node])
        kind, place = what.split()
        number = f"tl.load({self.number_of_rows(kind, int(place))}, mask=in_rows, other=0)"
        return f"{number}.to(tl.int64)" if node.kind == "int" else number

    def _read(self, node: Node) -> str:
        structure, op = self.structure, node.op
        if op == "input":
            return self._load("input", node.attrs[0], structure.inputs[node.attrs[0]], node.attrs[1])
        if op == "cotangent":
            number = node.attrs[0]
            operand = structure.outputs[number] if number < len(structure.outputs) else self.plan.intermediate_operand
            assert operand is not None
            return self._load("cotangent", number, operand, node.attrs[1])
        return self._place(node.attrs[0]) if op == "iota" else self._keep(node)

    def _place(self, axis: int) -> str:
        """The index along an axis."""
        if axis in self.structure.columns:
            return f"{column_index(self.structure, axis)}.to(tl.int64)"
        self._indices.add(axis)
        self._row_index(axis)  # asked for before the list of arguments ends
        return f"row{axis}"

    def _keep(self, node: Node) -> str:
        """Dropout's factors: the parts of a row are rows of their own to the random numbers."""
        structure, (number, part) = self.structure, node.attrs
        threshold = self.argument("threshold", number, f"threshold{number}")
        parts = math.prod([structure.sizes[axis] for axis in structure.unrolled])
        which = 0
        for axis in structure.unrolled:
            which = which * structure.sizes[axis] + dict(part).get(axis, 0)
        flat = "(group * M + places)" if self.grouped else "places"
        rows = flat if parts == 1 else f"{flat} * {parts} + {which}"
        offset = f"offset + {number << 48}" if number else "offset"
        factors = f"keep_scale(seed, {offset}, {threshold}, {rows}, start, N, ROWS, BLOCK_N, VECTOR, ACC)"
        if not structure.columns:  # of a row's only element
            factors = f"tl.sum(tl.where(in_cols, {factors}, 0), axis=1, keep_dims=True)"
        return factors

    # --- memory -------------------------------------------------------------------------------------------------------

    def argument(self, kind: str, place: int, name: str, of: str = "") -> str:
        """The name of an argument."""
        key = (kind, place, of)
        found = self.arguments.get(key)
        if found is None:
            found = self.arguments[key] = Argument(self.free(name), kind, place, of)
        return found.name

    def number_of_rows(self, kind: str, place: int) -> str:
        """Where a number of each row is: of ``stats``, which a backward reads, or ``moments``, which another kernel does."""
        pointer = self.argument(kind, 0, kind)
        total = "M * groups" if self.grouped else "M"
        return f"{pointer} + {place} * {total} + rows" if place else f"{pointer} + rows"

    def store(self, kind: str, place: int, operand: Operand, part: Part, node: Node) -> None:
        """Write a part of a tensor."""
        value = self.value(node)
        address, mask = self._address(kind, place, operand, part)
        self._count(operand)
        pointer = self.arguments[kind, place, ""].name
        if value in self._literals:
            value = _filled(value, node.kind)
        into = self.lines if self.body is None or mask == "in_rows" else self.body
        into.append(f"tl.store({address}, {value}.to({pointer}.dtype.element_ty), mask={mask})")

    def store_number(self, kind: str, place: int, node: Node) -> None:
        """Write a number of each row."""
        value = self.value(node)
        self.lines.append(f"tl.store({self.number_of_rows(kind, place)}, {value}, mask=in_rows)")

    def _load(self, kind: str, place: int, operand: Operand, part: Part) -> str:
        address, mask = self._address(kind, place, operand, part)
        self._count(operand)
        loaded = f"tl.load({address}, mask={mask}, other=0)" if mask else f"tl.load({address})"
        if place_of(self.structure, operand, self.grouped) in ("vector", "group") and not self._has_column(operand):
            # Of a scalar, which Triton's interpreter cannot compare, a tensor of one element.
            kind = _SCALARS[operand.kind]
            return f"tl.full((1, 1), {loaded}.to({kind}), {kind})" + (" != 0" if operand.kind == "bool" else "")
        return loaded + _READ_AS[operand.kind]

    def _has_column(self, operand: Operand) -> bool:
        return bool(set(operand.axes) & set(self.structure.columns))

    def _element(self, node: Node) -> str:
        """An element of each row, zero where its number is none."""
        (place, part), index = node.args[0].attrs, self.named[node.args[1]]
        operand = self.structure.inputs[place]
        shared = place_of(self.structure, operand, self.grouped) in ("vector", "group")
        if shared and node.args[1].op == "const":  # its address is of the index alone: a block, as its mask is
            index = f"tl.full((1, 1), {index}, tl.int64)"
        address, mask = self._address("input", place, operand, part, index)
        there = " & ".join([f"({index} >= 0)", f"({index} < N)", *([mask] if mask else [])])
        return f"tl.load({address}, mask={there}, other=0){_READ_AS[operand.kind]}"

    def _count(self, operand: Operand) -> None:
        if {*self.structure.rows, *self.structure.columns} <= set(operand.axes) and not self.whole:
            self.moved.append(operand.dtype)

    def _address(self, kind: str, place: int, operand: Operand, part: Part, element: str = "") -> tuple[str, str]:
        """Where a tile of an operand is, and which of it there is; or where an element of each row is."""
        structure = self.structure
        pointer = self.argument(kind, place, {"cotangent": "d_", "gradient": "grad_"}.get(kind, "") + operand.name)
        how = place_of(structure, operand, self.grouped)
        strides, size = strides_of(structure, operand)
        terms = [pointer]
        if how in ("rows", "group"):
            vector = bool(set(structure.columns) & set(strides))
            contiguous = kind in ("output", "intermediate", "gradient") or size == 1 or (how == "group" and not vector)
            apart = size if contiguous else self.argument("stride", place, f"{operand.name}_stride", kind)
            terms.append(_times("group" if how == "group" else "rows", apart))
        elif how == "indexed":
            terms.append(self._index_of(operand))
        columns = [axis for axis in structure.columns if axis in strides]
        if columns:
            terms.append(_times(element, strides[columns[0]]) if element else offsets_along(structure, strides))
        offset = 0
        for axis, at in part:
            behind = [a for a in operand.axes[operand.axes.index(axis) + 1 :] if a in structure.rows]
            if at and behind:  # each part has rows of its own
                terms.append(" * ".join([str(strides[axis] * at), *map(self._size, behind)]))
            else:
                offset += strides[axis] * at
        terms += [str(offset)] if offset else []
        mask = _MASKS[how in ("rows", "indexed"), bool(columns) and not (element or self.whole)]
        if how == "group" and not mask:  # an element's address is a block, that of a group's number a scalar
            mask = "in_groups" if element else "(group < groups)"
        return " + ".join(terms), mask

    def _index_of(self, operand: Operand) -> str:
        """Where a row of an operand begins that has other rows than the call, contiguous as it is."""
        structure, terms = self.structure, []
        for at, axis in enumerate(operand.axes):
            if axis in structure.rows:
                self._indices.add(axis)
                sizes = [
                    self._size(a) if a in structure.rows else str(structure.sizes[a]) for a in operand.axes[at + 1 :]
                ]
                terms.append(" * ".join([f"row{axis}", *sizes]))
        for axis in self._indices:  # asked for before the list of arguments ends
            self._row_index(axis)
        return " + ".join(terms)

    def _size(self, axis: int) -> str:
        return self.argument("size", axis, f"size{axis}")

    def _row_index(self, axis: int) -> str:
        rows = self.structure.rows
        inner = " * ".join([self._size(a) for a in rows[rows.index(axis) + 1 :]])
        text = f"(rows // ({inner}))" if inner else "rows"
        return text if axis == rows[0] else f"{text} % {self._size(axis)}"

    def indices(self) -> list[str]:
        """The lines that find the index along each row axis that is asked for."""
        return [f"row{axis} = {self._row_index(axis)}" for axis in sorted(self._indices)]

    def free(self, name: str) -> str:
        """A name that nothing else has."""
        name = re.sub(r"\W", "_", name)
        name = name if name.isascii() else "v"
        name = name if name[:1].isalpha() or name[:1] == "_" else f"v{name}"  # no suffix makes 0_weight an identifier
        if re.fullmatch(r"(sum|row)\d+|.*_base", name):  # the package's own
            name = f"v_{name}_"
        while name in self._taken or not name.isidentifier():
            found = re.fullmatch(r"(.*?)(\d*)", name)
            assert found is not None
            name = f"{found[1] or 'v'}{int(found[2] or 1) + 1}"
        self._taken.add(name)
        return name


_NAME = re.compile(r"[^\W\d]\w*")
_LEAVES = frozenset({"input", "cotangent", "iota", "keep"})
_READ_AS = {"float": ".to(ACC)", "int": ".to(tl.int64)", "bool": " != 0"}
_SCALARS = {"float": "ACC", "int": "tl.int64", "bool": "tl.int8"}
_KINDS = {"float": "ACC", "int": "tl.int64", "bool": "tl.int1"}
_LEAST = str(-(2**63))
_NEUTRAL = {"sum": "0", "amax": 'float("-inf")'}


def _times(index: str, stride: int | str) -> str:
    return index if stride == 1 else f"{index} * {stride}"


def _filled(literal: str, kind: str) -> str:
    """A number as a tensor of one element, which some are already: those in brackets are sums of such."""
    is_tensor = literal.startswith(("(", "negative_zero"))
    return literal if is_tensor else f"tl.full((1, 1), {literal}, {_KINDS[kind]})"


def _literal(node: Node, acc: torch.dtype) -> str:
    value = value_of(node)
    if not isinstance(value, float):
        return repr(value)
    if not math.isfinite(value):
        return f'float("{value}")'
    if value == 0.0 and math.copysign(1.0, value) < 0.0:
        return "negative_zero(ACC)"
    if acc != torch.float64 or float(torch.tensor(value, dtype=torch.float32, device="cpu")) == value:
        return repr(value)
    # Triton takes a number for fp32: a sum of such is exact, and so is a product with powers of two.
    mantissa, exponent = math.frexp(value)
    if -100 <= exponent <= 127:
        mantissa, exponent = value, 0
    terms: list[float] = []
    while mantissa and len(terms) < 3:
        terms.append(float(torch.tensor(mantissa, dtype=torch.float32, device="cpu")))
        mantissa -= terms[-1]
    powers = [100] * (abs(exponent) // 100) + [abs(exponent) % 100]
    factors = [math.ldexp(1.0, power if exponent > 0 else -power) for power in powers if power]
    total = " + ".join(map(_in_fp64, terms))
    return f"({' * '.join([f'({total})', *map(_in_fp64, factors)])})" if factors else f"({total})"


def _as_tensor(value: str) -> str:
    """A value, which may be a number, for a device function that looks at its dtype."""
    return value if _NAME.fullmatch(value) else f"tl.zeros((1, 1), ACC) + {value}"


def _in_fp64(value: float) -> str:
    return f"tl.full((1, 1), {value!r}, ACC)"
