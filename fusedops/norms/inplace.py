"""Norms of a sum that is written to a tensor of the caller's, such as the residual itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiler.quantising import Format, PerBlock, PerRow, Static, form_of
from ..core.calls import checks
from ..core.calls.call import launched_into, site_without_gradients
from ..core.calls.function import PLAIN
from ..core.calls.operator import Dtypes
from ..core.calls.operators import decode, dtypes_of
from ..core.calls.registration import implement
from ..core.calls.words import DTYPES_BY_NAME, NAMES, encode
from ..core.compat.dispatch import is_intercepted
from ..core.random import dropout
from .operator import NORM
from .quantised import check_quantised, quantised_norm
from .site import NormConstants

__all__ = ["summed_into"]

# The index of the sum among the outputs of `NORM`.
_SUM = 1
# The positions of x and the residual: kernels read their elements before they write the sum's.
_SUMMANDS = (0, 2)


def summed_into(
    constants: NormConstants, tensors: Sequence[Any], quantize: Format[Any, Any] | None, out: Tensor
) -> tuple[Tensor, ...]:
    """Returns the normalised sum, its scales with a format, and ``out``, which has the sum.

    Args:
        constants: those of the call without ``out``.
        tensors: x, None, the residual, the weight and the norm's bias.
        quantize: the format, or None.
        out: a tensor like the sum: the residual, x, or a tensor that shares no memory with them.
    Raises:
        ValueError, TypeError, RuntimeError: ``out`` does not fit, or a gradient is needed.
    """
    NORM.check(constants, tensors, nested=False)
    _check_out(constants, tensors, out)
    if quantize is not None:
        check_quantised(constants, tensors)
        form_of(constants.op, quantize, tensors[0].shape[-1])
    is_traced = torch.compiler.is_dynamo_compiling()
    if is_traced or is_intercepted() or not PLAIN.issuperset(map(type, (*tensors, out))):
        first, scales = _registered(constants, tensors, quantize, out)
    else:
        first, scales = _computed(constants, tensors, quantize, out)
    if quantize is None:
        return first, out
    return first, (quantize.scale if isinstance(quantize, Static) else scales), out


def _computed(
    constants: NormConstants, tensors: Sequence[Any], quantize: Format[Any, Any] | None, out: Tensor
) -> tuple[Tensor, Any]:
    """Returns the normalised sum, and its scales or None; writes the sum."""
    # Here and not in `summed_into`: while a graph is traced, memory cannot be compared.
    _check_memory(constants, tensors, out)
    if quantize is not None:
        first, *scales, _ = quantised_norm(constants, tensors, quantize, out)
        return first, scales[0]
    site = site_without_gradients(NORM, constants, tensors)
    if site.special or not out.numel():
        first, total, *_ = NORM.reference(site.constants, tensors, dropout.none)
        assert first is not None and total is not None
        out.copy_(total)
        return first, None
    first, *_ = launched_into(NORM, site, tensors, out, _SUM)
    assert first is not None
    return first, None


# --- checks ---------------------------------------------------------------------------------------


def _check_out(constants: NormConstants, tensors: Sequence[Any], out: Any) -> None:
    """Raises unless a sum without gradients can be written to ``out``."""
    op, (x, _, residual, *_) = constants.op, tensors
    checks.check_tensor(op, "out", out, x)
    checks.check_shape(op, "out", out, tuple(x.shape))
    dtype = torch.promote_types(x.dtype, residual.dtype)
    if out.dtype != dtype:
        raise TypeError(f"{op}: out has dtype {out.dtype}, expected {dtype}, the sum's")
    if not out.is_contiguous():
        raise ValueError(f"{op}: out has strides {out.stride()}, expected a contiguous tensor")
    everything = list(filter(torch.is_tensor, (*tensors, out)))
    if torch.is_grad_enabled() and any(map(_requires_grad, everything)):
        raise RuntimeError(
            f"{op}: a call with out has no gradients, and an argument requires one; call it under "
            "torch.no_grad()"
        )


def _check_memory(constants: NormConstants, tensors: Sequence[Any], out: Tensor) -> None:
    """Raises unless ``out`` is a summand, or shares no memory with a tensor."""
    if out.is_neg():
        raise ValueError(
            f"{constants.op}: out has the negative of its memory; pass out.resolve_neg()"
        )
    for position, tensor in enumerate(tensors):
        is_summand = position in _SUMMANDS and _is_same(tensor, out)
        if tensor is not None and not is_summand and _overlap(tensor, out):
            name = NORM.argument(constants, position)
            raise ValueError(
                f"{constants.op}: out shares memory with {name}; expected the residual or x "
                "itself, or a tensor of other memory"
            )


def _requires_grad(tensor: Tensor) -> bool:
    return tensor.requires_grad


def _is_same(tensor: Tensor, out: Tensor) -> bool:
    """Whether each element has the memory of that of ``out`` at its position."""
    is_like = (tensor.dtype, tensor.shape) == (out.dtype, out.shape) and tensor.is_contiguous()
    return is_like and tensor.data_ptr() == out.data_ptr()


def _overlap(tensor: Tensor, out: Tensor) -> bool:
    first, last = _memory(tensor)
    first_of_out, last_of_out = _memory(out)
    return first < last_of_out and first_of_out < last


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Returns the address of a tensor's first byte, and the one behind its last."""
    if not tensor.numel():
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum([(size - 1) * stride for size, stride in steps])
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


# --- the registered operator ----------------------------------------------------------------------

_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")
_TENSORS = "Tensor x, Tensor residual, Tensor? weight, Tensor? bias, Tensor? scale, Tensor(a!) out"
_NUMBERS = "".join([f", float {name}" for name in NormConstants.numbered])  # type: ignore[attr-defined]
# ``form`` is a format without its scale; "" for none. Without scales the second tensor is empty.
_LIBRARY.define(f"add_norm_into({_TENSORS}, str form, str call{_NUMBERS}) -> (Tensor, Tensor)")


def _registered(
    constants: NormConstants, tensors: Sequence[Any], quantize: Format[Any, Any] | None, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Calls the registered operator, for torch.compile, dispatch modes and tensor subclasses."""
    x, _, residual, weight, bias = tensors
    scale = quantize.scale if isinstance(quantize, Static) else None
    call = encode(constants, dtypes_of(NORM, tensors), False)
    numbers = constants.numbers()  # type: ignore[attr-defined]
    return torch.ops.fusedops.add_norm_into(  # type: ignore[no-any-return]
        x, residual, weight, bias, scale, out, _text_of(quantize), call, *numbers
    )


def _text_of(quantize: Format[Any, Any] | None) -> str:
    if quantize is None:
        return ""
    size, column_major = getattr(quantize, "size", 0), getattr(quantize, "column_major", False)
    return f"{NAMES[quantize.dtype]} {size} {int(column_major)}"


def _format_of(text: str, scale: Tensor | None) -> Format | None:
    if not text:
        return None
    name, size, column_major = text.split()
    dtype = DTYPES_BY_NAME[name]
    assert dtype is not None
    if scale is not None:
        return Static(scale, dtype)
    return PerBlock(int(size), dtype, column_major == "1") if int(size) else PerRow(dtype)


class _Arguments(NamedTuple):
    """What the operator's arguments stand for."""

    constants: NormConstants
    dtypes: Dtypes
    tensors: tuple[Any, ...]
    quantize: Format[Any, Any] | None
    out: Tensor


def _read(arguments: Sequence[Any]) -> _Arguments:
    x, residual, weight, bias, scale, out, form, call, *numbers = arguments
    constants, dtypes, _ = decode(NORM, call, tuple(numbers))
    return _Arguments(
        constants, dtypes, (x, None, residual, weight, bias), _format_of(form, scale), out
    )


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Implements the registered operator."""
    constants, _, tensors, quantize, out = _read(arguments)
    first, scales = _computed(constants, tensors, quantize, out)
    has_scales = isinstance(quantize, (PerRow, PerBlock))
    return first, (scales if has_scales else tensors[0].new_empty(0))


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Returns tensors like those of `_forward`, for tracers."""
    constants, dtypes, (x, *_), quantize, _ = _read(arguments)
    if quantize is None:
        site = NORM.site(constants, dtypes, x.shape[-1], -1, dropout=False, saves=False)
        return x.new_empty(x.shape, dtype=site.y), x.new_empty(0)
    scales = x.new_empty(0)
    *rows, cols = x.shape
    if isinstance(quantize, PerRow):
        scales = x.new_empty((*rows, 1), dtype=torch.float32)
    elif isinstance(quantize, PerBlock):
        blocks = cols // quantize.size
        scales = x.new_empty((*rows, blocks), dtype=torch.float32)
        if quantize.column_major:
            scales = x.new_empty((blocks, *rows), dtype=torch.float32).movedim(0, -1)
    return x.new_empty(x.shape, dtype=quantize.dtype), scales


implement(_LIBRARY, "add_norm_into", _forward, _fake)
