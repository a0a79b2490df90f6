"""Regions that compute the same of different slices: which of them are to be one operator.

A group is *in order* if no value must wait: the inputs of all members precede the first user of any
result. Other members may be one operator if none needs another, such as the layers of parallel
towers. The graph is then reordered, layer by layer::

    a1  a2  a3   b1  b2  b3        becomes        a1 b1   a2 b2   a3 b3
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import fx

from .graphs import (
    ancestors_of,
    is_tensor,
    name_of,
    parts_of,
    positions_of,
    size_of,
    users_of,
)
from .order import Units
from .regions import Region, connected

__all__ = ["LEAST_ALIKE", "Former", "Group", "parts_alike"]

_T = TypeVar("_T")

# The fewest parts of a region that become operators of their own, and the fewest regions that
# become one operator only because they are alike.
LEAST_ALIKE = 4


def parts_alike(region: Region) -> list[Region]:
    """The connected parts of a region, if they are many and compute the same of other tensors.

    Parts that read the same tensors stay one kernel, which reads them once.
    """
    parts = connected(region.nodes)
    if len(parts) < LEAST_ALIKE or len({tuple(map(name_of, nodes)) for nodes in parts}) > 1:
        return []
    size = max(map(size_of, region.nodes))
    inputs = [set(filter(is_tensor, Region(nodes).inputs)) for nodes in parts]
    largest = [{node for node in own if size_of(node) >= size // len(parts)} for own in inputs]
    if sum(map(len, largest)) > len(set().union(*largest)):
        return []
    return list(map(Region, parts))


# --- groups ---------------------------------------------------------------------------------------


class Group(Generic[_T]):
    """Members of a group that may grow.

    Attributes:
        members: what has the regions.
        region: the regions of all members.
        bits: their nodes, as a bit set of positions.
        ancestors: the ancestors of these.
        last_input: the position of the last input of any.
        first_user: the position of the first node that uses a result of any.
    """

    def __init__(self) -> None:
        self.members: list[_T] = []
        self.region = Region([])
        self.bits = self.ancestors = 0
        self.last_input, self.first_user = -1, 1 << 62

    @property
    def is_in_order(self) -> bool:
        """Whether the inputs of all members precede the first user of any."""
        return self.last_input < self.first_user


class Former(Generic[_T]):
    """Forms groups of a graph's regions.

    Args:
        graph: the graph.
        region_of: returns the region of a member.
        key_of: returns what is the same for members of a group; None for one that is in none.
        fits: whether a member may be in one group with another, of the same key.
        layered: whether groups need not be in order. Each member then joins the first group that
            has none that it needs: the first layers of parallel towers are one group.
    """

    def __init__(
        self,
        graph: fx.Graph,
        region_of: Callable[[_T], Region],
        key_of: Callable[[_T], Hashable],
        fits: Callable[[_T, _T], bool],
        *,
        layered: bool = False,
    ) -> None:
        self.position, self.part = positions_of(graph), parts_of(graph)
        self.region_of, self.key_of, self.fits = region_of, key_of, fits
        self.ancestors: Mapping[fx.Node, int] = ancestors_of(graph) if layered else {}
        self.layered = layered
        self.groups: list[Group[_T]] = []

    def form(self, members: Sequence[_T]) -> list[Group[_T]]:
        """The groups, of one member or more, in the order of their first members."""
        by_key: dict[Any, list[Group[_T]]] = {}
        regions = {id(member): self.region_of(member) for member in members}
        waiting = dict(regions)
        for member in sorted(members, key=lambda member: self._start(regions[id(member)])):
            region = waiting.pop(id(member))
            own_key = self.key_of(member)
            # One operator is in one part of the graph: see `graphs.parts_of`.
            groups = by_key.setdefault((self.part[region.nodes[0]], own_key), [])
            group = None
            if own_key is not None:
                group = self._group_of(member, region, groups, waiting.values())
            if group is None:
                group = Group[_T]()
                groups.append(group)
                self.groups.append(group)
            self._add(group, member, region)
        return self.groups

    def _group_of(
        self, member: _T, region: Region, groups: Sequence[Group[_T]], others: Collection[Region]
    ) -> Group[_T] | None:
        """The group that a member joins; None if it begins one.

        Args:
            member: the member.
            region: its region.
            groups: those of its key.
            others: the regions that are in no group yet.
        """
        if self.layered:
            independent = self._independent(region, groups, others)
            return next((g for g in independent if self.fits(g.members[0], member)), None)
        fitting = (g for g in reversed(groups) if self.fits(g.members[0], member))
        last = next(fitting, None)
        return last if last is not None and self._follows(last, region) else None

    def _start(self, region: Region) -> int:
        return self.position[region.nodes[0]]

    def _extent(self, region: Region) -> tuple[int, int]:
        """The position of a region's last input, and of the first node that uses a result."""
        users = users_of(region.outputs).difference(region.nodes)
        inputs = [self.position[node] for node in filter(is_tensor, region.inputs)]
        first_user = min([self.position[user] for user in users], default=1 << 62)
        return max(inputs, default=-1), first_user

    def _follows(self, group: Group[_T], region: Region) -> bool:
        """Whether a group is in order with a region."""
        last_input, first_user = self._extent(region)
        return max(last_input, group.last_input) < min(first_user, group.first_user)

    def _independent(
        self, region: Region, groups: Sequence[Group[_T]], others: Collection[Region]
    ) -> Iterator[Group[_T]]:
        """The groups that do not need a region nor it them, not even through other groups."""
        bits, ancestors = self._reach(region)
        for group in groups:
            # A chain of layers has a group for each layer. This rules all of them out.
            if group.bits & ancestors or bits & group.ancestors:
                continue
            other_groups = [other.region for other in self.groups if other is not group]
            units = Units([*other_groups, *others])
            if not units.are_cyclic_with(_union(group.region, region)):
                yield group

    def _reach(self, region: Region) -> tuple[int, int]:
        """The nodes of a region, and their ancestors, as bit sets."""
        bits = ancestors = 0
        for node in region.nodes:
            bits |= 1 << self.position[node]
            ancestors |= self.ancestors.get(node, 0)
        return bits, ancestors

    def _add(self, group: Group[_T], member: _T, region: Region) -> None:
        last_input, first_user = self._extent(region)
        group.members.append(member)
        group.region = _union(group.region, region)
        bits, ancestors = self._reach(region)
        group.bits, group.ancestors = group.bits | bits, group.ancestors | ancestors
        group.last_input = max(last_input, group.last_input)
        group.first_user = min(first_user, group.first_user)


def _union(region: Region, other: Region) -> Region:
    return Region([*region.nodes, *other.nodes])
