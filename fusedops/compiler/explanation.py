"""What runs for a call of a row-wise function, in words and numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import compat, launch, tuning
from ..core.tuning_key import TuningKey
from ..core.usage import Usage, usage_of
from .launching import chosen
from .planning import Alternative

if TYPE_CHECKING:
    from .operator import Program

__all__ = ["Explanation", "KernelExplanation", "explained"]


@dataclass(frozen=True)
class KernelExplanation:
    """One kernel of a call with all gradients.

    Attributes:
        name: the kernel's name in the source.
        key: the tuning key, on which the config depends.
        config: the launch parameters.
        origin: the source of the config: the cache, the shipped table or a heuristic.
        moved: the bytes per row that the kernel reads from and writes to full tensors.
        usage: registers and spilled bytes per thread; None on devices where kernels are not compiled.
    """

    name: str
    key: TuningKey
    config: tuning.Config
    origin: tuning.Source
    moved: int
    usage: Usage | None

    def cells(self) -> tuple[str, ...]:
        """Of a table."""
        usage = "" if self.usage is None else f"{self.usage.registers} registers, {self.usage.spills} bytes spilled"
        return self.name, f"{self.moved} bytes of a row", f"{self.config} ({self.origin})", usage


@dataclass(frozen=True)
class Explanation:
    """What runs for a call.

    Attributes:
        function: the function's name.
        reason: why the function runs unfused; "" if kernels run.
        rows: the number of rows.
        columns: the number of columns in each part of a row.
        parts: the number of equal parts into which a row is split; 1 if it is not split.
        tensors: the name and dtype of each input and output, and the dimensions along which it varies.
        saved: the tensors that are saved for the backward.
        alternatives: the intermediate results that could be saved for the backward, the best first, with their cost in
            bytes per row.
        kernels: the kernels of a call in which every input needs a gradient, in the order in which they run.
    """

    function: str
    reason: str = ""
    rows: int = 0
    columns: int = 0
    parts: int = 1
    tensors: tuple[tuple[str, str, str], ...] = ()
    saved: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    kernels: tuple[KernelExplanation, ...] = ()

    def __str__(self) -> str:
        if self.reason:
            return f"{self.function} runs as it is: {self.reason}"
        parts = f" in {self.parts} parts" if self.parts > 1 else ""
        lines = [
            f"{self.function} runs as kernels, on rows of {self.columns * self.parts} columns{parts}",
            "",
            "tensors",
        ]
        lines += _table(self.tensors)
        lines += ["", f"saved for the backward: {', '.join(self.saved) or 'nothing'}", "",
                  "alternatives, the first of which is chosen, in bytes of a row written and read again, and held"]  # fmt: skip
        best = self.alternatives[:6]
        lines += _table([(a.name or "inputs alone", f"{a.moved} moved", f"{a.held} held",
                          f"{a.operators} operators recomputed") for a in best])  # fmt: skip
        return "\n".join([*lines, "", "kernels", *_table([k.cells() for k in self.kernels])])


def _table(rows: object) -> list[str]:
    texts = [tuple(map(str, row)) for row in rows]  # type: ignore[attr-defined]
    widths = [max(len(row[i]) for row in texts) for i in range(len(texts[0]))] if texts else []
    return [
        "  " + "  ".join([text.ljust(width) for text, width in zip(row, widths, strict=True)]).rstrip() for row in texts
    ]


def explained(program: Program, tensors: Sequence[Tensor]) -> Explanation:
    """What runs for a call of a program with these tensors."""
    structure, plan, sizes = program.structure, program.plan, program.sizes_of(tensors)
    operands = [(operand.name, str(operand.dtype).removeprefix("torch."), _class_of(program, operand.axes))
               for operand in (*structure.inputs, *structure.outputs)]  # fmt: skip
    saved = [structure.inputs[place].name for place in plan.saved_inputs]
    if plan.intermediate_operand is not None:
        whose = "the output " if plan.intermediate_output >= 0 else ""
        saved.append(
            f"{whose}{plan.intermediate_operand.name} ({str(plan.intermediate_operand.dtype).removeprefix('torch.')})"
        )
    if plan.stats:
        saved.append(f"{len(plan.stats)} number{'s' if len(plan.stats) > 1 else ''} of each row")
    device = next(t.device for t in tensors)
    index = -1 if launch.interpreting() or device.type != "cuda" else device.index or torch.cuda.current_device()
    kernels = [KernelExplanation(request.kernel.fn.__name__, key, request.config, tuning.source(key, index), moved,
                                 _usage(request, index)) for key, request, moved in chosen(program, index, tensors)]  # fmt: skip
    return Explanation(
        program.op,
        "",
        math.prod([sizes[axis] for axis in structure.rows]),
        structure.cols,
        structure.parts_of_row,
        tuple(operands),
        tuple(saved),
        plan.alternatives,
        tuple(kernels),
    )


def _usage(request: launch.Request, device_index: int) -> Usage | None:
    if device_index < 0 or not compat.compiles_ahead():
        return None
    return usage_of(launch.compile_fitting(request, launch.shared_memory(device_index)))


def _class_of(program: Program, axes: tuple[int, ...]) -> str:
    """Along what a tensor varies."""
    structure = program.structure
    rows = tuple([axis for axis in axes if axis in structure.rows])
    columns = any(axis not in structure.rows for axis in axes)
    if not rows:
        return "columns" if columns else "one number"
    others = "groups of rows" if rows == program.group else "some rows, by index"
    what = "rows" if rows == structure.rows else others
    return f"{what} and columns" if columns else what
