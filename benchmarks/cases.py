"""The cases to time: operators, shapes and dtypes, from the specs of every family."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

import fusedops
from fusedops.core.spec import Shape, Spec

from .results import elements

__all__ = ["DTYPES", "MODES", "Case", "cases", "discover", "dtype_name"]

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
MODES = ("fwd", "fwd_bwd")


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in results files."""
    return next(name for name, known in DTYPES.items() if known == dtype)


@dataclass(frozen=True)
class Case:
    """One operator at one shape and dtype.

    Both modes and all providers are timed on the same inputs.
    """

    spec: Spec
    sides: Shape
    dtype: torch.dtype

    @property
    def op(self) -> str:
        """The operator's name."""
        return self.spec.name

    @property
    def shape(self) -> str:
        """The name of the shape in results files."""
        return "x".join(map(str, self.sides))

    @property
    def dtype_name(self) -> str:
        """The name of the dtype in results files."""
        return dtype_name(self.dtype)

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes to time."""
        return MODES[:1] if self.spec.exact else MODES

    @property
    def elements(self) -> int:
        """The number of elements of the shape."""
        return elements(self.shape)

    @property
    def launch_bound(self) -> bool:
        """Whether the tensors are so small that the host's time determines the time of a call."""
        return self.elements <= 1 << 16

    def __str__(self) -> str:
        return f"{self.op} {self.shape} {self.dtype_name}"


def discover() -> tuple[Spec, ...]:
    """Returns the specs of all families, new ones included."""
    specs: list[Spec] = []
    for module in pkgutil.iter_modules(fusedops.__path__):
        name = f"fusedops.{module.name}.spec"
        if module.ispkg and importlib.util.find_spec(name) is not None:
            specs += getattr(importlib.import_module(name), "SPECS", ())
    return tuple(specs)


def cases(
    specs: Iterable[Spec],
    ops: Iterable[str] | None = None,
    shapes: Iterable[str] | None = None,
    dtypes: Iterable[str] | None = None,
) -> Iterator[Case]:
    """Yields the specs' cases with the named operators, shapes and dtypes; None means all."""
    named_ops, named_shapes, named_dtypes = (
        None if names is None else set(names) for names in (ops, shapes, dtypes)
    )
    for spec in specs:
        for sides, dtype in spec.shapes:
            case = Case(spec, sides, dtype)
            if named_ops is not None and case.op not in named_ops:
                continue
            if named_shapes is not None and case.shape not in named_shapes:
                continue
            if named_dtypes is not None and case.dtype_name not in named_dtypes:
                continue
            yield case
