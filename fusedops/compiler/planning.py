"""Choice of what a row-wise function saves for its backward.

It moves the fewest bytes, forward and backward together. The numbers of a row (a mean, a maximum)
that a backward needs are always saved. Beside them the function saves at most one whole tensor of
its own. Without one the backward reads inputs and computes the rest again.

A tensor that is saved or returned is rounded to its dtype, and the forward continues from the
rounded one, so that the backward has the forward's values. This choice does not depend on what
requires a gradient: training and inference compute the same. Which inputs are saved may: see
`planned`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from .derivative import cotangent, gradients
from .errors import NotRowwiseError
from .ir import (
    REDUCTIONS,
    SAME_VALUE,
    Graph,
    Node,
    computed_of,
    derived_of,
    reachable,
    topological,
    value_of,
)
from .needs import Needs
from .structure import Operand, Part, Structure, nodes_of, within, without

__all__ = ["Alternative", "Plan", "planned", "rebuilt"]

Parts = Mapping[Part, Node]


@dataclass(frozen=True)
class Alternative:
    """One choice of what is saved.

    Attributes:
        name: the name of the tensor; "" for none.
        moved: bytes of a row that are read and written, forward and backward.
        held: bytes of a row that are saved for the backward, inputs included, outputs excluded.
        operators: the number of operators that the backward computes.
    """

    name: str
    moved: int
    held: int
    operators: int


# An alternative with the parts and the dtype of the tensor that it saves, {} and None for none, and
# whether derivatives are computed from results: see `Plan.of_results`.
_Candidate = tuple[Alternative, Parts, torch.dtype | None, bool]


@dataclass(frozen=True, eq=False)
class Plan:
    """A row-wise function, and what it saves for its backward.

    Attributes:
        structure: the function's structure, with rounded outputs.
        intermediate: the nodes of the whole tensor that is saved, by part; empty if none is saved.
        intermediate_operand: the dtype, dimensions and name of this tensor.
        intermediate_output: the index of the output that is this tensor; -1 if no output is.
        stats: the numbers of each row that are saved.
        saved_inputs: the indices of the inputs that a backward reads.
        alternatives: the possible choices, the best first; the first one is chosen.
        differentiable: the indices of the inputs that have gradients.
        of_results: whether derivatives of ReLU and the like are computed from their results.
    """

    structure: Structure
    intermediate: Parts
    intermediate_operand: Operand | None
    intermediate_output: int
    stats: tuple[Node, ...]
    saved_inputs: tuple[int, ...]
    alternatives: tuple[Alternative, ...]
    differentiable: tuple[int, ...]
    of_results: bool = False

    def gradients(
        self, positions: Iterable[int], wanted: Iterable[int]
    ) -> dict[int, dict[Part, Node]]:
        """Return the gradients of inputs, by part, from those of outputs.

        Args:
            positions: the outputs. The intermediate counts as an output after the others.
            wanted: the inputs.
        """
        return gradients(
            self.structure, seeds(self, positions), tuple(wanted), of_results=self.of_results
        )


def seeds(plan: Plan, positions: Iterable[int]) -> dict[Node, Node]:
    """Return the cotangents of the nodes that are outputs."""
    structure = plan.structure
    cotangents: dict[Node, Node] = {}
    for position in positions:
        is_output = position < len(structure.results)
        results = structure.results[position] if is_output else plan.intermediate
        for part, node in results.items():
            if node.kind == "float":
                seed = _cotangent(plan, position, part)
                cotangents[node] = _added(structure.graph, cotangents.get(node), seed)
    return cotangents


def _added(graph: Graph, known: Node | None, seed: Node) -> Node:
    """Return the sum of cotangents: a value may be returned twice."""
    if known is None:
        return seed
    return graph.binary("add", known, seed)


def _cotangent(plan: Plan, position: int, part: Part) -> Node:
    structure = plan.structure
    if position < len(structure.outputs):
        return cotangent(structure, position, part)
    assert plan.intermediate_operand is not None
    axes = without(plan.intermediate_operand.axes, structure.unrolled)
    return structure.graph.make("cotangent", attrs=(position, part), axes=axes, kind="float")


def planned(
    structure: Structure,
    *,
    memory: bool = False,
    also_saved: Collection[int] = (),
    constant: Collection[int] = (),
) -> Plan:
    """Return the plan of a function.

    Args:
        structure: its structure.
        memory: whether a byte that is saved counts as much as one that is moved.
        also_saved: the indices of inputs that other operators save: to save these takes no memory.
        constant: the indices of inputs that get no gradient. What only their gradients read is not
            saved. The whole tensor that is saved, which is rounded, is chosen without regard to
            them: so the results are the same bits with and without gradients.
    """
    structure = _rounded(*_separate_dtypes(structure))
    differentiable = _differentiable(structure)
    bare = Plan(structure, {}, None, -1, (), (), (), tuple(differentiable))
    positions = range(len(structure.outputs))
    # All gradients have to be computable, but only some count in the cost: see `_is_counted`.
    _check_reductions(structure, nodes_of(bare.gradients(positions, differentiable).values()))
    counted = [i for i in differentiable if _is_counted(structure, structure.inputs[i])]
    candidates: list[_Candidate] = []
    # Derivatives are computed from results only where that is better: results are rounded.
    for of_results in (False, True):
        plan = replace(bare, of_results=of_results)
        roots = nodes_of(plan.gradients(positions, counted).values())
        choices = _candidates(structure, roots, also_saved)
        candidates += [(*choice, of_results) for choice in choices]

    def rank(candidate: _Candidate) -> tuple[int, int, int]:
        choice, parts, dtype, _ = candidate
        # ``memory`` is a factor of 0 or 1. The order is by (moved, held, operators) without it, and
        # with it by (moved + held, held + saved output, operators): an output is in memory anyway
        # while the forward needs it, and saving it keeps it alive for the backward.
        alive = choice.held + (_returned(structure, parts, dtype) if memory else 0)
        return choice.moved + memory * choice.held, alive, choice.operators

    candidates.sort(key=rank)
    _, parts, dtype, of_results = candidates[0]
    alternatives = tuple(
        dict.fromkeys([one for one, *_, other in candidates if other == of_results])
    )
    trained = tuple([i for i in differentiable if i not in constant])
    chosen = replace(bare, of_results=of_results, differentiable=trained)
    return _completed(chosen, parts, dtype, alternatives)


def _differentiable(structure: Structure) -> list[int]:
    """Return the indices of the inputs that have gradients."""
    indices: list[int] = []
    for index, operand in enumerate(structure.inputs):
        if operand.kind == "float" and structure.used[index]:
            indices.append(index)
    return indices


def _candidates(
    structure: Structure, roots: list[Node], also_saved: Collection[int]
) -> list[tuple[Alternative, Parts, torch.dtype | None]]:
    """Return all choices of what is saved: nothing, or one whole tensor of the forward."""
    forward = _forward(structure)
    choices: list[tuple[Parts, torch.dtype | None]] = [({}, None)]
    for value in structure.values:
        nodes = value[0].values()
        if forward.issuperset(nodes) and _are_whole(structure, nodes):
            choices.append(value)
    saved = [parts.values() for parts, _ in choices]
    needs = Needs(roots, saved, _numbers(structure, forward, roots))
    candidates: list[tuple[Alternative, Parts, torch.dtype | None]] = []
    for index, (parts, dtype) in enumerate(choices):
        cost = _cost(structure, needs.needed(index), parts, dtype, also_saved)
        alternative = Alternative(_name_of(structure, parts), *cost)
        candidates.append((alternative, parts, dtype))
    return candidates


def _check_reductions(structure: Structure, roots: list[Node]) -> None:
    """Raise if a derivative sums over a part of a row other than the forward, or its blocks."""
    columns = set(structure.columns)
    known = [columns, set(structure.inner), set(structure.outer)]
    for node in topological(roots):
        if node.op not in REDUCTIONS:
            continue
        over = set(node.attrs[0])
        is_over_blocks = over != columns and over == set(structure.inner)
        if over not in known or (is_over_blocks and not columns <= node.args[0].axes):
            raise NotRowwiseError(
                "its derivative sums over a part of a row. Take rows apart outside, and pass the "
                "parts as arguments of their own"
            )


def _name_of(structure: Structure, parts: Parts) -> str:
    """Return the user's name of a value, or the line that computes it; "" for no value."""
    if not parts:
        return ""
    line = 0
    for node in parts.values():
        if node.number in structure.lines:
            line = structure.lines[node.number]
            break
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
    structure = bare.structure
    operand = None
    output = _output_of(structure, parts)
    if output >= 0:
        parts = structure.results[output]
        operand = structure.outputs[output]
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
    # The intermediate has a cotangent, too: a second derivative reaches it from the backward.
    is_own = bool(parts) and output < 0
    positions = range(len(structure.outputs) + is_own)
    roots = nodes_of(plan.gradients(positions, bare.differentiable).values())
    intermediate = set(parts.values())
    # The saved inputs include those that a second derivative reads. It computes `stats` again, so
    # the search does not end at `stats`, only at the intermediate. It also needs the second
    # argument of `instead`, which may have the only gradient: see `derived_of`.
    computed = reachable(roots, intermediate.__contains__, derived_of)
    saved = sorted({node.attrs[0] for node in computed if node.op == "input"})
    stats = _stats(structure, roots, intermediate)
    return replace(plan, stats=tuple(stats), saved_inputs=tuple(saved))


def _forward(structure: Structure) -> set[Node]:
    """Return the values that a forward can save.

    Among them are the indices of elements of which only the gradient is picked by an index.
    """
    results = nodes_of(structure.results)
    picks = [node for node in topological(results) if node.op == "pick"]
    return reachable([*results, *itertools.chain(*[pick.args[1].args for pick in picks])])


def _stats(structure: Structure, roots: list[Node], intermediate: set[Node]) -> list[Node]:
    """Return the numbers of each row that a backward reads.

    A number that only other saved numbers are computed from is not among them: the backward reads
    ``rstd = rsqrt(variance + eps)``, and needs the variance for nothing else.
    """
    stats = _numbers(structure, _forward(structure), roots)
    saved = intermediate | stats
    read = stats & reachable(roots, saved.__contains__)
    return list(filter(read.__contains__, topological(roots)))


def _output_of(structure: Structure, parts: Parts) -> int:
    """Return the index of the output that a value is; -1 if it is none."""
    nodes = set(parts.values())
    if not nodes:
        return -1
    for position, results in enumerate(structure.results):
        if nodes == set(results.values()):
            return position
    return -1


# --- what an alternative costs --------------------------------------------------------------------


# For z = dropout(x + bias) + residual and the LayerNorm of z, in bf16 and with N columns, in bytes
# of a row:
#
#   saved           forward writes   backward reads       moved   held
#   nothing         -                x, residual: 4 N     4 N     4 N
#   z               2 N              z: 2 N               4 N     2 N
#   z, a result     -                z: 2 N               2 N     -
#
# What all alternatives move, such as the gradients, is left out. Of those that move the same, the
# one that holds less is taken: here z.


def _cost(
    structure: Structure,
    needed: set[Node],
    parts: Parts,
    dtype: torch.dtype | None,
    also_saved: Collection[int],
) -> tuple[int, int, int]:
    """Return the bytes moved, the bytes held and the operators of a backward, of one row."""
    # Only whole tensors count. Vectors, and tensors with one number for each row, are few bytes.
    read = [node for node in needed if node.op == "input" and _is_whole(structure, node)]
    held = sum([_bytes_of(structure, node) for node in read if node.attrs[0] not in also_saved])
    moved = sum([_bytes_of(structure, node) for node in read])
    if dtype is not None:
        saved_bytes = len(parts) * dtype.itemsize
        moved += saved_bytes  # the backward reads it
        if not _returned(structure, parts, dtype):
            moved += saved_bytes  # the forward writes it
            held += saved_bytes
    computed = [node for node in needed.difference(parts.values()) if node.args]
    return moved * structure.cols, held * structure.cols, len(computed)


def _bytes_of(structure: Structure, node: Node) -> int:
    """Return the bytes of an element of an input."""
    operand: Operand = structure.inputs[node.attrs[0]]
    return operand.dtype.itemsize


def _returned(structure: Structure, parts: Parts, dtype: torch.dtype | None) -> int:
    """Return the bytes of a row of a saved value that is one of the outputs; 0 for others."""
    if dtype is None:
        return 0
    if _output_of(structure, parts) < 0:
        return 0
    return len(parts) * dtype.itemsize * structure.cols


def _are_whole(structure: Structure, nodes: Iterable[Node]) -> bool:
    return all(_is_whole(structure, node) for node in nodes)


def _is_whole(structure: Structure, node: Node) -> bool:
    """Whether the value varies along all rows and columns."""
    if node.kind != "float":
        return False
    return len(node.axes) == len(structure.rows) + len(structure.columns)


def _is_counted(structure: Structure, operand: Operand) -> bool:
    """Whether the cost includes an input's gradient.

    It does not for inputs that are broadcast along outer rows, or have rows in another order.
    """
    rows = tuple(within(operand.axes, structure.rows))
    return rows == structure.rows[: len(rows)]


def _numbers(structure: Structure, forward: set[Node], roots: list[Node]) -> set[Node]:
    """Return the numbers of each row that reductions give, and that a backward need not compute.

    There are none if the backward would read more of them than a row has elements: the row is read
    anyway, and they are computed of it again. In iterations on small matrices, each sum is one.
    """
    # A function of small matrices has thousands of values, so that each is visited once.
    reduced: set[Node] = set()
    for node in topological(forward):
        if node.op in REDUCTIONS or not reduced.isdisjoint(computed_of(node)):
            reduced.add(node)
    is_stat = functools.partial(_is_stat, structure)
    numbers = set(filter(is_stat, reduced & forward))
    read = numbers & reachable(roots, numbers.__contains__)
    return numbers if len(read) <= structure.parts_of_row * structure.cols else set()


def _is_stat(structure: Structure, node: Node) -> bool:
    """Whether a value that depends on a reduction is a number of each row that can be saved."""
    if node.kind != "float" or node.op in SAME_VALUE:
        return False
    if not node.args or node.axes != set(structure.rows):
        return False
    return not _is_largest_of_sums(structure, node)


def _is_largest_of_sums(structure: Structure, node: Node) -> bool:
    """Whether this is the largest of values that depend on sums over blocks of a row.

    A backward finds the largest value by comparing all with it. It computes sums over blocks again,
    perhaps in another order, so it has to compute their largest value again, too.
    """
    if node.op != "amax":
        return False
    inner = structure.inner
    sums = filter(lambda inner: inner.op == "sum", reachable([node]))
    return bool(inner) and inner in [one.attrs[0] for one in sums]


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

    results = tuple(map(rebuilt_parts, structure.results))
    values = tuple([(rebuilt_parts(parts), dtype) for parts, dtype in structure.values])
    lines: dict[int, int] = {}
    nodes = list(structure.graph.nodes.values())
    for node in [node for node in nodes if node.number in structure.lines]:
        lines[again(node).number] = structure.lines[node.number]
    return replace(structure, graph=graph, results=results, values=values, lines=lines)


def _separate_dtypes(structure: Structure) -> tuple[Structure, dict[Node, torch.dtype]]:
    """Return the function, and the widest dtype in which each of its results is returned.

    If a result is also returned in a narrower dtype, that output becomes a new value. For example,
    if ``y`` is returned in fp32 and in bf16, the results are ``y`` and ``round(y, bf16)``, and the
    dtype of ``y`` is fp32.
    """
    outputs = list(zip(structure.outputs, structure.results, strict=True))
    dtypes: dict[Node, torch.dtype] = {}
    for operand, parts in outputs:
        for node in parts.values():
            widest = dtypes.get(node, operand.dtype)
            dtypes[node] = _wider(widest, operand.dtype)

    def narrowed(node: Node, dtype: torch.dtype) -> Node:
        if node.kind != "float" or dtypes[node] == dtype:
            return node
        return structure.graph.make("round", node, attrs=(dtype,))

    results = []
    for operand, parts in outputs:
        results.append({part: narrowed(node, operand.dtype) for part, node in parts.items()})
    return replace(structure, results=tuple(results)), dtypes


def _wider(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """Return the dtype of more bytes; the first of two that have as many."""
    return max(first, second, key=lambda dtype: dtype.itemsize)


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
    if node.op == "const":
        return graph.const(float(torch.tensor(value_of(node), dtype=dtype, device="cpu")))
    if _dtype_of(node, structure) == dtype:
        return node
    result = graph.make("round", node, attrs=(dtype,))
    _add_names(result, node)
    return result


def _dtype_of(node: Node, structure: Structure) -> torch.dtype | None:
    """Return the dtype to which a value is rounded already; None if it is not rounded."""
    if node.op == "input":
        operand: Operand = structure.inputs[node.attrs[0]]
        return operand.dtype
    if node.op != "round":
        return None
    dtype: torch.dtype = node.attrs[0]
    return dtype


def rebuilt(graph: Graph, change: Callable[[Node, Node], Node]) -> Callable[[Node], Node]:
    """Return a function that copies nodes to another graph.

    ``change`` takes a node and its copy, and returns the copy, or another node to use instead.
    """
    done: dict[Node, Node] = {}

    def again(root: Node) -> Node:
        for node in topological([root], done):
            args = map(done.__getitem__, node.args)
            built = graph.make(node.op, *args, attrs=node.attrs, axes=node.axes, kind=node.kind)
            _add_names(built, node)
            done[node] = change(node, built)
        return done[root]

    return again


def _add_names(node: Node, other: Node) -> None:
    node.names.extend(name for name in other.names if name not in node.names)


def _operand_of(structure: Structure, parts: Parts, dtype: torch.dtype) -> Operand:
    """Return the tensor of an intermediate: rows, then its parts one after the other."""
    unrolled = dict.fromkeys(axis for axis, _ in itertools.chain(*parts))
    axes = (*structure.rows, *unrolled, *structure.columns)
    labels = tuple([(axis,) for axis in axes])
    return Operand(labels, dtype, "float", _user_name(parts, "intermediate"))
