"""The records of a call on slices: `SliceConstants`, and `SliceSite` for the kernels."""

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
        sizes: the slices' widths. If ``dims`` is 2, the functional passes ``(count, width)``
            instead, because every call computes the record's hash; `SliceOperator.check` replaces
            it by the widths.
        dims: the form of the slices: 0 for a sequence of tensors, 1 for one tensor ``(*, ΣD_k)``,
            2 for one tensor ``(*, K, D)``.
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
        """Returns whether the output is a tensor for each slice."""
        return self.dims == 0 and not self.concat


@dataclass(frozen=True, eq=False)
class SliceSite(Site):
    """The properties of a call on slices that stay the same from step to step.

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
        # ``dtypes`` has weight, bias, and the slices, which share one dtype.
        return self.dtypes[2]  # type: ignore[return-value]
