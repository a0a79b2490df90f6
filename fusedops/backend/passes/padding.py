"""Matrix products whose columns are padded to a multiple of 64, as `fuse_model` pads them.

A linear layer is padded before it is differentiated, so that both products of its backward have
aligned rows as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ...core.alignment import ALIGNED, HALF, LEAST_OUTPUTS, LEAST_ROWS, MULTIPLE
from ...core.compat.fake import hints
from ...core.launches import launch
from ..graphs import VIEWS, are_numbers, must_keep_strides, name_of, value_of
from ..report import note_change
from ..rewrite import Rewrite
from ..symbols import have_hints
from .products import is_product, product_like

__all__ = ["PADDED", "pad_products", "returns_padded"]

# The mark of the columns of a padded product that are not padding, in `fx.Node.meta`.
PADDED = "fusedops_padded"


def pad_products(rewrite: Rewrite) -> None:
    """Pads linear layers whose many outputs are no multiple of eight, as `fuse_model` does.

    The two products of the backward then have aligned rows, too. The result is a view of the padded
    rows, even if the model returns it.
    """
    # All are decided before one is padded.
    for node in list(filter(_is_padded, rewrite.graph.nodes)):
        _pad(rewrite.graph, node)


def _is_padded(node: fx.Node) -> bool:
    """Whether a node gains by padding, and nothing depends on its strides, which become longer."""
    return _gains_by_padding(node) and not must_keep_strides(node)


def returns_padded(graph: fx.Graph) -> bool:
    """Whether the graph returns a view of padded rows, whose gradient will have no padding."""
    return any(map(_is_of_padded, graph.output_node().all_input_nodes))


def _is_of_padded(node: fx.Node) -> bool:
    """Whether a node is the columns of a padded product, or a view of them."""
    while not node.meta.get(PADDED) and name_of(node) in VIEWS:
        node = node.all_input_nodes[0]
    return bool(node.meta.get(PADDED))


def _gains_by_padding(node: fx.Node) -> bool:
    """Whether a node is a linear layer in half precision, large enough and not aligned."""
    if not is_product(node) or name_of(node.args[-1]) != "t":  # type: ignore[arg-type]
        return False
    product, rows = value_of(node), value_of(node.args[-2])  # type: ignore[arg-type]
    if product.dtype not in HALF or not launch.runs_kernels(product.device.type):
        return False
    if not _is_wide_and_unaligned(product.shape[1], rows.shape[1]) or not _has_many_rows(rows):
        return False
    if name_of(node) == "mm":
        return True
    # A bias of another shape is no layer's. Last: to compare sizes that are symbols adds a guard.
    bias: Tensor = value_of(node.args[0])  # type: ignore[arg-type]
    return tuple(bias.shape) == (product.shape[1],)


def _is_wide_and_unaligned(columns: Any, depth: Any) -> bool:
    """Whether padding would align a product of these known sizes, and it is large enough."""
    if not are_numbers((columns, depth)):
        return False
    # The depth is the length of the factors' rows, which padding does not change.
    is_aligned_by_padding = depth % ALIGNED == 0 and columns % ALIGNED != 0
    return bool(is_aligned_by_padding and columns >= LEAST_OUTPUTS)


def _has_many_rows(rows: Tensor) -> bool:
    return have_hints(rows.shape) and hints(rows.shape)[0] >= LEAST_ROWS


def _pad(graph: fx.Graph, node: fx.Node) -> None:
    """Pads the weight and the bias of a linear layer with zeros, and slices the result.

    [outputs, depth] ──▶ [outputs + extra, depth] ──▶ [rows, outputs + extra] ──▶ [rows, :outputs]
    """
    aten, transposed = torch.ops.aten, node.args[-1]
    columns: int = value_of(node).shape[1]
    extra = -columns % MULTIPLE  # up to the next multiple
    with graph.inserting_before(node):
        source = transposed.args[0]  # type: ignore[union-attr]
        weight = graph.call_function(aten.constant_pad_nd.default, (source, (0, 0, 0, extra)))
        factors: tuple[Any, ...] = (node.args[-2], graph.call_function(aten.t.default, (weight,)))
        if name_of(node) == "addmm":
            padding = (node.args[0], (0, extra))
            factors = (graph.call_function(aten.constant_pad_nd.default, padding), *factors)
        product = product_like(graph, node, factors)
        part = graph.call_function(aten.slice.Tensor, (product, 1, 0, columns))
    part.meta.update(node.meta)
    part.meta[PADDED] = True
    note_change(part, "a product with columns padded to a multiple of 64")
    node.replace_all_uses_with(part)
    graph.erase_node(node)
