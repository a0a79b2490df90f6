"""`fusedops.rowwise`: first and higher derivatives, special inputs, and single operators."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops
from rowwise_checks import (
    assert_as_good,
    check,
    cotangents_of,
    every,
    kernels,
    masks,
    of,
    randn,
    rowwise,
    wide,
)
from rowwise_functions import SAMPLES, RowwiseFunction, named, subsets
from support import DEVICE, as_tuple, fixed_draw

# --- derivatives ----------------------------------------------------------------------------------


@kernels
@every
def test_second_derivatives(sample: RowwiseFunction) -> None:
    tensors = sample.tensors(torch.float32, DEVICE)
    names = sample.floating()

    def second(function: Callable[..., Any], inputs: dict[str, Tensor]) -> list[Tensor]:
        leaves = {name: t.detach().requires_grad_(name in names) for name, t in inputs.items()}
        outputs = as_tuple(function(*leaves.values()))
        floating = [leaves[name] for name in names]
        cotangents = [c.requires_grad_() for c in cotangents_of(outputs)]
        grads = torch.autograd.grad(outputs, floating, cotangents, create_graph=True)
        variables = [*floating, *cotangents]
        derivatives = torch.autograd.grad(grads, variables, cotangents_of(grads), allow_unused=True)
        return [
            torch.zeros_like(variable) if derivative is None else derivative
            for derivative, variable in zip(derivatives, variables, strict=True)
        ]

    with fixed_draw():
        got = second(rowwise(sample), tensors)
    with masks(sample):
        exact = second(sample.function, wide(tensors))
    with masks(sample):
        eager = second(sample.function, tensors)
    for number, (actual, expected, native) in enumerate(zip(got, exact, eager, strict=True)):
        what = f"{sample.name}: second derivative {number}"
        assert_as_good(actual, expected, [native], what, units=64.0)


@kernels
@pytest.mark.parametrize(
    ("sample", "names"),
    [
        pytest.param(sample, names, id="-".join((sample.name, *names)))
        for sample in named(
            "gated_residual_norm",
            "adaptive_layer_norm_grouped",
            "swiglu_norm",
            "norm_and_rotary",
            "group_norm",
        )
        for names in subsets(sample.floating())
    ],
)
def test_gradients_of_some_inputs(sample: RowwiseFunction, names: tuple[str, ...]) -> None:
    check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE), names)


@kernels
@of("gated_residual_norm", "gate_and_residual")
@pytest.mark.parametrize("used", [0, 1])
def test_one_of_two_outputs_unused(sample: RowwiseFunction, used: int) -> None:
    function = rowwise(sample)
    of_one_output = RowwiseFunction(
        sample.name, lambda *args: sample.function(*args)[used], sample.shapes
    )
    # The second output, the residual stream, depends only on these inputs.
    names = ["x", "residual"] if used == 1 else None
    tensors = sample.tensors(torch.float32, DEVICE)
    check(of_one_output, lambda *args: function(*args)[used], tensors, names)


@kernels
def test_output_that_is_the_same_for_a_whole_row() -> None:
    """Its cotangent is summed over the row."""

    def function(x: Tensor) -> Tensor:
        return x.mean(-1, keepdim=True) + torch.zeros_like(x)

    sample = RowwiseFunction("broadcast", function, lambda rows: {"x": (rows, 24)})
    check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE))


@kernels
def test_gradient_of_fp64_that_is_summed_over_the_middle_rows() -> None:
    """The kernel writes it for each row, in fp64 like its input; then it is summed."""
    generator = torch.Generator().manual_seed(0)
    x, shift, cotangent = (
        torch.randn(shape, dtype=torch.float64, generator=generator).to(DEVICE)
        for shape in ((3, 4, 32), (3, 1, 32), (3, 4, 32))
    )
    shift.requires_grad_()
    function = fusedops.rowwise(lambda x, shift: x * (1 + shift), strict=True)
    (result,) = torch.autograd.grad(function(x, shift), shift, cotangent)
    torch.testing.assert_close(result, (cotangent * x).sum(1, keepdim=True), rtol=1e-13, atol=1e-13)


@kernels
@pytest.mark.parametrize("case", ["stack", "cat", "transpose"])
def test_outputs_whose_rows_are_not_outermost(case: str) -> None:
    """The function is fused correctly, or refused."""
    functions: dict[str, Callable[..., Any]] = {
        "stack": lambda x, y: torch.stack((x, x * y), 0),
        "cat": lambda x, y: torch.cat((x, x * y), 0),
        "transpose": lambda x, y: (x * y).mT,
    }
    sample = RowwiseFunction(case, functions[case], lambda rows: {"x": (rows, 24), "y": (rows, 24)})
    try:
        function = rowwise(sample)
        check(sample, function, sample.tensors(torch.float32, DEVICE))
    except fusedops.NotRowwiseError as error:
        assert case[:4] in str(error) or "rows" in str(error)  # noqa: PT017


@kernels
def test_transposed_heads_of_attention() -> None:
    """The rows of the output are in another order than those of the input."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, 1e-6).transpose(1, 2)

    sample = RowwiseFunction(
        "heads", function, lambda rows: {"x": (2, rows, 3, 16), "weight": (16,)}
    )
    check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE))


@kernels
def test_output_is_computed_from_the_rounded_sum() -> None:
    """The returned sum is rounded to bf16. The backward and the next layer read it, too."""

    def function(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        z = x * 3.0 + residual
        return F.layer_norm(z.float(), z.shape[-1:]), z

    x, residual = randn(5, 24, dtype=torch.bfloat16), randn(5, 24, dtype=torch.bfloat16)
    y, z = fusedops.rowwise(function, strict=True)(x, residual)
    assert (y.dtype, z.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(y, F.layer_norm(z.float(), (24,)), rtol=1e-5, atol=1e-5)


@kernels
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_rows_of_an_ignored_class_have_no_loss_and_no_gradient(smoothing: float) -> None:
    """The ignored index is also the index of a column."""

    def function(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(
            logits, target, ignore_index=3, reduction="none", label_smoothing=smoothing
        )

    sample = RowwiseFunction("ignored", function, SAMPLES["cross_entropy"].shapes)
    target = torch.tensor([3, 0, 3, 39, 1], device=DEVICE)
    check(
        sample,
        rowwise(sample),
        {**sample.tensors(torch.float32, DEVICE), "target": target},
        ["logits"],
    )


@kernels
@pytest.mark.parametrize("case", ["detach", "no_grad"])
def test_factor_without_a_gradient(case: str) -> None:
    """The function is fused correctly, or refused."""

    def detached(x: Tensor) -> Tensor:
        return x * x.exp().detach()

    def under_no_grad(x: Tensor) -> Tensor:
        with torch.no_grad():
            factor = x.exp()
        return x * factor

    function = detached if case == "detach" else under_no_grad
    sample = RowwiseFunction(case, function, lambda rows: {"x": (rows, 24)})
    try:
        check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE))
    except fusedops.NotRowwiseError as error:
        assert case in str(error)  # noqa: PT017


@kernels
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_inputs_without_a_gradient_have_none(compiled: bool, fresh_dynamo: None) -> None:
    """The gradient is None, as in PyTorch, for inputs that are only detached or compared.

    It is also None for inputs on which no differentiated output depends. For `sign` it is zero.
    """

    def function(
        x: Tensor, w: Tensor, other: Tensor, detached: Tensor, compared: Tensor, signs: Tensor
    ) -> Any:
        with torch.no_grad():
            largest = x.amax(-1, keepdim=True)
        y = torch.where(x > compared, x * w, detached.detach() * x) + signs.sign()
        return y, x * other, largest, detached.detach() * x.detach()

    fused: Any = fusedops.rowwise(function, strict=True)
    if compiled:
        fused = torch.compile(fused, backend="aot_eager")
    leaves = [randn(5, 24).requires_grad_(), *[randn(24).requires_grad_() for _ in range(5)]]
    outs, eager = fused(*leaves), function(*leaves)
    assert [out.requires_grad for out in outs] == [True, True, False, False]
    assert [out.requires_grad for out in eager] == [True, True, False, False]
    w_alone = [t if t is leaves[1] else t.detach() for t in leaves]
    assert [out.requires_grad for out in fused(*w_alone)] == [True, False, False, False]
    # A graph of torch.compile returns zeros, not None, if only some outputs are differentiated.
    subsets_of_outputs = ((0, 1),) if compiled else ((0,), (1,), (0, 1))
    for used in subsets_of_outputs:
        got, want = (
            torch.autograd.grad(
                [result[i] for i in used],
                leaves,
                [torch.ones_like(result[i]) for i in used],
                allow_unused=True,
                retain_graph=True,
            )
            for result in (outs, eager)
        )
        assert [grad is None for grad in got] == [grad is None for grad in want]
        for result, value in zip(got, want, strict=True):
            if result is not None:
                torch.testing.assert_close(result, value, rtol=1e-4, atol=1e-4)


@kernels
@pytest.mark.parametrize("name", ["relu", "sigmoid", "tanh", "exp"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_results_are_saved_for_derivatives_of_results(name: str, dtype: torch.dtype) -> None:
    """The input is not saved. At zero and for NaN the gradients are PyTorch's."""

    def function(x: Tensor, b: Tensor) -> Tensor:
        result: Tensor = getattr(torch, name)(x + b)
        return result

    fused = fusedops.rowwise(function, strict=True)
    x, b = randn(5, 8).to(dtype).requires_grad_(), randn(8).to(dtype).requires_grad_()
    with torch.no_grad():
        x[0] = -b
        x[1, 2] = torch.nan
    y = fused(x, b)
    saved = [t for t in y.grad_fn.saved_tensors if t is not None and t.shape == x.shape]
    assert [t.data_ptr() for t in saved] == [y.data_ptr()]
    (cotangent,) = cotangents_of([y])
    (got,) = torch.autograd.grad(y, x, cotangent)
    (eager,) = torch.autograd.grad(function(x, b), x, cotangent)
    wide_x = x.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(function(wide_x, b.double()), wide_x, cotangent.double())
    assert_as_good(got, exact, [eager], name)
    if dtype == torch.float64:
        away = (x.detach().nan_to_num() + 0.01).requires_grad_()  # from the kink
        assert torch.autograd.gradgradcheck(fused, (away, b))


@kernels
def test_results_are_not_read_where_an_input_is() -> None:
    """The other derivative reads the input, from which this one is exact.

    In bf16 the result is 1.0, and the derivative from the result would be zero.
    """
    x = torch.full((5, 8), 4.0, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    y, _ = fusedops.rowwise(lambda x: (torch.tanh(x), torch.sin(x)), strict=True)(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    # Two roundings, of which the interpreter's are towards zero.
    expected = torch.full_like(gradient, 1 - math.tanh(4.0) ** 2)
    torch.testing.assert_close(gradient, expected, rtol=2.0**-6, atol=0)


@kernels
@pytest.mark.parametrize("name", ["sigmoid", "tanh"])
def test_derivatives_are_not_of_results_that_a_cast_rounds(name: str) -> None:
    """PyTorch saves the result in fp32: in bf16 it is 1, and the derivative would be zero."""
    x = torch.full((5, 8), 7.0, dtype=torch.bfloat16, device=DEVICE).requires_grad_()

    def function(x: Tensor) -> Tensor:
        result: Tensor = getattr(torch, name)(x.float())
        return result.to(x.dtype)

    (got,) = torch.autograd.grad(fusedops.rowwise(function, strict=True)(x).sum(), x)
    (eager,) = torch.autograd.grad(function(x).sum(), x)
    assert eager.all()
    # The roundings of the interpreter are towards zero.
    torch.testing.assert_close(got, eager, rtol=2.0**-6, atol=0)


@kernels
@pytest.mark.parametrize("name", ["sigmoid", "silu", "tanh", "relu", "gelu", "softplus"])
def test_batched_gradients(name: str) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return getattr(F, name)(x * w) * w

    x, w = randn(3, 8).double().requires_grad_(), randn(8).double().requires_grad_()
    cotangents = randn(4, 3, 8).double()

    def results(function: Callable[..., Any]) -> list[Tensor]:
        y = function(x, w)
        batched = torch.autograd.grad(
            y, (x, w), cotangents, is_grads_batched=True, retain_graph=True
        )
        mapped = torch.func.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(
            cotangents
        )
        jacobian = torch.autograd.functional.jacobian(function, (x, w), vectorize=True)
        hessian = torch.autograd.functional.hessian(
            lambda x: function(x, w).sum(), x, vectorize=True
        )
        return [*batched, mapped, *jacobian, hessian]

    # The tolerance is some tens of roundings in fp64, for numbers of about one.
    for got, want in zip(
        results(fusedops.rowwise(function, strict=True)), results(function), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


# Functions, and a kind of input at which the derivative is a convention of PyTorch or at which the
# plain formula of the derivative fails.
_EDGES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "clamp": (lambda x: x.clamp(min=0.0), "zeros"),
    "clamp_between": (lambda x: torch.clamp(x, 0.0, 1.0), "zeros"),
    "clamp_by_tensors": (lambda x: torch.clamp(x, torch.zeros_like(x), x.abs()), "zeros"),
    "hardtanh": (lambda x: F.hardtanh(x, 0.0, 1.0), "zeros"),
    "relu6": (lambda x: F.relu6(x), "zeros"),
    "relu": (lambda x: F.relu(x), "zeros"),
    "maximum": (lambda x: torch.maximum(x, torch.zeros_like(x)), "zeros"),
    "abs": (lambda x: x.abs(), "zeros"),
    "power": (lambda x: x.abs() ** 1.5, "zeros"),
    "square": (lambda x: x**2.0, "zeros"),
    "normalize": (lambda x: F.normalize(x, dim=-1), "zero row"),
    "norm": (lambda x: x * x.norm(dim=-1, keepdim=True), "zero row"),
    "std": (lambda x: x - x.std(-1, keepdim=True), "zero row"),
    "softmax": (lambda x: x.softmax(-1), "zero row"),
    "layer_norm": (lambda x: F.layer_norm(x, (24,)), "zero row"),
    "amax": (lambda x: x - x.amax(-1, keepdim=True), "ties"),
    "max": (lambda x: x - x.max(-1, keepdim=True).values, "ties"),
    "amin": (lambda x: x - x.amin(-1, keepdim=True), "ties"),
    "odd_power": (lambda x: x**17, "ties"),
    "even_power": (lambda x: x**20, "ties"),
    "softplus": (lambda x: F.softplus(x * 40), "ties"),
    "logsumexp": (lambda x: torch.logsumexp(x * 40, -1), "ties"),
    "log_softmax": (lambda x: torch.log_softmax(x * 40, -1), "ties"),
    "log1p": (lambda x: torch.log1p(x * 1e-6), "ties"),
    "expm1": (lambda x: torch.expm1(x * 1e-6), "ties"),
}


@kernels
@pytest.mark.parametrize("case", _EDGES)
def test_derivatives_at_edges(case: str) -> None:
    function, edge = _EDGES[case]
    sample = RowwiseFunction(case, function, lambda rows: {"x": (rows, 24)})
    x = sample.tensors(torch.float32, DEVICE)["x"]
    if edge == "zeros":
        x[:, 3:9] = 0.0
    elif edge == "zero row":
        x[1] = 0.0
    else:
        x[:, 3:6] = 2.5
    check(sample, rowwise(sample), {"x": x})


@kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize(
    "case", ["fmax", "fmin", "maximum", "relu", "clamp", "amax", "softmax", "logsumexp", "where"]
)
def test_nan_and_infinity_propagate_as_in_pytorch(case: str, value: float) -> None:
    """The function is fused correctly, or refused."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "fmax": lambda x: torch.fmax(x, torch.zeros_like(x)),
        "fmin": lambda x: torch.fmin(x, torch.zeros_like(x)),
        "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
        "relu": F.relu,
        "clamp": lambda x: x.clamp(-1.0, 1.0),
        "amax": lambda x: x - x.amax(-1, keepdim=True),
        "softmax": lambda x: x.softmax(-1),
        "logsumexp": lambda x: torch.logsumexp(x, -1),
        "where": lambda x: torch.where(x > 0, x, 0.0),
    }
    x = randn(5, 24)
    x[1, 3], x[2] = value, value
    fused = fusedops.rowwise(functions[case])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a refusal
        got = fused(x)
    torch.testing.assert_close(got, functions[case](x), rtol=1e-5, atol=1e-5, equal_nan=True)


@kernels
def test_clamp_by_limits_that_are_nan() -> None:
    def function(x: Tensor, low: Tensor) -> Tensor:
        return torch.clamp(torch.clamp(x, min=low), max=x.mean(-1, keepdim=True)) * 2

    x, low = randn(5, 24), randn(24)
    x[1, 3] = low[5] = float("nan")
    expected = function(x, low)
    assert int(expected.isnan().sum()) == 24 + 4
    got = fusedops.rowwise(function, strict=True)(x, low)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@kernels
@pytest.mark.parametrize("correction", [24, 25])
def test_variance_without_degrees_of_freedom(correction: int) -> None:
    """It is infinite, and NaN where all elements of a row are equal."""
    x = randn(5, 24)
    x[2] = 1.5
    for function in (torch.var, torch.std):
        fused = fusedops.rowwise(
            lambda x, function=function: function(x, -1, correction=correction), strict=True
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns
            expected = function(x, -1, correction=correction)
            torch.testing.assert_close(fused(x), expected, equal_nan=True)
        assert expected[0] == float("inf") and expected[2].isnan()


# --- operators that PyTorch decomposes ------------------------------------------------------------

_POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(F, name)
        for name in (
            "leaky_relu",
            "elu",
            "selu",
            "celu",
            "hardswish",
            "hardsigmoid",
            "softplus",
            "mish",
            "logsigmoid",
            "gelu",
            "silu",
            "softsign",
            "tanhshrink",
            "glu",
        )
    },
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "lerp": lambda x: torch.lerp(x, x.exp(), 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x.exp(), value=0.5),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.exp(), value=0.5),
    "mse_loss": lambda x: F.mse_loss(x, x.exp(), reduction="none").mean(-1),
    "exp2": torch.exp2,
    "base": lambda x: 2.0**x,
    "remainder": lambda x: x % 0.7,
    "std_mean": lambda x: torch.std_mean(x, -1, keepdim=True)[0] * x,
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "softmin": lambda x: F.softmin(x, -1),
    "var": lambda x: x * x.var(-1, unbiased=False, keepdim=True),
    "in_place": lambda x: (x * 2).add_(1.0).mul_(0.5).exp_(),
    "in_place_of_a_copy": lambda x: x.clone().mul_(0.5) * x + (x * 1).exp_(),
    "min_max": lambda x: (
        (x - x.amin(-1, keepdim=True)) / (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True))
    ),
    "integers": lambda x: x * (x > 0).sum(-1, keepdim=True) - (x * 4).long().amax(-1, keepdim=True),
    "bits": lambda x: x * ((x > 0) & ~(x > 1) | (x < -1)),
    "one_hot": lambda x: x * F.one_hot((x.amax(-1) * 3).long().clamp(0, 23), 24),
    "unflatten": lambda x: F.softmax(x.unflatten(-1, (2, 12)), -1).flatten(-2),
    "parts": lambda x: torch.cat(
        [part * (i + 1) for i, part in enumerate(x.chunk(3, -1))], -1
    ).softmax(-1),
}
# PyTorch has decompositions of these, so a function that calls them must not be refused.
_COVERED = frozenset(_POINTWISE) - {"remainder", "base", "exp2", "std_mean"}


@kernels
@pytest.mark.parametrize("name", _POINTWISE)
def test_operators_have_pytorchs_derivatives(name: str) -> None:
    operator = _POINTWISE[name]

    def function(x: Tensor) -> Tensor:  # has a signature, unlike a builtin
        return operator(x)

    sample = RowwiseFunction(name, function, lambda rows: {"x": (rows, 24)})
    tensors = sample.tensors(torch.float32, DEVICE)
    try:
        check(sample, rowwise(sample), tensors)
    except fusedops.NotRowwiseError:
        assert name not in _COVERED, f"{name} is refused"


@kernels
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("case", ["sign", "floor", "a vector", "a part"])
def test_gradients_of_step_functions_are_zero(case: str, batched: bool) -> None:
    """They are zero, not None: in kernels, and in PyTorch's operators, which batches run."""
    function: Callable[[Tensor, Tensor], Tensor] = {
        "sign": lambda x, w: x.sign() + w.sign(),
        "floor": lambda x, w: (x * w).floor().sum(-1),
        "a vector": lambda x, w: x * w.sign(),
        "a part": lambda x, w: x.chunk(2, -1)[0].ceil() * w.chunk(2, -1)[1],
    }[case]
    tensors = [randn(3, 8).requires_grad_(), randn(8).requires_grad_()]

    def gradients(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        out = function(*tensors)
        cotangent = torch.ones(2, *out.shape, device=DEVICE) if batched else torch.ones_like(out)
        return torch.autograd.grad(
            out, tensors, cotangent, create_graph=True, is_grads_batched=batched
        )

    got, want = gradients(fusedops.rowwise(function, strict=True)), gradients(function)
    for result, value in zip(got, want, strict=True):
        torch.testing.assert_close(result, value)


@kernels
@pytest.mark.parametrize("case", ["one part", "two results", "nothing"])
def test_second_derivatives_of_a_part_of_a_row(case: str) -> None:
    """Unused columns have a gradient of zero, also if no column is used."""
    function = {
        "one part": lambda x: (x.chunk(2, -1)[0] ** 2,),
        "two results": lambda x: (torch.tanh(x[..., :4]) * 2, x[..., :4]),
        "nothing": lambda x: (torch.sign(x) + 0 * torch.sin(x),),
    }[case]
    x = randn(2, 3, 8).requires_grad_()

    def derivatives(function: Any) -> list[Tensor]:
        outs = function(x)
        (first,) = torch.autograd.grad(
            sum(out.square().sum() for out in outs), x, create_graph=True
        )
        (second,) = torch.autograd.grad(first.square().sum(), x)
        (batched,) = torch.autograd.grad(
            function(x)[0], x, torch.ones(2, *outs[0].shape, device=x.device), is_grads_batched=True
        )
        return [first, second, batched]

    for got, want in zip(
        derivatives(fusedops.rowwise(function, strict=True)), derivatives(function), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@kernels
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "change", [lambda y, v: y.clamp_(-0.5, 0.5), lambda y, v: y.copy_(v)], ids=["clamp", "copy"]
)
def test_second_derivatives_of_a_value_that_is_changed_without_a_gradient(
    change: Callable[..., Tensor], batched: bool
) -> None:
    """PyTorch differentiates as if the change had not happened, but with the new values.

    The values from before the change may not be saved.
    """

    def function(x: Tensor, v: Tensor) -> Tensor:
        y = x * 1.0
        with torch.no_grad():
            change(y, v)
        return y**3 * v

    def second(called: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
        out, cotangent = called(*leaves), cotangents[0].to(dtype)
        grads = torch.autograd.grad(out, leaves, cotangent, create_graph=True)
        batches = [cotangents[1:3].to(dtype), cotangents[3:].to(dtype)]
        directions = batches if batched else [batch[0] for batch in batches]
        return torch.autograd.grad(grads, leaves, directions, is_grads_batched=batched)

    inputs, cotangents = [randn(3, 24) for _ in range(2)], randn(5, 3, 24)
    exact, eager = [second(function, dtype) for dtype in (torch.float64, torch.float32)]
    for got, want, native in zip(
        second(fusedops.rowwise(function, strict=True), torch.float32), exact, eager, strict=True
    ):
        assert_as_good(got, want, [native], "a second derivative")


def _clamped(x: Tensor) -> Tensor:
    y = x * 1.0
    with torch.no_grad():
        y.clamp_(-0.5, 0.5)
    return F.elu(y) ** 3


@kernels
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.softplus(x) ** 2,
        lambda x: F.elu(x) ** 2,
        lambda x: F.mish(x) ** 2,
        _clamped,
        lambda x: torch.logsumexp(x, -1, keepdim=True) ** 2 * x,
        lambda x: x.std(-1, keepdim=True) * x,
        lambda x: x.norm(dim=-1, keepdim=True) * x,
        lambda x: torch.linalg.vector_norm(x, 3, dim=-1, keepdim=True) * x,
    ],
    ids=["softplus", "elu", "mish", "clamped", "logsumexp", "std", "norm", "norm of order 3"],
)
def test_third_derivatives(function: Callable[[Tensor], Tensor]) -> None:
    x, cotangents = randn(3, 24).double().requires_grad_(), randn(3, 3, 24).double()

    def third(called: Callable[[Tensor], Tensor]) -> Tensor:
        result = called(x)
        for cotangent in cotangents:
            (result,) = torch.autograd.grad(result, x, cotangent, create_graph=True)
        return result

    expected = third(function)
    assert_as_good(
        third(fusedops.rowwise(function, strict=True)),
        expected,
        [expected],
        "third derivative",
        units=64.0,
    )


@kernels
@pytest.mark.parametrize("function", [F.elu, F.selu, F.celu], ids=["elu", "selu", "celu"])
def test_second_derivatives_where_the_exponential_overflows(
    function: Callable[[Tensor], Tensor],
) -> None:
    """It overflows in the branch that is not selected. At the input zero the branches meet."""
    numbers = torch.tensor([[100.0, -100.0, 0.0, 2.0, -2.0]], device=DEVICE)

    def second(called: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        x = numbers.clone().requires_grad_()
        out = called(x)
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out, first, torch.autograd.grad(first.sum(), x)[0]

    for outer in (lambda x: function(x) * 2.0, lambda x: function(x) * function(x)):
        torch.testing.assert_close(second(fusedops.rowwise(outer, strict=True)), second(outer))


# --- roundings that change the result -------------------------------------------------------------


def _quotient_and_its_largest(x: Tensor, scale: Tensor) -> Tensor:
    q = x / scale
    return q + q.amax(-1, keepdim=True)


# Functions and inputs. For these inputs, a product with a reciprocal instead of a quotient, or
# another order of factors, gives infinity, NaN, or a difference that should be zero.
_ROUNDINGS: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Tensor]]]] = {
    "a quotient compared with the largest": (
        _quotient_and_its_largest,
        lambda: [
            torch.full((2, 32), 1.0009765625, dtype=torch.float16),
            torch.tensor([0.9665251970291138]),
        ],
    ),
    "a quotient by zero": (lambda x: x / 0.0, lambda: [torch.randn(2, 32)]),
    "a quotient by a subnormal number": (
        lambda x: x / 2.0**-133,
        lambda: [torch.full((2, 32), 2.0**-132)],
    ),
    "a quotient by a number beyond fp32": (lambda x: x / 1e39, lambda: [torch.ones(2, 32)]),
    "a quotient by a subnormal limit": (
        lambda x, scale: x / torch.maximum(scale, torch.full_like(scale, 2.0**-133)),
        lambda: [
            torch.full((2, 32), 2.0**-132, dtype=torch.bfloat16),
            torch.zeros(2, 1, dtype=torch.bfloat16),
        ],
    ),
    "large factors between small ones": (
        lambda x, scale: x * (scale * 1e-20) * (scale * 1e-20),
        lambda: [torch.randn(2, 32), torch.full((2, 1), 1e20)],
    ),
    "equal quotients normalised": (
        lambda x, scale: F.layer_norm(x / scale, (32,), eps=1e-12),
        lambda: [torch.full((2, 32), 1.1), torch.full((2, 1), 0.7)],
    ),
    "exponentials with a subnormal sum": (
        lambda scale, x: scale * (x.exp() / x.exp().sum(-1, keepdim=True)).bfloat16(),
        lambda: [torch.ones(2, 2), torch.full((2, 2), -91.0, dtype=torch.bfloat16)],
    ),
}


@kernels
@pytest.mark.parametrize("case", _ROUNDINGS)
def test_roundings_that_change_the_result(case: str) -> None:
    """Values and the first gradient are those of fp64, also where these are NaN."""
    function, inputs = _ROUNDINGS[case]
    tensors = [t.to(DEVICE).requires_grad_() for t in inputs()]
    out = fusedops.rowwise(function, strict=True)(*tensors)
    (gradient,) = torch.autograd.grad(out.sum(), tensors[:1])
    exact = [t.detach().double().cpu().requires_grad_() for t in tensors]
    expected = function(*exact)
    (exact_gradient,) = torch.autograd.grad(expected.sum(), exact[:1])
    tolerance = 8 * torch.finfo(tensors[0].dtype).eps
    for result, value in ((out, expected), (gradient, exact_gradient)):
        value = value.detach().to(result.dtype)
        torch.testing.assert_close(
            result.detach().cpu(), value, rtol=tolerance, atol=tolerance, equal_nan=True
        )
