"""`fusedops.compile` keeps the semantics of a graph, or leaves the graph to Inductor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedops
from backends import Backend, PostNorm, randn
from fusedops.backend import entry, programs
from fusedops.backend.fx import leaves, may_save_changed_inputs, namespace
from fusedops.compiler.errors import NotRowwiseError
from fusedops.core.calls import registration, words
from support import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]


class _WrongGradient(torch.autograd.Function):
    """Doubles x, and triples the gradient.

    The backend does not trace its checkpointed part, which detaches a tensor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda: (x * 2).detach_(), use_reentrant=False)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


class _ChangesOwnTensors(torch.autograd.Function):
    """Changes its own tensors in place, and does not use what the operators return."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        y = x.clone()
        y.add_(other)
        return y * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        grad.mul_(2)
        return grad, None


class _UnsqueezesInput(torch.autograd.Function):
    """Changes the shape of its second input in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        other.unsqueeze_(0)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _BackwardChangesSaved(torch.autograd.Function):
    """Changes its saved tensor in place in the backward. Subclasses do so in other ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(other)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.saved_tensors[0].mul_(0)
        return grad, None


class _BackwardAssignsSaved(_BackwardChangesSaved):
    """Changes the saved tensor by an assignment to a slice."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.saved_tensors[0].view(-1)[1:] = 0
        return grad, None


class _BackwardChangesList(_BackwardChangesSaved):
    """Changes the saved tensor by an operator on a list of tensors."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        torch._foreach_mul_(ctx.saved_tensors, 0)
        return grad, None


class _BackwardWritesOut(_BackwardChangesSaved):
    """Changes the saved tensor as the ``out`` of an operator."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (other,) = ctx.saved_tensors
        torch.mul(other, 0, out=other)
        return grad, None


class _BackwardDividesSaved(_BackwardChangesSaved):
    """Changes the saved tensor by an augmented assignment of Python."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (other,) = ctx.saved_tensors
        other //= 0.5
        return grad, None


class _BackwardPassesByName(_BackwardChangesSaved):
    """Changes the saved tensor, which it passes as a keyword argument."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (other,) = ctx.saved_tensors
        torch.relu_(input=other)
        return grad, None


def _unsqueezed(x: Tensor, w: Tensor) -> Tensor:
    y = x.detach() * 2
    return F.layer_norm(_UnsqueezesInput.apply(x, y) + w, (8,), w) + y.squeeze(0)


def _saved_by_two(
    x: Tensor, w: Tensor, changing: Any = _BackwardChangesSaved
) -> tuple[Tensor, Tensor]:
    """Save a tensor for a region and for a function whose backward changes it: the region is left."""
    y = x.detach() * 2
    return changing.apply(F.layer_norm(F.gelu(y + w), (8,), w), y), F.layer_norm(x * w, (8,), w)


def _written_without_gradients(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Write to a tensor without a gradient, in a part that computes another with a gradient."""

    def body(a: Tensor, b: Tensor) -> Tensor:
        b.view(-1)[3:].zero_()
        return a * 1.0

    y = x.detach().clone()
    z = F.layer_norm(F.gelu(y.transpose(0, 1) + w), (8,), w)
    return z + checkpoint(body, x, y, use_reentrant=False).transpose(0, 1), y


def _own_tensors_changed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Call a custom function whose second input has no gradient, before and after the call."""
    y = x.detach() * 2
    return F.layer_norm(y, (8,), w) + _ChangesOwnTensors.apply(x, y), y + x.detach()


def _own_derivative(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(_WrongGradient.apply(x), (8,), w)


def _partly_detached(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        scale = F.layer_norm(x, (8,), w)
    return F.layer_norm(x, (8,), w) * scale + F.layer_norm(x.detach(), (8,), w)


def _in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1
    first = y.view(y.shape)
    y += w
    other = x + 1
    other.mul_(2).sub_(w)
    y = y * F.layer_norm(x, (8,), w)
    return F.layer_norm(first, (8,), w) + F.layer_norm(other, (8,), w) * y


def _outputs_share_memory(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = F.layer_norm(x, (8,), w)
    return y, y.view(-1), y, x, x.view(-1)


def _transposed(x: Tensor, w: Tensor) -> Tensor:
    y = F.layer_norm(x.transpose(0, 1), (8,), w)
    return y.transpose(0, 1).reshape(-1, 16)


def _condition_on_positions(x: Tensor, w: Tensor) -> Tensor:
    positions = torch.arange(x.shape[0], device=x.device)[:, None, None]
    return torch.where(positions > 1, F.layer_norm(x, (8,), w), w)


def _regions_depend_on_each_other(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Compute two regions, each of which needs a part of the other."""
    first, second = F.layer_norm(x, (8,), w), F.layer_norm(x.sin(), (8,), w)
    return first + (second * 3) @ w.outer(w), second + (first * 2) @ w.outer(w)


def _changed_without_gradients(x: Tensor, w: Tensor) -> Tensor:
    """Change a tensor in place without gradients: the tensor still has the gradient from before."""
    y = x * w
    with torch.no_grad():
        y.mul_(2)
    return F.layer_norm(y, (8,), w)


def _changed_without_gradients_again(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Change the result of a change without gradients again, and one with gradients."""
    y, z = x * w, x + w
    z.mul_(3)
    with torch.no_grad():
        y.mul_(2).sub_(1)
        z.mul_(2)
    return F.layer_norm(y, (8,), w.detach()), F.layer_norm(z, (8,), w)


def _changed_twice(x: Tensor, w: Tensor) -> Tensor:
    """Change a tensor twice, the second time through a view that is not used later."""
    y = x * 1
    y.add_(w)
    y.view(-1, 8).mul_(2)
    return F.layer_norm(y, (8,), w) + y


def _copied(x: Tensor, w: Tensor) -> Tensor:
    y = x * 2
    y.copy_(x)
    return F.layer_norm(y + w, (8,), w)


def _inverted(x: Tensor, w: Tensor) -> Tensor:
    """Invert a tensor in place: PyTorch passes the gradient through this change."""
    y = x * 1
    y.logical_not_()
    return F.layer_norm(y * x, (8,), w)


def _written_into(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Write to a part of a tensor without a gradient, which then has one."""
    y = x.detach().clone()
    y[:, 0] = w
    return F.layer_norm(y, (8,), w.detach()), x * 2


def _written_into_by_a_body(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Write to a part of a tensor without a gradient in a checkpointed part."""

    def body(y: Tensor, x: Tensor, w: Tensor) -> Tensor:
        y[:, 0].add_(w)
        return x * 2

    y = x.detach().clone()
    z = checkpoint(body, y, x, w, use_reentrant=False)
    return F.layer_norm(y, (8,), w.detach()), z


def _viewed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Return a view from the middle of a region, and its base."""
    y = x + w
    rows = y.view(-1, 8)
    return F.layer_norm(rows, (8,), w), y, rows


def _view_of_a_later_one(x: Tensor, w: Tensor) -> Tensor:
    """Compute a region that reads a view inside another region and is replaced before it."""
    # The smallest probability that is not rounded to zero. With this seed it drops nothing.
    y = F.dropout(x + w, 2**-16).transpose(0, 1)
    return F.layer_norm(F.linear(y, w.outer(w)) + y, (8,), w)


def _view_changed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        y = x + w
        rows = y.view(-1, 8)
        z = F.layer_norm(rows, (8,), w)
        rows.add_(1)
    return z.view(x.shape) + x * w, y + x


def _cloned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.layer_norm(x, (8,), w) + w
    return y, y.clone()


def _clone_of_changed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.layer_norm(x, (8,), w) + w
    other, rows = y.clone(), y.view(-1)
    y.mul_(2)
    return other, rows


def _result_without_gradient(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a region with a result that has no gradient."""
    y = x.detach() * 2
    return F.layer_norm(y, (8,), w), y + x.detach()


def _compared(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Compare the result of a norm: the comparison has no gradient."""
    y = F.layer_norm(x, (8,), w)
    return torch.where(y > 0.5, x.detach(), 1.0), y


def _bias_without_gradients(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Add a bias without gradients, and view the sum where gradients are recorded again."""
    with torch.no_grad():
        y = F.linear(x.view(-1, 8), w.outer(w), w)
    return F.layer_norm(y.view(x.shape), (8,), w), x * 2


def _bias_changed(x: Tensor, w: Tensor) -> Tensor:
    """Change the bias of a product in place before the product's rows are viewed."""
    bias = w.detach().clone()
    alias = bias.view(-1)
    y = F.linear(x.view(-1, 8), w.outer(w), bias)
    alias.mul_(3)
    return F.layer_norm(y.view(x.shape), (8,), w) + bias


def _equal_and_changed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Change the first of two equal results of a region before the second is read."""
    y = x * w
    first, second = [F.layer_norm(y, (8,), w) for _ in range(2)]
    rows = first.view(-1)
    first.add_(1)
    return rows, torch.fmod(second, 2.0)


def _layer_of_one_number(x: Tensor, w: Tensor) -> Tensor:
    """View a product of one element without dimensions."""
    row = F.layer_norm(x, (8,), w).sum((0, 1))
    return F.linear(row[None], w[None], w[:1]).view(())


def _scaled_by_numpy(x: Tensor, w: Tensor) -> Tensor:
    """NumPy's functions and operators on numbers, as in DINOv3's rotary embeddings."""
    factor = -np.log(3.0) / 2
    return F.layer_norm(x * factor, (8,), w)


def _mapped(x: Tensor, w: Tensor) -> Tensor:
    """A function of each slice, within another, as in masks of Transformers."""

    def scaled(row: Tensor, scale: Tensor) -> Tensor:
        return row * scale + row.sum()

    rows = torch.vmap(torch.vmap(scaled, in_dims=(0, None)), in_dims=(1, None), out_dims=1)(x, w)
    return F.layer_norm(rows, (8,), w)


# PyTorch itself raises the warning.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "function",
    [
        _mapped,
        _own_derivative,
        _scaled_by_numpy,
        _partly_detached,
        _in_place,
        _outputs_share_memory,
        _transposed,
        _condition_on_positions,
        _regions_depend_on_each_other,
        _changed_without_gradients,
        _changed_without_gradients_again,
        _changed_twice,
        _copied,
        _inverted,
        _written_into,
        _written_into_by_a_body,
        _viewed,
        _view_of_a_later_one,
        _view_changed,
        _cloned,
        _clone_of_changed,
        _result_without_gradient,
        _compared,
        _bias_without_gradients,
        _bias_changed,
        _own_tensors_changed,
        _unsqueezed,
        _saved_by_two,
        partial(_saved_by_two, changing=_BackwardAssignsSaved),
        partial(_saved_by_two, changing=_BackwardChangesList),
        partial(_saved_by_two, changing=_BackwardWritesOut),
        partial(_saved_by_two, changing=_BackwardDividesSaved),
        partial(_saved_by_two, changing=_BackwardPassesByName),
        _equal_and_changed,
        _layer_of_one_number,
        _written_without_gradients,
    ],
)
@pytest.mark.usefixtures("every_region")
def test_semantics_of_the_graph(function: Callable[..., Any]) -> None:
    """Values, gradients and shared memory of outputs are those of eager mode.

    The functions have custom derivatives, parts without gradients, and changes in place.
    """
    x, w = randn(4, 6, 8).double().requires_grad_(), randn(8).double().requires_grad_()

    def outputs_and_gradients(call: Callable[..., Any]) -> tuple[list[Tensor], list[Tensor]]:
        outputs = leaves(call(x, w))
        gradients = torch.autograd.grad(_loss(outputs), (x, w), materialize_grads=True)
        return outputs, list(gradients)

    def shared_memory(outputs: list[Tensor]) -> list[bool]:
        pairs = itertools.combinations([t.data_ptr() for t in outputs], 2)
        return [first == second for first, second in pairs]

    backend = Backend()
    our_outputs, our_gradients = outputs_and_gradients(torch.compile(function, backend=backend))
    eager_outputs, eager_gradients = outputs_and_gradients(function)
    assert backend.report.fused
    assert not backend.report.left
    for ours, eager in zip(
        our_outputs + our_gradients, eager_outputs + eager_gradients, strict=True
    ):
        # Rounding errors of fp64 are far smaller than this tolerance.
        torch.testing.assert_close(ours, eager, rtol=1e-9, atol=1e-9)
        assert ours.requires_grad == eager.requires_grad
    assert shared_memory(our_outputs) == shared_memory(eager_outputs)


def _loss(outputs: Sequence[Tensor]) -> Any:
    """Return a sum in which each output has another weight, and each element another gradient."""
    return sum(weight * (t * t.detach().cos()).sum() for weight, t in enumerate(outputs, 1))


# Functions that change their input y. The input v is a view of y.
def _input_changed(y: Tensor, v: Tensor, w: Tensor) -> Tensor:
    z = y + w
    y[:, 0] = 0
    return F.layer_norm(y + 0, (8,), w) + z


def _input_saved_and_changed(y: Tensor, v: Tensor, w: Tensor) -> Tensor:
    y.add_(F.softmax(y + w, -1))
    return F.layer_norm(v + w, (8,), w)


def _input_changed_and_view_read(y: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y.mul_(2.5)
    return F.layer_norm(v + w, (8,), w), F.softmax(y + w, -1)


def _view_changed_without_gradients(y: Tensor, v: Tensor, w: Tensor) -> Tensor:
    y.mul_(2.5)
    with torch.no_grad():
        v[:, 0] = 1
    return F.layer_norm(y + w, (8,), w)


def _input_changed_last(y: Tensor, v: Tensor, w: Tensor) -> Tensor:
    z = y * 2
    rows = z.unsqueeze(1).squeeze(1)
    y.zero_()
    return F.layer_norm(rows, (8,), w) + z


@pytest.mark.parametrize(
    "function",
    [
        _input_changed,
        _input_changed_last,
        _input_saved_and_changed,
        _input_changed_and_view_read,
        _view_changed_without_gradients,
    ],
)
def test_gradients_of_changed_inputs_that_are_not_leaves(function: Callable[..., Any]) -> None:
    """Gradients pass through the change to the tensors from which the input was computed."""

    def results(call: Callable[..., Any]) -> list[Tensor]:
        x, w = [t.double().requires_grad_() for t in (start, weight)]
        y = x * 2
        v = y[1:3]
        outputs = [*leaves(call(y, v, w)), y, v]
        return [*outputs, *torch.autograd.grad(_loss(outputs), (x, w))]

    start, weight = randn(4, 6, 8), randn(8)
    backend = Backend()
    result, expected = results(torch.compile(function, backend=backend)), results(function)
    if may_save_changed_inputs():
        assert backend.report.left == ["it changes an input that others are differentiated through"]
    else:
        assert backend.report.fused
        assert not backend.report.left
    for ours, eager in zip(result, expected, strict=True):
        # Rounding errors of fp64 are far smaller than this tolerance.
        torch.testing.assert_close(ours, eager, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y.unsqueeze_(0),
        lambda y: y[:, :1].squeeze_(1),
        lambda y: y.squeeze_(),
        lambda y: y.transpose_(0, 1),
        lambda y: y.swapaxes_(0, 1),
        lambda y: y[0].t_().t_(),
        lambda y: y.as_strided_((2, 8), (8, 1)),
        lambda y: y.mul_(2).unsqueeze_(1).mul_(2),
    ],
)
def test_regions_use_the_shape_after_an_in_place_change(
    change: Callable[[Tensor], Tensor],
) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x.cumsum(0)
        before = y[0] * 2
        changed = change(y)
        return F.layer_norm(changed * w, (8,), w), before, F.layer_norm(y.sin() * w, (8,), w) + 1

    x, w = randn(4, 6, 8).requires_grad_(), randn(8).requires_grad_()
    backend, results = Backend(), []
    for call in (function, torch.compile(function, backend=backend)):
        outputs = call(x, w)
        total = sum(weight * t.square().sum() for weight, t in enumerate(outputs, 1))
        results.append((*outputs, *torch.autograd.grad(total, (x, w))))
    assert backend.report.fused
    assert not backend.report.left
    for eager, ours in zip(*results, strict=True):
        assert ours.stride() == eager.stride()
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-3)


def test_graph_with_set_in_place_is_left() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x.cumsum(0)
        y.set_(x.cumsum(1)[:2])
        return F.layer_norm(y * w, (8,), w)

    x, w, backend = randn(4, 8), randn(8).requires_grad_(), Backend()
    torch.testing.assert_close(
        torch.compile(function, backend=backend)(x, w), function(x, w), rtol=1e-4, atol=1e-5
    )
    assert backend.report.left == ["set_ changes a tensor's shape in place; compute another tensor"]


def test_program_refuses_shapes_for_which_it_was_not_compiled() -> None:
    """Its kernels would read and write beyond the tensors."""
    x, w, backend = randn(4, 6, 8), randn(8).requires_grad_(), Backend()
    torch.compile(lambda x: F.layer_norm(x * w, (8,), w), backend=backend)(x)
    (region,) = backend.report.fused
    program = region.program
    call_words = words.encode(program.record, program.dtypes, saves=True)
    operator = getattr(torch.ops.fusedops, f"{program.name}_forward").default

    def forward(tensors: Sequence[Tensor]) -> None:
        seed, offset, cols = None, 0, 8
        operator(*tensors, seed, offset, cols, call_words)

    rows_index = program.first  # of the input with all rows; the other is the weight
    weight_index = 1 - rows_index
    tensors = [w.detach(), w.detach()]
    tensors[rows_index] = x
    with torch.no_grad():
        forward(tensors)
        for index, shape in (
            (rows_index, (4, 6, 9)),
            (rows_index, (4, 6)),
            (weight_index, (7,)),
        ):
            wrong = list(tensors)
            wrong[index] = randn(*shape)
            with pytest.raises((RuntimeError, IndexError), match=r"program is for|out of range"):
                forward(wrong)


def _hidden_states_summed(x: Tensor, w: Tensor) -> Tensor:
    """Normalise the sum of 66 tensors: a registered operator takes at most 64 arguments."""
    states = [x.roll(number, 0) for number in range(66)]
    return F.layer_norm(sum(number * state * w for number, state in enumerate(states)), (8,), w)


def _slices_normalised(x: Tensor, w: Tensor) -> Tensor:
    """Normalise 30 slices, each a result of its own: more than the alphabet has letters."""
    slices = x.repeat(1, 30, 1).split(6, 1)
    return torch.cat([torch.tanh(F.layer_norm(part, (8,), w)) for part in slices], 1)


@pytest.mark.parametrize("function", [_hidden_states_summed, _slices_normalised])
@pytest.mark.usefixtures("every_region")
def test_gradients_through_many_tensors(function: Callable[..., Any]) -> None:
    """They are right in each graph, also in later graphs, which reuse programs of the first."""
    w, backend = randn(8).requires_grad_(), Backend()
    compiled = torch.compile(function, backend=backend)
    for rows in (2, 3, 4):
        x = randn(rows, 6, 8)
        cotangent = torch.randn_like(function(x, w))
        ours, theirs = [
            torch.autograd.grad(call(x, w), w, cotangent)[0] for call in (compiled, function)
        ]
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    reasons = [region.reason for region in backend.report.regions if region.reason]
    assert all("use fewer tensors" in reason for reason in reasons)
    assert backend.report.graphs > 1
    assert not backend.report.left


def test_operator_whose_derivative_cannot_be_registered_is_not_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(x * w, (8,), w) * 17 + 23 * w

    def failing(*_: Any) -> None:
        raise NotRowwiseError("no derivative")

    x, w = randn(4, 8), randn(8).requires_grad_()
    (expected,) = torch.autograd.grad(function(x, w).cos().sum(), w)
    for fails in (True, True, False):
        torch.compiler.reset()
        backend = Backend()
        with monkeypatch.context() as patched:
            if fails:
                patched.setattr(registration, "_differentiate", failing)
            else:
                patched.setattr(programs, "_known", {})
            loss = torch.compile(function, backend=backend)(x, w).cos().sum()
            (result,) = torch.autograd.grad(loss, w)
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)
        assert [region.reason for region in backend.report.regions] == [
            "no derivative" if fails else ""
        ]


def _zero(x: Tensor) -> Tensor:
    return x.mul_(0).sum()


@pytest.mark.parametrize("change", [_zero, lambda x: checkpoint(_zero, x[1:], use_reentrant=False)])
def test_region_whose_saved_input_is_changed_later_is_left(
    change: Callable[[Tensor], Tensor],
) -> None:
    """Eager PyTorch saves the sum ``x + bias``; the region would save x."""

    def function(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        y = F.layer_norm(F.gelu(x + bias), (8,), w)
        change(x)
        return y

    x, w, bias = randn(4, 8), randn(8).requires_grad_(), randn(8).requires_grad_()
    backend, results = Backend(), []
    for call in (function, torch.compile(function, backend=backend)):
        inputs = x.clone()
        y = call(inputs, w, bias)
        results.append((y, inputs, *torch.autograd.grad(y, (w, bias), torch.ones_like(y))))
    assert [region.reason for region in backend.report.regions] == [
        "a tensor that it saves is changed later"
    ]
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


def test_factor_of_a_fraction_of_a_size_does_not_add_graphs() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(x, (8,), w) * (1.0 / x.shape[0])

    w, backend = randn(8).requires_grad_(), Backend()
    compiled = torch.compile(function, backend=backend)
    for rows in (4, 6):
        x = randn(rows, 8)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x, w), function(x, w), rtol=1e-4, atol=1e-5)
    assert backend.report.graphs == 1


def _detached(x: Tensor, w: Tensor) -> Tensor:
    y = x * w
    y.detach_()
    return F.layer_norm(y + w, (8,), w) + x


def test_graph_whose_derivative_would_be_lost_is_left() -> None:
    x, w = randn(1, 4, 8).double().requires_grad_(), randn(8).double().requires_grad_()
    backend, results = Backend(), []
    for call in (_detached, torch.compile(_detached, backend=backend)):
        y = call(x, w)
        results.append([y, *torch.autograd.grad(y, (x, w), torch.ones_like(y))])
    assert len(backend.report.left) == 1
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("has_constant", [False, True])
def test_parameters_are_marked_as_static_inputs(has_constant: bool) -> None:
    """CUDA graphs copy inputs that are not static, and an input on the CPU turns them off.

    A constant on the GPU is static, too.
    """

    class Scaled(PostNorm):
        def forward(self, x: Tensor) -> Tensor:
            if has_constant:
                x = x * torch.tensor(2.0, device=x.device)
            return super().forward(x)

    name = "_try_get_metadata_from_dynamo"
    original = getattr(torch._functorch.aot_autograd, name)
    static_inputs: list[Any] = []

    def recording(*args: Any) -> Any:
        metadata = original(*args)
        static_inputs.append(metadata[1])
        return metadata

    model = Scaled().to(DEVICE)
    with mock.patch.object(torch._functorch.aot_autograd, name, recording):
        torch.compile(model, backend=Backend())(randn(3, 24))
    static_constants = has_constant and DEVICE.type == "cuda"
    assert len(static_inputs[0]) == len(list(model.parameters())) + static_constants


@pytest.mark.usefixtures("every_region")
def test_parts_without_gradients_save_nothing() -> None:
    """These are parts under `torch.no_grad`, and parts of detached tensors."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            scale = F.layer_norm(x, (8,), w)
        return (
            F.layer_norm(x, (8,), w) @ scale.mT
            + F.layer_norm(x.detach(), (8,), w.detach()) @ scale.mT
        )

    graphs = []
    fuse = entry.fused

    def recording(gm: torch.fx.GraphModule, *args: Any) -> None:
        fuse(gm, *args)
        graphs.append(gm)

    with mock.patch.object(entry, "fused", recording):
        torch.compile(function, backend=Backend())(
            randn(4, 8).requires_grad_(), randn(8).requires_grad_()
        )
    calls = [node for node in graphs[0].graph.nodes if namespace(node.target) == "fusedops"]
    saves = [" saves " in str(node.args[-1]) for node in calls]  # the last argument is the words
    assert saves == [False, True, False]


def test_parameter_is_read_before_and_after_its_in_place_change() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = F.layer_norm(x, (8,), w)
        w.add_(1)
        return first, F.layer_norm(x, (8,), w)

    x, w = randn(4, 8), randn(8)
    our_w, eager_w = w.clone(), w.clone()
    result = torch.compile(function, backend=Backend())(x, our_w)
    for ours, eager in zip(result, function(x, eager_w), strict=True):
        torch.testing.assert_close(ours, eager)
    assert torch.equal(our_w, eager_w)


def test_graph_that_cannot_be_captured_is_left_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @torch.compiler.allow_in_graph
    def unknown(x: Tensor) -> Tensor:
        return x + 1

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(unknown(x), (8,), w)

    autocast_states: list[bool] = []  # while Inductor compiles a graph

    def compile_(gm: torch.fx.GraphModule, *_: Any) -> Any:
        autocast_states.append(torch.is_autocast_enabled(DEVICE.type))
        return gm.forward

    monkeypatch.setattr(entry, "compile_by_inductor", compile_)
    x, w = randn(4, 8), randn(8)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        fusedops.compile(lambda x, w: F.layer_norm(x, (8,), w))(x, w)
        with pytest.warns(RuntimeWarning, match="leaves a graph to Inductor: it calls unknown"):
            result = fusedops.compile(function)(x, w)
        torch.testing.assert_close(result, function(x, w))
    # A captured graph contains its casts. The graph that is left needs autocast.
    assert autocast_states == [False, True]
    assert "a graph is left to Inductor: it calls unknown" in str(fusedops.explain(function, x, w))


@fusedops.rowwise
def _shifted(x: Tensor, w: Tensor, *, by: float = 1.0) -> Tensor:
    with torch.no_grad():
        mean = (x * w).mean(-1, keepdim=True)
    return F.silu(x - mean) * w + by


@fusedops.rowwise
def _shifted_twice(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return _shifted(x, w, by=2.0), F.dropout(_shifted(x, w), 2**-16) * w


@fusedops.rowwise
def _scaled(x: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(x) * w


@fusedops.rowwise
def _opened(x: Tensor, w: Tensor) -> Tensor:
    return (torch.sigmoid(x) * w).unsqueeze(-2)


def _in_a_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(_shifted(x, w, by=0.5) * 2, (8,), w)


def _several_results(x: Tensor, w: Tensor) -> Tensor:
    first, second = _shifted_twice(x, w)
    return F.rms_norm(first + x, (8,), w) + second


def _without_reductions(x: Tensor, w: Tensor) -> Tensor:
    return torch.fmod(_scaled(x, w) * 2, 64.0)


def _viewed_result(x: Tensor, w: Tensor) -> Tensor:
    return _opened(x, w).cumsum(0).squeeze(-2)


# Each function with the functions of `rowwise` in its regions.
@pytest.mark.parametrize(
    ("function", "names"),
    [
        (_in_a_norm, {"_shifted"}),
        (_several_results, {"_shifted_twice"}),
        (_without_reductions, {"_scaled"}),
        (_viewed_result, {"_opened"}),
    ],
)
def test_rowwise_functions_are_fused_with_the_code_around_them(
    function: Callable[..., Any], names: set[str]
) -> None:
    """Parts without gradients within a function have none in the graph either."""
    x, w = randn(4, 6, 8).double().requires_grad_(), randn(8).double().requires_grad_()
    backend, results = Backend(), []
    for call in (function, torch.compile(function, backend=backend, fullgraph=True)):
        y = call(x, w)
        results.append([y, *torch.autograd.grad(y, (x, w), torch.cos(y.detach()))])
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=2.0**-14, atol=2.0**-14)
    assert not backend.report.left
    assert not [region.reason for region in backend.report.regions if region.reason]
    assert {name for region in backend.report.fused for name in region.functions} == names
    assert f" of {min(names)}  " in str(backend.report)


@fusedops.rowwise
def _own(x: Tensor, w: Tensor) -> Tensor:
    return _ChangesOwnTensors.apply(x, w) * w  # type: ignore[no-untyped-call, no-any-return]


@fusedops.rowwise
def _hooked(x: Tensor, w: Tensor) -> Tensor:
    y = x * w
    y.register_hook(lambda grad: grad * 3)
    return y + w


@pytest.mark.filterwarnings("ignore:fusedops.rowwise does not fuse:RuntimeWarning")
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_own, "it calls _own, which calls a custom autograd function"),
        (_hooked, "it calls register_hook"),
    ],
)
def test_graph_with_a_rowwise_function_whose_derivative_would_be_lost_is_left(
    function: Callable[..., Any], reason: str
) -> None:
    def normed(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(function(x, w), (8,), w)

    backend = Backend()
    torch.compile(normed, backend=backend)(randn(4, 8).requires_grad_(), randn(8).requires_grad_())
    assert backend.report.left == [reason]


def test_capture_that_fails_within_autocast_restores_autocast() -> None:
    """Otherwise the code after the block would be compiled under autocast."""

    @fusedops.rowwise
    def detached(x: Tensor, w: Tensor) -> Tensor:
        return (x * w).detach_() + 1

    def function(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            y = detached(x, w)
        return F.linear(y, w.outer(w))

    x, w, backend = randn(4, 8), randn(8), Backend()
    torch.testing.assert_close(torch.compile(function, backend=backend)(x, w), function(x, w))
    assert backend.report.left == ["it calls detach_"]


def test_values_from_before_gradients_are_disabled_have_gradients() -> None:
    """The function disables gradients and does not enable them again."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = F.layer_norm(x * w, (8,), w)
        torch.set_grad_enabled(False)
        return y, torch.fmod(y * 2, 3.0)

    x, w, backend = randn(4, 8).requires_grad_(), randn(8).requires_grad_(), Backend()
    for call in (function, torch.compile(function, backend=backend)):
        with torch.set_grad_enabled(True):
            results = call(x, w)
            assert not torch.is_grad_enabled()
        assert [y.requires_grad for y in results] == [True, False]
    assert len(backend.report.fused) == 1


def test_operators_that_the_model_calls_are_not_in_regions() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = fusedops.bias_dropout_add_ln(F.gelu(x + w), w, x, w, w, p=0.0)
        return F.layer_norm(fusedops.swiglu(y, fusedops.layer_norm(y, (8,), w)) * w, (8,), w)

    x, w = randn(4, 8).double().requires_grad_(), randn(8).double().requires_grad_()
    backend, results = Backend(), []
    for call in (function, torch.compile(function, backend=backend, fullgraph=True)):
        y = call(x, w)
        results.append([y, *torch.autograd.grad(y, (x, w), torch.cos(y.detach()))])
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager)
    assert backend.report.operators == {"bias_dropout_add_ln": 1, "layer_norm": 1, "swiglu": 1}
    assert len(backend.report.fused) == 1
    assert not backend.report.left
    assert "  called by the model: 1 x swiglu\n" in str(backend.report) + "\n"


def test_nested_compile_regions_are_fused_like_unmarked_code() -> None:
    """All calls of a part are fused, and so is the checkpointed code in each."""

    def checkpointed(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(F.layer_norm(x * 2, (8,), w))

    def part(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
        h = F.layer_norm(F.silu(x) + 1, (8,), w) @ m
        return x + checkpoint(checkpointed, h, w, use_reentrant=False)  # type: ignore[no-any-return]

    def model(step: Callable[..., Tensor], x: Tensor, ws: list[Tensor], ms: list[Tensor]) -> Tensor:
        for w, m in zip(ws, ms, strict=True):
            x = step(x, w, m)
        return x

    x = randn(3, 5, 8).requires_grad_()
    ws = [randn(8).requires_grad_() for _ in range(3)]
    ms = [(randn(8, 8) / 8**0.5).requires_grad_() for _ in range(3)]
    cotangent, regions, results = randn(3, 5, 8), [], []
    for step in (part, torch.compiler.nested_compile_region(part)):
        torch._dynamo.reset()
        backend = Backend()
        y = torch.compile(model, backend=backend)(step, x, ws, ms)
        results.append([y, *torch.autograd.grad(y, [x, *ws, *ms], cotangent)])
        regions.append(sorted(region.operators for region in backend.report.fused))
        assert not backend.report.left
    unmarked_regions, marked_regions = regions
    assert unmarked_regions == marked_regions
    assert len(marked_regions) >= 6
    y = model(part, x, ws, ms)
    eager_results = [y, *torch.autograd.grad(y, [x, *ws, *ms], cotangent)]
    for unmarked, marked, eager in zip(*results, eager_results, strict=True):
        torch.testing.assert_close(unmarked, eager, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(marked, eager, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_around_a_compiled_block_does_not_count_the_capture() -> None:
    """The hooks of `checkpoint` count the tensors that the first forward saves."""
    block, x = PostNorm().to(DEVICE), randn(2, 3, 24).requires_grad_()
    backend = Backend()
    output = checkpoint(torch.compile(block, backend=backend), x, use_reentrant=False)
    expected = torch.autograd.grad(block(x).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), x), expected)
    assert not backend.report.left
