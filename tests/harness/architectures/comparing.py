"""Compares the results of a changed model with those of the original, with a measured tolerance.

The tolerance is measured as by `fuse_model(check=...)`: all parameters and inputs are moved by a
unit in the last place. Results may differ by sixteen times the change that this causes, and by
their own rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support import DEVICE

from . import make, outputs

__all__ = [
    "DRAWS",
    "Results",
    "built",
    "compare",
    "distance",
    "first_results",
    "moved_by",
    "results_of",
    "size_of",
]

# Results may differ by this many times the change that moved inputs cause.
MOVEMENTS = 16
# The number of random movements.
DRAWS = 3
Results = dict[str, Tensor]


def built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Returns an architecture in evaluation mode, and arguments for a call.

    If the model cannot be built, the test is skipped: left.txt was written for one version of
    Transformers, and another may be installed.
    """
    architecture = make(name)
    try:
        model = architecture.build()
        arguments = architecture.inputs(model)
    except Exception as error:  # noqa: BLE001
        pytest.skip(f"cannot be built or run: {error}")
    return model.to(DEVICE), {
        k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in arguments.items()
    }


def results_of(
    model: nn.Module, arguments: dict[str, Any], draw: int | None = None, *, inputs_too: bool = True
) -> Results:
    """Returns the outputs, and the gradients of a random sum of them by parameters and inputs.

    Args:
        model: the model.
        arguments: its arguments.
        draw: the seed with which to move the weights of the sum; None does not move them.
        inputs_too: whether to differentiate by the inputs, too.
    """
    inputs = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            value = value.detach().clone()
            value.requires_grad_(inputs_too and value.is_floating_point())
        inputs[name] = value
    torch.manual_seed(3)
    result = outputs(model(**inputs))
    variables = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.is_floating_point()
    }
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.requires_grad:
            variables[f"input {name}"] = value
    generator = torch.Generator().manual_seed(1)
    move = _mover(draw)
    total = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for y in result:
        weight = move(torch.randn(y.shape, generator=generator).to(y))
        if y.requires_grad:
            total = total + (y.masked_fill(~y.isfinite(), 0.0) * weight).double().sum()
    results = {f"output {index}": y.detach().clone() for index, y in enumerate(result)}
    if total.requires_grad:
        gradients = torch.autograd.grad(total, list(variables.values()), allow_unused=True)
        for name, gradient in zip(variables, gradients, strict=True):
            if gradient is not None:
                results[f"gradient of {name}"] = gradient
    return results


def first_results(
    model: nn.Module, arguments: dict[str, Any]
) -> tuple[Callable[..., Results], Results]:
    """Returns a function that runs a model, and the results of the model as it is.

    The function does not differentiate by inputs if the model raises an error for that: some models
    set `requires_grad` of their inputs themselves. If the model fails anyway, the test is skipped.
    """
    try:
        return results_of, results_of(model, arguments)
    except RuntimeError:
        run = partial(results_of, inputs_too=False)
        try:
            return run, run(model, arguments)
        except Exception as error:  # noqa: BLE001
            pytest.skip(f"fails without being fused: {error}")


def _mover(draw: int | None, unit: float = 0.0) -> Callable[[Any], Any]:
    """Returns a function that moves every element of a tensor up or down, at random.

    Args:
        draw: the seed; None returns the identity.
        unit: the relative distance, if it is more than a unit in the last place.
    """
    generator = torch.Generator().manual_seed(draw or 0)

    def move(x: Any) -> Any:
        if draw is None or not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        signs = (torch.randint(0, 2, x.shape, generator=generator) * 2 - 1).to(x)
        return x.detach() * (1 + max(unit, torch.finfo(x.dtype).eps) * signs)

    return move


def moved_by(
    model: nn.Module, arguments: dict[str, Any], draw: int, unit: float = 0.0
) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a copy of the model and its arguments with every number moved, as by `_mover`."""
    move, moved_model = _mover(draw, unit), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in moved_model.parameters():
            parameter.copy_(move(parameter))
    return moved_model, {k: move(v) for k, v in arguments.items()}


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference. Equal infinities do not differ, nor does NaN from NaN."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.double(), b.double()
    different = (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
    return float(different.max()) if different.numel() else 0.0


def size_of(x: Tensor) -> float:
    """The largest magnitude of a finite element."""
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def compare(actual: Results, expected: Results, moved: list[Results]) -> None:
    """Fails unless all results have the expected dtypes, and are within the tolerance.

    Args:
        actual: the results of the changed model.
        expected: the results of the original.
        moved: results of the original with moved parameters and inputs.
    """
    assert actual.keys() == expected.keys()
    dtypes = {name: x.dtype for name, x in expected.items()}
    assert {name: x.dtype for name, x in actual.items()} == dtypes
    wrong = {}
    for name, x in expected.items():
        changes = [distance(results[name], x) for results in moved if name in results]
        allowed = torch.finfo(x.dtype).eps * size_of(x) + MOVEMENTS * max(changes, default=0.0)
        difference = distance(actual[name], x)
        if not difference <= allowed:  # true also for NaN
            wrong[name] = (difference, allowed)
    if wrong:
        worst = max(wrong, key=lambda name: wrong[name][0] / (wrong[name][1] or 1e-30))
        difference, allowed = wrong[worst]
        pytest.fail(
            f"{len(wrong)} of {len(expected)} results differ; "
            f"{worst} by {difference:.3g}, allowed {allowed:.3g}"
        )
