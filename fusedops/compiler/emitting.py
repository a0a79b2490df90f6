"""Triton code of values: one line each, with the user's names.

A program has a tile of ROWS rows and BLOCK_N columns. A value's shape follows from the axes along
which it varies::

                    along columns      not along columns
    along rows      (ROWS, BLOCK_N)    (ROWS, 1)
    not along rows  (1, BLOCK_N)       (1, 1)

A line goes where it is computed least often: before all tiles, once for a tile of rows, or once for
a tile of columns.
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
from .structure import Operand, Part, Structure, within, without

__all__ = [
    "HEADER",
    "Argument",
    "Emitter",
    "RowLayout",
    "group_of",
    "offsets_along",
    "row_layout",
    "strides_of",
    "unreduced",
]

# How an operand's rows correspond to those of the call: it has all of them, none, one for each
# group of rows, or some in some order.
RowLayout = Literal["rows", "vector", "group", "indexed"]

_DEVICE = (
    "await_predecessor",
    "gelu",
    "gelu_derivative",
    "gelu_tanh",
    "gelu_tanh_derivative",
    "keep_scale",
    "load_seed",
    "relu",
    "relu_derivative",
    "rows_of",
    "sigmoid",
    "sigmoid_derivative",
    "silu",
    "silu_derivative",
    "tanh",
    "tanh_derivative",
)
_OWN = ("expm1", "fmod", "largest", "log1p", "negative_zero", "power", "xlogy")
HEADER = f"""import triton
import triton.language as tl

from fusedops.core.device import {", ".join(_DEVICE)}
from fusedops.compiler.device import {", ".join(_OWN)}
"""
# Names that the templates of kernels use.
_RESERVED = {
    "tl",
    "triton",
    "ACC",
    "N",
    "BLOCK_N",
    "ROWS",
    "VECTOR",
    "STAGES",
    "OVERLAP",
    "M",
    "rows",
    "cols",
    "tile",
    "tiles",
    "group",
    "groups",
    "mask",
    "in_rows",
    "in_cols",
    "in_groups",
    "in_group",
    "places",
    "seed",
    "offset",
    "partials",
    "program",
    "start",
    "float",
    "range",
    *_DEVICE,
    *_OWN,
    *keyword.kwlist,
}

# Operators as formats of their arguments. Those that depend on more are methods of `Emitter`.
_FORMATS = {
    "exp": "tl.exp({})",
    "exp2": "tl.exp2({})",
    "log2": "tl.log2({})",
    "log": "tl.log({})",
    "log1p": "log1p({})",
    "expm1": "expm1({})",
    "sqrt": "tl.sqrt({})",
    "root": "tl.sqrt({})",
    "rsqrt": "tl.rsqrt({})",
    "reciprocal": "1.0 / {}",
    "abs": "tl.abs({})",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0)).to(ACC)",
    "sin": "tl.sin({})",
    "cos": "tl.cos({})",
    "erf": "tl.erf({})",
    "floor": "tl.floor({})",
    "ceil": "tl.ceil({})",
    "not": "{} == 0",
    "isnan": "{0} != {0}",
    "fmod": "{} % {}",
    "quotient": "{} // {}",
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "and": "{} & {}",
    "or": "{} | {}",
    "xor": "{} ^ {}",
    "lt": "{} < {}",
    "le": "{} <= {}",
    "gt": "{} > {}",
    "ge": "{} >= {}",
    "eq": "{} == {}",
    "ne": "{} != {}",
    # NaN propagates, as in PyTorch.
    "maximum": "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    **{name: f"{name}({{}})" for name in ACTIVATIONS},
    **{f"d:{name}": f"{name}_derivative({{}})" for name in ACTIVATIONS},
}
_TYPES = {
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}
# By whether an address varies along rows and along columns.
_MASKS = {
    (True, True): "mask",
    (True, False): "in_rows",
    (False, True): "in_cols",
    (False, False): "",
}


@dataclass(frozen=True)
class Argument:
    """A run-time argument of a kernel.

    Attributes:
        name: in the source.
        kind: "input", "output", "intermediate", "stats", "moments", "cotangent", "gradient",
            "partials", "seed", "offset", "threshold", "stride" (of the tensor that ``of`` names),
            "size" (of a row axis), "rows", "chunks" or "programs".
        index: of the input, output, dropout or axis.
        of: for a stride: the kind of its tensor.
    """

    name: str
    kind: str
    index: int = 0
    of: str = ""


def row_layout(structure: Structure, operand: Operand, grouped: bool) -> RowLayout:
    """Return how the rows of an operand correspond to those of the call."""
    rows = _row_axes(structure, operand)
    static = tuple(without(operand.axes, structure.rows))
    rows_first = operand.axes[len(rows) :] == static
    # A function without row axes has one row.
    if rows_first and rows == structure.rows:
        return "rows"
    if not rows:
        return "vector"
    if grouped and rows_first and rows == group_of(structure):
        return "group"
    return "indexed"


def group_of(structure: Structure) -> tuple[int, ...]:
    """Return the row axes of the groups of rows that share a vector; () if there are none.

    With several kinds of groups, returns the kind with the most groups. The vectors of the others
    are read by index.
    """
    group: tuple[int, ...] = ()
    for operand in structure.inputs:
        rows = _row_axes(structure, operand)
        is_leading = rows == structure.rows[: len(rows)]
        is_shared = len(rows) < len(structure.rows)
        if operand.kind == "float" and is_leading and is_shared:
            group = max(group, rows, key=len)
    return group


def strides_of(structure: Structure, operand: Operand) -> tuple[dict[int, int], int]:
    """Return the strides of an operand's axes within a row, and the number of elements of a row."""
    static = without(operand.axes, structure.rows)
    strides: dict[int, int] = {}
    size = 1
    for axis in reversed(static):
        strides[axis] = size
        size *= structure.sizes[axis]
    return strides, size


def offsets_along(structure: Structure, strides: Mapping[int, int]) -> str:
    """Return the offsets of a tile's columns in an operand's row; "" if it has no columns.

    The operand may have the column axes in another order than the call, or only some of them.
    """
    columns, sizes = within(structure.columns, strides), structure.sizes
    adjacent = all(strides[a] == strides[b] * sizes[b] for a, b in itertools.pairwise(columns))
    is_complete = tuple(columns) == structure.columns
    if columns and is_complete and adjacent:
        return _times("cols", strides[columns[-1]])
    return " + ".join([_times(column_index(structure, axis), strides[axis]) for axis in columns])


def column_index(structure: Structure, axis: int) -> str:
    """Return the index along one of the axes that make up a row."""
    columns, sizes = structure.columns, structure.sizes
    inner = math.prod([sizes[a] for a in columns[columns.index(axis) + 1 :]])
    text = "cols" if inner == 1 else f"(cols // {inner})"
    if axis == columns[0]:
        return text
    return f"({text} % {sizes[axis]})"


def unreduced(structure: Structure, operand: Operand, acc: torch.dtype) -> Operand:
    """Return the operand of an input's gradient before it is summed over rows, in ``acc``.

    It has all rows, and all columns if the input has any.
    """
    unrolled = within(structure.unrolled, operand.axes)
    columns = structure.columns if set(structure.columns) & set(operand.axes) else ()
    axes = (*structure.rows, *unrolled, *columns)
    return Operand(tuple([(axis,) for axis in axes]), acc, "float", operand.name)


class Emitter:
    """Writes values of a function, and the arguments that they are read from.

    A kernel's lines are in three lists, one for each level of its loops::

        invariant                    # vectors: once in a program
        for tile in tiles of rows:
            lines                    # numbers of rows, and whole rows
            for start in tiles of columns:
                body                 # only between open_columns() and close_columns()

    Attributes:
        flat: whether nothing precedes the loop over tiles: a program has one tile, or its registers
            hold no vectors beside the sums.
        invariant: the lines before all tiles.
        lines: the lines of a tile of rows.
        body: the lines of a tile of columns, in a loop over a row's tiles; None where one program
            has one tile.
        full: whether that tile has all its columns.
        leaves: values that are read, not computed: "intermediate", "stats 3" or "moments 0".
        moved: the dtypes of whole tensors that are read or written.
        stores_after: stores of numbers of rows, which follow the line that computes the number.
            Triton 3.6 to 3.9 cannot compile some kernels that compute more of a number before it is
            stored: the pass that removes layout conversions uses a value ahead of its definition.
    """

    def __init__(self, plan: Plan, acc: torch.dtype, *, grouped: bool) -> None:
        self.plan, self.structure, self.acc, self.grouped = plan, plan.structure, acc, grouped
        self.arguments: dict[tuple[str, int, str], Argument] = {}
        self.flat = False
        self.invariant: list[str] = []
        self.lines: list[str] = []
        self.body: list[str] | None = None
        self.full = False
        self.leaves: dict[Node, str] = {}
        self.intermediate_parts: dict[Node, Part] = {}
        self.moved: list[torch.dtype] = []
        self.named: dict[Node, str] = {}
        self.stores_after: dict[Node, list[Callable[[], None]]] = {}
        self._literals: set[str] = set()  # the texts of values that are written as numbers
        self._used_names = set(_RESERVED)
        self._by_row: dict[Node, bool] = {}
        self._known: dict[str, str] = {}  # from an expression to its name
        self._indexed_axes: set[int] = set()  # the row axes whose index is used

    # --- values -----------------------------------------------------------------------------------

    def value(self, root: Node) -> str:
        """Emit the lines that compute a value, and return its name."""
        todo = [root]
        while todo:
            node = todo[-1]
            if node in self.named:
                todo.pop()
                continue
            missing = [arg for arg in self._arguments(node) if arg not in self.named]
            if missing:
                # Vectors last: they are in cache, and take registers.
                missing.sort(key=self.has_rows, reverse=True)
                todo.extend(reversed(missing))
                continue
            self.named[node] = self._emit(node)
            for store in self.stores_after.pop(node, ()):
                store()
            todo.pop()
        return self.named[root]

    def _arguments(self, node: Node) -> Sequence[Node]:
        """Return the values that are computed before this one."""
        if node in self.leaves:
            return ()
        if self._is_loaded(node):
            return node.args[1:]
        return computed_of(node)

    def open_columns(self, *, full: bool) -> None:
        """Begin the body of a loop over tiles of columns."""
        self.body, self.full = [], full

    def close_columns(self, *header: str) -> None:
        """End the body of the loop that ``header`` begins."""
        assert self.body is not None
        self.lines.append(header[0])
        self.lines += [f"    {line}" for line in (*header[1:], *self.body)]
        # The next pass computes its columns again: names of this body are out of scope.
        ended = {name for node, name in self.named.items() if self.has_columns(node)}
        self.named = {node: name for node, name in self.named.items() if name not in ended}
        self._known = {text: name for text, name in self._known.items() if name not in ended}
        self.body, self.full = None, False

    def live(self) -> int:
        """Return how many values along columns are live at a time, in the order of the lines.

        Vectors before all tiles are always live.
        """
        wide = {name for node, name in self.named.items() if self.has_columns(node)}
        names_by_line = [_NAME.findall(line.partition("  # line ")[0]) for line in self.lines]
        last_use: dict[str, int] = {}
        for number, names in enumerate(names_by_line):
            last_use |= dict.fromkeys(names, number)
        most, live = 0, set[str]()
        for number, names in enumerate(names_by_line):
            live |= wide & set(names[:1])
            most = max(most, len(live))
            live = {name for name in live if last_use[name] > number}
        vectors = sum(line.partition(" = ")[0] in wide for line in self.invariant)
        return most + vectors

    def is_reduced(self, node: Node) -> bool:
        """Whether a reduction passes over the columns of rows."""
        if node in self.leaves or not self.has_columns(node.args[0]):
            return False
        return not self._is_loaded(node)

    def _is_loaded(self, node: Node) -> bool:
        """Whether this is one element of each row of an input, which is loaded by its address."""
        if node.op != "pick":
            return False
        source = node.args[0]
        if source.op != "input" or source in self.leaves:
            return False
        return bool(node.attrs[0] == self.structure.columns)

    def has_columns(self, node: Node) -> bool:
        """Whether a value varies along a row."""
        return bool(node.axes & set(self.structure.columns))

    def has_rows(self, node: Node) -> bool:
        """Whether a value differs between tiles of rows: it is computed of what is read by row."""
        result = self._by_row.get(node)
        if result is None:
            result = self._by_row[node] = self._varies_by_row(node)
        return result

    def _varies_by_row(self, node: Node) -> bool:
        if node in self.leaves or node.op in ("cotangent", "keep"):
            return True
        if node.op == "input":
            operand = self.structure.inputs[node.attrs[0]]
            return row_layout(self.structure, operand, self.grouped) in _BY_ROW
        if node.op == "iota":
            return node.attrs[0] in self.structure.rows
        return any(map(self.has_rows, node.args))

    def _emit(self, node: Node) -> str:
        """Emit the line that computes a value of named arguments, and return its name."""
        if node not in self.leaves:
            if node.op == "const":
                text = _literal(node, self.acc)
                self._literals.add(text)
                return text
            if node.op in ("constant_to_gradients", "detached", "instead", "narrowed"):
                return self.named[node.args[0]]
        text = self._expression(node)
        # Different nodes may have the same text, as where operators differ only in gradients.
        if text in self._known:
            return self._known[text]
        user_name = node.names[-1] if node.names else f"v{len(self._known)}"
        name = self._known[text] = self.free(user_name)
        line = self.structure.lines.get(node.number)
        comment = f"  # line {line}" if line else ""
        self._lines_for(node).append(f"{name} = {text}{comment}")
        return name

    def _lines_for(self, node: Node) -> list[str]:
        """Return the lines in which a value is computed least often."""
        if self.body is not None and self.has_columns(node):
            return self.body
        if self.flat or self.has_rows(node):
            return self.lines
        return self.invariant

    def _expression(self, node: Node) -> str:
        """Return the expression of a value."""
        if node in self.leaves:
            return self._leaf(node, self.leaves[node])
        args = self._named_arguments(node)
        method = _METHODS.get(node.op)
        if method is not None:
            return method(self, node, args)
        return _FORMATS[node.op].format(*args)

    def _named_arguments(self, node: Node) -> list[str]:
        """Return the names of a node's arguments; of numbers alone as tensors.

        Triton computes operators of numbers alone when it compiles, without a tensor's dtype.
        """
        arguments = self._arguments(node)
        names = [self.named[argument] for argument in arguments]
        if node.op == "where" or not self._literals.issuperset(names):
            return names
        return [
            _filled(name, argument.kind) for name, argument in zip(names, arguments, strict=True)
        ]

    def _cast(self, node: Node, args: Sequence[str]) -> str:
        if node.kind == "bool":
            return f"{args[0]} != 0"
        return f"{args[0]}.to({_KINDS[node.kind]})"

    def _round(self, node: Node, args: Sequence[str]) -> str:
        return self._rounded_to(node.attrs[0], args[0])

    def _rounded(self, node: Node, args: Sequence[str]) -> str:
        return self._rounded_to(getattr(torch, node.attrs[0]), args[0])

    def _rounded_to(self, dtype: torch.dtype, value: str) -> str:
        if dtype == self.acc:
            return value
        return f"{value}.to({_TYPES[dtype]}).to(ACC)"

    def _where(self, node: Node, args: Sequence[str]) -> str:
        text = f"tl.where({', '.join(args)})"
        # Of two numbers Triton makes fp32, whatever ACC is.
        if node.kind == "float" and self._literals.issuperset(args[1:]):
            text += ".to(ACC)"
        return text

    def _negative(self, node: Node, args: Sequence[str]) -> str:
        # Triton subtracts from zero, which has another zero.
        if node.kind == "float":
            return f"{args[0]} * -1.0"
        return f"-{args[0]}"

    def _device_call(self, node: Node, args: Sequence[str]) -> str:
        """Return a call of a function of two numbers, of which the second may be an attribute."""
        if node.kind != "float":
            return _FORMATS[node.op].format(*args)
        graph = self.structure.graph
        exponents = [_literal(graph.const(number), self.acc) for number in node.attrs]
        name = "power" if node.op == "pow" else node.op
        return f"{name}({', '.join(map(_as_tensor, (*args, *exponents)))})"

    def _reduction(self, node: Node, args: Sequence[str]) -> str:
        if self._is_loaded(node):
            return self._element(node)
        if not self.is_reduced(node):
            return self.named[node.args[0]]
        return self.reduced(node, self.reducible(node))

    def reducible(self, node: Node) -> str:
        """Return the argument of a reduction, with its neutral element in the padding."""
        value = self.value(node.args[0])
        if node.op == "pick":
            index = column_index(self.structure, node.attrs[0][0])
            return f"tl.where({index} == {self.value(node.args[1])}, {value}, 0)"
        if self.full or not self._is_padded():
            return value
        is_integer_maximum = node.op == "amax" and node.kind == "int"
        neutral = _LEAST if is_integer_maximum else _NEUTRAL[node.op]
        return f"tl.where(in_cols, {value}, {neutral})"

    def _is_padded(self) -> bool:
        """Whether a tile may have more columns than the row: blocks are powers of two, from 16."""
        cols = self.structure.cols
        is_power_of_two = cols & (cols - 1) == 0
        return self.body is not None or cols < 16 or not is_power_of_two

    def reduced(self, node: Node, value: str) -> str:
        """Return the reduction of a tile."""
        if node.op == "amax":
            return f"largest({value})"
        return f"tl.sum({value}, axis=1, keep_dims=True)"

    # --- leaves -----------------------------------------------------------------------------------

    def _leaf(self, node: Node, source: str) -> str:
        if source == "intermediate":
            operand = self.plan.intermediate_operand
            assert operand is not None
            return self._load("intermediate", 0, operand, self.intermediate_parts[node])
        kind, index = source.split()
        number = f"tl.load({self.number_of_rows(kind, int(index))}, mask=in_rows, other=0)"
        if node.kind == "int":
            return f"{number}.to(tl.int64)"
        return number

    def _input(self, node: Node, args: Sequence[str]) -> str:
        index, part = node.attrs
        return self._load("input", index, self.structure.inputs[index], part)

    def _cotangent(self, node: Node, args: Sequence[str]) -> str:
        index, part = node.attrs
        # The intermediate counts as an output after the others.
        is_output = index < len(self.structure.outputs)
        operand = self.structure.outputs[index] if is_output else self.plan.intermediate_operand
        assert operand is not None
        return self._load("cotangent", index, operand, part)

    def _iota(self, node: Node, args: Sequence[str]) -> str:
        """Return the index along an axis."""
        (axis,) = node.attrs
        if axis in self.structure.columns:
            return f"{column_index(self.structure, axis)}.to(tl.int64)"
        self._indexed_axes.add(axis)
        # The line itself comes from `indices`, when the list of arguments is complete: this call
        # registers the sizes that it uses.
        self._row_index(axis)
        return f"row{axis}"

    def _keep(self, node: Node, args: Sequence[str]) -> str:
        """Return dropout's factors: random numbers count each part of a row as a row."""
        structure, (number, part) = self.structure, node.attrs
        threshold = self.argument("threshold", number, f"threshold{number}")
        parts = math.prod([structure.sizes[axis] for axis in structure.unrolled])
        part_index = 0
        for axis in structure.unrolled:
            part_index = part_index * structure.sizes[axis] + dict(part).get(axis, 0)
        rows = "(group * M + places)" if self.grouped else "places"
        if parts > 1:
            rows = f"{rows} * {parts} + {part_index}"
        offset = f"offset + {number << 48}" if number else "offset"
        factors = (
            f"keep_scale(seed, {offset}, {threshold}, {rows}, start, N, ROWS, BLOCK_N, VECTOR, ACC)"
        )
        # A row of one element has no column axis, but the factors are a block: all but the first
        # are zeroed.
        if not structure.columns:
            return f"tl.sum(tl.where(in_cols, {factors}, 0), axis=1, keep_dims=True)"
        return factors

    # --- memory -----------------------------------------------------------------------------------

    def argument(self, kind: str, index: int, name: str, of: str = "") -> str:
        """Return the name of an argument, which is added if it is new."""
        key = (kind, index, of)
        argument = self.arguments.get(key)
        if argument is None:
            argument = self.arguments[key] = Argument(self.free(name), kind, index, of)
        return argument.name

    def number_of_rows(self, kind: str, index: int) -> str:
        """Return the address of a number of each row.

        It is one of ``stats``, which a backward reads, or of ``moments``, which the next kernel
        reads::

            stats = [number 0 of all rows | number 1 of all rows | ...]
        """
        pointer = self.argument(kind, 0, kind)
        total = "M * groups" if self.grouped else "M"
        if index:
            return f"{pointer} + {index} * {total} + rows"
        return f"{pointer} + rows"

    def store(self, kind: str, index: int, operand: Operand, part: Part, node: Node) -> None:
        """Write a part of a tensor."""
        value = self.value(node)
        address, mask = self._address(kind, index, operand, part)
        self._count(operand)
        pointer = self.arguments[kind, index, ""].name
        if value in self._literals:
            value = _filled(value, node.kind)
        stored = f"tl.store({address}, {value}.to({pointer}.dtype.element_ty), mask={mask})"
        # A number of a row is stored once, not for each tile of columns.
        if self.body is None or mask == "in_rows":
            self.lines.append(stored)
        else:
            self.body.append(stored)

    def store_number(self, kind: str, index: int, node: Node) -> None:
        """Write a number of each row."""
        value = self.value(node)
        self.lines.append(f"tl.store({self.number_of_rows(kind, index)}, {value}, mask=in_rows)")

    def _load(self, kind: str, index: int, operand: Operand, part: Part) -> str:
        address, mask = self._address(kind, index, operand, part)
        self._count(operand)
        loaded = f"tl.load({address}, mask={mask}, other=0)" if mask else f"tl.load({address})"
        by_row = row_layout(self.structure, operand, self.grouped) in _BY_ROW
        if by_row or set(operand.axes) & set(self.structure.columns):
            return loaded + _READ_AS[operand.kind]
        # Of a scalar, which Triton's interpreter cannot compare, a tensor of one element.
        dtype = _SCALARS[operand.kind]
        block = f"tl.full((1, 1), {loaded}.to({dtype}), {dtype})"
        if operand.kind == "bool":
            return f"{block} != 0"
        return block

    def _element(self, node: Node) -> str:
        """Return an element of each row; zero where its index is out of range."""
        source, index_node = node.args
        (number, part), index = source.attrs, self.named[index_node]
        operand = self.structure.inputs[number]
        by_row = row_layout(self.structure, operand, self.grouped) in _BY_ROW
        if index_node.op == "const" and not by_row:
            # The address depends on the index alone: it has to be a block, as the mask is one.
            index = f"tl.full((1, 1), {index}, tl.int64)"
        address, mask = self._address("input", number, operand, part, index)
        conditions = [f"({index} >= 0)", f"({index} < N)"]
        if mask:
            conditions.append(mask)
        return f"tl.load({address}, mask={' & '.join(conditions)}, other=0){_READ_AS[operand.kind]}"

    def _count(self, operand: Operand) -> None:
        """Count the bytes of a whole tensor, in a loop over tiles of columns only once."""
        is_whole = {*self.structure.rows, *self.structure.columns} <= set(operand.axes)
        if is_whole and not self.full:
            self.moved.append(operand.dtype)

    def _address(
        self, kind: str, index: int, operand: Operand, part: Part, element: str = ""
    ) -> tuple[str, str]:
        """Return the address of a tile of an operand, or of an element of each row; and its mask.

        The address is a sum of terms, each of which may be absent::

            pointer + row * stride of rows + column * stride of columns + offset of the part
        """
        structure = self.structure
        # Arguments are named in the order of these calls.
        pointer = self.argument(kind, index, _PREFIXES.get(kind, "") + operand.name)
        layout = row_layout(structure, operand, self.grouped)
        strides, _ = strides_of(structure, operand)
        columns = within(structure.columns, strides)
        terms = [pointer]
        if layout == "indexed":
            terms.append(self._row_offset(operand))
        elif layout != "vector":
            row = "group" if layout == "group" else "rows"
            terms.append(_times(row, self._row_stride(kind, index, operand, layout)))
        if columns and element:
            terms.append(_times(element, strides[columns[0]]))
        elif columns:
            terms.append(offsets_along(structure, strides))
        terms += self._part_offsets(operand, part)
        by_column = bool(columns) and not (element or self.full)
        mask = _MASKS[layout in _BY_ROW, by_column]
        if layout == "group" and not mask:
            # An element's address is a block, that of a group's number is a scalar.
            mask = "in_groups" if element else "(group < groups)"
        return " + ".join(terms), mask

    def _row_stride(self, kind: str, index: int, operand: Operand, layout: RowLayout) -> int | str:
        """Return the distance of rows, or of groups: a constant where the tensor is contiguous."""
        strides, size = strides_of(self.structure, operand)
        is_vector = bool(set(self.structure.columns) & set(strides))
        is_number_of_group = layout == "group" and not is_vector
        # What this package allocates for the call is contiguous.
        is_allocated = kind in ("output", "intermediate", "gradient")
        if is_allocated or size == 1 or is_number_of_group:
            return size
        return self.argument("stride", index, f"{operand.name}_stride", kind)

    def _part_offsets(self, operand: Operand, part: Part) -> list[str]:
        """Return the terms of an address that lead to a part of a row."""
        strides, _ = strides_of(self.structure, operand)
        terms: list[str] = []
        offset = 0
        for axis, position in part:
            inner = operand.axes[operand.axes.index(axis) + 1 :]
            inner_rows = within(inner, self.structure.rows)
            distance = strides[axis] * position
            if position and inner_rows:
                # Each part has rows of its own: their number is not a constant.
                terms.append(" * ".join([str(distance), *map(self._size, inner_rows)]))
            else:
                offset += distance
        if offset:
            terms.append(str(offset))
        return terms

    def _row_offset(self, operand: Operand) -> str:
        """Return the offset of a row of a contiguous operand that has other rows than the call."""
        structure, terms = self.structure, []
        for dim, axis in enumerate(operand.axes):
            if axis not in structure.rows:
                continue
            self._indexed_axes.add(axis)
            factors = [f"row{axis}"]
            for inner in operand.axes[dim + 1 :]:
                is_dynamic = inner in structure.rows
                factors.append(self._size(inner) if is_dynamic else str(structure.sizes[inner]))
            terms.append(" * ".join(factors))
        for axis in self._indexed_axes:  # registers the sizes, as in `_iota`
            self._row_index(axis)
        return " + ".join(terms)

    def _size(self, axis: int) -> str:
        return self.argument("size", axis, f"size{axis}")

    def _row_index(self, axis: int) -> str:
        rows = self.structure.rows
        inner = " * ".join([self._size(a) for a in rows[rows.index(axis) + 1 :]])
        text = f"(rows // ({inner}))" if inner else "rows"
        if axis == rows[0]:
            return text
        return f"{text} % {self._size(axis)}"

    def indices(self) -> list[str]:
        """Return the lines that compute the index along each row axis whose index is used."""
        return [f"row{axis} = {self._row_index(axis)}" for axis in sorted(self._indexed_axes)]

    def free(self, name: str) -> str:
        """Return a name that is not in use, as similar as possible."""
        name = re.sub(r"\W", "_", name)
        if not name.isascii():
            name = "v"
        if not (name[:1].isalpha() or name[:1] == "_"):
            name = f"v{name}"  # no suffix makes 0_weight an identifier
        if re.fullmatch(r"(sum|row)\d+|.*_base", name):  # the package's own
            name = f"v_{name}_"
        while name in self._used_names or not name.isidentifier():
            match = re.fullmatch(r"(.*?)(\d*)", name)
            assert match is not None
            name = f"{match[1] or 'v'}{int(match[2] or 1) + 1}"
        self._used_names.add(name)
        return name


_NAME = re.compile(r"[^\W\d]\w*")
_METHODS: dict[str, Callable[[Emitter, Node, Sequence[str]], str]] = {
    "input": Emitter._input,
    "cotangent": Emitter._cotangent,
    "iota": Emitter._iota,
    "keep": Emitter._keep,
    "cast": Emitter._cast,
    "round": Emitter._round,
    "rounded": Emitter._rounded,
    "where": Emitter._where,
    "neg": Emitter._negative,
    "fmod": Emitter._device_call,
    "pow": Emitter._device_call,
    "power": Emitter._device_call,
    "xlogy": Emitter._device_call,
    **dict.fromkeys(REDUCTIONS, Emitter._reduction),
}
assert set(BINARY | COMPARISONS) <= set(_FORMATS) | set(_METHODS)
_BY_ROW = ("rows", "indexed")
_PREFIXES = {"cotangent": "d_", "gradient": "grad_"}
_READ_AS = {"float": ".to(ACC)", "int": ".to(tl.int64)", "bool": " != 0"}
_SCALARS = {"float": "ACC", "int": "tl.int64", "bool": "tl.int8"}
_KINDS = {"float": "ACC", "int": "tl.int64", "bool": "tl.int1"}
_LEAST = str(-(2**63))
_NEUTRAL = {"sum": "0", "amax": 'float("-inf")'}


def _row_axes(structure: Structure, operand: Operand) -> tuple[int, ...]:
    return tuple(within(operand.axes, structure.rows))


def _times(index: str, stride: int | str) -> str:
    return index if stride == 1 else f"{index} * {stride}"


def _filled(literal: str, kind: str) -> str:
    """Return a number as a tensor of one element.

    Numbers in parentheses are sums of such tensors already: see `_exact_fp64`.
    """
    is_tensor = literal.startswith(("(", "negative_zero"))
    if is_tensor:
        return literal
    return f"tl.full((1, 1), {literal}, {_KINDS[kind]})"


def _literal(node: Node, acc: torch.dtype) -> str:
    """Return a number as Triton code that keeps its value in ``acc``."""
    value = value_of(node)
    if not isinstance(value, float):
        return repr(value)
    if not math.isfinite(value):
        return f'float("{value}")'
    if value == 0.0 and math.copysign(1.0, value) < 0.0:
        return "negative_zero(ACC)"
    if acc != torch.float64 or _in_fp32(value) == value:
        return repr(value)
    return _exact_fp64(value)


def _exact_fp64(value: float) -> str:
    """Return a number that is not one of fp32 as a sum of numbers that are.

    Triton takes a number for fp32. The sum is computed in fp64, where it is exact, and so is a
    product with powers of two.
    """
    # The mantissa of a number beyond fp32's range is scaled afterwards.
    mantissa, exponent = math.frexp(value)
    if -100 <= exponent <= 127:
        mantissa, exponent = value, 0
    # fp64 has 53 bits, fp32 24: three terms hold them all.
    terms: list[float] = []
    while mantissa and len(terms) < 3:
        terms.append(_in_fp32(mantissa))
        mantissa -= terms[-1]
    total = f"({' + '.join(map(_fp64_block, terms))})"
    powers = [100] * (abs(exponent) // 100) + [abs(exponent) % 100]
    sign = 1 if exponent > 0 else -1
    factors = [_fp64_block(math.ldexp(1.0, sign * power)) for power in powers if power]
    if factors:
        return f"({' * '.join([total, *factors])})"
    return total


def _in_fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32, device="cpu"))


def _as_tensor(value: str) -> str:
    """Return a value, which may be a number, for a device function that reads its dtype."""
    if _NAME.fullmatch(value):
        return value
    return f"tl.zeros((1, 1), ACC) + {value}"


def _fp64_block(value: float) -> str:
    return f"tl.full((1, 1), {value!r}, ACC)"
