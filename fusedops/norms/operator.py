"""The norm family's operator: cache keys, checks, outputs, reference implementation, gradients."""

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

# For each of output, pre-norm sum and low-precision copy, the indices in `TENSORS` of the tensors
# that it depends on. The sum depends on x, bias and residual only.
_SOURCES = (frozenset(range(5)), frozenset(range(3)), frozenset(range(5)))

# By kind: does GPU autocast run PyTorch's norm in fp32? For rms_norm it does from PyTorch 2.12 on.
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
        """Returns all that `check` reads: types, dtypes, devices, and the sizes of last dimensions.

        The number of rows is not in the key: it is not checked, and differs from batch to batch.
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
        """Checks everything but p; see `Operator`.

        Under autocast PyTorch's norm may return fp32. Then the returned constants have that dtype.
        """
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
        if is_widened and _all_on_gpu(tensors[:3]):
            return constants._replace(out_dtype=torch.float32)
        return constants

    def _check_tensors(self, constants: NormConstants, tensors: Any) -> None:
        op, shape = constants.op, constants.shape
        x, bias, residual, weight, ln_bias = tensors
        # The caller's names of x and ln_bias: see `argument`.
        x_name, ln_bias_name = self.argument(constants, 0), self.argument(constants, 4)
        checks.check_tensor(op, x_name, x)
        if shape is None:
            if x.dim() == 0:
                raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
            tail: tuple[int, ...] = tuple(x.shape[-1:])
        else:
            tail = shape
            if tuple(x.shape[-len(tail) :]) != tail:
                expected = ", ".join(map(str, tail))
                raise ValueError(
                    f"{op}: input has shape {tuple(x.shape)}, expected (*, {expected})"
                )
        if residual is not None:
            checks.check_tensor(op, "residual", residual, x)
            checks.check_shape(op, "residual", residual, tuple(x.shape))
        for name, value in (("bias", bias), ("weight", weight), (ln_bias_name, ln_bias)):
            if value is not None:
                checks.check_tensor(op, name, value, x)
                checks.check_shape(op, name, value, tail)

    def cols(self, constants: NormConstants, tensors: Any) -> int:
        """Returns the hidden size, -1 if the kernels do not support it."""
        x = tensors[0]
        cols = x.shape[-1] if constants.shape is None else math.prod(constants.shape)
        return cols if 0 < cols <= launch.LONGEST_ROW else -1

    def writes(
        self, constants: NormConstants, dtypes: Dtypes, *, dropout: bool, saves: bool
    ) -> tuple[bool, ...]:
        """Returns whether each output is written: y, z, the low-precision copy and the statistics.

        The pre-norm sum z is written if it is returned, or if it is saved and differs from x.
        """
        if constants.kind == "none":
            return True, False, False, False
        _, bias, residual, _, _ = dtypes
        sum_is_x = bias is None and residual is None and not dropout
        saves_sum = saves and constants.save == "sum" and not sum_is_x
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
        _, stores_sum, casts, _ = outs
        # The autograd Function returns the first ``returned`` of y, z and the copy. It returns a
        # saved sum even if the caller does not get it: for the second derivative, autograd must
        # differentiate the sum with respect to x, bias and residual.
        returned = 1
        if stores_sum:
            returned = 2
        if constants.return_sum or constants.cast_dtype is not None:
            returned = 3
        moments = {"layer": 2, "rms": 1, "none": 0}[constants.kind]
        shares = not dropout and dtypes[0] is dtypes[2]
        return NormSite(
            constants,
            device_index,
            cols,
            dtypes,
            dropout,
            saves,
            acc=accumulator(z),
            outs=outs,
            returned=returned,
            saved=_saved(constants, stores_sum=stores_sum),
            y=y,
            z=z,
            cast=constants.cast_dtype if casts else None,
            dims=constants.dims(),
            moments=moments,
            shares=shares,
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
        """See `Operator`. If a row has several dimensions, none of them is sharded."""
        dims = constants.dims()
        axes = axes_of_rows(
            tensors,
            first=0,
            dims=dims,
            columns=self.cols(constants, tensors),
            carriers=(0, 2),  # x and the residual
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
        """Returns the output, the pre-norm sum and the copy: see `Operator` and `reference`."""
        x, bias, residual, weight, ln_bias = tensors
        if x.is_nested:
            # A nested tensor is left to PyTorch's norm, if that computes the same.
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
        # Like the kernels, this never returns the caller's own tensor.
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
        """Returns the gradients, from the pre-norm sum, which is saved or computed again."""
        dy, dz, dcast = grads
        weight, ln_bias = saved[3:5]
        if dcast is not None:
            dy = dcast if dy is None else dy + dcast
        like = dz if dy is None else dy
        dropped = dropout(like)
        # The whole gradient of the pre-norm sum: dz, plus dy propagated back through the norm.
        total = None if dz is None else dz.to(site.acc)
        dweight = dln_bias = None
        if not site.normalizes:
            total = dy.to(site.acc)
        elif dy is not None:
            norm_needs = (any(needs[:3]), needs[3], needs[4])
            from_dy, dweight, dln_bias = _norm_derivative(site, dy, saved, dropped, norm_needs)
            if from_dy is not None:
                from_dy = from_dy.view(like.shape)
                total = from_dy if total is None else total + from_dy
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
        """Returns uninitialised ``(y, z, cast, stats)``, None where not written.

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
        """Returns which gradients the backward writes: see `Operator`.

        If x and residual share a gradient (``site.shares``), only the residual's is written. If
        only the pre-norm sum has a gradient, the norm's parameters have none.
        """
        dy, _, dcast = grads
        has_dy = dy is not None or dcast is not None
        if has_dy and not site.shares:
            return needs  # type: ignore[no-any-return]
        x, bias, residual, weight, ln_bias = needs
        if site.shares and residual:
            x = False
        return x, bias, residual, weight and has_dy, ln_bias and has_dy

    def allocate_gradients(
        self, site: NormSite, grads: Any, saved: Any, needed: Any
    ) -> tuple[Tensor | None, ...]:
        """Returns uninitialised ``(dx, dbias, dresidual, dweight, dln_bias)``."""
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
        """Returns the gradients, with the residual's for x too if they share it: see `needed`."""
        if needs[0] and outs[0] is None:
            return outs[2], *outs[1:]
        return outs  # type: ignore[no-any-return]


def _flat(t: Tensor, dims: int) -> Tensor:
    """Returns the tensor with its last ``dims`` dimensions flattened into one."""
    # Not `flatten`: it has no batching rule for the gradients of `torch.autograd.grad` with
    # ``is_grads_batched=True``.
    return t if dims == 1 else t.reshape(*t.shape[:-dims], math.prod(t.shape[-dims:]))


def _native(constants: NormConstants, dtypes: Dtypes) -> Callable[..., Any] | None:
    """Returns `F.layer_norm` or `F.rms_norm` if it computes the same call, and else None."""
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
    """Returns the dtypes of the output and of the pre-norm sum."""
    x, bias, residual, weight, _ = dtypes
    assert x is not None
    z = x
    for dtype in (bias, residual):
        if dtype is not None:
            z = torch.promote_types(z, dtype)
    return constants.out_dtype or constants.rule().output_dtype(z, weight), z


def _saved(
    constants: NormConstants, *, stores_sum: bool
) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Returns a function that selects the tensors of `Norm.saved`.

    Its argument is ``(*tensors, *outputs, None)``, with these indices:

        0 x   1 bias   2 residual   3 weight   4 ln_bias
        5 y   6 z      7 cast       8 stats    9 None
    """
    absent = 9
    if constants.kind == "none":
        return itemgetter(*[absent] * 6)
    if constants.save == "inputs":
        return itemgetter(0, 1, 2, 3, 4, 8)
    source = 6 if stores_sum else 0  # a sum that is not written is x
    if constants.save == "output":
        source = 5
    return itemgetter(source, absent, absent, 3, 4, 8)


def _norm_derivative(
    site: NormSite, dy: Tensor, saved: Any, dropped: Dropout, needs: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Returns the gradients of the pre-norm sum, weight and ln_bias, differentiably."""
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
    """Returns whether GPU autocast casts all tensors: they are on a GPU and not in fp64."""
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
    """Checks all constants of a norm but p; an RMSNorm's eps may be None."""
    if eps is not None or kind == "layer":
        checks.check_eps(op, eps)
    checks.check_number(op, "weight_offset", weight_offset)
    checks.check_choice(op, "rounding", rounding, _ROUNDINGS)
    checks.check_choice(op, "save", save, _SAVES)


NORM = Norm()
define(NORM)
