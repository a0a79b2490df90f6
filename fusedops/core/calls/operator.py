"""The interface of a family's operators; `call` has the code that their calls share.

A call consists of an operator, a record of constants, the tensors, and a drop probability. What
stays the same from step to step (constants, dtypes, widths, device) is collected in a `Site`:

    functional --> constants, tensors, p
                      |
                   key --> Site of an earlier call with this key, or
                   check, cols, site --> a new one
                      |
    tensors, outputs, random state, Site --> forward, backward --> launches
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..random.dropout import Dropout
from ..random.rng import State
from . import words

__all__ = ["Axes", "Dtypes", "Operator", "Site", "Tensors", "axes_of_rows"]

Tensors = Sequence[Tensor | None]
Dtypes = tuple[torch.dtype | None, ...]


@dataclass(frozen=True, eq=False)
class Site:
    """The part of a call that stays the same from step to step.

    Equal sites are one object, so sites are compared and hashed by identity. Plans are cached by
    sites, and hashing a site is as cheap as hashing an address.

    Attributes:
        constants: the record of the call's constants.
        device_index: the index of the GPU; -1 under the interpreter.
        cols: the width of a row that kernels are compiled for: see `Operator.cols`.
        dtypes: the tensors' dtypes, None where absent.
        dropout: whether a mask is drawn.
        saves: whether a backward will follow.
        acc: the dtype that kernels compute in.
        outs: for each of the operator's outputs, whether calls of this site write it.
        returned: the number of outputs, from the first, that the autograd Function returns: those
            that the caller gets, and perhaps one that is only saved. Autograd differentiates a
            saved tensor a second time only if it is an input or a returned output.
        saved: selects the saved tensors from ``(*tensors, *outputs, None)``.
        sources: for each of the outputs that the caller gets, the indices of the tensors that it
            depends on; None where each depends on all.
        native: PyTorch's operator, as a function of constants and tensors; None unless it computes
            exactly the same.
        splits: whether the caller gets parts of the output: see `SequenceOperator.expose`.
        special: whether the call is not launched directly: no kernel runs on this device, or a
            tensor is of a subclass, and the registered operator is called for it.
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
    # By keyword only: the families' sites have fields without a default after these.
    sources: tuple[frozenset[int], ...] | None = field(default=None, kw_only=True)
    native: Callable[..., Any] | None = field(default=None, kw_only=True)
    splits: bool = field(default=False, kw_only=True)
    special: bool = field(default=False, kw_only=True)

    # Not cached: `functools.cached_property` takes a lock before Python 3.12, at which compiled
    # autograd breaks its graph. Only calls of registered operators read it.
    @property
    def call(self) -> str:
        """The constants and dtypes as registered operators take them."""
        return words.encode(self.constants, self.dtypes, self.saves)


@functools.lru_cache(maxsize=1024)
def _without(site: Site, output: int) -> Site:
    """Returns a site that does not write an output, for the allocation of the others."""
    outs = [number != output and out for number, out in enumerate(site.outs)]
    return replace(site, outs=tuple(outs))


class Axes(NamedTuple):
    """The axes along which a call may be sharded: those of its rows, then the columns.

    An axis is an integer. For LayerNorm of x, ``(B, T, C)``, with weight and bias, ``(C,)``:

        axis       0    1    2           rows        (B, T)
        size       B    T    C           columns     C
        x          0    1    2           tensors     ((0, 1, 2), (2,), (2,)), without absent ones
        weight               2           outputs     ((0, 1, 2),)

    Attributes:
        rows: the sizes of the rows' axes.
        parts: the number of rows of the dropout mask for each row.
        columns: the number of columns of the dropout mask; also the size of the columns' axis.
        tensors: for each tensor, the axis of each of its dimensions; None for a dimension that is
            not sharded.
        outputs: the same for the outputs that the caller gets.
        carriers: the indices of the tensors with rows.
        over_columns: a function that computes the outputs of a rank that has some columns of its
            rows; None where columns do not depend on one another. Its arguments are the constants,
            the rank's tensors, its dropout's random state, a `sharding.Layout` (which sums values
            of a row over ranks), and the argument ``compute`` of `sharding.run`.
    """

    rows: tuple[int, ...]
    parts: int
    columns: int
    tensors: tuple[tuple[int | None, ...], ...]
    outputs: tuple[tuple[int | None, ...], ...]
    carriers: tuple[int, ...]
    over_columns: Callable[..., Any] | None = None

    @property
    def mask(self) -> tuple[int, ...]:
        """The shape of the dropout mask."""
        return (*self.rows, self.parts, self.columns)


def axes_of_rows(
    tensors: Tensors,
    first: int,
    *,
    dims: int,
    columns: int,
    carriers: Collection[int],
    are_split: bool,
    outputs: int,
) -> Axes:
    """Returns the axes of a call whose tensors hold rows, or one parameter for each column.

    Args:
        tensors: the call's tensors.
        first: the index of the tensor that determines the rows.
        dims: the number of its trailing dimensions that make up a row.
        columns: the width of a row.
        carriers: the indices of the tensors with rows.
        are_split: whether rows may be sharded along their last dimension; the parameters are
            sharded with them.
        outputs: the number of outputs. Each has the first tensor's axes.
    """
    like = tensors[first]
    assert like is not None
    # For x of (B, T, S, C), the axes of its dimensions are:
    #
    #     dims 1, are_split         0  1  2  3
    #     dims 1, not are_split     0  1  2  None
    #     dims 2, not are_split     0  1  None  None
    leading = max(like.dim() - dims, 0)
    axis = leading if are_split else None
    inner = [None] * (like.dim() - leading - 1)
    # A scalar has no dimension for the columns: the slice drops ``axis``.
    row_axes = (*range(leading), *inner, axis)[: like.dim()]
    tensor_axes: list[tuple[int | None, ...]] = []
    for i, t in enumerate(tensors):
        if t is None:
            tensor_axes.append(())
        elif i in carriers:
            tensor_axes.append(row_axes)
        else:
            tensor_axes.append((axis,) * t.dim())
    return Axes(
        rows=tuple(like.shape[:leading]),
        parts=1,
        # In a traced call the width may be symbolic: `int` makes it a constant of the graph.
        columns=int(columns),
        tensors=tuple(tensor_axes),
        outputs=(row_axes,) * outputs,
        carriers=tuple(carriers),
    )


class Operator(ABC):
    """A family's operator; subclasses fill in the attributes and methods.

    Attributes:
        name: the prefix of the registered operators ``fusedops::<name>_forward`` and ``_backward``.
        constants: the class of its records of constants, a NamedTuple under `words.dispatched`.
        tensors: the names of the tensor arguments.
        first: the index of the tensor that determines the rows.
        variadic: whether the last name in ``tensors`` stands for any number of tensors.
        by_rows: whether kernels read rows of adjacent elements, so that other tensors are copied.
        outputs: the names of all tensors that the forward writes.
        visible: the number of outputs, from the first, that the caller gets; the rest is only
            saved.
        saved: the names of the tensors that a backward reads.
        gradients: the names of the gradients that the kernels write, in the order of `needed`; by
            default one for each name in ``tensors``.
        native_elements: the most elements of a GPU call that PyTorch's operator computes, if there
            is one. At such sizes both take a few microseconds on the GPU, and PyTorch's autograd
            node costs tens of microseconds less on the host.
    """

    name: ClassVar[str]
    constants: ClassVar[Any]
    tensors: ClassVar[tuple[str, ...]]
    first: ClassVar[int] = 0
    variadic: ClassVar[bool] = False
    by_rows: ClassVar[bool] = True
    outputs: ClassVar[tuple[str, ...]]
    visible: ClassVar[int] = 1
    saved: ClassVar[tuple[str, ...]]
    gradients: tuple[str, ...] = ()
    native_elements: int = 65536

    def __init__(self) -> None:
        # The sites of checked eager calls, by `key`. Registered operators take the constants as a
        # string, and get their sites from the cache of `operators.site_of`.
        self.sites: dict[Hashable, Any] = {}

    # --- before a call ----------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def key(mode: int, constants: Any, tensors: Any) -> Hashable:
        """Returns the call's key: ``mode``, and all that `check`, `cols` and `site` depend on.

        An invalid call must not have the key of a valid one: a call whose key is cached is not
        checked. Every call computes its key, so implementations have no loops and no helper
        functions. The key does not contain what changes from batch to batch, such as the number of
        rows.
        """

    @abstractmethod
    def check(self, constants: Any, tensors: Any, *, nested: bool) -> Any:
        """Raises if the call is invalid; returns the constants to compute with.

        GPU autocast may have set the output's dtype in them.

        Args:
            constants: the functional's record.
            tensors: the call's tensor arguments, of any type.
            nested: whether the rows are a nested tensor, which PyTorch's operators check.
        """

    def is_empty(self, tensors: Tensors) -> bool:
        """Returns whether the call has no elements, so that it launches nothing."""
        first = tensors[self.first]
        assert first is not None
        return not first.numel()

    @abstractmethod
    def cols(self, constants: Any, tensors: Tensors) -> int:
        """Returns the width of a row that a kernel is compiled for.

        It is 0 for a kernel of any width, and -1 where no kernel fits.
        """

    # Not a method of `Site`, because calls under torch.compile have none: see `call._in_graph`.
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
        """Returns the site for these choices; `operators.site_of` caches it."""

    def argument(self, constants: Any, position: int) -> str:
        """Returns the name of the tensor argument at ``position``, for messages."""
        return self.tensors[min(position, len(self.tensors) - 1)]

    @abstractmethod
    def axes(self, constants: Any, tensors: Tensors) -> Axes:
        """Returns the axes along which the call may be sharded over ranks."""

    # --- PyTorch's operators ----------------------------------------------------------------------

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

        ``dropout`` is a function of a tensor of the mask's shape: see `function.mask_of`.
        """

    # --- kernels ----------------------------------------------------------------------------------

    # Allocation and launch are separate methods, because compilers plan the memory of a registered
    # operator's outputs: the operator then writes to tensors that it gets as arguments.

    @abstractmethod
    def allocate(self, site: Any, tensors: Any) -> tuple[Tensor | None, ...]:
        """Returns uninitialised tensors for ``outputs``, None where the site has none."""

    def allocate_except(self, site: Any, tensors: Any, output: int) -> tuple[Tensor | None, ...]:
        """Returns what `allocate` returns, with None in place of an output that the caller has."""
        return self.allocate(_without(site, output), tensors)

    @abstractmethod
    def forward(self, site: Any, tensors: Any, outs: Any, state: State) -> None:
        """Launches the forward, which fills ``outs``."""

    # A kernel need not write one gradient for each tensor: in ``x + residual`` both have the same
    # gradient, and the gradients of many slices are parts of one buffer. `needed` selects what the
    # kernel writes, and from that `expose_gradients` builds each tensor's gradient.

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

    def expose_gradients(
        self, site: Any, grads: Tensors, saved: Tensors, outs: Any, needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Returns the gradients of the caller's tensors, where `needed` differs from ``needs``."""
        return outs  # type: ignore[no-any-return]


class SequenceOperator(Operator):
    """An operator of any number of tensors, whose kernels write one buffer for all of them.

    A third registered operator, ``fusedops::<name>_call``, returns what the caller gets, as a list.
    A graph has it until it is differentiated: its backward reads each cotangent where it is.
    """

    variadic = True

    @abstractmethod
    def expose(self, constants: Any, tensors: Tensors, outs: Any) -> tuple[Tensor | None, ...]:
        """Returns the outputs that the caller gets, from those that the kernels wrote."""

    def saved_separately(self, site: Any, saved: Any, returned: Any) -> tuple[Tensor | None, ...]:
        """Returns what a call saves: ``saved``, with outputs that the caller got in their place.

        Autograd then notices if the caller changes such an output before the backward.

        Args:
            site: the call's.
            saved: what the site selects, with outputs as the kernels wrote them.
            returned: the outputs that the caller got: see `expose`.
        """
        return saved  # type: ignore[no-any-return]
