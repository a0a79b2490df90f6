"""Slices that are rows of tables, which an index selects, such as embeddings.

The kernels read a row where it is, by its index, forward and backward. So the looked-up rows are
never written, and only the index is saved for the backward, beside the table::

    index  [2, 0, 2]        table  row 0 ─────▶ row 1 of the slice
                                   row 1
                                   row 2 ─────▶ rows 0 and 2

The backward writes the gradients of the slice's rows. Kernels add them up to the gradients of the
tables, or PyTorch's operators if there are few tables: see `tables`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Lookup", "gradient_of_few", "is_of_few"]

# Tables of so few rows, with so many look-ups. T5's table of distances has 32 rows and 262,144
# look-ups a batch: atomic additions took 3.1 of the 30.0 ms that the GPU is busy in a step of
# T5-base on an H200.
_FEW_ROWS, _LEAST_LOOKUPS = 64, 4096
# The most elements of the matrix of zeros and ones.
_MOST_ELEMENTS = 2**26
# A product of so many parts of the look-ups keeps a GPU busy.
_MOST_PARTS = 256


class Lookup(NamedTuple):
    """An input whose slices are rows of tables.

    Attributes:
        input: the index of the input.
        dtype: the name of the indices' dtype: "int32" or "int64".
        rows: the rows of each slice's table.
        padding: for each slice, the row that gets no gradient; -1 for none.
    """

    input: int
    dtype: str
    rows: tuple[int, ...]
    padding: tuple[int, ...]

    def read(self, tensors: Sequence[Any]) -> list[Tensor]:
        """Return the rows of each slice, from the tables and the indices that follow them."""
        count = len(self.rows)
        pairs = zip(tensors[:count], tensors[count:], strict=True)
        return [torch.nn.functional.embedding(index, table) for table, index in pairs]

    def gradients_of_tables(
        self, gradients: Sequence[Tensor | None], indices: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradients of the tables.

        Args:
            gradients: those of each slice's rows, ``(rows, columns)``; None where not needed.
            indices: ``(rows,)`` of each slice.
        """
        slices = zip(gradients, indices, self.rows, self.padding, strict=True)
        return [
            None if grad is None else _gradient(grad, index, rows, padding)
            for grad, index, rows, padding in slices
        ]


def _gradient(grad: Tensor, indices: Tensor, rows: int, padding: int) -> Tensor:
    """Return the dense gradient of a table with ``rows`` rows."""
    # With a row that has no gradient there is no such product.
    if padding < 0 and is_of_few(rows, indices):
        return gradient_of_few(grad, indices, rows)
    summed: Tensor = torch.ops.aten.embedding_dense_backward(grad, indices, rows, padding, False)
    return summed


# --- tables of few rows ---------------------------------------------------------------------------


def is_of_few(rows: int, indices: Tensor) -> bool:
    """Return whether a table has few rows and many look-ups, both of known numbers.

    PyTorch compiles the gradient of such a table to atomic additions, which wait for one another:
    `gradient_of_few` is faster.
    """
    if not {int}.issuperset(map(type, (rows, *indices.shape))):
        return False
    lookups = math.prod(indices.shape)
    most_lookups = _MOST_ELEMENTS // max(rows, 1)
    return rows <= _FEW_ROWS and _LEAST_LOOKUPS <= lookups <= most_lookups


def gradient_of_few(grad: Tensor, indices: Tensor, rows: int) -> Tensor:
    """Return the gradient of a table of few rows, as a product with zeros and ones.

    It is summed in fp32, or in the gradient's dtype if that is wider. As zero times infinity is not
    a number, one element of ``grad`` that is not finite makes the whole column not a number.

    With p parts of n look-ups, r rows and d columns:

        is_row [p, r, n] @ grad [p, n, d] ──▶ [p, r, d] ──sum──▶ [r, d]
    """
    count = indices.numel()
    parts = math.gcd(count, _MOST_PARTS)
    acc = torch.promote_types(grad.dtype, torch.float32)
    lookups = indices.reshape(parts, 1, -1)
    numbers = torch.arange(rows, device=indices.device).view(1, -1, 1)
    is_row = (lookups == numbers).to(acc)
    by_part = grad.reshape(parts, count // parts, -1).to(acc)
    return torch.bmm(is_row, by_part).sum(0).to(grad.dtype)
