"""The module face: subclasses of torch.nn modules, and torch.nn's own way of writing models."""

from .norms.modules import (
    FusedBiasDropoutAdd,
    FusedBiasDropoutAddLayerNorm,
    FusedBiasDropoutAddRMSNorm,
    FusedLayerNorm,
    FusedRMSNorm,
)

__all__ = [
    "FusedBiasDropoutAdd",
    "FusedBiasDropoutAddLayerNorm",
    "FusedBiasDropoutAddRMSNorm",
    "FusedLayerNorm",
    "FusedRMSNorm",
]
