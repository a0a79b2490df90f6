"""Whole models: `fuse_model` makes modules call the fused operators, `unfuse_model` undoes it.

A table of rules (`rules`) lists the known classes, by their code, and the methods that replace
theirs. A fused module keeps its identity and all its state; only its class changes (`classes`). See
docs/models.md.
"""

from .fuse import fuse_model, fusion_status, unfuse_model
from .report import Difference, FusionReport, ModuleReport
from .rule import Rule

__all__ = [
    "Difference",
    "FusionReport",
    "ModuleReport",
    "Rule",
    "fuse_model",
    "fusion_status",
    "unfuse_model",
]
