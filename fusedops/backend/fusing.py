"""Rewrites a captured graph by all passes."""

from __future__ import annotations

from torch import fx

from .fx import without_autocast
from .passes import PASSES
from .prediction import Measure
from .report import CompileReport
from .rewrite import Rewrite

__all__ = ["fused"]


def fused(
    gm: fx.GraphModule, report: CompileReport, rest: str, measure: Measure | None = None
) -> None:
    """Replaces the regions of a captured graph by operators, and adds each region to a report.

    Args:
        gm: the captured graph.
        report: the report.
        rest: what runs the rest of the graph: see `options`.
        measure: measures regions; None to predict all times.
    """
    rewrite = Rewrite(gm.graph, rest, measure)
    # Passes compute nodes of the graph, and trace regions: autocast would cast once more.
    with without_autocast():
        for apply in PASSES[rest]:
            apply(rewrite)
            rewrite.drop_sets()
    gm.graph.lint()
    gm.recompile()
    report.regions += rewrite.reports
    report.rest += rewrite.rest
    report.differentiated += rewrite.differentiated
