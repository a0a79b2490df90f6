"""The record that describes an operator to the tests, the benchmarks and the tuner.

Each family's ``spec.py`` fills these records. Each test file checks one property of all of them,
and the benchmarks read the same records. A bug fix begins with a failing sample here.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["BadSample", "Maker", "Sample", "Shape", "Spec", "Sweep", "masked", "only_sample"]

# Rows and columns; a family may take more dimensions, or name a shape: (4096, "R4096").
Shape = tuple[int | str, ...]


# For each active block of `only_sample`, the name of its sample. A spec is a generator of samples,
# so a test of one sample iterates over the others too. The others are on the meta device, which
# saves the time to draw their values.
_only: list[str] = []


@contextmanager
def only_sample(name: str) -> Iterator[None]:
    """Builds all samples but the named one on the meta device, without values, inside the block."""
    _only.append(name)
    try:
        yield
    finally:
        _only.pop()


class Maker:
    """Returns random tensors when called; seeded by a name, so that all tests get the same ones."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype) -> None:
        self.device = torch.device("meta") if _only and _only[-1] != name else device
        self.dtype = dtype
        # Not `hash`, which differs from process to process for strings.
        self.generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def __call__(
        self, *shape: int, dtype: torch.dtype | None = None, shift: float = 0.0, scale: float = 1.0
    ) -> Tensor:
        """Returns a normally distributed tensor, in the maker's dtype by default."""
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        # Drawn on the CPU in fp64, and rounded: devices and dtypes have the same values.
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale + shift
        return values.to(device=self.device, dtype=dtype or self.dtype)


def masked(keep: Tensor | None, keep_probability: float) -> Callable[[Tensor, torch.dtype], Tensor]:
    """Returns dropout with a known keep mask, for references; no dropout if it is None."""
    if keep is None:
        return lambda h, dtype: h
    # Multiplied by the reciprocal, as in the kernels: a quotient would be rounded differently.
    inverse = 1.0 / keep_probability if keep_probability > 0.0 else 0.0
    return lambda h, dtype: h * (keep.to(h.dtype) * inverse)


@dataclass(frozen=True)
class Sample:
    """One valid call, ``spec.call(**tensors, **options)``. Absent tensors are None."""

    name: str
    tensors: dict[str, torch.Tensor | None]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def p(self) -> float:
        """The effective drop probability, 0 for an operator without dropout."""
        if not self.options.get("training", True):
            return 0.0
        return float(self.options.get("p", 0.0))


@dataclass(frozen=True)
class BadSample:
    """One call that must raise ``error``, with a message that the regex ``match`` matches."""

    name: str
    tensors: dict[str, Any]
    options: dict[str, Any]
    error: type[Exception]
    match: str


@dataclass(frozen=True)
class Sweep:
    """The shapes of the benchmark's sweeps.

    A tail is a shape without its first dimension, the rows. The benchmark chooses the number of
    rows so that all shapes of a sweep have the same number of elements, except in ``rows``.

    Attributes:
        hidden: tails of different widths.
        slices: tails of different numbers of slices.
        rows: tails that are timed with different numbers of rows.
        widths: tails of widths that are no power of two. They are timed twice: the second time with
            a quarter of the elements.
        ragged: names of rows of slices with different widths, such as ``R4096``. The number is the
            sum of the widths.
    """

    hidden: tuple[tuple[int, ...], ...] = tuple(
        (cols,)
        for cols in (256, 512, 768, 1024, 1536, 2048, 4096, 5120, 8192, 11008, 16384, 32768, 65536)
    )
    slices: tuple[tuple[int, ...], ...] = ()
    rows: tuple[tuple[int, ...], ...] = ((1024,), (4096,))
    widths: tuple[tuple[int, ...], ...] = ()
    ragged: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spec:
    """One public operator.

    Attributes:
        name: the operator's name in tests and results; usually the functional's,
            ``fusedops.<name>``.
        call: the functional itself; takes the tensors and options of a sample by keyword.
        reference: the reference implementation. It takes the same keywords, and ``keep`` (a boolean
            keep mask or None) and ``keep_probability``; it returns a tuple of outputs. Tests call
            it with fp64 tensors for the expected values.
        eager: the same operator by ``torch.nn.functional``. It takes the same keywords and returns
            a tuple of outputs.
        tensors: names of the tensor arguments, in call order; the first one has the rows.
        has_dropout: whether the operator takes ``p``.
        samples: yields valid calls in a dtype on a device, with random weights, biases and inputs.
        bad_samples: yields calls that must raise.
        benchmark: returns the tensors and options for a shape, a dtype and a device, with every
            optional tensor. The shape may be any ``(M, N)``.
        passes: the number of ``(M, N)`` tensors that must be read or written, for the roofline:
            ``{"fwd": …, "fwd_bwd": …}``.
        launches: the number of kernels that a forward and a backward launch at ordinary sizes.
        saved: the number of ``(M, N)`` tensors saved for backward, without the caller's own.
        promoted: names of tensors: the output's dtype is promoted from theirs and the first one's.
        combined: ``eager`` computes some operators slice by slice; this computes all slices at
            once. The benchmark compiles and times it too.
        liger: returns Liger-Kernel's operator as a callable with the signature of ``eager``. None
            if it has none.
        shapes: the shapes and dtypes of the benchmark.
        functional: the functional's name, if it is not ``name``.
        sweep: the shapes of the benchmark's sweeps.
        exact: whether the operator only moves or replaces numbers. Then its outputs are compared
            bit for bit, and it has no backward to launch or time.
        transformers: like ``liger``, for the operator of Hugging Face's Transformers.
    """

    name: str
    call: Callable[..., Any]
    reference: Callable[..., tuple[torch.Tensor, ...]]
    eager: Callable[..., tuple[torch.Tensor, ...]]
    tensors: tuple[str, ...]
    has_dropout: bool
    samples: Callable[[torch.device, torch.dtype], Iterator[Sample]]
    bad_samples: Callable[[torch.device], Iterator[BadSample]]
    benchmark: Callable[[Shape, torch.dtype, torch.device], Sample]
    passes: dict[str, int]
    launches: tuple[int, int]
    saved: int
    shapes: tuple[tuple[Shape, torch.dtype], ...]
    liger: Callable[[], Callable[..., Any]] | None = None
    promoted: tuple[str, ...] = ()
    combined: Callable[..., tuple[torch.Tensor, ...]] | None = None
    functional: str = ""
    sweep: Sweep = Sweep()
    exact: bool = False
    transformers: Callable[[], Callable[..., Any]] | None = None

    @property
    def public_name(self) -> str:
        """The public name: that of the functional."""
        return self.functional or self.name
