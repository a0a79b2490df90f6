"""Triton: compilation ahead of a launch, targets, launch hooks, and calls of the C launcher.

Imported inside functions: the package is imported without Triton.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "GRID",
    "STREAM",
    "DirectCall",
    "NoDirectCallError",
    "Place",
    "compile_ahead",
    "compiles_ahead",
    "current_target",
    "direct_call",
    "gpu_target",
    "launch_hooks",
    "launches_cooperatively",
    "overlaps_launches",
]

# --- targets and what they can do -----------------------------------------------------------------


def gpu_target(backend: str, arch: int | str, warp_size: int) -> Any:
    """Returns Triton's record of a kind of GPU to compile for."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget(backend, arch, warp_size)


def current_target() -> Any:
    """Returns the current GPU as a compilation target.

    From the GPU's properties if the release has its driver elsewhere: such a GPU is NVIDIA's, with
    32 threads in a warp.
    """
    import triton

    try:
        return triton.runtime.driver.active.get_current_target()
    except AttributeError:
        major, minor = torch.cuda.get_device_capability()
        return gpu_target("cuda", 10 * major + minor, 32)


def _options() -> Mapping[str, Any]:
    """Returns the compiler's options for NVIDIA GPUs; none without its module.

    An option that a release does not have is an error there, so that it is asked by name.
    """
    try:
        from triton.backends.nvidia.compiler import CUDAOptions
    except ImportError:
        return {}
    return inspect.signature(CUDAOptions).parameters


@functools.cache
def overlaps_launches() -> bool:
    """Returns whether kernels can be compiled for programmatic dependent launch.

    Such a kernel begins before its predecessor ends, and waits by ``gdc_wait`` before it reads.
    Without the private names each launch begins behind the one before: slower.
    """
    import triton.language as tl

    cuda = getattr(tl.extra, "cuda", None)
    return "launch_pdl" in _options() and hasattr(cuda, "gdc_wait")


@functools.cache
def launches_cooperatively() -> bool:
    """Returns whether a launch can require that all programs of a kernel run at the same time.

    Programs that wait for one another need it. Without the private names such a kernel is launched
    twice instead: slower.
    """
    return "launch_cooperative_grid" in _options()


# --- compilation ----------------------------------------------------------------------------------


def compiles_ahead() -> bool:
    """Returns whether `compile_ahead` works.

    Without it kernels are compiled at their first launch.
    """
    import triton

    source = getattr(getattr(triton, "compiler", None), "ASTSource", None)
    if source is None:
        return False
    return {"fn", "signature", "constexprs", "attrs"} <= set(inspect.signature(source).parameters)


def compile_ahead(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    divisible: Mapping[str, int],
    options: Mapping[str, Any],
    target: Any = None,
) -> Any:
    """Returns a kernel compiled for these types; with a target, without a GPU.

    Args:
        kernel: the decorated function.
        signature: Triton's type name of every argument; ``"constexpr"`` for one that is a constant.
        constants: the values of the constant arguments.
        divisible: powers of two that the values of arguments are multiples of.
        options: the compiler's options.
        target: as `gpu_target` returns it; the current GPU by default.
    Raises:
        RuntimeError: this release cannot do it; `compiles_ahead` tells beforehand.
    """
    import triton

    if not compiles_ahead():
        raise RuntimeError(
            f"fusedops: Triton {triton.__version__} cannot compile a kernel without launching it"
        )
    _choose_assembler()
    # Triton names an argument by the path to it: of one that is no tuple, its index alone.
    paths = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    constexprs = {paths[name]: value for name, value in constants.items()}
    attrs = {paths[name]: [["tt.divisibility", multiple]] for name, multiple in divisible.items()}
    source = triton.compiler.ASTSource(kernel, dict(signature), constexprs, attrs)
    return triton.compile(source, target=target, options=dict(options))


def _choose_assembler() -> None:
    """Chooses PyTorch's ``ptxas`` if Inductor is loaded.

    Inductor does the same when it compiles a kernel in this process.

    The assembler's version is part of the key of Triton's cache. A process with warm caches of
    Inductor may compile nothing itself, and would use Triton's ``ptxas``: its keys would differ
    from those of the first process. Without the private names a kernel may be compiled once more in
    a later process.
    """
    tasks = sys.modules.get("torch._inductor.runtime.compile_tasks")
    choose = getattr(tasks, "_set_triton_ptxas_path", None)
    if choose is not None:
        _take_assembler(choose)


@functools.cache
def _take_assembler(choose: Callable[[], None]) -> None:
    try:
        choose()
    # Another release's, or a warning as an error: Triton's own stays.
    except Exception:  # noqa: BLE001
        return
    # Triton caches the version of the assembler that it used before, which is in the key as well.
    compiler = sys.modules.get("triton.backends.nvidia.compiler")
    version: Any = getattr(compiler, "get_ptxas_version", None)
    if hasattr(version, "cache_clear"):
        version.cache_clear()


# --- launches -------------------------------------------------------------------------------------


def launch_hooks() -> Any:
    """Returns the object whose ``launch_enter_hook`` and ``launch_exit_hook`` launches call.

    Each is a chain with a list ``calls``, in which profilers put functions. None without the
    chains: whether there are hooks is unknown then, and Triton's own launcher is used, which calls
    them.
    """
    import triton

    runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        if not isinstance(getattr(getattr(runtime, name, None), "calls", None), list):
            return None
    return runtime


class NoDirectCallError(Exception):
    """A compiled kernel that only Triton's own launcher can launch; the message says why."""


@dataclass(frozen=True)
class Place:
    """A value that differs between launches: a grid axis, the stream, or an argument."""

    name: str


GRID = (Place("grid_x"), Place("grid_y"), Place("grid_z"))
STREAM = Place("stream")


@dataclass(frozen=True)
class DirectCall:
    """How a kernel is launched by a call of Triton's C function: ``launch(*arguments)``.

    An argument is a fixed value, a `Place`, or a tuple of these.
    """

    launch: Callable[..., None]
    arguments: tuple[Any, ...]


# What the C function takes (grid: three numbers; scratch and metadata: two each; a: an argument):
#
#   3.6         grid stream function cooperative pdl scratch metadata hooks a a a ...
#   3.7 to 3.9  grid stream function cooperative pdl metadata hooks scratch
#               annotations signature (a, a, a, ...)
def direct_call(compiled: Any, arguments: Sequence[Place | None]) -> DirectCall:
    """Returns the call of a C function that ``compiled[grid](*arguments)`` amounts to.

    Triton's launcher is an object in Python that holds the C function as ``launch`` and calls it
    with the grid, stream, kernel, hooks, scratch memory and arguments, in an order that changes
    between releases. So the launcher is called once with a recorder in place of the C function, and
    what arrives there is the order.

    Args:
        compiled: a compiled kernel, loaded on the current GPU.
        arguments: one for each argument of the kernel, None for constants.
    Raises:
        NoDirectCallError: the kernel needs something of each launch that is not among its arguments
            (scratch memory, an instrumented build's tables), or the launcher is of another form.
    """
    try:
        run = compiled.run
        function, packed = compiled.function, compiled.packed_metadata
        scratch = max(run.global_scratch_size, run.profile_scratch_size)
        # A copy: other threads may launch by the original meanwhile.
        launch, probe = run.launch, copy.copy(run)
    except AttributeError as error:
        raise NoDirectCallError(f"its launcher is of an unknown form ({error})") from None
    # Scratch memory is allocated for each launch, which a fixed argument cannot be.
    if scratch > 0:
        raise NoDirectCallError("the kernel needs scratch memory")
    # From 3.8 on. Builds that GSan instruments take the driver's tables at each launch.
    if getattr(run, "gsan_enabled", False):
        raise NoDirectCallError("the kernel is instrumented")
    recorded: list[tuple[Any, ...]] = []
    probe.launch = lambda *values: recorded.append(values)
    try:
        # After the packed metadata come the launch metadata and the two hooks, absent here.
        probe(*GRID, STREAM, function, packed, None, None, None, *arguments)
    # An unknown launcher may raise anything at such arguments.
    except Exception as error:  # noqa: BLE001
        raise NoDirectCallError(f"its launcher is of an unknown form ({error})") from None
    if len(recorded) != 1 or not _is_complete(recorded[0], arguments):
        raise NoDirectCallError("its launcher passes on other arguments than the kernel's")
    return DirectCall(launch, recorded[0])


def _is_complete(taken: tuple[Any, ...], arguments: Sequence[Place | None]) -> bool:
    """Returns whether a recorded call begins with grid and stream, and ends with the arguments."""
    if taken[:4] != (*GRID, STREAM):
        return False
    last = taken[-1] if isinstance(taken[-1], tuple) else taken[len(taken) - len(arguments) :]
    return last == tuple(arguments)
