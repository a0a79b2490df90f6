"""Regions that become operators of the compiler."""

from __future__ import annotations

from torch import fx

from ..replacing import replace
from ..rewrite import Rewrite
from ..selection import Match, Selector

__all__ = ["fuse_regions"]


def fuse_regions(rewrite: Rewrite) -> None:
    """Replaces the regions for which an operator pays, and reports all regions."""
    graph, recorded = rewrite.graph, rewrite.recorded
    selector = Selector(graph, rewrite.needs, rewrite.receives)
    selector.select()
    for match in selector.matches:
        # Where gradients are off, nothing has one: there is nothing to cut.
        is_recorded = match.region.nodes[0] in recorded
        cut = _inputs_without_gradient(match, rewrite.needs) if is_recorded else set[fx.Node]()
        replace(graph, match, rewrite.needs, cut, selector.replaced)
        rewrite.results += [selector.replaced[old] for old, _ in match.program.outputs]
    rewrite.reports = selector.reports


def _inputs_without_gradient(match: Match, needs: set[fx.Node]) -> set[fx.Node]:
    """The nodes with gradients that have none through a region.

    An operator returns a gradient for each of its arguments, if only zeros. PyTorch's own operators
    return none where no path leads to a result, so such arguments are detached.
    """
    return needs - match.reached
