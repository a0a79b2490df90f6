"""A row-wise function of a chunk of logits, and its gradients in the memory of the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..compiler.function import Rowwise
from ..compiler.operator import Program
from ..compiler.programs import tensors_of
from ..core.random.rng import NO_DROPOUT

__all__ = ["CallPrograms", "Chunk", "check_program"]


class CallPrograms:
    """The programs of a call's chunks: one for each number of rows.

    Chunks differ in their rows alone, so that a look-up of one serves all of its size.

    Args:
        function: the row-wise function.
    """

    def __init__(self, function: Rowwise[..., Any]) -> None:
        self._function = function
        self._by_rows: dict[int, tuple[Program, list[Tensor]]] = {}

    def of(self, arguments: Sequence[Any], rows: int) -> tuple[Program, list[Tensor]]:
        """Returns the program of a chunk, and its inputs.

        Args:
            arguments: all of the function's arguments, by position.
            rows: the number of the chunk's rows.
        Raises:
            NotRowwiseError: the function cannot be one kernel.
        """
        inputs = tensors_of(arguments)
        if rows not in self._by_rows:
            program, tensors = self._function.program_of(arguments)
            self._by_rows[rows] = program, tensors[len(inputs) :]
        program, captured = self._by_rows[rows]
        return program, [*inputs, *captured]


class Chunk:
    """A call of a row-wise function on the logits of a chunk of rows.

    Args:
        programs: the programs of the call.
        logits: its first arguments, (R, V) each. They are written over.
        others: its other arguments.
        wanted: for each argument, whether its gradient will be asked for.
        numbers: the `numbers` of an earlier call on these logits. Then there are no results.
    Raises:
        NotRowwiseError: the function cannot be one kernel.

    Attributes:
        results: what it returns, (R,) each.
        numbers: the numbers of rows that its backward reads, (S, R); None without any.
    """

    def __init__(
        self,
        programs: CallPrograms,
        logits: Sequence[Tensor],
        others: Sequence[Any],
        wanted: Sequence[bool],
        numbers: Tensor | None = None,
    ) -> None:
        args = [*logits, *others]
        self._heads = len(logits)
        self._program, tensors = programs.of(args, len(logits[0]))
        program = self._program
        self._positions = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        needs = [wanted[i] for i in self._positions]
        self._needs = (*needs, *[False] * (len(tensors) - len(needs)))
        site = program.fitted_site(tensors, saves=any(self._needs))
        assert site is not None  # the tensors are of no subclass
        self._site = site
        outs = list(program.allocate(site, tensors))
        if numbers is not None and outs[-1] is not None:
            outs[-1] = numbers.view_as(outs[-1])
        # If the numbers of rows are known, the backward needs nothing else of the forward, unless
        # it reads a whole tensor that is neither an input nor an output.
        if numbers is None or program.own:
            program.forward(site, tensors, outs, NO_DROPOUT)
        self.results = tuple([out for out in outs[: program.count] if out is not None])
        self.numbers = outs[-1]
        self._saved = site.saved((*tensors, *outs, None))
        self._tensors = tensors

    def gradients(self, cotangents: Sequence[Tensor]) -> dict[int, Tensor]:
        """Returns the gradients of the wanted arguments, by position.

        The gradient of logits is written over them, where no kernel reads them again.

        Args:
            cotangents: the gradient of each result, (R,).
        """
        program, site = self._program, self._site
        grads = (*cotangents, *[None] * (program.visible - len(cotangents)))
        needed = program.needed(site, grads, self._needs)
        over = [need and self._is_replaced(i) for i, need in enumerate(needed)]
        own = tuple([need and not o for need, o in zip(needed, over, strict=True)])
        outs = list(program.allocate_gradients(site, grads, self._saved, own))
        for i, is_over in enumerate(over):
            if is_over:
                outs[i] = self._tensors[i]
        program.backward(site, grads, self._saved, outs, NO_DROPOUT)
        pairs = zip(self._positions, outs, strict=False)
        return {position: out for position, out in pairs if out is not None}

    def _is_replaced(self, index: int) -> bool:
        """Whether the gradient of an input may be written over it.

        Each element's gradient is computed from that element and from numbers of its row, which are
        known before any element is written: single elements of a row are saved, or reduced from the
        whole row. The exception is a row of parts that occur in one another's gradients.
        """
        operand = self._program.structure.inputs[index]
        if index >= self._heads:  # the caller's
            return False
        return self._program.structure.is_whole(operand) and not self._program.structure.unrolled


def check_program(program: Program, captured: Sequence[Tensor], *, single: bool) -> None:
    """Raises unless a program is that of a loss of each row.

    Args:
        program: the program.
        captured: the tensors that the function uses beside its arguments.
        single: whether it must have one result.
    Raises:
        TypeError: it drops elements, uses a tensor that needs a gradient, or returns anything but
            numbers of rows, or more than one where one is expected.
    """
    structure = program.structure
    if structure.drops:
        raise TypeError(f"{program.op}: a loss of logits in chunks has no dropout")
    if torch.is_grad_enabled() and any(t.requires_grad for t in captured):
        raise TypeError(
            f"{program.op}: it uses a tensor that needs a gradient; pass it as an argument"
        )
    for operand in structure.outputs:
        if set(operand.axes) != set(structure.rows) or len(operand.labels) != 1:
            raise TypeError(
                f"{program.op}: it returns a tensor of {len(operand.labels)} dimensions, expected "
                "one number for each row of logits"
            )
    if single and program.count != 1:
        raise TypeError(
            f"{program.op}: it returns {program.count} results, and their sum has more than one "
            'gradient; use reduction="none"'
        )
