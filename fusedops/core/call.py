"""The one path of a call: from a functional's constants and tensors to kernels, or to PyTorch's operators.

A call whose key was seen before is not checked again. Then it goes, in this order: to the reference implementation
(no kernels on this device, no elements, a torch.func transform, forward-mode differentiation, within a row-wise function
that is traced), to PyTorch's own operator (small tensors, exactly the same function), to the registered operator (dispatch
modes, tensor subclasses), to the autograd Function, or directly to a launch. torch.compile traces a path of its own, to the
registered operator.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import checks, compat, dropout, launch, operators, rng, sharding
from .dropout import Dropout
from .function import PLAIN, Call, Nothing, apply, forward
from .operator import Operator, Site, Tensors
from .rng import NO_DROPOUT, State

__all__ = ["as_references", "run", "with_state"]

# More than a program has different calls. A program with ever new ones starts with an empty cache again.
_MOST_CALLS = 8192


class _References(threading.local):
    """Whether calls of this thread run their reference implementations."""

    on = False


_references = _References()


@contextlib.contextmanager
def as_references() -> Iterator[None]:
    """Within it calls of this thread run their reference implementations: a tracer sees PyTorch's operators."""
    before = _references.on
    _references.on = True
    try:
        yield
    finally:
        _references.on = before


class Signature:
    """A call that was checked: what its key determines."""

    __slots__ = ("cols", "constants", "device_index", "dtypes", "kernels", "native", "sites", "special")

    def __init__(self, op: Operator, constants: Any, tensors: Tensors, *, nested: bool, autocast: bool) -> None:
        first = tensors[op.first]
        assert first is not None
        self.constants = constants
        self.dtypes = operators.dtypes_of(op, tensors)
        self.device_index = first.get_device()
        # A symbol becomes a number: kernels are compiled for it.
        self.cols = int(op.cols(constants, tensors)) if launch.runs_kernels(first.device.type) and not nested else -1
        self.kernels = self.cols >= 0
        # Tensor subclasses see registered operators.
        self.special = not self.kernels or not PLAIN.issuperset(map(type, tensors))
        self.native: Callable[..., Any] | None = None
        if not self.special and first.is_cuda and not autocast:
            self.native = op.native(constants, self.dtypes)
        # By dropout and by whether a backward will follow.
        self.sites: list[Site | None] = [None] * 4

    def site(self, op: Operator, which: int) -> Any:
        """The site of calls with dropout if ``which & 1``, and with a backward if ``which & 2``."""
        made = operators.site_of(op, self.constants, self.dtypes, self.cols, self.device_index, bool(which & 1),
                                 bool(which & 2))  # fmt: skip
        self.sites[which] = made
        return made


def run(op: Operator, arguments: Any, tensors: Any, p: Any = 0.0) -> Any:
    """The outputs of ``op`` as a tuple, which may end after the last that the constants ask for.

    Args:
        op: the operator.
        arguments: what `Operator.record` makes the record of constants of.
        tensors: its tensor arguments, None where absent.
        p: the drop probability.
    """
    if torch.compiler.is_dynamo_compiling():
        return _traced(op, op.record(*arguments), tensors, p)
    try:
        autocast = compat.any_autocast_enabled() and torch.is_autocast_enabled("cuda")
        signature = op.signatures[autocast].get(op.key(arguments, tensors))
    except (AttributeError, IndexError, TypeError, RuntimeError):
        # Something is wrong, which the checks name; or a tensor subclass or nested tensor has no shape to read.
        signature = None
    if signature is None:
        signature = _checked(op, arguments, tensors)
    if p != 0.0 and not (type(p) is float and 0.0 <= p <= 1.0):
        checks.check_p(signature.constants.op, p)
    first = tensors[op.first]
    try:
        elements = first.numel()
        if signature.special or compat.is_intercepted() or not elements:
            return _elsewhere(op, tensors, p, signature)
        if elements <= op.native_elements and signature.native is not None and p == 0.0:
            return (signature.native(signature.constants, tensors),)
        which, state = (0, NO_DROPOUT) if p == 0.0 else (1, rng.state_of(p, first.device))
        if torch.is_grad_enabled():
            for t in tensors:
                if t is not None and t.requires_grad:
                    site = signature.sites[which + 2] or signature.site(op, which + 2)
                    return apply((op, site, state, False), *tensors)
        site = signature.sites[which] or signature.site(op, which)
        return op.expose(site.constants, tensors, forward(op, site, tensors, state))
    except RuntimeError:
        _check_dense(op, signature, tensors)
        raise


def _checked(op: Operator, arguments: Any, tensors: Tensors) -> Signature:
    """Checks a call that is new, and remembers it."""
    constants, autocast = op.record(*arguments), torch.is_autocast_enabled("cuda")
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise RuntimeError(f"{constants.op}: torch.jit.trace is not supported; use torch.export")
    constants, nested = _validated(op, constants, tensors)
    signature = Signature(op, constants, tensors, nested=nested, autocast=autocast)
    known = op.signatures[autocast]
    if len(known) >= _MOST_CALLS:
        known.clear()
    with contextlib.suppress(AttributeError, IndexError, TypeError, RuntimeError):  # without a key, or one of symbols
        known[op.key(arguments, tensors)] = signature
    return signature


def _validated(op: Operator, constants: Any, tensors: Tensors) -> tuple[Any, bool]:
    """Checks a call; its constants, with those of GPU autocast, and whether its tensors are nested."""
    first = tensors[op.first]
    nested = isinstance(first, Tensor) and first.is_nested
    if nested:
        op.check_constants(constants)  # PyTorch's operators check the tensors
    else:
        op.check(constants, tensors)
    return op.autocast(constants, tensors) if torch.is_autocast_enabled("cuda") else constants, nested


def _check_dense(op: Operator, signature: Signature, tensors: Tensors) -> None:
    """Names a tensor without strides, or a nested one, after PyTorch's error.

    No key holds the layout, which would cost every call: such a tensor may look like those of an earlier call.
    """
    constants = signature.constants
    first = tensors[op.first]
    # PyTorch takes nested tensors itself where it has the operator; its error is then about something else.
    if first is not None and first.is_nested and op.native(constants, signature.dtypes) is not None:
        return
    for place, t in enumerate(tensors):
        if t is not None:
            checks.check_dense(constants.op, op.argument(constants, place), t)


def _elsewhere(op: Operator, tensors: Tensors, p: float, signature: Signature) -> Any:
    """A call that is no launch: see the module."""
    constants, first = signature.constants, tensors[op.first]
    assert first is not None
    elements = first.numel()
    if not first.is_nested and any(t is not None and t.layout is not torch.strided for t in tensors):
        _check_dense(op, signature, tensors)  # some of PyTorch's operators would take it
    if _is_on_shards(op, constants, tensors):
        return _on_shards(op, constants, tensors, p)
    # A symbol is not asked: it would become a guard, or be unknown.
    if not signature.kernels or (type(elements) is int and not elements) or _references.on:
        return op.reference(constants, tensors, dropout.dropout_of(p, NO_DROPOUT, signature.cols))
    if compat.transforms() or compat.in_forward_mode():
        state = rng.state_of(p, first.device)
        return op.reference(constants, tensors, dropout.dropout_of(p, state, signature.cols))
    return _called(op, signature, tensors, _drawn(p, tensors, first.device), registered=True)


def _drawn(p: float, tensors: Tensors, device: torch.device) -> State:
    """The random state of a call whose tensors may be recorded."""
    if 0.0 < p < 1.0 and compat.is_recording(*tensors):
        return rng.recorded(device), None, rng.threshold(p)
    return rng.state_of(p, device)


def _called(op: Operator, signature: Signature, tensors: Tensors, state: State, *, registered: bool) -> Any:
    """The outputs from the registered operator, or from a launch."""
    saves = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    site = signature.site(op, (state[0] is not None) + 2 * saves)
    if saves:
        return Call.apply((op, site, state, registered), *tensors)  # type: ignore[no-untyped-call]
    launched = operators.forward if registered else forward
    return op.expose(site.constants, tensors, launched(op, site, tensors, state))


def _traced(op: Operator, constants: Any, tensors: Tensors, p: Any) -> Any:
    """Under torch.compile: one registered operator, which has a derivative of its own."""
    checks.check_p(constants.op, p)
    constants, nested = _validated(op, constants, tensors)
    first = tensors[op.first]
    assert first is not None
    fused = launch.runs_kernels(first.device.type) and not nested and not compat.transforms_when_traced()
    if not nested and _is_on_shards(op, constants, tensors):
        return _on_shards(op, constants, tensors, p)
    cols = op.cols(constants, tensors) if fused else -1
    if cols < 0:
        return op.reference(constants, tensors, dropout.dropout_of(p, NO_DROPOUT, cols))
    return _in_graph(op, constants, tensors, _recorded(p, first.device))


def _recorded(p: float, device: torch.device) -> State:
    """The random state of a call that torch.compile traces."""
    if p <= 0.0:
        return NO_DROPOUT
    seed = rng.recorded(device) if p < 1.0 else torch.zeros(2, dtype=torch.int64, device=device)
    return seed, None, rng.threshold(p)


def _in_graph(op: Operator, constants: Any, tensors: Tensors, state: State) -> Any:
    """The registered operator, and of its outputs those that are there."""
    saves = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    dtypes = operators.dtypes_of(op, tensors)
    outs = operators.call_forward(op, constants, tensors, state, op.cols(constants, tensors),
                                  operators.encode(constants, dtypes, saves))  # fmt: skip
    there = op.writes(constants, dtypes, dropout=state[0] is not None, saves=saves)
    return op.expose(constants, tensors, operators.present(outs, there))


# --- DTensors -----------------------------------------------------------------------------------------------------------


def _is_on_shards(op: Operator, constants: Any, tensors: Tensors) -> bool:
    """Whether a call is one on DTensors, of rows that kernels can be compiled for."""
    return sharding.distributes(tensors) and op.cols(constants, tensors) >= 0


def _on_shards(op: Operator, constants: Any, tensors: Tensors, p: float) -> Any:
    """A call on DTensors: on each rank a call on its own tensors."""
    tensors = sharding.replicated(tensors)
    plan = sharding.planned(op, constants, tensors, dropout=p > 0.0)
    layout, local = plan.layout, plan.local(tensors)
    first = local[op.first]
    assert first is not None
    state = _of_shard(layout, p, local, first.device)
    outs = op.over_columns(constants, local, state, layout) if layout.splits_columns else None
    if outs is None:
        outs = with_state(op, constants, local, state)
    if torch.compiler.is_dynamo_compiling() and len(layout.axes.outputs) > op.visible:
        # AOTAutograd loses DTensors that are views of one tensor (PyTorch 2.13).
        outs = [out.clone() for out in outs]
    return plan.whole(outs)


def _of_shard(layout: sharding.Layout, p: float, local: Tensors, device: torch.device) -> State | Dropout:
    """The random state of a rank's kernels; where no kernels run, dropout with the rank's part of PyTorch's mask."""
    if not launch.runs_kernels(device.type):
        return layout.dropout(p)
    if layout.axes.rows.count(0):  # nothing is drawn for no elements in one process either
        return NO_DROPOUT
    state = _recorded(p, device) if torch.compiler.is_dynamo_compiling() else _drawn(p, local, device)
    first, second, threshold = state
    if first is None:
        return state
    seed = layout.seed(first if isinstance(first, Tensor) else (first, second), device)  # type: ignore[arg-type]
    return seed, seed, threshold


def with_state(op: Operator, constants: Any, tensors: Tensors, state: State | Dropout) -> Any:
    """The outputs of a call that was checked, with what `Operator.over_columns` has for dropout."""
    if not isinstance(state, tuple):
        return op.reference(constants, tensors, state)
    if torch.compiler.is_dynamo_compiling():
        if op.cols(constants, tensors) < 0:  # of no columns
            return op.reference(constants, tensors, dropout.none)
        return _in_graph(op, constants, tensors, state)
    signature = Signature(op, constants, tensors, nested=False, autocast=False)
    first = tensors[op.first]
    assert first is not None
    if type(first.numel()) is int and not first.numel():
        return _nothing(op, signature, tensors)
    return _called(op, signature, tensors, state, registered=signature.special or compat.is_intercepted())


def _nothing(op: Operator, signature: Signature, tensors: Tensors) -> Any:
    """Outputs of a rank that has no rows or no columns."""
    saves = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    site = signature.site(op, 2 * saves)
    if saves:
        return Nothing.apply((op, site), *tensors)  # type: ignore[no-untyped-call]
    return op.expose(site.constants, tensors, op.allocate(site, tensors))
