"""What an operator tells the tests and the benchmarks about itself.

Each family's ``spec.py`` fills these records; each test file is one property looped over all of them, and the
benchmark reads the same records. A bug fix begins with a failing sample here.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["BadSample", "Maker", "Sample", "Shape", "Spec", "Sweep", "only_sample"]

# Rows and columns; a family may take more dimensions, or name a shape: (4096, "R4096").
Shape = tuple[int | str, ...]


_only: list[str] = []


@contextmanager
def only_sample(name: str) -> Iterator[None]:
    """Inside the block the samples of other names have no values: their tensors lie on the meta device."""
    _only.append(name)
    try:
        yield
    finally:
        _only.pop()


class Maker:
    """Random tensors that depend on the sample's name alone, so that one sample is the same in every test."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype) -> None:
        self.device = torch.device("meta") if _only and _only[-1] != name else device
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def __call__(self, *shape: int, dtype: torch.dtype | None = None, shift: float = 0.0, scale: float = 1.0) -> Tensor:
        """A normal tensor of that shape, in the maker's dtype if none is given."""
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale + shift
        return values.to(device=self.device, dtype=dtype or self.dtype)


@dataclass(frozen=True)
class Sample:
    """One valid call: ``spec.call(**tensors, **options)``; absent tensors are None."""

    name: str
    tensors: dict[str, torch.Tensor | None]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def p(self) -> float:
        """The drop probability in force, 0 when the operator has none."""
        return float(self.options.get("p", 0.0)) if self.options.get("training", True) else 0.0


@dataclass(frozen=True)
class BadSample:
    """One call that must raise ``error`` with a message that matches the regular expression ``match``."""

    name: str
    tensors: dict[str, Any]
    options: dict[str, Any]
    error: type[Exception]
    match: str


@dataclass(frozen=True)
class Sweep:
    """Along which lines the benchmark varies a shape. A tail is all of a shape's sides but the first, the rows.

    Attributes:
        hidden: tails of different widths, each with as many rows as make one and the same number of elements.
        slices: tails of different numbers of slices, likewise.
        rows: tails at which the number of rows varies.
    """

    hidden: tuple[tuple[int, ...], ...] = tuple(
        (cols,) for cols in (256, 512, 768, 1024, 1536, 2048, 4096, 5120, 8192, 11008, 16384, 32768, 65536)
    )
    slices: tuple[tuple[int, ...], ...] = ()
    rows: tuple[tuple[int, ...], ...] = ((1024,), (4096,))


@dataclass(frozen=True)
class Spec:
    """One public operator.

    Attributes:
        name: the operator's name in tests and results; as a rule the functional's, ``fusedops.<name>``.
        call: the functional itself; takes the tensors and options of a sample by keyword.
        reference: the formula in plain torch, same keywords plus ``keep`` (a boolean keep mask or None) and
            ``keep_probability``. Fed fp64 tensors it is the oracle. Always returns a tuple of outputs.
        eager: what a user writes with ``torch.nn.functional`` today; same keywords, returns a tuple of outputs.
        tensors: names of the tensor arguments, in call order; the first one carries the rows.
        has_dropout: whether the operator takes ``p``.
        samples: valid calls in a dtype on a device; random weights, biases and inputs.
        bad_samples: calls that must raise.
        benchmark: tensors and options for a shape and dtype, with every optional tensor present; any ``(M, N)`` will do.
        passes: ``(M, N)`` tensors that must move: ``{"fwd": …, "fwd_bwd": …}``, for the roofline.
        launches: kernels that one forward and one backward launch at ordinary sizes.
        kept: the number of ``(M, N)`` tensors that may live from forward to backward beyond the caller's own.
        promoted: tensors whose dtypes take part, with the first's, in PyTorch's promotion of the output.
        combined: ``eager`` written for all slices at once, for operators that ``eager`` calls slice by slice; what
            torch.compile is then given too.
        liger: builds Liger-Kernel's twin as a callable with the eager signature, or None where it has none.
        shapes: the shapes and dtypes that the benchmark times.
        functional: the functional's name, where it is not ``name``.
        sweep: the lines along which the benchmark's sweeps vary the shape.
        exact: nothing is computed with floating-point numbers, they are only moved or replaced: outputs are compared bit
            for bit, and there is no backward to launch or to time.
        transformers: builds the callable of Hugging Face's transformers, as ``liger`` does.
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
    kept: int
    shapes: tuple[tuple[Shape, torch.dtype], ...]
    liger: Callable[[], Callable[..., Any]] | None = None
    promoted: tuple[str, ...] = ()
    combined: Callable[..., tuple[torch.Tensor, ...]] | None = None
    functional: str = ""
    sweep: Sweep = Sweep()
    exact: bool = False
    transformers: Callable[[], Callable[..., Any]] | None = None
