"""The loop over chunks of rows: logits, a function of each row, and the gradients.

For a sum or mean of the function's results the gradients are formed in the forward: three products
in all. For results of each row the backward computes the logits again: four products.

    chunk of rows ──▶ logits ──▶ results, gradient of logits in their place
                                   │            ├──▶ gradient of the rows
                                   ▼            └──▶ added to the weight's gradient
                              sum, or each

Logits may be a sum of products, as of a weight and of a low-rank adapter. The first product
overwrites the buffer of logits, and the others add to it. The gradient of all is that of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compiler.operator import Program
from .chunks import accumulated_in, chunk_rows
from .operands import Loss, Operands
from .products import logits_of, product
from .rows import CallPrograms, Chunk, check_program

__all__ = ["backward", "check", "described", "forward", "gradient_dtype"]


@dataclass(frozen=True)
class _Slice:
    """Rows of a call: those at ``index``, or from ``start`` to ``stop``."""

    start: int
    stop: int
    index: Tensor | None

    @property
    def count(self) -> int:
        return self.stop - self.start

    def of(self, t: Tensor) -> Tensor:
        """Returns these rows of a tensor."""
        if self.index is None:
            return t[self.start : self.stop]
        return t.index_select(0, self.index)

    def write(self, t: Tensor, rows: Tensor) -> None:
        """Writes these rows of a tensor."""
        if self.index is None:
            t[self.start : self.stop].copy_(rows)
        else:
            t.index_copy_(0, self.index, rows)


def gradient_dtype(operands: Operands, position: int, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a gradient before the gradient of the loss is known.

    A sum over rows comes before a mean's division. In fp16 it could overflow: it is in fp32.

    Args:
        operands: the arguments of the call.
        position: the argument's, among all inputs, weights, biases and other arguments.
        dtype: the argument's dtype.
    """
    count = len(operands.inputs)
    by_row = position < count or (position >= 3 * count and operands.by_row[position - 3 * count])
    return torch.float32 if dtype == torch.float16 and not by_row else dtype


class _Loop:
    """The chunks of a call, and the gradients that they add to.

    Args:
        loss: the function.
        operands: its arguments.
        needs: for each input, weight, bias and other argument, whether its gradient is wanted.
    """

    def __init__(self, loss: Loss, operands: Operands, needs: Sequence[bool]) -> None:
        self.loss, self.operands = loss, operands
        self.programs = CallPrograms(loss.rows)
        count = len(operands.inputs)
        self.of_inputs = needs[:count]
        self.of_weights = needs[count : 2 * count]
        self.of_biases = needs[2 * count : 3 * count]
        self.of_others = needs[3 * count :]
        self.products = list(map(operands.products, range(operands.heads)))
        self.any = any(needs)
        choice = loss.choice(operands)
        self.index, self.count, self.mask = choice.index, choice.count, choice.mask
        self.counted = choice.counted
        self.weights, self.biases = operands.parameters()
        device = operands.inputs[0].device
        row_bytes = loss.columns(operands) * operands.dtype.itemsize
        self.size = chunk_rows(
            loss.name,
            self.count,
            row_bytes,
            operands.chunk_mib,
            device,
            self._bytes_in_fp32() if any(self.of_weights) else None,
        )
        like = operands.inputs[0]
        rows = min(self.size, self.count)
        self.buffers = [
            like.new_empty(rows, weight.shape[0], dtype=operands.dtype)
            for weight in self.weights[: operands.heads]
        ]
        self._create_gradients()

    def _create_gradients(self) -> None:
        """Creates the wanted gradients, which chunks overwrite or add to."""
        operands, chunks = self.operands, -(-self.count // self.size)
        pairs = zip(operands.inputs, self.of_inputs, strict=True)
        self.d_inputs = [self._of_rows(t) if need else None for t, need in pairs]
        create = torch.empty_like if chunks else torch.zeros_like
        self.d_weights = [
            # The first product overwrites it.
            create(w, dtype=accumulated_in(w.dtype, chunks), memory_format=_DENSE) if need else None
            for w, need in zip(operands.weights, self.of_weights, strict=True)
        ]
        self.d_biases = [
            _zeros(b, wide=True) if need else None
            for b, need in zip(operands.biases, self.of_biases, strict=True)
        ]
        triples = zip(operands.others, operands.by_row, self.of_others, strict=True)
        self.d_others = [
            _zeros(other, wide=not by_row) if need else None for other, by_row, need in triples
        ]

    def _bytes_in_fp32(self) -> int:
        """Returns the bytes of the weights' gradients in fp32, of those in 16 bits."""
        pairs = zip(self.operands.weights, self.of_weights, strict=True)
        return sum([4 * w.numel() for w, need in pairs if need and w.dtype.itemsize < 4])

    def _of_rows(self, t: Tensor) -> Tensor:
        """Returns the gradient of rows: zeros if some rows are left out."""
        whole = self.index is None and self.count == t.shape[0]
        create = torch.empty_like if whole else torch.zeros_like
        return create(t, memory_format=_DENSE)

    def slices(self) -> Iterator[_Slice]:
        """Yields the rows of each chunk."""
        for start in range(0, self.count, self.size):
            stop = min(start + self.size, self.count)
            index = None if self.index is None else self.index[start:stop]
            yield _Slice(start, stop, index)

    def masked(self, t: Tensor, rows: _Slice | None = None) -> Tensor:
        """Returns numbers of all rows, or of some, with zeros for those that do not count.

        A row that does not count may have any result.
        """
        if self.mask is None:
            return t
        return torch.where(self.mask if rows is None else rows.of(self.mask), t, 0)

    def chunk(self, rows: _Slice, numbers: Tensor | None = None) -> tuple[Chunk, list[Tensor]]:
        """Computes the logits of some rows; returns the function's call on them, and the rows.

        The rows are those of each product. ``numbers`` are those that an earlier call saved for
        these rows.
        """
        operands = self.operands
        inputs = [rows.of(t).to(operands.dtype) for t in operands.inputs]
        logits = [buffer[: rows.count] for buffer in self.buffers]
        # The heads' own products come first.
        for t, weight, bias, out in zip(inputs, self.weights, self.biases, logits, strict=False):
            logits_of(t, weight, bias, out)
        for position, of_head in enumerate(operands.added, start=operands.heads):
            weight = self.weights[position]
            product(logits[of_head], inputs[position], weight.t(), adds=True)
        others = [
            rows.of(other) if by_row else other
            for other, by_row in zip(operands.others, operands.by_row, strict=True)
        ]
        wanted = [*map(self._needs_logits, self.products), *self.of_others]
        return Chunk(self.programs, logits, others, wanted, numbers), inputs

    def _needs_logits(self, products: Sequence[int]) -> bool:
        """Whether a gradient of these products is wanted, and so that of their logits."""
        needs = [self.of_inputs, self.of_weights, self.of_biases]
        return any(of_kind[position] for of_kind in needs for position in products)

    def add(self, rows: _Slice, inputs: Sequence[Tensor], gradients: dict[int, Tensor]) -> None:
        """Adds the gradients of a chunk."""
        heads = self.operands.heads
        for position, gradient in gradients.items():
            if position >= heads:
                self._add_of_other(rows, position - heads, gradient)
                continue
            for index in self.products[position]:
                self._add_of_product(rows, index, inputs[index], gradient)

    def _add_of_product(self, rows: _Slice, index: int, t: Tensor, d_logits: Tensor) -> None:
        """Adds the gradients of a product's rows, weight and bias from that of its logits."""
        weight, d_input = self.weights[index], self.d_inputs[index]
        d_weight, d_bias = self.d_weights[index], self.d_biases[index]
        if d_input is not None and rows.index is None:
            product(d_input[rows.start : rows.stop], d_logits, weight)
        elif d_input is not None:
            d_rows = d_input.new_empty(rows.count, d_input.shape[1])
            product(d_rows, d_logits, weight)
            rows.write(d_input, d_rows)
        if d_weight is not None:
            product(d_weight, d_logits.t(), t, adds=rows.start > 0)
        if d_bias is not None:
            d_bias += d_logits.sum(0, dtype=d_bias.dtype)

    def _add_of_other(self, rows: _Slice, index: int, gradient: Tensor) -> None:
        """Adds the gradient of another argument, which has its rows or is the same for all."""
        d_other = self.d_others[index]
        if d_other is None:
            return
        if self.operands.by_row[index]:
            rows.write(d_other, gradient)
        else:
            d_other += gradient

    def gradients(self) -> list[Tensor]:
        """Returns the wanted gradients, in the dtypes of `gradient_dtype`."""
        operands = self.operands
        gradients = [*self.d_inputs, *self.d_weights, *self.d_biases, *self.d_others]
        pairs = zip(operands.arguments, gradients, strict=True)
        return [
            gradient.to(gradient_dtype(operands, position, t.dtype))
            for position, (t, gradient) in enumerate(pairs)
            if gradient is not None
        ]


_DENSE = torch.contiguous_format


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which gradients of vectors are summed over chunks."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def _zeros(t: Tensor | None, *, wide: bool) -> Tensor | None:
    """Returns zeros of a tensor's shape, in its dtype or the wide one; None for None."""
    if t is None:
        return None
    dtype = _wide(t.dtype) if wide else t.dtype
    return torch.zeros_like(t, dtype=dtype, memory_format=_DENSE)


def forward(
    loss: Loss, operands: Operands, needs: Sequence[bool]
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the results, and what the backward needs.

    Of a sum or mean the latter is the scale by which gradients are still to be multiplied, and the
    gradients; of results of each row the numbers that the backward reads, in the order of chunks.
    Without these numbers a backward computes the results again.
    """
    loop = _Loop(loss, operands, needs)
    if loss.reduction == "none":
        return _each(loop)
    return _reduced(loop)


def _each(loop: _Loop) -> tuple[list[Tensor], list[Tensor]]:
    operands = loop.operands
    like = operands.inputs[0]
    dtypes, each, dtype = described(loop.loss, operands)
    results = [like.new_zeros(operands.rows, dtype=of_result) for of_result in dtypes]
    # As many as for all rows, so that their number does not depend on which rows count.
    each = each if loop.any and not loop.loss.combines else 0
    numbers = like.new_zeros(each * operands.rows, dtype=dtype)
    for rows in loop.slices():
        chunk, _ = loop.chunk(rows)
        of_rows, _ = loop.loss.combined(operands, chunk.results, ())
        for result, of_chunk in zip(results, of_rows, strict=True):
            rows.write(result, of_chunk)
        if each and chunk.numbers is not None:
            numbers[each * rows.start : each * rows.stop] = chunk.numbers.flatten()
    return [loop.masked(result) for result in results], [numbers]


def _reduced(loop: _Loop) -> tuple[list[Tensor], list[Tensor]]:
    operands = loop.operands
    scale = loop.loss.scale(operands, loop.counted)
    # In fp16 gradients divided by the number of rows would underflow. They are multiplied together
    # with the gradient of the loss, which is large where gradients are scaled.
    is_late = operands.dtype == torch.float16
    each = torch.ones(operands.rows, dtype=scale.dtype, device=scale.device)
    if not is_late:
        each *= scale
    each = loop.masked(each)
    totals: list[Tensor] = []
    for rows in loop.slices():
        chunk, inputs = loop.chunk(rows)
        (result,), cotangents = loop.loss.combined(operands, chunk.results, [rows.of(each)])
        totals.append(loop.masked(result, rows).sum(dtype=scale.dtype))
        if loop.any:
            loop.add(rows, inputs, chunk.gradients(cotangents))
    total = torch.stack(totals).sum() if totals else torch.zeros_like(scale)
    late = scale if is_late else torch.ones_like(scale)
    return [total * scale], [late, *loop.gradients()]


def backward(
    loss: Loss,
    operands: Operands,
    needs: Sequence[bool],
    cotangents: Sequence[Tensor],
    numbers: Tensor,
) -> list[Tensor]:
    """Returns the wanted gradients from those of the results of each row, (M,)."""
    loop = _Loop(loss, operands, needs)
    cotangents = [loop.masked(c) for c in cotangents]
    each = numbers.numel() // max(operands.rows, 1)
    for rows in loop.slices():
        part = numbers[each * rows.start : each * rows.stop] if each else None
        chunk, inputs = loop.chunk(rows, part)
        of_rows = [rows.of(c).contiguous() for c in cotangents]
        _, of_results = loss.combined(operands, chunk.results, of_rows)
        loop.add(rows, inputs, chunk.gradients(of_results))
    return loop.gradients()


def check(loss: Loss, operands: Operands) -> Program:
    """Returns the program of a call's function.

    Raises:
        NotRowwiseError: the function cannot be one kernel.
        TypeError: it is no loss; see `rows.check`.
    """
    arguments = _sample(operands)
    program, tensors = loss.rows.program_of(arguments)
    captured = tensors[sum(isinstance(a, Tensor) for a in arguments) :]
    check_program(program, captured, single=loss.reduction != "none" and not loss.combines)
    return program


def _sample(operands: Operands) -> list[Any]:
    """Returns arguments of the function, with logits that have no memory."""
    one = operands.inputs[0].new_empty(1, 1, dtype=operands.dtype)
    # A symbol of classes becomes a number: kernels are compiled for it.
    weights = operands.weights[: operands.heads]
    logits = [one.expand(operands.rows, int(weight.shape[0])) for weight in weights]
    return [*logits, *operands.others]


def described(loss: Loss, operands: Operands) -> tuple[list[torch.dtype], int, torch.dtype]:
    """Returns the dtypes of results of each row, and the count and dtype of saved numbers."""
    program, _ = loss.rows.program_of(_sample(operands))
    dtypes = [operand.dtype for operand in program.structure.outputs]
    dtypes = dtypes[: loss.count] if loss.combines else dtypes
    return dtypes, len(program.plan.stats), program.acc
