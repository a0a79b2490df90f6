"""Functions for code that torch.compile traces. Their results are constants of its graphs.

This module does not import `torch._dynamo`, which takes a second.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .dispatch import transforms

__all__ = [
    "constant_when_traced",
    "guarding_hooks",
    "is_exporting",
    "skips_hooks",
    "transforms_when_traced",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_OPTION = "skip_nnmodule_hook_guards"


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
    """Returns whether torch.compile lacks the private option that `guarding_hooks` sets."""
    return not hasattr(_config(), _OPTION)


class guarding_hooks:  # noqa: N801 - used like a function
    """A context in which torch.compile guards on modules without hooks staying so.

    By default it does not: a hook that is registered after a graph was compiled does not run in it.
    `patch` of the options does the same, and takes the host thrice as long at each call.
    """

    def __enter__(self) -> None:
        self._before = getattr(_config(), _OPTION)
        setattr(_config(), _OPTION, False)

    def __exit__(self, *_: Any) -> None:
        setattr(_config(), _OPTION, self._before)
