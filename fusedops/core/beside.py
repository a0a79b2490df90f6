"""Modules that take tensors beside the first, under the hooks of `torch.distributed.tensor.distribute_module`."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from torch import Tensor, nn

from . import compat

__all__ = ["TensorsBeside"]


class TensorsBeside(nn.Module):
    """A module whose forward takes further tensors after the first.

    The hooks of `SequenceParallel` and its like place the first argument and drop all others that have no name. So the
    others go by name there, and the forward places them as the first is.
    """

    _beside: ClassVar[tuple[str, ...]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `torch.nn.Module`."""
        if compat.is_distributed(self):
            args, others = args[:1], args[1:]
            kwargs |= zip(self._beside[: len(others)], others, strict=True)
        return super().__call__(*args, **kwargs)

    def _vector(self, t: Tensor | None, x: Any) -> Tensor | None:
        """A tensor without rows, which all ranks have: a DTensor, if those hooks made ``x`` one."""
        if t is None or not self._places(t, x):
            return t
        from torch.distributed.tensor import Replicate

        return self._placed(t, x, [Replicate()] * x.device_mesh.ndim)

    def _rows(self, t: Tensor | None, x: Any) -> Tensor | None:
        """This rank's rows: a DTensor placed as ``x``, if those hooks made that one."""
        if t is None or not self._places(t, x):
            return t
        if t.shape != x.to_local().shape or any(placement.is_partial() for placement in x.placements):
            return t  # which DTensor refuses
        return self._placed(t, x, x.placements, shape=x.shape, stride=x.stride())

    @staticmethod
    def _placed(t: Tensor, x: Any, placements: Any, **sizes: Any) -> Tensor:
        placed: Tensor = type(x).from_local(t, x.device_mesh, placements, run_check=False, **sizes)
        return placed

    def _places(self, t: Tensor, x: Any) -> bool:
        if not compat.is_distributed(self):
            return False
        kind: Any = sys.modules["torch.distributed.tensor"].DTensor
        return isinstance(x, kind) and not isinstance(t, kind)
