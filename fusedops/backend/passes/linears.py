"""Products as linear layers, with the views of their rows, weight and result.

    x ──▶ view ──▶ addmm ──▶ view            x ──▶ linear
    weight ──▶ t ──┘                         weight ──┘

Both compute and save the same. As eager operators the first are four calls, and the second is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ..graphs import is_tensor, name_of, parts_of, value_of
from ..rewrite import Rewrite
from .products import is_product

__all__ = ["restore_linears"]


def restore_linears(rewrite: Rewrite) -> None:
    """Replaces products of rows and a transposed weight by linear layers."""
    parts = parts_of(rewrite.graph)
    for product in list(filter(_is_recorded_product, rewrite.graph.nodes)):
        _restore(rewrite.graph, product, parts)


def _is_recorded_product(node: fx.Node) -> bool:
    """Whether a node is a product of the model: those that passes insert have no shapes."""
    return is_product(node) and is_tensor(node)


def _restore(graph: fx.Graph, product: fx.Node, parts: Mapping[fx.Node, int]) -> None:
    """Replaces a product, unless it is not that of a linear layer."""
    arguments: Any = product.args
    *bias, rows, transposed = arguments
    # A bias of another shape is no layer's.
    is_layer = list(map(_shape, bias)) in ([], [_shape(product)[-1:]])
    if name_of(transposed) != "t" or not is_layer:
        return
    result, source = _around(product, rows)
    # In another part a tensor has changed, or the gradient mode.
    if len({parts[result], parts[product], parts[transposed]}) > 1:
        return
    with graph.inserting_before(result):
        linear = graph.call_function(
            torch.ops.aten.linear.default, (source, transposed.args[0], *bias)
        )
    linear.meta.update(result.meta)
    # The other nodes have no users then, and are erased by `clean_up`.
    result.replace_all_uses_with(linear)


def _around(product: fx.Node, rows: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The result of a layer and its input: without the views to two dimensions, if it has both."""
    nodes = [rows, *product.users]
    if (len(nodes), len(rows.users)) != (2, 1) or not all(map(_is_view, nodes)):
        return product, rows
    result, source = nodes[1], rows.all_input_nodes[0]
    *leading, columns = _shape(source)
    viewed = [*leading, *_shape(product)[-1:]], [columns]
    is_layer = viewed == (_shape(result), _shape(rows)[-1:])
    return (result, source) if is_layer else (product, rows)


def _is_view(node: fx.Node) -> bool:
    return name_of(node) in ("view", "_unsafe_view")


def _shape(node: fx.Node) -> list[str]:
    """The sizes of a node's tensor as text: to compare sizes that are symbols adds a guard."""
    return list(map(str, value_of(node).shape))
