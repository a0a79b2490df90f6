"""The keep mask as a tensor: dropout in reference implementations, in derivatives of any order, and under torch.func."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import compat, launch, rng
from .rng import State
from .tuning_key import Config

__all__ = ["Dropout", "dropout_of", "fixed", "none"]

# Multiplies its first argument by the keep mask over the keep probability; the second is the dtype of `F.dropout`'s input.
Dropout = Callable[[Tensor, torch.dtype], Tensor]


def none(h: Tensor, dtype: torch.dtype) -> Tensor:
    """No dropout."""
    return h


def fixed(scale: Tensor) -> Dropout:
    """Dropout with a mask that is known, over its probability."""
    return lambda h, dtype: h * scale


def dropout_of(p: float, state: State, cols: int) -> Dropout:
    """Dropout as a function of a tensor.

    With a state the mask is the kernels', of rows of ``cols`` elements; without one it is the one that `F.dropout` draws.
    """

    def as_kernels(h: Tensor, dtype: torch.dtype) -> Tensor:
        like = torch.empty_like(h, memory_format=torch.contiguous_format)
        if compat.transforms() and p < 1.0:
            # Batched as PyTorch's own random operators are, with their error for randomness="error".
            like = like + F.dropout(torch.zeros((), dtype=h.dtype, device=h.device), 0.5)
        return h * keep_scale(like, state, cols)

    def as_torch(h: Tensor, dtype: torch.dtype) -> Tensor:
        if p >= 1.0:
            return h * 0.0
        kept = F.dropout(torch.ones_like(h, dtype=dtype), p) != 0
        return h * (kept.to(h.dtype) * (1.0 / (1.0 - p)))

    return none if p == 0.0 else as_torch if state[0] is None else as_kernels


def keep_scale(like: Tensor, state: State, cols: int) -> Tensor:
    """What dropout multiplies by, in shape and dtype of ``like``: one over the keep probability where kept, else 0."""
    first, second, threshold = state
    seed = first if isinstance(first, Tensor) else torch.tensor((first, second), dtype=torch.int64, device="cpu")
    return _keep_scale(like, seed, threshold, cols)


class _KeepScale(torch.autograd.Function):
    """A constant to autograd; under ``vmap`` one mask for all, or one for the whole batch."""

    @staticmethod
    def forward(like: Tensor, seed: Tensor, threshold: int, cols: int) -> Tensor:
        """The registered operator."""
        return torch.ops.fusedops.keep_scale(like, seed, threshold, cols)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is saved."""
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        """No argument has a gradient."""
        return None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, like: Tensor, seed: Tensor, threshold: int, cols: int) -> Any:
        """As `F.dropout` does with ``randomness``."""
        if info.randomness == "same":
            return _keep_scale(like.select(in_dims[0], 0), seed, threshold, cols), None
        return _keep_scale(like.movedim(in_dims[0], 0), seed, threshold, cols), 0


_keep_scale: Callable[..., Tensor] = _KeepScale.apply


# --- the registered operator --------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")
_LIBRARY.define("keep_scale(Tensor like, Tensor seed, int threshold, int cols) -> Tensor")


def _empty(like: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


_CONFIG = Config(1024, 1, 4)


@functools.lru_cache(maxsize=256)
def _variant(device_index: int, dtype: torch.dtype, seed: int, cols: int) -> launch.Variant:
    from .kernels import keep_scale_kernel

    types = {"out": launch.pointer_type(dtype), **launch.SEED_TYPES[seed], "threshold": "i32", "M": "i64"}
    constants = {"VECTOR": launch.vector_width(dtype)}
    return launch.build(keep_scale_kernel, types, constants, _CONFIG, device_index=device_index, acc=dtype, cols=cols,
                        aligned=True)  # fmt: skip


def _write(like: Tensor, seed: Tensor, threshold: int, cols: int) -> Tensor:
    out = _empty(like)
    first, second = rng.unpacked(seed)
    kind = rng.seed_kind(second)
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        variant = _variant(out.get_device(), out.dtype, kind, cols)
        rows = out.numel() // cols
        variant(-(-cols // _CONFIG.block_n), -(-rows // _CONFIG.rows), out, first, second, threshold, rows)
    return out


torch.library.register_fake("fusedops::keep_scale", _empty, lib=_LIBRARY)
_LIBRARY.impl("keep_scale", _write, "CompositeExplicitAutograd")
