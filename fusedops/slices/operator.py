"""The slices family's operator: what its calls depend on, their checks, outputs and reference implementation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, index, itemgetter
from typing import Any

import torch
from torch import Tensor

from ..core import checks, compat
from ..core.activations import ACTIVATIONS, Activation
from ..core.dropout import Dropout
from ..core.function import vjp
from ..core.operand import empty
from ..core.operator import Axes, Constants, Dtypes, Operator, Site
from ..core.operators import NAMES, encode, named
from ..core.registration import define
from . import configs, launching, reference
from .reference import accumulator
from .widths import Widths, widths_of

__all__ = ["ACTIVATION_NAMES", "SLICES", "SliceConstants", "SliceSite"]

# The names of `core.activations`, and another name of "identity".
ACTIVATION_NAMES = (*ACTIVATIONS, "none")

# Whether GPU autocast runs PyTorch's LayerNorm in fp32.
_WIDENED = compat.cast_by_autocast("aten::layer_norm")


@dataclass(frozen=True)
class SliceConstants(Constants):
    """The constants of a call.

    Attributes:
        sizes: the slices' widths.
        dims: trailing dimensions of the one tensor that hold the slices, 1 or 2; 0 for a sequence of tensors.
        concat: whether the output is one tensor with the slices side by side.
        eps: added to the variance.
        activation: the name of what follows the norm.
        shared: whether all slices have the same parameters.
        out_dtype: the output's dtype, None for the slices'.
    """

    sizes: tuple[int, ...]
    dims: int
    concat: bool
    eps: float
    activation: str
    shared: bool
    out_dtype: torch.dtype | None = None

    @property
    def separate(self) -> bool:
        """Whether the outputs are a tensor for each slice."""
        return self.dims == 0 and not self.concat

    def words(self) -> tuple[str, ...]:
        """See `Constants`."""
        sizes = ",".join([str(size) for size in self.sizes])
        return (sizes, str(self.dims), "joined" if self.concat else "separate", self.activation,
                "shared" if self.shared else "own", NAMES[self.out_dtype])  # fmt: skip

    def numbers(self) -> tuple[float, ...]:
        """See `Constants`."""
        return (self.eps,)

    @classmethod
    def read(cls, words: Sequence[str], numbers: Sequence[float]) -> SliceConstants:
        """See `Constants`."""
        op, widths, dims, form, activation, shared, out_dtype = words
        sizes = tuple([int(size) for size in widths.split(",")])
        return cls(op, sizes, int(dims), form == "joined", numbers[0], activation, shared == "shared", named(out_dtype))


@dataclass(frozen=True, eq=False)
class SliceSite(Site):
    """What of a call stays the same from step to step.

    Attributes:
        widths: the widths of the slices.
        y: the output's dtype.
    """

    widths: Widths
    y: torch.dtype

    @property
    def activation(self) -> Activation:
        """The activation's entry in the table."""
        return ACTIVATIONS[self.constants.activation]

    @property
    def x(self) -> torch.dtype:
        """The slices' dtype."""
        return self.dtypes[2]  # type: ignore[return-value]


# What a key takes of each of many tensors, in C.
_DTYPE, _DEVICE, _SHAPE = attrgetter("dtype"), attrgetter("device"), attrgetter("shape")


class SliceOperator(Operator):
    """``activation(layer_norm(slice))`` for many slices.

    The kernels' output, and their gradient of the slices, is one tensor in every form: for slices that are tensors of
    their own a buffer with one after the other.
    """

    name = "slices"
    constants = SliceConstants
    tensors = ("weight", "bias", "slices")
    first = 2
    variadic = True
    outputs = ("y",)
    saved = ("kept_weight", "kept_bias", "kept")
    rows = frozenset(("slices", "y", "kept"))
    numbers = ("eps",)
    # Tables of addresses outlive a call, which memory that a graph tree manages must not.
    tags = tuple([getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name)])

    @staticmethod
    def record(*arguments: Any) -> SliceConstants:
        """``sizes`` are the widths; with two dimensions the number of slices and the width of each."""
        op, sizes, dims, *rest = arguments
        if dims == 2:
            count, size = sizes if len(sizes) == 2 else (0, 0)
            sizes = (index(size),) * index(count) or (0,)
        # A tracer may have symbols for sizes: `index` makes numbers of them, as kernels are compiled for each width.
        return SliceConstants(op, tuple([index(size) for size in sizes]), dims, *rest)

    @staticmethod
    def key(arguments: Any, tensors: Any) -> Hashable:
        """What the checks look at; of a sequence no more than what all slices have in common."""
        weight, bias, x, *_ = tensors
        dims: int = arguments[2]
        facts: Any
        if dims:
            facts = type(x), x.dtype, x.device, x.dim() == 2, dims == 2 or x.shape[-1]
        else:
            slices = tensors[2:]
            shapes = set(map(_SHAPE, slices))
            batches = 1 if len(shapes) == 1 else len({shape[:-1] for shape in shapes})
            facts = (frozenset(map(type, slices)), frozenset(map(_DTYPE, slices)), frozenset(map(_DEVICE, slices)),
                     batches)  # fmt: skip
        return (
            arguments, facts,
            None if weight is None else (type(weight), weight.dtype, weight.device, weight.shape),
            None if bias is None else (type(bias), bias.dtype, bias.device, bias.shape),
        )  # fmt: skip

    def check(self, constants: SliceConstants, tensors: Any) -> None:
        """All that can be wrong but ``sizes``."""
        op, sizes = constants.op, constants.sizes
        weight, bias, *slices = tensors
        if constants.dims:
            _check_one(constants, *tensors)
        else:
            _check_many(op, slices)
        count, size, total = len(sizes), sizes[0], sum(sizes)
        equal = all(other == size for other in sizes)
        for name, value in (("weight", weight), ("bias", bias)):
            if value is not None:
                checks.check_tensor(op, name, value, slices[0])
                shape = tuple(value.shape)
                if shape != (total,) and not (equal and shape in ((count, size), (size,))):
                    shapes = f"({total},), ({count}, {size}) or ({size},)" if equal else f"({total},)"
                    raise ValueError(f"{op}: {name} has shape {shape}, expected {shapes} for {count} slices")
        self.check_constants(constants)

    def check_constants(self, constants: SliceConstants) -> None:
        """The epsilon and the activation."""
        checks.check_eps(constants.op, constants.eps)
        # "none" is "identity" by now.
        if constants.activation not in ACTIVATIONS:
            checks.check_choice(constants.op, "activation", constants.activation, ACTIVATION_NAMES)

    def autocast(self, constants: SliceConstants, tensors: Any) -> SliceConstants:
        """An output in fp32 where PyTorch's LayerNorm gives one."""
        first = tensors[self.first]
        if _WIDENED and getattr(first, "is_cuda", False) and first.dtype != torch.float64:
            return _in_fp32(constants)
        return constants

    def cols(self, constants: SliceConstants, tensors: Any) -> int:
        """All widths together."""
        sizes = constants.sizes
        return sum(sizes) if max(sizes) <= configs.widest(tensors[self.first].dtype.itemsize) else -1

    def site(self, constants: SliceConstants, dtypes: Dtypes, cols: int, device_index: int, *, dropout: bool,
             saves: bool) -> SliceSite:  # fmt: skip
        """See `Operator`; the arguments are all that is saved."""
        x = dtypes[2]
        assert x is not None
        return SliceSite(constants, device_index, cols, dtypes, dropout, saves, accumulator(x), (True,), 1,
                         itemgetter(slice(None, -2)), encode(constants, dtypes, saves), widths_of(constants.sizes),
                         constants.out_dtype or x)  # fmt: skip

    def leading(self, constants: SliceConstants, dims: int) -> int:
        """See `Operator`."""
        return dims - max(constants.dims, 1)

    def axes(self, constants: SliceConstants, tensors: Any) -> Axes:
        """See `Operator`; there may be an output for each slice, or one without a dimension for the slices."""
        found = super().axes(constants, tensors)
        rows = tuple(range(len(found.rows)))
        if constants.separate:
            return found._replace(outputs=((*rows, None),) * len(constants.sizes))
        return found._replace(outputs=((*rows, None),)) if constants.concat else found

    def argument(self, constants: SliceConstants, place: int) -> str:
        """See `Operator`."""
        return self.tensors[place] if place < 2 or constants.dims else f"slice {place - 2}"

    # --- PyTorch's operators --------------------------------------------------------------------------------------------

    def reference(self, constants: SliceConstants, tensors: Any, dropout: Dropout) -> tuple[Tensor, ...]:
        """See `reference`."""
        elementary = compat.transforms() or compat.in_forward_mode()
        return _reference(constants, tensors, constants.out_dtype, elementary=elementary)

    def derivative(self, site: SliceSite, grads: Any, saved: Any, dropout: Callable[[Tensor], Dropout],
                   needs: Sequence[bool]) -> Sequence[Tensor | None]:  # fmt: skip
        """Of the reference implementation, in the dtype that kernels compute in."""
        constants, slices = site.constants, saved[2:]
        if constants.separate and len(grads) == 1:
            grads = _views(grads[0].reshape(-1), slices)
        primals = [None if t is None else t.to(site.acc) for t in saved]
        cotangents = [None if g is None else g.to(site.acc) for g in grads]
        found = vjp(lambda *tensors: _reference(constants, tensors, None, elementary=True), primals, cotangents, needs)
        return [g if g is None else g.to(t.dtype) for g, t in zip(found, saved, strict=True)]

    def sources(self, constants: SliceConstants, outputs: int) -> tuple[frozenset[int], ...] | None:
        """Each output, where there is one for each slice, depends on its slice and the parameters."""
        return None if outputs == 1 else tuple([frozenset((0, 1, place)) for place in range(2, 2 + outputs)])

    # --- between the caller's tensors and the kernels' ------------------------------------------------------------------

    def expose(self, constants: SliceConstants, tensors: Any, outs: Any) -> tuple[Tensor, ...]:
        """One tensor, or one for each slice."""
        return _taken_apart(constants, outs[0], tensors[2:]) if constants.separate else outs

    def joined(self, constants: SliceConstants, grads: Any, saved: Any) -> tuple[Tensor]:
        """The cotangents of a sequence in one buffer."""
        if len(grads) == 1:
            return grads  # type: ignore[no-any-return]
        like = next(g for g in grads if g is not None)
        return (torch.cat([like.new_zeros(x.numel()) if g is None else g.reshape(-1)
                           for g, x in zip(grads, saved[2:], strict=True)]),)  # fmt: skip

    def expose_gradients(self, site: SliceSite, grads: Any, saved: Any, outs: Any,
                         needs: Sequence[bool]) -> Sequence[Tensor | None]:  # fmt: skip
        """The parameters' gradients and the slices'; None of those whose output has none."""
        dweight, dbias, dx = outs
        slices, needed = saved[2:], needs[2:]
        if site.constants.dims or dx is None:
            return (dweight, dbias, *[dx] * len(slices))
        dxs: Sequence[Tensor | None] = _taken_apart(site.constants, dx, slices)
        if not all(needed):
            dxs = [dx if need else None for dx, need in zip(dxs, needed, strict=True)]
        if len(grads) > 1:
            dxs = [None if g is None else dx for dx, g in zip(dxs, grads, strict=True)]
        return (dweight, dbias, *dxs)

    # --- kernels --------------------------------------------------------------------------------------------------------

    def allocate(self, site: SliceSite, tensors: Any) -> tuple[Tensor]:
        """The output; for a sequence of outputs their buffer."""
        constants, first = site.constants, tensors[2]
        if constants.separate:
            return (_buffer(site, first, site.y),)
        if constants.concat and constants.dims != 1:
            return (first.new_empty((*first.shape[: -2 if constants.dims else -1], site.cols), dtype=site.y),)
        return (empty(first, site.y),)

    forward = staticmethod(launching.forward)
    backward = staticmethod(launching.backward)

    def needed(self, site: SliceSite, grads: Any, needs: Sequence[bool]) -> tuple[bool, bool, bool]:
        """The slices' gradient is one tensor."""
        return needs[0], needs[1], any(needs[2:])

    def allocate_gradients(self, site: SliceSite, grads: Any, saved: Any,
                           needed: Sequence[bool]) -> tuple[Tensor | None, ...]:  # fmt: skip
        """``(dweight, dbias, dx)``, of a sequence dx in a buffer."""
        weight, bias, first, *_ = saved
        dx = None
        if needed[2]:
            dx = empty(first, site.x) if site.constants.dims else _buffer(site, first, site.x)
        return empty(weight, weight.dtype) if needed[0] else None, empty(bias, bias.dtype) if needed[1] else None, dx


def _in_fp32(constants: SliceConstants) -> SliceConstants:
    return replace(constants, out_dtype=torch.float32)


def _reference(constants: SliceConstants, tensors: Any, out_dtype: torch.dtype | None, *,
               elementary: bool) -> tuple[Tensor, ...]:  # fmt: skip
    weight, bias, *slices = tensors
    rule = partial(reference.forward, eps=constants.eps, activation=ACTIVATIONS[constants.activation].formula,
                   out_dtype=out_dtype, elementary=elementary)  # fmt: skip
    return reference.composite(slices, weight, bias, constants.sizes, constants.dims, rule, shared=constants.shared,
                               concat=constants.concat)  # fmt: skip


# --- a buffer with slices one after the other -------------------------------------------------------------------------


def _buffer(site: SliceSite, first: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised, for slices of which ``first`` is one."""
    return first.new_empty(first.numel() // site.widths.sizes[0] * site.cols, dtype=dtype)


def _taken_apart(constants: SliceConstants, buffer: Tensor, slices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors that ``buffer`` holds, in the shapes of ``slices``.

    They share its memory, none of it twice, and nothing else: autograd is not to take them for views, whose change in
    place it would refuse, or take for a change of all.
    """
    if torch.compiler.is_dynamo_compiling():
        return _views(buffer, slices)
    with compat.below_autograd():
        if type(buffer) is not Tensor:
            return _views(buffer, slices)
        if widths_of(constants.sizes).uniform:
            return buffer.view(len(slices), *slices[0].shape).unbind(0)
        return tuple(compat.unflatten(buffer, list(slices)))


def _views(buffer: Tensor, slices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # One view each: of several views from one operator none may be changed in place.
    elements = [t.numel() for t in slices]
    parts = zip(itertools.accumulate(elements), elements, slices, strict=True)
    return tuple([buffer.narrow(0, end - count, count).view(t.shape) for end, count, t in parts])


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_one(constants: SliceConstants, weight: Any, bias: Any, x: Any) -> None:
    """One tensor with all slices."""
    op, sizes = constants.op, constants.sizes
    checks.check_tensor(op, "slices", x)
    shape = tuple(x.shape)
    if constants.dims == 1:
        if shape[-1:] != (sum(sizes),):
            raise ValueError(f"{op}: the sizes of {len(sizes)} slices add up to {sum(sizes)}, but slices has shape "
                             f"{shape}")  # fmt: skip
        return
    if x.dim() < 2:
        raise ValueError(f"{op}: slices has shape {shape}, expected (*, K, D), or (*, N) with sizes")
    if 0 in shape[-2:]:
        raise ValueError(f"{op}: slices has shape {shape}, expected (*, K, D) with K and D at least 1")
    if x.dim() == 2 and any(isinstance(t, Tensor) and tuple(t.shape) == shape[-1:] for t in (weight, bias)):
        # Rows of slices side by side, their sizes forgotten, look like one row of slices that share a parameter.
        raise ValueError(f"{op}: slices has shape {shape}, expected sizes with it, or (*, K, D) of three dimensions at "
                         "least")  # fmt: skip


def _check_many(op: str, slices: Sequence[Any]) -> None:
    """A tensor for each slice."""
    first = slices[0]
    for k, t in enumerate(slices):
        name = f"slice {k}"
        checks.check_tensor(op, name, t, first if k else None)
        if t.dim() < 1 or t.shape[-1] < 1:
            raise ValueError(f"{op}: {name} has shape {tuple(t.shape)}, expected (*, D) with D at least 1")
        if t.shape[:-1] != first.shape[:-1]:
            raise ValueError(f"{op}: {name} has shape {tuple(t.shape)}, but slice 0 has {tuple(first.shape)}")
        if t.dtype != first.dtype:
            raise TypeError(f"{op}: {name} has dtype {t.dtype}, expected {first.dtype} as slice 0")


SLICES = SliceOperator()
define(SLICES)
