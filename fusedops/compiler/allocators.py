"""Write the functions that allocate a program's outputs and gradients.

Each call runs one of them, so they are compiled from flat source. This is the source, which has one
line, for an output like the first input, and two numbers that are saved for each row:

    def allocate(tensors, saves):
        return (
            empty(tensors[0], dtype=torch.float32, memory_format=dense),
            tensors[0].new_empty(2, tensors[0].shape[0], dtype=torch.float32) if saves else None,
        )
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .site import LaunchedProgram
from .structure import Operand
from .text import product, tuple_of

__all__ = ["gradient_allocator", "output_allocator"]

Allocated = tuple[Tensor | None, ...]


def output_allocator(
    program: LaunchedProgram, omitted: int = -1
) -> Callable[[Any, bool], Allocated]:
    """Return a function that allocates the outputs, the intermediate and the numbers of each row.

    Its arguments are the inputs, and whether a backward follows. The output ``omitted`` is None.
    """
    structure = program.structure
    plan = program.plan
    first = f"tensors[{program.first}]"
    sizes = {
        axis: f"tensors[{position}].shape[{dim}]"
        for axis, (_, position, dim) in program.dynamic.items()
    }
    likes = [(operand.labels, f"tensors[{i}]") for i, operand in enumerate(structure.inputs)]
    expressions = [_new(program, operand, first, sizes, likes) for operand in structure.outputs]
    if omitted >= 0:
        expressions[omitted] = "None"
    if program.own:
        assert plan.intermediate_operand is not None
        intermediate = _new(program, plan.intermediate_operand, first, sizes, likes)
        expressions.append(f"{intermediate} if saves else None")
    if plan.stats:
        rows = _product(program, structure.rows, sizes)
        shape = f"{len(plan.stats)}, {rows}"
        expressions.append(f"{first}.new_empty({shape}, dtype={program.acc}) if saves else None")
    else:
        expressions.append("None")
    return _function("tensors, saves", expressions)


def gradient_allocator(program: LaunchedProgram, output: int) -> Callable[[Any, Any], Allocated]:
    """Return a function that allocates the gradients.

    Its arguments are the cotangent of an output, and which inputs need a gradient.
    """
    dims = program.dims_of(output)
    sizes = {axis: f"like.shape[{dims[axis]}]" for axis in program.dynamic}
    likes = [(program.operand(output).labels, "like")]
    expressions = [
        f"{_new(program, operand, 'like', sizes, likes)} if needed[{i}] else None"
        for i, operand in enumerate(program.structure.inputs)
    ]
    return _function("like, needed", expressions)


def _new(
    program: LaunchedProgram,
    operand: Operand,
    like: str,
    sizes: dict[int, str],
    likes: Sequence[tuple[Any, str]],
) -> str:
    """Return an expression for a new tensor.

    Args:
        program: the program.
        operand: the tensor's labels and dtype.
        like: a tensor on the device.
        sizes: the expressions of dynamic sizes.
        likes: known tensors, with their labels. One with the operand's labels has its shape.
    """
    # `empty` copies the shape of a known tensor, and reads no sizes in Python.
    for labels, name in likes:
        if labels == operand.labels:
            return f"empty({name}, dtype={operand.dtype}, memory_format=dense)"
    # PyTorch reads single sizes faster than a tuple of them.
    sizes_of = ", ".join([_product(program, label, sizes) for label in operand.labels])
    return f"{like}.new_empty({sizes_of or '()'}, dtype={operand.dtype})"


def _product(program: LaunchedProgram, axes: Sequence[int], sizes: dict[int, str]) -> str:
    """Return an expression for the product of the sizes of axes."""
    factors = [sizes.get(axis, str(program.structure.sizes[axis])) for axis in axes]
    return product(factors)


def _function(parameters: str, expressions: Sequence[str]) -> Callable[..., Allocated]:
    """Compile a function that returns the values of expressions."""
    names = {"empty": torch.empty_like, "dense": torch.contiguous_format}
    namespace: dict[str, Any] = {**names, "torch": torch}
    exec(f"def allocate({parameters}):\n    return {tuple_of(expressions)}", namespace)
    return namespace["allocate"]  # type: ignore[no-any-return]
