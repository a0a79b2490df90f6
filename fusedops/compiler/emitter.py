"""Triton code of values: one line each, with the user's names.

A program has a tile of ROWS rows and BLOCK_N columns. A value's shape follows from the axes along
which it varies::

                    along columns      along blocks                not along columns
    along rows      (ROWS, BLOCK_N)    (ROWS, BLOCK_N // block)    (ROWS, 1)
    not along rows  (1, BLOCK_N)       (1, BLOCK_N // block)       (1, 1)

Blocks are neighbouring columns of a row that something reduces over: see `Structure.inner`. A
number of each block is spread over its columns where it meets a value along columns.

A line is placed where it runs least often: before all tiles, once for a tile of rows, or once for a
tile of columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import torch

from ..core.activations import ACTIVATIONS
from ..core.compat.casts import saturates_float8
from .addresses import Addresses, Sliced, Spacings
from .axes import Label
from .costs import instructions
from .identifiers import Identifiers
from .integers import Ranges
from .ir import (
    BINARY,
    COMPARISONS,
    REDUCTIONS,
    SAME_VALUE,
    Node,
    computed_of,
    has_reciprocal,
    is_below_largest,
    reachable,
)
from .layouts import column_index, pair_axis, paired
from .literals import KINDS, as_tensor, filled, literal, neutral
from .planning import Plan
from .rows_of_programs import column_lines
from .structure import Operand, Part
from .text import indented

__all__ = ["Emitter"]

# Operators as formats of their arguments. Those that depend on more are methods of `Emitter`.
_FORMATS = {
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
    "rint": "rint({})",
    "not": "{} == 0",
    "isnan": "{0} != {0}",
    "fmod": "{} % {}",
    "quotient": "{} // {}",
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
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
# The functions with a shorter one for results in 16 bits.
_NARROW = {name for name, activation in ACTIVATIONS.items() if activation.has_narrow}
_TYPES = {
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}
# Functions that round to floats of 8 bits.
_TO_FLOAT8 = {
    torch.float8_e4m3fn: "to_e4m3({}, {saturates}, {signed})",
    torch.float8_e5m2: "to_e5m2({})",
}
# Operators whose result may be one of their arguments, with all its bits.
_MOVING = frozenset(
    {"abs", "amax", "cast", "maximum", "minimum", "pick", "round", "rounded", "where", *SAME_VALUE}
)
_READ_AS = {"float": ".to(ACC)", "int": ".to(tl.int64)", "bool": " != 0"}
_SCALARS = {"float": "ACC", "int": "tl.int64", "bool": "tl.int8"}
_Key = TypeVar("_Key")
_NAME = re.compile(r"[^\W\d]\w*")


class Emitter:
    """Writes values of a function, and the arguments that they are read from.

    A kernel's lines are in three lists, one for each level of its loops::

        invariant                    # vectors: once in a program
        for tile in tiles of rows:
            lines                    # numbers of rows, and whole rows
            for start in tiles of columns:
                body                 # only between open_columns() and close_columns()

    Attributes:
        names: the names in use.
        addresses: writes addresses, and has the kernel's arguments.
        flat: whether `invariant` stays empty, and vectors are computed in each tile of rows. This
            is the case if a program has one tile, or if the sums leave no registers that could hold
            vectors from tile to tile.
        invariant: the lines before all tiles.
        lines: the lines of a tile of rows.
        body: the lines of a tile of columns, in a loop over a row's tiles; None outside such a
            loop.
        full: whether that tile has all its columns.
        holds_vectors: whether vectors are computed before the loop over the tiles of a row that
            are side by side, for all of them.
        carried: the values whose tiles a phase keeps for a later one.
        tiles: the names of tuples of tiles: of carried values, and of vectors that are held for all
            tiles of rows.
        tuples: the names of the tuples that the body adds tiles to.
        vectors: the lines of a loop over the parts of vectors, before all tiles of rows.
        vector_tuples: the names of the tuples that this loop adds tiles to.
        leaves: values that are read, not computed: "intermediate", "stats 3" or "moments 0".
        moved: the dtypes of whole tensors that are read or written.
        read: the dtypes of those of them that are read.
        computed: the values that have lines.
        inexact: the values that another kernel may have rounded otherwise.
        narrow: the values that are rounded to 16 bits, and not read otherwise.
        stores_after: stores of numbers of rows, which follow the line that computes the number.
            Triton 3.6 to 3.9 cannot compile some kernels that compute more of a number before it is
            stored: the pass that removes layout conversions uses a value ahead of its definition.
    """

    def __init__(
        self,
        plan: Plan,
        acc: torch.dtype,
        *,
        group: Label,
        spacings: Spacings,
        sliced: Sliced,
    ) -> None:
        self.plan = plan
        self.structure = plan.structure
        self.acc = acc
        self.grouped = bool(group)
        self.names = Identifiers()
        self.addresses = Addresses(
            plan.structure, self.names, group=group, spacings=spacings, sliced=sliced
        )
        self.flat = False
        self.invariant: list[str] = []
        self.lines: list[str] = []
        self.body: list[str] | None = None
        self.full = False
        self.holds_vectors = False
        self.carried: Collection[Node] = ()
        self.tiles: dict[Node, str] = {}
        self.vectors: list[str] = []
        self.tuples: list[str] = []
        self.vector_tuples: list[str] = []
        self._early_names: dict[Node, str] = {}
        self._vector_names: tuple[dict[Node, str], dict[str, str]] = {}, {}
        self.leaves: dict[Node, str] = {}
        self.intermediate_parts: dict[Node, Part] = {}
        self.moved: list[torch.dtype] = []
        self.read: list[torch.dtype] = []
        self.named: dict[Node, str] = {}
        self.stores_after: dict[Node, list[Callable[[], None]]] = {}
        self.computed: set[Node] = set()
        self.ranges = Ranges(plan.structure.sizes, plan.structure.columns)
        self.inexact: Collection[Node] = ()
        self.narrow: Collection[Node] = ()
        self._literals: set[str] = set()  # the texts of values that are written as numbers
        self._by_row: dict[Node, bool] = {}
        self._names_by_text: dict[str, str] = {}  # the variables, by the expressions that they have
        self._pairs: dict[str, str] = {}  # from a load of two parts to its name
        self._narrow: dict[str, str] = {}  # from a value in 8 bits to its name
        self._spread: dict[str, str] = {}  # from numbers of blocks to the tile that repeats them

    # --- values -----------------------------------------------------------------------------------

    def value(self, root: Node) -> str:
        """Emit the lines that compute a value, and return its name."""
        # Depth first, without recursion: a node is popped once all its arguments have names.
        pending = [root]
        while pending:
            node = pending[-1]
            missing = self._missing(node)
            if missing:
                pending += missing
                continue
            pending.pop()
            if node not in self.named:
                self._emit_and_define(node)
        return self.named[root]

    def block(self, node: Node) -> str:
        """Emit the lines that compute a value, and return its name; for a number, a block."""
        value = self.value(node)
        return filled(value, node.kind) if value in self._literals else value

    def wide(self, node: Node) -> str:
        """Emit the lines that compute a value, and return the name of a tile along columns."""
        name = self.block(node)
        return self._spread_name(node, name) if self.has_blocks(node) else name

    def has_blocks(self, node: Node) -> bool:
        """Whether a value has one number for each block of a row."""
        return self.structure.has_blocks(node.axes)

    def _spread_name(self, node: Node, name: str) -> str:
        """Return the variable of a tile with the number of its block in each column."""
        if name not in self._spread:
            self._spread[name] = self.names.free(f"{name}_spread")
            text = f"block_spread({name}, {self.structure.block})"
            self._lines_for(node).append(f"{self._spread[name]} = {text}")
        return self._spread[name]

    def _missing(self, node: Node) -> list[Node]:
        """Return the arguments that have no name yet, for the stack of `value`: last in, first out.

        They are in reverse order of emission: for ``x * weight`` the result is ``[weight, x]``, and
        the line of ``x`` comes first.
        """
        if node in self.named:
            return []
        missing = [arg for arg in self._arguments(node) if arg not in self.named]
        # Vectors are emitted last: they are in cache, and take registers.
        missing.sort(key=self.has_rows, reverse=True)
        missing.reverse()
        return missing

    def _emit_and_define(self, node: Node) -> None:
        """Emit a value whose arguments have names, and the stores that follow its line."""
        self.define(node, self._emit(node))

    def define(self, node: Node, name: str) -> None:
        """Name a value that is emitted, and emit the stores that follow its line."""
        self.named[node] = name
        self.computed.update({node}.difference(self.leaves))
        is_carried_first = node in self.carried and node not in self.tiles
        if self.body is not None and is_carried_first:
            self._hold(node, name)
        for store in self.stores_after.pop(node, ()):
            store()

    def _arguments(self, node: Node) -> Sequence[Node]:
        """Return the values that are computed before this one."""
        if node in self.leaves:
            return ()
        if self._is_loaded(node):
            return node.args[1:]
        if self._is_carried(node) or self._is_held_vector(node):
            return ()
        return computed_of(node)

    # --- tiles side by side -----------------------------------------------------------------------

    def is_tile(self, node: Node) -> bool:
        """Whether this is a tile in memory, of rows and of columns."""
        is_read = node in self.leaves or node.op in ("input", "cotangent")
        return is_read and self.has_columns(node) and self.has_rows(node)

    def _is_carried(self, node: Node) -> bool:
        """Whether an earlier phase has carried a value."""
        return self.body is not None and node in self.carried and node in self.tiles

    def is_number(self, node: Node) -> bool:
        """Whether this is a floating-point number of each row, in memory."""
        is_read = node in self.leaves or node.op in ("input", "cotangent")
        if not is_read or node.kind != "float":
            return False
        return self.has_rows(node) and not self.has_columns(node)

    def early_mask(self, node: Node) -> str:
        """Return the line that draws a dropout mask ahead, in a kernel with EARLY."""
        self._early_names[node] = self.names.free("factors")
        return f"{self._early_names[node]} = {self._keep(node, ())}"

    def _is_held_vector(self, node: Node) -> bool:
        """Whether this is a vector for a phase, which all tiles of rows share."""
        if not self.holds_vectors or self.body is None or self.body is self.vectors:
            return False
        # Such an operator has its argument's name, and the argument is held.
        if node.op in SAME_VALUE:
            return False
        if self.has_rows(node) or not self.has_columns(node):
            return False
        return any(inner.op == "input" for inner in reachable([node]))

    def _held_vector(self, node: Node) -> str:
        """Return a vector's tile, whose tiles are computed before all rows.

        A wide program loads a parameter again for each row: see `phases._HOLDS`.
        """
        if node not in self.tiles:
            outer = self.body, self.tuples, self._take_wide()
            self.body, self.tuples = self.vectors, self.vector_tuples
            self._put(self._vector_names)
            self._hold(node, self.value(node))
            self._vector_names = self._take_wide()
            self.body, self.tuples, names = outer
            self._put(names)
        held = f"{self.tiles[node]}[part]"
        if self.flat or node.op != "input":
            return held
        return f"{held} if HOLDS else {self._computed(node)}"

    def _carried_tile(self, node: Node, text: str) -> str:
        """Return a tile that a phase loads and a later one reads, in its dtype in memory.

        Args:
            node: the tile.
            text: the expression that loads it.
        """
        cast = _READ_AS[node.kind]
        assert self.body is not None
        name = self.names.free(f"{node.names[-1] if node.names else self.pointer_of(node)}_tile")
        self.body.append(f"{name} = {text.removesuffix(cast)}")
        self._hold(node, name)
        return f"{name}{cast}"

    def begin_vectors(self) -> None:
        """Begin the lines of other vectors."""
        self.vectors, self.vector_tuples = [], []
        self._vector_names = {}, {}

    def itemsize_of(self, node: Node) -> int:
        """Return the bytes of an element of the widest input that a vector is computed from."""
        inputs = [inner.attrs[0] for inner in reachable([node]) if inner.op == "input"]
        itemsizes: list[int] = [self.structure.inputs[index].dtype.itemsize for index in inputs]
        return max(itemsizes)

    def _hold(self, node: Node, name: str) -> None:
        """Emit the line that adds a tile to the tuple of a value's tiles, one for each part."""
        tiles = self.tiles[node] = self.names.free(f"{name}_parts")
        self.extend(tiles, name)

    def extend(self, tiles: str, tile: str) -> None:
        """Emit the line that adds a tile to a tuple, which is empty before the loop."""
        assert self.body is not None
        self.body.append(f"{tiles} = {tiles} + ({tile},)")
        self.tuples.append(tiles)

    def pointer_of(self, node: Node) -> str:
        """Return the argument that a tile is read from."""
        if node in self.leaves:
            return self.addresses.arguments["intermediate", 0, "", -1].name
        return self.addresses.arguments[node.op, node.attrs[0], "", -1].name

    def _take_wide(self) -> tuple[dict[Node, str], dict[str, str]]:
        """Take names along columns out of scope, and return them."""
        wide = self._wide_names()
        named = {node: name for node, name in self.named.items() if name in wide}
        names_by_text = {text: name for text, name in self._names_by_text.items() if name in wide}
        self._forget(wide)
        return named, names_by_text

    def _put(self, names: tuple[dict[Node, str], dict[str, str]]) -> None:
        """Take names into scope again."""
        named, names_by_text = names
        self.named |= named
        self._names_by_text |= names_by_text

    def forget_rows(self) -> None:
        """Take the names of values that vary by row out of scope: later lines have other rows."""
        self._forget({name for node, name in self.named.items() if self.has_rows(node)})

    # --- the loop over tiles of columns -----------------------------------------------------------

    def open_columns(self, *, full: bool) -> None:
        """Begin the body of a loop over tiles of columns."""
        self.body = []
        self.tuples = []
        self.full = full

    def column_lines(self, inside: str = "{} < {}", *, masked: bool = True) -> list[str]:
        """Return the lines that compute the columns of a tile: see `rows_of_programs`."""
        return column_lines(
            inside,
            masked=masked,
            grouped=self.grouped,
            pairs=self.addresses.pairs,
            block=self.structure.block if self.addresses.blocks else 0,
        )

    def close_columns(self, *header: str) -> None:
        """End the body of the loop that ``header`` begins."""
        assert self.body is not None
        self.lines += [f"{tiles} = ()" for tiles in self.tuples]
        self.lines.append(header[0])
        self.lines += indented([*header[1:], *self.body])
        self._forget(self._wide_names())
        self.body = None
        self.full = False

    def _forget(self, ended: set[str]) -> None:
        """Take names out of scope: the next pass over the columns computes them again."""
        self._pairs = {}
        self._narrow = {}
        self._spread = {}
        self.named = _without_names(self.named, ended)
        self._names_by_text = _without_names(self._names_by_text, ended)

    def _wide_names(self) -> set[str]:
        """Return the names of values along columns."""
        return {name for node, name in self.named.items() if self.has_columns(node)}

    def live(self) -> int:
        """Return how many values along columns are live at a time, in the order of the lines.

        Vectors before all tiles are always live, and so is what phases carry.
        """
        wide = self._wide_names()
        vectors = [line for line in self.invariant if line.partition(" = ")[0] in wide]
        return _most_live(self.lines, wide) + len(vectors) + len(self.tiles)

    def instructions(self) -> int:
        """Return the instructions of the kernel for an element: see `costs`."""
        wide = [node for node in self.computed if self.has_columns(node) and self.has_rows(node)]
        return instructions(wide, self.moved)

    def is_reduced(self, node: Node) -> bool:
        """Whether a reduction passes over the columns of rows."""
        if node in self.leaves or not self.has_columns(node.args[0]):
            return False
        return not (self._is_loaded(node) or self._is_over_blocks(node))

    def _is_over_blocks(self, reduction: Node) -> bool:
        """Whether a reduction has a result for each block of a row, in a tile of columns."""
        inner = self.structure.inner
        return bool(inner) and set(reduction.attrs[0]) == set(inner)

    def _is_loaded(self, node: Node) -> bool:
        """Whether this is one element of each row of an input, which is loaded by its address."""
        if node.op != "pick" or node.attrs[0] != self.structure.columns:
            return False
        source = node.args[0]
        return source.op == "input" and source not in self.leaves

    def has_columns(self, node: Node) -> bool:
        """Whether a value varies along a row."""
        return bool(node.axes & set(self.structure.columns))

    def has_rows(self, node: Node) -> bool:
        """Whether a value differs between tiles of rows: it depends on what is read by row."""
        if node not in self._by_row:
            self._by_row[node] = self._varies_by_row(node)
        return self._by_row[node]

    def _varies_by_row(self, node: Node) -> bool:
        if node in self.leaves or node.op in ("cotangent", "keep"):
            return True
        if node.op == "input":
            operand = self.structure.inputs[node.attrs[0]]
            return self.addresses.varies_by_row(operand)
        if node.op == "iota":
            return node.attrs[0] in self.structure.rows
        return any(map(self.has_rows, node.args))

    def _emit(self, node: Node) -> str:
        """Emit the line that computes a value of named arguments, and return its name."""
        is_read = node in self.leaves
        if self._is_carried(node):
            cast = _READ_AS[node.kind] if self.is_tile(node) else ""
            return self._assign(node, f"{self.tiles[node]}[part]{cast}")
        if node.op == "const" and not is_read:
            text = literal(node, self.acc)
            self._literals.add(text)
            return text
        if node.op in SAME_VALUE and not is_read:
            return self._argument(node, node.args[0])
        text = self._expression(node)
        # Different nodes may have the same text, for example if they differ only in gradients.
        if text not in self._names_by_text:
            self._names_by_text[text] = self._assign(node, text)
        return self._names_by_text[text]

    def _assign(self, node: Node, text: str) -> str:
        """Emit a line that assigns an expression, and return the variable."""
        user_name = node.names[-1] if node.names else f"v{len(self._names_by_text)}"
        early = self._early_names.get(node)
        if early is not None:
            self._lines_for(node).extend(["if not EARLY:", f"    {early} = {text}"])
            return early
        name = self.names.free(user_name)
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
        if self._is_held_vector(node):
            return self._held_vector(node)
        text = self._computed(node)
        if self.body is not None and node in self.carried and self.is_tile(node):
            return self._carried_tile(node, text)
        return text

    def _computed(self, node: Node) -> str:
        """Return the expression that loads or computes a value."""
        if node in self.leaves:
            return self._leaf(node, self.leaves[node])
        args = self._named_arguments(node)
        method = _METHODS.get(node.op)
        if method is not None:
            return method(self, node, args)
        if node in self.narrow and node.op in _NARROW:
            return f"{node.op}_in_16_bits({args[0]})"
        return _FORMATS[node.op].format(*args)

    def _named_arguments(self, node: Node) -> list[str]:
        """Return the names of a node's arguments; if all are numbers, tensors of these numbers.

        Otherwise Triton would compute the operator when it compiles, without a tensor's dtype.
        """
        arguments = self._arguments(node)
        names = [self._argument(node, argument) for argument in arguments]
        if node.kind == "int" and not self.ranges.are_narrow(node):
            names = list(map(self._in_64_bits, arguments, names))
        if node.op == "where" or not self._literals.issuperset(names):
            return names
        kinds = [argument.kind for argument in arguments]
        return list(map(filled, names, kinds))

    def _in_64_bits(self, argument: Node, name: str) -> str:
        """Return an argument of an integer of 64 bits."""
        is_short = name not in self._literals and self.ranges.are_narrow(argument)
        return f"{name}.to(tl.int64)" if is_short else name

    def _type_of(self, node: Node) -> str:
        return "tl.int32" if self.ranges.are_narrow(node) else KINDS[node.kind]

    def _argument(self, node: Node, argument: Node) -> str:
        """Return the name of an argument, as a tile of the columns that the value has."""
        name = self.named[argument]
        if not self.has_blocks(argument) or self.has_blocks(node) or not self.has_columns(node):
            return name
        return self._spread_name(argument, name)

    def _cast(self, node: Node, args: Sequence[str]) -> str:
        value, dtype = args[0], self._type_of(node)
        if node.kind == "bool":
            return f"{value} != 0"
        if node.attrs and f"tl.{node.attrs[0]}" != dtype:
            (name,) = node.attrs
            # PyTorch casts floats to unsigned integers in two steps: a negative number wraps.
            if node.args[0].kind == "float" and name == "uint8":
                value = f"{value}.to(tl.int64)"
            value = f"{value}.to(tl.{name})"
        return f"{value}.to({dtype})"

    def _round(self, node: Node, args: Sequence[str]) -> str:
        return self._rounded_to(node, node.attrs[0], args[0])

    def _rounded(self, node: Node, args: Sequence[str]) -> str:
        return self._rounded_to(node, getattr(torch, node.attrs[0]), args[0])

    def _rounded_to(self, node: Node, dtype: torch.dtype, value: str) -> str:
        if dtype == self.acc:
            return value
        if dtype in _TO_FLOAT8:
            return self._in_8_bits(node, dtype, value) + self._widened(dtype)
        return f"{value}.to({_TYPES[dtype]}).to(ACC)"

    def _in_8_bits(self, node: Node, dtype: torch.dtype, value: str) -> str:
        """Return the variable of a value as a float of 8 bits, which a store reads, too."""
        signed = any(map(_is_moved, node.args or (node,)))
        text = _TO_FLOAT8[dtype].format(value, saturates=saturates_float8(), signed=signed)
        if text not in self._narrow:
            self._narrow[text] = self.names.free("narrow")
            self._lines_for(node).append(f"{self._narrow[text]} = {text}")
        return self._narrow[text]

    def _where(self, node: Node, args: Sequence[str]) -> str:
        text = f"tl.where({', '.join(args)})"
        # For two numbers Triton's result is in fp32, whatever ACC is, or in int32, in which later
        # products could overflow.
        if node.kind != "bool" and self._literals.issuperset(args[1:]):
            text += f".to({self._type_of(node)})"
        return text

    def _quotient(self, node: Node, args: Sequence[str]) -> str:
        """Return a quotient: by a number of each row, it may be a product with the reciprocal."""
        if node in self.inexact and self._is_by_number(node):
            return f"{args[0]} * (1.0 / {args[1]})"
        return f"{args[0]} / {args[1]}"

    def _is_by_number(self, quotient: Node) -> bool:
        divisor = quotient.args[1]
        return not self.has_columns(divisor) and has_reciprocal(divisor)

    def _exponential(self, node: Node, args: Sequence[str]) -> str:
        """Return an exponential.

        If the argument is a difference from the row's largest element, results that would be
        subnormal do not matter beside the largest one, 1: see `exponential`.
        """
        if is_below_largest(node.args[0]):
            return f"exponential({args[0]}, 1.0)"
        return f"tl.exp({args[0]})"

    def _difference(self, node: Node, args: Sequence[str]) -> str:
        """Return a difference, which is zero for equal arguments unless they are not finite.

        Contracted with a product, it would be the product's rounding error.
        """
        if node.kind == "float" and args[0] == args[1] and not self._literals.issuperset(args):
            return f"tl.abs({args[0]}) * 0.0"
        return _FORMATS["sub"].format(*args)

    def _negative(self, node: Node, args: Sequence[str]) -> str:
        # Triton would compute 0 - x, which has the wrong sign for a zero.
        if node.kind == "float":
            return f"{args[0]} * -1.0"
        return f"-{args[0]}"

    def _ordinal(self, node: Node, args: Sequence[str]) -> str:
        value = f"{as_tensor(args[0])}.to(tl.{node.attrs[0]})"
        return f"ordinal({value})"

    def _of_ordinal(self, node: Node, args: Sequence[str]) -> str:
        is_wide = node.attrs == ("float64",)
        return f"of_ordinal({args[0]}, {is_wide}).to(ACC)"

    def _device_call(self, node: Node, args: Sequence[str]) -> str:
        """Return a call of a function of two numbers; the second may be an attribute."""
        if node.kind != "float":
            return _FORMATS[node.op].format(*args)
        graph = self.structure.graph
        exponents = [literal(graph.const(number), self.acc) for number in node.attrs]
        name = "power" if node.op == "pow" else node.op
        return f"{name}({', '.join(map(as_tensor, (*args, *exponents)))})"

    def _reduction(self, node: Node, args: Sequence[str]) -> str:
        if self._is_loaded(node):  # a gather from an input, without the other columns
            return self._element(node)
        if self._is_over_blocks(node):
            function = "block_largest" if node.op == "amax" else "block_sum"
            return f"{function}({args[0]}, {self.structure.block})"
        if not self.is_reduced(node):  # a value without columns: its own reduction
            return self.named[node.args[0]]
        return self.reduced(node, self.reducible(node))

    def reducible(self, node: Node) -> str:
        """Return the argument of a reduction, with its neutral element in the padding."""
        (reduced, *_) = node.args
        value = self.wide(reduced)
        if node.op == "sum" and self.has_blocks(reduced):
            # Each number is repeated along its block, and only the first column is added: the sum
            # of equal shares, added one by one, would have a rounding error for each column.
            value = f"tl.where(cols % {self.structure.block} == 0, {value}, 0)"
        if node.op == "pick":
            index = column_index(self.structure, node.attrs[0][0])
            return f"tl.where({index} == {self.value(node.args[1])}, {value}, 0)"
        if not self._is_padded():
            return value
        kind = "narrow" if self.ranges.are_narrow(node) else node.kind
        return f"tl.where(in_cols, {value}, {neutral(node.op, kind)})"

    def _is_padded(self) -> bool:
        """Whether a tile may have more columns than the row: blocks are powers of two, from 16.

        In 16 lanes, a row of 12 columns needs the neutral element in four::

            maximum    x x x x x x x x x x x x -inf -inf -inf -inf
        """
        if self.body is not None:
            return not self.full
        if self.addresses.sliced == "mixed":
            return True
        cols = self.structure.cols
        return cols < 16 or cols & (cols - 1) != 0

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
            return self._load(node, "intermediate", 0, operand, self.intermediate_parts[node])
        kind, index = source.split()
        number = (
            f"tl.load({self.addresses.number_of_rows(kind, int(index))}, mask=in_rows, other=0)"
        )
        if node.kind == "int":
            return f"{number}.to(tl.int64)"
        return number

    def _input(self, node: Node, args: Sequence[str]) -> str:
        index, part = node.attrs
        return self._load(node, "input", index, self.structure.inputs[index], part)

    def _cotangent(self, node: Node, args: Sequence[str]) -> str:
        index, part = node.attrs
        # The intermediate counts as an output after the others.
        is_output = index < len(self.structure.outputs)
        operand = self.structure.outputs[index] if is_output else self.plan.intermediate_operand
        assert operand is not None
        return self._load(node, "cotangent", index, operand, part)

    def _iota(self, node: Node, args: Sequence[str]) -> str:
        """Return the index along an axis."""
        (axis,) = node.attrs
        if axis in self.structure.columns:
            of_blocks = self.has_blocks(node)
            self.addresses.blocks |= of_blocks
            return column_index(self.structure, axis, of_blocks=of_blocks)
        return self.addresses.index_of_row(axis)

    def _keep(self, node: Node, args: Sequence[str]) -> str:
        """Return dropout's factors: random numbers count each part of a row as a row.

        If rows have three parts, part 1 of row 5 has the random numbers of row ``5 * 3 + 1``.
        """
        structure = self.structure
        (number, part) = node.attrs
        threshold = self.addresses.argument("threshold", number, f"threshold{number}")
        parts = 1
        part_index = 0
        for axis in structure.unrolled:
            size = structure.sizes[axis]
            parts *= size
            part_index = part_index * size + dict(part).get(axis, 0)
        rows = "numbers" if self.grouped else "places"
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

    def store(
        self, kind: str, index: int, operand: Operand, part: Part, nodes: Sequence[Node]
    ) -> None:
        """Write a part of a tensor, or two that alternate in memory."""
        are_paired = len(nodes) > 1
        address, mask = self.addresses.tile(
            kind, index, operand, part, full=self.full, paired=are_paired
        )
        pointer = self.addresses.arguments[kind, index, "", -1].name
        values = []
        for node in nodes:
            is_wide = self.has_blocks(node) and not self.structure.has_blocks(operand.axes)
            values.append(self._as_stored(node, operand.dtype, pointer, is_wide=is_wide))
            self._count(operand)
        stored = ", ".join(values)
        if are_paired:
            stored = f"join_pairs({stored}, ROWS, BLOCK_N)"
        stored = f"tl.store({address}, {stored}, mask={mask})"
        # A number of a row is stored once, not for each tile of columns.
        if self.body is None or mask == "in_rows":
            self.lines.append(stored)
        else:
            self.body.append(stored)

    def _as_stored(self, node: Node, dtype: torch.dtype, pointer: str, *, is_wide: bool) -> str:
        """Return a value in the dtype of a tensor; ``is_wide``: along all columns."""
        value = self.wide(node) if is_wide else self.block(node)
        if dtype not in _TO_FLOAT8:
            return f"{value}.to({pointer}.dtype.element_ty)"
        # What is returned is rounded already. Its argument is in 8 bits then.
        if node.op == "round" and node.args[0] in self.named and not is_wide:
            value = self.block(node.args[0])
        return self._in_8_bits(node, dtype, value)

    def store_number(self, kind: str, index: int, node: Node) -> None:
        """Write a number of each row."""
        value = self.value(node)
        self.lines.append(
            f"tl.store({self.addresses.number_of_rows(kind, index)}, {value}, mask=in_rows)"
        )

    def _load(self, node: Node, kind: str, index: int, operand: Operand, part: Part) -> str:
        if self._count(operand):
            self.read.append(operand.dtype)
        axis = pair_axis(self.structure, operand)
        if axis is not None:
            first, number = paired(part, axis)
            pair = self._pair(node, kind, index, operand, first)
            return f"{pair}[{number}]{self._read_as(operand)}"
        loaded = self._loaded(kind, index, operand, part)
        if self.structure.has_columns(operand) or self.addresses.varies_by_row(operand):
            return loaded + self._read_as(operand)
        # The address is one pointer, and the loaded value a scalar. Triton's interpreter cannot
        # compare a scalar, but it can compare a block of one element. All values of a kernel have
        # two dimensions then, and broadcast.
        dtype = _SCALARS[operand.kind]
        block = f"tl.full((1, 1), {loaded}.to({dtype}), {dtype})"
        if operand.kind == "bool":
            return f"{block} != 0"
        return block

    def _loaded(
        self, kind: str, index: int, operand: Operand, part: Part, *, paired: bool = False
    ) -> str:
        """Return the load of a tile."""
        address, mask = self.addresses.tile(
            kind, index, operand, part, full=self.full, paired=paired
        )
        if not mask:
            return f"tl.load({address})"
        # Triton has no conversion of an integer to a float of 8 bits.
        other = "0.0" if operand.dtype in _TO_FLOAT8 else "0"
        return f"tl.load({address}, mask={mask}, other={other})"

    def _pair(self, node: Node, kind: str, index: int, operand: Operand, first: Part) -> str:
        """Return the variable of two parts that alternate in memory, which one line loads."""
        loaded = self._loaded(kind, index, operand, first, paired=True)
        if loaded not in self._pairs:
            self._pairs[loaded] = self.names.free(f"{operand.name}_pair")
            line = f"{self._pairs[loaded]} = split_pairs({loaded})"
            self._lines_for(node).append(line)
        return self._pairs[loaded]

    def _element(self, node: Node) -> str:
        """Return an element of each row; zero if its index is out of range."""
        source, index_node = node.args
        (number, part) = source.attrs
        index = self._in_64_bits(index_node, self.named[index_node])
        operand = self.structure.inputs[number]
        if index_node.op == "const" and not self.addresses.varies_by_row(operand):
            # The address depends on the index alone. It has to be a block, because the mask is one.
            index = f"tl.full((1, 1), {index}, tl.int64)"
        address, mask = self.addresses.tile(
            "input", number, operand, part, full=self.full, element=index
        )
        conditions = [f"({index} >= 0)", f"({index} < N)"]
        if mask:
            conditions.append(mask)
        other = "0.0" if operand.dtype in _TO_FLOAT8 else "0"
        loaded = f"tl.load({address}, mask={' & '.join(conditions)}, other={other})"
        return loaded + self._read_as(operand)

    def _read_as(self, operand: Operand) -> str:
        """Return what converts an element of a tensor to a value."""
        return self._widened(operand.dtype) if operand.kind == "float" else _READ_AS[operand.kind]

    def _widened(self, dtype: torch.dtype) -> str:
        # Triton has no conversion of 8 bits to 64.
        is_far = dtype in _TO_FLOAT8 and self.acc == torch.float64
        return f".to(tl.float32){_READ_AS['float']}" if is_far else _READ_AS["float"]

    def _count(self, operand: Operand) -> bool:
        """Count the bytes of a whole tensor; return whether it is one.

        The source of a pass has each load twice, for full tiles and for the last one. The load of
        full tiles is not counted.
        """
        counts = self.structure.is_whole(operand) and not self.full
        if counts:
            self.moved.append(operand.dtype)
        return counts


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
    "sub": Emitter._difference,
    "div": Emitter._quotient,
    "div_rn": Emitter._device_call,
    "exp": Emitter._exponential,
    "fmod": Emitter._device_call,
    "of_ordinal": Emitter._of_ordinal,
    "ordinal": Emitter._ordinal,
    "pow": Emitter._device_call,
    "power": Emitter._device_call,
    "xlogy": Emitter._device_call,
    **dict.fromkeys(REDUCTIONS, Emitter._reduction),
}
assert set(BINARY | COMPARISONS) <= set(_FORMATS) | set(_METHODS)


def _is_moved(node: Node) -> bool:
    """Whether a value may be a number that was read: then a NaN may have a sign."""
    if node.op in ("input", "cotangent"):
        return True
    return node.op in _MOVING and any(map(_is_moved, computed_of(node)))


def _without_names(named: dict[_Key, str], ended: set[str]) -> dict[_Key, str]:
    """Return the entries of names that are still in scope."""
    return {key: name for key, name in named.items() if name not in ended}


def _most_live(lines: Sequence[str], wide: set[str]) -> int:
    """Return the most of these variables that are live after a line: assigned, and used later."""
    names_by_line = [_NAME.findall(line.partition("  # line ")[0]) for line in lines]
    last_use: dict[str, int] = {}
    for number, names in enumerate(names_by_line):
        last_use |= dict.fromkeys(names, number)
    most = 0
    live = set[str]()
    for number, names in enumerate(names_by_line):
        live |= wide & set(names[:1])
        most = max(most, len(live))
        live -= {name for name in live if last_use[name] <= number}
    return most
