"""Sums and norms under `SequenceParallel`, which a block fuses as it does without it.

The hooks of `SequenceParallel` only convert the norm's input and output, from and to plain tensors.
So the block may convert the branch and the residual instead of their sum, and skip the hooks.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.compat.distributed import rows_placed_by
from ..core.compat.modules import has_compiled_call, has_global_hooks
from ..models.hooks import keeps_method

__all__ = ["Rows", "rows_of_norm"]


class Rows(NamedTuple):
    """The layout that a norm's hooks give its rows.

    Attributes:
        mesh: the device mesh.
        placements: those of a sharded sequence.
        to_local: whether the norm's output is a plain tensor.
    """

    mesh: Any
    placements: tuple[Any, ...]
    to_local: bool

    def take(self, *tensors: Any) -> tuple[Any, ...] | None:
        """Return the tensors as the norm would get them, or None if the hooks would do more.

        DTensors must have this layout already; plain tensors are local parts of it.
        """
        # Imported already if a norm has such hooks.
        dtensor = sys.modules["torch.distributed.tensor"].DTensor
        if all(isinstance(t, dtensor) and self._is_layout_of(t) for t in tensors):
            return tensors
        if not all(type(t) is Tensor for t in tensors):
            return None
        return tuple(
            [dtensor.from_local(t, self.mesh, self.placements, run_check=False) for t in tensors]
        )

    def _is_layout_of(self, t: Any) -> bool:
        return bool(t.device_mesh == self.mesh) and tuple(t.placements) == self.placements


def rows_of_norm(norm: nn.Module) -> Rows | None:
    """Return the layout of a fused norm whose only hooks are `SequenceParallel`'s; else None."""
    if torch.compiler.is_compiling() or not keeps_method(type(norm), "_fusedops_add_norm"):
        return None
    if "forward" in norm.__dict__ or has_compiled_call(norm) or has_global_hooks():
        return None
    layout = rows_placed_by(norm)
    return None if layout is None else Rows(*layout)
