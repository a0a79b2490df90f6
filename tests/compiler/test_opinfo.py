"""PyTorch's own samples of its operators, each as a row-wise function.

The tensors of a sample are the arguments of the function, and everything else is a constant in it.
The function must be refused by `NotRowwiseError` (a reduction over rows, for example), or its
results and gradients must be those of PyTorch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.compiler.lowering import TABLE
from rowwise_checks import a_rounding_away
from support import DEVICE
from tolerances import unit_roundoff

pytest.importorskip(
    "expecttest", reason="torch.testing._internal imports it; it is in the extra `test`"
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore", ImportWarning)  # packages that only PyTorch's tests need
    from torch.testing._internal.common_methods_invocations import op_db

Function = Callable[..., Any]
OPS = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}
# Larger samples take seconds in the interpreter.
_MOST_ELEMENTS = 4000
_UNITS = 16.0
_COMPOSED = ("isclose", "nanmean", "linalg.vector_norm", "nn.functional.hinge_embedding_loss")
# Operators of the compiler's table, and some that are composed of these.
_TABLED = [
    name
    for name, op in OPS.items()
    if op.name.removeprefix("nn.functional.") in TABLE or name in _COMPOSED
]
# PyTorch's decomposition of `addr` omits a term that is multiplied by zero, which then has no
# gradient. The gradient of a norm of order 0 is None there, not zero.
_LEFT_OUT = ("addr", "linalg.norm.subgradients_at_zero")
# Operators whose results are random numbers or uninitialised memory.
_UNKNOWN = ("dropout", "rrelu", "empty")
# Operators that also return statistics, through which PyTorch propagates no gradient.
_NORMS = ("native_layer_norm", "native_group_norm")


# --- samples --------------------------------------------------------------------------------------


def _source(value: Any, tensors: list[Tensor]) -> str:
    """Returns the source of a constant, or the name of an argument for a tensor.

    A tensor that is not in ``tensors``, the list of the arguments, is appended to it.
    """
    if isinstance(value, Tensor):
        for index, argument in enumerate(tensors):
            if argument is value:
                return f"a{index}"
        tensors.append(value)
        return f"a{len(tensors) - 1}"
    if isinstance(value, (list, tuple)):
        inner = "".join([f"{_source(item, tensors)}, " for item in value])
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, slice):
        bounds = [_source(bound, tensors) for bound in (value.start, value.stop, value.step)]
        return f"slice({', '.join(bounds)})"
    if isinstance(
        value, (int, float, str, type(None), type(...), torch.dtype, torch.memory_format)
    ):
        return "..." if value is ... else repr(value)
    raise TypeError(f"a constant of type {type(value).__name__}")


def _as_function(op: Any, sample: Any) -> tuple[Function, list[Tensor], str]:
    """Returns a function of the sample's tensors, the tensors, and the function's source."""
    tensors: list[Tensor] = []
    arguments = [_source(value, tensors) for value in (sample.input, *sample.args)]
    arguments += [f"{name}={_source(value, tensors)}" for name, value in sample.kwargs.items()]
    parameters = [f"a{index}" for index in range(len(tensors))]
    source = f"lambda {', '.join(parameters)}: op({', '.join(arguments)})"
    scope = {"op": op, "torch": torch, "inf": math.inf, "nan": math.nan}
    return eval(source, scope), tensors, source


def _samples(name: str, dtype: torch.dtype) -> Iterator[tuple[Function, list[Tensor], str]]:
    """Yields the operator's samples as functions, without empty and 0-dim ones."""
    operator = OPS[name].op
    op = (lambda *args: operator(*args)[0]) if name in _NORMS else operator
    for sample in OPS[name].sample_inputs(DEVICE, dtype):
        try:
            function, tensors, source = _as_function(op, sample)
        except TypeError:  # a constant of a type without source
            continue
        has_dimensions = any(t.dim() for t in tensors)
        if has_dimensions and all(0 < t.numel() <= _MOST_ELEMENTS for t in tensors):
            yield function, tensors, source


def _tensors_of(returned: Any) -> list[Tensor]:
    """Returns the tensors among a function's results; raises TypeError for other results."""
    if isinstance(returned, Tensor):
        return [returned]
    if not isinstance(returned, (list, tuple)):
        raise TypeError(f"a result of type {type(returned).__name__}")
    return [t for item in returned for t in _tensors_of(item)]


def _results(function: Function, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns the outputs, and the gradients of all floating-point inputs."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
    outputs = _tensors_of(function(*leaves))
    values = [t.detach() for t in outputs]
    floating = [t for t in leaves if t.requires_grad]
    differentiable = [t for t in outputs if t.requires_grad]
    if not floating or not differentiable:
        return values
    generator = torch.Generator().manual_seed(1)
    cotangents = [
        torch.randn(t.shape, generator=generator).to(t.device, t.dtype) for t in differentiable
    ]
    grads = torch.autograd.grad(differentiable, floating, cotangents, allow_unused=True)
    return [*values, *grads]


# --- comparisons ----------------------------------------------------------------------------------


def _is_right(got: Tensor | None, exact: Tensor | None, *natives: Tensor | None) -> bool:
    """Returns whether each element is PyTorch's, or that of fp64, within a tolerance.

    The tolerance of integers is zero. That of floats is as in `assert_as_good`: twice PyTorch's
    largest error, plus `_UNITS` units of roundoff of the largest value. The units allow for the
    operators between the inputs and a value, and for the sums in gradients.

    Args:
        got: the fused function's result.
        exact: PyTorch's result in fp64.
        natives: PyTorch's results for the inputs, and for other roundings of the inputs.
    """
    want = natives[0]
    if got is None or want is None or exact is None:
        return got is want is exact
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    result, in_fp64 = got.double(), exact.to(want.dtype).double()
    tolerance = torch.zeros(())
    if want.dtype.is_floating_point:
        errors = torch.stack(
            [
                (native.double() - in_fp64).nan_to_num(0.0, 0.0, 0.0).abs()
                for native in natives
                if native is not None
            ]
        )
        size = in_fp64.nan_to_num(0.0, 0.0, 0.0).abs()
        tolerance = 2 * errors.max() + _UNITS * unit_roundoff(want.dtype) * size.max()

    def matches(expected: Tensor) -> Tensor:
        both_nan = result.isnan() & expected.isnan()
        return (result == expected) | both_nan | ((result - expected).abs() <= tolerance)

    return bool((matches(want.double()) | matches(in_fp64)).all())


def _check(function: Function, inputs: list[Tensor], source: str, draws: int = 3) -> str:
    """Asserts that a fused function has the right results, if it is fused.

    Args:
        function: the plain function.
        inputs: its arguments.
        source: its source, for the message.
        draws: the number of other roundings of the inputs on which to measure PyTorch's error.

    Returns:
        "right"; "refused", if the function is not fused; "unknown", if PyTorch cannot call it.
    """
    try:
        want = _results(function, inputs)
    except (RuntimeError, TypeError):  # PyTorch refuses the sample, or returns no tensor
        return "unknown"
    try:
        exact = _results(function, [t.double() if t.is_floating_point() else t for t in inputs])
    except RuntimeError:  # the sample has a dtype that does not fit inputs in fp64
        exact = want
    try:
        got = _results(fusedops.rowwise(function, strict=True), inputs)
    except fusedops.NotRowwiseError:
        return "refused"
    perturbed = [
        _results(function, [a_rounding_away(t, draw) for t in inputs]) for draw in range(draws)
    ]
    right = [_is_right(*results) for results in zip(got, exact, want, *perturbed, strict=True)]
    assert all(right), f"{source} of {inputs}: {right}, got {got}, expected {want}"
    return "right"


def _rounded(t: Tensor) -> Tensor:
    """The tensor rounded to multiples of 0.5, so that it has ties, zeros and ones."""
    return (t * 2).round() / 2 if t.dtype.is_floating_point else t


# The operators that the short suite also tests on integers and booleans.
_OF_INTEGERS = (
    "add",
    "sub",
    "mul",
    "floor",
    "sum",
    "amax",
    "where",
    "clamp",
    "nn.functional.hardtanh",
    "cat",
)


def _cases() -> Iterator[Any]:
    for name, op in OPS.items():
        if any(word in name for word in _UNKNOWN) or name in _LEFT_OUT:
            continue
        for dtype in (torch.float32, torch.int64, torch.bool):
            if dtype not in op.supported_dtypes(DEVICE.type):
                continue
            in_short_suite = name in (_TABLED if dtype == torch.float32 else _OF_INTEGERS)
            marks = () if in_short_suite else pytest.mark.full
            yield pytest.param(name, dtype, marks=marks, id=f"{name}-{str(dtype)[6:]}")


@pytest.mark.shared("name", most=40)  # tests/compiler/test_operators.py tests the others
@pytest.mark.kernels
# Some samples call deprecated operators, which are not traced.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "dtype"), list(_cases()))
def test_samples_are_right_or_refused(name: str, dtype: torch.dtype, full: bool) -> None:
    """The full suite tests at most 16 samples of an operator, the short suite one."""
    samples = list(_samples(name, dtype))
    step = -(-len(samples) // (16 if full else 1)) or 1
    for function, inputs, source in samples[step // 2 :: step]:
        result = _check(function, inputs, source)
        if result == "right" and dtype == torch.float32:
            # Random numbers have no ties, but rounded ones do. Other roundings would remove the ties.
            _check(function, list(map(_rounded, inputs)), source, draws=0)
