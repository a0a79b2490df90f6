"""Counts what generated code launches, and the bytes that its kernels read and write.

Bytes of Inductor's kernels are its own count. It counts what calls of other code read and write,
too, and what an operator writes several times: as an argument, and as each changed buffer. So those
of this package's operators are counted from their programs instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from fusedops.compiler.codegen import backward_kernels, forward_kernels
from fusedops.compiler.kernel import Kernel
from fusedops.compiler.operator import Program
from fusedops.core.calls.registration import defined

__all__ = ["Counts", "counts_of"]

# A launch of one of Inductor's kernels, in the code that it generates, and of one of PyTorch's that
# adds up partial sums of such a kernel: ``x.run(...)``, and ``x = workspace_0[...]....sum(dim=0)``.
_LAUNCH = re.compile(r"^ +(\w+\.run\(|\w+ = workspace_\d+\[.*\.sum\()", re.MULTILINE)
_PRODUCTS = frozenset(
    {
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "_scaled_mm",
        "_grouped_mm",
        "convolution",
        "convolution_backward",
    }
)


@dataclass(frozen=True)
class Counts:
    """What the code of graphs does.

    Attributes:
        generated: launches of Inductor's kernels, and of the sums of their partial sums.
        generated_bytes: the bytes that they read and write.
        operators: launches of the kernels of this package's operators.
        operator_bytes: the bytes of whole tensors that they read and write.
        products: matrix products and convolutions.
        others: other calls, such as attentions.
    """

    generated: int = 0
    generated_bytes: int = 0
    operators: int = 0
    operator_bytes: int = 0
    products: int = 0
    others: int = 0

    def __add__(self, other: Counts) -> Counts:
        """Returns the counts of two graphs together."""
        return Counts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def counts_of(graph: Any, code: str) -> Counts:
    """Returns the counts of a graph.

    Args:
        graph: Inductor's `GraphLowering`, whose code is generated.
        code: the code.
    """
    moved, operators, products, others = 0, list[tuple[int, int]](), 0, 0
    for node in graph.scheduler.nodes:
        if not node.is_extern():
            moved += node.get_read_write_buffers_sizes()
    for kernel in _calls(graph.scheduler.nodes):
        if kernel.op_overload.namespace == "fusedops":
            operators.append(_of_operator(kernel))
        elif kernel.op_overload.overloadpacket.__name__ in _PRODUCTS:
            products += 1
        else:
            others += 1
    return Counts(
        generated=len(_LAUNCH.findall(code)),
        generated_bytes=moved,
        operators=sum([launches for launches, _ in operators]),
        operator_bytes=sum([moved for _, moved in operators]),
        products=products,
        others=others,
    )


def _calls(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yields the calls of other code that a scheduler's nodes are: Inductor's `ExternKernel`s."""
    for node in nodes:
        # A result of a call that has several is a node, too, without an operator.
        if node.is_extern() and isinstance(node.node.op_overload, torch._ops.OpOverload):
            yield node.node


def _of_operator(kernel: Any) -> tuple[int, int]:
    """Returns the launches and the bytes of a call of an operator of this package.

    An operator that is no traced function counts as one launch that reads and writes each argument
    once.
    """
    arguments = _arguments(kernel)
    name, _, direction = kernel.op_overload.overloadpacket.__name__.removesuffix("_out").rpartition(
        "_"
    )
    program = defined(name)
    if not isinstance(program, Program):
        return 1, sum([tensor.nbytes for tensor in _tensors(arguments.values())])
    kernels, sizes = _of_program(program, direction, arguments)
    row = sum([dtype.itemsize for one in kernels for dtype in one.moved]) * program.structure.cols
    # One more launch adds up the partial sums over rows.
    launches = len(kernels) + any(one.sums for one in kernels)
    return launches, row * math.prod([sizes[axis] for axis in program.structure.rows])


def _of_program(
    program: Program, direction: str, arguments: Mapping[str, Any]
) -> tuple[list[Kernel], Sequence[int]]:
    """Returns the kernels of a call of a traced function, and the sizes of its axes."""
    options: dict[str, Any] = {"group": (), "tiled": program.tiled}
    if direction == "forward":
        saved = (arguments.get("intermediate"), arguments["stats"])
        saves = any(isinstance(value, Tensor) for value in saved)
        kernels = forward_kernels(program.plan, program.acc, saves=saves, **options)
        return kernels, program.sizes_of([arguments[name] for name in program.tensors])
    grads = [arguments[f"d{name}"] for name in program.outputs[: program.visible]]
    written = [arguments[f"d{name}"] for name in program.tensors]
    kernels = backward_kernels(
        program.plan, program.acc, cotangents=_present(grads), wanted=_present(written), **options
    )
    return kernels, program.sizes_by(grads)


def _present(values: Sequence[Any]) -> list[int]:
    return [index for index, value in enumerate(values) if value is not None]


def _arguments(kernel: Any) -> dict[str, Any]:
    """Returns the arguments of a call, by name, with tensors without memory for buffers."""
    args, kwargs = kernel.unflatten_args(kernel.inputs, kernel.constant_args)
    names = [argument.name for argument in kernel.op_overload._schema.arguments]
    values = dict(zip(names, args, strict=False)) | kwargs
    return {name: _without_memory(value) for name, value in values.items()}


def _without_memory(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return list(map(_without_memory, value))
    if not hasattr(value, "get_size"):
        return value
    sizes = tuple(map(int, value.get_size()))
    return torch.empty(sizes, dtype=value.get_dtype(), device="meta")


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, list):
            yield from _tensors(value)
        elif isinstance(value, Tensor):
            yield value
