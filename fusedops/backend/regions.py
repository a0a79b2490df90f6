"""Row-wise regions of a captured graph: which nodes are to be one operator.

A region grows around a *seed* along the edges of the graph: through operators of the same elements, and through what is
broadcast to them if nothing else uses it. Seeds are reductions over the last dimensions, dropouts, and biases of matrix
products. A region is convex: no path leaves it and comes back.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..compiler.lowering import TABLE
from ..core import compat, launch
from ..core.operators import NAMES

__all__ = [
    "BIAS",
    "CHANGING",
    "COPIES",
    "FUNCTION",
    "VIEWS",
    "Finder",
    "Region",
    "arguments_first",
    "captured_body",
    "changed_in",
    "columns_of",
    "drop_unused",
    "escapes",
    "is_fixed",
    "is_laid_out",
    "is_of_elements",
    "name_of",
    "named_again",
    "overlap",
    "parts_of",
    "reshapes",
    "size_of",
    "tensors_of",
    "value_of",
    "written",
]

# The mark of a sum of a matrix product and a bias, in `fx.Node.meta`.
BIAS = "fusedops_bias"
# The mark of what a function of `rowwise` returns: the function's name.
FUNCTION = "fusedops_function"
# Operators that only name elements otherwise.
VIEWS = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "unsqueeze", "squeeze", "permute", "transpose",
                   "t", "alias", "split", "split_with_sizes", "chunk", "select", "slice", "unbind"})  # fmt: skip
# Why a region is left whose kernel would be another in each call.
CHANGING = "a length that changes from call to call is one of columns"
# Operators that compute nothing.
COPIES = VIEWS | {"_to_copy", "clone", ""}
# Operators that give elements other places.
_MOVES = (VIEWS - {"view", "_unsafe_view", "reshape", "_reshape_alias", "alias", "unsqueeze"}) | {
    "cat",
    "clone",
    "flip",
    "roll",
}
# Reductions over the dimensions that an argument names; norms, whose dimensions are a shape; softmax.
_OVER_DIMS = frozenset({"sum", "mean", "amax", "amin", "var", "std", "var_mean", "logsumexp", "linalg_vector_norm"})
_NORMS = frozenset({"native_layer_norm", "_fused_rms_norm"})
_SOFTMAX = frozenset({"_softmax", "_safe_softmax"})
# What makes tensors of nothing, reductions and gathers whose rows are others, and losses, of which Inductor writes no
# probabilities.
_NOT_TAKEN = frozenset({"arange", "full", "new_full", "zeros", "new_zeros", "ones", "new_ones", "scalar_tensor", "max", "min",
                        "argmax", "argmin", "any", "all",
                        "native_group_norm", "gather", "nll_loss_forward", "stack", "lift_fresh_copy", "lift", "detach",
                        "copy", "norm", "_log_softmax", "huber_loss", "smooth_l1_loss", "binary_cross_entropy", "roll",
                        "flip", "constant_pad_nd", "fill", "zero", "multi_margin_loss", "empty",
                        "empty_like", "new_empty"})  # fmt: skip


@dataclass(eq=False)
class Region:
    """Nodes that are to be one operator.

    Attributes:
        nodes: in the graph's order.
    """

    nodes: list[fx.Node]

    @property
    def inputs(self) -> list[fx.Node]:
        """What they use of others, each once."""
        own = set(self.nodes)
        return list(dict.fromkeys(arg for node in self.nodes for arg in node.all_input_nodes if arg not in own))

    @property
    def outputs(self) -> list[fx.Node]:
        """What others use of them."""
        own = set(self.nodes)
        return [node for node in self.nodes if any(user not in own for user in node.users)]


def value_of(node: fx.Node) -> Any:
    """The fake tensor of a node, or what else it stands for."""
    return node.meta.get("val")


def tensors_of(nodes: Iterable[fx.Node]) -> list[Tensor]:
    """The fake tensors of nodes."""
    return [value for node in nodes for value in compat.leaves(value_of(node)) if isinstance(value, Tensor)]


def overlap(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether one of some tensors shares memory with one of others."""
    return not set(map(compat.memory_of, tensors)).isdisjoint(map(compat.memory_of, others))


def captured_body(node: fx.Node) -> fx.Graph | None:
    """Of an operator that takes functions and was looked into."""
    given = node.all_input_nodes
    body = value_of(given[0]) if given else None
    return body.graph if isinstance(body, fx.GraphModule) else None


def written(node: fx.Node) -> list[Tensor]:
    """The tensors that a node writes into.

    Of an operator with a captured body they are what the body writes into, also tensors of its own. Of any other operator
    that takes functions they are all its arguments: it may write into each.
    """
    if (body := captured_body(node)) is not None:
        return changed_in(body)
    given: Any = node.all_input_nodes
    if not isinstance(node.target, compat.HIGHER_ORDER):
        given = compat.written(node.target, node.args, node.kwargs)
    return tensors_of(one for one in given if isinstance(one, fx.Node))


def changed_in(graph: fx.Graph) -> list[Tensor]:
    """The tensors that the nodes of a graph write into."""
    return [tensor for node in graph.nodes for tensor in written(node)]


def drop_unused(graph: fx.Graph) -> None:
    """Erases the nodes that nothing uses and that change nothing.

    `fx.Graph.eliminate_dead_code` would also erase a checkpointed part that only writes and, in the bodies of other
    operators, calls of methods that write.
    """
    for node in reversed(graph.nodes):
        if not (node.users or node.is_impure() or node.target in compat.GRAD_MODES or written(node)):
            graph.erase_node(node)


def name_of(node: fx.Node) -> str:
    """Of an aten operator, without its overload; "" for other nodes."""
    return compat.aten_name(node.target)


def size_of(node: fx.Node) -> Any:
    """Elements of a node's tensor, a number or a symbol; of several tensors the sum; 0 for none."""
    value = value_of(node)
    tensors = [t for t in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(t, Tensor)]
    return math.prod(compat.hints(tensors[0].shape)) if tensors else 0


def parts_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """The part of the graph that each node is in, as a number. A node may be moved among others of its part.

    Between parts gradients are switched on or off, or tensors are changed.
    """
    found, number = {}, 0
    for node in graph.nodes:
        number += is_fixed(node)
        found[node] = number
        number += is_fixed(node)
    return found


def arguments_first(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Nodes and all that they are computed from, each behind its arguments, and otherwise in their order."""
    order: dict[fx.Node, None] = {}
    for root in list(nodes):
        stack: list[tuple[fx.Node, Any]] = [(root, iter(root.all_input_nodes))] if root not in order else []
        while stack:
            node, rest = stack[-1]
            arg = next((arg for arg in rest if arg not in order), None)
            if arg is None:
                order.setdefault(node)
                stack.pop()
            else:
                stack.append((arg, iter(arg.all_input_nodes)))
    return list(order)


def escapes(node: fx.Node) -> bool:
    """Whether a value, or a view of it, is returned by the graph or changed in place: then it needs memory of its own."""
    return any(user.op == "output" or is_fixed(user) for user in _users_of_memory(node))


def is_laid_out(node: fx.Node) -> bool:
    """Whether a value, or a view of it, is changed in place or read by strides: then it lies in memory as it does."""
    return any(is_fixed(user) or name_of(user) == "as_strided" for user in _users_of_memory(node))


def _users_of_memory(node: fx.Node) -> Iterator[fx.Node]:
    """What uses a node or a view of it."""
    todo = list(node.users)
    while todo:
        user = todo.pop()
        yield user
        if name_of(user) in VIEWS or named_again(user):
            todo += user.users


def named_again(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node returns or is a view of."""
    if node.target is operator.getitem:
        return node.all_input_nodes
    return [one for one in compat.named_again(node.target, node.args, node.kwargs) if isinstance(one, fx.Node)]


def reshapes(node: fx.Node) -> bool:
    """Whether a node is a view in another shape, which other strides may make a copy."""
    return name_of(node) in ("view", "_unsafe_view") and not isinstance(node.args[1], torch.dtype)


class Finder:
    """Finds the regions of a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.place = {node: place for place, node in enumerate(self.nodes)}
        self.before = self._reached(self.nodes, lambda node: node.all_input_nodes)
        self.behind = self._reached(self.nodes[::-1], lambda node: node.users)
        self.part = parts_of(graph)
        self.eligible = {node for node in self.nodes if self._is_eligible(node)}
        self.taken: set[fx.Node] = set()

    def found(self) -> list[Region]:
        """All regions, in the order of their first seeds."""
        return list(self._found(self.nodes))

    def smaller(self, region: Region) -> list[Region]:
        """The regions in one that cannot be a single kernel, with nothing that moves elements to other rows or columns."""
        self.taken.difference_update(region.nodes)
        everything, self.eligible = self.eligible, {node for node in region.nodes if name_of(node) not in _MOVES}
        found = list(self._found(region.nodes))
        self.eligible = everything
        return [other for other in found if len(other.nodes) < len(region.nodes)]

    def changing(self) -> list[Region]:
        """The reductions over columns whose number may change from call to call, each alone, that are in no region."""
        left = [node for node in self.nodes if node in self.eligible and node not in self.taken]
        return [Region([node]) for node in left if isinstance(_columns(node), torch.SymInt)]

    def _found(self, nodes: Iterable[fx.Node]) -> Iterator[Region]:
        for node in nodes:
            if node in self.eligible and node not in self.taken and (columns := columns_of(node)):
                yield from self._grown(node, columns)
        for node in nodes:
            is_seed = _is_dropout(node) or node.meta.get(BIAS) or node.meta.get(FUNCTION)
            if is_seed and node in self.eligible and node not in self.taken:
                yield from self._grown(node, 0)

    # --- what may be in a region ----------------------------------------------------------------------------------------

    def _reached(self, nodes: Sequence[fx.Node], next_to: Any) -> dict[fx.Node, int]:
        """Of each node, the nodes that come before or behind it, as bits."""
        found: dict[fx.Node, int] = {}
        for node in nodes:
            bits = 0
            for other in next_to(node):
                bits |= found[other] | 1 << self.place[other]
            found[node] = bits
        return found

    def _is_eligible(self, node: fx.Node) -> bool:
        if node.op != "call_function":
            return False
        if node.target is operator.getitem:
            return is_of_elements(node.args[0])  # type: ignore[arg-type]
        if not is_of_elements(node) or is_fixed(node):
            return False
        tensors = [value_of(other) for other in (node, *node.all_input_nodes)]
        tensors = [t for value in tensors for t in (value if isinstance(value, (tuple, list)) else [value])]
        tensors = [t for t in tensors if isinstance(t, Tensor)]
        return all(_is_readable(t) for t in tensors) and len({t.device for t in tensors}) == 1

    # --- growth ---------------------------------------------------------------------------------------------------------

    def _grown(self, seed: fx.Node, columns: int) -> Iterator[Region]:
        size = max(map(size_of, [seed, *seed.all_input_nodes]))
        own: dict[fx.Node, None] = {}
        bits = [0, 0, 0]
        todo = [seed]
        while todo:
            node = todo.pop()
            if node in own or not self._may_join(node, own, bits, size, columns):
                continue
            own[node] = None
            bits[0] |= 1 << self.place[node]
            bits[1] |= self.before[node]
            bits[2] |= self.behind[node]
            neighbours = [other for other in (*node.all_input_nodes, *node.users) if other in self.eligible]
            todo += sorted(neighbours, key=self.place.__getitem__, reverse=True)
            if not todo:
                todo = self._shared(own, size)
        nodes = self._trimmed(sorted(own, key=self.place.__getitem__))
        self.taken.update(nodes)
        if seed in nodes:
            yield Region(nodes)

    def _may_join(self, node: fx.Node, own: Iterable[fx.Node], bits: Sequence[int], size: int, columns: int) -> bool:
        """Whether a region with a node more is still one."""
        first = next(iter(own), None)
        if (
            node not in self.eligible
            or node in self.taken
            or (first is not None and self.part[first] != self.part[node])
        ):
            return False
        if size_of(node) > size or not self._is_along(node, columns):
            return False
        is_small = first is not None and size_of(node) < size and not any(arg in own for arg in node.all_input_nodes)
        if is_small and not all(user in own for user in node.users):
            return False
        bits = [bits[0] | 1 << self.place[node], bits[1] | self.before[node], bits[2] | self.behind[node]]
        return not bits[1] & bits[2] & ~bits[0]

    def _shared(self, own: Iterable[fx.Node], size: int) -> list[fx.Node]:
        """What is broadcast to a region, and used by nothing else."""
        own = set(own)
        return [arg for node in own for arg in node.all_input_nodes if arg not in own and arg in self.eligible
                and size_of(arg) < size and all(user in own for user in arg.users)]  # fmt: skip

    def _is_along(self, node: fx.Node, columns: int) -> bool:
        """Whether a node is no reduction, or one over rows as long as others are."""
        if name_of(node) not in _OVER_DIMS | _NORMS | _SOFTMAX:
            return True
        found = columns_of(node)
        return bool(found) and columns in (0, found)

    def _trimmed(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Without what is only viewed or cast on the way in, and only viewed on the way out."""
        own = dict.fromkeys(nodes)
        changing = True
        while changing:
            changing = False
            for node in list(own):
                enters = not any(arg in own for arg in node.all_input_nodes)
                leaves = not any(user in own for user in node.users)
                is_part = node.target is operator.getitem and name_of(node.args[0]) in VIEWS  # type: ignore[arg-type]
                if is_part and not enters:  # all parts of a tensor leave together
                    leaves = not any(user in own for part in node.all_input_nodes[0].users for user in part.users)
                if (name_of(node) in VIEWS or is_part) and (enters or leaves):
                    del own[node]
                    changing = True
        return list(own)


def _is_dropout(node: fx.Node) -> bool:
    return name_of(node) == "native_dropout"


def columns_of(node: fx.Node) -> int:
    """How many columns a reduction is over; 0 for other nodes, and where the number may change from call to call."""
    columns = _columns(node)
    return columns if type(columns) is int else 0


def _columns(node: fx.Node) -> int | torch.SymInt:
    """How many columns a reduction is over; 0 for other nodes."""
    name = name_of(node)
    if (
        not node.args
        or not isinstance(node.args[0], fx.Node)
        or not isinstance(value := value_of(node.args[0]), Tensor)
    ):
        return 0
    rank = value.dim()
    dims: Any = ()
    if name in _NORMS:
        dims = range(rank - len(node.args[1]), rank)  # type: ignore[arg-type]
    elif name in _SOFTMAX:
        dims = [node.args[1]]
    elif name in _OVER_DIMS:
        place = 2 if name == "linalg_vector_norm" else 1
        dims = node.args[place] if len(node.args) > place else node.kwargs.get("dim", ())
    dims = sorted(d % rank for d in ([dims] if isinstance(dims, int) else dims or ())) if rank else []
    if not dims or dims != list(range(rank - len(dims), rank)) or len(dims) == rank:
        return 0
    sizes: list[Any] = [compat.settled(value.shape[d]) for d in dims]
    return math.prod(sizes)  # type: ignore[no-any-return]


def is_of_elements(node: fx.Node) -> bool:
    """Whether a node computes elements of rows, or sums over them."""
    name = name_of(node)
    return _is_dropout(node) or (name in TABLE and name not in _NOT_TAKEN and not name.endswith("_"))


def _is_readable(tensor: Tensor) -> bool:
    read = tensor.dtype in NAMES and tensor.layout is torch.strided and launch.runs_kernels(tensor.device.type)
    return read and compat.have_hints(tensor.shape) and 0 not in compat.hints(tensor.shape)


def is_fixed(node: fx.Node) -> bool:
    """Whether a node stays where it is among all others."""
    if node.op != "call_function":
        return False
    if node.target in compat.GRAD_MODES or isinstance(node.target, compat.HIGHER_ORDER):
        return True
    return compat.mutates(node.target)
