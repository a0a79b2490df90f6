"""Whole models: `fuse_model` makes a model's modules call the fused operators, `unfuse_model` undoes it.

A table of rules (`rules`) says which classes are known, by their code, and what stands in for their methods. A fused
module keeps its identity and all its state; only its class is another (`classes`). See docs/models.md.
"""

from .fuse import fuse_model, unfuse_model
from .report import Difference, FusionReport, ModuleReport
from .rule import Rule

__all__ = ["Difference", "FusionReport", "ModuleReport", "Rule", "fuse_model", "unfuse_model"]
