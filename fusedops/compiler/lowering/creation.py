"""New tensors: of one number, or of indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..traced import Value, kind_of
from .common import as_kind, as_value, differentiated, lowers


def _constant(
    r: Any, value: float, shape: Sequence[int], dtype: torch.dtype, *, like: Value | None = None
) -> Value:
    """A tensor of one number, with the dimensions of ``like``, or else new ones."""
    kind = kind_of(dtype)
    number = {"float": float, "int": int, "bool": bool}[kind](value)
    if like is not None:
        return Value(r.graph.const(number), like.labels, dtype)
    labels = tuple(map(r.axes.new, shape))
    return Value(r.graph.const(number), labels, dtype)


@lowers("full", "new_full")
def _full(r: Any, out: Any, *args: Any, **_: Any) -> Value:
    value = args[-1]
    return _constant(r, value, out.shape, out.dtype)


@lowers("full_like")
def _full_like(r: Any, out: Any, x: Value, value: Any, **_: Any) -> Value:
    return _constant(r, value, out.shape, out.dtype, like=x)


@lowers("fill")
def _fill(r: Any, out: Any, x: Value, value: Any) -> Value:
    """One number everywhere; the gradient of ``x`` is then zero, not absent."""
    node = as_value(r, value, kind_of(out.dtype)).node
    if node.kind == "float" and x.node.kind == "float":
        partials = [(x.node, r.graph.const(0.0))]
        is_tensor = isinstance(value, Value)
        if is_tensor and value.node.kind == "float":
            partials.append((node, r.graph.const(1.0)))
        node = differentiated(r, node, *partials)
    return Value(node, x.labels, out.dtype)


@lowers("zero")
def _zero(r: Any, out: Any, x: Value) -> Value:
    return _fill(r, out, x, 0)


@lowers("zeros_like", "empty_like")
def _zeros_like(r: Any, out: Any, x: Value, **_: Any) -> Value:
    return _constant(r, 0, out.shape, out.dtype, like=x)


@lowers("ones_like")
def _ones_like(r: Any, out: Any, x: Value, **_: Any) -> Value:
    return _constant(r, 1, out.shape, out.dtype, like=x)


@lowers("zeros", "new_zeros", "empty", "new_empty")
def _zeros(r: Any, out: Any, *_: Any, **__: Any) -> Value:
    return _constant(r, 0, out.shape, out.dtype)


@lowers("ones", "new_ones")
def _ones(r: Any, out: Any, *_: Any, **__: Any) -> Value:
    return _constant(r, 1, out.shape, out.dtype)


@lowers("scalar_tensor")
def _scalar_tensor(r: Any, out: Any, value: Any, **_: Any) -> Value:
    return _constant(r, value, (), out.dtype)


@lowers("arange")
def _arange(r: Any, out: Any, *args: Any, **_: Any) -> Value:
    # The arguments are (end), (start, end) or (start, end, step).
    start = args[0] if len(args) > 1 else 0
    step = args[2] if len(args) > 2 else 1
    label = r.axes.new(out.shape[0])
    index = r.graph.make("iota", attrs=label, axes=label, kind="int")
    kind = kind_of(out.dtype)
    index = as_kind(r, index, kind)
    scaled = r.graph.binary("mul", index, as_kind(r, r.graph.const(step), kind))
    node = r.graph.binary("add", scaled, as_kind(r, r.graph.const(start), kind))
    return Value(node, (label,), out.dtype)
