"""The generation family's operator: checks, dispatch, and the registered operators.

The dispatch is that of `core.calls.call` for an operator without backward and dropout, of which one
form writes to an argument.
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

# Far more than a program has different calls. At this size the cache is cleared, so that it does
# not grow without limit.
_MOST_CALLS = 1024


class _Signature(NamedTuple):
    """A checked call.

    Attributes:
        site: None where no kernel can run.
        special: whether a tensor is of a subclass.
    """

    site: Site | None
    special: bool


class NoRepeatNGram:
    """n-gram blocking, on a copy of the scores or in place."""

    def __init__(self) -> None:
        # The calls that were checked, by `_key`.
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
        """The scores with the bans, for a rule that was checked.

        One of three paths:

            reference     no kernel can run, a gradient is required, or there are no scores
            registered    torch.compile, a dispatch mode or a tensor subclass has to see the call
            kernel        all other calls
        """
        tensors = scores, input_ids, allowed
        if torch.compiler.is_dynamo_compiling():
            _check(*tensors, inplace=inplace)
            runs = launch.runs_kernels(scores.device.type)
            observed = True
        else:
            padded = rule.pad_token_id is not None
            site, special = self._signature(*tensors, padded=padded, inplace=inplace)
            runs = site is not None
            observed = special or dispatch_modes() > 0
        differentiated = _is_differentiated(scores)
        try:
            if not runs or differentiated or scores.numel() == 0:
                return reference.no_repeat_ngram(*tensors, rule, inplace=inplace)
            if observed:
                return _registered(*tensors, rule, inplace=inplace)
            assert site is not None
            out = scores if inplace else _copy(scores)
            arguments = out, input_ids, allowed, rule
            on_device(site, launching.forward, *arguments)  # type: ignore[arg-type]
        except RuntimeError:
            # A tensor without strides fails only here, because the layout is not in the key. The
            # check raises the error that names it.
            _check(*tensors, inplace=inplace)
            raise
        return out

    def _signature(
        self, scores: Any, input_ids: Any, allowed: Any, *, padded: bool, inplace: bool
    ) -> _Signature:
        """The signature of a call, which is checked if it is the first with its key."""
        tensors = scores, input_ids, allowed
        try:
            known = self.signatures.get(_key(*tensors, padded=padded, inplace=inplace))
        except (AttributeError, IndexError, TypeError, RuntimeError):
            # An argument is wrong, which the checks name; or it is of a subclass without a shape.
            known = None
        if known is not None:
            return known
        _check(*tensors, inplace=inplace)
        site = None
        # With the negative bit set, memory holds the scores' negatives: minus infinity written
        # there would be read as infinity.
        negated = inplace and scores.is_neg()
        if launch.runs_kernels(scores.device.type) and not negated:
            site = site_of(
                scores.get_device(), scores.dtype, input_ids.dtype, allowed is not None, padded
            )
        signature = _Signature(site, not PLAIN.issuperset(map(type, tensors)))

        if not signature.special:
            if len(self.signatures) >= _MOST_CALLS:
                self.signatures.clear()
            self.signatures[_key(*tensors, padded=padded, inplace=inplace)] = signature
        return signature


def _is_differentiated(scores: Tensor) -> bool:
    """Whether a gradient, a transform or a tangent needs PyTorch's operators."""
    if scores.requires_grad and torch.is_grad_enabled():
        return True
    return transforms() or in_forward_mode()


# --- checks ---------------------------------------------------------------------------------------


def _key(scores: Any, input_ids: Any, allowed: Any, *, padded: bool, inplace: bool) -> Hashable:
    """The properties that the checks and the choice of a kernel depend on."""
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
    """Raises what is wrong with the tensors."""
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
    """Raises what is wrong with ``input_ids`` or ``allowed``, except its shape."""
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
    """Whether two of the elements share memory, for tensors of two dimensions."""
    if scores.is_contiguous():
        return False
    dims = zip(scores.stride(), scores.shape, strict=True)
    strided = sorted((stride, size) for stride, size in dims if size > 1)
    if any(stride == 0 for stride, _ in strided):
        return True
    if len(strided) != 2:
        return False
    # Whether the inner dimension's last element is at or behind the outer one's second.
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
    """A copy for a call out of place: contiguous, and without the negative bit."""
    return scores.clone(memory_format=torch.contiguous_format)


def _forward(scores: Tensor, *call: Any) -> Tensor:
    """The registered operator out of place."""
    out = _copy(scores)
    _forward_inplace(out, *call)
    return out


def _forward_inplace(
    scores: Tensor, input_ids: Tensor, allowed: Tensor | None, *constants: Any
) -> None:
    """The registered operator in place."""
    rule = Rule(*constants)
    site = site_of(
        scores.get_device(),
        scores.dtype,
        input_ids.dtype,
        allowed is not None,
        rule.pad_token_id is not None,
    )
    on_device(site, launching.forward, scores, input_ids, allowed, rule)  # type: ignore[arg-type]


implement(_LIBRARY, "no_repeat_ngram_forward", _forward, _copy)
implement(_LIBRARY, "no_repeat_ngram_forward_", _forward_inplace, lambda *_: None)

NO_REPEAT_NGRAM = NoRepeatNGram()
