"""Nodes of a captured graph: names, values, users, aliases, and what they write.

A node's value is the fake tensor that the capture recorded for it, in ``meta["val"]``. It has
sizes, strides and an identity of its memory, but no elements.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from ..core.compat.fake import hints, memory_of
from .fx import (
    GRAD_MODES,
    HIGHER_ORDER,
    Opaque,
    aliased_arguments,
    aten_name,
    leaves,
    mutates,
    written_arguments,
)
from .targets import is_of_dtensors

__all__ = [
    "BIAS",
    "COPIES",
    "FUNCTION",
    "FUSED",
    "OF_RANK",
    "SHARD",
    "VIEWS",
    "aliased_inputs",
    "ancestors_of",
    "are_numbers",
    "arguments_first",
    "captured_body",
    "changed_in",
    "closure",
    "direct_tensors",
    "drop_unused",
    "dtype_of",
    "escapes",
    "held_names",
    "hints_of",
    "is_fixed",
    "is_input",
    "is_part_of_view",
    "is_tensor",
    "is_view",
    "may_be_changed",
    "must_keep_strides",
    "name_of",
    "nodes_in",
    "overlap",
    "parts_of",
    "positions_of",
    "reshapes",
    "size_of",
    "sort_nodes",
    "strides_of",
    "tensors_in",
    "tensors_of",
    "users_of",
    "users_through",
    "value_of",
    "written",
]

_Kind = TypeVar("_Kind")

# Keys in `fx.Node.meta`. ``meta[BIAS]`` is true for a node that adds the bias of a product or a
# convolution.
BIAS = "fusedops_bias"
# ``meta[REACHED]`` is, for each tensor of a region's operator, whether a gradient reaches it.
REACHED = "fusedops_reached"
# ``meta[FUSED]`` is true for an operator of PyTorch's that replaces several of the model.
FUSED = "fusedops_fused"
# ``meta[FUNCTION]`` is the name of the `rowwise` function that returned the node's value.
FUNCTION = "fusedops_function"
# ``meta[OF_RANK]`` of a graph is whether that of another rank of a mesh may differ from it.
OF_RANK = "fusedops_of_rank"
# ``meta[SHARD]`` of a dropout is the part of a tensor that this rank has: see `shards.Shard`.
SHARD = "fusedops_shard"
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
# Operators that compute nothing: views, casts and copies. "" is the name of nodes without an aten
# operator, such as `operator.getitem`.
COPIES = VIEWS | {"_to_copy", "clone", ""}


# --- names and values -----------------------------------------------------------------------------


def name_of(node: fx.Node) -> str:
    """The name of a node's aten operator, without its overload; "" for other nodes."""
    return aten_name(node.target)


def value_of(node: fx.Node) -> Any:
    """The fake tensor of a node, or its value of another type, such as a tuple or a symbol."""
    return node.meta.get("val")


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors in a value, or in nested lists, tuples and dictionaries of values."""
    return _instances(Tensor, leaves(values))


def tensors_of(nodes: Iterable[fx.Node]) -> list[Tensor]:
    """The fake tensors of nodes."""
    return tensors_in(list(map(value_of, nodes)))


def direct_tensors(value: Any) -> list[Tensor]:
    """The tensors of a value that is a tensor, a tuple or a list; nested ones are left out."""
    values = value if isinstance(value, (tuple, list)) else [value]
    return _instances(Tensor, values)


def is_tensor(node: fx.Node) -> bool:
    """Whether a node's value is one tensor."""
    return isinstance(value_of(node), Tensor)


def dtype_of(node: fx.Node) -> torch.dtype:
    """The dtype of a node that is a tensor."""
    dtype: torch.dtype = value_of(node).dtype
    return dtype


def hints_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node that is a tensor, in the traced call."""
    return hints(value_of(node).shape)


def nodes_in(arguments: Iterable[Any]) -> list[fx.Node]:
    """The arguments that are nodes."""
    return _instances(fx.Node, arguments)


def _instances(kind: type[_Kind], values: Iterable[Any]) -> list[_Kind]:
    """The values that are instances of a class."""
    return [value for value in values if isinstance(value, kind)]


def size_of(node: fx.Node) -> int:
    """The number of elements of a node's first tensor in the traced call; 0 without a tensor."""
    tensors = direct_tensors(value_of(node))
    if not tensors:
        return 0
    return math.prod(hints(tensors[0].shape))


def strides_of(tensor: Tensor) -> list[int]:
    """The strides of a tensor in the traced call, without those of dimensions of one element.

    These mean nothing: any number addresses the same element.
    """
    sizes, strides = hints(tensor.shape), hints(tensor.stride())
    return [stride for size, stride in zip(sizes, strides, strict=True) if size != 1]


def are_numbers(sizes: Iterable[Any]) -> bool:
    """Whether no size is a symbol."""
    return {int}.issuperset(map(type, sizes))


def held_names(graph: fx.Graph) -> list[str]:
    """The target of each ``get_attr`` node: the name of a tensor or module that the graph holds."""
    return [str(node.target) for node in graph.find_nodes(op="get_attr")]


def is_input(node: fx.Node) -> bool:
    """Whether a node is an input of the graph, or a tensor or module that the graph holds."""
    return node.op in ("placeholder", "get_attr")


# --- order ----------------------------------------------------------------------------------------


def positions_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """The position of each node in a graph."""
    return dict(zip(graph.nodes, itertools.count()))


def ancestors_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """The ancestors of each node, as a bit set of positions."""
    return closure(graph.nodes, _arguments_of, positions_of(graph))


def closure(
    nodes: Iterable[fx.Node],
    next_to: Callable[[fx.Node], Iterable[fx.Node]],
    position: Mapping[fx.Node, int],
) -> dict[fx.Node, int]:
    """What each node reaches, such as its ancestors, as a bit set of positions.

    Integers are the bit sets: the union of two is one operation, whatever the graph's size.

    Args:
        nodes: in an order in which each comes after those that `next_to` returns for it.
        next_to: returns the arguments (or the users) of a node.
        position: of each node.
    """
    reached: dict[fx.Node, int] = {}
    for node in nodes:
        bits = 0
        for other in next_to(node):
            bits |= reached[other] | 1 << position[other]
        reached[node] = bits
    return reached


def parts_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """The part of the graph that each node is in, as a number.

    A node may move among the nodes of its part. Parts are separated by nodes that switch gradients
    on or off, or change tensors; each of these is a part by itself.

        a   b   add_   c   d   set_grad_enabled   e
        0   0    1     2   2          3           4
    """
    parts, number = {}, 0
    for node in graph.nodes:
        number += is_fixed(node)  # the part before it ends
        parts[node] = number
        number += is_fixed(node)  # the next begins after it
    return parts


def is_fixed(node: fx.Node) -> bool:
    """Whether other nodes must not move across a node: it changes tensors or gradient mode."""
    if node.op != "call_function":
        return False
    # Autograd records an operator or not by the gradient mode at its position.
    if node.target in GRAD_MODES:
        return True
    # Both call functions, which may do either.
    if isinstance(node.target, (HIGHER_ORDER, Opaque)):
        return True
    return mutates(node.target)


def _arguments_of(node: fx.Node) -> list[fx.Node]:
    return node.all_input_nodes


def arguments_first(
    nodes: Iterable[fx.Node], arguments_of: Callable[[fx.Node], list[fx.Node]] = _arguments_of
) -> list[fx.Node]:
    """Nodes and all their ancestors, each after its arguments.

    Apart from that, the order of ``nodes`` is preserved.
    """
    order: dict[fx.Node, None] = {}
    for root in list(nodes):
        if root not in order:
            _add_after_arguments(root, order, arguments_of)
    return list(order)


def _add_after_arguments(
    root: fx.Node,
    order: dict[fx.Node, None],
    arguments_of: Callable[[fx.Node], list[fx.Node]],
) -> None:
    """Appends to ``order`` the missing ancestors of a node, and then the node."""
    # A depth-first walk with its own stack: graphs may be deeper than Python's recursion limit.
    stack: list[tuple[fx.Node, Iterator[fx.Node]]] = [(root, iter(arguments_of(root)))]
    while stack:
        node, arguments = stack[-1]
        pending = next(itertools.filterfalse(order.__contains__, arguments), None)
        if pending is None:
            order.setdefault(node)
            stack.pop()
        else:
            stack.append((pending, iter(arguments_of(pending))))


# --- users ----------------------------------------------------------------------------------------


def sort_nodes(graph: fx.Graph) -> None:
    """Sorts a graph topologically, and otherwise leaves its order.

    A pass puts an operator before the first of its users. Other arguments of it may come later:

        a   operator(a, b)   user   b        becomes        a   b   operator(a, b)   user
    """
    for node, following in itertools.pairwise(arguments_first(graph.nodes)):
        node.append(following)  # moves `following` to the position after `node`


def users_of(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The users of nodes."""
    return set().union(*[node.users for node in nodes])


def users_through(node: fx.Node, passes: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    """The users of a node, and the users of those for which ``passes`` holds."""
    todo = list(node.users)
    while todo:
        user = todo.pop()
        yield user
        if passes(user):
            todo += user.users


def may_be_changed(node: fx.Node) -> bool:
    """Whether a node after a value may write into its memory."""
    return any(map(is_fixed, users_through(node, _is_alias)))


def escapes(node: fx.Node) -> bool:
    """Whether a value needs its own memory: it, or a view of it, is returned or may be changed."""
    if may_be_changed(node):
        return True
    return "output" in {user.op for user in users_through(node, _is_alias)}


def must_keep_strides(node: fx.Node) -> bool:
    """Whether a value must keep its strides: it, or a view of it, may be changed or is restrided.

    It is restrided by `as_strided`, which reads its memory by strides and offset.
    """
    if may_be_changed(node):
        return True
    return "as_strided" in map(name_of, users_through(node, _is_alias))


# --- memory ---------------------------------------------------------------------------------------


def _is_alias(node: fx.Node) -> bool:
    """Whether a node's value has the memory of an argument."""
    if name_of(node) in VIEWS:
        return True
    return bool(aliased_inputs(node))


def aliased_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs that a node returns, or returns views of: its value shares their memory."""
    if node.target is operator.getitem or is_of_dtensors(node.target):
        return node.all_input_nodes
    aliased = aliased_arguments(node.target, node.args, node.kwargs)
    return nodes_in(aliased)


def reshapes(node: fx.Node) -> bool:
    """Whether a node is a ``view(shape)``, which other strides of its input could forbid."""
    # PyTorch 2.15 splits the rows of a linear layer's product by `_unsafe_view`.
    if name_of(node) not in ("view", "_unsafe_view"):
        return False
    # ``view(dtype)`` is an overload of the same name.
    return not isinstance(node.args[1], torch.dtype)


def is_view(node: fx.Node) -> bool:
    """Whether a node is a view, or one of the views that another node returns."""
    if name_of(node) in VIEWS:
        return True
    return is_part_of_view(node)


def is_part_of_view(node: fx.Node) -> bool:
    """Whether a node is one of several views of a tensor, such as one result of a split."""
    if node.target is not operator.getitem:
        return False
    return name_of(node.args[0]) in VIEWS  # type: ignore[arg-type]


def overlap(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether a tensor of one group shares memory with a tensor of the other."""
    return not set(map(memory_of, tensors)).isdisjoint(map(memory_of, others))


# --- changes in place -----------------------------------------------------------------------------


def captured_body(node: fx.Node) -> fx.Graph | None:
    """The captured graph of the function that an operator calls; None if there is none."""
    arguments = node.all_input_nodes
    if not arguments:
        return None
    body = value_of(arguments[0])
    return body.graph if isinstance(body, fx.GraphModule) else None


def written(node: fx.Node) -> list[Tensor]:
    """The tensors that a node writes into.

    An operator with a captured body writes into the tensors that the body writes into. Some of
    these the body allocates: no node outside shares their memory, so that they do no harm. Any
    other operator that calls functions may write into each of its arguments.
    """
    body = captured_body(node)
    if body is not None:
        return changed_in(body)
    targets: Any = node.all_input_nodes
    if not isinstance(node.target, (HIGHER_ORDER, Opaque)):
        targets = written_arguments(node.target, node.args, node.kwargs)
    return tensors_of(nodes_in(targets))


def changed_in(graph: fx.Graph) -> list[Tensor]:
    """The tensors that the nodes of a graph write into."""
    return list(itertools.chain.from_iterable(map(written, graph.nodes)))


def drop_unused(graph: fx.Graph) -> None:
    """Erases the nodes that nothing uses and that change nothing.

    `fx.Graph.eliminate_dead_code` would erase too much: checkpointed parts that write but return
    nothing that is used, and method calls that write, in the bodies of other operators.
    """
    # In reverse order: erasing a node may leave its arguments unused, and they come after it.
    for node in reversed(graph.nodes):
        is_used = bool(node.users)
        if not is_used and not _has_effect(node):
            graph.erase_node(node)


def _has_effect(node: fx.Node) -> bool:
    """Whether a node is needed even if nothing uses its value."""
    if node.is_impure() or node.target in GRAD_MODES:
        return True
    return bool(written(node))
