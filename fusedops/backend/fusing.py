"""Rewrites a captured graph by all passes."""

from __future__ import annotations

from torch import fx

from .passes import PASSES
from .report import RegionReport
from .rewrite import Rewrite

__all__ = ["fused"]


def fused(gm: fx.GraphModule) -> list[RegionReport]:
    """Replaces the regions of a captured graph by operators, and reports each region."""
    rewrite = Rewrite(gm.graph)
    for apply in PASSES:
        apply(rewrite)
    gm.graph.lint()
    gm.recompile()
    return rewrite.reports
