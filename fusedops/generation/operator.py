"""The generation family's operator: checks, dispatch, and the registered operators.

The dispatch is like that of `core.calls.call`. But this operator has no backward and no dropout,
and it may write to an argument.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.calls import checks
from ..core.calls.function import PLAIN, on_device
from ..core.calls.registration import implement
from ..core.compat.dispatch import dispatch_modes, in_forward_mode, transforms
from ..core.launches import launch
from . import launching, reference
from .launching import Site, site_of
from .reference import Rule

__all__ = ["NO_REPEAT_NGRAM"]

# The most cached signatures, which is far more than a program has different calls. At this size the
# cache is cleared, so that it does not grow without limit.
_MOST_CALLS = 1024


class _Signature(NamedTuple):
    """The properties of a call that was checked.

    Attributes:
        site: the site of the kernel; None if no kernel can run.
        special: whether a tensor is of a subclass.
    """

    site: Site | None
    special: bool


class NoRepeatNGram:
    """The operator that bans repeated n-grams, in a copy of the scores or in place."""

    def __init__(self) -> None:
        # The signatures of the calls that were checked, by `_key`.
        self.signatures: dict[Hashable, _Signature] = {}

    def run(
        self,
        scores: Tensor,
        input_ids: Tensor,
        allowed: Tensor | None,
        rule: Rule,
        *,
        inplace: bool,
    ) -> Tensor:
        """Returns the scores with the bans; the caller has checked ``rule``.

        The call takes one of three paths:

            reference     if no kernel can run, a gradient is required, or there are no scores
            registered    if torch.compile, a dispatch mode or a tensor subclass has to see the call
            kernel        otherwise
        """
        tensors = scores, input_ids, allowed
        if torch.compiler.is_dynamo_compiling():
            _check(*tensors, inplace=inplace)
            has_kernel = launch.runs_kernels(scores.device.type)
            is_observed = True
        else:
            padded = rule.pad_token_id is not None
            site, special = self._signature(*tensors, padded=padded, inplace=inplace)
            has_kernel = site is not None
            is_observed = special or dispatch_modes() > 0
        is_differentiated = _is_differentiated(scores)
        try:
            if not has_kernel or is_differentiated or scores.numel() == 0:
                return reference.no_repeat_ngram(*tensors, rule, inplace=inplace)
            if is_observed:
                return _registered(*tensors, rule, inplace=inplace)
            assert site is not None
            out = scores if inplace else _copy(scores)
            arguments = out, input_ids, allowed, rule
            on_device(site, launching.forward, *arguments)  # type: ignore[arg-type]
        except RuntimeError:
            # A sparse tensor fails only here, because the layout is not in the key. The check
            # raises an error that names the tensor.
            _check(*tensors, inplace=inplace)
            raise
        return out

    def _signature(
        self, scores: Any, input_ids: Any, allowed: Any, *, padded: bool, inplace: bool
    ) -> _Signature:
        """Returns the signature of a call, after a check if it is the first with its key."""
        tensors = scores, input_ids, allowed
        try:
            cached = self.signatures.get(_key(*tensors, padded=padded, inplace=inplace))
        except (AttributeError, IndexError, TypeError, RuntimeError):
            # An argument is wrong, and `_check` will raise an error that names it; or an argument
            # is of a subclass without a shape.
            cached = None
        if cached is not None:
            return cached
        _check(*tensors, inplace=inplace)
        site = None
        # The memory of a tensor with the negative bit holds its negatives: minus infinity, written
        # by a kernel, would be read as infinity.
        is_negated = inplace and scores.is_neg()
        if launch.runs_kernels(scores.device.type) and not is_negated:
            site = site_of(
                scores.get_device(),
                scores.dtype,
                input_ids.dtype,
                allowed=allowed is not None,
                padded=padded,
            )
        signature = _Signature(site, special=not PLAIN.issuperset(map(type, tensors)))
        if not signature.special:
            if len(self.signatures) >= _MOST_CALLS:
                self.signatures.clear()
            self.signatures[_key(*tensors, padded=padded, inplace=inplace)] = signature
        return signature


def _is_differentiated(scores: Tensor) -> bool:
    """Whether a gradient, a torch.func transform or forward mode needs PyTorch's operators."""
    if scores.requires_grad and torch.is_grad_enabled():
        return True
    return transforms() or in_forward_mode()


# --- checks ---------------------------------------------------------------------------------------


def _key(scores: Any, input_ids: Any, allowed: Any, *, padded: bool, inplace: bool) -> Hashable:
    """Returns the properties on which the checks and the choice of a kernel depend."""
    allowed_key = None
    if allowed is not None:
        fits = allowed.shape == scores.shape[1:]
        allowed_key = (type(allowed), allowed.dtype, allowed.device, fits)
    return (
        padded,
        type(input_ids),
        input_ids.dtype,
        input_ids.device,
        input_ids.dim(),
        type(scores),
        scores.dtype,
        scores.device,
        scores.dim(),
        input_ids.shape[0] == scores.shape[0],
        allowed_key,
        inplace and (scores.is_neg(), _overlaps(scores)),
    )


def _check(scores: Any, input_ids: Any, allowed: Any, *, inplace: bool) -> None:
    """Raises an error if a tensor is invalid."""
    op = "no_repeat_ngram"
    checks.check_tensor(op, "scores", scores)
    _check_other(op, "input_ids", input_ids, (torch.int64, torch.int32), scores)
    for name, tensor in (("scores", scores), ("input_ids", input_ids)):
        if tensor.dim() != 2:
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)}, expected two dimensions"
            )
    if input_ids.shape[0] != scores.shape[0]:
        raise ValueError(
            f"{op}: input_ids has {input_ids.shape[0]} rows, expected {scores.shape[0]} as scores"
        )
    if allowed is not None:
        _check_other(op, "allowed", allowed, (torch.bool,), scores)
        checks.check_shape(op, "allowed", allowed, tuple(scores.shape[1:]))
    if inplace and _overlaps(scores):
        raise ValueError(
            f"{op}: scores has overlapping rows, with strides {scores.stride()}: "
            "it cannot be changed in place"
        )


def _check_other(
    op: str, name: str, value: Any, dtypes: tuple[torch.dtype, ...], scores: Tensor
) -> None:
    """Raises an error if ``input_ids`` or ``allowed`` is invalid; does not check its shape."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise TypeError(
            f"{op}: {name} has dtype {value.dtype}, expected {' or '.join(map(str, dtypes))}"
        )
    checks.check_dense(op, name, value)
    if value.device != scores.device:
        raise RuntimeError(f"{op}: {name} is on {value.device}, expected {scores.device} as scores")


def _overlaps(scores: Tensor) -> bool:
    """Whether two elements of a tensor of two dimensions share memory."""
    if scores.is_contiguous():
        return False
    dims = zip(scores.stride(), scores.shape, strict=True)
    strided = sorted((stride, size) for stride, size in dims if size > 1)
    if any(stride == 0 for stride, _ in strided):
        return True
    if len(strided) != 2:
        return False
    # Two elements share memory if the inner dimension reaches the second element along the outer
    # dimension.
    (inner_stride, inner_size), (outer_stride, _) = strided
    return inner_stride * (inner_size - 1) >= outer_stride


# --- the registered operators ---------------------------------------------------------------------

_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")
_CALL = (
    "Tensor input_ids, Tensor? allowed, "
    "int ngram_size, int? window, int prompt_length, int? pad_token_id"
)
_LIBRARY.define(f"no_repeat_ngram_forward(Tensor scores, {_CALL}) -> Tensor")
_LIBRARY.define(f"no_repeat_ngram_forward_(Tensor(a!) scores, {_CALL}) -> ()")


def _registered(
    scores: Tensor, input_ids: Tensor, allowed: Tensor | None, rule: Rule, *, inplace: bool
) -> Tensor:
    """Calls the registered operator, for torch.compile, dispatch modes and tensor subclasses."""
    if inplace:
        torch.ops.fusedops.no_repeat_ngram_forward_(scores, input_ids, allowed, *rule)
        return scores
    operator = torch.ops.fusedops.no_repeat_ngram_forward
    return operator(scores, input_ids, allowed, *rule)  # type: ignore[no-any-return]


def _copy(scores: Tensor, *_: Any) -> Tensor:
    """Returns a contiguous copy without the negative bit, for a call that is not in place."""
    return scores.clone(memory_format=torch.contiguous_format)


def _forward(scores: Tensor, *call: Any) -> Tensor:
    """Implements the registered operator that returns a copy."""
    out = _copy(scores)
    _forward_inplace(out, *call)
    return out


def _forward_inplace(
    scores: Tensor, input_ids: Tensor, allowed: Tensor | None, *constants: Any
) -> None:
    """Implements the registered operator that writes to ``scores``."""
    rule = Rule(*constants)
    site = site_of(
        scores.get_device(),
        scores.dtype,
        input_ids.dtype,
        allowed=allowed is not None,
        padded=rule.pad_token_id is not None,
    )
    on_device(site, launching.forward, scores, input_ids, allowed, rule)  # type: ignore[arg-type]


implement(_LIBRARY, "no_repeat_ngram_forward", _forward, _copy)
implement(_LIBRARY, "no_repeat_ngram_forward_", _forward_inplace, lambda *_: None)

NO_REPEAT_NGRAM = NoRepeatNGram()
