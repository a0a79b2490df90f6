"""The fused operators as modules, most of them subclasses of `torch.nn`'s modules."""

from .activations.modules import (
    FusedBiasAct,
    FusedBiasGELU,
    FusedGatedAct,
    FusedGEGLU,
    FusedGELU,
    FusedSwiGLU,
)
from .compiler.modules import Rowwise
from .losses.modules import FusedLinearCrossEntropy
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
    "FusedGatedAct",
    "FusedLayerNorm",
    "FusedLinearCrossEntropy",
    "FusedRMSNorm",
    "FusedSwiGLU",
    "Rowwise",
]
