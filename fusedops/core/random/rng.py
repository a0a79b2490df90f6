"""The random state of dropout kernels, drawn from PyTorch's generators.

On a GPU the state is the device generator's (seed, offset), and each draw advances the offset. So
`torch.manual_seed`, `torch.get_rng_state` and activation checkpointing set and restore the state,
and drawing it launches no kernel. This also holds under dispatch modes and for tensor subclasses.

CUDA-graph capture, torch.compile and `make_fx` record operators, to run them later. Recorded
numbers would be the same in every run. So there the state is a tensor, and a recorded random
operator fills it in each run. One such operator draws the states of many calls.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from ..compat.dispatch import without_modes, without_transforms
from ..compat.dynamo import is_exporting
from ..compat.fake import Functional, current_tracer, is_recording, saved_for_backward
from ..compat.runtime import capturing, other_threads

__all__ = [
    "NO_DROPOUT",
    "Seed",
    "State",
    "advanced",
    "draw",
    "draw_or_record_state",
    "draw_state",
    "keep_probability",
    "kernel_arguments",
    "probability",
    "record_seed",
    "record_state",
    "seed_kind",
    "threshold",
]

Seed = tuple[int, int] | torch.Tensor
# The random state as three arguments of a kernel. The last is the threshold. The first two are:
#
#     seed and offset as numbers, or
#     a tensor of seed and offset, and None, or
#     a shard's tensor of nine numbers, twice: see `sharding`
State = tuple[int | Tensor | None, int | Tensor | None, int]

NO_DROPOUT: State = (None, None, 0)

# A keep decision uses 16 random bits.
_STEPS = 65536
_lock = threading.Lock()


def threshold(p: float) -> int:
    """Returns how many of the 65536 values of 16 random bits drop an element.

    The number is 0 or 65536 only if ``p`` is exactly 0 or 1.
    """
    if p <= 0.0:
        return 0
    if p >= 1.0:
        return _STEPS
    return min(max(round(p * _STEPS), 1), _STEPS - 1)


_threshold = functools.lru_cache(maxsize=256)(threshold)


def probability(threshold: int) -> float:
    """Returns the drop probability whose `threshold` this is, and which kernels apply."""
    return threshold / _STEPS


def keep_probability(p: float) -> float:
    """Returns the probability with which a kernel keeps an element.

    It is ``1 - p``, rounded to a multiple of 2⁻¹⁶. Kernels divide by it the elements that they
    keep.
    """
    return 1.0 - threshold(p) / _STEPS


def draw_state(p: float, device: torch.device) -> State:
    """Draws and returns the state of one call with drop probability ``p``; nothing is recorded."""
    if 0.0 < p < 1.0:
        seed = draw(device)
        if isinstance(seed, tuple):
            return (*seed, _threshold(p))
        return seed, None, _threshold(p)
    # With p of 1 all elements are dropped, whatever the seed.
    return NO_DROPOUT if p == 0.0 else (0, 0, _STEPS)


def draw_or_record_state(p: float, tensors: Any, device: torch.device) -> State:
    """Returns the state of a call: recorded if a tracer records the call, else drawn now."""
    if 0.0 < p < 1.0 and is_recording(*tensors):
        return record_seed(device), None, threshold(p)
    return draw_state(p, device)


def record_state(p: float, device: torch.device) -> State:
    """Records the drawing of a state in the graph that torch.compile traces; returns the state."""
    if p <= 0.0:
        return NO_DROPOUT
    seed = record_seed(device) if p < 1.0 else torch.zeros(2, dtype=torch.int64, device=device)
    return seed, None, threshold(p)


def draw(device: torch.device) -> Seed:
    """Draws and returns the next random state.

    It is ``(seed, offset)``, or under CUDA-graph capture an int64 tensor of both.
    """
    if device.type != "cuda":
        # Not under torch.func transforms: even if a transform maps the call, it has one state.
        with without_transforms(), without_modes():
            seed, offset = _draw_tensor(device).tolist()
        return seed, offset
    if capturing():
        return _draw_captured(device)
    index = device.index
    generator, step, can_lock = _generator(index)
    if not (can_lock and other_threads()):
        offset = generator.get_offset()
        generator.set_offset(offset + step)
    else:
        with _lock:
            offset = generator.get_offset()
            _advance(index)
    seed = generator.initial_seed()
    if seed >= 2**63:
        seed -= 2**64  # the signed integer with the same 64 bits, as in kernels
    return seed, offset


def _advance(index: int) -> None:
    """Advances a GPU's generator under PyTorch's own lock.

    ``get_offset`` and ``set_offset`` are not one atomic operation: between them another thread's
    `F.dropout` may advance the offset, and setting it would undo that. `torch.poisson` advances the
    generator under the lock. For a tensor without elements it launches nothing. It takes 1.4 µs
    more.
    """
    with without_transforms(), without_modes():
        torch.poisson(_empty(index))


# The results of `_generator`, by the GPU's index.
_generators: dict[int, tuple[torch.Generator, int, bool]] = {}


def _generator(index: int) -> tuple[torch.Generator, int, bool]:
    """Returns a GPU's generator, a draw's step of the offset, and whether `_advance` works.

    The step is measured once for each GPU: it is the number by which `_advance` moves the offset.
    If `torch.poisson` of some release does not move it, the step is 4, and draws set the offset.
    """
    result = _generators.get(index)
    if result is None:
        with _lock:
            generator = torch.cuda.default_generators[index]
            offset = generator.get_offset()
            _advance(index)
            step = generator.get_offset() - offset
            generator.set_offset(offset)
            result = _generators[index] = generator, step or 4, step > 0
    return result


@functools.cache
def _empty(index: int) -> Tensor:
    """Returns a tensor without elements on a GPU."""
    with without_transforms(), without_modes(), torch.inference_mode(False):
        return torch.empty(0, device=torch.device("cuda", index))


def _draw_tensor(device: torch.device) -> torch.Tensor:
    """Returns a random seed and offset, ``(2,)``."""
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


def advanced(state: State, steps: int, threshold: int | None = None) -> State:
    """Returns the state of a further dropout, in a call that has several dropouts.

    Args:
        state: the state of the call's first dropout.
        steps: the number to add to the offset of ``state``.
        threshold: the further dropout's threshold; None for that of the first dropout.
    """
    seed, offset, first_threshold = state
    if threshold is None:
        threshold = first_threshold
    if not steps:
        return seed, offset, threshold
    if isinstance(offset, int):
        return seed, offset + steps, threshold
    # The tensor holds the seed, the offset, and for a shard seven more numbers.
    assert isinstance(seed, Tensor)
    advanced_seed = torch.cat([seed[:1], seed[1:2] + steps, seed[2:]])
    is_shard = offset is not None
    return advanced_seed, advanced_seed if is_shard else None, threshold


def seed_kind(offset: int | Tensor | None) -> int:
    """Returns the index in `launch.SEED_TYPES` of a state with a seed, from the state's offset.

    It is 1 for two numbers, 2 for a tensor of both, and 3 for a shard's tensor.
    """
    if offset is None:
        return 2
    return 1 if type(offset) is int else 3


def kernel_arguments(seed: Tensor | None) -> tuple[int | Tensor | None, int | Tensor | None]:
    """Returns a kernel's arguments ``seed`` and ``offset`` for a registered operator's seed."""
    if seed is None:
        return None, None
    if seed.shape[0] > 2:  # a shard's tensor, on any device
        return seed, seed
    if seed.is_cuda:
        return seed, None
    # The state was drawn as two numbers: `operators.seed_of` wrote them to a tensor on the CPU.
    seed_number, offset = seed.tolist()
    return seed_number, offset


# --- many states from one recorded operator -------------------------------------------------------

# The number of states that one recorded operator draws.
_POOL = 64


def record_seed(device: torch.device) -> Tensor:
    """Records an operator that draws a seed and offset when the graph runs; returns its result."""
    return torch.ops.fusedops.random_state(device)  # type: ignore[no-any-return]


def _draw_pool(device: torch.device) -> torch.Tensor:
    """Returns `_POOL` random seeds and offsets, ``(_POOL, 2)``."""
    return torch.randint(0, 2**62, (_POOL, 2), dtype=torch.int64, device=device)


# A pool of states for the calls that one stream captures: ((capture, stream), device index, states,
# number of used states).
_captured: tuple[tuple[int, int], int, torch.Tensor, int] | None = None


def _draw_captured(device: torch.device) -> torch.Tensor:
    """Returns a state for a call under graph capture.

    One recorded kernel draws `_POOL` states at every replay, for as many calls.
    """
    global _captured
    stream = torch.cuda.current_stream(device).cuda_stream
    capture = _capture_id(stream)
    # Not under torch.func transforms: even if a transform maps the call, it has one state.
    with without_transforms(), without_modes():
        if capture is None:
            return _draw_tensor(device)
        with _lock:
            owner = (capture, stream), device.index
            if _captured is None or _captured[:2] != owner or _captured[3] == _POOL:
                _captured = (*owner, _draw_pool(device), 0)
            *_, states, used = _captured
            _captured = (*owner, states, used + 1)
            return states[used]


@functools.cache
def _capture_info() -> Any:
    """Returns the driver's function that queries a stream's capture; None if it is missing."""
    try:
        query = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None
    query.argtypes = [ctypes.c_void_p] * 6
    query.restype = ctypes.c_int
    return query


def _capture_id(stream: int) -> int | None:
    """Returns the identity of a stream's graph capture; None where it is unknown."""
    query = _capture_info()
    if query is None:
        return None
    status, identity = ctypes.c_int(0), ctypes.c_uint64(0)
    error = query(stream, ctypes.byref(status), ctypes.byref(identity), None, None, None)
    is_active = status.value == 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
    return identity.value if not error and is_active else None


# Pools of states for the calls that a tracer records, by tracer and device: (states, number of used
# states).
_traced: weakref.WeakKeyDictionary[Any, dict[torch.device, tuple[torch.Tensor, int]]] = (
    weakref.WeakKeyDictionary()
)

# The operator that torch.compile, torch.export and make_fx record. It returns one state, drawn when
# it runs. The kind of graph determines what the graph contains for it:
#
#     not functionalised                 the operator itself
#     functionalised by torch.compile    one of the `_POOL` states that one ``randint`` draws: calls
#                                        can share it, because such a graph always runs as a whole
#     an exported program, decomposed    a ``randint`` for this call alone
_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")
_LIBRARY.define("random_state(Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.impl("random_state", _draw_tensor, "CompositeExplicitAutograd")


def _fake_state(device: torch.device) -> torch.Tensor:
    return torch.empty(2, dtype=torch.int64, device=device)


def _functional_state(
    mode: Any, itself: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """Returns the next state of the graph's pool, for a graph that is functionalised."""
    tracer = current_tracer()
    with mode:
        (device,) = args
        if tracer is None or is_exporting():
            return _draw_tensor(device)
        pools = _traced.setdefault(tracer, {})
        states, used = pools.get(device, (None, _POOL))
        if states is None or used == _POOL:
            with saved_for_backward(tracer):
                states, used = _draw_pool(device), 0
        pools[device] = states, used + 1
        return states[used]


torch.library.register_fake("fusedops::random_state", _fake_state, lib=_LIBRARY)
if Functional is not None:
    torch.library.register_torch_dispatch(
        "fusedops::random_state", Functional, _functional_state, lib=_LIBRARY
    )
