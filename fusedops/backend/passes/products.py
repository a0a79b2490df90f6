"""Linear layers of the same rows, such as query, key and value, as one matrix product."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from ...core.alignment import ALIGNED
from ..fx import namespace
from ..graphs import (
    VIEWS,
    are_numbers,
    escapes,
    is_input,
    name_of,
    parts_of,
    users_through,
    value_of,
)
from ..regions import is_of_elements
from ..report import note_change
from ..rewrite import Rewrite
from .casts import JOINED

__all__ = ["is_product", "join_products", "product_like"]


def join_products(rewrite: Rewrite) -> None:
    """Joins the products of linear layers that multiply the same rows: query, key and value.

    The weights are concatenated in the tensor into which they are cast, so that this copies
    nothing more. Backward, the rows have one gradient from one product, instead of several and
    their sum. Where attention reads the values as they are, and queries and keys rotated, the
    values are copied: it would save the whole product for them. Gate and up stay separate: one
    kernel computes both their gradients, and would compute each twice to write them as one tensor.
    """
    for products in _groups(rewrite).values():
        group = _that_never_meet(products)
        if len(group) > 1:
            _join(rewrite, group)


def _groups(rewrite: Rewrite) -> dict[Any, list[fx.Node]]:
    """The products that may be joined, by keys that are equal for those of one product.

    Products of one key have the same rows, dtypes and gradients, and may move to one another.
    Products whose gradients come from a result are not joined with others, so that those get none.
    """
    groups, parts = dict[Any, list[fx.Node]](), parts_of(rewrite.graph)
    needs = rewrite.needs
    for node in rewrite.graph.nodes:
        weight = _weight(node)
        if weight is None:
            continue
        # Parts share the memory of the whole: a change of a returned one would be seen in the
        # others.
        if _feeds_operators(node) or escapes(node):
            continue
        bias = node.args[0] if _has_bias(node) else None
        # One product has one gradient mode and one set of gradients, and reads its rows and weights
        # once: nothing may change them between the products.
        key = (
            _rows_of(node.args[-2], parts),
            name_of(node),
            value_of(weight).dtype,
            value_of(node).dtype,
            (weight in needs, bias in needs, node in rewrite.receives),
            (parts[node], parts[_cast_of(node)]),
        )
        groups.setdefault(key, []).append(node)
    return groups


def is_product(node: fx.Node) -> bool:
    """Whether a node is a matrix product, perhaps with a bias, that is not scaled."""
    return name_of(node) in ("mm", "addmm") and not node.kwargs


def _has_bias(product: fx.Node) -> bool:
    return name_of(product) == "addmm"


def _weight(node: fx.Node) -> fx.Node | None:
    """The parameter of a linear layer whose weight is cast for this product alone.

    None for other nodes.
    """
    cast = _only_cast(node)
    if cast is None:
        return None
    weight: Any = cast.args[0]
    outputs, *_ = sizes = value_of(weight).shape
    bias: Any = node.args[0]
    if _has_bias(node) and tuple(value_of(bias).shape) != (outputs,):
        return None
    if not is_input(weight) or not are_numbers(sizes):
        return None
    # Each weight then begins at a multiple of 16 bytes of the joined one.
    return weight if outputs % ALIGNED == 0 else None


def _only_cast(product: fx.Node) -> fx.Node | None:
    """The cast whose transposition is the second factor of a product, and that no other reads.

    None for other nodes.
    """
    if not is_product(product):
        return None
    transposed: Any = product.args[-1]
    if name_of(transposed) != "t":
        return None
    cast: Any = transposed.args[0]
    if name_of(cast) != "_to_copy":
        return None
    is_shared = len(transposed.users) > 1 or len(cast.users) > 1
    return None if is_shared else cast


def _cast_of(product: fx.Node) -> fx.Node:
    """The cast of a product's weight; see `_only_cast`."""
    transposed: Any = product.args[-1]
    cast: fx.Node = transposed.args[0]
    return cast


def _rows_of(node: fx.Node, parts: dict[fx.Node, int]) -> Any:
    """A key that is equal for equal rows.

    It is a node, and how and in which part of the graph that is cast and viewed.
    """
    if name_of(node) not in ("view", "_to_copy"):
        return node
    source = _rows_of(node.args[0], parts)  # type: ignore[arg-type]
    return name_of(node), source, str(node.args[1:]), str(node.kwargs), parts[node]


def _that_never_meet(products: list[fx.Node]) -> list[fx.Node]:
    """The products that no elementwise operator reads together with another of them."""
    # Their gradients would be written as one tensor by a kernel that computes each element of
    # several others. A step of Llama 1B on an H200 takes 4.8 ms in these kernels with gate and up
    # joined, and 2.5 ms without. The products take as long either way.
    reached = list(map(_elements_from, products))
    counts = Counter(itertools.chain.from_iterable(reached))
    shared = {node for node, count in counts.items() if count > 1}
    return list(itertools.compress(products, map(shared.isdisjoint, reached)))


def _elements_from(node: fx.Node) -> set[fx.Node]:
    """The nodes that chains of elementwise operators compute from a node."""
    reached, todo = set[fx.Node](), list(node.users)
    while todo:
        user = todo.pop()
        if user in reached:
            continue
        if is_of_elements(user) or user.target is operator.getitem:
            reached.add(user)
            todo += user.users
    return reached


def _feeds_operators(node: fx.Node) -> bool:
    """Whether an operator of a region reads a product: its gradients would be concatenated."""
    return any(map(_is_own_operator, _consumers(node)))


def _is_own_operator(node: fx.Node) -> bool:
    return namespace(node.target) == "fusedops"


def _is_saved_by_attention(part: fx.Node) -> bool:
    """Whether attention reads a part as it is, so that it saves it for the backward."""
    return any(map(_is_attention, _consumers(part)))


def _is_attention(node: fx.Node) -> bool:
    return name_of(node).startswith("_scaled_dot_product")


def _consumers(node: fx.Node) -> list[fx.Node]:
    """The nodes that read a node or its views, and are no views themselves."""
    return list(itertools.filterfalse(_is_view, users_through(node, _is_view)))


def _is_view(node: fx.Node) -> bool:
    return name_of(node) in VIEWS or node.target is operator.getitem


def _join(rewrite: Rewrite, group: list[fx.Node]) -> None:
    """Replaces several products by the parts of one.

    rows [n, k], weights [m1, k], [m2, k]
    rows @ concatenated weights.T ──▶ [n, m1 + m2] ──split──▶ [n, m1], [n, m2]
    """
    graph, first, aten = rewrite.graph, group[0], torch.ops.aten
    casts = list(map(_cast_of, group))
    sizes = [value_of(cast).shape[0] for cast in casts]
    with graph.inserting_before(first):
        weight = graph.call_function(aten.t.default, (_concatenated(graph, casts),))
        factors: tuple[Any, ...] = (first.args[-2], weight)
        if _has_bias(first):
            bias = _concatenated(graph, [node.args[0] for node in group])
            factors = (bias, *factors)
        product = product_like(graph, first, factors)
        note_change(product, "one product of the same rows in the place of several")
        parts = graph.call_function(aten.split_with_sizes.default, (product, sizes, 1))
        for number, node in enumerate(group):
            part = graph.call_function(operator.getitem, (parts, number))
            part.meta.update(node.meta)
            node.replace_all_uses_with(part)
    for node in group:
        graph.erase_node(node)
    if first in rewrite.needs:
        _copy_saved_parts(graph, parts)


def product_like(graph: fx.Graph, node: fx.Node, factors: tuple[Any, ...]) -> fx.Node:
    """A product by the operator of another node, with the node's marks but not its value."""
    product = graph.call_function(node.target, factors)  # type: ignore[arg-type]
    product.meta.update(node.meta)
    product.meta.pop("val", None)
    return product


def _copy_saved_parts(graph: fx.Graph, parts: fx.Node) -> None:
    """Copies the parts of a product that attention saves, unless it saves all of them.

    It would save a part with the memory of the whole product, which others do not need.
    """
    # Of query, key and value with rotary embeddings attention saves the value as it is.
    saved = list(filter(_is_saved_by_attention, parts.users))
    if len(saved) < len(parts.users):
        for part in saved:
            _copy(graph, part)


def _copy(graph: fx.Graph, part: fx.Node) -> None:
    """Copies a part of a product, so that saving it does not save the others with it."""
    users = list(part.users)
    dense: dict[str, Any] = {"memory_format": torch.contiguous_format}
    with graph.inserting_after(part):
        copied = graph.call_function(torch.ops.aten.clone.default, (part,), dense)
    copied.meta.update(part.meta)
    for user in users:
        user.replace_input_with(part, copied)


def _concatenated(graph: fx.Graph, tensors: Iterable[Any]) -> fx.Node:
    node = graph.call_function(torch.ops.aten.cat.default, (list(tensors),))
    node.meta[JOINED] = True
    return node
