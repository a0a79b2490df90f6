"""Whether a model that was changed still computes the same.

Within what moving all its numbers a little makes of it.

How far two results may differ is measured, as `fuse_model(check=...)` does: all parameters and
inputs are moved by a unit in the last place, and the results may differ by sixteen times what that
makes of them, and by their own rounding.
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

MOVEMENTS, DRAWS = 16, 3
Results = dict[str, Tensor]


def built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """An architecture in evaluation mode, and arguments of a call."""
    architecture = make(name)
    try:
        model = architecture.build()
        arguments = architecture.inputs(model)
    # Another Transformers than the one for which left.txt was written.
    except Exception as error:  # noqa: BLE001
        pytest.skip(f"cannot be built or run: {error}")
    return model.to(DEVICE), {
        k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in arguments.items()
    }


def results_of(
    model: nn.Module, arguments: dict[str, Any], draw: int | None = None, *, inputs_too: bool = True
) -> Results:
    """Outputs, and the gradients of a random sum of them by parameters and inputs.

    With ``draw``, of that sum moved.
    """
    inputs = {
        k: v.detach().clone().requires_grad_(inputs_too and v.is_floating_point())
        if isinstance(v, Tensor)
        else v
        for k, v in arguments.items()
    }
    torch.manual_seed(3)
    result = outputs(model(**inputs))
    by = {n: p for n, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}
    by |= {f"input {k}": v for k, v in inputs.items() if isinstance(v, Tensor) and v.requires_grad}
    generator = torch.Generator().manual_seed(1)
    move = _mover(draw)
    total = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for y in result:
        weight = move(torch.randn(y.shape, generator=generator).to(y))
        if y.requires_grad:
            total = total + (y.masked_fill(~y.isfinite(), 0.0) * weight).double().sum()
    gradients = (
        torch.autograd.grad(total, list(by.values()), allow_unused=True)
        if total.requires_grad
        else ()
    )
    made = {f"output {index}": y.detach().clone() for index, y in enumerate(result)}
    return made | {
        f"gradient of {n}": g for n, g in zip(by, gradients, strict=False) if g is not None
    }


def first_results(
    model: nn.Module, arguments: dict[str, Any]
) -> tuple[Callable[..., Results], Results]:
    """How to run a model that is not fused, and its results.

    Some set what of their inputs requires a gradient.
    """
    try:
        return results_of, results_of(model, arguments)
    except RuntimeError:
        run = partial(results_of, inputs_too=False)
        try:
            return run, run(model, arguments)
        # Such a model, or such a mode of it, is out of order by itself.
        except Exception as error:  # noqa: BLE001
            pytest.skip(f"fails without being fused: {error}")


def _mover(draw: int | None, unit: float = 0.0) -> Callable[[Any], Any]:
    """Moves every number by a unit in the last place, or by ``unit`` of it, at random.

    Without ``draw``, none.
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
    """A copy of the model, and its arguments, with every number moved by a unit in the last place, or of ``unit``."""
    move, other = _mover(draw, unit), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(move(parameter))
    return other, {k: move(v) for k, v in arguments.items()}


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference; none where both are the same infinity or both NaN."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.double(), b.double()
    different = (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
    return float(different.max()) if different.numel() else 0.0


def size_of(x: Tensor) -> float:
    """The largest finite number."""
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def compare(found: Results, expected: Results, moved: list[Results]) -> None:
    """Each result within its bounds, and of the same dtype; the worst is named."""
    assert found.keys() == expected.keys()
    assert {n: x.dtype for n, x in found.items()} == {n: x.dtype for n, x in expected.items()}
    wrong = {}
    for name, x in expected.items():
        moves = max((distance(m[name], x) for m in moved if name in m), default=0.0)
        allowed = torch.finfo(x.dtype).eps * size_of(x) + MOVEMENTS * moves
        apart = distance(found[name], x)
        if not apart <= allowed:
            wrong[name] = (apart, allowed)
    if wrong:
        name, (apart, allowed) = max(
            wrong.items(), key=lambda item: item[1][0] / (item[1][1] or 1e-30)
        )
        pytest.fail(
            f"{len(wrong)} of {len(expected)} results differ; {name} by {apart:.3g}, allowed {allowed:.3g}"
        )
