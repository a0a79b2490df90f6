"""The records of an activation's call: `ActivationConstants`, and `ActivationSite` for kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ..core.activations import ACTIVATIONS, Activation
from ..core.calls.operator import Site
from ..core.calls.words import dispatched

__all__ = ["ActivationConstants", "ActivationSite", "Kind"]


# What a call computes from its tensors ``(x, other)``:
#
#     "bias"      dropout(activation(x + other)), where other is the bias
#     "glu"       activation(x) * other, where x is the gate and other is up
#     "packed"    the same, where x has gate and up side by side, and other is None
Kind = Literal["bias", "glu", "packed"]


@dispatched
class ActivationConstants(NamedTuple):
    """The constants of an activation's call.

    Attributes:
        op: the functional's name, for messages.
        kind: what the call computes: see `Kind`.
        activation: the activation's name.
    """

    op: str
    kind: Kind
    activation: str


@dataclass(frozen=True, eq=False)
class ActivationSite(Site):
    """The properties of an activation's call that stay the same from step to step.

    Attributes:
        y: the output's dtype.
        vector: the site of the same call with a width of 0, for kernels that read the tensors as
            vectors; None if elements of the output depend on their column or position.
    """

    y: torch.dtype
    vector: ActivationSite | None

    @property
    def kind(self) -> Kind:
        """What the call computes: see `Kind`."""
        return self.constants.kind  # type: ignore[no-any-return]

    @property
    def activation(self) -> Activation:
        """The activation's entry in the table."""
        return ACTIVATIONS[self.constants.activation]
