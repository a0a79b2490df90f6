"""The records of a norm's call: its constants, and its dtypes and statistics."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import torch

from ..core.calls.operator import Constants, Site
from ..core.calls.operators import NAMES, named
from ..core.launches.launch import pointer_type
from .reference import NormRule

__all__ = ["TENSORS", "NormConstants", "NormSite"]

TENSORS = ("x", "bias", "residual", "weight", "ln_bias")


@dataclass(frozen=True)
class NormConstants(Constants):
    """The constants of a norm's call.

    Attributes:
        rule: the norm.
        shape: the normalised dimensions of a norm alone, None for those with a bias and a residual:
            the last.
        save: what is saved for the backward: "sum", "output" or "inputs".
        return_sum: whether the pre-norm sum is an output.
        out_dtype: the output's dtype, None for what the arguments' dtypes give.
        cast_dtype: the dtype of the output's low-precision copy, None for no copy.
    """

    rule: NormRule
    shape: tuple[int, ...] | None
    save: str = "sum"
    return_sum: bool = False
    out_dtype: torch.dtype | None = None
    cast_dtype: torch.dtype | None = None

    @property
    def dims(self) -> int:
        """Trailing dimensions that make up a row."""
        return 1 if self.shape is None else len(self.shape)

    def words(self) -> tuple[str, ...]:
        """See `Constants`."""
        shape = "none"
        if self.shape is not None:
            shape = ",".join([str(index(size)) for size in self.shape])
        return (
            self.rule.kind,
            self.rule.rounding,
            "eps" if self.rule.eps is None else "given",
            shape,
            self.save,
            "stores" if self.return_sum else "drops",
            NAMES[self.out_dtype],
            NAMES[self.cast_dtype],
        )

    def numbers(self) -> tuple[float, ...]:
        """See `Constants`."""
        return (0.0 if self.rule.eps is None else self.rule.eps, self.rule.weight_offset)

    @classmethod
    def read(cls, words: Sequence[str], numbers: Sequence[float]) -> NormConstants:
        """See `Constants`."""
        op, kind, rounding, epsilon, shape, save, stored, out_dtype, cast_dtype = words
        eps = None if epsilon == "eps" else numbers[0]
        rule = NormRule(kind, eps, numbers[1], rounding)  # type: ignore[arg-type]
        sizes = None
        if shape != "none":
            sizes = tuple([int(size) for size in shape.split(",")])
        return cls(op, rule, sizes, save, stored == "stores", named(out_dtype), named(cast_dtype))


@dataclass(frozen=True, eq=False)
class NormSite(Site):
    """The properties of a norm's call that stay the same from step to step.

    Attributes:
        y, z, cast: the dtypes of the output, the pre-norm sum and the low-precision copy, None for
            no copy.
        dims: trailing dimensions that make up a row.
        moments: statistics of a row: rstd and, for LayerNorm, the mean; 0 without a norm.
        shares: whether x and the residual have one gradient, as in PyTorch's add.
    """

    y: torch.dtype
    z: torch.dtype
    cast: torch.dtype | None
    dims: int
    moments: int
    shares: bool

    @property
    def rule(self) -> NormRule:
        """The norm."""
        return self.constants.rule  # type: ignore[no-any-return]

    @property
    def normalizes(self) -> bool:
        """Whether there is a norm."""
        return self.rule.kind != "none"

    @functools.cached_property
    def pointers(self) -> dict[str, str | None]:
        """Triton's pointer types of the arguments."""
        dtypes = (*self.dtypes, self.y, self.z, self.cast)
        return dict(zip((*TENSORS, "y", "z", "cast"), map(pointer_type, dtypes), strict=True))
