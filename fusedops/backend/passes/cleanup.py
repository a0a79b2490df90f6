"""The order of a rewritten graph, views in it, and nodes that nothing uses."""

from __future__ import annotations

import torch

from ..graphs import drop_unused, reshapes, sort_nodes
from ..rewrite import Rewrite

__all__ = ["clean_up"]


def clean_up(rewrite: Rewrite) -> None:
    """Sorts the nodes, makes views valid for any strides, and erases unused nodes."""
    graph = rewrite.graph
    sort_nodes(graph)
    # The strides need not be those with which a view was recorded. `reshape` copies where `view`
    # would raise, and is a view otherwise.
    for node in filter(reshapes, graph.nodes):
        node.target = torch.ops.aten.reshape.default
    drop_unused(graph)
