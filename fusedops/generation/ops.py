"""The generation family's functional: it checks the constants and calls the operator."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .operator import NO_REPEAT_NGRAM
from .reference import Rule

__all__ = ["check_rule", "no_repeat_ngram"]

# The largest number: the kernel takes numbers as int64 arguments.
_MOST = 2**63 - 1


def no_repeat_ngram(
    input_ids: Tensor,
    scores: Tensor,
    ngram_size: int,
    *,
    window: int | None = None,
    allowed: Tensor | None = None,
    prompt_length: int = 0,
    pad_token_id: int | None = None,
    inplace: bool = False,
) -> Tensor:
    """Returns the scores, with minus infinity for next tokens that would repeat an n-gram.

    In each row, a token is banned if the row's last ``ngram_size - 1`` tokens occur elsewhere in
    the row and the token follows them there. With ``ngram_size=1`` every token of the row is
    banned. A row of fewer than ``ngram_size`` tokens bans none. All other scores are unchanged. On
    a GPU the call copies the scores, unless ``inplace``, and launches one kernel, or none if the
    rows are too short for any ban. It does not synchronise.

    Args:
        input_ids: ``(B, L)``, int64 or int32: each row's tokens so far; any strides. Tokens outside
            ``[0, V)`` are compared like others, and never banned.
        scores: ``(B, V)``, fp16, bf16, fp32 or fp64: each row's scores of the next token; any
            strides.
        ngram_size: n, at least 1.
        window: only n-grams within a row's last ``window`` tokens count, at least ``ngram_size``;
            None for all.
        allowed: ``(V,)``, boolean: True for tokens that are never banned; or None.
        prompt_length: n-grams that contain one of a row's first ``prompt_length`` tokens do not
            count.
        pad_token_id: n-grams that contain this token at the beginning of a row do not count. None:
            rows are not padded, or padding counts as text, as in Hugging Face's processor.
        inplace: write to ``scores`` itself. The copy, which this saves, is most of the cost.
    Returns:
        ``(B, V)`` in the scores' dtype; ``scores`` itself if ``inplace``.
    Raises:
        ValueError: a shape does not fit, a number is out of range, or ``inplace`` is True and rows
            of ``scores`` overlap; the message names it.
        TypeError: an argument is of another type or dtype.
        RuntimeError: a tensor is on another device.
    Numerics: the scores are copied bit for bit. Gradient: if the scores require one, PyTorch's
    operators run instead of the kernel; it is zero for banned tokens. Source: Paulus et al. 2017,
    arXiv:1705.04304, section 2.5; Klein et al. 2017, arXiv:1701.02810.
    """
    # Every call checks these numbers, because they are not in the key of the call's signature.
    check_rule("no_repeat_ngram", ngram_size, window, prompt_length, pad_token_id)
    rule = Rule(ngram_size, window, prompt_length, pad_token_id)
    return NO_REPEAT_NGRAM.run(scores, input_ids, allowed, rule, inplace=bool(inplace))


def check_rule(
    op: str, ngram_size: Any, window: Any, prompt_length: Any, pad_token_id: Any
) -> None:
    """Raises an error if a constant is invalid."""
    _check_integer(op, "ngram_size", ngram_size, least=1)
    if window is not None:
        _check_integer(op, "window", window, least=1)
        if window < ngram_size:
            raise ValueError(
                f"{op}: window must be at least {ngram_size} as ngram_size, got {window}"
            )
    _check_integer(op, "prompt_length", prompt_length, least=0)
    if pad_token_id is not None:
        _check_integer(
            op, "pad_token_id", pad_token_id, least=-_MOST - 1, expected="an integer or None"
        )


def _check_integer(
    op: str, name: str, value: Any, least: int, expected: str = "an integer"
) -> None:
    """Raises unless ``value`` is an integer of 64 bits and at least ``least``."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer:
        raise TypeError(f"{op}: {name} must be {expected}, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {value}")
    if value > _MOST:
        raise ValueError(f"{op}: {name} must be at most {_MOST}, got {value}")
