"""The norm family's operator: what its calls depend on, their checks, outputs and reference implementation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from operator import index, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import checks, compat, launch
from ..core.dropout import Dropout
from ..core.function import vjp
from ..core.launch import pointer_type
from ..core.operand import empty
from ..core.operator import Constants, Dtypes, Operator, Site
from ..core.operators import NAMES, encode, named
from ..core.registration import define
from ..core.rng import State
from ..core.sharding import Layout
from . import launching, reference
from .reference import NormRule, accumulator

__all__ = ["NORM", "NormConstants", "NormSite", "check_constants", "constants_of"]

_ROUNDINGS = ("once", "llama", "t5")
_SAVES = ("sum", "output", "inputs")

# Of the output, the pre-norm sum and the low-precision copy, the places of the tensors that they depend on.
_SOURCES = tuple(map(frozenset, (range(5), range(3), range(5))))

# Whether GPU autocast runs PyTorch's norms in fp32 (rms_norm: from 2.12 on).
_WIDENED = {kind: compat.cast_by_autocast(f"aten::{kind}_norm") for kind in ("layer", "rms")}


@dataclass(frozen=True)
class NormConstants(Constants):
    """The constants of a norm's call.

    Attributes:
        rule: the norm.
        shape: the normalised dimensions of a norm alone, None for those with a bias and a residual: the last.
        save: what is saved for the backward: "sum", "output" or "inputs".
        return_sum: whether the pre-norm sum is an output.
        out_dtype: the output's dtype, None for what the arguments' dtypes give.
        cast_dtype: the dtype of the output's low-precision copy, None for no copy.
    """

    rule: NormRule
    shape: tuple[int, ...] | None
    save: str = "sum"
    return_sum: bool = False
    out_dtype: torch.dtype | None = None
    cast_dtype: torch.dtype | None = None

    @property
    def dims(self) -> int:
        """Trailing dimensions that make up a row."""
        return 1 if self.shape is None else len(self.shape)

    def words(self) -> tuple[str, ...]:
        """See `Constants`."""
        shape = "none" if self.shape is None else ",".join([str(index(size)) for size in self.shape])
        stored = "stores" if self.return_sum else "drops"
        exact = "eps" if self.rule.eps is None else "given"
        return (self.rule.kind, self.rule.rounding, exact, shape, self.save, stored, NAMES[self.out_dtype],
                NAMES[self.cast_dtype])  # fmt: skip

    def numbers(self) -> tuple[float, ...]:
        """See `Constants`."""
        return (0.0 if self.rule.eps is None else self.rule.eps, self.rule.weight_offset)

    @classmethod
    def read(cls, words: Sequence[str], numbers: Sequence[float]) -> NormConstants:
        """See `Constants`."""
        op, kind, rounding, exact, shape, save, stored, out_dtype, cast_dtype = words
        rule = NormRule(kind, None if exact == "eps" else numbers[0], numbers[1], rounding)  # type: ignore[arg-type]
        sizes = None if shape == "none" else tuple([int(size) for size in shape.split(",")])
        return cls(op, rule, sizes, save, stored == "stores", named(out_dtype), named(cast_dtype))


def constants_of(
    op: str, kind: Any, eps: Any, weight_offset: Any, rounding: Any, shape: Any, *rest: Any
) -> NormConstants:
    """The record of a call's constants; ``rest`` are the fields from ``save`` on."""
    return NormConstants(op, NormRule(kind, eps, weight_offset, rounding), shape, *rest)


@dataclass(frozen=True, eq=False)
class NormSite(Site):
    """What of a norm's call stays the same from step to step.

    Attributes:
        y, z, cast: the dtypes of the output, the pre-norm sum and the low-precision copy, None for no copy.
        dims: trailing dimensions that make up a row.
        moments: statistics of a row: rstd and, for LayerNorm, the mean; 0 without a norm.
        shares: whether x and the residual have one gradient, as in PyTorch's add.
    """

    y: torch.dtype
    z: torch.dtype
    cast: torch.dtype | None
    dims: int
    moments: int
    shares: bool

    @property
    def rule(self) -> NormRule:
        """The norm."""
        return self.constants.rule  # type: ignore[no-any-return]

    @property
    def normalizes(self) -> bool:
        """Whether there is a norm."""
        return self.rule.kind != "none"

    @functools.cached_property
    def pointers(self) -> dict[str, str | None]:
        """Triton's pointer types of the arguments."""
        dtypes = (*self.dtypes, self.y, self.z, self.cast)
        return dict(zip((*NORM.tensors, "y", "z", "cast"), map(pointer_type, dtypes), strict=True))


class Norm(Operator):
    """LayerNorm, RMSNorm or no norm of ``dropout(x + bias) + residual``."""

    name = "norm"
    constants = NormConstants
    tensors = ("x", "bias", "residual", "weight", "ln_bias")
    outputs = ("y", "z", "cast", "stats")
    visible = 3
    saved = ("kept", "kept_bias", "kept_residual", "kept_weight", "kept_ln_bias", "stats")
    numbers = ("eps", "weight_offset")
    shares = (0, 2)
    rows = frozenset(("x", "residual", "y", "z", "cast", "kept", "kept_residual"))

    record = staticmethod(constants_of)

    @staticmethod
    def key(arguments: Any, tensors: Any) -> Hashable:
        """Every shape, dtype, type and device that the checks look at; of rows the last dimensions alone."""
        x, bias, residual, weight, ln_bias = tensors
        shape, normalized = x.shape, arguments[5]
        return (
            arguments, type(x), x.dtype, x.device,
            shape[-1] if normalized is None or len(normalized) == 1 else shape[-len(normalized) :],
            None if bias is None else (type(bias), bias.dtype, bias.device, bias.shape),
            None if residual is None else (type(residual), residual.dtype, residual.device, residual.shape == shape),
            None if weight is None else (type(weight), weight.dtype, weight.device, weight.shape),
            None if ln_bias is None else (type(ln_bias), ln_bias.dtype, ln_bias.device, ln_bias.shape),
        )  # fmt: skip

    def check(self, constants: NormConstants, tensors: Any) -> None:
        """All that can be wrong but p."""
        op, shape = constants.op, constants.shape
        x, bias, residual, weight, ln_bias = tensors
        first, last = self.argument(constants, 0), self.argument(constants, 4)
        checks.check_tensor(op, first, x)
        if shape is None:
            if x.dim() == 0:
                raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
            tail: tuple[int, ...] = tuple(x.shape[-1:])
        else:
            tail = shape
            if tuple(x.shape[-len(tail) :]) != tail:
                wanted = ", ".join(map(str, tail))
                raise ValueError(f"{op}: input has shape {tuple(x.shape)}, expected (*, {wanted})")
        if residual is not None:
            checks.check_tensor(op, "residual", residual, x)
            checks.check_shape(op, "residual", residual, tuple(x.shape))
        for name, value in (("bias", bias), ("weight", weight), (last, ln_bias)):
            if value is not None:
                checks.check_tensor(op, name, value, x)
                checks.check_shape(op, name, value, tail)
        self.check_constants(constants)

    def check_constants(self, constants: NormConstants) -> None:
        """What can be wrong with them."""
        op, rule = constants.op, constants.rule
        check_constants(op, rule.kind, rule.eps, rule.weight_offset, rule.rounding, constants.save)
        checks.check_out_dtype(op, constants.out_dtype)
        checks.check_out_dtype(op, constants.cast_dtype, "cast_dtype")

    def autocast(self, constants: NormConstants, tensors: Any) -> NormConstants:
        """An output in fp32 where PyTorch's norm gives one."""
        kind = constants.rule.kind
        if constants.out_dtype is None and _WIDENED.get(kind) and _all_on_gpu(tensors[:3]):
            return _in_fp32(constants)
        return constants

    def cols(self, constants: NormConstants, tensors: Any) -> int:
        """The hidden size."""
        x = tensors[0]
        cols = x.shape[-1] if constants.shape is None else math.prod(constants.shape)
        return cols if 0 < cols <= launch.LONGEST_ROW else -1

    def writes(self, constants: NormConstants, dtypes: Dtypes, *, dropout: bool, saves: bool) -> tuple[bool, ...]:
        """The pre-norm sum is written if it is returned, or saved and not simply x."""
        if constants.rule.kind == "none":
            return True, False, False, False
        x_alone = dtypes[1] is None and dtypes[2] is None and not dropout
        stores = constants.return_sum or (saves and constants.save == "sum" and not x_alone)
        y, _ = _output_dtypes(constants, dtypes)
        return True, stores, constants.cast_dtype not in (None, y), True

    def site(self, constants: NormConstants, dtypes: Dtypes, cols: int, device_index: int, *, dropout: bool,
             saves: bool) -> NormSite:  # fmt: skip
        """See `Operator`."""
        y, z = _output_dtypes(constants, dtypes)
        outs = self.writes(constants, dtypes, dropout=dropout, saves=saves)
        several = constants.return_sum or constants.cast_dtype is not None
        returned = 3 if several else 1 + outs[1]
        moments, shares = {"layer": 2, "rms": 1, "none": 0}[constants.rule.kind], not dropout and dtypes[0] is dtypes[2]
        return NormSite(constants, device_index, cols, dtypes, dropout, saves, accumulator(z), outs, returned,
                        _saved(constants, outs[1]), encode(constants, dtypes, saves), y, z,
                        constants.cast_dtype if outs[2] else None, constants.dims, moments, shares)  # fmt: skip

    def leading(self, constants: NormConstants, dims: int) -> int:
        """See `Operator`."""
        return dims - constants.dims

    def has_columns(self, constants: NormConstants) -> bool:
        """See `Operator`; of several normalised dimensions none is sharded."""
        return constants.dims == 1

    def argument(self, constants: NormConstants, place: int) -> str:
        """See `Operator`."""
        name = NORM.tensors[place]
        if name == "ln_bias" and (constants.shape is not None or constants.op == "add_layer_norm"):
            return "bias"
        return "input" if name == "x" and constants.shape is not None else name

    def sources(self, constants: NormConstants, outputs: int) -> tuple[frozenset[int], ...] | None:
        """The pre-norm sum depends on none of the norm's parameters."""
        return _SOURCES if constants.return_sum else None

    def over_columns(self, constants: NormConstants, tensors: Any, state: State | Dropout, layout: Layout) -> Any:
        """See `sharded`."""
        if constants.rule.kind == "none":
            return None
        from .sharded import norm_over_columns

        return norm_over_columns(constants, tensors, state, layout)

    # --- PyTorch's operators --------------------------------------------------------------------------------------------

    def native(self, constants: NormConstants, dtypes: Dtypes) -> Callable[..., Any] | None:
        """`F.layer_norm` and `F.rms_norm`, where they do exactly this."""
        rule = constants.rule
        x, bias, residual, weight, ln_bias = dtypes
        y, _ = _output_dtypes(constants, dtypes)
        alone = constants.shape is not None and rule.kind != "none" and bias is None and residual is None
        exact = rule.rounding == "once" and rule.weight_offset == 0.0 and (weight is not None or ln_bias is None)
        if not alone or not exact or len({d for d in (x, weight, ln_bias, y) if d is not None}) > 1:
            return None
        return _layer_norm if rule.kind == "layer" else _rms_norm

    def reference(self, constants: NormConstants, tensors: Any,
                  dropout: Dropout) -> tuple[Tensor | None, ...]:  # fmt: skip
        """See `reference.forward`."""
        x, bias, residual, weight, ln_bias = tensors
        if x.is_nested:
            native = self.native(constants, tuple([None if t is None else t.dtype for t in tensors]))
            if native is not None:
                return native(constants, tensors), None, None
        dims, flat = constants.dims, x
        if dims > 1:
            flat = x.flatten(-dims)
            weight, ln_bias = (None if t is None else t.flatten() for t in (weight, ln_bias))
        elementary = compat.transforms() or compat.in_forward_mode()
        y, z = reference.forward((flat, bias, residual, weight, ln_bias), constants.rule, dropout=dropout,
                                 out_dtype=constants.out_dtype, elementary=elementary)  # fmt: skip
        # As from the kernels: neither is ever the caller's own tensor.
        y = y.clone() if y is x else y
        z = z.clone() if z is x and constants.return_sum else z
        y = y.view(x.shape) if flat is not x else y
        cast = constants.cast_dtype
        return y, z if constants.return_sum else None, None if cast in (None, y.dtype) else y.to(cast)

    def derivative(self, site: NormSite, grads: Any, saved: Any, dropout: Callable[[Tensor], Dropout],
                   needs: Sequence[bool]) -> Sequence[Tensor | None]:  # fmt: skip
        """From the pre-norm sum, which is saved or computed again."""
        dy, dz, dcast = grads
        kept, bias, residual, weight, ln_bias, _ = saved
        if dcast is not None:
            dy = dcast if dy is None else dy + dcast
        like = dz if dy is None else dy
        dropped = dropout(like)
        total = None if dz is None else dz.to(site.acc)
        dweight = dln_bias = None
        if not site.normalizes:
            total = dy.to(site.acc)
        elif dy is not None:
            if site.constants.save == "output":
                raise RuntimeError("fusedops: save='output' has no double backward; use save='sum'")
            z = kept
            if site.constants.save == "inputs":
                z = reference.dropout_add(kept, bias, residual, dropped).to(site.z)
            dims, rule = site.constants.dims, replace(site.rule, rounding="once", eps=site.rule.epsilon(site.z))
            primals = [None if t is None else _flat(t, dims).to(site.acc) for t in (z, weight, ln_bias)]
            function = lambda z, w, b: (reference.normalize(z, w, b, rule, elementary=True),)  # noqa: E731
            cotangents = (_flat(dy, dims).to(site.acc),)
            normed, dweight, dln_bias = vjp(function, primals, cotangents, (any(needs[:3]), needs[3], needs[4]))
            if normed is not None:
                normed = normed.view(like.shape)
                total = normed if total is None else total + normed
        if total is None:
            total = torch.zeros_like(like, dtype=site.acc)
        dx = dropped(total, site.acc)
        dbias = dx.sum(tuple(range(dx.dim() - 1))) if dx.dim() > 1 else dx
        shapes = (like.shape, dbias.shape, like.shape, *(None if t is None else t.shape for t in (weight, ln_bias)))
        return [
            grad.reshape(shape).to(dtype) if needed and grad is not None and shape is not None else None
            for grad, shape, dtype, needed in zip((dx, dbias, total, dweight, dln_bias), shapes, site.dtypes, needs,
                                                  strict=True)
        ]  # fmt: skip

    # --- kernels --------------------------------------------------------------------------------------------------------

    def allocate(self, site: NormSite, tensors: Any) -> tuple[Tensor | None, ...]:
        """``(y, z, cast, stats)``; the statistics are rstd and, for LayerNorm, the mean, one number a row each."""
        x = tensors[0]
        y = empty(x, site.y)
        moments = site.moments
        if not moments:
            return y, None, None, None
        _, stores, casts, _ = site.outs
        z = empty(x, site.z) if stores else None
        cast = empty(x, site.cast) if casts else None
        return y, z, cast, x.new_empty(moments, *x.shape[: x.dim() - site.dims], dtype=site.acc)

    forward = staticmethod(launching.forward)
    backward = staticmethod(launching.backward)

    def needed(self, site: NormSite, grads: Any, needs: Any) -> tuple[bool, ...]:
        """Without dropout x and residual of one dtype share a gradient, as in PyTorch's add.

        Where only the pre-norm sum has a gradient, the norm's parameters have none.
        """
        normed = grads[0] is not None or grads[2] is not None
        if normed and not site.shares:
            return needs  # type: ignore[no-any-return]
        x, bias, residual, weight, ln_bias = needs
        shared = site.shares and x and residual
        return x and not shared, bias, residual, weight and normed, ln_bias and normed

    def allocate_gradients(self, site: NormSite, grads: Any, saved: Any, needed: Any) -> tuple[Tensor | None, ...]:
        """``(dx, dbias, dresidual, dweight, dln_bias)``."""
        dy, dz, dcast = grads
        like = dy if dy is not None else dz if dz is not None else dcast
        x, bias, residual, _, _ = site.dtypes
        return (
            empty(like, x) if needed[0] else None,
            like.new_empty(site.cols, dtype=bias) if needed[1] else None,
            empty(like, residual) if needed[2] else None,
            empty(saved[3], saved[3].dtype) if needed[3] else None,
            empty(saved[4], saved[4].dtype) if needed[4] else None,
        )


def _flat(t: Tensor, dims: int) -> Tensor:
    # `flatten` has no rule for gradients that `torch.autograd.grad` maps over (``is_grads_batched=True``).
    return t if dims == 1 else t.reshape(*t.shape[:-dims], math.prod(t.shape[-dims:]))


def _layer_norm(constants: NormConstants, tensors: Any) -> Tensor:
    x, _, _, weight, ln_bias = tensors
    return F.layer_norm(x, constants.shape, weight, ln_bias, constants.rule.eps)  # type: ignore[arg-type]


def _rms_norm(constants: NormConstants, tensors: Any) -> Tensor:
    return F.rms_norm(tensors[0], constants.shape, tensors[3], constants.rule.eps)  # type: ignore[arg-type]


def _output_dtypes(constants: NormConstants, dtypes: Dtypes) -> tuple[torch.dtype, torch.dtype]:
    """Of the output and of the pre-norm sum."""
    x, bias, residual, weight, _ = dtypes
    assert x is not None
    z = x
    for other in (bias, residual):
        if other is not None:
            z = torch.promote_types(z, other)
    return constants.out_dtype or constants.rule.output_dtype(z, weight), z


def _saved(constants: NormConstants, stores: bool) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Takes what `Norm.saved` names out of the five tensors, the four outputs and a None."""
    absent = 9
    if constants.rule.kind == "none":
        return itemgetter(*[absent] * 6)
    if constants.save == "inputs":
        return itemgetter(0, 1, 2, 3, 4, 8)
    kept = 5 if constants.save == "output" else 6 if stores else 0
    return itemgetter(kept, absent, absent, 3, 4, 8)


def _all_on_gpu(tensors: Sequence[Any]) -> bool:
    return all(t is None or (getattr(t, "is_cuda", False) and t.dtype != torch.float64) for t in tensors)


def _in_fp32(constants: NormConstants) -> NormConstants:
    return NormConstants(constants.op, constants.rule, constants.shape, constants.save, constants.return_sum,
                         torch.float32, constants.cast_dtype)  # fmt: skip


def check_constants(op: str, kind: reference.Kind, eps: Any, weight_offset: Any = 0.0, rounding: Any = "once",
                    save: Any = "sum") -> None:  # fmt: skip
    """What stays the same from call to call, but p; an RMSNorm's eps may be None."""
    if eps is not None or kind == "layer":
        checks.check_eps(op, eps)
    checks.check_number(op, "weight_offset", weight_offset)
    checks.check_choice(op, "rounding", rounding, _ROUNDINGS)
    checks.check_choice(op, "save", save, _SAVES)


NORM = Norm()
define(NORM)
