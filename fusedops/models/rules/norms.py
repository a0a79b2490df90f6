"""Norms: LayerNorm and RMSNorm of torch.nn, and all that compute the same, which differ in where they round.

Each gets a forward, and two methods that fused blocks call: ``_fusedops_norm``, the norm with an output in a given dtype,
and ``_fusedops_add_norm``, the norm of a branch added to the residual stream, with an output in that dtype instead of or
beside the norm's own.
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
    """The output's dtype where all that takes it would cast it to ``low``; None for the operator's own choice.

    From another half dtype, which may be what the norm gives, it would be rounded twice.
    """
    if low is None:
        return None
    return low if functools.reduce(torch.promote_types, dtypes) in (torch.float32, low) else None


def _methods(norm: Method, add_norm: Method, argument: str) -> dict[str, Method]:
    """The methods of a norm: its forward, whose argument has that name, and what a fused block calls."""

    def forward(self: Any, input: Tensor) -> Tensor:
        return norm(self, input, None)  # type: ignore[no-any-return]

    forward.__code__ = forward.__code__.replace(co_varnames=("self", argument))
    return {"forward": forward, "_fusedops_norm": norm, "_fusedops_add_norm": add_norm}


def _layer_norm(self: Any, x: Tensor, low: torch.dtype | None) -> Tensor:
    return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps, out_dtype=_narrowed(low, x.dtype))


def _rms_norm(self: Any, x: Tensor, low: torch.dtype | None) -> Tensor:
    return rms_norm(x, self.normalized_shape, self.weight, self.eps, out_dtype=_narrowed(low, x.dtype))


def _of_one_dimension(call: Method) -> Method:
    """The method that adds and normalises; over several dimensions, which the operators do not take, in two steps."""

    def add_norm(self: Any, end: Branch, residual: Tensor, return_sum: bool, low: torch.dtype | None,
                 with_cast: bool = False) -> Any:  # fmt: skip
        if len(self.normalized_shape) != 1:
            z = add(end, residual)
            return (self(z), z) if return_sum else self(z)
        low = _narrowed(low, end.product.dtype, residual.dtype)
        return call(self, end.product, folded(end, residual), residual, p=end.p, training=end.training, eps=self.eps,
                    return_sum=return_sum, **{"cast_dtype" if with_cast else "out_dtype": low})  # fmt: skip

    return add_norm


def _add_layer_norm(self: Any, x: Tensor, bias: Tensor | None, residual: Tensor, **options: Any) -> Any:
    return bias_dropout_add_ln(x, bias, residual, self.weight, self.bias, **options)


def _add_rms_norm(self: Any, x: Tensor, bias: Tensor | None, residual: Tensor, **options: Any) -> Any:
    return bias_dropout_add_rms_norm(x, bias, residual, self.weight, **options)


def _output_dtype(x: torch.dtype, weight: torch.dtype, rounding: Rounding, low: torch.dtype | None) -> torch.dtype:
    """The dtype that a norm gives which computes out of autocast's sight.

    Or ``low``, to which it would be cast; through another half dtype on the way it would round twice.
    """
    if rounding == "llama":
        x = torch.promote_types(x, weight)
    elif rounding == "t5":
        x = (
            weight
            if weight in (torch.float16, torch.bfloat16)
            else torch.promote_types(torch.promote_types(x, weight), torch.float32)
        )
    return x if low is None or x != torch.float32 else low


def _of(form: Form) -> dict[str, Method]:
    """The methods of a norm of this form."""
    layer, rounding, offset, eps = form.kind == "layer", form.rounding, form.offset, form.eps
    weight_name, bias_name, widened = form.weight, form.bias, form.widened

    def constants(self: Any) -> tuple[Tensor | None, Any]:
        weight = None if weight_name is None else getattr(self, weight_name)
        if layer and offset and weight is not None:
            weight = weight + offset
        return weight, getattr(self, eps) if isinstance(eps, str) else eps

    def dtype_of(x: torch.dtype, weight: Tensor | None, low: torch.dtype | None) -> torch.dtype | None:
        if widened:
            return _narrowed(low, x)
        return _output_dtype(x, x if weight is None else weight.dtype, rounding, low)

    def norm(self: Any, x: Tensor, low: torch.dtype | None) -> Tensor:
        weight, epsilon = constants(self)
        size, dtype = x.shape[-1] if weight is None else weight.shape[0], dtype_of(x.dtype, weight, low)
        if layer:
            return layer_norm(x, size, weight, None if bias_name is None else getattr(self, bias_name), epsilon,
                              out_dtype=dtype)  # fmt: skip
        return rms_norm(x, size, weight, epsilon, weight_offset=offset, rounding=rounding, out_dtype=dtype)

    def add_norm(self: Any, end: Branch, residual: Tensor, return_sum: bool, low: torch.dtype | None,
                 with_cast: bool = False) -> Any:  # fmt: skip
        weight, epsilon = constants(self)
        z = torch.promote_types(end.product.dtype, residual.dtype)
        low = dtype_of(z, weight, low)
        options = {"p": end.p, "training": end.training, "eps": epsilon, "return_sum": return_sum,
                   "out_dtype": dtype_of(z, weight, None) if with_cast else low,
                   "cast_dtype": low if with_cast else None}  # fmt: skip
        x, bias = end.product, folded(end, residual)
        if layer:
            ln_bias = None if bias_name is None else getattr(self, bias_name)
            return bias_dropout_add_ln(x, bias, residual, weight, ln_bias, **options)
        return bias_dropout_add_rms_norm(x, bias, residual, weight, weight_offset=offset, rounding=rounding, **options)

    return _methods(norm, add_norm, form.argument)


def _computed(form: Form, module: nn.Module, x: Tensor) -> Tensor:
    """What a module fused as this form gives; for the probe."""
    y: Tensor = _rule(form).methods["_fusedops_norm"](module, x, None)
    return y


@functools.cache
def _rule(form: Form) -> Rule:
    calls = [f"{form.kind}_norm"]
    if form.kind == "rms" and form.rounding in ("llama", "t5"):
        calls.append(f"rounding as {form.rounding.capitalize()}'s")
    if form.offset:
        calls.append("weight + 1")
    return Rule(name="norm", calls=", ".join(calls), methods=_of(form), known=form.methods, made=("norm", form))


def _key(module: nn.Module) -> Form | None:
    return probe.form(module, _computed)


def _made(cls: type[nn.Module], form: Form) -> Rule | None:
    return _rule(form) if probe.same_code(cls, form) else None


def _why(module: nn.Module) -> str:
    return probe.other_rounding(module, _computed)


def _why_of_name(module: nn.Module) -> str:
    return probe.other_norm(module, _computed)


RULES = (
    Rule(
        name="layer_norm",
        calls="layer_norm",
        methods=_methods(_layer_norm, _of_one_dimension(_add_layer_norm), "input"),
        base=nn.LayerNorm,
        names=("LayerNorm",),
    ),
    Rule(
        name="rms_norm",
        calls="rms_norm",
        methods=_methods(_rms_norm, _of_one_dimension(_add_rms_norm), "x"),
        base=nn.RMSNorm,
        names=("RMSNorm",),
    ),
    Family(name="norm", key=_key, rule=_made, names=("norm",), why=_why, why_of_name=_why_of_name),
)
