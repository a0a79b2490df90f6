"""A result of a row-wise function, computed again from what its backward reads.

A backward of ``y = rms_norm(x + residual) * weight`` reads the sum ``z``, the numbers ``rstd`` of
the rows, and the weight. Of these ``y`` is a function without reductions:

    x, residual ──▶ z ──▶ rstd ──▶ y         the function
               saved z,  saved rstd ──▶ y    the result again, with the same bits
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch

from .ir import REDUCTIONS, Graph, Node, reachable
from .planning import Plan, rebuilt
from .structure import Operand, Part

__all__ = ["Saved", "computed_again"]

# A tensor of the forward: "input" and its index, "intermediate" and 0, or "stats" and the index of
# the number of each row.
Saved = tuple[str, int]
# The operators of nodes that are not computed again.
_NOT_AGAIN = REDUCTIONS | {"keep"}


def computed_again(
    plan: Plan, output: int, acc: torch.dtype
) -> tuple[Plan, tuple[Saved, ...]] | None:
    """Return the plan of a result, and the tensors that it reads; None if it is not cheap.

    It is not if the backward does not read all whole tensors that the result is computed from, or
    if a reduction or a dropout would be computed again.

    Args:
        plan: the function.
        output: the index of the result.
        acc: the dtype in which the function computes, which is that of the numbers of its rows.
    """
    structure, results = plan.structure, plan.structure.results[output]
    leaves = _leaves(plan, acc)
    read = reachable(results.values(), leaves.__contains__)
    computed = read - leaves.keys()
    ops = set(map(operator.attrgetter("op"), computed))
    if not _NOT_AGAIN.isdisjoint(ops):
        return None
    for node in computed:
        if node.op != "input":
            continue
        index, part = node.attrs
        operand = structure.inputs[index]
        # Vectors are small, and mostly parameters: a LayerNorm's bias is read by no backward.
        if index not in plan.saved_inputs and structure.is_whole(operand):
            return None
        leaves[node] = ("input", index), operand, part
    saved = sorted({leaves[node][0] for node in read & leaves.keys()})
    operands = {kind: operand for kind, operand, _ in leaves.values()}
    graph = Graph()

    def change(node: Node, built: Node) -> Node:
        if node not in read & leaves.keys():
            return built
        kind, _, part = leaves[node]
        position = saved.index(kind)
        return graph.make("input", attrs=(position, part), axes=node.axes, kind=node.kind)

    again = rebuilt(graph, change)
    values = dict(zip(results, map(again, results.values()), strict=True))
    count = len(saved)
    changed = replace(
        structure,
        graph=graph,
        inputs=tuple([operands[kind] for kind in saved]),
        outputs=(structure.outputs[output],),
        results=(values,),
        drops=(),
        container="tensor",
        lines={},
        used=(True,) * count,
        values=(),
        loose=(0,) * count,
    )
    return Plan(changed, {}, None, -1, (), (), (), ()), tuple(saved)


def _leaves(plan: Plan, acc: torch.dtype) -> dict[Node, tuple[Saved, Operand, Part]]:
    """Return what a forward saves of its own: the tensor and the part that each node is."""
    leaves: dict[Node, tuple[Saved, Operand, Part]] = {}
    labels = tuple([(axis,) for axis in plan.structure.rows])
    numbers = Operand(labels, acc, "float", "stats")
    for index, node in enumerate(plan.stats):
        leaves[node] = ("stats", index), numbers, ()
    for part, node in plan.intermediate.items():
        assert plan.intermediate_operand is not None
        leaves[node] = ("intermediate", 0), plan.intermediate_operand, part
    return leaves
