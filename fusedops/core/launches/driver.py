"""Queries of CUDA's driver that PyTorch has no functions for: a stream's share of the GPU.

A green context has a part of the GPU's multiprocessors, and so may a process under MPS; the device
properties are those of the whole GPU all the same. Where the driver or one of its functions is
missing, a query returns None.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

__all__ = ["limit_of_process", "multiprocessors_of", "programs_at_a_time"]

_MULTIPROCESSORS = 1  # CU_DEV_RESOURCE_TYPE_SM
_LIMITED = 0  # CU_EXEC_AFFINITY_TYPE_SM_COUNT


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
    """Returns a function of the driver with its argument types set; None where it is missing."""
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        function = getattr(ctypes.CDLL(library), name)
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = types, ctypes.c_int
    return function


def multiprocessors_of(stream: int) -> int | None:
    """Returns the multiprocessors of a stream's green context; None where it has none."""
    # Functions of the driver return 0 for no error.
    green_of = _function("cuStreamGetGreenCtx", ctypes.c_void_p, ctypes.c_void_p)
    if green_of is None:
        return None
    green = ctypes.c_void_p()
    if green_of(stream, ctypes.byref(green)) or not green.value:
        return None
    resource_of = _function(
        "cuGreenCtxGetDevResource", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int
    )
    resource = _Resource()
    if resource_of is None or resource_of(green, ctypes.byref(resource), _MULTIPROCESSORS):
        return None
    return int(resource.multiprocessors)


def limit_of_process() -> int | None:
    """Returns the multiprocessors that MPS leaves to the current context; None without a limit."""
    affinity_of = _function("cuCtxGetExecAffinity", ctypes.c_void_p, ctypes.c_int)
    affinity = _Affinity()
    if affinity_of is None or affinity_of(ctypes.byref(affinity), _LIMITED):
        return None
    return int(affinity.multiprocessors) or None


def programs_at_a_time(function: int, threads: int, shared: int) -> int | None:
    """Returns the programs of a loaded kernel that a multiprocessor runs at a time.

    Args:
        function: the kernel's handle.
        threads: the threads of a program.
        shared: the bytes of shared memory of a program.
    """
    occupancy_of = _function(
        "cuOccupancyMaxActiveBlocksPerMultiprocessor",
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_size_t,
    )
    count = ctypes.c_int()
    if occupancy_of is None or occupancy_of(ctypes.byref(count), function, threads, shared):
        return None
    return count.value or None
