"""Triton: compilation ahead of a launch, targets, launch hooks, and calls of the C launcher.

Functions import Triton when they are called, so that the package can be imported without Triton.
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

# --- targets and their capabilities ---------------------------------------------------------------


def gpu_target(backend: str, arch: int | str, warp_size: int) -> Any:
    """Returns Triton's record of a kind of GPU to compile for."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget(backend, arch, warp_size)


def current_target() -> Any:
    """Returns the current GPU as a compilation target.

    If the release lacks the private name, the target is built from the GPU's properties, as for
    NVIDIA's GPUs with 32 threads in a warp.
    """
    import triton

    try:
        return triton.runtime.driver.active.get_current_target()
    except AttributeError:
        major, minor = torch.cuda.get_device_capability()
        return gpu_target("cuda", 10 * major + minor, 32)


def _options() -> Mapping[str, Any]:
    """Returns the compiler's options for NVIDIA GPUs, by name; none without the private name.

    An unknown option raises an error, so callers check that a release has an option.
    """
    try:
        from triton.backends.nvidia.compiler import CUDAOptions
    except ImportError:
        return {}
    return inspect.signature(CUDAOptions).parameters


@functools.cache
def overlaps_launches() -> bool:
    """Returns whether kernels can be compiled for programmatic dependent launch.

    Such a kernel begins before its predecessor ends, and calls ``gdc_wait`` before it reads memory.
    Without the private names a kernel begins when its predecessor has ended, which is slower.
    """
    import triton.language as tl

    cuda = getattr(tl.extra, "cuda", None)
    return "launch_pdl" in _options() and hasattr(cuda, "gdc_wait")


@functools.cache
def launches_cooperatively() -> bool:
    """Returns whether a launch can require that all programs of a kernel run at the same time.

    Programs that wait for one another need such a launch. Without the private names the kernel is
    launched twice instead, which is slower.
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
    """Compiles and returns a kernel for these argument types; with a ``target``, no GPU is needed.

    Args:
        kernel: the decorated function.
        signature: Triton's type name of every argument; ``"constexpr"`` for one that is a constant.
        constants: the values of the constant arguments.
        divisible: for some arguments, by name, a power of two that divides their values.
        options: the compiler's options.
        target: the result of `gpu_target`; None for the current GPU.
    Raises:
        RuntimeError: this release of Triton cannot do it: `compiles_ahead` is False.
    """
    import triton

    if not compiles_ahead():
        raise RuntimeError(
            f"fusedops: Triton {triton.__version__} cannot compile a kernel without launching it"
        )
    _choose_assembler()
    # Triton identifies an argument by a path, for elements of nested tuples. The path to an
    # argument that is not a tuple is its index alone.
    paths = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    constexprs = {paths[name]: value for name, value in constants.items()}
    attrs = {paths[name]: [["tt.divisibility", multiple]] for name, multiple in divisible.items()}
    source = triton.compiler.ASTSource(kernel, dict(signature), constexprs, attrs)
    return triton.compile(source, target=target, options=dict(options))


def _choose_assembler() -> None:
    """Chooses PyTorch's ``ptxas`` if Inductor is loaded.

    Inductor does the same, but only in a process in which it compiles a kernel. The assembler's
    version is part of the key of Triton's cache. So in a later process, in which Inductor has warm
    caches, this package's kernels would have other keys than in the first process, and would be
    compiled again. That happens if PyTorch lacks the private names.
    """
    tasks = sys.modules.get("torch._inductor.runtime.compile_tasks")
    choose = getattr(tasks, "_set_triton_ptxas_path", None)
    if choose is not None:
        _take_assembler(choose)


@functools.cache
def _take_assembler(choose: Callable[[], None]) -> None:
    try:
        choose()
    # The private function of another release may raise anything, or a warning may be an error. Then
    # Triton's own assembler is used.
    except Exception:  # noqa: BLE001
        return
    # Triton caches the version of its assembler, which is part of the key.
    compiler = sys.modules.get("triton.backends.nvidia.compiler")
    version: Any = getattr(compiler, "get_ptxas_version", None)
    if hasattr(version, "cache_clear"):
        version.cache_clear()


# --- launches -------------------------------------------------------------------------------------


def launch_hooks() -> Any:
    """Returns the object whose ``launch_enter_hook`` and ``launch_exit_hook`` launches call.

    Each of these is a chain with a list ``calls``, to which profilers add functions. Returns None
    if a release has no such chains. Then it is unknown whether there are hooks, and kernels are
    launched by Triton's own launcher, which calls any hooks.
    """
    import triton

    runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        if not isinstance(getattr(getattr(runtime, name, None), "calls", None), list):
            return None
    return runtime


class NoDirectCallError(Exception):
    """Raised for a kernel that only Triton's launcher can launch; the message has the reason."""


@dataclass(frozen=True)
class Place:
    """Represents a value that differs between launches: a grid axis, the stream or an argument."""

    name: str


GRID = (Place("grid_x"), Place("grid_y"), Place("grid_z"))
STREAM = Place("stream")


@dataclass(frozen=True)
class DirectCall:
    """The call of Triton's C function that launches a kernel: ``launch(*arguments)``.

    An argument is a fixed value, a `Place`, or a tuple of these.
    """

    launch: Callable[..., None]
    arguments: tuple[Any, ...]


# The arguments of the C function, by release of Triton. The grid has three numbers; scratch and
# metadata are two values each; a is an argument of the kernel.
#
#   3.6         grid stream function cooperative pdl scratch metadata hooks a a a ...
#   3.7 to 3.9  grid stream function cooperative pdl metadata hooks scratch
#               annotations signature (a, a, a, ...)
def direct_call(compiled: Any, arguments: Sequence[Place | None]) -> DirectCall:
    """Returns the call of Triton's C function by which ``compiled[grid](*arguments)`` launches.

    Triton's launcher is a Python object that holds the C function as ``launch``. It calls this with
    the grid, stream, kernel, hooks, scratch memory and arguments, in an order that differs between
    releases. To determine the order, the launcher is called once with a function that records its
    arguments in place of the C function.

    Args:
        compiled: a compiled kernel, loaded on the current GPU.
        arguments: a `Place` for each argument of the kernel, None for constants.
    Raises:
        NoDirectCallError: at each launch the kernel needs something that is not among its arguments
            (scratch memory, tables of an instrumented build), or the launcher is of another form.
    """
    try:
        run = compiled.run
        function, packed = compiled.function, compiled.packed_metadata
        scratch = max(run.global_scratch_size, run.profile_scratch_size)
        # The recorder is set on a copy, because other threads may launch by the original.
        launch, probe = run.launch, copy.copy(run)
    except AttributeError as error:
        raise NoDirectCallError(f"its launcher is of an unknown form ({error})") from None
    # Scratch memory is allocated at each launch, so it cannot be a fixed argument.
    if scratch > 0:
        raise NoDirectCallError("the kernel needs scratch memory")
    # Triton 3.8 and later: kernels that GSan instruments take tables of the driver at each launch.
    if getattr(run, "gsan_enabled", False):
        raise NoDirectCallError("the kernel is instrumented")
    recorded: list[tuple[Any, ...]] = []
    probe.launch = lambda *values: recorded.append(values)
    try:
        # After the packed metadata come the launch metadata and the two hooks, absent here.
        probe(*GRID, STREAM, function, packed, None, None, None, *arguments)
    # An unknown launcher may raise any exception for such arguments.
    except Exception as error:  # noqa: BLE001
        raise NoDirectCallError(f"its launcher is of an unknown form ({error})") from None
    if len(recorded) != 1 or not _is_complete(recorded[0], arguments):
        raise NoDirectCallError("its launcher passes on other arguments than the kernel's")
    return DirectCall(launch, recorded[0])


def _is_complete(recorded: tuple[Any, ...], arguments: Sequence[Place | None]) -> bool:
    """Returns whether a recorded call begins with grid and stream, and ends with the arguments."""
    if recorded[:4] != (*GRID, STREAM):
        return False
    # Releases pass the arguments one by one, or as a tuple.
    if isinstance(recorded[-1], tuple):
        kernel_arguments = recorded[-1]
    else:
        kernel_arguments = recorded[len(recorded) - len(arguments) :]
    return kernel_arguments == tuple(arguments)
