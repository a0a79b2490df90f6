"""Workloads of users' functions.

For example ``fusedops tune --function blocks.py:gated_norm --arg 8192x4096 --arg 4096``.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..compiler.function import Rowwise
from ..core.configs.tuning_key import TuningKey
from .workloads import DTYPES, Step

__all__ = ["FunctionError", "FunctionWorkload", "parsed", "planned", "sides_of"]

# A number, a bool or None, or a tensor's shape and dtype.
Argument = float | bool | None | tuple[tuple[int, ...], torch.dtype]
_KINDS = DTYPES | {"bool": torch.bool, "int32": torch.int32, "int64": torch.int64}


class FunctionError(Exception):
    """An invalid function or argument on the command line."""


@dataclass(frozen=True)
class FunctionWorkload:
    """A function with its arguments: shapes and dtypes of tensors, and numbers.

    Attributes:
        name: the function's name on the command line.
        function: the fused function.
        arguments: the arguments by name.
        rows: the number of rows.
        columns: the number of columns of a row, and the limit of random integers.
        moved: bytes that each kernel reads and writes, by its name and variant.
    """

    name: str
    function: Rowwise[..., Any]
    arguments: tuple[tuple[str, Argument], ...]
    rows: int = 1
    columns: int = 1
    moved: tuple[tuple[tuple[str, ...], int], ...] = ()

    def at(self, rows: int) -> FunctionWorkload:
        """See `Tunable`. It returns the workload itself: keys are collected with all rows.

        Only the traced function tells which dimensions of its arguments are rows.
        """
        return self

    def step(self, device: torch.device) -> Step:
        """See `Tunable`."""
        return Step(self.call, self.inputs(device))

    def call(self, **arguments: Any) -> Any:
        """Call the function with arguments by name."""
        positional, named = self.bound(arguments)
        return self.function(*positional, **named)

    def bound(self, arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and the keyword arguments of a call."""
        parameters = inspect.signature(self.function.function).parameters
        # By position if possible, because a parameter may be positional-only.
        positional, named = [], {}
        for name, value in arguments.items():
            if parameters[name].kind is inspect.Parameter.KEYWORD_ONLY:
                named[name] = value
            else:
                positional.append(value)
        return positional, named

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """Create the arguments, with random tensors."""
        return {name: self._value(argument, device) for name, argument in self.arguments}

    def key_at(self, key: TuningKey) -> TuningKey:
        """See `Tunable`."""
        return key

    def floor_us(self, key: TuningKey, bandwidth: float) -> float:
        """See `Tunable`."""
        return dict(self.moved).get((key.kernel, *key.variant), 0) / bandwidth * 1e6

    def __str__(self) -> str:
        arguments = []
        for name, argument in self.arguments:
            if isinstance(argument, tuple):
                arguments.append(f"{name} {'x'.join(map(str, argument[0]))}")
            else:
                arguments.append(f"{name}={argument}")
        return f"{self.name} {' '.join(arguments)}"

    def _value(self, argument: Argument, device: torch.device) -> Any:
        if not isinstance(argument, tuple):
            return argument
        shape, dtype = argument
        if dtype == torch.bool:
            return torch.randn(shape, device=device) > 1.0
        if not dtype.is_floating_point:
            # The function may use the integers as indices of columns, so they are valid indices.
            return torch.randint(self.columns, shape, device=device, dtype=dtype)
        return torch.randn(shape, device=device, dtype=dtype)


def parsed(name: str, texts: Sequence[str], dtype: torch.dtype) -> FunctionWorkload:
    """Return the function of a file or module with arguments in the command line's format.

    Raises:
        FunctionError: there is no such function, or an argument is invalid.
    """
    function = _loaded(name)
    arguments = [_argument(text, dtype) for text in texts]
    names = list(inspect.signature(function.function).parameters)[: len(arguments)]
    if len(names) < len(arguments):
        raise FunctionError(f"{name} takes {len(names)} arguments, got {len(arguments)}")
    if not any(isinstance(argument, tuple) for argument in arguments):
        raise FunctionError(f"--function needs the shapes of {name}'s tensors, each by --arg")
    return FunctionWorkload(name, function, tuple(zip(names, arguments, strict=True)))


def planned(workload: FunctionWorkload, device: torch.device) -> FunctionWorkload:
    """Return the workload with the sizes of its kernels.

    Raises:
        FunctionError: the function is not one kernel.
    """
    name = workload.name
    try:
        positional, named = workload.bound(workload.inputs(device))
        explanation = workload.function.explain(*positional, **named)
    except Exception as error:  # noqa: BLE001 - the user's function may raise anything
        raise FunctionError(
            f"{name} does not take these arguments: {type(error).__name__}: {error}"
        ) from None
    if explanation.reason:
        raise FunctionError(
            f"{name} is not fused, so that there is nothing to tune: {explanation.reason}"
        )
    columns = explanation.columns * explanation.parts
    moved = []
    for kernel in explanation.kernels:
        name_and_variant = (kernel.key.kernel, *kernel.key.variant)
        moved.append((name_and_variant, kernel.moved * explanation.rows))
    return replace(workload, rows=explanation.rows, columns=columns, moved=tuple(moved))


def _loaded(name: str) -> Rowwise[..., Any]:
    """Import the function that ``--function`` names, and fuse it if it is not a `Rowwise`."""
    source, _, attribute = name.rpartition(":")
    if not source or not attribute:
        raise FunctionError(
            f"--function must be FILE:NAME, such as blocks.py:gated_norm, got {name!r}"
        )
    try:
        module = _module(source)
    except (ImportError, OSError, SyntaxError) as error:
        raise FunctionError(f"cannot import {source}: {error}") from None
    function = getattr(module, attribute, None)
    if function is None:
        raise FunctionError(f"{source} has no {attribute}")
    # A decorated function keeps the options of its decorator.
    if isinstance(function, Rowwise):
        return function
    if not inspect.isfunction(function):
        raise FunctionError(f"{name} is no function but a {type(function).__name__}")
    try:
        return Rowwise(function)
    except TypeError as error:
        raise FunctionError(str(error)) from None


def _module(source: str) -> Any:
    """Import a module by name, or from a file, as a part of the packages that the file is in."""
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source).resolve()
    packages = list(
        itertools.takewhile(lambda folder: (folder / "__init__.py").exists(), path.parents)
    )
    if packages:
        # The file is imported as a part of its package, so that relative imports work.
        sys.path.insert(0, str(packages[-1].parent))
        names = [folder.name for folder in reversed(packages)]
        return importlib.import_module(".".join([*names, path.stem]))
    # The prefix keeps the file from replacing a module of the same name.
    name = f"fusedops_tuned_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(source)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _argument(text: str, dtype: torch.dtype) -> Argument:
    """Return an ``--arg``: the number after ``=``, or a shape and a dtype, by default ``dtype``."""
    if text.startswith("="):
        with contextlib.suppress(ValueError, SyntaxError):
            # Literals only: a command line must not run code.
            value = ast.literal_eval(text[1:])
            if value is None or isinstance(value, (bool, int, float)):
                return value
        raise FunctionError(f"--arg {text}: expected a number, True, False or None behind =")
    sides, _, kind = text.lower().partition(":")
    shape, kinds = sides_of(sides), {**_KINDS, "": dtype}
    if min(shape) < 1 or kind not in kinds:
        raise FunctionError(
            f"--arg must be a shape and perhaps a dtype of {', '.join(_KINDS)}, such as "
            f"8192x4096:fp32, or a number such as =0.1; got {text!r}"
        )
    return shape, kinds[kind]


def sides_of(text: str) -> tuple[int, ...]:
    """Return the sides of a shape such as ``8192x4096``; a side that is no number is 0."""
    # The documentation writes shapes with a multiplication sign.
    sides = text.lower().replace("×", "x").split("x")  # noqa: RUF001
    return tuple([int(side) if side.isdecimal() else 0 for side in sides])
