"""Casts of concatenated tensors, before the concatenation instead of after it.

Under autocast, slices are normalised in fp32, concatenated, and cast for a matrix product:

    regions ──▶ cat, fp32 ──▶ cast to bf16 ──▶ mm   becomes   regions with casts ──▶ cat ──▶ mm

The values are the same. The regions then write half of the bytes, and their backward reads the
product's gradient as it is; else that would be cast into a tensor of its own first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..graphs import dtype_of, is_tensor, name_of, parts_of, value_of
from ..rewrite import Rewrite

__all__ = ["cast_before_concatenating"]


def cast_before_concatenating(rewrite: Rewrite) -> None:
    """Moves the only cast of a concatenation's result to the tensors that are concatenated."""
    graph = rewrite.graph
    part = parts_of(graph)
    for cast in list(graph.nodes):
        cat = _narrowed(cast)
        if cat is None or part[cat] != part[cast]:
            continue
        tensors: Any = cat.args[0]
        casts = [_cast(graph, cat, node, cast) for node in tensors]
        cat.args = (casts, *cat.args[1:])
        cat.meta["val"] = value_of(cast)
        cast.replace_all_uses_with(cat)
        graph.erase_node(cast)


def _narrowed(cast: fx.Node) -> fx.Node | None:
    """The concatenation whose result a node alone uses, and casts to a smaller dtype."""
    if name_of(cast) != "_to_copy" or set(cast.kwargs) != {"dtype"} or not is_tensor(cast):
        return None
    cat: Any = cast.args[0]
    if name_of(cat) not in ("cat", "stack") or len(cat.users) > 1:
        return None
    dtypes = set(map(dtype_of, (cat, *cat.all_input_nodes)))
    # Tensors of several dtypes would be promoted first.
    return cat if len(dtypes) == 1 and _is_narrower(dtype_of(cast), dtype_of(cat)) else None


def _is_narrower(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether a floating-point dtype has fewer bits than another."""
    are_floats = dtype.is_floating_point and other.is_floating_point
    return are_floats and dtype.itemsize < other.itemsize


def _cast(graph: fx.Graph, cat: fx.Node, node: fx.Node, cast: fx.Node) -> fx.Node:
    """The cast of a tensor before it is concatenated."""
    with graph.inserting_before(cat):
        result = graph.node_copy(cast, lambda _: node)
    result.meta["val"] = value_of(node).to(dtype_of(cast))
    return result
