"""Inputs of Transformers' models, derived from the forward's signature and the configuration."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

__all__ = ["candidates"]

_BATCH, _LENGTH = 2, 9


def candidates(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yields inputs that the model may accept, the likeliest first; the same at each call."""
    signature = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    guesses = _Guesses(model, frozenset(signature))
    yield from guesses.patches(main)
    decoder = guesses.decoder()
    second_inputs = (
        {},
        guesses.first("input_ids"),
        guesses.first("pixel_values"),
        guesses.first("input_features"),
    )
    for second in second_inputs:
        for main_inputs in guesses.variants(main):
            if second and second.keys() <= main_inputs.keys():
                continue
            yield {**second, **main_inputs, **decoder}
            if decoder:
                yield {**second, **main_inputs}
    for name in (
        "input_ids",
        "pixel_values",
        "input_features",
        "input_values",
        "pixel_values_videos",
    ):
        if name != main:
            yield from guesses.variants(name)
    required = [
        name
        for name, parameter in signature.items()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    width = guesses.number("hidden_size", "d_model", default=32)
    yield {name: guesses.normal(_BATCH, _LENGTH, width) for name in required}


class _Guesses:
    """Possible inputs of a model, by the names of its parameters."""

    def __init__(self, model: nn.Module, names: frozenset[str]) -> None:
        self._config: Any = getattr(model, "config", None)
        self._names = names
        self._generator = torch.Generator().manual_seed(5)

    def number(self, *names: str, default: int) -> int:
        """The first of these fields in the configuration, or in a configuration within it."""
        parts = [self._config, *(v for v in vars(self._config).values() if hasattr(v, "to_dict"))]
        for part in parts:
            for name in names:
                value = getattr(part, name, None)
                value = value[0] if isinstance(value, (list, tuple)) and value else value
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return default

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def first(self, name: str) -> dict[str, Tensor]:
        """The likeliest inputs for a name; empty if the model has no such parameter."""
        return next(iter(self.variants(name)), {})

    def decoder(self) -> dict[str, Tensor]:
        """The inputs of a decoder; empty if the model has none."""
        if "decoder_input_ids" not in self._names:
            return {}
        return {"decoder_input_ids": self._ids(7)}

    def patches(self, main: str) -> list[dict[str, Tensor]]:
        """Two images as rows of patches, with the numbers of patches in time, height and width."""
        grid = next((name for name in ("grid_thw", "image_grid_thw") if name in self._names), None)
        if grid is None or "input_ids" in self._names:
            return []
        patch = self.number("patch_size", default=8)
        channels = self.number("in_channels", "num_channels", default=3)
        names = (main, "hidden_states", "pixel_values")
        name = next((name for name in names if name in self._names), "pixel_values")
        results = []
        for frames in (self.number("temporal_patch_size", default=1), 1):
            inputs = {
                name: self.normal(32, channels * frames * patch * patch),
                grid: torch.tensor([[1, 4, 4]] * 2),
            }
            shaped = {
                **inputs,
                name: rearrange(inputs[name], "n (c h w) -> n c h w", h=patch, w=patch),
            }
            results += [inputs, shaped, {**inputs, "merge_sizes": torch.tensor([2, 2])}]
        return [arguments for arguments in results if arguments.keys() <= self._names]

    def variants(self, name: str) -> list[dict[str, Tensor]]:
        """Inputs for a name and for those that belong to it, in the shapes that models accept."""
        if name not in self._names:
            return []
        if name == "input_ids":
            return self._text()
        if name in ("pixel_values", "pixel_values_videos"):
            return [{name: x} for x in self._images()]
        if name == "input_values":
            length = self.number("max_length", default=32)
            mel = self.number("num_mel_bins", default=16)
            return [
                {name: self.normal(*shape)}
                for shape in ((_BATCH, 1600), (_BATCH, 1, 1600), (_BATCH, length, mel))
            ]
        if name == "input_features":
            mel = self.number(
                "num_mel_bins", "feature_size", "input_dim", "input_feat_per_channel", default=16
            )
            length = 2 * self.number("max_source_positions", default=16)
            shapes = (
                (_BATCH, mel, length),
                (_BATCH, length, mel),
                (_BATCH, 1, length, mel),
                (_BATCH, 1, 64, 64),
            )
            return [{name: self.normal(*shape)} for shape in shapes]
        if name in ("inputs_embeds", "hidden_states"):
            width = self.number("hidden_size", "d_model", default=32)
            return [{name: self.normal(_BATCH, _LENGTH, width)}]
        return []

    def _ids(self, length: int) -> Tensor:
        """Random tokens without the first and last of the vocabulary, which are often special."""
        words = self.number("vocab_size", default=128)
        return torch.randint(
            min(10, words // 2),
            max(words - words // 5, 2),
            (_BATCH, length),
            generator=self._generator,
        )

    def _text(self) -> list[dict[str, Tensor]]:
        """Tokens, with and without a mask."""
        ids = {"input_ids": self._ids(_LENGTH)}
        mask = torch.ones(_BATCH, _LENGTH, dtype=torch.long)
        mask[1, -2:] = 0
        full = {**ids, "attention_mask": mask} if "attention_mask" in self._names else ids
        if "bbox" in self._names:
            full["bbox"] = torch.tensor([1, 2, 5, 6]).expand(_BATCH, _LENGTH, 4).contiguous()
        return [full, ids] if len(full) > 1 else [ids]

    def _images(self) -> list[Tensor]:
        channels = self.number(
            "num_channels", "in_channels", "in_chans", "input_channels", default=3
        )
        size = self.number("image_size", default=32)
        sizes = [size] if size == 64 else [size, 64]
        frames = self.number("num_frames", "frames_per_clip", default=2)
        shapes = [(_BATCH, channels, size, size) for size in sizes]
        shapes += [(_BATCH, frames, channels, size, size) for size in sizes]
        return [self.normal(*shape) for shape in (*shapes, (_BATCH, channels, 224, 224))]
