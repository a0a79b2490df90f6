"""Biases of matrix products, as sums that regions can have.

PyTorch records a linear layer as one operator, ``addmm``. It is split into a product and a sum with
the bias, which may join the region that follows. A bias that no region adds becomes part of the
product again.

    addmm ──▶ view ──▶ dropout        mm ──▶ view ──▶ add bias ──▶ dropout
                                                      └─────── region ───…
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from ..fx import is_erased
from ..graphs import BIAS, name_of, parts_of, reshapes, value_of
from ..rewrite import Rewrite

__all__ = ["restore_biases", "split_biases"]


def split_biases(rewrite: Rewrite) -> None:
    """Splits the biases from matrix products, for regions to add.

    A product whose rows are only viewed as several dimensions has the bias added after the view.
    """
    parts = parts_of(rewrite.graph)
    for node in filter(_adds_bias, list(rewrite.graph.nodes)):
        total, product = _split_bias(rewrite.graph, node, parts)
        rewrite.sums[total] = product


def _adds_bias(node: fx.Node) -> bool:
    """Whether a node is the product of a linear layer with a bias."""
    # With keywords it scales the product or the bias.
    if name_of(node) != "addmm" or node.kwargs:
        return False
    bias = value_of(node.args[0])  # type: ignore[arg-type]
    return bool(bias.dim() == 1)


def _split_bias(
    graph: fx.Graph, node: fx.Node, parts: Mapping[fx.Node, int]
) -> tuple[fx.Node, fx.Node]:
    """Replaces ``addmm`` by a product and a sum; returns the sum, then the product."""
    bias, *factors = node.args
    view = _only_view(node, parts)
    with graph.inserting_before(node):
        product = graph.call_function(torch.ops.aten.mm.default, tuple(factors))
    product.meta.update(node.meta)
    node.replace_all_uses_with(product)
    graph.erase_node(node)
    rows = product if view is None else view
    with graph.inserting_after(rows):
        total = graph.call_function(torch.ops.aten.add.Tensor, (rows, bias))
    total.meta.update(rows.meta)
    total.meta[BIAS] = True
    rows.replace_all_uses_with(total, lambda user: user is not total)
    return total, product


def _only_view(node: fx.Node, parts: Mapping[fx.Node, int]) -> fx.Node | None:
    """The only user of a node, if that views it with the same columns in the same part."""
    users = list(node.users)
    if len(users) != 1 or not _keeps_columns(users[0]):
        return None
    # In another part the sum would be differentiated otherwise, or read a bias that was changed.
    return users[0] if parts[users[0]] == parts[node] else None


def _keeps_columns(node: fx.Node) -> bool:
    """Whether a node is a view in another shape with the same last dimension, a known number."""
    if not reshapes(node):
        return False
    before, after = value_of(node.args[0]), value_of(node)  # type: ignore[arg-type]
    if after.dim() == 0:
        return False
    columns = after.shape[-1]
    # To compare symbols would add a guard.
    return type(columns) is int and before.shape[-1] == columns


def restore_biases(rewrite: Rewrite) -> None:
    """Restores the products whose biases no region adds: one kernel computes product and sum."""
    for total, product in rewrite.sums.items():
        is_in_region = is_erased(total)
        if not is_in_region:
            _restore_bias(rewrite.graph, total, product)


def _restore_bias(graph: fx.Graph, total: fx.Node, product: fx.Node) -> None:
    """Replaces a sum and its product by ``addmm``, as before `_split_bias`."""
    rows, bias = total.args
    assert isinstance(rows, fx.Node)
    total.replace_all_uses_with(rows)
    graph.erase_node(total)
    with graph.inserting_before(product):
        node = graph.call_function(torch.ops.aten.addmm.default, (bias, *product.args))
    node.meta.update(product.meta)
    product.replace_all_uses_with(node)
    graph.erase_node(product)
