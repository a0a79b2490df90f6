"""Sums over rows, in kernels whose tiles of a row are side by side.

The sums are gradients of tensors that rows share. A program loops over tiles of rows, and adds each
tile to its sums::

    the tensor     what is summed              the sums
    a vector       a value for each column     one sum for each column, in tiles
    a number       one value for each row      one sum
    a number       a value for each column     one sum for each lane, and in the end their sum

In each step of the loop the rows of the tile are summed. A kernel without reductions of rows adds
whole tiles of columns instead, and sums their rows after the loop: a step then exchanges no tile
between threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from .emitter import Emitter
from .ir import Node
from .rows_of_programs import of_rows
from .structure import Part

__all__ = ["RowSum", "add_columns", "row_sums"]


class RowSum:
    """The sum over rows of a value with one number for each row.

    Attributes:
        name: the name of its variable.
        node: the value that is summed.
        rows: the number of rows that each tile's summand has, as an expression: 1, or ROWS if whole
            tiles are added.
    """

    def __init__(
        self, emitter: Emitter, slot: int, node: Node, *, exchanges: bool, keeps_rows: bool
    ) -> None:
        self.emitter = emitter
        self.name = f"sum{slot}"
        self.following = f"next{slot}"
        self.node = node
        self.exchanges = exchanges
        self.rows = "ROWS" if keeps_rows else "1"

    def begin(self) -> list[str]:
        """Return the lines before all rows."""
        return [f"{self.name} = tl.zeros((1, 1), ACC)"]

    def add_columns(self) -> None:
        """Emit the lines that add a tile of columns, in a loop over those of a row."""

    def add_rows(self) -> list[str]:
        """Return the lines after the loop over the columns of a row."""
        value = self._of_rows("sum_of_rows", self.emitter.block(self.node))
        return [f"{self.name} += {value}"]

    def end(self) -> list[str]:
        """Return the lines after all rows."""
        return []

    def _added(self, value: str) -> str:
        """Return the summand of a tile of columns: its sum over rows, or its rows that exist."""
        function = "sum_of_rows" if self.rows == "1" else "existing_rows"
        return self._of_rows(function, value)

    def _of_rows(self, function: str, value: str) -> str:
        return of_rows(function, value, grouped=self.emitter.grouped, exchanges=self.exchanges)


class _Columns(RowSum):
    """The sum over rows for each column, in a tuple of tiles."""

    def begin(self) -> list[str]:
        """See `RowSum`."""
        tiles = f"{self.name} = {self.name} + (tl.zeros(({self.rows}, BLOCK_N), ACC),)"
        return [f"{self.name} = ()", "for part in tl.static_range(PARTS):", f"    {tiles}"]

    def add_columns(self) -> None:
        """See `RowSum`."""
        value = self._added(self.emitter.wide(self.node))
        self.emitter.extend(self.following, f"{self.name}[part] + {value}")

    def add_rows(self) -> list[str]:
        """See `RowSum`."""
        return [f"{self.name} = {self.following}"]

    def end(self) -> list[str]:
        """See `RowSum`."""
        if self.rows == "1":
            return []
        summed = f"tl.sum({self.name}[part], axis=0, keep_dims=True)"
        return [
            f"{self.following} = ()",
            "for part in tl.static_range(PARTS):",
            f"    {self.following} = {self.following} + ({summed},)",
            f"{self.name} = {self.following}",
        ]


class _Lanes(RowSum):
    """The sum over rows and columns, as one sum for each lane until the end."""

    def begin(self) -> list[str]:
        """See `RowSum`."""
        return [f"{self.name} = tl.zeros(({self.rows}, BLOCK_N), ACC)"]

    def add_columns(self) -> None:
        """See `RowSum`."""
        value = f"tl.where(in_cols, {self.emitter.wide(self.node)}, 0)"
        assert self.emitter.body is not None
        self.emitter.body.append(f"{self.name} += {self._added(value)}")

    def add_rows(self) -> list[str]:
        """See `RowSum`."""
        return []

    def end(self) -> list[str]:
        """See `RowSum`."""
        lines = [f"{self.name} = tl.sum({self.name}, axis=1, keep_dims=True)"]
        if self.rows != "1":
            lines.append(f"{self.name} = tl.sum({self.name}, axis=0, keep_dims=True)")
        return lines


def row_sums(
    emitter: Emitter,
    sums: Sequence[tuple[int, Part, Node]],
    *,
    exchanges: bool,
    keeps_rows: bool,
) -> list[RowSum]:
    """Return the sums over rows of a kernel.

    Args:
        emitter: the emitter of the kernel.
        sums: the inputs whose gradients they are, their parts, and the values that are summed.
        exchanges: whether programs exchange sums of rows that they share.
        keeps_rows: whether the sums are whole tiles until the end.
    """
    return [
        _kind(emitter, index, node)(emitter, slot, node, exchanges=exchanges, keeps_rows=keeps_rows)
        for slot, (index, _, node) in enumerate(sums)
    ]


def add_columns(totals: Sequence[RowSum]) -> None:
    """Emit the lines that add a tile of columns to sums."""
    for total in totals:
        total.add_columns()


def _kind(emitter: Emitter, index: int, node: Node) -> type[RowSum]:
    structure = emitter.structure
    if structure.has_columns(structure.inputs[index]):
        return _Columns
    return _Lanes if emitter.has_columns(node) else RowSum
