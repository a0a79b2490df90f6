"""Attentions that a model writes out, by PyTorch's fused kernels.

    bmm(query, keys) ──▶ scale, mask ──▶ softmax ──▶ dropout ──▶ bmm(…, value)

becomes ``scaled_dot_product_attention``, whose kernels hold no scores in memory and add in fp32. A
mask that is constant is left out if it masks nothing, and is ``is_causal`` if it is causal.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ...core.alignment import ALIGNED, HALF
from ...core.launches import launch
from ..fx import CAST
from ..graphs import (
    FUSED,
    are_numbers,
    drop_unused,
    dtype_of,
    hints_of,
    is_tensor,
    name_of,
    parts_of,
    reshapes,
    value_of,
)
from ..masks import Constants, Mask
from ..report import note_change
from ..rewrite import Rewrite
from ..symbols import have_hints, is_same
from .creating import Creator

__all__ = ["fuse_attentions"]

_ATEN = torch.ops.aten
# Fewer queries or keys are left: then scores are small, and kernels of attention have idle threads.
_LEAST_TOKENS = 128
# The widest heads for which PyTorch has fused kernels.
_WIDEST_HEADS = 256
# A score that is replaced by a number so low is as if the number were added.
_HIDDEN = -1e30
# The dtypes to which scores and weights are cast without other losses than a rounding.
_WIDE = (*HALF, torch.float32, torch.float64)
# Operators that copy a tensor as it is.
_SAME = ("clone", "alias")

_MakeMask = Callable[[Creator], fx.Node]


@dataclass(frozen=True)
class _Scores:
    """Scores: the product of queries and keys, times a scale, plus a mask.

    Attributes:
        product: the node of the product.
        scale: the scale.
        mask: adds the mask to the graph; None without a mask.
        terms: the nodes that the mask is computed from.
    """

    product: fx.Node
    scale: float = 1.0
    mask: _MakeMask | None = None
    terms: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class _Attention:
    """An attention that is written out.

    Attributes:
        scores: its scores.
        softmax: the node of its softmax.
        weights: the nodes from the softmax to the second product.
        dropout: the drop probability.
        product: the node of the second product.
    """

    scores: _Scores
    softmax: fx.Node
    weights: tuple[fx.Node, ...]
    dropout: float
    product: fx.Node


@dataclass
class _Masks:
    """The masks of a graph.

    Attributes:
        constants: the constants of the graph.
        prepared: from masks of the model to what kernels read: layers share them.
    """

    constants: Constants = field(default_factory=Constants)
    prepared: dict[Any, fx.Node] = field(default_factory=dict)


def fuse_attentions(rewrite: Rewrite) -> None:
    """Replaces attentions in half precision that are written out by PyTorch's operator."""
    masks, part = _Masks(), parts_of(rewrite.graph)
    for softmax in list(filter(_is_softmax_of_keys, rewrite.graph.nodes)):
        attention = _attention_of(softmax, masks.constants)
        if attention is None or not _gains(attention, rewrite):
            continue
        # Nothing between them changes a tensor, or the gradient mode.
        nodes = (softmax, attention.scores.product, attention.product)
        if len({part[node] for node in nodes}) == 1:
            _replace(rewrite, attention, masks)
    drop_unused(rewrite.graph)


# --- what is an attention -------------------------------------------------------------------------


def _is_softmax_of_keys(node: fx.Node) -> bool:
    """Whether a node is a softmax of (batch, heads, queries, keys), on a device with kernels."""
    if name_of(node) != "_softmax" or value_of(node).dim() != 4 or node.args[1] not in (-1, 3):
        return False
    return launch.runs_kernels(value_of(node).device.type) and have_hints(value_of(node).shape)


def _attention_of(softmax: fx.Node, constants: Constants) -> _Attention | None:
    """The attention of a softmax; None if it is none, or something else reads a step of it."""
    scores = _inner(softmax, softmax.args[0], constants)
    weights, dropout, node = [softmax], 0.0, _only_user(softmax)
    while node is not None and _passes_on(node):
        if name_of(node) == "native_dropout":
            dropout = float(node.args[1])  # type: ignore[arg-type]
        weights.append(node)
        node = _only_user(node)
    if scores is None or node is None or name_of(node) != "bmm" or node.args[0] is not weights[-1]:
        return None
    # Heads that are folded into the rows of a product would be those of other queries.
    rows, products = value_of(softmax).shape[2:], (scores.product, weights[-1])
    if not all(_are_same(value_of(product).shape[1:], rows) for product in products):
        return None
    return _Attention(scores, softmax, tuple(weights), dropout, node)


def _only_user(node: fx.Node) -> fx.Node | None:
    """The only user of a node, or of the first result of a dropout."""
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def _passes_on(node: fx.Node) -> bool:
    """Whether a node of weights drops some of them, or passes them on in another form."""
    if name_of(node) == "native_dropout":
        return node.args[2] is True
    if name_of(node) in (*_SAME, "_to_copy", "expand"):
        return _keeps_size(node) and _keeps_values(node)
    is_first = node.target is operator.getitem and node.args[1] == 0
    return bool(is_first or reshapes(node))


def _keeps_size(node: fx.Node) -> bool:
    """Whether a node has the shape of its first argument."""
    source: Any = node.args[0]
    return is_tensor(source) and _are_same(value_of(source).shape, value_of(node).shape)


def _keeps_values(node: fx.Node) -> bool:
    """Whether a node is no cast to integers or 8 bits, and on the device of its argument."""
    value, source = map(value_of, (node, node.all_input_nodes[0]))
    return value.dtype in _WIDE and value.device == source.device


def _are_same(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are equal in all calls; no guard is added."""
    return len(shape) == len(other) and all(map(is_same, shape, other))


def _scores_of(node: Any, constants: Constants) -> _Scores | None:
    """The scores that a node computes; None if it computes something else.

    It is the reverse of the steps between the product and the softmax::

        scores              (product, 1, no mask)
        scores * number     the scale and the mask times the number
        scores + tensor     the mask plus the tensor
        masked_fill, where  the mask, where it is not the lowest number
        views, casts        the same
    """
    if not isinstance(node, fx.Node) or not is_tensor(node):
        return None
    name = name_of(node)
    if name == "bmm":
        return _Scores(node)
    step = _STEPS.get(name)
    if step is None and reshapes(node):
        step = _reshaped
    return None if step is None else step(node, constants)


def _inner(node: fx.Node, argument: Any, constants: Constants) -> _Scores | None:
    """The scores that are an argument of a node, which alone reads them, and has their shape."""
    if not isinstance(argument, fx.Node) or len(argument.users) != 1:
        return None
    if not reshapes(node) and not _are_same(value_of(argument).shape, value_of(node).shape):
        return None
    return _scores_of(argument, constants)


def _same(node: fx.Node, constants: Constants) -> _Scores | None:
    return _inner(node, node.args[0], constants) if _keeps_values(node) else None


def _reshaped(node: fx.Node, constants: Constants) -> _Scores | None:
    source: Any = node.args[0]
    scores = _inner(node, source, constants)
    if scores is None or scores.mask is None:
        return scores
    mask, before, after = scores.mask, value_of(source).shape, value_of(node).shape
    if not are_numbers((*before, *after)):
        return None

    def reshaped(creator: Creator) -> fx.Node:
        whole = creator.call(_ATEN.expand.default, mask(creator), before)
        return creator.call(_ATEN.reshape.default, whole, after)

    return replace(scores, mask=reshaped)


def _scaled(node: fx.Node, constants: Constants) -> _Scores | None:
    source: Any
    number: Any
    source, number = node.args[:2]
    scores = _inner(node, source, constants)
    if scores is None or type(number) not in (int, float) or number == 0 or node.kwargs:
        return None
    factor = 1 / number if name_of(node) == "div" else number
    mask, target = scores.mask, node.target
    scores = replace(scores, scale=scores.scale * factor)
    if mask is None:
        return scores
    return replace(scores, mask=lambda creator: creator.call(target, mask(creator), number))


def _added(node: fx.Node, constants: Constants) -> _Scores | None:
    if node.kwargs:
        return None
    for source, term in (node.args, node.args[::-1]):
        scores = _inner(node, source, constants)
        if scores is not None and isinstance(term, fx.Node):
            return _plus(scores, term, functools.partial(_term, term, dtype_of(node)))
    return None


def _term(term: fx.Node, dtype: torch.dtype, creator: Creator) -> fx.Node:
    """A summand of a mask: truth values are added as numbers."""
    if dtype_of(term).is_floating_point:
        return term
    return creator.call(CAST, term, dtype=dtype)


def _filled(node: fx.Node, constants: Constants) -> _Scores | None:
    """Scores that a number hides where a condition holds, or elsewhere: see `_HIDDEN`."""
    is_elsewhere = name_of(node) == "where"
    condition: Any = node.args[not is_elsewhere]
    fill, scores = (
        _number_of(node.args[2], constants),
        _inner(node, node.args[is_elsewhere], constants),
    )
    if scores is None or not fill <= _HIDDEN:
        return None
    numbers, dtype = ((0.0, fill) if is_elsewhere else (fill, 0.0)), dtype_of(node)

    def hidden(creator: Creator) -> fx.Node:
        new = _ATEN.new_full.default
        both = [creator.call(new, condition, [], number, dtype=dtype) for number in numbers]
        return creator.call(_ATEN.where.self, condition, *both)

    return _plus(scores, condition, hidden)


def _number_of(argument: Any, constants: Constants) -> float:
    """The number that an argument is, also as a constant tensor; NaN for others."""
    if not isinstance(argument, fx.Node):
        return float(argument)
    value = constants.value(argument)
    return math.nan if value is None or value.dim() else float(value)


def _plus(scores: _Scores, term: fx.Node, make: _MakeMask) -> _Scores:
    """Scores plus one more mask."""
    mask, terms = scores.mask, (*scores.terms, term)
    if mask is None:
        return replace(scores, mask=make, terms=terms)

    def both(creator: Creator) -> fx.Node:
        return creator.call(_ATEN.add.Tensor, mask(creator), make(creator))

    return replace(scores, mask=both, terms=terms)


_STEPS: dict[str, Callable[[fx.Node, Constants], _Scores | None]] = {
    "mul": _scaled,
    "div": _scaled,
    "add": _added,
    "masked_fill": _filled,
    "where": _filled,
    "_to_copy": _same,
    **dict.fromkeys(_SAME, _same),
}


# --- which are replaced ---------------------------------------------------------------------------


def _gains(attention: _Attention, rewrite: Rewrite) -> bool:
    """Whether PyTorch has fused kernels for an attention, and they are faster."""
    scores = attention.scores
    products = (scores.product, attention.product)
    if {dtype_of(node) for node in products} not in ({dtype} for dtype in HALF):
        return False
    query: Any = scores.product.args[0]
    widths = (value_of(query).shape[-1], value_of(attention.product).shape[-1])
    heads = value_of(attention.softmax).shape[1]
    if not are_numbers((heads, *widths)) or any(not _is_width(width) for width in widths):
        return False
    *_, queries, keys = hints_of(attention.softmax)
    # Kernels look for the largest score before they scale.
    if min(queries, keys) < _LEAST_TOKENS or scores.scale <= 0:
        return False
    if scores.mask is None:
        return True
    # Kernels read a mask along the keys, and compute its gradient more slowly than the operators.
    is_read = rewrite.needs.isdisjoint(scores.terms) and keys % ALIGNED == 0
    has_backward = attention.softmax in rewrite.needs
    return is_read and not (has_backward and _may_fail(value_of(attention.softmax).shape[-1]))


def _may_fail(keys: Any) -> bool:
    """Whether cuDNN's backward with a mask of so many keys may return NaN (issue 196678)."""
    return not are_numbers([keys]) or keys % 128 == 64


def _is_width(width: int) -> bool:
    return width <= _WIDEST_HEADS and width % ALIGNED == 0


# --- how they are replaced ------------------------------------------------------------------------


def _replace(rewrite: Rewrite, attention: _Attention, masks: _Masks) -> None:
    scores, product = attention.scores, attention.product
    softmax = attention.softmax
    result = _view_as_heads(product, value_of(softmax).shape[:2]) or product
    creator = Creator(rewrite, result)
    query, transposed = [_of_heads(creator, arg, softmax) for arg in scores.product.args]
    key = creator.call(_ATEN.transpose.int, transposed, -2, -1)
    value = _of_heads(creator, product.args[1], softmax)
    query, key, value = [_in_rows(creator, node) for node in (query, key, value)]
    mask, is_causal = None, False
    if scores.mask is not None:
        mask, is_causal = _needed_mask(creator, scores, transposed, masks)
    node = creator.call(
        _ATEN.scaled_dot_product_attention.default,
        query,
        key,
        value,
        mask,
        attention.dropout,
        is_causal,
        scale=scores.scale,
    )
    if result is product:
        node = creator.call(_ATEN.flatten.using_ints, node, 0, 1)
    node.meta[FUSED] = True
    note_change(node, "an attention that is written out, in PyTorch's fused kernels")
    # The next passes see the model's strides.
    rewrite.restrided[node] = value_of(node)
    node.meta["val"] = value_of(result)
    result.replace_all_uses_with(node)
    # A dropout without users would still draw.
    for old in dict.fromkeys((result, product, *reversed(attention.weights))):
        rewrite.graph.erase_node(old)


def _view_as_heads(product: fx.Node, sizes: Sequence[Any]) -> fx.Node | None:
    """The only user of a product, if it is a view as (batch, heads, queries, columns)."""
    user = _only_user(product)
    if user is None or not reshapes(user):
        return None
    shape = value_of(user).shape
    return user if len(shape) == 4 and _are_same(shape[:2], sizes) else None


def _of_heads(creator: Creator, factor: Any, softmax: fx.Node) -> fx.Node:
    """A factor of a product as (batch, heads, rows, columns), not copied where that can be."""
    shape = (*value_of(softmax).shape[:2], *value_of(factor).shape[1:])
    for node in _sources(factor):
        if _are_same(value_of(node).shape, shape):
            return node
    return creator.call(_ATEN.unflatten.int, factor, 0, [-1, shape[1]])


def _in_rows(creator: Creator, node: fx.Node) -> fx.Node:
    """A tensor whose columns are adjacent, as the fused kernels demand; a product does not."""
    if value_of(node).stride()[-1] == 1:
        return node
    return creator.call(_ATEN.clone.default, node, memory_format=torch.contiguous_format)


def _sources(node: Any) -> Iterator[fx.Node]:
    """The tensors, the first one first, that a node is a view or a copy of, element by element."""
    chain: list[fx.Node] = []
    while not chain or is_same(value_of(node).numel(), value_of(chain[0]).numel()):
        chain.append(node)
        if not reshapes(node) and name_of(node) not in (*_SAME, "expand"):
            break
        node = node.args[0]
    yield from reversed(chain)


def _needed_mask(
    creator: Creator, scores: _Scores, keys: fx.Node, masks: _Masks
) -> tuple[fx.Node | None, bool]:
    """The mask that an attention needs, and whether it is causal instead.

    Args:
        creator: adds it to the graph.
        scores: the scores.
        keys: (batch, heads, columns, keys).
        masks: the masks of the graph.
    """
    assert scores.mask is not None
    mask = scores.mask(creator)
    if value_of(mask).dim() < 2:
        mask = creator.call(_ATEN.reshape.default, mask, [1, -1])
    masks.constants.visit(creator.added)
    kind = masks.constants.kind(mask)
    if kind is Mask.ALL:
        return None, False
    sizes, dtype = value_of(scores.product).shape[-2:], dtype_of(scores.product)
    if kind is Mask.CAUSAL and _are_same(value_of(mask).shape[-2:], sizes):
        return None, True
    if (mask, dtype) not in masks.prepared:
        masks.prepared[mask, dtype] = _prepared(creator, mask, dtype, keys)
    return masks.prepared[mask, dtype], False


def _prepared(creator: Creator, mask: fx.Node, dtype: torch.dtype, keys: fx.Node) -> fx.Node:
    """A mask as kernels read it: of the dtype of the scores, and contiguous along the keys.

    Rows that are hidden whole have equal weights. So they have in eager PyTorch, except those that
    are hidden by -inf. In kernels, which compute powers of two, the lowest numbers of bf16 and fp32
    would be -inf.
    """
    lowest = max(_HIDDEN, torch.finfo(dtype).min)
    mask = creator.call(_ATEN.clamp.default, mask, lowest)
    if dtype_of(mask) != dtype:
        # Numbers near the largest of a row keep their digits, and a softmax does not see a shift. A
        # row that is hidden whole stays so.
        largest = creator.call(_ATEN.amax.default, mask, [-1], True)
        largest = creator.call(_ATEN.clamp.default, largest, _HIDDEN / 2)
        mask = creator.call(_ATEN.sub.Tensor, mask, largest)
        mask = creator.call(_ATEN.clamp.default, mask, lowest)
        mask = creator.call(CAST, mask, dtype=dtype)
    value, count = value_of(mask), value_of(keys).shape[-1]
    if is_same(value.shape[-1], count) and value.stride()[-1] == 1:
        return mask
    if not are_numbers([count]):
        count = creator.call(_ATEN.sym_size.int, keys, 3)
    mask = creator.call(_ATEN.expand.default, mask, [*[-1] * (value.dim() - 1), count])
    return creator.call(_ATEN.clone.default, mask, memory_format=torch.contiguous_format)
