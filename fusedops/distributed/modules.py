"""The base class of modules with several tensor arguments, for `distribute_module`'s hooks."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from torch import Tensor, nn

from ..core.compat.distributed import is_distributed

__all__ = ["TensorsBeside"]


class TensorsBeside(nn.Module):
    """A module whose forward takes other tensors after the first.

    `torch.distributed.tensor.distribute_module` registers hooks for `SequenceParallel` and similar
    styles. These hooks convert the first argument to a DTensor, and drop all other positional
    arguments. So a distributed module passes the others by keyword, and its forward converts them
    to DTensors, by `_vector` and `_rows`.

    Attributes:
        _beside: the names of the tensors after the first.
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
        """Returns a parameter, as a replicated DTensor if the hooks converted ``x`` to one."""
        if t is None or not self._needs_placement(t, x):
            return t
        from torch.distributed.tensor import Replicate

        return self._distributed(t, x, [Replicate()] * x.device_mesh.ndim)

    def _rows(self, t: Tensor | None, x: Any) -> Tensor | None:
        """Returns rows, as a DTensor placed like ``x`` if the hooks converted ``x`` to one."""
        if t is None or not self._needs_placement(t, x):
            return t
        is_partial = any(placement.is_partial() for placement in x.placements)
        if is_partial or t.shape != x.to_local().shape:
            return t  # the operator will raise an error for the mixture
        return self._distributed(t, x, x.placements, shape=x.shape, stride=x.stride())

    @staticmethod
    def _distributed(t: Tensor, x: Any, placements: Any, **sizes: Any) -> Tensor:
        """Returns the DTensor of this rank's ``t`` on the mesh of ``x``."""
        dtensor: Tensor = type(x).from_local(t, x.device_mesh, placements, run_check=False, **sizes)
        return dtensor

    def _needs_placement(self, t: Tensor, x: Any) -> bool:
        """Whether the hooks converted ``x`` to a DTensor, and ``t`` is a plain tensor."""
        if not is_distributed(self):
            return False
        # The module is imported: `distribute_module`, which has been called, is in it.
        dtensor: Any = sys.modules["torch.distributed.tensor"].DTensor
        return isinstance(x, dtensor) and not isinstance(t, dtensor)
