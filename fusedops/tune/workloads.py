"""The tuner's workloads: an operator at a shape, which has tuning keys and is timed under configs."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

import fusedops

from ..core import launch, tuning
from ..core.operator import Operator
from ..core.spec import Shape, Spec
from ..core.tuning_key import BUCKETS, Grid, TuningKey

__all__ = [
    "DTYPES",
    "Step",
    "Tunable",
    "Workload",
    "discover",
    "grid",
    "kernels_alone",
    "keys_of",
    "operators",
    "runs_natively",
    "workload_for",
]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
# The number of rows that represents a bucket, and the limit of a tensor's elements, which reduces the rows of wide ones.
_ROWS = (4, 64, 1024, 8192, 262144)
_MOST_ELEMENTS = 1 << 28
# Operators with more elements never use PyTorch's own.
_SMALL = 1 << 16


@cache
def _families() -> tuple[ModuleType, ...]:
    """The spec modules of all families, found by name, so that a new family is included."""
    names = [f"fusedops.{module.name}.spec" for module in pkgutil.iter_modules(fusedops.__path__) if module.ispkg]
    found = [importlib.import_module(name) for name in names if importlib.util.find_spec(name) is not None]
    return tuple(module for module in found if hasattr(module, "SPECS"))


def _tunable() -> tuple[ModuleType, ...]:
    """The families with a grid of shapes to tune."""
    return tuple(family for family in _families() if hasattr(family, "GRID"))


def operators() -> list[str]:
    """The functionals of all families."""
    return sorted({spec.functional or spec.name for family in _families() for spec in family.SPECS})


def discover() -> tuple[Spec, ...]:
    """The operators that can be tuned."""
    return tuple(spec for family in _tunable() for spec in family.SPECS)


@dataclass(frozen=True)
class Workload:
    """One operator at one shape, with its benchmark's arguments except for those given here.

    Attributes:
        spec: the operator.
        shape: rows, and the rest of the shape.
        dtype: the tensors' dtype.
        options: options that replace the benchmark's.
        absent: names of tensors that are None.
        recast: tensors with another dtype.
    """

    spec: Spec
    shape: Shape
    dtype: torch.dtype
    options: tuple[tuple[str, Any], ...] = ()
    absent: tuple[str, ...] = ()
    recast: tuple[tuple[str, torch.dtype], ...] = ()

    @property
    def rows(self) -> int:
        """The shape's first dimension."""
        return int(self.shape[0])

    def at(self, rows: int) -> Workload:
        """The same workload with another number of rows."""
        return replace(self, shape=(rows, *self.shape[1:]))

    def step(self, device: torch.device) -> Step:
        """See `Tunable`."""
        sample, recast = self.spec.benchmark(self.shape, self.dtype, device), dict(self.recast)
        tensors = {name: t if t is None or name not in recast else t.to(recast[name])
                   for name, t in sample.tensors.items()}  # fmt: skip
        tensors |= dict.fromkeys(self.absent)
        return Step(self.spec.call, {**tensors, **sample.options, **dict(self.options)})

    def key_at(self, key: TuningKey) -> TuningKey:
        """See `Tunable`."""
        rows = self.rows
        if key.is_vector:
            rows = rows * elements_per_row(self.spec, self.shape[1:]) // key.cols
        return replace(key, bucket=tuning.BUCKET[rows.bit_length()])

    def floor_us(self, key: TuningKey, bandwidth: float) -> float:
        """See `Tunable`."""
        passes = self.spec.passes
        count = passes["fwd_bwd"] - passes["fwd"] if "backward" in key.kernel else passes["fwd"]
        elements = self.rows * elements_per_row(self.spec, self.shape[1:])
        return math.ceil(count * elements * self.dtype.itemsize) / bandwidth * 1e6

    def __str__(self) -> str:
        dtype = next(name for name, known in DTYPES.items() if known == self.dtype)
        extras = [f"{name}={value}" for name, value in self.options]
        extras += [f"no {name}" for name in self.absent]
        extras += [f"{name} {str(other).removeprefix('torch.')}" for name, other in self.recast]
        return " ".join((self.spec.name, "x".join(map(str, self.shape)), dtype, *extras))


class Tunable(Protocol):
    """A call at one size, whose kernels can be tuned: an operator's, or a user's function's."""

    @property
    def rows(self) -> int:
        """Of the call."""

    def at(self, rows: int) -> Tunable:
        """The same with another number of rows, if its keys are found with fewer."""

    def step(self, device: torch.device) -> Step:
        """The call on random inputs."""

    def key_at(self, key: TuningKey) -> TuningKey:
        """A key that was found with fewer rows, at this size."""

    def floor_us(self, key: TuningKey, bandwidth: float) -> float:
        """The roofline in microseconds: the bytes that must be read and written over the bandwidth."""


class Step:
    """A call on one set of random inputs: training forward, inference forward, and backward.

    Args:
        call: the function.
        arguments: of it, by name.
    """

    def __init__(self, call: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self._call, self._arguments = call, arguments
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        self._leaves = [tensor.requires_grad_() for tensor in tensors if tensor.is_floating_point()]
        self._cotangents: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """The inputs' size in bytes."""
        return sum(leaf.nbytes for leaf in self._leaves)

    def forward(self) -> tuple[Tensor, ...]:
        """The outputs of a training forward."""
        outputs = self._call(**self._arguments)
        return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)

    @torch.no_grad()
    def infer(self) -> tuple[Tensor, ...]:
        """The outputs of an inference forward, which saves nothing for backward."""
        return self.forward()

    def backward(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The gradients of all inputs that have one, for random output gradients, which are made once.

        It may be called repeatedly.
        """
        outputs = tuple([out for out in outputs if out.requires_grad])
        if not outputs:
            return ()
        if not self._cotangents:
            self._cotangents = [torch.randn_like(out) for out in outputs]
        found = torch.autograd.grad(outputs, self._leaves, self._cotangents, retain_graph=True, allow_unused=True)
        return tuple([gradient for gradient in found if gradient is not None])

    def __call__(self) -> None:
        """Runs all three."""
        self.infer()
        self.backward(self.forward())


@contextmanager
def kernels_alone() -> Iterator[None]:
    """Context manager: small calls run the kernels too, instead of PyTorch's own operators."""
    before = Operator.native_elements
    Operator.native_elements = 0
    try:
        yield
    finally:
        Operator.native_elements = before


def keys_of(workload: Tunable, device: torch.device) -> list[TuningKey]:
    """The keys of a forward and a backward, in order; compiles nothing and allocates few rows."""
    with kernels_alone(), tuning.collected_keys() as seen, launch.collecting():
        workload.at(4).step(device)()
    tuning.forget()
    return [workload.key_at(key) for key in seen]


def runs_natively(workload: Workload, device: torch.device) -> bool:
    """Whether the operator uses PyTorch's own at this size, so that there is nothing to tune."""
    if workload.rows * elements_per_row(workload.spec, workload.shape[1:]) > _SMALL:
        return False
    with tuning.collected_keys() as seen, launch.collecting():
        workload.step(device)()
    tuning.forget()
    return not seen


def elements_per_row(spec: Spec, tail: Shape) -> int:
    """The outputs' elements per row."""
    return _elements(spec.name, tail)


@cache
def _elements(name: str, tail: Shape) -> int:
    spec = next(spec for spec in discover() if spec.name == name)
    sample = spec.benchmark((1, *tail), torch.float32, torch.device("meta"))
    return sum(out.numel() for out in spec.eager(**sample.tensors, **sample.options))


# --- the shipped table ------------------------------------------------------------------------------------


def grid(specs: Iterable[Spec], dtypes: Iterable[torch.dtype]) -> list[Workload]:
    """Every operator, with and without dropout, at its family's shapes; the most common first."""
    names, dtypes = {spec.name for spec in specs}, tuple(dtypes)
    found = []
    for family in _tunable():
        shapes: Grid = family.GRID
        for spec, dtype in itertools.product(family.SPECS, dtypes):
            if spec.name in names:
                tails = shapes.coarse if dtype == torch.float64 else shapes.tails
                found += [w for tail in tails for w in _cells(spec, tail, dtype, shapes.buckets)]
    return sorted(found, key=_rank)


def _cells(spec: Spec, tail: Shape, dtype: torch.dtype, buckets: tuple[int, ...]) -> Iterator[Workload]:
    most = _MOST_ELEMENTS // elements_per_row(spec, tail)
    for bucket in buckets:
        rows = min(_ROWS[bucket], most)
        if rows >= BUCKETS[bucket]:
            yield Workload(spec, (rows, *tail), dtype)
            if spec.has_dropout:
                yield Workload(spec, (rows, *tail), dtype, (("p", 0.0),))


def _rank(workload: Workload) -> tuple[int, int, int]:
    """Half precision first, narrow rows before wide ones, many rows before few."""
    dtype = list(DTYPES.values()).index(workload.dtype)
    wide = elements_per_row(workload.spec, workload.shape[1:]) > 16384
    many = 4096 <= workload.rows < 65536
    return dtype, int(wide), int(not many)


# --- from a key to a workload -------------------------------------------------------------------------


def workload_for(key: TuningKey, device: torch.device) -> Workload | None:
    """The first of the specs' workloads that has the key; None if there is none."""
    return next((workload for workload in _plausible(key) if _has_key(workload, key, device)), None)


def _has_key(workload: Workload, key: TuningKey, device: torch.device) -> bool:
    try:
        return key in keys_of(workload, device)
    except (TypeError, ValueError, RuntimeError):  # the operator does not accept this combination
        return False


def _plausible(key: TuningKey) -> Iterator[Workload]:
    """Operators with subsets of their tensors, with and without dropout, in the key's dtypes."""
    bits = [int(part) for part in key.widths.removesuffix("bit").split("-")]
    by_width = {dtype.itemsize * 8: dtype for dtype in reversed(DTYPES.values())}
    rows = _ROWS[key.bucket]
    for family in _tunable():
        for spec, tail in itertools.product(family.SPECS, family.GRID.tails_of(key.cols)):
            most = _MOST_ELEMENTS // elements_per_row(spec, tail)
            if most < BUCKETS[key.bucket]:
                continue
            fitting = min(rows, most)
            for options, absent, recast in _variations(spec, [by_width[b] for b in dict.fromkeys(bits)]):
                yield Workload(spec, (fitting, *tail), by_width[min(bits)], options, absent, recast)


def _variations(spec: Spec, dtypes: list[torch.dtype]) -> Iterator[
    tuple[tuple[tuple[str, Any], ...], tuple[str, ...], tuple[tuple[str, torch.dtype], ...]]
]:  # fmt: skip
    optional = spec.tensors[1:] if len(spec.tensors) <= 5 else ()
    absences = [names for count in range(len(optional) + 1) for names in itertools.combinations(optional, count)]
    recasts: list[tuple[tuple[str, torch.dtype], ...]] = [()]
    if len(dtypes) > 1:
        recasts = [((name, max(dtypes, key=lambda d: d.itemsize)),) for name in optional]
    drops: list[tuple[tuple[str, Any], ...]] = [(), (("p", 0.0),)] if spec.has_dropout else [()]
    outs: list[tuple[tuple[str, Any], ...]] = [()]
    if len(dtypes) > 1:
        outs += [(("out_dtype", dtype),) for dtype in dtypes]
        # Post-norm blocks under autocast: fp32 outputs that are also returned cast to half precision.
        low, high = (pick(dtypes, key=lambda d: d.itemsize) for pick in (min, max))
        outs += [(("cast_dtype", low),), (("out_dtype", high), ("cast_dtype", low))]
    for recast, absent, drop, out in itertools.product(recasts, absences, drops, outs):
        yield drop + out, absent, recast
