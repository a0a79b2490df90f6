"""The path of every call, from a functional's constants and tensors to kernels or PyTorch.

A call whose key is cached is not checked again. The first row that applies computes it:

    condition                                        computed by
    no kernels on this device, no elements, a        the reference implementation
      torch.func transform, forward-mode
      differentiation, tracing of a row-wise
      function
    a dispatch mode, a tensor subclass               the registered operator
    a small tensor, and PyTorch has the operator     PyTorch's operator
    a tensor requires a gradient                     the autograd Function, which launches
    otherwise                                        a launch

torch.compile traces a separate path, to the registered operator. DTensors take `_on_shards`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...distributed import sharding
from ..compat.dispatch import any_autocast_enabled, in_forward_mode, is_intercepted, transforms
from ..compat.dynamo import transforms_when_traced
from ..compat.fake import is_recording
from ..launches import launch
from ..random import dropout, rng
from ..random.dropout import Dropout
from ..random.rng import NO_DROPOUT, State
from . import checks, operators
from .function import PLAIN, Call, Nothing, apply, forward
from .operator import Operator, Site, Tensors

__all__ = ["as_references", "run", "with_state"]

# A program has fewer different calls. One with ever new calls starts with an empty cache again.
_MOST_CALLS = 8192


class _References(threading.local):
    """Whether calls of this thread run their reference implementations."""

    on = False


_references = _References()


@contextlib.contextmanager
def as_references() -> Iterator[None]:
    """Runs this thread's calls by reference implementations, for tracers of PyTorch's operators."""
    before = _references.on
    _references.on = True
    try:
        yield
    finally:
        _references.on = before


class Signature:
    """All that the key of a checked call determines."""

    __slots__ = (
        "cols",
        "constants",
        "device_index",
        "dtypes",
        "kernels",
        "native",
        "sites",
        "special",
    )

    def __init__(
        self, op: Operator, constants: Any, tensors: Tensors, *, nested: bool, autocast: bool
    ) -> None:
        first = tensors[op.first]
        assert first is not None
        self.constants = constants
        self.dtypes = operators.dtypes_of(op, tensors)
        self.device_index = first.get_device()
        self.cols = -1
        if launch.runs_kernels(first.device.type) and not nested:
            # A symbol becomes a number: kernels are compiled for it.
            self.cols = int(op.cols(constants, tensors))
        self.kernels = self.cols >= 0
        # Tensor subclasses see registered operators.
        self.special = not self.kernels or not PLAIN.issuperset(map(type, tensors))
        self.native: Callable[..., Any] | None = None
        if not self.special and first.is_cuda and not autocast:
            self.native = op.native(constants, self.dtypes)
        # Indexed by dropout (bit 0) and by whether a backward will follow (bit 1).
        self.sites: list[Site | None] = [None] * 4

    def site(self, op: Operator, index: int) -> Any:
        """Returns the site at an index of ``sites``, and stores it."""
        site = operators.site_of(
            op,
            self.constants,
            self.dtypes,
            self.cols,
            self.device_index,
            bool(index & 1),
            bool(index & 2),
        )
        self.sites[index] = site
        return site


def run(op: Operator, arguments: Any, tensors: Any, p: Any = 0.0) -> Any:
    """Returns the outputs of ``op`` as a tuple, which may end after the last that the call has.

    The host time of a repeated call counts, so its path is one flat function without helpers.

    Args:
        op: the operator.
        arguments: the arguments of `Operator.record`, which builds the record of constants.
        tensors: the operator's tensor arguments, None where absent.
        p: the drop probability.
    """
    if torch.compiler.is_dynamo_compiling():
        return _traced(op, op.record(*arguments), tensors, p)
    try:
        autocast = any_autocast_enabled() and torch.is_autocast_enabled("cuda")
        signature = op.signatures[autocast].get(op.key(arguments, tensors))
    except (AttributeError, IndexError, TypeError, RuntimeError):
        # An argument is wrong, and the checks will raise an error that names it; or a tensor
        # subclass or nested tensor has no shape to read.
        signature = None
    if signature is None:
        signature = _checked(op, arguments, tensors)
    if p != 0.0 and not (type(p) is float and 0.0 <= p <= 1.0):
        checks.check_p(signature.constants.op, p)
    first = tensors[op.first]
    try:
        elements = first.numel()
        if signature.special or is_intercepted() or not elements:
            return _elsewhere(op, tensors, p, signature)
        if elements <= op.native_elements and signature.native is not None and p == 0.0:
            return (signature.native(signature.constants, tensors),)
        if p == 0.0:
            index, state = 0, NO_DROPOUT
        else:
            index, state = 1, rng.state_of(p, first.device)
        if torch.is_grad_enabled():
            for t in tensors:
                if t is not None and t.requires_grad:
                    site = signature.sites[index + 2] or signature.site(op, index + 2)
                    return apply((op, site, state, False), *tensors)
        site = signature.sites[index] or signature.site(op, index)
        return op.expose(site.constants, tensors, forward(op, site, tensors, state))
    except RuntimeError:
        _check_dense(op, signature, tensors)
        raise


def _checked(op: Operator, arguments: Any, tensors: Tensors) -> Signature:
    """Checks a new call, and caches its signature."""
    constants, autocast = op.record(*arguments), torch.is_autocast_enabled("cuda")
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise RuntimeError(f"{constants.op}: torch.jit.trace is not supported; use torch.export")
    constants, nested = _validated(op, constants, tensors)
    signature = Signature(op, constants, tensors, nested=nested, autocast=autocast)
    known = op.signatures[autocast]
    if len(known) >= _MOST_CALLS:
        known.clear()
    # A call may have no key, or one of symbols, which have no hash.
    with contextlib.suppress(AttributeError, IndexError, TypeError, RuntimeError):
        known[op.key(arguments, tensors)] = signature
    return signature


def _validated(op: Operator, constants: Any, tensors: Tensors) -> tuple[Any, bool]:
    """Checks a call; returns its constants, by GPU autocast too, and whether tensors are nested."""
    first = tensors[op.first]
    is_nested = isinstance(first, Tensor) and first.is_nested
    if is_nested:
        op.check_constants(constants)  # PyTorch's operators check the tensors
    else:
        op.check(constants, tensors)
    if torch.is_autocast_enabled("cuda"):
        constants = op.autocast(constants, tensors)
    return constants, is_nested


def _check_dense(op: Operator, signature: Signature, tensors: Tensors) -> None:
    """Raises for a tensor without strides, or a nested one, after PyTorch's error.

    The layout is not part of a key, as it would cost every call. So the key of such a tensor may
    equal that of an earlier call.
    """
    constants = signature.constants
    first = tensors[op.first]
    is_nested = first is not None and first.is_nested
    # PyTorch takes nested tensors itself where it has the operator; its error is then about
    # something else.
    if is_nested and op.native(constants, signature.dtypes) is not None:
        return
    for i, t in enumerate(tensors):
        if t is not None:
            checks.check_dense(constants.op, op.argument(constants, i), t)


def _elsewhere(op: Operator, tensors: Tensors, p: float, signature: Signature) -> Any:
    """Computes a call that is not directly a launch: see the module's table."""
    constants, first = signature.constants, tensors[op.first]
    assert first is not None
    elements = first.numel()
    are_strided = all(t is None or t.layout is torch.strided for t in tensors)
    if not are_strided and not first.is_nested:
        _check_dense(op, signature, tensors)  # some of PyTorch's operators would take it
    if _is_on_shards(op, constants, tensors):
        return _on_shards(op, constants, tensors, p)
    # A comparison of a symbol would become a guard, or raise where its value is unknown.
    is_empty = type(elements) is int and not elements
    if is_empty or not signature.kernels or _references.on:
        return op.reference(constants, tensors, dropout.dropout_of(p, NO_DROPOUT, signature.cols))
    if transforms() or in_forward_mode():
        state = rng.state_of(p, first.device)
        return op.reference(constants, tensors, dropout.dropout_of(p, state, signature.cols))
    return _called(op, signature, tensors, _drawn(p, tensors, first.device), registered=True)


def _drawn(p: float, tensors: Tensors, device: torch.device) -> State:
    """Returns the random state of a call whose tensors may be recorded."""
    if 0.0 < p < 1.0 and is_recording(*tensors):
        return rng.recorded(device), None, rng.threshold(p)
    return rng.state_of(p, device)


def _needs_backward(tensors: Tensors) -> bool:
    """Whether autograd records the call."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def _called(
    op: Operator, signature: Signature, tensors: Tensors, state: State, *, registered: bool
) -> Any:
    """Returns the outputs from the registered operator, or from a launch."""
    saves = _needs_backward(tensors)
    site = signature.site(op, (state[0] is not None) + 2 * saves)
    if saves:
        return Call.apply((op, site, state, registered), *tensors)  # type: ignore[no-untyped-call]
    launched = operators.forward if registered else forward
    return op.expose(site.constants, tensors, launched(op, site, tensors, state))


def _traced(op: Operator, constants: Any, tensors: Tensors, p: Any) -> Any:
    """Computes a call under torch.compile: one registered operator, which has a derivative."""
    checks.check_p(constants.op, p)
    constants, is_nested = _validated(op, constants, tensors)
    first = tensors[op.first]
    assert first is not None
    has_kernels = launch.runs_kernels(first.device.type)
    is_fused = has_kernels and not is_nested and not transforms_when_traced()
    if not is_nested and _is_on_shards(op, constants, tensors):
        return _on_shards(op, constants, tensors, p)
    cols = op.cols(constants, tensors) if is_fused else -1
    if cols < 0:
        return op.reference(constants, tensors, dropout.dropout_of(p, NO_DROPOUT, cols))
    return _in_graph(op, constants, tensors, _recorded(p, first.device))


def _recorded(p: float, device: torch.device) -> State:
    """Returns the random state of a call that torch.compile traces."""
    if p <= 0.0:
        return NO_DROPOUT
    seed = rng.recorded(device) if p < 1.0 else torch.zeros(2, dtype=torch.int64, device=device)
    return seed, None, rng.threshold(p)


def _in_graph(op: Operator, constants: Any, tensors: Tensors, state: State) -> Any:
    """Calls the registered operator; returns the outputs that the caller gets."""
    saves = _needs_backward(tensors)
    dtypes = operators.dtypes_of(op, tensors)
    outs = operators.call_forward(
        op,
        constants,
        tensors,
        state,
        op.cols(constants, tensors),
        operators.encode(constants, dtypes, saves),
    )
    written = op.writes(constants, dtypes, dropout=state[0] is not None, saves=saves)
    return op.expose(constants, tensors, operators.present(outs, written))


# --- DTensors -------------------------------------------------------------------------------------


def _is_on_shards(op: Operator, constants: Any, tensors: Tensors) -> bool:
    """Whether a call has DTensors, of rows that kernels can be compiled for."""
    return sharding.distributes(tensors) and op.cols(constants, tensors) >= 0


def _on_shards(op: Operator, constants: Any, tensors: Tensors, p: float) -> Any:
    """Computes a call on DTensors: each rank makes the call on its own tensors."""
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


def _of_shard(
    layout: sharding.Layout, p: float, local: Tensors, device: torch.device
) -> State | Dropout:
    """Returns the random state of a rank's kernels.

    Where no kernels run, it is dropout with the rank's part of PyTorch's mask.
    """
    if not launch.runs_kernels(device.type):
        return layout.dropout(p)
    if layout.axes.rows.count(0):  # one process draws nothing for no elements either
        return NO_DROPOUT
    is_traced = torch.compiler.is_dynamo_compiling()
    state = _recorded(p, device) if is_traced else _drawn(p, local, device)
    first, second, threshold = state
    if first is None:
        return state
    own: Any = first if isinstance(first, Tensor) else (first, second)
    seed = layout.seed(own, device)
    return seed, seed, threshold


def with_state(op: Operator, constants: Any, tensors: Tensors, state: State | Dropout) -> Any:
    """Returns the outputs of a checked call, with a state as `Operator.over_columns` takes it."""
    if not isinstance(state, tuple):
        return op.reference(constants, tensors, state)
    if torch.compiler.is_dynamo_compiling():
        if op.cols(constants, tensors) < 0:  # this rank has no columns
            return op.reference(constants, tensors, dropout.none)
        return _in_graph(op, constants, tensors, state)
    signature = Signature(op, constants, tensors, nested=False, autocast=False)
    first = tensors[op.first]
    assert first is not None
    elements = first.numel()
    if type(elements) is int and not elements:
        return _nothing(op, signature, tensors)
    registered = signature.special or is_intercepted()
    return _called(op, signature, tensors, state, registered=registered)


def _nothing(op: Operator, signature: Signature, tensors: Tensors) -> Any:
    """Returns the outputs of a rank that has no rows or no columns."""
    saves = _needs_backward(tensors)
    site = signature.site(op, 2 * saves)
    if saves:
        return Nothing.apply((op, site), *tensors)  # type: ignore[no-untyped-call]
    return op.expose(site.constants, tensors, op.allocate(site, tensors))
