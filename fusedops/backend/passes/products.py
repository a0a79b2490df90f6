"""Joins linear layers that multiply the same rows, such as query, key and value, to one product."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from ...core.alignment import ALIGNED
from ..fx import aten_name, namespace
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
from ..targets import ToLocal, is_of_dtensors, whole_of
from .casts import JOINED

__all__ = ["is_product", "join_products", "product_like"]


def join_products(rewrite: Rewrite) -> None:
    """Joins the products of linear layers that multiply the same rows, as query, key and value do.

    The weights are cast and concatenated in one kernel, so that joining them takes no further copy.
    In the backward one product computes the gradient of the rows, instead of one for each layer and
    a sum of the results.

    With rotary embeddings, queries and keys are rotated but attention reads the values as a view of
    the product. The values are then copied: otherwise attention would save the whole product.

    Gate and up stay separate. One kernel computes both of their gradients. To write these as one
    tensor it would compute each of them twice.
    """
    for products in _groups(rewrite).values():
        group = _with_separate_descendants(products)
        if len(group) > 1:
            _join(rewrite, group)


def _groups(rewrite: Rewrite) -> dict[Any, list[fx.Node]]:
    """The products that may be joined: a map from a key to the products that share it.

    Products with the same key have the same rows and dtypes, and are in the same part of the graph,
    so that they may move next to one another. Either all or none of them receive gradients from a
    result of the graph: joined with others, a layer without a gradient would get one of zeros.
    """
    groups, parts = dict[Any, list[fx.Node]](), parts_of(rewrite.graph)
    needs = rewrite.needs
    for node in rewrite.graph.nodes:
        weight = _weight(node)
        if weight is None:
            continue
        # The gradients for an operator's input would be concatenated. And the parts of a joined
        # product share memory: a change of one that is returned would change the others.
        if _feeds_operators(node) or escapes(node):
            continue
        bias = node.args[0] if _has_bias(node) else None
        key = (
            _rows_of(node.args[-2], parts),
            name_of(node),
            value_of(weight).dtype,
            value_of(node).dtype,
            # The joined product computes a gradient for all layers or for none.
            (weight in needs, bias in needs, node in rewrite.receives),
            # Within a part the gradient mode is the same, and no tensor changes: the rows and
            # weights may be read once.
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
    """The weight of a linear layer whose product may be joined; None for other nodes.

    The weight is an input of the graph, or this rank's part of one, that is cast for this product
    only.
    """
    cast = _only_cast(node)
    if cast is None:
        return None
    weight: Any = cast.args[0]
    sizes = value_of(weight).shape
    outputs, *_ = sizes
    bias: Any = node.args[0]
    if _has_bias(node) and tuple(value_of(bias).shape) != (outputs,):
        return None
    if not is_input(whole_of(weight)) or not are_numbers(sizes):
        return None
    # In the joined weight, a weight after this one must begin at a multiple of 16 bytes.
    return weight if outputs % ALIGNED == 0 else None


def _only_cast(product: fx.Node) -> fx.Node | None:
    """The cast in ``mm(rows, t(cast))`` if only this product uses it; None for other nodes."""
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

    The key is a node that is neither a view nor a cast, or it describes a view or a cast: operator,
    key of its input, arguments and part of the graph. A rank's part of a DTensor is a view.
    """
    kind = _kind_of_view(node)
    if not kind:
        return node
    source = _rows_of(node.args[0], parts)  # type: ignore[arg-type]
    return kind, source, str(node.args[1:]), str(node.kwargs), parts[node]


def _kind_of_view(node: fx.Node) -> str:
    """The operator of a view or a cast, of a tensor or of a DTensor; "" for other nodes."""
    target: Any = node.target
    if isinstance(target, ToLocal):
        return str(target.parameters)
    operator_of = target.function if is_of_dtensors(target) else target
    name = aten_name(operator_of)
    return f"{type(target)} {name}" if name in ("view", "_to_copy") else ""


def _with_separate_descendants(products: list[fx.Node]) -> list[fx.Node]:
    """The products without a common elementwise descendant, as gate and up have one."""
    # One kernel computes the gradients of products with such a descendant. If they are joined, it
    # writes one tensor, and computes each gradient more than once. A step of Llama 1B on an H200
    # spends 4.8 ms in these kernels with gate and up joined, and 2.5 ms with both separate. The
    # matrix products take the same time in both cases.
    reached = list(map(_elements_from, products))
    counts = Counter(itertools.chain.from_iterable(reached))
    shared = {node for node, count in counts.items() if count > 1}
    return list(itertools.compress(products, map(shared.isdisjoint, reached)))


def _elements_from(node: fx.Node) -> set[fx.Node]:
    """The results of all chains of elementwise operators that start at a node."""
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
    """Whether an operator of this library reads a product or a view of it."""
    return any(map(_is_own_operator, _consumers(node)))


def _is_own_operator(node: fx.Node) -> bool:
    return namespace(node.target) == "fusedops"


def _is_saved_by_attention(part: fx.Node) -> bool:
    """Whether attention reads a part or a view of it, and so saves its memory for the backward."""
    return any(map(_is_attention, _consumers(part)))


def _is_attention(node: fx.Node) -> bool:
    return name_of(node).startswith("_scaled_dot_product")


def _consumers(node: fx.Node) -> list[fx.Node]:
    """The nodes that read a node or views of it, without the views."""
    return list(itertools.filterfalse(_is_view, users_through(node, _is_view)))


def _is_view(node: fx.Node) -> bool:
    return name_of(node) in VIEWS or node.target is operator.getitem


def _join(rewrite: Rewrite, group: list[fx.Node]) -> None:
    """Replaces several products by parts of one joined product.

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
    """A product with the operator and metadata of ``node``, but without its fake tensor."""
    product = graph.call_function(node.target, factors)  # type: ignore[arg-type]
    product.meta.update(node.meta)
    product.meta.pop("val", None)
    return product


def _copy_saved_parts(graph: fx.Graph, parts: fx.Node) -> None:
    """Copies the parts of a product that attention saves, unless it saves all of them.

    A saved view keeps the memory of the whole product alive, with parts that no backward reads.
    """
    # With rotary embeddings, attention saves only the values as a view of the product.
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
