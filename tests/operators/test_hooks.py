"""Hooks on saved tensors, gradients and graph nodes work as with PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.autograd import graph

import fusedops
from fusedops.core.spec import Spec
from pairs import close, pair, second_order
from support import ALL_SPECS, random_like

every = pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)

Function = Callable[..., Any]


# --- saved tensors --------------------------------------------------------------------------------


def _column_major(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT if t.dim() > 1 else t


def _misaligned(t: Tensor) -> Tensor:
    """A copy that begins one element into its storage, not at a multiple of 16 bytes."""
    flat = t.flatten()
    storage = torch.cat((torch.full_like(flat[:1], float("nan")), flat))
    return storage[1:].view(t.shape)


def _every_second(t: Tensor) -> Tensor:
    return torch.stack((t, torch.full_like(t, float("nan"))), -1)[..., 0]


def _negative(t: Tensor) -> Tensor:
    """A view with a lazy negation, such as the imaginary part of a conjugated tensor."""
    return torch._neg_view(-t)


def _unpacking(layout: Callable[[Tensor], Tensor]) -> Callable[[], AbstractContextManager[None]]:
    """Returns hooks that unpack saved floating-point tensors in another layout."""
    back = lambda t: layout(t) if t.is_floating_point() else t  # noqa: E731
    return lambda: graph.saved_tensors_hooks(torch.clone, back)


HOOKS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "column major": _unpacking(_column_major),
    "misaligned": _unpacking(_misaligned),
    "every second": _unpacking(_every_second),
    "negative": _unpacking(_negative),
    "offloaded": graph.save_on_cpu,
}


# Without kernels the operator runs PyTorch's LayerNorm, which ignores the strides of its saved
# statistics.
_MARKED = [
    pytest.param(name, marks=[pytest.mark.kernels] if name == "every second" else [])
    for name in HOOKS
]


@every
@pytest.mark.parametrize("hooks", _MARKED)
def test_saved_tensors_in_another_layout(spec: Spec, hooks: str, device: torch.device) -> None:
    """First and second derivatives are those without hooks."""
    both = pair(spec, device)
    weights = both.cotangents()
    with HOOKS[hooks]():
        leaves = both.leaves()
        outputs = both.ours(*leaves)
    result = torch.autograd.grad(outputs, leaves, weights)
    leaves = both.leaves()
    close(result, torch.autograd.grad(both.theirs(*leaves), leaves, weights))
    with HOOKS[hooks]():
        result = second_order(both.ours, both.tensors, weights)
    close(result, second_order(both.theirs, both.tensors, weights))


class _UnpackedError(Exception):
    """Raised when a saved tensor is unpacked."""


def _refuse(_: Any) -> Tensor:
    raise _UnpackedError


@every
def test_nothing_is_saved_past_the_hooks(spec: Spec, device: torch.device) -> None:
    """Hooks unpack all tensors that the backward reads; that of `bias_dropout_add` reads none."""
    both = pair(spec, device, p=0.0)
    weights, leaves = both.cotangents(), both.leaves()
    with graph.saved_tensors_hooks(lambda t: None, _refuse):
        outputs = both.ours(*leaves)
    with pytest.raises(_UnpackedError) if spec.name != "bias_dropout_add" else nullcontext():
        torch.autograd.grad(outputs, leaves, weights)


# --- hooks on tensors and nodes -------------------------------------------------------------------

# The gradients that hooks receive, by a description of the hook.
Recorded = dict[str, Any]


def _recording_hook(recorded: Recorded, name: str) -> Callable[..., None]:
    """Returns a hook that records its first argument, and changes nothing."""

    def hook(first: Any, *_: Any) -> None:
        recorded[name] = tuple(first) if isinstance(first, tuple) else first

    return hook


def _record(recorded: Recorded, name: str, tensor: Tensor) -> None:
    """Registers every kind of hook on a tensor that is no leaf, and on its node."""
    tensor.retain_grad()
    tensor.register_hook(_recording_hook(recorded, f"{name}: tensor"))
    node = tensor.grad_fn
    assert node is not None
    node.register_prehook(_recording_hook(recorded, f"{name}: before its node"))
    node.register_hook(_recording_hook(recorded, f"{name}: after its node"))


def _record_leaf(recorded: Recorded, name: str, leaf: Tensor) -> None:
    """Registers hooks before and after the accumulation of a leaf's gradient."""
    leaf.register_post_accumulate_grad_hook(
        lambda t: recorded.update({f"{name}: accumulated": t.grad})
    )
    node = graph.get_gradient_edge(leaf).node
    node.register_prehook(_recording_hook(recorded, f"{name}: before accumulation"))


def _gradients_in_hooks(
    function: Function, tensors: tuple[Tensor, ...], weights: list[Tensor]
) -> Recorded:
    """Runs forward and backward, and returns the gradients that all hooks received."""
    recorded: Recorded = {}
    leaves = [t.clone().requires_grad_() for t in tensors]
    inputs = [leaf * 1 for leaf in leaves]
    for i, (leaf, tensor) in enumerate(zip(leaves, inputs, strict=True)):
        _record_leaf(recorded, f"leaf {i}", leaf)
        _record(recorded, f"input {i}", tensor)
    handle = graph.register_multi_grad_hook(
        inputs, lambda grads: recorded.update({"all at once": tuple(grads)})
    )
    outputs = function(*inputs)
    # The sum has no hook: in PyTorch's formula the first output depends on it, so its gradient has
    # another term.
    outputs[0].register_hook(_recording_hook(recorded, "output"))
    torch.autograd.backward(outputs, weights)
    handle.remove()
    return recorded | {f"input {i}: retained": tensor.grad for i, tensor in enumerate(inputs)}


@every
def test_hooks_receive_the_gradients(spec: Spec, device: torch.device) -> None:
    both = pair(spec, device)
    weights = both.cotangents()
    ours, theirs = (
        _gradients_in_hooks(function, both.tensors, weights)
        for function in (both.ours, both.theirs)
    )
    assert ours.keys() == theirs.keys()
    for name in theirs:
        close(ours[name], theirs[name])


@every
def test_hooks_change_the_gradients(spec: Spec, device: torch.device) -> None:
    """The backward uses the gradients that hooks on an input and on an output return."""
    both = pair(spec, device)
    weights = both.cotangents()

    def changed(function: Function) -> tuple[Tensor, ...]:
        leaves = both.leaves()
        inputs = [leaf * 1 for leaf in leaves]
        outputs = function(*inputs)
        inputs[0].register_hook(lambda g: 3.0 * g)
        outputs[0].register_hook(lambda g: g + 0.5)
        return torch.autograd.grad(outputs, leaves, weights)

    close(changed(both.ours), changed(both.theirs))


# --- the halves of one tensor ---------------------------------------------------------------------

CUTS: dict[str, Callable[[Tensor], Any]] = {
    "chunk": lambda t: t.chunk(2, -1),
    "split": lambda t: t.split(t.shape[-1] // 2, -1),
    "slices": lambda t: (t[..., : t.shape[-1] // 2], t[..., t.shape[-1] // 2 :]),
    "up first": lambda t: t.chunk(2, -1)[::-1],
    "unflatten": lambda t: t.unflatten(-1, (2, -1)).unbind(-2),
}
GLUS = [spec for spec in ALL_SPECS if spec.tensors[:2] == ("gate", "up")]


def _gradients_of_halves(function: Function, cut: str, packed: Tensor, dy: Tensor) -> Recorded:
    """The gradients that hooks on a packed tensor and its halves receive."""
    recorded: Recorded = {}
    leaf = packed.clone().requires_grad_()
    whole = leaf * 1
    gate, up = CUTS[cut](whole)
    for name, tensor in (("whole", whole), ("gate", gate), ("up", up)):
        _record(recorded, name, tensor)
    (output,) = function(gate, up)
    output.backward(dy)
    return recorded | {"leaf": leaf.grad, "gate: retained": gate.grad, "up: retained": up.grad}


@pytest.mark.parametrize("spec", GLUS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("cut", CUTS)
def test_hooks_receive_the_gradients_of_halves(spec: Spec, cut: str, device: torch.device) -> None:
    both = pair(spec, device)
    packed = torch.cat(both.tensors, -1)
    (dy,) = both.cotangents()
    ours, theirs = (_gradients_of_halves(f, cut, packed, dy) for f in (both.ours, both.theirs))
    assert ours.keys() == theirs.keys()
    for name in theirs:
        close(ours[name], theirs[name])


# --- compiled autograd ----------------------------------------------------------------------------


def _compiled_backward(outputs: Any, weights: list[Tensor]) -> int:
    """Runs ``backward()`` as a graph that Dynamo traces; returns the number of graph breaks."""
    counters.clear()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        torch.autograd.backward(outputs, weights)
    assert counters["compiled_autograd"]["captures"] == 1
    return sum(counters["graph_break"].values())


# PyTorch's tracer reads ``grad`` of saved outputs. It suppresses the warning about that, but not
# if warnings are errors, as in this suite.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@every
def test_compiled_autograd(spec: Spec, device: torch.device, fresh_dynamo: None) -> None:
    """The backward of an eager forward is one graph without breaks, and has the right values."""
    both = pair(spec, device)
    weights = both.cotangents()
    leaves = both.leaves()
    breaks = _compiled_backward(both.ours(*leaves), weights)
    expected = both.leaves()
    torch.autograd.backward(both.theirs(*expected), weights)
    close([leaf.grad for leaf in leaves], [leaf.grad for leaf in expected])
    assert breaks == 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("cut", ["chunk", "slices"])
def test_compiled_autograd_of_halves(cut: str, device: torch.device, fresh_dynamo: None) -> None:
    packed = torch.randn(4, 16, dtype=torch.float64, device=device, requires_grad=True)
    output = fusedops.swiglu(*CUTS[cut](packed * 1))
    (dy,) = random_like([output])
    breaks = _compiled_backward(output, [dy])
    gate, up = CUTS[cut](packed)
    close(packed.grad, torch.autograd.grad(torch.nn.functional.silu(gate) * up, packed, dy)[0])
    assert breaks == 0
