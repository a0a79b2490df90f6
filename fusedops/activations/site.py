"""The records of an activation's call: its constants, and its dtypes, widths and functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ..core.activations import ACTIVATIONS, Activation
from ..core.calls.operator import Site
from ..core.calls.words import dispatched

__all__ = ["ActivationConstants", "ActivationSite", "Kind"]


# "bias": activation(x + bias), dropped out. "glu": activation(gate) * up. "packed": the same, up
# behind gate in x.
Kind = Literal["bias", "glu", "packed"]


@dispatched
class ActivationConstants(NamedTuple):
    """The constants of an activation's call.

    Attributes:
        op: the functional's name, for messages.
        kind: the kind of function.
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
        vector: the same call's site with a width of 0, with which kernels read the tensors as
            vectors. None if elements of the output depend on their column or position.
    """

    y: torch.dtype
    vector: ActivationSite | None

    @property
    def kind(self) -> Kind:
        """The kind of function."""
        return self.constants.kind  # type: ignore[no-any-return]

    @property
    def activation(self) -> Activation:
        """The activation's entry in the table."""
        return ACTIVATIONS[self.constants.activation]
