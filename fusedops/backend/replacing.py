"""Puts an operator in the place of a region.

    inputs ──▶ region's nodes ──▶ users
    inputs ──split──▶ region_…_forward ──getitem──▶ join ──(clone)──▶ users

PyTorch differentiates the operator later. Each argument and result then has a gradient where it had
one through the region's own nodes. The operator's derivative sees to that: it returns None for an
argument that no result with a gradient depends on, and marks results without such an argument as
not differentiable.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from ..core.calls.words import encode
from ..core.random import rng
from .dimensions import join, split
from .graphs import dtype_of, escapes, may_be_changed, positions_of, users_of, value_of
from .regions import Region
from .selection import Match

__all__ = ["replace"]


def replace(graph: fx.Graph, match: Match, replaced: dict[fx.Node, fx.Node]) -> None:
    """Replaces a region by one node, before the first that uses it.

    Args:
        graph: the graph of the region.
        match: the region and its program.
        replaced: from regions' outputs and views to the nodes that replace them; it is extended.
    """
    members = set(match.region.nodes)
    with graph.inserting_before(_insertion_point(graph, match.region)):
        results = _call(graph, match, replaced)
    # Nodes with equal values become one result of the operator. Eager PyTorch gives each its own
    # memory. So all but the first are copied if anything writes into the result, or if they leave
    # the graph.
    outputs = match.program.outputs
    changed = {number for old, number in outputs if may_be_changed(old)}
    returned = set[int]()
    for old, number in outputs:
        result = results[number]
        if number in returned and (number in changed or escapes(old)):
            with graph.inserting_after(results[-1]):
                result = graph.call_function(torch.ops.aten.clone.default, (result,))
        returned.add(number)
        old.replace_all_uses_with(result, lambda user: user not in members)
        result.meta.setdefault("val", value_of(old))
        replaced[old] = result
    # Backwards, since a node with users cannot be erased.
    for node in reversed(match.region.nodes):
        graph.erase_node(node)


def _insertion_point(graph: fx.Graph, region: Region) -> fx.Node:
    """The node before which a region's operator goes."""
    position = positions_of(graph)
    members = set(region.nodes)
    first = min(users_of(region.outputs) - members, key=position.__getitem__)
    last = max(region.nodes, key=position.__getitem__)
    # The operator's position decides the gradient mode in which it is recorded. So it never goes
    # beyond the region's own nodes, though the first user may be far behind them:
    #
    #     set_grad_enabled(False)   region   [here]   set_grad_enabled(True)   first user
    return first if position[first] < position[last] else last.next


def _call(graph: fx.Graph, match: Match, replaced: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """Calls a region's operator; returns its results, in the program's order.

    Args:
        graph: the graph of the region.
        match: the region and its program.
        replaced: from regions' outputs and views to the nodes that replace them.
    """
    region_program = match.program
    program, inputs = region_program.program, region_program.inputs
    dtypes = tuple(map(dtype_of, inputs))
    seed, threshold = None, rng.threshold(program.p)
    if threshold > 0:
        device = value_of(inputs[0]).device
        seed = graph.call_function(torch.ops.fusedops.random_state.default, (device,))
    target = getattr(torch.ops.fusedops, f"{program.name}_forward").default
    encoded = encode(program.record, dtypes, bool(match.reached))
    arguments = _arguments(graph, match, replaced)
    args = (*arguments, seed, threshold, program.structure.cols, encoded)
    call = graph.call_function(target, args)
    results = []
    for number, joins in enumerate(region_program.source.joins):
        result = graph.call_function(operator.getitem, (call, number))
        results.append(join(graph, result, joins))
    return results


def _arguments(graph: fx.Graph, match: Match, replaced: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """The tensors for a region's operator, see `_call`.

    If the program has several dimensions for a dimension of a tensor, a view splits it: see
    `dimensions`.
    """
    program = match.program
    # An input may be the output of a region that has been replaced meanwhile.
    nodes = [*[replaced.get(node, node) for node in program.inputs], *program.sizes]
    return [
        split(graph, position, splits, nodes)
        for position, splits in enumerate(program.source.splits)
    ]
