"""Pads linear layers whose many outputs are no multiple of eight: a vocabulary of 50257 words, say.

In half precision, matrix products on tensor cores load 16 bytes at once. That needs rows whose
length is a multiple of eight; for others cuBLAS falls back to kernels that take several times as
long. Here the weight is padded with rows of zeros to the next multiple of 64, and their columns of
the output are cut off again. The product is the same; the cost is a copy of the weight, and one of
the gradient in backward. torch.compile pads by itself, and `fusedops.backend` pads as this does::

    (rows, K) x (K, 50257 + 47 zeros) -> (rows, 50304), of which the view [:, :50257] is returned
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.alignment import ALIGNED, HALF, LEAST_OUTPUTS, LEAST_ROWS, MULTIPLE
from ..hooks import is_plain
from ..rule import Rule

__all__ = ["RULES", "padded_linear"]


def padded_linear(input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``F.linear`` in ``dtype`` with aligned rows: the first columns of a wider output.

    Args:
        input: of shape (..., K).
        weight: of shape (N, K).
        bias: of shape (N,), or None.
        dtype: the dtype of the product.
    """
    columns = weight.shape[0]
    padding = -columns % MULTIPLE
    weight = F.pad(weight.to(dtype), (0, 0, 0, padding))
    bias = None if bias is None else F.pad(bias.to(dtype), (0, padding))
    return F.linear(input.to(dtype), weight, bias)[..., :columns]


def _product_dtype(input: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The half precision of a product that gains by padding; None for other products."""
    # torch.compile pads by itself.
    if not input.is_cuda or torch.compiler.is_compiling():
        return None
    if not _gains(input):
        return None
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if not all(map(is_plain, tensors)):
        return None
    dtype = _common_dtype({t.dtype for t in tensors})
    return dtype if dtype in HALF else None


def _gains(input: Tensor) -> bool:
    """Whether there are enough rows, and their length is aligned."""
    # The weight's rows have the same length. Padding aligns the rows of the output alone.
    K = input.shape[-1]
    if K % ALIGNED != 0:
        return False
    return input.numel() >= LEAST_ROWS * K


def _common_dtype(dtypes: set[torch.dtype]) -> torch.dtype | None:
    """Return the dtype in which PyTorch multiplies tensors of these dtypes; None if it raises."""
    if torch.is_autocast_enabled("cuda"):
        # Autocast does not cast other dtypes, fp64 for one.
        is_cast = dtypes <= {*HALF, torch.float32}
        if not is_cast:
            return None
        return torch.get_autocast_dtype("cuda")
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return None


def _linear(self: Any, input: Tensor) -> Tensor:
    dtype = _product_dtype(input, self.weight, self.bias)
    if dtype is None:
        return F.linear(input, self.weight, self.bias)
    return padded_linear(input, self.weight, self.bias, dtype)


def _fits(module: nn.Module) -> str:
    outputs = int(module.out_features)  # type: ignore[arg-type]
    if outputs >= LEAST_OUTPUTS and outputs % ALIGNED:
        return ""
    return "no rule"


RULES = (
    Rule(
        name="padded_linear",
        calls="a product with padded rows",
        # It is a plain linear layer to the rule of a loss.
        methods={"forward": _linear, "_fusedops_multiplies": lambda self: True},
        base=nn.Linear,
        fits=_fits,
    ),
)
