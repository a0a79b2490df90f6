"""The public modules: the fused operators as `torch.nn.Module`, most of them subclasses of those of torch.nn."""

from .activations.modules import FusedBiasAct, FusedBiasGELU, FusedGEGLU, FusedGELU, FusedGLU, FusedSwiGLU
from .compiler.modules import Rowwise
from .norms.modules import (
    FusedBiasDropoutAdd,
    FusedBiasDropoutAddLayerNorm,
    FusedBiasDropoutAddRMSNorm,
    FusedLayerNorm,
    FusedRMSNorm,
)
from .slices.modules import FusedBatchedLayerNormTanh

__all__ = [
    "FusedBatchedLayerNormTanh",
    "FusedBiasAct",
    "FusedBiasDropoutAdd",
    "FusedBiasDropoutAddLayerNorm",
    "FusedBiasDropoutAddRMSNorm",
    "FusedBiasGELU",
    "FusedGEGLU",
    "FusedGELU",
    "FusedGLU",
    "FusedLayerNorm",
    "FusedRMSNorm",
    "FusedSwiGLU",
    "Rowwise",
]
