"""Triton kernels of a row-wise function, as source.

A program that holds whole rows does all in one kernel each way. Longer rows take two: one passes over each row, tile by
tile, and writes the numbers that reductions give (*moments*); the other has a tile of columns in each program. Sums over
rows are held by the programs of a backward, and added up by one more kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core.tuning_key import block_holding
from .emitting import Argument, Emitter, offsets_along, place_of, strides_of, whole
from .errors import NotRowwiseError
from .ir import REDUCTIONS, Node, computed_of, reachable, topological
from .planning import Plan
from .structure import Operand, Part, Structure

__all__ = ["Kernel", "backward_kernels", "forward_kernels", "reduce_kernel"]

# Of a multiprocessor's registers, those that vectors, sums and what a tile reads may take.
_REGISTERS = 49152
# Elements of all values at a time that a backward's program may have: with more than twice a multiprocessor's registers
# most are spilled, and pass through memory more often than the rows that tiles read twice.
_MOST_LIVE = 150_000
_CONSTANTS = ("ACC", "N", "BLOCK_N", "ROWS", "VECTOR", "STAGES", "OVERLAP", "PERSISTENT")
_ORDER = ("input", "cotangent", "intermediate", "stats", "moments", "output", "gradient", "partials")


@dataclass(frozen=True)
class Kernel:
    """A kernel's source.

    Attributes:
        name: of its function.
        source: of it.
        arguments: in order.
        grouped: whether axis 1 of the grid is the groups of rows.
        tiled: whether axis 1 of the grid is tiles of columns.
        sums: the inputs whose gradients are sums over rows, with their parts, in the order of their slots.
        written: the inputs whose gradients are written whole and are for the caller to sum.
        moved: the dtypes of the whole tensors, or of parts of all rows, that it reads and writes.
        moments: how many numbers of each row it writes for the next kernel.
        live: how many values of a tile exist at a time, sums over rows and vectors among them.
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
    """Something that a kernel writes: a part of a tensor, or with ``kind`` "stats" a number of each row."""

    kind: str
    place: int
    operand: Operand | None
    part: Part
    node: Node


def forward_kernels(plan: Plan, acc: torch.dtype, *, grouped: bool, tiled: bool, saves: bool) -> list[Kernel]:
    """The kernels of a forward; ``saves``: also what a backward reads."""
    structure = plan.structure
    stores = [_Store("output", number, operand, part, node)
              for number, (operand, parts) in enumerate(zip(structure.outputs, structure.results, strict=True))
              for part, node in parts.items()]  # fmt: skip
    if saves:
        if plan.intermediate_output < 0:
            stores += [
                _Store("intermediate", 0, plan.intermediate_operand, part, node)
                for part, node in plan.intermediate.items()
            ]
        stores += [_Store("stats", place, None, (), node) for place, node in enumerate(plan.stats)]
    return _Writer(plan, acc, "forward", grouped, tiled).kernels(stores, [])


def backward_kernels(plan: Plan, acc: torch.dtype, *, grouped: bool, tiled: bool, given: Sequence[int],
                     wanted: Sequence[int]) -> list[Kernel]:  # fmt: skip
    """The kernels of a backward, for cotangents that are given and gradients that are wanted.

    Rows that a program of the forward holds may be too long for one of the backward, which has more values at a time.
    """
    kernels = _backward_kernels(plan, acc, grouped=grouped, tiled=tiled, given=given, wanted=wanted)
    if not tiled and max(kernel.live for kernel in kernels) * block_holding(plan.structure.cols) > _MOST_LIVE:
        try:
            return _backward_kernels(plan, acc, grouped=False, tiled=True, given=given, wanted=wanted)
        except NotRowwiseError:  # no kernel of long rows computes it
            return kernels
    return kernels


def _backward_kernels(plan: Plan, acc: torch.dtype, *, grouped: bool, tiled: bool, given: Sequence[int],
                      wanted: Sequence[int]) -> list[Kernel]:  # fmt: skip
    structure, writer = plan.structure, _Writer(plan, acc, "backward", grouped, tiled)
    found = plan.gradients(given, wanted)
    stores: list[_Store] = []
    sums: list[tuple[int, Part, Node]] = []
    for place in wanted:
        operand = structure.inputs[place]
        how = _leaves_as(structure, operand, grouped)
        for part in structure.parts(operand):
            node = found.get(place, {}).get(part) or structure.graph.const(0.0)
            if how == "sum":
                sums.append((place, part, node))
            else:
                out = operand if how == "store" else whole(structure, operand, acc)
                writer.written |= {} if how == "store" else {place: None}
                stores.append(_Store("gradient", place, out, part, node))
    return writer.kernels(stores, sums)


def _leaves_as(structure: Structure, operand: Operand, grouped: bool) -> str:
    """How an input's gradient leaves the kernel: stored, summed over rows, or whole for the caller to sum."""
    columns = set(operand.axes) & set(structure.columns)
    place = place_of(structure, operand, grouped)
    if columns and columns != set(structure.columns):
        return "whole"
    if place == "indexed":
        return "store" if set(structure.rows) <= set(operand.axes) else "whole"
    return "store" if place == "rows" else "sum"


class _Writer:
    def __init__(self, plan: Plan, acc: torch.dtype, which: str, grouped: bool, tiled: bool) -> None:
        self.plan, self.acc, self.which, self.grouped, self.tiled = plan, acc, which, grouped and not tiled, tiled
        self.structure = plan.structure
        self.written: dict[int, None] = {}

    def kernels(self, stores: Sequence[_Store], sums: Sequence[tuple[int, Part, Node]]) -> list[Kernel]:
        """In the order in which they run."""
        if not self.tiled:
            return [self._kernel(self._emitter(), stores, sums, self.which)]
        narrow = [store for store in stores if not self._is_wide(store)]
        wide = [store for store in stores if self._is_wide(store)]
        numbers = self._moments([*[store.node for store in wide], *[node for _, _, node in sums]])
        found = []
        if numbers or narrow:
            found.append(self._moments_kernel(numbers if wide or sums else [], numbers, narrow))
        if wide or sums:
            emitter = self._emitter()
            for place, node in enumerate(numbers):
                emitter.leaves.setdefault(node, f"moments {place}")
            found.append(self._kernel(emitter, wide, sums, self.which))
        return found

    def _is_wide(self, store: _Store) -> bool:
        return store.operand is not None and bool(set(store.operand.axes) & set(self.structure.columns))

    def _emitter(self) -> Emitter:
        """With what a backward reads instead of computing it."""
        emitter = Emitter(self.plan, self.acc, grouped=self.grouped)
        if self.which == "backward":
            for part, node in self.plan.intermediate.items():
                emitter.leaves[node] = "intermediate"
                emitter.intermediate_parts[node] = part
            for place, node in enumerate(self.plan.stats):
                emitter.leaves.setdefault(node, f"stats {place}")
        return emitter

    # --- long rows ----------------------------------------------------------------------------------------------------

    def _moments(self, roots: Sequence[Node]) -> list[Node]:
        """The numbers of rows that reductions give, of those that whole values are computed of."""
        emitter = self._emitter()
        used = reachable(roots, lambda node: node in emitter.leaves)
        todo = [arg for node in used if node not in emitter.leaves and emitter.has_columns(node) for arg in node.args]
        found: set[Node] = set()
        for node in (*roots, *todo):
            self._numbers(node, emitter, found)
        return [node for node in topological(roots) if node in found & used]

    def _numbers(self, node: Node, emitter: Emitter, found: set[Node]) -> None:
        """The numbers that one of a row is computed of and that memory of floats holds, itself if it does."""
        if node in emitter.leaves or emitter.has_columns(node) or not self._reduces(node, emitter):
            return
        if node.kind == "float" or (node.op in REDUCTIONS and _counts_columns(node)):
            found.add(node)
        elif node.op in REDUCTIONS:
            raise NotRowwiseError("sums of whole numbers along rows that are longer than a program holds")
        else:
            for arg in node.args:
                self._numbers(arg, emitter, found)

    def _reduces(self, node: Node, emitter: Emitter) -> bool:
        return any(inner.op in REDUCTIONS and inner not in emitter.leaves
                   for inner in reachable([node], lambda inner: inner in emitter.leaves))  # fmt: skip

    def _moments_kernel(self, written: Sequence[Node], numbers: Sequence[Node], stores: Sequence[_Store]) -> Kernel:
        emitter = self._emitter()
        emitter.flat = True
        levels = _levels([*numbers, *[store.node for store in stores]], emitter)
        for level in sorted(set(levels.values())):
            self._pass(emitter, [node for node, found in levels.items() if found == level])
        for place, node in enumerate(written):
            emitter.store_number("moments", place, node)
        for store in stores:
            self._store(emitter, store)
        return self._assembled(emitter, f"{self.which}_moments_kernel", [], moments=len(written))

    def _pass(self, emitter: Emitter, nodes: Sequence[Node]) -> None:
        """Once over the columns of the rows, for reductions whose own needs are there: full tiles, a last one, the sum."""
        names = {node: emitter.free("total" if node.op != "amax" else "largest") for node in nodes}
        online = {node: largest for node in nodes for largest in nodes if _is_online(node, largest)}
        for node, name in names.items():
            kind, start = ("tl.int64", _LEAST_OF["int"]) if node.kind == "int" else ("ACC", _LEAST_OF["float"])
            columns = "1" if node in online.values() else "BLOCK_N"  # others are reduced lane by lane until the end
            start = start if node.op == "amax" else "0"
            emitter.lines.append(f"{name} = tl.full((ROWS, {columns}), {start}, {kind})")
        for full in (True, False):
            emitter.open_columns(whole=full)
            self._accumulate(emitter, names, online)
            emitter.close_columns(*(_FULL_TILES if full else _LAST_TILE))
        for node, name in names.items():
            if node not in online.values():
                emitter.lines.append(f"{name} = {emitter.reduced(node, name)}")
        emitter.named |= names

    def _accumulate(self, emitter: Emitter, names: dict[Node, str], online: dict[Node, Node]) -> None:
        """The lines that take a tile into what is reduced."""
        body = emitter.body
        assert body is not None
        for node in sorted(names, key=lambda node: node in online):
            name = names[node]
            if node in online.values():
                self._online(emitter, body, node, [(names[total], name) for total in online if online[total] is node])
            elif node in online:
                value = f"tl.exp({emitter.value(node.args[0].args[0].args[0])} - {names[online[node]]}_base)"
                body.append(f"{name} += {value if emitter.whole else f'tl.where(in_cols, {value}, 0)'}")
            elif node.op == "amax":
                value = emitter.reducible(node)
                body.append(f"{name} = tl.maximum({name}, {value}, propagate_nan=tl.PropagateNan.ALL)")
            else:
                body.append(f"{name} += {emitter.reducible(node)}")

    def _online(self, emitter: Emitter, body: list[str], node: Node, totals: Sequence[tuple[str, str]]) -> None:
        """The lines of a maximum whose sums of exponentials are taken in the same pass, and follow it down.

        Milakov and Gimelshein 2018, arXiv:1805.02867. Nothing is taken from an infinite maximum: rows may begin masked.
        """
        name = totals[0][1]
        later, base = emitter.free("next"), f"{name}_base"
        body.append(
            f"{later} = tl.maximum({name}, {emitter.reduced(node, emitter.reducible(node))}, propagate_nan=tl.PropagateNan.ALL)"
        )
        body.append(f'{base} = tl.where({later} == float("-inf"), 0.0, {later})')
        body.extend(f"{total} *= tl.exp({name} - {base})" for total, _ in totals)
        body.append(f"{name} = {later}")

    # --- kernels ------------------------------------------------------------------------------------------------------

    def _store(self, emitter: Emitter, store: _Store) -> None:
        if store.operand is None:
            emitter.store_number(store.kind, store.place, store.node)
        else:
            emitter.store(store.kind, store.place, store.operand, store.part, store.node)

    def _kernel(self, emitter: Emitter, stores: Sequence[_Store], sums: Sequence[tuple[int, Part, Node]],
                name: str) -> Kernel:  # fmt: skip
        emitter.flat = not sums or not self._has_room(emitter, stores, sums)
        for store in stores:
            if not self._is_wide(store):
                emitter.behind.setdefault(store.node, []).append(functools.partial(self._store, emitter, store))
        for store in stores:
            emitter.value(store.node)
            if self._is_wide(store):
                self._store(emitter, store)
        for slot, (_, _, node) in enumerate(sums):
            value = emitter.value(node)
            if node.op != "const":  # a cotangent reaches the input
                emitter.lines.append(f"sum{slot} += tl.sum(tl.where(in_rows, {value}, 0), axis=0, keep_dims=True)")
        return self._assembled(emitter, f"{name}_kernel", [(place, part) for place, part, _ in sums])

    def _has_room(self, emitter: Emitter, stores: Sequence[_Store], sums: Sequence[tuple[int, Part, Node]]) -> bool:
        """Whether vectors stay in registers from tile to tile, beside the sums and what a tile reads."""
        roots = [*[store.node for store in stores], *[node for _, _, node in sums]]
        used = reachable(roots, lambda node: node in emitter.leaves)
        read = [node for node in used if emitter.has_columns(node) and
                (node in emitter.leaves or node.op in ("input", "cotangent"))]  # fmt: skip
        return self.tiled or (len(read) + len(sums)) * block_holding(self.structure.cols) < _REGISTERS

    def _assembled(self, emitter: Emitter, name: str, sums: Sequence[tuple[int, Part]], moments: int = 0) -> Kernel:
        by_row = name.endswith("moments_kernel")
        listed = sorted([*emitter.arguments.values(), *([Argument("partials", "partials")] if sums else [])],
                        key=lambda a: (_ORDER.index(a.kind) if a.kind in _ORDER else len(_ORDER), a.kind, a.place))  # fmt: skip
        drops = any(argument.kind == "threshold" for argument in listed)
        listed += [Argument("seed", "seed"), Argument("offset", "offset")] if drops else []
        listed += [Argument("M", "rows"), *([Argument("groups", "groups")] if self.grouped else [])]
        body = ["await_predecessor(OVERLAP)", *(["seed, offset = load_seed(seed, offset)"] if drops else [])]
        if not by_row:
            body.append("start = tl.program_id(1) * BLOCK_N" if self.tiled else "start = 0")
            body += ["cols = start + tl.arange(0, BLOCK_N)[None, :]", "in_cols = cols < N"]
        if self.grouped:  # the last programs may have none: see `core.launch`
            body.append("group = (tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)).to(tl.int64)")
            # Of a block and a number Triton's interpreter makes no boolean mask, so the number is a block too.
            body.append("in_groups = tl.full((1, 1), group, tl.int64) < groups")
            body.append("in_cols = in_cols & in_groups")
        body += emitter.invariant
        body += [f"sum{slot} = tl.zeros((1, {'BLOCK_N' if self._has_columns(place) else '1'}), ACC)"
                 for slot, (place, _) in enumerate(sums)]  # fmt: skip
        head = ["places = rows_of(tile, ROWS)",
                f"in_rows = (places < M)[:, None]{' & in_groups' if self.grouped else ''}",
                "rows = (group * M + places)[:, None]" if self.grouped else "rows = places[:, None]"]  # fmt: skip
        head += [] if by_row else ["mask = in_rows & in_cols"]
        lines = [*head, *emitter.indices(), *emitter.lines]
        if sums:
            body += ["tiles = tl.cdiv(M, ROWS).to(tl.int32)",
                     "for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):",
                     *[f"    {line}" for line in lines]]  # fmt: skip
        else:
            body += ["tile = tl.program_id(0)", *lines]
        body += self._partials(sums)
        return Kernel(name, _source(name, listed, _CONSTANTS, body), tuple(listed), self.grouped, self.tiled and not by_row,
                      tuple(sums), tuple(self.written), tuple(emitter.moved), moments,
                      emitter.live() + len(sums))  # fmt: skip

    def _has_columns(self, place: int) -> bool:
        return bool(set(self.structure.inputs[place].axes) & set(self.structure.columns))

    def _partials(self, sums: Sequence[tuple[int, Part]]) -> list[str]:
        """The lines that store what a program has summed."""
        out = ["program = tl.program_id(0).to(tl.int64)" + (" + group * tl.num_programs(0)" if self.grouped else "")]
        for slot, (place, _) in enumerate(sums):
            mask = "in_cols" if self._has_columns(place) else "in_cols & (cols < 1)"
            out.append(f"tl.store(partials + (program * {len(sums)} + {slot}) * N + cols, sum{slot}, mask={mask})")
        return out if sums else []


# How a loop over whole tiles of columns begins, and what is left behind it: one tile, of fewer columns, or none. No kernel
# with such a loop has groups, which other masks would have to keep to.
_COLUMNS = "cols = start + tl.arange(0, BLOCK_N)[None, :]"
_FULL_TILES = ("for start in tl.range(0, N // BLOCK_N * BLOCK_N, BLOCK_N, num_stages=STAGES):", _COLUMNS)
_LAST_TILE = ("if N % BLOCK_N:", "start = N // BLOCK_N * BLOCK_N", _COLUMNS, "in_cols = cols < N",
              "mask = in_rows & in_cols")  # fmt: skip
_LEAST_OF = {"int": str(-(2**63)), "float": 'float("-inf")'}


def _levels(roots: Sequence[Node], emitter: Emitter) -> dict[Node, int]:
    """Of each reduction of whole rows, how many passes over the rows come before its own."""
    levels: dict[Node, int] = {}
    found: dict[Node, int] = {}
    used = reachable(roots, lambda node: node in emitter.leaves)
    for node in topological(roots):
        if node not in used:
            continue
        level = 0 if node in emitter.leaves else max([levels[arg] for arg in computed_of(node)], default=0)
        if node.op in REDUCTIONS and emitter.is_reduced(node):
            online = next((other for other in found if _is_online(node, other)), None)
            found[node] = level if online is None else found[online]
            level = found[node] + 1
        levels[node] = level
    return found


def _counts_columns(node: Node) -> bool:
    """Whether a reduction gives no whole number beyond the count of columns, as of `any` and `argmax`: fp32 holds it."""
    if node.op == "sum":
        return node.args[0].op == "cast" and node.args[0].args[0].kind == "bool"
    todo = list(node.args)
    while todo:
        node = todo.pop()
        if node.kind == "bool" or node.op in ("const", "iota"):
            continue
        if node.op not in ("cast", "where", "neg") or any(arg.kind == "float" for arg in node.args):
            return False
        todo += node.args
    return True


def _is_online(total: Node, largest: Node) -> bool:
    """Whether this is the sum of the exponentials of a row less its largest element: both come of one pass."""
    if total.op != "sum" or largest.op != "amax" or total.args[0].op != "exp":
        return False
    shifted = total.args[0].args[0]
    if shifted.op != "sub" or shifted.args[0] is not largest.args[0] or total.attrs[0] != largest.attrs[0]:
        return False
    by = shifted.args[1]
    return (by.args[0] if by.op == "constant_to_gradients" else by) is largest


def _source(name: str, arguments: Sequence[Argument], constants: Sequence[str], body: Sequence[str]) -> str:
    fixed = [a.name for a in arguments if a.kind in ("seed", "offset", "rows", "chunks", "programs", "groups")]
    lines = [f"@triton.jit(do_not_specialize={fixed!r})", f"def {name}("]
    lines += [f"    {argument.name}," for argument in arguments]
    lines += [f"    {constant}: tl.constexpr," for constant in constants]
    return "\n".join([*lines, "):", *[f"    {line}" for line in body]]) + "\n"


def reduce_kernel(plan: Plan, kernel: Kernel) -> Kernel:
    """The kernel that adds up what the programs of a backward have summed: axis 1 of the grid is slots and groups."""
    structure, slots = plan.structure, len(kernel.sums)
    places = dict.fromkeys(place for place, _ in kernel.sums)
    arguments = [Argument("partials", "partials"), *[Argument(f"grad{place}", "gradient", place) for place in places],
                 Argument("chunks", "chunks"), Argument("programs", "programs")]  # fmt: skip
    grouped, stores = [], list[str]()
    for slot, (place, part) in enumerate(kernel.sums):
        operand = structure.inputs[place]
        strides, size = strides_of(structure, operand)
        columns = offsets_along(structure, strides)
        in_group = place_of(structure, operand, kernel.grouped) == "group"
        terms = [f"grad{place}", columns or "cols"]
        terms += [f"group * {size}"] if in_group else []
        terms.append(str(sum(strides[axis] * at for axis, at in part)))
        mask = f"(cols < {'N' if columns else 1}) & (in_group {'< programs // chunks' if in_group else '== 0'})"
        stores += [f"if slot == {slot}:",
                   f"    tl.store({' + '.join(terms)}, total.to(grad{place}.dtype.element_ty), mask={mask})"]  # fmt: skip
        grouped += [slot] if in_group else []
    body = [
        "await_predecessor(OVERLAP)",
        "place = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)",
        f"slot = place % {slots}",
        f"group = (place // {slots}).to(tl.int64)",
        "in_group = tl.full((BLOCK_N,), group, tl.int64)",
        "cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)",
        f"grouped = {' | '.join([f'(slot == {slot})' for slot in grouped]) or 'slot < 0'}",
        "first = tl.where(grouped, group * chunks, 0)",
        "count = tl.where(grouped, tl.minimum(chunks, programs - first), tl.where(group == 0, programs, 0))",
        "sums = tl.zeros((ROWS, BLOCK_N), ACC)",
        "for start in range(0, count, ROWS):",
        "    part = start + tl.arange(0, ROWS)",
        f"    at = ((first + part) * {slots} + slot)[:, None] * N + cols[None, :]",
        "    sums += tl.load(partials + at, mask=(part < count)[:, None] & (cols < N)[None, :], other=0.0)",
        "total = tl.sum(sums, axis=0)",
        *stores,
    ]
    source = _source("reduce_kernel", arguments, ("ACC", "N", "BLOCK_N", "ROWS", "OVERLAP"), body)
    return Kernel("reduce_kernel", source, tuple(arguments), kernel.grouped, sums=kernel.sums)
