"""Models as people write them by hand, each in the manner of a well-known code base.

With labels a call returns the loss too, as Transformers' models do.
"""

from .dit import DiT
from .gated import GatedDecoder
from .llama import MetaLlama
from .nanogpt import NanoGPT
from .output import Output

__all__ = ["DiT", "GatedDecoder", "MetaLlama", "NanoGPT", "Output"]
