"""The records of a norm's call: `NormConstants` from the caller, and `NormSite` for the kernels."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch

from ..core.calls.operator import Site
from ..core.calls.words import dispatched
from ..core.launches.launch import pointer_type
from .reference import Kind, NormRule, Rounding

__all__ = ["TENSORS", "NormConstants", "NormSite"]

TENSORS = ("x", "bias", "residual", "weight", "ln_bias")


@dispatched
class NormConstants(NamedTuple):
    """The constants of a norm's call.

    Attributes:
        op: the functional's name, for messages.
        kind: the norm.
        rounding: where the norm rounds intermediate results: see `NormRule`.
        eps: added to the variance; None for the machine epsilon.
        weight_offset: added to the weight.
        shape: the normalised dimensions of `layer_norm` and `rms_norm`; None for operators that
            take a bias or a residual, which normalise the last dimension.
        save: what is saved for the backward: "sum", "output" or "inputs".
        return_sum: whether the pre-norm sum is an output.
        out_dtype: the output's dtype, None for the dtype that follows from the arguments.
        cast_dtype: the dtype of the output's low-precision copy, None for no copy.
    """

    op: str
    kind: Kind
    rounding: Rounding
    eps: float | None
    weight_offset: float
    shape: tuple[int, ...] | None
    save: str = "sum"
    return_sum: Annotated[bool, ("drops", "stores")] = False
    out_dtype: torch.dtype | None = None
    cast_dtype: torch.dtype | None = None

    # Methods, not properties: torch.compile traces these.

    def rule(self) -> NormRule:
        """Returns the norm's kind, constants and rounding."""
        return NormRule(self.kind, self.eps, self.weight_offset, self.rounding)

    def dims(self) -> int:
        """Returns the number of trailing dimensions that make up a row."""
        return 1 if self.shape is None else len(self.shape)


@dataclass(frozen=True, eq=False)
class NormSite(Site):
    """The properties of a norm's call that stay the same from step to step.

    Attributes:
        y, z, cast: the dtypes of the output, the pre-norm sum and the low-precision copy, None for
            no copy.
        dims: the number of trailing dimensions that make up a row.
        moments: the number of statistics of a row: 2 for LayerNorm (rstd and mean), 1 for RMSNorm
            (rstd), 0 without a norm.
        shares: whether x and the residual have one gradient, as in PyTorch's add: without dropout,
            and if they have one dtype.
    """

    y: torch.dtype
    z: torch.dtype
    cast: torch.dtype | None
    dims: int
    moments: int
    shares: bool

    @functools.cached_property
    def rule(self) -> NormRule:
        """The norm's kind, constants and rounding."""
        return self.constants.rule()  # type: ignore[no-any-return]

    @property
    def normalizes(self) -> bool:
        """Whether there is a norm."""
        return self.constants.kind != "none"  # type: ignore[no-any-return]

    @functools.cached_property
    def pointers(self) -> dict[str, str | None]:
        """Triton's pointer types of the tensors and outputs, by name; None where absent."""
        dtypes = (*self.dtypes, self.y, self.z, self.cast)
        return dict(zip((*TENSORS, "y", "z", "cast"), map(pointer_type, dtypes), strict=True))
