"""Code that torch.compile traces: answers that become constants of its graphs.

Does not import `torch._dynamo`, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .dispatch import transforms

__all__ = ["constant_when_traced", "is_exporting", "transforms_when_traced"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_when_traced(function: _Function) -> _Function:
    """Makes torch.compile take the function's result as a constant, and not look into it.

    What `torch.compiler.assume_constant_result` does, without the second that its import takes.
    Without the private attribute the function is traced.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_traced
def is_exporting() -> bool:
    """Returns whether `torch.export` traces.

    Dynamo of PyTorch 2.11 takes `torch.compiler.is_exporting` as True in all that torch.compile
    traces. In a function that Dynamo does not trace, it reads the state that export sets.
    """
    return torch.compiler.is_exporting()


@constant_when_traced
def transforms_when_traced() -> bool:
    """`transforms` for code that torch.compile traces, which guards on the transforms itself."""
    return transforms()
