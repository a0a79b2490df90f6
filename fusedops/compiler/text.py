"""Pieces of generated code."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["indented", "product", "tuple_of"]


def indented(lines: Iterable[str], levels: int = 1) -> list[str]:
    """Return lines indented by four spaces for each level."""
    return list(map(("    " * levels).__add__, lines))


def product(factors: Iterable[str]) -> str:
    """Return the product of expressions; 1 for none."""
    return " * ".join(factors) or "1"


def tuple_of(items: Iterable[object]) -> str:
    """Return a tuple of expressions, which ends with a comma so that one item is a tuple, too."""
    return f"({''.join(map('{}, '.format, items))})"
