"""Norms that PyTorch does not decompose."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..axes import Label
from ..ir import Node
from ..traced import Value
from .common import as_kind, lowers, pointwise
from .reductions import length, reduced, repeated, variance


def _trailing(x: Value, shape: Sequence[int]) -> list[int]:
    """The dimensions that a norm over ``shape`` normalizes."""
    rank = len(x.labels)
    return list(range(rank - len(shape), rank))


def _standardized(
    r: Any, x: Value, normalized: Value, dims: Sequence[int], eps: float
) -> tuple[Node, Node, Node, tuple[Label, ...]]:
    """``(x - mean) * rstd``, the mean, rstd, and the labels of mean and rstd.

    ``dims`` are dimensions of ``normalized``: the same tensor as ``x``, perhaps with its dimensions
    split, as a group norm splits the channels into groups.
    """
    graph = r.graph
    var, mean, labels = variance(r, normalized, list(dims), 0, True)
    rstd = graph.unary("rsqrt", graph.binary("add", var, graph.const(float(eps))))
    centred = graph.binary("sub", as_kind(r, x.node, "float"), mean)
    return graph.binary("mul", centred, rstd), mean, rstd, labels


def _affine(r: Any, out: Any, x: Value, weight: Any, bias: Any) -> Value:
    for op, vector in (("mul", weight), ("add", bias)):
        if vector is not None:
            x = pointwise(r, out, functools.partial(r.graph.binary, op), x, vector)
    return x


@lowers("native_layer_norm")
def _layer_norm(
    r: Any, out: Any, x: Value, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> Any:
    node, mean, rstd, labels = _standardized(r, x, x, _trailing(x, shape), eps)
    y = _affine(r, out[0], Value(node, x.labels, out[0].dtype), weight, bias)
    return [y, Value(mean, labels, out[1].dtype), Value(rstd, labels, out[2].dtype)]


@lowers("_fused_rms_norm")
def _rms_norm(r: Any, out: Any, x: Value, shape: Sequence[int], weight: Any, eps: Any) -> Any:
    graph = r.graph
    if eps is None:
        # PyTorch's default is the machine epsilon of the dtype in which it computes.
        acc = torch.float64 if x.dtype == torch.float64 else torch.float32
        eps = torch.finfo(acc).eps
    node = as_kind(r, x.node, "float")
    square = Value(graph.binary("mul", node, node), x.labels, x.dtype)
    total, labels, axes = reduced(r, "sum", square, _trailing(x, shape), True, "float")
    total = repeated(r, square, total, axes)
    mean = graph.binary("mul", total, graph.const(1.0 / length(r, axes)))
    rstd = graph.unary("rsqrt", graph.binary("add", mean, graph.const(float(eps))))
    normalized = Value(graph.binary("mul", node, rstd), x.labels, out[0].dtype)
    y = _affine(r, out[0], normalized, weight, None)
    return [y, Value(rstd, labels, out[1].dtype)]


@lowers("native_group_norm")
def _group_norm(r: Any, out: Any, x: Value, weight: Any, bias: Any, *sizes: Any) -> Any:
    """A norm whose rows are the groups of channels, with all elements of these channels."""
    _count, channels, _size, groups, eps = sizes
    inner = channels // groups
    # With one channel in each group the channels are rows, whose number may differ between calls.
    # But ``groups`` is a constant: with more channels each group would have several.
    if inner == 1:
        r.traced.fixed.append(x.labels[1])
        if not any(x.labels[2:]):  # of one element each, which PyTorch refuses in a batch of one
            r.traced.fixed.append(x.labels[0])
    # A group is a row, and its channels and their space are the columns:
    # (batch, channels, *space) -> (batch, groups, channels of a group, *space)
    split = iter(r.axes.split(x.labels[1], [size for size in (groups, inner) if size != 1]))
    group_label = next(split) if groups != 1 else ()
    channel_label = next(split) if inner != 1 else ()
    labels = (x.labels[0], group_label, channel_label, *x.labels[2:])
    grouped = Value(x.node, labels, x.dtype)
    dims = range(2, len(labels))
    node, mean, rstd, stat_labels = _standardized(r, x, grouped, dims, eps)
    y = Value(node, x.labels, out[0].dtype)
    y = _affine(r, out[0], y, _along_channels(weight, x), _along_channels(bias, x))
    stat_labels = stat_labels[:2]
    return [y, Value(mean, stat_labels, out[1].dtype), Value(rstd, stat_labels, out[2].dtype)]


def _along_channels(vector: Any, x: Value) -> Value | None:
    """A parameter of each channel, broadcast over the dimensions behind the channels."""
    if vector is None:
        return None
    behind = [()] * (len(x.labels) - 2)
    return Value(vector.node, (vector.labels[0], *behind), vector.dtype)
