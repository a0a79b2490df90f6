"""The workloads: functions, the tensors of their calls, and the bytes that must be moved."""

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
        rows: the rows of most functions: batch times sequence length.
        batch: the batch size.
        widths: the row lengths of functions that are timed at several, the most important first.
        width: the row length of functions that are timed at one.
        groups: the heads of keys of grouped queries; there are four times as many heads of queries.
        head: the columns of a head.
        scores: the length of a row of attention weights.
        vocabulary: the classes of the cross-entropy.
        experts: tokens and experts of a router.
        steps: the iterations of Sinkhorn and Knopp.
        quantised: rows and columns of quantised norms, of quantised norms of sums, and of quantised
            gated units.
    """

    rows: int
    batch: int
    widths: tuple[int, ...]
    width: int
    groups: int
    head: int
    scores: int
    vocabulary: int
    experts: tuple[int, int]
    steps: int
    quantised: tuple[tuple[Shape, ...], ...]

    @property
    def length(self) -> int:
        """The positions of a sequence."""
        return self.rows // self.batch

    @property
    def heads(self) -> int:
        """The number of heads of queries."""
        return 4 * self.groups


FULL = Sizes(
    rows=8192,
    batch=8,
    widths=(4096, 1536, 3072, 5120, 6144),
    width=3584,
    groups=4,
    head=64,
    scores=1024,
    vocabulary=128_256,
    experts=(16384, 128),
    steps=20,
    quantised=(((4096, 16384), (8192, 4096)), ((8192, 4096), (8192, 7168)), ((8192, 14336),)),
)
TINY = Sizes(
    rows=6,
    batch=2,
    widths=(48,),
    width=56,
    groups=1,
    head=16,
    scores=24,
    vocabulary=40,
    experts=(6, 24),
    steps=2,
    quantised=(((6, 384),),) * 3,
)


@dataclass(frozen=True)
class Argument:
    """A tensor of a call, or several views of one tensor.

    Attributes:
        shape: the shape of the tensor that is allocated.
        kind: "float", "mask", or "target" for indices of columns.
        trained: whether it requires a gradient.
        classes: for a target, the number of columns.
        views: functions that return views of the tensor. If there are any, the views are the
            arguments, and not the tensor.
    """

    shape: Shape
    kind: str = "float"
    trained: bool = True
    classes: int = 1
    views: Views = ()

    def tensors(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """Returns the arguments with random values; views keep their strides and are leaves."""
        if self.kind == "target":
            return [torch.randint(self.classes, self.shape, device=device)]
        values = torch.randn(self.shape, device=device, dtype=dtype)
        if self.kind == "mask":
            return [values > 1.0]
        parts = [view(values) for view in self.views] or [values]
        return [part.requires_grad_(self.trained) for part in parts]


@dataclass(frozen=True)
class Workload:
    """A function, and the tensors of its call.

    Attributes:
        name: the function's name.
        function: the function.
        shape: the rows and columns in the results file.
        arguments: the function's arguments.
        elements: by mode, the number of elements of 16 bits that must be read or written: each
            tensor of rows counts once in the forward, and once in the backward. Functions without a
            backward have no such mode.
        caller: for a workload that calls the function more than once, a function that does so; its
            first argument is the function.
        by_hand: this package's hand-written operator for the function, if there is one.
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
        """Returns random tensors for a call."""
        lists = [argument.tensors(device, dtype) for argument in self.arguments]
        return tuple([tensor for tensors in lists for tensor in tensors])

    def called(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the whole call; ``function`` is the workload's function, perhaps compiled."""
        caller = self.caller
        if caller is None:
            return function
        return lambda *tensors: caller(function, *tensors)

    def moved(self, mode: str) -> int:
        """Returns the bytes that one call must read or write, in bf16."""
        return self.elements[mode] * torch.bfloat16.itemsize

    @property
    def shape_name(self) -> str:
        """The shape's name in the results file."""
        return "x".join(map(str, self.shape))

    @property
    def dtype_name(self) -> str:
        """The dtype's name in the results file."""
        return "bfloat16"


def workloads(names: Sequence[str] = (), sizes: Sizes = FULL) -> list[Workload]:
    """Returns the workloads of the named functions, or of all if none are named."""
    result = [
        *_rows(sizes),
        *_heads(sizes),
        *_queries_and_keys(sizes),
        *_scores(sizes),
        *_routers(sizes),
        *_streams(sizes),
        *_quantised(sizes),
    ]
    if not names:
        return result
    return [workload for workload in result if workload.name in names]


def _elements(forward: int, backward: int) -> dict[str, int]:
    """Returns `Workload.elements` for numbers of elements of forward and backward."""
    return {"fwd": forward, "fwd_bwd": forward + backward}


def _floats(*shapes: Shape) -> tuple[Argument, ...]:
    return tuple([Argument(shape) for shape in shapes])


def _rows(sizes: Sizes) -> Iterator[Workload]:
    rows = sizes.rows
    for cols in sizes.widths:
        shape, vector = (rows, cols), (cols,)
        # The elements of one tensor of rows, here and below.
        per_tensor = rows * cols
        yield Workload(
            name="dropout_add_layer_norm",
            function=functions.dropout_add_layer_norm,
            shape=shape,
            arguments=_floats(shape, vector, shape, vector, vector),
            elements=_elements(3 * per_tensor, 4 * per_tensor),
            by_hand=functions.dropout_add_layer_norm_by_hand,
        )
        per_sequence = (sizes.batch, 1, cols)
        yield Workload(
            name="adaptive_layer_norm",
            function=functions.adaptive_layer_norm,
            shape=shape,
            arguments=_floats((sizes.batch, sizes.length, cols), per_sequence, per_sequence),
            elements=_elements(2 * per_tensor, 3 * per_tensor),
        )
        yield Workload(
            name="gated_residual_norm",
            function=functions.gated_residual_norm,
            shape=shape,
            arguments=_floats(shape, vector, shape, vector),
            elements=_elements(4 * per_tensor, 6 * per_tensor),
        )
        yield Workload(
            name="layer_scale",
            function=functions.layer_scale,
            shape=shape,
            arguments=_floats(shape, vector, shape, vector, vector),
            elements=_elements(4 * per_tensor, 6 * per_tensor),
        )
        yield Workload(
            name="swiglu_norm",
            function=functions.swiglu_norm,
            shape=shape,
            arguments=_floats((rows, 2 * cols), vector),
            elements=_elements(3 * per_tensor, 5 * per_tensor),
        )
    yield from _rows_of_one_width(sizes)


def _rows_of_one_width(sizes: Sizes) -> Iterator[Workload]:
    shape, vector = (sizes.rows, sizes.width), (sizes.width,)
    per_tensor = math.prod(shape)
    yield Workload(
        name="polynomial_norm",
        function=functions.polynomial_norm,
        shape=shape,
        arguments=_floats(shape, (3,), (1,)),
        elements=_elements(2 * per_tensor, 3 * per_tensor),
    )
    yield Workload(
        name="dynamic_tanh",
        function=functions.dynamic_tanh,
        shape=shape,
        arguments=_floats(shape, (1,), vector, vector),
        elements=_elements(2 * per_tensor, 3 * per_tensor),
    )
    yield Workload(
        name="gated_rms_norm",
        function=functions.gated_rms_norm,
        shape=shape,
        arguments=_floats(shape, shape, vector),
        elements=_elements(3 * per_tensor, 5 * per_tensor),
    )
    yield Workload(
        name="normalized_residual",
        function=functions.normalized_residual,
        shape=shape,
        arguments=_floats(shape, shape, vector),
        elements=_elements(3 * per_tensor, 5 * per_tensor),
    )


def _heads(sizes: Sizes) -> Iterator[Workload]:
    heads, size = 2 * sizes.heads, 2 * sizes.head
    per_tensor = sizes.rows * heads * size
    yield Workload(
        name="norm_and_rotary",
        function=functions.norm_and_rotary,
        shape=(sizes.rows * heads, size),
        arguments=(
            *_floats((sizes.batch, sizes.length, heads, size), (size,)),
            *_cosines_and_sines(sizes, size),
        ),
        elements=_elements(2 * per_tensor, 3 * per_tensor),
    )
    heads, size = sizes.heads, sizes.head
    per_tensor = sizes.rows * heads * size
    yield Workload(
        name="per_head_rms_norm",
        function=functions.per_head_rms_norm,
        shape=(sizes.rows * heads, size),
        arguments=_floats((sizes.batch, sizes.length, heads, size), (heads, size)),
        elements=_elements(2 * per_tensor, 3 * per_tensor),
    )


def _cosines_and_sines(sizes: Sizes, cols: int) -> tuple[Argument, Argument]:
    positions = Argument((sizes.length, 1, cols), trained=False)
    return positions, positions


def _queries_and_keys(sizes: Sizes) -> Iterator[Workload]:
    heads, size = sizes.heads, sizes.head
    rows = sizes.rows * heads
    per_tensor = rows * size
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
            name=f"qk_norm_rotary_{form}",
            function=function,
            shape=(rows, size),
            arguments=(views, *weights, *positions),
            elements=_elements(4 * per_tensor, 6 * per_tensor),
        )
    # The projection has the values too. The function returns them, and the backward copies their
    # gradient.
    yield Workload(
        name="qk_norm_rotary_packed",
        function=functions.qk_norm_rotary_packed,
        shape=(rows, size),
        arguments=(Argument(packed), *weights, *all_columns),
        elements=_elements(6 * per_tensor, 8 * per_tensor),
    )
    yield from _grouped_queries(sizes, weights, all_columns)


def _grouped_queries(
    sizes: Sizes, weights: tuple[Argument, ...], positions: tuple[Argument, ...]
) -> Iterator[Workload]:
    """Yields the workloads of grouped queries."""
    # Elements are counted in tensors of as many heads as there are groups: queries are four, keys
    # and values one each.
    group = sizes.groups * sizes.head
    per_tensor = sizes.rows * group
    packed = (sizes.batch, sizes.length, 6 * group)
    q = partial(_slice_of_heads, first=0, last=4 * group, size=sizes.head)
    k = partial(_slice_of_heads, first=4 * group, last=5 * group, size=sizes.head)
    shape = (sizes.rows * 5 * sizes.groups, sizes.head)
    yield Workload(
        name="qk_norm_rotary_grouped",
        function=functions.norm_and_rotary,
        shape=shape,
        arguments=(Argument(packed, views=(q, k)), *weights, *positions),
        elements=_elements(10 * per_tensor, 15 * per_tensor),
        caller=functions.qk_norm_rotary_grouped,
    )
    yield Workload(
        name="qk_norm_rotary_grouped_packed",
        function=functions.qk_norm_rotary_grouped_packed,
        shape=shape,
        arguments=(Argument(packed), *weights, *positions),
        elements=_elements(12 * per_tensor, 17 * per_tensor),
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
    per_tensor = math.prod(scores)
    mask = Argument((1, sizes.scores), "mask", trained=False)
    for function in (functions.masked_softmax, functions.soft_capped_softmax):
        yield Workload(
            name=function.__name__,
            function=function,
            shape=scores,
            arguments=(Argument(scores), mask),
            elements=_elements(2 * per_tensor, 3 * per_tensor),
        )
    rows, classes = sizes.rows, sizes.vocabulary
    yield Workload(
        name="cross_entropy",
        function=functions.cross_entropy,
        shape=(rows, classes),
        arguments=(
            Argument((rows, classes)),
            Argument((rows,), "target", trained=False, classes=classes),
        ),
        elements=_elements(rows * classes, 2 * rows * classes),
    )


def _routers(sizes: Sizes) -> Iterator[Workload]:
    """Yields a router with eight weights for each token, of two elements of 16 bits each.

    The forward writes indices, too, of four elements each.
    """
    rows, cols = sizes.experts
    yield Workload(
        name="router",
        function=functions.router,
        shape=(rows, cols),
        arguments=_floats((rows, cols)),
        elements=_elements(rows * (cols + 6 * 8), rows * (2 * cols + 2 * 8)),
        caller=functions.router_weights,
    )


def _streams(sizes: Sizes) -> Iterator[Workload]:
    """Yields a hyper-connection of four streams, and matrices to mix them, whose results are fp32."""
    rows, cols = sizes.rows, sizes.widths[0]
    yield Workload(
        name="hyper_connection",
        function=functions.hyper_connection,
        shape=(rows, 4 * cols),
        arguments=_floats((rows, 4, cols), (rows, cols), (rows, 4, 4), (rows, 4)),
        elements=_elements(rows * (9 * cols + 20), rows * (14 * cols + 40)),
    )
    yield Workload(
        name="sinkhorn",
        function=functions.sinkhorn_of(sizes.steps),
        shape=(rows, 16),
        arguments=_floats((rows, 4, 4)),
        elements=_elements(rows * 48, rows * 64),
    )


def _quantised(sizes: Sizes) -> Iterator[Workload]:
    """Yields forwards of results in fp8: half an element of 16 bits each, a scale two."""
    norms, sums, units = sizes.quantised
    for rows, cols in norms:
        yield Workload(
            name="rms_norm_to_fp8",
            function=functions.rms_norm_to_fp8,
            shape=(rows, cols),
            arguments=_untrained((rows, cols), (cols,)),
            elements={"fwd": rows * cols * 3 // 2 + 2 * rows},
            by_hand=functions.rms_norm_to_fp8_by_hand,
        )
    for rows, cols in sums:
        yield Workload(
            name="add_rms_norm_to_fp8_blocks",
            function=functions.add_rms_norm_to_fp8_blocks,
            shape=(rows, cols),
            arguments=_untrained((rows, cols), (rows, cols), (cols,)),
            elements={"fwd": rows * cols * 7 // 2 + rows * cols // 64},
            by_hand=functions.add_rms_norm_to_fp8_blocks_by_hand,
        )
    for rows, cols in units:
        yield Workload(
            name="swiglu_to_fp8_blocks",
            function=functions.swiglu_to_fp8_blocks,
            shape=(rows, cols),
            arguments=_untrained((rows, 2 * cols)),
            elements={"fwd": rows * cols * 5 // 2 + rows * cols // 64},
            by_hand=functions.swiglu_to_fp8_blocks_by_hand,
        )


def _untrained(*shapes: Shape) -> tuple[Argument, ...]:
    return tuple([Argument(shape, trained=False) for shape in shapes])


FUNCTIONS = tuple(dict.fromkeys(workload.name for workload in workloads()))
