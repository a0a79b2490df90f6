"""Heads with an adapter of PEFT: the low-rank product that is added to logits.

PEFT's LoRA replaces a linear layer by one that computes::

    base_layer(x) + lora_B(lora_A(dropout(x))) * scaling

Adapters can be disabled, merged and exchanged at any time, so that each call checks their state.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...core.compat.dynamo import constant_when_traced
from ...losses.adapters import dtypes_beside
from ..hooks import has_hooks, is_named, is_plain

__all__ = ["added_by", "is_adapted", "why_not_adapted"]


@constant_when_traced
def is_adapted(cls: type) -> bool:
    """Whether this is PEFT's class of linear layers with LoRA."""
    return is_named(cls, "peft.tuners.lora.layer", "Linear")


def _active(head: Any) -> list[str]:
    """The names of the adapters that a layer adds."""
    return [name for name in head.active_adapters if name in head.lora_A]


def why_not_adapted(head: Any) -> str:
    """The reason why the logits of a head with LoRA have to be whole; "" if there is none."""
    if has_hooks(head):
        return "its head has hooks"
    if head.disable_adapters or head.merged:
        return "the adapter of its head is disabled or merged"
    names = _active(head)
    if len(names) != 1:
        return f"its head has {len(names)} active adapters, expected one"
    (name,) = names
    # PEFT before 0.16 has no table of variants.
    if name in getattr(head, "lora_variant", names):
        return "the adapter of its head is a variant of LoRA, such as DoRA"
    return _why_not_last(head.lora_B[name], head.base_layer)


def _why_not_last(lora_B: Any, base_layer: Any) -> str:
    """The reason why a layer ``lora_B`` has to be called; "" if its weight is enough."""
    if type(lora_B) is not nn.Linear or has_hooks(lora_B) or not is_plain(lora_B.weight):
        return "lora_B of its head is no plain linear layer"
    dtypes = lora_B.weight.dtype, base_layer.weight.dtype
    if dtypes[0] not in dtypes_beside(dtypes[1]):
        return f"the adapter of its head has {dtypes[0]}, and its weight {dtypes[1]}"
    return "" if lora_B.bias is None else "the adapter of its head has a bias"


def added_by(head: Any, rows: Tensor) -> tuple[Tensor, Tensor] | None:
    """The rows (M, R) and the weight (V, R) of a head's LoRA; None for a head without one."""
    if not is_adapted(type(head)):
        return None
    (name,) = _active(head)
    lora_A, lora_B = head.lora_A[name], head.lora_B[name]
    rows = head.lora_dropout[name](rows.to(lora_A.weight.dtype))
    return lora_A(rows) * head.scaling[name], lora_B.weight
