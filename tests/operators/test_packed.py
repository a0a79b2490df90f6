"""Gated units whose two inputs are the halves of one tensor.

One packed tensor has one gradient, which the kernel writes without a copy. Two views of a tensor
are read in place, and autograd treats them as any other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusedops.core.launches import launch
from fusedops.core.spec import Spec
from support import ALL_SPECS

GATED = [spec for spec in ALL_SPECS if spec.tensors == ("gate", "up")]
every = pytest.mark.parametrize("spec", GATED, ids=lambda spec: spec.name)
pytestmark = pytest.mark.kernels

COLS = 24
CUTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "chunk": lambda packed: packed.chunk(2, -1),
    "split": lambda packed: packed.split([COLS, COLS], -1),
    "slices": lambda packed: (packed[..., :COLS], packed[..., COLS:]),
    "up first": lambda packed: packed.chunk(2, -1)[::-1],
}
# Operators that join two gradients or make rows contiguous.
COPIES = {
    "aten::cat",
    "aten::slice_backward",
    "aten::narrow_copy",
    "aten::add",
    "aten::add_",
    "aten::clone",
}


@contextmanager
def _no_copies() -> Iterator[None]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield
    names = {event.name for event in profile.events()}
    assert not names & COPIES


def _expected(spec: Spec, packed: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output and the two gradients if gate and up are separate tensors."""
    halves = [half.detach().clone().requires_grad_() for half in packed.chunk(2, -1)]
    y = spec.call(*halves)
    return y.detach(), *torch.autograd.grad(y, halves, cotangent)


def _assert_near(
    actual: Tensor | tuple[Tensor, ...], expected: Tensor | tuple[Tensor, ...]
) -> None:
    """A few ulps are allowed, as kernels of dense tensors round some products in another order."""
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


# --- one tensor -----------------------------------------------------------------------------------

DERIVATIVES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor | None]] = {
    "backward": lambda y, leaf, dy: y.backward(dy),
    "inputs": lambda y, leaf, dy: y.backward(dy, inputs=[leaf]),
    "grad": lambda y, leaf, dy: torch.autograd.grad(y, leaf, dy)[0],
    "retain_graph": lambda y, leaf, dy: torch.autograd.grad(y, leaf, dy, retain_graph=True)[0],
}


@every
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("shape", [(6, 2 * COLS), (2, 3, 2 * COLS), (2 * COLS,)], ids=str)
def test_one_gradient_and_no_copy(
    spec: Spec, derivative: str, shape: tuple[int, ...], device: torch.device
) -> None:
    leaf = torch.randn(shape, device=device, requires_grad=True)
    cotangent = torch.randn((*shape[:-1], COLS), device=device)
    with launch.record() as launched, _no_copies():
        y = spec.call(leaf, None)
        grad = DERIVATIVES[derivative](y, leaf, cotangent)
    assert launched == ["glu_forward_kernel", "glu_backward_kernel"]
    expected, *halves = _expected(spec, leaf, cotangent)
    _assert_near(y, expected)
    _assert_near(leaf.grad if grad is None else grad, torch.cat(halves, -1))


@every
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_of_a_packed_input(
    spec: Spec, use_reentrant: bool, device: torch.device
) -> None:
    leaf = torch.randn(6, 2 * COLS, device=device, requires_grad=True)
    cotangent = torch.randn(6, COLS, device=device)
    checkpoint(lambda t: spec.call(t, None), leaf, use_reentrant=use_reentrant).backward(cotangent)
    _assert_near(leaf.grad, torch.cat(_expected(spec, leaf, cotangent)[1:], -1))


# --- two views of one tensor ----------------------------------------------------------------------


@every
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("leading", [(6,), (2, 3), ()], ids=str)
def test_halves_are_read_in_place(
    spec: Spec, cut: str, leading: tuple[int, ...], device: torch.device
) -> None:
    """Each half has a gradient of its own, also if the gradient of the whole is requested."""
    leaf = torch.randn((*leading, 2 * COLS), device=device, requires_grad=True)
    halves = CUTS[cut](leaf)
    with _no_copies():
        y = spec.call(*halves)
    cotangent = torch.randn_like(y)
    is_reversed = cut == "up first"
    gate_first = leaf.roll(COLS, -1) if is_reversed else leaf
    output, *gradients = _expected(spec, gate_first, cotangent)
    of_halves = torch.autograd.grad(y, halves, cotangent, retain_graph=True)
    _assert_near((y, *of_halves), (output, *gradients))
    y.backward(cotangent)
    in_memory_order = reversed(gradients) if is_reversed else gradients
    _assert_near(leaf.grad, torch.cat(tuple(in_memory_order), -1))


@every
@pytest.mark.parametrize("kind", ["hook", "retain_grad"])
@pytest.mark.parametrize("half", [0, 1], ids=["gate", "up"])
def test_hooks_on_a_half(spec: Spec, kind: str, half: int, device: torch.device) -> None:
    leaf = torch.randn(6, 2 * COLS, device=device, requires_grad=True)
    halves = leaf.chunk(2, -1)
    if kind == "hook":
        halves[half].register_hook(lambda grad: 2.0 * grad)
    else:
        halves[half].retain_grad()
    y = spec.call(*halves)
    cotangent = torch.randn_like(y)
    _, *grads = _expected(spec, leaf, cotangent)
    y.backward(cotangent)
    if kind == "retain_grad":
        _assert_near(halves[half].grad, grads[half])
    else:
        grads[half] = 2.0 * grads[half]
    _assert_near(leaf.grad, torch.cat(grads, -1))


@every
@pytest.mark.parametrize("form", ["packed", "halves"])
@pytest.mark.parametrize("changed", ["packed", "half"])
def test_changes_in_place_are_errors(
    spec: Spec, form: str, changed: str, device: torch.device
) -> None:
    packed = torch.randn(6, 2 * COLS, device=device, requires_grad=True) * 1.5
    gate, up = packed[..., :COLS], packed[..., COLS:]
    y = spec.call(packed, None) if form == "packed" else spec.call(gate, up)
    (packed if changed == "packed" else gate).mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
