"""The module face: subclasses of torch.nn modules, and torch.nn's own way of writing models."""

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
    "FusedBiasDropoutAdd",
    "FusedBiasDropoutAddLayerNorm",
    "FusedBiasDropoutAddRMSNorm",
    "FusedLayerNorm",
    "FusedRMSNorm",
]
