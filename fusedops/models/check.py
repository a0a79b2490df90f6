"""``check``: each fused module, and the model, before and after on the same inputs, forward and backward.

How far two ways to compute the same may differ depends on the module and on the inputs, so it is measured. All inputs
and parameters of the original, and the gradients of its outputs, are moved by one unit in the last place, up or down at
random. That moves its results as one rounding at every one of its inputs would. A fused operator rounds less often than
what it stands for, which takes eight elementwise steps at most (T5's gated unit by tanh) and as many sums; so both may
differ from the exact result by eight such movements, and from each other by sixteen, and by the rounding of the result
itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import classes
from .report import Difference
from .rule import Rule

__all__ = ["fuse_and_check"]

_MOVEMENTS = 16
_DRAWS = 3
Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class _Call:
    """One call's arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class _Result:
    """A call's floating-point outputs, and the gradients of a random sum of them by inputs and parameters."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]


def fuse_and_check(
    model: nn.Module, planned: Mapping[nn.Module, Rule], check: Any, off: frozenset[str] = frozenset()
) -> tuple[dict[nn.Module, Difference], Difference]:
    """Fuse the planned modules and restore those that differ; the differences of each that ran, and of the model."""
    call = _call_of(model, check)
    found: dict[nn.Module, Difference] = {}
    with _evaluating(model), _undone_on_errors(planned):
        calls = _recorded(model, list(planned), call)
        for module in reversed(list(planned)):  # children before their parents
            if module in calls:
                found[module] = _checked(module, planned, calls[module], off)
            else:
                classes.fuse(module, planned[module], off)
        return found, _compared(model, planned, call, off)


def _checked(module: nn.Module, planned: Mapping[nn.Module, Rule], call: _Call, off: frozenset[str]) -> Difference:
    """Fuse one module, whose children are done, and restore it if it differs."""
    classes.fuse(module, planned[module], off)
    difference = _compared(module, planned, call, off)
    if not difference.passes:
        classes.unfuse(module)
    return difference


def _compared(module: nn.Module, planned: Mapping[nn.Module, Rule], call: _Call, off: frozenset[str]) -> Difference:
    """The module against itself with nothing in it fused."""
    after = _run(module, call)
    fused = [inner for inner in module.modules() if inner in planned and classes.is_fused(inner)]
    for inner in fused:
        classes.unfuse(inner)
    try:
        before = _run(module, call)
        moved = [_run(module, call, _mover(seed)) for seed in range(_DRAWS)]
    finally:
        for inner in fused:
            classes.fuse(inner, planned[inner], off)
    output = _worst(after.outputs, before.outputs, [result.outputs for result in moved])
    gradient = _worst(after.gradients, before.gradients, [result.gradients for result in moved])
    return Difference(output[0], gradient[0], output[1], gradient[1])


def _worst(after: list[Any], before: list[Any], moved: list[list[Any]]) -> tuple[float, float]:
    """The difference, and the one allowed, of the tensor where their ratio is largest."""
    worst = (0.0, 0.0)
    if len(after) != len(before):
        return float("inf"), 0.0
    for index, (new, old) in enumerate(zip(after, before, strict=True)):
        if new is None and old is None:
            continue
        if new is None or old is None or new.shape != old.shape or new.dtype != old.dtype:
            return float("inf"), 0.0
        rounding = torch.finfo(old.dtype).eps * _largest(old)
        allowed = rounding + _MOVEMENTS * max(_distance(results[index], old) for results in moved)
        difference = _distance(new, old)
        if not difference <= allowed or difference * worst[1] >= worst[0] * allowed:
            worst = (difference, allowed)
            if not difference <= allowed:
                break
    return worst


def _largest(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest difference; none where both are the same infinity or both NaN."""
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = (a - b).abs().masked_fill(same, 0.0)
    return float(difference.max()) if difference.numel() else 0.0


# --- runs -------------------------------------------------------------------------------------------------------------


def _mover(seed: int) -> Callable[[Tensor], Tensor]:
    """A function that moves every number by a unit in the last place, up or down."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def move(x: Tensor) -> Tensor:
        signs = torch.randint(0, 2, x.shape, generator=generator, device="cpu").to(x.device, x.dtype) * 2 - 1
        return x.detach() * (1 + torch.finfo(x.dtype).eps * signs)

    return move


def _run(module: nn.Module, call: _Call, move: Callable[[Tensor], Tensor] = Tensor.detach) -> _Result:
    """One call on fresh copies of the arguments; no gradient is stored."""
    inputs: list[Tensor] = []

    def fresh(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x.clone()
        inputs.append(move(x).clone().requires_grad_())
        return inputs[-1]

    args, kwargs = _mapped(call.args, fresh), _mapped(call.kwargs, fresh)
    parameters = {name: p for name, p in module.named_parameters() if p.is_floating_point()}
    used = {name: move(p).requires_grad_(p.requires_grad) for name, p in parameters.items()}
    with torch.enable_grad():
        result = torch.func.functional_call(module, used, args, kwargs)
        outputs = list(_tensors(result))
        by = [*inputs, *(p for p in used.values() if p.requires_grad)]
        generator = torch.Generator("cpu").manual_seed(0)
        trained = [y for y in outputs if y.requires_grad]
        drawn = [torch.randn(y.shape, generator=generator, device="cpu") for y in trained]
        terms = [(y * move(numbers.to(y))).sum() for y, numbers in zip(trained, drawn, strict=True)]
        gradients: list[Tensor | None] = [None] * len(by)
        if terms and by:
            gradients = list(torch.autograd.grad(torch.stack([t.double() for t in terms]).sum(), by, allow_unused=True))
    return _Result([y.detach() for y in outputs], gradients)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in a result."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors(inner)


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same nest with a function applied to its tensors; anything else in it is copied, as a call may change it."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(inner, function) for inner in value)
    if type(value) is dict:
        return {key: _mapped(inner, function) for key, inner in value.items()}
    return copy.deepcopy(value)


def _recorded(model: nn.Module, modules: list[nn.Module], call: _Call) -> dict[nn.Module, _Call]:
    """The arguments of each module's first call in a run of the model."""
    calls: dict[nn.Module, _Call] = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in calls:
            calls[module] = _Call(_mapped(args, Tensor.clone), _mapped(kwargs, Tensor.clone))

    handles = [module.register_forward_pre_hook(record, with_kwargs=True) for module in modules]
    try:
        with torch.no_grad():
            model(*_mapped(call.args, Tensor.clone), **_mapped(call.kwargs, Tensor.clone))
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _call_of(model: nn.Module, check: Any) -> _Call:
    if check is True:
        check = getattr(model, "dummy_inputs", None)
        if check is None:
            raise TypeError("fuse_model: check=True needs a model with dummy_inputs; give example inputs as check")
    if isinstance(check, Mapping):
        return _Call((), dict(check))
    if isinstance(check, (tuple, list)):
        return _Call(tuple(check), {})
    if isinstance(check, Tensor):
        return _Call((check,), {})
    raise TypeError(f"fuse_model: check must be True or example inputs (a tensor, a tuple or a dict), "
                    f"got {type(check).__name__}")  # fmt: skip


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _undone_on_errors(planned: Mapping[nn.Module, Rule]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for module in planned:
            classes.unfuse(module)
        raise
