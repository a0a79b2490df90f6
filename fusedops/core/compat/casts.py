"""PyTorch's casts, where they differ between releases."""

from __future__ import annotations

import functools

import torch

from .dispatch import without_modes

__all__ = ["saturates_float8"]


@functools.cache
def saturates_float8() -> bool:
    """Returns whether a cast to float8_e4m3fn saturates at 448.

    Up to PyTorch 2.11 numbers out of range become NaN.
    """
    with without_modes():
        large = torch.tensor(1024.0, device="cpu").to(torch.float8_e4m3fn)
        return not bool(large.float().isnan())
