"""Lets a fused block fuse the residual sum and the norm under `SequenceParallel` too.

The hooks of `SequenceParallel` do only two things: they convert the norm's input from a plain
tensor to a DTensor, and its output to a plain tensor. So the block can convert the branch and the
residual itself, without the hooks, and fuse their sum and the norm.
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
    """The layout to which a norm's hooks convert its rows.

    Attributes:
        mesh: the device mesh.
        placements: the placements of the rows.
        to_local: whether the hooks convert the norm's output to a plain tensor.
    """

    mesh: Any
    placements: tuple[Any, ...]
    to_local: bool

    def take(self, *tensors: Any) -> tuple[Any, ...] | None:
        """Return the tensors as DTensors in this layout, as the norm would get them from its hooks.

        The tensors must all be DTensors in this layout, or all be plain tensors, this rank's parts.
        Otherwise the hooks would do more, and the result is None.
        """
        # The module is imported, because a norm has hooks of a parallel style.
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
    """Return the layout of a fused norm if its only hooks are `SequenceParallel`'s, else None."""
    if torch.compiler.is_compiling() or not keeps_method(type(norm), "_fusedops_add_norm"):
        return None
    if "forward" in norm.__dict__ or has_compiled_call(norm) or has_global_hooks():
        return None
    layout = rows_placed_by(norm)
    return None if layout is None else Rows(*layout)
