"""Evaluation of a graph by PyTorch's operators.

For second derivatives, for devices without kernels, and to check kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.activations import ACTIVATIONS
from ..core.calls.function import vjp
from .ir import Node, derived_of, value_of
from .structure import Operand, Part, Structure, within, without

__all__ = ["assembled", "evaluate", "part_of"]

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log2": torch.log2,
    "log": torch.log,
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "abs": torch.abs,
    "sign": torch.sign,
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "rint": torch.round,
    "not": torch.logical_not,
    "isnan": torch.isnan,
    "detached": torch.Tensor.detach,
    "narrowed": lambda x: x,
    # The graph of a backward was built without gradients for these: here only the value counts.
    "constant_to_gradients": lambda x: x,
    **{name: activation.formula for name, activation in ACTIVATIONS.items()},
}
_BINARY: dict[str, Callable[[Any, Any], Tensor]] = {
    "power": torch.pow,
    "fmod": torch.fmod,
    "xlogy": torch.xlogy,
    "quotient": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "div_rn": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "and": torch.bitwise_and,  # of truth values and of integers
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
}
_DTYPES = {"int": torch.int64, "bool": torch.bool}
# The integers that floats have for their bits, and the largest of them.
_INTEGERS = {"float32": (torch.int32, 2**31 - 1), "float64": (torch.int64, 2**63 - 1)}


def part_of(structure: Structure, operand: Operand, tensor: Tensor, part: Part) -> Tensor:
    """Return a part of a tensor, with a dimension for each row and column axis.

    A dimension along which the tensor does not vary has size 1::

        (batch, 3 heads, 64), head 1 -> (batch, 64)
        (64,)                        -> (1, 64)
    """
    sizes = [_size(structure, operand, tensor, axis) for axis in operand.axes]
    flat = tensor.reshape(sizes)
    axes = list(operand.axes)
    for axis, index in part:
        flat = flat.select(axes.index(axis), index)
        axes.remove(axis)
    full_order = (*structure.rows, *structure.columns)
    flat = flat.permute(list(map(axes.index, within(full_order, axes))))
    for dim, axis in enumerate(full_order):
        if axis not in axes:
            flat = flat.unsqueeze(dim)
    return flat


def _size(structure: Structure, operand: Operand, tensor: Tensor, axis: int) -> int:
    """Return the size of an axis.

    A dimension of rows may have any size, which is read from the tensor. Other axes have the size
    of the trace.
    """
    if axis in structure.rows:
        for dim, label in enumerate(operand.labels):
            if label == (axis,):
                return tensor.shape[dim]
    return structure.sizes[axis]


def assembled(
    structure: Structure, operand: Operand, parts: Mapping[Part, Tensor], shape: Iterable[int]
) -> Tensor:
    """Return a tensor of its parts: the inverse of `part_of`.

    Parts have all row and column axes. Those that the tensor does not have are removed, and the
    unrolled ones become dimensions::

        3 x (batch, 64) -> (3 heads, batch, 64) -> (batch, 3 heads, 64)
    """
    shape = tuple(shape)
    full_order = [*structure.rows, *structure.columns]
    sizes = {axis: structure.sizes[axis] for axis in operand.axes}
    for dim, label in enumerate(operand.labels):
        if len(label) == 1:
            sizes[label[0]] = shape[dim]
    unrolled = within(structure.unrolled, operand.axes)
    rolled = within(full_order, without(operand.axes, unrolled))
    full_shape = [sizes.get(axis, 1) for axis in full_order]
    stacked = torch.stack([value.expand(full_shape) for value in parts.values()])
    # Dimension 0 is the parts. A tensor without unrolled axes has one part.
    absent = without(full_order, rolled)
    stacked = stacked.squeeze(tuple([1 + full_order.index(axis) for axis in absent]))
    axes = [*unrolled, *rolled]
    stacked = stacked.reshape([sizes[axis] for axis in axes])
    return stacked.permute(list(map(axes.index, operand.axes))).reshape(shape)


def evaluate(
    structure: Structure,
    roots: Iterable[Node],
    leaves: Callable[[Node], Tensor | None],
    dtype: torch.dtype,
    device: torch.device,
    sizes: Sequence[int],
) -> dict[Node, Tensor]:
    """Return the values of the roots, and of all that they are computed from.

    Args:
        structure: the function.
        roots: the nodes whose values are wanted.
        leaves: the values of leaves, and of nodes that are not to be computed; None for others.
        dtype: the dtype of floating-point values.
        device: the device of all values.
        sizes: the sizes of the axes.
    """
    values: dict[Node, Tensor] = {}
    evaluation = _Evaluation((*structure.rows, *structure.columns), sizes, device, dtype)
    for node in _topological_until(roots, leaves, values):
        if node not in values:
            args = [values[arg] for arg in derived_of(node)]
            values[node] = evaluation.computed(node, args)
    return values


def _topological_until(
    roots: Iterable[Node], leaves: Callable[[Node], Tensor | None], values: dict[Node, Tensor]
) -> list[Node]:
    """Return the nodes to compute, arguments first; the values of leaves are put in ``values``."""
    # A node is first looked up among the leaves. The arguments of a leaf are not visited: those of
    # a saved node may have no value, such as inputs that a backward does not save.
    order: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node in order or node in values:
            return
        value = leaves(node)
        if value is not None:
            values[node] = value
            return
        for arg in derived_of(node):
            visit(arg)
        order[node] = None

    for root in roots:
        visit(root)
    return list(order)


@dataclass(frozen=True)
class _Evaluation:
    """Computes the values of nodes.

    Attributes:
        order: the axes of all values' dimensions.
        sizes: the sizes of the axes.
        device: the device of all values.
        dtype: the dtype of floating-point values.
    """

    order: tuple[int, ...]
    sizes: Sequence[int]
    device: torch.device
    dtype: torch.dtype

    def computed(self, node: Node, args: list[Tensor]) -> Tensor:
        """Return a node's value, computed from the values of its arguments."""
        method = _METHODS.get(node.op)
        if method is not None:
            return method(self, node, args)
        if node.op.startswith("d:"):
            return _derivative(ACTIVATIONS[node.op[2:]].formula, args[0])
        if node.op in _UNARY:
            return _UNARY[node.op](*args)
        return _BINARY[node.op](*args)

    def _const(self, node: Node, args: list[Tensor]) -> Tensor:
        shape = (1,) * len(self.order)
        dtype = self._dtype_of(node)
        return torch.full(shape, value_of(node), dtype=dtype, device=self.device)

    def _iota(self, node: Node, args: list[Tensor]) -> Tensor:
        return self._index(node.attrs[0])

    def _cast(self, node: Node, args: list[Tensor]) -> Tensor:
        value = args[0]
        if node.attrs:
            value = value.to(getattr(torch, node.attrs[0]))
        return value.to(self._dtype_of(node))

    # A plan adds "round" for tensors that are returned or saved, with a `torch.dtype`. A trace has
    # "rounded" for the user's casts and comparisons, with a name, which a file can hold.

    def _round(self, node: Node, args: list[Tensor]) -> Tensor:
        return args[0].to(node.attrs[0]).to(self.dtype)

    def _rounded(self, node: Node, args: list[Tensor]) -> Tensor:
        return args[0].to(getattr(torch, node.attrs[0])).to(self.dtype)

    def _ordinal(self, node: Node, args: list[Tensor]) -> Tensor:
        integers, most = _INTEGERS[node.attrs[0]]
        value = args[0].to(getattr(torch, node.attrs[0]))
        return torch.where(value.isnan(), most - 1, _places(value.view(integers), most)).long()

    def _of_ordinal(self, node: Node, args: list[Tensor]) -> Tensor:
        integers, most = _INTEGERS[node.attrs[0]]
        bits = _places(args[0].to(integers), most)
        return bits.view(getattr(torch, node.attrs[0])).to(self.dtype)

    def _instead(self, node: Node, args: list[Tensor]) -> Tensor:
        # `derived_of` leaves out the second argument, unless the first is detached or a constant.
        if len(args) == 1:
            return args[0]
        return _instead(*torch.broadcast_tensors(*args))

    def _root(self, node: Node, args: list[Tensor]) -> Tensor:
        # At zero the derivative of the square root is infinite, so there the root of one is taken.
        is_zero = args[0] == 0.0
        return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, args[0]).sqrt())

    def _pow(self, node: Node, args: list[Tensor]) -> Tensor:
        return torch.pow(args[0], node.attrs[0])

    def _where(self, node: Node, args: list[Tensor]) -> Tensor:
        return torch.where(*args)  # type: ignore[return-value]

    def _pick(self, node: Node, args: list[Tensor]) -> Tensor:
        (axis,) = node.attrs[0]
        # Zero where the index is out of range, as in kernels: `torch.gather` would raise.
        picked = torch.where(self._index(axis) == args[1], args[0], 0)
        return picked.sum(self.order.index(axis), keepdim=True)

    def _sum(self, node: Node, args: list[Tensor]) -> Tensor:
        return args[0].sum(self._dims(node), keepdim=True)

    def _amax(self, node: Node, args: list[Tensor]) -> Tensor:
        return args[0].amax(self._dims(node), keepdim=True)

    def _dims(self, node: Node) -> list[int]:
        return list(map(self.order.index, node.attrs[0]))

    def _dtype_of(self, node: Node) -> torch.dtype:
        if node.kind == "float":
            return self.dtype
        return _DTYPES[node.kind]

    def _index(self, axis: int) -> Tensor:
        """Return the index along an axis, which broadcasts along the others."""
        shape = [1] * len(self.order)
        shape[self.order.index(axis)] = self.sizes[axis]
        return torch.arange(self.sizes[axis], device=self.device).view(shape)


_METHODS: dict[str, Callable[[_Evaluation, Node, list[Tensor]], Tensor]] = {
    "const": _Evaluation._const,
    "iota": _Evaluation._iota,
    "cast": _Evaluation._cast,
    "round": _Evaluation._round,
    "rounded": _Evaluation._rounded,
    "ordinal": _Evaluation._ordinal,
    "of_ordinal": _Evaluation._of_ordinal,
    "instead": _Evaluation._instead,
    "root": _Evaluation._root,
    "pow": _Evaluation._pow,
    "where": _Evaluation._where,
    "pick": _Evaluation._pick,
    "sum": _Evaluation._sum,
    "amax": _Evaluation._amax,
}


def _places(bits: Tensor, most: int) -> Tensor:
    """Return the ordinals of numbers from their bits, or their bits from the ordinals."""
    return torch.where(bits < 0, bits ^ most, bits)


def _instead(value: Tensor, substitute: Tensor) -> Tensor:
    """Return the value, with the derivative of ``substitute``."""
    result = substitute.clone()
    with torch.no_grad():
        return result.copy_(value)


def _derivative(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gradient = vjp(lambda inner: (function(inner),), (x,), (torch.ones_like(x),), (True,))[0]
    assert gradient is not None
    return gradient
