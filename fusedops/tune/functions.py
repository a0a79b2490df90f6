"""A user's function as something to tune: ``fusedops tune --function blocks.py:gated_norm --arg 8192x4096 --arg 4096``."""

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
from ..core.tuning_key import TuningKey
from .workloads import DTYPES, Step

__all__ = ["FunctionError", "FunctionWorkload", "parsed", "planned"]

# A number, a truth value or None, or a tensor's shape and dtype.
Argument = float | bool | None | tuple[tuple[int, ...], torch.dtype]
_KINDS = DTYPES | {"bool": torch.bool, "int32": torch.int32, "int64": torch.int64}


class FunctionError(Exception):
    """A function or argument on the command line that is none."""


@dataclass(frozen=True)
class FunctionWorkload:
    """A function with its arguments: shapes and dtypes of tensors, and numbers.

    Attributes:
        name: as it was asked for.
        function: of tensors and numbers.
        arguments: by name.
        rows: of the call.
        columns: of a row: whole numbers are drawn from as many.
        moved: bytes that each kernel reads and writes, by what its key says but for the rows.
    """

    name: str
    function: Rowwise[..., Any]
    arguments: tuple[tuple[str, Argument], ...]
    rows: int = 1
    columns: int = 1
    moved: tuple[tuple[tuple[str, ...], int], ...] = ()

    def at(self, rows: int) -> FunctionWorkload:
        """See `Tunable`: keys are found with all rows."""
        return self

    def step(self, device: torch.device) -> Step:
        """See `Tunable`."""
        return Step(self.call, self.made(device))

    def call(self, **arguments: Any) -> Any:
        """The function, with its arguments by name."""
        placed, named = self.placed(arguments)
        return self.function(*placed, **named)

    def placed(self, arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments as the function takes them, by place and by name."""
        parameters = inspect.signature(self.function.function).parameters
        alone = {name for name in arguments if parameters[name].kind is inspect.Parameter.KEYWORD_ONLY}
        placed = [value for name, value in arguments.items() if name not in alone]
        return placed, {name: arguments[name] for name in alone}

    def made(self, device: torch.device) -> dict[str, Any]:
        """The arguments, with random tensors."""
        return {name: self._made(what, device) for name, what in self.arguments}

    def key_at(self, key: TuningKey) -> TuningKey:
        """See `Tunable`."""
        return key

    def floor_us(self, key: TuningKey, bandwidth: float) -> float:
        """See `Tunable`."""
        return dict(self.moved).get((key.kernel, *key.variant), 0) / bandwidth * 1e6

    def __str__(self) -> str:
        shown = [f"{name} {'x'.join(map(str, what[0]))}" if isinstance(what, tuple) else f"{name}={what}"
                 for name, what in self.arguments]  # fmt: skip
        return f"{self.name} {' '.join(shown)}"

    def _made(self, what: Argument, device: torch.device) -> Any:
        if not isinstance(what, tuple):
            return what
        shape, dtype = what
        if dtype == torch.bool:
            return torch.randn(shape, device=device) > 1.0
        if not dtype.is_floating_point:
            return torch.randint(self.columns, shape, device=device, dtype=dtype)
        return torch.randn(shape, device=device, dtype=dtype)


def parsed(name: str, texts: Sequence[str], dtype: torch.dtype) -> FunctionWorkload:
    """The function of a file or module with arguments as the command line has them.

    Raises:
        FunctionError: there is no such function, or an argument is none.
    """
    function = _loaded(name)
    arguments = [_argument(text, dtype) for text in texts]
    names = list(inspect.signature(function.function).parameters)[: len(arguments)]
    if len(names) < len(arguments):
        raise FunctionError(f"{name} takes {len(names)} arguments, got {len(arguments)}")
    if not any(isinstance(what, tuple) for what in arguments):
        raise FunctionError(f"--function needs the shapes of {name}'s tensors, each by --arg")
    return FunctionWorkload(name, function, tuple(zip(names, arguments, strict=True)))


def planned(workload: FunctionWorkload, device: torch.device) -> FunctionWorkload:
    """With what is known of the kernels.

    Raises:
        FunctionError: the function is not one kernel.
    """
    name = workload.name
    try:
        tensors = workload.made(device)
        placed, named = workload.placed(tensors)
        explanation = workload.function.explain(*placed, **named)
    except Exception as error:  # noqa: BLE001 - the user's own, of his function
        raise FunctionError(f"{name} does not take these arguments: {type(error).__name__}: {error}") from None
    if explanation.reason:
        raise FunctionError(f"{name} is not fused, so that there is nothing to tune: {explanation.reason}")
    columns = explanation.columns * explanation.parts
    moved = tuple([((kernel.key.kernel, *kernel.key.variant), kernel.moved * explanation.rows)
                   for kernel in explanation.kernels])  # fmt: skip
    return replace(workload, rows=explanation.rows, columns=columns, moved=moved)


def _loaded(name: str) -> Rowwise[..., Any]:
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise FunctionError(f"--function must be FILE:NAME, such as blocks.py:gated_norm, got {name!r}")
    try:
        module = _module(place)
    except (ImportError, OSError, SyntaxError) as error:
        raise FunctionError(f"cannot import {place}: {error}") from None
    found = getattr(module, attribute, None)
    if found is None:
        raise FunctionError(f"{place} has no {attribute}")
    if isinstance(found, Rowwise):
        return found
    if not inspect.isfunction(found):
        raise FunctionError(f"{name} is no function but a {type(found).__name__}")
    try:
        return Rowwise(found)
    except TypeError as error:
        raise FunctionError(str(error)) from None


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).resolve()
    packages = list(itertools.takewhile(lambda folder: (folder / "__init__.py").exists(), path.parents))
    if packages:
        sys.path.insert(0, str(packages[-1].parent))
        return importlib.import_module(".".join([*[folder.name for folder in reversed(packages)], path.stem]))
    name = f"fusedops_tuned_{path.stem}"  # no module's that the program has
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(place)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _argument(text: str, dtype: torch.dtype) -> Argument:
    if text.startswith("="):
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(text[1:])
            if value is None or isinstance(value, (bool, int, float)):
                return value
        raise FunctionError(f"--arg {text}: expected a number, True, False or None behind =")
    sides, _, kind = text.lower().replace("×", "x").partition(":")  # noqa: RUF001 - as for --shape
    numbers = [int(side) if side.isdecimal() else 0 for side in sides.split("x")]
    if min(numbers) < 1 or (kind and kind not in _KINDS):
        raise FunctionError(f"--arg must be a shape and perhaps a dtype of {', '.join(_KINDS)}, such as 8192x4096:fp32, "
                            f"or a number such as =0.1; got {text!r}")  # fmt: skip
    return tuple(numbers), _KINDS[kind] if kind else dtype
