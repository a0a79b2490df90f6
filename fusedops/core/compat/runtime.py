"""The state of the process: the current GPU, its stream, and Python's threads.

Every call or every launch calls these functions. If PyTorch lacks a private name, the public
function is used, which has the same result but takes longer.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable

import torch

from .lookup import find

__all__ = ["capturing", "current_device", "current_stream", "other_threads"]


def _public_device() -> int:
    # Without a GPU there is no current device, and `torch.cuda.current_device` would raise.
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


# Returns the index of the current GPU. The public function first checks that CUDA is initialised. A
# build without CUDA has no private function, and no GPU.
current_device: Callable[[], int] = find("_C._cuda_getDevice", _public_device)

# Returns the handle of a device's current stream, for the device's index. The public function
# creates an object for the stream.
current_stream: Callable[[int], int] = find(
    "_C._cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)

# Returns whether the current stream is captured into a CUDA graph. The public function first checks
# that there is a GPU.
capturing: Callable[[], bool] = find(
    "_C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)

# Returns the number of Python threads besides the main one. If there is none, drawing a random
# state takes no lock. The private name is CPython's. The public function takes a lock.
other_threads: Callable[[], int] = getattr(_thread, "_count", lambda: threading.active_count() - 1)
