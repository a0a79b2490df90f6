"""The error for a function that is not row-wise, which names the operator and the user's line."""

from __future__ import annotations

__all__ = ["NotRowwiseError"]


class NotRowwiseError(RuntimeError):
    """Raised if `rowwise` cannot fuse a function.

    Args:
        message: which operator, where, and why.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
