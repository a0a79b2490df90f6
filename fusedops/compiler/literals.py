"""Numbers in generated code, with the value and the dtype that PyTorch gives them."""

from __future__ import annotations

import math
import re

import torch

from .ir import Node, value_of

__all__ = ["KINDS", "as_tensor", "filled", "in_fp32", "literal", "neutral"]

# Triton's dtype of each kind of values.
KINDS = {"float": "ACC", "int": "tl.int64", "bool": "tl.int1"}
# The largest element of an empty row.
_LEAST = {"float": 'float("-inf")', "int": str(-(2**63)), "narrow": str(-(2**31))}
_NAME = re.compile(r"[^\W\d]\w*")


def neutral(op: str, kind: str) -> str:
    """Return the number that changes no result of a reduction: its start, and the padding.

    The kind "narrow" is that of integers of 32 bits.
    """
    return _LEAST[kind] if op == "amax" else "0"


def filled(literal: str, kind: str) -> str:
    """Return a number as a tensor of one element.

    Numbers in parentheses are sums of such tensors already: see `_exact_fp64`.
    """
    is_tensor = literal.startswith(("(", "negative_zero"))
    if is_tensor:
        return literal
    return f"tl.full((1, 1), {literal}, {KINDS[kind]})"


def literal(node: Node, acc: torch.dtype) -> str:
    """Return a number as Triton code that keeps its value in ``acc``."""
    value = value_of(node)
    if not isinstance(value, float):
        return repr(value)
    if not math.isfinite(value):
        return f'float("{value}")'
    if repr(value) == "-0.0":
        return "negative_zero(ACC)"
    if acc == torch.float64 and in_fp32(value) != value:
        return _exact_fp64(value)
    return repr(value)


def _exact_fp64(value: float) -> str:
    """Return a number that fp32 cannot represent, as a sum of fp32 numbers.

    Triton reads a literal as fp32. The sum is computed in fp64, where it is exact; so is a product
    with powers of two.
    """
    # A number beyond fp32's range is its mantissa, times powers of two.
    mantissa, exponent = math.frexp(value)
    if -100 <= exponent <= 127:
        mantissa = value
        exponent = 0
    total = f"({' + '.join(map(_fp64_block, _terms_in_fp32(mantissa)))})"
    factors = list(map(_fp64_block, _powers_of_two(exponent)))
    if factors:
        return f"({' * '.join([total, *factors])})"
    return total


def _terms_in_fp32(value: float) -> list[float]:
    """Return up to three numbers of fp32, of 24 bits each, whose sum is a number of 53 bits."""
    terms: list[float] = []
    while value and len(terms) < 3:
        terms.append(in_fp32(value))
        value -= terms[-1]
    return terms


def _powers_of_two(exponent: int) -> list[float]:
    """Return factors of ``2 ** exponent``, each in fp32's range."""
    sign = 1 if exponent > 0 else -1
    count, remainder = divmod(abs(exponent), 100)
    powers = [100] * count
    if remainder:
        powers.append(remainder)
    return [math.ldexp(1.0, sign * power) for power in powers]


def in_fp32(value: float) -> float:
    """Return the nearest fp32 number."""
    return float(torch.tensor(value, dtype=torch.float32, device="cpu"))


def as_tensor(value: str) -> str:
    """Return a value, which may be a number, as a tensor: device functions read its dtype."""
    if _NAME.fullmatch(value):
        return value
    return f"tl.zeros((1, 1), ACC) + {value}"


def _fp64_block(value: float) -> str:
    return f"tl.full((1, 1), {value!r}, ACC)"
