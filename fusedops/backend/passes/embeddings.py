"""Embeddings of few rows that are looked up very often, such as those of token types.

The gradient of such a table is a sum of as many rows as there are look-ups, into few rows. PyTorch
compiles it to atomic additions, which wait for one another; here it is a product with the look-ups
as zeros and ones. As zero times infinity is not a number, one element of the gradient that is not
finite makes the whole column of the table's gradient not a number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ...compiler.horizontal.lookups import gradient_of_few, is_of_few
from ...core.calls.registration import implement
from ...core.launches import launch
from ..graphs import name_of, value_of
from ..report import note_change
from ..rewrite import Rewrite

__all__ = ["sum_embedding_gradients"]


def sum_embedding_gradients(rewrite: Rewrite) -> None:
    """Replaces the embeddings of few rows whose gradients are wanted."""
    for node in filter(_is_of_few, rewrite.graph.nodes):
        if node in rewrite.needs:
            node.target = torch.ops.fusedops.embedding_of_few.default
            note_change(node, "an embedding of few rows, whose gradient is a matrix product")


def _is_of_few(node: fx.Node) -> bool:
    """Whether a node is an embedding of few rows and many look-ups, of known numbers."""
    # With more arguments a row has no gradient, or gradients are scaled by frequency.
    if name_of(node) != "embedding" or len(node.args) != 2 or node.kwargs:
        return False
    table, indices = value_of(node.args[0]), value_of(node.args[1])  # type: ignore[arg-type]
    return is_of_few(table.shape[0], indices) and launch.runs_kernels(table.device.type)


# --- the operator ---------------------------------------------------------------------------------


def _embedding(table: Tensor, indices: Tensor) -> Tensor:
    return torch.nn.functional.embedding(indices, table)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    table, indices = inputs
    ctx.save_for_backward(indices)
    ctx.rows, ctx.dtype = table.shape[0], table.dtype


def _derivative(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (indices,) = ctx.saved_tensors
    return gradient_of_few(grad, indices, ctx.rows).to(ctx.dtype), None


_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")
_LIBRARY.define("embedding_of_few(Tensor table, Tensor indices) -> Tensor")
implement(_LIBRARY, "embedding_of_few", _embedding, _embedding, decomposed=True)
torch.library.register_autograd(
    "fusedops::embedding_of_few", _derivative, setup_context=_setup, lib=_LIBRARY
)
