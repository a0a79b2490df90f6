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
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..core.calls.words import encode
from ..core.random import rng
from .dimensions import join, split
from .graphs import REACHED, dtype_of, escapes, may_be_changed, users_of, value_of
from .selection import Match

__all__ = ["call_operator", "insertion_point", "replace", "results_of", "substitute"]


def replace(graph: fx.Graph, match: Match, replaced: dict[fx.Node, fx.Node]) -> None:
    """Replaces a region by one node, before the first that uses it.

    Args:
        graph: the graph of the region.
        match: the region and its program.
        replaced: from regions' outputs and views to the nodes that replace them; it is extended.
    """
    region, program = match.region, match.program
    with graph.inserting_before(insertion_point(region.nodes, region.outputs)):
        arguments = _arguments(graph, match, replaced)
        dtypes = tuple(map(dtype_of, program.inputs))
        reached = list(map(match.reached.__contains__, program.inputs))
        call = call_operator(
            graph, program.program, arguments, program.inputs, dtypes, reached, match.shard
        )
        joins = program.source.joins
        results = results_of(graph, call, 0, len(joins))
        joined = [join(graph, *pair) for pair in zip(results, joins, strict=True)]
    substitute(graph, program.outputs, dict(enumerate(joined)), region.nodes, replaced)


def insertion_point(nodes: Iterable[fx.Node], outputs: Iterable[fx.Node]) -> fx.Node:
    """The node before which the operator of some nodes goes; ``outputs`` are those used outside."""
    # Nodes compare by their order in the graph.
    first = min(users_of(outputs).difference(nodes))
    last = max(nodes)
    # The operator's position decides the gradient mode in which it is recorded. So it never goes
    # beyond the region's own nodes, though the first user may be far behind them:
    #
    #     set_grad_enabled(False)   region   [here]   set_grad_enabled(True)   first user
    return first if first < last else last.next


def call_operator(
    graph: fx.Graph,
    op: Any,
    arguments: Sequence[Any],
    inputs: Sequence[fx.Node],
    dtypes: Sequence[torch.dtype],
    reached: Sequence[bool],
    shard: Sequence[int] = (),
) -> fx.Node:
    """Calls an operator of the compiler.

    Args:
        graph: the graph.
        op: the operator, a `Program` or a `SliceGroup`.
        arguments: its tensors as in its schema.
        inputs: the nodes of the region that are its inputs.
        dtypes: the dtypes of its tensors; of those in a list, one.
        reached: for each of its tensors, whether a gradient reaches it. If any is, a backward
            will follow.
        shard: locates this rank's part of the dropout mask: see `Match`.
    """
    seed, threshold = None, rng.threshold(op.p)
    if threshold > 0:
        device = value_of(inputs[0]).device
        seed = graph.call_function(torch.ops.fusedops.random_state.default, (device,))
        if shard:
            options = {"dtype": torch.int64, "device": device}
            part = graph.call_function(torch.tensor, (list(shard),), options)
            seed = graph.call_function(torch.ops.aten.cat.default, ([seed, part],))
    name = op.name + ("_call" if op.variadic else "_forward")
    target = getattr(torch.ops.fusedops, name).default
    encoded = encode(op.record, tuple(dtypes), any(reached))
    args = (*arguments, seed, threshold, op.cols(op.record, ()), encoded)
    call = graph.call_function(target, args)
    call.meta[REACHED] = tuple(reached)
    return call


def results_of(graph: fx.Graph, call: fx.Node, first: int, count: int) -> list[fx.Node]:
    """The nodes of some results of a call, from the first of them."""
    numbers = range(first, first + count)
    return [graph.call_function(operator.getitem, (call, number)) for number in numbers]


def substitute(
    graph: fx.Graph,
    outputs: Sequence[tuple[fx.Node, Any]],
    results: Mapping[Any, fx.Node],
    nodes: Collection[fx.Node],
    replaced: dict[fx.Node, fx.Node],
) -> None:
    """Replaces nodes by results of an operator, and erases them.

    Args:
        graph: the graph.
        outputs: pairs of a node that others use, and the key of its result.
        results: the results.
        nodes: all nodes that the operator replaces.
        replaced: see `replace`.
    """
    # Nodes with equal values become one result of the operator. Eager PyTorch gives each its own
    # memory. So all but the first are copied if anything writes into the result, or if they leave
    # the graph.
    members = set(nodes)
    changed = {key for old, key in outputs if may_be_changed(old)}
    returned = set[Any]()
    for old, key in outputs:
        result = results[key]
        if key in returned and (key in changed or escapes(old)):
            with graph.inserting_after(result):
                result = graph.call_function(torch.ops.aten.clone.default, (result,))
        returned.add(key)
        old.replace_all_uses_with(result, lambda user: user not in members)
        result.meta.setdefault("val", value_of(old))
        replaced[old] = result
    # Backwards, since a node with users cannot be erased.
    for node in sorted(members, reverse=True):
        graph.erase_node(node)


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
