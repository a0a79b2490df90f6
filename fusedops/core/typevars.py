"""Type variables for modules whose constructor arguments determine the type of a call's result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

__all__ = ["Returned", "Sliced"]

# The default is the type of a call's result with the constructor's default options. `typing` has
# defaults of type variables since Python 3.13: before, type checkers read `typing_extensions`,
# which need not be installed.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Returned = TypeVar("Returned", default=Tensor)
    Sliced = TypeVar("Sliced", default=tuple[Tensor, ...])
else:
    from typing import TypeVar

    Returned = TypeVar("Returned")
    Sliced = TypeVar("Sliced")
