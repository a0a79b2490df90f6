"""The records of a call on slices: its constants, and its dtypes and widths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch

from ..core.activations import ACTIVATIONS, Activation
from ..core.calls.operator import Site
from ..core.calls.words import dispatched
from .widths import Widths

__all__ = ["SliceConstants", "SliceSite"]


@dispatched
class SliceConstants(NamedTuple):
    """The constants of a call.

    Attributes:
        op: the functional's name, for messages.
        sizes: the slices' widths. The functional's record of slices in two dimensions has ``(count,
            width)`` instead, as every call computes its hash; `SliceOperator.check` returns the
            widths.
        dims: the number of last dimensions of one tensor that hold the slices, 1 or 2; 0 if the
            slices are a sequence of tensors.
        concat: whether the output is one tensor with the slices side by side.
        eps: added to the variance.
        activation: the name of the activation after the norm.
        shared: whether all slices have the same parameters.
        out_dtype: the output's dtype, None for the slices'.
    """

    op: str
    sizes: tuple[int, ...]
    dims: int
    concat: Annotated[bool, ("separate", "joined")]
    eps: float
    activation: str
    shared: Annotated[bool, ("own", "shared")]
    out_dtype: torch.dtype | None = None

    def separate(self) -> bool:
        """Whether the outputs are a tensor for each slice."""
        return self.dims == 0 and not self.concat


@dataclass(frozen=True, eq=False)
class SliceSite(Site):
    """All of a call that stays the same from step to step; see `Site`.

    Attributes:
        widths: the widths of the slices.
        y: the output's dtype.
    """

    widths: Widths
    y: torch.dtype

    @property
    def activation(self) -> Activation:
        """The activation's entry in the table."""
        return ACTIVATIONS[self.constants.activation]

    @property
    def x(self) -> torch.dtype:
        """The slices' dtype."""
        # The dtypes are those of weight, bias and slices.
        return self.dtypes[2]  # type: ignore[return-value]
