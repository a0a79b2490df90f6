"""Trace a function of plain PyTorch operators, once and on tensors without memory, into a `Graph`.

Every operator that PyTorch dispatches is looked up in `lowering`. An operator without an entry is
decomposed by PyTorch, or refused with its name and the user's line. Numbers that a function reads
from the sizes of its tensors would be constants of the graph; `programs` traces the function again
with other sizes to detect them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..core.calls.call import as_references
from ..core.compat.autograd import noticing_autograd_functions
from ..core.compat.fake import quiet
from .axes import AxisError
from .errors import NotRowwiseError
from .recorder import Recorder
from .replacements import Replacements
from .traced import Traced

__all__ = ["recording", "trace", "traced_with_others"]


def trace(
    call: Callable[..., Any],
    arguments: Sequence[Any],
    function: Callable[..., Any],
    names: Sequence[str],
    find_captured: Callable[[Tensor], tuple[int, str] | None],
) -> Traced:
    """Return the function's graph for tensors like these.

    Args:
        call: calls the function.
        arguments: arguments of the call; of tensors only dtype, device and shape are read.
        function: the user's function.
        names: names of the tensors among the arguments, in order.
        find_captured: returns the position and name of a captured tensor; None if its origin is
            unknown.
    Raises:
        NotRowwiseError: the function cannot be one kernel.
    """
    recorder = Recorder(function, find_captured)
    remaining = iter(names)

    def stand_in(value: Any) -> Any:
        return recorder.input(value, next(remaining)) if isinstance(value, Tensor) else value

    fake_arguments = list(map(stand_in, arguments))
    autocast_cached = torch.is_autocast_cache_enabled()
    try:
        # A cast in the trace has no memory. Autocast would cache it, and use it in later calls.
        torch.set_autocast_cache_enabled(False)
        # Gradients are enabled, so that a `torch.no_grad` block of the function is noticed.
        # Functions are replaced first. What remains is dispatched to the recorder, which runs it on
        # fake tensors.
        with (
            traced_with_others(),
            as_references(),
            torch.enable_grad(),
            quiet(),
            recorder.fake,
            recorder,
            Replacements(recorder),
            noticing_autograd_functions(recorder.refuse_autograd_function),
        ):
            returned = call(*fake_arguments)
        # The function caught the refusal, and continued in a branch that no call takes: PyTorch
        # would not have raised an error.
        if recorder.failed is not None:
            raise recorder.failed
    except (NotRowwiseError, AxisError) as error:
        raise (recorder.failed or recorder.refused(str(error))) from None
    finally:
        torch.set_autocast_cache_enabled(autocast_cached)
    traced = recorder.traced
    traced.container = _container_of(returned)
    outputs = (returned,) if traced.container == "tensor" else returned
    if not outputs or not all(isinstance(out, Tensor) for out in outputs):
        raise NotRowwiseError(
            f"{recorder.name} returns {_described(returned, outputs)}, expected a tensor, or a "
            "tuple or list of tensors; return these, and put them into what else a caller expects "
            "outside"
        )
    if any(out.is_complex() for out in outputs):
        raise NotRowwiseError(
            f"{recorder.name} returns a complex tensor; return torch.view_as_real of it"
        )
    traced.outputs = list(map(recorder.value, outputs))
    recorder.name_nodes()
    return traced


def _container_of(returned: Any) -> str:
    """Return "tuple", "list", or "tensor" for anything else."""
    if type(returned) is tuple:
        return "tuple"
    if type(returned) is list:
        return "list"
    return "tensor"


def _described(returned: Any, outputs: Sequence[Any]) -> str:
    """Return the type of a wrong result, with the types of its elements that are no tensors."""
    name = type(returned).__name__
    kinds = sorted({type(out).__name__ for out in outputs if not isinstance(out, Tensor)})
    if outputs is returned and kinds:
        return f"{name} of {', '.join(kinds)}"
    return name


class _Running(threading.local):
    """The number of nested traces in this thread."""

    count = 0


_running = _Running()


def recording() -> bool:
    """Whether a function is being traced in this thread: functions that it calls are inlined."""
    return _running.count > 0


@contextmanager
def traced_with_others() -> Iterator[None]:
    """Run row-wise functions as plain PyTorch in the block, for a tracer that fuses several."""
    _running.count += 1
    try:
        yield
    finally:
        _running.count -= 1
