"""The interface of a family's operators; `call` has all that is common to their calls.

A call consists of an operator, a record of constants, the tensors, and a drop probability. All of
it that stays the same from step to step, with dtypes, widths and device, is a `Site`:

    arguments -- record --> constants --+
    tensors ------ cols, dtypes, device +-- site --> Site
                                                      |
    tensors, outputs, random state -------------------+-- forward, backward --> launches
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..random.dropout import Dropout
from ..random.rng import State

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
        """Returns all constants but floating-point numbers, as words without spaces.

        Registered operators take these words.
        """

    def numbers(self) -> tuple[float, ...]:
        """Returns the floating-point numbers."""
        return ()

    @classmethod
    @abstractmethod
    def read(cls, words: Sequence[str], numbers: Sequence[float]) -> Any:
        """Returns the record with these words and numbers."""


@dataclass(frozen=True, eq=False)
class Site:
    """All of a call that stays the same from step to step.

    There is one object for equal sites, so identity is equality.

    Attributes:
        constants: the call's constants.
        device_index: the GPU, -1 under the interpreter.
        cols: the width of a row that kernels are compiled for: see `Operator.cols`.
        dtypes: the tensors' dtypes, None where absent.
        dropout: whether a mask is drawn.
        saves: whether a backward will follow.
        acc: the dtype that kernels compute in.
        outs: for each of the operator's outputs, whether the site has it.
        returned: the number of outputs, from the first, that the autograd Function returns: those
            that the caller gets, and one that has a second derivative.
        saved: selects the saved tensors from ``(*tensors, *outputs, None)``.
        call: the constants and dtypes as a string for registered operators.
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
    """The axes along which a call may be sharded: its rows', and after them the columns.

    Attributes:
        rows: the sizes of the rows' axes.
        parts: rows of the dropout mask in each row.
        columns: columns of the dropout mask, and of a row whose columns may be sharded.
        tensors: for each tensor, the axis that each dimension is; None for one that is not sharded.
        outputs: the same for the outputs that the caller gets.
        carriers: the indices of the tensors with rows.
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
        name: the prefix of the registered operators ``fusedops::<name>_forward`` and ``_backward``.
        constants: the class of its constants.
        tensors: the names of the tensor arguments.
        variadic: whether the last name stands for any number of tensors.
        first: the index of the tensor that determines the rows.
        outputs: the names of all that the forward writes.
        visible: the number of outputs, from the first, that the caller gets; the rest is only
            saved.
        saved: the names of the tensors that a backward reads.
        numbers: the names of the constants that are floating-point numbers.
        shares: the indices of two tensors; where the backward writes no gradient for the first, it
            is the second's.
        rows: those of the names above whose tensors have rows, in their leading dimensions.
        tags: the registered operators' tags.
        native_elements: the largest call on a GPU that goes to PyTorch's operator, where there is
            one: both take a few microseconds there, and a native autograd node costs tens of
            microseconds less on the host.
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
        # The signatures of checked calls by `key`, without GPU autocast and under it.
        self.signatures: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})

    # --- before a call ----------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def record(*arguments: Any) -> Any:
        """Returns the record of constants, from the ``arguments`` of `call.run`."""

    @staticmethod
    @abstractmethod
    def key(arguments: Any, tensors: Any) -> Hashable:
        """Returns all that `check`, `cols` and `site` depend on.

        No bad call may have the key of a good one: a call whose key is cached is not checked.
        """

    @abstractmethod
    def check(self, constants: Any, tensors: Any) -> None:
        """Raises an error if the call is invalid."""

    @abstractmethod
    def check_constants(self, constants: Any) -> None:
        """Raises an error if the constants are invalid: the only check for nested tensors."""

    def autocast(self, constants: Any, tensors: Tensors) -> Any:
        """Returns the constants under GPU autocast."""
        return constants

    @abstractmethod
    def cols(self, constants: Any, tensors: Tensors) -> int:
        """Returns the width of a row that a kernel is compiled for.

        It is 0 for a kernel of any width, and -1 where no kernel fits.
        """

    def writes(
        self, constants: Any, dtypes: Dtypes, *, dropout: bool, saves: bool
    ) -> tuple[bool, ...]:
        """Returns, for each of ``outputs``, whether the forward writes it."""
        return (True,)

    @abstractmethod
    def site(
        self,
        constants: Any,
        dtypes: Dtypes,
        cols: int,
        device_index: int,
        *,
        dropout: bool,
        saves: bool,
    ) -> Any:
        """Returns the site for these choices; the caller caches it."""

    # --- DTensors ---------------------------------------------------------------------------------

    def argument(self, constants: Any, place: int) -> str:
        """Returns the name of the tensor argument at an index, for messages."""
        return self.tensors[min(place, len(self.tensors) - 1)]

    def axes(self, constants: Any, tensors: Tensors) -> Axes:
        """Returns the axes along which the call may be sharded."""
        first = tensors[self.first]
        assert first is not None
        leading = self.leading(constants, first.dim())
        columns = leading if self.has_columns(constants) else None
        inner = [None] * (first.dim() - leading - 1)
        # A scalar has no dimension for the columns.
        of_rows = (*range(leading), *inner, columns)[: first.dim()]
        axes_of_tensors: list[tuple[int | None, ...]] = []
        carriers = []
        for i, t in enumerate(tensors):
            has_rows = self.has_rows(constants, self.tensors[min(i, len(self.tensors) - 1)])
            if has_rows:
                carriers.append(i)
            if t is None:
                axes_of_tensors.append(())
            else:
                axes_of_tensors.append(of_rows if has_rows else (columns,) * t.dim())
        return Axes(
            rows=tuple(first.shape[:leading]),
            parts=1,
            columns=int(self.cols(constants, tensors)),
            tensors=tuple(axes_of_tensors),
            outputs=(of_rows,) * self.visible,
            carriers=tuple(carriers),
        )

    def leading(self, constants: Any, dims: int) -> int:
        """Returns the number of the first tensor's dimensions that are rows."""
        return max(dims - 1, 0)

    def has_columns(self, constants: Any) -> bool:
        """Whether rows may be sharded along their last dimension.

        The parameters, of one dimension, then are too.
        """
        return False

    def over_columns(
        self, constants: Any, tensors: Tensors, state: State | Dropout, layout: Any
    ) -> Any:
        """Returns the outputs of a rank that has some columns of its rows.

        It is None where columns do not depend on one another.

        Args:
            constants: the call's constants.
            tensors: the rank's tensors.
            state: the random state of the rank's kernels; where no kernels run, dropout.
            layout: a `sharding.Layout`, which sums numbers of a row over the ranks.
        """
        return None

    def has_rows(self, constants: Any, name: str) -> bool:
        """Whether the tensor of that name has rows; else it is a parameter."""
        return name in self.rows

    # --- PyTorch's operators ----------------------------------------------------------------------

    def native(self, constants: Any, dtypes: Dtypes) -> Callable[..., Any] | None:
        """Returns PyTorch's operator, as a function of constants and tensors.

        It computes exactly the same; None where PyTorch has no such operator.
        """
        return None

    @abstractmethod
    def reference(
        self, constants: Any, tensors: Tensors, dropout: Dropout
    ) -> tuple[Tensor | None, ...]:
        """Returns the visible outputs, computed by PyTorch's operators.

        They are differentiable to any order, under any transform.
        """

    @abstractmethod
    def derivative(
        self,
        site: Any,
        grads: Tensors,
        saved: Tensors,
        dropout: Callable[[Tensor], Dropout],
        needs: Sequence[bool],
    ) -> Sequence[Tensor | None]:
        """Returns the gradients, computed by differentiable operators.

        ``dropout`` is a function of a tensor of the mask's shape.
        """

    def sources(self, constants: Any, outputs: int) -> tuple[frozenset[int], ...] | None:
        """Returns, for each of the first outputs, the indices of the tensors that it depends on.

        It is None where each output depends on all tensors.
        """
        return None

    # --- between the caller's tensors and the kernels' --------------------------------------------

    def expose(self, constants: Any, tensors: Tensors, outs: Any) -> tuple[Tensor | None, ...]:
        """Returns the outputs that the caller gets."""
        return outs[: self.visible]  # type: ignore[no-any-return]

    def joined(self, constants: Any, grads: Tensors, saved: Tensors) -> Tensors:
        """Returns the cotangents as the registered backward takes them."""
        return grads

    def expose_gradients(
        self, site: Any, grads: Tensors, saved: Tensors, outs: Any, needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Returns the gradients of the caller's tensors."""
        if self.shares is not None:
            first, second = self.shares
            if needs[first] and outs[first] is None:
                return (*outs[:first], outs[second], *outs[first + 1 :])
        return outs  # type: ignore[no-any-return]

    # --- kernels ----------------------------------------------------------------------------------

    @abstractmethod
    def allocate(self, site: Any, tensors: Any) -> tuple[Tensor | None, ...]:
        """Returns uninitialised ``outputs``, None where the site has none."""

    @abstractmethod
    def forward(self, site: Any, tensors: Any, outs: Any, state: State) -> None:
        """Launches the forward, which fills ``outs``."""

    def needed(self, site: Any, grads: Tensors, needs: Sequence[bool]) -> Sequence[bool]:
        """Returns which gradients the backward writes, in the order of ``tensors``."""
        return needs

    @abstractmethod
    def allocate_gradients(
        self, site: Any, grads: Any, saved: Any, needed: Any
    ) -> tuple[Tensor | None, ...]:
        """Returns uninitialised gradients, None where not needed."""

    @abstractmethod
    def backward(self, site: Any, grads: Any, saved: Any, outs: Any, state: State) -> None:
        """Launches the backward, which fills ``outs`` and does not write to ``grads``."""
