"""The generation family's functional: checks, then the kernel, or the formula where none can run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core import autograd, checks, launch
from ..core.admission import UNSEEN, keep
from . import launching, reference
from .launching import Rule, Site
from .operators import operator_call

__all__ = ["check_rule", "no_repeat_ngram"]

_OP = "no_repeat_ngram"


def no_repeat_ngram(input_ids: Tensor, scores: Tensor, ngram_size: int, *, window: int | None = None,
                    allowed: Tensor | None = None, prompt_length: int = 0, pad_token_id: int | None = None,
                    inplace: bool = False) -> Tensor:  # fmt: skip
    """Bans every next token that would repeat an n-gram of its row: its score becomes minus infinity.

    A token is banned if it follows, anywhere in the row, the same ``ngram_size - 1`` tokens that end the row. With
    ``ngram_size=1`` that is every token of the row; a row of fewer than ``ngram_size`` tokens bans none. All other
    scores keep their bits. On a GPU it is one launch, and the host waits for nothing.

    Args:
        input_ids: ``(B, L)``, int64 or int32: each row's tokens so far; any strides. What is outside ``[0, V)`` is
            compared like any other token, and never banned.
        scores: ``(B, V)``, fp16, bf16, fp32 or fp64: each row's scores of the next token; any strides.
        ngram_size: n, at least 1.
        window: only n-grams within a row's last ``window`` tokens count, at least ``ngram_size``; None for all.
        allowed: ``(V,)``, boolean: True for tokens that are never banned; or None.
        prompt_length: n-grams that touch a row's first ``prompt_length`` tokens do not count.
        pad_token_id: n-grams that touch the run of this token at a row's beginning do not count; None if rows are not
            padded, or if padding is to be taken for text, as Hugging Face's processor takes it.
        inplace: write to ``scores``, which moves almost nothing; else its copy is most of the cost.
    Returns:
        ``(B, V)`` in the scores' dtype; ``scores`` itself if ``inplace``.
    Raises:
        ValueError: a shape does not fit, a number is out of range, or ``inplace`` is asked of overlapping rows; the
            message names it.
        TypeError: an argument is of another type or dtype.
        RuntimeError: a tensor is on another device.
    Numerics: nothing is computed with the scores.
    Gradient: where one is asked, PyTorch's operators compute both ways; it is zero for banned tokens.
    Source: Paulus et al. 2017, arXiv:1705.04304, section 2.5; Klein et al. 2017, arXiv:1701.02810.
    """
    rule = (ngram_size, window, prompt_length, pad_token_id)
    if torch.compiler.is_compiling():
        return _observed(input_ids, scores, allowed, rule, inplace)
    try:
        key = (
            inplace, pad_token_id is None, type(input_ids), input_ids.dtype, input_ids.device, input_ids.dim(),
            type(scores), scores.dtype, scores.device, scores.dim(), scores.is_neg(),
            input_ids.shape[0] == scores.shape[0], inplace and _overlaps(scores),
            None if allowed is None else (type(allowed), allowed.dtype, allowed.device,
                                          allowed.shape == scores.shape[1:]),
        )  # fmt: skip
        site = _admitted.get(key, UNSEEN)
    except (AttributeError, IndexError, TypeError, RuntimeError):
        key, site = None, UNSEEN  # something is wrong, and the checks say what; or a subclass that hides its device
    check_rule(_OP, *rule)
    if site is UNSEEN or torch._C._len_torch_dispatch_stack() > 0:
        _check(input_ids, scores, allowed, inplace)
        if not autograd.plain(input_ids, scores, allowed):
            return _observed(input_ids, scores, allowed, rule, inplace)
        site = _admit(key, input_ids, scores, allowed, pad_token_id, inplace)
    if site is None or scores.numel() == 0 or _differentiated(scores):
        return _composite(input_ids, scores, allowed, rule, inplace)
    return launching.forward(site, input_ids, scores, allowed, rule)


# --- checks -------------------------------------------------------------------------------------------------------


def check_rule(op: str, ngram_size: Any, window: Any, prompt_length: Any, pad_token_id: Any) -> None:
    """The arguments that are no tensors."""
    _check_integer(op, "ngram_size", ngram_size, 1)
    if window is not None:
        _check_integer(op, "window", window, 1)
        if window < ngram_size:
            raise ValueError(f"{op}: window must be at least {ngram_size} as ngram_size, got {window}")
    _check_integer(op, "prompt_length", prompt_length, 0)
    if pad_token_id is not None and not isinstance(pad_token_id, int):
        raise TypeError(f"{op}: pad_token_id must be an integer or None, got {type(pad_token_id).__name__}")


def _check_integer(op: str, name: str, value: Any, least: int) -> None:
    if not isinstance(value, int):
        raise TypeError(f"{op}: {name} must be an integer, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {value}")


def _check(input_ids: Tensor, scores: Tensor, allowed: Tensor | None, inplace: bool) -> None:
    """All that can be wrong with the tensors."""
    checks.check_tensor(_OP, "scores", scores)
    _check_other("input_ids", input_ids, (torch.int64, torch.int32), scores)
    for name, tensor in (("scores", scores), ("input_ids", input_ids)):
        if tensor.dim() != 2:
            raise ValueError(f"{_OP}: {name} has shape {tuple(tensor.shape)}, expected two dimensions")
    if input_ids.shape[0] != scores.shape[0]:
        raise ValueError(f"{_OP}: input_ids has {input_ids.shape[0]} rows, expected {scores.shape[0]} as scores")
    if allowed is not None:
        _check_other("allowed", allowed, (torch.bool,), scores)
        checks.check_shape(_OP, "allowed", allowed, tuple(scores.shape[1:]))
    if inplace and _overlaps(scores):
        raise ValueError(f"{_OP}: scores has overlapping rows, with strides {scores.stride()}: it cannot be changed in "
                         "place")  # fmt: skip


def _overlaps(scores: Tensor) -> bool:
    """Whether two of the elements share memory, for tensors of two dimensions."""
    if scores.is_contiguous():
        return False
    sides = sorted((stride, size) for size, stride in zip(scores.shape, scores.stride(), strict=True) if size > 1)
    if any(stride == 0 for stride, _ in sides):
        return True
    return len(sides) == 2 and sides[0][0] * (sides[0][1] - 1) >= sides[1][0]


def _check_other(name: str, value: Any, dtypes: tuple[torch.dtype, ...], scores: Tensor) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{_OP}: {name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise TypeError(f"{_OP}: {name} has dtype {value.dtype}, expected {' or '.join(map(str, dtypes))}")
    if value.device != scores.device:
        raise RuntimeError(f"{_OP}: {name} is on {value.device}, expected {scores.device} as scores")


# --- dispatch -----------------------------------------------------------------------------------------------------

# The calls seen to be right, by all that checks and choice of kernel depend on; None for those the formula serves.
_admitted: dict[Any, Site | None] = {}


def _admit(key: Any, input_ids: Tensor, scores: Tensor, allowed: Tensor | None, pad_token_id: int | None,
           inplace: bool) -> Site | None:  # fmt: skip
    site = None
    # Scores whose sign is still to be flipped have other numbers in memory.
    if launch.runs_kernels(scores.device.type) and not scores.is_neg():
        site = launching.site_of(scores.get_device(), input_ids.dtype, scores.dtype, allowed is not None,
                                 pad_token_id is not None, inplace)  # fmt: skip
    return keep(_admitted, key, site)


def _differentiated(scores: Tensor) -> bool:
    return (torch.is_grad_enabled() and scores.requires_grad) or autograd.transforming()


def _observed(input_ids: Tensor, scores: Tensor, allowed: Tensor | None, rule: Rule, inplace: bool) -> Tensor:
    """Under torch.compile, a dispatch mode or a tensor subclass: one registered operator, which they can see."""
    check_rule(_OP, *rule)
    _check(input_ids, scores, allowed, inplace)
    if not launch.runs_kernels(scores.device.type) or scores.numel() == 0 or _differentiated(scores):
        return _composite(input_ids, scores, allowed, rule, inplace)
    return operator_call(input_ids, scores, allowed, rule, inplace)


def _composite(input_ids: Tensor, scores: Tensor, allowed: Tensor | None, rule: Rule, inplace: bool) -> Tensor:
    ngram_size, window, prompt_length, pad_token_id = rule
    return reference.no_repeat_ngram(input_ids, scores, ngram_size, window=window, allowed=allowed,
                                     prompt_length=prompt_length, pad_token_id=pad_token_id, inplace=inplace)  # fmt: skip
