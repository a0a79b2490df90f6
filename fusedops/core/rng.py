"""Random state for dropout kernels: drawn from PyTorch's generators, so that PyTorch's controls govern it.

Eagerly on a GPU the state is the device generator's own (seed, offset), and the offset moves on as `F.dropout` moves
it: `torch.manual_seed`, `torch.get_rng_state` and activation checkpointing see and restore it, at no kernel's cost.
Under CUDA-graph capture and torch.compile numbers would freeze, so there the state is a tensor filled by a recorded
random operator: every replay and every call draws anew.
"""

from __future__ import annotations

import threading

import torch

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
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return _draw_tensor(device)
    if device.type != "cuda":
        # Outside any torch.func transform: the state is one for the whole call, whatever is being mapped.
        with torch._C._DisableFuncTorch():
            seed, offset = _draw_tensor(device).tolist()
        return seed, offset
    if torch._C._cuda_isCurrentStreamCapturing():
        return _draw_tensor(device)
    generator = torch.cuda.default_generators[device.index]
    with _lock:
        offset = generator.get_offset()
        generator.set_offset(offset + 4)
    return generator.initial_seed(), offset


def _draw_tensor(device: torch.device) -> torch.Tensor:
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)
