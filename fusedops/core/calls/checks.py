"""Checks of arguments. Every message names the argument, its value and the expected one."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch

__all__ = [
    "DTYPES",
    "check_choice",
    "check_dense",
    "check_eps",
    "check_jit",
    "check_number",
    "check_out_dtype",
    "check_p",
    "check_p_off",
    "check_shape",
    "check_tensor",
]

DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
# A string, because messages list the dtypes in a fixed order, and a set has none.
_DTYPE_NAMES = "torch.float16, torch.bfloat16, torch.float32, torch.float64"


def check_jit(op: str) -> None:
    """Raises under `torch.jit.trace`, which would not record a launch."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise RuntimeError(f"{op}: torch.jit.trace is not supported; use torch.export")


def check_tensor(op: str, name: str, value: Any, like: torch.Tensor | None = None) -> None:
    """Raises unless ``value`` is a dense floating-point tensor, on the device of any ``like``."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")
    # The check of the dtype below would raise too, but its message would not say what to do.
    if value.is_quantized:
        raise TypeError(
            f"{op}: {name} is quantised, expected one of {_DTYPE_NAMES}; static quantisation takes "
            "PyTorch's own modules: call unfuse_model before torch.ao.quantization.prepare"
        )
    if value.dtype not in DTYPES:
        raise TypeError(f"{op}: {name} has dtype {value.dtype}, expected one of {_DTYPE_NAMES}")
    check_dense(op, name, value)
    if like is not None and value.device != like.device:
        raise RuntimeError(
            f"{op}: {name} is on {value.device}, expected {like.device} as the first argument"
        )


def check_dense(op: str, name: str, value: torch.Tensor) -> None:
    """Raises for a nested tensor, and for one without strides, such as a sparse one."""
    if value.is_nested:
        raise TypeError(f"{op}: {name} is a nested tensor, expected a dense one")
    if value.layout is not torch.strided:
        raise TypeError(f"{op}: {name} has layout {value.layout}, expected torch.strided")


def check_shape(op: str, name: str, value: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raises unless ``value`` has the expected shape."""
    if value.shape != expected:
        raise ValueError(f"{op}: {name} has shape {tuple(value.shape)}, expected {tuple(expected)}")


def _check_is_number(op: str, name: str, value: Any) -> None:
    if not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")


def check_p(op: str, p: Any) -> None:
    """Raises unless ``p`` is a probability."""
    _check_is_number(op, "p", p)
    # Comparisons with NaN are False, so that NaN is refused.
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{op}: p must be in [0, 1], got {p}")


def check_p_off(op: str, p: Any) -> float:
    """Checks ``p``, which must be valid in evaluation too; returns 0, the probability there."""
    check_p(op, p)
    return 0.0


def check_number(op: str, name: str, value: Any) -> None:
    """Raises unless ``value`` is a finite number."""
    _check_is_number(op, name, value)
    # Comparisons, because torch.compile can trace them, unlike `math.isfinite`.
    if not -math.inf < value < math.inf:
        raise ValueError(f"{op}: {name} must be finite, got {value}")


def check_eps(op: str, eps: Any) -> None:
    """Raises unless ``eps`` is a non-negative number."""
    _check_is_number(op, "eps", eps)
    if not eps >= 0.0:  # not ``eps < 0.0``, which is False for NaN
        raise ValueError(f"{op}: eps must be at least 0, got {eps}")


def check_choice(op: str, name: str, value: Any, choices: Collection[str]) -> None:
    """Raises unless ``value`` is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"{op}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}"
        )


def check_out_dtype(op: str, out_dtype: Any, name: str = "out_dtype") -> None:
    """Raises unless ``out_dtype`` is None or a floating-point dtype that the kernels support."""
    if out_dtype is None:
        return
    # The type is checked before the look-up in a set, because a wrong argument may have no hash.
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in DTYPES:
        raise TypeError(f"{op}: {name} must be one of {_DTYPE_NAMES}, got {out_dtype}")
