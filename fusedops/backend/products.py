"""Matrix products in the form that is fast: of the same rows as one, and with columns that are aligned."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from ..core import compat, launch
from ..models.tricks.padding import ALIGNED, HALF, LEAST_OUTPUTS, LEAST_ROWS, MULTIPLE
from .casts import JOINED
from .regions import VIEWS, escapes, is_laid_out, is_of_elements, name_of, parts_of, value_of
from .report import note_change

__all__ = ["joined", "padded", "returns_padded"]


# The mark of the columns of a padded product that are not padding, in `fx.Node.meta`.
PADDED = "fusedops_padded"


def joined(graph: fx.Graph, needs: set[fx.Node], receives: set[fx.Node]) -> None:
    """Joins the products of linear layers that multiply the same rows: query, key and value.

    The weights lie behind one another in the tensor into which they are cast, so that this copies nothing more. Backward, the
    rows have one gradient from one product, instead of several and their sum. Where attention takes the values as they are and
    queries and keys rotated, the values are copied: it would save the whole product for them. Gate and up stay apart: one
    kernel makes both their gradients, and would compute each twice to write them as one tensor.

    Args:
        graph: of operators.
        needs: the nodes whose values have gradients.
        receives: those of them whose gradients come from a result. They are not joined with others, which are to have none.
    """
    groups, parts = dict[Any, list[fx.Node]](), parts_of(graph)
    for node in graph.nodes:
        if (weight := _weight(node)) is not None and not _feeds_operators(node) and not escapes(node):
            bias = node.args[0] if name_of(node) == "addmm" else None
            trained = (weight in needs, bias in needs, node in receives)
            places = (parts[node], parts[node.args[-1].args[0]])
            rows = _rows_of(node.args[-2], parts)
            key = (rows, name_of(node), value_of(weight).dtype, value_of(node).dtype, trained, places)
            groups.setdefault(key, []).append(node)
    for group in [_that_never_meet(products) for products in groups.values()]:
        if len(group) > 1:
            _join(graph, group, needs)


def _weight(node: fx.Node) -> fx.Node | None:
    """The parameter of a linear layer whose weight is cast for this product alone; None for other nodes."""
    if name_of(node) not in ("mm", "addmm") or node.kwargs:
        return None
    turned: Any = node.args[-1]
    cast: Any = turned.args[0] if name_of(turned) == "t" else None
    if cast is None or name_of(cast) != "_to_copy" or len(turned.users) > 1 or len(cast.users) > 1:
        return None
    weight: fx.Node = cast.args[0]
    sizes = value_of(weight).shape
    is_known = weight.op in ("placeholder", "get_attr") and all(type(size) is int for size in sizes)
    bias: Any = node.args[0]
    if name_of(node) == "addmm" and tuple(value_of(bias).shape) != (sizes[0],):
        return None
    return weight if is_known and sizes[0] % 8 == 0 else None


def _rows_of(node: fx.Node, parts: dict[fx.Node, int]) -> Any:
    """What tells rows from others: a tensor, and how and in which part of the graph it is cast and viewed."""
    if name_of(node) not in ("view", "_to_copy"):
        return node
    before = _rows_of(node.args[0], parts)  # type: ignore[arg-type]
    return name_of(node), before, str(node.args[1:]), str(node.kwargs), parts[node]


def _that_never_meet(products: list[fx.Node]) -> list[fx.Node]:
    """Those whose values no operator of elements takes together."""
    reached = {node: _elements_from(node) for node in products}
    return [node for node in products
            if not any(reached[node] & reached[other] for other in products if other is not node)]  # fmt: skip


def _elements_from(node: fx.Node) -> set[fx.Node]:
    """What operators of elements make of a node, one after the other."""
    found, todo = set[fx.Node](), list(node.users)
    while todo:
        user = todo.pop()
        if user not in found and (is_of_elements(user) or user.target is operator.getitem):
            found.add(user)
            todo += user.users
    return found


def _feeds_operators(node: fx.Node) -> bool:
    """Whether an operator of a region takes a product: its gradients would be copied behind one another."""
    return any(compat.namespace(taker.target) == "fusedops" for taker in _takers(node))


def _is_saved_by_attention(part: fx.Node) -> bool:
    """Whether attention takes a part as it is, so that it saves it for backward."""
    return any(name_of(taker).startswith("_scaled_dot_product") for taker in _takers(part))


def _takers(node: fx.Node) -> list[fx.Node]:
    """What takes a node or views of it."""
    found, todo = list[fx.Node](), list(node.users)
    while todo:
        user = todo.pop()
        if name_of(user) in VIEWS or user.target is operator.getitem:
            todo += user.users
        else:
            found.append(user)
    return found


def _join(graph: fx.Graph, group: list[fx.Node], needs: set[fx.Node]) -> None:
    """Puts one product and its parts in the place of several."""
    first, aten = group[0], torch.ops.aten
    casts: list[Any] = [node.args[-1].args[0] for node in group]  # type: ignore[union-attr]
    sizes = [value_of(cast).shape[0] for cast in casts]
    with graph.inserting_before(first):
        weight = graph.call_function(aten.t.default, (_behind(graph, casts),))
        factors: tuple[Any, ...] = (first.args[-2], weight)
        if name_of(first) == "addmm":
            factors = (_behind(graph, [node.args[0] for node in group]), *factors)
        product = graph.call_function(first.target, factors)  # type: ignore[arg-type]
        product.meta.update({key: value for key, value in first.meta.items() if key != "val"})
        note_change(product, "one product of the same rows in the place of several")
        parts = graph.call_function(aten.split_with_sizes.default, (product, sizes, 1))
        for number, node in enumerate(group):
            part = graph.call_function(operator.getitem, (parts, number))
            part.meta.update(node.meta)
            node.replace_all_uses_with(part)
    for node in group:
        graph.erase_node(node)
    saved = [part for part in parts.users if _is_saved_by_attention(part)]
    if first in needs and len(saved) < len(parts.users):
        for part in saved:
            _copy(graph, part)


def _copy(graph: fx.Graph, part: fx.Node) -> None:
    """Copies a part, so that for its sake the others are not saved with it."""
    users = list(part.users)
    with graph.inserting_after(part):
        copied = graph.call_function(torch.ops.aten.clone.default, (part,), {"memory_format": torch.contiguous_format})
    copied.meta.update(part.meta)
    for user in users:
        user.replace_input_with(part, copied)


def _behind(graph: fx.Graph, tensors: Iterable[Any]) -> fx.Node:
    node = graph.call_function(torch.ops.aten.cat.default, (list(tensors),))
    node.meta[JOINED] = True
    return node


def padded(graph: fx.Graph) -> None:
    """Pads linear layers with very many outputs, whose number is no multiple of eight, as `fuse_model` does.

    Backward, both products are of aligned rows too. The result is a view of the padded rows, also where a model returns it.

    Args:
        graph: of operators.
    """
    for node in [node for node in graph.nodes if _gains_by_padding(node) and not is_laid_out(node)]:
        _pad(graph, node)


def returns_padded(graph: fx.Graph) -> bool:
    """Whether the graph returns a view of padded rows, whose gradient will come without padding."""
    return any(_is_of_padded(node) for node in graph.output_node().all_input_nodes)


def _is_of_padded(node: fx.Node) -> bool:
    while name_of(node) in VIEWS and not node.meta.get(PADDED):
        node = node.all_input_nodes[0]
    return bool(node.meta.get(PADDED))


def _gains_by_padding(node: fx.Node) -> bool:
    if name_of(node) not in ("mm", "addmm") or node.kwargs or name_of(node.args[-1]) != "t":  # type: ignore[arg-type]
        return False
    product, rows = value_of(node), value_of(node.args[-2])  # type: ignore[arg-type]
    columns, depth = product.shape[1], rows.shape[1]
    if type(columns) is not int or type(depth) is not int or not launch.runs_kernels(product.device.type):
        return False
    is_wide = columns >= LEAST_OUTPUTS and columns % ALIGNED != 0 and depth % ALIGNED == 0
    is_long = is_wide and compat.have_hints(rows.shape) and compat.hints(rows.shape)[0] >= LEAST_ROWS
    bias = value_of(node.args[0]).shape if name_of(node) == "addmm" else (columns,)  # type: ignore[arg-type]
    return is_long and product.dtype in HALF and tuple(bias) == (columns,)


def _pad(graph: fx.Graph, node: fx.Node) -> None:
    aten, turned = torch.ops.aten, node.args[-1]
    columns: int = value_of(node).shape[1]
    more = -columns % MULTIPLE
    with graph.inserting_before(node):
        weight = graph.call_function(aten.constant_pad_nd.default, (turned.args[0], (0, 0, 0, more)))  # type: ignore[union-attr]
        factors: tuple[Any, ...] = (node.args[-2], graph.call_function(aten.t.default, (weight,)))
        if name_of(node) == "addmm":
            factors = (graph.call_function(aten.constant_pad_nd.default, (node.args[0], (0, more))), *factors)
        product = graph.call_function(node.target, factors)  # type: ignore[arg-type]
        product.meta.update({key: value for key, value in node.meta.items() if key != "val"})
        part = graph.call_function(aten.slice.Tensor, (product, 1, 0, columns))
    part.meta.update(node.meta)
    part.meta[PADDED] = True
    note_change(part, "a product with columns padded to a multiple of 64")
    node.replace_all_uses_with(part)
    graph.erase_node(node)
