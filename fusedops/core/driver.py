"""Questions to CUDA's driver that PyTorch does not pass on: how many multiprocessors a stream has, and how many programs fit.

A green context has a part of the GPU's multiprocessors, and so may a process under MPS; their properties are those of the
whole GPU. Where the driver or one of its functions is not there, the answer is None.
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
    """CUdevResource (CUDA 12.4 to 13.1); a later release's may be longer, and begins in the same way."""

    _fields_ = (("kind", ctypes.c_int), ("internal", ctypes.c_ubyte * 92), ("multiprocessors", ctypes.c_uint),
                ("rest", ctypes.c_ubyte * 412))  # fmt: skip


class _Affinity(ctypes.Structure):
    """CUexecAffinityParam."""

    _fields_ = (("kind", ctypes.c_int), ("multiprocessors", ctypes.c_uint))


@functools.cache
def _function(name: str, *types: Any) -> Any:
    """A function of the driver with the types of its arguments; None where there is none."""
    try:
        found = getattr(ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"), name)
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = types, ctypes.c_int
    return found


def multiprocessors_of(stream: int) -> int | None:
    """The multiprocessors of a stream's green context; None where it has none."""
    green_of = _function("cuStreamGetGreenCtx", ctypes.c_void_p, ctypes.c_void_p)
    if green_of is None:
        return None
    green = ctypes.c_void_p()
    if green_of(stream, ctypes.byref(green)) or not green.value:
        return None
    resource_of, resource = _function("cuGreenCtxGetDevResource", *[ctypes.c_void_p] * 2, ctypes.c_int), _Resource()
    if resource_of is None or resource_of(green, ctypes.byref(resource), _MULTIPROCESSORS):
        return None
    return int(resource.multiprocessors)


def limit_of_process() -> int | None:
    """The multiprocessors that MPS leaves to the current context; None where it sets no limit."""
    affinity_of, affinity = _function("cuCtxGetExecAffinity", ctypes.c_void_p, ctypes.c_int), _Affinity()
    if affinity_of is None or affinity_of(ctypes.byref(affinity), _LIMITED):
        return None
    return int(affinity.multiprocessors) or None


def programs_at_a_time(function: int, threads: int, shared: int) -> int | None:
    """The programs of a loaded kernel that a multiprocessor runs at a time, each of so many threads and bytes of shared memory."""
    ask = _function(
        "cuOccupancyMaxActiveBlocksPerMultiprocessor", *[ctypes.c_void_p] * 2, ctypes.c_int, ctypes.c_size_t
    )
    count = ctypes.c_int()
    if ask is None or ask(ctypes.byref(count), function, threads, shared):
        return None
    return count.value or None
