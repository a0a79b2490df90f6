"""``check``: compares each fused module, and the model, with the original, forward and backward.

How far two ways to compute the same result may differ depends on the module and on the inputs, so
the limit is measured. All inputs and parameters of the original, and the gradients of its outputs,
are perturbed by one unit in the last place, up or down at random. The change of the results is the
effect of one rounding of everything that the module reads.

The code that a fused operator replaces takes at most eight elementwise steps (T5's gated unit by
tanh) and as many sums, each with a rounding, and the operator rounds less often. So each of the two
may differ from the exact result by eight such changes. The limit of their difference is sixteen,
plus the rounding of the result itself.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from . import classes
from .report import Difference
from .rule import Rule

__all__ = ["calls_in", "fuse_and_check"]

# The limit of a difference is the change that a perturbation causes, times this.
_PERTURBATIONS = 16
# This many random perturbations are tried; the largest change counts.
_DRAWS = 3


@dataclass(frozen=True)
class _Call:
    """One call's arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class _Result:
    """A call's floating-point outputs, and gradients.

    Attributes:
        outputs: the outputs.
        gradients: the gradients of a random sum of the outputs, for all inputs and parameters.
    """

    outputs: list[Tensor]
    gradients: list[Tensor | None]


def fuse_and_check(
    model: nn.Module,
    planned: Mapping[nn.Module, Rule],
    check: Any,
) -> tuple[dict[nn.Module, Difference], Difference]:
    """Fuse the planned modules, and restore those that differ.

    Args:
        model: the model.
        planned: the modules to fuse, with their rules.
        check: `fuse_model`'s argument: True, or example inputs.
    Returns:
        The differences of each module that ran, and of the model.
    """
    call = _call_of(model, check)
    differences: dict[nn.Module, Difference] = {}
    with _evaluating(model), _undone_on_errors(planned):
        # Before anything is fused: each module is compared on the original's inputs.
        calls = _recorded(model, list(planned), call)
        for module in reversed(list(planned)):  # children before their parents
            if module in calls:
                differences[module] = _fuse_one(module, planned, calls[module])
            else:
                classes.fuse(module, planned[module])
        return differences, _compare(model, planned, call)


def _fuse_one(module: nn.Module, planned: Mapping[nn.Module, Rule], call: _Call) -> Difference:
    """Fuse one module, after its children, and restore it if it differs."""
    classes.fuse(module, planned[module])
    difference = _compare(module, planned, call)
    if not difference.passes:
        classes.unfuse(module)
    return difference


def _compare(module: nn.Module, planned: Mapping[nn.Module, Rule], call: _Call) -> Difference:
    """Compare the module with itself while nothing in it is fused."""
    after = _run(module, call)
    with _restored(module, planned):
        before = _run(module, call)
        perturbed = [_run(module, call, _perturbation(seed)) for seed in range(_DRAWS)]
    output, allowed_output = _worst(
        after.outputs, before.outputs, [result.outputs for result in perturbed]
    )
    gradient, allowed_gradient = _worst(
        after.gradients, before.gradients, [result.gradients for result in perturbed]
    )
    return Difference(output, gradient, allowed_output, allowed_gradient)


@contextmanager
def _restored(module: nn.Module, planned: Mapping[nn.Module, Rule]) -> Iterator[None]:
    """Restore a module and all modules inside for a while: the original calls original children."""
    fused = [inner for inner in module.modules() if inner in planned and classes.is_fused(inner)]
    for inner in fused:
        classes.unfuse(inner)
    try:
        yield
    finally:
        for inner in fused:
            classes.fuse(inner, planned[inner])


# The difference between results that cannot be compared.
_INCOMPARABLE = (float("inf"), 0.0)


def _worst(after: list[Any], before: list[Any], perturbed: list[list[Any]]) -> tuple[float, float]:
    """Return the difference and its limit for the tensor where their ratio is largest."""
    if len(after) != len(before):
        return _INCOMPARABLE
    worst, worst_limit = 0.0, 0.0
    for index, (new, old) in enumerate(zip(after, before, strict=True)):
        # Neither has a gradient.
        if new is None and old is None:
            continue
        if not _is_comparable(new, old):
            return _INCOMPARABLE
        difference = _distance(new, old)
        limit = _limit(old, [results[index] for results in perturbed])
        # Negated, so that NaN exceeds the limit.
        if not difference <= limit:
            return difference, limit
        # The ratios are compared without a division, since a limit may be 0.
        if difference * worst_limit >= worst * limit:
            worst, worst_limit = difference, limit
    return worst, worst_limit


def _limit(old: Tensor, perturbed: list[Tensor]) -> float:
    """Return the largest difference that rounding explains, by the results of perturbed inputs."""
    change = max(_distance(result, old) for result in perturbed)
    # The result itself is rounded once, whatever the inputs are.
    rounding = torch.finfo(old.dtype).eps * _largest(old)
    return rounding + _PERTURBATIONS * change


def _is_comparable(new: Tensor | None, old: Tensor | None) -> bool:
    # One of them alone has a gradient.
    if new is None or old is None:
        return False
    if new.shape != old.shape:
        return False
    return new.dtype == old.dtype


def _largest(x: Tensor) -> float:
    """Return the largest finite magnitude."""
    finite = x[x.isfinite()]
    if not finite.numel():
        return 0.0
    return float(finite.abs().max())


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference; equal infinities and two NaNs do not differ."""
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = (a - b).abs().masked_fill(same, 0.0)
    if not difference.numel():
        return 0.0
    return float(difference.max())


# --- runs -----------------------------------------------------------------------------------------


def _perturbation(seed: int) -> Callable[[Tensor], Tensor]:
    """Build a function that changes every number by a unit in the last place, up or down.

    The largest finite numbers stay as they are. In masks of attention they stand for infinity, and
    are exact: in a row in which all keys are masked, the masked scores are equal, and any change
    would put them in an order.
    """
    # On the CPU, so that every device gets the same numbers.
    generator = torch.Generator("cpu").manual_seed(seed)

    def perturb(x: Tensor) -> Tensor:
        bits = torch.randint(0, 2, x.shape, generator=generator, device="cpu")
        signs = bits.to(x.device, x.dtype) * 2 - 1
        limits = torch.finfo(x.dtype)
        x = x.detach()
        return torch.where(x.abs() == limits.max, x, x * (1 + limits.eps * signs))

    return perturb


def _run(
    module: nn.Module, call: _Call, perturb: Callable[[Tensor], Tensor] = Tensor.detach
) -> _Result:
    """Run one call, forward and backward, on fresh copies of the arguments; store no gradient."""
    inputs: list[Tensor] = []

    def fresh(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x.clone()
        # Cloned, since the module may write to its arguments.
        inputs.append(perturb(x).clone().requires_grad_())
        return inputs[-1]

    args, kwargs = _mapped(call.args, fresh), _mapped(call.kwargs, fresh)
    copies: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point():
            copies[name] = perturb(parameter).requires_grad_(parameter.requires_grad)
    with _same_random_numbers(module), torch.enable_grad():
        # The module's own parameters stay as they are, and so do their gradients.
        state = {**copies, **_copied_buffers(module)}
        outputs = list(_tensors(torch.func.functional_call(module, state, args, kwargs)))
        leaves = _differentiable([*inputs, *copies.values()])
        gradients = _gradients(_differentiable(outputs), leaves, perturb)
    return _Result([y.detach() for y in outputs], gradients)


def _copied_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers: a module that counts its calls starts anew in each run."""
    copies = {}
    for name, buffer in module.named_buffers():
        # `functional_call` refuses two values for a parameter that is a buffer too.
        if not is_lazy(buffer) and not isinstance(buffer, nn.Parameter):
            copies[name] = buffer.clone()
    return copies


@contextmanager
def _same_random_numbers(module: nn.Module) -> Iterator[None]:
    """Restore the state of the generators afterwards, so that the next run draws the same."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    gpus = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    with torch.random.fork_rng(gpus):
        yield


@contextmanager
def _without_nested_tensors() -> Iterator[None]:
    """Turn off PyTorch's fast path of attention for a while.

    Without gradients, an `nn.TransformerEncoder` with a padding mask would otherwise pass nested
    tensors to its layers, and most operators do not support nested tensors.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _differentiable(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list(filter(operator.attrgetter("requires_grad"), tensors))


def _gradients(
    outputs: list[Tensor], leaves: list[Tensor], perturb: Callable[[Tensor], Tensor]
) -> list[Tensor | None]:
    """Return the gradients for the leaves, with random gradients of the outputs."""
    if not outputs or not leaves:
        return [None] * len(leaves)
    # Every run draws the same gradients, and then perturbs them: they are inputs of the backward.
    generator = torch.Generator("cpu").manual_seed(0)
    random = [torch.randn(y.shape, generator=generator, device="cpu") for y in outputs]
    pairs = zip(outputs, random, strict=True)
    terms = [(y * perturb(cotangent.to(y))).sum() for y, cotangent in pairs]
    # In fp64, since the outputs may be of several dtypes.
    total = torch.stack([term.double() for term in terms]).sum()
    return list(torch.autograd.grad(total, leaves, allow_unused=True))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in a result; complex ones as real and imaginary parts."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    elif dataclasses.is_dataclass(value):
        value = tuple([getattr(value, field.name) for field in dataclasses.fields(value)])
    if isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors(inner)
    elif isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, Tensor) and value.is_complex():
        yield torch.view_as_real(value.resolve_conj())


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to the tensors in a nested structure.

    Anything else in it is copied, since a call may change it.
    """
    if isinstance(value, Tensor):
        return function(value)
    if type(value) is dict:
        values = _mapped(list(value.values()), function)
        return dict(zip(value, values, strict=True))
    # Subclasses, such as named tuples, may take other arguments than a list of items.
    if type(value) in (tuple, list):
        return type(value)(_mapped(inner, function) for inner in value)
    return copy.deepcopy(value)


def calls_in(
    model: nn.Module, modules: list[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments of each module's first call in a call of the model, by module."""
    calls = _recorded(model, modules, _Call(args, kwargs))
    return {module: (call.args, call.kwargs) for module, call in calls.items()}


def _recorded(model: nn.Module, modules: list[nn.Module], call: _Call) -> dict[nn.Module, _Call]:
    """Return the arguments of each module's first call in a run of the model."""
    calls: dict[nn.Module, _Call] = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The first call counts. Its arguments are cloned, since later code may write to them.
        if module not in calls:
            calls[module] = _Call(_mapped(args, Tensor.clone), _mapped(kwargs, Tensor.clone))

    handles = [module.register_forward_pre_hook(record, with_kwargs=True) for module in modules]
    try:
        args, kwargs = _mapped(call.args, Tensor.clone), _mapped(call.kwargs, Tensor.clone)
        with _same_random_numbers(model), _without_nested_tensors(), torch.no_grad():
            torch.func.functional_call(model, _copied_buffers(model), args, kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _call_of(model: nn.Module, check: Any) -> _Call:
    """Return the call of the model that the argument ``check`` describes."""
    inputs = _dummy_inputs(model) if check is True else check
    match inputs:
        case Mapping():
            return _Call((), dict(inputs))
        case tuple() | list():
            return _Call(tuple(inputs), {})
        case Tensor():
            return _Call((inputs,), {})
    raise TypeError(
        f"fuse_model: check must be True or example inputs (a tensor, a tuple or a dict), "
        f"got {type(inputs).__name__}"
    )


def _dummy_inputs(model: nn.Module) -> Any:
    """Return the example inputs that models of Transformers have."""
    inputs = getattr(model, "dummy_inputs", None)
    if inputs is None:
        raise TypeError(
            "fuse_model: check=True needs a model with dummy_inputs; give example inputs as check"
        )
    return inputs


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode for a while: dropouts would differ from run to run."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _undone_on_errors(planned: Mapping[nn.Module, Rule]) -> Iterator[None]:
    """Restore all modules if the model raises on the example inputs, or the user interrupts."""
    try:
        yield
    except BaseException:
        for module in planned:
            classes.unfuse(module)
        raise
