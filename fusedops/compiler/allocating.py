"""Functions that allocate a program's outputs and gradients: written as flat code, since each call runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.operand import empty
from .structure import Operand

if TYPE_CHECKING:
    from .operator import Program

__all__ = ["gradient_allocator", "output_allocator"]

Allocated = tuple[Tensor | None, ...]


def output_allocator(program: Program) -> Callable[[Any, bool], Allocated]:
    """From the inputs, and whether a backward follows, to the outputs, the intermediate, and the numbers of rows."""
    structure, plan = program.structure, program.plan
    first = f"tensors[{program.first}]"
    sizes = {axis: f"tensors[{place}].shape[{dim}]" for axis, (_, place, dim) in program.dynamic.items()}
    likes = [(operand.labels, f"tensors[{place}]") for place, operand in enumerate(structure.inputs)]
    made = [_new(program, operand, first, sizes, likes) for operand in structure.outputs]
    if program.own:
        assert plan.intermediate_operand is not None
        made.append(f"{_new(program, plan.intermediate_operand, first, sizes, likes)} if saves else None")
    rows = " * ".join([sizes.get(axis, str(structure.sizes[axis])) for axis in structure.rows]) or "1"
    stats = f"{first}.new_empty(({len(plan.stats)}, {rows}), dtype={program.acc}) if saves else None"
    made.append(stats if plan.stats else "None")
    return _function("tensors, saves", made)


def gradient_allocator(program: Program, output: int) -> Callable[[Any, Any], Allocated]:
    """From the cotangent of an output, and which inputs need a gradient, to the gradients."""
    dims = program.dims_of(output)
    sizes = {axis: f"like.shape[{dims[axis]}]" for axis in program.dynamic}
    likes = [(program.operand(output).labels, "like")]
    made = [f"{_new(program, operand, 'like', sizes, likes)} if needed[{place}] else None"
            for place, operand in enumerate(program.structure.inputs)]  # fmt: skip
    return _function("like, needed", made)


def _new(program: Program, operand: Operand, like: str, sizes: dict[int, str],
         likes: Sequence[tuple[Any, str]]) -> str:  # fmt: skip
    """An expression for a new tensor."""
    same = next((name for labels, name in likes if labels == operand.labels), None)
    if same is not None:
        return f"empty({same}, {operand.dtype})"
    shape = [" * ".join([sizes.get(axis, str(program.structure.sizes[axis])) for axis in label]) or "1"
             for label in operand.labels]  # fmt: skip
    return f"{like}.new_empty(({''.join(f'{size}, ' for size in shape)}), dtype={operand.dtype})"


def _function(parameters: str, made: Sequence[str]) -> Callable[..., Allocated]:
    namespace: dict[str, Any] = {"empty": empty, "torch": torch}
    exec(f"def allocate({parameters}):\n    return ({''.join(f'{one}, ' for one in made)})", namespace)
    return namespace["allocate"]  # type: ignore[no-any-return]
