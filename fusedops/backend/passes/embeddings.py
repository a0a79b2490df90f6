"""Embeddings of few rows that are looked up very often, such as those of token types.

The gradient of such a table is a sum of as many rows as there are look-ups, into few rows. PyTorch
compiles it to atomic additions, which wait for one another; here it is a product with the look-ups
as zeros and ones. As zero times infinity is not a number, one element of the gradient that is not
finite makes the whole column of the table's gradient not a number.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from ...core.calls.registration import implement
from ...core.launches import launch
from ..graphs import are_numbers, name_of, value_of
from ..report import note_change
from ..rewrite import Rewrite

__all__ = ["sum_embedding_gradients"]

# T5's table of distances has 32 rows and 262,144 look-ups a batch: atomic additions took 3.1 of the
# 30.0 ms that the GPU is busy in a step of T5-base on an H200.
_MOST_ROWS, _LEAST_LOOKUPS = 64, 4096
# The most elements of the matrix of zeros and ones.
_MOST_ELEMENTS = 2**26
# A product of so many parts of the look-ups keeps a GPU busy.
_MOST_PARTS = 256


def sum_embedding_gradients(rewrite: Rewrite) -> None:
    """Replaces the embeddings of few rows whose gradients are wanted."""
    for node in filter(_is_of_few, rewrite.graph.nodes):
        if node.args[0] in rewrite.needs:
            node.target = torch.ops.fusedops.embedding_of_few.default
            note_change(node, "an embedding of few rows, whose gradient is a matrix product")


def _is_of_few(node: fx.Node) -> bool:
    """Whether a node is an embedding of few rows and many look-ups, of known numbers."""
    # With more arguments a row has no gradient, or gradients are scaled by frequency.
    if name_of(node) != "embedding" or len(node.args) != 2 or node.kwargs:
        return False
    table, indices = value_of(node.args[0]), value_of(node.args[1])  # type: ignore[arg-type]
    if not are_numbers((*table.shape, *indices.shape)):
        return False
    rows, lookups = table.shape[0], math.prod(indices.shape)
    most_lookups = _MOST_ELEMENTS // max(rows, 1)
    is_fit = rows <= _MOST_ROWS and _LEAST_LOOKUPS <= lookups <= most_lookups
    return is_fit and launch.runs_kernels(table.device.type)


# --- the operator ---------------------------------------------------------------------------------


def _embedding(table: Tensor, indices: Tensor) -> Tensor:
    return torch.nn.functional.embedding(indices, table)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    table, indices = inputs
    ctx.save_for_backward(indices)
    ctx.rows, ctx.dtype = table.shape[0], table.dtype


def _derivative(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    """The gradient, summed in fp32, or in the gradient's dtype if that is wider.

    With p parts of n look-ups, r rows and d columns:

        is_row [p, r, n] @ grad [p, n, d] ──▶ [p, r, d] ──sum──▶ [r, d]
    """
    (indices,) = ctx.saved_tensors
    count = indices.numel()
    parts = math.gcd(count, _MOST_PARTS)
    acc = torch.promote_types(grad.dtype, torch.float32)
    lookups = indices.reshape(parts, 1, -1)
    rows = torch.arange(ctx.rows, device=indices.device).view(1, -1, 1)
    is_row = (lookups == rows).to(acc)
    by_part = grad.reshape(parts, count // parts, -1).to(acc)
    return torch.bmm(is_row, by_part).sum(0).to(ctx.dtype), None


_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")
_LIBRARY.define("embedding_of_few(Tensor table, Tensor indices) -> Tensor")
implement(_LIBRARY, "embedding_of_few", _embedding, _embedding, decomposed=True)
torch.library.register_autograd(
    "fusedops::embedding_of_few", _derivative, setup_context=_setup, lib=_LIBRARY
)
