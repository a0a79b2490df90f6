"""Linear layers with very many outputs whose number is no multiple of eight: vocabularies of 50257 or 30522 words, say.

In half precision, matrix products on tensor cores load 16 bytes at once, which takes rows whose length is a multiple
of eight; with others cuBLAS falls back to kernels that take several times as long. Here the weight gets rows of zeros
up to the next multiple of 64, and the columns that come of them are cut off again. The product is the same; what it
costs is a copy of the weight, and one of the gradient in backward. torch.compile pads by itself, and `fusedops.backend`
does as is done here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..hooks import is_plain
from ..rule import Rule

__all__ = ["ALIGNED", "HALF", "LEAST_OUTPUTS", "LEAST_ROWS", "MULTIPLE", "RULES", "padded_linear"]

MULTIPLE = 64
ALIGNED = 8
# Below so many outputs, or rows of input, there is nothing to win.
LEAST_OUTPUTS = 4096
LEAST_ROWS = 1024
HALF = (torch.float16, torch.bfloat16)


def padded_linear(input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``F.linear`` in ``dtype`` with rows of the output that are aligned: the first columns of a wider tensor.

    Args:
        input: of shape (..., K).
        weight: of shape (N, K).
        bias: of shape (N,), or None.
        dtype: of the product.
    """
    columns = weight.shape[0]
    more = -columns % MULTIPLE
    weight = F.pad(weight.to(dtype), (0, 0, 0, more))
    bias = None if bias is None else F.pad(bias.to(dtype), (0, more))
    return F.linear(input.to(dtype), weight, bias)[..., :columns]


def _product_dtype(input: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The half precision that the product is in, where padding gains; None where it does not, or might do otherwise."""
    if not input.is_cuda or torch.compiler.is_compiling() or input.shape[-1] % ALIGNED:
        return None
    given = (input, weight) if bias is None else (input, weight, bias)
    if input.numel() < LEAST_ROWS * input.shape[-1] or not all(map(is_plain, given)):
        return None
    dtypes = {t.dtype for t in given}
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        return dtype if dtype in HALF and dtypes <= {*HALF, torch.float32} else None
    return weight.dtype if dtypes == {weight.dtype} and weight.dtype in HALF else None


def _linear(self: Any, input: Tensor) -> Tensor:
    dtype = _product_dtype(input, self.weight, self.bias)
    if dtype is None:
        return F.linear(input, self.weight, self.bias)
    return padded_linear(input, self.weight, self.bias, dtype)


def _fits(module: nn.Module) -> str:
    outputs = int(module.out_features)  # type: ignore[arg-type]
    return "" if outputs >= LEAST_OUTPUTS and outputs % ALIGNED else "no rule"


RULES = (
    Rule(
        name="padded_linear",
        helps="its output is a view of padded rows",
        # To a block it is the linear layer that it was, whose bias the block may take.
        methods={"forward": _linear, "_fusedops_multiplies": lambda self: True},
        base=nn.Linear,
        fits=_fits,
    ),
)
