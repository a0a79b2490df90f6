"""Units: modules that run as a graph of the compile backend, whatever their class does.

A unit is the whole model, or, where ``exclude`` names modules in it, the largest modules without
one of these. Its fused class has a forward that either calls the original forward, or a function
that torch.compile makes of it::

    unit(x) ─▶ hooks ─▶ forward ─▶ compiled: regions are kernels, the rest is eager or Inductor's
                              └──▶ original: another tracer runs, nothing has kernels, or the
                                   host's time decides (`_runs_as_it_is`)

Each module has a compiled function of its own. It is no part of the module's state: copies and
unpickled modules compile at their first call.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..backend.entry import backend
from ..backend.options import EAGER
from ..core.compat.dispatch import is_intercepted, jit_tracing
from ..core.compat.dynamo import as_in_eager_mode, skips_hooks
from ..core.compat.modules import has_global_hooks, is_replica
from ..core.launches import launch
from .hooks import ORIGINAL, original
from .rule import Rule

__all__ = [
    "BESIDE",
    "FEW_ROWS",
    "GRAPH",
    "beside",
    "can_be_unit",
    "forget",
    "inner_of",
    "is_small",
    "is_unit",
    "rest_of",
    "rule_of",
    "units",
]

GRAPH, BESIDE = "graph", "beside"
# A call with so many rows at most is bound by the host. Where no gradient is recorded, it runs as
# it is, and so does each token of a generation, whose shapes grow.
FEW_ROWS = 64
# The arguments of Transformers' models whose elements are the rows, if they have them.
_TOKENS = ("decoder_input_ids", "input_ids")

# The compiled functions of modules.
_compiled: weakref.WeakKeyDictionary[nn.Module, Callable[..., Any]]
_compiled = weakref.WeakKeyDictionary()


def units(model: nn.Module, excluded: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield the largest modules of a model that can be units, without excluded modules in them."""
    if can_be_unit(model) and not any(map(excluded.__contains__, model.modules())):
        yield model
    elif model not in excluded:
        for child in model.children():
            yield from units(child, excluded)


def can_be_unit(module: nn.Module) -> bool:
    """Whether a module has parts, and a forward of its class, which a fused class can replace."""
    # A parametrization has changed the class already.
    if "parametrizations" in module._modules or "forward" in vars(module):
        return False
    is_callable = type(module).forward is not nn.Module.forward
    return is_callable and any(True for _ in module.children())


def rule_of(cls: Any, rest: str, inner: Rule | None = None) -> Rule:
    """The rule of a unit.

    Args:
        cls: its class.
        rest: what runs the rest of its graphs, as in `fusedops.compile`.
        inner: the rule of its class for what no graph does, such as the loss, or None.
    """
    return _rule_of(cls, rest, inner or _NOTHING_ELSE)


# The inner rule of a unit without one.
_NOTHING_ELSE = Rule(name="", methods={})


@functools.cache
def _rule_of(cls: Any, rest: str, inner: Rule) -> Rule:
    methods = {**inner.methods, "forward": _forward(cls, rest, inner.methods.get("forward"))}
    own = "operators in the regions of its graph, by fusion_status(model, *inputs)"
    return Rule(
        name=GRAPH,
        calls="; ".join(filter(None, (own, inner.calls))),
        methods=methods,
        base=nn.Module,
        known=(),
        origin=(GRAPH, (rest, inner if inner.name else None)),
    )


@functools.cache
def beside(rule: Rule) -> Rule:
    """The rule of a norm or activation in a unit: where no graph runs, it calls its operator.

    In a graph its formula is part of a region. `torch.jit.trace` takes no operators.
    """
    fused = rule.methods["forward"]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_traced = torch.compiler.is_compiling() or jit_tracing()
        return (original(self, "forward") if is_traced else fused)(self, *args, **kwargs)

    calls = f"in the graph; elsewhere {rule.calls}"
    return replace(rule, calls=calls, methods={"forward": forward}, origin=(BESIDE, rule))


def is_unit(rule: Rule | None) -> bool:
    """Whether a rule is that of units."""
    return rule is not None and rule.name == GRAPH


def inner_of(rule: Rule) -> Rule | None:
    """The rule within that of a unit, or None; another rule itself."""
    match rule.origin:
        case (name, (_, inner)) if name == GRAPH:
            return inner  # type: ignore[no-any-return]
    return rule


def is_small(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a unit runs a call without its graph, as the host's time decides."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return rest_of(module) == EAGER and _has_few_rows(module, _rows_of(tensors, kwargs))


def rest_of(module: nn.Module) -> str:
    """What runs the rest of a unit's graphs."""
    cls: Any = type(module)
    rest, _ = cls._fusedops_rule.origin[1]
    return str(rest)


def forget(module: nn.Module) -> None:
    """Drop what was compiled for a module."""
    _compiled.pop(module, None)


# --- the forward ----------------------------------------------------------------------------------


def _forward(cls: Any, rest: str, replacement: Callable[..., Any] | None) -> Callable[..., Any]:
    """Build the forward of a unit.

    Args:
        cls: the unit's class, for the signature.
        rest: what runs the rest of its graphs.
        replacement: a rule's forward, to call instead of the class's own.
    """

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # What wrapped the bound method, such as Accelerate's mixed precision, outlives the fusion.
        if not hasattr(self, ORIGINAL + "forward"):
            return type(self).forward(self, *args, **kwargs)
        body = replacement or original(self, "forward")
        if _runs_as_it_is(self, rest, args, kwargs):
            return body(self, *args, **kwargs)
        with as_in_eager_mode():
            return _compiled_function(self, rest)(body, self, *args, **kwargs)

    return forward


def _compiled_function(module: nn.Module, rest: str) -> Callable[..., Any]:
    """The compiled function of a module. It calls a forward with the module and its arguments."""
    function = _compiled.get(module)
    if function is None:
        # Dynamo counts compilations by code object, and after eight it traces no more.
        own = FunctionType(_call.__code__.replace(), globals(), _call.__name__)
        function = torch.compile(own, backend=backend, options={"fusedops.rest": rest})
        _compiled[module] = function
    return function


def _call(forward: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return forward(module, *args, **kwargs)


# Whether another tracer, a mode, a transform, or a hook of all modules sees each operation. An
# outer graph takes those of the unit: the first answer is a constant for torch.compile.
_OBSERVERS: tuple[Callable[[], bool], ...] = (
    torch.compiler.is_compiling,
    jit_tracing,
    is_intercepted,
    has_global_hooks,
)


def _runs_as_it_is(
    module: nn.Module, rest: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a call runs the original forward."""
    # A replica of DataParallel exists for one call.
    if any(is_active() for is_active in _OBSERVERS) or is_replica(module):
        return True
    values = [*args, *kwargs.values()]
    if any(isinstance(value, fx.Proxy) for value in values):
        return True
    tensors = [value for value in values if isinstance(value, Tensor)]
    if any(tensor.is_nested for tensor in tensors):
        return True
    # Inductor was asked for, and compiles for all devices.
    is_left = rest == EAGER and not _gains(module, _rows_of(tensors, kwargs))
    # Without PyTorch's option for hooks, those that come after a call would not run in a graph.
    return is_left or skips_hooks()


def _rows_of(tensors: list[Tensor], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The tokens of a call, or its argument with the most rows; None if no argument is a tensor."""
    tokens = [kwargs[name] for name in _TOKENS if isinstance(kwargs.get(name), Tensor)]
    rows = next(iter(tokens), None)
    if rows is None:
        rows = max(tensors, key=_count, default=None)
    return rows


def _count(tensor: Tensor) -> int:
    """The number of rows of a tensor of numbers, and of elements of others, such as tokens."""
    if tensor.is_floating_point():
        return math.prod(tensor.shape[:-1])
    return tensor.numel()


def _gains(module: nn.Module, rows: Tensor | None) -> bool:
    """Whether a graph without Inductor is faster than the module as it is.

    Args:
        module: the module.
        rows: what `_rows_of` returns.
    """
    tensor = next(module.parameters(), None) if rows is None else rows
    if tensor is None or not launch.runs_kernels(tensor.device.type):
        return False
    return not _has_few_rows(module, rows)


def _has_few_rows(module: nn.Module, rows: Tensor | None) -> bool:
    """Whether a call without gradients is bound by the host."""
    # In training, a part that is checkpointed with re-entrance runs first without gradients, and
    # has to draw the same masks again.
    if rows is None or torch.is_grad_enabled() or module.training:
        return False
    if _count(rows) <= FEW_ROWS:
        return True
    # One token of each sequence of a generation.
    is_token = not rows.is_floating_point() and rows.shape[-1] == 1
    return is_token and hasattr(module, "generate")
