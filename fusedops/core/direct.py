"""Direct launches: a Python function for each compiled kernel that calls Triton's C function and nothing else.

The function is generated, as those of dataclasses are, so that a launch is one call of flat code: no list of arguments
is built, and each address is read where the C function takes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from . import compat

__all__ = ["bind"]

# ``_observers``, ``_observe`` and ``MOST_TILES`` are globals of `launch`. A chain of hooks that is not the one seen at
# binding was assigned since; ``entering`` and ``leaving`` are the lists of hooks in those that were seen.
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
    """``variant(grid_x, grid_y, *arguments)``, which launches on the current stream of the device.

    Addresses go in as integers: the C function then neither calls back into Python nor asks the driver about them.

    Args:
        compiled: the compiled kernel. ``general`` keeps it alive: a kernel that is collected is unloaded.
        kinds: Triton's type name of each run-time argument, None for one that is absent.
        constants: how many constants follow the run-time arguments.
        name: the kernel's name, for observers.
        device_index: the GPU for which the kernel was compiled.
        general: takes the same arguments, where launch hooks are set or the grid is too long for axis 1.
        namespace: the globals of the function.
    Raises:
        compat.NoDirectCallError: this kernel has to be launched by Triton's own launcher.
    """
    runtime = compat.launch_hooks()
    if runtime is None:
        raise compat.NoDirectCallError("it has no launch hooks that could be looked at")
    places = [None if kind is None else compat.Place(f"a{i}") for i, kind in enumerate(kinds)]
    call = compat.direct_call(compiled, [*places, *[None] * constants])
    written: dict[Any, str] = {axis: axis.name for axis in compat.GRID[:2]}
    written |= {compat.GRID[2]: "1", compat.STREAM: f"current_stream({device_index})"}
    for place, kind in zip(places, kinds, strict=True):
        if place is not None:
            written[place] = f"{place.name}.data_ptr()" if str(kind).startswith("*") else place.name
    fixed: list[Any] = []
    taken = ", ".join(_expression(value, written, fixed) for value in call.arguments)
    arguments = "".join(f", a{i}" for i in range(len(kinds)))
    source = _SOURCE.format(call=taken, arguments=arguments, fixed="".join(f", f{i}" for i in range(len(fixed))))
    made: dict[str, Any] = {}
    exec(_code(source), namespace, made)
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    variant: Callable[..., None] = made["bind"](
        call.launch, compat.current_stream, name, general, runtime, enter, leave, enter.calls, leave.calls, *fixed
    )
    return variant


@functools.cache
def _code(source: str) -> Any:
    return compile(source, "<fusedops launch>", "exec")


def _expression(value: Any, written: dict[Any, str], fixed: list[Any]) -> str:
    """What the generated call says for a value; one that cannot be written down becomes an argument of ``bind``."""
    if isinstance(value, compat.Place):
        return written[value]
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, tuple) and any(isinstance(part, compat.Place) for part in value):
        return f"({', '.join(_expression(part, written, fixed) for part in value)},)"
    fixed.append(value)
    return f"f{len(fixed) - 1}"
