"""A tensor subclass that wraps a tensor and logs its operators, like PyTorch's LoggingTensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

__all__ = ["Wrapper", "wrapped"]


class Wrapper(Tensor):
    """Wraps the tensor ``held``, and has no storage itself. ``log`` has the names of operators."""

    held: Tensor
    log: list[str] = []  # noqa: RUF012 - one log of all wrappers

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapper:
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=held.device,
            requires_grad=held.requires_grad,
        )
        wrapper.held = held.detach()
        return wrapper

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Wrapper({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.log.append(str(func))
        args, kwargs = tree_map_only(Wrapper, lambda t: t.held, (args, kwargs or {}))
        return tree_map_only(Tensor, Wrapper, func(*args, **kwargs))


def wrapped(tensors: Sequence[Tensor]) -> tuple[Wrapper, ...]:
    return tuple(map(Wrapper, tensors))
