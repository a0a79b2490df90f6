"""Functions for code that torch.compile traces. Their results are constants of its graphs.

This module does not import `torch._dynamo`, which takes a second.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .dispatch import transforms

__all__ = [
    "as_in_eager_mode",
    "constant_when_traced",
    "is_exporting",
    "skips_hooks",
    "transforms_when_traced",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])
# Options of Dynamo with the values of `as_in_eager_mode`.
_OPTIONS = {
    "skip_nnmodule_hook_guards": False,
    "suppress_errors": True,
    # Equal layers behind graph breaks share a code object, and may differ by a number.
    "recompile_limit": 64,
    # A module that counts its calls is not compiled for each number.
    "allow_unspec_int_on_nn_module": True,
    # Otherwise DDP would split graphs at its buckets, to overlap backwards that Inductor compiles.
    "optimize_ddp": False,
}
# How many calls are in the context, and what the options were before the first of them.
_inside = 0
_before: list[Any] = []
_lock = threading.Lock()


def constant_when_traced(function: _Function) -> _Function:
    """Marks a function: torch.compile treats its result as a constant, and does not trace it.

    `torch.compiler.assume_constant_result` does the same, but imports Dynamo, which takes a second.
    If PyTorch ignores the private attribute, it traces the function.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_traced
def is_exporting() -> bool:
    """Returns whether `torch.export` traces.

    In code that Dynamo of PyTorch 2.11 traces, `torch.compiler.is_exporting` is always True. Dynamo
    does not trace this function, so here it reads the state that export sets.
    """
    return torch.compiler.is_exporting()


@constant_when_traced
def transforms_when_traced() -> bool:
    """Returns `transforms`, for traced code; PyTorch itself guards the result."""
    return transforms()


@functools.cache
def _config() -> Any:
    """Returns the options of Dynamo, which takes a second to import."""
    return importlib.import_module("torch._dynamo.config")


@functools.cache
def skips_hooks() -> bool:
    """Returns whether torch.compile lacks a private option that `as_in_eager_mode` sets."""
    return not all(hasattr(_config(), option) for option in _OPTIONS)


class as_in_eager_mode:  # noqa: N801 - used like a function
    """A context in which code that torch.compile compiles behaves as in eager mode.

    A hook that is registered on a module after a graph was compiled runs, since graphs have guards
    on modules without hooks. Code that torch.compile fails on runs as it is, and PyTorch logs the
    error. `patch` of the options does the same, and takes the host thrice as long at each call.
    """

    def __enter__(self) -> None:
        global _inside
        with _lock:
            if not _inside:
                _before[:] = [getattr(_config(), option) for option in _OPTIONS]
            _inside += 1
        for option, value in _OPTIONS.items():
            setattr(_config(), option, value)

    def __exit__(self, *_: Any) -> None:
        global _inside
        with _lock:
            _inside -= 1
        # Options are of a thread, or in older releases of the process.
        for option, value in zip(_OPTIONS, _before, strict=True):
            setattr(_config(), option, value)
