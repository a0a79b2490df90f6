"""A logits processor for `transformers`' ``generate``, which does not import that library."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import ops

__all__ = ["FusedNoRepeatNGramLogitsProcessor"]

_NAME = "FusedNoRepeatNGramLogitsProcessor"


class FusedNoRepeatNGramLogitsProcessor:
    """A logits processor that prevents repeated n-grams.

    A drop-in for `transformers.NoRepeatNGramLogitsProcessor`. Use ``model.generate(…,
    logits_processor=[FusedNoRepeatNGramLogitsProcessor(3)])`` in place of
    ``no_repeat_ngram_size=3``.

    Args:
        ngram_size: n, at least 1.
        window: only n-grams within the last ``window`` tokens count, at least ``ngram_size``; None
            for all.
        allowed: ids of tokens that are never banned.
        prompt_length: n-grams that contain one of the first ``prompt_length`` tokens do not count.
            The length of a padded prompt includes its padding.
        pad_token_id: n-grams that contain this token at the beginning of a row do not count. None:
            padding counts as text.
        inplace: write to the argument ``scores``. This is correct in ``generate``, except with
            ``output_logits=True``.
    Shape:
        input_ids: ``(B, L)``; scores: ``(B, V)``. Returns ``(B, V)``.
    Raises:
        ValueError: an argument is out of range, or a shape does not fit.
        TypeError: an argument is of another type or dtype.
        RuntimeError: the tensors are on different devices.
    Numerics: the scores are copied bit for bit.
    Source: as `fusedops.no_repeat_ngram`, which it calls.
    """

    def __init__(
        self,
        ngram_size: int,
        *,
        window: int | None = None,
        allowed: Iterable[int] = (),
        prompt_length: int = 0,
        pad_token_id: int | None = None,
        inplace: bool = False,
    ) -> None:
        ops.check_rule(_NAME, ngram_size, window, prompt_length, pad_token_id)
        self.ngram_size, self.window, self.prompt_length = ngram_size, window, prompt_length
        self.pad_token_id, self.inplace = pad_token_id, inplace
        if not isinstance(allowed, Iterable):
            raise TypeError(f"{_NAME}: allowed must be token ids, got {type(allowed).__name__}")
        self.allowed = tuple(allowed)
        for token in self.allowed:
            is_integer = isinstance(token, int) and not isinstance(token, bool)
            if not is_integer or token < 0:
                raise ValueError(
                    f"{_NAME}: allowed must hold token ids (a mask is for no_repeat_ngram), "
                    f"got {token!r}"
                )
        self._masks: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns the scores, with minus infinity for tokens that would repeat an n-gram."""
        return ops.no_repeat_ngram(
            input_ids,
            scores,
            self.ngram_size,
            window=self.window,
            allowed=self._mask(scores.shape[-1], scores.device) if self.allowed else None,
            prompt_length=self.prompt_length,
            pad_token_id=self.pad_token_id,
            inplace=self.inplace,
        )

    def _mask(self, cols: int, device: torch.device) -> Tensor:
        """Returns the mask of the allowed tokens, ``(cols,)``; it is created once per device."""
        mask = self._masks.get((cols, device))
        if mask is None:
            if max(self.allowed) >= cols:
                raise ValueError(
                    f"{_NAME}: allowed holds token {max(self.allowed)}, expected less than {cols}"
                )
            mask = torch.zeros(cols, dtype=torch.bool)
            mask[list(self.allowed)] = True
            mask = mask.to(device)
            # Only a plain tensor is cached: a fake one is of no use outside its mode.
            if type(mask) is Tensor:
                self._masks[cols, device] = mask
        return mask

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without the masks, which are created again at the next call."""
        return {**self.__dict__, "_masks": {}}

    def __repr__(self) -> str:
        defaults = {
            "window": None,
            "allowed": (),
            "prompt_length": 0,
            "pad_token_id": None,
            "inplace": False,
        }
        options = [
            f"{name}={getattr(self, name)!r}"
            for name, default in defaults.items()
            if getattr(self, name) != default
        ]
        return f"{_NAME}({', '.join([str(self.ngram_size), *options])})"
