"""The family's private `torch.library` operators: what torch.compile, FakeTensor and make_fx see of a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core import autograd
from ..core.operators import implement
from ..core.rng import Seed
from . import launching
from .launching import Kind, Packed, site_of
from .reference import promoted

__all__ = ["operator_call"]

_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")

_CALL = "Tensor? seed, int threshold, str kind, str activation, int cols"
_LIBRARY.define(f"activation_forward(Tensor x, Tensor? other, {_CALL}) -> Tensor")
# The gradients that are needed.
_LIBRARY.define(
    f"activation_backward(Tensor dy, Tensor x, Tensor? other, bool needs_x, bool needs_other, str packed, "
    f"{_CALL}) -> Tensor[]"
)


def operator_call(x: Tensor, other: Tensor | None, seed: Seed | None, threshold: int, kind: Kind, activation: str,
                  cols: int) -> Tensor:  # fmt: skip
    """The forward as one registered operator."""
    if isinstance(seed, tuple):
        seed = torch.tensor(seed, dtype=torch.int64, device=x.device)
    return torch.ops.fusedops.activation_forward(x, other, seed, threshold, kind, activation, cols)  # type: ignore[no-any-return]


def _forward(x: Tensor, other: Tensor | None, seed: Tensor | None, threshold: int, kind: Any, activation: str,
             cols: int) -> Tensor:  # fmt: skip
    site = site_of(kind, activation, cols, x.get_device(), x.dtype, None if other is None else other.dtype)
    return launching.forward(site, x, other, seed, threshold)


def _fake_forward(x: Tensor, other: Tensor | None, seed: Tensor | None, threshold: int, kind: str, activation: str,
                  cols: int) -> Tensor:  # fmt: skip
    return x.new_empty((*x.shape[:-1], cols), dtype=promoted(x, other))


def _backward(dy: Tensor, x: Tensor, other: Tensor | None, needs_x: bool, needs_other: bool, packed: Packed,
              seed: Tensor | None, threshold: int, kind: Any, activation: str, cols: int) -> list[Tensor]:  # fmt: skip
    site = site_of(kind, activation, cols, x.get_device(), x.dtype, None if other is None else other.dtype)
    grads = launching.backward(site, dy, x, other, seed, threshold, (needs_x, needs_other), packed)
    return [grad for grad in grads if grad is not None]


def _fake_backward(dy: Tensor, x: Tensor, other: Tensor | None, needs_x: bool, needs_other: bool, packed: str,
                   seed: Tensor | None, threshold: int, kind: str, activation: str, cols: int) -> list[Tensor]:  # fmt: skip
    needed = ((x, needs_x or packed), (other, needs_other))
    return [t.new_empty(t.shape) for t, need in needed if t is not None and need]


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, other, seed, *call = inputs
    ctx.save_for_backward(x, other, seed)
    ctx.set_materialize_grads(False)
    ctx.call = call


def _autograd_backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
    rest = (None,) * 5
    if dy is None:
        return None, None, *rest
    x, other, seed = ctx.saved_tensors
    needs = ctx.needs_input_grad[:2]
    packed = "gate" if ctx.call[1] == "packed" else ""
    grads = iter(autograd.once(torch.ops.fusedops.activation_backward, dy, x, other, *needs, packed, seed, *ctx.call))
    return *[next(grads) if need else None for need in needs], *rest


implement(_LIBRARY, "activation_forward", _forward, _fake_forward)
implement(_LIBRARY, "activation_backward", _backward, _fake_backward)
torch.library.register_autograd(
    "fusedops::activation_forward", _autograd_backward, setup_context=_setup_context, lib=_LIBRARY
)
