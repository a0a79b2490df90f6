"""Type variables for modules whose constructor arguments determine the type of a call's result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

__all__ = ["Returned", "Sliced"]

# The default is the type of a call's result with the constructor's default options. In `typing`,
# type variables have defaults only since Python 3.13, so type checkers read `typing_extensions`. It
# need not be installed: it is not imported at run time.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Returned = TypeVar("Returned", default=Tensor)
    Sliced = TypeVar("Sliced", default=tuple[Tensor, ...])
else:
    from typing import TypeVar

    Returned = TypeVar("Returned")
    Sliced = TypeVar("Sliced")
