"""The records of a call on slices: its constants, and its dtypes and widths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core.activations import ACTIVATIONS, Activation
from ..core.calls.operator import Constants, Site
from ..core.calls.operators import NAMES, named
from .widths import Widths

__all__ = ["SliceConstants", "SliceSite"]


@dataclass(frozen=True)
class SliceConstants(Constants):
    """The constants of a call.

    Attributes:
        sizes: the slices' widths.
        dims: how many of the last dimensions of one tensor hold the slices, 1 or 2; 0 if the slices
            are a sequence of tensors.
        concat: whether the output is one tensor with the slices side by side.
        eps: added to the variance.
        activation: the name of the activation after the norm.
        shared: whether all slices have the same parameters.
        out_dtype: the output's dtype, None for the slices'.
    """

    sizes: tuple[int, ...]
    dims: int
    concat: bool
    eps: float
    activation: str
    shared: bool
    out_dtype: torch.dtype | None = None

    @property
    def separate(self) -> bool:
        """Whether the outputs are a tensor for each slice."""
        return self.dims == 0 and not self.concat

    def words(self) -> tuple[str, ...]:
        """See `Constants`."""
        sizes = ",".join([str(size) for size in self.sizes])
        return (
            sizes,
            str(self.dims),
            "joined" if self.concat else "separate",
            self.activation,
            "shared" if self.shared else "own",
            NAMES[self.out_dtype],
        )

    def numbers(self) -> tuple[float, ...]:
        """See `Constants`."""
        return (self.eps,)

    @classmethod
    def read(cls, words: Sequence[str], numbers: Sequence[float]) -> SliceConstants:
        """See `Constants`."""
        # The functional's name, and the words of `words`.
        op, widths, dims, form, activation, shared, out_dtype = words
        sizes = tuple([int(size) for size in widths.split(",")])
        return cls(
            op,
            sizes,
            int(dims),
            form == "joined",
            numbers[0],
            activation,
            shared == "shared",
            named(out_dtype),
        )


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
