"""Kernels compiled under a key of our own, and launched without Triton's argument binder.

A plain ``kernel[grid](…)`` with twenty arguments costs about 28 µs of host time, most of it spent finding out again
what the arguments are. Here the caller derives a key from what the compiled code depends on (dtypes, absences,
constants, alignment, device), builds a `Variant` once, and afterwards hands addresses to the compiled launcher.
Plans that differ in nothing that is compiled share one `Variant`.
Triton's interpreter, and releases that cannot be used so, go through ``kernel[grid](…)``: see `Kernel`.
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

from . import compat, direct, driver
from .tuning_key import Config

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

_observers: list[list[str]] = []
_collectors: list[list[Request]] = []
_built: dict[Any, Variant] = {}
_resident: dict[Variant, int] = {}
_variants = 0
_build_lock = threading.Lock()
_interpreter_lock = threading.RLock()


@functools.cache
def interpreting() -> bool:
    """Whether Triton interprets its kernels on the CPU (``TRITON_INTERPRET``; read at the first call)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


@functools.cache
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        warnings.warn(
            "fusedops: Triton is not installed, so the fused kernels cannot run; PyTorch's operators stand in.",
            stacklevel=2,
        )
        return False
    return True


@compat.constant_when_traced
def runs_kernels(device_type: str) -> bool:
    """Whether tensors on such a device go through the kernels: on a GPU, or on the CPU under the interpreter."""
    if device_type == "cuda":
        return _has_triton()
    return device_type == "cpu" and interpreting()


def variants() -> int:
    """How many kernel variants this process has built."""
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
    """Multiprocessors of a GPU; two stand-ins under the interpreter (index -1)."""
    if device_index < 0:
        return 2
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


current_device = compat.current_device


@functools.cache
def overlaps(device_index: int) -> bool:
    """Whether a kernel may be launched while its predecessor drains (programmatic dependent launch, from Hopper on)."""
    if device_index < 0 or interpreting() or torch.version.hip is not None or not compat.overlaps_launches():
        return False
    return torch.cuda.get_device_capability(device_index) >= (9, 0)


def multiprocessors(device_index: int) -> int:
    """Multiprocessors that kernels on the current stream have: of its green context, or of the GPU that MPS leaves."""
    own = driver.multiprocessors_of(compat.current_stream(device_index))
    return _left_by_mps(device_index) if own is None else own


@functools.cache
def _left_by_mps(device_index: int) -> int:
    return min(driver.limit_of_process() or processors(device_index), processors(device_index))


@functools.cache
def _is_waiting_on() -> bool:
    """Whether ``FUSEDOPS_WAIT`` lets programs wait for one another (read at the first call)."""
    value = os.environ.get("FUSEDOPS_WAIT", "").lower()
    if value not in ("", "1", "true", "on", "yes", "y", "0", "false", "off", "no", "n"):
        warnings.warn(f"fusedops: FUSEDOPS_WAIT is {value!r}, expected 0 (programs never wait for one another) or 1; they "
                      "may wait.", RuntimeWarning, stacklevel=2)  # fmt: skip
    return value not in ("0", "false", "off", "no", "n")


def may_wait(device_index: int, acc: torch.dtype) -> bool:
    """Whether programs may wait for sums of ``acc`` of others, if there are multiprocessors for all: see `waits`."""
    if device_index < 0 or acc != torch.float32 or _cannot_compile(device_index):
        return False
    return compat.launches_cooperatively() and _is_waiting_on()


def waits(device_index: int, acc: torch.dtype, programs: int) -> bool:
    """Whether so many neighbours in the grid may wait for sums of ``acc`` that the others leave.

    All of them must run at the same time. The launch is cooperative: the driver starts all programs of the grid or none.
    Other kernels that wait, of other streams or of other libraries, so never hold what is missing while these hold the
    rest. Of few multiprocessors a cooperative launch would leave most without work, and it would wait for all of them.
    """
    return may_wait(device_index, acc) and programs <= 8 and 6 * (programs - 1) < multiprocessors(device_index)


def resident(variant: Variant) -> int:
    """The programs of a cooperative kernel that a multiprocessor runs at a time."""
    return _resident.get(variant, 1)


def pointer_type(dtype: torch.dtype | None) -> str | None:
    """Triton's name for a pointer to ``dtype``; None, which is absence, for None."""
    return None if dtype is None else _POINTERS[dtype]


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name for a dtype."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


# A kernel is compiled for each length of a row. Longer ones are vectors rather than rows of features, for which the
# reference implementation runs.
LONGEST_ROW = 1 << 23
# Tiles of rows that one program takes alone, without another launch that adds up what several have summed.
MOST_ALONE = 4
# The longest axis 1 of a CUDA grid, and axis 2.
MOST_TILES = 65535


def vector_width(*dtypes: torch.dtype | None, config: Config | None = None) -> int:
    """Neighbouring columns of which a thread draws the mask: at most 16 bytes of the narrowest tensor.

    With more than Triton gives a thread, or fewer, the mask is the same, and takes an exchange or another draw.
    """
    each = 8 if config is None else config.block_n * config.rows // (32 * config.warps)
    return 8 if min(d.itemsize for d in dtypes if d is not None) == 2 and each >= 8 else 4


# The arguments ``seed`` and ``offset`` of a kernel, by the kind of random state: absent, two numbers, a tensor of both, or
# that of a shard, given twice.
SEED_TYPES: tuple[dict[str, str | None], ...] = (
    {"seed": None, "offset": None},
    {"seed": "i64", "offset": "i64"},
    {"seed": "*i64", "offset": None},
    {"seed": "*i64", "offset": "*i64"},
)


@dataclass(frozen=True)
class Request:
    """What a `Variant` is compiled from: a kernel, its argument types and constants, and the config."""

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
        # Whether a product and a sum may be contracted to one instruction, which rounds once. Where a kernel allows
        # it, the user decides: Triton's default is to contract, from 3.10 on not to.
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
        """What tells apart what is compiled."""
        parts = (self.types, self.constants, self.options, self.divisible)
        return (self.kernel.fn, *[tuple(part.items()) for part in parts])


@contextmanager
def collecting() -> Iterator[list[Request]]:
    """Inside the block nothing is compiled or launched: what would be compiled is collected, in order.

    Results inside are whatever the memory held, and so is what a plan launches that was made there: the caller drops
    all plans before and after (`tuning.forced` does).
    """
    requests: list[Request] = []
    _collectors.append(requests)
    try:
        yield requests
    finally:
        _collectors[:] = [other for other in _collectors if other is not requests]


def collects() -> bool:
    """Whether a block of `collecting` is in force."""
    return bool(_collectors)


class NotCompiledError(RuntimeError):
    """The error if Triton cannot compile a kernel; its cause is Triton's own.

    Args:
        name: the kernel's.
        error: Triton's.
    """

    def __init__(self, name: str, error: Exception) -> None:
        lines = [type(error).__name__, *str(error).strip().splitlines()]
        super().__init__(f"Triton cannot compile {name} ({': '.join(lines[:2])})")


# One kernel, specialised and ready to launch: ``variant(grid_x, grid_y, *arguments)``.
#
# The arguments are the kernel's run-time ones in its order, None (or anything) where it was built without one. The
# caller holds the device current and guarantees that tensors and integers fit the types it was built with. What is too
# long for axis 1 of the grid goes on along axis 2; a kernel whose caller lets that happen looks at both.
Variant: TypeAlias = Callable[..., None]


def specialise(request: Request, device_index: int) -> Variant:
    """The variant for a request, compiled for the device; what the interpreter runs has the index -1."""
    global _variants
    _variants += 1
    return Kernel(request, device_index).variant


class Kernel:
    """One specialised kernel with the way in which it is launched.

    Attributes:
        variant: launches it.
        launcher: "direct", by a call of Triton's C function; "compiled", by Triton's launcher of compiled kernels; or
            "ordinary", by ``kernel[grid](…)``. Each costs more host time than the one before.
        reason: why it is not launched directly; "" if it is.
    """

    def __init__(self, request: Request, device_index: int) -> None:
        self.name: str = request.kernel.fn.__name__
        self._kernel, types = request.kernel, request.types
        self._constants = dict(request.constants)
        self._options = request.options
        self._present = [types[name] is not None for name in self._kernel.arg_names if name in types]
        self.launcher, self.reason = "ordinary", _cannot_compile(device_index)
        if self.reason:
            self.variant = self._observed(self._launch_ordinarily)
            return
        self._compiled = compile_fitting(request, shared_memory(device_index))
        self._filler = (None,) * len(self._constants)
        try:
            self.variant = direct.bind(
                self._compiled, list(types.values()), len(self._constants), name=self.name, device_index=device_index,
                general=self._launch_compiled, namespace=globals(),
            )  # fmt: skip
            self.launcher = "direct"
        except compat.NoDirectCallError as error:
            self.launcher, self.reason = "compiled", str(error)
            self.variant = self._observed(self._launch_compiled)
        if request.cooperative:
            metadata = self._compiled.metadata
            most = driver.programs_at_a_time(self._compiled.function, 32 * metadata.num_warps, metadata.shared)
            _resident[self.variant] = most or 1

    def _observed(self, launch: Variant) -> Variant:
        def variant(grid_x: int, grid_y: int, *arguments: Any) -> None:
            if _observers:
                _observe(self.name)
            launch(grid_x, grid_y, *arguments)

        return variant

    def _launch_compiled(self, grid_x: int, grid_y: int, *arguments: Any) -> None:
        """Through Triton's launcher, which calls the launch hooks and allocates scratch memory."""
        self._compiled[_grid(grid_x, grid_y)](*arguments, *self._filler)

    def _launch_ordinarily(self, grid_x: int, grid_y: int, *arguments: Any) -> None:
        """Through Triton's own binder; as `compile_fitting`, with fewer stages while shared memory is short."""
        from triton import OutOfResources

        given = [a if here else None for a, here in zip(arguments, self._present, strict=True)]
        while True:
            try:
                # Triton's interpreter keeps its place in the grid in globals.
                with _interpreter_lock if interpreting() else nullcontext():
                    self._kernel[_grid(grid_x, grid_y)](*given, **self._constants, **self._options)
                return
            except OutOfResources:  # noqa: PERF203 - each turn is a compilation
                if self._constants.get("STAGES", 1) == 1:
                    raise
                self._constants["STAGES"] -= 1
                self._options = {**self._options, "num_stages": self._constants["STAGES"]}


def _grid(grid_x: int, grid_y: int) -> tuple[int, int, int]:
    """The grid, with what is too long for axis 1 folded onto axis 2."""
    grid_z = -(-grid_y // MOST_TILES) or 1
    return grid_x, -(-grid_y // grid_z), grid_z


def _cannot_compile(device_index: int) -> str:
    """Why kernels for a device are left to Triton's binder; "" where they are compiled under a key of our own."""
    if interpreting() or device_index < 0:
        return "kernels are interpreted"
    if torch.version.hip is not None:
        return "only NVIDIA's launchers have been tested"
    return "" if compat.compiles_ahead() else "this Triton cannot compile a kernel without launching it"


def diagnose(device_index: int) -> Kernel:
    """A small kernel, built for the device whatever has been built before: shows how kernels are launched there."""
    from .kernels import sum_partials_kernel

    types: dict[str, str | None] = {
        "partials": "*fp32",
        "first": "*fp32",
        "second": None,
        "third": None,
        "programs": "i32",
    }
    constants = {"ACC": triton_dtype(torch.float32), "N": 16, "BLOCK_N": 16, "ROWS": 16, "OVERLAP": False}
    return Kernel(Request(sum_partials_kernel, types, constants, Config(16, rows=16, warps=1), {}), device_index)


class _Collected:
    """Replaces a variant whose request was only to be collected, and launches nothing."""

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
    """The variant for a config; types and constants that the kernel has no argument for are left out.

    With ``aligned`` every address is a multiple of 16 and every stride of 8.
    """
    types = {name: types[name] for name in kernel.arg_names if name in types}
    divisible = {}
    if aligned:
        divisible = {name: 16 for name, kind in types.items() if kind is not None and kind[0] == "*"}
        divisible |= {name: 8 for name in types if name.endswith("_stride")}
    every = dict(constants) | {"ACC": triton_dtype(acc), "N": cols, "BLOCK_N": config.block_n, "PARTS": config.parts,
                               "ROWS": config.rows, "STAGES": config.stages}  # fmt: skip
    every["OVERLAP"] = not every.get("PERSISTENT", False) and overlaps(device_index)
    request = Request(
        kernel,
        types,
        {name: every[name] for name in kernel.arg_names if name in every},
        config,
        divisible,
    )
    if _collectors:
        _collectors[-1].append(request)
        return _Collected()
    key = (device_index, *request.key)
    with _build_lock:
        variant = _built.get(key)
        if variant is None:
            variant = _built[key] = specialise(request, device_index)
        return variant


@functools.cache
def shared_memory(device_index: int) -> int:
    """Bytes of shared memory that a program may have."""
    return int(torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def compile_kernel(request: Request, target: Any = None) -> Any:
    """Compiles a kernel for exactly these argument types, with no GPU needed where ``target`` is given.

    ``types`` maps each run-time argument to Triton's type name, None where the argument is absent; ``divisible``
    gives the power of two that an argument's value is a multiple of.

    Raises:
        NotCompiledError: Triton has an error.
        OSError, MemoryError, ImportError: it cannot write its files, say, or finds no assembler.
    """
    types = {name: kind for name, kind in request.types.items() if kind is not None}
    absent = dict.fromkeys(name for name in request.types if name not in types)
    constants = {**absent, **request.constants}
    signature = {name: "constexpr" if name in constants else types[name] for name in request.kernel.arg_names}
    divisible = {name: multiple for name, multiple in request.divisible.items() if name in types}
    try:
        return compat.compile_ahead(request.kernel, signature, constants, divisible, request.options, target)
    except (OSError, MemoryError, ImportError):  # of the machine, and not of the kernel
        raise
    except Exception as error:  # whatever a pass of the compiler or the assembler raises
        raise NotCompiledError(request.kernel.fn.__name__, error) from error


def compile_fitting(request: Request, limit: int, target: Any = None) -> Any:
    """`compile_kernel`, with fewer tiles taken ahead while they exceed ``limit`` bytes of shared memory."""
    while True:
        compiled = compile_kernel(request, target)
        stages = request.constants.get("STAGES", 1)
        if compiled.metadata.shared <= limit or stages == 1:
            return compiled
        config = replace(request.config, stages=request.config.stages - 1)
        request = replace(request, constants={**request.constants, "STAGES": stages - 1}, config=config)
