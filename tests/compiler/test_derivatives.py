"""`fusedops.rowwise`: derivatives at corners and of higher order, and operators one by one."""

from __future__ import annotations

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

    def twice(function: Callable[..., Any], given: dict[str, Tensor]) -> list[Tensor]:
        leaves = {name: t.detach().requires_grad_(name in names) for name, t in given.items()}
        outputs = as_tuple(function(*leaves.values()))
        inner = [leaves[name] for name in names]
        cotangents = [c.requires_grad_() for c in cotangents_of(outputs)]
        grads = torch.autograd.grad(outputs, inner, cotangents, create_graph=True)
        again = torch.autograd.grad(
            grads, [*inner, *cotangents], cotangents_of(grads), allow_unused=True
        )
        return [
            torch.zeros_like(t) if g is None else g
            for g, t in zip(again, [*inner, *cotangents], strict=True)
        ]

    with fixed_draw():
        got = twice(rowwise(sample), tensors)
    with masks(sample):
        exact = twice(sample.function, wide(tensors))
    with masks(sample):
        eager = twice(sample.function, tensors)
    for number, (a, b, c) in enumerate(zip(got, exact, eager, strict=True)):
        assert_as_good(a, b, [c], f"{sample.name}: second derivative {number}", 64.0)


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
def test_some_gradients(sample: RowwiseFunction, names: tuple[str, ...]) -> None:
    check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE), names)


@kernels
@of("gated_residual_norm", "gate_and_residual")
@pytest.mark.parametrize("used", [0, 1])
def test_one_output_unused(sample: RowwiseFunction, used: int) -> None:
    function = rowwise(sample)
    one = RowwiseFunction(sample.name, lambda *args: sample.function(*args)[used], sample.shapes)
    # The residual stream depends on these two alone, not on the norm after it.
    names = ["x", "residual"] if used else None
    check(one, lambda *args: function(*args)[used], sample.tensors(torch.float32, DEVICE), names)


@kernels
def test_output_that_is_the_same_for_a_whole_row() -> None:
    """Its cotangent is summed over the row."""

    def function(x: Tensor) -> Tensor:
        return x.mean(-1, keepdim=True) + torch.zeros_like(x)

    sample = RowwiseFunction("broadcast", function, lambda rows: {"x": (rows, 24)})
    check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE))


@kernels
def test_gradient_of_fp64_that_is_summed_over_the_middle_rows() -> None:
    """It is written whole, in fp64 too, and then summed."""
    generator = torch.Generator().manual_seed(0)
    x, shift, along = (
        torch.randn(shape, dtype=torch.float64, generator=generator).to(DEVICE)
        for shape in ((3, 4, 32), (3, 1, 32), (3, 4, 32))
    )
    shift.requires_grad_()
    function = fusedops.rowwise(lambda x, shift: x * (1 + shift), strict=True)
    (result,) = torch.autograd.grad(function(x, shift), shift, along)
    torch.testing.assert_close(result, (along * x).sum(1, keepdim=True), rtol=1e-13, atol=1e-13)


@kernels
@pytest.mark.parametrize("which", ["stack", "cat", "transpose"])
def test_outputs_whose_rows_are_not_outermost(which: str) -> None:
    functions: dict[str, Callable[..., Any]] = {
        "stack": lambda x, y: torch.stack((x, x * y), 0),
        "cat": lambda x, y: torch.cat((x, x * y), 0),
        "transpose": lambda x, y: (x * y).mT,
    }
    sample = RowwiseFunction(
        which, functions[which], lambda rows: {"x": (rows, 24), "y": (rows, 24)}
    )
    try:
        function = rowwise(sample)
        check(sample, function, sample.tensors(torch.float32, DEVICE))
    except fusedops.NotRowwiseError as error:
        # It may be refused, but not be wrong.
        assert which[:4] in str(error) or "rows" in str(error)  # noqa: PT017


@kernels
def test_heads_transposed() -> None:
    """The heads are those of attention: the output's rows are in another order."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, 1e-6).transpose(1, 2)

    sample = RowwiseFunction(
        "heads", function, lambda rows: {"x": (2, rows, 3, 16), "weight": (16,)}
    )
    check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE))


@kernels
def test_output_is_of_the_returned_sum() -> None:
    """It is of the returned, rounded numbers, which the backward and the next layer read."""

    def function(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        z = x * 3.0 + residual
        return F.layer_norm(z.float(), z.shape[-1:]), z

    x, residual = randn(5, 24, dtype=torch.bfloat16), randn(5, 24, dtype=torch.bfloat16)
    y, z = fusedops.rowwise(function, strict=True)(x, residual)
    assert (y.dtype, z.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(y, F.layer_norm(z.float(), (24,)), rtol=1e-5, atol=1e-5)


@kernels
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_ignored_class(smoothing: float) -> None:
    """One that is a column, too: its rows have neither loss nor gradient."""

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
@pytest.mark.parametrize("inside", ["detach", "no_grad"])
def test_what_has_no_gradient_in_the_function(inside: str) -> None:
    def detached(x: Tensor) -> Tensor:
        return x * x.exp().detach()

    def without(x: Tensor) -> Tensor:
        with torch.no_grad():
            factor = x.exp()
        return x * factor

    function = detached if inside == "detach" else without
    sample = RowwiseFunction(inside, function, lambda rows: {"x": (rows, 24)})
    try:
        check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE))
    except fusedops.NotRowwiseError as error:
        assert inside in str(error)  # noqa: PT017 - it may be refused, but not be wrong


@kernels
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_inputs_without_a_gradient_have_none(compiled: bool, fresh_dynamo: None) -> None:
    """The differentiated output does not depend on them, or they are only detached or compared.

    None, as in PyTorch.

    Not where it is zero whatever the numbers are.
    """

    def function(
        x: Tensor, w: Tensor, other: Tensor, detached: Tensor, compared: Tensor, signs: Tensor
    ) -> Any:
        with torch.no_grad():
            largest = x.amax(-1, keepdim=True)
        y = torch.where(x > compared, x * w, detached.detach() * x) + signs.sign()
        return y, x * other, largest, detached.detach() * x.detach()

    made: Any = fusedops.rowwise(function, strict=True)
    made = torch.compile(made, backend="aot_eager") if compiled else made
    leaves = [randn(5, 24).requires_grad_(), *[randn(24).requires_grad_() for _ in range(5)]]
    outs, eager = made(*leaves), function(*leaves)
    assert (
        [out.requires_grad for out in outs]
        == [out.requires_grad for out in eager]
        == [True, True, False, False]
    )
    assert [
        out.requires_grad
        for out in made(leaves[0].detach(), leaves[1], *[t.detach() for t in leaves[2:]])
    ] == [True, False, False, False]
    # A graph of torch.compile has zeros where only some of its outputs are differentiated.
    for used in ((0, 1),) if compiled else ((0,), (1,), (0, 1)):
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
        assert [g is None for g in got] == [g is None for g in want]
        for a, b in zip(got, want, strict=True):
            if a is not None and b is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@kernels
@pytest.mark.parametrize("name", ["sigmoid", "silu", "tanh", "relu", "gelu", "softplus"])
def test_batched_gradients(name: str) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return getattr(F, name)(x * w) * w

    x, w = randn(3, 8).double().requires_grad_(), randn(8).double().requires_grad_()
    many = randn(4, 3, 8).double()

    def results(function: Callable[..., Any]) -> list[Tensor]:
        y = function(x, w)
        once = torch.autograd.grad(y, (x, w), many, is_grads_batched=True, retain_graph=True)
        mapped = torch.func.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(many)
        jacobian = torch.autograd.functional.jacobian(function, (x, w), vectorize=True)
        hessian = torch.autograd.functional.hessian(
            lambda x: function(x, w).sum(), x, vectorize=True
        )
        return [*once, mapped, *jacobian, hessian]

    # Some tens of roundings in fp64 of numbers of this size.
    for got, want in zip(
        results(fusedops.rowwise(function, strict=True)), results(function), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


# At these inputs PyTorch's derivatives are conventions, or need more than a formula.
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
    inner, edge = _EDGES[case]
    x = RowwiseFunction(case, inner, lambda rows: {"x": (rows, 24)}).tensors(torch.float32, DEVICE)[
        "x"
    ]
    if edge == "zeros":
        x[:, 3:9] = 0.0
    elif edge == "zero row":
        x[1] = 0.0
    else:
        x[:, 3:6] = 2.5
    sample = RowwiseFunction(case, inner, lambda rows: {"x": (rows, 24)})
    check(sample, rowwise(sample), {"x": x})


@kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize(
    "case", ["fmax", "fmin", "maximum", "relu", "clamp", "amax", "softmax", "logsumexp", "where"]
)
def test_not_a_number_spreads_as_in_pytorch(case: str, value: float) -> None:
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
        warnings.simplefilter("ignore")  # it may be refused, but not be wrong
        got = fused(x)
    torch.testing.assert_close(got, functions[case](x), rtol=1e-5, atol=1e-5, equal_nan=True)


@kernels
def test_limits_that_are_no_numbers() -> None:
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
def test_variance_of_no_freedom(correction: int) -> None:
    """Infinite, and not a number where all elements are the same."""
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
# PyTorch's table says how these decompose, so they are no reason to refuse a function.
_COVERED = frozenset(_POINTWISE) - {"remainder", "base", "exp2", "std_mean"}


@kernels
@pytest.mark.parametrize("name", _POINTWISE)
def test_operators_have_pytorchs_derivatives(name: str) -> None:
    inner = _POINTWISE[name]

    def function(x: Tensor) -> Tensor:  # builtins have no signature
        return inner(x)

    sample = RowwiseFunction(name, function, lambda rows: {"x": (rows, 24)})
    tensors = sample.tensors(torch.float32, DEVICE)
    try:
        check(sample, rowwise(sample), tensors)
    except fusedops.NotRowwiseError:
        assert name not in _COVERED, f"{name} is refused"


@kernels
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("which", ["sign", "floor", "a vector", "a part"])
def test_gradients_that_are_zero_whatever_the_numbers(which: str, batched: bool) -> None:
    """In PyTorch's operators as by kernels, for second derivatives and batches; not None."""
    function: Callable[[Tensor, Tensor], Tensor] = {
        "sign": lambda x, w: x.sign() + w.sign(),
        "floor": lambda x, w: (x * w).floor().sum(-1),
        "a vector": lambda x, w: x * w.sign(),
        "a part": lambda x, w: x.chunk(2, -1)[0].ceil() * w.chunk(2, -1)[1],
    }[which]
    tensors = [randn(3, 8).requires_grad_(), randn(8).requires_grad_()]
    firsts = []
    for one in (fusedops.rowwise(function, strict=True), function):
        out = one(*tensors)
        seed = torch.ones(2, *out.shape, device=DEVICE) if batched else torch.ones_like(out)
        firsts.append(
            torch.autograd.grad(out, tensors, seed, create_graph=True, is_grads_batched=batched)
        )
    for got, want in zip(*firsts, strict=True):
        torch.testing.assert_close(got, want)


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
def test_second_derivatives_of_what_is_changed_without_a_gradient(
    change: Callable[..., Tensor], batched: bool
) -> None:
    """They are those of what was there before, of which nothing may be left to compute the first ones of."""

    def function(x: Tensor, v: Tensor) -> Tensor:
        y = x * 1.0
        with torch.no_grad():
            change(y, v)
        return y**3 * v

    def second(of: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
        grads = torch.autograd.grad(of(*leaves), leaves, cotangents[0].to(dtype), create_graph=True)
        along = [
            c.to(dtype) if batched else c[0].to(dtype) for c in (cotangents[1:3], cotangents[3:])
        ]
        return torch.autograd.grad(grads, leaves, along, is_grads_batched=batched)

    inputs, cotangents = [randn(3, 24) for _ in range(2)], randn(5, 3, 24)
    exact, eager = [second(function, dtype) for dtype in (torch.float64, torch.float32)]
    for got, want, like in zip(
        second(fusedops.rowwise(function, strict=True), torch.float32), exact, eager, strict=True
    ):
        assert_as_good(got, want, [like], "a second derivative")


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

    def third(of: Callable[[Tensor], Tensor]) -> Tensor:
        result = of(x)
        for cotangent in cotangents:
            (result,) = torch.autograd.grad(result, x, cotangent, create_graph=True)
        return result

    assert_as_good(
        third(fusedops.rowwise(function, strict=True)),
        third(function),
        [third(function)],
        "third derivative",
        64.0,
    )


@kernels
@pytest.mark.parametrize("function", [F.elu, F.selu, F.celu], ids=["elu", "selu", "celu"])
def test_second_derivatives_where_the_exponential_overflows(
    function: Callable[[Tensor], Tensor],
) -> None:
    """The exponential overflows in the branch that is not selected. Also at the kink."""
    numbers = torch.tensor([[100.0, -100.0, 0.0, 2.0, -2.0]], device=DEVICE)

    def second(of: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        x = numbers.clone().requires_grad_()
        out = of(x)
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out, first, torch.autograd.grad(first.sum(), x)[0]

    for outer in (lambda x: function(x) * 2.0, lambda x: function(x) * function(x)):
        torch.testing.assert_close(second(fusedops.rowwise(outer, strict=True)), second(outer))


# --- values of which another rounding is another result -------------------------------------------


def _quotient_and_its_largest(x: Tensor, scale: Tensor) -> Tensor:
    q = x / scale
    return q + q.amax(-1, keepdim=True)


# Functions, and the inputs by which a product with a reciprocal, or another order of factors, gives
# infinity, NaN or a difference that is not zero.
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
def test_roundings_that_matter(case: str) -> None:
    """Values and the first gradient are those of fp64, or as in PyTorch no numbers."""
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
