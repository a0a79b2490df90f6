"""The arguments of a call, the rows of it that count, and the function as the loop sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..compiler.function import Rowwise
from ..core.compat.dispatch import is_intercepted

__all__ = ["Choice", "Loss", "Operands", "has_autocast", "has_values"]


def has_autocast(kind: str) -> bool:
    """Returns whether autocast is enabled for a kind of device; the meta device has none."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def has_values(t: Tensor) -> bool:
    """Returns whether the host can read values: there are some, and nothing traces or maps."""
    if torch.compiler.is_compiling() or t.is_meta or is_intercepted() or not t.numel():
        return False
    return not (t.is_cuda and torch.cuda.is_current_stream_capturing())


@dataclass(frozen=True)
class Operands:
    """The arguments of a call, with rows as one dimension.

    The logits of a head are a product of rows and a weight, and perhaps more products added to it,
    as of a low-rank adapter. The heads' own products come first, and then those that are added.

    Attributes:
        inputs: the rows of each product, (M, D).
        weights: the weight of each product, (V, D).
        biases: the bias of each product, (V,); None without one.
        others: the function's other arguments, tensors and numbers.
        by_row: for each of ``others``, whether it has an element or a row for each row.
        dtype: the dtype of the products.
        chunk_mib: the budget of a chunk's logits in MiB; None for the default.
        added: for each product that is added, the head whose logits it is added to.
    """

    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    others: tuple[Any, ...]
    by_row: tuple[bool, ...]
    dtype: torch.dtype
    chunk_mib: float | None
    added: tuple[int, ...] = ()

    @property
    def heads(self) -> int:
        """The number of heads, whose logits the function takes."""
        return len(self.inputs) - len(self.added)

    def products(self, head: int) -> list[int]:
        """Returns the positions of the products whose sum is the logits of a head."""
        added = [self.heads + i for i, of_head in enumerate(self.added) if of_head == head]
        return [head, *added]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.inputs[0].shape[0]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """All inputs, weights, biases and other arguments, in the order of their gradients."""
        return (*self.inputs, *self.weights, *self.biases, *self.others)

    @property
    def acc(self) -> torch.dtype:
        """The dtype of sums of results."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def parameters(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Returns the weights and biases in the dtype of the products."""
        biases = [None if bias is None else bias.to(self.dtype) for bias in self.biases]
        return [weight.to(self.dtype) for weight in self.weights], biases


@dataclass(frozen=True)
class Choice:
    """The rows of a call that are computed.

    Attributes:
        count: their number.
        index: the rows, ascending; None for all.
        mask: which of the computed rows count; None if all do. Results and gradients of the others
            are zero.
        counted: which of all rows count; None if all do.
    """

    count: int
    index: Tensor | None = None
    mask: Tensor | None = None
    counted: Tensor | None = None


class Loss(Protocol):
    """The interface of a function for the loop over chunks and the registered operators.

    `function.LinearRowwise` implements it. It imports the code that uses this interface, so that
    code cannot import it.

    Attributes:
        function: the user's function.
        rows: the function as a `fusedops.rowwise` function.
        name: its name in messages.
        key: its name among all such functions of the process.
        reduction: "sum", "mean" or "none".
        combines: whether `combined` does more than return its arguments.
        count: how many results `combined` returns then.
    """

    function: Callable[..., Any]
    rows: Rowwise[..., Any]
    name: str
    key: str
    reduction: str
    combines: bool
    count: int

    def guard(self) -> None:
        """Makes torch.compile guard on the variables that the function reads."""

    def mask(self, operands: Operands) -> Tensor | None:
        """Returns which rows count, (M,); None if all do."""

    def choice(self, operands: Operands) -> Choice:
        """Returns the rows to compute."""

    def index(self, mask: Tensor | None) -> Tensor | None:
        """Returns the rows that count; None for all, or if the host cannot read which."""

    def scale(self, operands: Operands, mask: Tensor | None) -> Tensor:
        """Returns the factor of the sum of all results."""

    def columns(self, operands: Operands) -> int:
        """Returns the number of columns of all heads' logits, from which chunks are sized."""

    def combined(
        self, operands: Operands, results: Sequence[Tensor], cotangents: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Returns the results of rows, and the gradients of what the function returned."""
