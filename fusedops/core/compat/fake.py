"""Tensors without memory, and the modes that record operators on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

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

# The modes under which PyTorch makes a graph have keys of their own. `_mode` returns the mode that
# is on for a key, or None: no other name tells them from a user's mode, which only observes.
_mode: Callable[[Any], Any] = find("_C._get_dispatch_mode", lambda key: None)
_keys = find("_C._TorchDispatchModeKey", None)
_RECORDING_KEYS = tuple(
    getattr(_keys, name) for name in ("FAKE", "PROXY", "FUNCTIONAL") if hasattr(_keys, name)
)

# The mode in which torch.compile makes a graph functional: operators that allocate there become
# operators that write. Without it compiled code calls the former.
Functional: Any = imported("torch._subclasses.functional_tensor", "FunctionalTensorMode")


def is_recording(*tensors: Tensor | None) -> bool:
    """Returns whether operators are recorded, so that a number drawn now is the same in every run.

    True for fake and functional tensors and while `make_fx` traces; other dispatch modes only
    observe a call. Without the private names only the tensors are looked at, and a traced graph
    repeats its dropout mask.
    """
    if any(isinstance(t, _RECORDED) for t in tensors):
        return True
    return any(_mode(key) is not None for key in _RECORDING_KEYS)


def are_functional(types: Iterable[type]) -> bool:
    """Returns whether these are types of a functional graph, with no tensor subclass among them."""
    return all(t is Tensor or issubclass(t, _RECORDED) for t in types)


def current_tracer() -> Any:
    """Returns the tracer that records operators in this thread; None if there is none, or unknown.

    The random state of a graph belongs to its tracer. Without the private name every call of the
    graph draws a state of its own.
    """
    get = imported("torch.fx.experimental.proxy_tensor", "get_proxy_mode")
    mode = get() if get is not None else None
    return getattr(mode, "tracer", None)


# --- tensors without memory -----------------------------------------------------------------------


def is_fake(tensor: Tensor) -> bool:
    """Returns whether a tensor has no memory."""
    return isinstance(tensor, _RECORDED)


def fake_mode() -> AbstractContextManager[Any]:
    """Returns a mode in which only dtypes, devices and shapes are computed: tensors have no memory.

    Raises:
        RuntimeError: this PyTorch has no such mode.
    """
    mode: Any = imported("torch._subclasses.fake_tensor", "FakeTensorMode")
    if mode is None:
        raise RuntimeError(
            "this PyTorch has no tensors without memory, with which functions are traced"
        )
    # A traced function may read tensors around it, which have memory.
    return mode(allow_non_fake_inputs=True)  # type: ignore[no-any-return]


@contextmanager
def quiet() -> Iterator[None]:
    """Raises errors of operators on tensors without memory, and does not log them too.

    PyTorch logs some of them, with a traceback, before it raises them. A function that is refused
    would print that beside the reason.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _hint(size: Any) -> int:
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(size if hint is None else hint)


def hints(shape: Sequence[Any]) -> tuple[int, ...]:
    """Returns sizes as numbers: for a symbol, its number in the traced call. Adds no guard.

    ``int(size)`` of a symbol does add one: the graph would be compiled again for other sizes. So it
    is without the private names.
    """
    return tuple([size if type(size) is int else _hint(size) for size in shape])


def memory_of(tensor: Tensor) -> Hashable:
    """Returns an identity of a tensor's memory, also of a fake tensor's.

    A fake tensor has no address, but a storage object in C++, which its views share. Without the
    private name all tensors have the same, and are taken to overlap.
    """
    return getattr(tensor.untyped_storage(), "_cdata", None)


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Returns whether tensors without memory would share it; True without the private name."""
    return memory_of(one) == memory_of(other)
