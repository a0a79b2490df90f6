"""`RowwiseSite`, the site of a call, and `LaunchedProgram`, the program as launches see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.calls.operator import Site
from ..core.launches.launch import NotCompiledError
from ..core.random.dropout import Dropout
from .axes import Label
from .ir import Node
from .planning import Plan
from .structure import Operand, Structure

__all__ = ["BackwardKey", "LaunchedProgram", "RowwiseSite"]

# The axes of groups of rows, the dtype of each cotangent, and whether each gradient is wanted.
BackwardKey = tuple[Label, tuple[torch.dtype | None, ...], tuple[bool, ...]]


class LaunchedProgram(Protocol):
    """The interface of a program for allocation, launches and the fallback.

    `operator.Program` implements it. `operator` imports the code that uses this interface, so that
    code cannot import `operator`.

    Attributes:
        op: the function's name.
        digest: the hash of everything that its registered operators depend on.
        plan: the function, and what it saves for the backward.
        structure: the structure of the plan.
        acc: the dtype in which kernels compute.
        dtypes: the dtypes of the inputs.
        thresholds: the threshold of each dropout's random numbers.
        count: the number of the function's results.
        own: whether an intermediate is saved that is not a result.
        wanted: for each input, whether it has a gradient.
        dynamic: the row axes whose sizes may change: see `operator.dynamic_axes`.
        group: the row axes of a forward's groups of rows; () without groups.
        groups: the row axes of each kind of groups that a backward may have, with the inputs that
            the rows of a group share.
        tiled: whether rows are read tile by tile.
        is_long: whether rows have more columns than any kernel supports.
        group_of: returns the row axes of a forward's groups, from the inputs; () if there are no
            groups, or if their rows are few.
        backward_key: returns the key of a backward's launches, from cotangents and gradients.
    """

    op: str
    digest: str
    plan: Plan
    structure: Structure
    acc: torch.dtype
    dtypes: tuple[torch.dtype, ...]
    thresholds: tuple[int, ...]
    count: int
    own: bool
    wanted: tuple[bool, ...]
    dynamic: dict[int, tuple[int, int, int]]
    group: Label
    groups: dict[Label, list[int]]
    tiled: bool
    is_long: bool
    group_of: Callable[[Any], Label]
    backward_key: Callable[[Any, Any], BackwardKey]

    # Properties, because `Operator` declares both as variables of the class.
    @property
    def visible(self) -> int:
        """Return the number of results; the intermediate, if there is one, counts as a result."""

    @property
    def first(self) -> int:
        """Return the position of the input from which sizes and the device are read."""

    @property
    def record(self) -> Any:
        """Return the constants of all calls."""

    def site(
        self,
        constants: Any,
        dtypes: Any,
        cols: int,
        device_index: int,
        *,
        dropout: bool,
        saves: bool,
    ) -> RowwiseSite:
        """Return the site of a call."""

    def operand(self, output: int) -> Operand:
        """Return the operand of an output, or of the intermediate that follows the outputs."""

    def row_size(self, output: int) -> int:
        """Return the number of elements in a row of an output."""

    def size_of_row(self, operand: Operand) -> int:
        """Return the number of elements in a row of an operand."""

    def dims_of(self, output: int) -> dict[int, int]:
        """Return the dimension of an output that each axis has to itself."""

    def sizes_of(self, tensors: Any) -> list[int]:
        """Return the sizes of all axes, read from the inputs."""

    def evaluated(
        self, roots: Iterable[Node], tensors: Any, draw: Callable[..., Dropout]
    ) -> dict[Node, Tensor]:
        """Return the values of nodes, computed by PyTorch's operators."""

    def derivative(
        self, site: RowwiseSite, grads: Any, saved: Any, dropout: Any, needs: Sequence[bool]
    ) -> Any:
        """Return the gradients, computed by PyTorch's operators."""

    def runs_unfused(self, error: NotCompiledError) -> None:
        """Warn, once, that PyTorch's operators run instead of kernels, or raise."""


@dataclass(frozen=True, eq=False)
class RowwiseSite(Site):
    """The part of a call that stays the same from step to step.

    Attributes:
        program: the function's program.
        launches: the functions that launch its kernels, by the variant of the kernels.
        fitted: whether the inputs' shapes are known to fit the program. Otherwise launches compare
            them.
    """

    program: LaunchedProgram
    launches: dict[Any, Any]
    fitted: bool = False
