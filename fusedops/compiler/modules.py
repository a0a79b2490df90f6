"""The module form of `rowwise`: a function with its own parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .explanation import Explanation
from .function import Rowwise as Function
from .function import rowwise

__all__ = ["Rowwise"]


class Rowwise(nn.Module):
    """A row-wise function with some of its arguments as parameters.

    Keyword arguments of the constructor are arguments of the function, by name: a tensor becomes a parameter, a number a
    constant. `forward` takes the other arguments, in the function's order. An argument named ``training`` is set to the
    module's training mode if it is not given.

    Args:
        function: a function, or what `fusedops.rowwise` returns.
    Shape:
        As the function's.
    Raises:
        TypeError: it is no function; it has no argument of that name; a value is neither a tensor nor a number.
        NotRowwiseError: the function is ``strict`` and cannot be one kernel.
    Numerics: computed in fp32, in fp64 with fp64 tensors.
    Source: `fusedops.rowwise`.

    Example::

        norm = fusedops.nn.Rowwise(gated_residual_norm, gamma=torch.ones(64), weight=torch.ones(64))
        y, z = norm(x, residual)
    """

    def __init__(self, function: Callable[..., Any], **parameters: Any) -> None:
        super().__init__()
        if not callable(function):
            raise TypeError(f"Rowwise: function must be a function, got {type(function).__name__}")
        self.function: Function[..., Any] = function if isinstance(function, Function) else rowwise(function)
        names = list(inspect.signature(self.function).parameters)
        self._names = names
        self._constants: dict[str, Any] = {}
        self._own: tuple[str, ...] = ()
        for name, value in parameters.items():
            if name not in names:
                raise TypeError(f"Rowwise: {self.function.name} has no argument {name}; it has {', '.join(names)}")
            if isinstance(value, Tensor):
                given = value if isinstance(value, nn.Parameter) else nn.Parameter(value, value.is_floating_point())
                self.register_parameter(name, given)
                self._own = (*self._own, name)
            elif value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
                self._constants[name] = value
            else:
                raise TypeError(f"Rowwise: {name} must be a tensor or a number, got {type(value).__name__}")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with its other arguments; see the class."""
        return self.function(**self._given(args, kwargs))

    def _given(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments of the function, by name."""
        given = {**{name: getattr(self, name) for name in self._own}, **self._constants}
        if "training" in self._names:
            given.setdefault("training", self.training)
        free = [name for name in self._names if name not in given]
        if len(args) > len(free):
            raise TypeError(f"{self.function.name} takes {len(free)} arguments beside its parameters, got {len(args)}")
        return given | dict(zip(free, args, strict=False)) | kwargs

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """What runs for these arguments of `forward`: print it. See `fusedops.rowwise`.

        Args:
            args: as in a call.
            kwargs: as in a call.
        """
        return self.function.explain(**self._given(args, kwargs))

    def source(self, *args: Any, **kwargs: Any) -> str:
        """The Triton source of the kernels for these arguments of `forward`.

        Args:
            args: as in a call.
            kwargs: as in a call.
        Raises:
            NotRowwiseError: the function cannot be one kernel.
        """
        return self.function.source(**self._given(args, kwargs))

    def extra_repr(self) -> str:
        """The function and its constants."""
        shapes = [f"{name}={tuple(getattr(self, name).shape)}" for name in self._own]
        return ", ".join(
            [self.function.name, *shapes, *[f"{name}={value!r}" for name, value in self._constants.items()]]
        )
