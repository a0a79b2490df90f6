"""The base class of modules with several tensor arguments, for `distribute_module`'s hooks."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from torch import Tensor, nn

from ..core.compat.distributed import is_distributed

__all__ = ["TensorsBeside"]


class TensorsBeside(nn.Module):
    """A module whose forward takes further tensors after the first.

    The hooks that `torch.distributed.tensor.distribute_module` installs for `SequenceParallel` and
    similar styles make the first argument a DTensor and drop all other positional arguments. So a
    distributed module passes the others by keyword, and its forward makes them DTensors with the
    first one's placements.
    """

    _beside: ClassVar[tuple[str, ...]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, as `torch.nn.Module` does."""
        if not is_distributed(self):
            return super().__call__(*args, **kwargs)
        first, others = args[:1], args[1:]
        if len(others) > len(self._beside):
            raise TypeError(
                f"{type(self).__name__} takes at most {1 + len(self._beside)} tensors, "
                f"got {len(args)}"
            )
        named = dict(zip(self._beside, others, strict=False))
        # Python raises a TypeError for a name that is in both.
        return super().__call__(*first, **named, **kwargs)

    def _vector(self, t: Tensor | None, x: Any) -> Tensor | None:
        """Returns a tensor without rows, replicated if the hooks turned ``x`` into a DTensor."""
        if t is None or not self._needs_placement(t, x):
            return t
        from torch.distributed.tensor import Replicate

        return self._distributed(t, x, [Replicate()] * x.device_mesh.ndim)

    def _rows(self, t: Tensor | None, x: Any) -> Tensor | None:
        """Returns this rank's rows, with the placements of ``x`` if that is a DTensor now."""
        if t is None or not self._needs_placement(t, x):
            return t
        is_partial = any(placement.is_partial() for placement in x.placements)
        if is_partial or t.shape != x.to_local().shape:
            return t  # DTensor refuses the call
        return self._distributed(t, x, x.placements, shape=x.shape, stride=x.stride())

    @staticmethod
    def _distributed(t: Tensor, x: Any, placements: Any, **sizes: Any) -> Tensor:
        """Returns the DTensor of this rank's ``t`` on the mesh of ``x``."""
        dtensor: Tensor = type(x).from_local(t, x.device_mesh, placements, run_check=False, **sizes)
        return dtensor

    def _needs_placement(self, t: Tensor, x: Any) -> bool:
        """Whether the hooks turned ``x`` into a DTensor, and left ``t`` a plain tensor."""
        if not is_distributed(self):
            return False
        # `distribute_module`, which set the mark, is in the same module.
        dtensor: Any = sys.modules["torch.distributed.tensor"].DTensor
        return isinstance(x, dtensor) and not isinstance(t, dtensor)
