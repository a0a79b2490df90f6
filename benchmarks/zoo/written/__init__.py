"""Models of the zoo that are written by hand, each in the style of a well-known code base.

They return an `Output`, as the models of `benchmarks.models.written` do.
"""

from .contrastive import Contrastive
from .dcn import DCN
from .detr import DETR
from .graph import GraphTransformer
from .mixer import MLPMixer
from .recurrent import GatedRecurrence
from .resnet import ResNet
from .s4d import S4D
from .tabular import TabTransformer
from .unet import UNet

__all__ = [
    "DCN",
    "DETR",
    "S4D",
    "Contrastive",
    "GatedRecurrence",
    "GraphTransformer",
    "MLPMixer",
    "ResNet",
    "TabTransformer",
    "UNet",
]
