"""Gated units whose two inputs are the halves of one tensor: one gradient for it, with nothing put together by a copy.

And nobody can tell, but by the time it takes: whoever asks for the halves' own gradients gets them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fusedops.core import launch
from fusedops.core.spec import Spec
from support import ALL_SPECS, KERNEL_PATH

GATED = [spec for spec in ALL_SPECS if spec.tensors == ("gate", "up")]
every = pytest.mark.parametrize("spec", GATED, ids=lambda spec: spec.name)
pytestmark = pytest.mark.kernels

COLS = 24
CUTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "chunk": lambda packed: packed.chunk(2, -1),
    "split": lambda packed: packed.split([COLS, COLS], -1),
    "slices": lambda packed: (packed[..., :COLS], packed[..., COLS:]),
    "narrow": lambda packed: (packed.narrow(-1, 0, COLS), packed.narrow(-1, COLS, COLS)),
    "up first": lambda packed: packed.chunk(2, -1)[::-1],
    "slices, up first": lambda packed: (packed[..., COLS:], packed[..., :COLS]),
}
# What autograd does to make one gradient of two.
JOINTS = {"aten::cat", "aten::slice_backward", "aten::narrow_copy", "aten::add", "aten::add_"}


@contextmanager
def _operators() -> Iterator[set[str]]:
    names: set[str] = set()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield names
    names |= {event.name for event in profile.events()}


def _packed(device: torch.device, shape: tuple[int, ...] = (6, 2 * COLS)) -> tuple[Tensor, Tensor]:
    """A leaf, and a tensor made of it that is no view."""
    leaf = torch.randn(shape, device=device, requires_grad=True)
    return leaf, leaf * 1.5


def _expected(spec: Spec, leaf: Tensor, cut: str, cotangent: Tensor) -> Tensor:
    """The leaf's gradient where nothing is packed."""
    halves = [half.detach().clone().requires_grad_() for half in CUTS[cut](leaf * 1.5)]
    grads = torch.autograd.grad(spec.call(*halves), halves, cotangent)
    joined = torch.cat(grads if "up first" not in cut else grads[::-1], -1)
    return joined * 1.5


def _joined(operators: set[str]) -> bool:
    return bool(operators & JOINTS)


@every
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("shape", [(6, 2 * COLS), (2, 3, 2 * COLS), (2 * COLS,)], ids=str)
def test_one_gradient_and_no_copy(spec: Spec, cut: str, shape: tuple[int, ...], device: torch.device) -> None:
    leaf, packed = _packed(device, shape)
    y = spec.call(*CUTS[cut](packed))
    cotangent = torch.randn_like(y)
    with launch.record() as launched, _operators() as operators:
        y.backward(cotangent)
    assert not _joined(operators), operators & JOINTS
    assert launched == ["glu_backward_kernel"]
    assert torch.equal(leaf.grad, _expected(spec, leaf, cut, cotangent))


@every
def test_explicitly_packed(spec: Spec, device: torch.device) -> None:
    """``up=None`` needs no finding out, and is one gradient under `torch.autograd.grad` too."""
    leaf, packed = _packed(device)
    y = spec.call(packed, None)
    cotangent = torch.randn_like(y)
    with _operators() as operators:
        (grad,) = torch.autograd.grad(y, leaf, cotangent)
    assert not _joined(operators)
    assert torch.equal(grad, _expected(spec, leaf, "chunk", cotangent))
    assert torch.equal(y, spec.call(*packed.chunk(2, -1)))


def test_a_linear_layers_output(device: torch.device) -> None:
    linear = nn.Linear(16, 2 * COLS, device=device)
    x = torch.randn(5, 16, device=device)
    grads = []
    for separate in (False, True):
        linear.zero_grad()
        halves = linear(x).chunk(2, -1)
        halves = tuple(half.clone() for half in halves) if separate else halves
        with _operators() as operators:
            GATED[0].call(*halves).square().sum().backward()
        assert ("aten::cat" in operators) == separate
        grads.append([p.grad.clone() for p in linear.parameters()])
    assert all(map(torch.equal, *grads))


# --- who asks for the halves' gradients gets them ------------------------------------------------------------------


def _halves_gradients(spec: Spec, packed: Tensor, cotangent: Tensor) -> tuple[Tensor, ...]:
    halves = [half.detach().clone().requires_grad_() for half in packed.chunk(2, -1)]
    return torch.autograd.grad(spec.call(*halves), halves, cotangent)


@every
@pytest.mark.parametrize("cut", ["chunk", "slices"])
def test_gradients_of_chosen_tensors(spec: Spec, cut: str, device: torch.device) -> None:
    leaf, packed = _packed(device)
    gate, up = CUTS[cut](packed)
    y = spec.call(gate, up)
    cotangent = torch.randn_like(y)
    dgate, dup = _halves_gradients(spec, packed, cotangent)
    whole = torch.cat((dgate, dup), -1)
    grad = lambda *inputs: torch.autograd.grad(y, inputs, cotangent, retain_graph=True)  # noqa: E731
    assert all(map(torch.equal, grad(gate, up), (dgate, dup)))
    assert torch.equal(grad(up)[0], dup) and torch.equal(grad(packed)[0], whole)
    assert all(map(torch.equal, grad(gate, leaf, packed, up), (dgate, whole * 1.5, whole, dup)))
    y.backward(cotangent, inputs=[leaf], retain_graph=True)
    assert torch.equal(leaf.grad, whole * 1.5)
    y.backward(cotangent)
    assert torch.equal(leaf.grad, 2 * (whole * 1.5))


@every
@pytest.mark.parametrize("when", ["before", "after", "removed"])
@pytest.mark.parametrize("kind", ["hook", "retain_grad"])
@pytest.mark.parametrize("which", [0, 1], ids=["gate", "up"])
def test_hooks_on_the_halves(spec: Spec, when: str, kind: str, which: int, device: torch.device) -> None:
    leaf, packed = _packed(device)
    halves = packed.chunk(2, -1)
    seen: list[Tensor] = []
    y = spec.call(*halves) if when == "after" else None
    if kind == "hook":
        handle = halves[which].register_hook(lambda grad: seen.append(grad.clone()) or 2.0 * grad)
    else:
        halves[which].retain_grad()
    y = spec.call(*halves) if y is None else y
    if when == "removed" and kind == "hook":
        handle.remove()
    cotangent = torch.randn_like(y)
    expected = list(_halves_gradients(spec, packed, cotangent))
    half = halves[which]
    del halves  # the hook outlives the caller's own names
    y.backward(cotangent)
    if kind == "retain_grad":
        assert torch.equal(half.grad, expected[which])
    elif when != "removed":
        assert torch.equal(seen[0], expected[which])
        expected[which] = 2.0 * expected[which]
    assert torch.equal(leaf.grad, torch.cat(expected, -1) * 1.5)


@every
def test_a_hook_on_a_half_that_is_gone(spec: Spec, device: torch.device) -> None:
    """Registered after the call, and nobody but the graph holds the half any more."""
    _, packed = _packed(device)
    seen: list[Tensor] = []

    def call() -> Tensor:
        gate, up = packed.chunk(2, -1)
        y = spec.call(gate, up)
        gate.register_hook(lambda grad: seen.append(grad))
        return y

    call().sum().backward()
    assert len(seen) == 1 and seen[0] is not None and seen[0].any()


@every
def test_hooks_on_the_whole(spec: Spec, device: torch.device) -> None:
    _, packed = _packed(device)
    seen: list[Tensor] = []
    packed.register_hook(lambda grad: seen.append(grad.clone()))
    packed.retain_grad()
    y = spec.call(*packed.chunk(2, -1))
    cotangent = torch.randn_like(y)
    with _operators() as operators:
        y.backward(cotangent)
    assert "aten::cat" not in operators
    whole = torch.cat(_halves_gradients(spec, packed, cotangent), -1)
    assert len(seen) == 1 and torch.equal(seen[0], whole) and torch.equal(packed.grad, whole)


@every
@pytest.mark.parametrize("between", ["view", "module"])
def test_what_stands_between_is_not_passed_by(spec: Spec, between: str, device: torch.device) -> None:
    """Another view, or a module with a full backward hook, whose observers would miss a gradient that goes past."""
    leaf, packed = _packed(device)
    seen: list[Tensor] = []
    if between == "view":
        middle = packed.view(2, 3, 2 * COLS)
        middle.register_hook(lambda grad: seen.append(grad.clone()))
    else:
        module = nn.Identity()
        module.register_full_backward_hook(lambda m, dx, dy: seen.append(dy[0].clone()))
        middle = module(packed)
    y = spec.call(*middle.chunk(2, -1))
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    whole = torch.cat(_halves_gradients(spec, packed.view(middle.shape), cotangent), -1)
    assert len(seen) == 1 and torch.equal(seen[0], whole)
    assert torch.equal(leaf.grad, whole.view(packed.shape) * 1.5)


# --- other ways through the graph ----------------------------------------------------------------------------------


@every
def test_halves_used_elsewhere_too(spec: Spec, device: torch.device) -> None:
    leaf, packed = _packed(device)
    gate, up = packed.chunk(2, -1)
    y = spec.call(gate, up) + spec.call(gate, up) * gate + up.square()
    cotangent = torch.randn_like(y)
    y.backward(cotangent, retain_graph=True)
    (ordinary,) = torch.autograd.grad(y, leaf, cotangent)
    # The same terms, added in another order.
    torch.testing.assert_close(leaf.grad, ordinary, rtol=1e-5, atol=1e-5)
    assert leaf.grad.any()


@every
def test_a_leaf_cut_in_two(spec: Spec, device: torch.device) -> None:
    leaf = torch.randn(6, 2 * COLS, device=device, requires_grad=True)
    y = spec.call(*leaf.chunk(2, -1))
    cotangent = torch.randn_like(y)
    with _operators() as operators:
        y.backward(cotangent)
    assert "aten::cat" not in operators
    assert torch.equal(leaf.grad, torch.cat(_halves_gradients(spec, leaf, cotangent), -1))


@every
@pytest.mark.parametrize("way", ["no_grad", "detached", "one frozen", "overlapping", "quarters"])
def test_no_halves(spec: Spec, way: str, device: torch.device) -> None:
    """What looks like two halves of one differentiable tensor, and is not."""
    leaf, packed = _packed(device)
    gate, up = packed.chunk(2, -1)
    if way == "no_grad":
        with torch.no_grad():
            gate, up = packed.chunk(2, -1)
        gate, up = gate.requires_grad_(), up.requires_grad_()
    elif way == "detached":
        gate, up = (half.requires_grad_() for half in packed.detach().chunk(2, -1))
    elif way == "one frozen":
        up = up.detach()
    elif way == "overlapping":
        up = packed[..., COLS - 4 : 2 * COLS - 4]
    else:
        gate, up = packed.chunk(4, -1)[:2]
    y = spec.call(gate, up)
    cotangent = torch.randn_like(y)
    halves = [half.detach().clone().requires_grad_() for half in (gate, up)]
    dgate, dup = torch.autograd.grad(spec.call(*halves), halves, cotangent)
    y.backward(cotangent)
    if way in ("no_grad", "detached"):
        assert torch.equal(gate.grad, dgate) and torch.equal(up.grad, dup) and leaf.grad is None
        return
    whole = torch.zeros_like(packed)
    whole[..., : gate.shape[-1]] += dgate
    if way != "one frozen":
        start = up.storage_offset()
        whole[..., start : start + up.shape[-1]] += dup
    assert torch.equal(leaf.grad, whole * 1.5)


@every
@pytest.mark.parametrize("changed", ["packed", "gate"])
def test_a_change_in_place_is_noticed(spec: Spec, changed: str, device: torch.device) -> None:
    _, packed = _packed(device)
    gate, up = packed[..., :COLS], packed[..., COLS:]
    y = spec.call(gate, up)
    (packed if changed == "packed" else gate).mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@every
def test_a_change_in_place_before_the_call(spec: Spec, device: torch.device) -> None:
    """The halves' place in the graph is another one then."""
    leaf, packed = _packed(device)
    gate, up = packed[..., :COLS], packed[..., COLS:]
    packed.mul_(2.0)
    y = spec.call(gate, up)
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    assert torch.equal(leaf.grad, torch.cat(_halves_gradients(spec, packed, cotangent), -1) * 2.0 * 1.5)


@every
@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "saved on the host"])
def test_recomputed_and_moved(spec: Spec, way: str, device: torch.device) -> None:
    leaf, packed = _packed(device)
    function = lambda t: spec.call(*(t * 1.5).chunk(2, -1))  # noqa: E731
    if way == "saved on the host":
        with torch.autograd.graph.save_on_cpu():
            y = function(leaf)
    else:
        y = checkpoint(function, leaf, use_reentrant=way == "reentrant")
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    assert torch.equal(leaf.grad, torch.cat(_halves_gradients(spec, packed, cotangent), -1) * 1.5)


@every
@pytest.mark.parametrize("way", ["not reentrant", "saved on the host"])
def test_a_hook_on_a_half_that_was_saved_elsewhere(spec: Spec, way: str, device: torch.device) -> None:
    """What the backward gets back is another tensor than the one that has the hook."""
    leaf, _ = _packed(device)
    seen: list[Tensor] = []

    def function(t: Tensor) -> Tensor:
        gate, up = (t * 1.5).chunk(2, -1)
        y = spec.call(gate, up)
        gate.register_hook(lambda grad: seen.append(grad))
        return y

    if way == "saved on the host":
        with torch.autograd.graph.save_on_cpu():
            y = function(leaf)
    else:
        y = checkpoint(function, leaf, use_reentrant=False)
    y.sum().backward()
    assert len(seen) == 1 and seen[0] is not None and seen[0].any()


@every
def test_second_derivatives(spec: Spec, device: torch.device) -> None:
    leaf = torch.randn(3, 8, device=device, dtype=torch.float64, requires_grad=True)
    function = lambda t: spec.call(*(t * 1.5).chunk(2, -1))  # noqa: E731
    torch.autograd.gradcheck(function, leaf, fast_mode=True)
    torch.autograd.gradgradcheck(function, leaf, fast_mode=True)
    function(leaf).sum().backward(create_graph=True)
    assert leaf.grad is not None and leaf.grad.requires_grad


@every
def test_threads(spec: Spec, device: torch.device) -> None:
    """One graph, two backwards at once: one for all leaves, one for the halves."""
    leaf, packed = _packed(device)
    gate, up = packed.chunk(2, -1)
    y = spec.call(gate, up)
    cotangent = torch.randn_like(y)
    expected = _halves_gradients(spec, packed, cotangent)
    barrier = threading.Barrier(2)

    def work(which: int) -> Any:
        barrier.wait()
        for _ in range(5):
            if which:
                y.backward(cotangent, retain_graph=True)
            else:
                grads = torch.autograd.grad(y, (gate, up), cotangent, retain_graph=True)
                assert all(map(torch.equal, grads, expected))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    torch.testing.assert_close(leaf.grad, 5 * torch.cat(expected, -1) * 1.5, rtol=1e-5, atol=1e-6)


def test_there_are_gated_units() -> None:
    assert len(GATED) >= 3 and KERNEL_PATH
