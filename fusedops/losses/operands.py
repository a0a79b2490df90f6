"""The arguments of a call, and the rows of it that count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Choice", "Operands"]


@dataclass(frozen=True)
class Operands:
    """The arguments of a call, with rows as one dimension.

    Attributes:
        inputs: the rows of each head, (M, D).
        weights: the weight of each head, (V, D).
        biases: the bias of each head, (V,); None without one.
        others: the function's other arguments, tensors and numbers.
        by_row: for each of ``others``, whether it has an element or a row for each row.
        dtype: the dtype of the products.
        chunk_mib: the budget of a chunk's logits in MiB; None for the default.
    """

    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    others: tuple[Any, ...]
    by_row: tuple[bool, ...]
    dtype: torch.dtype
    chunk_mib: float | None

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.inputs[0].shape[0]

    @property
    def classes(self) -> int:
        """The number of columns of the first head's logits."""
        return self.weights[0].shape[0]

    @property
    def acc(self) -> torch.dtype:
        """The dtype of sums of results."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Choice:
    """The rows of a call that are computed.

    Attributes:
        count: their number.
        index: the rows, ascending; None for all.
        mask: which of the computed rows count; None if all do. Results and gradients of the others
            are zero.
    """

    count: int
    index: Tensor | None = None
    mask: Tensor | None = None
