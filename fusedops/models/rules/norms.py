"""Norms: LayerNorm and RMSNorm of torch.nn, and all norms of the same formulas.

Norms of other classes may round elsewhere. Each norm gets a forward, and two methods that fused
blocks call:

- ``_fusedops_norm``: the norm, with an output in a chosen dtype,
- ``_fusedops_add_norm``: the norm of the sum of a branch and the residual stream. It returns the
  output in a chosen dtype, or the norm's own output and a copy in that dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...norms.ops import bias_dropout_add_ln, bias_dropout_add_rms_norm, layer_norm, rms_norm
from ...norms.reference import Rounding
from .. import probe
from ..parts import Branch, add, folded
from ..probe import Form
from ..rule import Family, Rule

__all__ = ["RULES"]

Method = Callable[..., Any]


def _narrowed(low: torch.dtype | None, *dtypes: torch.dtype) -> torch.dtype | None:
    """The output's dtype where all consumers would cast it to ``low``; None for the default.

    If the norm's own output is in another half dtype, the cast rounds it a second time, and a
    single rounding to ``low`` would give other numbers.
    """
    if low is None:
        return None
    # The dtype that the operators give the sum, and so the norm.
    norm_dtype = functools.reduce(torch.promote_types, dtypes)
    if norm_dtype in (torch.float32, low):
        return low
    return None


def _methods(norm: Method, add_norm: Method, argument: str) -> dict[str, Method]:
    """The methods of a norm: its forward, and those that a fused block calls."""

    def forward(self: Any, input: Tensor) -> Tensor:
        return norm(self, input, None)  # type: ignore[no-any-return]

    # Callers may pass the argument by the name that it has in the original forward.
    forward.__code__ = forward.__code__.replace(co_varnames=("self", argument))
    return {"forward": forward, "_fusedops_norm": norm, "_fusedops_add_norm": add_norm}


def _layer_norm(self: Any, x: Tensor, low: torch.dtype | None) -> Tensor:
    return layer_norm(
        x,
        self.normalized_shape,
        self.weight,
        self.bias,
        self.eps,
        out_dtype=_narrowed(low, x.dtype),
    )


def _rms_norm(self: Any, x: Tensor, low: torch.dtype | None) -> Tensor:
    return rms_norm(
        x, self.normalized_shape, self.weight, self.eps, out_dtype=_narrowed(low, x.dtype)
    )


def _adding(call: Method) -> Method:
    """Build ``_fusedops_add_norm`` from the operator that adds and normalises.

    A norm over several dimensions, which that operator does not support, takes two steps.
    """

    def add_norm(
        self: Any,
        end: Branch,
        residual: Tensor,
        return_sum: bool,
        low: torch.dtype | None,
        with_cast: bool = False,
    ) -> Any:
        if len(self.normalized_shape) != 1:
            z = add(end, residual)
            return (self(z), z) if return_sum else self(z)
        low = _narrowed(low, end.product.dtype, residual.dtype)
        return call(
            self,
            end.product,
            folded(end, residual),
            residual,
            p=end.p,
            training=end.training,
            eps=self.eps,
            return_sum=return_sum,
            **{"cast_dtype" if with_cast else "out_dtype": low},
        )

    return add_norm


def _add_layer_norm(
    self: Any, x: Tensor, bias: Tensor | None, residual: Tensor, **options: Any
) -> Any:
    return bias_dropout_add_ln(x, bias, residual, self.weight, self.bias, **options)


def _add_rms_norm(
    self: Any, x: Tensor, bias: Tensor | None, residual: Tensor, **options: Any
) -> Any:
    return bias_dropout_add_rms_norm(x, bias, residual, self.weight, **options)


def _output_dtype(
    x: torch.dtype, weight: torch.dtype, rounding: Rounding, low: torch.dtype | None
) -> torch.dtype:
    """The output's dtype of a norm that calls elementwise operators, as Transformers' RMSNorms do.

    Autocast changes none of these operators, so the dtype is the same with and without it. If
    ``low`` is not None, it replaces fp32 (see `_narrowed`).
    """
    dtype = x
    if rounding == "llama":
        dtype = torch.promote_types(x, weight)
    elif rounding == "t5" and weight in (torch.float16, torch.bfloat16):
        dtype = weight
    elif rounding == "t5":
        dtype = torch.promote_types(torch.promote_types(x, weight), torch.float32)
    if low is not None and dtype == torch.float32:
        return low
    return dtype


def _methods_of(form: Form) -> dict[str, Method]:
    """The methods of a norm of this form."""
    is_layer_norm = form.kind == "layer"
    rounding, offset, eps = form.rounding, form.offset, form.eps
    weight_name, bias_name, widened = form.weight, form.bias, form.widened

    # Read at each call, since a user may assign another weight or eps.
    def constants(self: Any) -> tuple[Tensor | None, Any]:
        weight = None if weight_name is None else getattr(self, weight_name)
        # The LayerNorm operators have no offset.
        if is_layer_norm and offset and weight is not None:
            weight = weight + offset
        return weight, getattr(self, eps) if isinstance(eps, str) else eps

    def bias_of(self: Any) -> Tensor | None:
        return None if bias_name is None else getattr(self, bias_name)

    def dtype_of(
        x: torch.dtype, weight: Tensor | None, low: torch.dtype | None
    ) -> torch.dtype | None:
        # None leaves the dtype to the operators, which return fp32 under autocast too.
        if widened:
            return _narrowed(low, x)
        return _output_dtype(x, x if weight is None else weight.dtype, rounding, low)

    def norm(self: Any, x: Tensor, low: torch.dtype | None) -> Tensor:
        weight, epsilon = constants(self)
        size = x.shape[-1] if weight is None else weight.shape[0]
        dtype = dtype_of(x.dtype, weight, low)
        if is_layer_norm:
            return layer_norm(x, size, weight, bias_of(self), epsilon, out_dtype=dtype)
        return rms_norm(
            x, size, weight, epsilon, weight_offset=offset, rounding=rounding, out_dtype=dtype
        )

    def add_norm(
        self: Any,
        end: Branch,
        residual: Tensor,
        return_sum: bool,
        low: torch.dtype | None,
        with_cast: bool = False,
    ) -> Any:
        weight, epsilon = constants(self)
        sum_dtype = torch.promote_types(end.product.dtype, residual.dtype)
        low = dtype_of(sum_dtype, weight, low)
        options = {
            "p": end.p,
            "training": end.training,
            "eps": epsilon,
            "return_sum": return_sum,
            # With a cast copy, the output itself is the residual stream, in the norm's own dtype.
            "out_dtype": dtype_of(sum_dtype, weight, None) if with_cast else low,
            "cast_dtype": low if with_cast else None,
        }
        x, bias = end.product, folded(end, residual)
        if is_layer_norm:
            return bias_dropout_add_ln(x, bias, residual, weight, bias_of(self), **options)
        return bias_dropout_add_rms_norm(
            x, bias, residual, weight, weight_offset=offset, rounding=rounding, **options
        )

    return _methods(norm, add_norm, form.argument)


def _computed(form: Form, module: nn.Module, x: Tensor) -> Tensor:
    """The output of a module fused as this form, for the probe to compare with the original's."""
    y: Tensor = _rule(form).methods["_fusedops_norm"](module, x, None)
    return y


@functools.cache
def _rule(form: Form) -> Rule:
    calls = [f"{form.kind}_norm"]
    if form.kind == "rms" and form.rounding in ("llama", "t5"):
        calls.append(f"rounding as {form.rounding.capitalize()}'s")
    if form.offset:
        calls.append("weight + 1")
    return Rule(
        name="norm",
        calls=", ".join(calls),
        methods=_methods_of(form),
        known=form.methods,
        origin=("norm", form),
    )


def _key(module: nn.Module) -> Form | None:
    return probe.form(module, _computed)


def _rule_for(cls: type[nn.Module], form: Form) -> Rule | None:
    """The rule for a class, if it has the code of the form."""
    if not probe.same_code(cls, form):
        return None
    return _rule(form)


def _why(module: nn.Module) -> str:
    """The reason why a module that computes a norm in fp32 has no rule; "" for others."""
    return probe.other_rounding(module, _computed)


def _why_of_name(module: nn.Module) -> str:
    """The reason why a module of a class named like a norm has no rule; "" for others."""
    return probe.other_norm(module, _computed)


RULES = (
    Rule(
        name="layer_norm",
        calls="layer_norm",
        methods=_methods(_layer_norm, _adding(_add_layer_norm), "input"),
        base=nn.LayerNorm,
        names=("LayerNorm",),
    ),
    Rule(
        name="rms_norm",
        calls="rms_norm",
        methods=_methods(_rms_norm, _adding(_add_rms_norm), "x"),
        base=nn.RMSNorm,
        names=("RMSNorm",),
    ),
    Family(
        name="norm", key=_key, rule=_rule_for, names=("norm",), why=_why, why_of_name=_why_of_name
    ),
)
