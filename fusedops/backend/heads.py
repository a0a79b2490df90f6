"""Heads of keys and values that a model repeats for groups of queries, which PyTorch's fused attention does by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Repeats"]

# Functions and methods by which heads are repeated: `expand` followed by `reshape`, or `repeat_interleave` alone.
_REPEATING = frozenset({"expand", "repeat_interleave", "reshape"})


@dataclass
class _Call:
    """A call that may repeat heads.

    Attributes:
        versions: of the result and of its source, when it was made.
    """

    result: Tensor
    name: str
    source: Tensor
    versions: tuple[int, int]

    @property
    def is_stale(self) -> bool:
        """Whether one of both was changed since."""
        return (self.result._version, self.source._version) != self.versions


class Repeats:
    """The calls that may repeat heads, while a graph is run."""

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}  # by their results, which they keep

    def note(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Any) -> Any:
        """Remembers a call if it may repeat heads; what it found."""
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        if name in _REPEATING and isinstance(found, Tensor) and args and isinstance(args[0], Tensor):
            how_often = args[1] if len(args) > 1 else kwargs.get("repeats")
            if name != "repeat_interleave" or isinstance(how_often, int):
                self._calls[id(found)] = _Call(found, name, args[0], (found._version, args[0]._version))
        return found

    def once(self, heads: Tensor) -> Tensor | None:
        """The heads of which these are repetitions, those of a head next to each other; None if these are no repetitions.

        Args:
            heads: of shape (batch, heads, length, size).
        """
        last = self._calls.get(id(heads))
        if heads.dim() != 4 or last is None or last.is_stale:
            return None
        source = last.source
        if last.name == "reshape":
            expanded = self._calls.get(id(source))
            if expanded is None or expanded.name != "expand" or expanded.is_stale or source.dim() != 5:
                return None
            batch, count, group, *rows = source.shape
            is_group = expanded.source.shape == (batch, count, 1, *rows)
            if not is_group or heads.shape != (batch, count * group, *rows):
                return None
            return expanded.source.squeeze(2) if group > 1 and _have_gradients_alike(expanded.source, heads) else None
        if last.name != "repeat_interleave" or source.dim() != 4 or not _have_gradients_alike(source, heads):
            return None
        is_along_heads = _without_heads(source) == _without_heads(heads)
        return source if is_along_heads and source.shape[1] < heads.shape[1] else None


def _have_gradients_alike(source: Tensor, heads: Tensor) -> bool:
    """Not where gradients were off when the heads were repeated."""
    return source.requires_grad == heads.requires_grad


def _without_heads(heads: Tensor) -> tuple[Any, ...]:
    batch, _, *rows = heads.shape
    return (batch, *rows)
