"""Adds nodes to a captured graph, with their values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..fx import recording_nothing
from ..graphs import value_of
from ..rewrite import Rewrite

__all__ = ["Creator"]


@dataclass
class Creator:
    """Adds nodes to a graph, before one of its nodes.

    Attributes:
        rewrite: the graph.
        before: the node.
        added: the new nodes.
    """

    rewrite: Rewrite
    before: fx.Node
    added: list[fx.Node] = field(default_factory=list)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node, with its fake value."""
        graph, sets = self.rewrite.graph, (self.rewrite.needs, self.rewrite.receives)
        values = fx.node.map_arg((args, kwargs), value_of)
        with recording_nothing(), torch.no_grad():
            value = target(*values[0], **values[1])
        with graph.inserting_before(self.before):
            node = graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        for nodes in sets:
            if not nodes.isdisjoint(node.all_input_nodes):
                nodes.add(node)
        self.added.append(node)
        return node
