"""Embeddings that a group of slices reads from their tables, by index: see `horizontal`.

    table, index ──▶ embedding ──▶ region ──▶          table, index ──▶ operator ──▶

The rows are then neither written nor saved. The backward reads them again from the table, so the
table must not change meanwhile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..compiler.horizontal.lookups import Lookup
from .graphs import (
    are_numbers,
    changed_in,
    dtype_of,
    is_input,
    name_of,
    overlap,
    tensors_of,
    value_of,
)
from .selection import Match

__all__ = ["Embeddings", "divided", "embeddings_of"]

# The fewest members of a group for whose embeddings the group is divided.
_LEAST = 4
# The arguments of PyTorch's operator, with their defaults.
_ARGUMENTS: dict[str, Any] = {
    "weight": None,
    "indices": None,
    "padding_idx": -1,
    "scale_grad_by_freq": False,
    "sparse": False,
}
# The bytes of the shortest piece of memory that a GPU reads.
_SECTOR = 32


@dataclass(frozen=True)
class Embeddings:
    """The embeddings that are an input of a group, one for each member.

    Attributes:
        lookup: the input.
        nodes: the embeddings.
        tables: their tables.
        indices: their indices.
    """

    lookup: Lookup
    nodes: tuple[fx.Node, ...]
    tables: tuple[fx.Node, ...]
    indices: tuple[fx.Node, ...]


def divided(group: Sequence[Match]) -> list[list[Match]]:
    """The parts of a group: members whose embeddings can be read by index, and the others.

    Two operators then take the place of one, and of the embeddings' own kernels.
    """
    inputs = [tuple(map(_is_embedding, match.program.inputs)) for match in group]
    kind, count = Counter(inputs).most_common(1)[0]
    if not any(kind) or not _LEAST <= count < len(group):
        return [list(group)]
    parts: list[list[Match]] = [[], []]
    for match, own in zip(group, inputs, strict=True):
        parts[own != kind].append(match)
    return sorted(parts, key=lambda part: group.index(part[0]))


def _is_embedding(node: fx.Node) -> bool:
    return name_of(node) == "embedding"


def embeddings_of(index: int, matches: Sequence[Match], dims: int) -> Embeddings | str:
    """The embeddings that are an input of all members and that the group can read by index.

    Args:
        index: the index of the input.
        matches: the members.
        dims: the number of dimensions of rows.
    Returns:
        The embeddings; a reason if some are embeddings, but not read by index; "" if none is.
    """
    nodes = tuple([match.program.inputs[index] for match in matches])
    kinds = set(map(_is_embedding, nodes))
    if kinds != {True}:
        return "other slices are not looked up" if True in kinds else ""
    candidates = _Candidates(index, matches, dims, nodes, *zip(*map(_arguments_of, nodes)))  # noqa: B905
    reason = next((reason for holds, reason in _RULES if holds(candidates)), "")
    return reason or Embeddings(candidates.lookup(), nodes, candidates.tables, candidates.indices)


def _arguments_of(node: fx.Node) -> tuple[Any, ...]:
    passed = dict(zip(_ARGUMENTS, node.args, strict=False))
    return tuple((_ARGUMENTS | passed | node.kwargs).values())


@dataclass(frozen=True, eq=False)
class _Candidates:
    """The embeddings of an input: see `embeddings_of`. The rest is their arguments, one of each."""

    index: int
    matches: Sequence[Match]
    dims: int
    nodes: tuple[fx.Node, ...]
    tables: tuple[fx.Node, ...]
    indices: tuple[fx.Node, ...]
    padding: tuple[int, ...]
    scaled: tuple[bool, ...]
    sparse: tuple[bool, ...]

    def lookup(self) -> Lookup:
        """The input of the operator."""
        dtype = str(dtype_of(self.indices[0])).removeprefix("torch.")
        rows = tuple([int(value_of(table).shape[0]) for table in self.tables])
        return Lookup(self.index, dtype, rows, tuple(map(int, self.padding)))

    def have_other_dims(self) -> bool:
        """Whether an index has other dimensions than the rows."""
        return set(map(torch.Tensor.dim, map(value_of, self.indices))) != {self.dims}

    def have_other_users(self) -> bool:
        """Whether looked-up rows are used outside of the region that reads them."""
        return not all(map(_is_used_within, self.nodes, self.matches))

    def are_changed(self) -> bool:
        """Whether a table or an index is changed in place."""
        changes = changed_in(self.nodes[0].graph)
        return overlap(tensors_of([*self.tables, *self.indices]), changes)

    def would_move_more(self) -> bool:
        """Whether reading by index moves more bytes, because rows are shorter than sectors."""
        return sum([_bytes_saved(self.index, match) for match in self.matches]) < 0


# Pairs of a condition and the reason that it is not fulfilled.
_RULES: tuple[tuple[Callable[[_Candidates], bool], str], ...] = (
    (lambda own: any(own.scaled), "its gradient is divided by frequencies"),
    (lambda own: any(own.sparse), "its gradient is sparse"),
    # It would be saved for the backward in place of the rows, and may be larger.
    (lambda own: not all(map(is_input, own.tables)), "a table is computed"),
    (
        lambda own: not all(map(_is_plain, own.tables)),
        "a table is not contiguous, or its size is not known",
    ),
    (_Candidates.have_other_dims, "an index has other dimensions than the rows"),
    (lambda own: len(set(map(dtype_of, own.indices))) > 1, "the indices have several dtypes"),
    (_Candidates.have_other_users, "its rows have other users"),
    (_Candidates.are_changed, "a table or an index is changed in place"),
    (_Candidates.would_move_more, "its rows are shorter than what a GPU reads at once"),
)


def _is_plain(table: fx.Node) -> bool:
    """Whether a table is contiguous, of known sizes."""
    value = value_of(table)
    return bool(value.is_contiguous()) and are_numbers(value.shape)


def _is_used_within(node: fx.Node, match: Match) -> bool:
    return set(match.region.nodes).issuperset(node.users)


def _bytes_saved(index: int, match: Match) -> int:
    """The bytes of a row that are not moved if a match reads the row by index.

    Rows in a table are read in whole sectors. With n bytes of a row, and s bytes of its sectors::

                     lookup          forward     backward
        rows         s + n           n           n             read, written, and read
        by index                     s           s
    """
    program = match.program.program
    operand = program.structure.inputs[index]
    size = program.size_of_row(operand) * operand.dtype.itemsize
    sectors = size - math.gcd(size, _SECTOR) + _SECTOR
    is_read_again = bool(match.reached) and index in program.plan.saved_inputs
    return 2 * size - is_read_again * (sectors - size)
