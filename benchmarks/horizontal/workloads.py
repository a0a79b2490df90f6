"""The workloads: functions of a slice, the slices, and loops over them as users write them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cases import dtype_name
from . import functions

__all__ = ["FULL", "FUNCTIONS", "TINY", "Sizes", "Workload", "workloads"]

ROWS, VECTOR = "rows", "vector"


@dataclass(frozen=True)
class Sizes:
    """The sizes of all tensors.

    Attributes:
        rows: the rows of each slice.
        uniform: the number of slices, their width and dtype, of slices of one width.
        ragged: the widths of slices of one tensor.
        separate: the widths of slices in separate tensors.
    """

    rows: int
    uniform: tuple[tuple[int, int, torch.dtype], ...]
    ragged: tuple[int, ...]
    separate: tuple[int, ...]


def _random_widths(count: int, *, step: int) -> tuple[int, ...]:
    """Returns widths of up to 256 columns, multiples of ``step``; always the same."""
    generator = random.Random(48)
    return tuple([step * generator.randint(1, 256 // step) for _ in range(count)])


FULL = Sizes(
    rows=4096,
    uniform=((16, 128, torch.float32), (64, 64, torch.bfloat16)),
    ragged=_random_widths(60, step=1),
    separate=_random_widths(40, step=8),
)
TINY = Sizes(
    rows=6,
    uniform=((3, 16, torch.float32),),
    ragged=(1, 3, 20, 3),
    separate=(8, 24, 16),
)


@dataclass(frozen=True)
class Workload:
    """A function that is called for each slice, and the slices.

    Attributes:
        name: the function's name.
        function: the function of one slice.
        rows: the rows of each slice.
        widths: the width of each slice.
        arguments: for each argument of the function, whether it is ROWS or a VECTOR of the
            slice's width.
        tensors_moved: by mode, how many tensors of rows must be read or written: inputs, outputs
            and their gradients, each once in the forward and once in the backward.
        joint: whether the slices are side by side in one tensor, or in separate tensors.
        dtype: the dtype of all tensors.
        by_hand: whether this package has a hand-written operator for the function.
    """

    name: str
    function: Callable[..., Tensor]
    rows: int
    widths: tuple[int, ...]
    arguments: tuple[str, ...]
    tensors_moved: dict[str, int]
    joint: bool = False
    dtype: torch.dtype = torch.bfloat16
    by_hand: bool = False

    def tensors(self, device: torch.device, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """Returns random tensors for a call: all slices of the first argument, and so on."""
        shapes: list[tuple[int, ...]] = []
        for argument in self.arguments:
            leading = (self.rows,) if argument == ROWS else ()
            if not self.joint:
                shapes += [(*leading, width) for width in self.widths]
            elif argument == VECTOR and self.is_uniform:
                shapes.append((len(self.widths), self.widths[0]))
            else:
                shapes.append((*leading, sum(self.widths)))
        options: Any = {"device": device, "dtype": dtype or self.dtype, "requires_grad": True}
        return tuple([torch.randn(shape, **options) for shape in shapes])

    def by_argument(self, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Returns the tensors of each argument, of slices in separate tensors."""
        count = len(self.widths)
        return [tensors[start : start + count] for start in range(0, len(tensors), count)]

    def loop(self) -> Callable[..., Any]:
        """Returns the loop over the slices; it takes the workload's tensors."""
        function, widths = self.function, list(self.widths)

        def of_one_tensor(x: Tensor, *vectors: Tensor) -> Tensor:
            # Vectors of slices of one width are the rows of a matrix.
            parts = [vector if vector.dim() == 2 else vector.split(widths) for vector in vectors]
            outs = [
                function(s, *[part[k] for part in parts]) for k, s in enumerate(x.split(widths, -1))
            ]
            return torch.cat(outs, -1)

        def of_separate_tensors(*tensors: Tensor) -> list[Tensor]:
            return [function(*slices) for slices in zip(*self.by_argument(tensors), strict=True)]

        return of_one_tensor if self.joint else of_separate_tensors

    def moved(self, mode: str) -> int:
        """Returns the bytes that one call must read or write."""
        return self.tensors_moved[mode] * self.rows * sum(self.widths) * self.dtype.itemsize

    @property
    def is_uniform(self) -> bool:
        """Whether the slices have one width."""
        return len(set(self.widths)) == 1

    @property
    def shape_name(self) -> str:
        """The shape's name: R stands for slices of unequal widths, S for separate tensors."""
        if self.joint and self.is_uniform:
            return f"{self.rows}x{len(self.widths)}x{self.widths[0]}"
        return f"{self.rows}x{'R' if self.joint else 'S'}{sum(self.widths)}"

    @property
    def dtype_name(self) -> str:
        """The dtype's name in the results file."""
        return dtype_name(self.dtype)


def workloads(names: Sequence[str] = (), sizes: Sizes = FULL) -> list[Workload]:
    """Returns the workloads of the named functions, or of all if none are named."""
    result = [*_layer_norms(sizes), *_others(sizes)]
    return [workload for workload in result if not names or workload.name in names]


def _moved(forward: int, backward: int) -> dict[str, int]:
    """Returns `Workload.tensors_moved` for numbers of tensors of forward and backward."""
    return {"fwd": forward, "fwd_bwd": forward + backward}


def _layer_norms(sizes: Sizes) -> Iterator[Workload]:
    joint = [((width,) * count, dtype) for count, width, dtype in sizes.uniform]
    joint += [(sizes.ragged, dtype) for dtype in (torch.bfloat16, torch.float32)]
    slices = [(widths, dtype, True) for widths, dtype in joint]
    slices.append((sizes.separate, torch.bfloat16, False))
    for widths, dtype, is_joint in slices:
        yield Workload(
            name="layer_norm_tanh",
            function=functions.layer_norm_tanh,
            rows=sizes.rows,
            widths=widths,
            arguments=(ROWS, VECTOR, VECTOR),
            tensors_moved=_moved(2, 3),
            joint=is_joint,
            dtype=dtype,
            by_hand=True,
        )


def _others(sizes: Sizes) -> Iterator[Workload]:
    for function, arguments, moved in (
        (functions.rms_norm_silu, (ROWS, VECTOR), _moved(2, 3)),
        (functions.dropout_add_layer_norm, (ROWS, ROWS, VECTOR, VECTOR), _moved(3, 4)),
        (functions.softmax, (ROWS,), _moved(2, 3)),
        (functions.gate, (ROWS, ROWS, VECTOR), _moved(3, 5)),
        (functions.bias_gelu, (ROWS, VECTOR), _moved(2, 3)),
    ):
        yield Workload(
            name=function.__name__,
            function=function,
            rows=sizes.rows,
            widths=sizes.separate,
            arguments=arguments,
            tensors_moved=moved,
        )


FUNCTIONS = tuple(dict.fromkeys(workload.name for workload in workloads()))
