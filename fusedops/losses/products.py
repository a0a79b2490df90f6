"""The matrix products of a head: logits, and the gradients of the input and weight."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["logits_of", "product"]


def logits_of(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Writes ``rows @ weight.T + bias``, (R, V), for rows (R, D) and a weight (V, D)."""
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def product(out: Tensor, first: Tensor, second: Tensor, *, adds: bool = False) -> None:
    """Writes ``first @ second`` in the dtype of ``out``, which may be wider than theirs.

    With ``adds`` the product is added to ``out``. Either way it is summed in fp32, and rounded
    once.
    """
    if out.dtype != first.dtype and not out.is_cuda:
        # CPUs have no product of one dtype into another.
        first, second = first.to(out.dtype), second.to(out.dtype)
    if out.dtype == first.dtype:
        if adds:
            torch.addmm(out, first, second, out=out)
        else:
            torch.mm(first, second, out=out)
    elif adds:
        torch.ops.aten.addmm.dtype_out(out, first, second, out.dtype, out=out)
    else:
        torch.ops.aten.mm.dtype_out(first, second, out.dtype, out=out)
