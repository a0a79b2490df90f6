"""What the tuner runs: an operator at a shape, which asks the questions and is timed with their answers."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import pkgutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import fusedops

from ..core import launch, tuning
from ..core.question import BUCKETS, Grid, Question
from ..core.spec import Shape, Spec

__all__ = [
    "DTYPES",
    "Step",
    "Workload",
    "discover",
    "floor_us",
    "grid",
    "kernels_alone",
    "operators",
    "questions_of",
    "runs_natively",
    "workload_for",
]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
# Rows that stand for a bucket's; and the most elements of a tensor, of which the largest buckets then have fewer rows.
_ROWS = (4, 64, 1024, 8192, 262144)
_MOST_ELEMENTS = 1 << 28
# Beyond this, no operator goes to PyTorch's own.
_SMALL = 1 << 16


@cache
def _families() -> tuple[ModuleType, ...]:
    """The spec modules of all families, found by name: a new family needs no line here."""
    names = [f"fusedops.{module.name}.spec" for module in pkgutil.iter_modules(fusedops.__path__) if module.ispkg]
    found = [importlib.import_module(name) for name in names if importlib.util.find_spec(name) is not None]
    return tuple(module for module in found if hasattr(module, "SPECS"))


def _tunable() -> tuple[ModuleType, ...]:
    """Those that say which shapes to tune."""
    return tuple(family for family in _families() if hasattr(family, "GRID"))


def operators() -> list[str]:
    """The functionals of all families."""
    return sorted({spec.functional or spec.name for family in _families() for spec in family.SPECS})


def discover() -> tuple[Spec, ...]:
    """The operators that have something to tune."""
    return tuple(spec for family in _tunable() for spec in family.SPECS)


@dataclass(frozen=True)
class Workload:
    """One operator at one shape, as its spec's benchmark has it, apart from what is named here.

    Attributes:
        spec: the operator.
        shape: rows, and the rest of the shape.
        dtype: the tensors' dtype.
        options: options that differ from the benchmark's.
        absent: tensors left out.
        recast: tensors in another dtype.
    """

    spec: Spec
    shape: Shape
    dtype: torch.dtype
    options: tuple[tuple[str, Any], ...] = ()
    absent: tuple[str, ...] = ()
    recast: tuple[tuple[str, torch.dtype], ...] = ()

    @property
    def rows(self) -> int:
        """The shape's first side."""
        return int(self.shape[0])

    def at(self, rows: int) -> Workload:
        """The same with another number of rows."""
        return replace(self, shape=(rows, *self.shape[1:]))

    def __str__(self) -> str:
        dtype = next(name for name, known in DTYPES.items() if known == self.dtype)
        extras = [f"{name}={value}" for name, value in self.options]
        extras += [f"no {name}" for name in self.absent]
        extras += [f"{name} {str(other).removeprefix('torch.')}" for name, other in self.recast]
        return " ".join((self.spec.name, "x".join(map(str, self.shape)), dtype, *extras))


class Step:
    """One call on one set of random inputs, forward and backward; and the forward of inference."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        sample = workload.spec.benchmark(workload.shape, workload.dtype, device)
        recast = dict(workload.recast)
        tensors = {name: t if t is None or name not in recast else t.to(recast[name])
                   for name, t in sample.tensors.items()}  # fmt: skip
        tensors |= dict.fromkeys(workload.absent)
        self._call = workload.spec.call
        self._arguments = {**tensors, **sample.options, **dict(workload.options)}
        self._leaves = [t.requires_grad_() for t in tensors.values() if t is not None]
        self._cotangents: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs."""
        return sum(leaf.nbytes for leaf in self._leaves)

    def forward(self) -> tuple[Tensor, ...]:
        """The outputs."""
        outputs = self._call(**self._arguments)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    @torch.no_grad()
    def infer(self) -> tuple[Tensor, ...]:
        """The outputs where nothing is kept for a backward."""
        return self.forward()

    def backward(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The gradients of all tensors, along random ones that are made once; may be called again."""
        if not self._cotangents:
            self._cotangents = [torch.randn_like(out) for out in outputs]
        return torch.autograd.grad(outputs, self._leaves, self._cotangents, retain_graph=True)

    def __call__(self) -> None:
        """All of them."""
        self.infer()
        self.backward(self.forward())


@contextmanager
def kernels_alone() -> Iterator[None]:
    """Inside the block small calls run the kernels too, where PyTorch's own operators would take them."""
    changed: list[Any] = [module for family in _tunable()
               if hasattr(module := importlib.import_module(family.__name__.removesuffix("spec") + "ops"),
                          "native_elements")]  # fmt: skip
    before = [module.native_elements for module in changed]
    for module in changed:
        module.native_elements = 0
    try:
        yield
    finally:
        for module, elements in zip(changed, before, strict=True):
            module.native_elements = elements


def questions_of(workload: Workload, device: torch.device) -> list[Question]:
    """What a forward and a backward ask, in order; nothing is compiled, and few rows are allocated."""
    with kernels_alone(), tuning.asked() as seen, launch.collecting():
        Step(workload.at(4), device)()
    tuning.forget()
    bucket = tuning.BUCKET[workload.rows.bit_length()]
    return [replace(question, bucket=bucket) for question in seen]


def runs_natively(workload: Workload, device: torch.device) -> bool:
    """Whether the operator at this size leaves the work to PyTorch's own, so that nothing is there to tune."""
    if workload.rows * elements_per_row(workload.spec, workload.shape[1:]) > _SMALL:
        return False
    with tuning.asked() as seen, launch.collecting():
        Step(workload, device)()
    tuning.forget()
    return not seen


def elements_per_row(spec: Spec, tail: Shape) -> int:
    """Elements of the outputs for one row."""
    return _elements(spec.name, tail)


@cache
def _elements(name: str, tail: Shape) -> int:
    spec = next(spec for spec in discover() if spec.name == name)
    sample = spec.benchmark((1, *tail), torch.float32, torch.device("meta"))
    return sum(out.numel() for out in spec.eager(**sample.tensors, **sample.options))


# --- the table that is shipped ------------------------------------------------------------------------------------


def grid(specs: Iterable[Spec], dtypes: Iterable[torch.dtype]) -> list[Workload]:
    """Every operator, with and without dropout, over the shapes of its family: what is most common first."""
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
    """Training in half precision first; then few rows, wide rows, and other dtypes."""
    dtype = list(DTYPES.values()).index(workload.dtype)
    wide = elements_per_row(workload.spec, workload.shape[1:]) > 16384
    many = 4096 <= workload.rows < 65536
    return dtype, int(wide), int(not many)


# --- from a question back to what asks it -------------------------------------------------------------------------


def workload_for(question: Question, device: torch.device) -> Workload | None:
    """A workload that asks the question, or None: the first of those that the specs can make which does."""
    return next((workload for workload in _plausible(question) if _asks(workload, question, device)), None)


def _asks(workload: Workload, question: Question, device: torch.device) -> bool:
    try:
        return question in questions_of(workload, device)
    except (TypeError, ValueError, RuntimeError):  # the operator does not take that combination
        return False


def _plausible(question: Question) -> Iterator[Workload]:
    """Operators of the kernel's family with tensors left out, with and without dropout, in the question's dtypes."""
    bits = [int(part) for part in question.widths.removesuffix("bit").split("-")]
    by_width = {dtype.itemsize * 8: dtype for dtype in reversed(DTYPES.values())}
    rows = _ROWS[question.bucket]
    for family in _tunable():
        for spec, tail in itertools.product(family.SPECS, family.GRID.asking(question.cols)):
            most = _MOST_ELEMENTS // elements_per_row(spec, tail)
            if most < BUCKETS[question.bucket]:
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
        # Post-norm blocks under autocast: rows that are fp32, or become so, and their twin of half precision.
        low, high = (pick(dtypes, key=lambda d: d.itemsize) for pick in (min, max))
        outs += [(("twin_dtype", low),), (("out_dtype", high), ("twin_dtype", low))]
    for recast, absent, drop, out in itertools.product(recasts, absences, drops, outs):
        yield drop + out, absent, recast


def floor_us(workload: Workload, question: Question, bandwidth: float) -> float:
    """The time in which the bytes that must move can move, at so many bytes a second."""
    passes = workload.spec.passes
    count = passes["fwd_bwd"] - passes["fwd"] if "backward" in question.kernel else passes["fwd"]
    elements = workload.rows * elements_per_row(workload.spec, workload.shape[1:])
    return math.ceil(count * elements * workload.dtype.itemsize) / bandwidth * 1e6
