"""Biases of matrix products and convolutions, as sums that regions can have.

PyTorch records a linear layer as one operator, ``addmm``. It is split into a product and a sum with
the bias, which may join the region that follows. So is a convolution whose channels are then moved
last. A bias that no region adds becomes part of the product or the convolution again.

    addmm ──▶ view ──▶ dropout                 mm ──▶ view ──▶ add bias ──▶ dropout
    convolution ──▶ permute ──▶ norm           convolution ──▶ permute ──▶ add bias ──▶ norm
                                                                        └─────── region ───…
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ..fx import is_erased
from ..graphs import BIAS, name_of, parts_of, reshapes, value_of
from ..rewrite import Rewrite
from .channels import to_last

__all__ = ["restore_biases", "split_biases"]

_BIAS_OF_CONVOLUTION = 2  # the position of the argument


def split_biases(rewrite: Rewrite) -> None:
    """Splits the biases from matrix products and convolutions, for regions to add.

    If the result is only viewed, as several dimensions of rows or with channels last, the bias is
    added after the view.
    """
    parts = parts_of(rewrite.graph)
    for node in list(rewrite.graph.nodes):
        if _is_biased_product(node):
            rows = _only_view(node, parts, _keeps_columns) or node
        elif _is_biased_convolution(node):
            rows = _only_view(node, parts, _puts_channels_last)
        else:
            continue
        if rows is not None:
            rewrite.sums[_split_bias(rewrite.graph, node, rows)] = node


def _is_biased_product(node: fx.Node) -> bool:
    """Whether a node is the product of a linear layer with a bias."""
    # With keywords it scales the product or the bias.
    if name_of(node) != "addmm" or node.kwargs:
        return False
    bias = value_of(node.args[0])  # type: ignore[arg-type]
    return bool(bias.dim() == 1)


def _is_biased_convolution(node: fx.Node) -> bool:
    return name_of(node) == "convolution" and node.args[_BIAS_OF_CONVOLUTION] is not None


def _split_bias(graph: fx.Graph, node: fx.Node, rows: fx.Node) -> fx.Node:
    """Takes the bias from a product or a convolution; returns the node that adds it.

    Args:
        graph: the graph.
        node: the product or the convolution, which keeps its metadata.
        rows: the node, or the view of it to which the bias is added.
    """
    if name_of(node) == "addmm":
        bias, *factors = node.args
        node.target, node.args = torch.ops.aten.mm.default, tuple(factors)
    else:
        bias = node.args[_BIAS_OF_CONVOLUTION]
        _set_bias(node, None)
    with graph.inserting_after(rows):
        total = graph.call_function(torch.ops.aten.add.Tensor, (rows, bias))
    total.meta.update(rows.meta)
    total.meta[BIAS] = True
    rows.replace_all_uses_with(total, lambda user: user is not total)
    return total


def _set_bias(convolution: fx.Node, bias: Any) -> None:
    convolution.update_arg(_BIAS_OF_CONVOLUTION, bias)


def _only_view(
    node: fx.Node, parts: Mapping[fx.Node, int], is_wanted: Callable[[fx.Node], bool]
) -> fx.Node | None:
    """The only user of a node, if that is a wanted view in the same part; None otherwise."""
    users = list(node.users)
    if len(users) != 1 or not is_wanted(users[0]):
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


def _puts_channels_last(node: fx.Node) -> bool:
    """Whether a node is a view of an image with the channels after the pixels."""
    if name_of(node) not in ("permute", "transpose"):
        return False
    source: Any = node.args[0]
    rank = value_of(source).dim()
    dims: Any = list(range(rank))
    if name_of(node) == "permute":
        dims = node.args[1]
    else:
        first, second = node.args[1:]
        dims[first], dims[second] = dims[second], dims[first]
    return [dim % rank for dim in dims] == to_last(rank)


def restore_biases(rewrite: Rewrite) -> None:
    """Restores what no region adds: one kernel computes product and sum."""
    for total, node in rewrite.sums.items():
        is_in_region = is_erased(total)
        if not is_in_region:
            _restore_bias(rewrite.graph, total, node)


def _restore_bias(graph: fx.Graph, total: fx.Node, node: fx.Node) -> None:
    """Gives a product or a convolution its bias back."""
    rows, bias = total.args
    assert isinstance(rows, fx.Node)
    total.replace_all_uses_with(rows)
    graph.erase_node(total)
    if name_of(node) == "mm":
        node.target, node.args = torch.ops.aten.addmm.default, (bias, *node.args)
    else:
        _set_bias(node, bias)
