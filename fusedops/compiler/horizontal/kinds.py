"""Which slices of a call are one operator.

Slices whose kernels differ in numbers alone are a kind. Ragged slices of a few kinds may be one
operator, too: then its kernels have a function for each kind, and each program calls that of its
slice::

    LayerNorm of 130, 7, 2 and 1 columns    kind 0: 130 and 7    kind 1: 2    kind 2: 1
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from .launching import family_of, outline_of
from .tiles import is_ragged

__all__ = ["members_of"]

# The most kinds of an operator: its kernels have code for each.
_MOST_KINDS = 3


def members_of(programs: Sequence[Any], slices: Sequence[int]) -> list[list[int]]:
    """Return the slices of each operator, which has slices of one kind or of several.

    Args:
        programs: the program of each slice of the call.
        slices: the slices whose rows may be in one operator.
    """
    kinds: dict[str, list[int]] = {}
    for k in slices:
        kinds.setdefault(outline_of(programs[k]), []).append(k)
    if not 1 < len(kinds) <= _MOST_KINDS:
        return list(kinds.values())
    families: dict[str, list[list[int]]] = {}
    for members in kinds.values():
        families.setdefault(family_of(programs[members[0]]), []).append(members)
    result: list[list[int]] = []
    for family in families.values():
        if _is_ragged(programs, family):
            family = [sorted(itertools.chain(*family))]
        result += family
    return result


def _is_ragged(programs: Sequence[Any], family: Sequence[Sequence[int]]) -> bool:
    """Return whether the longest slices are ragged, whatever the others are.

    Otherwise a slice of one column would take the vector loads from all others.
    """
    lengths_of_kinds = [[programs[k].structure.cols for k in members] for members in family]
    return is_ragged(max(lengths_of_kinds, key=max), programs[family[0][0]].dtypes)
