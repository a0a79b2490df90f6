"""The family's private `torch.library` operators: what torch.compile, FakeTensor and make_fx see of a call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.operators import implement
from . import launching
from .launching import Rule, site_of

__all__ = ["operator_call"]

_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")

_CALL = "Tensor? allowed, int ngram_size, int? window, int prompt_length, int? pad_token_id"
_LIBRARY.define(f"no_repeat_ngram_forward(Tensor input_ids, Tensor scores, {_CALL}) -> Tensor")
_LIBRARY.define(f"no_repeat_ngram_forward_(Tensor input_ids, Tensor(a!) scores, {_CALL}) -> ()")


def operator_call(input_ids: Tensor, scores: Tensor, allowed: Tensor | None, rule: Rule, inplace: bool) -> Tensor:
    """The call as one registered operator."""
    if inplace:
        torch.ops.fusedops.no_repeat_ngram_forward_(input_ids, scores, allowed, *rule)
        return scores
    return torch.ops.fusedops.no_repeat_ngram_forward(input_ids, scores, allowed, *rule)  # type: ignore[no-any-return]


def _forward(input_ids: Tensor, scores: Tensor, allowed: Tensor | None, ngram_size: int, window: int | None,
             prompt_length: int, pad_token_id: int | None, inplace: bool = False) -> Tensor:  # fmt: skip
    site = site_of(scores.get_device(), input_ids.dtype, scores.dtype, allowed is not None, pad_token_id is not None,
                   inplace)  # fmt: skip
    return launching.forward(site, input_ids, scores, allowed, (ngram_size, window, prompt_length, pad_token_id))


def _forward_inplace(input_ids: Tensor, scores: Tensor, allowed: Tensor | None, ngram_size: int, window: int | None,
                     prompt_length: int, pad_token_id: int | None) -> None:  # fmt: skip
    _forward(input_ids, scores, allowed, ngram_size, window, prompt_length, pad_token_id, inplace=True)


def _fake_forward(input_ids: Tensor, scores: Tensor, allowed: Tensor | None, ngram_size: int, window: int | None,
                  prompt_length: int, pad_token_id: int | None) -> Tensor:  # fmt: skip
    return scores.new_empty(scores.shape)


def _fake_forward_inplace(input_ids: Tensor, scores: Tensor, allowed: Tensor | None, ngram_size: int,
                          window: int | None, prompt_length: int, pad_token_id: int | None) -> None:  # fmt: skip
    return None


implement(_LIBRARY, "no_repeat_ngram_forward", _forward, _fake_forward)
implement(_LIBRARY, "no_repeat_ngram_forward_", _forward_inplace, _fake_forward_inplace)
