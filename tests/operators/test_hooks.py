"""Hooks see and change what they would of PyTorch's own operators.

Saved tensors, gradients, nodes of the graph.
"""

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
    """A copy that begins one element after its memory, at no multiple of 16 bytes."""
    flat = t.flatten()
    storage = torch.cat((torch.full_like(flat[:1], float("nan")), flat))
    return storage[1:].view(t.shape)


def _every_second(t: Tensor) -> Tensor:
    return torch.stack((t, torch.full_like(t, float("nan"))), -1)[..., 0]


def _negative(t: Tensor) -> Tensor:
    """A view with a lazy negation, such as the imaginary part of a conjugated tensor."""
    return torch._neg_view(-t)


def _unpacking(layout: Callable[[Tensor], Tensor]) -> Callable[[], AbstractContextManager[None]]:
    """A saved floating-point tensor comes back in another layout."""
    back = lambda t: layout(t) if t.is_floating_point() else t  # noqa: E731
    return lambda: graph.saved_tensors_hooks(torch.clone, back)


HOOKS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "column major": _unpacking(_column_major),
    "misaligned": _unpacking(_misaligned),
    "every second": _unpacking(_every_second),
    "negative": _unpacking(_negative),
    "offloaded": graph.save_on_cpu,
}


# PyTorch's own LayerNorm, which stands in for the kernels on the CPU, reads its statistics without
# strides.
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
    """A saved tensor was asked for."""


def _refuse(_: Any) -> Tensor:
    raise _UnpackedError


@every
def test_nothing_is_saved_past_the_hooks(spec: Spec, device: torch.device) -> None:
    """All tensors that the backward reads come from the hooks.

    `bias_dropout_add` is linear: its backward reads none.
    """
    both = pair(spec, device, p=0.0)
    weights, leaves = both.cotangents(), both.leaves()
    with graph.saved_tensors_hooks(lambda t: None, _refuse):
        outputs = both.ours(*leaves)
    with pytest.raises(_UnpackedError) if spec.name != "bias_dropout_add" else nullcontext():
        torch.autograd.grad(outputs, leaves, weights)


# --- hooks on tensors and nodes -------------------------------------------------------------------

Seen = dict[str, Any]


def _note(seen: Seen, name: str) -> Callable[..., None]:
    """A hook that writes down what it is given, and changes nothing."""

    def hook(first: Any, *_: Any) -> None:
        seen[name] = tuple(first) if isinstance(first, tuple) else first

    return hook


def _watch(seen: Seen, name: str, tensor: Tensor) -> None:
    """Every kind of hook on a tensor that is no leaf, and on the node that made it."""
    tensor.retain_grad()
    tensor.register_hook(_note(seen, f"{name}: tensor"))
    node = tensor.grad_fn
    assert node is not None
    node.register_prehook(_note(seen, f"{name}: before its node"))
    node.register_hook(_note(seen, f"{name}: behind its node"))


def _watch_leaf(seen: Seen, name: str, leaf: Tensor) -> None:
    leaf.register_post_accumulate_grad_hook(lambda t: seen.update({f"{name}: accumulated": t.grad}))
    graph.get_gradient_edge(leaf).node.register_prehook(_note(seen, f"{name}: before accumulation"))


def _seen(function: Function, tensors: tuple[Tensor, ...], weights: list[Tensor]) -> Seen:
    seen: Seen = {}
    leaves = [t.clone().requires_grad_() for t in tensors]
    inputs = [leaf * 1 for leaf in leaves]
    for i, (leaf, tensor) in enumerate(zip(leaves, inputs, strict=True)):
        _watch_leaf(seen, f"leaf {i}", leaf)
        _watch(seen, f"input {i}", tensor)
    handle = graph.register_multi_grad_hook(
        inputs, lambda grads: seen.update({"all at once": tuple(grads)})
    )
    outputs = function(*inputs)
    # No hook on the sum: PyTorch's formula computes the first output from it, so its gradient has
    # one more term there.
    outputs[0].register_hook(_note(seen, "output"))
    torch.autograd.backward(outputs, weights)
    handle.remove()
    return seen | {f"input {i}: retained": tensor.grad for i, tensor in enumerate(inputs)}


@every
def test_hooks_see_the_gradients(spec: Spec, device: torch.device) -> None:
    both = pair(spec, device)
    weights = both.cotangents()
    ours, theirs = (_seen(f, both.tensors, weights) for f in (both.ours, both.theirs))
    assert ours.keys() == theirs.keys()
    for name in theirs:
        close(ours[name], theirs[name])


@every
def test_hooks_change_the_gradients(spec: Spec, device: torch.device) -> None:
    """The backward goes on with the results of a hook on an input and of one on an output."""
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


def _halves(spec: Spec, function: Function, cut: str, packed: Tensor, dy: Tensor) -> Seen:
    seen: Seen = {}
    leaf = packed.clone().requires_grad_()
    whole = leaf * 1
    gate, up = CUTS[cut](whole)
    for name, tensor in (("whole", whole), ("gate", gate), ("up", up)):
        _watch(seen, name, tensor)
    (output,) = function(gate, up)
    output.backward(dy)
    return seen | {"leaf": leaf.grad, "gate: retained": gate.grad, "up: retained": up.grad}


@pytest.mark.parametrize("spec", GLUS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("cut", CUTS)
def test_hooks_see_the_gradients_of_halves(spec: Spec, cut: str, device: torch.device) -> None:
    both = pair(spec, device)
    packed = torch.cat(both.tensors, -1)
    (dy,) = both.cotangents()
    ours, theirs = (_halves(spec, f, cut, packed, dy) for f in (both.ours, both.theirs))
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


# PyTorch's tracer reads ``grad`` of saved outputs. It hides the warning, but not if warnings are
# errors, as in this suite.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@every
def test_compiled_autograd(spec: Spec, device: torch.device, fresh_dynamo: None) -> None:
    """The backward of an eager forward is one graph, without breaks, and its values agree."""
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
