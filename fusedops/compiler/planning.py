"""What a row-wise function saves for its backward: chosen so that the fewest bytes move, forward and backward together.

The numbers of a row (a mean, a maximum) that a backward needs are always saved. Beside them at most one whole tensor of
the function's own is, or none: then the backward reads inputs and computes the rest again. A tensor that is saved or
returned is rounded to its dtype, and the forward goes on from the rounded one, so that the backward sees what the
forward saw. Nothing here depends on what requires a gradient: training and inference compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from .derivative import cotangent, gradients
from .errors import NotRowwiseError
from .ir import REDUCTIONS, Graph, Node, derived_of, reachable, topological, value_of
from .structure import Operand, Part, Structure

__all__ = ["Alternative", "Plan", "planned"]

Parts = Mapping[Part, Node]


@dataclass(frozen=True)
class Alternative:
    """One choice of what is saved.

    Attributes:
        name: of the tensor; "" for none.
        moved: bytes that a row moves, forward and backward.
        held: bytes of it that are saved for the backward, inputs among them, but no outputs.
        operators: how many the backward computes.
    """

    name: str
    moved: int
    held: int
    operators: int


@dataclass(frozen=True, eq=False)
class Plan:
    """A row-wise function, with what it saves.

    Attributes:
        structure: with rounded outputs.
        intermediate: the tensor of its own that is saved, by part; empty for none.
        intermediate_operand: its dtype, dimensions and name.
        intermediate_output: which of the outputs it is; -1 for none of them.
        stats: what is saved of each row.
        saved_inputs: the places of the inputs that a backward reads.
        alternatives: what else could have been saved, the best first.
        differentiable: the places of the inputs that have gradients.
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
        """The gradients of inputs, by part, of those of outputs; behind the outputs comes the intermediate."""
        return gradients(self.structure, seeds(self, given), tuple(wanted))


def seeds(plan: Plan, given: Iterable[int]) -> dict[Node, Node]:
    """The cotangents of the nodes that are outputs."""
    structure, found = plan.structure, dict[Node, Node]()
    for number in given:
        results = structure.results[number] if number < len(structure.results) else plan.intermediate
        for part, node in results.items():
            if node.kind == "float":
                seed = _cotangent(plan, number, part)
                found[node] = structure.graph.binary("add", found[node], seed) if node in found else seed
    return found


def _cotangent(plan: Plan, number: int, part: Part) -> Node:
    if number < len(plan.structure.outputs):
        return cotangent(plan.structure, number, part)
    assert plan.intermediate_operand is not None
    axes = [axis for axis in plan.intermediate_operand.axes if axis not in plan.structure.unrolled]
    return plan.structure.graph.make("cotangent", attrs=(number, part), axes=axes, kind="float")


def planned(structure: Structure, *, memory: bool = False, kept: Collection[int] = ()) -> Plan:
    """The plan of a function.

    Args:
        structure: of it.
        memory: a byte that is saved counts as much as one that is moved.
        kept: the places of inputs that are saved by others: to save these, too, takes no memory.
    """
    structure = _rounded(*_apart(structure))
    differentiable = tuple(
        [place for place, operand in enumerate(structure.inputs) if operand.kind == "float" and structure.used[place]]
    )
    bare = Plan(structure, {}, None, -1, (), (), (), differentiable)
    numbers = range(len(structure.outputs))
    wanted = [place for place in differentiable if _is_summed(structure, structure.inputs[place])]
    roots = [node for parts in bare.gradients(numbers, differentiable).values() for node in parts.values()]
    if any(node.op in REDUCTIONS and set(node.attrs[0]) != set(structure.columns) for node in topological(roots)):
        raise NotRowwiseError(
            "its derivative sums over a part of a row. Take rows apart outside, and pass the parts as arguments of "
            "their own"
        )
    roots = [node for parts in bare.gradients(numbers, wanted).values() for node in parts.values()]
    forward = reachable(node for parts in structure.results for node in parts.values())
    candidates: list[tuple[Alternative, Parts, torch.dtype | None]] = [
        (Alternative("", *_cost(structure, forward, roots, {}, None, kept)), {}, None)
    ]
    for parts, dtype in structure.values:
        if all(_is_whole(structure, node) and node in forward for node in parts.values()):
            costs = _cost(structure, forward, roots, parts, dtype, kept)
            name = next((name for node in parts.values() for name in reversed(node.names)), _line_of(structure, parts))
            candidates.append((Alternative(name, *costs), parts, dtype))

    def rank(found: tuple[Alternative, Parts, torch.dtype | None]) -> tuple[int, int, int]:
        choice, parts, dtype = found
        # What is returned, too, is there anyway while the forward needs it. The backward makes it live on.
        lives = choice.held + (_returned(structure, parts, dtype) if memory else 0)
        return choice.moved + memory * choice.held, lives, choice.operators

    candidates.sort(key=rank)
    alternatives = tuple(dict.fromkeys([found[0] for found in candidates]))
    return _completed(bare, candidates[0][1], candidates[0][2], alternatives)


def _line_of(structure: Structure, parts: Parts) -> str:
    line = next((structure.lines[node.number] for node in parts.values() if node.number in structure.lines), 0)
    return f"a value of line {line}" if line else "a value"


def _completed(bare: Plan, parts: Parts, dtype: torch.dtype | None, alternatives: tuple[Alternative, ...]) -> Plan:
    structure, numbers = bare.structure, range(len(bare.structure.outputs))
    output = (
        next((n for n in numbers if set(structure.results[n].values()) == set(parts.values())), -1) if parts else -1
    )
    operand = structure.outputs[output] if output >= 0 else None
    if parts and operand is None:
        assert dtype is not None
        structure, parts = _with_value_rounded(structure, parts, dtype)
        operand = _operand_of(structure, parts, dtype)
    elif operand is not None:
        parts = structure.results[output]
    plan = replace(bare, structure=structure, intermediate=parts, intermediate_operand=operand, intermediate_output=output,
                   alternatives=alternatives)  # fmt: skip
    forward = reachable(node for results in structure.results for node in results.values())
    given = [*numbers, *([len(numbers)] if parts and output < 0 else [])]
    roots = [node for found in plan.gradients(given, bare.differentiable).values() for node in found.values()]
    intermediate = set(parts.values())
    stats = [node for node in topological(roots) if _is_stat(structure, node) and node in forward]
    reached = reachable(roots, lambda node: node in intermediate or node in stats)
    stats = [node for node in stats if node in reached]
    # For a second derivative the numbers of a row are computed again.
    again = reachable(roots, lambda node: node in intermediate, derived_of)
    saved = sorted({node.attrs[0] for node in again if node.op == "input"})
    return replace(plan, stats=tuple(stats), saved_inputs=tuple(saved))


# --- what an alternative costs ------------------------------------------------------------------------------------------


def _cost(structure: Structure, forward: set[Node], roots: list[Node], parts: Parts, dtype: torch.dtype | None,
          kept: Collection[int]) -> tuple[int, int, int]:  # fmt: skip
    """Bytes moved, bytes held and operators of a backward, of one row."""
    intermediate = set(parts.values())
    reached = reachable(roots, lambda node: node in intermediate or (node in forward and _is_stat(structure, node)))
    read = {node for node in reached if node.op == "input" and _is_whole(structure, node)}
    moved = sum([structure.inputs[node.attrs[0]].dtype.itemsize for node in read])
    own, held = 0, sum([structure.inputs[node.attrs[0]].dtype.itemsize for node in read if node.attrs[0] not in kept])
    if parts:
        assert dtype is not None
        moved += len(parts) * dtype.itemsize
        own = 0 if _returned(structure, parts, dtype) else len(parts) * dtype.itemsize
        held += own
    operators = sum(bool(node.args) and node not in intermediate for node in reached)
    return (moved + own) * structure.cols, held * structure.cols, operators


def _returned(structure: Structure, parts: Parts, dtype: torch.dtype | None) -> int:
    """Bytes of a row that are saved as one of the outputs."""
    is_output = any(set(parts.values()) == set(results.values()) for results in structure.results)
    return len(parts) * dtype.itemsize * structure.cols if dtype is not None and is_output else 0


def _is_whole(structure: Structure, node: Node) -> bool:
    """Whether the value varies along all rows and columns."""
    return node.kind == "float" and len(node.axes) == len(structure.rows) + len(structure.columns)


def _is_summed(structure: Structure, operand: Operand) -> bool:
    """Whether an input's gradient is counted: all but that of what is broadcast among the rows in another order."""
    rows = tuple([axis for axis in operand.axes if axis in structure.rows])
    return rows == structure.rows[: len(rows)]


def _is_stat(structure: Structure, node: Node) -> bool:
    """Whether this is a number of each row that a reduction gives."""
    if not node.args or node.op in ("constant_to_gradients", "detached", "instead", "narrowed") or node.kind != "float":
        return False
    return node.axes == set(structure.rows) and _has_reduction(node)


def _has_reduction(node: Node) -> bool:
    return any(inner.op in REDUCTIONS for inner in reachable([node]))


# --- rounding -----------------------------------------------------------------------------------------------------------


def _rounded(structure: Structure, dtypes: Mapping[Node, torch.dtype]) -> Structure:
    """The function with values rounded to dtypes, for all that takes them."""
    graph = Graph()
    again = rebuilt(graph, lambda node, made: _round(graph, made, dtypes[node], structure) if node in dtypes else made)
    results = tuple([{part: again(node) for part, node in parts.items()} for parts in structure.results])
    values = tuple([({part: again(node) for part, node in parts.items()}, dtype) for parts, dtype in structure.values])
    lines = {again(node).number: structure.lines[node.number]
             for node in list(structure.graph.nodes.values()) if node.number in structure.lines}  # fmt: skip
    return replace(structure, graph=graph, results=results, values=values, lines=lines)


def _apart(structure: Structure) -> tuple[Structure, dict[Node, torch.dtype]]:
    """The dtypes of what is returned; of a value that is returned in several, the narrower ones as values of their own."""
    dtypes: dict[Node, torch.dtype] = {}
    for operand, parts in zip(structure.outputs, structure.results, strict=True):
        for node in parts.values():
            known = dtypes.get(node, operand.dtype)
            dtypes[node] = operand.dtype if operand.dtype.itemsize > known.itemsize else known
    results = tuple([
        {part: node if dtypes[node] == operand.dtype or node.kind != "float" else
         structure.graph.make("round", node, attrs=(operand.dtype,)) for part, node in parts.items()}
        for operand, parts in zip(structure.outputs, structure.results, strict=True)
    ])  # fmt: skip
    return replace(structure, results=results), dtypes


def _with_value_rounded(structure: Structure, parts: Parts, dtype: torch.dtype) -> tuple[Structure, Parts]:
    places = [index for index, (found, _) in enumerate(structure.values) if found == parts]
    structure = _rounded(structure, dict.fromkeys(parts.values(), dtype))
    return structure, structure.values[places[0]][0]


def _round(graph: Graph, node: Node, dtype: torch.dtype, structure: Structure) -> Node:
    if node.kind != "float" or (node.op == "input" and structure.inputs[node.attrs[0]].dtype == dtype):
        return node
    if node.op == "round" and node.attrs[0] == dtype:
        return node
    if node.op == "const":
        return graph.const(float(torch.tensor(value_of(node), dtype=dtype, device="cpu")))
    found = graph.make("round", node, attrs=(dtype,))
    found.names.extend(name for name in node.names if name not in found.names)
    return found


def rebuilt(graph: Graph, change: Callable[[Node, Node], Node]) -> Callable[[Node], Node]:
    """A function from nodes to those of another graph, in which ``change`` may put others in their place."""
    done: dict[Node, Node] = {}

    def again(root: Node) -> Node:
        for node in topological([root]):
            if node not in done:
                args = [done[arg] for arg in node.args]
                made = graph.make(node.op, *args, attrs=node.attrs, axes=node.axes, kind=node.kind)
                made.names.extend(name for name in node.names if name not in made.names)
                done[node] = change(node, made)
        return done[root]

    return again


def _operand_of(structure: Structure, parts: Parts, dtype: torch.dtype) -> Operand:
    """The tensor of an intermediate: rows, then its parts one behind the other."""
    unrolled = tuple(dict.fromkeys(axis for part in parts for axis, _ in part))
    name = next((name for node in parts.values() for name in reversed(node.names)), "intermediate")
    labels = (*[(axis,) for axis in structure.rows], *[(axis,) for axis in (*unrolled, *structure.columns)])
    return Operand(tuple(labels), dtype, "float", name)
