"""Choice of what a row-wise function saves for its backward.

It moves the fewest bytes, forward and backward together. The numbers of a row (a mean, a maximum)
that a backward needs are always saved. Beside them the function saves at most one whole tensor of
its own. Without one the backward reads inputs and computes the rest again.

A tensor that is saved or returned is rounded to its dtype, and the forward continues from the
rounded one, so that the backward has the forward's values. Nothing here depends on what requires a
gradient: training and inference compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from .derivative import cotangent, gradients
from .errors import NotRowwiseError
from .ir import REDUCTIONS, Graph, Node, derived_of, reachable, topological, value_of
from .structure import Operand, Part, Structure, nodes_of, within, without

__all__ = ["Alternative", "Plan", "planned"]

Parts = Mapping[Part, Node]


@dataclass(frozen=True)
class Alternative:
    """One choice of what is saved.

    Attributes:
        name: of the tensor; "" for none.
        moved: bytes that a row moves, forward and backward.
        held: bytes of a row that are saved for the backward, inputs included, outputs excluded.
        operators: how many the backward computes.
    """

    name: str
    moved: int
    held: int
    operators: int


# An alternative with the parts and the dtype of the tensor that it saves; {} and None for none.
_Candidate = tuple[Alternative, Parts, torch.dtype | None]


@dataclass(frozen=True, eq=False)
class Plan:
    """A row-wise function, with what it saves.

    Attributes:
        structure: with rounded outputs.
        intermediate: the tensor of its own that is saved, by part; empty for none.
        intermediate_operand: its dtype, dimensions and name.
        intermediate_output: the index of the output that it is; -1 if it is none of them.
        stats: the numbers of each row that are saved.
        saved_inputs: the indices of the inputs that a backward reads.
        alternatives: what else could have been saved, the best first.
        differentiable: the indices of the inputs that have gradients.
    """

    structure: Structure
    intermediate: Parts
    intermediate_operand: Operand | None
    intermediate_output: int
    stats: tuple[Node, ...]
    saved_inputs: tuple[int, ...]
    alternatives: tuple[Alternative, ...]
    differentiable: tuple[int, ...]

    def gradients(self, given: Iterable[int], wanted: Iterable[int]) -> dict[int, dict[Part, Node]]:
        """Return the gradients of inputs, by part, from those of outputs.

        The intermediate counts as an output after the others.
        """
        return gradients(self.structure, seeds(self, given), tuple(wanted))


def seeds(plan: Plan, given: Iterable[int]) -> dict[Node, Node]:
    """Return the cotangents of the nodes that are outputs."""
    structure = plan.structure
    cotangents: dict[Node, Node] = {}
    for number in given:
        is_output = number < len(structure.results)
        results = structure.results[number] if is_output else plan.intermediate
        for part, node in results.items():
            if node.kind != "float":
                continue
            seed = _cotangent(plan, number, part)
            # A value may be returned twice.
            if node in cotangents:
                seed = structure.graph.binary("add", cotangents[node], seed)
            cotangents[node] = seed
    return cotangents


def _cotangent(plan: Plan, number: int, part: Part) -> Node:
    structure = plan.structure
    if number < len(structure.outputs):
        return cotangent(structure, number, part)
    assert plan.intermediate_operand is not None
    axes = without(plan.intermediate_operand.axes, structure.unrolled)
    return structure.graph.make("cotangent", attrs=(number, part), axes=axes, kind="float")


def planned(structure: Structure, *, memory: bool = False, kept: Collection[int] = ()) -> Plan:
    """Return the plan of a function.

    Args:
        structure: of it.
        memory: whether a byte that is saved counts as much as one that is moved.
        kept: the indices of inputs that others save: to save these, too, takes no memory.
    """
    structure = _rounded(*_separate_dtypes(structure))
    differentiable = []
    for index, operand in enumerate(structure.inputs):
        if operand.kind == "float" and structure.used[index]:
            differentiable.append(index)
    bare = Plan(structure, {}, None, -1, (), (), (), tuple(differentiable))
    numbers = range(len(structure.outputs))
    _check_reductions(structure, nodes_of(bare.gradients(numbers, differentiable).values()))
    counted = [i for i in differentiable if _is_counted(structure, structure.inputs[i])]
    roots = nodes_of(bare.gradients(numbers, counted).values())
    candidates = _candidates(structure, roots, kept)

    def rank(candidate: _Candidate) -> tuple[int, int, int]:
        choice, parts, dtype = candidate
        # An output is in memory anyway while the forward needs it. To save it keeps it alive for
        # the backward.
        lives = choice.held + (_returned(structure, parts, dtype) if memory else 0)
        return choice.moved + memory * choice.held, lives, choice.operators

    candidates.sort(key=rank)
    _, parts, dtype = candidates[0]
    alternatives = tuple(dict.fromkeys([alternative for alternative, _, _ in candidates]))
    return _completed(bare, parts, dtype, alternatives)


def _candidates(structure: Structure, roots: list[Node], kept: Collection[int]) -> list[_Candidate]:
    """Return all choices of what is saved: nothing, or one whole tensor of the forward."""
    forward = reachable(nodes_of(structure.results))
    nothing = Alternative("", *_cost(structure, forward, roots, {}, None, kept))
    candidates: list[_Candidate] = [(nothing, {}, None)]
    for parts, dtype in structure.values:
        if not forward.issuperset(parts.values()):
            continue
        if all(_is_whole(structure, node) for node in parts.values()):
            cost = _cost(structure, forward, roots, parts, dtype, kept)
            alternative = Alternative(_name_of(structure, parts), *cost)
            candidates.append((alternative, parts, dtype))
    return candidates


def _check_reductions(structure: Structure, roots: list[Node]) -> None:
    """Raise if a derivative sums over a part of a row, which no kernel does."""
    columns = set(structure.columns)
    for node in topological(roots):
        if node.op in REDUCTIONS and set(node.attrs[0]) != columns:
            raise NotRowwiseError(
                "its derivative sums over a part of a row. Take rows apart outside, and pass the "
                "parts as arguments of their own"
            )


def _name_of(structure: Structure, parts: Parts) -> str:
    """Return the user's name of a value, or the line that computes it."""
    numbers = [node.number for node in parts.values()]
    line = next((structure.lines[n] for n in numbers if n in structure.lines), 0)
    return _user_name(parts, f"a value of line {line}" if line else "a value")


def _user_name(parts: Parts, default: str) -> str:
    """Return the last name that the user gave to the first named part."""
    for node in parts.values():
        if node.names:
            return node.names[-1]
    return default


def _completed(
    bare: Plan, parts: Parts, dtype: torch.dtype | None, alternatives: tuple[Alternative, ...]
) -> Plan:
    """Return the plan that saves a value: it is rounded, unless it is an output already."""
    structure, operand = bare.structure, None
    output = _output_of(structure, parts)
    if output >= 0:
        parts, operand = structure.results[output], structure.outputs[output]
    elif parts:
        assert dtype is not None
        structure, parts = _with_value_rounded(structure, parts, dtype)
        operand = _operand_of(structure, parts, dtype)
    plan = replace(
        bare,
        structure=structure,
        intermediate=parts,
        intermediate_operand=operand,
        intermediate_output=output,
        alternatives=alternatives,
    )
    given = list(range(len(structure.outputs)))
    if parts and output < 0:
        given.append(len(given))
    roots = nodes_of(plan.gradients(given, bare.differentiable).values())
    intermediate = set(parts.values())
    # For a second derivative the numbers of a row are computed again.
    computed = reachable(roots, lambda node: node in intermediate, derived_of)
    saved = sorted({node.attrs[0] for node in computed if node.op == "input"})
    stats = _stats(structure, roots, intermediate)
    return replace(plan, stats=tuple(stats), saved_inputs=tuple(saved))


def _stats(structure: Structure, roots: list[Node], intermediate: set[Node]) -> list[Node]:
    """Return the numbers of each row that a backward reads.

    It does not read one from which it only needs other numbers.
    """
    forward = reachable(nodes_of(structure.results))
    stats = {node for node in forward if _is_stat(structure, node)}
    reached = reachable(roots, lambda node: node in intermediate or node in stats)
    read = stats & reached
    return [node for node in topological(roots) if node in read]


def _output_of(structure: Structure, parts: Parts) -> int:
    """Return the index of the output that a value is; -1 if it is none."""
    if parts:
        for number, results in enumerate(structure.results):
            if set(results.values()) == set(parts.values()):
                return number
    return -1


# --- what an alternative costs --------------------------------------------------------------------


def _cost(
    structure: Structure,
    forward: set[Node],
    roots: list[Node],
    parts: Parts,
    dtype: torch.dtype | None,
    kept: Collection[int],
) -> tuple[int, int, int]:
    """Return the bytes moved, the bytes held and the operators of a backward, of one row."""

    def is_saved(node: Node) -> bool:
        return node in intermediate or (node in forward and _is_stat(structure, node))

    def size(node: Node) -> int:
        operand: Operand = structure.inputs[node.attrs[0]]
        return operand.dtype.itemsize

    intermediate = set(parts.values())
    reached = reachable(roots, is_saved)
    # Only whole tensors count: numbers of rows, and vectors, are few bytes beside them.
    read = {node for node in reached if node.op == "input" and _is_whole(structure, node)}
    moved = sum([size(node) for node in read])
    held = sum([size(node) for node in read if node.attrs[0] not in kept])
    if parts:
        assert dtype is not None
        own = len(parts) * dtype.itemsize
        moved += own  # the backward reads it
        if not _returned(structure, parts, dtype):
            moved += own  # the forward writes it
            held += own
    operators = sum(bool(node.args) and node not in intermediate for node in reached)
    return moved * structure.cols, held * structure.cols, operators


def _returned(structure: Structure, parts: Parts, dtype: torch.dtype | None) -> int:
    """Return the bytes of a row of a saved value that is one of the outputs; 0 for others."""
    if dtype is None:
        return 0
    nodes = set(parts.values())
    if not any(nodes == set(results.values()) for results in structure.results):
        return 0
    return len(parts) * dtype.itemsize * structure.cols


def _is_whole(structure: Structure, node: Node) -> bool:
    """Whether the value varies along all rows and columns."""
    return node.kind == "float" and len(node.axes) == len(structure.rows) + len(structure.columns)


def _is_counted(structure: Structure, operand: Operand) -> bool:
    """Whether the cost includes an input's gradient.

    It excludes those of inputs that are broadcast along outer rows, or have rows in another order.
    """
    rows = tuple(within(operand.axes, structure.rows))
    return rows == structure.rows[: len(rows)]


def _is_stat(structure: Structure, node: Node) -> bool:
    """Whether this is a number of each row that a reduction gives."""
    if not node.args or node.kind != "float" or node.op in _SAME_VALUE:
        return False
    return node.axes == set(structure.rows) and _has_reduction(node)


# Operators that change only gradients: their argument is the value that is saved.
_SAME_VALUE = ("constant_to_gradients", "detached", "instead", "narrowed")


def _has_reduction(node: Node) -> bool:
    return any(inner.op in REDUCTIONS for inner in reachable([node]))


# --- rounding -------------------------------------------------------------------------------------


def _rounded(structure: Structure, dtypes: Mapping[Node, torch.dtype]) -> Structure:
    """Return the function with values rounded to dtypes, also where other values use them."""
    graph = Graph()

    def change(node: Node, built: Node) -> Node:
        if node not in dtypes:
            return built
        return _round(graph, built, dtypes[node], structure)

    again = rebuilt(graph, change)

    def rebuilt_parts(parts: Parts) -> Parts:
        return {part: again(node) for part, node in parts.items()}

    results = tuple([rebuilt_parts(parts) for parts in structure.results])
    values = tuple([(rebuilt_parts(parts), dtype) for parts, dtype in structure.values])
    lines: dict[int, int] = {}
    for node in list(structure.graph.nodes.values()):
        if node.number in structure.lines:
            lines[again(node).number] = structure.lines[node.number]
    return replace(structure, graph=graph, results=results, values=values, lines=lines)


def _separate_dtypes(structure: Structure) -> tuple[Structure, dict[Node, torch.dtype]]:
    """Return the widest dtype in which each value is returned, and narrower ones as new values."""
    outputs = list(zip(structure.outputs, structure.results, strict=True))
    dtypes: dict[Node, torch.dtype] = {}
    for operand, parts in outputs:
        for node in parts.values():
            known = dtypes.get(node, operand.dtype)
            dtypes[node] = operand.dtype if operand.dtype.itemsize > known.itemsize else known
    results = []
    for operand, parts in outputs:
        result = dict(parts)
        for part, node in parts.items():
            if node.kind == "float" and dtypes[node] != operand.dtype:
                result[part] = structure.graph.make("round", node, attrs=(operand.dtype,))
        results.append(result)
    return replace(structure, results=tuple(results)), dtypes


def _with_value_rounded(
    structure: Structure, parts: Parts, dtype: torch.dtype
) -> tuple[Structure, Parts]:
    """Return the function with a value rounded, and the value in it."""
    index = [value for value, _ in structure.values].index(parts)
    structure = _rounded(structure, dict.fromkeys(parts.values(), dtype))
    return structure, structure.values[index][0]


def _round(graph: Graph, node: Node, dtype: torch.dtype, structure: Structure) -> Node:
    if node.kind != "float":
        return node
    if node.op == "input" and structure.inputs[node.attrs[0]].dtype == dtype:
        return node
    if node.op == "round" and node.attrs[0] == dtype:
        return node
    if node.op == "const":
        return graph.const(float(torch.tensor(value_of(node), dtype=dtype, device="cpu")))
    result = graph.make("round", node, attrs=(dtype,))
    _add_names(result, node)
    return result


def rebuilt(graph: Graph, change: Callable[[Node, Node], Node]) -> Callable[[Node], Node]:
    """Return a function from nodes to those of another graph, as replaced by ``change``.

    ``change`` takes a node and its copy, and returns the copy or another node instead.
    """
    done: dict[Node, Node] = {}

    def again(root: Node) -> Node:
        for node in topological([root]):
            if node not in done:
                args = [done[arg] for arg in node.args]
                built = graph.make(node.op, *args, attrs=node.attrs, axes=node.axes, kind=node.kind)
                _add_names(built, node)
                done[node] = change(node, built)
        return done[root]

    return again


def _add_names(node: Node, other: Node) -> None:
    node.names.extend(name for name in other.names if name not in node.names)


def _operand_of(structure: Structure, parts: Parts, dtype: torch.dtype) -> Operand:
    """Return the tensor of an intermediate: rows, then its parts one after the other."""
    unrolled = dict.fromkeys(axis for part in parts for axis, _ in part)
    axes = (*structure.rows, *unrolled, *structure.columns)
    labels = tuple([(axis,) for axis in axes])
    return Operand(labels, dtype, "float", _user_name(parts, "intermediate"))
