"""Sums and norms under `SequenceParallel`: joined by the block as without it, where the hooks would only place the sum."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.compat import has_compiled_call, has_global_hooks, rows_placed_by
from .hooks import keeps_method

__all__ = ["Rows", "rows_of_norm"]


class Rows(NamedTuple):
    """Where a norm's hooks place its rows.

    Attributes:
        mesh: the mesh.
        placements: the sequence is sharded.
        to_local: whether the norm's output is a plain tensor.
    """

    mesh: Any
    placements: tuple[Any, ...]
    to_local: bool

    def take(self, *tensors: Any) -> tuple[Any, ...] | None:
        """The tensors as the norm would get them: DTensors placed so already, or plain ones, which become such; else None."""
        module = sys.modules["torch.distributed.tensor"]
        if all(isinstance(t, module.DTensor) and t.device_mesh == self.mesh and tuple(t.placements) == self.placements
               for t in tensors):  # fmt: skip
            return tensors
        if all(type(t) is Tensor for t in tensors):
            return tuple([module.DTensor.from_local(t, self.mesh, self.placements, run_check=False) for t in tensors])
        return None


def rows_of_norm(norm: nn.Module) -> Rows | None:
    """Where a fused norm's hooks place its rows, if it has `SequenceParallel`'s and no others; None otherwise."""
    if torch.compiler.is_compiling() or not keeps_method(type(norm), "_fusedops_add_norm"):
        return None
    if "forward" in norm.__dict__ or has_compiled_call(norm) or has_global_hooks():
        return None
    found = rows_placed_by(norm)
    return None if found is None else Rows(*found)
