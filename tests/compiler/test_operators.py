"""`fusedops.rowwise`: each operator of the table, and its derivative, at kinks and ends, as PyTorch has them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops
from backends import Backend
from fusedops.compiler import launching
from fusedops.compiler.operator import Program
from fusedops.compiler.planning import planned
from fusedops.compiler.rows import structured
from fusedops.compiler.tracing import trace
from fusedops.core.configs import tuning
from fusedops.core.launches import launch
from rowwise_operators import BINARY, ROWS, UNARY, numbers, pairs, rows
from support import DEVICE

_DTYPES = [torch.float32, torch.float64, torch.bfloat16]
compiler = pytest.importorskip("triton.backends.compiler")
kernels = pytest.mark.kernels
every_dtype = pytest.mark.parametrize("dtype", _DTYPES, ids=lambda dtype: str(dtype)[6:])
# An exponential of a number up to 88, in fp64 up to 709, has a relative error of as many units.
_RTOL = {torch.float32: 1e-5, torch.float64: 2e-13, torch.bfloat16: 2.0**-7}
# Beyond the smallest results that a logistic function in fp32 tells from zero.
_ATOL = {torch.float32: 1e-16, torch.float64: 1e-20, torch.bfloat16: 1e-16}
# Differences of near numbers, in which PyTorch, the kernel or both have lost all but some units of
# one.
_CANCELS = {
    "tanh",
    "sigmoid",
    "tanhshrink",
    "binary_cross_entropy_with_logits",
    "gelu",
    "gelu_tanh",
    "sinc",
    "cosine",
    "kl_div_log",
    "sinh",
    "tan",
    "frac",
}
# PyTorch's kernels for fp64 have constants in fp32.
_IN_FP32 = {"hardsigmoid", "hardswish", "binary_cross_entropy"}
# Of NaN as an input PyTorch's kernels have a gradient of one or of zero, by dtype and device.
_NOT_OF_NAN = {"relu6", "hardtanh", "hardshrink", "hardswish", "softshrink"}
# There the gradient of these is one in PyTorch's scalar code, and NaN in its vectors of AVX2.
_NAN_BY_VECTORS = {"elu", "selu", "celu", "elu_of", "celu_of"}


def _results(function: Callable[..., Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """The output, and the gradients of all inputs."""
    leaves = [t.clone().requires_grad_() for t in given]
    out = function(*leaves)
    if not out.requires_grad:
        return [out]
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0], device=out.device).repeat(-(-out.shape[-1] // 4))[
        : out.shape[-1]
    ]
    grads = torch.autograd.grad(
        out, leaves, weights.to(out.dtype).expand_as(out), allow_unused=True
    )
    return [out.detach(), *grads]


def _differs(got: Tensor, want: Tensor, name: str, by_row: bool) -> Tensor:
    """Where two results differ, by more than roundings of an element, or of the largest in its row."""
    got, wide = got.double(), want.double()
    rtol, atol = _RTOL.get(want.dtype, 0.0), _ATOL.get(want.dtype, 0.0)
    if name in _CANCELS:
        atol = max(
            atol,
            4 * torch.finfo(torch.float64 if want.dtype == torch.float64 else torch.float32).eps,
        )
        rtol *= 10
    if name == "sinc" and want.dtype == torch.float64:  # PyTorch's derivative cancels near zero
        rtol = 1e-10
    if name in _IN_FP32 and want.dtype == torch.float64:
        rtol = 1e-7
    size = wide.abs().nan_to_num(0.0, 0.0, 0.0)
    tolerance = rtol * (size.amax(-1, keepdim=True) if by_row else size) + atol
    return ~((got == wide) | (got.isnan() & wide.isnan()) | ((got - wide).abs() <= tolerance))


def _check(
    name: str, function: Callable[..., Tensor], given: Sequence[Tensor], *, by_row: bool = False
) -> None:
    """As in PyTorch, or as in PyTorch in fp64."""
    named: Any = (lambda x: function(x)) if len(given) == 1 else (lambda x, y: function(x, y))
    got = _results(fusedops.rowwise(named, strict=True), given)
    # On the CPU, as conventions are others on the GPU.
    given = [t.cpu() for t in given]
    want, exact = (
        _results(lambda *cpu: function(*cpu), given),
        _results(function, [t.double() for t in given]),
    )
    assert [t is None for t in got] == [t is None for t in want]
    for place, (result, two, wide) in enumerate(zip(got, want, exact, strict=True)):
        if result is None or two is None or wide is None:
            continue
        one, three = result.cpu(), wide.to(two.dtype)
        assert one.dtype == two.dtype
        wrong = _differs(one, two, name, by_row) & _differs(one, three, name, by_row)
        if place:  # a gradient of what is no number may be none
            wrong &= ~(one.isnan() & want[0].isnan())
        # A GPU's remainder is not exact if the dtype cannot hold the quotient.
        if name in ("remainder", "fmod"):
            wrong &= (given[0] / given[1]).abs() < 1 / torch.finfo(torch.float32).eps
        if name in _NOT_OF_NAN or (place and name in _NAN_BY_VECTORS):
            wrong &= ~given[0].isnan()
        bad = [
            (*[t[tuple(at)].item() for t in (*given, one, two)],)
            for at in wrong.nonzero().tolist()[:4]
        ]
        assert not bad, (
            f"{'gradient' if place else 'output'} {place}: inputs, found, expected: {bad}"
        )


@kernels
@every_dtype
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_number(name: str, dtype: torch.dtype) -> None:
    _check(name, UNARY[name], [numbers(dtype).to(DEVICE)])


@kernels
@pytest.mark.parametrize(
    "name", ["sinc", "sinh", "atanh", "elu", "hardswish", "relu6", "softshrink", "pow -2"]
)
def test_functions_of_rows_that_are_too_long_for_kernels(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's operators run in their place, with the derivatives that the kernels have."""
    monkeypatch.setattr(launch, "LONGEST_ROW", 16)
    with launch.record() as launched:
        _check(name, UNARY[name], [numbers(torch.float32).to(DEVICE)])
    assert not launched


@kernels
@every_dtype
@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_numbers(name: str, dtype: torch.dtype) -> None:
    _check(name, BINARY[name], [t.to(DEVICE) for t in pairs(dtype)])


@kernels
@every_dtype
@pytest.mark.parametrize("name", ROWS)
def test_functions_of_a_row(name: str, dtype: torch.dtype) -> None:
    _check(name, ROWS[name], [rows(dtype).to(DEVICE)], by_row=True)


@kernels
@pytest.mark.parametrize("name", ["fmax", "fmin", "maximum", "minimum", "clamp"])
def test_ties_and_limits_have_pytorchs_gradients(name: str) -> None:
    """Arguments are all combinations of numbers, some of them equal, infinite or NaN."""
    values = torch.tensor([0.0, -0.0, 1.0, 2.0, float("nan"), float("inf"), float("-inf")])
    inputs = list(
        torch.cartesian_prod(*[values] * (3 if name == "clamp" else 2))
        .T.contiguous()[:, None]
        .to(DEVICE)
    )
    function: Any = (
        (lambda x, y: getattr(torch, name)(x, y))
        if len(inputs) == 2
        else (lambda x, y, z: torch.clamp(x, y, z))
    )
    # On the CPU, as conventions are others on the GPU.
    want = _results(function, [t.cpu() for t in inputs])
    got = [t.cpu() for t in _results(fusedops.rowwise(function, strict=True), inputs)]
    torch.testing.assert_close(got, want, rtol=0.0, atol=0.0, equal_nan=True)


# --- what is rounded, and what has a wider dtype --------------------------------------------------


def _same(
    function: Callable[..., Any], *given: Tensor, rtol: float = 0.0, how: str = "rowwise"
) -> None:
    """The result is PyTorch's, and so are the gradients, which PyTorch rounds at each cast."""
    results = []
    for run in (
        fusedops.rowwise(function, strict=True) if how == "rowwise" else _compiled(function),
        function,
    ):
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in given]
        out = run(*leaves)
        grads = torch.autograd.grad(
            out.sum(), [t for t in leaves if t.requires_grad], allow_unused=True
        )
        results.append((out.detach(), *[g for g in grads if g is not None]))
    (got, *grads), (want, *expected) = results
    torch.testing.assert_close(got, want, rtol=rtol, atol=0.0)
    torch.testing.assert_close(grads, expected, rtol=2.0**-7, atol=1e-6)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """In a region of the backend, which is not compiled further."""
    backend = Backend()

    def run(*given: Tensor) -> Tensor:
        out = torch.compile(function, backend=backend, fullgraph=True)(*given)
        assert len(backend.report.regions) == 1
        return out  # type: ignore[no-any-return]

    return run


_CASTS: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype]] = {
    "residual": (lambda x: x - x.bfloat16().float() + x.amax(-1, keepdim=True), torch.float32),
    "residual of parts": (
        lambda x: (
            x
            - torch.cat([part.float() for part in x.bfloat16().chunk(2, -1)], -1)
            + x.amax(-1, keepdim=True)
        ),
        torch.float32,
    ),
    "two narrow dtypes": (
        lambda x: x.bfloat16().half().float() * x.amax(-1, keepdim=True),
        torch.float32,
    ),
    "equal": (lambda x: x * (x == -10000.0) + x.amax(-1, keepdim=True), torch.bfloat16),
    "greater": (lambda x: x * (x > 0.1) + x.amax(-1, keepdim=True), torch.bfloat16),
    "equal to half": (
        lambda x: x * (x.half() == 0.1) + x.amax(-1, keepdim=True),
        torch.float32,
    ),
    "at least half": (
        lambda x: x * ((x * -10.0).half() >= 1e5) + x.amax(-1, keepdim=True),
        torch.float32,
    ),
    "equal to single": (
        lambda x: x * (x.float() == 0.1) + x.amax(-1, keepdim=True),
        torch.float64,
    ),
}


@kernels
@pytest.mark.parametrize("how", ["rowwise", "compile"])
@pytest.mark.parametrize("case", _CASTS)
def test_casts_down_and_up_round_and_numbers_compare_in_half_precision(
    case: str, how: str, fresh_dynamo: None
) -> None:
    function, dtype = _CASTS[case]
    x = torch.randn(5, 24)
    x[:, 0], x[:, 1] = 0.1, -10000.0
    _same(lambda x: function(x), x.to(DEVICE, dtype), how=how)


@kernels
@pytest.mark.parametrize("how", ["rowwise", "compile"])
@pytest.mark.parametrize("case", ["double", "dtype of a sum"])
def test_fp64_inside_a_function_is_computed_in_fp64(
    case: str, how: str, fresh_dynamo: None
) -> None:
    def double(x: Tensor) -> Tensor:
        return x.double().exp().sum(-1, keepdim=True).log().float() - x

    def total(x: Tensor) -> Tensor:
        return (x * 1e30).sum(-1, keepdim=True, dtype=torch.float64).mul(1e30).log().float() * x

    x = 100 + torch.randn(5, 24, device=DEVICE)
    # The sum of the exponentials is beyond fp32, the logarithm is not.
    _same(double if case == "double" else total, x, rtol=1e-5, how=how)


@kernels
@pytest.mark.parametrize("columns", [3, 24, 100, 20001])
def test_equal_numbers_have_no_deviation(columns: int) -> None:
    x = torch.full((2, columns), 0.1, device=DEVICE, requires_grad=True)
    spread = fusedops.rowwise(
        lambda x: x.std(-1, keepdim=True) + x.var(-1, keepdim=True), strict=True
    )(x)
    (grad,) = torch.autograd.grad(spread.sum(), x)
    assert not spread.any() and not grad.any()
    mean = fusedops.rowwise(lambda x: torch.var_mean(x, -1, keepdim=True)[1], strict=True)
    assert mean(torch.full((2, columns), torch.inf, device=DEVICE)).isposinf().all()


@kernels
def test_smoothed_labels_far_from_zero() -> None:
    def loss(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x, target, reduction="none", label_smoothing=0.1)

    x, target = torch.randn(5, 24) + 1e6, torch.arange(5)
    exact = loss(x.double(), target).float()
    got = fusedops.rowwise(loss, strict=True)(x.to(DEVICE), target.to(DEVICE))
    torch.testing.assert_close(got.cpu(), exact, rtol=1e-5, atol=0.0)


# --- arguments that PyTorch refuses ---------------------------------------------------------------


@kernels
@pytest.mark.parametrize("target", [-1, 24, 1 << 40])
def test_targets_out_of_range_have_no_loss(target: int) -> None:
    """PyTorch raises an error, for which a kernel would have to be waited for."""

    def losses(x: Tensor, target: Tensor) -> Tensor:
        likely = x.log_softmax(-1)
        loss = F.cross_entropy(x, target, reduction="none") + F.nll_loss(
            likely, target, reduction="none"
        )
        return loss + x.gather(-1, target[:, None])[:, 0]

    targets = torch.tensor([3, target, 0], device=DEVICE)
    got = fusedops.rowwise(losses, strict=True)(torch.randn(3, 24, device=DEVICE), targets)
    assert got.isnan().tolist() == [False, True, False]


@kernels
@pytest.mark.parametrize("index", [-1, 24, 1 << 40])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_indices_out_of_range_give_no_number(index: int, dtype: torch.dtype) -> None:
    """Among integers, too: these become NaN as floats, and are the least one as they are."""

    def picked(table: Tensor, index: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        element = table.gather(-1, index[:, None])
        return element, element + x[:, :1], F.one_hot(index, 24) * x

    indices, table = (
        torch.tensor([3, index, 0], device=DEVICE),
        torch.arange(72, device=DEVICE).view(3, 24).to(dtype),
    )
    result, *floats = fusedops.rowwise(picked, strict=True)(
        table, indices, torch.randn(3, 24, device=DEVICE)
    )
    assert result.flatten().tolist() == [3, torch.iinfo(dtype).min, 48]
    for given in floats:
        assert (
            given.isnan().all(-1).tolist() == given.isnan().any(-1).tolist() == [False, True, False]
        )


@kernels
@pytest.mark.parametrize("cols", [24, 64])
def test_whole_numbers_chosen_by_a_condition_do_not_overflow(cols: int) -> None:
    """They are int64, as in PyTorch, and a maximum of them has a neutral element in the padding."""

    def products(x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.where(x > 0, 2**30, 0)
        return (chosen * 4).to(x.dtype), chosen.amax(-1, keepdim=True) + x

    x = torch.randn(3, cols, device=DEVICE)
    results = fusedops.rowwise(products, strict=True)(x)
    for result, expected in zip(results, products(x), strict=True):
        assert torch.equal(result, expected)


@kernels
@pytest.mark.parametrize("number", [2**24, 2**24 + 1])
def test_whole_numbers_of_long_rows_are_exact_or_refused(number: int) -> None:
    """The maximum of a long row is stored as a float, which does not hold ``2 ** 24 + 1``."""

    def parity(x: Tensor) -> Tensor:
        largest = torch.where(x > 0, number, 0).amax(-1, keepdim=True)
        return torch.where(largest % 2 == 1, x, 0.0)

    x = torch.randn(2, 65536, device=DEVICE)
    function = fusedops.rowwise(parity, strict=True)
    if number % 2:
        with pytest.raises(fusedops.NotRowwiseError, match="maxima or minima of whole numbers"):
            function(x)
    else:
        assert torch.equal(function(x), parity(x))


@kernels
def test_probabilities_out_of_range_have_no_loss() -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy(x, y, reduction="none")

    inputs = torch.tensor([[0.5, 1.5, -0.5, 1.0]], device=DEVICE)
    for y in (0.0, 1.0, 0.5):
        got = fusedops.rowwise(loss, strict=True)(inputs, torch.full_like(inputs, y))
        assert got.isnan().tolist() == [[False, True, True, False]]


@kernels
@pytest.mark.parametrize("how", ["smooth_l1", "huber", "hardtanh", "celu"])
def test_constants_that_pytorch_refuses_are_refused(how: str) -> None:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "smooth_l1": lambda x: F.smooth_l1_loss(x, x, reduction="none", beta=-1.0),
        "huber": lambda x: F.huber_loss(x, x, reduction="none", delta=-1.0),
        "hardtanh": lambda x: F.hardtanh(x, 1.0, -1.0),
        "celu": lambda x: F.celu(x, 0.0),
    }
    with pytest.raises((RuntimeError, ValueError)) as expected:
        functions[how](torch.ones(2, 4))
    with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
        fusedops.rowwise(functions[how], strict=True)(torch.ones(2, 4, device=DEVICE))


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("some", range(6))
def test_operators_compile(some: int, dtype: torch.dtype) -> None:
    """In kernels of many operators each."""
    table: dict[str, Callable[..., Tensor]] = {**UNARY, **BINARY, **ROWS}
    chosen = [(function, name in BINARY) for name, function in list(table.items())[some::6]]

    def function(x: Tensor, y: Tensor) -> Tensor:
        results = [
            (inner(x, y) if takes_two else inner(x)).to(x.dtype) for inner, takes_two in chosen
        ]
        return functools.reduce(torch.add, results)

    inputs = [torch.empty(64, 256, dtype=dtype, device="meta") for _ in range(2)]
    structure = structured(trace(function, inputs, function, ["x", "y"], lambda _: None))
    program = Program("function", function, planned(structure))
    # Two elements for each thread: the time to compile grows with their number.
    small = tuning.Config(256, 1, 4)
    with tuning.forced("rowwise_forward", small), tuning.forced("rowwise_backward", small):
        kernels_of_call = launching.chosen(program, -1, inputs)
    for _, request, _ in kernels_of_call:
        assert request.config == small
        launch.compile_kernel(request, compiler.GPUTarget("cuda", 90, 32))


@pytest.mark.kernels
@pytest.mark.parametrize("keepdim", [False, True])
def test_extremes_of_truth_values_along_a_row(keepdim: bool) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        condition = x > -1.8
        least, first = condition.min(-1, keepdim=keepdim)
        most, _ = (x > 1.8).max(-1, keepdim=keepdim)
        return least, first, most, x * 2

    x = torch.randn(24, 16).to(DEVICE)
    expected = function(x)
    assert 0 < expected[0].sum() < 24 and 0 < expected[2].sum() < 24
    for one, other in zip(fusedops.rowwise(function, strict=True)(x), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.kernels
def test_bits_of_integers_have_the_same_gradients_in_a_graph() -> None:
    def function(x: Tensor, i: Tensor) -> Tensor:
        return x * x * (i & 2) + x**3 * (i | 4) - x * (i ^ 3)

    x, i = torch.randn(6, 16).to(DEVICE).requires_grad_(), torch.arange(16, device=DEVICE)
    fused = fusedops.rowwise(function, strict=True)(x, i.expand(6, 16))
    (got,) = torch.autograd.grad(fused.sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(function(x, i).sum(), x)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
