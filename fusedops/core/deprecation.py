"""The warning that an old name gives."""

from __future__ import annotations

import warnings

import torch

__all__ = ["warn_old"]


def warn_old(old: str, new: str, stacklevel: int = 3) -> None:
    """Warns that ``old`` is deprecated in favour of ``new``, at the line that called the caller.

    Code that torch.compile traces gives no warning: one there would split the graph.
    """
    if not torch.compiler.is_dynamo_compiling():
        warnings.warn(f"{old} is deprecated; use {new}", DeprecationWarning, stacklevel=stacklevel)
