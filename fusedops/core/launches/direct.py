"""Direct launches: for each compiled kernel, a Python function that only calls Triton's C function.

The function's source is generated, as a dataclass's methods are. So it contains no loop over the
arguments and builds no list of them. This is the source for a kernel whose arguments are a tensor,
an integer and None. Dots stand for the check of hooks, and for arguments of the C function that are
the same in each launch:

    def variant(grid_x, grid_y, a0, a1, a2):
        ...
        launch(grid_x, grid_y, 1, current_stream(0), ..., a0.data_ptr(), a1, None)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..compat.runtime import current_stream
from ..compat.triton import GRID, STREAM, NoDirectCallError, Place, direct_call, launch_hooks

__all__ = ["bind"]

# ``_observers``, ``_observe`` and ``MOST_TILES`` are globals of the module `launch`. `bind` passes
# the rest. ``enter`` and ``leave`` are Triton's chains of launch hooks, ``entering`` and
# ``leaving`` the chains' lists of hooks. A launch may have hooks if one of the lists has an item,
# or if a chain was replaced after binding. Then ``general`` launches the kernel.
_SOURCE = """
def bind(launch, current_stream, name, general, runtime, enter, leave, entering, leaving{fixed}):
    def variant(grid_x, grid_y{arguments}):
        if _observers:
            _observe(name)
        if (
            grid_y > MOST_TILES
            or entering
            or leaving
            or runtime.launch_enter_hook is not enter
            or runtime.launch_exit_hook is not leave
        ):
            return general(grid_x, grid_y{arguments})
        launch({call})
    return variant
"""


def bind(
    compiled: Any,
    kinds: Sequence[str | None],
    constants: int,
    *,
    name: str,
    device_index: int,
    general: Callable[..., None],
    namespace: dict[str, Any],
) -> Callable[..., None]:
    """Returns ``variant(grid_x, grid_y, *arguments)``, which launches on the current stream.

    ``variant`` passes addresses as integers. For a tensor, the C function would call ``data_ptr()``
    from C and query the driver about the address.

    Args:
        compiled: the compiled kernel. ``general`` must hold a reference to it, because a kernel is
            unloaded when it is garbage-collected.
        kinds: Triton's type name of each run-time argument, None for one that is absent.
        constants: the number of constants that follow the run-time arguments.
        name: the kernel's name, for observers.
        device_index: the GPU for which the kernel was compiled.
        general: a function with the arguments of ``variant``, which calls it if there are launch
            hooks, or if ``grid_y`` exceeds CUDA's limit for that axis.
        namespace: the globals of ``variant``.
    Raises:
        NoDirectCallError: only Triton's own launcher can launch this kernel.
    """
    runtime = launch_hooks()
    if runtime is None:
        raise NoDirectCallError("it has no launch hooks that could be looked at")
    # `direct_call` calls Triton's launcher with placeholders, and returns what it passes to the C
    # function: a placeholder for each value that changes between launches, and the fixed values.
    placeholders = [None if kind is None else Place(f"a{i}") for i, kind in enumerate(kinds)]
    call = direct_call(compiled, [*placeholders, *[None] * constants])
    expressions: dict[Any, str] = {axis: axis.name for axis in GRID[:2]}
    expressions |= {GRID[2]: "1", STREAM: f"current_stream({device_index})"}
    for placeholder, kind in zip(placeholders, kinds, strict=True):
        if placeholder is None:
            continue
        is_address = str(kind).startswith("*")
        suffix = ".data_ptr()" if is_address else ""
        expressions[placeholder] = f"{placeholder.name}{suffix}"
    fixed: list[Any] = []
    call_text = ", ".join([_expression(value, expressions, fixed) for value in call.arguments])
    source = _SOURCE.format(
        call=call_text,
        arguments="".join(f", a{i}" for i in range(len(kinds))),
        fixed="".join(f", f{i}" for i in range(len(fixed))),
    )
    defined: dict[str, Any] = {}
    # ``namespace`` is not copied: the generated function reads the module's variables at each call,
    # such as the observers of a later `launch.record`.
    exec(_code(source), namespace, defined)
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    variant: Callable[..., None] = defined["bind"](
        call.launch,
        current_stream,
        name,
        general,
        runtime,
        enter,
        leave,
        enter.calls,
        leave.calls,
        *fixed,
    )
    return variant


@functools.cache
def _code(source: str) -> Any:
    """Returns the code object for a source; kernels with the same kinds of arguments share it."""
    return compile(source, "<fusedops launch>", "exec")


def _expression(value: Any, expressions: dict[Any, str], fixed: list[Any]) -> str:
    """Returns the source text of an argument.

    A value that cannot be written as source is appended to ``fixed``, and its text is the name of a
    parameter of the generated ``bind``. ``bind`` is called with these values.
    """
    if isinstance(value, Place):
        return expressions[value]
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, tuple) and any(isinstance(part, Place) for part in value):
        parts = [_expression(part, expressions, fixed) for part in value]
        return f"({', '.join(parts)},)"
    fixed.append(value)
    return f"f{len(fixed) - 1}"
