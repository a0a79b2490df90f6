"""Attention masks that a graph computes from constants: causal ones, and ones that mask nothing.

Compiled models compute such masks where eager ones pass none. With a mask PyTorch's fused attention
computes every score, and without it, or told that it is causal, only those that count.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, fx

from ..core.compat.dispatch import without_modes
from .fx import draws
from .regions import are_numbers, arguments_first, changed_in, name_of, overlap, tensors_of

__all__ = ["Constants", "Mask"]

# A larger value is not computed.
_MOST_BYTES = 2**30


class Mask(Enum):
    """The kinds of masks, by the keys that queries attend to."""

    ALL = auto()
    CAUSAL = auto()
    OTHER = auto()


def _kind_of(mask: Tensor) -> Mask:
    """The kind of a mask: a causal one has as many queries as keys."""
    with without_modes():
        visible = _visible(mask)
        if visible is None:
            return Mask.OTHER
        if bool(visible.all()):
            return Mask.ALL
        *_, queries, keys = visible.shape
        if queries != keys:
            return Mask.OTHER
        causal = visible.new_ones(keys, keys).tril()
        return Mask.CAUSAL if bool((visible == causal).all()) else Mask.OTHER


class Constants:
    """The values of nodes that depend on no input, computed on the CPU.

    Args:
        known: the values of some placeholders.
    """

    def __init__(self, known: Mapping[fx.Node, Tensor] | None = None) -> None:
        self._known = dict(known or {})
        self._values: dict[fx.Node, Tensor | None] = {}
        self._kinds: dict[fx.Node, Mask] = {}

    def value(self, node: fx.Node) -> Tensor | None:
        """The value of a node of the graph so far; None if it is not constant, or too large."""
        needed = arguments_first([node])
        # Each time: the graph grows, and a later node may write into the memory.
        if _is_changed(node.graph, needed):
            return None
        if node not in self._values:
            is_constant = all(other in self._known or _is_constant(other) for other in needed)
            self._values[node] = self._compute(node, needed) if is_constant else None
        return self._values[node]

    def kind(self, node: fx.Node) -> Mask:
        """The kind of a node's value as a mask."""
        value = self.value(node)
        if value is None:
            return Mask.OTHER
        if node not in self._kinds:
            self._kinds[node] = _kind_of(value)
        return self._kinds[node]

    def _compute(self, node: fx.Node, needed: list[fx.Node]) -> Tensor | None:
        """The value of a node, on the CPU; None if an operator does not run there.

        Args:
            node: of the graph.
            needed: the node and all that it is computed from, arguments first.
        """
        values: dict[fx.Node, Any] = dict(self._known)
        with without_modes():
            for other in needed:
                if other in values:
                    continue
                target: Any = other.target
                args, kwargs = fx.node.map_arg((other.args, dict(other.kwargs)), values.__getitem__)
                if "device" in kwargs:
                    kwargs = kwargs | {"device": torch.device("cpu")}
                try:
                    values[other] = target(*args, **kwargs)
                # There is no such operator on the CPU, or not for these tensors.
                except Exception:  # noqa: BLE001
                    return None
        value = values[node]
        return value if isinstance(value, Tensor) else None


def _visible(mask: Tensor) -> Tensor | None:
    """Whether each query attends to each key; None if the mask adds other numbers.

    A mask of numbers adds 0 for keys that are attended to, and the least number for the others.
    """
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    visible = mask == 0
    is_hidden = mask <= torch.finfo(mask.dtype).min
    return visible if bool((visible | is_hidden).all()) else None


def _is_changed(graph: fx.Graph, nodes: list[fx.Node]) -> bool:
    """Whether an operator writes into the memory of one of the nodes."""
    return overlap(tensors_of(nodes), changed_in(graph))


def _is_constant(node: fx.Node) -> bool:
    """Whether a node's value follows from its arguments alone, and is small enough."""
    if node.op != "call_function":
        return False
    tensors = tensors_of([node])
    if not tensors or not all(map(_is_small, tensors)):
        return False
    if node.target is operator.getitem:
        return True
    return bool(name_of(node)) and not draws(node.target)


def _is_small(tensor: Tensor) -> bool:
    """Whether a tensor has known sizes and at most `_MOST_BYTES`."""
    if not are_numbers(tensor.shape):
        return False
    return math.prod(tensor.shape) * tensor.dtype.itemsize <= _MOST_BYTES
