"""Corrects Triton's interpreter where it computes something else than a GPU, for as long as the tests run.

Triton 3.6's interpreter holds bf16 as 16-bit integers. It cuts the low bits off when it narrows fp32 to bf16, where a
GPU rounds to the nearest, ties to even; and it converts between bf16 and dtypes other than fp32 as if the bits were a
number. Tests that hold a kernel to one correct rounding would have to be twice as lenient for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["install"]


def install() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    original = builder.cast_impl

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target or not (source.is_floating() and target.is_floating() and tl.bfloat16 in (source, target)):
            return original(self, src, dst_type)
        values = torch.from_numpy(np.ascontiguousarray(src.data).reshape(-1))
        if source == tl.bfloat16:
            values = values.view(torch.bfloat16)
        if target == tl.bfloat16:
            # By way of fp32: for fp64 that is two roundings, as on the GPU.
            data = values.float().bfloat16().view(torch.int16).numpy().view(np.uint16)
        else:
            data = values.to(getattr(torch, f"float{target.primitive_bitwidth}")).numpy()
        return interpreter.TensorHandle(data.reshape(src.data.shape), target)

    builder.cast_impl = cast
    # A GPU does not warn of 0/0 or inf - inf, least of all in lanes that are masked off.
    np.seterr(all="ignore")
