"""Random row-wise functions: each has the right values and gradients, or is refused by name."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch

import fusedops
from rowwise_random import check, in_tiles, outcome
from rowwise_writer import Argument, RandomFunction, random_function
from support import DEVICE

pytestmark = pytest.mark.kernels

# Numbers of seeds: of the short suite, of the full suite, and of one test case of the full suite.
_SHORT, _FULL, _PER_CASE = 24, 2000, 20
# On a GPU there are fewer, since compiling takes five seconds a function.
_SHORT_ON_DEVICE = _SHORT if DEVICE.type == "cpu" else 15
# Seeds of functions that were once wrong.
_KNOWN = (
    11919,  # the mean of var_mean for an infinite element
    32530,  # the second derivative of sinc near zero
    700017,  # the second derivative of hardsigmoid in fp64
    900269,  # a column of a repeated vector
    2005403,  # columns that are split in two ways; refused
    2003244,  # a derivative of a part of a row; refused
    4030136,  # the second derivative of a norm of order 3 of zeros
    4040401,  # a sum of products with an infinite number
    4030792,  # a view of transposed rows
)


def _assert_none_is_wrong(seeds: range) -> None:
    results = [outcome(seed) for seed in seeds]
    wrong = [reason for kind, reason in results if kind == "wrong"]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("seed", [*range(_SHORT_ON_DEVICE), *_KNOWN])
def test_right_or_refused(seed: int) -> None:
    _assert_none_is_wrong(range(seed, seed + 1))


@pytest.mark.full
@pytest.mark.parametrize("first", range(_SHORT, _FULL, _PER_CASE))
def test_right_or_refused_among_many(first: int) -> None:
    _assert_none_is_wrong(range(first, first + _PER_CASE))


def test_few_are_refused() -> None:
    """Most functions of the generator are row-wise, so they must be fused."""
    results = []
    for random in map(random_function, range(_SHORT)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                fusedops.rowwise(random.function, strict=True).source(
                    *random.tensors(device=DEVICE)
                )
            except fusedops.NotRowwiseError as error:
                results.append(f"{random.seed}: {error}")
    assert len(results) <= _SHORT // 3, "\n".join(results)


def test_same_seed_generates_the_same_function() -> None:
    """So the seed in a report is enough to reproduce it. Most seeds give different functions."""
    first, repeated = random_function(7), random_function(7)
    assert first.source == repeated.source
    assert all(map(torch.equal, first.tensors(), repeated.tensors()))
    assert len({random_function(seed).source for seed in range(100)}) > 95


# --- errors that random functions have shown ------------------------------------------------------


def _of(text: str, *arguments: Argument, **options: Any) -> RandomFunction:
    """Returns a function of ``arguments`` that returns the expression ``text``."""
    names = ", ".join(argument.name for argument in arguments)
    options = {
        "second": False,
        "batched": False,
        "tiled": False,
        "stored": False,
        "used": (True,) * 4,
    } | options
    sizes, seed = options.pop("sizes", ({"s": 3, "n": 8},)), options.pop("seed", 0)
    return RandomFunction(
        seed, f"def function({names}):\n    return {text}\n", arguments, sizes, **options
    )


def _rows(name: str = "x", **options: Any) -> Argument:
    return Argument(name, ("s", "n"), **{"dtype": torch.float32, "differentiated": True, **options})


_x = _rows()
_faulty = _rows(faults=True)  # has infinite elements and NaN, which the seed places
_number = Argument("t", (), torch.float32, differentiated=True)
_row = Argument("r", ("s", "1"), torch.float32, faults=True, differentiated=True)
_given_row = Argument("r", ("s", "1"), torch.float32, differentiated=True)
_ORDERS = (-1, 0.5, 1.5, 3)  # one order of norms for each of PyTorch's formulas
ONCE_WRONG = {
    "an output without gradient beside an unused input": _of(
        "x * 2.0", _rows(differentiated=False), _rows("y")
    ),
    "NaN as the largest of parts": _of("torch.cat((x, x * 2.0), -1).amax(-1)", _faulty, seed=3),
    "NaN as the largest of equal numbers": _of(
        "x + r.expand_as(x).amax(-1, keepdim=True)", _x, _row, seed=3
    ),
    "a largest number of rows that were reduced": _of(
        "x + x.amax(-1, keepdim=True).max(-1, keepdim=True).values", _faulty
    ),
    "NaN for a gradient between the limits of softshrink": _of(
        "x + F.softshrink(x, 0.5).amax(-1, keepdim=True)", _faulty, seed=3
    ),
    "the largest of values that the backward recomputes from a saved number": _of(
        "x + (y * v - (y * v).mean(-1, keepdim=True)).amax(-1, keepdim=True) + (y * v).logsumexp(-1, keepdim=True)",
        _rows(dtype=torch.float64, differentiated=False),
        _rows("y", dtype=torch.float64, differentiated=False),
        Argument("v", ("n",), torch.float64, differentiated=True),
        sizes=({"s": 3, "n": 16}, {"s": 17, "n": 32}),
    ),
    "xlogy without a gradient beside an infinite number": _of(
        "torch.softmax(torch.xlogy(r, x.abs() + 0.3), -1)",
        _faulty,
        _given_row,
        seed=2,
        sizes=({"s": 1, "n": 16},),
    ),
    "a constant of other sizes": _of(
        "(r * 0.5).argmax(-1)", Argument("r", ("s", "1"), torch.float32), sizes=({"s": 5}, {"s": 4})
    ),
    "many unused arguments": _of(
        "x * 2.0", _x, *[_rows(f"u{number}") for number in range(12)], sizes=({"s": 17, "n": 64},)
    ),
    "a number without its last dimension": _of(
        "x + t.abs().squeeze(-1).transpose(0, -1)", _x, _number
    ),
    "the index of the largest of a number": _of("x + t.argmax(-1) + t.max(-1).values", _x, _number),
    "gradients beside those of one column that cancel": _of(
        "F.silu(x) + F.normalize(F.layer_norm(x, x.shape[-1:]), dim=-1) + F.silu(x) * x",
        _x,
        sizes=({"s": 3, "n": 1},),
    ),
    "second derivatives of a norm of zeros": _of(
        "F.smooth_l1_loss(torch.where(x > 9.0, x, 0.0).norm(dim=-1, keepdim=True) + x, x, reduction='none')",
        _x,
        second=True,
    ),
    "a choice by any of a row, in tiles": _of(
        "torch.where((x > 1.0).any(-1, keepdim=True), x.exp(), v) + x.sum(-1, keepdim=True)",
        _x,
        Argument("v", ("n",), torch.float32, differentiated=True),
        tiled=True,
        sizes=({"s": 3, "n": 24},),
    ),
    "a choice by the largest column, in tiles": _of(
        "torch.where((x.argmax(-1, keepdim=True) > 4) | ((x > 0.0).sum(-1, keepdim=True) > 15), x.exp(), v)",
        _x,
        Argument("v", ("n",), torch.float32, differentiated=True),
        tiled=True,
        sizes=({"s": 5, "n": 24},),
    ),
    "a norm of rows of equal columns": _of(
        "F.normalize(F.layer_norm(r.expand_as(x), x.shape[-1:]), p=1, dim=-1) + x",
        _x,
        _given_row,
        sizes=({"s": 40, "n": 80}, {"s": 40, "n": 11}),
    ),
    "the first largest of columns that are parts": _of(
        "F.softshrink(x.max(-1, keepdim=True).values, 0.1).norm(dim=-1, keepdim=True) * x + x[..., 1:].sum(-1, keepdim=True)",
        _faulty,
        seed=5,
    ),
    "a gate of hardswish beside an infinity": _of("F.softsign(F.hardswish(x))", _faulty, seed=1),
    "the sum of a part that is one number of a row": _of(
        "torch.cat((x, r.expand_as(x)), -1).chunk(2, -1)[1].sum(-1, keepdim=True) * x",
        _x,
        _given_row,
    ),
    "the mean of a part that is one number of a row, in tiles": _of(
        "torch.stack((x, r.expand_as(x)), -2)[..., 1, :].mean(-1, keepdim=True) * x",
        _x,
        _given_row,
        tiled=True,
    ),
    "the first largest of a part that is one number of a row": _of(
        "torch.stack((r.expand_as(x), x), -2)[..., 0, :].max(-1, keepdim=True).values * x",
        _x,
        _given_row,
    ),
    "a part without a gradient of a row with one": _of(
        "torch.cat((x, v.expand_as(x)), -1).chunk(2, -1)[1] * 2.0",
        _x,
        Argument("v", ("n",), torch.float32),
    ),
    "a negative zero instead of NaN": _of(
        "1.0 / x.nan_to_num(-0.0)", _rows(faults=True, differentiated=False), seed=3
    ),
    "a cotangent of NaN beside a deviation of zero": _of(
        "torch.where((x * 0.0).std(-1, keepdim=True) > 0.0, y / (x * 0.0).std(-1, keepdim=True), 0.0) + x",
        _x,
        _rows("y", differentiated=False),
    ),
    "a cotangent of NaN beside a norm of zeros": _of(
        "(x * 0.0).norm(dim=-1, keepdim=True) * r", _x, _row, seed=3
    ),
    **{
        f"second derivatives of a norm of order {order} of zeros": _of(
            f"(x * 0.0).norm(p={order}, dim=-1, keepdim=True) + x * x", _x, second=True
        )
        for order in _ORDERS
    },
    **{
        f"a cotangent of NaN beside a norm of order {order} of zeros": _of(
            f"(x * 0.0).norm(p={order}, dim=-1, keepdim=True) * r", _x, _row, seed=3
        )
        for order in _ORDERS
    },
    "a cotangent of NaN beside a norm of the largest": _of(
        "torch.linalg.vector_norm(x, float('inf'), dim=-1, keepdim=True).logsumexp(-1, keepdim=True) + x",
        _faulty,
        seed=3,
    ),
    "one column of vectors that rows share": _of(
        "x + g[..., 2].unsqueeze(-1) * v[..., 20]",
        Argument("x", ("b", "s", "n"), torch.float32, differentiated=True),
        Argument("g", ("b", "1", "n"), torch.float32, differentiated=True),
        Argument("v", ("n",), torch.float32, differentiated=True),
        sizes=({"b": 2, "s": 18, "n": 24},),
    ),
    "a comparison with a value that was cast down": _of(
        "((y := (z := x.to(v.dtype)) + torch.arange(x.shape[-1], device=x.device) * 0.05) > z) + y.amax(-1, keepdim=True) + x",
        _rows(dtype=torch.float64, differentiated=False),
        Argument("v", ("n",), torch.float32),
        sizes=({"s": 17, "n": 8},),
    ),
    "a cotangent of NaN beside nan_to_num": _of("x.nan_to_num() * x", _faulty, seed=3),
    "a view that is invalid for the strides of an argument": _of(
        "x.view(-1).view(x.shape) * 2.0", _rows(layout="transposed")
    ),
    **{
        f"an infinite number of each row in {name}": _of(text, _x, _row, seed=2)
        for name, text in {
            "a sum": "(x * r).sum(-1, keepdim=True) + x",
            "a mean with a factor": "(-(x * r) * 0.5).mean(-1, keepdim=True) + x",
            "a sum of a part": "(x * r).chunk(2, -1)[0].sum(-1, keepdim=True) + x",
            "a variance": "(x * r).var(-1, keepdim=True) + x",
        }.items()
    },
    "an infinite number of each row in a sum, in tiles": _of(
        "(x * r).sum(-1, keepdim=True) + x", _x, _row, seed=2, tiled=True
    ),
    **{
        f"an infinite factor in a gradient of {name}": _of(text, _x, _row, seed=seed)
        for name, text, seed in (
            ("a mean", "(x - x.mean(-1, keepdim=True)) * r", 2),
            ("a sum of zero", "(x * r).mean(-1, keepdim=True).reciprocal() + x", 3),
        )
    },
    "an infinite constant in a sum": _of("(x * float('inf')).sum(-1, keepdim=True) + x", _x),
}


@pytest.mark.parametrize("name", ONCE_WRONG)
def test_functions_that_were_once_wrong(name: str) -> None:
    random = ONCE_WRONG[name]
    with in_tiles() if random.tiled else contextlib.nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome, reason = check(random)
    # On a GPU, PyTorch itself has no maximum along a dimension of a 0-dim tensor.
    fails_in_pytorch = name == "the index of the largest of a number" and DEVICE.type == "cuda"
    assert outcome == "right" or (fails_in_pytorch and outcome == "invalid"), reason


def test_view_of_a_tensor_that_the_function_transposed_fails_as_in_pytorch() -> None:
    random = _of("x.transpose(0, 1).view(-1)", _x)
    outcome, reason = check(random)
    assert outcome == "invalid" and "view size is not compatible" in reason


def test_values_in_half_precision_are_rounded_before_a_comparison() -> None:
    """In fp16 the added number is rounded away, so the sum is not larger."""
    x = torch.rand(5, 24, device=DEVICE).half() + 1.0
    function = lambda x: (x * 2.0 + 1e-4 > x * 2.0) + x  # noqa: E731
    assert torch.equal(function(x), x)
    assert torch.equal(fusedops.rowwise(function, strict=True)(x), x)
