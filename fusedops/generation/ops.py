"""The generation family's functional: its constants, and one call into its operator."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .operator import NO_REPEAT_NGRAM
from .reference import Rule

__all__ = ["check_rule", "no_repeat_ngram"]


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
    # In every call: these numbers are in no key.
    check_rule("no_repeat_ngram", ngram_size, window, prompt_length, pad_token_id)
    rule = Rule(ngram_size, window, prompt_length, pad_token_id)
    return NO_REPEAT_NGRAM.run(scores, input_ids, allowed, rule, inplace=bool(inplace))


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
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"{op}: {name} must be an integer, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {value}")
