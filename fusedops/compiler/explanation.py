"""What runs for a call of a row-wise function, in words and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..core import launch, tuning
from .launching import chosen
from .planning import Alternative

if TYPE_CHECKING:
    from .operator import Program

__all__ = ["Explanation", "explained"]


@dataclass(frozen=True)
class Explanation:
    """What runs for a call.

    Attributes:
        function: its name.
        reason: why the function runs as it is; "" if kernels run.
        rows, columns, parts: the names of dimensions, elements of a row, and the equal parts that rows are taken in.
        tensors: of each that goes in or out, its name, its dtype and along what it varies.
        kept: what is saved for the backward.
        alternatives: what may be kept of the function's own, the best first, in bytes of a row.
        kernels: of each, its name, the bits that it moves of a row, its config and where that comes from.
    """

    function: str
    reason: str = ""
    columns: int = 0
    parts: int = 1
    tensors: tuple[tuple[str, str, str], ...] = ()
    kept: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    kernels: tuple[tuple[str, str, str], ...] = ()

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
        lines += ["", f"kept for the backward: {', '.join(self.kept) or 'nothing'}", "",
                  "what else could be kept, in bytes of a row moved (forward and backward together) and held"]  # fmt: skip
        best = self.alternatives[:6]
        lines += _table([(a.name or "inputs alone", f"{a.moved} moved", f"{a.kept} held", f"{a.operators} operators again")
                         for a in best])  # fmt: skip
        return "\n".join([*lines, "", "kernels", *_table(self.kernels)])


def _table(rows: object) -> list[str]:
    texts = [tuple(map(str, row)) for row in rows]  # type: ignore[attr-defined]
    widths = [max(len(row[i]) for row in texts) for i in range(len(texts[0]))] if texts else []
    return [
        "  " + "  ".join([text.ljust(width) for text, width in zip(row, widths, strict=True)]).rstrip() for row in texts
    ]


def explained(program: Program, device: torch.device) -> Explanation:
    """What runs for calls of a program on a device."""
    structure, plan = program.structure, program.plan
    parts = 1
    for axis in structure.unrolled:
        parts *= structure.sizes[axis]
    tensors = [(operand.name, str(operand.dtype).removeprefix("torch."), _class_of(program, operand.axes))
               for operand in (*structure.inputs, *structure.outputs)]  # fmt: skip
    kept = [structure.inputs[place].name for place in plan.saved_inputs]
    if plan.kept_operand is not None:
        whose = "the output " if plan.kept_output >= 0 else ""
        kept.append(f"{whose}{plan.kept_operand.name} ({str(plan.kept_operand.dtype).removeprefix('torch.')})")
    if plan.stats:
        kept.append(f"{len(plan.stats)} numbers of each row")
    index = -1 if launch.interpreting() or device.type != "cuda" else device.index or torch.cuda.current_device()
    kernels = [
        (name, str(key), f"{config} ({tuning.source(key, index)})") for name, key, config in chosen(program, index)
    ]
    return Explanation(
        program.op, "", structure.cols, parts, tuple(tensors), tuple(kept), plan.alternatives, tuple(kernels)
    )


def _class_of(program: Program, axes: tuple[int, ...]) -> str:
    """Along what a tensor varies."""
    structure = program.structure
    rows = tuple([axis for axis in axes if axis in structure.rows])
    columns = any(axis not in structure.rows for axis in axes)
    if not rows:
        return "columns" if columns else "one number"
    others = "groups of rows" if rows == program.group else "rows by index"
    what = "rows" if rows == structure.rows else others
    return f"{what} and columns" if columns else what
