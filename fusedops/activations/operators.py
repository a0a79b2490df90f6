"""The family's private `torch.library` operators: what torch.compile, FakeTensor and make_fx see of a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core import autograd
from ..core.operators import Calls, define, versioned
from ..core.rng import Seed
from . import launching
from .launching import Kind, Packed, Site, site_of
from .reference import promoted

__all__ = ["operator_call"]

_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")


def operator_call(x: Tensor, other: Tensor | None, seed: Seed | None, threshold: int, kind: Kind, activation: str,
                  cols: int) -> Tensor:  # fmt: skip
    """The forward as one registered operator."""
    if isinstance(seed, tuple):
        seed = torch.tensor(seed, dtype=torch.int64, device=x.device)
    return torch.ops.fusedops.activation_forward(x, other, seed, threshold, versioned(kind, activation), cols)  # type: ignore[no-any-return]


def _site(call: str, cols: int, device_index: int, x: torch.dtype, other: torch.dtype | None) -> Site:
    kind, activation, _ = call.split()
    return site_of(kind, activation, cols, device_index, x, other)


# --- forward ------------------------------------------------------------------------------------------------------------


def _prepare_forward(device_index: int, dtypes: tuple[Any, ...], threshold: int, call: str,
                     cols: int) -> tuple[Site, int]:  # fmt: skip
    return _site(call, cols, device_index, *dtypes[:2]), threshold


_forward_calls = Calls(_prepare_forward)


def _forward(x: Tensor, other: Tensor | None, seed: Tensor | None, y: Tensor, call: str) -> None:
    site, threshold = _forward_calls[call, x.get_device()]
    launching.forward(site, x, other, seed, threshold, y)


def _outputs(x: Tensor, other: Tensor | None, seed: Tensor | None, threshold: int, call: str,
             cols: int) -> tuple[Tensor]:  # fmt: skip
    return (x.new_empty((*x.shape[:-1], cols), dtype=promoted(x, other)),)


# --- backward -----------------------------------------------------------------------------------------------------------


def _prepare_backward(device_index: int, dtypes: tuple[Any, ...], needs_x: bool, needs_other: bool, packed: Packed,
                      threshold: int, call: str, cols: int) -> tuple[Site, int, tuple[bool, bool], Packed]:  # fmt: skip
    return _site(call, cols, device_index, *dtypes[1:3]), threshold, (needs_x, needs_other), packed


_backward_calls = Calls(_prepare_backward)


def _backward(dy: Tensor, x: Tensor, other: Tensor | None, seed: Tensor | None, dx: Tensor | None,
              dother: Tensor | None, call: str) -> None:  # fmt: skip
    site, threshold, needs, packed = _backward_calls[call, dy.get_device()]
    launching.backward(site, dy, x, other, seed, threshold, needs, packed, (dx, dother))


def _gradients(dy: Tensor, x: Tensor, other: Tensor | None, seed: Tensor | None, needs_x: bool, needs_other: bool,
               packed: str, *_: Any) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    dx = x.new_empty(x.shape) if needs_x or packed else None
    return dx, other.new_empty(other.shape) if other is not None and needs_other else None


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, other, seed, *call = inputs
    ctx.save_for_backward(x, other, seed)
    ctx.set_materialize_grads(False)
    ctx.call = call


def _autograd_backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
    rest = (None,) * 4
    if dy is None:
        return None, None, *rest
    x, other, seed = ctx.saved_tensors
    needs = ctx.needs_input_grad[:2]
    packed = "gate" if ctx.call[1].startswith("packed ") else ""
    grads = iter(autograd.once(torch.ops.fusedops.activation_backward, dy, x, other, seed, *needs, packed, *ctx.call))
    return *[next(grads) if need else None for need in needs], *rest


_CALL = "int threshold, str call, int cols"  # ``call`` holds kind, activation and version
define(
    _LIBRARY,
    "activation_forward",
    tensors="Tensor x, Tensor? other, Tensor? seed",
    constants=_CALL,
    outputs=("y",),
    returns="Tensor",
    allocate=_outputs,
    write=_forward,
)
define(
    _LIBRARY,
    "activation_backward",
    tensors="Tensor dy, Tensor x, Tensor? other, Tensor? seed",
    constants=f"bool needs_x, bool needs_other, str packed, {_CALL}",
    outputs=("dx", "dother"),
    returns="Tensor[]",
    allocate=_gradients,
    write=_backward,
)
torch.library.register_autograd(
    "fusedops::activation_forward", _autograd_backward, setup_context=_setup_context, lib=_LIBRARY
)
