"""Matrix products in a fast form: one product for the same rows, and columns that are aligned."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from ..core.compat.fake import hints
from ..core.launches import launch
from ..models.tricks.padding import ALIGNED, HALF, LEAST_OUTPUTS, LEAST_ROWS, MULTIPLE
from .casts import JOINED
from .fx import namespace
from .regions import (
    VIEWS,
    are_numbers,
    escapes,
    is_input,
    is_laid_out,
    is_of_elements,
    name_of,
    parts_of,
    users_through,
    value_of,
)
from .report import note_change
from .symbols import have_hints

__all__ = ["join_products", "pad_products", "returns_padded"]

# The mark of the columns of a padded product that are not padding, in `fx.Node.meta`.
PADDED = "fusedops_padded"


def join_products(graph: fx.Graph, needs: set[fx.Node], receives: set[fx.Node]) -> None:
    """Joins the products of linear layers that multiply the same rows: query, key and value.

    The weights are concatenated in the tensor into which they are cast, so that this copies
    nothing more. Backward, the rows have one gradient from one product, instead of several and
    their sum. Where attention reads the values as they are, and queries and keys rotated, the
    values are copied: it would save the whole product for them. Gate and up stay separate: one
    kernel computes both their gradients, and would compute each twice to write them as one tensor.

    Args:
        graph: of operators.
        needs: the nodes whose values have gradients.
        receives: those of them whose gradients come from a result. They are not joined with others,
            so that those get none.
    """
    groups, parts = dict[Any, list[fx.Node]](), parts_of(graph)
    for node in graph.nodes:
        weight = _weight(node)
        if weight is None or _feeds_operators(node) or escapes(node):
            continue
        bias = node.args[0] if name_of(node) == "addmm" else None
        key = (
            _rows_of(node.args[-2], parts),
            name_of(node),
            value_of(weight).dtype,
            value_of(node).dtype,
            (weight in needs, bias in needs, node in receives),
            (parts[node], parts[node.args[-1].args[0]]),
        )
        # Products of one key have the same rows, dtypes and gradients, and may move to one another.
        groups.setdefault(key, []).append(node)
    for products in groups.values():
        group = _that_never_meet(products)
        if len(group) > 1:
            _join(graph, group, needs)


def _is_product(node: fx.Node) -> bool:
    return name_of(node) in ("mm", "addmm") and not node.kwargs


def _weight(node: fx.Node) -> fx.Node | None:
    """The parameter of a linear layer whose weight is cast for this product alone.

    None for other nodes.
    """
    if not _is_product(node):
        return None
    cast = _only_cast(node)
    if cast is None:
        return None
    weight: Any = cast.args[0]
    sizes = value_of(weight).shape
    bias: Any = node.args[0]
    if name_of(node) == "addmm" and tuple(value_of(bias).shape) != (sizes[0],):
        return None
    if not is_input(weight) or not are_numbers(sizes):
        return None
    # Each weight then begins at a multiple of 16 bytes of the joined one.
    return weight if sizes[0] % 8 == 0 else None


def _only_cast(product: fx.Node) -> fx.Node | None:
    """The cast whose transposition is the second factor of a product; None if others read it."""
    transposed: Any = product.args[-1]
    if name_of(transposed) != "t":
        return None
    cast: Any = transposed.args[0]
    is_shared = len(transposed.users) > 1 or len(cast.users) > 1
    if is_shared or name_of(cast) != "_to_copy":
        return None
    return cast  # type: ignore[no-any-return]


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
    counts = Counter[fx.Node]()
    for node in products:
        counts.update(_elements_from(node))
    shared = {node for node, count in counts.items() if count > 1}
    return [node for node in products if shared.isdisjoint(_elements_from(node))]


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
    return any(namespace(user.target) == "fusedops" for user in _consumers(node))


def _is_saved_by_attention(part: fx.Node) -> bool:
    """Whether attention reads a part as it is, so that it saves it for the backward."""
    return any(name_of(user).startswith("_scaled_dot_product") for user in _consumers(part))


def _consumers(node: fx.Node) -> list[fx.Node]:
    """The nodes that read a node or its views, and are no views themselves."""
    return [user for user in users_through(node, _is_view) if not _is_view(user)]


def _is_view(node: fx.Node) -> bool:
    return name_of(node) in VIEWS or node.target is operator.getitem


def _join(graph: fx.Graph, group: list[fx.Node], needs: set[fx.Node]) -> None:
    """Replaces several products by the parts of one.

    rows [n, k], weights [m1, k], [m2, k]
    rows @ concatenated weights.T ──▶ [n, m1 + m2] ──split──▶ [n, m1], [n, m2]
    """
    first, aten = group[0], torch.ops.aten
    casts: list[Any] = [node.args[-1].args[0] for node in group]  # type: ignore[union-attr]
    sizes = [value_of(cast).shape[0] for cast in casts]
    with graph.inserting_before(first):
        weight = graph.call_function(aten.t.default, (_concatenated(graph, casts),))
        factors: tuple[Any, ...] = (first.args[-2], weight)
        if name_of(first) == "addmm":
            bias = _concatenated(graph, [node.args[0] for node in group])
            factors = (bias, *factors)
        product = _product_like(graph, first, factors)
        note_change(product, "one product of the same rows in the place of several")
        parts = graph.call_function(aten.split_with_sizes.default, (product, sizes, 1))
        for number, node in enumerate(group):
            part = graph.call_function(operator.getitem, (parts, number))
            part.meta.update(node.meta)
            node.replace_all_uses_with(part)
    for node in group:
        graph.erase_node(node)
    # Attention would save a part with the memory of the whole product, which others do not need.
    saved = [part for part in parts.users if _is_saved_by_attention(part)]
    if first in needs and len(saved) < len(parts.users):
        for part in saved:
            _copy(graph, part)


def _product_like(graph: fx.Graph, node: fx.Node, factors: tuple[Any, ...]) -> fx.Node:
    """A product by the operator of another node, with the node's marks but not its value."""
    product = graph.call_function(node.target, factors)  # type: ignore[arg-type]
    product.meta.update({key: value for key, value in node.meta.items() if key != "val"})
    return product


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


def pad_products(graph: fx.Graph) -> None:
    """Pads linear layers of very many outputs, no multiple of eight, as `fuse_model` does.

    Backward, both products are of aligned rows too. The result is a view of the padded rows, also
    where a model returns it.

    Args:
        graph: of operators.
    """
    for node in [node for node in graph.nodes if _gains_by_padding(node) and not is_laid_out(node)]:
        _pad(graph, node)


def returns_padded(graph: fx.Graph) -> bool:
    """Whether the graph returns a view of padded rows, whose gradient will have no padding."""
    return any(_is_of_padded(node) for node in graph.output_node().all_input_nodes)


def _is_of_padded(node: fx.Node) -> bool:
    while name_of(node) in VIEWS and not node.meta.get(PADDED):
        node = node.all_input_nodes[0]
    return bool(node.meta.get(PADDED))


def _gains_by_padding(node: fx.Node) -> bool:
    """Whether a node is a linear layer in half precision, large enough and not aligned."""
    if not _is_product(node) or name_of(node.args[-1]) != "t":  # type: ignore[arg-type]
        return False
    product, rows = value_of(node), value_of(node.args[-2])  # type: ignore[arg-type]
    if not launch.runs_kernels(product.device.type) or product.dtype not in HALF:
        return False
    columns = product.shape[1]
    if not _is_wide_and_unaligned(columns, rows.shape[1]) or not _has_many_rows(rows):
        return False
    if name_of(node) == "mm":
        return True
    # A bias of another shape is no layer's.
    return tuple(value_of(node.args[0]).shape) == (columns,)  # type: ignore[arg-type]


def _is_wide_and_unaligned(columns: Any, depth: Any) -> bool:
    """Whether padding would align a product of these known sizes, and it is large enough."""
    if not are_numbers((columns, depth)) or columns < LEAST_OUTPUTS:
        return False
    return bool(columns % ALIGNED != 0 and depth % ALIGNED == 0)


def _has_many_rows(rows: Tensor) -> bool:
    return have_hints(rows.shape) and hints(rows.shape)[0] >= LEAST_ROWS


def _pad(graph: fx.Graph, node: fx.Node) -> None:
    """Pads the weight and the bias of a linear layer with zeros, and slices the result.

    [outputs, depth] ──▶ [outputs + more, depth] ──▶ [rows, outputs + more] ──▶ [rows, :outputs]
    """
    aten, transposed = torch.ops.aten, node.args[-1]
    columns: int = value_of(node).shape[1]
    more = -columns % MULTIPLE  # up to the next multiple
    with graph.inserting_before(node):
        source = transposed.args[0]  # type: ignore[union-attr]
        weight = graph.call_function(aten.constant_pad_nd.default, (source, (0, 0, 0, more)))
        factors: tuple[Any, ...] = (node.args[-2], graph.call_function(aten.t.default, (weight,)))
        if name_of(node) == "addmm":
            padding = (node.args[0], (0, more))
            factors = (graph.call_function(aten.constant_pad_nd.default, padding), *factors)
        product = _product_like(graph, node, factors)
        part = graph.call_function(aten.slice.Tensor, (product, 1, 0, columns))
    part.meta.update(node.meta)
    part.meta[PADDED] = True
    note_change(part, "a product with columns padded to a multiple of 64")
    node.replace_all_uses_with(part)
    graph.erase_node(node)
