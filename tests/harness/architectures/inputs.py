"""Inputs of models of Transformers, found from the signature of the forward and from the configuration."""

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
    """Inputs that the model may take, the likeliest first; the same at each call."""
    signature = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    result = _Found(model, frozenset(signature))
    yield from result.patches(main)
    decoder = result.decoder()
    for extra in (
        {},
        result.of("input_ids"),
        result.of("pixel_values"),
        result.of("input_features"),
    ):
        for own in result.variants(main):
            if not extra or not extra.keys() <= own.keys():
                yield {**extra, **own, **decoder}
                if decoder:
                    yield {**extra, **own}
    for other in (
        "input_ids",
        "pixel_values",
        "input_features",
        "input_values",
        "pixel_values_videos",
    ):
        if other != main:
            yield from result.variants(other)
    required = [
        n
        for n, p in signature.items()
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    width = result.number("hidden_size", "d_model", default=32)
    yield {name: result.normal(_BATCH, _LENGTH, width) for name in required}


class _Found:
    """Inputs by name."""

    def __init__(self, model: nn.Module, names: frozenset[str]) -> None:
        self._config: Any = getattr(model, "config", None)
        self._names = names
        self._generator = torch.Generator().manual_seed(5)

    def number(self, *names: str, default: int) -> int:
        """The first of these that the configuration has, or one in it."""
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

    def of(self, name: str) -> dict[str, Tensor]:
        return next(iter(self.variants(name)), {})

    def decoder(self) -> dict[str, Tensor]:
        if "decoder_input_ids" not in self._names:
            return {}
        return {"decoder_input_ids": self._ids(7)}

    def patches(self, main: str) -> list[dict[str, Tensor]]:
        """Two images in patches, laid out in rows, with how many there are in time, height and width."""
        grid = next((name for name in ("grid_thw", "image_grid_thw") if name in self._names), None)
        if grid is None or "input_ids" in self._names:
            return []
        patch, channels = (
            self.number("patch_size", default=8),
            self.number("in_channels", "num_channels", default=3),
        )
        name = (
            main
            if main in self._names
            else "hidden_states"
            if "hidden_states" in self._names
            else "pixel_values"
        )
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
        """Inputs of a name with what goes with it, in the shapes that models take it in."""
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
            return [
                {
                    name: self.normal(
                        _BATCH, _LENGTH, self.number("hidden_size", "d_model", default=32)
                    )
                }
            ]
        return []

    def _ids(self, length: int) -> Tensor:
        words = self.number("vocab_size", default=128)
        return torch.randint(
            min(10, words // 2),
            max(words - words // 5, 2),
            (_BATCH, length),
            generator=self._generator,
        )

    def _text(self) -> list[dict[str, Tensor]]:
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
