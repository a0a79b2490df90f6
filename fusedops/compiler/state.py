"""The state of what a function uses beside its tensors, read in each call.

A walk visits all that the function may read: globals and closures of it and of the functions that
it calls, arguments that are objects, and the attributes of objects, classes and modules that its
code names. It ends at values that cannot change, such as PyTorch's own functions; at numbers, which
are constants of the kernels; at tensors, which are arguments of the kernels; or at a value that may
change unseen, which is refused.

    globals, closures, objects --Walk--> source of `read` --exec--> Look
    each call: Look.read(args) --> (numbers, identical tensors, tensors), or None

The walk writes a Python function that reads the same values again. It returns the numbers and the
tensors, or None if the structure has changed; then there is another walk. That function holds
constants only: code, classes and functions of libraries.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from .errors import NotRowwiseError
from .objects import PLAIN
from .reader import Look
from .text import indented, tuple_of
from .walking import Names, Walk

__all__ = ["Looks", "call_key", "plain_state", "simple_variables"]

# The most structures of objects whose `Look` a function holds.
_MOST_LOOKS = 64


def plain_state(value: Any) -> Any:
    """Return a number or the like as a part of a key; for other values the type.

    `Looks` reads the state of these.
    """
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise TypeError("a symbol")
    if isinstance(value, float):
        return float, value.hex()  # zeros have a sign, and NaN equals itself
    return (type(value), value) if isinstance(value, PLAIN) else type(value)


@functools.cache
def call_key(count: int) -> Callable[[Any, Sequence[Any]], Any]:
    """Return the function that returns the key of a call with ``count`` arguments.

    It is flat code, as every call runs it. For one argument::

        def key(autocast, args):
            a0, = args
            return (
                autocast,
                default_dtype(),
                (type(a0), a0.dtype, a0.layout, a0.device, a0.shape)
                if isinstance(a0, Tensor) else plain_state(a0),
            )
    """
    names = [f"a{i}" for i in range(count)]
    kinds = [
        f"(type({a}), {a}.dtype, {a}.layout, {a}.device, {a}.shape)"
        f" if isinstance({a}, Tensor) else plain_state({a})"
        for a in names
    ]
    lines = [
        f"{tuple_of(names)} = args",
        f"return {tuple_of(['autocast', 'default_dtype()', *kinds])}",
    ]
    scope = {"Tensor": Tensor, "default_dtype": torch.get_default_dtype, "plain_state": plain_state}
    exec("\n".join(["def key(autocast, args):", *indented(lines)]), scope)
    return scope["key"]  # type: ignore[return-value]


class Looks:
    """The known structures of the state around a function and of its arguments that are objects.

    Args:
        function: the function.
        names: the names of its arguments.
        positions: the positions of the arguments that are objects.
    """

    def __init__(
        self, function: FunctionType, names: Sequence[str], positions: tuple[int, ...]
    ) -> None:
        self.function = function
        self.names = names
        self.positions = positions
        self._known: tuple[Look, ...] = ()  # the last walked first

    def at(self, args: Sequence[Any], first: Look | None = None) -> tuple[Look, Any, list[Tensor]]:
        """Return the `Look` that reads the state, the hashable state, and the tensors in it.

        Args:
            args: the arguments of a call.
            first: the `Look` that is tried before others; None for the last walked.
        """
        for look in self._known if first is None else (first, *self._known):
            state = look.read(args)
            if state is not None:
                numbers, identical, tensors = state
                return look, (look, numbers, identical), tensors
        return self.walked(args)

    def walked(self, args: Sequence[Any]) -> tuple[Look, Any, list[Tensor]]:
        """Return the same as `at`, after a walk through the state as it is now.

        A known `Look` does not read what was absent in its walk, such as an attribute that was set
        later. If a trace reads the attribute, there has to be a `Look` that reads it too. From then
        on that `Look` is tried first:

            cfg.flag = False                  f reads cfg.scale where cfg.flag is set
            f(x)                              the look reads cfg.flag
            cfg.flag, cfg.scale = True, 2.0
            f(x)                              the number of cfg.flag is new: a trace, and a walk
            cfg.scale = 3.0
            f(x)                              the second look reads cfg.scale
        """
        walk, reason = _walked(self.function, self.names, self.positions, args)
        look = walk.look(reason)
        look = next(filter(look.reads_as, self._known), look)
        state = look.read(args)
        if state is None:
            # The state changed between the walk and the first read, and will change again. This
            # `Look` accepts every later state, so that no call walks again: all are refused.
            look = dataclasses.replace(
                look,
                read=lambda args: ((), None, []),
                reason="what it reads is another at each look, such as an attribute that is "
                "computed; pass it",
            )
            state = (), None, []
        others = [known_look for known_look in self._known if known_look is not look]
        self._known = (look, *others[: _MOST_LOOKS - 1])
        return look, (look, *state[:2]), state[2]


def simple_variables(
    function: FunctionType,
) -> list[tuple[FunctionType, list[tuple[str, Any]]]] | None:
    """Return the outer variables, with values, of a function and of the functions that it calls.

    Returns None unless each variable is a number, or a function with only such variables.
    """
    walk, _ = _walked(function, (), (), ())
    return walk.simple if walk.is_simple else None


def _walked(
    function: FunctionType, names: Sequence[str], positions: Sequence[int], args: Sequence[Any]
) -> tuple[Walk, str]:
    """Return a complete walk, and why the function is refused, or "".

    A walk visits attributes by the names that functions read. It finds further functions and so
    further names, with which it starts again until there are no new ones.
    """
    names_read = Names()
    while True:
        walk = Walk(names_read)
        reason = ""
        try:
            walk.root(function)
            for i, argument in enumerate(args):
                if i in positions:
                    called = names_read.calls
                    walk.visit(argument, f"args[{i}]", names[i], role="its argument", called=called)
                elif isinstance(argument, Tensor):
                    walk.tensor_argument(argument, f"args[{i}]", names[i])
        except NotRowwiseError as error:
            reason = str(error)
        except RecursionError:
            reason = "what it reads is too deep; pass what is needed of it"
        except ValueError as error:
            # A computed attribute raised it. The walk is not complete, so later changes could not
            # be noticed.
            reason = f"what it reads raises an error: {error}; pass what is needed of it"
        if reason or walk.read == names_read:
            return walk, reason
        names_read = walk.read
