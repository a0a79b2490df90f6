"""Random state for dropout kernels: drawn from PyTorch's generators, so that PyTorch's controls govern it.

Eagerly on a GPU the state is the device generator's own (seed, offset), and the offset moves on as `F.dropout` moves
it: `torch.manual_seed`, `torch.get_rng_state` and activation checkpointing see and restore it, at no kernel's cost.
Under CUDA-graph capture and torch.compile numbers would freeze, so there the state is a tensor filled by a recorded
random operator: every replay and every call draws anew. A captured or compiled graph has one such operator for many
calls.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .operators import exporting

__all__ = ["Seed", "draw", "keep_probability", "threshold"]

Seed = tuple[int, int] | torch.Tensor

# A keep decision spends 16 random bits.
_STEPS = 65536
_lock = threading.Lock()


def threshold(p: float) -> int:
    """How many of 65536 equal chances drop an element; never 0 or all unless p is exactly 0 or 1."""
    if p <= 0.0 or p >= 1.0:
        return 0 if p <= 0.0 else _STEPS
    return min(max(round(p * _STEPS), 1), _STEPS - 1)


def keep_probability(p: float) -> float:
    """The probability with which a kernel keeps an element: ``1 - p`` to the nearest 2⁻¹⁶, and what it scales by."""
    return 1.0 - threshold(p) / _STEPS


def draw(device: torch.device) -> Seed:
    """The next random state: ``(seed, offset)``, or an int64 tensor of both where the call is being recorded."""
    if torch.compiler.is_compiling():
        return torch.ops.fusedops.random_state(device)  # type: ignore[no-any-return]
    if torch._C._len_torch_dispatch_stack() > 0:
        return _draw_tensor(device)
    if device.type != "cuda":
        # Outside any torch.func transform: the state is one for the whole call, whatever is being mapped.
        with torch._C._DisableFuncTorch():
            seed, offset = _draw_tensor(device).tolist()
        return seed, offset
    if torch._C._cuda_isCurrentStreamCapturing():
        return _draw_captured(device)
    generator = torch.cuda.default_generators[device.index]
    with _lock:
        offset = generator.get_offset()
        generator.set_offset(offset + 4)
    seed = generator.initial_seed()
    return seed - 2**64 if seed >= 2**63 else seed, offset  # the same 64 bits, as the kernels' signed integer


def _draw_tensor(device: torch.device) -> torch.Tensor:
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


# --- many states from one recorded kernel -------------------------------------------------------------------------------

_POOL = 64


def _draw_pool(device: torch.device) -> torch.Tensor:
    return torch.randint(0, 2**62, (_POOL, 2), dtype=torch.int64, device=device)


# States for the calls that one stream captures: (capture, device, states, taken).
_captured: tuple[tuple[int, int], int, torch.Tensor, int] | None = None


def _draw_captured(device: torch.device) -> torch.Tensor:
    """A state for a call under graph capture: one of `_POOL` that a single recorded kernel draws at every replay."""
    global _captured
    stream = torch.cuda.current_stream(device).cuda_stream
    capture = _capture_id(stream)
    if capture is None:
        return _draw_tensor(device)
    with _lock:
        key = (capture, stream)
        with torch._C._DisableFuncTorch():  # one state for the whole call, whatever is being mapped
            if _captured is None or _captured[:2] != (key, device.index) or _captured[3] == _POOL:
                _captured = (key, device.index, _draw_pool(device), 0)
            _, index, states, taken = _captured
            _captured = (key, index, states, taken + 1)
            return states[taken]


@functools.cache
def _capture_info() -> Any:
    """The driver's query for a stream's capture, or None where there is no such driver."""
    try:
        query = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None
    query.argtypes = [ctypes.c_void_p] * 6
    query.restype = ctypes.c_int
    return query


def _capture_id(stream: int) -> int | None:
    """What tells one graph capture from another; None if nobody can say."""
    query = _capture_info()
    if query is None:
        return None
    status, identity = ctypes.c_int(0), ctypes.c_uint64(0)
    if query(stream, ctypes.byref(status), ctypes.byref(identity), None, None, None) != 0 or status.value != 1:
        return None
    return identity.value


# States for the calls of the graph that a tracer writes: the device's (states, taken).
_traced: weakref.WeakKeyDictionary[Any, dict[torch.device, tuple[torch.Tensor, int]]] = weakref.WeakKeyDictionary()

# What torch.compile and torch.export see first: one state, drawn when it runs. It becomes one of many where a graph is
# made functional (what lies in one such graph is computed together, and recomputed together), and in an exported
# program, once it is decomposed, an operator of its own.
_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")
_LIBRARY.define("random_state(Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.impl("random_state", _draw_tensor, "CompositeExplicitAutograd")


def _fake_state(device: torch.device) -> torch.Tensor:
    return torch.empty(2, dtype=torch.int64, device=device)


def _functional_state(mode: Any, itself: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    proxies = get_proxy_mode()
    with mode:
        if proxies is None or exporting():
            return _draw_tensor(*args)
        pools = _traced.setdefault(proxies.tracer, {})
        states, taken = pools.get(args[0], (None, _POOL))
        if states is None or taken == _POOL:
            states, taken = _draw_pool(*args), 0
        pools[args[0]] = states, taken + 1
        return states[taken]


torch.library.register_fake("fusedops::random_state", _fake_state, lib=_LIBRARY)
torch.library.register_torch_dispatch("fusedops::random_state", FunctionalTensorMode, _functional_state, lib=_LIBRARY)
