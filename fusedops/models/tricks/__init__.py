"""Optimizations besides fused operators: ways around slow paths of PyTorch, Inductor and cuDNN.

Each is correct wherever it applies, is in one file, and can be turned off by its name in
``exclude``.
"""

from __future__ import annotations

from typing import Any

from ...core.compat.dynamo import constant_when_traced

__all__ = ["TRICKS", "allowed"]

# Masks laid out for PyTorch's fused attention; query, key and value as one product; weights cast in
# one pass; T5's next token by fewer calls. Padded vocabularies are a rule of their own (`padding`).
TRICKS = frozenset({"masks", "packing", "casts", "one_token"})


@constant_when_traced
def _is_off(cls: Any, trick: str) -> bool:
    return trick in getattr(cls, "_fusedops_off", ())


def allowed(module: Any, trick: str) -> bool:
    """Whether a module may use the trick: False only for fused modules that have it disabled."""
    return not _is_off(type(module), trick)
