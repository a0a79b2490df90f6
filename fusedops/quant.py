"""Formats of quantised results, for the argument ``quantize`` of norms and gated units."""

from .compiler.quantising import Format, PerBlock, PerRow, Static

__all__ = ["Format", "PerBlock", "PerRow", "Static"]
