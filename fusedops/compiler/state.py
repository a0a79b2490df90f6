"""The state of what a function uses beside its tensors, looked at in each call.

A walk goes through all that the function may read: variables around it and around the functions that it calls, arguments
that are objects, and of objects, classes and modules the attributes that its code names. It ends in what cannot change,
such as PyTorch's own functions; in numbers, which are constants of the kernels; in tensors, which are arguments of the
kernels; or in something that may change unseen, which is refused. The walk writes a function of Python that takes the same
way again: it returns the numbers and tensors, or None where something else is now there, and then there is another walk.
Nothing on the way is held but constants: code, classes and functions of libraries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from .errors import NotRowwiseError
from .looking import Look
from .surroundings import PLAIN
from .walking import Names, Walk

__all__ = ["Looks", "plain_state", "simple_variables"]

# Structures of objects that a function is traced for at a time.
_MOST_LOOKS = 64


def plain_state(value: Any) -> Any:
    """A number or the like as a part of a key; of another value its type, as `Looks` sees what it has."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise TypeError("a symbol")
    if isinstance(value, float):
        return float, value.hex()  # zeros have a sign, and NaN equals itself
    return (type(value), value) if isinstance(value, PLAIN) else type(value)


class Looks:
    """The state around a function, and of its arguments that are objects.

    Args:
        function: the function.
        names: of its arguments.
        places: the arguments that are objects.
    """

    def __init__(self, function: FunctionType, names: Sequence[str], places: tuple[int, ...]) -> None:
        self.function, self.names, self.places = function, names, places
        self._known: tuple[Look, ...] = ()

    def at(self, args: Sequence[Any]) -> tuple[Look, Any, list[Tensor]]:
        """How the state was looked at, its hashable form, and the tensors in it."""
        known = self._known
        for place, look in enumerate(known):
            found = look.read(args)
            if found is not None:
                if place:
                    self._known = (look, *known[:place], *known[place + 1 :])
                return look, (look, *found[:2]), found[2]
        walk, reason = _walked(self.function, self.names, self.places, args)
        look = walk.look(reason)
        found = look.read(args)
        if found is None:
            look = dataclasses.replace(
                look, read=lambda args: ((), None, []),
                reason="what it reads is another at each look, such as an attribute that is computed; pass it",
            )  # fmt: skip
            found = (), None, []
        self._known = (look, *known[: _MOST_LOOKS - 1])
        return look, (look, *found[:2]), found[2]


def simple_variables(function: FunctionType) -> list[tuple[FunctionType, list[tuple[str, Any]]]] | None:
    """Of a function and those that it calls, the variables around each, and their values.

    None where there is more than numbers, and functions that have nothing but such variables.
    """
    walk, _ = _walked(function, (), (), ())
    return walk.simple if walk.is_simple else None


def _walked(
    function: FunctionType, names: Sequence[str], places: Sequence[int], args: Sequence[Any]
) -> tuple[Walk, str]:
    """A walk, and why the function is refused; repeated until the names of all attributes that functions on it read are known."""
    known = Names()
    while True:
        walk, reason = Walk(known), ""
        try:
            walk.root(function)
            for place in places:
                walk.visit(args[place], f"args[{place}]", names[place], of="its argument", called=False)
        except NotRowwiseError as error:
            reason = str(error)
        except RecursionError:
            reason = "what it reads is too deep; pass what is needed of it"
        if reason or walk.read == known:
            return walk, reason
        known = walk.read
