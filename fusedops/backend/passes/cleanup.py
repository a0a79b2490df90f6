"""The order of a rewritten graph, views in it, and nodes that nothing uses."""

from __future__ import annotations

import itertools

import torch
from torch import fx

from ..graphs import arguments_first, drop_unused, reshapes
from ..rewrite import Rewrite

__all__ = ["clean_up"]


def clean_up(rewrite: Rewrite) -> None:
    """Sorts the nodes, makes views valid for any strides, and erases unused nodes."""
    graph = rewrite.graph
    _sort(graph)
    # The strides need not be those with which a view was recorded. `reshape` copies where `view`
    # would raise, and is a view otherwise.
    for node in filter(reshapes, graph.nodes):
        node.target = torch.ops.aten.reshape.default
    drop_unused(graph)


def _sort(graph: fx.Graph) -> None:
    """Sorts a graph topologically, and otherwise leaves its order.

    A pass puts an operator before the first of its users. Other arguments of it may come later:

        a   operator(a, b)   user   b        becomes        a   b   operator(a, b)   user
    """
    for node, following in itertools.pairwise(arguments_first(graph.nodes)):
        node.append(following)  # moves `following` to the position after `node`
