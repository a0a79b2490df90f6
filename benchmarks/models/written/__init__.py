"""Models that are written by hand, each in the style of a well-known code base.

Given labels, they return the loss too, as Transformers' models do. If a model has the method
``use_operators``, it writes operators of fusedops into the model, in place.
"""

from .dit import DiT
from .dlrm import DLRM
from .gated import GatedDecoder
from .llama import MetaLlama
from .nanogpt import NanoGPT
from .output import Output

__all__ = ["DLRM", "DiT", "GatedDecoder", "MetaLlama", "NanoGPT", "Output"]
