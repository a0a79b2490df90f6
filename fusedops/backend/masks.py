"""Recognises attention masks that are constants: causal ones, and masks that mask nothing.

The graphs of compiled models compute such masks where eager models pass no mask. With a mask,
PyTorch's fused attention computes every score. With ``is_causal`` in place of a mask it computes
only the scores that are not masked.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Hashable, Iterable, Mapping
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, fx

from ..core.compat.dispatch import without_modes
from ..core.compat.fake import memory_of
from .fx import draws
from .graphs import are_numbers, arguments_first, name_of, tensors_of, written

__all__ = ["Constants", "Mask", "is_mask"]

# Values of constant nodes are not computed if they take more memory than this.
_MOST_BYTES = 2**30


class Mask(Enum):
    """The kinds of masks, by the keys that queries attend to."""

    # A step of Llama 1B, 4 x 2048, on an H200: attention takes 31.9 ms with a mask of numbers, and
    # 13.0 ms with `is_causal`.

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
        return Mask.CAUSAL if _is_causal(visible) else Mask.OTHER


def _is_causal(visible: Tensor) -> bool:
    """Whether each query attends to the keys up to its own position, as with ``is_causal``.

    1 0 0
    1 1 0
    1 1 1
    """
    *_, queries, keys = visible.shape
    if queries != keys:
        return False
    causal = visible.new_ones(keys, keys).tril()
    return bool((visible == causal).all())


class Constants:
    """The values of nodes that depend on no input, computed on the CPU.

    Args:
        known: the values of the placeholders that are constant.
    """

    def __init__(self, known: Mapping[fx.Node, Tensor] | None = None) -> None:
        self._known = dict(known or {})
        self._values: dict[fx.Node, Tensor | None] = {}
        self._kinds: dict[fx.Node, Mask] = {}
        # Of the nodes up to the last one that was visited: those that are constant, and a tensor
        # for each memory that one of them writes into.
        self._last: fx.Node | None = None
        self._constant = set(self._known)
        self._written: dict[Hashable, Tensor] = {}

    def value(self, node: fx.Node) -> Tensor | None:
        """The value of a node of the graph so far; None if it is not constant, or too large."""
        # Each call does this: nodes that were added since the last one may write into the memory.
        self._visit_new_nodes(node.graph)
        if node not in self._constant:
            return None
        needed = arguments_first([node])
        if self._is_changed(needed):
            return None
        if node not in self._values:
            self._values[node] = self._compute(node, needed)
        return self._values[node]

    def _visit_new_nodes(self, graph: fx.Graph) -> None:
        """Finds the constants and the writes among the nodes that were added since the last call.

        A graph has an attention in each layer: to visit all nodes in each call would take a time
        that is quadratic in the number of layers.
        """
        backwards = itertools.takewhile(lambda node: node is not self._last, reversed(graph.nodes))
        new = list(backwards)
        self.visit(reversed(new))
        self._last = next(iter(new), self._last)

    def visit(self, nodes: Iterable[fx.Node]) -> None:
        """Finds the constants and the writes among new nodes, arguments first."""
        for node in nodes:
            is_constant = self._constant.issuperset(node.all_input_nodes) and _is_constant(node)
            if is_constant:
                self._constant.add(node)
            self._written.update({memory_of(tensor): tensor for tensor in written(node)})

    def _is_changed(self, nodes: list[fx.Node]) -> bool:
        """Whether an operator writes into the memory of one of the nodes."""
        # A write into anything else does no harm, though it may depend on the same nodes: rotary
        # embeddings are computed from the positions that the mask is computed from, and may be
        # changed.
        return not self._written.keys().isdisjoint(map(memory_of, tensors_of(nodes)))

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
            node: a node of the graph.
            needed: the node and all that it is computed from, arguments first.
        """
        values: dict[fx.Node, Any] = dict(self._known)
        with without_modes():
            try:
                for other in needed:
                    if other not in values:
                        values[other] = _call(other, values)
            # There is no such operator on the CPU, or not for these tensors.
            except Exception:  # noqa: BLE001
                return None
        value = values[node]
        return value if isinstance(value, Tensor) else None


def _call(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Calls the operator of a node on the CPU, with the values of its arguments."""
    target: Any = node.target
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    if "device" in kwargs:
        kwargs = kwargs | {"device": torch.device("cpu")}
    return target(*args, **kwargs)


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


def _is_constant(node: fx.Node) -> bool:
    """Whether a node's value follows from its arguments alone, and is small enough."""
    tensors = tensors_of([node])
    if not tensors or not all(map(_is_small, tensors)):
        return False
    if node.target is operator.getitem:
        return True
    # Inputs and attributes have an empty name, and so has the call that makes a number a tensor.
    is_operator = bool(name_of(node)) or node.target is torch.tensor
    return is_operator and not draws(node.target)


def _is_small(tensor: Tensor) -> bool:
    """Whether a tensor has known sizes and at most `_MOST_BYTES`."""
    if not are_numbers(tensor.shape):
        return False
    return math.prod(tensor.shape) * tensor.dtype.itemsize <= _MOST_BYTES


def is_mask(value: Any) -> bool:
    """Returns whether a value may be an attention mask: of truth values, or of summands."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return False
    return value.dtype == torch.bool or value.is_floating_point()
