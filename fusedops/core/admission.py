"""What a family remembers of calls that were checked, so that the same call is not checked again.

Each family has a dict of its own and looks into it itself, at every call. What follows a miss is here.
"""

from __future__ import annotations

from typing import Any, TypeVar

__all__ = ["UNSEEN", "keep"]

_Found = TypeVar("_Found")

# What a look-up gives for a call that was not admitted, where None is an answer.
UNSEEN: Any = object()
# Far more than a program has calls that differ. One that makes ever new ones starts anew rather than grow.
_MOST = 8192


def keep(known: dict[Any, _Found], key: Any, found: _Found) -> _Found:
    """Remembers what was found for a key, if there is one; returns it."""
    if key is not None:
        if len(known) >= _MOST:
            known.clear()
        known[key] = found
    return found
