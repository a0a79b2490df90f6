"""A captured graph while the passes rewrite it, with what they share."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from .gradients import needs_gradients, receives_gradients
from .prediction import Measure
from .report import RegionReport

__all__ = ["Rewrite"]


@dataclass(eq=False)
class Rewrite:
    """A captured graph while the passes rewrite it.

    The sets of nodes are computed when a pass first reads them, for the graph as it is then. They
    are dropped after each pass, which may have replaced nodes.

    Attributes:
        graph: a graph of operators. PyTorch has not differentiated it yet.
        runner: what runs the nodes that are in no region: see `options`.
        measure: measures regions; None to predict all times.
        sums: from each sum with a bias to the product or convolution that it was split from.
        results: the nodes that have replaced the outputs of regions. They are contiguous.
        restrided: from other nodes whose strides are not the model's to their values.
        reports: the reports of all regions.
        rest: the bytes that operators outside of regions read and write forward, one by one.
        differentiated: those of operators whose results have gradients.
    """

    graph: fx.Graph
    runner: str
    measure: Measure | None = None
    sums: dict[fx.Node, fx.Node] = field(default_factory=dict)
    results: list[fx.Node] = field(default_factory=list)
    restrided: dict[fx.Node, Any] = field(default_factory=dict)
    reports: list[RegionReport] = field(default_factory=list)
    rest: int = 0
    differentiated: int = 0

    @functools.cached_property
    def needs(self) -> set[fx.Node]:
        """The nodes whose values have gradients."""
        return needs_gradients(self.graph)

    @functools.cached_property
    def receives(self) -> set[fx.Node]:
        """Those of `needs` whose gradients come from a result of the graph."""
        return receives_gradients(self.graph, self.needs)

    def drop_sets(self) -> None:
        """Drops the sets, so that they are computed again when they are read."""
        for name in ("needs", "receives"):
            self.__dict__.pop(name, None)
