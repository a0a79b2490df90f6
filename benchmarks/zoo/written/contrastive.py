"""A model of images and texts, whose loss compares all images with all texts of a batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...models.written import Output

__all__ = ["Contrastive"]


class Contrastive(nn.Module):
    """A model of Transformers with a text tower and a vision tower, such as CLIP.

    Args:
        model: the name of the model's class.
        config: the name of the config's class.
        towers: the arguments of the config, by tower.
    """

    def __init__(self, model: str, config: str, **towers: Any) -> None:
        super().__init__()
        import transformers

        self.inner = getattr(transformers, model)(getattr(transformers, config)(**towers))

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor, labels: Tensor | None = None
    ) -> Output:
        """Returns the logits of all pairs, and with labels the loss.

        Args:
            input_ids: ``(batch, length)`` tokens.
            pixel_values: ``(batch, channels, height, width)``.
            labels: any tensor. The label of a text is always the image at its index.
        """
        result = self.inner(input_ids, pixel_values, return_loss=labels is not None)
        return Output(result.loss, result.logits_per_text)
