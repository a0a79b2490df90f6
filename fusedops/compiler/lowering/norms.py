"""Norms that PyTorch does not decompose."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..tracing import Value
from .common import as_kind, lowers, pointwise
from .reductions import length, reduced, repeated, variance


@lowers("native_layer_norm")
def _layer_norm(r: Any, out: Any, x: Value, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    graph = r.graph
    dims = list(range(len(x.labels) - len(shape), len(x.labels)))
    var, mean, labels = variance(r, x, dims, 0, True)
    rstd = graph.unary("rsqrt", graph.binary("add", var, graph.const(float(eps))))
    node = graph.binary("mul", graph.binary("sub", as_kind(r, x.node, "float"), mean), rstd)
    found = _affine(r, out[0], Value(node, x.labels, out[0].dtype), weight, bias)
    return [found, Value(mean, labels, out[1].dtype), Value(rstd, labels, out[2].dtype)]


def _affine(r: Any, out: Any, x: Value, weight: Any, bias: Any) -> Value:
    for op, vector in (("mul", weight), ("add", bias)):
        if vector is not None:
            x = pointwise(r, out, functools.partial(r.graph.binary, op), x, vector)
    return x


@lowers("_fused_rms_norm")
def _rms_norm(r: Any, out: Any, x: Value, shape: Sequence[int], weight: Any, eps: Any) -> Any:
    graph = r.graph
    eps = torch.finfo(torch.float32 if x.dtype != torch.float64 else x.dtype).eps if eps is None else eps
    dims = list(range(len(x.labels) - len(shape), len(x.labels)))
    node = as_kind(r, x.node, "float")
    square = Value(graph.binary("mul", node, node), x.labels, x.dtype)
    total, labels, axes = reduced(r, "sum", square, dims, True, "float")
    mean = graph.binary("mul", repeated(r, square, total, axes), graph.const(1.0 / length(r, axes)))
    rstd = graph.unary("rsqrt", graph.binary("add", mean, graph.const(float(eps))))
    found = _affine(r, out[0], Value(graph.binary("mul", node, rstd), x.labels, out[0].dtype), weight, None)
    return [found, Value(rstd, labels, out[1].dtype)]


@lowers("native_group_norm")
def _group_norm(r: Any, out: Any, x: Value, weight: Any, bias: Any, *sizes: Any) -> Any:
    """Rows are the groups of channels, with all that is in them."""
    _count, channels, _size, groups, eps = sizes
    graph = r.graph
    inner = channels // groups
    if inner == 1:  # with more channels each group would have several
        r.traced.fixed.append(x.labels[1])
        if not any(x.labels[2:]):  # of one element each, which PyTorch refuses in a batch of one
            r.traced.fixed.append(x.labels[0])
    split = iter(r.axes.split(x.labels[1], [part for part in (groups, inner) if part != 1]))
    labels = (x.labels[0], next(split) if groups != 1 else (), next(split) if inner != 1 else (), *x.labels[2:])
    grouped = Value(x.node, labels, x.dtype)
    var, mean, left = variance(r, grouped, list(range(2, len(labels))), 0, True)
    rstd = graph.unary("rsqrt", graph.binary("add", var, graph.const(float(eps))))
    node = graph.binary("mul", graph.binary("sub", as_kind(r, x.node, "float"), mean), rstd)
    found = Value(node, x.labels, out[0].dtype)
    for op, vector in (("mul", weight), ("add", bias)):
        if vector is not None:
            shaped = Value(vector.node, (vector.labels[0], *[()] * (len(x.labels) - 2)), vector.dtype)
            found = pointwise(r, out[0], functools.partial(graph.binary, op), found, shaped)
    return [found, Value(mean, left[:2], out[1].dtype), Value(rstd, left[:2], out[2].dtype)]
