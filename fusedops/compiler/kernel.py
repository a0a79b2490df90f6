"""The record of a generated kernel, and its source from the lines of its body."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .addresses import Argument
from .axes import Label
from .costs import excess
from .structure import Part
from .text import indented

__all__ = ["SLICE_ARGUMENTS", "Kernel", "first_lines", "slice_source", "source_of"]

# The arguments of the function of one slice, after those of its kernel.
SLICE_ARGUMENTS = ("N", "program", "programs")
# Arguments whose values Triton does not compile into a kernel.
_NOT_SPECIALIZED = ("seed", "offset", "rows", "chunks", "programs", "groups")


@dataclass(frozen=True)
class Kernel:
    """A kernel's source.

    Attributes:
        name: the name of its function.
        source: its source.
        arguments: in order.
        group: the row axes of groups of rows; () without groups. The rows of a group have the same
            index along these axes, and share vectors: see `layouts.row_layout`. Axis 1 of the grid
            is groups.
        tiled: whether a program has one tile of columns of each of its rows.
        sums: the inputs whose gradients are sums over rows, with their parts, in the order of their
            slots.
        written: the inputs whose gradients it writes with all rows, although the inputs lack some
            axes. The caller sums them over these axes.
        moved: the dtypes of the tensors with all rows and columns that it reads and writes, one for
            each load and store.
        moments: how many statistics of each row it writes for the next kernel.
        live: how many values along columns are live at a time, at most. Always live are vectors
            that are loaded before the tiles, tiles for a later phase, and sums over rows.
        divides: whether it divides the index of a row, to get its index along single axes.
        held: whether a program holds its columns of a row at once, in PARTS adjacent tiles.
        joins: whether a tile may have several slices: see `horizontal.tiles`.
        shares: whether several programs may share the columns of a row.
        read: the dtypes of those of them that it reads, one for each load.
        reductions: the number of reductions of rows that depend on one another.
        instructions: its instructions for an element of whole tensors, an estimate: see `costs`.
        drops: whether it draws random numbers.
        exchanged: the number of sums of a row that the programs sharing it exchange.
        loops: whether a program has several tiles of rows, one after the other.
        contracts: whether a product and a sum may be one instruction.
        stats: how many numbers of each row the forward saves for the backward.
        block: the columns of a block, if something reduces over blocks of a row: a tile has whole
            blocks. Else 0.
    """

    name: str
    source: str
    arguments: tuple[Argument, ...]
    group: Label = ()
    tiled: bool = False
    sums: tuple[tuple[int, Part], ...] = ()
    written: tuple[int, ...] = ()
    moved: tuple[torch.dtype, ...] = ()
    moments: int = 0
    live: int = 0
    divides: bool = False
    held: bool = False
    joins: bool = False
    shares: bool = False
    read: tuple[torch.dtype, ...] = ()
    reductions: int = 0
    instructions: int = 0
    drops: bool = False
    exchanged: int = 0
    loops: bool = False
    contracts: bool = False
    stats: int = 0
    block: int = 0

    @property
    def excess(self) -> float:
        """The instructions for an element beyond those that its loads and stores hide."""
        return excess(self.instructions, self.moved)

    @property
    def is_backward(self) -> bool:
        """Whether it reads gradients of results."""
        return "cotangent" in self._kinds

    @property
    def checks(self) -> bool:
        """Whether it checks indices of tables: a forward does, with the backward's indices."""
        return "index" in self._kinds and not self.is_backward

    @property
    def _kinds(self) -> set[str]:
        return {argument.kind for argument in self.arguments}


def first_lines(*, drops: bool) -> list[str]:
    """Return the first lines of a kernel.

    Args:
        drops: whether it draws random numbers.
    """
    lines = ["await_predecessor(OVERLAP)"]
    if drops:
        lines.append("seed, offset = load_seed(seed, offset)")
    return lines


def slice_source(
    name: str, arguments: Sequence[Argument], constants: Sequence[str], body: Sequence[str]
) -> str:
    """Return the source of the function of one slice, which a kernel of many slices calls.

    Its arguments are those of a kernel, the length of a row, and the index of the program among
    those of the slice, with their number: see `horizontal`. It has no constant N.
    """
    names = [argument.name for argument in arguments]
    lines = ["@triton.jit", f"def {name}("]
    lines += indented([f"{parameter}," for parameter in (*names, *SLICE_ARGUMENTS)])
    lines += indented([f"{constant}: tl.constexpr," for constant in constants if constant != "N"])
    return "\n".join([*lines, "):", *indented(body)]) + "\n"


def source_of(
    name: str, arguments: Sequence[Argument], constants: Sequence[str], body: Sequence[str]
) -> str:
    """Return the source of a kernel.

    Args:
        name: the name of its function.
        arguments: the run-time arguments, in order.
        constants: the names of the compile-time arguments.
        body: the lines of the function.
    """
    # These change from call to call: a variant of its own for values like 1 or multiples of 16
    # would be compiled again and again.
    fixed = [argument.name for argument in arguments if argument.kind in _NOT_SPECIALIZED]
    lines = [f"@triton.jit(do_not_specialize={fixed!r})", f"def {name}("]
    lines += indented([f"{argument.name}," for argument in arguments])
    lines += indented(map("{}: tl.constexpr,".format, constants))
    return "\n".join([*lines, "):", *indented(body)]) + "\n"
