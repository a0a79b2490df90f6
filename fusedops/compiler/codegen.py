"""Triton kernels of a row-wise function, as source.

Where a program holds whole rows, forward and backward are one kernel each. Longer rows take two:
the first passes over each row, tile by tile, and writes the results of reductions (*moments*); the
second has a tile of columns in each program. Programs of a backward hold partial sums over rows,
which one more kernel adds up.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..core.configs.tuning_key import block_holding
from .emitting import Argument, Emitter, offsets_along, row_layout, strides_of, unreduced
from .errors import NotRowwiseError
from .ir import REDUCTIONS, Node, computed_of, reachable, topological
from .planning import Plan
from .structure import Operand, Part, Structure

__all__ = ["Kernel", "backward_kernels", "forward_kernels", "reduce_kernel"]

# The registers of a multiprocessor that vectors, sums and a tile's inputs may take together.
_REGISTERS = 49152
# The most elements that are live in a program of a backward. With more than twice a
# multiprocessor's registers most are spilled, and pass through memory more often than the rows that
# tiles read twice.
_MOST_LIVE = 150_000
_CONSTANTS = ("ACC", "N", "BLOCK_N", "ROWS", "VECTOR", "STAGES", "OVERLAP", "PERSISTENT")
_ORDER = (
    "input",
    "cotangent",
    "intermediate",
    "stats",
    "moments",
    "output",
    "gradient",
    "partials",
)

# Arguments whose values Triton does not compile into a kernel.
_NOT_SPECIALIZED = ("seed", "offset", "rows", "chunks", "programs", "groups")


@dataclass(frozen=True)
class Kernel:
    """A kernel's source.

    Attributes:
        name: of its function.
        source: of it.
        arguments: in order.
        grouped: whether axis 1 of the grid is the groups of rows.
        tiled: whether axis 1 of the grid is tiles of columns.
        sums: the inputs whose gradients are sums over rows, with their parts, in the order of their
            slots.
        written: the inputs whose gradients are written whole and are for the caller to sum.
        moved: the dtypes of the whole tensors, or of parts of all rows, that it reads and writes.
        moments: how many numbers of each row it writes for the next kernel.
        live: how many values of a tile are live at a time, sums over rows and vectors included.
    """

    name: str
    source: str
    arguments: tuple[Argument, ...]
    grouped: bool = False
    tiled: bool = False
    sums: tuple[tuple[int, Part], ...] = ()
    written: tuple[int, ...] = ()
    moved: tuple[torch.dtype, ...] = ()
    moments: int = 0
    live: int = 0


@dataclass(frozen=True)
class _Store:
    """One write of a kernel: a part of a tensor, or with ``kind`` "stats" a number of each row."""

    kind: str
    index: int
    operand: Operand | None
    part: Part
    node: Node


# A gradient that is summed over rows: the input, its part, and the value that is summed.
_Sum = tuple[int, Part, Node]


def forward_kernels(
    plan: Plan, acc: torch.dtype, *, grouped: bool, tiled: bool, saves: bool
) -> list[Kernel]:
    """Return the kernels of a forward; with ``saves`` they also write what a backward reads."""
    structure = plan.structure
    stores: list[_Store] = []
    for number, operand in enumerate(structure.outputs):
        for part, node in structure.results[number].items():
            stores.append(_Store("output", number, operand, part, node))
    if saves:
        # An intermediate that is one of the outputs is written already.
        if plan.intermediate_output < 0:
            for part, node in plan.intermediate.items():
                stores.append(_Store("intermediate", 0, plan.intermediate_operand, part, node))
        for index, node in enumerate(plan.stats):
            stores.append(_Store("stats", index, None, (), node))
    return _Writer(plan, acc, "forward", grouped, tiled).kernels(stores, [])


def backward_kernels(
    plan: Plan,
    acc: torch.dtype,
    *,
    grouped: bool,
    tiled: bool,
    given: Sequence[int],
    wanted: Sequence[int],
) -> list[Kernel]:
    """Return the kernels of a backward, from the cotangents ``given`` to the gradients ``wanted``.

    Rows that a program of the forward holds may be too long for one of the backward, which has more
    values at a time.
    """
    kernels = _backward_kernels(plan, acc, grouped=grouped, tiled=tiled, given=given, wanted=wanted)
    most_live = max(kernel.live for kernel in kernels)
    if tiled or most_live * block_holding(plan.structure.cols) <= _MOST_LIVE:
        return kernels
    try:
        return _backward_kernels(plan, acc, grouped=False, tiled=True, given=given, wanted=wanted)
    except NotRowwiseError:  # no kernel of long rows computes it
        return kernels


def _backward_kernels(
    plan: Plan,
    acc: torch.dtype,
    *,
    grouped: bool,
    tiled: bool,
    given: Sequence[int],
    wanted: Sequence[int],
) -> list[Kernel]:
    structure, writer = plan.structure, _Writer(plan, acc, "backward", grouped, tiled)
    gradients = plan.gradients(given, wanted)
    stores: list[_Store] = []
    sums: list[_Sum] = []
    for index in wanted:
        operand = structure.inputs[index]
        target = _gradient_target(structure, operand, grouped)
        gradient = gradients.get(index, {})
        for part in structure.parts(operand):
            node = gradient.get(part) or structure.graph.const(0.0)
            if target == "sum":
                sums.append((index, part, node))
            elif target == "store":
                stores.append(_Store("gradient", index, operand, part, node))
            else:
                writer.written[index] = None
                out = unreduced(structure, operand, acc)
                stores.append(_Store("gradient", index, out, part, node))
    return writer.kernels(stores, sums)


def _gradient_target(structure: Structure, operand: Operand, grouped: bool) -> str:
    """Return how an input's gradient leaves the kernel.

    Returns "store" for a gradient that is stored, "sum" for one that the programs sum over rows,
    and "whole" for one that is stored with all rows, and is for the caller to sum.
    """
    columns = set(operand.axes) & set(structure.columns)
    # Sums have all columns or none.
    if columns and columns != set(structure.columns):
        return "whole"
    layout = row_layout(structure, operand, grouped)
    if layout == "indexed":
        if set(structure.rows) <= set(operand.axes):
            return "store"
        return "whole"
    return "store" if layout == "rows" else "sum"


class _Writer:
    """Writes the kernels of one direction.

    Attributes:
        direction: "forward" or "backward".
        written: the inputs whose gradients are for the caller to sum, in order.
    """

    def __init__(
        self, plan: Plan, acc: torch.dtype, direction: str, grouped: bool, tiled: bool
    ) -> None:
        self.plan, self.acc, self.direction = plan, acc, direction
        # Axis 1 of the grid is groups or tiles of columns: it cannot be both.
        self.grouped, self.tiled = grouped and not tiled, tiled
        self.structure = plan.structure
        self.written: dict[int, None] = {}

    def kernels(self, stores: Sequence[_Store], sums: Sequence[_Sum]) -> list[Kernel]:
        """Return the kernels in the order in which they run.

        Long rows take up to two. The first writes what varies by row alone, and the moments that
        the second reads::

            rows -> moments kernel -> moments, outputs that are numbers of rows
            rows, moments -> kernel -> whole outputs, sums over rows
        """
        if not self.tiled:
            return [self._kernel(self._emitter(), stores, sums, self.direction)]
        wide = [store for store in stores if self._is_wide(store)]
        narrow = [store for store in stores if store not in wide]
        moments = self._moments(_roots(wide, sums))
        has_second = bool(wide or sums)
        kernels = []
        if moments or narrow:
            kernels.append(self._moments_kernel(moments if has_second else [], moments, narrow))
        if has_second:
            emitter = self._emitter()
            for index, node in enumerate(moments):
                emitter.leaves.setdefault(node, f"moments {index}")
            kernels.append(self._kernel(emitter, wide, sums, self.direction))
        return kernels

    def _is_wide(self, store: _Store) -> bool:
        """Whether the columns of a row are written, not a number of it."""
        if store.operand is None:
            return False
        return bool(set(store.operand.axes) & set(self.structure.columns))

    def _emitter(self) -> Emitter:
        """Return an emitter that reads what the forward saved instead of computing it."""
        emitter = Emitter(self.plan, self.acc, grouped=self.grouped)
        if self.direction == "backward":
            for part, node in self.plan.intermediate.items():
                emitter.leaves[node] = "intermediate"
                emitter.intermediate_parts[node] = part
            for index, node in enumerate(self.plan.stats):
                emitter.leaves.setdefault(node, f"stats {index}")
        return emitter

    # --- long rows --------------------------------------------------------------------------------

    def _moments(self, roots: Sequence[Node]) -> list[Node]:
        """Return the numbers of rows that whole values are computed of, and reductions give."""
        emitter = self._emitter()
        used = reachable(roots, lambda node: node in emitter.leaves)
        candidates = list(roots)
        for node in used:
            if node not in emitter.leaves and emitter.has_columns(node):
                candidates += node.args
        moments: set[Node] = set()
        for node in candidates:
            self._add_moments(node, emitter, moments)
        moments &= used
        return [node for node in topological(roots) if node in moments]

    def _add_moments(self, node: Node, emitter: Emitter, moments: set[Node]) -> None:
        """Add a number of a row to the moments, or what it is computed of.

        Moments are stored as floats: a whole number is not one unless it is small enough.
        """
        if node in emitter.leaves or emitter.has_columns(node):
            return
        if not self._has_reduction(node, emitter):
            return
        is_reduction = node.op in REDUCTIONS
        if node.kind == "float" or (is_reduction and _counts_columns(node)):
            moments.add(node)
            return
        if is_reduction:
            raise NotRowwiseError(
                "sums of whole numbers along rows that are longer than a program holds"
            )
        for arg in node.args:
            self._add_moments(arg, emitter, moments)

    def _has_reduction(self, node: Node, emitter: Emitter) -> bool:
        computed = reachable([node], lambda inner: inner in emitter.leaves)
        return any(inner.op in REDUCTIONS for inner in computed.difference(emitter.leaves))

    def _moments_kernel(
        self, written: Sequence[Node], moments: Sequence[Node], stores: Sequence[_Store]
    ) -> Kernel:
        emitter = self._emitter()
        emitter.flat = True
        passes = _passes([*moments, *_roots(stores, [])], emitter)
        for number in sorted(set(passes.values())):
            self._pass(emitter, [node for node in passes if passes[node] == number])
        for index, node in enumerate(written):
            emitter.store_number("moments", index, node)
        for store in stores:
            self._store(emitter, store)
        return self._assembled(
            emitter, f"{self.direction}_moments_kernel", [], moments=len(written)
        )

    def _pass(self, emitter: Emitter, nodes: Sequence[Node]) -> None:
        """Emit one pass over the columns of the rows, for reductions that depend on no other.

        A loop over full tiles, which need no mask, the last tile, and the reduction of the lanes::

            total = tl.full((ROWS, BLOCK_N), 0, ACC)    # one sum a lane
            for start in full tiles: total += tile
            if there is a rest:      total += masked tile
            total = tl.sum(total)
        """
        names = {node: emitter.free(_ACCUMULATORS.get(node.op, "total")) for node in nodes}
        # From a sum of exponentials to the maximum that is computed in the same pass.
        pairs = itertools.product(nodes, nodes)
        online = {total: largest for total, largest in pairs if _is_online(total, largest)}
        online_maxima = list(online.values())
        for node, name in names.items():
            # A maximum that rescales its sums is one for the row in each tile. Other reductions are
            # computed lane by lane until the end.
            columns = "1" if node in online_maxima else "BLOCK_N"
            emitter.lines.append(f"{name} = {_initial(node, columns)}")
        for full in (True, False):
            emitter.open_columns(full=full)
            self._accumulate(emitter, names, online)
            emitter.close_columns(*(_FULL_TILES if full else _LAST_TILE))
        for node, name in names.items():
            if node not in online_maxima:
                emitter.lines.append(f"{name} = {emitter.reduced(node, name)}")
        emitter.named |= names

    def _accumulate(
        self, emitter: Emitter, names: dict[Node, str], online: dict[Node, Node]
    ) -> None:
        """Emit the lines that add a tile to what is reduced."""
        body = emitter.body
        assert body is not None
        online_maxima = list(online.values())
        # The exponentials are taken after the maximum of their tile.
        for node in sorted(names, key=lambda node: node in online):
            name = names[node]
            if node in online_maxima:
                totals = [names[total] for total in online if online[total] is node]
                self._accumulate_online(emitter, body, node, name, totals)
            elif node in online:
                shifted = node.args[0].args[0]
                largest = names[online[node]]
                value = f"tl.exp({emitter.value(shifted.args[0])} - {largest}_base)"
                if not emitter.full:
                    value = f"tl.where(in_cols, {value}, 0)"
                body.append(f"{name} += {value}")
            elif node.op == "amax":
                larger = _maximum(name, emitter.reducible(node))
                body.append(f"{name} = {larger}")
            else:
                body.append(f"{name} += {emitter.reducible(node)}")

    def _accumulate_online(
        self, emitter: Emitter, body: list[str], node: Node, name: str, totals: Sequence[str]
    ) -> None:
        """Emit the lines of a maximum whose sums of exponentials are taken in the same pass.

        When the maximum grows, the sums are rescaled (Milakov and Gimelshein 2018,
        arXiv:1805.02867). Nothing is subtracted from an infinite maximum: rows may begin masked.
        """
        following, base = emitter.free("next"), f"{name}_base"
        larger = _maximum(name, emitter.reduced(node, emitter.reducible(node)))
        body.append(f"{following} = {larger}")
        body.append(f'{base} = tl.where({following} == float("-inf"), 0.0, {following})')
        body.extend(f"{total} *= tl.exp({name} - {base})" for total in totals)
        body.append(f"{name} = {following}")

    # --- kernels ----------------------------------------------------------------------------------

    def _store(self, emitter: Emitter, store: _Store) -> None:
        if store.operand is None:
            emitter.store_number(store.kind, store.index, store.node)
        else:
            emitter.store(store.kind, store.index, store.operand, store.part, store.node)

    def _kernel(
        self, emitter: Emitter, stores: Sequence[_Store], sums: Sequence[_Sum], name: str
    ) -> Kernel:
        emitter.flat = not sums or not self._has_room(emitter, stores, sums)
        for store in stores:
            if not self._is_wide(store):
                write = functools.partial(self._store, emitter, store)
                emitter.stores_after.setdefault(store.node, []).append(write)
        for store in stores:
            emitter.value(store.node)
            if self._is_wide(store):
                self._store(emitter, store)
        for slot, (_, _, node) in enumerate(sums):
            value = emitter.value(node)
            # A constant is zero: no cotangent reaches the input.
            if node.op != "const":
                masked = f"tl.where(in_rows, {value}, 0)"
                emitter.lines.append(f"sum{slot} += tl.sum({masked}, axis=0, keep_dims=True)")
        slots = [(index, part) for index, part, _ in sums]
        return self._assembled(emitter, f"{name}_kernel", slots)

    def _has_room(self, emitter: Emitter, stores: Sequence[_Store], sums: Sequence[_Sum]) -> bool:
        """Whether registers hold vectors from tile to tile, beside the sums and a tile's inputs."""
        if self.tiled:
            return True
        read = 0
        for node in reachable(_roots(stores, sums), lambda node: node in emitter.leaves):
            is_read = node in emitter.leaves or node.op in ("input", "cotangent")
            read += is_read and emitter.has_columns(node)
        return (read + len(sums)) * block_holding(self.structure.cols) < _REGISTERS

    def _assembled(
        self, emitter: Emitter, name: str, sums: Sequence[tuple[int, Part]], moments: int = 0
    ) -> Kernel:
        """Return the kernel of an emitter's lines."""
        by_row = name.endswith("moments_kernel")
        arguments = self._ordered_arguments(emitter, has_sums=bool(sums))
        body = ["await_predecessor(OVERLAP)"]
        if _drops(arguments):
            body.append("seed, offset = load_seed(seed, offset)")
        if not by_row:
            body += self._column_lines()
        if self.grouped:
            body += _GROUP_LINES
        body += emitter.invariant
        for slot, (index, _) in enumerate(sums):
            columns = "BLOCK_N" if self._has_columns(index) else "1"
            body.append(f"sum{slot} = tl.zeros((1, {columns}), ACC)")
        tile_lines = [*self._row_lines(by_row), *emitter.indices(), *emitter.lines]
        if sums:
            # Programs that sum over rows take several tiles, so that there are few partial sums.
            body.append("tiles = tl.cdiv(M, ROWS).to(tl.int32)")
            body.append(_TILES)
            body += [f"    {line}" for line in tile_lines]
            body += self._partials(sums)
        else:
            body += ["tile = tl.program_id(0)", *tile_lines]
        return Kernel(
            name,
            _source(name, arguments, _CONSTANTS, body),
            tuple(arguments),
            self.grouped,
            self.tiled and not by_row,
            tuple(sums),
            tuple(self.written),
            tuple(emitter.moved),
            moments,
            emitter.live() + len(sums),
        )

    def _ordered_arguments(self, emitter: Emitter, *, has_sums: bool) -> list[Argument]:
        """Return a kernel's arguments: tensors first, then the others by kind, then the sizes."""

        def order(argument: Argument) -> tuple[int, str, int]:
            kind = argument.kind
            rank = _ORDER.index(kind) if kind in _ORDER else len(_ORDER)
            return rank, kind, argument.index

        arguments = list(emitter.arguments.values())
        if has_sums:
            arguments.append(Argument("partials", "partials"))
        arguments.sort(key=order)
        if _drops(arguments):
            arguments += [Argument("seed", "seed"), Argument("offset", "offset")]
        arguments.append(Argument("M", "rows"))
        if self.grouped:
            arguments.append(Argument("groups", "groups"))
        return arguments

    def _column_lines(self) -> list[str]:
        """Return the lines that compute the columns of a program that has one tile of them."""
        start = "tl.program_id(1) * BLOCK_N" if self.tiled else "0"
        return [f"start = {start}", _COLUMNS, _IN_COLUMNS]

    def _row_lines(self, by_row: bool) -> list[str]:
        """Return the lines that compute the rows of a tile, and its mask."""
        lines = ["places = rows_of(tile, ROWS)"]
        if self.grouped:
            lines.append("in_rows = (places < M)[:, None] & in_groups")
            lines.append("rows = (group * M + places)[:, None]")
        else:
            lines.append("in_rows = (places < M)[:, None]")
            lines.append("rows = places[:, None]")
        # In a loop over tiles of columns the mask is one of each tile.
        if not by_row:
            lines.append(_MASK)
        return lines

    def _has_columns(self, index: int) -> bool:
        return bool(set(self.structure.inputs[index].axes) & set(self.structure.columns))

    def _partials(self, sums: Sequence[tuple[int, Part]]) -> list[str]:
        """Return the lines that store a program's partial sums.

        Each program writes its own, which `reduce_kernel` adds up in a fixed order::

            partials = (programs of all groups, slots, N)
        """
        program = "program = tl.program_id(0).to(tl.int64)"
        if self.grouped:
            program += " + group * tl.num_programs(0)"
        lines = [program]
        for slot, (index, _) in enumerate(sums):
            address = f"partials + (program * {len(sums)} + {slot}) * N + cols"
            mask = "in_cols" if self._has_columns(index) else "in_cols & (cols < 1)"
            lines.append(f"tl.store({address}, sum{slot}, mask={mask})")
        return lines


# How a loop over whole tiles of columns begins, and what follows it: one tile of fewer columns, or
# none. No kernel with such a loop has groups, whose masks would be others.
_COLUMNS = "cols = start + tl.arange(0, BLOCK_N)[None, :]"
_IN_COLUMNS = "in_cols = cols < N"
_MASK = "mask = in_rows & in_cols"
_FULL_TILES = (
    "for start in tl.range(0, N // BLOCK_N * BLOCK_N, BLOCK_N, num_stages=STAGES):",
    _COLUMNS,
)
_LAST_TILE = (
    "if N % BLOCK_N:",
    "start = N // BLOCK_N * BLOCK_N",
    _COLUMNS,
    _IN_COLUMNS,
    _MASK,
)
# The loop of a program over its tiles of rows.
_TILES = "for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):"
_GROUP_LINES = (
    # The last programs may have no group: see `core.launches.launch`.
    "group = (tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)).to(tl.int64)",
    # Of a block and a number Triton's interpreter makes no boolean mask, so the number is a block
    # too.
    "in_groups = tl.full((1, 1), group, tl.int64) < groups",
    "in_cols = in_cols & in_groups",
)
_ACCUMULATORS = {"amax": "largest"}
_LEAST_OF = {"int": str(-(2**63)), "float": 'float("-inf")'}


def _initial(node: Node, columns: str) -> str:
    """Return the accumulator of a reduction before the first tile."""
    kind = "int" if node.kind == "int" else "float"
    start = _LEAST_OF[kind] if node.op == "amax" else "0"
    dtype = "tl.int64" if kind == "int" else "ACC"
    return f"tl.full((ROWS, {columns}), {start}, {dtype})"


def _roots(stores: Sequence[_Store], sums: Sequence[_Sum]) -> list[Node]:
    return [*[store.node for store in stores], *[node for _, _, node in sums]]


def _drops(arguments: Iterable[Argument]) -> bool:
    """Whether a kernel has dropout, and with it random numbers."""
    return any(argument.kind == "threshold" for argument in arguments)


def _maximum(one: str, other: str) -> str:
    return f"tl.maximum({one}, {other}, propagate_nan=tl.PropagateNan.ALL)"


def _passes(roots: Sequence[Node], emitter: Emitter) -> dict[Node, int]:
    """Return for each reduction of whole rows how many passes over the rows precede its own."""
    # Of all nodes: how many passes precede what is computed of them.
    levels: dict[Node, int] = {}
    passes: dict[Node, int] = {}
    used = reachable(roots, lambda node: node in emitter.leaves)
    for node in topological(roots):
        if node not in used:
            continue
        level = 0
        if node not in emitter.leaves:
            level = max([levels[arg] for arg in computed_of(node)], default=0)
        if node.op in REDUCTIONS and emitter.is_reduced(node):
            # A sum of exponentials shares the pass of its maximum, which it is computed of.
            shared = [passes[other] for other in passes if _is_online(node, other)]
            passes[node] = shared[0] if shared else level
            level = passes[node] + 1
        levels[node] = level
    return passes


def _counts_columns(node: Node) -> bool:
    """Whether a reduction of whole numbers is at most the count of columns, which fp32 holds.

    So it is for `any` and `argmax`.
    """
    if node.op == "sum":
        return node.args[0].op == "cast" and node.args[0].args[0].kind == "bool"
    todo = list(node.args)
    while todo:
        node = todo.pop()
        if node.kind == "bool" or node.op in ("const", "iota"):
            continue
        if node.op not in ("cast", "where", "neg"):
            return False
        if any(arg.kind == "float" for arg in node.args):
            return False
        todo += node.args
    return True


def _is_online(total: Node, largest: Node) -> bool:
    """Whether this is the sum of ``exp(x - largest)`` over the row x: one pass computes both."""
    if total.op != "sum" or largest.op != "amax" or total.args[0].op != "exp":
        return False
    shifted = total.args[0].args[0]
    if shifted.op != "sub" or shifted.args[0] is not largest.args[0]:
        return False
    if total.attrs[0] != largest.attrs[0]:
        return False
    shift = shifted.args[1]
    if shift.op == "constant_to_gradients":
        shift = shift.args[0]
    return shift is largest


def _source(
    name: str, arguments: Sequence[Argument], constants: Sequence[str], body: Sequence[str]
) -> str:
    # These change from call to call: a variant of its own for values like 1 or multiples of 16
    # would be compiled again and again.
    fixed = [argument.name for argument in arguments if argument.kind in _NOT_SPECIALIZED]
    lines = [f"@triton.jit(do_not_specialize={fixed!r})", f"def {name}("]
    lines += [f"    {argument.name}," for argument in arguments]
    lines += [f"    {constant}: tl.constexpr," for constant in constants]
    return "\n".join([*lines, "):", *[f"    {line}" for line in body]]) + "\n"


def reduce_kernel(plan: Plan, kernel: Kernel) -> Kernel:
    """Return the kernel that adds up the partial sums of a backward.

    Axis 0 of the grid is tiles of columns. Axes 1 and 2 are slots and groups: a program adds up one
    slot, of the programs of one group or of all::

        partials = (programs, slots, N) -> total of a slot = (N,)
    """
    slots = len(kernel.sums)
    inputs = dict.fromkeys(index for index, _ in kernel.sums)
    arguments = [
        Argument("partials", "partials"),
        *[Argument(f"grad{index}", "gradient", index) for index in inputs],
        Argument("chunks", "chunks"),
        Argument("programs", "programs"),
    ]
    grouped_slots, stores = [], list[str]()
    for slot, (index, part) in enumerate(kernel.sums):
        operand = plan.structure.inputs[index]
        in_group = row_layout(plan.structure, operand, kernel.grouped) == "group"
        if in_group:
            grouped_slots.append(slot)
        stores.append(f"if slot == {slot}:")
        stores.append(f"    {_total_store(plan.structure, index, part, in_group)}")
    is_grouped = " | ".join([f"(slot == {slot})" for slot in grouped_slots])
    count_of_all = "tl.where(group == 0, programs, 0)"
    mask = "(part < count)[:, None] & (cols < N)[None, :]"
    body = [
        "await_predecessor(OVERLAP)",
        "place = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)",
        f"slot = place % {slots}",
        f"group = (place // {slots}).to(tl.int64)",
        "in_group = tl.full((BLOCK_N,), group, tl.int64)",
        "cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)",
        f"grouped = {is_grouped or 'slot < 0'}",
        "first = tl.where(grouped, group * chunks, 0)",
        f"count = tl.where(grouped, tl.minimum(chunks, programs - first), {count_of_all})",
        "sums = tl.zeros((ROWS, BLOCK_N), ACC)",
        "for start in range(0, count, ROWS):",
        "    part = start + tl.arange(0, ROWS)",
        f"    at = ((first + part) * {slots} + slot)[:, None] * N + cols[None, :]",
        f"    sums += tl.load(partials + at, mask={mask}, other=0.0)",
        "total = tl.sum(sums, axis=0)",
        *stores,
    ]
    source = _source("reduce_kernel", arguments, ("ACC", "N", "BLOCK_N", "ROWS", "OVERLAP"), body)
    return Kernel("reduce_kernel", source, tuple(arguments), kernel.grouped, sums=kernel.sums)


def _total_store(structure: Structure, index: int, part: Part, in_group: bool) -> str:
    """Return the store of a slot's total into its part of an input's gradient."""
    strides, size = strides_of(structure, structure.inputs[index])
    columns = offsets_along(structure, strides)
    terms = [f"grad{index}", columns or "cols"]
    if in_group:
        terms.append(f"group * {size}")
    terms.append(str(sum(strides[axis] * position for axis, position in part)))
    # A gradient without columns is one number. One that groups do not have is stored by the first.
    column_mask = f"(cols < {'N' if columns else 1})"
    group_mask = f"(in_group {'< programs // chunks' if in_group else '== 0'})"
    value = f"total.to(grad{index}.dtype.element_ty)"
    return f"tl.store({' + '.join(terms)}, {value}, mask={column_mask} & {group_mask})"
