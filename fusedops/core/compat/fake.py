"""Fake tensors, which have no memory, and the modes that record operators.

This module uses private names of PyTorch. If a release lacks one, its function returns a fallback,
which the function's docstring describes.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from .distributed import local_of
from .lookup import find, imported

__all__ = [
    "Functional",
    "are_functional",
    "current_tracer",
    "fake_mode",
    "hints",
    "is_fake",
    "is_recording",
    "memory_of",
    "quiet",
    "saved_for_backward",
    "share_memory",
]


def _recorded_types() -> tuple[type, ...]:
    types = (
        imported("torch._subclasses.fake_tensor", "FakeTensor"),
        imported("torch._subclasses.functional_tensor", "FunctionalTensor"),
    )
    return tuple(t for t in types if t is not None)


_RECORDED = _recorded_types()

# --- modes that record ----------------------------------------------------------------------------

# The dispatch modes with which PyTorch captures a graph have keys. `_mode` returns the active mode
# of a key, or None. A user's dispatch mode, which only observes calls, has no key. So the keys
# distinguish the two kinds.
_mode: Callable[[Any], Any] = find("_C._get_dispatch_mode", lambda key: None)
_keys = find("_C._TorchDispatchModeKey", None)
_RECORDING_KEYS = tuple(
    getattr(_keys, name) for name in ("FAKE", "PROXY", "FUNCTIONAL") if hasattr(_keys, name)
)

# The mode in which torch.compile functionalises a graph. An operator of this library that allocates
# its outputs is replaced there by one that writes into outputs. Without the mode, compiled code
# calls the operator that allocates.
Functional: Any = imported("torch._subclasses.functional_tensor", "FunctionalTensorMode")


def is_recording(*tensors: Tensor | None) -> bool:
    """Returns whether operators are being recorded in a graph.

    If so, a random number that is drawn now would be a constant of the graph. True for fake and
    functional tensors, and while `make_fx` traces. Other dispatch modes only observe a call.
    Without PyTorch's private names only the tensors are checked, and a graph of `make_fx` uses the
    same dropout mask in each run.
    """
    if any(isinstance(t, _RECORDED) for t in tensors):
        return True
    return any(_mode(key) is not None for key in _RECORDING_KEYS)


def are_functional(types: Iterable[type]) -> bool:
    """Returns whether all types are `Tensor`, fake or functional, and none another subclass."""
    return all(t is Tensor or issubclass(t, _RECORDED) for t in types)


def current_tracer() -> Any:
    """Returns the tracer that records operators in this thread; None if none does.

    The random states of a graph are drawn several at once and stored for its tracer. Without
    PyTorch's private name the result is None, and each call in the graph draws its own state.
    """
    get = imported("torch.fx.experimental.proxy_tensor", "get_proxy_mode")
    mode = get() if get is not None else None
    return getattr(mode, "tracer", None)


@contextmanager
def saved_for_backward(tracer: Any) -> Iterator[None]:
    """Context manager that marks what a tracer records in the block: a backward must not redo it.

    Without the mark PyTorch's partitioner may record a random operator in the backward, too, where
    it would draw other numbers.
    """
    nodes = tracer.graph.nodes
    before = len(nodes)
    yield
    for node in itertools.islice(reversed(nodes), len(nodes) - before):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


# --- fake tensors ---------------------------------------------------------------------------------


def is_fake(tensor: Tensor) -> bool:
    """Returns whether a tensor is a fake or a functional tensor."""
    return isinstance(tensor, _RECORDED)


def fake_mode() -> AbstractContextManager[Any]:
    """Returns a mode with fake tensors: operators compute only dtypes, devices and shapes.

    Raises:
        RuntimeError: this PyTorch has no such mode.
    """
    mode: Any = imported("torch._subclasses.fake_tensor", "FakeTensorMode")
    if mode is None:
        raise RuntimeError(
            "this PyTorch has no tensors without memory, with which functions are traced"
        )
    # A traced function may read real tensors from its closure or globals.
    return mode(allow_non_fake_inputs=True)  # type: ignore[no-any-return]


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager that silences PyTorch's log of this thread's errors on fake tensors.

    PyTorch logs some errors, with a traceback, before it raises them. The caller reports the raised
    error as the reason for which a function cannot be traced, so the log would repeat it.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    thread = threading.get_ident()

    def is_of_another_thread(record: logging.LogRecord) -> bool:
        return threading.get_ident() != thread

    # Not by `disabled`, which two threads could restore in the wrong order.
    logger.addFilter(is_of_another_thread)
    try:
        yield
    finally:
        logger.removeFilter(is_of_another_thread)


def _hint(size: Any) -> int:
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(size if hint is None else hint)


def hints(shape: Sequence[Any]) -> tuple[int, ...]:
    """Returns sizes as ints, without guards. A symbolic size has its value in the traced call.

    ``int(size)`` would add a guard, so that the graph would be compiled again for other sizes. It
    is the fallback without PyTorch's private names.
    """
    return tuple([size if type(size) is int else _hint(size) for size in shape])


def memory_of(tensor: Tensor) -> Hashable:
    """Returns a key that is equal for tensors that share a storage, fake tensors included.

    A fake tensor has no address, but it has a storage object in C++, which its views share. The
    memory of a DTensor is that of its local tensor. Without PyTorch's private name all tensors have
    the same key, as if they overlapped.
    """
    return getattr(local_of(tensor).untyped_storage(), "_cdata", None)


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors share a storage; True without PyTorch's private name."""
    return memory_of(one) == memory_of(other)
