"""The tuner's workloads: calls of an operator at a shape, to be timed with different configs."""

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

from ..core.calls.operator import Operator
from ..core.configs import tuning
from ..core.configs.tuning_key import BUCKETS, Grid, TuningKey
from ..core.launches import launch
from ..core.optional import without_none
from ..core.spec import Shape, Spec

__all__ = [
    "DTYPES",
    "NO_DROPOUT",
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

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The dtype that represents each number of bytes per element: bf16 for two.
_OF_ITEMSIZE = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
# The number of rows that represents each bucket of rows.
_ROWS = (4, 64, 1024, 8192, 262144)
# The most elements of a tensor. In a bucket, wide tensors have fewer rows.
_MOST_ELEMENTS = 1 << 28
# With more elements than this no operator uses PyTorch's own kernels.
_SMALL = 1 << 16

# Parts of a `Workload`: options, names of absent tensors, and tensors with another dtype.
_Options = tuple[tuple[str, Any], ...]
_Absent = tuple[str, ...]
_Recast = tuple[tuple[str, torch.dtype], ...]

NO_DROPOUT: _Options = (("p", 0.0),)


@cache
def _families() -> tuple[ModuleType, ...]:
    """Return the spec modules of all families, by name, so that a new family is included."""
    packages = [module.name for module in pkgutil.iter_modules(fusedops.__path__) if module.ispkg]
    families = []
    for package in packages:
        name = f"fusedops.{package}.spec"
        if importlib.util.find_spec(name) is not None:
            module = importlib.import_module(name)
            if hasattr(module, "SPECS"):
                families.append(module)
    return tuple(families)


def _tunable() -> tuple[ModuleType, ...]:
    """Return the families with a grid of shapes to tune."""
    return tuple(family for family in _families() if hasattr(family, "GRID"))


def _specs_of(families: tuple[ModuleType, ...]) -> Iterator[Spec]:
    return itertools.chain.from_iterable(family.SPECS for family in families)


def operators() -> list[str]:
    """Return the functionals of all families."""
    return sorted({spec.public_name for spec in _specs_of(_families())})


def discover() -> tuple[Spec, ...]:
    """Return the operators that can be tuned."""
    return tuple(_specs_of(_tunable()))


@dataclass(frozen=True)
class Workload:
    """One operator at one shape.

    The arguments are those of the operator's benchmark, except for the following attributes.

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
    options: _Options = ()
    absent: _Absent = ()
    recast: _Recast = ()

    @property
    def rows(self) -> int:
        """The shape's first dimension."""
        return int(self.shape[0])

    def at(self, rows: int) -> Workload:
        """Return the same workload with another number of rows."""
        return replace(self, shape=(rows, *self.shape[1:]))

    def step(self, device: torch.device) -> Step:
        """See `Tunable`."""
        sample = self.spec.benchmark(self.shape, self.dtype, device)
        tensors = dict(sample.tensors)
        for name, dtype in self.recast:
            tensor = tensors.get(name)
            if tensor is not None:
                tensors[name] = tensor.to(dtype)
        tensors |= dict.fromkeys(self.absent)
        return Step(self.spec.call, {**tensors, **sample.options, **dict(self.options)})

    def key_at(self, key: TuningKey) -> TuningKey:
        """See `Tunable`."""
        rows = self.rows
        # The key of an elementwise kernel counts rows of another length.
        if key.is_vector:
            rows = rows * elements_per_row(self.spec, self.shape[1:]) // key.cols
        return replace(key, bucket=tuning.BUCKET[rows.bit_length()])

    def floor_us(self, key: TuningKey, bandwidth: float) -> float:
        """See `Tunable`."""
        count = self.spec.passes["fwd"]
        if "backward" in key.kernel:
            count = self.spec.passes["fwd_bwd"] - count
        elements = self.rows * elements_per_row(self.spec, self.shape[1:])
        return math.ceil(count * elements * self.dtype.itemsize) / bandwidth * 1e6

    def __str__(self) -> str:
        extras = [f"{name}={value}" for name, value in self.options]
        extras += [f"no {name}" for name in self.absent]
        extras += [f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in self.recast]
        shape = "x".join(map(str, self.shape))
        return " ".join((self.spec.name, shape, _NAMES[self.dtype], *extras))


class Tunable(Protocol):
    """A call of an operator or a user's function at one size, whose kernels can be tuned."""

    @property
    def rows(self) -> int:
        """The number of rows of the call."""

    def at(self, rows: int) -> Tunable:
        """Return the workload with another number of rows, or itself if it needs all rows."""

    def step(self, device: torch.device) -> Step:
        """Return the call on random inputs."""

    def key_at(self, key: TuningKey) -> TuningKey:
        """Return the key with the bucket of this size; it was collected with fewer rows."""

    def floor_us(self, key: TuningKey, bandwidth: float) -> float:
        """Return the roofline in microseconds: the bytes read and written, over the bandwidth."""


class Step:
    """A call on one set of random inputs: training forward, inference forward, and backward.

    Args:
        call: the function.
        arguments: its arguments by name.
    """

    def __init__(self, call: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self._call, self._arguments = call, arguments
        self._leaves: list[Tensor] = []
        for value in arguments.values():
            if isinstance(value, Tensor) and value.is_floating_point():
                self._leaves.append(value.requires_grad_())
        self._cotangents: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """The inputs' size in bytes."""
        return sum(leaf.nbytes for leaf in self._leaves)

    def forward(self) -> tuple[Tensor, ...]:
        """Return the outputs of a training forward."""
        outputs = self._call(**self._arguments)
        return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)

    @torch.no_grad()
    def infer(self) -> tuple[Tensor, ...]:
        """Return the outputs of an inference forward, which saves nothing for backward."""
        return self.forward()

    def backward(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the gradients of all inputs that have one, for random output gradients.

        The output gradients are drawn in the first call. The method may be called repeatedly.
        """
        outputs = tuple([out for out in outputs if out.requires_grad])
        if not outputs:
            return ()
        # The first call is not timed. All configs have the same output gradients.
        if not self._cotangents:
            self._cotangents = list(map(torch.randn_like, outputs))
        gradients = torch.autograd.grad(
            outputs, self._leaves, self._cotangents, retain_graph=True, allow_unused=True
        )
        return tuple(without_none(gradients))

    def __call__(self) -> None:
        """Run inference, training forward and backward."""
        self.infer()
        self.backward(self.forward())


@contextmanager
def kernels_alone() -> Iterator[None]:
    """Context manager: small calls run this package's kernels, not PyTorch's own operators."""
    previous = Operator.native_elements
    Operator.native_elements = 0
    try:
        yield
    finally:
        Operator.native_elements = previous


def keys_of(workload: Tunable, device: torch.device) -> list[TuningKey]:
    """Return the keys of a forward and a backward, in order.

    Kernels are neither compiled nor run, and the tensors have few rows.
    """
    # Four rows are enough: keys depend only on the bucket of the rows, which `key_at` sets.
    with kernels_alone(), tuning.collected_keys() as keys, launch.collecting():
        workload.at(4).step(device)()
    # The plans of these calls are not compiled, so later calls must not use them.
    tuning.forget()
    return list(map(workload.key_at, keys))


def runs_natively(workload: Workload, device: torch.device) -> bool:
    """Return whether PyTorch's own operator runs at this size: then there is nothing to tune."""
    if workload.rows * elements_per_row(workload.spec, workload.shape[1:]) > _SMALL:
        return False
    with tuning.collected_keys() as keys, launch.collecting():
        workload.step(device)()
    tuning.forget()
    return not keys


def elements_per_row(spec: Spec, tail: Shape) -> int:
    """Return the number of output elements per row, for rows of this shape."""
    return _elements(spec.name, tail)


@cache
def _elements(name: str, tail: Shape) -> int:
    spec = {spec.name: spec for spec in discover()}[name]
    sample = spec.benchmark((1, *tail), torch.float32, torch.device("meta"))
    return sum(out.numel() for out in spec.eager(**sample.tensors, **sample.options))


# --- the shipped table ----------------------------------------------------------------------------


def grid(specs: Iterable[Spec], dtypes: Iterable[torch.dtype]) -> list[Workload]:
    """Return workloads of the operators at their families' shapes, with and without dropout.

    The most common ones come first, so that a run that is stopped has tuned these.
    """
    names, dtypes = {spec.name for spec in specs}, tuple(dtypes)
    workloads: list[Workload] = []
    for family in _tunable():
        shapes: Grid = family.GRID
        named = [spec for spec in family.SPECS if spec.name in names]
        for spec, dtype in itertools.product(named, dtypes):
            tails = shapes.coarse if dtype == torch.float64 else shapes.tails
            for tail in tails:
                workloads += _cells(spec, tail, dtype, shapes.buckets)
    return sorted(workloads, key=_rank)


def _cells(
    spec: Spec, tail: Shape, dtype: torch.dtype, buckets: tuple[int, ...]
) -> Iterator[Workload]:
    """Yield the workloads of one operator, row shape and dtype, by number of rows."""
    for bucket in buckets:
        rows = _rows_in(bucket, spec, tail)
        if rows:
            yield Workload(spec, (rows, *tail), dtype)
            if spec.has_dropout:
                yield Workload(spec, (rows, *tail), dtype, NO_DROPOUT)


def _rows_in(bucket: int, spec: Spec, tail: Shape) -> int:
    """Return the number of rows for a bucket, or 0 if even its fewest rows are too many."""
    # 2**28 elements are 1 GiB in fp32. A step has several such tensors, in several sets.
    most = _MOST_ELEMENTS // elements_per_row(spec, tail)
    rows = min(_ROWS[bucket], most)
    return rows if rows >= BUCKETS[bucket] else 0


def _rank(workload: Workload) -> tuple[int, int, int]:
    """Return a sort key: half precision first, then narrow rows, then many rows."""
    dtype = list(DTYPES.values()).index(workload.dtype)
    wide = elements_per_row(workload.spec, workload.shape[1:]) > 16384
    many = 4096 <= workload.rows < 65536
    return dtype, int(wide), int(not many)


# --- from a key to a workload ---------------------------------------------------------------------


def workload_for(key: TuningKey, device: torch.device) -> Workload | None:
    """Return the first workload of an operator that has the key; None if there is none."""
    for workload in _plausible(key):
        if _has_key(workload, key, device):
            return workload
    return None


def _has_key(workload: Workload, key: TuningKey, device: torch.device) -> bool:
    try:
        return key in keys_of(workload, device)
    except (TypeError, ValueError, RuntimeError):
        # The operator does not accept this combination of arguments.
        return False


def _plausible(key: TuningKey) -> Iterator[Workload]:
    """Yield workloads in the key's dtypes, with all variations of their arguments."""
    dtypes = [_OF_ITEMSIZE[size] for size in dict.fromkeys(key.itemsizes)]
    narrowest = _OF_ITEMSIZE[min(key.itemsizes)]
    for family in _tunable():
        for spec, tail in itertools.product(family.SPECS, family.GRID.tails_of(key.cols)):
            rows = _rows_in(key.bucket, spec, tail)
            if rows:
                for variation in _variations(spec, dtypes):
                    yield Workload(spec, (rows, *tail), narrowest, *variation)


def _variations(
    spec: Spec, dtypes: list[torch.dtype]
) -> Iterator[tuple[_Options, _Absent, _Recast]]:
    """Yield options, absent tensors and recast tensors of workloads in these dtypes.

    The variations are subsets of the optional tensors, with and without dropout. If there are two
    dtypes, one of the optional tensors has the wider dtype, and each output has the default dtype
    or one of the two.
    """
    # Operators with many tensors have too many subsets.
    optional = spec.tensors[1:] if len(spec.tensors) <= 5 else ()
    absences: list[_Absent] = []
    for count in range(len(optional) + 1):
        absences += itertools.combinations(optional, count)
    drops: list[_Options] = [()]
    if spec.has_dropout:
        drops.append(NO_DROPOUT)
    recasts: list[_Recast] = [()]
    outs: list[_Options] = [()]
    if len(dtypes) > 1:
        low = min(dtypes, key=lambda dtype: dtype.itemsize)
        high = max(dtypes, key=lambda dtype: dtype.itemsize)
        # For example a residual stream in fp32 and activations in bf16.
        recasts = [((name, high),) for name in optional]
        outs += [(("out_dtype", dtype),) for dtype in dtypes]
        # Post-norm blocks under autocast return fp32 outputs, and also half-precision copies.
        outs += [(("cast_dtype", low),), (("out_dtype", high), ("cast_dtype", low))]
    for recast, absent, drop, out in itertools.product(recasts, absences, drops, outs):
        yield drop + out, absent, recast
