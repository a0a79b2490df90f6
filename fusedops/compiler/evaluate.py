"""A graph computed by PyTorch's operators: for second derivatives, for devices without kernels, and to check kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.activations import ACTIVATIONS
from ..core.function import vjp
from .ir import Node, derived_of, value_of
from .structure import Operand, Part, Structure

__all__ = ["assembled", "evaluate", "part_of"]

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg, "exp": torch.exp, "exp2": torch.exp2, "log2": torch.log2,
    "log": torch.log, "log1p": torch.log1p, "expm1": torch.expm1, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "abs": torch.abs, "sign": torch.sign, "sin": torch.sin,
    "cos": torch.cos, "erf": torch.erf, "floor": torch.floor, "ceil": torch.ceil, "not": torch.logical_not,
    "isnan": torch.isnan,
    "detached": torch.Tensor.detach,
    "narrowed": lambda x: x,
    # In a backward's graph these are values like others: that they are constants is already in it.
    "constant_to_gradients": lambda x: x,
    **{name: activation.formula for name, activation in ACTIVATIONS.items()},
}  # fmt: skip
_BINARY: dict[str, Callable[[Any, Any], Tensor]] = {
    "power": torch.pow, "fmod": torch.fmod, "xlogy": torch.xlogy,
    "quotient": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum,
    "minimum": torch.minimum, "and": torch.logical_and, "or": torch.logical_or, "xor": torch.logical_xor,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
}  # fmt: skip
_DTYPES = {"int": torch.int64, "bool": torch.bool}


def part_of(structure: Structure, operand: Operand, tensor: Tensor, part: Part) -> Tensor:
    """A part of a tensor, with a dimension for each row and column axis, of size 1 where it has none."""
    flat = tensor.reshape([structure.sizes[axis] if axis not in structure.rows else _size(operand, tensor, axis, structure)
                           for axis in operand.axes])  # fmt: skip
    axes = list(operand.axes)
    for axis, place in part:
        flat = flat.select(axes.index(axis), place)
        axes.remove(axis)
    order = [axis for axis in (*structure.rows, *structure.columns) if axis in axes]
    flat = flat.permute([axes.index(axis) for axis in order])
    for at, axis in enumerate((*structure.rows, *structure.columns)):
        if axis not in axes:
            flat = flat.unsqueeze(at)
    return flat


def _size(operand: Operand, tensor: Tensor, axis: int, structure: Structure) -> int:
    """Of a row axis, from the dimension that it is in."""
    place = next(place for place, label in enumerate(operand.labels) if axis in label)
    size = tensor.shape[place]
    return size if len(operand.labels[place]) == 1 else structure.sizes[axis]


def assembled(structure: Structure, operand: Operand, parts: Mapping[Part, Tensor], shape: Iterable[int]) -> Tensor:
    """The inverse of `part_of`: a tensor of its parts."""
    shape = tuple(shape)
    order = [*structure.rows, *structure.columns]
    sizes = {axis: structure.sizes[axis] for axis in operand.axes}
    for place, label in enumerate(operand.labels):
        if len(label) == 1:
            sizes[label[0]] = shape[place]
    unrolled = [axis for axis in structure.unrolled if axis in operand.axes]
    rolled = [axis for axis in operand.axes if axis not in unrolled]
    values = [value.expand([sizes.get(axis, 1) for axis in order]) for value in parts.values()]
    whole = torch.stack(values) if unrolled else values[0].unsqueeze(0)
    whole = whole.squeeze(tuple([1 + at for at, axis in enumerate(order) if axis not in rolled]))
    whole = whole.reshape([sizes[axis] for axis in unrolled] + [sizes[axis] for axis in order if axis in rolled])
    have = unrolled + [axis for axis in order if axis in rolled]
    return whole.permute([have.index(axis) for axis in operand.axes]).reshape(shape)


def evaluate(structure: Structure, roots: Iterable[Node], leaves: Callable[[Node], Tensor | None],
             dtype: torch.dtype, device: torch.device, sizes: Sequence[int]) -> dict[Node, Tensor]:  # fmt: skip
    """The values of the roots, and of all that they are computed of.

    Args:
        structure: the function.
        roots: what is wanted.
        leaves: the values of nodes that are not to be computed, and of leaves; None for all others.
        dtype: of floating-point values.
        device: of all.
        sizes: of the axes.
    """
    order = (*structure.rows, *structure.columns)
    found: dict[Node, Tensor] = {}
    for node in topological_until(roots, leaves, found):
        if node not in found:
            found[node] = _computed(node, [found[arg] for arg in derived_of(node)], order, sizes, device, dtype)
    return found


def topological_until(roots: Iterable[Node], leaves: Callable[[Node], Tensor | None],
                      found: dict[Node, Tensor]) -> list[Node]:  # fmt: skip
    """The nodes to compute, arguments first; leaves go to ``found``."""
    order: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node in order or node in found:
            return
        value = leaves(node)
        if value is not None:
            found[node] = value
            return
        for arg in derived_of(node):
            visit(arg)
        order[node] = None

    for root in roots:
        visit(root)
    return list(order)


def _computed(node: Node, args: list[Tensor], order: tuple[int, ...], sizes: Sequence[int], device: torch.device,
              dtype: torch.dtype) -> Tensor:  # fmt: skip
    op = node.op
    if op == "const":
        kind = dtype if node.kind == "float" else _DTYPES[node.kind]
        return torch.full((1,) * len(order), value_of(node), dtype=kind, device=device)
    if op == "iota":
        shape = [sizes[axis] if axis == node.attrs[0] else 1 for axis in order]
        return torch.arange(sizes[node.attrs[0]], device=device).view(shape)
    if op == "cast":
        return args[0].to(dtype if node.kind == "float" else _DTYPES[node.kind])
    if op in ("round", "rounded"):
        return args[0].to(node.attrs[0] if op == "round" else getattr(torch, node.attrs[0])).to(dtype)
    if op == "instead":
        return args[0] if len(args) == 1 else _instead(*torch.broadcast_tensors(*args))
    if op == "root":
        return torch.where(args[0] == 0.0, 0.0, torch.where(args[0] == 0.0, 1.0, args[0]).sqrt())
    if op == "pow":
        return torch.pow(args[0], node.attrs[0])
    if op == "where":
        return torch.where(*args)  # type: ignore[return-value]
    if op == "pick":
        (axis,) = node.attrs[0]
        shape = [sizes[axis] if a == axis else 1 for a in order]
        places = torch.arange(sizes[axis], device=device).view(shape)
        return torch.where(places == args[1], args[0], 0).sum(order.index(axis), keepdim=True)
    if op in ("sum", "amax"):
        dims = [order.index(axis) for axis in node.attrs[0]]
        return args[0].sum(dims, keepdim=True) if op == "sum" else args[0].amax(dims, keepdim=True)
    if op.startswith("d:"):
        return _derivative(ACTIVATIONS[op[2:]].formula, args[0])
    return _UNARY[op](*args) if op in _UNARY else _BINARY[op](*args)


def _instead(value: Tensor, standing: Tensor) -> Tensor:
    """The value, with the derivative of ``standing``."""
    found = standing.clone()
    with torch.no_grad():
        return found.copy_(value)


def _derivative(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    found = vjp(lambda inner: (function(inner),), (x,), (torch.ones_like(x),), (True,))[0]
    assert found is not None
    return found
