"""Calls of the registered operators, which torch.compile, dispatch modes and subclasses see.

An operator takes the tensors, the random state, and the constants in the form that `words` defines.
`registration` defines the operators.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..random.rng import State
from .operator import Dtypes, Operator, Site, Tensors
from .words import DTYPES_BY_NAME

__all__ = [
    "backward",
    "call_forward",
    "call_parts",
    "decode",
    "dtypes_of",
    "forward",
    "present",
    "seed_of",
    "site_from",
    "site_of",
]

# --- sites ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def decode(op: Operator, call: str, numbers: tuple[float, ...]) -> tuple[Any, Dtypes, bool]:
    """Returns the constants, the tensors' dtypes, and whether a backward will follow."""
    _, mode, *words = call.split(" ")
    count = len(op.tensors)
    dtypes = tuple([DTYPES_BY_NAME[name] for name in words[:count]])
    return op.constants.read(words[count:], numbers), dtypes, mode == "saves"


def site_from(
    op: Operator, device_index: int, dropout: bool, cols: int, call: str, numbers: tuple[float, ...]
) -> Any:
    """Returns the site for a registered operator's arguments."""
    constants, dtypes, saves = decode(op, call, numbers)
    return site_of(
        op, constants, dtypes, cols=cols, device_index=device_index, dropout=dropout, saves=saves
    )


def site_of(
    op: Operator,
    constants: Any,
    dtypes: Dtypes,
    cols: int,
    device_index: int,
    dropout: bool,
    saves: bool,
    special: bool = False,
) -> Any:
    """Returns the site of these arguments, always the same object for equal arguments."""
    # The cache tells named arguments from positional ones, and a default from its value.
    return _cached_site(op, constants, dtypes, cols, device_index, dropout, saves, special)


@functools.lru_cache(maxsize=4096)
def _cached_site(
    op: Operator,
    constants: Any,
    dtypes: Dtypes,
    cols: int,
    device_index: int,
    dropout: bool,
    saves: bool,
    special: bool,
) -> Any:
    site = op.site(constants, dtypes, cols, device_index, dropout=dropout, saves=saves)
    return replace(site, special=True) if special else site


# --- calls ----------------------------------------------------------------------------------------


def seed_of(state: State) -> Tensor | None:
    """Returns a random state as one tensor, None without dropout."""
    seed, offset, _ = state
    if seed is None or isinstance(seed, Tensor):
        return seed
    return torch.tensor((seed, offset), dtype=torch.int64, device="cpu")


def dtypes_of(op: Operator, tensors: Tensors) -> Dtypes:
    """Returns the dtypes of an operator's tensors, None where absent.

    The tensors of a list have one entry, the dtype of the first.
    """
    return tuple([None if t is None else t.dtype for t in tensors[: len(op.tensors)]])


def forward(op: Operator, site: Site, tensors: Tensors, state: State) -> tuple[Tensor | None, ...]:
    """Returns the outputs of the registered operator, None where the site has none."""
    outs = call_forward(op, site.constants, tensors, state, site.cols, site.call)
    return present(outs, site.outs)


def call_forward(
    op: Operator, constants: Any, tensors: Tensors, state: State, cols: int, call: str
) -> Any:
    """Returns the outputs of the registered operator, with empty tensors for absent ones."""
    operator = getattr(torch.ops.fusedops, f"{op.name}_forward")
    return operator(
        *_listed(op, op.tensors, tensors),
        seed_of(state),
        state[2],
        cols,
        call,
        *constants.numbers(),
    )


def call_parts(
    op: Operator, constants: Any, tensors: Tensors, state: State, cols: int, call: str
) -> Any:
    """Returns the caller's outputs of a `SequenceOperator`."""
    operator = getattr(torch.ops.fusedops, f"{op.name}_call")
    return operator(
        *_listed(op, op.tensors, tensors),
        seed_of(state),
        state[2],
        cols,
        call,
        *constants.numbers(),
    )


def backward(
    op: Operator, site: Site, grads: Tensors, saved: Tensors, state: State, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the registered operator, None where not needed."""
    operator = getattr(torch.ops.fusedops, f"{op.name}_backward")
    # The schema has one string for all of ``needed``: a "1" or "0" for each gradient.
    digits = "".join(["1" if need else "0" for need in needed])
    cotangents: Any = [list(grads)] if op.variadic else grads
    outs = operator(
        *cotangents,
        *_listed(op, op.saved, saved),
        seed_of(state),
        state[2],
        digits,
        site.cols,
        site.call,
        *site.constants.numbers(),
    )
    return present(outs, needed)


def _listed(op: Operator, names: Sequence[str], tensors: Tensors) -> Sequence[Any]:
    """Returns the tensors as in the schema, which has one list for a variable number of tensors."""
    if not op.variadic:
        return tensors
    fixed = len(names) - 1
    return (*tensors[:fixed], list(tensors[fixed:]))


def present(outs: Any, is_present: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Returns an operator's outputs, None in place of the empty tensors for absent ones."""
    outs = (outs,) if isinstance(outs, Tensor) else outs
    pairs = zip(outs, is_present, strict=True)
    return tuple([out if is_output else None for out, is_output in pairs])
