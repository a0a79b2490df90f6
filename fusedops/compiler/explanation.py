"""Describe what runs for a call of a row-wise function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.compat.triton import compiles_ahead
from ..core.configs import tuning
from ..core.configs.tuning_key import TuningKey
from ..core.launches import launch
from ..core.launches.usage import Usage, usage_of
from . import configs
from .launching import chosen
from .planning import Alternative
from .structure import within

if TYPE_CHECKING:
    from .operator import Program

__all__ = ["Explanation", "KernelExplanation", "explained"]

_ALTERNATIVES = (
    "alternatives, the first of which is chosen, in bytes of a row written and read again, and held"
)


@dataclass(frozen=True)
class KernelExplanation:
    """One kernel of a call with all gradients.

    Attributes:
        name: the kernel's name in the source.
        key: the tuning key, on which the config depends.
        config: the launch parameters.
        origin: the source of the config: the cache, the shipped table or a heuristic.
        reason: why the heuristic chooses its config; "" if the config has another source.
        moved: the bytes per row that the kernel reads from and writes to full tensors.
        usage: registers and spilled bytes per thread; None on devices where kernels are not
            compiled.
    """

    name: str
    key: TuningKey
    config: tuning.Config
    origin: tuning.Source
    reason: str
    moved: int
    usage: Usage | None

    def cells(self) -> tuple[str, ...]:
        """Return the kernel's row of a table."""
        usage = ""
        if self.usage is not None:
            usage = f"{self.usage.registers} registers, {self.usage.spills} bytes spilled"
        origin = ": ".join(filter(None, [self.origin, self.reason]))
        return self.name, f"{self.moved} bytes of a row", f"{self.config} ({origin})", usage


@dataclass(frozen=True)
class Explanation:
    """A description of what runs for a call.

    Attributes:
        function: the function's name.
        reason: why the function runs unfused; "" if kernels run.
        rows: the number of rows.
        columns: the number of columns in each part of a row.
        parts: the number of equal parts into which a row is split; 1 if it is not split.
        tensors: the name and dtype of each input and output, and the dimensions along which it
            varies.
        saved: the tensors that are saved for the backward.
        alternatives: the intermediate results that could be saved for the backward, the best first,
            with their cost in bytes per row.
        kernels: the kernels of a call in which every input needs a gradient, in the order in which
            they run.
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
        columns = self.columns * self.parts
        lines = [
            f"{self.function} runs as kernels, on rows of {columns} columns{parts}",
            "",
            "tensors",
            *_table(self.tensors),
            "",
            f"saved for the backward: {', '.join(self.saved) or 'nothing'}",
            "",
            _ALTERNATIVES,
            *_table(list(map(_cells_of, self.alternatives[:6]))),
            "",
            "kernels",
            *_table([kernel.cells() for kernel in self.kernels]),
        ]
        return "\n".join(lines)


def _cells_of(alternative: Alternative) -> tuple[str, ...]:
    """Return an alternative's row of a table."""
    return (
        alternative.name or "inputs alone",
        f"{alternative.moved} moved",
        f"{alternative.held} held",
        f"{alternative.operators} operators recomputed",
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        cells = map(str.ljust, row, widths)
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def explained(program: Program, tensors: Sequence[Tensor]) -> Explanation:
    """Return what runs for a call of a program with these tensors."""
    structure = program.structure
    sizes = program.sizes_of(tensors)
    operands = [
        (operand.name, _name_of(operand.dtype), _variation(program, operand.axes))
        for operand in (*structure.inputs, *structure.outputs)
    ]
    index = _device_index(tensors[0].device)
    kernels = [
        KernelExplanation(
            request.kernel.fn.__name__,
            key,
            request.config,
            tuning.source(key, index),
            _reason(key, index),
            moved,
            _usage(request, index),
        )
        for key, request, moved in chosen(program, index, tensors)
    ]
    return Explanation(
        program.op,
        "",
        math.prod([sizes[axis] for axis in structure.rows]),
        structure.cols,
        structure.parts_of_row,
        tuple(operands),
        tuple(_saved(program)),
        program.plan.alternatives,
        tuple(kernels),
    )


def _saved(program: Program) -> list[str]:
    """Return descriptions of the tensors that are saved for the backward."""
    plan = program.plan
    saved = [program.structure.inputs[i].name for i in plan.saved_inputs]
    operand = plan.intermediate_operand
    if operand is not None:
        prefix = "the output " if plan.intermediate_output >= 0 else ""
        saved.append(f"{prefix}{operand.name} ({_name_of(operand.dtype)})")
    if plan.stats:
        plural = "s" if len(plan.stats) > 1 else ""
        saved.append(f"{len(plan.stats)} number{plural} of each row")
    return saved


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_index(device: torch.device) -> int:
    """Return a GPU's index; -1 for the interpreter."""
    if launch.interpreting() or device.type != "cuda":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


def _reason(key: TuningKey, index: int) -> str:
    return configs.reason(key) if tuning.source(key, index) == "heuristic" else ""


def _usage(request: launch.Request, device_index: int) -> Usage | None:
    """Return the registers of a compiled kernel; None if kernels are not compiled."""
    if device_index < 0 or not compiles_ahead():
        return None
    return usage_of(launch.compile_fitting(request, launch.shared_memory(device_index)))


def _variation(program: Program, axes: tuple[int, ...]) -> str:
    """Return the dimensions along which a tensor varies."""
    rows = tuple(within(axes, program.structure.rows))
    names: list[str] = []
    if rows:
        names.append(_name_of_rows(program, rows))
    if len(rows) < len(axes):
        names.append("columns")
    return " and ".join(names) or "one number"


def _name_of_rows(program: Program, rows: tuple[int, ...]) -> str:
    """Return how a tensor's rows correspond to those of the call."""
    if rows == program.structure.rows:
        return "rows"
    if rows == program.group:
        return "groups of rows"
    return "some rows, by index"
