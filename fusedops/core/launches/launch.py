"""Compilation of kernels under keys of this package, and launches without Triton's argument binder.

A plain ``kernel[grid](…)`` with twenty arguments costs about 28 µs of host time, most of which
Triton spends on inspecting the arguments again. Here the caller derives a key from all that the
compiled code depends on (dtypes, absences, constants, alignment, device), builds a `Variant` once,
and then passes addresses to the compiled launcher:

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
}

# Values of environment variables, in lower case.
_ON = ("1", "true", "on", "yes", "y")
_OFF = ("0", "false", "off", "no", "n")

_observers: list[list[str]] = []
_collectors: list[list[Request]] = []
_built: dict[Any, Variant] = {}
_resident: dict[Variant, int] = {}
_variants = 0
_build_lock = threading.Lock()
_interpreter_lock = threading.RLock()


@functools.cache
def interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU: ``TRITON_INTERPRET`` at the first call."""
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
        _observers[:] = [other for other in _observers if other is not names]


def _observe(name: str) -> None:
    for names in _observers:
        names.append(name)


@functools.cache
def processors(device_index: int) -> int:
    """Returns the multiprocessors of a GPU; under the interpreter (index -1) two."""
    if device_index < 0:
        return 2
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


current_device = runtime.current_device


@functools.cache
def overlaps(device_index: int) -> bool:
    """Whether a kernel may be launched while its predecessor drains.

    This is CUDA's programmatic dependent launch, which exists from Hopper on.
    """
    if device_index < 0 or interpreting():
        return False
    if torch.version.hip is not None or not overlaps_launches():
        return False
    return torch.cuda.get_device_capability(device_index) >= (9, 0)


def multiprocessors(device_index: int) -> int:
    """Returns the multiprocessors that kernels on the current stream may use.

    These are its green context's, or all those of the GPU that MPS leaves to the process.
    """
    own = driver.multiprocessors_of(runtime.current_stream(device_index))
    return _left_by_mps(device_index) if own is None else own


@functools.cache
def _left_by_mps(device_index: int) -> int:
    """Returns the multiprocessors that MPS leaves to this process: all without a limit."""
    every = processors(device_index)
    limit = driver.limit_of_process()
    return min(limit, every) if limit else every


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
    """Whether programs may wait for others' sums of dtype ``acc``, if all can run: see `waits`."""
    if device_index < 0 or acc != torch.float32:
        return False
    if _cannot_compile(device_index):
        return False
    return launches_cooperatively() and _is_waiting_on()


def waits(device_index: int, acc: torch.dtype, programs: int) -> bool:
    """Whether ``programs`` neighbours in the grid may wait for one another's sums of dtype ``acc``.

    All of them must run at the same time. The launch is cooperative: the driver starts all programs
    of the grid or none. So two kernels that wait, of two streams or two libraries, never each hold
    the multiprocessors that the other one lacks.
    """
    if not may_wait(device_index, acc) or programs > 8:
        return False
    # The grid has whole groups of ``programs``. On few multiprocessors a cooperative launch would
    # leave most without work, and it would wait for all of them. So 2, 3, ..., 8 programs take more
    # than 6, 12, ..., 42 multiprocessors.
    return 6 * (programs - 1) < multiprocessors(device_index)


def resident(variant: Variant) -> int:
    """Returns the programs of a cooperative kernel that a multiprocessor runs at a time."""
    return _resident.get(variant, 1)


def pointer_type(dtype: torch.dtype | None) -> str | None:
    """Returns Triton's name for a pointer to ``dtype``; None, for an absent argument, for None."""
    return None if dtype is None else _POINTERS[dtype]


def triton_dtype(dtype: torch.dtype) -> Any:
    """Returns Triton's counterpart of a dtype."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


# A kernel is compiled for each length of a row. Longer rows are vectors rather than rows of
# features: the reference implementation runs for them.
LONGEST_ROW = 1 << 23
# Tiles of rows that one program sums alone. For more, several programs write partial sums, and
# another launch adds them up.
MOST_ALONE = 4
# The longest axis 1 of a CUDA grid, and axis 2.
MOST_TILES = 65535


def vector_width(*dtypes: torch.dtype | None, config: Config | None = None) -> int:
    """Returns the number of adjacent columns whose mask one thread draws: 8 or 4.

    The mask is the same for both; only the speed differs. The number should be that of the adjacent
    columns that Triton gives to a thread: 16 bytes of the narrowest tensor, which are 8 columns in
    16 bits, or fewer in a small tile. Otherwise the mask costs an exchange between threads or a
    second draw.
    """
    narrowest = min(d.itemsize for d in dtypes if d is not None)
    per_thread = 8 if config is None else config.block_n * config.rows // (32 * config.warps)
    return 8 if narrowest == 2 and per_thread >= 8 else 4


# The arguments ``seed`` and ``offset`` of a kernel, by the kind of random state: absent, two
# numbers, a tensor of both, or a shard's tensor, passed twice.
SEED_TYPES: tuple[dict[str, str | None], ...] = (
    {"seed": None, "offset": None},
    {"seed": "i64", "offset": "i64"},
    {"seed": "*i64", "offset": None},
    {"seed": "*i64", "offset": "*i64"},
)


@dataclass(frozen=True)
class Request:
    """The source of a `Variant`: a kernel, its argument types and constants, and the config.

    Attributes:
        kernel: the kernel.
        types: Triton's type name of each run-time argument, None where the argument is absent.
        constants: the value of each constexpr argument.
        config: the launch parameters.
        divisible: a power of two that divides the argument of that name.
    """

    kernel: Any
    types: Mapping[str, str | None]
    constants: Mapping[str, Any]
    config: Config
    divisible: Mapping[str, int]

    @property
    def options(self) -> dict[str, int]:
        """The compiler's options."""
        options = {"num_warps": self.config.warps, "num_stages": self.config.stages}
        if self.config.registers and torch.version.hip is None:
            options["maxnreg"] = self.config.registers
        if self.constants.get("OVERLAP"):
            options["launch_pdl"] = True
        if self.cooperative:
            options["launch_cooperative_grid"] = True
        # FP fusion contracts a product and a sum to one instruction, which rounds once. Triton's
        # default is on, from 3.10 on off: so it is set, unless the user has set it for a kernel
        # that allows it.
        if not getattr(self.kernel, "contracts", True):
            options["enable_fp_fusion"] = False
        elif "TRITON_DEFAULT_FP_FUSION" not in os.environ:
            options["enable_fp_fusion"] = True
        return options

    @property
    def cooperative(self) -> bool:
        """Whether programs wait for others, so that all have to run at the same time."""
        return self.constants.get("EXCHANGE") == "wait" and not interpreting()

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of the compiled code: all that it depends on."""
        # Mappings have no hash. `build` orders them as the kernel's arguments: equal requests have
        # equal keys.
        parts = (self.types, self.constants, self.options, self.divisible)
        return (self.kernel.fn, *[tuple(part.items()) for part in parts])


@contextmanager
def collecting() -> Iterator[list[Request]]:
    """Collects, in order, the requests in the block instead of compiling or launching anything.

    Results inside the block are uninitialised memory, and plans from there launch
    nothing: the caller drops all plans before and after (`tuning.forced` does).
    """
    requests: list[Request] = []
    _collectors.append(requests)
    try:
        yield requests
    finally:
        _collectors[:] = [other for other in _collectors if other is not requests]


def collects() -> bool:
    """Whether a block of `collecting` is active."""
    return bool(_collectors)


class NotCompiledError(RuntimeError):
    """The error where Triton cannot compile a kernel; its cause is Triton's error.

    Args:
        name: the kernel's name.
        error: Triton's error.
    """

    def __init__(self, name: str, error: Exception) -> None:
        lines = [type(error).__name__, *str(error).strip().splitlines()]
        super().__init__(f"Triton cannot compile {name} ({': '.join(lines[:2])})")


# One kernel, specialised and ready to launch: ``variant(grid_x, grid_y, *arguments)``.
#
# The arguments are the kernel's run-time ones in its order, None (or anything) where it was built
# without one. The caller keeps the device current and guarantees that tensors and integers fit the
# types it was built with. A grid too long for axis 1 is folded onto axis 2; a kernel whose caller
# allows that uses both program indices.
Variant: TypeAlias = Callable[..., None]


def specialise(request: Request, device_index: int) -> Variant:
    """Returns the variant for a request, compiled for a device; index -1 is the interpreter."""
    global _variants
    _variants += 1
    return Kernel(request, device_index).variant


class Kernel:
    """One specialised kernel with the way in which it is launched.

    Attributes:
        variant: launches it.
        launcher: "direct", by a call of Triton's C function; "compiled", by Triton's launcher of
            compiled kernels; or "ordinary", by ``kernel[grid](…)``. Each costs more host time than
            the one before.
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
        # Triton's launcher takes a position for each constant too, and ignores its value.
        self._filler = (None,) * len(self._constants)
        try:
            self.variant = direct.bind(
                self._compiled,
                list(types.values()),
                len(self._constants),
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
        """Launches by Triton's binder, with fewer stages while shared memory is short."""
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
    """Returns the grid, with an axis 1 that is too long folded onto axis 2.

    The folded grid may have more programs than ``grid_y``; their rows are past the end.
    """
    grid_z = -(-grid_y // MOST_TILES) or 1
    return grid_x, -(-grid_y // grid_z), grid_z


def _cannot_compile(device_index: int) -> str:
    """Returns why kernels for a device are launched by Triton's binder; "" where they are not."""
    if interpreting() or device_index < 0:
        return "kernels are interpreted"
    if torch.version.hip is not None:
        return "only NVIDIA's launchers have been tested"
    if not compiles_ahead():
        return "this Triton cannot compile a kernel without launching it"
    return ""


def diagnose(device_index: int) -> Kernel:
    """Returns a small new kernel for the device, which shows how kernels are launched there."""
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
    request = Request(sum_partials_kernel, types, constants, Config(16, rows=16, warps=1), {})
    return Kernel(request, device_index)


class _Collected:
    """Replaces a variant inside `collecting`; launches nothing."""

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

    Types and constants that are no arguments of the kernel are left out. With ``aligned`` every
    address is a multiple of 16 and every stride of 8.
    """
    types = {name: types[name] for name in kernel.arg_names if name in types}
    every_constant = dict(constants) | {
        "ACC": triton_dtype(acc),
        "N": cols,
        "BLOCK_N": config.block_n,
        "PARTS": config.parts,
        "ROWS": config.rows,
        "STAGES": config.stages,
    }
    # A persistent kernel that is launched early piles up: see `device.await_predecessor`.
    is_persistent = every_constant.get("PERSISTENT", False)
    every_constant["OVERLAP"] = not is_persistent and overlaps(device_index)
    own = {name: every_constant[name] for name in kernel.arg_names if name in every_constant}
    request = Request(kernel, types, own, config, _divisible(types) if aligned else {})
    if _collectors:
        _collectors[-1].append(request)
        return _Collected()
    # A variant launches on the stream of one device. The lock is for all kernels: threads that need
    # the same variant compile it once.
    key = (device_index, *request.key)
    with _build_lock:
        variant = _built.get(key)
        if variant is None:
            variant = _built[key] = specialise(request, device_index)
        return variant


def _divisible(types: Mapping[str, str | None]) -> dict[str, int]:
    """Returns the divisors of a kernel's aligned arguments: of addresses 16, of strides 8."""
    addresses = [name for name, kind in types.items() if kind is not None and kind[0] == "*"]
    strides = [name for name in types if name.endswith("_stride")]
    return dict.fromkeys(addresses, 16) | dict.fromkeys(strides, 8)


@functools.cache
def shared_memory(device_index: int) -> int:
    """Returns the bytes of shared memory that a program may use."""
    properties: Any = torch.cuda.get_device_properties(device_index)
    return int(properties.shared_memory_per_block_optin)


def compile_kernel(request: Request, target: Any = None) -> Any:
    """Compiles a kernel for exactly these argument types; with a ``target``, no GPU is needed.

    Raises:
        NotCompiledError: Triton has an error.
        OSError, MemoryError, ImportError: Triton cannot write its files, or finds no assembler.
    """
    # To the compiler an absent argument is the constant None.
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
    except (OSError, MemoryError, ImportError):  # of the machine, not of the kernel
        raise
    except Exception as error:  # a pass of the compiler or the assembler may raise anything
        raise NotCompiledError(request.kernel.fn.__name__, error) from error


def compile_fitting(request: Request, limit: int, target: Any = None) -> Any:
    """Compiles a kernel with as many stages as ``limit`` bytes of shared memory hold."""
    while True:
        compiled = compile_kernel(request, target)
        stages = request.constants.get("STAGES", 1)
        if stages == 1 or compiled.metadata.shared <= limit:
            return compiled
        config = replace(request.config, stages=request.config.stages - 1)
        constants = {**request.constants, "STAGES": stages - 1}
        request = replace(request, constants=constants, config=config)
