"""Random state for dropout kernels: drawn from PyTorch's generators, which so control it.

On a GPU the state is the device generator's (seed, offset), and the offset advances: `torch.manual_seed`,
`torch.get_rng_state` and activation checkpointing set and restore it, and no kernel is launched for it. Dispatch modes
and tensor subclasses change nothing. Where operators are recorded to be run later (CUDA-graph capture, torch.compile,
`make_fx`), a number would be the same in every run: there the state is a tensor, filled by a recorded random operator,
one for many calls.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from . import compat

__all__ = [
    "NO_DROPOUT",
    "Seed",
    "State",
    "beyond",
    "draw",
    "keep_probability",
    "recorded",
    "seed_kind",
    "state_of",
    "threshold",
    "unpacked",
]

Seed = tuple[int, int] | torch.Tensor
# What a kernel takes: seed and offset (or a tensor of both and None, or a shard's nine numbers, given twice), and the threshold.
State = tuple[int | Tensor | None, int | Tensor | None, int]

NO_DROPOUT: State = (None, None, 0)

# A keep decision spends 16 random bits.
_STEPS = 65536
_lock = threading.Lock()


def threshold(p: float) -> int:
    """How many of 65536 equal chances drop an element; never 0 or all unless p is exactly 0 or 1."""
    if p <= 0.0 or p >= 1.0:
        return 0 if p <= 0.0 else _STEPS
    return min(max(round(p * _STEPS), 1), _STEPS - 1)


_threshold = functools.lru_cache(maxsize=256)(threshold)


def keep_probability(p: float) -> float:
    """The probability with which a kernel keeps an element: ``1 - p`` to the nearest 2⁻¹⁶, and what it scales by."""
    return 1.0 - threshold(p) / _STEPS


def state_of(p: float, device: torch.device) -> State:
    """The state of one call with drop probability ``p``, in which nothing is recorded."""
    if 0.0 < p < 1.0:
        seed = draw(device)
        return (*seed, _threshold(p)) if type(seed) is tuple else (seed, None, _threshold(p))  # type: ignore[return-value]
    return NO_DROPOUT if p == 0.0 else (0, 0, _STEPS)


def draw(device: torch.device) -> Seed:
    """The next random state: ``(seed, offset)``, or an int64 tensor of both under CUDA-graph capture."""
    if device.type != "cuda":
        # Outside any torch.func transform: the state is one for the whole call, whatever is being mapped.
        with compat.without_transforms(), compat.without_modes():
            seed, offset = _draw_tensor(device).tolist()
        return seed, offset
    if compat.capturing():
        return _draw_captured(device)
    index = device.index
    generator, steps, locks = _generator(index)
    if not (locks and compat.other_threads()):
        offset = generator.get_offset()
        generator.set_offset(offset + steps)
    else:
        with _lock:
            offset = generator.get_offset()
            _advance(index)
    seed = generator.initial_seed()
    return seed - 2**64 if seed >= 2**63 else seed, offset  # the same 64 bits, as the kernels' signed integer


def _advance(index: int) -> None:
    """Advances a GPU's generator under PyTorch's own lock.

    To read an offset and set it is not atomic: a concurrent `F.dropout` of another thread would be rewound.
    `torch.poisson` advances the generator under the lock, and launches nothing for no elements; it takes 1.4 µs more.
    """
    with compat.without_transforms(), compat.without_modes():
        torch.poisson(_empty(index))


_generators: dict[int, tuple[torch.Generator, int, bool]] = {}


def _generator(index: int) -> tuple[torch.Generator, int, bool]:
    """A GPU's generator, by how much a draw advances it, and whether `_advance` does, which not every PyTorch need do."""
    found = _generators.get(index)
    if found is None:
        with _lock:
            generator = torch.cuda.default_generators[index]
            before = generator.get_offset()
            _advance(index)
            moved = generator.get_offset() - before
            generator.set_offset(before)
            found = _generators[index] = generator, moved or 4, moved > 0
    return found


@functools.cache
def _empty(index: int) -> Tensor:
    with compat.without_transforms(), compat.without_modes(), torch.inference_mode(False):
        return torch.empty(0, device=torch.device("cuda", index))


def _draw_tensor(device: torch.device) -> torch.Tensor:
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


def beyond(state: State, further: int, threshold: int | None = None) -> State:
    """The state of another dropout of the same call: so many steps on, perhaps with another threshold."""
    first, second, own = state
    own = own if threshold is None else threshold
    if not further:
        return first, second, own
    if not isinstance(second, int):
        assert isinstance(first, Tensor)
        moved = torch.cat([first[:1], first[1:2] + further, first[2:]])
        return moved, None if second is None else moved, own
    return first, second + further, own


def seed_kind(offset: int | Tensor | None) -> int:
    """Which of `launch.SEED_TYPES` a state with a seed is."""
    return 2 if offset is None else 1 if type(offset) is int else 3


def unpacked(seed: Tensor | None) -> tuple[int | Tensor | None, int | Tensor | None]:
    """A registered operator's seed as a launch takes it: on the CPU it holds numbers that were drawn on the host.

    That of a shard is longer, and stays a tensor everywhere.
    """
    if seed is not None and seed.shape[0] > 2:
        return seed, seed
    if seed is None or seed.is_cuda:
        return seed, None
    first, second = seed.tolist()
    return first, second


# --- many states from one recorded operator -----------------------------------------------------------------------------

_POOL = 64


def recorded(device: torch.device) -> Tensor:
    """A state that is drawn when what is being recorded is run."""
    return torch.ops.fusedops.random_state(device)  # type: ignore[no-any-return]


def _draw_pool(device: torch.device) -> torch.Tensor:
    return torch.randint(0, 2**62, (_POOL, 2), dtype=torch.int64, device=device)


# States for the calls that one stream captures: (capture, device, states, taken).
_captured: tuple[tuple[int, int], int, torch.Tensor, int] | None = None


def _draw_captured(device: torch.device) -> torch.Tensor:
    """A state for a call under graph capture: one of `_POOL` that a single recorded kernel draws at every replay."""
    global _captured
    stream = torch.cuda.current_stream(device).cuda_stream
    capture = _capture_id(stream)
    with compat.without_transforms(), compat.without_modes():  # one state for the whole call, whatever is being mapped
        if capture is None:
            return _draw_tensor(device)
        with _lock:
            key = (capture, stream)
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

# What torch.compile, torch.export and make_fx record: one state, drawn when it runs. It becomes one of many where a
# graph is made functional (what is in one such graph is computed together, and recomputed together), and in an
# exported program, once it is decomposed, an operator of its own.
_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")
_LIBRARY.define("random_state(Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.impl("random_state", _draw_tensor, "CompositeExplicitAutograd")


def _fake_state(device: torch.device) -> torch.Tensor:
    return torch.empty(2, dtype=torch.int64, device=device)


def _functional_state(mode: Any, itself: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    tracer = compat.current_tracer()
    with mode:
        if tracer is None or compat.is_exporting():
            return _draw_tensor(*args)
        pools = _traced.setdefault(tracer, {})
        states, taken = pools.get(args[0], (None, _POOL))
        if states is None or taken == _POOL:
            states, taken = _draw_pool(*args), 0
        pools[args[0]] = states, taken + 1
        return states[taken]


torch.library.register_fake("fusedops::random_state", _fake_state, lib=_LIBRARY)
if compat.Functional is not None:
    torch.library.register_torch_dispatch("fusedops::random_state", compat.Functional, _functional_state, lib=_LIBRARY)
