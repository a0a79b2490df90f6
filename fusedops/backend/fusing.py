"""Rewrites a captured graph by all passes."""

from __future__ import annotations

from torch import fx

from .fx import without_autocast
from .passes import PASSES
from .report import CompileReport
from .rewrite import Rewrite

__all__ = ["fused"]


def fused(gm: fx.GraphModule, report: CompileReport) -> None:
    """Replaces the regions of a captured graph by operators, and adds each region to a report."""
    rewrite = Rewrite(gm.graph)
    # Passes compute nodes of the graph, and trace regions: autocast would cast once more.
    with without_autocast():
        for apply in PASSES:
            apply(rewrite)
            rewrite.drop_sets()
    gm.graph.lint()
    gm.recompile()
    report.regions += rewrite.reports
    report.rest += rewrite.rest
    report.differentiated += rewrite.differentiated
