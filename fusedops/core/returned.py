"""A type variable for modules whose constructor decides what a call returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

__all__ = ["Returned", "Sliced"]

# Type checkers take a class without parameters as that of its default options; only Python 3.13 has such defaults.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Returned = TypeVar("Returned", default=Tensor)
    Sliced = TypeVar("Sliced", default=tuple[Tensor, ...])
else:
    from typing import TypeVar

    Returned = TypeVar("Returned")
    Sliced = TypeVar("Sliced")
