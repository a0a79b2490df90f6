"""Regions that become operators of the compiler."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from torch import fx

from ..alike import LEAST_ALIKE
from ..changes import NotCapturedError
from ..horizontal import groups_of, replace_group
from ..replacing import replace
from ..rewrite import Rewrite
from ..selection import Match, Selector
from ..shards import is_of_shard

__all__ = ["fuse_regions"]


def fuse_regions(rewrite: Rewrite) -> None:
    """Replaces the regions for which an operator pays, and reports all regions."""
    selector = Selector(
        rewrite.graph, rewrite.needs, rewrite.receives, rewrite.runner, rewrite.measure
    )
    selector.select()
    graph, replaced = rewrite.graph, selector.replaced
    # A concatenation may be a region by itself, which a group of regions replaces as well.
    regions = [match.region.nodes for match in selector.matches]
    left = set(itertools.chain(*[nodes for nodes in regions if len(nodes) > 1]))
    groups = groups_of(graph, selector.matches, rewrite.needs, selector.saved)
    # All at once, so that their kernels are compiled at the same time.
    alone = set(selector.alone([match for match, *others in groups if not others]))
    for matches in groups:
        if left.isdisjoint(matches[0].region.nodes) and matches[0].region.nodes[0] in replaced:
            continue
        if not _are_replaced(rewrite, selector, matches, left):
            # Members of a group that is none may be operators by themselves.
            separate = alone.intersection(matches) if len(matches) == 1 else selector.alone(matches)
            for match in separate:
                replace(graph, match, replaced)
        outputs = [old for match in matches for old, _ in match.program.outputs]
        rewrite.results += filter(None, map(replaced.get, outputs))
    rewrite.reports += selector.reports
    # Last: an operator of slices also replaces what concatenates its results.
    rewrite.rest, rewrite.differentiated = selector.rest()
    # PyTorch would draw the mask of this rank's part alone.
    if any(map(is_of_shard, graph.nodes)):
        raise NotCapturedError("a dropout of a DTensor is in no region")


def _are_replaced(
    rewrite: Rewrite, selector: Selector, matches: Sequence[Match], left: Collection[fx.Node]
) -> bool:
    """Replaces the regions of a group by one operator; returns whether that is possible.

    Args:
        rewrite: the graph of the regions.
        selector: it selected them.
        matches: the group.
        left: see `replace_group`.
    """
    # Slices that pay only together may turn out to be other functions.
    if len(matches) < (LEAST_ALIKE if matches[0].is_slice else 2):
        return False
    grouped = replace_group(rewrite.graph, matches, selector.replaced, rewrite.receives, left)
    if grouped is None:
        return False
    selector.note_group(matches, grouped.lookups, grouped.outside)
    return True
