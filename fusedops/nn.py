"""The public modules: the fused operators as `torch.nn.Module`, most of them subclasses of those of torch.nn."""

from .activations.modules import (
    FusedBiasAct,
    FusedBiasGELU,
    FusedGatedAct,
    FusedGEGLU,
    FusedGELU,
    FusedGLU,
    FusedSwiGLU,
)
from .compiler.modules import Rowwise
from .norms.modules import (
    FusedAddLayerNorm,
    FusedAddRMSNorm,
    FusedBiasDropoutAdd,
    FusedBiasDropoutAddLayerNorm,
    FusedBiasDropoutAddRMSNorm,
    FusedLayerNorm,
    FusedRMSNorm,
)
from .slices.modules import FusedBatchedLayerNormAct, FusedBatchedLayerNormTanh

__all__ = [
    "FusedAddLayerNorm",
    "FusedAddRMSNorm",
    "FusedBatchedLayerNormAct",
    "FusedBatchedLayerNormTanh",
    "FusedBiasAct",
    "FusedBiasDropoutAdd",
    "FusedBiasDropoutAddLayerNorm",
    "FusedBiasDropoutAddRMSNorm",
    "FusedBiasGELU",
    "FusedGEGLU",
    "FusedGELU",
    "FusedGLU",
    "FusedGatedAct",
    "FusedLayerNorm",
    "FusedRMSNorm",
    "FusedSwiGLU",
    "Rowwise",
]
