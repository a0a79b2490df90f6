"""Row-wise regions of a captured graph: which nodes are to be one operator.

A region grows around a *seed* along the edges of the graph: through operators of the same elements,
and through what is broadcast to them if nothing else uses it. Seeds are reductions over the last
dimensions, dropouts, and biases of matrix products. A region is convex: no path leaves it and comes
back.
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
from ..core.calls.operators import NAMES
from ..core.compat.fake import hints, memory_of
from ..core.launches import launch
from .fx import GRAD_MODES, HIGHER_ORDER, aten_name, leaves, mutates, named_again, written_arguments
from .symbols import have_hints, settled

__all__ = [
    "BIAS",
    "CHANGING",
    "COPIES",
    "FUNCTION",
    "VIEWS",
    "Finder",
    "Region",
    "aliased_inputs",
    "are_numbers",
    "arguments_first",
    "captured_body",
    "changed_in",
    "columns_of",
    "drop_unused",
    "escapes",
    "is_fixed",
    "is_input",
    "is_laid_out",
    "is_of_elements",
    "is_view",
    "name_of",
    "nodes_in",
    "overlap",
    "parts_of",
    "reshapes",
    "size_of",
    "tensors_in",
    "tensors_of",
    "users_of",
    "users_through",
    "value_of",
    "written",
]

# The mark of a sum of a matrix product and a bias, in `fx.Node.meta`.
BIAS = "fusedops_bias"
# The mark of the results of a function of `rowwise`, in `fx.Node.meta`: the function's name.
FUNCTION = "fusedops_function"
# Operators whose results are views: they address the same elements by other indices.
VIEWS = frozenset(
    {
        "view",
        "_unsafe_view",
        "reshape",
        "_reshape_alias",
        "expand",
        "unsqueeze",
        "squeeze",
        "permute",
        "transpose",
        "t",
        "alias",
        "split",
        "split_with_sizes",
        "chunk",
        "select",
        "slice",
        "unbind",
    }
)
# The reason for leaving a region whose kernel would depend on a length that changes between calls.
CHANGING = "a length that changes from call to call is one of columns"
# Operators that compute nothing.
COPIES = VIEWS | {"_to_copy", "clone", ""}
# Operators that move elements to other rows or columns.
_MOVES = (VIEWS - {"view", "_unsafe_view", "reshape", "_reshape_alias", "alias", "unsqueeze"}) | {
    "cat",
    "clone",
    "flip",
    "roll",
}
# Reductions over the dimensions that an argument names; norms, whose argument is a shape; softmax.
_OVER_DIMS = frozenset(
    {"sum", "mean", "amax", "amin", "var", "std", "var_mean", "logsumexp", "linalg_vector_norm"}
)
_NORMS = frozenset({"native_layer_norm", "_fused_rms_norm"})
_SOFTMAX = frozenset({"_softmax", "_safe_softmax"})
# Operators that the tracer supports, but regions leave out: those that create tensors, reductions
# and gathers along other rows, and losses, for which Inductor writes no probabilities.
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
        "stack",
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
        nodes: in the graph's order.
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
        own = set(self.nodes)
        return [node for node in self.nodes if not own.issuperset(node.users)]


def value_of(node: fx.Node) -> Any:
    """The fake tensor of a node, or the other value that it stands for."""
    return node.meta.get("val")


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors in a value, or in nested lists, tuples and dictionaries of values."""
    return [leaf for leaf in leaves(values) if isinstance(leaf, Tensor)]


def tensors_of(nodes: Iterable[fx.Node]) -> list[Tensor]:
    """The fake tensors of nodes."""
    return tensors_in(list(map(value_of, nodes)))


def nodes_in(arguments: Iterable[Any]) -> list[fx.Node]:
    """The arguments that are nodes."""
    return [arg for arg in arguments if isinstance(arg, fx.Node)]


def users_of(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The users of nodes."""
    return set().union(*[node.users for node in nodes])


def are_numbers(sizes: Iterable[Any]) -> bool:
    """Whether no size is a symbol."""
    return all(type(size) is int for size in sizes)


def is_input(node: fx.Node) -> bool:
    """Whether a node is an input of the graph, or a tensor or module that the graph holds."""
    return node.op in ("placeholder", "get_attr")


def overlap(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether a tensor of one group shares memory with a tensor of the other."""
    return not set(map(memory_of, tensors)).isdisjoint(map(memory_of, others))


def captured_body(node: fx.Node) -> fx.Graph | None:
    """The captured graph of the function that an operator calls; None if there is none."""
    arguments = node.all_input_nodes
    body = value_of(arguments[0]) if arguments else None
    return body.graph if isinstance(body, fx.GraphModule) else None


def written(node: fx.Node) -> list[Tensor]:
    """The tensors that a node writes into.

    An operator with a captured body writes what the body writes, also tensors of its own. Any
    other operator that calls functions may write into each of its arguments.
    """
    body = captured_body(node)
    if body is not None:
        return changed_in(body)
    targets: Any = node.all_input_nodes
    if not isinstance(node.target, HIGHER_ORDER):
        targets = written_arguments(node.target, node.args, node.kwargs)
    return tensors_of(nodes_in(targets))


def changed_in(graph: fx.Graph) -> list[Tensor]:
    """The tensors that the nodes of a graph write into."""
    return list(itertools.chain.from_iterable(map(written, graph.nodes)))


def drop_unused(graph: fx.Graph) -> None:
    """Erases the nodes that nothing uses and that change nothing.

    `fx.Graph.eliminate_dead_code` would also erase a checkpointed part that only writes and, in the
    bodies of other operators, calls of methods that write.
    """
    # Backwards, so that the arguments of an erased node are unused when their turn comes.
    for node in reversed(graph.nodes):
        if not node.users and not _has_effect(node):
            graph.erase_node(node)


def _has_effect(node: fx.Node) -> bool:
    """Whether a node is needed even if nothing uses its value."""
    if node.is_impure() or node.target in GRAD_MODES:
        return True
    return bool(written(node))


def name_of(node: fx.Node) -> str:
    """The name of a node's aten operator, without its overload; "" for other nodes."""
    return aten_name(node.target)


def _direct_tensors(value: Any) -> list[Tensor]:
    """A tensor alone, or the tensors of a tuple or a list."""
    values = value if isinstance(value, (tuple, list)) else [value]
    return [tensor for tensor in values if isinstance(tensor, Tensor)]


def size_of(node: fx.Node) -> Any:
    """The number of elements of a node's first tensor, a number or a symbol; 0 without a tensor."""
    tensors = _direct_tensors(value_of(node))
    return math.prod(hints(tensors[0].shape)) if tensors else 0


def parts_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """The part of the graph that each node is in, as a number.

    A node may move among the nodes of its part. Parts are separated by nodes that switch gradients
    on or off, or change tensors; each of these is a part by itself.
    """
    parts, number = {}, 0
    for node in graph.nodes:
        number += is_fixed(node)  # the part before it ends
        parts[node] = number
        number += is_fixed(node)  # the next begins after it
    return parts


def arguments_first(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Nodes and all their ancestors in topological order, otherwise in the order of the nodes."""
    order: dict[fx.Node, None] = {}
    for root in list(nodes):
        if root in order:
            continue
        # A depth-first walk with its own stack: graphs may be deeper than Python's recursion limit.
        stack: list[tuple[fx.Node, Any]] = [(root, iter(root.all_input_nodes))]
        while stack:
            node, arguments = stack[-1]
            pending = next((arg for arg in arguments if arg not in order), None)
            if pending is not None:
                stack.append((pending, iter(pending.all_input_nodes)))
                continue
            order.setdefault(node)
            stack.pop()
    return list(order)


def escapes(node: fx.Node) -> bool:
    """Whether a value needs its own memory: it or a view of it is returned or changed in place."""
    users = list(users_through(node, _is_alias))
    return any(map(is_fixed, users)) or any(user.op == "output" for user in users)


def is_laid_out(node: fx.Node) -> bool:
    """Whether the strides of a value count: it, or a view of it, is changed or read by strides."""
    users = list(users_through(node, _is_alias))
    return any(map(is_fixed, users)) or "as_strided" in map(name_of, users)


def users_through(node: fx.Node, passes: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    """The users of a node, and the users of those for which ``passes`` holds."""
    todo = list(node.users)
    while todo:
        user = todo.pop()
        yield user
        if passes(user):
            todo += user.users


def _is_alias(node: fx.Node) -> bool:
    """Whether a node's value has the memory of an argument."""
    return name_of(node) in VIEWS or bool(aliased_inputs(node))


def aliased_inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node returns or is a view of."""
    if node.target is operator.getitem:
        return node.all_input_nodes
    aliased = named_again(node.target, node.args, node.kwargs)
    return nodes_in(aliased)


def reshapes(node: fx.Node) -> bool:
    """Whether a node is a view in another shape, which other strides may make a copy."""
    return name_of(node) in ("view", "_unsafe_view") and not isinstance(node.args[1], torch.dtype)


def is_view(node: fx.Node) -> bool:
    """Whether a node is a view, or one of the views that another node returns."""
    return name_of(node) in VIEWS or _is_part_of_view(node)


def _is_part_of_view(node: fx.Node) -> bool:
    """Whether a node is one of several views of a tensor, such as one result of a split."""
    if node.target is not operator.getitem:
        return False
    return name_of(node.args[0]) in VIEWS  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Reach:
    """The nodes of a region, their ancestors and their descendants, as bit sets of positions.

    A region is convex if every node that is both an ancestor and a descendant is in it:

        in region ──▶ outside ──▶ in region
                      (a bit of `descendants` and of `ancestors`, not of `own`)
    """

    own: int = 0
    ancestors: int = 0
    descendants: int = 0

    @property
    def is_convex(self) -> bool:
        """Whether no path leaves the region and comes back."""
        return not self.ancestors & self.descendants & ~self.own


class Finder:
    """Finds the regions of a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.position = {node: position for position, node in enumerate(self.nodes)}
        self.ancestors = self._closure(self.nodes, lambda node: node.all_input_nodes)
        self.descendants = self._closure(self.nodes[::-1], lambda node: node.users)
        self.part = parts_of(graph)
        self.eligible = set(filter(_is_eligible, self.nodes))
        self.claimed: set[fx.Node] = set()  # the nodes that are in a region

    def regions(self) -> list[Region]:
        """All regions, in the order of their first seeds."""
        return list(self._find(self.nodes))

    def smaller(self, region: Region) -> list[Region]:
        """The regions within one that cannot be a single kernel.

        Nodes that move elements to other rows or columns are left out.
        """
        self.claimed.difference_update(region.nodes)
        eligible = self.eligible
        self.eligible = {node for node in region.nodes if name_of(node) not in _MOVES}
        regions = list(self._find(region.nodes))
        self.eligible = eligible
        # One that is no smaller is the region that has failed.
        return [other for other in regions if len(other.nodes) < len(region.nodes)]

    def changing(self) -> list[Region]:
        """The unclaimed reductions whose number of columns may change between calls, each alone."""
        unclaimed = filter(self._is_free, self.nodes)
        return [Region([node]) for node in unclaimed if isinstance(_columns(node), torch.SymInt)]

    def _is_free(self, node: fx.Node) -> bool:
        return node in self.eligible and node not in self.claimed

    def _find(self, nodes: Iterable[fx.Node]) -> Iterator[Region]:
        # Reductions first: they fix the number of columns, and other seeds join their regions.
        for node in nodes:
            columns = columns_of(node) if self._is_free(node) else 0
            if columns:
                yield from self._grow(node, columns)
        for node in nodes:
            if _is_other_seed(node) and self._is_free(node):
                yield from self._grow(node, 0)

    def _closure(self, nodes: Sequence[fx.Node], next_to: Any) -> dict[fx.Node, int]:
        """The ancestors (or the descendants) of each node, as a bit set of positions.

        Args:
            nodes: in an order in which those of `next_to` come first.
            next_to: returns the arguments (or the users) of a node.
        """
        closure: dict[fx.Node, int] = {}
        for node in nodes:
            bits = 0
            for other in next_to(node):
                bits |= closure[other] | 1 << self.position[other]
            closure[node] = bits
        return closure

    # --- growth -----------------------------------------------------------------------------------

    def _grow(self, seed: fx.Node, columns: int) -> Iterator[Region]:
        """Grows a region from a seed along the edges of the graph, and claims its nodes.

        Args:
            seed: the first node.
            columns: the number of columns of the seed's reduction; 0 for other seeds.
        """
        size = max(map(size_of, [seed, *seed.all_input_nodes]))
        own: dict[fx.Node, None] = {}  # in the order of growth
        reach = _Reach()
        todo = [seed]
        while todo:
            node = todo.pop()
            if node in own or not self._may_join(node, own, size, columns):
                continue
            extended = self._extended(reach, node)
            if not extended.is_convex:
                continue
            own[node] = None
            reach = extended
            todo += self._neighbours(node)
            if not todo:
                todo = self._broadcast_inputs(own, size)
        nodes = self._trimmed(sorted(own, key=self.position.__getitem__))
        self.claimed.update(nodes)
        if seed in nodes:
            yield Region(nodes)

    def _extended(self, reach: _Reach, node: fx.Node) -> _Reach:
        """The reach of a region with one more node."""
        own = reach.own | 1 << self.position[node]
        ancestors = reach.ancestors | self.ancestors[node]
        descendants = reach.descendants | self.descendants[node]
        return _Reach(own, ancestors, descendants)

    def _neighbours(self, node: fx.Node) -> list[fx.Node]:
        """The eligible arguments and users of a node, the last of the graph first."""
        adjacent = self.eligible.intersection([*node.all_input_nodes, *node.users])
        return sorted(adjacent, key=self.position.__getitem__, reverse=True)

    def _may_join(
        self, node: fx.Node, own: Mapping[fx.Node, None], size: int, columns: int
    ) -> bool:
        """Whether a region may have one more node, as far as its convexity allows it."""
        if not self._is_free(node):
            return False
        first = next(iter(own), None)
        if first is not None and self.part[first] != self.part[node]:
            return False
        if size_of(node) > size or not self._is_along(node, columns):
            return False
        if first is None or size_of(node) == size:
            return True
        # A smaller value that the region does not compute itself is broadcast to it. It joins only
        # if nothing else uses it: otherwise the region would have to write it, too.
        is_computed_here = not own.keys().isdisjoint(node.all_input_nodes)
        return is_computed_here or node.users.keys() <= own.keys()

    def _broadcast_inputs(self, own: Mapping[fx.Node, None], size: int) -> list[fx.Node]:
        """The smaller inputs of a region that nothing else uses."""
        arguments = itertools.chain.from_iterable(node.all_input_nodes for node in own)
        return [arg for arg in arguments if self._is_only_broadcast(arg, own, size)]

    def _is_only_broadcast(self, arg: fx.Node, own: Mapping[fx.Node, None], size: int) -> bool:
        """Whether an input of a region is smaller than it, and used by nothing else."""
        if arg in own or arg not in self.eligible:
            return False
        return size_of(arg) < size and arg.users.keys() <= own.keys()

    def _is_along(self, node: fx.Node, columns: int) -> bool:
        """Whether a node is no reduction, or one over rows of the region's length."""
        if name_of(node) not in _OVER_DIMS | _NORMS | _SOFTMAX:
            return True
        own_columns = columns_of(node)
        return bool(own_columns) and columns in (0, own_columns)

    def _trimmed(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """The nodes without the views at the region's borders, where a kernel gains nothing."""
        own = dict.fromkeys(nodes)
        changing = True
        while changing:
            changing = False
            for node in list(own):
                if is_view(node) and _is_at_border(node, own):
                    del own[node]
                    changing = True
        return list(own)


def _is_eligible(node: fx.Node) -> bool:
    """Whether a node may be in a region."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_of_elements(node.args[0])  # type: ignore[arg-type]
    if not is_of_elements(node) or is_fixed(node):
        return False
    tensors = _direct_tensors(value_of(node))
    for arg in node.all_input_nodes:
        tensors += _direct_tensors(value_of(arg))
    devices = {tensor.device for tensor in tensors}
    return all(map(_is_readable, tensors)) and len(devices) == 1


def _is_at_border(node: fx.Node, own: Mapping[fx.Node, None]) -> bool:
    """Whether a node of a region has no argument in it, or no user in it."""
    if own.keys().isdisjoint(node.all_input_nodes):
        return True
    # All parts of a tensor leave together.
    leaving = list(node.all_input_nodes[0].users) if _is_part_of_view(node) else [node]
    return all(own.keys().isdisjoint(other.users) for other in leaving)


def _is_dropout(node: fx.Node) -> bool:
    return name_of(node) == "native_dropout"


def _is_other_seed(node: fx.Node) -> bool:
    """Whether a region may grow from a node that is no reduction."""
    if _is_dropout(node):
        return True
    return bool(node.meta.get(BIAS) or node.meta.get(FUNCTION))


def columns_of(node: fx.Node) -> int:
    """The number of columns of a reduction; 0 for other nodes, and for a number that may change."""
    columns = _columns(node)
    return columns if type(columns) is int else 0


def _columns(node: fx.Node) -> int | torch.SymInt:
    """The number of columns of a reduction over the last dimensions; 0 for other nodes."""
    source = node.args[0] if node.args else None
    value = value_of(source) if isinstance(source, fx.Node) else None
    if not isinstance(value, Tensor) or value.dim() == 0:
        return 0
    rank = value.dim()
    dims = _reduced_dims(node, rank)
    is_over_all = len(dims) == rank
    if not dims or is_over_all or dims != list(range(rank - len(dims), rank)):
        return 0
    sizes: list[Any] = [settled(value.shape[dim]) for dim in dims]
    return math.prod(sizes)  # type: ignore[no-any-return]


def _reduced_dims(node: fx.Node, rank: int) -> list[int]:
    """The dimensions that a reduction is over, in their order; empty for other nodes."""
    name = name_of(node)
    dims: Any = ()
    if name in _NORMS:
        dims = range(rank - len(node.args[1]), rank)  # type: ignore[arg-type]
    elif name in _SOFTMAX:
        dims = [node.args[1]]
    elif name in _OVER_DIMS:
        position = 2 if name == "linalg_vector_norm" else 1
        is_positional = len(node.args) > position
        dims = node.args[position] if is_positional else node.kwargs.get("dim", ())
    if isinstance(dims, int):
        dims = [dims]
    return sorted(dim % rank for dim in dims or ())


def is_of_elements(node: fx.Node) -> bool:
    """Whether a node computes elements of rows, or sums over them."""
    if _is_dropout(node):
        return True
    name = name_of(node)
    return name in TABLE and name not in _EXCLUDED and not name.endswith("_")


def _is_readable(tensor: Tensor) -> bool:
    """Whether a kernel can read a tensor: strided, of a supported dtype and device, not empty."""
    if tensor.dtype not in NAMES or tensor.layout is not torch.strided:
        return False
    if not launch.runs_kernels(tensor.device.type) or not have_hints(tensor.shape):
        return False
    return 0 not in hints(tensor.shape)


def is_fixed(node: fx.Node) -> bool:
    """Whether a node keeps its position among all others."""
    if node.op != "call_function":
        return False
    if node.target in GRAD_MODES or isinstance(node.target, HIGHER_ORDER):
        return True
    return mutates(node.target)
