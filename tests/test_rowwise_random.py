"""Random row-wise functions: each is right, in values and gradients, or refused by name; none is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.core.tuning_key import Config
from rowwise_random import RandomFunction, random_function
from support import DEVICE, as_tuple
from tolerances import a_rounding_away, unit_roundoff

pytestmark = pytest.mark.kernels

_SHORT, _FULL = 40, 500


def _run(function: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Outputs and gradients along random cotangents; zero where there is none."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    outputs = as_tuple(function(*leaves))
    generator = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(out.shape, generator=generator).to(out.device, out.dtype) for out in outputs]
    grads = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
    return [*outputs, *[torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True)]]


def check(random: RandomFunction, function: Callable[..., Any]) -> None:
    """Errors are at most twice those of PyTorch, on these inputs or on inputs a rounding away.

    A function may be ill-conditioned: then an error is PyTorch's by luck, and its largest of a few is looked at. The floor
    is a unit of roundoff for each of ten statements, of the largest result: values and cotangents are of order one, and
    what is smaller is the difference of some that are not.
    """
    tensors = random.tensors(DEVICE)
    got = _run(function, tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = _run(random.function, tensors)
        exact = _run(random.function, [t.double() for t in tensors])
        moved = [_run(random.function, [a_rounding_away(t, draw) for t in tensors]) for draw in range(3)]
    largest = max(1.0, *(want.nan_to_num().abs().max().item() for want in exact if want.numel()))
    for number, (one, native, want, *others) in enumerate(zip(got, eager, exact, *moved, strict=True)):
        what = f"result {number} of seed {random.seed}\n{random.source}"
        assert one.shape == want.shape and one.dtype == native.dtype, what
        assert torch.equal(one.isfinite(), want.isfinite()), f"not finite: {what}"
        if not want.numel():
            continue
        error, *natives = ((t.double() - want).nan_to_num().abs().max().item() for t in (one, native, *others))
        floor = 10 * unit_roundoff(one.dtype) * largest
        assert error <= 2 * max(natives) + floor, f"{error:.3g}, eager's {max(natives):.3g}, floor {floor:.3g}: {what}"


def _check_seed(seed: int) -> None:
    """A seed's function is right, or refused by its name."""
    random = random_function(seed)
    try:
        check(random, fusedops.rowwise(random.function, strict=True))
    except fusedops.NotRowwiseError as error:
        if not str(error).startswith("function: ") or "cannot be traced" in str(error):
            pytest.fail(f"it is refused without a name: {error}\n{random.source}")


@pytest.mark.parametrize("seed", range(_SHORT))
def test_right_or_refused(seed: int) -> None:
    _check_seed(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(_SHORT, _FULL))
def test_right_or_refused_among_many(seed: int) -> None:
    _check_seed(seed)


@pytest.mark.parametrize("seed", range(_SHORT, _SHORT + 15))
def test_right_or_refused_in_long_rows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a program holds a part of a row."""
    _in_tiles(monkeypatch)
    _check_seed(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(_SHORT + 15, 300))
def test_right_or_refused_in_many_long_rows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _in_tiles(monkeypatch)
    _check_seed(seed)


def _in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusedops.compiler.operator.LONGEST_ROW", 8)
    monkeypatch.setattr("fusedops.compiler.configs._of_long_rows", lambda key: Config(16, 2, 1, 1, 1))


def test_few_are_refused() -> None:
    """What the generator writes is all row-wise: most of it has to be one kernel."""
    found = []
    for seed in range(_SHORT):
        random = random_function(seed)
        try:
            fusedops.rowwise(random.function, strict=True).source(*random.tensors(DEVICE))
        except fusedops.NotRowwiseError as error:
            found.append(f"{seed}: {error}")
    assert len(found) <= _SHORT // 10, "\n".join(found)


def test_generator_repeats_itself() -> None:
    """A seed in a report is enough to see the function again."""
    first, again = random_function(7), random_function(7)
    assert first.source == again.source and all(map(torch.equal, first.tensors(), again.tensors()))
    assert len({random_function(seed).source for seed in range(100)}) > 95
