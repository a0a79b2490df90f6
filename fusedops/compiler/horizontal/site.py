"""`SliceSite`, the site of a call of many slices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...core.calls.operator import Site

__all__ = ["SliceSite"]


@dataclass(frozen=True, eq=False)
class SliceSite(Site):
    """The part of a call that stays the same from step to step.

    Attributes:
        group: the `operator.SliceGroup`, whose module imports this one.
        plans: the launches, by the way of the call: see `launching`.
    """

    group: Any
    plans: dict[Any, Any]
