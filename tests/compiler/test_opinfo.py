"""PyTorch's own samples of its operators, each as a row-wise function: right, or refused by name.

A sample's tensors are arguments, and all else is a constant of the function. Those that PyTorch
takes and kernels do not, such as reductions over rows, raise `NotRowwiseError`; any other result is
compared with PyTorch's, and so are the gradients.
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
    warnings.simplefilter("ignore", ImportWarning)  # of packages that only PyTorch's own tests need
    from torch.testing._internal.common_methods_invocations import op_db

Function = Callable[..., Any]
OPS = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}
# Larger samples take the interpreter seconds.
_MOST_ELEMENTS = 4000
_UNITS = 16.0
_COMPOSED = ("isclose", "nanmean", "linalg.vector_norm", "nn.functional.hinge_embedding_loss")
_TABLED = [
    name
    for name, op in OPS.items()
    if op.name.removeprefix("nn.functional.") in TABLE or name in _COMPOSED
]
# PyTorch's decomposition leaves out what is multiplied by zero, which then has no gradient; a norm
# of order 0 requires one that is None.
_LEFT_OUT = ("addr", "linalg.norm.subgradients_at_zero")
# Random numbers, and what no one has written.
_UNKNOWN = ("dropout", "rrelu", "empty")
# In PyTorch their statistics hand no gradient on.
_NORMS = ("native_layer_norm", "native_group_norm")


# --- samples --------------------------------------------------------------------------------------


def _written(value: Any, tensors: list[Tensor]) -> str:
    """A constant as Python's source; a tensor as the name of an argument, among which it is put."""
    if isinstance(value, Tensor):
        place = next((place for place, known in enumerate(tensors) if known is value), len(tensors))
        tensors[place:] = tensors[place:] or [value]
        return f"a{place}"
    if isinstance(value, (list, tuple)):
        inner = "".join([f"{_written(one, tensors)}, " for one in value])
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, slice):
        return f"slice({', '.join([_written(one, tensors) for one in (value.start, value.stop, value.step)])})"
    if isinstance(
        value, (int, float, str, type(None), type(...), torch.dtype, torch.memory_format)
    ):
        return "..." if value is ... else repr(value)
    raise TypeError(f"a constant of type {type(value).__name__}")


def _as_function(op: Any, sample: Any) -> tuple[Function, list[Tensor], str]:
    """A function of the sample's tensors, these, and its source."""
    tensors: list[Tensor] = []
    parts = [_written(value, tensors) for value in (sample.input, *sample.args)]
    parts += [f"{name}={_written(value, tensors)}" for name, value in sample.kwargs.items()]
    source = f"lambda {', '.join([f'a{place}' for place in range(len(tensors))])}: op({', '.join(parts)})"
    return (
        eval(source, {"op": op, "torch": torch, "inf": math.inf, "nan": math.nan}),
        tensors,
        source,
    )


def _samples(name: str, dtype: torch.dtype) -> Iterator[tuple[Function, list[Tensor], str]]:
    """Those of tensors with a dimension, and elements."""
    op = OPS[name].op
    for sample in OPS[name].sample_inputs(DEVICE, dtype):
        try:
            made = _as_function((lambda *args: op(*args)[0]) if name in _NORMS else op, sample)
        except TypeError:
            continue
        if any(t.dim() for t in made[1]) and all(0 < t.numel() <= _MOST_ELEMENTS for t in made[1]):
            yield made


def _tensors_of(returned: Any) -> list[Tensor]:
    """Raises TypeError where something else is returned."""
    if isinstance(returned, Tensor):
        return [returned]
    if not isinstance(returned, (list, tuple)):
        raise TypeError(f"a result of type {type(returned).__name__}")
    return [t for one in returned for t in _tensors_of(one)]


def _results(function: Function, given: Sequence[Tensor]) -> list[Tensor | None]:
    """The outputs, and the gradients of all inputs of floats."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in given]
    outs = _tensors_of(function(*leaves))
    wanted, differentiated = (
        [t for t in leaves if t.requires_grad],
        [t for t in outs if t.requires_grad],
    )
    if not wanted or not differentiated:
        return [t.detach() for t in outs]
    generator = torch.Generator().manual_seed(1)
    along = [
        torch.randn(t.shape, generator=generator).to(t.device, t.dtype) for t in differentiated
    ]
    return [
        *[t.detach() for t in outs],
        *torch.autograd.grad(differentiated, wanted, along, allow_unused=True),
    ]


# --- comparisons ----------------------------------------------------------------------------------


def _is_right(got: Tensor | None, exact: Tensor | None, *natives: Tensor | None) -> bool:
    """Whether a result is PyTorch's, or that of fp64: of whole numbers exactly.

    Errors are as in `assert_as_good`: at most twice PyTorch's on this and other roundings of the
    inputs, or a unit of roundoff of the largest value for each of the few operators on a value's
    way, and of a gradient's, which is a sum of many.
    """
    want = natives[0]
    if got is None or want is None or exact is None:
        return got is want is exact
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    one, two, wide = got.double(), want.double(), exact.to(want.dtype).double()
    tolerance = torch.zeros(())
    if want.dtype.is_floating_point:
        errors = torch.stack(
            [
                (native.double() - wide).nan_to_num(0.0, 0.0, 0.0).abs()
                for native in natives
                if native is not None
            ]
        )
        size = wide.nan_to_num(0.0, 0.0, 0.0).abs()
        tolerance = 2 * errors.max() + _UNITS * unit_roundoff(want.dtype) * size.max()
    results = [
        (one == other) | (one.isnan() & other.isnan()) | ((one - other).abs() <= tolerance)
        for other in (two, wide)
    ]
    return bool((results[0] | results[1]).all())


def _check(function: Function, given: list[Tensor], source: str, draws: int = 3) -> str:
    """Raises where a result is wrong; "refused" or "right".

    ``draws`` are as many other roundings of the inputs.
    """
    try:
        want = _results(function, given)
    except (RuntimeError, TypeError):  # some are refused by PyTorch, and some return no tensor
        return "unknown"
    try:
        exact = _results(function, [t.double() if t.is_floating_point() else t for t in given])
    except RuntimeError:  # of two dtypes
        exact = want
    try:
        got = _results(fusedops.rowwise(function, strict=True), given)
    except fusedops.NotRowwiseError:
        return "refused"
    near = [_results(function, [a_rounding_away(t, draw) for t in given]) for draw in range(draws)]
    right = [_is_right(*results) for results in zip(got, exact, want, *near, strict=True)]
    assert all(right), f"{source} of {given}: {right}, found {got}, expected {want}"
    return "right"


def _rounded(t: Tensor) -> Tensor:
    """The numbers rounded to halves, so that there are ties, zeros and ones."""
    return (t * 2).round() / 2 if t.dtype.is_floating_point else t


_OF_WHOLE_NUMBERS = (
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
_CASES = [
    pytest.param(
        name, dtype, marks=[] if is_short else pytest.mark.full, id=f"{name}-{str(dtype)[6:]}"
    )
    for name, op in OPS.items()
    if not any(word in name for word in _UNKNOWN) and name not in _LEFT_OUT
    for dtype in (torch.float32, torch.int64, torch.bool)
    if dtype in op.supported_dtypes(DEVICE.type)
    for is_short in [name in (_TABLED if dtype == torch.float32 else _OF_WHOLE_NUMBERS)]
]


@pytest.mark.shared("name", most=40)  # tests/compiler/test_operators.py has the others
@pytest.mark.kernels
# Some samples call deprecated operators, which are not traced.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "dtype"), _CASES)
def test_samples_are_right_or_refused(name: str, dtype: torch.dtype, full: bool) -> None:
    samples = list(_samples(name, dtype))
    step = -(-len(samples) // (16 if full else 1)) or 1
    for function, given, source in samples[step // 2 :: step]:
        result = _check(function, given, source)
        if result == "right" and dtype == torch.float32:
            # Numbers that are not rounded would have no ties.
            _check(function, list(map(_rounded, given)), source, 0)
