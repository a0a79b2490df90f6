"""Triton kernels of a row-wise function, as source.

If a program holds whole rows, forward and backward are one kernel each. Longer rows take two:
the first passes over each row, tile by tile, and writes the results of reductions (*moments*); the
second has a tile of columns in each program. Programs of a backward hold partial sums over rows,
which one more kernel adds up.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.configs.tuning_key import block_holding
from .addresses import EVEN, SPREAD, Argument, Sliced, Spacings
from .axes import Label
from .emitter import Emitter
from .errors import NotRowwiseError
from .ir import COMPARISONS, SAME_VALUE, Node, cannot_cancel, computed_of, reachable
from .kernel import Kernel, first_lines, slice_source, source_of
from .layouts import pair_axis, paired, row_layout, unreduced
from .partials import stores_of_sums
from .passes import emit_passes, moments_of
from .phases import WIDEST_TILE, held_body, phases_of
from .planning import Plan
from .rows_of_programs import GROUP_LINES, MASK, of_rows, partial_row_line, program_lines
from .structure import Operand, Part, Structure, nodes_of
from .text import indented

__all__ = ["backward_kernels", "forward_kernels"]

# The registers of a multiprocessor that vectors, sums and a tile's inputs may take together.
_REGISTERS = 49152
# The most elements that are live in a program of a backward. Beyond about twice a multiprocessor's
# registers most values are spilled. That costs more memory traffic than the kernels of long rows,
# which read each row twice.
_MOST_LIVE = 150_000
# The longest rows that a program of a backward holds alone, and that eight programs share.
_LONGEST_ALONE = 16384
_LONGEST_SHARED = 65536
# The longest rows whose sums over columns, of numbers' gradients, are taken after all rows.
_LONGEST_WITH_LATE_SUMS = 4096
_CONSTANTS = ("ACC", "N", "BLOCK_N", "ROWS", "VECTOR", "STAGES", "OVERLAP", "PERSISTENT")
_ORDER = (
    "input",
    "cotangent",
    "intermediate",
    "stats",
    "moments",
    "exchange",
    "output",
    "gradient",
    "partials",
)


@dataclass(frozen=True)
class _Store:
    """One write of a kernel: a part of a tensor, or with ``kind`` "stats" a number of each row.

    Two parts that alternate in memory are one write of two nodes: see `layouts.pair_axis`.
    """

    kind: str
    index: int
    operand: Operand | None
    part: Part
    nodes: tuple[Node, ...]


# The arguments of these operators may be computed in two kernels, or twice in one, and must then be
# equal to the last bit: comparisons and roundings to whole numbers would change by a step, and
# exponentials enlarge a difference.
_OF_EXACT = COMPARISONS | {
    "amax",
    "ceil",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "fmod",
    "maximum",
    "minimum",
    "ordinal",
    "quotient",
    "rint",
    "sign",
}

# The functions that change little if their arguments do, and their derivatives.
_SMOOTH_FUNCTIONS = {"gelu", "gelu_tanh", "quick_gelu", "sigmoid", "silu", "tanh"}
_SMOOTH = _SMOOTH_FUNCTIONS | set(map("d:{}".format, _SMOOTH_FUNCTIONS))

# Operators without arguments: they read a value, or create one.
_READ = ("input", "const", "iota", "keep")

# A gradient that is summed over rows: the input, its part, and the value that is summed.
_Sum = tuple[int, Part, Node]


def forward_kernels(
    plan: Plan,
    acc: torch.dtype,
    *,
    group: Label,
    tiled: bool,
    saves: bool,
    spacings: Spacings = EVEN,
    sliced: Sliced = "",
) -> list[Kernel]:
    """Return the kernels of a forward; with ``saves`` they also write what a backward reads.

    With ``sliced``, the result is one function of a slice: see `horizontal`.
    """
    structure = plan.structure
    stores: list[_Store] = []
    for number, operand in enumerate(structure.outputs):
        parts = structure.results[number]
        stores += _stores_of_parts(structure, "output", number, operand, parts)
    # An intermediate that is one of the outputs is written already.
    if saves and plan.intermediate_output < 0:
        intermediate = plan.intermediate_operand
        if intermediate is not None:
            parts = plan.intermediate
            stores += _stores_of_parts(structure, "intermediate", 0, intermediate, parts)
    if saves:
        for index, node in enumerate(plan.stats):
            stores.append(_Store("stats", index, None, (), (node,)))
    return _Writer(plan, acc, "forward", group, tiled, spacings, sliced).kernels(stores, [])


def _stores_of_parts(
    structure: Structure, kind: str, index: int, operand: Operand, parts: Mapping[Part, Node]
) -> list[_Store]:
    axis = pair_axis(structure, operand)
    nodes: dict[Part, list[Node]] = {}
    for part, node in parts.items():
        first, _ = paired(part, axis)
        nodes.setdefault(first, []).append(node)
    return [_Store(kind, index, operand, part, tuple(pair)) for part, pair in nodes.items()]


def backward_kernels(
    plan: Plan,
    acc: torch.dtype,
    *,
    group: Label,
    tiled: bool,
    cotangents: Sequence[int],
    wanted: Sequence[int],
    spacings: Spacings = EVEN,
    sliced: Sliced = "",
) -> list[Kernel]:
    """Return the kernels of a backward, from ``cotangents`` to the gradients ``wanted``.

    Rows that a program of the forward holds may be too long for one of the backward, which has more
    values at a time.
    """
    kernels_of = functools.partial(
        _backward_kernels,
        plan,
        acc,
        cotangents=cotangents,
        wanted=wanted,
        spacings=spacings,
        sliced=sliced,
    )
    if sliced:
        return kernels_of(group=group, tiled=False)
    cols = plan.structure.cols
    if not tiled or cols <= _LONGEST_SHARED:
        kernels = kernels_of(group=group, tiled=False)
        (kernel,) = kernels
        fits = cols <= _LONGEST_ALONE and kernel.live * block_holding(cols) <= _MOST_LIVE
        if (fits and not tiled) or (kernel.held and kernel.shares):
            return kernels
    try:
        return kernels_of(group=(), tiled=True)
    except NotRowwiseError:  # no kernel of long rows computes it
        return kernels_of(group=group, tiled=tiled)


def _backward_kernels(
    plan: Plan,
    acc: torch.dtype,
    *,
    group: Label,
    tiled: bool,
    cotangents: Sequence[int],
    wanted: Sequence[int],
    spacings: Spacings,
    sliced: Sliced,
) -> list[Kernel]:
    structure = plan.structure
    writer = _Writer(plan, acc, "backward", group, tiled, spacings, sliced)
    gradients = plan.gradients(cotangents, wanted)
    stores: list[_Store] = []
    sums: list[_Sum] = []
    for index in wanted:
        operand = structure.inputs[index]
        parts = _complete(structure, operand, gradients.get(index, {}))
        target = _gradient_target(structure, operand, group)
        if target == "sum":
            sums += [(index, part, node) for part, node in parts.items()]
            continue
        if target == "whole":
            writer.written[index] = None
            operand = unreduced(structure, operand, acc)
        stores += _stores_of_parts(structure, "gradient", index, operand, parts)
    return writer.kernels(stores, sums)


def _complete(
    structure: Structure, operand: Operand, gradient: Mapping[Part, Node]
) -> dict[Part, Node]:
    """Return the gradient of all parts: zero for one that no cotangent reaches."""
    parts: dict[Part, Node] = {}
    for part in structure.parts(operand):
        parts[part] = gradient.get(part) or structure.graph.const(0.0)
    return parts


def _gradient_target(structure: Structure, operand: Operand, group: Label) -> str:
    """Return how an input's gradient leaves the kernel.

    Returns "store" for a gradient that is stored, "sum" for one that the programs sum over rows,
    and "whole" for one that is stored with all rows, and is for the caller to sum. For rows (batch,
    sequence)::

        (batch, sequence, 64)   store
        (sequence, batch, 64)   store: it is permuted, and has all rows
        (64,)                   sum
        (batch, 64)             sum if they are groups, else whole
        (sequence, 64)          sum if they are groups, else whole
        (8,) of columns (8, 8)  whole
    """
    # Sums have all columns or none.
    has_all_columns = set(structure.columns) <= set(operand.axes)
    if structure.has_columns(operand) and not has_all_columns:
        return "whole"
    layout = row_layout(structure, operand, group)
    if layout == "indexed":
        has_all_rows = set(structure.rows) <= set(operand.axes)
        return "store" if has_all_rows else "whole"
    return "store" if layout == "rows" else "sum"


class _Writer:
    """Writes the kernels of one direction.

    Attributes:
        direction: "forward" or "backward".
        written: the inputs whose gradients are for the caller to sum, in order.
    """

    def __init__(
        self,
        plan: Plan,
        acc: torch.dtype,
        direction: str,
        group: Label,
        tiled: bool,
        spacings: Spacings,
        sliced: Sliced,
    ) -> None:
        self.plan = plan
        self.acc = acc
        self.direction = direction
        self.spacings = spacings
        # Columns are not divided among programs of a group.
        self.group = () if tiled else group
        self.tiled = tiled
        self.sliced = sliced
        self.structure = plan.structure
        self.written: dict[int, None] = {}

    def kernels(self, stores: Sequence[_Store], sums: Sequence[_Sum]) -> list[Kernel]:
        """Return the kernels in the order in which they run.

        Long rows take up to two. The first writes what varies by row alone, and the moments that
        the second reads::

            rows -> moments kernel -> moments, outputs that are numbers of rows
            rows, moments -> kernel -> whole outputs, sums over rows

        There is no first one if neither is needed, and no second one if nothing else is written.
        """
        if not self.tiled:
            return [self._kernel(self._emitter(_roots(stores, sums)), stores, sums)]
        wide: list[_Store] = []
        narrow: list[_Store] = []
        for store in stores:
            stores_of_kind = wide if self._is_wide(store) else narrow
            stores_of_kind.append(store)
        roots = _roots(wide, sums)
        moments = moments_of(roots, self._emitter(roots))
        kernels: list[Kernel] = []
        if moments or narrow:
            # Without a second kernel the first one only writes numbers of rows.
            written = moments if roots else []
            kernels.append(self._moments_kernel(written, [*moments, *_roots(narrow, [])], narrow))
        if roots:
            emitter = self._emitter(roots)
            for index, node in enumerate(moments):
                emitter.leaves.setdefault(node, f"moments {index}")
            kernels.append(self._kernel(emitter, wide, sums))
        return kernels

    def _name(self) -> str:
        """Return the name of the kernel, or of the function of one slice."""
        return f"{self.direction}_{'slice' if self.sliced else 'kernel'}"

    def _is_wide(self, store: _Store) -> bool:
        """Whether the columns of a row are written, not a number of it."""
        return store.operand is not None and self.structure.has_columns(store.operand)

    def _emitter(self, roots: Iterable[Node]) -> Emitter:
        """Return an emitter that reads what the forward saved instead of computing it."""
        emitter = Emitter(
            self.plan, self.acc, group=self.group, spacings=self.spacings, sliced=self.sliced
        )
        if self.direction == "forward":
            emitter.inexact = emitter.narrow = self._rounded_alone(roots)
            return emitter
        for part, node in self.plan.intermediate.items():
            emitter.leaves[node] = "intermediate"
            emitter.intermediate_parts[node] = part
        for index, node in enumerate(self.plan.stats):
            emitter.leaves.setdefault(node, f"stats {index}")
        # In rows of one column, some values are equal that are only close in longer rows.
        if self.structure.cols > 1:
            used = reachable(roots, emitter.leaves.__contains__)
            compared = filter(lambda node: node.op in _OF_EXACT, used)
            exact = [*itertools.chain(*map(computed_of, compared)), *self.plan.stats]
            emitter.inexact = used - reachable(exact)
        return emitter

    def _rounded_alone(self, roots: Iterable[Node]) -> set[Node]:
        """Return the values of a forward that are rounded to 16 bits, returned, and not read."""
        uses = Counter(itertools.chain(*[node.args for node in reachable(roots)]))
        rounded = filter(_is_rounded_to_16_bits, nodes_of(self.structure.results))
        values = [node.args[0] for node in rounded if not uses[node]]
        return set(filter(lambda value: uses[value] == 1, values))

    def _moments_kernel(
        self, written: Sequence[Node], roots: Sequence[Node], stores: Sequence[_Store]
    ) -> Kernel:
        """Return the kernel that passes over whole rows, and writes only numbers of each row.

        Args:
            written: the moments that it writes for the next kernel.
            roots: all values that it computes.
            stores: the stores of the function's results.
        """
        emitter = self._emitter(roots)
        emitter.flat = True
        emit_passes(roots, emitter)
        for index, node in enumerate(written):
            emitter.store_number("moments", index, node)
        for store in stores:
            self._store(emitter, store)
        return self._assembled(
            emitter, f"{self.direction}_moments_kernel", [], moments=len(written)
        )

    # --- kernels ----------------------------------------------------------------------------------

    def _store(self, emitter: Emitter, store: _Store) -> None:
        if store.operand is None:
            emitter.store_number(store.kind, store.index, *store.nodes)
        else:
            emitter.store(store.kind, store.index, store.operand, store.part, store.nodes)

    def _kernel(self, emitter: Emitter, stores: Sequence[_Store], sums: Sequence[_Sum]) -> Kernel:
        """Return the kernel of whole rows, or of one tile of columns in each program."""
        if self._holds_parts():
            return self._held_kernel(emitter, stores, sums)
        # Without sums over rows a program has one tile of rows, and no loop.
        emitter.flat = not sums or not self._has_room(emitter, stores, sums)
        # Numbers of rows are stored as soon as they are computed: see `Emitter.stores_after`.
        for store in itertools.filterfalse(self._is_wide, stores):
            write = functools.partial(self._store, emitter, store)
            emitter.stores_after.setdefault(store.nodes[0], []).append(write)
        for store in stores:
            for node in store.nodes:
                emitter.value(node)
            if self._is_wide(store):
                self._store(emitter, store)
        for slot, (_, _, node) in enumerate(sums):
            value = emitter.wide(node)
            # Rows beyond the last are loaded as zeros. A value computed from zeros may be anything,
            # so these rows are masked.
            if self.tiled:
                emitter.lines.append(f"sum{slot} += {of_rows('sum_of_rows', value, grouped=False)}")
            else:
                emitter.lines.append(f"sum{slot} += tl.where(in_rows, {value}, 0)")
        slots = [(index, part) for index, part, _ in sums]
        return self._assembled(emitter, self._name(), slots)

    def _holds_parts(self) -> bool:
        """Whether a program holds a row in tiles side by side: see `phases`."""
        if self.sliced:
            return self.sliced == "ragged" and bool(self.structure.columns)
        return self.structure.cols > WIDEST_TILE and not self.tiled

    def _held_kernel(
        self, emitter: Emitter, stores: Sequence[_Store], sums: Sequence[_Sum]
    ) -> Kernel:
        """Return the kernel of rows, or shares of them, in tiles side by side: see `phases`."""
        writes: list[tuple[tuple[Node, ...], Callable[[], None]]] = []
        for store in stores:
            write = functools.partial(self._store, emitter, store)
            if self._is_wide(store):
                writes.append((store.nodes, write))
            else:  # see `Emitter.stores_after`
                emitter.stores_after.setdefault(store.nodes[0], []).append(write)
        stored = [store.nodes for store in stores]
        late = self._late_sums(emitter, _roots(stores, []), sums)
        # Programs that share rows would each have a part of these numbers.
        sums = [(index, part, late.get(node, node)) for index, part, node in sums]
        summed = [node for _, _, node in sums]
        exchanges = self.direction == "backward" and not self.sliced
        phases = phases_of(stored, summed, emitter, exchanges=exchanges)
        body = held_body(
            emitter, phases, writes, sums, _roots(stores, []), direction=self.direction
        )
        return self._finished(
            emitter,
            self._name(),
            body,
            [(index, part) for index, part, _ in sums],
            held=True,
            reductions=len(phases.reductions),
            exchanged=len(phases.exchanged),
            shares=phases.can_share and not (self.group or late or self.sliced),
            loops=bool(sums or phases.exchanged or self.sliced),
        )

    def _late_sums(
        self, emitter: Emitter, stored: Sequence[Node], sums: Sequence[_Sum]
    ) -> dict[Node, Node]:
        """Return the sums over columns that only sums over rows need, with what they sum.

        For example, the gradient of a number is summed over columns and rows. Its lanes are summed
        once after all rows, not for each row. This is for rows that one program holds.
        """
        if self.structure.cols > _LONGEST_WITH_LATE_SUMS:
            return {}
        summed = [node for _, _, node in sums]
        others = [*stored, *itertools.chain(*[node.args for node in summed])]
        needed = reachable(others, emitter.leaves.__contains__)
        return {
            node: node.args[0]
            for node in summed
            if node.op == "sum"
            and emitter.is_reduced(node)
            and not emitter.has_blocks(node.args[0])
            and node not in needed
        }

    def _has_room(self, emitter: Emitter, stores: Sequence[_Store], sums: Sequence[_Sum]) -> bool:
        """Whether registers hold vectors from tile to tile, beside the sums and a tile's inputs."""
        # A tile of columns is narrow, whatever the row's length is.
        if self.tiled:
            return True
        read = 0
        computed = reachable(_roots(stores, sums), emitter.leaves.__contains__)
        for node in filter(emitter.has_columns, computed):
            read += node in emitter.leaves or node.op in ("input", "cotangent")
        return (read + len(sums)) * block_holding(self.structure.cols) < _REGISTERS

    def _assembled(
        self, emitter: Emitter, name: str, sums: Sequence[tuple[int, Part]], moments: int = 0
    ) -> Kernel:
        """Return the kernel of an emitter's lines.

        Axis 0 of the grid is tiles of rows, or of rows and columns: see `program_lines`. Axis 1 is
        groups of rows, or 1.
        """
        by_row = name.endswith("moments_kernel")
        inputs = self.structure.inputs
        is_tiled = self.tiled and not by_row
        body = list(GROUP_LINES) if self.group else []
        if is_tiled:
            body.append("COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N")
        if self.sliced:  # the programs are arguments
            if emitter.addresses.spreads:
                body.append(f"{SPREAD} = tl.zeros((ROWS, 1), tl.int32)")
        else:
            body += program_lines(shares=is_tiled)
        if not by_row:
            body += self._column_lines(emitter)
        body += emitter.invariant
        # The lanes of narrow tiles have different rows: what they add up is summed in the end.
        rows = "1" if self.tiled else "ROWS"
        for slot, (index, _) in enumerate(sums):
            columns = "BLOCK_N" if self.structure.has_columns(inputs[index]) else "1"
            body.append(f"sum{slot} = tl.zeros(({rows}, {columns}), ACC)")
        tile_lines = emitter.addresses.row_lines()
        if not by_row:  # in a loop over tiles of columns the mask is one of each tile
            tile_lines.append(MASK)
        tile_lines += emitter.lines
        if sums:
            # Programs that sum over rows take several tiles, so that there are few partial sums.
            joins = emitter.addresses.joins
            rows_of_slice = "ROWS // BLOCK_K" if joins else "ROWS"
            body.append(f"tiles = tl.cdiv(M, {rows_of_slice}).to(tl.int32)")
            body.append(_TILES)
            body += indented(tile_lines)
            total = _SUM_OF_SLICES if joins else _SUM_OF_ROWS
            body += [f"sum{n} = {total.format(f'sum{n}')}" for n in range(len(sums))]
            body.append(partial_row_line(bool(self.group)))
            body += stores_of_sums(emitter.addresses, sums)
        elif self.sliced == "ragged":
            body.append("tiles = tl.cdiv(M, ROWS).to(tl.int32)")
            body.append(_TILES)
            body += indented(tile_lines)
        else:
            body += ["tile = program", *tile_lines]
        return self._finished(
            emitter,
            name,
            body,
            sums,
            tiled=is_tiled,
            moments=moments,
            loops=bool(sums) or self.sliced == "ragged",
        )

    def _finished(
        self,
        emitter: Emitter,
        name: str,
        body: Sequence[str],
        sums: Sequence[tuple[int, Part]],
        **properties: Any,
    ) -> Kernel:
        """Return the kernel of all lines but the first; the properties are those of `Kernel`."""
        arguments = self._ordered_arguments(emitter, has_sums=bool(sums))
        first = [] if self.sliced else first_lines(drops=_drops(arguments))
        constants: tuple[str, ...] = _CONSTANTS
        if emitter.addresses.joins:
            constants += ("BLOCK_K",)
        if properties.get("held"):
            constants += ("PARTS", "EXACT") if self.sliced else ("PARTS",)
        if properties.get("exchanged"):  # see `phases`
            constants += ("EXCHANGE",)
        if emitter.addresses.divides:
            constants += ("INDEX",)
        write = slice_source if self.sliced else source_of
        return Kernel(
            name,
            write(name, arguments, constants, [*first, *body]),
            tuple(arguments),
            group=self.group,
            sums=tuple(sums),
            written=tuple(self.written),
            moved=tuple(emitter.moved),
            live=emitter.live() + len(sums),
            read=tuple(emitter.read),
            instructions=emitter.instructions(),
            drops=_drops(arguments),
            divides=emitter.addresses.divides,
            joins=emitter.addresses.joins,
            contracts=self.direction == "backward" and self._may_contract(emitter.computed),
            stats=len(self.plan.stats),
            block=self.structure.block,
            **properties,
        )

    def _may_contract(self, computed: set[Node]) -> bool:
        """Whether a product and a sum of a backward may be one instruction, which rounds once.

        It may not if the backward computes a sum of the forward again, unless the sum's arguments
        are only read: with contracted products the sum would differ from the forward's, and an
        ``x * x - y * y`` of zero would not be zero. A sum that only smooth functions read may
        differ, and so may that of a square and a positive number, which never cancel. And it may
        not if the kernel has an operator in `_OF_EXACT`.
        """
        again = reachable(nodes_of(self.structure.results)) & computed
        sums = {node for node in again if _sums_computed(node, computed)}
        readers = [node for node in computed if node.op not in _SMOOTH]
        read = itertools.chain(*[map(_with_line, node.args) for node in readers])
        return sums.isdisjoint(read) and _OF_EXACT.isdisjoint([node.op for node in computed])

    def _ordered_arguments(self, emitter: Emitter, *, has_sums: bool) -> list[Argument]:
        """Return a kernel's arguments: tensors first, then the others by kind, then the sizes."""

        def order(argument: Argument) -> tuple[int, str, int]:
            kind = argument.kind
            rank = _ORDER.index(kind) if kind in _ORDER else len(_ORDER)
            return rank, kind, argument.index

        arguments = list(emitter.addresses.arguments.values())
        if has_sums:
            arguments.append(Argument("partials", "partials"))
        arguments.sort(key=order)
        if _drops(arguments):
            arguments += [Argument("seed", "seed"), Argument("offset", "offset")]
        arguments.append(Argument("M", "rows"))
        if self.group:
            arguments.append(Argument("groups", "groups"))
        return arguments

    def _column_lines(self, emitter: Emitter) -> list[str]:
        """Return the lines that compute the columns of a program that has one tile of them."""
        start = "column * BLOCK_N" if self.tiled else "0"
        return [f"start = {start}", *emitter.column_lines()]


# The loop of a program over its tiles of rows. With P programs, program p has the tiles p, p + P,
# p + 2 P, and so on: neighbouring programs read neighbouring rows.
_TILES = "for tile in tl.range(program, tiles, programs, num_stages=STAGES):"
# The sum of a tile over its rows, or over those of each of its slices.
_SUM_OF_ROWS = "tl.sum({}, axis=0, keep_dims=True)"
_SUM_OF_SLICES = "sums_of_slices({}, ROWS, BLOCK_K)"


def _roots(stores: Sequence[_Store], sums: Sequence[_Sum]) -> list[Node]:
    stored = [store.nodes for store in stores]
    return [*itertools.chain(*stored), *[node for _, _, node in sums]]


def _sums_computed(node: Node, computed: set[Node]) -> bool:
    """Whether a value is a sum, or a difference, of values that are not all read."""
    arguments = computed.intersection(map(_with_line, node.args))
    ops = {arg.op for arg in arguments}
    return node.op in ("add", "sub", "sum") and not ops.issubset(_READ) and not cannot_cancel(node)


def _is_rounded_to_16_bits(node: Node) -> bool:
    return node.op == "round" and node.attrs[0].itemsize == 2


def _with_line(node: Node) -> Node:
    """Return the value whose line a kernel has for this one.

    Operators that change only gradients have no line of their own.
    """
    while node.op in SAME_VALUE:
        node = node.args[0]
    return node


def _drops(arguments: Iterable[Argument]) -> bool:
    """Whether a kernel has dropout, and with it random numbers."""
    return any(argument.kind == "threshold" for argument in arguments)
