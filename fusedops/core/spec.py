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


# The name of the sample that gets values, for each block of `only_sample`. A spec yields all its
# samples, and a test that takes one iterates over the others too. These are on the meta device
# meanwhile, which saves the time to draw their values.
_only: list[str] = []


@contextmanager
def only_sample(name: str) -> Iterator[None]:
    """Builds samples of other names on the meta device, without values, inside the block."""
    _only.append(name)
    try:
        yield
    finally:
        _only.pop()


class Maker:
    """Makes random tensors, seeded by the sample's name: the values are the same in every test."""

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
        # Drawn on the CPU in fp64, so that every device and dtype has the same values, rounded.
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale + shift
        return values.to(device=self.device, dtype=dtype or self.dtype)


# Multiplied by the reciprocal, as in the kernels: a quotient would be rounded differently.
def masked(keep: Tensor | None, keep_probability: float) -> Callable[[Tensor, torch.dtype], Tensor]:
    """Returns dropout with a known keep mask, None for no dropout, for the references."""
    if keep is None:
        return lambda h, dtype: h
    inverse = 1.0 / keep_probability if keep_probability > 0.0 else 0.0
    return lambda h, dtype: h * (keep.to(h.dtype) * inverse)


@dataclass(frozen=True)
class Sample:
    """One valid call: ``spec.call(**tensors, **options)``; absent tensors are None."""

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

    A tail is a shape without its first dimension, the rows.

    All but those of ``rows`` are timed with as many rows as make the number of elements the same.

    Attributes:
        hidden: tails of different widths.
        slices: tails of different numbers of slices.
        rows: tails that are timed with different numbers of rows.
        widths: tails of widths that are no power of two; they are timed with a fourth of the
            elements too.
        ragged: names of rows of slices with different widths, such as ``R4096``; the number is that
            of all columns.
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
        reference: the reference implementation, same keywords plus ``keep`` (a boolean keep mask or
            None) and ``keep_probability``. With fp64 tensors it is the oracle of the tests. Returns
            a tuple of outputs.
        eager: the same operator in ``torch.nn.functional``; same keywords, returns a tuple of
            outputs.
        tensors: names of the tensor arguments, in call order; the first one has the rows.
        has_dropout: whether the operator takes ``p``.
        samples: valid calls in a dtype on a device; random weights, biases and inputs.
        bad_samples: calls that must raise.
        benchmark: tensors and options for a shape and dtype, with every optional tensor present;
            takes any ``(M, N)``.
        passes: the number of ``(M, N)`` tensors that must be read or written, for the roofline:
            ``{"fwd": …, "fwd_bwd": …}``.
        launches: the number of kernels that a forward and a backward launch at ordinary sizes.
        saved: the number of ``(M, N)`` tensors saved for backward, without the caller's own.
        promoted: tensors whose dtypes are promoted with the first one's to the output's dtype.
        combined: for operators that ``eager`` computes slice by slice, the same for all slices at
            once; the benchmark also compiles it.
        liger: returns Liger-Kernel's operator as a callable with the eager signature; None if it
            has none.
        shapes: the shapes and dtypes of the benchmark.
        functional: the functional's name, if it is not ``name``.
        sweep: the shapes of the benchmark's sweeps.
        exact: the operator only moves or replaces numbers: outputs are compared bit for bit, and no
            backward is launched or timed.
        transformers: the same as ``liger`` for Hugging Face's Transformers.
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
