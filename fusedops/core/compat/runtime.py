"""The state of the process: the current GPU, its stream, and Python's threads.

Each function runs in every call, or at every launch. The public functions have the same results
with more work on the host.
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


# The index of the current GPU. The public function checks first that CUDA is initialised: slower. A
# build without CUDA has no private one, and no GPU.
current_device: Callable[[], int] = find("_C._cuda_getDevice", _public_device)

# The handle of a device's current stream, by the device's index. The public way creates an object
# first: slower.
current_stream: Callable[[int], int] = find(
    "_C._cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)

# Whether the current stream is captured into a CUDA graph. The public function checks for a GPU
# first: slower.
capturing: Callable[[], bool] = find(
    "_C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)

# How many Python threads there are besides the main one: a draw in a process of one thread takes no
# lock. Of CPython. Without it the public function, which takes a lock: slower.
other_threads: Callable[[], int] = getattr(_thread, "_count", lambda: threading.active_count() - 1)
