"""Operators of complex tensors, in operators of their real and imaginary parts.

A complex tensor of ``(..., n)`` is a real one of ``(..., n, 2)``, the pairs that
`torch.view_as_real` returns. Complex numbers are then parts of rows that alternate in memory::

    view_as_complex(x)     x
    z * w                  stack((a c - b d, b c + a d), -1)    for the pairs (a, b) and (c, d)
    z.view(n, 4)           the pairs' view(n, 4, 2)
    view_as_real(z)        the pairs

The pairs have the same derivatives as PyTorch's complex tensors: for ``z`` in ``z * w`` it is
``grad * w.conj()``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import NotRowwiseError

__all__ = ["MAKING", "Pairs", "as_pairs", "of_pairs"]


@dataclass(frozen=True, eq=False)
class Pairs:
    """A complex tensor as a real one, whose last dimension has the two parts."""

    tensor: Tensor


# Operators of real tensors whose result is complex.
MAKING = frozenset({"view_as_complex", "complex", "polar"})


def as_pairs(tensor: Tensor) -> Tensor:
    """Return the pairs of a complex tensor; a real tensor as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def of_pairs(name: str, out: Any, args: Sequence[Any], kwargs: Any) -> Tensor:
    """Return the result of an operator; a complex one as a tensor of pairs.

    Args:
        name: the name of PyTorch's operator.
        out: its result for tensors without memory, which has the dtype.
        args: its arguments, with `Pairs` for complex tensors.
        kwargs: its arguments by keyword.
    Raises:
        NotRowwiseError: it is not known for such arguments.
    """
    operator = _OPERATORS.get(name, _unknown)
    result = operator(*args, **kwargs)
    if result is NotImplemented:
        raise NotRowwiseError(
            f"{name} of complex numbers, which have sums, products, conj, abs and views in a "
            "kernel; compute with the real and the imaginary parts, z.real and z.imag"
        )
    # In PyTorch a factor without dimensions does not determine the dtype of a product. Here the
    # factor has one more dimension, and does: so the result is converted.
    converted: Tensor = result.to(out.dtype.to_real())
    return converted


def _unknown(*args: Any, **kwargs: Any) -> Any:
    return NotImplemented


def _parts(pairs: Tensor) -> tuple[Tensor, Tensor]:
    return pairs.select(-1, 0), pairs.select(-1, 1)


def _joined(real: Tensor, imaginary: Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(real, imaginary), -1)


def _are_pairs(*values: Any) -> bool:
    return all(isinstance(value, Pairs) for value in values)


def _mul(x: Any, y: Any) -> Any:
    if not _are_pairs(x, y):
        pairs, factor = (x, y) if _are_pairs(x) else (y, x)
        return _scaled(torch.mul, pairs, factor)
    # Products of pairs, not of their parts: so the results are parts of one dimension. Only the
    # first factor, in a rotary embedding the rows, is split into its parts.
    real, imaginary = _parts(x.tensor)
    straight = _parts(x.tensor * y.tensor)
    crossed = _parts(_joined(imaginary, real) * y.tensor)
    return _joined(straight[0] - straight[1], crossed[0] + crossed[1])


def _scaled(operator: Callable[..., Tensor], x: Pairs, factor: Any) -> Any:
    """Both parts times, or divided by, a real tensor or number."""
    if isinstance(factor, Tensor):
        return operator(x.tensor, factor.unsqueeze(-1))
    return operator(x.tensor, factor) if isinstance(factor, (int, float)) else NotImplemented


def _div(x: Any, y: Any) -> Any:
    return _scaled(torch.div, x, y) if _are_pairs(x) else NotImplemented


def _sum_of(operator: Callable[..., Tensor]) -> Callable[..., Any]:
    def add(x: Any, y: Any, alpha: Any = 1) -> Any:
        if not _are_pairs(x, y):
            return NotImplemented
        return operator(x.tensor, y.tensor, alpha=alpha)

    return add


def _conj(x: Pairs) -> Tensor:
    real, imaginary = _parts(x.tensor)
    return _joined(real, -imaginary)


def _abs(x: Pairs) -> Tensor:
    """The length; its derivative at zero is zero, unlike that of `hypot`, which is NaN."""
    real, imaginary = _parts(x.tensor)
    is_zero = (real == 0) & (imaginary == 0)
    length = torch.hypot(real.masked_fill(is_zero, 1.0), imaginary)
    return length.masked_fill(is_zero, 0.0)


def _view(x: Pairs, size: Sequence[Any]) -> Tensor:
    return x.tensor.view(*size, 2)


def _dim(dim: int) -> int:
    """A dimension of a complex tensor as one of its pairs, which have one more at the end."""
    return dim - 1 if dim < 0 else dim


def _slice(x: Pairs, dim: int = 0, *bounds: Any) -> Any:
    return torch.ops.aten.slice(x.tensor, _dim(dim), *bounds)


_OPERATORS: dict[str, Callable[..., Any]] = {
    "view_as_complex": lambda x: x,
    "view_as_real": lambda x: x.tensor,
    "complex": _joined,
    "mul": _mul,
    "div": _div,
    "add": _sum_of(torch.add),
    "sub": _sum_of(torch.sub),
    "neg": lambda x: -x.tensor,
    "_conj": _conj,
    "abs": _abs,
    "clone": lambda x, **options: x.tensor.clone(**options),
    "alias": lambda x: x.tensor,
    "detach": lambda x: x.tensor.detach(),
    "view": _view,
    "_unsafe_view": _view,
    "expand": lambda x, size: x.tensor.expand(*size, 2),
    "unsqueeze": lambda x, dim: x.tensor.unsqueeze(_dim(dim)),
    "transpose": lambda x, first, second: x.tensor.transpose(_dim(first), _dim(second)),
    "permute": lambda x, dims: x.tensor.permute(*map(_dim, dims), -1),
    "slice": _slice,
    "select": lambda x, dim, index: x.tensor.select(_dim(dim), index),
}
