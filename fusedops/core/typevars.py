"""Type variables for functions and modules whose arguments determine the type of a result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

__all__ = ["Quantised", "QuantisedSum", "Returned", "Sliced", "Summed"]

# The default is the type of a result with the default options. In `typing`,
# type variables have defaults only since Python 3.13, so type checkers read `typing_extensions`. It
# need not be installed: it is not imported at run time.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Returned = TypeVar("Returned", default=Tensor)
    Sliced = TypeVar("Sliced", default=tuple[Tensor, ...])
    Summed = TypeVar("Summed", default=tuple[Tensor, Tensor])
    Quantised = TypeVar("Quantised", default=tuple[Tensor, Tensor])
    QuantisedSum = TypeVar("QuantisedSum", default=tuple[Tensor, Tensor, Tensor])
else:
    from typing import TypeVar

    Returned = TypeVar("Returned")
    Sliced = TypeVar("Sliced")
    Summed = TypeVar("Summed")
    Quantised = TypeVar("Quantised")
    QuantisedSum = TypeVar("QuantisedSum")
