"""Calls of registered operators: what torch.compile, dispatch modes and tensor subclasses see of a call.

An operator takes the tensors, the random state, and the constants as numbers and words. `registration` makes them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .checks import DTYPES
from .operator import Dtypes, Operator, Site, Tensors
from .rng import State
from .version import __version__

__all__ = [
    "NAMES",
    "backward",
    "call_forward",
    "decode",
    "dtypes_of",
    "encode",
    "forward",
    "named",
    "present",
    "seed_of",
    "site_from",
    "site_of",
]

# Dtypes as operators take them: an argument of its own kind costs more than a word in a string.
# Rows of integers and truth values are read by functions of the user's.
_READ = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
NAMES: dict[torch.dtype | None, str] = {None: "none", **{d: str(d).removeprefix("torch.") for d in (*DTYPES, *_READ)}}
_DTYPES = {name: dtype for dtype, name in NAMES.items()}


# --- constants ----------------------------------------------------------------------------------------------------------


def named(name: str) -> torch.dtype | None:
    """The dtype behind one of `NAMES`."""
    return _DTYPES[name]


def encode(constants: Any, dtypes: Dtypes, saves: bool) -> str:
    """All but numbers as one string, with the version: PyTorch keeps compiled functions on disk by their constants."""
    names = [NAMES[dtype] for dtype in dtypes]
    return " ".join((__version__, "saves" if saves else "drops", *names, constants.op, *constants.words()))


def name_in(call: str) -> str:
    """The name of the operator that a call's string is of."""
    return next(word for word in call.split(" ")[2:] if word not in NAMES.values())


@functools.lru_cache(maxsize=4096)
def decode(op: Operator, call: str, numbers: tuple[float, ...]) -> tuple[Any, Dtypes, bool]:
    """The constants, the tensors' dtypes, and whether a backward will follow."""
    _, saves, *words = call.split(" ")
    count = len(op.tensors)
    constants = op.constants.read(words[count:], numbers)
    return constants, tuple([named(name) for name in words[:count]]), saves == "saves"


def site_from(op: Operator, device_index: int, dropout: bool, cols: int, call: str, numbers: tuple[float, ...]) -> Any:
    """The site that a call's arguments stand for."""
    constants, dtypes, saves = decode(op, call, numbers)
    return site_of(op, constants, dtypes, cols, device_index, dropout, saves)


@functools.lru_cache(maxsize=4096)
def site_of(op: Operator, constants: Any, dtypes: Dtypes, cols: int, device_index: int,
            dropout: bool, saves: bool) -> Any:  # fmt: skip
    """The one site for these choices."""
    return op.site(constants, dtypes, cols, device_index, dropout=dropout, saves=saves)


# --- calls --------------------------------------------------------------------------------------------------------------


def seed_of(state: State) -> Tensor | None:
    """A random state as one tensor, None without dropout."""
    first, second, _ = state
    if first is None or isinstance(first, Tensor):
        return first
    return torch.tensor((first, second), dtype=torch.int64, device="cpu")


def dtypes_of(op: Operator, tensors: Tensors) -> Dtypes:
    """The dtypes of an operator's tensors, None where absent; of a variable number of tensors the first's."""
    return tuple([None if t is None else t.dtype for t in tensors[: len(op.tensors)]])


def forward(op: Operator, site: Site, tensors: Tensors, state: State) -> tuple[Tensor | None, ...]:
    """The outputs, from the registered operator."""
    return present(call_forward(op, site.constants, tensors, state, site.cols, site.call), site.outs)


def call_forward(op: Operator, constants: Any, tensors: Tensors, state: State, cols: int, call: str) -> Any:
    """What the registered operator returns."""
    operator = getattr(torch.ops.fusedops, f"{op.name}_forward")
    return operator(*_listed(op, tensors), seed_of(state), state[2], cols, call, *constants.numbers())


def backward(op: Operator, site: Site, grads: Tensors, saved: Tensors, state: State,
             needed: Sequence[bool]) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients, from the registered operator."""
    operator = getattr(torch.ops.fusedops, f"{op.name}_backward")
    digits = "".join(["1" if need else "0" for need in needed])
    outs = operator(*grads, *_listed(op, saved), seed_of(state), state[2], digits, site.cols, site.call,
                    *site.constants.numbers())  # fmt: skip
    return present(outs, needed)


def _listed(op: Operator, tensors: Tensors) -> Sequence[Any]:
    if not op.variadic:
        return tensors
    fixed = len(op.tensors) - 1
    return (*tensors[:fixed], list(tensors[fixed:]))


def present(outs: Any, there: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """What an operator returned, None for what is absent, for which it returns an empty tensor."""
    outs = (outs,) if isinstance(outs, Tensor) else outs
    return tuple([out if here else None for out, here in zip(outs, there, strict=True)])
