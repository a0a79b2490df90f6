"""Regions that become operators of the compiler."""

from __future__ import annotations

from ..replacing import replace
from ..rewrite import Rewrite
from ..selection import Selector

__all__ = ["fuse_regions"]


def fuse_regions(rewrite: Rewrite) -> None:
    """Replaces the regions for which an operator pays, and reports all regions."""
    selector = Selector(rewrite.graph, rewrite.needs, rewrite.receives)
    selector.select()
    for match in selector.matches:
        replace(rewrite.graph, match, selector.replaced)
        rewrite.results += [selector.replaced[old] for old, _ in match.program.outputs]
    rewrite.reports = selector.reports
