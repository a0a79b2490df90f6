"""The module face: subclasses of torch.nn modules, and torch.nn's own way of writing models."""

from .activations.modules import FusedBiasAct, FusedBiasGELU, FusedGEGLU, FusedGELU, FusedGLU, FusedSwiGLU
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
]
