"""Row-wise regions of a captured graph: which nodes are to be one operator.

A region grows around a *seed* along the edges of the graph: through operators of the same elements,
and through what is broadcast to them if nothing else uses it. Seeds are reductions over the last
dimensions, dropouts, and biases of matrix products. A region is convex: no path leaves it and comes
back.

    mm ──▶ add bias ──▶ dropout ──▶ add ──▶ layer_norm ──▶ mm      nodes of one size: one region
                                     ▲                             its seed is layer_norm
                                     └── residual
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..compiler.lowering import TABLE
from ..core.calls.words import NAMES
from ..core.compat.fake import hints
from ..core.launches import launch
from .graphs import (
    BIAS,
    COPIES,
    FUNCTION,
    VIEWS,
    ancestors_of,
    closure,
    direct_tensors,
    is_fixed,
    is_part_of_view,
    is_tensor,
    is_view,
    name_of,
    parts_of,
    positions_of,
    size_of,
    users_of,
    value_of,
)
from .symbols import have_hints, settled

__all__ = [
    "CHANGING",
    "DIVIDING",
    "Finder",
    "Region",
    "columns_of",
    "connected",
    "is_of_elements",
    "reduced_dims",
    "set_dim",
]

# The reason for leaving a region whose kernel would depend on a length that changes between calls.
CHANGING = "a length that changes from call to call is one of columns"
# Operators that move elements to other rows or columns.
_MOVES = (VIEWS - {"view", "_unsafe_view", "reshape", "_reshape_alias", "alias", "unsqueeze"}) | {
    "cat",
    "clone",
    "flip",
    "roll",
    "stack",
}
# Views that are several parts of a tensor.
DIVIDING = frozenset({"split", "split_with_sizes", "chunk", "unbind"})
# Reductions that take their dimensions as an argument. `_NORMS` take a shape instead.
_OVER_DIMS = frozenset(
    {"sum", "mean", "amax", "amin", "var", "std", "var_mean", "logsumexp", "linalg_vector_norm"}
)
# The position of the dimensions among a reduction's arguments, if it is not 1.
_POSITION_OF_DIMS = {"linalg_vector_norm": 2}
_NORMS = frozenset({"native_layer_norm", "_fused_rms_norm"})
_SOFTMAX = frozenset({"_softmax", "_safe_softmax"})
# Operators that the tracer supports, but regions leave out: those that create tensors, reductions
# and gathers along other rows, and losses. Inductor fuses a loss with the softmax before it; an
# operator of the softmax would write all probabilities.
_EXCLUDED = frozenset(
    {
        "arange",
        "full",
        "new_full",
        "zeros",
        "new_zeros",
        "ones",
        "new_ones",
        "scalar_tensor",
        "max",
        "min",
        "argmax",
        "argmin",
        "any",
        "all",
        "native_group_norm",
        "gather",
        "nll_loss_forward",
        "lift_fresh_copy",
        "lift",
        "detach",
        "copy",
        "norm",
        "_log_softmax",
        "huber_loss",
        "smooth_l1_loss",
        "binary_cross_entropy",
        "roll",
        "flip",
        "constant_pad_nd",
        "fill",
        "zero",
        "multi_margin_loss",
        "empty",
        "empty_like",
        "new_empty",
    }
)


@dataclass(eq=False)
class Region:
    """Nodes that are to be one operator.

    Attributes:
        nodes: its nodes, in the graph's order.
    """

    nodes: list[fx.Node]

    @property
    def inputs(self) -> list[fx.Node]:
        """The nodes outside the region that it uses, each once."""
        inputs: dict[fx.Node, None] = {}
        for node in self.nodes:
            inputs.update(dict.fromkeys(node.all_input_nodes))
        for node in self.nodes:
            inputs.pop(node, None)
        return list(inputs)

    @property
    def outputs(self) -> list[fx.Node]:
        """The nodes of the region that others use."""
        members = set(self.nodes)
        return [node for node in self.nodes if not members.issuperset(node.users)]


@dataclass(frozen=True)
class _Reach:
    """The nodes of a region, their ancestors and their descendants, as bit sets of positions.

    A region is convex if every node that is both an ancestor and a descendant is in it:

        in region ──▶ outside ──▶ in region
                      (a bit of `descendants` and of `ancestors`, not of `members`)
    """

    members: int = 0
    ancestors: int = 0
    descendants: int = 0

    @property
    def is_convex(self) -> bool:
        """Whether no path leaves the region and comes back."""
        return not self.ancestors & self.descendants & ~self.members


def _is_dropout(node: fx.Node) -> bool:
    return name_of(node) == "native_dropout"


def _is_other_seed(node: fx.Node) -> bool:
    """Whether a region may grow from a node that is no reduction."""
    if _is_dropout(node):
        return True
    return bool(node.meta.get(BIAS) or node.meta.get(FUNCTION))


def _computes(node: fx.Node) -> bool:
    """Whether a node computes elements of rows, instead of a copy or a view."""
    return name_of(node) not in COPIES and is_tensor(node)


class Finder:
    """Finds the regions of a graph.

    Args:
        graph: the graph.
        keeps_views: whether regions have the views of a tensor that they read in several ways.
    """

    def __init__(self, graph: fx.Graph, *, keeps_views: bool = False) -> None:
        self.nodes = list(graph.nodes)
        self.keeps_views = keeps_views
        self.position = positions_of(graph)
        self.ancestors = ancestors_of(graph)
        self.descendants = closure(self.nodes[::-1], lambda node: node.users, self.position)
        self.part = parts_of(graph)
        self.eligible = set(filter(_is_eligible, self.nodes))
        self.claimed: set[fx.Node] = set()  # the nodes that are in a region

    def regions(self) -> list[Region]:
        """All regions, in the order of their first seeds."""
        return list(self._find(self.nodes))

    def smaller(self, region: Region) -> list[Region]:
        """The regions to try within one that cannot be a single kernel.

        The region may have several connected parts: it grew through views at its borders, as from
        queries to a gate of the same packed projection, and these views were trimmed. Then each
        part is tried. If it has one part, that is tried without the nodes that move elements to
        other rows or columns.
        """
        self.claimed.difference_update(region.nodes)
        parts = connected(region.nodes)
        if len(parts) == 1:
            parts = [list(itertools.filterfalse(_moves_elements, region.nodes))]
        eligible = self.eligible
        regions: list[Region] = []
        for nodes in parts:
            self.eligible = set(nodes)
            regions += self._find(nodes)
        self.eligible = eligible
        # A region of the same size is the one that has failed: trying it again would never end.
        return [smaller for smaller in regions if len(smaller.nodes) < len(region.nodes)]

    def rest(self, selected: Iterable[fx.Node]) -> list[Region]:
        """Regions of the nodes that are not selected, in the order of their seeds.

        They may have neither a reduction nor a dropout.
        """
        self.claimed = set(selected)
        return list(self._find(self.nodes, _computes))

    def changing(self) -> list[Region]:
        """The unclaimed reductions whose number of columns may change between calls, each alone."""
        unclaimed = filter(self._is_free, self.nodes)
        return [Region([node]) for node in filter(_has_changing_columns, unclaimed)]

    def _is_free(self, node: fx.Node) -> bool:
        return node in self.eligible and node not in self.claimed

    def _find(
        self, nodes: Iterable[fx.Node], is_other_seed: Callable[[fx.Node], bool] = _is_other_seed
    ) -> Iterator[Region]:
        # Reductions first: they fix the number of columns, and other seeds join their regions.
        # `filter` is lazy: a node that an earlier seed's region has claimed meanwhile is no seed.
        for node in filter(self._is_free, nodes):
            columns = columns_of(node)
            if columns:
                yield from self._grow(node, columns)
        for node in filter(is_other_seed, nodes):
            if self._is_free(node):
                yield from self._grow(node, 0)

    # --- growth -----------------------------------------------------------------------------------

    def _grow(self, seed: fx.Node, columns: int) -> Iterator[Region]:
        """Grows a region from a seed along the edges of the graph, and claims its nodes.

        Args:
            seed: the first node.
            columns: the number of columns of the seed's reduction; 0 for other seeds.
        """
        nodes = self._trimmed(self._reached_from(seed, columns))
        self.claimed.update(nodes)
        # The region is empty if not even the seed could join: a function of `rowwise` may return a
        # reduction over other dimensions than the last.
        if seed in nodes:
            yield Region(nodes)

    def _reached_from(self, seed: fx.Node, columns: int) -> list[fx.Node]:
        """The nodes of a region that grows from a seed, in the order of the graph; see `_grow`."""
        # A reduction is smaller than the rows that it reads: the region has the size of the rows.
        size = max(map(size_of, [seed, *seed.all_input_nodes]))
        members: dict[fx.Node, None] = {}  # in the order of growth
        reach = _Reach()
        todo = [seed]
        while todo:
            node = todo.pop()
            if node in members or not self._may_join(node, members, size, columns):
                continue
            # With this node a path would leave the region and come back. It is left for now: if
            # the nodes on that path join, it is a neighbour of theirs, and tried again.
            extended = self._extended(reach, node)
            if not extended.is_convex:
                continue
            members[node] = None
            reach = extended
            todo += self._neighbours(node)
            if not todo:
                # Last: whether nothing else uses an input is known once all its users have joined.
                todo = self._broadcast_inputs(members, size)
        return sorted(members, key=self.position.__getitem__)

    def _extended(self, reach: _Reach, node: fx.Node) -> _Reach:
        """The reach of a region with one more node."""
        members = reach.members | 1 << self.position[node]
        ancestors = reach.ancestors | self.ancestors[node]
        descendants = reach.descendants | self.descendants[node]
        return _Reach(members, ancestors, descendants)

    def _neighbours(self, node: fx.Node) -> list[fx.Node]:
        """The eligible arguments and users of a node, the last of the graph first."""
        adjacent = self.eligible.intersection([*node.all_input_nodes, *node.users])
        return sorted(adjacent, key=self.position.__getitem__, reverse=True)

    def _may_join(
        self, node: fx.Node, members: Mapping[fx.Node, None], size: int, columns: int
    ) -> bool:
        """Whether a node may join a region, apart from the region's convexity."""
        if not self._is_free(node):
            return False
        first = next(iter(members), node)
        # The operator is one node, so it can be in one part of the graph only: see `parts_of`.
        if self.part[first] != self.part[node]:
            return False
        if not self._is_along(node, columns) or _divides_larger(node, size):
            return False
        size_of_node = size_of(node)
        if size_of_node > size:
            return False
        if first is node or size_of_node == size:
            return True
        # A smaller value that the region does not compute itself is broadcast to it. It joins only
        # if nothing else uses it: otherwise the region would have to write it, too.
        is_computed_here = not members.keys().isdisjoint(node.all_input_nodes)
        return is_computed_here or node.users.keys() <= members.keys()

    def _broadcast_inputs(self, members: Mapping[fx.Node, None], size: int) -> list[fx.Node]:
        """The smaller inputs of a region that nothing else uses."""
        arguments = itertools.chain.from_iterable(node.all_input_nodes for node in members)
        eligible = filter(self.eligible.__contains__, arguments)
        return [arg for arg in eligible if _is_only_broadcast(arg, members, size)]

    def _is_along(self, node: fx.Node, columns: int) -> bool:
        """Whether a node is no reduction, or one over rows of the region's length."""
        if name_of(node) not in _OVER_DIMS | _NORMS | _SOFTMAX:
            return True
        own_columns = columns_of(node)
        return bool(own_columns) and columns in (0, own_columns)

    def _trimmed(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """The nodes without the views at the region's borders, where a kernel gains nothing."""
        members = dict.fromkeys(nodes)
        count = -1
        # Again until none leaves: behind a view that leaves, another may be at the border.
        while count != len(members):
            count = len(members)
            for node in filter(is_view, list(members)):
                if _is_at_border(node, members) and not self._is_of_input(node, members):
                    del members[node]
        return list(members)

    def _is_of_input(self, node: fx.Node, members: Mapping[fx.Node, None]) -> bool:
        """Whether a view is of a tensor that the region reads in another way, too.

        Outside of the region, autograd would compute a gradient of the tensor's size for each view,
        and add them up. Inductor computes views and sums in the kernels around.
        """
        base = node.all_input_nodes[0]
        # An item of a split is in a region only with the split.
        if not self.keeps_views or base in members or not is_tensor(base):
            return False
        # The items of a split have one gradient. If another node reads one, the split is outside.
        if not is_tensor(node):
            return users_of(node.users) <= members.keys()
        return len(members.keys() & base.users.keys()) > 1


def _is_eligible(node: fx.Node) -> bool:
    """Whether a node may be in a region."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_of_elements(node.args[0])  # type: ignore[arg-type]
    if not is_of_elements(node) or is_fixed(node):
        return False
    tensors = direct_tensors(value_of(node))
    for arg in node.all_input_nodes:
        tensors += direct_tensors(value_of(arg))
    if not all(map(_is_readable, tensors)):
        return False
    # PyTorch's operators accept a CPU tensor without dimensions beside tensors of a GPU. A kernel
    # cannot read it.
    devices = set(map(_device_of, tensors))
    return len(devices) == 1


def connected(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The connected parts of a region, each in the region's order."""
    parts: list[set[fx.Node]] = []
    unvisited = dict.fromkeys(nodes)
    while unvisited:
        part = set[fx.Node]()
        todo = {next(iter(unvisited))}
        while todo:
            node = todo.pop()
            del unvisited[node]
            part.add(node)
            todo |= unvisited.keys() & {*node.all_input_nodes, *node.users}
        parts.append(part)
    return [list(filter(part.__contains__, nodes)) for part in parts]


def _moves_elements(node: fx.Node) -> bool:
    return name_of(node) in _MOVES


def _is_only_broadcast(arg: fx.Node, members: Mapping[fx.Node, None], size: int) -> bool:
    """Whether an input of a region is smaller than it, and used by nothing else."""
    is_broadcast = arg not in members and size_of(arg) < size
    return is_broadcast and arg.users.keys() <= members.keys()


def _divides_larger(node: fx.Node, size: int) -> bool:
    """Whether a node divides a tensor larger than a region into parts that differ in size.

    Such a tensor is a packed projection, of more queries than keys. No kernel computes parts of
    different sizes, so a region must not grow from one through the view of another. Parts of equal
    sizes, such as q and k with as many heads, may be one kernel.
    """
    if name_of(node) not in DIVIDING:
        return False
    sizes = {math.prod(hints(part.shape)) for part in direct_tensors(value_of(node))}
    return len(sizes) > 1 and size_of(node.all_input_nodes[0]) > size


def _is_at_border(node: fx.Node, members: Mapping[fx.Node, None]) -> bool:
    """Whether a node of a region has no argument in it, or no user in it."""
    if members.keys().isdisjoint(node.all_input_nodes):
        return True
    leaving = [node]
    if is_part_of_view(node):
        # All parts of a tensor leave together.
        leaving = list(node.all_input_nodes[0].users)
    return members.keys().isdisjoint(users_of(leaving))


def columns_of(node: fx.Node) -> int:
    """The number of columns of a reduction; 0 for other nodes, and for a number that may change."""
    columns = _columns(node)
    return columns if type(columns) is int else 0


def _has_changing_columns(node: fx.Node) -> bool:
    return isinstance(_columns(node), torch.SymInt)


def _columns(node: fx.Node) -> int | torch.SymInt:
    """The number of columns of a reduction over the last dimensions; 0 for other nodes."""
    value = _first_tensor(node)
    if value is None or value.dim() == 0:
        return 0
    rank = value.dim()
    dims = reduced_dims(node, rank)
    last_dims = list(range(rank - len(dims), rank))
    # Over all dimensions there are no rows.
    if dims != last_dims or len(dims) in (0, rank):
        return 0
    sizes: list[Any] = [settled(value.shape[dim]) for dim in dims]
    return math.prod(sizes)  # type: ignore[no-any-return]


def _first_tensor(node: fx.Node) -> Tensor | None:
    """The value of a node's first argument; None if that is no tensor."""
    source = next(iter(node.args), None)
    if not isinstance(source, fx.Node):
        return None
    value = value_of(source)
    return value if isinstance(value, Tensor) else None


def reduced_dims(node: fx.Node, rank: int) -> list[int]:
    """The dimensions that a reduction is over, in their order; empty for other nodes."""
    dims = _named_dims(node, rank)
    if isinstance(dims, int):
        dims = [dims]
    elif dims is None:  # of a sum over everything
        dims = []
    return sorted(dim % rank for dim in dims)


def _named_dims(node: fx.Node, rank: int) -> Any:
    """The dimensions as the arguments of a reduction have them: a number, several, or None."""
    name = name_of(node)
    if name in _NORMS:
        normalized_shape: Any = node.args[1]
        return range(rank - len(normalized_shape), rank)
    if name in _SOFTMAX:
        return node.args[1]
    if name not in _OVER_DIMS:
        return ()
    position = _POSITION_OF_DIMS.get(name, 1)
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get("dim", ())


def set_dim(node: fx.Node, dim: int) -> None:
    """Makes a reduction over one dimension, which it takes as an argument, one over another."""
    position = _POSITION_OF_DIMS.get(name_of(node), 1)
    # A softmax takes a number, other reductions take a list.
    takes_number = name_of(node) in _SOFTMAX
    dims = dim if takes_number else [dim]
    if len(node.args) > position:
        node.update_arg(position, dims)
    else:
        node.update_kwarg("dim", dims)


def is_of_elements(node: fx.Node) -> bool:
    """Whether a node computes elements of rows, or sums over them."""
    if _is_dropout(node):
        return True
    name = name_of(node)
    if name in _EXCLUDED or name.endswith("_"):
        return False
    return name in TABLE


def _device_of(tensor: Tensor) -> torch.device:
    return tensor.device


def _is_readable(tensor: Tensor) -> bool:
    """Whether a kernel can read a tensor: strided, of a supported dtype and device, not empty."""
    if tensor.dtype not in NAMES or tensor.layout is not torch.strided:
        return False
    if not launch.runs_kernels(tensor.device.type):
        return False
    # Sizes that depend on data have no number in the traced call.
    if not have_hints(tensor.shape):
        return False
    return 0 not in hints(tensor.shape)
