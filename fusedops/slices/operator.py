"""The slices family's operator: cache keys, checks, outputs, reference, gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import attrgetter, index, itemgetter
from typing import Any

import torch
from torch import Tensor

from ..core.activations import ACTIVATIONS
from ..core.calls import checks
from ..core.calls.buffers import separated
from ..core.calls.function import vjp
from ..core.calls.operator import Axes, Dtypes, SequenceOperator, axes_of_rows
from ..core.calls.registration import define
from ..core.compat.dispatch import cast_by_autocast, in_forward_mode, transforms
from ..core.launches.operand import empty
from ..core.random.dropout import Dropout
from . import configs, launching, reference
from .reference import accumulator
from .site import SliceConstants, SliceSite
from .widths import widths_of

__all__ = ["ACTIVATION_NAMES", "SLICES"]

# The names in `core.activations`, and "none", another name of "identity".
ACTIVATION_NAMES = (*ACTIVATIONS, "none")

# Whether GPU autocast runs PyTorch's LayerNorm in fp32.
_WIDENED = cast_by_autocast("aten::layer_norm")


# Attributes of the tensors of a sequence. `map` over these functions is a loop in C.
_DTYPE, _DEVICE, _SHAPE = attrgetter("dtype"), attrgetter("device"), attrgetter("shape")


class SliceOperator(SequenceOperator):
    """``activation(layer_norm(slice))`` for many slices.

    The kernels write one output tensor, and one gradient of the slices, whatever the slices' form.
    If the slices are separate tensors, it is a buffer with one slice after the other.
    """

    name = "slices"
    constants = SliceConstants
    tensors = ("weight", "bias", "slices")
    first = 2
    outputs = ("y",)
    saved = ("saved_weight", "saved_bias", "saved_slices")

    @staticmethod
    def key(mode: int, constants: Any, tensors: Any) -> Hashable:
        """Returns all that the checks read; for a sequence, sets of the slices' properties."""
        weight, bias, x, *_ = tensors
        dims: int = constants.dims
        slices_key: Any
        if dims:
            # If dims is 2, the last dimensions of x are in the constants: their sizes are (K, D).
            width = None if dims == 2 else x.shape[-1]
            slices_key = type(x), x.dtype, x.device, x.dim() == 2, width
        else:
            slices = tensors[2:]
            shapes = set(map(_SHAPE, slices))
            # The widths are in the constants. The batch dimensions must be the same for all slices.
            batches = 1 if len(shapes) == 1 else len({shape[:-1] for shape in shapes})
            slices_key = (
                frozenset(map(type, slices)),
                frozenset(map(_DTYPE, slices)),
                frozenset(map(_DEVICE, slices)),
                batches,
            )
        weight_key: Hashable = None
        bias_key: Hashable = None
        if weight is not None:
            weight_key = type(weight), weight.dtype, weight.device, weight.shape
        if bias is not None:
            bias_key = type(bias), bias.dtype, bias.device, bias.shape
        return mode, constants, slices_key, weight_key, bias_key

    def check(self, constants: SliceConstants, tensors: Any, *, nested: bool) -> SliceConstants:
        """Checks everything but ``sizes``; see `Operator`.

        Under GPU autocast the output is fp32, like that of `F.layer_norm`, unless slices are fp64.
        """
        constants = _with_widths(constants)
        if not nested:
            _check_tensors(constants, tensors)
        checks.check_eps(constants.op, constants.eps)
        # The functional has replaced "none" by "identity".
        if constants.activation not in ACTIVATIONS:
            checks.check_choice(constants.op, "activation", constants.activation, ACTIVATION_NAMES)
        first = tensors[self.first]
        is_on_gpu = torch.is_autocast_enabled("cuda") and getattr(first, "is_cuda", False)
        if _WIDENED and is_on_gpu and first.dtype != torch.float64:
            return constants._replace(out_dtype=torch.float32)
        return constants

    def cols(self, constants: SliceConstants, tensors: Any) -> int:
        """Returns the sum of the widths, -1 if a slice is too wide for a program."""
        sizes = constants.sizes
        if max(sizes) > configs.widest(tensors[self.first].dtype.itemsize):
            return -1
        return sum(sizes)

    def site(
        self,
        constants: SliceConstants,
        dtypes: Dtypes,
        cols: int,
        device_index: int,
        *,
        dropout: bool,
        saves: bool,
    ) -> SliceSite:
        """See `Operator`. The tensors are saved, and no output."""
        x = dtypes[2]
        assert x is not None
        return SliceSite(
            constants,
            device_index,
            cols,
            dtypes,
            dropout,
            saves,
            acc=accumulator(x),
            outs=(True,),
            returned=1,
            saved=itemgetter(slice(None, -2)),  # all of ``(*tensors, y, None)`` but the last two
            widths=widths_of(constants.sizes),
            y=constants.out_dtype or x,
            sources=_sources(constants),
            splits=constants.separate(),
        )

    def axes(self, constants: SliceConstants, tensors: Any) -> Axes:
        """See `Operator`. There is one output, or one for each slice; columns are not sharded."""
        axes = axes_of_rows(
            tensors,
            first=self.first,
            dims=max(constants.dims, 1),
            columns=self.cols(constants, tensors),
            carriers=range(2, len(tensors)),
            are_split=False,
            outputs=1,
        )
        rows = tuple(range(len(axes.rows)))
        if constants.separate():
            return axes._replace(outputs=((*rows, None),) * len(constants.sizes))
        if constants.concat:
            return axes._replace(outputs=((*rows, None),))
        return axes

    def argument(self, constants: SliceConstants, position: int) -> str:
        """See `Operator`."""
        is_one_of_many = position >= 2 and not constants.dims
        return f"slice {position - 2}" if is_one_of_many else self.tensors[position]

    # --- PyTorch's operators ----------------------------------------------------------------------

    def reference(
        self, constants: SliceConstants, tensors: Any, dropout: Dropout
    ) -> tuple[Tensor, ...]:
        """Returns the outputs by PyTorch's operators: see `Operator` and `reference`."""
        elementary = transforms() or in_forward_mode()
        return _reference(constants, tensors, constants.out_dtype, elementary=elementary)

    def derivative(
        self,
        site: SliceSite,
        grads: Any,
        saved: Any,
        dropout: Callable[[Tensor], Dropout],
        needs: Sequence[bool],
    ) -> Sequence[Tensor | None]:
        """Returns the gradients of the reference implementation, computed in the kernels' dtype."""
        constants = site.constants
        primals = [None if t is None else t.to(site.acc) for t in saved]
        cotangents = [None if g is None else g.to(site.acc) for g in grads]

        def function(*tensors: Any) -> tuple[Tensor, ...]:
            return _reference(constants, tensors, None, elementary=True)

        gradients = vjp(function, primals, cotangents, needs)
        return [g if g is None else g.to(t.dtype) for g, t in zip(gradients, saved, strict=True)]

    # --- between the caller's tensors and the kernels' --------------------------------------------

    def expose(self, constants: SliceConstants, tensors: Any, outs: Any) -> tuple[Tensor, ...]:
        """Returns the caller's outputs: one tensor, or one for each slice."""
        if not constants.separate():
            return outs  # type: ignore[no-any-return]
        slices = tensors[2:]
        return tuple(separated(outs[0], list(map(_SHAPE, slices)), slices))

    def expose_gradients(
        self, site: SliceSite, grads: Any, saved: Any, outs: Any, needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Returns the gradients of parameters and slices; None for a slice without a cotangent."""
        dweight, dbias, dx = outs
        slices, needed = saved[2:], needs[2:]
        if site.constants.dims or dx is None:
            return (dweight, dbias, *[dx] * len(slices))
        dxs: Sequence[Tensor | None] = separated(dx, list(map(_SHAPE, slices)), slices)
        if not all(needed):
            dxs = [dx if is_needed else None for dx, is_needed in zip(dxs, needed, strict=True)]
        if len(grads) > 1:
            dxs = [None if g is None else dx for dx, g in zip(dxs, grads, strict=True)]
        return (dweight, dbias, *dxs)

    # --- kernels ----------------------------------------------------------------------------------

    def allocate(self, site: SliceSite, tensors: Any) -> tuple[Tensor]:
        """Returns the uninitialised output; for a sequence of outputs, their buffer."""
        constants, first = site.constants, tensors[2]
        if constants.separate():
            return (_buffer(site, first, site.y),)
        if constants.concat and constants.dims != 1:
            # (*, K, D) or K times (*, D_k) -> (*, ΣD_k)
            lead = first.shape[:-2] if constants.dims else first.shape[:-1]
            return (first.new_empty((*lead, site.cols), dtype=site.y),)
        return (empty(first, site.y),)

    forward = staticmethod(launching.forward)
    backward = staticmethod(launching.backward)

    def needed(self, site: SliceSite, grads: Any, needs: Sequence[bool]) -> tuple[bool, bool, bool]:
        """Returns which of dweight, dbias and dx are written; dx is one for all slices."""
        return needs[0], needs[1], any(needs[2:])

    def allocate_gradients(
        self, site: SliceSite, grads: Any, saved: Any, needed: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Returns uninitialised ``(dweight, dbias, dx)``; for a sequence, dx is a buffer."""
        weight, bias, first, *_ = saved
        needs_weight, needs_bias, needs_x = needed
        dx = None
        if needs_x:
            dx = empty(first, site.x) if site.constants.dims else _buffer(site, first, site.x)
        dweight = empty(weight, weight.dtype) if needs_weight else None
        dbias = empty(bias, bias.dtype) if needs_bias else None
        return dweight, dbias, dx


def _sources(constants: SliceConstants) -> tuple[frozenset[int], ...] | None:
    """Returns the indices of the tensors that each output depends on: see `Site.sources`."""
    if not constants.separate():
        return None
    # An output of a slice depends on weight, bias and that slice.
    return tuple([frozenset((0, 1, 2 + k)) for k in range(len(constants.sizes))])


def _with_widths(constants: SliceConstants) -> SliceConstants:
    """Returns the record with a width for each slice, as ints.

    Sizes may be symbols of a tracer. `index` turns them into ints, because kernels are compiled for
    the widths.
    """
    sizes = constants.sizes
    if constants.dims == 2:
        # For a tensor with fewer dimensions this is one slice of width 0; `check` raises for it.
        count, width = sizes if len(sizes) == 2 else (0, 0)
        sizes = (index(width),) * index(count) or (0,)
    return constants._replace(sizes=tuple([index(size) for size in sizes]))


def _reference(
    constants: SliceConstants, tensors: Any, out_dtype: torch.dtype | None, *, elementary: bool
) -> tuple[Tensor, ...]:
    """Returns the outputs of the reference implementation."""
    weight, bias, *slices = tensors
    rule = partial(
        reference.forward,
        eps=constants.eps,
        activation=ACTIVATIONS[constants.activation].formula,
        out_dtype=out_dtype,
        elementary=elementary,
    )
    return reference.composite(
        slices,
        weight,
        bias,
        sizes=constants.sizes,
        dims=constants.dims,
        rule=rule,
        shared=constants.shared,
        concat=constants.concat,
    )


# --- a buffer with slices one after the other -----------------------------------------------------


def _buffer(site: SliceSite, first: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns an uninitialised buffer for all slices; ``first`` is the first of them.

    ``[rows of slice 0, D_0 each | rows of slice 1, D_1 each | ...]``
    """
    rows = first.numel() // site.widths.sizes[0]
    return first.new_empty(rows * site.cols, dtype=dtype)


# --- checks ---------------------------------------------------------------------------------------


def _check_tensors(constants: SliceConstants, tensors: Any) -> None:
    op, sizes = constants.op, constants.sizes
    weight, bias, *slices = tensors
    if constants.dims:
        _check_one(constants, *tensors)
    else:
        _check_many(op, slices)
    count, width, total = len(sizes), sizes[0], sum(sizes)
    shapes: list[tuple[int, ...]] = [(total,)]
    expected = f"({total},)"
    if all(size == width for size in sizes):
        shapes += [(count, width), (width,)]
        expected = f"({total},), ({count}, {width}) or ({width},)"
    for name, value in (("weight", weight), ("bias", bias)):
        if value is None:
            continue
        checks.check_tensor(op, name, value, slices[0])
        shape = tuple(value.shape)
        if shape not in shapes:
            raise ValueError(
                f"{op}: {name} has shape {shape}, expected {expected} for {count} slices"
            )


def _check_one(constants: SliceConstants, weight: Any, bias: Any, x: Any) -> None:
    """Checks the one tensor that has all slices."""
    op, sizes = constants.op, constants.sizes
    checks.check_tensor(op, "slices", x)
    shape = tuple(x.shape)
    if constants.dims == 1:
        if shape[-1:] != (sum(sizes),):
            raise ValueError(
                f"{op}: the sizes of {len(sizes)} slices add up to {sum(sizes)}, "
                f"but slices has shape {shape}"
            )
        return
    if x.dim() < 2:
        raise ValueError(
            f"{op}: slices has shape {shape}, expected (*, K, D), or (*, N) with sizes"
        )
    if 0 in shape[-2:]:
        raise ValueError(
            f"{op}: slices has shape {shape}, expected (*, K, D) with K and D at least 1"
        )
    # If the caller forgets ``sizes``, rows ``(M, N)`` with parameters ``(N,)`` look like M slices
    # that share the parameters.
    parameters = [t for t in (weight, bias) if isinstance(t, Tensor)]
    if x.dim() == 2 and any(tuple(t.shape) == shape[-1:] for t in parameters):
        raise ValueError(
            f"{op}: slices has shape {shape}, expected sizes with it, or (*, K, D) of three "
            "dimensions at least"
        )


def _check_many(op: str, slices: Sequence[Any]) -> None:
    """Checks the tensors of a sequence."""
    first = slices[0]
    for k, t in enumerate(slices):
        name = f"slice {k}"
        checks.check_tensor(op, name, t, first if k else None)
        if t.dim() < 1 or t.shape[-1] < 1:
            raise ValueError(
                f"{op}: {name} has shape {tuple(t.shape)}, expected (*, D) with D at least 1"
            )
        if t.shape[:-1] != first.shape[:-1]:
            raise ValueError(
                f"{op}: {name} has shape {tuple(t.shape)}, but slice 0 has {tuple(first.shape)}"
            )
        if t.dtype != first.dtype:
            raise TypeError(f"{op}: {name} has dtype {t.dtype}, expected {first.dtype} as slice 0")


SLICES = SliceOperator()
define(SLICES)
