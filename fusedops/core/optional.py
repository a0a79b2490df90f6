"""Sequences in which None stands for what a call lacks: a tensor, a gradient, a dtype."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

__all__ = ["present_indices", "without_none"]

_Value = TypeVar("_Value")


def without_none(values: Iterable[_Value | None]) -> list[_Value]:
    """Returns the values that are not None."""
    return [value for value in values if value is not None]


def present_indices(values: Iterable[Any]) -> list[int]:
    """Returns the indices of the values that are not None."""
    return [index for index, value in enumerate(values) if value is not None]
