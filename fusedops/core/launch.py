"""The light launcher: kernels compiled under a key of our own and called without Triton's argument binder.

A plain ``kernel[grid](…)`` with twenty arguments costs about 28 µs of host time, most of it spent finding out again
what the arguments are. Here the caller derives a key from what the compiled code depends on (dtypes, absences,
constants, alignment, device), builds a `Variant` once, and afterwards hands addresses to the compiled launcher.
Plans that differ in nothing that is compiled share one `Variant`.
Triton versions whose launcher this file does not know go through ``kernel[grid](…)``, as does Triton's interpreter.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from .question import Config

__all__ = [
    "LONGEST_ROW",
    "MOST_TILES",
    "SEED_TYPES",
    "Request",
    "Variant",
    "build",
    "collecting",
    "collects",
    "column_tiles",
    "compile_kernel",
    "current_device",
    "fast_launcher_known",
    "interpreting",
    "overlaps",
    "pointer_type",
    "processors",
    "record",
    "runs_kernels",
    "triton_dtype",
    "variants",
    "vector_width",
]

# Triton releases whose compiled launcher takes the arguments that `Variant` passes.
_KNOWN_LAUNCHERS = ("3.6.",)

_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
}

_observers: list[list[str]] = []
_collectors: list[list[Request]] = []
_built: dict[Any, Variant] = {}
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


def runs_kernels(device_type: str) -> bool:
    """Whether tensors on such a device go through the kernels: on a GPU, or on the CPU under the interpreter."""
    if device_type == "cuda":
        return _has_triton()
    return device_type == "cpu" and interpreting()


# What `torch.compiler.assume_constant_result` sets, without the second that its import takes: tracing takes the answer
# as it is, and does not look into caches and environment.
runs_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


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


@functools.cache
def processors(device_index: int) -> int:
    """Multiprocessors of a GPU; two stand-ins under the interpreter (index -1)."""
    if device_index < 0:
        return 2
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


# The index of the current GPU; PyTorch built without GPUs has no such function, and no GPU to call it for.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)


@functools.cache
def overlaps(device_index: int) -> bool:
    """Whether a kernel may be launched while its predecessor drains (programmatic dependent launch, from Hopper on)."""
    if device_index < 0 or not fast_launcher_known():
        return False
    return torch.cuda.get_device_capability(device_index) >= (9, 0)


def pointer_type(dtype: torch.dtype | None) -> str | None:
    """Triton's name for a pointer to ``dtype``; None, which is absence, for None."""
    return None if dtype is None else _POINTERS[dtype]


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name for a dtype."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


# A kernel is compiled for each length of a row. Longer ones are vectors rather than rows of features, and the formula
# serves them.
LONGEST_ROW = 1 << 23
# The longest axis 1 of a CUDA grid, and axis 2.
MOST_TILES = 65535


def column_tiles(cols: int, block_n: int) -> int:
    """Tiles along axis 1 of the grid."""
    tiles = -(-cols // block_n)
    if tiles > MOST_TILES:
        raise ValueError(f"fusedops: the last dimension has {cols} elements, expected at most {MOST_TILES * block_n}")
    return tiles


def vector_width(*dtypes: torch.dtype | None) -> int:
    """Neighbouring columns a thread holds: 16 bytes of the narrowest tensor, as Triton's coalescing has it."""
    return 8 if min(d.itemsize for d in dtypes if d is not None) == 2 else 4


# The arguments ``seed`` and ``offset`` of a kernel: absent, two numbers, or a tensor of both.
SEED_TYPES: tuple[dict[str, str | None], ...] = (
    {"seed": None, "offset": None},
    {"seed": "i64", "offset": "i64"},
    {"seed": "*i64", "offset": None},
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
        return options

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


class Variant:
    """One kernel, specialised and ready to launch: ``variant(grid_x, grid_y, *arguments)``.

    The arguments are the kernel's run-time ones in its order, None (or anything) where it was built without one. The
    caller holds the device current and guarantees that tensors and integers fit the types it was built with.
    """

    def __init__(self, request: Request, device_index: int) -> None:
        global _variants
        self.name: str = request.kernel.fn.__name__
        self._kernel, types = request.kernel, request.types
        self._constants = dict(request.constants)
        self._options = request.options
        self._present = [types[name] is not None for name in self._kernel.arg_names if name in types]
        # Where the compiled launcher reads an address: tensors are handed to it as plain integers.
        self._pointers = tuple(i for i, name in enumerate(types) if (types[name] or "").startswith("*"))
        self._launch: Callable[..., None] | None = None
        if device_index >= 0 and fast_launcher_known():
            compiled = compile_fitting(request, shared_memory(device_index))
            self._launch = _bind(compiled, device_index, self._pointers, len(self._constants))
        _variants += 1

    def __call__(self, grid_x: int, grid_y: int, *arguments: Any) -> None:
        """Launches on the current stream of the device it was built for.

        What is too long for axis 1 goes on along axis 2; a kernel whose caller lets that happen looks at both.
        """
        grid_z = 1
        if grid_y > MOST_TILES:
            grid_z = -(-grid_y // MOST_TILES)
            grid_y = -(-grid_y // grid_z)
        if _observers:
            for names in _observers:
                names.append(self.name)
        if self._launch is not None:
            self._launch(grid_x, grid_y, grid_z, arguments)
        else:
            given = [a if here else None for a, here in zip(arguments, self._present, strict=True)]
            # Triton's interpreter keeps its place in the grid in globals.
            with _interpreter_lock if interpreting() else nullcontext():
                self._launch_ordinarily((grid_x, grid_y, grid_z), given)

    def _launch_ordinarily(self, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        """Through Triton's own binder; as `compile_fitting`, with fewer tiles taken ahead while shared memory is short."""
        while True:
            try:
                self._kernel[grid](*arguments, **self._constants, **self._options)
                return
            except Exception as error:  # noqa: PERF203 - each turn is a compilation
                from triton.runtime.errors import OutOfResources

                if not isinstance(error, OutOfResources) or self._constants.get("STAGES", 1) == 1:
                    raise
                self._constants["STAGES"] -= 1
                self._options = {**self._options, "num_stages": self._constants["STAGES"]}


class _Collected(Variant):
    """Stands in for a variant whose request was only to be collected, and launches nothing."""

    def __init__(self) -> None: ...

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
    every = dict(constants) | {"ACC": triton_dtype(acc), "N": cols, "BLOCK_N": config.block_n, "ROWS": config.rows,
                               "STAGES": config.stages}  # fmt: skip
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
            variant = _built[key] = Variant(request, device_index)
        return variant


@functools.cache
def shared_memory(device_index: int) -> int:
    """Bytes of shared memory that a program may have."""
    return int(torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin)  # type: ignore[attr-defined]


@functools.cache
def fast_launcher_known() -> bool:
    """Whether this Triton's compiled launcher takes the arguments that a `Variant` passes."""
    import triton

    return not interpreting() and triton.__version__.startswith(_KNOWN_LAUNCHERS) and torch.version.hip is None


def compile_kernel(request: Request, target: Any = None) -> Any:
    """Compiles a kernel for exactly these argument types, with no GPU needed where ``target`` is given.

    ``types`` maps each run-time argument to Triton's type name, None where the argument is absent; ``divisible``
    gives the power of two that an argument's value is a multiple of.
    """
    import triton
    from triton.compiler import ASTSource

    names, types, constants = request.kernel.arg_names, request.types, request.constants
    signature: dict[str, str] = {}
    constexprs: dict[tuple[int], Any] = {}
    for index, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
            constexprs[(index,)] = constants[name]
        elif types[name] is None:
            signature[name] = "constexpr"
            constexprs[(index,)] = None
        else:
            signature[name] = str(types[name])
    attrs = {
        (index,): [["tt.divisibility", request.divisible[name]]]
        for index, name in enumerate(names)
        if name in request.divisible and types.get(name) is not None
    }
    source = ASTSource(request.kernel, signature, constexprs, attrs)
    return triton.compile(source, target=target, options=request.options)


def compile_fitting(request: Request, limit: int, target: Any = None) -> Any:
    """`compile_kernel`, with fewer tiles taken ahead while they exceed ``limit`` bytes of shared memory."""
    while True:
        compiled = compile_kernel(request, target)
        stages = request.constants.get("STAGES", 1)
        if compiled.metadata.shared <= limit or stages == 1:
            return compiled
        config = replace(request.config, stages=request.config.stages - 1)
        request = replace(request, constants={**request.constants, "STAGES": stages - 1}, config=config)


def _bind(compiled: Any, device_index: int, pointers: tuple[int, ...], constants: int) -> Callable[..., None]:
    """The compiled kernel's C launcher with everything fixed but grid, stream and arguments.

    Addresses go in as integers: the launcher then neither calls back into Python nor asks the driver about them.
    """
    run = compiled.run
    launch, cooperative, pdl = run.launch, run.launch_cooperative_grid, run.launch_pdl
    function, packed = compiled.function, compiled.packed_metadata
    stream_of = torch._C._cuda_getCurrentRawStream
    filler = (None,) * constants

    def call(grid_x: int, grid_y: int, grid_z: int, arguments: Sequence[Any]) -> None:
        addresses = list(arguments)
        for i in pointers:
            addresses[i] = arguments[i].data_ptr()
        launch(grid_x, grid_y, grid_z, stream_of(device_index), function, cooperative, pdl, None, None, packed, None,
               None, None, *addresses, *filler)  # fmt: skip

    return call
