"""`fusedops.compile`: what a graph computes stays what it was, or the graph is left to Inductor."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedops
from backends import Backend, PostNorm, randn
from fusedops.backend import entry, programs
from fusedops.backend.fx import leaves, may_save_changed_inputs, namespace
from fusedops.core.calls import registration, words
from support import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]


class _Doubled(torch.autograd.Function):
    """Its gradient is not that of what it computes.

    A part of it is not looked into: it detaches a tensor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda: (x * 2).detach_(), use_reentrant=False)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


class _Moved(torch.autograd.Function):
    """It changes its own tensors, and uses no result of that."""

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


class _Unsqueezed(torch.autograd.Function):
    """It changes the shape of what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        other.unsqueeze_(0)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ChangedAtLast(torch.autograd.Function):
    """Its backward changes what it saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(other)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.saved_tensors[0].mul_(0)
        return grad, None


class _SetAtLast(_ChangedAtLast):
    """The same, by an assignment."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.saved_tensors[0].view(-1)[1:] = 0
        return grad, None


class _ListedAtLast(_ChangedAtLast):
    """The same, of a list of tensors."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        torch._foreach_mul_(ctx.saved_tensors, 0)
        return grad, None


class _PutAtLast(_ChangedAtLast):
    """The same, by a result that is put there."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (other,) = ctx.saved_tensors
        torch.mul(other, 0, out=other)
        return grad, None


class _DividedAtLast(_ChangedAtLast):
    """The same, by an operator of Python."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (other,) = ctx.saved_tensors
        other //= 0.5
        return grad, None


class _NamedAtLast(_ChangedAtLast):
    """The same, of a tensor that is passed by name."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (other,) = ctx.saved_tensors
        torch.relu_(input=other)
        return grad, None


def _unsqueezed(x: Tensor, w: Tensor) -> Tensor:
    y = x.detach() * 2
    return F.layer_norm(_Unsqueezed.apply(x, y) + w, (8,), w) + y.squeeze(0)


def _saved_by_two(x: Tensor, w: Tensor, last: Any = _ChangedAtLast) -> tuple[Tensor, Tensor]:
    """The region that saves it, too, is left."""
    y = x.detach() * 2
    return last.apply(F.layer_norm(F.gelu(y + w), (8,), w), y), F.layer_norm(x * w, (8,), w)


def _saved_by_two_and_set(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return _saved_by_two(x, w, _SetAtLast)


def _written_without_gradients(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Beside something that has gradients."""

    def body(a: Tensor, b: Tensor) -> Tensor:
        b.view(-1)[3:].zero_()
        return a * 1.0

    y = x.detach().clone()
    z = F.layer_norm(F.gelu(y.transpose(0, 1) + w), (8,), w)
    return z + checkpoint(body, x, y, use_reentrant=False).transpose(0, 1), y


def _moved(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The tensors beside x have no gradient, neither before nor after."""
    y = x.detach() * 2
    return F.layer_norm(y, (8,), w) + _Moved.apply(x, y), y + x.detach()


def _own_derivative(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(_Doubled.apply(x), (8,), w)


def _cut(x: Tensor, w: Tensor) -> Tensor:
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


def _same_memory(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = F.layer_norm(x, (8,), w)
    return y, y.view(-1), y, x, x.view(-1)


def _transposed(x: Tensor, w: Tensor) -> Tensor:
    y = F.layer_norm(x.transpose(0, 1), (8,), w)
    return y.transpose(0, 1).reshape(-1, 16)


def _integers(x: Tensor, w: Tensor) -> Tensor:
    return torch.where(
        torch.arange(x.shape[0], device=x.device)[:, None, None] > 1, F.layer_norm(x, (8,), w), w
    )


def _crossed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Two regions, each of which needs a part of the other."""
    one, other = F.layer_norm(x, (8,), w), F.layer_norm(x.sin(), (8,), w)
    return one + (other * 3) @ w.outer(w), other + (one * 2) @ w.outer(w)


def _changed_without_gradients(x: Tensor, w: Tensor) -> Tensor:
    """The change is no part of the derivative; what it changes still has one."""
    y = x * w
    with torch.no_grad():
        y.mul_(2)
    return F.layer_norm(y, (8,), w)


def _changed_without_gradients_again(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The second change is of the first's result, and is no more a part of the derivative."""
    y, z = x * w, x + w
    z.mul_(3)
    with torch.no_grad():
        y.mul_(2).sub_(1)
        z.mul_(2)
    return F.layer_norm(y, (8,), w.detach()), F.layer_norm(z, (8,), w)


def _changed_twice(x: Tensor, w: Tensor) -> Tensor:
    """The second time through a view that is not used later."""
    y = x * 1
    y.add_(w)
    y.view(-1, 8).mul_(2)
    return F.layer_norm(y, (8,), w) + y


def _copied(x: Tensor, w: Tensor) -> Tensor:
    y = x * 2
    y.copy_(x)
    return F.layer_norm(y + w, (8,), w)


def _inverted(x: Tensor, w: Tensor) -> Tensor:
    """PyTorch passes the gradient through this change."""
    y = x * 1
    y.logical_not_()
    return F.layer_norm(y * x, (8,), w)


def _written_into(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor without a gradient has one after a part of it is written."""
    y = x.detach().clone()
    y[:, 0] = w
    return F.layer_norm(y, (8,), w.detach()), x * 2


def _written_into_by_a_body(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The same, by a checkpointed part."""

    def body(y: Tensor, x: Tensor, w: Tensor) -> Tensor:
        y[:, 0].add_(w)
        return x * 2

    y = x.detach().clone()
    z = checkpoint(body, y, x, w, use_reentrant=False)
    return F.layer_norm(y, (8,), w.detach()), z


def _viewed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A view in the middle of a region is returned with what it is of."""
    y = x + w
    rows = y.view(-1, 8)
    return F.layer_norm(rows, (8,), w), y, rows


def _view_of_a_later_one(x: Tensor, w: Tensor) -> Tensor:
    """A region reads a view inside another region, and its operator is made before the other's."""
    y = F.dropout(x + w, 2**-16).transpose(0, 1)  # the least that drops; with these seeds, nothing
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


def _without_gradient(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """One of a region's results."""
    y = x.detach() * 2
    return F.layer_norm(y, (8,), w), y + x.detach()


def _compared(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A comparison has no gradient to hand on."""
    y = F.layer_norm(x, (8,), w)
    return torch.where(y > 0.5, x.detach(), 1.0), y


def _bias_without_gradients(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The product's rows are viewed where gradients are recorded again."""
    with torch.no_grad():
        y = F.linear(x.view(-1, 8), w.outer(w), w)
    return F.layer_norm(y.view(x.shape), (8,), w), x * 2


def _bias_changed(x: Tensor, w: Tensor) -> Tensor:
    """The product's rows are viewed after that."""
    bias = w.detach().clone()
    alias = bias.view(-1)
    y = F.linear(x.view(-1, 8), w.outer(w), bias)
    alias.mul_(3)
    return F.layer_norm(y.view(x.shape), (8,), w) + bias


def _equal_and_changed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Two equal results of a region, the first of which is changed before the second is read."""
    y = x * w
    first, second = [F.layer_norm(y, (8,), w) for _ in range(2)]
    rows = first.view(-1)
    first.add_(1)
    return rows, torch.fmod(second, 2.0)


def _layer_of_one_number(x: Tensor, w: Tensor) -> Tensor:
    """The product is viewed without dimensions."""
    row = F.layer_norm(x, (8,), w).sum((0, 1))
    return F.linear(row[None], w[None], w[:1]).view(())


# PyTorch itself raises the warning.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "function",
    [
        _own_derivative,
        _cut,
        _in_place,
        _same_memory,
        _transposed,
        _integers,
        _crossed,
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
        _without_gradient,
        _compared,
        _bias_without_gradients,
        _bias_changed,
        _moved,
        _unsqueezed,
        _saved_by_two,
        _saved_by_two_and_set,
        partial(_saved_by_two, last=_ListedAtLast),
        partial(_saved_by_two, last=_PutAtLast),
        partial(_saved_by_two, last=_DividedAtLast),
        partial(_saved_by_two, last=_NamedAtLast),
        _equal_and_changed,
        _layer_of_one_number,
        _written_without_gradients,
    ],
)
def test_semantics_of_the_graph(function: Callable[..., Any]) -> None:
    """Derivatives of the user's, parts without gradients, changes in place, outputs that share memory."""
    x, w = randn(4, 6, 8).double().requires_grad_(), randn(8).double().requires_grad_()

    def results(call: Callable[..., Any]) -> list[Tensor]:
        outputs = leaves(call(x, w))
        total = sum([(index + 1) * (t * t.detach().cos()).sum() for index, t in enumerate(outputs)])
        return [*outputs, *torch.autograd.grad(total, (x, w), materialize_grads=True)]

    backend = Backend()
    result, expected = results(torch.compile(function, backend=backend)), results(function)
    assert backend.report.fused and not backend.report.left
    for one, other in zip(result, expected, strict=True):
        # The numbers are in fp64, whose rounding errors are far smaller.
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
        assert one.requires_grad == other.requires_grad
    pointers = [[t.data_ptr() for t in ours[:-2]] for ours in (result, expected)]
    shared = [[a == b for a, b in itertools.combinations(ours, 2)] for ours in pointers]
    assert shared[0] == shared[1]


def _computed_changed(y: Tensor, v: Tensor, w: Tensor) -> Tensor:
    z = y + w
    y[:, 0] = 0
    return F.layer_norm(y + 0, (8,), w) + z


def _computed_saved(y: Tensor, v: Tensor, w: Tensor) -> Tensor:
    y.add_(F.softmax(y + w, -1))
    return F.layer_norm(v + w, (8,), w)


def _computed_seen_by_a_view(y: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y.mul_(2.5)
    return F.layer_norm(v + w, (8,), w), F.softmax(y + w, -1)


def _computed_changed_without_gradients(y: Tensor, v: Tensor, w: Tensor) -> Tensor:
    y.mul_(2.5)
    with torch.no_grad():
        v[:, 0] = 1
    return F.layer_norm(y + w, (8,), w)


def _computed_changed_last(y: Tensor, v: Tensor, w: Tensor) -> Tensor:
    z = y * 2
    rows = z.unsqueeze(1).squeeze(1)
    y.zero_()
    return F.layer_norm(rows, (8,), w) + z


@pytest.mark.parametrize(
    "function",
    [
        _computed_changed,
        _computed_changed_last,
        _computed_saved,
        _computed_seen_by_a_view,
        _computed_changed_without_gradients,
    ],
)
def test_changes_of_inputs_that_were_computed(function: Callable[..., Any]) -> None:
    """Their gradients go on into what they were computed of, past the change."""

    def results(call: Callable[..., Any]) -> list[Tensor]:
        x, w = [t.double().requires_grad_() for t in (start, weight)]
        y = x * 2
        v = y[1:3]
        outputs = [*leaves(call(y, v, w)), y, v]
        total = sum([(index + 1) * (t * t.detach().cos()).sum() for index, t in enumerate(outputs)])
        return [*outputs, *torch.autograd.grad(total, (x, w))]

    start, weight = randn(4, 6, 8), randn(8)
    backend = Backend()
    result, expected = results(torch.compile(function, backend=backend)), results(function)
    if may_save_changed_inputs():
        assert backend.report.left == ["it changes an input that others are differentiated through"]
    else:
        assert backend.report.fused and not backend.report.left
    for one, other in zip(result, expected, strict=True):
        # The numbers are in fp64, whose rounding errors are far smaller.
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


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
def test_regions_have_the_shape_from_after_a_change_in_place(
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
        total = sum([(number + 1) * t.square().sum() for number, t in enumerate(outputs)])
        results.append((*outputs, *torch.autograd.grad(total, (x, w))))
    assert backend.report.fused and not backend.report.left
    for one, other in zip(*results, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


def test_graph_in_which_a_tensor_gets_other_memory_is_left() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x.cumsum(0)
        y.set_(x.cumsum(1)[:2])
        return F.layer_norm(y * w, (8,), w)

    x, w, backend = randn(4, 8), randn(8).requires_grad_(), Backend()
    torch.testing.assert_close(
        torch.compile(function, backend=backend)(x, w), function(x, w), rtol=1e-4, atol=1e-5
    )
    assert backend.report.left == ["set_ changes a tensor's shape in place; compute another tensor"]


def test_program_refuses_shapes_that_it_was_not_made_for() -> None:
    """Kernels would read and write beyond the tensors."""
    x, w, backend = randn(4, 6, 8), randn(8).requires_grad_(), Backend()
    torch.compile(lambda x: F.layer_norm(x * w, (8,), w), backend=backend)(x)
    (region,) = backend.report.fused
    program = region.program
    name, call = (
        f"{program.name}_forward",
        words.encode(program.record, program.dtypes, True),
    )
    forward = getattr(torch.ops.fusedops, name).default
    tensors = [
        x if operand.axes == program.structure.inputs[program.first].axes else w.detach()
        for operand in program.structure.inputs
    ]
    first = program.first
    with torch.no_grad():
        forward(*tensors, None, 0, 8, call)
        for place, shape in ((first, (4, 6, 9)), (first, (4, 6)), (1 - first, (7,))):
            inputs = [
                randn(*shape) if number == place else tensor
                for number, tensor in enumerate(tensors)
            ]
            with pytest.raises((RuntimeError, IndexError), match=r"program is for|out of range"):
                forward(*inputs, None, 0, 8, call)


def _hidden_states_summed(x: Tensor, w: Tensor) -> Tensor:
    """More tensors than an operator of PyTorch takes."""
    states = [x.roll(number, 0) for number in range(66)]
    return F.layer_norm(sum(number * state * w for number, state in enumerate(states)), (8,), w)


def _slices_normalised(x: Tensor, w: Tensor) -> Tensor:
    """As many results as slices, more than there are letters."""
    slices = x.repeat(1, 30, 1).split(6, 1)
    return torch.cat([torch.tanh(F.layer_norm(one, (8,), w)) for one in slices], 1)


@pytest.mark.parametrize("function", [_hidden_states_summed, _slices_normalised])
def test_gradients_through_many_tensors(function: Callable[..., Any]) -> None:
    """Also in the second and third graph, for which programs of the first are known."""
    w, backend = randn(8).requires_grad_(), Backend()
    compiled = torch.compile(function, backend=backend)
    for rows in (2, 3, 4):
        x = randn(rows, 6, 8)
        cotangent = torch.randn_like(function(x, w))
        ours, theirs = [
            torch.autograd.grad(call(x, w), w, cotangent)[0] for call in (compiled, function)
        ]
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert all(
        not region.reason or "use fewer tensors" in region.reason
        for region in backend.report.regions
    )
    assert backend.report.graphs > 1 and not backend.report.left


def test_operators_are_registered_with_their_derivative_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(x * w, (8,), w) * 17 + 23 * w

    def failing(*_: Any) -> None:
        raise RuntimeError("no derivative")

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
            (result,) = torch.autograd.grad(
                torch.compile(function, backend=backend)(x, w).cos().sum(), w
            )
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)
        assert [region.reason for region in backend.report.regions] == [
            "RuntimeError: no derivative" if fails else ""
        ]


def _zero(x: Tensor) -> Tensor:
    return x.mul_(0).sum()


@pytest.mark.parametrize(
    "changed", [_zero, lambda x: checkpoint(_zero, x[1:], use_reentrant=False)]
)
def test_region_whose_saved_input_is_changed_later_is_left(
    changed: Callable[[Tensor], Tensor],
) -> None:
    """Eager PyTorch saves the sum, a region what is added."""

    def function(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        y = F.layer_norm(F.gelu(x + bias), (8,), w)
        changed(x)
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
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_fractions_of_sizes_are_no_sizes() -> None:
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
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("constant", [False, True])
def test_parameters_are_known_to_stay_where_they_are(constant: bool) -> None:
    """CUDA graphs copy every other input, and one on the CPU turns them off.

    A constant on the GPU stays, too.
    """

    class Scaled(PostNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * torch.tensor(2.0, device=x.device) if constant else x)

    name, result = "_try_get_metadata_from_dynamo", list[Any]()
    original = getattr(torch._functorch.aot_autograd, name)

    def seen(*args: Any) -> Any:
        result.append(original(*args))
        return result[-1]

    model = Scaled().to(DEVICE)
    with mock.patch.object(torch._functorch.aot_autograd, name, seen):
        torch.compile(model, backend=Backend())(randn(3, 24))
    held = constant and DEVICE.type == "cuda"
    assert len(result[0][1]) == len(list(model.parameters())) + held


def test_parts_without_gradients_save_nothing() -> None:
    """Under `torch.no_grad`, and of tensors that are detached."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            scale = F.layer_norm(x, (8,), w)
        return (
            F.layer_norm(x, (8,), w) @ scale.mT
            + F.layer_norm(x.detach(), (8,), w.detach()) @ scale.mT
        )

    graphs = []
    with mock.patch.object(
        entry, "fused", lambda gm, fused=entry.fused: (fused(gm), graphs.append(gm))[0]
    ):
        torch.compile(function, backend=Backend())(
            randn(4, 8).requires_grad_(), randn(8).requires_grad_()
        )
    calls = [
        str(node.args[-1]) for node in graphs[0].graph.nodes if namespace(node.target) == "fusedops"
    ]
    assert ["saves" if " saves " in call else "drops" for call in calls] == [
        "drops",
        "saves",
        "drops",
    ]


def test_parameter_changed_in_place_is_read_in_its_turn() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = F.layer_norm(x, (8,), w)
        w.add_(1)
        return first, F.layer_norm(x, (8,), w)

    x, w = randn(4, 8), randn(8)
    one, other = w.clone(), w.clone()
    for result, expected in zip(
        torch.compile(function, backend=Backend())(x, one), function(x, other), strict=True
    ):
        torch.testing.assert_close(result, expected)
    assert torch.equal(one, other)


def test_graph_that_cannot_be_captured_is_left_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @torch.compiler.allow_in_graph
    def unknown(x: Tensor) -> Tensor:
        return x + 1

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(unknown(x), (8,), w)

    casts = []

    def compile_(gm: torch.fx.GraphModule, *_: Any) -> Any:
        casts.append(torch.is_autocast_enabled(DEVICE.type))
        return gm.forward

    monkeypatch.setattr(entry, "compile_by_inductor", compile_)
    x, w = randn(4, 8), randn(8)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        fusedops.compile(lambda x, w: F.layer_norm(x, (8,), w))(x, w)
        with pytest.warns(RuntimeWarning, match="leaves a graph to Inductor: it calls unknown"):
            result = fusedops.compile(function)(x, w)
        torch.testing.assert_close(result, function(x, w))
    assert casts == [False, True]  # what is left has no casts yet
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
    one, other = _shifted_twice(x, w)
    return F.rms_norm(one + x, (8,), w) + other


def _without_reductions(x: Tensor, w: Tensor) -> Tensor:
    return torch.fmod(_scaled(x, w) * 2, 64.0)


def _viewed_result(x: Tensor, w: Tensor) -> Tensor:
    return _opened(x, w).cumsum(0).squeeze(-2)


# Each with the functions in its regions.
@pytest.mark.parametrize(
    ("function", "names"),
    [
        (_in_a_norm, {"_shifted"}),
        (_several_results, {"_shifted_twice"}),
        (_without_reductions, {"_scaled"}),
        (_viewed_result, {"_opened"}),
    ],
)
def test_functions_of_rowwise_are_fused_with_what_is_around(
    function: Callable[..., Any], names: set[str]
) -> None:
    """Their parts without gradients are ones in the graph, too."""
    x, w = randn(4, 6, 8).double().requires_grad_(), randn(8).double().requires_grad_()
    backend, results = Backend(), []
    for call in (function, torch.compile(function, backend=backend, fullgraph=True)):
        y = call(x, w)
        results.append([y, *torch.autograd.grad(y, (x, w), torch.cos(y.detach()))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-14, atol=2.0**-14)
    assert not backend.report.left and not [
        region for region in backend.report.regions if region.reason
    ]
    assert {name for region in backend.report.fused for name in region.functions} == names
    assert f" of {min(names)}  " in str(backend.report)


@fusedops.rowwise
def _own(x: Tensor, w: Tensor) -> Tensor:
    return _Moved.apply(x, w) * w  # type: ignore[no-untyped-call, no-any-return]


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
def test_function_of_rowwise_whose_derivative_would_be_lost(
    function: Callable[..., Any], reason: str
) -> None:
    def normed(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(function(x, w), (8,), w)

    backend = Backend()
    torch.compile(normed, backend=backend)(randn(4, 8).requires_grad_(), randn(8).requires_grad_())
    assert backend.report.left == [reason]


def test_capture_that_fails_within_autocast_leaves_it() -> None:
    """Otherwise what is after the block would be compiled in its dtype."""

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


def test_gradients_that_are_switched_off_until_the_end() -> None:
    """Values from before the mode was set have gradients."""

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


def test_operators_that_the_model_calls_stay_beside_regions() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = fusedops.bias_dropout_add_ln(F.gelu(x + w), w, x, w, w, p=0.0)
        return F.layer_norm(fusedops.swiglu(y, fusedops.layer_norm(y, (8,), w)) * w, (8,), w)

    x, w, backend, results = (
        randn(4, 8).double().requires_grad_(),
        randn(8).double().requires_grad_(),
        Backend(),
        [],
    )
    for call in (function, torch.compile(function, backend=backend, fullgraph=True)):
        y = call(x, w)
        results.append([y, *torch.autograd.grad(y, (x, w), torch.cos(y.detach()))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    assert backend.report.operators == {"bias_dropout_add_ln": 1, "layer_norm": 1, "swiglu": 1}
    assert len(backend.report.fused) == 1 and not backend.report.left
    assert "  called by the model: 1 x swiglu\n" in str(backend.report) + "\n"


def test_regions_in_marked_parts() -> None:
    """All calls of a part, each with checkpointed code of its own in it, are fused as without the mark."""

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
    assert regions[0] == regions[1] and len(regions[0]) >= 6
    y = model(part, x, ws, ms)
    eager = [y, *torch.autograd.grad(y, [x, *ws, *ms], cotangent)]
    for ours, marked, theirs in zip(*results, eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(marked, theirs, rtol=1e-4, atol=1e-5)
