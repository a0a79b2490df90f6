"""`fusedops.rowwise`: values and derivatives of each operator at special inputs against PyTorch."""

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
# An exponential of x has a relative error of x units; x is at most 88 in fp32 and 709 in fp64.
_RTOL = {torch.float32: 1e-5, torch.float64: 2e-13, torch.bfloat16: 2.0**-7}
# Smaller results of a logistic function are zero in fp32.
_ATOL = {torch.float32: 1e-16, torch.float64: 1e-20, torch.bfloat16: 1e-16}
# Differences of nearly equal numbers. PyTorch, the kernel or both are exact only to some units of
# roundoff of one.
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
# PyTorch's kernels for fp64 use constants in fp32.
_CONSTANTS_IN_FP32 = {"hardsigmoid", "hardswish", "binary_cross_entropy"}
# If the input is NaN, PyTorch's gradient is one or zero, depending on dtype and device.
_NOT_OF_NAN = {"relu6", "hardtanh", "hardshrink", "hardswish", "softshrink"}
# If the input is NaN, PyTorch's gradient is one in scalar code, and NaN in vectors of AVX2.
_NAN_BY_VECTORS = {"elu", "selu", "celu", "elu_of", "celu_of"}


def _results(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the output, and the gradients of all inputs."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    if not out.requires_grad:
        return [out]
    cols = out.shape[-1]
    pattern = torch.tensor([1.0, -2.0, 0.5, 3.0], device=out.device)
    cotangent = pattern.repeat(-(-cols // 4))[:cols].to(out.dtype).expand_as(out)
    grads = torch.autograd.grad(out, leaves, cotangent, allow_unused=True)
    return [out.detach(), *grads]


def _differs(got: Tensor, want: Tensor, name: str, *, by_row: bool) -> Tensor:
    """Returns which elements differ by more than some roundings.

    The roundings are those of the element, or with ``by_row`` of the largest in its row.
    """
    got, wide = got.double(), want.double()
    rtol, atol = _RTOL.get(want.dtype, 0.0), _ATOL.get(want.dtype, 0.0)
    if name in _CANCELS:
        computed_in = torch.float64 if want.dtype == torch.float64 else torch.float32
        atol = max(atol, 4 * torch.finfo(computed_in).eps)
        rtol *= 10
    if name == "sinc" and want.dtype == torch.float64:  # PyTorch's derivative cancels near zero
        rtol = 1e-10
    if name in _CONSTANTS_IN_FP32 and want.dtype == torch.float64:
        rtol = 1e-7
    size = wide.abs().nan_to_num(0.0, 0.0, 0.0)
    if by_row:
        size = size.amax(-1, keepdim=True)
    is_close = (got - wide).abs() <= rtol * size + atol
    both_nan = got.isnan() & wide.isnan()
    return ~((got == wide) | both_nan | is_close)


def _check(
    name: str, function: Callable[..., Tensor], inputs: Sequence[Tensor], *, by_row: bool = False
) -> None:
    """Asserts that each element of output and gradients is PyTorch's, or PyTorch's in fp64."""
    with_signature: Any = (
        (lambda x: function(x)) if len(inputs) == 1 else (lambda x, y: function(x, y))
    )
    got = _results(fusedops.rowwise(with_signature, strict=True), inputs)
    # PyTorch is called on the CPU, because it has other conventions on the GPU.
    inputs = [t.cpu() for t in inputs]
    want = _results(function, inputs)
    exact = _results(function, [t.double() for t in inputs])
    assert [t is None for t in got] == [t is None for t in want]
    for index, (actual, expected, in_fp64) in enumerate(zip(got, want, exact, strict=True)):
        if actual is None or expected is None or in_fp64 is None:
            continue
        result, rounded = actual.cpu(), in_fp64.to(expected.dtype)
        assert result.dtype == expected.dtype
        wrong = _differs(result, expected, name, by_row=by_row)
        wrong &= _differs(result, rounded, name, by_row=by_row)
        is_gradient = index > 0
        if is_gradient:  # where the output is NaN, the gradient may be NaN, too
            wrong &= ~(result.isnan() & want[0].isnan())
        # A GPU's remainder is not exact if the dtype cannot hold the quotient.
        if name in ("remainder", "fmod"):
            wrong &= (inputs[0] / inputs[1]).abs() < 1 / torch.finfo(torch.float32).eps
        if name in _NOT_OF_NAN or (is_gradient and name in _NAN_BY_VECTORS):
            wrong &= ~inputs[0].isnan()
        examples = [
            [t[tuple(indices)].item() for t in (*inputs, result, expected)]
            for indices in wrong.nonzero().tolist()[:4]
        ]
        what = f"gradient {index}" if is_gradient else "output"
        assert not examples, f"{what}: inputs, actual, expected: {examples}"


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
    """PyTorch's operators run instead of kernels, with the derivatives of the kernels."""
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
    count = 3 if name == "clamp" else 2
    combinations = torch.cartesian_prod(*[values] * count)
    inputs = list(combinations.T.contiguous()[:, None].to(DEVICE))
    function: Any = (
        (lambda x, y, z: torch.clamp(x, y, z))
        if name == "clamp"
        else (lambda x, y: getattr(torch, name)(x, y))
    )
    # PyTorch is called on the CPU, because it has other conventions on the GPU.
    want = _results(function, [t.cpu() for t in inputs])
    got = [t.cpu() for t in _results(fusedops.rowwise(function, strict=True), inputs)]
    torch.testing.assert_close(got, want, rtol=0.0, atol=0.0, equal_nan=True)


# --- casts and wider dtypes -----------------------------------------------------------------------


def _assert_matches_pytorch(
    function: Callable[..., Any], *inputs: Tensor, rtol: float = 0.0, fused_by: str = "rowwise"
) -> None:
    """Compares result and gradients with PyTorch's. PyTorch rounds the gradient at each cast."""
    fused = (
        fusedops.rowwise(function, strict=True) if fused_by == "rowwise" else _compiled(function)
    )
    results = []
    for run in (fused, function):
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
        out = run(*leaves)
        grads = torch.autograd.grad(
            out.sum(), [t for t in leaves if t.requires_grad], allow_unused=True
        )
        results.append((out.detach(), *[g for g in grads if g is not None]))
    (got, *grads), (want, *expected_grads) = results
    torch.testing.assert_close(got, want, rtol=rtol, atol=0.0)
    torch.testing.assert_close(grads, expected_grads, rtol=2.0**-7, atol=1e-6)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled by the fusedops backend as one region, without Inductor."""
    backend = Backend()

    def run(*inputs: Tensor) -> Tensor:
        out = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
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
@pytest.mark.parametrize("fused_by", ["rowwise", "compile"])
@pytest.mark.parametrize("case", _CASTS)
def test_casts_to_a_narrower_dtype_round_also_constants_of_comparisons(
    case: str, fused_by: str, fresh_dynamo: None
) -> None:
    function, dtype = _CASTS[case]
    x = torch.randn(5, 24)
    x[:, 0], x[:, 1] = 0.1, -10000.0
    _assert_matches_pytorch(lambda x: function(x), x.to(DEVICE, dtype), fused_by=fused_by)


@kernels
@pytest.mark.parametrize("fused_by", ["rowwise", "compile"])
@pytest.mark.parametrize("case", ["double", "dtype of a sum"])
def test_fp64_inside_a_function_is_computed_in_fp64(
    case: str, fused_by: str, fresh_dynamo: None
) -> None:
    def double(x: Tensor) -> Tensor:
        return x.double().exp().sum(-1, keepdim=True).log().float() - x

    def total(x: Tensor) -> Tensor:
        return (x * 1e30).sum(-1, keepdim=True, dtype=torch.float64).mul(1e30).log().float() * x

    x = 100 + torch.randn(5, 24, device=DEVICE)
    # The sum of the exponentials overflows fp32; its logarithm does not.
    function = double if case == "double" else total
    _assert_matches_pytorch(function, x, rtol=1e-5, fused_by=fused_by)


@kernels
@pytest.mark.parametrize("columns", [3, 24, 100, 20001])
def test_deviation_of_equal_numbers_and_its_gradient_are_zero(columns: int) -> None:
    """The mean of equal infinite numbers is infinite, not NaN."""
    x = torch.full((2, columns), 0.1, device=DEVICE, requires_grad=True)
    deviation = fusedops.rowwise(
        lambda x: x.std(-1, keepdim=True) + x.var(-1, keepdim=True), strict=True
    )(x)
    (grad,) = torch.autograd.grad(deviation.sum(), x)
    assert not deviation.any()
    assert not grad.any()
    mean = fusedops.rowwise(lambda x: torch.var_mean(x, -1, keepdim=True)[1], strict=True)
    assert mean(torch.full((2, columns), torch.inf, device=DEVICE)).isposinf().all()


@kernels
def test_label_smoothing_of_logits_far_from_zero() -> None:
    def loss(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x, target, reduction="none", label_smoothing=0.1)

    x, target = torch.randn(5, 24) + 1e6, torch.arange(5)
    exact = loss(x.double(), target).float()
    got = fusedops.rowwise(loss, strict=True)(x.to(DEVICE), target.to(DEVICE))
    torch.testing.assert_close(got.cpu(), exact, rtol=1e-5, atol=0.0)


# --- arguments that PyTorch refuses ---------------------------------------------------------------


@kernels
@pytest.mark.parametrize("target", [-1, 24, 1 << 40])
def test_loss_of_a_target_out_of_range_is_nan(target: int) -> None:
    """PyTorch raises an error. A kernel cannot, without a synchronisation."""

    def losses(x: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(x, target, reduction="none")
        loss = loss + F.nll_loss(x.log_softmax(-1), target, reduction="none")
        return loss + x.gather(-1, target[:, None])[:, 0]

    targets = torch.tensor([3, target, 0], device=DEVICE)
    got = fusedops.rowwise(losses, strict=True)(torch.randn(3, 24, device=DEVICE), targets)
    assert got.isnan().tolist() == [False, True, False]


@kernels
@pytest.mark.parametrize("index", [-1, 24, 1 << 40])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_index_out_of_range_gives_nan_or_the_least_integer(index: int, dtype: torch.dtype) -> None:
    """An integer that is gathered is the least of its dtype; converted to a float, it is NaN."""

    def gathered(table: Tensor, index: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        element = table.gather(-1, index[:, None])
        return element, element + x[:, :1], F.one_hot(index, 24) * x

    indices = torch.tensor([3, index, 0], device=DEVICE)
    table = torch.arange(72, device=DEVICE).view(3, 24).to(dtype)
    elements, *floats = fusedops.rowwise(gathered, strict=True)(
        table, indices, torch.randn(3, 24, device=DEVICE)
    )
    assert elements.flatten().tolist() == [3, torch.iinfo(dtype).min, 48]
    for values in floats:
        assert values.isnan().all(-1).tolist() == [False, True, False]
        assert values.isnan().any(-1).tolist() == [False, True, False]


@kernels
@pytest.mark.parametrize("cols", [24, 64])
def test_integers_selected_by_a_condition_do_not_overflow(cols: int) -> None:
    """They are int64, as in PyTorch. Idle lanes do not change their maximum."""

    def products(x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.where(x > 0, 2**30, 0)
        return (chosen * 4).to(x.dtype), chosen.amax(-1, keepdim=True) + x

    x = torch.randn(3, cols, device=DEVICE)
    results = fusedops.rowwise(products, strict=True)(x)
    for result, expected in zip(results, products(x), strict=True):
        assert torch.equal(result, expected)


@kernels
@pytest.mark.parametrize("number", [2**24, 2**24 + 1])
def test_integers_of_long_rows_are_exact_or_refused(number: int) -> None:
    """The maximum of a long row is stored in fp32, which cannot represent ``2 ** 24 + 1``."""

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
def test_loss_of_probabilities_out_of_range_is_nan() -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy(x, y, reduction="none")

    inputs = torch.tensor([[0.5, 1.5, -0.5, 1.0]], device=DEVICE)
    for y in (0.0, 1.0, 0.5):
        got = fusedops.rowwise(loss, strict=True)(inputs, torch.full_like(inputs, y))
        assert got.isnan().tolist() == [[False, True, True, False]]


@kernels
@pytest.mark.parametrize("case", ["smooth_l1", "huber", "hardtanh", "celu"])
def test_constants_that_pytorch_refuses_raise_its_error(case: str) -> None:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "smooth_l1": lambda x: F.smooth_l1_loss(x, x, reduction="none", beta=-1.0),
        "huber": lambda x: F.huber_loss(x, x, reduction="none", delta=-1.0),
        "hardtanh": lambda x: F.hardtanh(x, 1.0, -1.0),
        "celu": lambda x: F.celu(x, 0.0),
    }
    with pytest.raises((RuntimeError, ValueError)) as expected:
        functions[case](torch.ones(2, 4))
    with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
        fusedops.rowwise(functions[case], strict=True)(torch.ones(2, 4, device=DEVICE))


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("first", range(6))
def test_operators_compile(first: int, dtype: torch.dtype) -> None:
    """Six kernels have a sixth of the operators each."""
    table: dict[str, Callable[..., Tensor]] = {**UNARY, **BINARY, **ROWS}
    names = list(table)[first::6]

    def function(x: Tensor, y: Tensor) -> Tensor:
        results = []
        for name in names:
            result = table[name](x, y) if name in BINARY else table[name](x)
            results.append(result.to(x.dtype))
        return functools.reduce(torch.add, results)

    inputs = [torch.empty(64, 256, dtype=dtype, device="meta") for _ in range(2)]
    structure = structured(trace(function, inputs, function, ["x", "y"], lambda _: None))
    program = Program("function", function, planned(structure))
    # Two elements for each thread, since the time to compile grows with their number.
    small = tuning.Config(block_n=256, rows=1, warps=4)
    with tuning.forced("rowwise_forward", small), tuning.forced("rowwise_backward", small):
        kernels_of_call = launching.chosen(program, device_index=-1, tensors=inputs)
    for _, request, _ in kernels_of_call:
        assert request.config == small
        launch.compile_kernel(request, compiler.GPUTarget("cuda", arch=90, warp_size=32))


@pytest.mark.kernels
@pytest.mark.parametrize("keepdim", [False, True])
def test_minimum_and_maximum_of_booleans_along_a_row(keepdim: bool) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        condition = x > -1.8
        least, first = condition.min(-1, keepdim=keepdim)
        most, _ = (x > 1.8).max(-1, keepdim=keepdim)
        return least, first, most, x * 2

    x = torch.randn(24, 16).to(DEVICE)
    expected = function(x)
    assert 0 < expected[0].sum() < 24 and 0 < expected[2].sum() < 24
    for result, value in zip(fusedops.rowwise(function, strict=True)(x), expected, strict=True):
        assert torch.equal(result, value)


@pytest.mark.kernels
def test_gradient_beside_bitwise_operators_with_create_graph() -> None:
    def function(x: Tensor, i: Tensor) -> Tensor:
        return x * x * (i & 2) + x**3 * (i | 4) - x * (i ^ 3)

    x, i = torch.randn(6, 16).to(DEVICE).requires_grad_(), torch.arange(16, device=DEVICE)
    fused = fusedops.rowwise(function, strict=True)(x, i.expand(6, 16))
    (got,) = torch.autograd.grad(fused.sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(function(x, i).sum(), x)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
