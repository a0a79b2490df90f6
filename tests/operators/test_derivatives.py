"""Higher derivatives by all compositions of forward and reverse mode, also under other modes.

They are compared in fp64 with the same derivatives of the formula in elementary operators
(`pairs.elementary`). Both differ only by roundings.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

from fusedops.core.spec import Spec
from pairs import Pair, close, filled, loss, pair, second_order
from support import ALL_SPECS, random_like
from wrappers import Wrapper, wrapped

every = pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)

Function = Callable[..., Any]


def _compare(both: Pair, evaluate: Callable[[Function], Any]) -> None:
    """Asserts that ``evaluate`` returns the same for the operator and for the formula."""
    close(evaluate(both.ours), evaluate(both.theirs))


# --- compositions of forward and reverse mode -----------------------------------------------------


@every
@pytest.mark.parametrize(
    ("along", "create_graph"), [("all", False), ("all", True), ("first", False), ("last", False)]
)
def test_forward_over_reverse(
    spec: Spec, along: str, create_graph: bool, device: torch.device
) -> None:
    """Gradients of dual tensors have tangents, with or without ``create_graph``.

    ``along`` says which inputs have tangents.
    """
    both = pair(spec, device)
    weights, directions = both.cotangents(), random_like(both.tensors, seed=3)
    chosen = {"all": range(len(directions)), "first": [0], "last": [len(directions) - 1]}[along]

    def product(function: Function) -> tuple[Tensor, ...]:
        with forward_ad.dual_level():
            leaves = both.leaves()
            duals = [
                forward_ad.make_dual(t, v) if i in chosen else t
                for i, (t, v) in enumerate(zip(leaves, directions, strict=True))
            ]
            grads = torch.autograd.grad(
                loss(function, weights)(*duals), duals, create_graph=create_graph
            )
            return filled(tuple(forward_ad.unpack_dual(g).tangent for g in grads), both.tensors)

    _compare(both, product)


@every
def test_forward_over_reverse_along_the_cotangents(spec: Spec, device: torch.device) -> None:
    """The cotangents have tangents, and the inputs have none."""
    both = pair(spec, device)
    cotangents, directions = both.cotangents(), random_like(both.cotangents(), seed=5)

    def product(function: Function) -> tuple[Tensor, ...]:
        with forward_ad.dual_level():
            leaves = both.leaves()
            duals = [
                forward_ad.make_dual(c, v) for c, v in zip(cotangents, directions, strict=True)
            ]
            grads = torch.autograd.grad(function(*leaves), leaves, duals)
            return filled(tuple(forward_ad.unpack_dual(g).tangent for g in grads), both.tensors)

    _compare(both, product)


@every
def test_reverse_over_forward(spec: Spec, device: torch.device) -> None:
    """The tangents of the outputs are differentiated by the inputs and by their tangents."""
    both = pair(spec, device)
    weights = both.cotangents()

    def product(function: Function) -> tuple[Tensor, ...]:
        leaves = both.leaves()
        directions = tuple(t.requires_grad_() for t in random_like(both.tensors, seed=3))
        with forward_ad.dual_level():
            outputs = function(*map(forward_ad.make_dual, leaves, directions))
            tangents = [forward_ad.unpack_dual(output).tangent for output in outputs]
        total = sum((t * t * w).sum() for t, w in zip(tangents, weights, strict=True))
        inputs = (*leaves, *directions)
        return filled(torch.autograd.grad(total, inputs, allow_unused=True), inputs)

    _compare(both, product)


@every
def test_grad_of_jvp(spec: Spec, device: torch.device) -> None:
    both = pair(spec, device)
    weights, directions = both.cotangents(), tuple(random_like(both.tensors, seed=3))
    argnums = tuple(range(len(directions)))

    def product(function: Function) -> Any:
        def loss_of_tangents(*values: Tensor) -> Tensor:
            tangents = func.jvp(function, values, directions)[1]
            return sum((t * t * w).sum() for t, w in zip(tangents, weights, strict=True))

        return func.grad(loss_of_tangents, argnums)(*both.tensors)

    _compare(both, product)


@every
def test_jvp_of_grad(spec: Spec, device: torch.device) -> None:
    both = pair(spec, device)
    weights, directions = both.cotangents(), tuple(random_like(both.tensors, seed=3))
    argnums = tuple(range(len(directions)))
    _compare(
        both, lambda f: func.jvp(func.grad(loss(f, weights), argnums), both.tensors, directions)
    )


@every
@pytest.mark.parametrize("inner", ["jacfwd", "jacrev"])
@pytest.mark.parametrize("outer", ["jacfwd", "jacrev"])
def test_hessian(spec: Spec, outer: str, inner: str, device: torch.device) -> None:
    """The Hessians by the first and by the last tensor, in all four compositions."""
    both = pair(spec, device, p=0.0, shape=(2, 3))
    weights = both.cotangents()
    outer_jacobian, inner_jacobian = getattr(func, outer), getattr(func, inner)
    for argnum in {0, len(both.tensors) - 1}:

        def hessian(function: Function, argnum: int = argnum) -> Any:
            gradient = inner_jacobian(loss(function, weights), argnum)
            return outer_jacobian(gradient, argnum)(*both.tensors)

        _compare(both, hessian)


@every
# Without kernels the operator runs F.layer_norm, whose third derivative is wrong in PyTorch 2.13.
@pytest.mark.kernels
def test_third_derivatives(spec: Spec, device: torch.device) -> None:
    """Gradients of gradients of gradients, by all tensors."""
    both = pair(spec, device)
    weights = both.cotangents()

    def product(function: Function) -> tuple[Tensor, ...]:
        leaves = both.leaves()
        total: Any = loss(function, weights)(*leaves)
        for seed in (11, 12):
            grads = torch.autograd.grad(total, leaves, create_graph=True)
            total = sum(
                (g * g * v).sum() for g, v in zip(grads, random_like(leaves, seed), strict=True)
            )
        return filled(torch.autograd.grad(total, leaves, allow_unused=True), leaves)

    _compare(both, product)


# --- derivatives under other modes ----------------------------------------------------------------


@every
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"]
)
def test_transforms_without_grad_mode(
    spec: Spec, mode: Callable[[], AbstractContextManager[None]], device: torch.device
) -> None:
    """Transforms of torch.func differentiate under no_grad and in inference mode, too."""
    both = pair(spec, device)
    cotangents, directions = tuple(both.cotangents()), tuple(random_like(both.tensors, seed=3))
    argnums = tuple(range(len(directions)))
    with mode():
        _compare(both, lambda f: func.vjp(f, *both.tensors)[1](cotangents))
        _compare(both, lambda f: func.grad(loss(f, cotangents), argnums)(*both.tensors))
        _compare(both, lambda f: func.jvp(f, both.tensors, directions))


@every
def test_double_backward_of_arguments_that_depend_on_another(
    spec: Spec, device: torch.device
) -> None:
    """The other arguments depend on the first; their gradients must be added once to its own."""
    both = pair(spec, device)
    weights = both.cotangents()

    def composed(function: Function) -> Function:
        return lambda first, *rest: function(first, *(t + 0.1 * first.mean() for t in rest))

    _compare(both, lambda function: second_order(composed(function), both.tensors, weights))


@every
def test_double_backward_under_a_dispatch_mode(spec: Spec, device: torch.device) -> None:
    both = pair(spec, device)
    weights = both.cotangents()
    with FlopCounterMode(display=False):
        _compare(both, lambda f: second_order(f, both.tensors, weights))


@every
def test_dispatch_mode_in_the_forward_or_the_backward_only(
    spec: Spec, device: torch.device
) -> None:
    both = pair(spec, device)
    weights = both.cotangents()

    def derivatives(function: Function, *, mode_in_forward: bool) -> tuple[Tensor, ...]:
        leaves = both.leaves()
        with FlopCounterMode(display=False) if mode_in_forward else nullcontext():
            total = loss(function, weights)(*leaves)
        with nullcontext() if mode_in_forward else FlopCounterMode(display=False):
            grads = torch.autograd.grad(total, leaves, create_graph=True)
            return (*grads, *torch.autograd.grad(sum((g * g).sum() for g in grads), leaves))

    _compare(both, lambda function: derivatives(function, mode_in_forward=False))
    _compare(both, lambda function: derivatives(function, mode_in_forward=True))


@every
@pytest.mark.parametrize("kind", ["wrapper", "two tensors"])
def test_double_backward_of_a_subclass(spec: Spec, kind: str, device: torch.device) -> None:
    """The tensors that a subclass contains have the derivatives of plain tensors."""
    both = pair(spec, device, p=0.0)  # with dropout, each of two tensors would draw another mask
    weights = both.cotangents()
    expected = second_order(both.theirs, both.tensors, weights)
    if kind == "wrapper":
        result = second_order(both.ours, wrapped(both.tensors), wrapped(weights))
        assert all(isinstance(t, Wrapper) for t in result)
        close(tuple(t.held for t in result), expected)
        return
    doubled = tuple(TwoTensor(t, 2.0 * t) for t in both.tensors)
    result = second_order(both.ours, doubled, [TwoTensor(w, w) for w in weights])
    close(tuple(t.a for t in result), expected)
    expected_of_doubled = second_order(both.theirs, tuple(2.0 * t for t in both.tensors), weights)
    close(tuple(t.b for t in result), expected_of_doubled)


@every
@pytest.mark.parametrize("tracing", ["real", "symbolic"])
def test_double_backward_traced_by_make_fx(spec: Spec, tracing: str, device: torch.device) -> None:
    """The recorded graph computes first and second derivatives also for other values."""
    both = pair(spec, device, p=0.0)
    weights = both.cotangents()
    count = len(both.tensors)

    def product(function: Function, *values: Tensor) -> tuple[Tensor, ...]:
        return second_order(function, values[:count], list(values[count:]))

    graph = make_fx(lambda *values: product(both.ours, *values), tracing_mode=tracing)(
        *both.tensors, *weights
    )
    others = tuple(0.5 * t + 0.25 for t in (*both.tensors, *weights))
    close(graph(*others), product(both.theirs, *others))


@every
def test_double_backward_of_fake_tensors(spec: Spec, device: torch.device) -> None:
    """Checks shapes, dtypes and devices of second derivatives."""
    both = pair(spec, device)
    weights = both.cotangents()
    expected = second_order(both.theirs, both.tensors, weights)
    with FakeTensorMode() as mode:
        fakes = tuple(map(mode.from_tensor, both.tensors))
        result = second_order(both.ours, fakes, list(map(mode.from_tensor, weights)))
    assert [(t.shape, t.dtype, t.device) for t in result] == [
        (t.shape, t.dtype, t.device) for t in expected
    ]
