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
        column_major: whether the scales of a column of blocks are neighbours in memory, as
            `torch.nn.functional.scaled_mm` reads those of its blocks of 128 columns. Their shape is
            the same, and of M rows the strides are (1, M).
    Raises:
        ValueError: another size.
        TypeError: another dtype; column_major is no bool.
    """

    size: int = 128
    dtype: torch.dtype = torch.float8_e4m3fn
    column_major: bool = False

    def __post_init__(self) -> None:
        _check_dtype("PerBlock", self.dtype)
        if not isinstance(self.column_major, bool):
            got = type(self.column_major).__name__
            raise TypeError(f"PerBlock: column_major must be a bool, got {got}")
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
        column_major: whether a row-wise function returns the scales with rows last.
    """

    dtype: torch.dtype
    size: int
    column_major: bool


def form_of(op: str, quantize: Any, cols: int) -> tuple[Form, Tensor | None]:
    """Return the form of a call's format, whose results have ``cols`` columns, and its scale.

    Raises:
        TypeError: it is no format.
        ValueError: the columns are no whole blocks.
    """
    if not isinstance(quantize, (PerRow, PerBlock, Static)):
        got = type(quantize).__name__
        raise TypeError(f"{op}: quantize must be a format of fusedops.quant, got {got}")
    scale = quantize.scale if isinstance(quantize, Static) else None
    if not isinstance(quantize, PerBlock):
        return Form(quantize.dtype, 0, False), scale
    if cols % quantize.size:
        raise ValueError(f"{op}: rows have {cols} columns, expected a multiple of {quantize.size}")
    return Form(quantize.dtype, quantize.size, quantize.column_major), scale


def called_by_row(
    function: Callable[..., tuple[Tensor, ...]],
    tensors: Sequence[Any],
    others: Sequence[Any],
    form: Form,
) -> tuple[Tensor, ...]:
    """Return a row-wise function's results; tensors of one dimension are one row.

    Args:
        function: takes the tensors, the others, and the fields of the form. It returns the results
            of `quantised` first.
        tensors: of equally many dimensions; all but the first may be None.
        others: its other arguments.
        form: the form of the results.
    """
    is_one_row = tensors[0].dim() <= 1
    if is_one_row:
        tensors = [None if tensor is None else tensor[None] for tensor in tensors]
    values, *results = function(*tensors, *others, *form)
    if form.column_major:
        results[0] = results[0].movedim(0, -1)
    if is_one_row:
        return tuple([result[0] for result in (values, *results)])
    return (values, *results)


# Row-wise functions call this one. Dynamo guards on what they read, and so on the number `_LEAST`;
# it could not guard on a table, and would trace the function in place of calling the kernel.
def quantised(
    y: Tensor, scale: Tensor | None, dtype: torch.dtype, size: int, column_major: bool
) -> tuple[Tensor, ...]:
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
    if column_major:
        scales = scales.movedim(-1, 0).contiguous()
    return values, scales.float()


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    # A cast to a float rounds to the nearest, a cast to an integer towards zero.
    whole = values if dtype.is_floating_point else values.round()
    return whole.to(dtype)


def _check_dtype(name: str, dtype: Any) -> None:
    if dtype not in _DTYPES:
        names = ", ".join(map(str, _DTYPES))
        raise TypeError(f"{name}: dtype must be one of {names}, got {dtype}")
