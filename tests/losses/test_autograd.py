"""Gradients of losses of matrix products in the situations of training, and of any order."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops.core.launches import launch
from heads import IGNORED, Head, budget, cross_entropy, new_head
from support import DEVICE, KERNEL_PATH
from wrappers import Wrapper

by_reduction = pytest.mark.parametrize("reduction", ["mean", "none"])


def _loss(head: Head, x: Tensor | None = None, w: Tensor | None = None, **options: Any) -> Tensor:
    """Returns the loss in chunks of three rows, summed over rows."""
    x, w = head.x if x is None else x, head.weight if w is None else w
    chunk_mib = budget(3, len(w), x.dtype)
    return fusedops.linear_cross_entropy(
        x, w, head.target, linear_bias=head.bias, chunk_mib=chunk_mib, **options
    ).sum()


def _eager(head: Head, x: Tensor | None = None, w: Tensor | None = None, **options: Any) -> Tensor:
    x, w = head.x if x is None else x, head.weight if w is None else w
    return cross_entropy(x, w, head.bias, head.target, **options).sum()


# --- training -------------------------------------------------------------------------------------


@by_reduction
def test_tied_weight_has_the_gradients_of_both_uses(reduction: str) -> None:
    head = new_head()
    ids = torch.randint(11, (8,), device=DEVICE)
    for function in (_loss, _eager):
        function(head, F.embedding(ids, head.weight), reduction=reduction).backward()
        head.bias.grad = None
        if function is _loss:
            ours, head.weight.grad = head.weight.grad, None
    torch.testing.assert_close(ours, head.weight.grad)


@by_reduction
def test_weight_that_is_computed(reduction: str) -> None:
    """As with LoRA on the head: the weight is frozen, and its update has gradients."""
    head = new_head()
    frozen = head.weight.detach()
    a, b = (torch.randn(s, device=DEVICE).requires_grad_() for s in ((2, 5), (11, 2)))
    grads = [
        torch.autograd.grad(f(head, w=frozen + b @ a, reduction=reduction), (head.x, a, b))
        for f in (_loss, _eager)
    ]
    torch.testing.assert_close(*grads)


def test_gradients_accumulate() -> None:
    """The second backward does not change what the first one returned."""
    head = new_head()
    _loss(head).backward()
    first = head.weight.grad.clone()
    _loss(head, head.x * 2).backward()
    expected = torch.autograd.grad(_eager(head) + _eager(head, head.x * 2), head.weight)
    torch.testing.assert_close(head.weight.grad, *expected)
    assert not torch.equal(first, head.weight.grad)


@by_reduction
def test_second_backward(reduction: str) -> None:
    """With ``retain_graph`` it has the gradients of its own factor; without, PyTorch's error."""
    head = new_head()
    leaves = head[:3]
    loss, eager = (f(head, reduction=reduction) for f in (_loss, _eager))
    held = []
    for factor in (3.0, 1.0, 5.0):
        grads = [torch.autograd.grad(t * factor, leaves, retain_graph=True) for t in (loss, eager)]
        torch.testing.assert_close(*grads)
        held.append(grads)
    for grads in held:  # a later backward has not changed them
        torch.testing.assert_close(*grads)
    torch.autograd.grad(loss, leaves)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


@by_reduction
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reduction: str, reentrant: bool) -> None:
    head = new_head()
    loss = checkpoint(
        lambda x: _loss(head, x, reduction=reduction), head.x * 1, use_reentrant=reentrant
    )
    (loss * 2).backward()
    expected = torch.autograd.grad(2 * _eager(head, reduction=reduction), head[:3])
    torch.testing.assert_close(tuple([t.grad for t in head[:3]]), expected)


@by_reduction
def test_saved_tensors_elsewhere(reduction: str) -> None:
    head = new_head()
    with torch.autograd.graph.save_on_cpu():
        loss = _loss(head, reduction=reduction)
    grads = torch.autograd.grad(loss * 3, head[:3], retain_graph=True)
    again = torch.autograd.grad(loss * 3, head[:3])
    expected = torch.autograd.grad(_eager(head, reduction=reduction) * 3, head[:3])
    torch.testing.assert_close(grads, expected)
    torch.testing.assert_close(again, expected)


@by_reduction
def test_memory_is_freed_without_a_garbage_collection(reduction: str) -> None:
    head = new_head()
    gc.disable()
    try:
        for backward in (False, True):
            hidden = head.x * 1
            loss = _loss(head, hidden, reduction=reduction)
            if backward:
                loss.backward()
            alive = weakref.ref(hidden)
            del hidden, loss
            assert alive() is None
    finally:
        gc.enable()


def _with_tensor() -> tuple[Any, weakref.ref[Tensor]]:
    """Returns a loss, and a reference to a tensor that its function uses."""
    factors = torch.rand(11, device=DEVICE)
    op = fusedops.linear_rowwise(lambda logits: (logits * factors).logsumexp(-1))
    return op, weakref.ref(factors)


@pytest.mark.kernels
def test_function_is_freed_after_its_last_backward() -> None:
    head = new_head()
    op, alive = _with_tensor()
    loss = op(head.x, head.weight)
    expected = torch.autograd.grad(op(head.x, head.weight), head.x)
    del op
    gc.collect()
    torch.testing.assert_close(torch.autograd.grad(loss, head.x, retain_graph=True), expected)
    assert alive() is not None
    del loss
    gc.collect()
    assert alive() is None


@pytest.mark.kernels
def test_function_lives_as_long_as_a_graph_may_call_it() -> None:
    x, w = (t.detach() for t in new_head()[:2])
    op, _ = _with_tensor()
    graph = make_fx(functools.partial(op))(x, w)
    expected = op(x, w)
    del op
    gc.collect()
    torch.testing.assert_close(graph(x, w), expected)


def test_changed_weight_raises() -> None:
    head = new_head()
    loss = _loss(head)
    with torch.no_grad():
        head.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_scaled_loss_in_fp16() -> None:
    """A `GradScaler` finds no infinity, and the step is that of fp32."""
    head = new_head()
    layer = nn.Linear(5, 11, device=DEVICE)
    layer.weight.data.copy_(head.weight)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**16)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with torch.autocast(DEVICE.type, torch.float16):
        loss = fusedops.linear_cross_entropy(
            head.x.detach(), layer.weight, head.target, linear_bias=layer.bias
        )
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**16
    (gradient,) = torch.autograd.grad(
        cross_entropy(head.x.detach(), head.weight, layer.bias.detach() * 0, head.target),
        head.weight,
    )
    expected = head.weight - 0.1 * gradient
    assert (layer.weight - expected).abs().max() < 0.02  # the bias is not zero, but small
    assert not torch.equal(layer.weight, head.weight)


# --- derivatives ----------------------------------------------------------------------------------


@by_reduction
def test_double_backward(reduction: str) -> None:
    head = new_head(5, dtype=torch.float64)
    leaves = head[:3]
    seconds = []
    for function in (_loss, _eager):
        loss = function(head, reduction=reduction)
        grads = torch.autograd.grad(loss * loss, leaves, create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))
    torch.testing.assert_close(*seconds)


@by_reduction
def test_batched_gradients(reduction: str) -> None:
    head = new_head(5, dtype=torch.float64)
    factors = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, device=DEVICE)
    grads = [
        torch.autograd.grad(f(head, reduction=reduction), head[:3], factors, is_grads_batched=True)
        for f in (_loss, _eager)
    ]
    torch.testing.assert_close(*grads)


def test_transforms() -> None:
    """`torch.func` and forward mode run the reference implementation."""
    head = new_head(5, dtype=torch.float64)
    xs = torch.randn(2, 5, 5, dtype=torch.float64, device=DEVICE)
    tokens = torch.randint(11, (2, 5), device=DEVICE)
    w = head.weight.detach()

    def results(function: Any, log_probs: Any) -> list[Any]:
        of_x = lambda x: function(head, x)  # noqa: E731
        return [
            torch.func.grad(of_x)(xs[0]),
            torch.func.hessian(of_x)(xs[0]),
            torch.func.vmap(torch.func.grad(of_x))(xs),
            torch.func.jvp(of_x, (xs[0],), (xs[1],)),
            torch.func.vmap(log_probs)(xs, tokens),
        ]

    with launch.record() as kernels:
        ours = results(_loss, lambda x, t: fusedops.linear_log_probs(x, w, t))
    assert not kernels
    eager = results(
        _eager, lambda x, t: torch.log_softmax(x @ w.t(), -1).gather(-1, t[:, None])[:, 0]
    )
    torch.testing.assert_close(ours, eager)


def test_modes_without_gradients() -> None:
    head = new_head()
    expected = _eager(head).detach()
    with torch.no_grad():
        loss = _loss(head)
    assert not loss.requires_grad
    with torch.inference_mode():
        assert _loss(head).is_inference()
    torch.testing.assert_close(loss, expected)


@by_reduction
def test_subclass_sees_one_operator(reduction: str) -> None:
    head = new_head()
    weight = Wrapper(head.weight)
    Wrapper.log.clear()
    gradient = torch.autograd.grad(_loss(head, w=weight, reduction=reduction) * 3, weight)
    if KERNEL_PATH:
        assert any("fusedops.linear_rowwise" in name for name in Wrapper.log)
    expected = torch.autograd.grad(_eager(head, reduction=reduction) * 3, head.weight)
    torch.testing.assert_close(gradient[0].held, expected[0])


# --- captured tensors -----------------------------------------------------------------------------


@pytest.mark.kernels
def test_captured_tensor_that_needs_a_gradient_is_refused() -> None:
    head = new_head()
    scale = torch.randn(11, device=DEVICE)
    op = fusedops.linear_rowwise(lambda logits: (logits * scale).logsumexp(-1))
    expected = ((head.x @ head.weight.t()) * scale).logsumexp(-1).sum()
    torch.testing.assert_close(op(head.x, head.weight), expected)
    scale.requires_grad_()
    with pytest.raises(TypeError, match="pass it as an argument"):
        op(head.x, head.weight)
    with torch.no_grad():
        torch.testing.assert_close(op(head.x, head.weight), expected)


def test_ignored_targets_alone_are_left_out() -> None:
    head = new_head()
    (gradient,) = torch.autograd.grad(_loss(head), head.x)
    assert torch.equal(gradient.any(-1), head.target != IGNORED)
