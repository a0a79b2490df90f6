"""Dropout by PyTorch's operators, for references, derivatives of any order and torch.func."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..compat.dispatch import transforms
from ..configs.tuning_key import Config
from ..launches import launch
from . import rng
from .rng import State

__all__ = ["Dropout", "dropout_of", "fixed", "none"]

# A function of a tensor and a dtype, which returns the tensor after dropout: dropped elements are
# 0, the others are divided by the keep probability. The tensor may be in the accumulator's dtype.
# The second argument is the dtype in which unfused code would call `F.dropout`: if PyTorch draws
# the mask, it draws it in that dtype.
Dropout = Callable[[Tensor, torch.dtype], Tensor]


def none(h: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``h`` unchanged: no dropout."""
    return h


def fixed(scale: Tensor) -> Dropout:
    """Returns dropout with known factors: 0, or one over the keep probability."""
    return lambda h, dtype: h * scale


def dropout_of(p: float, state: State, cols: int) -> Dropout:
    """Returns dropout as a function of a tensor.

    With a state, the mask is the one that kernels draw for rows of ``cols`` elements. Without one,
    `F.dropout` draws the mask.
    """

    def as_kernels(h: Tensor, dtype: torch.dtype) -> Tensor:
        like = torch.empty_like(h, memory_format=torch.contiguous_format)
        if transforms() and p < 1.0:
            # The result of a random operator is added, so that ``like`` behaves under `vmap` as a
            # random operator's result does: with randomness="different" it is batched, and with
            # randomness="error" this raises. Only the shape and dtype of ``like`` are read.
            like = like + F.dropout(torch.zeros((), dtype=h.dtype, device=h.device), 0.5)
        return h * keep_scale(like, state, cols)

    def as_torch(h: Tensor, dtype: torch.dtype) -> Tensor:
        if p >= 1.0:
            return h * 0.0
        keep = F.dropout(torch.ones_like(h, dtype=dtype), p) != 0
        return h * (keep.to(h.dtype) * (1.0 / (1.0 - p)))

    if p == 0.0:
        return none
    return as_torch if state[0] is None else as_kernels


def keep_scale(like: Tensor, state: State, cols: int) -> Tensor:
    """Returns dropout's factors in the shape and dtype of ``like``.

    A dropped element has the factor 0, and every other element one over the keep probability.
    """
    seed, offset, threshold = state
    if not isinstance(seed, Tensor):
        seed = torch.tensor((seed, offset), dtype=torch.int64, device="cpu")
    return _keep_scale(like, seed, threshold, cols)


class _KeepScale(torch.autograd.Function):
    """Calls the registered operator; under ``vmap``, for one mask or a batch of masks."""

    @staticmethod
    def forward(like: Tensor, seed: Tensor, threshold: int, cols: int) -> Tensor:
        """Returns dropout's factors."""
        return torch.ops.fusedops.keep_scale(like, seed, threshold, cols)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Marks the factors as constants: they have no gradient."""
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        """Returns no gradient for any argument."""
        return None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, like: Tensor, seed: Tensor, threshold: int, cols: int) -> Any:
        """Returns the factors of one mask for randomness="same", else those of a batch of masks."""
        if info.randomness == "same":
            return _keep_scale(like.select(in_dims[0], 0), seed, threshold, cols), None
        return _keep_scale(like.movedim(in_dims[0], 0), seed, threshold, cols), 0


_keep_scale: Callable[..., Tensor] = _KeepScale.apply


# --- the registered operator ----------------------------------------------------------------------

_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")
_LIBRARY.define("keep_scale(Tensor like, Tensor seed, int threshold, int cols) -> Tensor")


def _empty(like: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


_CONFIG = Config(block_n=1024, rows=1, warps=4)


@functools.lru_cache(maxsize=256)
def _variant(device_index: int, dtype: torch.dtype, kind: int, cols: int) -> launch.Variant:
    """Returns the kernel for an index of `launch.SEED_TYPES`, ``kind``: see `rng.seed_kind`."""
    from ..kernels import keep_scale_kernel

    types = {
        "out": launch.pointer_type(dtype),
        **launch.SEED_TYPES[kind],
        "threshold": "i32",
        "M": "i64",
    }
    constants = {"VECTOR": launch.vector_width(dtype)}
    return launch.build(
        keep_scale_kernel,
        types,
        constants,
        _CONFIG,
        device_index=device_index,
        acc=dtype,
        cols=cols,
        aligned=True,
    )


def _write(like: Tensor, seed: Tensor, threshold: int, cols: int) -> Tensor:
    """Implements ``fusedops::keep_scale``: launches the kernel, returns the factors."""
    out = _empty(like)
    kernel_seed, offset = rng.kernel_arguments(seed)
    kind = rng.seed_kind(offset)
    rows = out.numel() // cols
    grid = -(-cols // _CONFIG.block_n), -(-rows // _CONFIG.rows)
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        variant = _variant(out.get_device(), out.dtype, kind, cols)
        variant(*grid, out, kernel_seed, offset, threshold, rows)
    return out


torch.library.register_fake("fusedops::keep_scale", _empty, lib=_LIBRARY)
_LIBRARY.impl("keep_scale", _write, "CompositeExplicitAutograd")
