"""Row-wise functions from well-known models, with tensors for them, for tests of `rowwise`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

__all__ = ["DROP", "FUNCTIONS", "SAMPLES", "RowwiseFunction", "Sign", "named"]

# The probability of all dropouts in these functions.
DROP = 0.25

Shapes = Callable[[int], Mapping[str, tuple[int, ...]]]


@dataclass(frozen=True)
class RowwiseFunction:
    """A function with the shapes of its tensors.

    Attributes:
        name: the name of the sample; one function may have several samples.
        function: the function of tensors.
        shapes: maps a number of rows to the shapes of the tensors, in the order of the parameters.
        drops: whether the function draws a dropout mask.
        sums: whether a gradient is a sum over rows, which takes one more kernel.
        parts: the number of parts in which kernels read a row. Dropout draws a mask for each part.
        drops_whole: whether dropout applies to the whole row, before it is split into parts.
        rows: the number of rows in tests.
        wide: names of tensors that are fp32 if the others have 16 bits.
        kinds: names of tensors that are not floating-point, with their kind in `_KINDS`.
        smooth: whether second derivatives exist everywhere.
    """

    name: str
    function: Callable[..., Any]
    shapes: Shapes
    drops: bool = False
    sums: bool = True
    parts: int = 1
    drops_whole: bool = False
    rows: int = 5
    wide: tuple[str, ...] = ()
    kinds: tuple[tuple[str, str], ...] = ()
    smooth: bool = True

    def tensors(
        self,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        rows: int | None = None,
    ) -> dict[str, Tensor]:
        """Random tensors by name: the same in every call, with values of order one."""
        generator = torch.Generator().manual_seed(29)
        kinds, tensors = dict(self.kinds), {}
        for name, shape in self.shapes(self.rows if rows is None else rows).items():
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            if name in kinds:
                tensors[name] = _KINDS[kinds[name]](values).to(device)
            elif name in self.wide:
                tensors[name] = values.to(device, torch.promote_types(dtype, torch.float32))
            else:
                tensors[name] = values.to(device, dtype)
        return tensors

    def without_memory(self, dtype: torch.dtype, cols: int) -> list[Tensor]:
        """Tensors on the meta device, of many rows of ``cols`` columns.

        If the code of the function contains widths, the tensors have these widths instead.
        """
        sizes = {} if self.name in _FIXED else _columns(cols)
        shapes = {
            name: [sizes.get(size, size) for size in shape]
            for name, shape in self.shapes(4096).items()
        }
        kinds = {name: _DTYPES[kind] for name, kind in self.kinds}
        kinds |= dict.fromkeys(self.wide, torch.promote_types(dtype, torch.float32))
        return [
            torch.empty(shape, dtype=kinds.get(name, dtype), device="meta")
            for name, shape in shapes.items()
        ]

    def floating(self) -> list[str]:
        """The names of the tensors that have gradients."""
        return [name for name in self.shapes(2) if name not in dict(self.kinds)]


_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "mask": lambda values: values < 0.8,
    "target": lambda values: torch.where(values > 1.0, -100, (values.abs() * 7).long() % _CLASSES),
}
_CLASSES = 40
_DTYPES = {"mask": torch.bool, "target": torch.int64}
# Samples whose functions contain widths.
_FIXED = ("partial_rotary",)


def _columns(cols: int) -> dict[int, int]:
    """Maps the samples' sizes along a row to those for rows of ``cols`` columns."""
    return {24: cols, 48: 2 * cols, 16: cols, 8: cols // 2, _CLASSES: cols, 6: cols // 8, 3: 4}


# --- norms with operators around them -------------------------------------------------------------


def dropout_add_layer_norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, ln_bias: Tensor
) -> Tensor:
    z = F.dropout(x + bias, DROP) + residual
    return F.layer_norm(z, z.shape[-1:], weight, ln_bias)


def adaptive_layer_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """The norm of DiT (Peebles and Xie 2023), with scale and shift of each sample."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def gate_and_residual(
    x: Tensor, gate: Tensor, residual: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """The residual of FLUX: a gated branch, and the next branch's modulated norm."""
    stream = residual + gate * x
    return F.layer_norm(stream, stream.shape[-1:], eps=1e-6) * (1 + scale) + shift, stream


def gated_residual_norm(
    x: Tensor, gamma: Tensor, residual: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    z = residual + gamma * F.dropout(F.silu(x), DROP)
    return F.rms_norm(z, z.shape[-1:], weight, 1e-6), z


def layer_scale(x: Tensor, gamma: Tensor, residual: Tensor) -> Tensor:
    """The residual of CaiT (Touvron et al. 2021)."""
    return residual + gamma * F.dropout(F.gelu(x), DROP)


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (normed * (1.0 + weight.float())).type_as(x)


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(variance + 1e-5)
    return weight * wide.to(x.dtype)


def norm_then_add(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """The residual of OLMo-2: the branch is normalised, and then added."""
    return residual + F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def gated_norm(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    """The norm of Mamba-2 (Dao and Gu 2024)."""
    gated = x * F.silu(z)
    return gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + 1e-5) * weight


def dynamic_tanh(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """DyT (Zhu et al. 2025)."""
    return torch.tanh(alpha * x) * weight + bias


def swiglu_norm(packed: Tensor, weight: Tensor) -> Tensor:
    gate, up = packed.chunk(2, dim=-1)
    hidden = F.dropout(F.silu(gate) * up, DROP)
    return F.rms_norm(hidden, hidden.shape[-1:], weight, 1e-6)


def dropped_geglu(packed: Tensor) -> Tensor:
    """GEGLU with dropout before the row is split into halves."""
    gate, up = F.dropout(packed, DROP).chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def unit_rows(x: Tensor, scale: Tensor) -> Tensor:
    """The norm of nGPT: scales rows to length one, then by a vector."""
    return F.normalize(x, dim=-1) * scale


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 2, weight, bias, 1e-6))


# --- rotary embeddings ----------------------------------------------------------------------------


def norm_and_rotary(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """QK-norm and a rotary embedding of halves, as in Qwen-3."""
    normed = F.rms_norm(x, x.shape[-1:], weight, 1e-6)
    first, second = normed.chunk(2, dim=-1)
    return normed * cos + torch.cat((-second, first), dim=-1) * sin


def partial_rotary(packed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Splits a row into query, key and value of different widths, and rotates half of the query.

    GPT-NeoX rotates a part of each query so.
    """
    q, k, v = packed.split([32, 8, 8], dim=-1)
    rotated, rest = q[..., :16], q[..., 16:]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, rest), dim=-1), k * 2.0, v.tanh()


def interleaved_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A rotary embedding of neighbouring columns (Su et al. 2021)."""
    even, odd = rearrange(x, "... (d pair) -> pair ... d", pair=2)
    return rearrange([even * cos - odd * sin, even * sin + odd * cos], "pair ... d -> ... (d pair)")


def complex_rotary(x: Tensor, weight: Tensor, freqs: Tensor) -> Tensor:
    """A norm, then the rotary embedding of Llama, by complex numbers."""
    x = F.rms_norm(x, x.shape[-1:], weight, 1e-6)
    pairs = x.to(freqs.dtype).reshape(*x.shape[:-1], -1, 2)
    rotated = torch.view_as_complex(pairs) * torch.view_as_complex(freqs)
    return torch.view_as_real(rotated).flatten(-2).type_as(x)


def packed_heads(packed: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Splits a projection into key and value, each of several heads.

    In memory, the dimension of key and value is outside that of the heads.
    """
    key, value = packed.unbind(2)
    return F.rms_norm(key, key.shape[-1:], weight, 1e-6), value * torch.sigmoid(value)


def per_head_norm(x: Tensor, weight: Tensor) -> Tensor:
    """An RMSNorm of heads, with a separate weight for each head."""
    return F.dropout(F.rms_norm(x, x.shape[-1:], None, 1e-6) * weight, DROP)


# --- softmax and losses ---------------------------------------------------------------------------


def softcap(x: Tensor) -> Tensor:
    """The capped logits of Gemma 2."""
    return 30.0 * torch.tanh(x / 30.0)


def alibi_softmax(scores: Tensor, slope: Tensor) -> Tensor:
    """Softmax with a bias that grows with the position (Press et al. 2021)."""
    position = torch.arange(scores.shape[-1], device=scores.device, dtype=torch.float32)
    return torch.softmax(scores + slope * position, -1)


def windowed_softmax(scores: Tensor, slope: Tensor) -> Tensor:
    """The softmax of attention to the first position and to a few preceding ones.

    Mask and bias are computed from the indices of rows and columns.
    """
    row = torch.arange(scores.shape[-2], device=scores.device)[:, None]
    column = torch.arange(scores.shape[-1], device=scores.device)
    outside = (column > row) | ((row - column >= 4) & (column > 0))
    return torch.softmax((scores + slope * (column - row)).masked_fill(outside, float("-inf")), -1)


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    filled = (scores * 0.125).masked_fill(~mask, torch.finfo(scores.dtype).min)
    return F.dropout(torch.softmax(filled, -1), DROP)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy with label smoothing and PaLM's z-loss."""
    loss = F.cross_entropy(logits, target, reduction="none", label_smoothing=0.1)
    return loss + 1e-3 * torch.logsumexp(logits, -1).square()


# --- the samples ----------------------------------------------------------------------------------


def _rows(*names: str, vectors: tuple[str, ...] = (), cols: int = 24) -> Shapes:
    """Shapes of tensors of rows, which ``names`` lists, then of vectors."""
    return lambda rows: {**dict.fromkeys(names, (rows, cols)), **dict.fromkeys(vectors, (cols,))}


def _listed(order: str, shapes: Shapes) -> Shapes:
    """The same shapes in the order of the function's parameters, whose names ``order`` lists."""
    return lambda rows: {name: shapes(rows)[name] for name in order.split()}


def _groups(order: str, *vectors: str, cols: int = 24) -> Shapes:
    """Shapes of three groups of rows; each group has one row of the tensors in ``vectors``."""
    return lambda rows: {
        name: (3, 1, cols) if name in vectors else (3, rows, cols) for name in order.split()
    }


FUNCTIONS: tuple[RowwiseFunction, ...] = (
    RowwiseFunction(
        "dropout_add_layer_norm",
        dropout_add_layer_norm,
        drops=True,
        shapes=_listed(
            "x bias residual weight ln_bias",
            _rows("x", "residual", vectors=("bias", "weight", "ln_bias")),
        ),
    ),
    RowwiseFunction(
        "adaptive_layer_norm_indexed",
        adaptive_layer_norm,
        sums=False,
        shapes=_groups("x scale shift", "scale", "shift"),
    ),
    RowwiseFunction(
        "adaptive_layer_norm_grouped",
        adaptive_layer_norm,
        rows=40,
        shapes=_groups("x scale shift", "scale", "shift"),
    ),
    RowwiseFunction(
        "gate_and_residual",
        gate_and_residual,
        rows=17,
        shapes=_groups("x gate residual scale shift", "gate", "scale", "shift"),
    ),
    RowwiseFunction(
        "gated_residual_norm",
        gated_residual_norm,
        drops=True,
        shapes=_listed(
            "x gamma residual weight", _rows("x", "residual", vectors=("gamma", "weight"))
        ),
    ),
    RowwiseFunction(
        "layer_scale",
        layer_scale,
        drops=True,
        shapes=_listed("x gamma residual", _rows("x", "residual", vectors=("gamma",))),
    ),
    RowwiseFunction("gemma_norm", gemma_norm, _rows("x", vectors=("weight",), cols=32)),
    RowwiseFunction("llama_norm", llama_norm, _rows("x", vectors=("weight",))),
    RowwiseFunction(
        "norm_then_add",
        norm_then_add,
        _rows("x", "residual", vectors=("weight",)),
        wide=("residual",),
    ),
    RowwiseFunction("gated_norm", gated_norm, _rows("x", "z", vectors=("weight",))),
    RowwiseFunction(
        "dynamic_tanh",
        dynamic_tanh,
        lambda rows: {"x": (rows, 24), "alpha": (1,), "weight": (24,), "bias": (24,)},
    ),
    RowwiseFunction(
        "swiglu_norm",
        swiglu_norm,
        lambda rows: {"packed": (rows, 48), "weight": (24,)},
        drops=True,
        parts=2,
    ),
    RowwiseFunction(
        "dropped_geglu",
        dropped_geglu,
        lambda rows: {"packed": (rows, 48)},
        drops=True,
        parts=2,
        drops_whole=True,
        sums=False,
    ),
    RowwiseFunction("unit_rows", unit_rows, _rows("x", vectors=("scale",))),
    RowwiseFunction(
        "group_norm",
        group_norm,
        lambda rows: {"x": (rows, 6, 2, 3), "weight": (6,), "bias": (6,)},
        sums=False,
        rows=3,
    ),
    RowwiseFunction(
        "norm_and_rotary",
        norm_and_rotary,
        rows=3,
        shapes=lambda rows: {
            "x": (2, rows, 2, 16),
            "weight": (16,),
            "cos": (rows, 1, 16),
            "sin": (rows, 1, 16),
        },
    ),
    RowwiseFunction(
        "partial_rotary",
        partial_rotary,
        sums=False,
        rows=3,
        shapes=lambda rows: {"packed": (2, rows, 48), "cos": (rows, 16), "sin": (rows, 16)},
    ),
    RowwiseFunction(
        "interleaved_rotary",
        interleaved_rotary,
        sums=False,
        rows=3,
        shapes=lambda rows: {"x": (2, rows, 2, 16), "cos": (rows, 1, 8), "sin": (rows, 1, 8)},
    ),
    RowwiseFunction(
        "complex_rotary",
        complex_rotary,
        rows=3,
        shapes=lambda rows: {"x": (2, rows, 2, 16), "weight": (16,), "freqs": (rows, 1, 8, 2)},
        wide=("freqs",),
    ),
    RowwiseFunction(
        "packed_heads",
        packed_heads,
        rows=3,
        shapes=lambda rows: {"packed": (2, rows, 2, 4, 16), "weight": (16,)},
    ),
    RowwiseFunction(
        "per_head_norm_grouped",
        per_head_norm,
        drops=True,
        rows=9,
        shapes=lambda rows: {"x": (2, rows, 3, 16), "weight": (3, 16)},
    ),
    RowwiseFunction(
        "per_channel_norm_grouped",
        per_head_norm,
        drops=True,
        rows=9,
        shapes=lambda rows: {"x": (2, 3, rows, 16), "weight": (3, 1, 16)},
    ),
    RowwiseFunction("softcap", softcap, _rows("x"), sums=False),
    RowwiseFunction(
        "alibi_softmax",
        alibi_softmax,
        sums=False,
        rows=3,
        shapes=lambda rows: {"scores": (2, 4, rows, 24), "slope": (4, 1, 1)},
    ),
    RowwiseFunction(
        "windowed_softmax",
        windowed_softmax,
        sums=False,
        rows=7,
        shapes=lambda rows: {"scores": (2, 4, rows, 24), "slope": (4, 1, 1)},
    ),
    RowwiseFunction(
        "masked_softmax",
        masked_softmax,
        drops=True,
        sums=False,
        rows=3,
        kinds=(("mask", "mask"),),
        shapes=lambda rows: {"scores": (2, 2, rows, 24), "mask": (2, 1, 1, 24)},
    ),
    RowwiseFunction(
        "cross_entropy",
        cross_entropy,
        sums=False,
        kinds=(("target", "target"),),
        shapes=lambda rows: {"logits": (rows, _CLASSES), "target": (rows,)},
    ),
)
SAMPLES = {function.name: function for function in FUNCTIONS}
assert len(SAMPLES) == len(FUNCTIONS)


def named(*names: str) -> list[RowwiseFunction]:
    """The functions of these names."""
    return [SAMPLES[name] for name in names]


def subsets(names: list[str]) -> list[tuple[str, ...]]:
    """All subsets of ``names`` but the empty one."""
    sizes = range(1, len(names) + 1)
    return [choice for size in sizes for choice in itertools.combinations(names, size)]


class Sign(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient
