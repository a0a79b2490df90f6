"""The path of every call, from a functional's constants and tensors to kernels or PyTorch.

The *site* of a call holds what its checks returned and its launches need: see `operator.Site`. A
call whose key is cached is not checked again, and has the site of the earlier call. The first row
that applies computes the call:

    condition                                        computed by
    no kernels on this device, no elements, a        the reference implementation
      torch.func transform, forward-mode
      differentiation, tracing of a row-wise
      function
    a dispatch mode, a tensor subclass               the registered operator
    a small tensor, and PyTorch has the operator     PyTorch's operator
    a tensor requires a gradient                     the autograd Function, which launches
    otherwise                                        a launch

torch.compile traces a separate path, to the registered operator. DTensors take the path in
`sharding`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...distributed import sharding
from ..compat.dispatch import (
    any_autocast_enabled,
    in_forward_mode,
    is_intercepted,
    transforms,
)
from ..compat.dynamo import transforms_when_traced
from ..launches import launch
from ..random import dropout, rng
from ..random.dropout import Dropout
from ..random.rng import NO_DROPOUT, State
from . import checks, function, operators
from .function import PLAIN, Call, EmptyCall, apply, exposed, forward, on_device
from .operator import Operator, SequenceOperator, Site, Tensors
from .words import encode

__all__ = [
    "as_references",
    "elsewhere",
    "launched",
    "launched_into",
    "run",
    "site_without_gradients",
]

# The most sites in a cache. Few programs have so many different calls; if one does, its cache is
# emptied.
_MOST_CALLS = 8192

# Globals of this module, as every call looks them up.
_is_traced = torch.compiler.is_dynamo_compiling
_records_gradients = torch.is_grad_enabled
_any_autocast = any_autocast_enabled
_current_device = launch.current_device

# The bits of a call's mode. With the constants and the tensors, the mode selects the call's site.
_DROPS, _SAVES, _AUTOCAST = 1, 2, 4
# With either bit PyTorch's operator would return other values: it has no dropout, and autocast
# casts its inputs.
_CHANGES_NATIVE = _DROPS | _AUTOCAST


class _References(threading.local):
    """Whether calls of this thread run their reference implementations."""

    on = False


_references = _References()


@contextlib.contextmanager
def as_references() -> Iterator[None]:
    """Runs this thread's calls by reference implementations, for tracers of PyTorch's operators."""
    previous = _references.on
    _references.on = True
    try:
        yield
    finally:
        _references.on = previous


def run(op: Operator, constants: Any, tensors: Any, p: Any = 0.0) -> Any:
    """Returns the outputs of ``op`` as a tuple, perhaps without absent ones at its end.

    The host time of a repeated call counts, so its path is one flat function without helpers.

    Args:
        op: the operator.
        constants: its record of constants, a NamedTuple. A frozen dataclass would take several
            times as long to make, and its hash, for the key, is computed in Python.
        tensors: the operator's tensor arguments, None where absent.
        p: the drop probability.
    """
    # When torch.compile traces this, the condition is a constant, so it traces one branch only.
    if _is_traced():
        return _traced(op, constants, tensors, p)
    site, mode = None, 0
    try:
        # If p is a tensor, ``p != 0.0`` is one too, and as a part of the key would make every key
        # new.
        mode = _DROPS * bool(p != 0.0)
        # `_needs_backward`, inlined.
        if _records_gradients():
            for t in tensors:
                if t is not None and t.requires_grad:
                    mode |= _SAVES
                    break
        # `_any_autocast` is usually False, and cheaper than the query for one device.
        if _any_autocast():
            mode |= _AUTOCAST * torch.is_autocast_enabled("cuda")
        site = op.sites.get(op.key(mode, constants, tensors))
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
        # An argument is wrong, and the checks will raise an error that names it; or a tensor
        # subclass or nested tensor has no shape to read.
        checks.check_p(constants.op, p)
    # No lock: two threads with one new key both check it, and cache equal sites.
    if site is None:
        site = _validated(op, mode, constants, tensors)
    first = tensors[op.first]
    try:
        elements = first.numel()
        if site.special or not elements or is_intercepted():
            return elsewhere(op, site, tensors, p)
        native = site.native if elements <= op.native_elements else None
        if native is not None and site.device_index >= 0 and not mode & _CHANGES_NATIVE:
            return (native(site.constants, tensors),)
        return launched(op, site, tensors, p)
    except RuntimeError:
        # A sparse or nested tensor may have the key of a dense one, so it may come this far: then
        # raise an error that names it. Any other error, such as a failed launch, is re-raised.
        _check_dense(op, site, tensors)
        raise


def launched(op: Operator, site: Site, tensors: Any, p: Any) -> Any:
    """Launches the kernels of a call that nothing intercepts; returns its outputs."""
    state = NO_DROPOUT
    if site.dropout:
        state = rng.draw_state(_probability(site, p), tensors[op.first].device)
    if site.saves:
        return apply((op, site, state, False), *tensors)
    # `forward`, inlined to save a Python call.
    outs = op.allocate(site, tensors)
    index = site.device_index
    if index < 0 or index == _current_device():
        op.forward(site, tensors, outs, state)
    else:
        on_device(site, op.forward, tensors, outs, state)
    return exposed(op, site, tensors, outs) if site.splits else outs


def launched_into(
    op: Operator, site: Site, tensors: Any, out: Tensor, output: int
) -> tuple[Tensor | None, ...]:
    """Launches the kernels of a call without gradients; one output is written to ``out``.

    ``out`` may be one of the tensors if kernels read each element before they write it.
    """
    outs = list(op.allocate_except(site, tensors, output))
    outs[output] = out
    on_device(site, op.forward, tensors, outs, NO_DROPOUT)
    # PyTorch does not see the launch. A backward that has saved ``out`` compares the version.
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return exposed(op, site, tensors, outs)


def site_without_gradients(op: Operator, constants: Any, tensors: Any) -> Any:
    """Returns the site of a call without dropout and gradients, after its checks."""
    mode = _AUTOCAST * torch.is_autocast_enabled("cuda")
    site = None
    with contextlib.suppress(AttributeError, IndexError, TypeError, ValueError, RuntimeError):
        site = op.sites.get(op.key(mode, constants, tensors))
    return site or _validated(op, mode, constants, tensors)


def _probability(site: Site, p: Any) -> float:
    """Returns ``p`` after a check, which every call needs: keys of calls do not contain it."""
    if not (type(p) is float and 0.0 <= p <= 1.0):
        checks.check_p(site.constants.op, p)
    return p  # type: ignore[no-any-return]


def _validated(op: Operator, mode: int, constants: Any, tensors: Tensors) -> Site:
    """Checks a new call; returns and caches its site."""
    checks.check_jit(constants.op)
    # Under autocast `check` may return constants with another output dtype. The key below contains
    # the caller's constants instead, because the next call computes its key before any check. The
    # mode in the key tells autocast from no autocast.
    checked = op.check(constants, tensors, nested=_is_nested(op, tensors))
    site: Site = _site(op, checked, tensors, dropout=bool(mode & _DROPS), saves=bool(mode & _SAVES))
    if len(op.sites) >= _MOST_CALLS:
        op.sites.clear()
    # Some calls cannot be cached: their key cannot be computed, or contains symbolic sizes, which
    # have no hash.
    with contextlib.suppress(AttributeError, IndexError, TypeError, RuntimeError):
        op.sites[op.key(mode, constants, tensors)] = site
    return site


def _site(op: Operator, constants: Any, tensors: Tensors, *, dropout: bool, saves: bool) -> Any:
    """Returns the site of a checked call."""
    first = tensors[op.first]
    assert first is not None
    cols = -1
    if launch.runs_kernels(first.device.type) and not first.is_nested:
        # A symbol becomes a number: kernels are compiled for it.
        cols = int(op.cols(constants, tensors))
    # Several keys may have the same site, and so the same kernels: for example, a Parameter and a
    # tensor have different keys, but one site.
    dtypes = operators.dtypes_of(op, tensors)
    index = first.get_device()
    are_plain = PLAIN.issuperset(map(type, tensors))
    special = cols < 0 or not are_plain  # the call is not launched directly
    return operators.site_of(
        op,
        constants,
        dtypes,
        cols=cols,
        device_index=index,
        dropout=dropout,
        saves=saves,
        special=special,
    )


def _is_nested(op: Operator, tensors: Tensors) -> bool:
    """Returns whether the rows are a nested tensor, which PyTorch's operators check themselves."""
    first = tensors[op.first]
    return isinstance(first, Tensor) and first.is_nested


def _check_dense(op: Operator, site: Site, tensors: Tensors) -> None:
    """Raises for a sparse tensor, and for a nested one unless PyTorch has the operator.

    The layout is not part of a key, as reading it would cost every call. So the key of a sparse
    tensor may equal that of an earlier, dense one.
    """
    # Where PyTorch has the operator, it accepts nested tensors: an error has another cause.
    if _is_nested(op, tensors) and site.native is not None:
        return
    for i, t in enumerate(tensors):
        if t is not None:
            checks.check_dense(site.constants.op, op.argument(site.constants, i), t)


def elsewhere(op: Operator, site: Site, tensors: Tensors, p: float) -> Any:
    """Computes a call that is not directly a launch: see the module's table."""
    constants = site.constants
    first = tensors[op.first]
    assert first is not None
    if site.dropout:
        checks.check_p(constants.op, p)  # keys of calls do not contain it
    elements = first.numel()
    are_strided = all(t is None or t.layout is torch.strided for t in tensors)
    if not are_strided and not first.is_nested:
        _check_dense(op, site, tensors)  # some of PyTorch's operators would accept a sparse tensor
    if sharding.distributes(tensors) and op.cols(constants, tensors) >= 0:
        return sharding.run(op, constants, tensors, p, partial(_with_state, op))
    # Only an int is compared: comparing a symbolic size would add a guard, or raise if the size is
    # unknown.
    is_empty = type(elements) is int and not elements and op.is_empty(tensors)
    if is_empty or site.cols < 0 or _references.on:
        # Without a state, the mask is the one that `F.dropout` draws.
        return op.reference(constants, tensors, dropout.dropout_of(p, NO_DROPOUT, site.cols))
    # torch.func transforms and forward-mode tangents need derivative rules, and kernels have none.
    # The mask is still the kernels', so that a transformed call drops the same elements.
    if transforms() or in_forward_mode():
        state = rng.draw_state(p, first.device)
        return op.reference(constants, tensors, dropout.dropout_of(p, state, site.cols))
    return _called(
        op, site, tensors, rng.draw_or_record_state(p, tensors, first.device), registered=True
    )


def _called(op: Operator, site: Site, tensors: Tensors, state: State, *, registered: bool) -> Any:
    """Returns the outputs from the registered operator, or from a launch."""
    if registered:
        return function.registered(op, site, tensors, state)
    if site.saves:
        return Call.apply((op, site, state, False), *tensors)  # type: ignore[no-untyped-call]
    return exposed(op, site, tensors, forward(op, site, tensors, state))


def _needs_backward(tensors: Tensors) -> bool:
    """Returns whether autograd records the call."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


# --- under torch.compile, and on a rank's own tensors ---------------------------------------------


def _traced(op: Operator, constants: Any, tensors: Tensors, p: Any) -> Any:
    """Computes a call under torch.compile: one registered operator, which has a derivative."""
    checks.check_p(constants.op, p)
    is_nested = _is_nested(op, tensors)
    constants = op.check(constants, tensors, nested=is_nested)
    first = tensors[op.first]
    assert first is not None
    has_kernels = launch.runs_kernels(first.device.type)
    is_fused = has_kernels and not is_nested and not transforms_when_traced()
    is_sharded = not is_nested and sharding.distributes(tensors)
    if is_sharded and op.cols(constants, tensors) >= 0:
        return sharding.run(op, constants, tensors, p, partial(_with_state, op))
    cols = op.cols(constants, tensors) if is_fused else -1
    if cols < 0:
        return op.reference(constants, tensors, dropout.dropout_of(p, NO_DROPOUT, cols))
    return _in_graph(op, constants, tensors, rng.record_state(p, first.device))


def _in_graph(op: Operator, constants: Any, tensors: Tensors, state: State) -> Any:
    """Calls the registered operator; returns the outputs that the caller gets.

    It builds no `Site`, because `operators.site_of` is an ``lru_cache``: torch.compile warns of a
    call of one.
    """
    saves = _needs_backward(tensors)
    dtypes = operators.dtypes_of(op, tensors)
    call = encode(constants, dtypes, saves)
    cols = op.cols(constants, tensors)
    if isinstance(op, SequenceOperator):
        return tuple(operators.call_parts(op, constants, tensors, state, cols, call))
    outs = operators.call_forward(op, constants, tensors, state, cols, call)
    written = op.writes(constants, dtypes, dropout=state[0] is not None, saves=saves)
    present: Any = operators.present(outs, written)
    return present[: op.visible]


def _with_state(op: Operator, constants: Any, tensors: Tensors, state: State | Dropout) -> Any:
    """Returns the outputs of a checked call on a rank's own tensors.

    `sharding.run` calls it. Where kernels run, ``state`` is their random state, a tuple. Elsewhere
    ``state`` is a function, which applies the rank's part of a mask that PyTorch draws.
    """
    if not isinstance(state, tuple):
        return op.reference(constants, tensors, state)
    if torch.compiler.is_dynamo_compiling():
        if op.cols(constants, tensors) < 0:  # this rank has no columns
            return op.reference(constants, tensors, dropout.none)
        return _in_graph(op, constants, tensors, state)
    first = tensors[op.first]
    assert first is not None
    # A rank without elements launches nothing and draws no mask. It still needs a backward, because
    # other ranks may wait for this rank in a collective of the backward: see `EmptyCall`.
    elements = first.numel()
    is_empty = type(elements) is int and not elements
    draws = state[0] is not None and not is_empty
    site = _site(op, constants, tensors, dropout=draws, saves=_needs_backward(tensors))
    if not is_empty:
        registered = site.special or is_intercepted()
        return _called(op, site, tensors, state, registered=registered)
    if site.saves:
        return EmptyCall.apply((op, site), *tensors)  # type: ignore[no-untyped-call]
    return exposed(op, site, tensors, op.allocate(site, tensors))
