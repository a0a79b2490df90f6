"""A result of a row-wise function, computed again from what its backward reads.

A backward of ``y = rms_norm(x + residual) * weight`` reads the sum ``z``, the numbers ``rstd`` of
the rows, and the weight. Of these ``y`` is a function without reductions:

    x, residual ──▶ z ──▶ rstd ──▶ y         the function
               saved z,  saved rstd ──▶ y    the result again, with the same bits
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .ir import REDUCTIONS, Graph, Node, reachable
from .planning import Plan, rebuilt
from .structure import Operand

__all__ = ["Saved", "computed_again"]

# A tensor of the forward: "input" and its index, "intermediate" and 0, or "stats" and the index of
# the number of each row.
Saved = tuple[str, int]


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
    parts = {node: part for part, node in plan.intermediate.items()}
    stats = {node: index for index, node in enumerate(plan.stats)}
    read = reachable(results.values(), (parts.keys() | stats.keys()).__contains__)
    computed = read - parts.keys() - stats.keys()
    if any(node.op == "keep" or node.op in REDUCTIONS for node in computed):
        return None
    # Vectors are small, and mostly parameters: a LayerNorm's bias is read by no backward.
    inputs = {node.attrs[0] for node in computed if node.op == "input"}
    others = inputs.difference(plan.saved_inputs)
    if any(structure.is_whole(structure.inputs[index]) for index in others):
        return None
    graph = Graph()
    operands: dict[Saved, Operand] = {}

    def argument(node: Node, saved: Saved, operand: Operand, part: object) -> Node:
        operands.setdefault(saved, operand)
        position = list(operands).index(saved)
        return graph.make("input", attrs=(position, part), axes=node.axes, kind=node.kind)

    def change(node: Node, built: Node) -> Node:
        if node not in read:
            return built
        if node in parts:
            assert plan.intermediate_operand is not None
            return argument(node, ("intermediate", 0), plan.intermediate_operand, parts[node])
        if node in stats:
            labels = tuple([(axis,) for axis in structure.rows])
            operand = Operand(labels, acc, "float", "stats")
            return argument(node, ("stats", stats[node]), operand, ())
        if node.op == "input":
            index, part = node.attrs
            return argument(node, ("input", index), structure.inputs[index], part)
        return built

    again = rebuilt(graph, change)
    values = {part: again(node) for part, node in results.items()}
    count = len(operands)
    changed = replace(
        structure,
        graph=graph,
        inputs=tuple(operands.values()),
        outputs=(structure.outputs[output],),
        results=(values,),
        drops=(),
        container="tensor",
        lines={},
        used=(True,) * count,
        values=(),
        loose=(0,) * count,
    )
    return Plan(changed, {}, None, -1, (), (), (), ()), tuple(operands)
