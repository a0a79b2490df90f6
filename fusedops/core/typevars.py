"""Type variables for modules whose constructor arguments determine the type of a call's result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

__all__ = ["Returned", "Sliced"]

# To type checkers a class without type arguments is that of the default options. Before Python
# 3.13, typing has no defaults of type variables.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Returned = TypeVar("Returned", default=Tensor)
    Sliced = TypeVar("Sliced", default=tuple[Tensor, ...])
else:
    from typing import TypeVar

    Returned = TypeVar("Returned")
    Sliced = TypeVar("Sliced")
