"""Formats of quantised results, and the arithmetic that generated kernels have for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Form",
    "Format",
    "PerBlock",
    "PerRow",
    "Static",
    "called_by_row",
    "form_of",
    "quantised",
]

_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
# The least scale: that of a row of zeros.
_LEAST = 1e-12


@dataclass(frozen=True)
class PerRow:
    """A scale for each row: its largest magnitude, divided by the largest number of the dtype.

    Args:
        dtype: `torch.float8_e4m3fn`, `torch.float8_e5m2` or `torch.int8`.
    Raises:
        TypeError: another dtype.
    """

    dtype: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        _check_dtype("PerRow", self.dtype)


@dataclass(frozen=True)
class PerBlock:
    """A scale for each block of neighbouring columns.

    Args:
        size: the columns of a block, a power of two from 8 on.
        dtype: as in `PerRow`.
    Raises:
        ValueError: another size.
        TypeError: another dtype.
    """

    size: int = 128
    dtype: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        _check_dtype("PerBlock", self.dtype)
        is_whole = isinstance(self.size, int) and not isinstance(self.size, bool)
        if not is_whole or self.size < 8 or self.size & (self.size - 1):
            raise ValueError(f"PerBlock: size must be 8, 16, 32 or so on, got {self.size!r}")


@dataclass(frozen=True, eq=False)
class Static:
    """One scale for all values, which the caller has measured before.

    Values beyond the largest number of the dtype, times the scale, are limited to it.

    Args:
        scale: a tensor of one number, on the device of the call: what a quantised value is
            multiplied by.
        dtype: as in `PerRow`.
    Raises:
        TypeError: the scale is no floating-point tensor; another dtype.
        ValueError: the scale has several elements.
    """

    scale: Tensor
    dtype: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        _check_dtype("Static", self.dtype)
        if not isinstance(self.scale, Tensor) or not self.scale.is_floating_point():
            raise TypeError("Static: scale must be a floating-point tensor")
        if self.scale.numel() != 1:
            shape = tuple(self.scale.shape)
            raise ValueError(f"Static: scale has shape {shape}, expected one element")


Format = PerRow | PerBlock | Static


class Form(NamedTuple):
    """A format without its scale, as arguments of a row-wise function.

    Attributes:
        dtype: the dtype of the values.
        size: the columns of a block; 0 for whole rows.
    """

    dtype: torch.dtype
    size: int


def form_of(op: str, quantize: Any, cols: int) -> tuple[Form, Tensor | None]:
    """Return the form of a call's format, whose results have ``cols`` columns, and its scale.

    Raises:
        TypeError: it is no format.
        ValueError: the columns are no whole blocks.
    """
    if not isinstance(quantize, (PerRow, PerBlock, Static)):
        got = type(quantize).__name__
        raise TypeError(f"{op}: quantize must be a format of fusedops.quant, got {got}")
    size = quantize.size if isinstance(quantize, PerBlock) else 0
    if size and cols % size:
        raise ValueError(f"{op}: rows have {cols} columns, expected a multiple of {size}")
    scale = quantize.scale if isinstance(quantize, Static) else None
    return Form(quantize.dtype, size), scale


def called_by_row(
    function: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Any], *others: Any
) -> tuple[Tensor, ...]:
    """Return a row-wise function's results; tensors of one dimension are one row.

    Args:
        function: takes the tensors, then the others.
        tensors: of equally many dimensions; all but the first may be None.
    """
    if tensors[0].dim() > 1:
        return function(*tensors, *others)
    rows = [None if tensor is None else tensor[None] for tensor in tensors]
    return tuple([result[0] for result in function(*rows, *others)])


# Row-wise functions call this one. Dynamo guards on what they read, and so on the number `_LEAST`;
# it could not guard on a table, and would trace the function in place of calling the kernel.
def quantised(y: Tensor, scale: Tensor | None, dtype: torch.dtype, size: int) -> tuple[Tensor, ...]:
    """Return a tensor's values in 8 bits, and their scales unless ``scale`` is one for all.

    The last arguments are those of a `Form`.
    """
    # Integers are symmetric: -128 is not used.
    largest = torch.finfo(dtype).max if dtype.is_floating_point else 127.0
    if scale is not None:
        limited = (y * (1.0 / scale.float())).clamp(-largest, largest)
        return (_rounded(limited, dtype),)
    rows = y.unflatten(-1, (-1, size)) if size else y
    scales = (rows.abs().amax(-1, keepdim=True) * (1.0 / largest)).clamp(min=_LEAST)
    values = _rounded(rows * (1.0 / scales), dtype)
    if size:
        values, scales = values.flatten(-2), scales.squeeze(-1)
    return values, scales.float()


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    # A cast to a float rounds to the nearest, a cast to an integer towards zero.
    whole = values if dtype.is_floating_point else values.round()
    return whole.to(dtype)


def _check_dtype(name: str, dtype: Any) -> None:
    if dtype not in _DTYPES:
        names = ", ".join(map(str, _DTYPES))
        raise TypeError(f"{name}: dtype must be one of {names}, got {dtype}")
