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
        name: the name of the function or method.
        source: its first argument.
        versions: the versions of the result and of the source, at the call.
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
        source = next(iter(args), None)
        if not isinstance(result, Tensor) or not isinstance(source, Tensor):
            return result
        if _may_repeat(name, args, kwargs):
            versions = (result._version, source._version)
            self._calls[id(result)] = _Call(result, name, source, versions)
        return result

    def unrepeated(self, heads: Tensor) -> Tensor | None:
        """The heads before their repetition, if each is repeated next to itself; else None.

        Args:
            heads: of shape (batch, heads, length, size).
        """
        if heads.dim() != 4:
            return None
        expanded = self._source_of(heads, "reshape")
        if expanded is not None:
            return self._before_expand(expanded, heads)
        source = self._source_of(heads, "repeat_interleave")
        return None if source is None else _before_interleave(source, heads)

    def _source_of(self, result: Tensor, name: str) -> Tensor | None:
        """The first argument of the call that returned a tensor.

        None if another function returned it, or a tensor was changed after the call.
        """
        call = self._calls.get(id(result))
        if call is None or call.name != name:
            return None
        return None if call.is_stale else call.source

    def _before_expand(self, expanded: Tensor, heads: Tensor) -> Tensor | None:
        """The heads that `expand` repeats before they are reshaped.

        (batch, count, 1, length, size) ──expand──▶ (batch, count, group, length, size)
        ──reshape──▶ (batch, count * group, length, size)

        Args:
            expanded: the argument of `reshape`.
            heads: its result.
        """
        source = self._source_of(expanded, "expand")
        if source is None or expanded.dim() != 5:
            return None
        batch, count, group, *rows = expanded.shape
        shapes = ((batch, count, 1, *rows), (batch, count * group, *rows))
        if (source.shape, heads.shape) != shapes or group <= 1:
            return None
        return source.squeeze(2) if _have_gradients_alike(source, heads) else None


def _may_repeat(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may repeat each head next to itself."""
    if name != "repeat_interleave":
        return name in _REPEATING
    # A tensor of counts may repeat one head more often than another.
    repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
    return isinstance(repeats, int)


def _before_interleave(source: Tensor, heads: Tensor) -> Tensor | None:
    """The argument of `repeat_interleave`, if that repeats along the heads."""
    if source.dim() != 4 or not _have_gradients_alike(source, heads):
        return None
    if _without_heads(source) != _without_heads(heads):
        return None
    return source if source.shape[1] < heads.shape[1] else None


def _have_gradients_alike(source: Tensor, heads: Tensor) -> bool:
    """Whether both or neither have gradients: not if gradients were off at the repetition."""
    return source.requires_grad == heads.requires_grad


def _without_heads(heads: Tensor) -> tuple[Any, ...]:
    """The shape without the dimension of heads."""
    batch, _, *rows = heads.shape
    return (batch, *rows)
