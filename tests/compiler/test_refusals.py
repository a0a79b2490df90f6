"""Functions that `fusedops.rowwise` refuses, by an error or one warning with operator and line."""

from __future__ import annotations

import importlib
import inspect
import linecache
import re
import time
import warnings
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops.core.launches import launch
from rowwise_functions import Sign
from support import DEVICE

kernels = pytest.mark.kernels


def randn(*shape: int) -> Tensor:
    return torch.randn(shape).to(DEVICE)


# --- operators ------------------------------------------------------------------------------------
# In each function, the comment `here` marks the line that the message must name.


def cumulated(x: Tensor) -> Tensor:
    y = x * 2
    return y.cumsum(-1)  # here


def sorted_(x: Tensor) -> Tensor:
    return x.sort(-1).values  # here


def batch_norm(x: Tensor) -> Tensor:
    y = x + 1
    return F.batch_norm(y, None, None, training=True)  # here


def matrix_product(x: Tensor) -> Tensor:
    return x @ x.mT  # here


def linear(x: Tensor) -> Tensor:
    weight = torch.ones(8, 24, device=x.device)
    return F.linear(x, weight)  # here


def item(x: Tensor) -> Tensor:
    return x * x.sum().item()  # here


def branch(x: Tensor) -> Tensor:
    if x.sum() > 0:  # here
        return x * 2
    return x


def number(x: Tensor) -> Tensor:
    return x * float(x[0, 0])  # here


def random(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)  # here


def noise(x: Tensor) -> Tensor:
    return x + torch.randn(24, device=x.device)  # here


def in_place(x: Tensor) -> Tensor:
    x.mul_(2.0)  # here
    return x


def in_place_view(x: Tensor) -> Tensor:
    y = x.view(-1)
    y.add_(1.0)  # here
    return x * 2


def assigned(x: Tensor) -> Tensor:
    x[..., :12] = 0.0  # here
    return x * 2


def sum_over_rows(x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True)  # here


def softmax_over_rows(x: Tensor) -> Tensor:
    return torch.softmax(x, 0)  # here


def sum_of_all(x: Tensor) -> Tensor:
    return x / x.sum()  # here


def rows_joined(x: Tensor) -> Tensor:
    return torch.cat((x, x), 0)  # here


def mean_loss(x: Tensor) -> Tensor:
    target = torch.zeros_like(x[..., 0], dtype=torch.int64)
    return F.cross_entropy(x, target)  # here


def response_norm(x: Tensor) -> Tensor:
    """GRN of ConvNeXt V2: the norm over space, then its mean over channels."""
    norm = x.norm(dim=0, keepdim=True)  # here
    return x * norm / (norm.mean(-1, keepdim=True) + 1e-6)


def flipped(x: Tensor) -> Tensor:
    return x.flip(-1) + x  # here


def rolled(x: Tensor) -> Tensor:
    return x[:, None].expand(-1, 24, -1).roll(1, 1) * 2  # here


def rolled_in_two_dimensions(x: Tensor) -> Tensor:
    return x.roll((1, 1), (-1, 0)) * 2  # here


def neighbours(x: Tensor) -> Tensor:
    return x[..., 1:] - x[..., :-1]  # here


def embedded(x: Tensor) -> Tensor:
    table = torch.ones(9, 24, device=x.device)
    return x + F.embedding(torch.zeros(5, dtype=torch.int64, device=x.device), table)  # here


def without_a_kernel(x: Tensor) -> Tensor:
    return torch.lgamma(x)  # here


def complex_numbers(x: Tensor) -> Tensor:
    return torch.fft.fft(x).real  # here


class Reversed(torch.autograd.Function):
    """Reverses the gradient. Its forward is the identity, so a trace contains only a view."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def straight_through(x: Tensor) -> Tensor:
    y = x * 2
    return Sign.apply(y) * 3  # here


def reversed_gradient(x: Tensor) -> Tensor:
    return Reversed.apply(x) * 3  # here


def checkpointed(x: Tensor) -> Tensor:
    return checkpoint(torch.exp, x, use_reentrant=True)  # here


def validated(x: Tensor) -> Tensor:
    return Normal(x, 1.0, validate_args=True).log_prob(x * 2)  # here


def classes_of_the_largest(x: Tensor) -> Tensor:
    return F.one_hot((x[:, 0] > 0).long())  # here


def gathered_mask(x: Tensor) -> Tensor:
    index = (x[:, :1] > 0).long()
    return x * (x > 0).gather(-1, index)  # here


norm_with_statistics = nn.InstanceNorm1d(24, track_running_stats=True).to(DEVICE)


def instance_norm(x: Tensor) -> Tensor:
    return norm_with_statistics(x.unsqueeze(-1).expand(-1, -1, 3))  # here


def sink(x: Tensor) -> Tensor:
    return torch.cat((x, x.mean(-1, keepdim=True)), -1).softmax(-1)[..., :-1]  # here


def channels_first(x: Tensor) -> Tensor:
    x = x[..., None] * torch.arange(1, 9, device=x.device)
    return x / x.norm(dim=1, keepdim=True)  # here


def padded_rows(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, 0))  # here


def copied_into_a_part(x: Tensor) -> Tensor:
    y = x * 2
    y[..., :12] = x[..., 12:]  # here
    return y


def negative_log_likelihood(x: Tensor) -> Tensor:
    return F.gaussian_nll_loss(x, x * 2, x.square(), reduction="none")  # here


def weighted_classes(x: Tensor) -> Tensor:
    target = torch.zeros_like(x[..., 0], dtype=torch.int64)
    return F.cross_entropy(x, target, torch.ones(24, device=x.device), reduction="none")  # here


def on_another_device(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape, device="meta")  # here


def moved(x: Tensor) -> Tensor:
    return (x + 1).to("meta")  # here


# Refused functions with a pattern of the message.
REFUSED: dict[Callable[..., Any], str] = {
    sink: "a term of its sum",
    channels_first: "Move the dimension to the end outside, or take the dimension apart with unbind",
    padded_rows: "pad the last dimension alone",
    copied_into_a_part: "torch.cat",
    negative_log_likelihood: "write 0.5",
    weighted_classes: "multiply by weight",
    classes_of_the_largest: "num_classes",
    gathered_mask: "convert it to floats",
    instance_norm: "track_running_stats=False",
    validated: "validate_args=False",
    straight_through: "Sign is a torch.autograd.Function",
    reversed_gradient: "Reversed is a torch.autograd.Function",
    cumulated: "cumsum|each column depends on those before it",
    sorted_: "sort",
    batch_norm: "BatchNorm mixes rows",
    matrix_product: "matrix product|matmul|mm",
    linear: "linear|matrix product",
    item: "value in Python",
    branch: "value in Python",
    number: "value in Python",
    random: "random numbers.*; draw them outside, and pass them as an argument",
    noise: "random numbers",
    in_place: "mul_",
    in_place_view: "add_",
    assigned: "torch.cat|changes",
    sum_over_rows: "mixes rows",
    softmax_over_rows: "mixes rows",
    sum_of_all: "mixes rows",
    rows_joined: "rows",
    mean_loss: "mixes rows",
    response_norm: "rows|as a whole",
    flipped: "moves columns",
    rolled: "it moves rows; do so before the call",
    rolled_in_two_dimensions: "it moves rows; do so before the call",
    neighbours: "equal parts.*arguments of their own",
    embedded: "index before the call",
    without_a_kernel: "without a kernel",
    complex_numbers: "fft",
    on_another_device: "a result is on meta, and the arguments are on .*; move it outside",
    moved: "a result is on meta",
}
every = pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)


def _line(function: Callable[..., Any]) -> int:
    """The number of the line with the comment `here`."""
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if line.rstrip().endswith("# here"))


@kernels
@every
def test_refusal_names_operator_and_line(function: Callable[..., Any]) -> None:
    start = time.process_time()
    with pytest.raises(fusedops.NotRowwiseError, match=REFUSED[function]) as caught:
        fusedops.rowwise(function, strict=True)(randn(5, 24))
    assert time.process_time() - start < 0.5
    message = str(caught.value)
    assert message.startswith(f"{function.__name__}: ")
    assert re.search(rf"line {_line(function)} of .*test_refusals", message), message
    assert "# here" in message


@kernels
@every
def test_refused_function_runs_in_eager_pytorch(function: Callable[..., Any]) -> None:
    """Two calls give one warning."""
    fused, x = fusedops.rowwise(function), randn(5, 24)
    expected = function(x.clone())
    with warnings.catch_warnings(record=True) as caught, launch.record() as launched:
        warnings.simplefilter("always")
        torch.manual_seed(1)
        first = fused(x.clone())
        torch.manual_seed(1)
        second = fused(x.clone())
    (warning,) = [w for w in caught if issubclass(w.category, RuntimeWarning)]
    assert re.search(REFUSED[function], str(warning.message))
    assert warning.filename == __file__
    assert launched == []
    if expected.is_meta:
        assert first.is_meta
        assert second.is_meta
        return
    assert torch.equal(first, second)
    if function not in (random, noise):
        assert torch.equal(first, expected)


class Cumulated(nn.Module):
    """A module with a method that is refused."""

    @fusedops.rowwise
    def cumulated(self, x: Tensor) -> Tensor:
        return x.cumsum(-1)


# Functions of an intermediate tensor with the same axis in two dimensions.
_TWICE: dict[str, Callable[[Tensor], Tensor]] = {
    "ensemble score": lambda x: F.softplus(x[:, None, :] - x[:, :, None]).mean((1, 2)),
    "outer product": lambda x: (x[:, :, None] * x[:, None, :]).sum(-1),
    "numbers of rows": lambda x: x.mean(-1, keepdim=True) * x.mean(-1),
    "transposed": lambda x: (x + x.t()).sum(-1),
    "equal by a later line": lambda x: (x[:, :, None] * torch.sin(x)[:, None, :]).sum(-1) + x,
}


@kernels
@pytest.mark.parametrize("case", _TWICE)
def test_one_axis_in_two_dimensions_is_refused(case: str) -> None:
    """Kernels index a value by the set of its axes, so they would read the diagonal only."""
    with pytest.raises(
        fusedops.NotRowwiseError, match=r"one dimension twice[^\n]*\n  line \d+ of "
    ):
        fusedops.rowwise(_TWICE[case], strict=True)(randn(4, 4))


@kernels
def test_two_axes_that_a_later_line_makes_equal_are_refused() -> None:
    """An outer product has the columns of both tensors; a later line adds the two tensors."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x[:, :, None] * y[:, None, :]).sum(-1) + x * y

    with pytest.raises(fusedops.NotRowwiseError, match="one dimension twice"):
        fusedops.rowwise(function, strict=True)(randn(3, 8), randn(3, 8))


@kernels
def test_warning_names_the_callers_file() -> None:
    """The calls are of a method, and of a function with a keyword argument."""
    x = randn(5, 24)
    for call in (lambda: Cumulated().cumulated(x), lambda: fusedops.rowwise(cumulated)(x=x)):
        with pytest.warns(RuntimeWarning, match="each column depends") as caught:
            call()
        assert [w.filename for w in caught] == [__file__]


@kernels
def test_batch_norm_as_a_module_is_refused() -> None:
    norm = nn.BatchNorm1d(24, device=DEVICE)
    function = fusedops.rowwise(lambda x: F.relu(norm(x)), strict=True)
    with pytest.raises(fusedops.NotRowwiseError, match=r"BatchNorm mixes rows|num_batches_tracked"):
        function(randn(5, 24))


@kernels
@pytest.mark.parametrize("case", ["rows", "count", "position"])
def test_results_that_depend_on_the_number_of_rows_are_refused(case: str) -> None:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "rows": lambda x: x / x.shape[0],
        "count": lambda x: x.sum(-1) / x.numel(),
        "position": lambda x: x * torch.ones(x.shape[0], 1, device=x.device).cumsum(0),
    }
    with pytest.raises(fusedops.NotRowwiseError, match=r"number of rows|cumsum|order"):
        fusedops.rowwise(functions[case], strict=True)(randn(5, 24))


@kernels
@pytest.mark.parametrize("first", [5, 100])
def test_branch_on_a_large_number_of_rows(first: int) -> None:
    """One trace has one branch, so the function is refused, or traced for each number of rows."""

    def function(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 64 else x * 3

    fused = fusedops.rowwise(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in (first, 105 - first):
            x = randn(rows, 24)
            assert torch.equal(fused(x), function(x))


@kernels
def test_equal_numbers_of_rows_and_columns_are_distinguished() -> None:
    """Division by the number of columns is fused; by the number of rows, it is refused."""
    x = randn(24, 24)
    by_columns = fusedops.rowwise(lambda x: x / x.shape[-1], strict=True)
    torch.testing.assert_close(by_columns(x), x / 24)
    assert by_columns(randn(7, 24)).shape == (7, 24)
    with pytest.raises(fusedops.NotRowwiseError, match="number of rows"):
        fusedops.rowwise(lambda x: x / x.shape[0], strict=True)(x)


_BRANCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "one": lambda x: torch.softmax(x, -1) if x.shape[1] == 1 else torch.tanh(x),
    "even": lambda x: torch.softmax(x, -1) if x.shape[0] % 2 == 0 else torch.tanh(x),
    "eights": lambda x: torch.softmax(x, -1) if x.shape[1] % 8 == 0 else torch.tanh(x),
    "division": lambda x: x / x.shape[1],
    "shape": lambda x: x.squeeze(1).softmax(-1),
}


@kernels
@pytest.mark.parametrize("case", _BRANCHES)
@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.filterwarnings("ignore:fusedops.rowwise does not fuse:RuntimeWarning")
def test_branches_on_the_number_of_rows(case: str, first: int) -> None:
    """A program that was traced for one number of rows does not run for the other branch."""
    function = fusedops.rowwise(_BRANCHES[case])
    for batch, rows in ((3, first), (3, 1), (3, 5), (2, 5), (3, 8), (1, 1)):
        x = randn(batch, rows, 24)
        torch.testing.assert_close(function(x), _BRANCHES[case](x), rtol=1e-5, atol=1e-5)


# --- gradients that a trace does not contain ------------------------------------------------------


@kernels
@pytest.mark.parametrize(
    ("function", "compiled"),
    [
        pytest.param(straight_through, False, id="straight_through"),
        pytest.param(straight_through, True, id="straight_through-compiled"),
        pytest.param(reversed_gradient, True, id="reversed-compiled"),
        # PyTorch has no such checkpoints in a graph.
        pytest.param(checkpointed, False, id="checkpointed"),
    ],
)
def test_autograd_function_keeps_its_backward(
    function: Callable[..., Any], compiled: bool, fresh_dynamo: None
) -> None:
    fused: Any = fusedops.rowwise(function)
    x = randn(5, 24)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = torch.compile(fused, backend="aot_eager") if compiled else fused
        for called, leaf in zip((fused, function), leaves, strict=True):
            called(leaf).sum().backward()
    got, want = (leaf.grad for leaf in leaves)
    assert got is not None
    assert want is not None
    assert torch.equal(got, want)


@kernels
@pytest.mark.parametrize("after_a_call", [False, True], ids=["before", "after_a_call"])
@pytest.mark.parametrize("kind", [nn.Tanh, nn.Identity])
def test_backward_hooks_of_captured_modules_run(kind: type[nn.Module], after_a_call: bool) -> None:
    act, x = kind(), randn(5, 24).requires_grad_()
    function = fusedops.rowwise(lambda x: act(x) * 2)
    if after_a_call:
        function(x)
    act.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 3,))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (got,), (want,) = (
            torch.autograd.grad(f(x).sum(), x) for f in (function, lambda x: act(x) * 2)
        )
    assert torch.equal(got, want)
    assert any("the variable act is a module with backward hooks" in str(w.message) for w in caught)


# --- returned values ------------------------------------------------------------------------------

Pair = namedtuple("Pair", "first second")


@kernels
@pytest.mark.parametrize(
    "returned", [None, 3.0, (), {"y": 1}, "text"], ids=["none", "number", "empty", "dict", "text"]
)
def test_function_that_returns_no_tensor_is_refused(returned: Any) -> None:
    function = fusedops.rowwise(lambda x: returned, strict=True)
    with pytest.raises(
        fusedops.NotRowwiseError,
        match=r"expected a tensor, or a tuple or list of tensors|is a dict",
    ):
        function(randn(5, 24))


@kernels
@pytest.mark.parametrize("kind", ["dict", "list", "namedtuple", "with None"])
def test_returned_container_has_the_type_of_the_plain_functions(kind: str) -> None:
    """So a caller may read ``out.first``, whether the function is fused or refused."""
    functions: dict[str, Callable[[Tensor], Any]] = {
        "dict": lambda x: {"y": x * 2},
        "list": lambda x: [x * 2, x],
        "namedtuple": lambda x: Pair(x * 2, x),
        "with None": lambda x: (x * 2, None),
    }
    x = randn(5, 24)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = fusedops.rowwise(functions[kind])(x)
    assert type(got) is type(functions[kind](x))


# --- side effects ---------------------------------------------------------------------------------

_counted = 0


def counts(x: Tensor) -> Tensor:
    global _counted
    _counted += 1  # here
    return x * 2


def _effects() -> dict[str, tuple[Callable[..., Any], Callable[[], int]]]:
    """Functions with a side effect, and for each a function that counts its calls."""
    log: list[int] = []
    table = {"calls": 0}
    count, holder = 0, nn.Module()
    holder.calls = 0

    def nonlocal_variable(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * 2

    def attribute(x: Tensor) -> Tensor:
        holder.calls += 1
        return x * 2

    def item_of_a_dict(x: Tensor) -> Tensor:
        table["calls"] += 1
        return x * 2

    def list_that_grows(x: Tensor) -> Tensor:
        log.append(1)
        return x * 2

    def positional_only(x: Tensor, /) -> Tensor:
        log.append(1)
        return x * 2

    def inner() -> None:
        holder.calls += 1

    def called_function(x: Tensor) -> Tensor:
        inner()
        return x * 2

    return {
        "nonlocal": (nonlocal_variable, lambda: count),
        "attribute": (attribute, lambda: holder.calls),
        "dict": (item_of_a_dict, lambda: table["calls"]),
        "list": (list_that_grows, lambda: len(log)),
        "positional": (positional_only, lambda: len(log)),
        "nested": (called_function, lambda: holder.calls),
    }


@kernels
@pytest.mark.parametrize("case", ["nonlocal", "attribute", "dict", "list", "positional", "nested"])
def test_function_with_a_side_effect_is_refused(case: str) -> None:
    function, count_calls = _effects()[case]
    with pytest.raises(fusedops.NotRowwiseError, match=r"changes|assigns|calls|may change unseen"):
        fusedops.rowwise(function, strict=True)(randn(5, 24))
    before = count_calls()
    fused = fusedops.rowwise(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            fused(randn(5, 24))
    assert count_calls() - before == 3, "the function must run in every call"


@kernels
def test_change_of_a_global_is_refused() -> None:
    with pytest.raises(fusedops.NotRowwiseError, match="_counted") as caught:
        fusedops.rowwise(counts, strict=True)(randn(5, 24))
    assert "test_refusals" in str(caught.value)
    assert _counted == 0


@kernels
def test_function_that_changes_a_captured_buffer_is_refused() -> None:
    """The buffer may be a running mean. The refusal does not change it."""
    buffer = randn(24)

    def function(x: Tensor) -> Tensor:
        buffer.add_(1.0)
        return x + buffer

    before = buffer.clone()
    with pytest.raises(fusedops.NotRowwiseError, match="add_"):
        fusedops.rowwise(function, strict=True)(randn(5, 24))
    assert torch.equal(buffer, before), "tracing changed it"


# --- arguments ------------------------------------------------------------------------------------


@kernels
@pytest.mark.parametrize("shape", [(23,), (4, 24), (5, 23), (2, 2, 2)], ids=str)
def test_shapes_that_do_not_broadcast_raise_pytorchs_error(shape: tuple[int, ...]) -> None:
    """An earlier call had shapes that broadcast."""
    function = fusedops.rowwise(lambda x, y: x * 2 + y, strict=True)
    function(randn(5, 24), randn(24))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must match"):
            function(randn(5, 24), randn(*shape))


@kernels
def test_norm_over_a_wrong_shape_raises_pytorchs_error() -> None:
    with pytest.raises(RuntimeError, match="normalized_shape"):
        fusedops.rowwise(lambda x: F.layer_norm(x, (23,)), strict=True)(randn(5, 24))


@kernels
@pytest.mark.parametrize("meta_first", [False, True])
def test_tensors_of_different_devices_raise_pytorchs_error(meta_first: bool) -> None:
    function = fusedops.rowwise(lambda x, y: x + y, strict=True)
    tensors = [randn(5, 24), torch.randn(5, 24, device="meta")]
    with pytest.raises(RuntimeError, match="device"):
        function(*(reversed(tensors) if meta_first else tensors))


@kernels
@pytest.mark.parametrize(("p", "training"), [(-0.1, True), (1.5, False)])
def test_probability_out_of_range_raises_pytorchs_error(p: float, training: bool) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        fusedops.rowwise(lambda x: F.dropout(x, p, training), strict=True)(randn(5, 24))


@kernels
@pytest.mark.parametrize(
    ("kind", "message"), [("sparse", "dense"), ("complex", "torch.view_as_real")]
)
def test_sparse_or_complex_tensor_is_refused(kind: str, message: str) -> None:
    x = randn(5, 24).to_sparse() if kind == "sparse" else randn(5, 24).to(torch.complex64)
    with pytest.raises(fusedops.NotRowwiseError, match=message):
        fusedops.rowwise(lambda x: x * 2, strict=True)(x)


def test_list_of_tensors_is_refused() -> None:
    with pytest.raises(
        fusedops.NotRowwiseError, match="xs is a list of tensors; pass them one by one"
    ):
        fusedops.rowwise(lambda xs: xs[0] + xs[1]).source([randn(5, 24), randn(5, 24)])


@kernels
@pytest.mark.parametrize("error", [ValueError, KeyError, ZeroDivisionError])
def test_users_own_error_is_raised(error: type[Exception]) -> None:
    def function(x: Tensor) -> Tensor:
        raise error("of the user's")

    for strict in (False, True):
        with pytest.raises(error, match="of the user's"):
            fusedops.rowwise(function, strict=strict)(randn(5, 24))


def test_object_that_is_no_function_of_named_arguments_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes a function .*, got int; write one that calls it$"):
        fusedops.rowwise(3)
    for method in (nn.Tanh(), nn.Tanh().forward):
        with pytest.raises(TypeError, match="calls it, or decorate the method in its class"):
            fusedops.rowwise(method)
    with pytest.raises(TypeError, match="variable number"):
        fusedops.rowwise(lambda *tensors: tensors[0])
    with pytest.raises(TypeError, match="variable number"):
        fusedops.rowwise(lambda x, **options: x)


@kernels
def test_refusal_is_for_these_arguments_only() -> None:
    """Another call of the same function is fused."""
    function = fusedops.rowwise(lambda x, dim: x.softmax(dim))
    x = randn(5, 24)
    with pytest.warns(RuntimeWarning, match="mixes rows"):
        function(x, 0)
    with launch.record() as launched:
        torch.testing.assert_close(function(x, -1), x.softmax(-1))
    assert launched == ["forward_kernel"]


# --- decoration -----------------------------------------------------------------------------------


async def awaited(x: Tensor) -> Tensor:
    return x * 2


def yielding(x: Tensor) -> Any:
    yield x * 2


@pytest.mark.parametrize(
    ("decorate", "message"),
    [
        (lambda: fusedops.rowwise(awaited), "awaited is async; write it with `def`"),
        (lambda: fusedops.rowwise(yielding), "yielding yields its results; return a tuple of them"),
        (lambda: fusedops.rowwise(strict="yes"), "strict has type str, expected bool"),  # type: ignore[call-overload]
        (lambda: fusedops.rowwise(cumulated, strict=1), "strict has type int, expected bool"),  # type: ignore[call-overload]
    ],
)
def test_bad_arguments_of_the_decorator_are_refused_at_once(
    decorate: Callable[[], Any], message: str
) -> None:
    with pytest.raises(TypeError, match=f"^rowwise: {message}"):
        decorate()


@kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: F.threshold(x, 0.0, 1.0, inplace=True), "threshold_ changes x in place"),
        (lambda x: x.nan_to_num_(1.0), "nan_to_num_ changes x in place"),
        (
            lambda x: (x * 2)[..., :4].fill_(0.0),
            "fill_ changes in place what another tensor shares",
        ),
        (lambda x: (x[..., :1] * 2).lerp_(x, 0.5), "doesn't match the broadcast shape"),
    ],
)
def test_change_in_place_is_refused_by_the_users_names(
    change: Callable[[Tensor], Tensor], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        fusedops.rowwise(lambda x: change(x), strict=True)(randn(3, 8))


@pytest.mark.parametrize("text", ["x = (\n", "'''\n"], ids=["bracket", "string"])
def test_function_is_fused_after_its_file_became_invalid(
    text: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editor may save the file after the import, with an open bracket or string."""
    path = tmp_path / f"changed_{request.node.callspec.id}.py"
    path.write_text("def doubled(x):\n    y = x.relu()\n    return y * 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    doubled = importlib.import_module(path.stem).doubled
    path.write_text(text * 3)
    linecache.checkcache()
    assert "def forward_kernel(" in fusedops.rowwise(doubled).source(torch.randn(4, 8))


@kernels
def test_more_dimensions_of_rows_than_have_sizes_of_their_own() -> None:
    """The trace could not tell axes of equal size apart."""
    softmax = fusedops.rowwise(lambda x: torch.softmax(x, -1), strict=True)
    with pytest.raises(fusedops.NotRowwiseError, match=r"too many dimensions.*flatten some"):
        softmax(randn(*[2] * 12, 8))
