"""The functions with the tensors that they are called with, and the bytes that must move."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import functions

__all__ = ["FULL", "FUNCTIONS", "TINY", "Argument", "Sizes", "Workload", "workloads"]

Shape = tuple[int, ...]
Views = tuple[Callable[[Tensor], Tensor], ...]


@dataclass(frozen=True)
class Sizes:
    """The sizes of all tensors.

    Attributes:
        rows: of most functions, which are batch times length.
        widths: row lengths of the functions that are timed at several, the most telling first.
        width: row length of the functions that are timed at one.
        groups: heads of keys of grouped queries; there are four times as many heads elsewhere.
        head: columns of a head.
        scores: the length of a row of attention weights.
    """

    rows: int
    batch: int
    widths: tuple[int, ...]
    width: int
    groups: int
    head: int
    scores: int
    vocabulary: int

    @property
    def length(self) -> int:
        """Positions of a sequence."""
        return self.rows // self.batch

    @property
    def heads(self) -> int:
        """Heads of queries."""
        return 4 * self.groups


FULL = Sizes(8192, 8, (4096, 1536, 3072, 5120, 6144), 3584, 4, 64, 1024, 128_256)
TINY = Sizes(6, 2, (48,), 56, 1, 16, 24, 40)


@dataclass(frozen=True)
class Argument:
    """A tensor of a call, or several that are views of one.

    Attributes:
        shape: of the tensor that is allocated.
        kind: "float", "mask", or "target" (places of columns).
        trained: whether it requires a gradient.
        classes: of targets.
        views: functions of the tensor; their results are the arguments, in its place.
    """

    shape: Shape
    kind: str = "float"
    trained: bool = True
    classes: int = 1
    views: Views = ()

    def tensors(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """Random values; views keep their strides, and are leaves."""
        if self.kind == "target":
            return [torch.randint(self.classes, self.shape, device=device)]
        values = torch.randn(self.shape, device=device, dtype=dtype)
        if self.kind == "mask":
            return [values > 1.0]
        parts = [view(values) for view in self.views] or [values]
        return [part.requires_grad_(self.trained) for part in parts]


@dataclass(frozen=True)
class Workload:
    """A function with tensors.

    Attributes:
        name: of the function.
        function: of tensors.
        shape: rows and columns, as the results file has them.
        arguments: of the function.
        elements: of tensors, that must be read or written at the least by mode, each whole
            tensor once each way.
        caller: calls the function more than once; its first argument is what runs the function.
        by_hand: the library's own operator for it, if there is one.
    """

    name: str
    function: Callable[..., Any]
    shape: tuple[int, int]
    arguments: tuple[Argument, ...]
    elements: dict[str, int]
    caller: Callable[..., Any] | None = None
    by_hand: Callable[..., Any] | None = None

    def tensors(
        self, device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[Tensor, ...]:
        """Random tensors for a call."""
        lists = [argument.tensors(device, dtype) for argument in self.arguments]
        return tuple([tensor for tensors in lists for tensor in tensors])

    def called(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The whole call, with what runs the function."""
        caller = self.caller
        if caller is None:
            return function
        return lambda *tensors: caller(function, *tensors)

    def moved(self, mode: str) -> int:
        """Bytes that one call must move at the least, in bf16."""
        return self.elements[mode] * torch.bfloat16.itemsize

    @property
    def shape_name(self) -> str:
        """The shape as the results file has it."""
        return "x".join(map(str, self.shape))


def workloads(names: Sequence[str] = (), sizes: Sizes = FULL) -> list[Workload]:
    """Those of the functions of these names; all of them for none."""
    every = [*_rows(sizes), *_heads(sizes), *_queries_and_keys(sizes), *_scores(sizes)]
    return [workload for workload in every if not names or workload.name in names]


def _elements(forward: int, backward: int) -> dict[str, int]:
    return {"fwd": forward, "fwd_bwd": forward + backward}


def _floats(*shapes: Shape) -> tuple[Argument, ...]:
    return tuple([Argument(shape) for shape in shapes])


def _rows(sizes: Sizes) -> Iterator[Workload]:
    m = sizes.rows
    for n in sizes.widths:
        row, vector, one = (m, n), (n,), m * n
        yield Workload(
            "dropout_add_layer_norm",
            functions.dropout_add_layer_norm,
            row,
            _floats(row, vector, row, vector, vector),
            _elements(3 * one, 4 * one),
            by_hand=functions.dropout_add_layer_norm_by_hand,
        )
        group = (sizes.batch, 1, n)
        yield Workload(
            "adaptive_layer_norm",
            functions.adaptive_layer_norm,
            row,
            _floats((sizes.batch, sizes.length, n), group, group),
            _elements(2 * one, 3 * one),
        )
        yield Workload(
            "gated_residual_norm",
            functions.gated_residual_norm,
            row,
            _floats(row, vector, row, vector),
            _elements(4 * one, 6 * one),
        )
        yield Workload(
            "layer_scale",
            functions.layer_scale,
            row,
            _floats(row, vector, row, vector, vector),
            _elements(4 * one, 6 * one),
        )
        yield Workload(
            "swiglu_norm",
            functions.swiglu_norm,
            row,
            _floats((m, 2 * n), vector),
            _elements(3 * one, 5 * one),
        )
    yield from _rows_of_one_width(sizes)


def _rows_of_one_width(sizes: Sizes) -> Iterator[Workload]:
    row, vector = (sizes.rows, sizes.width), (sizes.width,)
    one = math.prod(row)
    yield Workload(
        "polynomial_norm",
        functions.polynomial_norm,
        row,
        _floats(row, (3,), (1,)),
        _elements(2 * one, 3 * one),
    )
    yield Workload(
        "dynamic_tanh",
        functions.dynamic_tanh,
        row,
        _floats(row, (1,), vector, vector),
        _elements(2 * one, 3 * one),
    )
    yield Workload(
        "gated_rms_norm",
        functions.gated_rms_norm,
        row,
        _floats(row, row, vector),
        _elements(3 * one, 5 * one),
    )
    yield Workload(
        "normalized_residual",
        functions.normalized_residual,
        row,
        _floats(row, row, vector),
        _elements(3 * one, 5 * one),
    )


def _heads(sizes: Sizes) -> Iterator[Workload]:
    heads, size = 2 * sizes.heads, 2 * sizes.head
    one = sizes.rows * heads * size
    yield Workload(
        "norm_and_rotary",
        functions.norm_and_rotary,
        (sizes.rows * heads, size),
        (
            *_floats((sizes.batch, sizes.length, heads, size), (size,)),
            *_cosines_and_sines(sizes, size),
        ),
        _elements(2 * one, 3 * one),
    )
    heads, size = sizes.heads, sizes.head
    one = sizes.rows * heads * size
    yield Workload(
        "per_head_rms_norm",
        functions.per_head_rms_norm,
        (sizes.rows * heads, size),
        _floats((sizes.batch, sizes.length, heads, size), (heads, size)),
        _elements(2 * one, 3 * one),
    )


def _cosines_and_sines(sizes: Sizes, cols: int) -> tuple[Argument, Argument]:
    positions = Argument((sizes.length, 1, cols), trained=False)
    return positions, positions


def _queries_and_keys(sizes: Sizes) -> Iterator[Workload]:
    heads, size = sizes.heads, sizes.head
    rows = sizes.rows * heads
    one = rows * size
    packed = (sizes.batch, sizes.length, 3, heads, size)
    weights = _floats((size,), (size,))
    views = Argument(packed, views=(_first_of_three, _second_of_three))
    all_columns, half = _cosines_and_sines(sizes, size), _cosines_and_sines(sizes, size // 2)
    for form, function, positions in (
        ("halves", functions.qk_norm_rotary_halves, all_columns),
        ("interleaved", functions.qk_norm_rotary_interleaved, half),
        ("partial", functions.qk_norm_rotary_partial, half),
    ):
        yield Workload(
            f"qk_norm_rotary_{form}",
            function,
            (rows, size),
            (views, *weights, *positions),
            _elements(4 * one, 6 * one),
        )
    # With the values, whose gradient the backward copies.
    yield Workload(
        "qk_norm_rotary_packed",
        functions.qk_norm_rotary_packed,
        (rows, size),
        (Argument(packed), *weights, *all_columns),
        _elements(6 * one, 8 * one),
    )
    yield from _grouped_queries(sizes, weights, all_columns)


def _grouped_queries(
    sizes: Sizes, weights: tuple[Argument, ...], positions: tuple[Argument, ...]
) -> Iterator[Workload]:
    """The elements are counted in groups: four of queries, one of keys, one of values."""
    group = sizes.groups * sizes.head
    one = sizes.rows * group
    packed = (sizes.batch, sizes.length, 6 * group)
    q = partial(_slice_of_heads, first=0, last=4 * group, size=sizes.head)
    k = partial(_slice_of_heads, first=4 * group, last=5 * group, size=sizes.head)
    shape = (sizes.rows * 5 * sizes.groups, sizes.head)
    yield Workload(
        "qk_norm_rotary_grouped",
        functions.norm_and_rotary,
        shape,
        (Argument(packed, views=(q, k)), *weights, *positions),
        _elements(10 * one, 15 * one),
        caller=functions.qk_norm_rotary_grouped,
    )
    yield Workload(
        "qk_norm_rotary_grouped_packed",
        functions.qk_norm_rotary_grouped_packed,
        shape,
        (Argument(packed), *weights, *positions),
        _elements(12 * one, 17 * one),
    )


def _first_of_three(packed: Tensor) -> Tensor:
    return packed[:, :, 0]


def _second_of_three(packed: Tensor) -> Tensor:
    return packed[:, :, 1]


def _slice_of_heads(packed: Tensor, *, first: int, last: int, size: int) -> Tensor:
    sliced = packed[..., first:last]
    return sliced.view(*sliced.shape[:-1], -1, size)


def _scores(sizes: Sizes) -> Iterator[Workload]:
    scores = (4 * sizes.rows, sizes.scores)
    one = math.prod(scores)
    mask = Argument((1, sizes.scores), "mask", trained=False)
    for function in (functions.masked_softmax, functions.soft_capped_softmax):
        yield Workload(
            function.__name__,
            function,
            scores,
            (Argument(scores), mask),
            _elements(2 * one, 3 * one),
        )
    m, classes = sizes.rows, sizes.vocabulary
    yield Workload(
        "cross_entropy",
        functions.cross_entropy,
        (m, classes),
        (Argument((m, classes)), Argument((m,), "target", trained=False, classes=classes)),
        _elements(m * classes, 2 * m * classes),
    )


FUNCTIONS = tuple(dict.fromkeys(workload.name for workload in workloads()))
