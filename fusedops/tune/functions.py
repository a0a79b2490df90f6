"""A user's function as something to tune: ``fusedops tune --function blocks.py:gated_norm --arg 8192x4096 --arg 4096``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..compiler.function import Rowwise
from ..core.tuning_key import TuningKey
from .workloads import DTYPES, Step

__all__ = ["FunctionError", "FunctionWorkload", "workload_of"]

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
    function: Rowwise
    arguments: tuple[tuple[str, float | tuple[tuple[int, ...], torch.dtype]], ...]
    rows: int = 1
    columns: int = 1
    moved: tuple[tuple[tuple[str, ...], int], ...] = ()

    def at(self, rows: int) -> FunctionWorkload:
        """See `Tunable`: keys are found with all rows."""
        return self

    def step(self, device: torch.device) -> Step:
        """See `Tunable`."""
        return Step(self.function, {name: self._made(what, device) for name, what in self.arguments})

    def key_at(self, key: TuningKey) -> TuningKey:
        """See `Tunable`."""
        return key

    def floor_us(self, key: TuningKey, bandwidth: float) -> float:
        """See `Tunable`."""
        return dict(self.moved).get((key.kernel, *key.variant), 0) / bandwidth * 1e6

    def __str__(self) -> str:
        shown = [f"{name}={what}" if isinstance(what, float) else f"{name} {'x'.join(map(str, what[0])) or 'number'}"
                 for name, what in self.arguments]  # fmt: skip
        return f"{self.name} {' '.join(shown)}"

    def _made(self, what: float | tuple[tuple[int, ...], torch.dtype], device: torch.device) -> Any:
        if isinstance(what, float):
            return what
        shape, dtype = what
        if dtype == torch.bool:
            return torch.randn(shape, device=device) > 1.0
        if not dtype.is_floating_point:
            return torch.randint(self.columns, shape, device=device, dtype=dtype)
        return torch.randn(shape, device=device, dtype=dtype)


def workload_of(name: str, texts: Sequence[str], dtype: torch.dtype, device: torch.device) -> FunctionWorkload:
    """The function of a file or module with arguments as the command line has them.

    Raises:
        FunctionError: there is no such function, an argument is none, or the function is not one kernel.
    """
    function = _loaded(name)
    arguments = [_argument(text, dtype) for text in texts]
    names = list(inspect.signature(function.function).parameters)[: len(arguments)]
    if len(names) < len(arguments):
        raise FunctionError(f"{name} takes {len(names)} arguments, got {len(arguments)}")
    found = FunctionWorkload(name, function, tuple(zip(names, arguments, strict=True)))
    tensors = {key: found._made(what, device) for key, what in found.arguments}
    try:
        explanation = function.explain(**tensors)
    except (TypeError, RuntimeError, ValueError) as error:
        raise FunctionError(f"{name} does not take these arguments: {error}") from None
    if explanation.reason:
        raise FunctionError(f"{name} runs as it is, so that there is nothing to tune: {explanation.reason}")
    every = [t for t in tensors.values() if isinstance(t, Tensor)]
    rows = max(t.numel() for t in every) // (explanation.columns * explanation.parts)
    moved = tuple([((kernel.key.kernel, *kernel.key.variant), kernel.moved * rows) for kernel in explanation.kernels])
    return FunctionWorkload(name, function, found.arguments, rows, explanation.columns * explanation.parts, moved)


def _loaded(name: str) -> Rowwise:
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
    return found if isinstance(found, Rowwise) else Rowwise(found)


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(place)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _argument(text: str, dtype: torch.dtype) -> float | tuple[tuple[int, ...], torch.dtype]:
    if text.startswith("="):
        try:
            return float(text[1:])
        except ValueError:
            raise FunctionError(f"--arg {text}: expected a number behind =") from None
    sides, _, kind = text.lower().partition(":")
    numbers = [int(side) if side.isdecimal() else 0 for side in sides.split("x")] if sides else []
    if any(number < 1 for number in numbers) or (kind and kind not in _KINDS):
        raise FunctionError(f"--arg must be a shape and perhaps a dtype of {', '.join(_KINDS)}, such as 8192x4096:fp32, "
                            f"or a number such as =0.1; got {text!r}")  # fmt: skip
    return tuple(numbers), _KINDS[kind] if kind else dtype
