"""Heads of keys and values that a model repeats for groups of queries.

PyTorch's fused attention accepts heads that are not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Repeats"]

# Functions and methods by which heads are repeated: `expand` followed by `reshape`, or
# `repeat_interleave` alone.
_REPEATING = frozenset({"expand", "repeat_interleave", "reshape"})


@dataclass
class _Call:
    """A call that may repeat heads.

    Attributes:
        result: the tensor that it returned.
        name: of the function or method.
        source: its first argument.
        versions: of the result and of the source, at the call.
    """

    result: Tensor
    name: str
    source: Tensor
    versions: tuple[int, int]

    @property
    def is_stale(self) -> bool:
        """Whether the result or the source was changed after the call."""
        return (self.result._version, self.source._version) != self.versions


class Repeats:
    """Records the calls that may repeat heads, while a graph is run."""

    def __init__(self) -> None:
        # By the identity of their results. A call holds its result, so that no other tensor gets
        # the same identity.
        self._calls: dict[int, _Call] = {}

    def note(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        """Records a call if it may repeat heads; returns its result."""
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        if name not in _REPEATING or not isinstance(result, Tensor):
            return result
        if not args or not isinstance(args[0], Tensor):
            return result
        if name == "repeat_interleave":
            repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
            if not isinstance(repeats, int):  # a tensor may repeat each head another time
                return result
        versions = (result._version, args[0]._version)
        self._calls[id(result)] = _Call(result, name, args[0], versions)
        return result

    def once(self, heads: Tensor) -> Tensor | None:
        """The heads before their repetition, if each is repeated next to itself; else None.

        Args:
            heads: of shape (batch, heads, length, size).
        """
        call = self._calls.get(id(heads))
        if heads.dim() != 4 or call is None or call.is_stale:
            return None
        if call.name == "reshape":
            return self._before_expand(call.source, heads)
        if call.name == "repeat_interleave":
            return _before_interleave(call.source, heads)
        return None

    def _before_expand(self, expanded: Tensor, heads: Tensor) -> Tensor | None:
        """The heads that `expand` repeats before they are reshaped.

        (batch, count, 1, length, size) ──expand──▶ (batch, count, group, length, size)
        ──reshape──▶ (batch, count * group, length, size)

        Args:
            expanded: the argument of `reshape`.
            heads: its result.
        """
        call = self._calls.get(id(expanded))
        if call is None or call.name != "expand" or call.is_stale or expanded.dim() != 5:
            return None
        batch, count, group, *rows = expanded.shape
        if call.source.shape != (batch, count, 1, *rows):
            return None
        if heads.shape != (batch, count * group, *rows):
            return None
        is_repeated = group > 1 and _have_gradients_alike(call.source, heads)
        return call.source.squeeze(2) if is_repeated else None


def _before_interleave(source: Tensor, heads: Tensor) -> Tensor | None:
    """The argument of `repeat_interleave`, if that repeats along the heads."""
    if source.dim() != 4 or not _have_gradients_alike(source, heads):
        return None
    is_along_heads = _without_heads(source) == _without_heads(heads)
    return source if is_along_heads and source.shape[1] < heads.shape[1] else None


def _have_gradients_alike(source: Tensor, heads: Tensor) -> bool:
    """Whether both or neither have gradients: not if gradients were off at the repetition."""
    return source.requires_grad == heads.requires_grad


def _without_heads(heads: Tensor) -> tuple[Any, ...]:
    """The shape without the dimension of heads."""
    batch, _, *rows = heads.shape
    return (batch, *rows)
