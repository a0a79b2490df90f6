"""Formats of quantised results, and the arithmetic that generated kernels have for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor, nn

from ..core.typevars import Quantised, QuantisedSum

__all__ = [
    "Form",
    "Format",
    "PerBlock",
    "PerRow",
    "Quantising",
    "Static",
    "called_by_row",
    "form_of",
    "quantised",
]

_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
# The least scale: that of a row of zeros.
_LEAST = 1e-12


class Format(Generic[Quantised, QuantisedSum]):
    """A format of quantised results: `PerRow`, `PerBlock` or `Static`.

    Its parameters are for type checkers: what a call with it returns, and a call that also returns
    a sum. So a function's signature has the types with and without a format::

        def rms_norm(..., quantize: Format[Returned, Any] | None = None) -> Returned: ...

    Attributes:
        dtype: the dtype of the values.
    """

    dtype: torch.dtype


@dataclass(frozen=True)
class PerRow(Format):
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
class PerBlock(Format):
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
class Static(Format):
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


class Quantising(nn.Module):
    """A module whose results may be quantised.

    Attributes:
        quantize: the format; None for plain results. It is in no ``state_dict``. The scale of a
            `Static` moves to another device with the module, and keeps its dtype.
    """

    quantize: Format[Any, Any] | None = None

    def _quantise(self, quantize: Any) -> None:
        """Set the format, or none."""
        if quantize is not None:
            _check_format(type(self).__name__, quantize)
            self.quantize = quantize

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if isinstance(self.quantize, Static):
            scale = self.quantize.scale
            self.quantize = replace(self.quantize, scale=scale.to(fn(scale).device))
        return self

    def extra_repr(self) -> str:
        """Return the line of the base class, and the format if there is one."""
        line = super().extra_repr()
        if self.quantize is None:
            return line
        return f"{line}, quantize={self.quantize!r}".removeprefix(", ")


class Form(NamedTuple):
    """A format without its scale, as arguments of a row-wise function.

    Attributes:
        dtype: the dtype of the values.
        size: the columns of a block; 0 for whole rows. If it is negative, scales are column-major.
    """

    dtype: torch.dtype
    size: int


def form_of(op: str, quantize: Any, cols: int) -> tuple[Form, Tensor | None]:
    """Return the form of a call's format, whose results have ``cols`` columns, and its scale.

    Raises:
        TypeError: it is no format.
        ValueError: the columns are no whole blocks.
    """
    _check_format(op, quantize)
    scale = quantize.scale if isinstance(quantize, Static) else None
    if not isinstance(quantize, PerBlock):
        return Form(quantize.dtype, 0), scale
    if cols % quantize.size:
        raise ValueError(f"{op}: rows have {cols} columns, expected a multiple of {quantize.size}")
    size = -quantize.size if quantize.column_major else quantize.size
    return Form(quantize.dtype, size), scale


def called_by_row(
    function: Any,
    tensors: Sequence[Any],
    others: Sequence[Any],
    form: Form,
    out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return a row-wise function's results; tensors of one dimension are one row.

    Args:
        function: a `Rowwise`. It takes the tensors, the others, and the fields of the form, and
            returns the results of `quantised` first.
        tensors: of equally many dimensions; all but the first may be None.
        others: its other arguments.
        form: the form of the results.
        out: a tensor that the last result is written to, in a call without gradients; or None.
    """
    is_one_row = tensors[0].dim() <= 1
    if is_one_row:
        *tensors, out = [None if tensor is None else tensor[None] for tensor in (*tensors, out)]
    if out is None:
        values, *results = function(*tensors, *others, *form)
    else:
        values, *results = function.into(out, -1, *tensors, *others, *form)
    if form.size < 0:
        results[0] = results[0].movedim(0, -1)
    if is_one_row:
        return tuple([result[0] for result in (values, *results)])
    return (values, *results)


# Row-wise functions call this one. Dynamo guards on what they read, and so on the number `_LEAST`;
# it could not guard on a table, and would trace the function in place of calling the kernel.
def quantised(
    y: Tensor,
    factor: Tensor | float,
    scale: Tensor | None,
    dtype: torch.dtype,
    size: int,
) -> tuple[Tensor, ...]:
    """Return the values of ``y * factor`` in 8 bits, and their scales unless ``scale`` is theirs.

    Args:
        y: rows.
        factor: a positive number of each row, or 1.0. The largest magnitudes of ``y`` do not depend
            on it, so that a kernel finds them while it computes the factor.
        scale: one scale for all values, or None.
        dtype: of a `Form`.
        size: of a `Form`. Column-major scales have rows last.
    """
    # Integers are symmetric: -128 is not used.
    largest = torch.finfo(dtype).max if dtype.is_floating_point else 127.0
    if scale is not None:
        limited = (y * (factor * (1.0 / scale.float()))).clamp(-largest, largest)
        return (_rounded(limited, dtype),)
    rows = y
    if size:
        rows = y.unflatten(-1, (-1, abs(size)))
        factor = factor if isinstance(factor, float) else factor.unsqueeze(-1)
    magnitudes = rows.abs().amax(-1, keepdim=True) * factor
    scales = (magnitudes * (1.0 / largest)).clamp(min=_LEAST)
    values = _rounded(rows * (factor * (1.0 / scales)), dtype)
    if size:
        values, scales = values.flatten(-2), scales.squeeze(-1)
    if size < 0:
        scales = scales.movedim(-1, 0).contiguous()
    return values, scales.float()


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    # A cast to a float rounds to the nearest, a cast to an integer towards zero.
    whole = values if dtype.is_floating_point else values.round()
    return whole.to(dtype)


def _check_format(op: str, quantize: Any) -> None:
    if not isinstance(quantize, (PerRow, PerBlock, Static)):
        got = type(quantize).__name__
        raise TypeError(f"{op}: quantize must be a format of fusedops.quant, got {got}")


def _check_dtype(name: str, dtype: Any) -> None:
    if dtype not in _DTYPES:
        names = ", ".join(map(str, _DTYPES))
        raise TypeError(f"{name}: dtype must be one of {names}, got {dtype}")
