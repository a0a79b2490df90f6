"""Models that are written by hand, each in the style of a well-known code base.

Given labels, they return the loss too, as Transformers' models do.
"""

from .dit import DiT
from .gated import GatedDecoder
from .llama import MetaLlama
from .nanogpt import NanoGPT
from .output import Output

__all__ = ["DiT", "GatedDecoder", "MetaLlama", "NanoGPT", "Output"]
