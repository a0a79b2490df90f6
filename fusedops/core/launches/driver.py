"""Functions of CUDA's driver that PyTorch does not have.

A green context has only some of the GPU's multiprocessors, and MPS may limit a process to some. The
device properties show neither: they have the number of the whole GPU. If the driver or the function
of a query is missing, the query returns None.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["limit_of_process", "multiprocessors_of", "programs_at_a_time", "relaxed"]

# The number of multiprocessors, as a kind of resource and as a kind of limit.
_MULTIPROCESSORS = 1  # CU_DEV_RESOURCE_TYPE_SM
_LIMITED = 0  # CU_EXEC_AFFINITY_TYPE_SM_COUNT
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class _Resource(ctypes.Structure):
    """CUdevResource (CUDA 12.4 to 13.1); a later release may append fields."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("internal", ctypes.c_ubyte * 92),
        ("multiprocessors", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * 412),
    )


class _Affinity(ctypes.Structure):
    """CUexecAffinityParam."""

    _fields_ = (("kind", ctypes.c_int), ("multiprocessors", ctypes.c_uint))


@functools.cache
def _function(name: str, *types: Any) -> Any:
    """Returns a function of the driver with its argument types set; None if it is missing."""
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        function = getattr(ctypes.CDLL(library), name)
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = types, ctypes.c_int
    return function


def _succeeds(name: str, types: tuple[Any, ...], *arguments: Any) -> bool:
    """Calls a function of the driver; returns False if it fails or is missing."""
    function = _function(name, *types)
    # The driver's functions return 0 for success.
    return function is not None and function(*arguments) == 0


@contextmanager
def relaxed() -> Iterator[None]:
    """Lets this thread use other streams freely while a stream is captured."""
    function = _function("cuThreadExchangeStreamCaptureMode", ctypes.c_void_p)
    mode = ctypes.c_int(_RELAXED)
    if function is not None:
        function(ctypes.byref(mode))  # ``mode`` has the previous mode afterwards
    try:
        yield
    finally:
        if function is not None:
            function(ctypes.byref(mode))


def multiprocessors_of(stream: int) -> int | None:
    """Returns the number of multiprocessors of a stream's green context; None without a context."""
    green = ctypes.c_void_p()
    pointers = (ctypes.c_void_p, ctypes.c_void_p)
    if not _succeeds("cuStreamGetGreenCtx", pointers, stream, ctypes.byref(green)):
        return None
    # An ordinary stream has no green context.
    if not green.value:
        return None
    resource = _Resource()
    types = (*pointers, ctypes.c_int)
    arguments = (green, ctypes.byref(resource), _MULTIPROCESSORS)
    if not _succeeds("cuGreenCtxGetDevResource", types, *arguments):
        return None
    return int(resource.multiprocessors)


def limit_of_process() -> int | None:
    """Returns how many multiprocessors the current context may use under MPS; None for no limit."""
    affinity = _Affinity()
    types = (ctypes.c_void_p, ctypes.c_int)
    if not _succeeds("cuCtxGetExecAffinity", types, ctypes.byref(affinity), _LIMITED):
        return None
    return int(affinity.multiprocessors) or None  # 0 is no limit


def programs_at_a_time(function: int, threads: int, shared: int) -> int | None:
    """Returns how many programs of a loaded kernel a multiprocessor runs at a time.

    The registers and shared memory of the architecture limit the number. None if the driver's query
    fails, or if no program fits.

    Args:
        function: the kernel's handle.
        threads: the threads of a program.
        shared: the bytes of shared memory of a program.
    """
    name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
    types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    count = ctypes.c_int()
    if not _succeeds(name, types, ctypes.byref(count), function, threads, shared):
        return None
    return count.value or None
