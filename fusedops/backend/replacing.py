"""Puts an operator in the place of a region.

    inputs ──▶ region's nodes ──▶ users
    inputs ──split──▶ region_…_forward ──getitem──▶ join ──(detach or clone)──▶ users

The operator has PyTorch's autograd in front of it: an argument may be detached before it, and a
result after it, to have gradients where the region's own operators had them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ..core.calls.words import encode
from ..core.random import rng
from .dimensions import join, split
from .graphs import dtype_of, escapes, positions_of, users_of, value_of
from .regions import Region
from .selection import Match

__all__ = ["replace"]


def replace(
    graph: fx.Graph,
    match: Match,
    needs: set[fx.Node],
    cut: set[fx.Node],
    replaced: dict[fx.Node, fx.Node],
) -> None:
    """Replaces a region by one node, before the first that uses it.

    Args:
        graph: of the region.
        match: the region and its program.
        needs: the nodes whose values have gradients.
        cut: those of them that have none through the region, where the operator's would be zeros.
        replaced: from regions' outputs and views to the nodes that replace them; it is extended.
    """
    own = set(match.region.nodes)
    with graph.inserting_before(_insertion_point(graph, match.region)):
        results = _call(graph, match, cut, replaced)
    returned = set[int]()
    for old, number in match.program.outputs:
        is_repeated = number in returned
        returned.add(number)
        change = _change(match, old, needs, is_repeated=is_repeated)
        result = results[number]
        if change is not None:
            with graph.inserting_after(results[-1]):
                result = graph.call_function(change, (result,))
        old.replace_all_uses_with(result, lambda user: user not in own)
        result.meta.setdefault("val", value_of(old))
        replaced[old] = result
    # Backwards, since a node with users cannot be erased.
    for node in reversed(match.region.nodes):
        graph.erase_node(node)


def _change(match: Match, old: fx.Node, needs: set[fx.Node], *, is_repeated: bool) -> Any:
    """The operator between an operator's result and the users of an output; None without any.

    Args:
        match: the region and its program.
        old: the output.
        needs: the nodes whose values have gradients.
        is_repeated: whether an earlier output has the same value, and is the same result.
    """
    if is_repeated and escapes(old):
        return torch.ops.aten.clone.default  # equal values have separate memory
    has_gradients = bool(match.reached)
    # All outputs of an operator have gradients, if one has.
    if has_gradients and old not in needs:
        return torch.ops.aten.detach.default
    return None


def _insertion_point(graph: fx.Graph, region: Region) -> fx.Node:
    """The node before which a region's operator goes."""
    position = positions_of(graph)
    own = set(region.nodes)
    first = min(users_of(region.outputs) - own, key=position.__getitem__)
    last = max(region.nodes, key=position.__getitem__)
    # Not after the last of its own nodes, where gradients may be switched on again.
    return first if position[first] < position[last] else last.next


def _call(
    graph: fx.Graph, match: Match, cut: set[fx.Node], replaced: Mapping[fx.Node, fx.Node]
) -> list[fx.Node]:
    """Calls a region's operator; returns its results, in the program's order.

    Args:
        graph: of the region.
        match: the region and its program.
        cut: the inputs whose gradients end here.
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
    arguments = _arguments(graph, match, cut, replaced)
    args = (*arguments, seed, threshold, program.structure.cols, encoded)
    call = graph.call_function(target, args)
    results = []
    for number, joins in enumerate(region_program.source.joins):
        result = graph.call_function(operator.getitem, (call, number))
        results.append(join(graph, result, joins))
    return results


def _arguments(
    graph: fx.Graph, match: Match, cut: set[fx.Node], replaced: Mapping[fx.Node, fx.Node]
) -> list[fx.Node]:
    """The tensors for a region's operator, see `_call`.

    Dimensions are split that the program takes as several.
    """
    program = match.program
    # An input may be the output of a region that has been replaced meanwhile.
    nodes = [*[replaced.get(node, node) for node in program.inputs], *program.sizes]
    arguments = [
        split(graph, position, splits, nodes)
        for position, splits in enumerate(program.source.splits)
    ]
    for position, node in enumerate(program.inputs):
        if node in cut:
            detach = torch.ops.aten.detach.default
            arguments[position] = graph.call_function(detach, (arguments[position],))
    return arguments
