"""Attention masks that a graph makes of nothing but numbers: causal ones, and ones that mask nothing.

Compiled, models make such masks where they pass none eagerly. With a mask PyTorch's fused attention computes every score, and
without it, or told that it is causal, only those that count.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, fx

from ..core import compat
from .regions import arguments_first, changed_in, name_of, overlap, tensors_of

__all__ = ["Constants", "Mask"]

_MOST_BYTES = 2**30


class Mask(Enum):
    """Which keys a mask lets queries see."""

    ALL = auto()
    CAUSAL = auto()
    OTHER = auto()


def _kind_of(mask: Tensor) -> Mask:
    """Whether each query sees all keys, or those up to its own place, of as many."""
    with compat.without_modes():
        seen = _seen(mask)
        if seen is None:
            return Mask.OTHER
        if bool(seen.all()):
            return Mask.ALL
        *_, queries, keys = seen.shape
        is_causal = queries == keys and bool((seen == seen.new_ones(keys, keys).tril()).all())
        return Mask.CAUSAL if is_causal else Mask.OTHER


class Constants:
    """The values of nodes that depend on no input, computed on the CPU.

    Args:
        given: what is known of placeholders.
    """

    def __init__(self, given: Mapping[fx.Node, Tensor] | None = None) -> None:
        self._given = dict(given or {})
        self._known: dict[fx.Node, Tensor | None] = {}
        self._kinds: dict[fx.Node, Mask] = {}

    def value(self, node: fx.Node) -> Tensor | None:
        """The value of a node of the graph so far; None if it is not known, or too large."""
        needed = arguments_first([node])
        if _is_changed(node.graph, needed):  # perhaps since it was asked for last
            return None
        if node not in self._known:
            is_known = all(one in self._given or _is_constant(one) for one in needed)
            self._known[node] = self._computed(node, needed) if is_known else None
        return self._known[node]

    def kind(self, node: fx.Node) -> Mask:
        """What a node is as a mask."""
        value = self.value(node)
        if value is None:
            return Mask.OTHER
        if node not in self._kinds:
            self._kinds[node] = _kind_of(value)
        return self._kinds[node]

    def _computed(self, node: fx.Node, needed: list[fx.Node]) -> Tensor | None:
        found: dict[fx.Node, Any] = dict(self._given)
        with compat.without_modes():
            for one in needed:
                if one in found:
                    continue
                target: Any = one.target
                args, kwargs = fx.node.map_arg((one.args, dict(one.kwargs)), found.__getitem__)
                try:
                    found[one] = target(
                        *args, **kwargs | ({"device": torch.device("cpu")} if "device" in kwargs else {})
                    )
                except Exception:  # noqa: BLE001 - there is no such operator on the CPU, or not for these tensors
                    return None
        value = found[node]
        return value if isinstance(value, Tensor) else None


def _seen(mask: Tensor) -> Tensor | None:
    """Where the mask lets queries see keys; None if it adds other numbers than zero and the least."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    seen = mask == 0
    return seen if bool((seen | (mask <= torch.finfo(mask.dtype).min)).all()) else None


def _is_changed(graph: fx.Graph, nodes: list[fx.Node]) -> bool:
    """Whether an operator writes into the memory of one of the nodes."""
    return overlap(tensors_of(nodes), changed_in(graph))


def _is_constant(node: fx.Node) -> bool:
    """Whether its value follows from its arguments alone, and is small enough."""
    if node.op != "call_function":
        return False
    tensors = tensors_of([node])
    sizes = [size for tensor in tensors for size in tensor.shape]
    is_known = bool(tensors) and all(type(size) is int for size in sizes)
    if not is_known or any(math.prod(tensor.shape) * tensor.dtype.itemsize > _MOST_BYTES for tensor in tensors):
        return False
    return node.target is operator.getitem or (bool(name_of(node)) and not compat.draws(node.target))
