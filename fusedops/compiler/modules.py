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

    Keyword arguments of the constructor are arguments of the function, by name: a tensor becomes a
    parameter, a number a constant. `forward` takes the other arguments, in the function's order. An
    argument named ``training`` is set to the module's training mode if it is left out.

    Args:
        function: a function, or what `fusedops.rowwise` returns.
    Shape:
        As the function's.
    Raises:
        TypeError: it is no function; it has no argument of that name; a value is neither a tensor
            nor a number.
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
        self.function: Function[..., Any] = (
            function if isinstance(function, Function) else rowwise(function)
        )
        self._names = list(inspect.signature(self.function).parameters)
        self._constants: dict[str, Any] = {}
        self._own: tuple[str, ...] = ()
        for name, value in parameters.items():
            if name not in self._names:
                raise TypeError(
                    f"Rowwise: {self.function.name} has no argument {name}; it has "
                    f"{', '.join(self._names)}"
                )
            if isinstance(value, Tensor):
                if not isinstance(value, nn.Parameter):
                    value = nn.Parameter(value, value.is_floating_point())
                self.register_parameter(name, value)
                self._own = (*self._own, name)
            elif value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
                self._constants[name] = value
            else:
                raise TypeError(
                    f"Rowwise: {name} must be a tensor or a number, got {type(value).__name__}"
                )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with its other arguments; see the class."""
        return self.function(**self._arguments(args, kwargs))

    def _arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments of the function, by name."""
        own = {**{name: getattr(self, name) for name in self._own}, **self._constants}
        if "training" in self._names:
            own.setdefault("training", self.training)
        free = [name for name in self._names if name not in own]
        if len(args) > len(free):
            raise TypeError(
                f"{self.function.name} takes {len(free)} arguments beside its parameters, got "
                f"{len(args)}"
            )
        return own | dict(zip(free, args, strict=False)) | kwargs

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Return a description of what runs for these arguments of `forward`; `print` shows it.

        Args:
            args: as in a call.
            kwargs: as in a call.
        """
        return self.function.explain(**self._arguments(args, kwargs))

    def source(self, *args: Any, **kwargs: Any) -> str:
        """Return the Triton source of the kernels for these arguments of `forward`.

        Args:
            args: as in a call.
            kwargs: as in a call.
        Raises:
            NotRowwiseError: the function cannot be one kernel.
        """
        return self.function.source(**self._arguments(args, kwargs))

    def extra_repr(self) -> str:
        """Return the function's name, the shapes of the parameters, and the constants."""
        shapes = [f"{name}={tuple(getattr(self, name).shape)}" for name in self._own]
        constants = [f"{name}={value!r}" for name, value in self._constants.items()]
        return ", ".join([self.function.name, *shapes, *constants])
