"""Compiles kernels under keys of this package; launches them without Triton's argument binder.

A plain ``kernel[grid](…)`` with twenty arguments costs about 28 µs of host time: Triton inspects
the arguments at each launch. Here the caller derives a key from all that the compiled code depends
on (dtypes, absent arguments, constants, alignment, device), and builds a `Variant` once for each
key. Later launches pass addresses to the compiled launcher:

    first call     types, constants, config -> Request -> build -> Variant, cached by Request.key
    repeated call  variant(grid_x, grid_y, *arguments) -> Triton's C function

Plans whose compiled code is the same share one `Variant`. Triton's interpreter, and releases
without the necessary interfaces, launch by ``kernel[grid](…)``: see `Kernel`.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from ..compat import runtime
from ..compat.dynamo import constant_when_traced
from ..compat.triton import (
    NoDirectCallError,
    compile_ahead,
    compiles_ahead,
    launches_cooperatively,
    overlaps_launches,
)
from ..configs.tuning_key import Config
from ..optional import without_none
from . import direct, driver

__all__ = [
    "LONGEST_ROW",
    "MOST_ALONE",
    "MOST_TILES",
    "SEED_TYPES",
    "Kernel",
    "NotCompiledError",
    "Request",
    "Variant",
    "build",
    "collecting",
    "collects",
    "compile_kernel",
    "current_device",
    "diagnose",
    "interpreting",
    "may_wait",
    "multiprocessors",
    "overlaps",
    "pointer_type",
    "processors",
    "record",
    "resident",
    "runs_kernels",
    "specialise",
    "triton_dtype",
    "variants",
    "vector_width",
    "waits",
]

_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}

# Values of environment variables that mean on or off, in lower case.
_ON = ("1", "true", "on", "yes", "y")
_OFF = ("0", "false", "off", "no", "n")

_observers: list[list[str]] = []  # the lists of active blocks of `record`
_collectors: list[list[Request]] = []  # the lists of active blocks of `collecting`
_built: dict[Any, Variant] = {}  # by device index and `Request.key`
_resident: dict[Variant, int] = {}  # see `resident`; of cooperative kernels only
_variants = 0
_count_lock = threading.Lock()
_locks: dict[Any, threading.Lock] = {}  # by the keys of `_built`
_interpreter_lock = threading.RLock()


@functools.cache
def interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU.

    It reads ``TRITON_INTERPRET`` at the first call.
    """
    return os.environ.get("TRITON_INTERPRET", "").lower() in _ON


@functools.cache
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        warnings.warn(
            "fusedops: Triton is not installed, so the fused kernels cannot run; PyTorch's "
            "operators stand in.",
            stacklevel=2,
        )
        return False
    return True


@constant_when_traced
def runs_kernels(device_type: str) -> bool:
    """Whether kernels run for tensors on such a device: a GPU, or the CPU under the interpreter."""
    if device_type == "cuda":
        return _has_triton()
    return device_type == "cpu" and interpreting()


def variants() -> int:
    """Returns the number of kernel variants that this process has built."""
    return _variants


@contextmanager
def record() -> Iterator[list[str]]:
    """Collects the name of every kernel launched inside the block, in order; for tests."""
    names: list[str] = []
    _observers.append(names)
    try:
        yield names
    finally:
        _observers[:] = [observer for observer in _observers if observer is not names]


def _observe(name: str) -> None:
    for names in _observers:
        names.append(name)


@functools.cache
def processors(device_index: int) -> int:
    """Returns a GPU's number of multiprocessors; 2 under the interpreter (index -1)."""
    if device_index < 0:
        return 2
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


current_device = runtime.current_device


@functools.cache
def overlaps(device_index: int) -> bool:
    """Whether a kernel may be launched while its predecessor still runs.

    This is CUDA's programmatic dependent launch, which exists from Hopper on.
    """
    if device_index < 0 or interpreting():
        return False
    if torch.version.hip is not None or not overlaps_launches():
        return False
    return torch.cuda.get_device_capability(device_index) >= (9, 0)


def multiprocessors(device_index: int) -> int:
    """Returns the number of multiprocessors that kernels on the current stream may use.

    A stream of a green context has those of the context. Any other stream has all multiprocessors
    of the GPU, or as many as MPS allows this process.
    """
    in_green_context = driver.multiprocessors_of(runtime.current_stream(device_index))
    return _allowed_by_mps(device_index) if in_green_context is None else in_green_context


@functools.cache
def _allowed_by_mps(device_index: int) -> int:
    """Returns the number of multiprocessors that MPS allows this process; all without a limit."""
    total = processors(device_index)
    limit = driver.limit_of_process()
    return min(limit, total) if limit else total


@functools.cache
def _is_waiting_on() -> bool:
    """Whether ``FUSEDOPS_WAIT`` lets programs wait for one another (read at the first call)."""
    value = os.environ.get("FUSEDOPS_WAIT", "").lower()
    if value not in ("", *_ON, *_OFF):
        warnings.warn(
            f"fusedops: FUSEDOPS_WAIT is {value!r}, expected 0 (programs never wait for one "
            "another) or 1; they may wait.",
            RuntimeWarning,
            stacklevel=2,
        )
    return value not in _OFF


def may_wait(device_index: int, acc: torch.dtype) -> bool:
    """Whether programs may wait for others' sums of dtype ``acc``, if enough of them can run.

    `waits` decides the latter.
    """
    if device_index < 0 or acc != torch.float32:
        return False
    if _cannot_compile(device_index):
        return False
    return launches_cooperatively() and _is_waiting_on()


def waits(device_index: int, acc: torch.dtype, programs: int) -> bool:
    """Whether groups of ``programs`` may wait for one another's sums of dtype ``acc``.

    A group consists of neighbours in the grid, and all of them must run at the same time. So the
    launch is cooperative: the driver starts all programs of the grid or none. Otherwise two such
    kernels, of two streams or libraries, could each hold multiprocessors that the other one needs,
    and both would wait forever.
    """
    if not may_wait(device_index, acc) or programs > 8:
        return False
    # The grid has whole groups. Few groups fit on few multiprocessors: then many multiprocessors
    # would have no work, and the launch would be delayed until all programs can start. So groups of
    # 2, 3, ..., 8 programs need more than 6, 12, ..., 42 multiprocessors.
    return 6 * (programs - 1) < multiprocessors(device_index)


def resident(variant: Variant) -> int:
    """Returns how many programs of a cooperative kernel a multiprocessor runs at a time."""
    return _resident.get(variant, 1)


def pointer_type(dtype: torch.dtype | None) -> str | None:
    """Returns Triton's type name of a pointer to ``dtype``; None for None, an absent argument."""
    return None if dtype is None else _POINTERS[dtype]


def triton_dtype(dtype: torch.dtype) -> Any:
    """Returns Triton's counterpart of a dtype."""
    import triton.language as tl

    return tl.int1 if dtype is torch.bool else getattr(tl, str(dtype).removeprefix("torch."))


# A kernel is compiled for each length of a row. Longer rows are vectors rather than rows of
# features: the reference implementation runs for them.
LONGEST_ROW = 1 << 23
# One program alone sums at most so many tiles of rows. For more tiles, several programs write
# partial sums, and another launch adds these up.
MOST_ALONE = 4
# CUDA's limit for the size of a grid's axis 1, and of axis 2.
MOST_TILES = 65535


def vector_width(*dtypes: torch.dtype | None, config: Config | None = None) -> int:
    """Returns the number of adjacent columns whose mask one thread draws at once: 8 or 4.

    Both give the same mask; only the speed differs. The fastest is the number of adjacent columns
    that Triton assigns to a thread: 16 bytes of the narrowest tensor (8 columns of a 16-bit dtype),
    or fewer in a small tile. With another number, threads would exchange parts of the mask, or draw
    twice.

    Args:
        dtypes: the tensors' dtypes, None where absent.
        config: the launch parameters; None for a tile that is not small.
    """
    narrowest = min([dtype.itemsize for dtype in without_none(dtypes)])
    per_thread = 8 if config is None else config.block_n * config.rows // (32 * config.warps)
    return 8 if narrowest == 2 and per_thread >= 8 else 4


# The types of a kernel's arguments ``seed`` and ``offset``, by the kind of random state (see
# `rng.seed_kind`): absent, two numbers, a tensor of both, or a shard's tensor, passed twice.
SEED_TYPES: tuple[dict[str, str | None], ...] = (
    {"seed": None, "offset": None},
    {"seed": "i64", "offset": "i64"},
    {"seed": "*i64", "offset": None},
    {"seed": "*i64", "offset": "*i64"},
)


@dataclass(frozen=True)
class Request:
    """A request to build a `Variant`: a kernel, its argument types and constants, and the config.

    Attributes:
        kernel: the kernel.
        types: Triton's type name of each run-time argument, None where the argument is absent.
        constants: the value of each constexpr argument.
        config: the launch parameters.
        divisible: for some arguments, by name, a power of two that divides the address or number.
    """

    kernel: Any
    types: Mapping[str, str | None]
    constants: Mapping[str, Any]
    config: Config
    divisible: Mapping[str, int]

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's options."""
        options = {"num_warps": self.config.warps, "num_stages": self.config.stages}
        if self.config.registers and torch.version.hip is None:
            options["maxnreg"] = self.config.registers
        if self.constants.get("OVERLAP"):
            options["launch_pdl"] = True
        if self.cooperative:
            options["launch_cooperative_grid"] = True
        # FP fusion contracts a product and a sum to one instruction, which rounds once. Some
        # kernels must not be contracted. For the others the option is set because Triton's default
        # varies: on before 3.10, off since. A user's environment variable overrides it.
        if not getattr(self.kernel, "contracts", True):
            options["enable_fp_fusion"] = False
        elif "TRITON_DEFAULT_FP_FUSION" not in os.environ:
            options["enable_fp_fusion"] = True
        # Triton compiles assertions in its debug mode alone, which may check sums of integers, too.
        if getattr(self.kernel, "checks", False):
            options |= {"debug": True, "sanitize_overflow": False}
        return options

    @property
    def cooperative(self) -> bool:
        """Whether programs wait for others, so that all have to run at the same time."""
        return self.constants.get("EXCHANGE") == "wait" and not interpreting()

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of the compiled code: everything that the code depends on."""
        # Tuples of items, because mappings have no hash. `build` orders the mappings as the
        # kernel's arguments, so equal requests have equal keys.
        parts = (self.types, self.constants, self.options, self.divisible)
        return (self.kernel.fn, *[tuple(part.items()) for part in parts])


@contextmanager
def collecting() -> Iterator[list[Request]]:
    """Collects the requests of the calls inside the block, in order.

    Nothing is compiled or launched: the calls return uninitialised memory, and plans made inside
    the block launch nothing. So the caller drops all plans before and after (`tuning.forced` does).
    """
    requests: list[Request] = []
    _collectors.append(requests)
    try:
        yield requests
    finally:
        _collectors[:] = [collector for collector in _collectors if collector is not requests]


def collects() -> bool:
    """Whether a block of `collecting` is active."""
    return bool(_collectors)


class NotCompiledError(RuntimeError):
    """Raised if Triton cannot compile a kernel; its cause is Triton's error.

    Args:
        name: the kernel's name.
        error: Triton's error.
    """

    def __init__(self, name: str, error: Exception) -> None:
        lines = [type(error).__name__, *str(error).strip().splitlines()]
        super().__init__(f"Triton cannot compile {name} ({': '.join(lines[:2])})")


# A compiled kernel, ready to launch: ``variant(grid_x, grid_y, *arguments)``.
#
# The arguments are the kernel's run-time arguments, in its order. If an argument's type was None
# when the variant was built, its value is ignored. The caller makes the device current, and
# guarantees that tensors and integers have the types that the variant was built for. If ``grid_y``
# exceeds `MOST_TILES`, the grid is folded onto axis 2: kernels that may have such grids read both
# program indices, by `device.place_along_rows`.
Variant: TypeAlias = Callable[..., None]


def specialise(request: Request, device_index: int) -> Variant:
    """Returns the variant for a request, compiled for a device; index -1 is the interpreter."""
    global _variants
    with _count_lock:
        _variants += 1
    return Kernel(request, device_index).variant


class Kernel:
    """A compiled kernel, and how it is launched.

    Attributes:
        variant: the function that launches it.
        launcher: "direct", by a call of Triton's C function; "compiled", by Triton's launcher of
            compiled kernels; or "ordinary", by ``kernel[grid](…)``. The first costs the least host
            time, the last the most.
        reason: why it is not launched directly; "" if it is.
    """

    def __init__(self, request: Request, device_index: int) -> None:
        types = request.types
        self._kernel = request.kernel
        self.name: str = request.kernel.fn.__name__
        self._constants = dict(request.constants)
        self._options = request.options
        argument_names = [name for name in self._kernel.arg_names if name in types]
        self._present = [types[name] is not None for name in argument_names]
        self.launcher, self.reason = "ordinary", _cannot_compile(device_index)
        if self.reason:
            self.variant = self._observed(self._launch_ordinarily)
            return
        self._compiled = compile_fitting(request, shared_memory(device_index))
        # Triton's launcher expects an argument for each constant too, and ignores its value.
        self._filler = (None,) * len(self._constants)
        try:
            self.variant = direct.bind(
                self._compiled,
                kinds=list(types.values()),
                constants=len(self._constants),
                name=self.name,
                device_index=device_index,
                general=self._launch_compiled,
                namespace=globals(),
            )
            self.launcher = "direct"
        except NoDirectCallError as error:
            self.launcher, self.reason = "compiled", str(error)
            self.variant = self._observed(self._launch_compiled)
        if request.cooperative:
            metadata = self._compiled.metadata
            threads = 32 * metadata.num_warps
            programs = driver.programs_at_a_time(self._compiled.function, threads, metadata.shared)
            _resident[self.variant] = programs or 1

    def _observed(self, launch: Variant) -> Variant:
        """Returns a variant that reports its launches to the observers."""

        def variant(grid_x: int, grid_y: int, *arguments: Any) -> None:
            if _observers:
                _observe(self.name)
            launch(grid_x, grid_y, *arguments)

        return variant

    def _launch_compiled(self, grid_x: int, grid_y: int, *arguments: Any) -> None:
        """Launches by Triton's launcher, which calls launch hooks and allocates scratch memory."""
        self._compiled[_grid(grid_x, grid_y)](*arguments, *self._filler)

    def _launch_ordinarily(self, grid_x: int, grid_y: int, *arguments: Any) -> None:
        """Launches by Triton's binder; lowers the number of stages until shared memory suffices."""
        from triton import OutOfResources

        pairs = zip(arguments, self._present, strict=True)
        inputs = [argument if is_present else None for argument, is_present in pairs]
        while True:
            try:
                # Triton's interpreter stores the current program's grid index in globals.
                with _interpreter_lock if interpreting() else nullcontext():
                    self._kernel[_grid(grid_x, grid_y)](*inputs, **self._constants, **self._options)
                return
            except OutOfResources:  # noqa: PERF203 - each turn is a compilation
                if self._constants.get("STAGES", 1) == 1:
                    raise
                self._constants["STAGES"] -= 1
                self._options = {**self._options, "num_stages": self._constants["STAGES"]}


def _grid(grid_x: int, grid_y: int) -> tuple[int, int, int]:
    """Returns the grid; if axis 1 would be too long, it is folded onto axis 2.

    A folded grid may have more than ``grid_y`` programs. The rows of the last ones do not exist.
    """
    grid_z = -(-grid_y // MOST_TILES) or 1
    return grid_x, -(-grid_y // grid_z), grid_z


def _cannot_compile(device_index: int) -> str:
    """Returns why kernels for a device cannot be compiled before a launch; "" if they can."""
    if interpreting() or device_index < 0:
        return "kernels are interpreted"
    if torch.version.hip is not None:
        return "only NVIDIA's launchers have been tested"
    if not compiles_ahead():
        return "this Triton cannot compile a kernel without launching it"
    return ""


def diagnose(device_index: int) -> Kernel:
    """Builds and returns a small kernel; its attributes show how kernels are launched there."""
    from ..kernels import sum_partials_kernel

    types: dict[str, str | None] = {
        "partials": "*fp32",
        "first": "*fp32",
        "second": None,
        "third": None,
        "programs": "i32",
    }
    constants = {
        "ACC": triton_dtype(torch.float32),
        "N": 16,
        "BLOCK_N": 16,
        "ROWS": 16,
        "OVERLAP": False,
    }
    config = Config(block_n=16, rows=16, warps=1)
    request = Request(sum_partials_kernel, types, constants, config, divisible={})
    return Kernel(request, device_index)


class _Collected:
    """A variant that is built inside `collecting`: it launches nothing."""

    def __call__(self, grid_x: int, grid_y: int, *arguments: Any) -> None: ...


def build(
    kernel: Any,
    types: Mapping[str, str | None],
    constants: Mapping[str, Any],
    config: Config,
    *,
    device_index: int,
    acc: torch.dtype,
    cols: int,
    aligned: bool,
) -> Variant:
    """Returns the variant for a config.

    ``types`` and ``constants`` may contain names that are not arguments of the kernel; these are
    ignored. With ``aligned``, the caller guarantees that every address is a multiple of 16 and
    every stride a multiple of 8.
    """
    types = {name: types[name] for name in kernel.arg_names if name in types}
    all_constants = dict(constants) | {
        "ACC": triton_dtype(acc),
        "N": cols,
        "BLOCK_N": config.block_n,
        "PARTS": config.parts,
        "ROWS": config.rows,
        "STAGES": config.stages,
    }
    # Persistent kernels must not be launched early: see `device.await_predecessor`.
    is_persistent = all_constants.get("PERSISTENT", False)
    all_constants["OVERLAP"] = not is_persistent and overlaps(device_index)
    used_constants = {
        name: all_constants[name] for name in kernel.arg_names if name in all_constants
    }
    divisible = _divisible(types) if aligned else {}
    request = Request(kernel, types, used_constants, config, divisible)
    if _collectors:
        _collectors[-1].append(request)
        return _Collected()
    # The key contains the device, because a variant launches on one device. With the lock, threads
    # that need the same variant compile it once; other variants are compiled at the same time.
    key = (device_index, *request.key)
    with _locks.setdefault(key, threading.Lock()):
        variant = _built.get(key)
        if variant is None:
            variant = _built[key] = specialise(request, device_index)
        return variant


def _divisible(types: Mapping[str, str | None]) -> dict[str, int]:
    """Returns the divisors of a kernel's aligned arguments: 16 for addresses, 8 for strides."""
    addresses = [name for name, kind in types.items() if kind is not None and kind[0] == "*"]
    strides = [name for name in types if name.endswith("_stride")]
    return dict.fromkeys(addresses, 16) | dict.fromkeys(strides, 8)


@functools.cache
def shared_memory(device_index: int) -> int:
    """Returns the bytes of shared memory that a program may use."""
    properties: Any = torch.cuda.get_device_properties(device_index)
    return int(properties.shared_memory_per_block_optin)


def compile_kernel(request: Request, target: Any = None) -> Any:
    """Compiles a kernel for a request, on the current GPU or for a ``target`` without a GPU.

    Raises:
        NotCompiledError: Triton cannot compile the kernel.
        OSError, MemoryError, ImportError: the machine's fault, not the kernel's: for example,
            Triton cannot write its files or has no assembler.
    """
    # For Triton, an absent argument is a constexpr None.
    absent = [name for name, kind in request.types.items() if kind is None]
    constants = {**dict.fromkeys(absent), **request.constants}
    kinds: dict[str, Any] = {**request.types, **dict.fromkeys(constants, "constexpr")}
    signature = {name: kinds[name] for name in request.kernel.arg_names}
    divisible = {
        name: multiple
        for name, multiple in request.divisible.items()
        if request.types.get(name) is not None
    }
    try:
        return compile_ahead(
            request.kernel, signature, constants, divisible, request.options, target
        )
    except (OSError, MemoryError, ImportError):
        raise
    except Exception as error:  # the compiler's passes and the assembler raise errors of any type
        raise NotCompiledError(request.kernel.fn.__name__, error) from error


def compile_fitting(request: Request, limit: int, target: Any = None) -> Any:
    """Compiles a kernel with the most stages that fit in ``limit`` bytes of shared memory."""
    while True:
        compiled = compile_kernel(request, target)
        stages = request.constants.get("STAGES", 1)
        if stages == 1 or compiled.metadata.shared <= limit:
            return compiled
        config = replace(request.config, stages=request.config.stages - 1)
        constants = {**request.constants, "STAGES": stages - 1}
        request = replace(request, constants=constants, config=config)
