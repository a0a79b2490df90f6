"""Runs of a norm's forward on random rows, in all dtypes, and comparisons of what it returns.

All runs are on the CPU, on a module that is created for them: the user's may be on a device without
memory to spare, or on "meta", without values.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...core.compat.dispatch import cast_by_autocast
from .arithmetic import Case, RefusedError

__all__ = [
    "FP32",
    "HALF",
    "NO_NORM",
    "OTHER_AUTOCAST",
    "AsOnGpus",
    "Probe",
    "Run",
    "differs",
    "equal",
    "run_or_none",
    "runs",
]

HALF = (torch.bfloat16, torch.float16)
NO_NORM = "it computes no LayerNorm or RMSNorm of the last dimension"
OTHER_AUTOCAST = "autocast changes what it computes"

# The mean of the random rows, in their standard deviations. LayerNorm and RMSNorm differ on rows
# whose mean is not 0.
_MEAN = 0.7
# Numbers of at least this size are scales or exponents, not an eps.
_LARGEST_EPS = 0.1
# PyTorch's default, for a LayerNorm that is called without an eps.
_DEFAULT_EPS = 1e-5


class Probe:
    """A case, its weights, and rows of several scales."""

    def __init__(self, case: Case, size: int) -> None:
        self.case, self.size = case, size
        # A generator of its own: the user's random numbers do not depend on `fuse_model`.
        generator = torch.Generator("cpu").manual_seed(5)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

        # Around 1 but all different, so that a weight that is left out or moved shows.
        self.weights = {name: 1.0 + 0.5 * random(size) for name, _ in case.vectors}
        self.epsilons = _epsilons(case)
        # An even number of rows, which `run` splits in two, and 512 elements at least.
        pairs = max(2, math.ceil(256 / size))
        self.ordinary = random(2 * pairs, size) + _MEAN
        # Rows whose variance is about an eps, so that the eps decides the result.
        self.small = torch.cat([math.sqrt(e) * (random(2, size) + _MEAN) for e in self.epsilons])

    def bare(self, dtype: torch.dtype = torch.float32) -> Any:
        """Create a module that computes what the case does, with the probe's weights."""
        # The class's own initializer may need arguments, or allocate on another device.
        module: Any = object.__new__(self.case.cls)
        nn.Module.__init__(module)
        vars(module).update(self.case.plain)
        for name, weight in self.weights.items():
            module._parameters[name] = weight.to(dtype)
        return module

    def run(
        self, x: Tensor, dtype: torch.dtype = torch.float32, module: Any = None, shape: Any = (2,)
    ) -> Tensor:
        """Return the forward's output for these rows.

        The forward gets the rows with the leading dimensions ``shape``; the output has x's shape.
        """
        module = self.bare(dtype) if module is None else module
        reshaped = x.reshape(*shape, -1, self.size)
        # The function of the class: no hook and no compiled call is run.
        y = self.case.cls.forward(module, reshaped)
        if not isinstance(y, Tensor) or y.shape != reshaped.shape:
            raise RefusedError(NO_NORM)
        return y.reshape(x.shape)


def _epsilons(case: Case) -> list[float]:
    """Return the numbers that may be the eps: attributes, literals, and PyTorch's default."""
    attributes = [value for _, value in case.floats()]
    epsilons = list(filter(_may_be_eps, attributes))
    for number in filter(_may_be_eps, (*case.numbers, _DEFAULT_EPS)):
        if number not in epsilons:
            epsilons.append(number)
    return epsilons


def _may_be_eps(number: float) -> bool:
    return 0.0 < number < _LARGEST_EPS


# The errors of arithmetic with unsuitable dtypes and attributes, such as a division by zero.
_ERRORS = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    ArithmeticError,
)


def run_or_none(probe: Probe, x: Tensor, dtype: torch.dtype, shape: Any = (2,)) -> Tensor | None:
    """Return the forward's output, or None if it raises: PyTorch's norms do, for some dtypes."""
    try:
        return probe.run(x, dtype, shape=shape)
    except _ERRORS:
        return None


# --- comparisons ----------------------------------------------------------------------------------

# fp32's rounding of some twenty operations, relative to a row's largest number.
FP32 = 4e-6


def differs(y: Tensor, exact: Tensor, bound: float = FP32) -> Tensor:
    """Return which numbers differ by more than this part of their row's largest."""
    exact = exact.double()
    # Negated, so that NaN counts as different.
    return ~((y.double() - exact).abs() <= bound * exact.abs().amax(-1, keepdim=True))


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two outputs have the same dtype and bits, or neither exists."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)


# --- dtypes ---------------------------------------------------------------------------------------

# The dtypes of rows and of weights. `runs` skips pairs for which a forward raises, as PyTorch's
# norms do for some. `forms._with_rounding` refuses a forward that never runs in half precision.
_DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float16),
    (torch.float64, torch.float32),
    (torch.float64, torch.float64),
)


class Run(NamedTuple):
    """Rows, the dtype of the weights, and the forward's output."""

    x: Tensor
    dtype: torch.dtype
    y: Tensor


def runs(probe: Probe) -> list[Run]:
    """Run the forward in all dtypes; raise `RefusedError` if CPU autocast changes a result."""
    results = []
    for x_dtype, dtype in _DTYPES:
        # fp16 cannot represent the squares of small rows, if the forward squares in fp16.
        rows = [probe.ordinary] if x_dtype == torch.float16 else [probe.ordinary, probe.small]
        x = torch.cat(rows).to(x_dtype)
        y = run_or_none(probe, x, dtype)
        with torch.autocast("cpu", torch.bfloat16):
            under_autocast = run_or_none(probe, x, dtype)
        if not equal(y, under_autocast):
            raise RefusedError(OTHER_AUTOCAST)
        if y is not None:
            results.append(Run(x, dtype, y))
    return results


# --- the autocast of GPUs -------------------------------------------------------------------------

# Functions that a forward may call and that GPU autocast computes in fp32 in every release of
# PyTorch. Its own norms are looked up: they depend on the release.
_IN_FP32 = frozenset(
    {
        "pow",
        "square",
        "rsqrt",
        "reciprocal",
        "__rdiv__",
        "__rpow__",
        "sum",
        "norm",
        "linalg_vector_norm",
        "vector_norm",
    }
)


class AsOnGpus(TorchFunctionMode):
    """Makes functions on a CPU cast their arguments as autocast does on a GPU.

    CPU autocast casts for other functions than GPU autocast, and there may be no GPU.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_cast_to_fp32(getattr(func, "__name__", "")):
            args = tuple(map(_wide, args))
            kwargs = {key: _wide(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _is_cast_to_fp32(name: str) -> bool:
    if name in ("layer_norm", "rms_norm"):
        return cast_by_autocast(f"aten::{name}")
    return name in _IN_FP32


def _wide(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in HALF
    return value.float() if is_half else value
