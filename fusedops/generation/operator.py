"""The generation family's operator: the checks and the path of a call, and the registered operators.

The path is that of `core.call` for an operator with no backward and no dropout, of which one form writes to an argument.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import checks, compat, launch
from ..core.function import PLAIN, on_device
from ..core.registration import implement
from . import launching, reference
from .launching import Site, site_of
from .reference import Rule

__all__ = ["NO_REPEAT_NGRAM"]

# Far more than a program has calls that differ. One that makes ever new ones starts anew rather than grow.
_MOST_CALLS = 1024


class _Signature(NamedTuple):
    """A call that was checked; ``site`` is None where no kernel can run, ``special`` is a tensor subclass among them."""

    site: Site | None
    special: bool


class NoRepeatNGram:
    """n-gram blocking, on a copy of the scores or in place."""

    def __init__(self) -> None:
        # The calls that were checked, by `_key`.
        self.signatures: dict[Hashable, _Signature] = {}

    def run(self, scores: Tensor, input_ids: Tensor, allowed: Tensor | None, rule: Rule, *, inplace: bool) -> Tensor:
        """The scores with the bans, for a rule that was checked."""
        tensors = scores, input_ids, allowed
        if torch.compiler.is_dynamo_compiling():
            _check(*tensors, inplace=inplace)
            runs, observed = launch.runs_kernels(scores.device.type), True
        else:
            site, special = self._signature(*tensors, padded=rule.pad_token_id is not None, inplace=inplace)
            runs, observed = site is not None, special or compat.dispatch_modes() > 0
        differentiated = (
            (scores.requires_grad and torch.is_grad_enabled()) or compat.transforms() or compat.in_forward_mode()
        )
        try:
            if not runs or differentiated or scores.numel() == 0:
                return reference.no_repeat_ngram(*tensors, rule, inplace=inplace)
            if observed:
                return _registered(*tensors, rule, inplace=inplace)
            assert site is not None
            out = scores if inplace else _copy(scores)
            on_device(site, launching.forward, out, input_ids, allowed, rule)  # type: ignore[arg-type]
        except RuntimeError:
            _check(*tensors, inplace=inplace)  # names a tensor without strides: no key holds the layout
            raise
        return out

    def _signature(self, scores: Any, input_ids: Any, allowed: Any, *, padded: bool, inplace: bool) -> _Signature:
        """What was found out about calls like this, which are checked once."""
        tensors = scores, input_ids, allowed
        try:
            found = self.signatures.get(_key(*tensors, padded=padded, inplace=inplace))
        except (AttributeError, IndexError, TypeError, RuntimeError):
            found = None  # something is wrong, which the checks name; or a subclass that hides its shape
        if found is not None:
            return found
        _check(*tensors, inplace=inplace)
        site = None
        # In place minus infinity cannot be written to scores whose sign is still to be flipped.
        if launch.runs_kernels(scores.device.type) and not (inplace and scores.is_neg()):
            site = site_of(scores.get_device(), scores.dtype, input_ids.dtype, allowed is not None, padded)
        found = _Signature(site, not PLAIN.issuperset(map(type, tensors)))
        if not found.special:
            if len(self.signatures) >= _MOST_CALLS:
                self.signatures.clear()
            self.signatures[_key(*tensors, padded=padded, inplace=inplace)] = found
        return found


# --- checks -----------------------------------------------------------------------------------------------------------


def _key(scores: Any, input_ids: Any, allowed: Any, *, padded: bool, inplace: bool) -> Hashable:
    """All that the checks and the choice of a kernel depend on."""
    return (
        padded, type(input_ids), input_ids.dtype, input_ids.device, input_ids.dim(),
        type(scores), scores.dtype, scores.device, scores.dim(), input_ids.shape[0] == scores.shape[0],
        None if allowed is None else (type(allowed), allowed.dtype, allowed.device, allowed.shape == scores.shape[1:]),
        inplace and (scores.is_neg(), _overlaps(scores)),
    )  # fmt: skip


def _check(scores: Any, input_ids: Any, allowed: Any, *, inplace: bool) -> None:
    """All that can be wrong with the tensors."""
    op = "no_repeat_ngram"
    checks.check_tensor(op, "scores", scores)
    _check_other(op, "input_ids", input_ids, (torch.int64, torch.int32), scores)
    for name, tensor in (("scores", scores), ("input_ids", input_ids)):
        if tensor.dim() != 2:
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected two dimensions")
    if input_ids.shape[0] != scores.shape[0]:
        raise ValueError(f"{op}: input_ids has {input_ids.shape[0]} rows, expected {scores.shape[0]} as scores")
    if allowed is not None:
        _check_other(op, "allowed", allowed, (torch.bool,), scores)
        checks.check_shape(op, "allowed", allowed, tuple(scores.shape[1:]))
    if inplace and _overlaps(scores):
        raise ValueError(f"{op}: scores has overlapping rows, with strides {scores.stride()}: it cannot be changed in "
                         "place")  # fmt: skip


def _check_other(op: str, name: str, value: Any, dtypes: tuple[torch.dtype, ...], scores: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise TypeError(f"{op}: {name} has dtype {value.dtype}, expected {' or '.join(map(str, dtypes))}")
    checks.check_dense(op, name, value)
    if value.device != scores.device:
        raise RuntimeError(f"{op}: {name} is on {value.device}, expected {scores.device} as scores")


def _overlaps(scores: Tensor) -> bool:
    """Whether two of the elements share memory, for tensors of two dimensions."""
    if scores.is_contiguous():
        return False
    sides = sorted((stride, size) for size, stride in zip(scores.shape, scores.stride(), strict=True) if size > 1)
    if any(stride == 0 for stride, _ in sides):
        return True
    return len(sides) == 2 and sides[0][0] * (sides[0][1] - 1) >= sides[1][0]


# --- the registered operators -----------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")
_CALL = "Tensor input_ids, Tensor? allowed, int ngram_size, int? window, int prompt_length, int? pad_token_id"
_LIBRARY.define(f"no_repeat_ngram_forward(Tensor scores, {_CALL}) -> Tensor")
_LIBRARY.define(f"no_repeat_ngram_forward_(Tensor(a!) scores, {_CALL}) -> ()")


def _registered(scores: Tensor, input_ids: Tensor, allowed: Tensor | None, rule: Rule, *, inplace: bool) -> Tensor:
    """The call as one operator that torch.compile, dispatch modes and tensor subclasses see."""
    if inplace:
        torch.ops.fusedops.no_repeat_ngram_forward_(scores, input_ids, allowed, *rule)
        return scores
    return torch.ops.fusedops.no_repeat_ngram_forward(scores, input_ids, allowed, *rule)  # type: ignore[no-any-return]


def _copy(scores: Tensor, *_: Any) -> Tensor:
    """What is written to out of place: contiguous, in memory of its own, and with no sign to be flipped."""
    return scores.clone(memory_format=torch.contiguous_format)


def _forward(scores: Tensor, *call: Any) -> Tensor:
    out = _copy(scores)
    _forward_inplace(out, *call)
    return out


def _forward_inplace(scores: Tensor, input_ids: Tensor, allowed: Tensor | None, *constants: Any) -> None:
    rule = Rule(*constants)
    site = site_of(scores.get_device(), scores.dtype, input_ids.dtype, allowed is not None,
                   rule.pad_token_id is not None)  # fmt: skip
    on_device(site, launching.forward, scores, input_ids, allowed, rule)  # type: ignore[arg-type]


implement(_LIBRARY, "no_repeat_ngram_forward", _forward, _copy)
implement(_LIBRARY, "no_repeat_ngram_forward_", _forward_inplace, lambda *_: None)

NO_REPEAT_NGRAM = NoRepeatNGram()
