"""The norm family's operator: cache keys, checks, outputs and reference implementation."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.calls import checks
from ..core.calls.function import vjp
from ..core.calls.operator import Axes, Dtypes, Operator, axes_of_rows
from ..core.calls.registration import define
from ..core.compat.dispatch import cast_by_autocast, in_forward_mode, transforms
from ..core.launches import launch
from ..core.launches.operand import empty
from ..core.random.dropout import Dropout
from . import launching, reference
from .reference import accumulator
from .site import TENSORS, NormConstants, NormSite

__all__ = ["NORM", "check_constants"]

_ROUNDINGS = ("once", "llama", "t5")
_SAVES = ("sum", "output", "inputs")

# The indices of the tensors that the output, the pre-norm sum and the low-precision copy depend on.
_SOURCES = tuple(map(frozenset, (range(5), range(3), range(5))))

# Whether GPU autocast runs PyTorch's norms in fp32 (rms_norm: from 2.12 on).
_WIDENED = {kind: cast_by_autocast(f"aten::{kind}_norm") for kind in ("layer", "rms")}


class Norm(Operator):
    """LayerNorm, RMSNorm or no norm of ``dropout(x + bias) + residual``."""

    name = "norm"
    constants = NormConstants
    tensors = TENSORS
    outputs = ("y", "z", "cast", "stats")
    visible = 3
    saved = ("saved_z", "saved_bias", "saved_residual", "saved_weight", "saved_ln_bias", "stats")

    @staticmethod
    def key(mode: int, constants: Any, tensors: Any) -> Hashable:
        """Everything that `check` reads: types, dtypes, devices, and the sizes of last dimensions.

        The number of rows is left out: it is not checked, and differs from batch to batch.
        """
        # This runs in every call: no helper function, and no loop over the tensors.
        x, bias, residual, weight, ln_bias = tensors
        shape, normalized = x.shape, constants.shape
        one_dimension = normalized is None or len(normalized) == 1
        tail = shape[-1] if one_dimension else shape[-len(normalized) :]
        bias_key = residual_key = weight_key = ln_bias_key = None
        if bias is not None:
            bias_key = (type(bias), bias.dtype, bias.device, bias.shape)
        if residual is not None:
            fits = residual.shape == shape
            residual_key = (type(residual), residual.dtype, residual.device, fits)
        if weight is not None:
            weight_key = (type(weight), weight.dtype, weight.device, weight.shape)
        if ln_bias is not None:
            ln_bias_key = (type(ln_bias), ln_bias.dtype, ln_bias.device, ln_bias.shape)
        return (
            mode,
            constants,
            type(x),
            x.dtype,
            x.device,
            tail,
            bias_key,
            residual_key,
            weight_key,
            ln_bias_key,
        )

    def check(self, constants: NormConstants, tensors: Any, *, nested: bool) -> NormConstants:
        """See `Operator`; it checks all but p. PyTorch's norms may return fp32 under autocast."""
        op = constants.op
        if not nested:
            self._check_tensors(constants, tensors)
        check_constants(
            op,
            constants.kind,
            constants.eps,
            constants.weight_offset,
            constants.rounding,
            constants.save,
        )
        checks.check_out_dtype(op, constants.out_dtype)
        checks.check_out_dtype(op, constants.cast_dtype, "cast_dtype")
        if not torch.is_autocast_enabled("cuda"):
            return constants
        is_widened = constants.out_dtype is None and _WIDENED.get(constants.kind)
        if not is_widened or not _all_on_gpu(tensors[:3]):
            return constants
        return constants._replace(out_dtype=torch.float32)

    def _check_tensors(self, constants: NormConstants, tensors: Any) -> None:
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

    def cols(self, constants: NormConstants, tensors: Any) -> int:
        """The hidden size."""
        x = tensors[0]
        cols = x.shape[-1] if constants.shape is None else math.prod(constants.shape)
        return cols if 0 < cols <= launch.LONGEST_ROW else -1

    def writes(
        self, constants: NormConstants, dtypes: Dtypes, *, dropout: bool, saves: bool
    ) -> tuple[bool, ...]:
        """Whether each output is written: y, z, the low-precision copy and the statistics.

        The pre-norm sum z is written if it is returned, or if it is saved and not equal to x.
        """
        if constants.kind == "none":
            return True, False, False, False
        is_x = dtypes[1] is None and dtypes[2] is None and not dropout
        saves_sum = saves and constants.save == "sum" and not is_x
        y, _ = _output_dtypes(constants, dtypes)
        casts = constants.cast_dtype not in (None, y)
        return True, constants.return_sum or saves_sum, casts, True

    def site(
        self,
        constants: NormConstants,
        dtypes: Dtypes,
        cols: int,
        device_index: int,
        *,
        dropout: bool,
        saves: bool,
    ) -> NormSite:
        """See `Operator`."""
        y, z = _output_dtypes(constants, dtypes)
        outs = self.writes(constants, dtypes, dropout=dropout, saves=saves)
        # The outputs of the autograd Function are the first ``returned`` of y, z and the copy. A
        # sum that is saved is one of them even if the caller does not get it: the second derivative
        # depends on it as a function of x, bias and residual.
        several = constants.return_sum or constants.cast_dtype is not None
        returned = 3 if several else 1 + outs[1]
        moments = {"layer": 2, "rms": 1, "none": 0}[constants.kind]
        shares = not dropout and dtypes[0] is dtypes[2]
        return NormSite(
            constants,
            device_index,
            cols,
            dtypes,
            dropout,
            saves,
            accumulator(z),
            outs,
            returned,
            _saved(constants, outs[1]),
            y,
            z,
            constants.cast_dtype if outs[2] else None,
            constants.dims(),
            moments,
            shares,
            # The pre-norm sum depends on none of the norm's parameters.
            sources=_SOURCES if constants.return_sum else None,
            native=_native(constants, dtypes),
        )

    def argument(self, constants: NormConstants, position: int) -> str:
        """See `Operator`."""
        name = NORM.tensors[position]
        norm_alone = constants.shape is not None
        if name == "ln_bias" and (norm_alone or constants.op == "add_layer_norm"):
            return "bias"
        return "input" if name == "x" and norm_alone else name

    def axes(self, constants: NormConstants, tensors: Any) -> Axes:
        """See `Operator`; of several normalised dimensions none is sharded."""
        dims = constants.dims()
        axes = axes_of_rows(
            tensors,
            0,
            dims=dims,
            columns=self.cols(constants, tensors),
            carriers=(0, 2),
            are_split=dims == 1,
            outputs=self.visible,
        )
        if constants.kind == "none":
            return axes
        from ..distributed.norms import norm_over_columns

        return axes._replace(over_columns=norm_over_columns)

    # --- PyTorch's operators ----------------------------------------------------------------------

    def reference(
        self, constants: NormConstants, tensors: Any, dropout: Dropout
    ) -> tuple[Tensor | None, ...]:
        """See `reference.forward`."""
        x, bias, residual, weight, ln_bias = tensors
        if x.is_nested:
            dtypes = tuple([None if t is None else t.dtype for t in tensors])
            native = _native(constants, dtypes)
            if native is not None:
                return native(constants, tensors), None, None
        dims, flat = constants.dims(), x
        if dims > 1:
            flat = x.flatten(-dims)
            weight, ln_bias = (None if t is None else t.flatten() for t in (weight, ln_bias))
        # Under transforms and in forward mode some derivatives of PyTorch's own norms are wrong.
        elementary = transforms() or in_forward_mode()
        y, z = reference.forward(
            (flat, bias, residual, weight, ln_bias),
            constants.rule(),
            dropout=dropout,
            out_dtype=constants.out_dtype,
            elementary=elementary,
        )
        # The kernels never return the caller's own tensor, so neither does this.
        if y is x:
            y = y.clone()
        if flat is not x:
            y = y.view(x.shape)
        total = None
        if constants.return_sum:
            total = z.clone() if z is x else z
        cast = None
        if constants.cast_dtype not in (None, y.dtype):
            cast = y.to(constants.cast_dtype)
        return y, total, cast

    def derivative(
        self,
        site: NormSite,
        grads: Any,
        saved: Any,
        dropout: Callable[[Tensor], Dropout],
        needs: Sequence[bool],
    ) -> Sequence[Tensor | None]:
        """The gradients, from the pre-norm sum, which is saved or computed again."""
        dy, dz, dcast = grads
        weight, ln_bias = saved[3:5]
        if dcast is not None:
            dy = dcast if dy is None else dy + dcast
        like = dz if dy is None else dy
        dropped = dropout(like)
        total = None if dz is None else dz.to(site.acc)
        dweight = dln_bias = None
        if not site.normalizes:
            total = dy.to(site.acc)
        elif dy is not None:
            norm_needs = (any(needs[:3]), needs[3], needs[4])
            normed, dweight, dln_bias = _norm_derivative(site, dy, saved, dropped, norm_needs)
            if normed is not None:
                normed = normed.view(like.shape)
                total = normed if total is None else total + normed
        if total is None:
            total = torch.zeros_like(like, dtype=site.acc)
        dx = dropped(total, site.acc)
        dbias = dx.sum(tuple(range(dx.dim() - 1))) if dx.dim() > 1 else dx
        weight_shape = None if weight is None else weight.shape
        ln_bias_shape = None if ln_bias is None else ln_bias.shape
        gradients = (dx, dbias, total, dweight, dln_bias)
        shapes = (like.shape, dbias.shape, like.shape, weight_shape, ln_bias_shape)
        results: list[Tensor | None] = []
        for grad, shape, dtype, needed in zip(gradients, shapes, site.dtypes, needs, strict=True):
            if not needed or grad is None or shape is None:
                results.append(None)
            else:
                results.append(grad.reshape(shape).to(dtype))
        return results

    # --- kernels ----------------------------------------------------------------------------------

    def allocate(self, site: NormSite, tensors: Any) -> tuple[Tensor | None, ...]:
        """``(y, z, cast, stats)``.

        The statistics are rstd and, for LayerNorm, the mean: one number per row each.
        """
        x = tensors[0]
        y = empty(x, site.y)
        if not site.moments:
            return y, None, None, None
        _, stores, casts, _ = site.outs
        z = empty(x, site.z) if stores else None
        cast = empty(x, site.cast) if casts else None
        rows = x.shape[: x.dim() - site.dims]
        return y, z, cast, x.new_empty(site.moments, *rows, dtype=site.acc)

    forward = staticmethod(launching.forward)
    backward = staticmethod(launching.backward)

    def needed(self, site: NormSite, grads: Any, needs: Any) -> tuple[bool, ...]:
        """See `Operator`.

        Without dropout x and residual of one dtype share a gradient, as in PyTorch's add. If only
        the pre-norm sum has a gradient, the norm's parameters have none.
        """
        normed = grads[0] is not None or grads[2] is not None
        if normed and not site.shares:
            return needs  # type: ignore[no-any-return]
        x, bias, residual, weight, ln_bias = needs
        shared = site.shares and x and residual
        return x and not shared, bias, residual, weight and normed, ln_bias and normed

    def allocate_gradients(
        self, site: NormSite, grads: Any, saved: Any, needed: Any
    ) -> tuple[Tensor | None, ...]:
        """``(dx, dbias, dresidual, dweight, dln_bias)``."""
        dy, dz, dcast = grads
        like = dy
        if like is None:
            like = dcast if dz is None else dz
        x, bias, residual, _, _ = site.dtypes
        return (
            empty(like, x) if needed[0] else None,
            like.new_empty(site.cols, dtype=bias) if needed[1] else None,
            empty(like, residual) if needed[2] else None,
            empty(saved[3], saved[3].dtype) if needed[3] else None,
            empty(saved[4], saved[4].dtype) if needed[4] else None,
        )

    def expose_gradients(
        self, site: NormSite, grads: Any, saved: Any, outs: Any, needs: Any
    ) -> Sequence[Tensor | None]:
        """See `Operator`; a gradient of x that was not written is the residual's: see `needed`."""
        if needs[0] and outs[0] is None:
            return outs[2], *outs[1:]
        return outs  # type: ignore[no-any-return]


def _flat(t: Tensor, dims: int) -> Tensor:
    """A tensor whose last ``dims`` dimensions are one."""
    # `flatten` has no rule for gradients that `torch.autograd.grad` maps over
    # (``is_grads_batched=True``).
    return t if dims == 1 else t.reshape(*t.shape[:-dims], math.prod(t.shape[-dims:]))


def _native(constants: NormConstants, dtypes: Dtypes) -> Callable[..., Any] | None:
    """`F.layer_norm` or `F.rms_norm`, where it computes exactly this."""
    x, bias, residual, weight, ln_bias = dtypes
    if constants.shape is None or constants.kind == "none":
        return None
    if bias is not None or residual is not None:
        return None
    if constants.rounding != "once" or constants.weight_offset != 0.0:
        return None
    if weight is None and ln_bias is not None:
        return None
    y, _ = _output_dtypes(constants, dtypes)
    if len({x, weight, ln_bias, y} - {None}) > 1:
        return None
    return _layer_norm if constants.kind == "layer" else _rms_norm


def _layer_norm(constants: NormConstants, tensors: Any) -> Tensor:
    x, _, _, weight, ln_bias = tensors
    return F.layer_norm(x, constants.shape, weight, ln_bias, constants.eps)  # type: ignore[arg-type]


def _rms_norm(constants: NormConstants, tensors: Any) -> Tensor:
    x, _, _, weight, _ = tensors
    return F.rms_norm(x, constants.shape, weight, constants.eps)  # type: ignore[arg-type]


def _output_dtypes(constants: NormConstants, dtypes: Dtypes) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of the output and of the pre-norm sum."""
    x, bias, residual, weight, _ = dtypes
    assert x is not None
    z = x
    for other in (bias, residual):
        if other is not None:
            z = torch.promote_types(z, other)
    return constants.out_dtype or constants.rule().output_dtype(z, weight), z


def _saved(constants: NormConstants, stores: bool) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that selects the tensors of `Norm.saved`.

    Its argument is a tuple with these indices:

        0 x   1 bias   2 residual   3 weight   4 ln_bias
        5 y   6 z      7 cast       8 stats    9 None
    """
    absent = 9
    if constants.kind == "none":
        return itemgetter(*[absent] * 6)
    if constants.save == "inputs":
        return itemgetter(0, 1, 2, 3, 4, 8)
    rows = 6 if stores else 0  # a sum that is not written is x
    if constants.save == "output":
        rows = 5
    return itemgetter(rows, absent, absent, 3, 4, 8)


def _norm_derivative(
    site: NormSite, dy: Tensor, saved: Any, dropped: Dropout, needs: Sequence[bool]
) -> Sequence[Tensor | None]:
    """The gradients of the pre-norm sum, weight and shift, in differentiable operators."""
    z, bias, residual, weight, ln_bias, _ = saved
    if site.constants.save == "output":
        raise RuntimeError("fusedops: save='output' has no double backward; use save='sum'")
    if site.constants.save == "inputs":
        z = reference.dropout_add(z, bias, residual, dropped).to(site.z)
    dims = site.dims
    rule = replace(site.rule, rounding="once", eps=site.rule.epsilon(site.z))

    def function(z: Tensor, weight: Tensor | None, ln_bias: Tensor | None) -> tuple[Tensor]:
        return (reference.normalize(z, weight, ln_bias, rule, elementary=True),)

    primals = (z, weight, ln_bias)
    flat = [None if t is None else _flat(t, dims).to(site.acc) for t in primals]
    return vjp(function, flat, (_flat(dy, dims).to(site.acc),), needs)


def _all_on_gpu(tensors: Sequence[Any]) -> bool:
    """Whether autocast casts all tensors: they are on a GPU, and not in fp64."""
    for t in tensors:
        if t is None:
            continue
        if not getattr(t, "is_cuda", False) or t.dtype == torch.float64:
            return False
    return True


def check_constants(
    op: str,
    kind: reference.Kind,
    eps: Any,
    weight_offset: Any = 0.0,
    rounding: Any = "once",
    save: Any = "sum",
) -> None:
    """Checks the constants of a norm but p; an RMSNorm's eps may be None."""
    if eps is not None or kind == "layer":
        checks.check_eps(op, eps)
    checks.check_number(op, "weight_offset", weight_offset)
    checks.check_choice(op, "rounding", rounding, _ROUNDINGS)
    checks.check_choice(op, "save", save, _SAVES)


NORM = Norm()
define(NORM)
