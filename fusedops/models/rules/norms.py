"""Norms: LayerNorm and RMSNorm of torch.nn, and all norms of the same formulas.

Norms of other classes may round elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...norms.ops import layer_norm, rms_norm
from ...norms.reference import Rounding
from .. import probe
from ..probe import Form
from ..rule import Family, Rule

__all__ = ["RULES"]

Method = Callable[..., Any]


def _method(norm: Method, argument: str) -> dict[str, Method]:
    """The forward of a norm."""

    def forward(self: Any, input: Tensor) -> Tensor:
        return norm(self, input)  # type: ignore[no-any-return]

    # Callers may pass the argument by the name that it has in the original forward.
    forward.__code__ = forward.__code__.replace(co_varnames=("self", argument))
    return {"forward": forward}


def _layer_norm(self: Any, x: Tensor) -> Tensor:
    return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


def _rms_norm(self: Any, x: Tensor) -> Tensor:
    return rms_norm(x, self.normalized_shape, self.weight, self.eps)


def _output_dtype(x: torch.dtype, weight: torch.dtype, rounding: Rounding) -> torch.dtype:
    """The output's dtype of a norm that calls elementwise operators, as Transformers' RMSNorms do.

    Autocast changes none of these operators, so the dtype is the same with and without it.
    """
    if rounding == "llama":
        return torch.promote_types(x, weight)
    if rounding != "t5":
        return x
    if weight in (torch.float16, torch.bfloat16):
        return weight
    return torch.promote_types(torch.promote_types(x, weight), torch.float32)


def _norm_of(form: Form) -> Method:
    """The function of a norm of this form and its rows."""
    is_layer_norm = form.kind == "layer"
    rounding, offset, eps = form.rounding, form.offset, form.eps
    weight_name, bias_name, widened = form.weight, form.bias, form.widened

    # Read at each call, since a user may assign another weight or eps.
    def norm(self: Any, x: Tensor) -> Tensor:
        weight = None if weight_name is None else getattr(self, weight_name)
        epsilon: Any = getattr(self, eps) if isinstance(eps, str) else eps
        size = x.shape[-1] if weight is None else weight.shape[0]
        # None leaves the dtype to the operators, which return fp32 under autocast too.
        dtype = None
        if not widened:
            dtype = _output_dtype(x.dtype, x.dtype if weight is None else weight.dtype, rounding)
        if not is_layer_norm:
            return rms_norm(
                x, size, weight, epsilon, weight_offset=offset, rounding=rounding, out_dtype=dtype
            )
        # The LayerNorm operators have no offset.
        if offset and weight is not None:
            weight = weight + offset
        bias = None if bias_name is None else getattr(self, bias_name)
        return layer_norm(x, size, weight, bias, epsilon, out_dtype=dtype)

    return norm


def _computed(form: Form, module: nn.Module, x: Tensor) -> Tensor:
    """The output of a module fused as this form, for the probe to compare with the original's."""
    y: Tensor = _norm_of(form)(module, x)
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
        methods=_method(_norm_of(form), form.argument),
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
        methods=_method(_layer_norm, "input"),
        base=nn.LayerNorm,
        names=("LayerNorm",),
    ),
    Rule(
        name="rms_norm",
        calls="rms_norm",
        methods=_method(_rms_norm, "x"),
        base=nn.RMSNorm,
        names=("RMSNorm",),
    ),
    Family(
        name="norm", key=_key, rule=_rule_for, names=("norm",), why=_why, why_of_name=_why_of_name
    ),
)
