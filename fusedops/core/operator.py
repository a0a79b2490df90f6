"""What a family declares of an operator: everything else about a call is core's, written once in `call`.

A call is an operator, a record of constants, the tensors, and a drop probability. From dtypes, widths and device comes
a `Site`: all that stays the same from step to step. Kernels are launched with a site, tensors, outputs and a random state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .dropout import Dropout
from .rng import State

__all__ = ["Axes", "Constants", "Dtypes", "Operator", "Site", "Tensors"]

Tensors = Sequence[Tensor | None]
Dtypes = tuple[torch.dtype | None, ...]


@dataclass(frozen=True)
class Constants(ABC):
    """The constants of a call, hashable.

    Attributes:
        op: the functional's name, for messages.
    """

    op: str

    @abstractmethod
    def words(self) -> tuple[str, ...]:
        """The constants that are no floating-point numbers, for a registered operator; no word has a space."""

    def numbers(self) -> tuple[float, ...]:
        """The others."""
        return ()

    @classmethod
    @abstractmethod
    def read(cls, words: Sequence[str], numbers: Sequence[float]) -> Any:
        """The record from its words and numbers."""


@dataclass(frozen=True, eq=False)
class Site:
    """What stays the same from step to step; one object for each, so identity is equality.

    Attributes:
        constants: the call's constants.
        device_index: the GPU, -1 under the interpreter.
        cols: what kernels are compiled for.
        dtypes: of the tensors, None where absent.
        dropout: whether a mask is drawn.
        saves: whether a backward will follow.
        acc: the dtype that kernels compute in.
        outs: which of the operator's outputs there are.
        returned: how many of them autograd knows, from the first: those that the caller gets, and one that a second
            derivative is taken of.
        saved: takes what is saved for the backward out of ``(*tensors, *outputs, None)``.
        call: the constants and dtypes as a word for registered operators.
    """

    constants: Any
    device_index: int
    cols: int
    dtypes: Dtypes
    dropout: bool
    saves: bool
    acc: torch.dtype
    outs: tuple[bool, ...]
    returned: int
    saved: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    call: str


class Axes(NamedTuple):
    """Along what a call may be sharded: its rows, and, numbered behind them, the columns.

    Attributes:
        rows: the sizes of the rows' axes.
        parts: rows of the dropout mask in each row.
        columns: columns of the dropout mask, and of a row whose columns may be sharded.
        tensors: of each tensor, the axis that each dimension is; None for one that is not sharded.
        outputs: the same of the outputs that the caller gets.
        carriers: the places of the tensors with rows.
    """

    rows: tuple[int, ...]
    parts: int
    columns: int
    tensors: tuple[tuple[int | None, ...], ...]
    outputs: tuple[tuple[int | None, ...], ...]
    carriers: tuple[int, ...]

    @property
    def mask(self) -> tuple[int, ...]:
        """The shape of the dropout mask."""
        return (*self.rows, self.parts, self.columns)


class Operator(ABC):
    """A family's operator; subclasses fill in the attributes and methods.

    Attributes:
        name: of the registered operators ``fusedops::<name>_forward`` and ``_backward``.
        constants: the class of its constants.
        tensors: the tensor arguments' names; ``variadic`` says whether the last stands for any number.
        first: the place of the tensor with the rows.
        outputs: all that the forward writes; the first ``visible`` are the caller's, the rest is only saved.
        saved: what a backward reads, by name.
        numbers: names of the constants that are floating-point numbers.
        shares: places of two tensors; where the backward writes no gradient for the first, it has the second's.
        rows: which of the names above are of tensors with rows, in their leading dimensions.
        tags: of the registered operators.
        native_elements: of calls that PyTorch has an operator for, those up to this size on a GPU go to it: both take
            a few microseconds there, and a native autograd node costs tens of microseconds less on the host.
    """

    name: ClassVar[str]
    constants: ClassVar[type[Constants]]
    tensors: ClassVar[tuple[str, ...]]
    first: ClassVar[int] = 0
    outputs: ClassVar[tuple[str, ...]]
    visible: ClassVar[int] = 1
    saved: ClassVar[tuple[str, ...]]
    numbers: ClassVar[tuple[str, ...]] = ()
    shares: ClassVar[tuple[int, int] | None] = None
    variadic: ClassVar[bool] = False
    rows: ClassVar[frozenset[str]] = frozenset()
    tags: ClassVar[tuple[torch.Tag, ...]] = ()
    native_elements: int = 65536

    def __init__(self) -> None:
        # The calls that were checked, by `key`: outside of GPU autocast, and under it.
        self.signatures: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})

    # --- before a call --------------------------------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def record(*arguments: Any) -> Any:
        """The record of constants from what a functional hands to `call.run`."""

    @staticmethod
    @abstractmethod
    def key(arguments: Any, tensors: Any) -> Hashable:
        """All that `check`, `cols` and `site` depend on, in a form that a bad call cannot share with a good one."""

    @abstractmethod
    def check(self, constants: Any, tensors: Any) -> None:
        """Raises what is wrong with the call."""

    @abstractmethod
    def check_constants(self, constants: Any) -> None:
        """Raises what is wrong with the constants alone: all that is checked of nested tensors."""

    def autocast(self, constants: Any, tensors: Tensors) -> Any:
        """The constants under GPU autocast."""
        return constants

    @abstractmethod
    def cols(self, constants: Any, tensors: Tensors) -> int:
        """What a kernel is compiled for: the width of a row, 0 for any; -1 where no kernel fits."""

    def writes(self, constants: Any, dtypes: Dtypes, *, dropout: bool, saves: bool) -> tuple[bool, ...]:
        """Which of ``outputs`` the forward writes."""
        return (True,)

    @abstractmethod
    def site(self, constants: Any, dtypes: Dtypes, cols: int, device_index: int, *, dropout: bool,
             saves: bool) -> Any:  # fmt: skip
        """The site for these choices, to be kept."""

    # --- DTensors -------------------------------------------------------------------------------------------------------

    def argument(self, constants: Any, place: int) -> str:
        """The name of a tensor argument, for messages."""
        return self.tensors[min(place, len(self.tensors) - 1)]

    def axes(self, constants: Any, tensors: Tensors) -> Axes:
        """Along what the call may be sharded."""
        first = tensors[self.first]
        assert first is not None
        leading = self.leading(constants, first.dim())
        columns = leading if self.has_columns(constants) else None
        inner = [None] * (first.dim() - leading - 1)
        carrying = (*range(leading), *inner, columns)[: first.dim()]
        found: list[tuple[int | None, ...]] = []
        carriers = []
        for place, t in enumerate(tensors):
            carries = self.has_rows(constants, self.tensors[min(place, len(self.tensors) - 1)])
            carriers += [place] * carries
            found.append(() if t is None else carrying if carries else (columns,) * t.dim())
        return Axes(tuple(first.shape[:leading]), 1, int(self.cols(constants, tensors)), tuple(found),
                    (carrying,) * self.visible, tuple(carriers))  # fmt: skip

    def leading(self, constants: Any, dims: int) -> int:
        """How many of the first tensor's dimensions are rows."""
        return max(dims - 1, 0)

    def has_columns(self, constants: Any) -> bool:
        """Whether rows may be sharded along their last dimension, as parameters, of one dimension, are then."""
        return False

    def over_columns(self, constants: Any, tensors: Tensors, state: State | Dropout, layout: Any) -> Any:
        """The outputs of a rank that has some columns of its rows; None where columns do not depend on one another.

        Args:
            constants: of the call.
            tensors: the rank's.
            state: the random state of the rank's kernels; where no kernels run, dropout.
            layout: a `sharding.Layout`, which adds up what ranks have of a row.
        """
        return None

    def has_rows(self, constants: Any, name: str) -> bool:
        """Whether the tensor of that name has rows; else it is a parameter."""
        return name in self.rows

    # --- PyTorch's operators --------------------------------------------------------------------------------------------

    def native(self, constants: Any, dtypes: Dtypes) -> Callable[..., Any] | None:
        """PyTorch's own operator for exactly this, as a function of constants and tensors; None for none."""
        return None

    @abstractmethod
    def reference(self, constants: Any, tensors: Tensors, dropout: Dropout) -> tuple[Tensor | None, ...]:
        """The visible outputs in PyTorch's operators, differentiable to any order, under any transform."""

    @abstractmethod
    def derivative(self, site: Any, grads: Tensors, saved: Tensors, dropout: Callable[[Tensor], Dropout],
                   needs: Sequence[bool]) -> Sequence[Tensor | None]:  # fmt: skip
        """The gradients in differentiable operators; ``dropout`` is a function of a tensor of the mask's shape."""

    def sources(self, constants: Any, outputs: int) -> tuple[frozenset[int], ...] | None:
        """Of each of so many outputs the places of the tensors that get a gradient from it; None where all do from each."""
        return None

    # --- between the caller's tensors and the kernels' ------------------------------------------------------------------

    def expose(self, constants: Any, tensors: Tensors, outs: Any) -> tuple[Tensor | None, ...]:
        """What the caller gets."""
        return outs[: self.visible]  # type: ignore[no-any-return]

    def joined(self, constants: Any, grads: Tensors, saved: Tensors) -> Tensors:
        """The cotangents as the registered backward takes them."""
        return grads

    def expose_gradients(self, site: Any, grads: Tensors, saved: Tensors, outs: Any,
                         needs: Sequence[bool]) -> Sequence[Tensor | None]:  # fmt: skip
        """The gradients of the caller's tensors."""
        if self.shares is not None:
            first, second = self.shares
            if needs[first] and outs[first] is None:
                return (*outs[:first], outs[second], *outs[first + 1 :])
        return outs  # type: ignore[no-any-return]

    # --- kernels --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def allocate(self, site: Any, tensors: Any) -> tuple[Tensor | None, ...]:
        """Uninitialised ``outputs``, None where the site has none."""

    @abstractmethod
    def forward(self, site: Any, tensors: Any, outs: Any, state: State) -> None:
        """Launches the forward, which fills ``outs``."""

    def needed(self, site: Any, grads: Tensors, needs: Sequence[bool]) -> Sequence[bool]:
        """Which gradient tensors the backward writes, in the order of ``tensors``."""
        return needs

    @abstractmethod
    def allocate_gradients(self, site: Any, grads: Any, saved: Any, needed: Any) -> tuple[Tensor | None, ...]:
        """Uninitialised gradients, None where not needed."""

    @abstractmethod
    def backward(self, site: Any, grads: Any, saved: Any, outs: Any, state: State) -> None:
        """Launches the backward, which fills ``outs``. ``grads`` are never written to."""
