"""The order of a graph in which some regions are to be single nodes.

region ──▶ a        a and b are nodes of one other region: each region alone is convex,
region ◀── b        but as operators each would read the other's results
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import fx

from ..core.compat.fake import hints
from .fx import namespace
from .graphs import arguments_first, is_input, is_view, name_of, tensors_of, users_of
from .regions import Region

__all__ = ["Units", "aliases", "bytes_of", "has_kernel", "order_with", "peak_of", "reorder"]


class Units:
    """Regions that are single nodes of a graph, none of which is in a cycle.

    A path that enters such a region at any of its nodes may leave it from any other.

    Args:
        regions: the first of them; `add` adds others.
    """

    def __init__(self, regions: Iterable[Region] = ()) -> None:
        self._owners: dict[fx.Node, Region] = {}
        # The first and the last node of each chain of overlapping regions, in the graph's order.
        self._first: list[fx.Node] = []
        self._last: list[fx.Node] = []
        for region in regions:
            self.add(region)

    def add(self, region: Region) -> None:
        """Makes one more region a single node."""
        self._owners.update(dict.fromkeys(region.nodes, region))
        first, last = min(region.nodes), max(region.nodes)
        # The chains that overlap the region's span; they become one with it.
        start, stop = bisect(self._last, first), bisect(self._first, last)
        self._first[start:stop] = [min([first, *self._first[start:stop]])]
        self._last[start:stop] = [max([last, *self._last[start:stop]])]

    def are_cyclic_with(self, region: Region) -> bool:
        """Whether replacing one more region by a single node would create a cycle."""
        # Search from the region's users, and stop at the last node from which a path may lead back.
        # Without the stop the time would be quadratic in the number of layers.
        end = self._end_of_overlap(max(region.nodes))
        members, seen = set(region.nodes), set[fx.Node]()
        todo = users_of(members) - members
        while todo:
            node = todo.pop()
            if node in members:
                return True
            if node > end:
                continue
            reached = self._owners[node].nodes if node in self._owners else [node]
            seen.update(reached)
            todo |= users_of(reached) - seen
        return False

    def _end_of_overlap(self, last: fx.Node) -> fx.Node:
        """The last node from which a path may lead back to a region that ends with ``last``.

        Edges lead to later nodes, but a path that enters a region may leave it from its first node.
        So a path leads back from as far as an unbroken chain of overlapping regions reaches:

            region    ├─────┤
            others       ├──────┤       ├────┤
                             ├─────┤
                                   end

        No path leads back from the last of these regions: all of its nodes are after the end.
        """
        # Chains do not overlap. So at most one holds the region's last node: the last of those that
        # begin before it.
        count = bisect(self._first, last)
        return max([last, *self._last[:count][-1:]])


def order_with(graph: fx.Graph, units: Iterable[Region]) -> list[fx.Node]:
    """The graph's nodes in an order in which all inputs of a unit precede its first node.

    A node moves towards the start, and only if a unit needs it: before the unit's first node.
    """
    needed: dict[fx.Node, list[fx.Node]] = {}
    for unit in units:
        needed.update(dict.fromkeys(unit.nodes, unit.inputs))

    def arguments(node: fx.Node) -> list[fx.Node]:
        return [*needed.get(node, ()), *node.all_input_nodes]

    return arguments_first(graph.nodes, arguments)


def reorder(graph: fx.Graph, order: Iterable[fx.Node]) -> None:
    """Puts the nodes of a graph in another order."""
    for node, following in itertools.pairwise(order):
        node.append(following)


def peak_of(
    order: Sequence[fx.Node],
    units: Collection[Region],
    needs: set[fx.Node],
    saved: Collection[fx.Node],
) -> int:
    """An estimate of the most bytes that a graph's values take at one time.

    A unit is computed when the first of its nodes is, and only its outputs take memory. The
    backward runs in the reverse order::

        time      0  1  2  3  4  5  6  7
        node      a  b  c  d  d' c' b' a'        b' computes the gradients of b's inputs
        value b      ├───────────┤               c reads it, and c' if it is saved
        gradient of b             ├──┤

    Args:
        order: the nodes.
        units: the regions that are single nodes.
        needs: the nodes whose values have gradients.
        saved: the nodes that units save for the backward; products save their factors.
    """
    time = dict(zip(order, itertools.count()))
    inside = set[fx.Node]()
    for unit in units:
        time.update(dict.fromkeys(unit.nodes, min(map(time.__getitem__, unit.nodes))))
        inside.update(set(unit.nodes).difference(unit.outputs))
    end = 2 * len(order)
    in_backward = set[fx.Node]()
    if any(not needs.isdisjoint(unit.outputs) for unit in units):  # a backward follows
        in_backward.update(map(_memory_of, [*saved, *_factors(order, needs)]))
    uses: dict[fx.Node, list[int]] = {}
    changes = Counter[int]()
    for node in reversed(order):
        through = map(uses.__getitem__, filter(aliases, node.users))
        uses[node] = [*map(time.__getitem__, node.users), *itertools.chain(*through)]
        if (node in inside and node not in in_backward) or aliases(node) or is_input(node):
            continue
        times, size = uses[node] or [time[node]], bytes_of(node)
        spans = _spans(time[node], times, end, node in in_backward, node in needs)
        for first, last in spans:
            changes[first] += size
            changes[last + 1] -= size
    return max(itertools.accumulate(map(changes.__getitem__, range(end + 2))))


def _spans(
    start: int, times: Sequence[int], end: int, is_in_backward: bool, needs_gradient: bool
) -> Iterator[tuple[int, int]]:
    """The first and last times at which a value and its gradient take memory.

    Args:
        start: the time at which the value is computed.
        times: the times of its uses in the forward.
        end: the time at which the backward ends.
        is_in_backward: whether the backward reads the value.
        needs_gradient: whether it has a gradient.
    """
    yield start, end - min(times) if is_in_backward else max(times)
    if needs_gradient:
        yield end - max(times), end - start


def _factors(nodes: Iterable[fx.Node], needs: set[fx.Node]) -> Iterator[fx.Node]:
    """The arguments of products that the gradients of their other arguments read."""
    for node in filter(has_kernel, nodes):
        for argument in node.all_input_nodes:
            if not needs.isdisjoint({*node.all_input_nodes} - {argument}):
                yield argument


def has_kernel(node: fx.Node) -> bool:
    """Whether an operator has a kernel of its own: a product, an attention, a custom operator."""
    from torch.utils.flop_counter import flop_registry  # imports much

    # The registry has attentions of GPUs alone.
    if "attention" in name_of(node):
        return True
    packet = getattr(node.target, "overloadpacket", None)
    return packet in flop_registry or namespace(node.target) not in ("", "aten", "prims")


def _memory_of(node: fx.Node) -> fx.Node:
    """The node whose memory a value has."""
    while aliases(node):
        node = node.all_input_nodes[0]
    return node


def bytes_of(node: fx.Node) -> int:
    """The bytes of a node's tensors, in the call that is traced."""
    tensors = tensors_of([node])
    return sum([tensor.dtype.itemsize * math.prod(hints(tensor.shape)) for tensor in tensors])


def aliases(node: fx.Node) -> bool:
    """Whether a value has the memory of an argument."""
    return node.target is operator.getitem or is_view(node)
