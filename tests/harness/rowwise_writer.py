"""Random row-wise functions as Python source, one for each seed.

They combine operators in ways that handwritten tests do not cover.

A function is a list of statements. Each is a random template, filled with names of earlier values.
PyTorch runs each statement when it is written. A statement that raises an error, or has values that
are too large, is drawn again. So the templates need no types.
"""

from __future__ import annotations

import linecache
import math
import random
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Argument", "RandomFunction", "random_function"]


class Clip(torch.autograd.Function):
    """The identity with a clipped gradient. No kernel can compute it, so it must be refused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.1, 0.1)


class Rounded(torch.autograd.Function):
    """A cast to a dtype and back to fp64.

    The gradient is not rounded, since kernels do not round it either.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).double()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def hardsigmoid(x: Tensor) -> Tensor:
    """`F.hardsigmoid` with an exact gradient. PyTorch's has the factor 1/6 in fp32 in any dtype."""
    return torch.where((x > -3.0) & (x < 3.0), x / 6.0 + 0.5, F.hardsigmoid(x.detach()))


# In a template, {x}, {y} and {z} are floating-point tensors, {v} is a vector, {m} a boolean tensor
# and {i} an integer tensor. {d} are the dimensions of a row. {out} is the name of the result of a
# statement of several lines.
_UNARY = (
    "-{x}",
    "{x}.abs()",
    "torch.tanh({x})",
    "torch.sigmoid({x})",
    "F.silu({x})",
    "F.gelu({x})",
    "torch.relu({x})",
    "F.gelu({x}, approximate='tanh')",
    "torch.sin({x})",
    "torch.cos({x})",
    "torch.exp(torch.tanh({x}))",
    "torch.log1p({x}.abs())",
    "torch.sqrt({x}.square() + 0.5)",
    "torch.rsqrt({x} * {x} + 0.5)",
    "(1.0 + {x}.pow(2)).reciprocal()",
    "torch.tanh({x}) ** 3",
    "{x}.clamp(-0.7, 0.9)",
    "F.softplus({x})",
    "0.5 * {x} + 0.1",
    "1.5 - {x}",
    "torch.expm1({x}.clamp(max=0.5))",
    "F.logsigmoid({x})",
    "F.leaky_relu({x}, 0.1)",
    "torch.erf({x})",
    "F.hardtanh({x})",
    "({x} > 0.1) * {x}",
    "{x}.detach() * 0.5 + {x}",
    "F.elu({x})",
    "F.selu({x})",
    "F.celu({x}, 0.5)",
    "F.mish({x})",
    "F.hardswish({x})",
    "F.hardsigmoid({x})",
    "F.softsign({x})",
    "torch.floor({x} * 3.0) * 0.2 + {x}",
    "torch.sign({x}) * {x}",
    "{x} % 0.7",
    "torch.exp2({x}.clamp(max=3.0))",
    "torch.log10({x}.abs() + 0.1)",
    "torch.sinc({x})",
    "torch.asinh({x})",
    "torch.nan_to_num({x}, nan=0.5, posinf=2.0, neginf=-2.0)",
    "torch.trunc({x} * 2.0) + {x}",
    "torch.frac({x})",
    "F.threshold({x}, 0.1, -0.3)",
    "torch.logit({x} / (1.0 + {x}.abs()) * 0.5 + 0.5, eps=0.01)",
    "F.tanhshrink({x})",
    "({x}.abs() + 0.2) ** -0.7",
    "({x}.abs() + 0.2) ** 1.5",
    "{x} ** 2",
    "{x} / 3.0",
    "2.0 ** {x}.clamp(-3.0, 3.0)",
    "F.dropout({x}, 0.5, training=False)",
    "F.softshrink({x}, 0.1)",
    "F.hardshrink({x}, 0.2)",
    "F.relu6({x} * 2.0)",
    "torch.cosh({x}.clamp(-2.0, 2.0)) - 1.0",
    "{x}.square()",
    "{x} * {x}.sign()",
    "{x}.clamp(min=0.0).sqrt()",
    "{x}.detach() // 0.6 * 0.2 + {x}",
    "torch.where({x}.isnan(), 0.1, {x})",
)
_BINARY = (
    "{x} + {y}",
    "{x} - {y}",
    "{x} * {y}",
    "{x} / (1.0 + {y}.square())",
    "torch.maximum({x}, {y})",
    "torch.minimum({x}, {y})",
    "torch.where({x} > {y}, {x}, 0.3 * {y})",
    "{x}.masked_fill({y} > 0.5, 0.25)",
    "torch.lerp({x}, {y}.type_as({x}), 0.3)",
    "torch.addcmul({x}, {x}, {y}, value=0.5)",
    "torch.where(({x} < {y}) & ~({y} > 1.0), {x}, 1.0)",
    "F.silu({x}) * {y}",
    "{x} * torch.sigmoid({y})",
    "torch.fmax({x}, {y})",
    "torch.fmin({x}, {y})",
    "torch.xlogy({x}, {y}.abs() + 0.3)",
    "torch.logaddexp({x}, {y})",
    "torch.remainder({x}, {y}.abs() + 0.5)",
    "({x}.abs() + 0.3) ** {y}.tanh()",
    "torch.sub({x}, {y}, alpha=2)",
    "F.huber_loss({x}, {y}, reduction='none', delta=0.7)",
    "F.smooth_l1_loss({x}, {y}, reduction='none')",
    "F.mse_loss({x}, {y}, reduction='none')",
    "F.l1_loss({x}, {y}, reduction='none')",
    "F.binary_cross_entropy_with_logits({x}, torch.sigmoid({y}), reduction='none')",
    "{x}.clamp(max={y})",
    "torch.clamp({x}, {y} - 0.5, {y} + 0.5)",
    "torch.addcdiv({x}, {y}, {x}.square() + 1.0, value=0.3)",
    "{x} + {y} * {z}",
    "{x} * {y} - {y} * {z}",
    "torch.where({x} > 0.0, {y}, {z})",
    "({x} - {y}).abs() * {z}",
    "{x} * {y}.detach() + {y}",
    "torch.atleast_1d({x}) * {y}",
)
_REDUCING = (
    "{x}.mean({d}, keepdim=True)",
    "{x}.sum({d}, keepdim=True) * 0.2",
    "{x}.var({d}, unbiased=False, keepdim=True)",
    "{x}.var({d}, keepdim=True)",
    "{x}.amax({d}, keepdim=True)",
    "{x}.amin(dim={d}, keepdim=True)",
    "torch.logsumexp({x}, {d}, keepdim=True)",
    "({x} > 0.2).sum({d}, keepdim=True) * 0.1",
    "torch.rsqrt({x}.pow(2).mean({d}, keepdim=True) + 0.01)",
    "{x}.norm(dim={d}, keepdim=True) * 0.3",
    "torch.var_mean({x}, {d}, keepdim=True)[1]",
    "torch.std({x}, {d}, keepdim=True)",
    "{x}.max(-1, keepdim=True).values",
    "{x}.min(-1, keepdim=True)[0]",
    "{x}.norm(p=1, dim={d}, keepdim=True) * 0.1",
    "torch.linalg.vector_norm({x}, float('inf'), dim={d}, keepdim=True)",
    "{x}.argmax(-1, keepdim=True) * 0.1",
    "({x} > 1.0).any(-1, keepdim=True)",
    "{x}.isfinite().all(-1, keepdim=True)",
    "{x}.sum(-1)[..., None] * 0.1",
    "{x}.mean(-1).unsqueeze(-1)",
    "{m}.sum(-1, keepdim=True) * 0.1",
    "({x} * {y}).sum({d}, keepdim=True) * 0.2",
    "F.cosine_similarity({x}, {y}, dim=-1).unsqueeze(-1)",
    "F.pairwise_distance({x}, {y}).unsqueeze(-1) * 0.3",
    "{x}.exp().sum({d}, keepdim=True).log()",
    "({x} - {x}.amax({d}, keepdim=True)).exp().sum({d}, keepdim=True)",
    "({x} - {x}.mean({d}, keepdim=True)).abs().mean({d}, keepdim=True)",
    "{x}.sum({d}, keepdim=True, dtype=torch.float32) * 0.1",
    "torch.where({m}, {x}, 0.0).sum({d}, keepdim=True) * 0.2",
    "{x}.amax({d}, keepdim=True) - {y}.amin({d}, keepdim=True)",
    "F.softmax({x}, -1).amax(-1, keepdim=True)",
    "({x}.softmax(-1) * {y}.log_softmax(-1)).sum(-1, keepdim=True) * 0.1",
)
_ALONG = (
    "torch.softmax({x}, -1) * 3.0",
    "torch.log_softmax({x}, -1) * 0.3",
    "F.layer_norm({x}, {x}.shape[-1:])",
    "F.rms_norm({x}, {x}.shape[-1:], eps=1e-3)",
    "F.normalize({x}, dim=-1) * 2.0",
    "{x} - {x}.mean({d}, keepdim=True)",
    "torch.cat((-{x}.chunk(2, -1)[1], {x}.chunk(2, -1)[0]), -1)",
    "F.layer_norm({x}, {x}.shape[-2:])",
    "torch.stack((-{x}[..., 1::2], {x}[..., 0::2]), -1).flatten(-2)",
    "torch.cat([part * (i + 0.5) for i, part in enumerate({x}.chunk(4, -1))], -1)",
    "F.softmax({x}.unflatten(-1, (2, -1)), -1).flatten(-2) * 2.0",
    "{x} + torch.arange({x}.shape[-1], device={x}.device) * 0.05",
    "F.glu({x}, -1)",
    "torch.cat((F.silu({x}.chunk(2, -1)[0]), {x}.chunk(2, -1)[1] * 0.5), -1)",
    "F.layer_norm({x}, {x}.shape[-1:], {v}.type_as({x}), {v}.type_as({x}))",
    "F.rms_norm({x}, {x}.shape[-1:], {v}.type_as({x}), 1e-5)",
    "F.softmin({x}, -1) * 2.0",
    "{x} / ({x}.abs().amax(-1, keepdim=True) + 0.1)",
    "torch.softmax({x}.masked_fill({m}, float('-inf')), -1)",
    "torch.softmax({x}.masked_fill({m}, -1e4), -1)",
    "{x}.sub({x}.amax({d}, keepdim=True)).exp()",
    "F.normalize({x}, p=1, dim=-1) * 2.0",
    "{x} * torch.rsqrt({x}.square().mean({d}, keepdim=True) + 1e-5)",
)
_PARTS = (
    "{x}.chunk(2, -1)[0]",
    "{x}.chunk(2, -1)[1]",
    "{x}[..., ::2]",
    "{x}[..., 1::2]",
    "{x}[..., :3]",
    "{x}[..., 1:]",
    "{x}[..., 0]",
    "{x}[..., -1:]",
    "{x}[..., 2].unsqueeze(-1)",
    "torch.cat((-{x}, {y}), -1)",
    "{x}.unflatten(-1, (2, -1)).sum(-2)",
    "{x}.unflatten(-1, (-1, 4)).mean(-1)",
    "torch.cat(({x}.unsqueeze(-2), {y}.unsqueeze(-2)), -2).amax(-2)",
    "torch.stack(({x}, {y}), -1).sum(-1)",
    "torch.cat(({x}, {y}.expand_as({x})), -1).chunk(2, -1)[1]",
    "{x}[..., : {y}.shape[-1]]",
    "{x}.unbind(-1)[0].unsqueeze(-1)",
    "{x}.split({x}.shape[-1] // 2, -1)[0]",
    "{x}.tensor_split(2, -1)[0]",
    "{x}.narrow(-1, 0, 2)",
    "{x}.unflatten(-1, (2, -1)).flip(-1).flatten(-2)",
    "torch.cat(({x}[..., 1:], {x}[..., :1]), -1)",
    "{x}[..., 1:] - {x}[..., :-1]",
    "torch.cat(({x}, {x}.mean(-1, keepdim=True)), -1)",
    "{x}.repeat_interleave(2, -1)",
    "{x}.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)",
)
_VECTORS = (
    "{v}.view(2, -1).t().reshape(-1)",
    "{v}.view(-1, 2).t().reshape(-1)",
    "torch.cat((-{v}.chunk(2)[1], {v}.chunk(2)[0]))",
    "{v}.view(2, -1).flip(0).reshape(-1)",
    "torch.stack(({v}[::2], {v}[1::2])).reshape(-1)",
    "{v} / {v}.norm()",
    "{v}.softmax(0) * 2.0",
    "{v}.view(4, -1).t().reshape(-1)",
    "torch.cat(({v}[1::2], {v}[::2]))",
    "{v}.view(2, -1).sum(0)",
    "{v}.view(2, -1).transpose(0, 1).flatten() * 0.5",
    "torch.stack({v}.chunk(2), 1).flatten()",
    "{v}[None, :]",
    "{v}[:, None]",
    "{v}.unsqueeze(0).expand(2, -1).reshape(-1)",
    "{v}.view(2, -1).mean(0).repeat(2)",
)
_CONSTANTS = (
    "torch.ones_like({x})",
    "torch.full_like({x}, 0.3)",
    "torch.full({x}.shape[-1:], 0.5, device={x}.device) * {x}",
    "torch.zeros_like({x}) + {y}",
    "torch.ones_like({x}).norm(dim=-1, keepdim=True) * 0.2 * {x}",
    "F.cosine_similarity({x}, torch.ones_like({x}), dim=-1).unsqueeze(-1)",
    "{y}.expand_as({x}).norm(dim=-1, keepdim=True) * 0.1",
    "F.normalize({y}.expand_as({x}), dim=-1)",
    "F.pairwise_distance({x}, torch.ones_like({x})).unsqueeze(-1) * 0.3",
    "{y}.expand_as({x}).norm(p=1, dim=-1, keepdim=True) * 0.05",
    "{y}.expand_as({x}).sum({d}, keepdim=True) * 0.1",
    "{y}.expand_as({x}).var({d}, unbiased=False, keepdim=True)",
    "torch.ones_like({x}).sum({d}, keepdim=True) * 0.1",
    "{y}.expand_as({x})",
    "{x} * {y}.shape[-1] ** -0.5",
    "torch.zeros_like({x})",
    "{y}.expand_as({x}).logsumexp(-1, keepdim=True)",
    "{y}.expand_as({x}).amax({d}, keepdim=True)",
    "{y}.expand_as({x}).softmax(-1)",
    "F.layer_norm({y}.expand_as({x}), {x}.shape[-1:])",
    "{y}.expand_as({x}).std({d}, keepdim=True)",
    "torch.tensor(0.4, device={x}.device) * {x}",
    "{x}.new_full((1,), 0.5) * {x}",
    "torch.arange({x}.shape[-1], device={x}.device) * 0.1 + {x}",
    "{x} * torch.ones_like({y})",
    "{y}.expand_as({x}).chunk(2, -1)[0]",
    "(torch.arange({x}.shape[-1], device={x}.device) < 2) * {x}",
    "{y}.broadcast_to({x}.shape).max(-1, keepdim=True).values",
    "torch.broadcast_tensors({x}, {y})[1]",
    "{y}.repeat(1, 2)",
    "F.one_hot({i}.long().clamp(0, 2), 3) * 0.5",
)
_REPEATED = (
    "{x}.mean({d}, keepdim=True).var(-1, unbiased=False, keepdim=True)",
    "{x}.mean({d}, keepdim=True).softmax(-1)",
    "{x}.amax({d}, keepdim=True).expand_as({x}).sum({d}, keepdim=True) * 0.1",
    "F.layer_norm(F.softmax({x}, -1), {x}.shape[-1:])",
    "({x} - {x}.mean({d}, keepdim=True)).square().mean({d}, keepdim=True).sqrt()",
    "{x}.softmax(-1).softmax(-1)",
    "torch.softmax({x} / {x}.std({d}, keepdim=True), -1)",
    "{x}.sub({x}.mean({d}, keepdim=True)).amax({d}, keepdim=True)",
    "F.normalize(F.layer_norm({x}, {x}.shape[-1:]), dim=-1)",
    "F.softmax({x}, -1) / (F.softmax({x}, -1).amax(-1, keepdim=True) + 0.1)",
    "({x} * {x}.softmax(-1)).sum(-1, keepdim=True)",
    "{x}.norm(dim={d}, keepdim=True).norm(dim={d}, keepdim=True) * 0.2",
)
# Rows of zeros, and operators on them.
_ZEROS = (
    "{x} * 0.0",
    "torch.relu(-{x}.abs())",
    "F.normalize({x} - {x}, dim=-1, eps=0.1)",
    "F.normalize({x} * 0.0, dim=-1) + {x}",
    "F.normalize(torch.relu(-{x}.abs()), dim=-1)",
    "F.layer_norm({x} - {x}, {x}.shape[-1:])",
    "({x} - {x}).norm(dim=-1, keepdim=True)",
    "({x} - {x}).softmax(-1)",
    "torch.where({x} > 9.0, {x}, 0.0).norm(dim={d}, keepdim=True) + {x}",
    "({x} * 0.0).amax({d}, keepdim=True)",
    "torch.zeros_like({x}).std({d}, keepdim=True) + {x}",
)
_TYPES = (
    "{x}.float()",
    "{x}.bfloat16()",
    "{x}.half()",
    "{x}.double()",
    "{x}.to({y}.dtype)",
    "{x}.type_as({y})",
    "{x}.bfloat16().float()",
    "{x}.half().float() * 0.5",
    "{x}.to(torch.float32)",
    "({x}.float() * {y}).type_as({x})",
    "F.layer_norm({x}.float(), {x}.shape[-1:]).type_as({x})",
    "{x}.float().softmax(-1).to({x}.dtype)",
)
_MASKS = (
    "{x} > {y}",
    "{x} <= 0.3",
    "{m} & ({x} > 0.0)",
    "~{m}",
    "{m} | {m}",
    "{m} ^ ({x} < 0.0)",
    "{x}.isfinite()",
    "torch.isnan({x})",
    "torch.where({m}, {x}, {y})",
    "{x}.masked_fill({m}, 0.2)",
    "{x} * {m}",
    "{m}.float() - 0.5",
    "{x} * {m}.type_as({x})",
    "{m}.amax(-1, keepdim=True)",
    "{i}.max(-1, keepdim=True).values",
    "{i}.amin(-1, keepdim=True) * {x}",
    "{i} > 1",
    "{x} * {i}",
    "{x} + {i} % 3",
    "{x} * ({i} == 2)",
    "{x}.gather(-1, {i}.long().clamp(0, 1))",
    "{i}.float() * 0.2",
    "F.cross_entropy({x}, {i}.long()[..., 0], reduction='none').unsqueeze(-1)",
    "{m}.sum(-1, keepdim=True)",
    "{x}.gather(-1, {i}.long().clamp(0, 1)) - {x}.logsumexp(-1, keepdim=True)",
    "{m}.any(-1, keepdim=True) * {x}",
    "torch.arange({x}.shape[-1], device={x}.device) == {i}",
    "{i} * 2 + 1",
    "torch.where({m}, {i}, 1) * {x}",
    "torch.where({m}, {x}, float('nan')).nan_to_num(0.1)",
    "torch.where({m}, {x}, float('inf')).amin({d}, keepdim=True)",
)
_BLOCKS = (
    "with torch.no_grad():\n    {out} = {x} * {y}",
    "with torch.no_grad():\n    {out} = {x}.amax({d}, keepdim=True)",
    "{out} = {x}.clone()\n{out}.mul_({y})",
    "{out} = {x} * 2.0\n{out} += {y}",
    "{out} = {x}.detach()",
    "{out} = {x} + ({x}.round() - {x}).detach()",
    "{out} = {x} + (torch.floor({x}) - {x}).detach()",
    "{out} = {x} * 1.0\nwith torch.no_grad():\n    {out}.clamp_(-0.5, 0.5)",
    "{out} = torch.relu_({x} + {y})",
    "with torch.no_grad():\n    {out} = F.softmax({x}, -1)\n{out} = {out} * {x}",
    "{out} = {x}.detach() - {y}",
    "{out} = {x} + 0.0\n{out}.masked_fill_({m}, 0.1)",
    "with torch.enable_grad():\n    {out} = {x} * 0.5",
)
_VIEWS = (
    "{x}.unsqueeze(0)",
    "{x}[None]",
    "{x}.squeeze(-1)",
    "{x}.unsqueeze(-1).squeeze(-1)",
    "{x}.reshape({x}.shape)",
    "{x}.flatten(-2).unflatten(-1, {x}.shape[-2:])",
    "{x}.movedim(-1, 0).movedim(0, -1)",
    "{x}.transpose(0, 1).transpose(0, 1)",
    "{x}.unsqueeze(-2).expand(*{x}.shape[:-1], 2, -1).sum(-2)",
    "{x}.contiguous()",
    "{x}.view_as({x})",
)
# Expressions that are often not row-wise: one axis in two dimensions, reductions over rows,
# autograd functions, and permutations of columns.
_ODD = (
    "({x}.unsqueeze(-1) * {x}.unsqueeze(-2)).sum(-1)",
    "({x}.unsqueeze(-1) - {y}.unsqueeze(-2)).abs().mean(-1)",
    "({x}[..., :, None] > {x}[..., None, :]).sum(-1) * 0.1",
    "torch.softmax({x}[..., :, None] * {x}[..., None, :], -1).sum(-2)",
    "({v}[:, None] * {v}[None, :]).sum(-1)",
    "{v}[:, None] * {v}",
    "{x}.unsqueeze(-1) * {x}.unsqueeze(-2)",
    "{x} + ({v}[:, None] - {v}).mean(1)",
    "({x}.unsqueeze(-1) * {v}).sum(-1)",
    "({x}.unsqueeze(-1) * {v}).sum(-2)",
    "({x}.unflatten(-1, (2, -1)).unsqueeze(-2) * {x}.unflatten(-1, (2, -1)).unsqueeze(-3)).sum((-1, -2)).flatten(-2)",
    "Clip.apply({x})",
    "Clip.apply({x}) * 0.5 + {y}",
    "{x}.mean(0)",
    "{x} - {x}.mean(0, keepdim=True)",
    "{x}.flip(-1)",
    "{x}.roll(1, -1)",
    "{x}.cumsum(-1)",
    "{x}.sort(-1).values",
    "{x} * {x}.shape[0]",
    "{x}.sum()",
    "{x}.transpose(-1, -2)",
    "{x}.prod(-1, keepdim=True)",
    "torch.atan2({x}, {y})",
    "{x}.norm(p=3, dim=-1, keepdim=True)",
    "{x} + torch.rand_like({x}) * 0.0",
    "{x}.transpose(0, 1)",
    "{x}.amax((0, -1), keepdim=True)",
    "{x}.view(-1)",
    "{x}[0]",
    "{x}[:1]",
    "F.pad({x}, (0, 1))",
)
# Each category of templates, with its weight in the random choice.
_CATEGORIES = {
    "unary": (_UNARY, 8),
    "binary": (_BINARY, 10),
    "reducing": (_REDUCING, 7),
    "along": (_ALONG, 6),
    "parts": (_PARTS, 2),
    "vectors": (_VECTORS, 2),
    "constants": (_CONSTANTS, 3),
    "repeated": (_REPEATED, 1.5),
    "zeros": (_ZEROS, 0.7),
    "types": (_TYPES, 1.2),
    "masks": (_MASKS, 3),
    "blocks": (_BLOCKS, 1),
    "views": (_VIEWS, 0.7),
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LAYOUTS = ("steps", "expanded", "transposed", "moved", "negative", "slice")
# The largest value and the most elements of a statement's result.
_LARGEST, _MOST_ELEMENTS = 60.0, 20_000


@dataclass(frozen=True)
class Argument:
    """A tensor argument of a random function.

    Attributes:
        name: the name of the parameter.
        axes: a letter for each dimension, whose size `RandomFunction.sizes` has, or "1".
        dtype: the dtype.
        layout: the layout in memory: "contiguous" or one of `_LAYOUTS`.
        faults: whether some rows have special values: zeros, equal numbers, infinities, NaN.
        differentiated: whether the tensor requires a gradient.
    """

    name: str
    axes: tuple[str, ...]
    dtype: torch.dtype
    layout: str = "contiguous"
    faults: bool = False
    differentiated: bool = False


@dataclass
class RandomFunction:
    """A function with its arguments, and the ways in which a test calls it.

    Attributes:
        seed: the seed that generated it.
        source: its source.
        arguments: its arguments.
        sizes: the sizes of the axes, for each call.
        used: for each output, whether the loss depends on it.
        second: whether second derivatives are compared, too.
        batched: whether gradients of several cotangents at once are compared, too.
        tiled: whether kernels process rows tile by tile.
        stored: whether each call uses a new fused function, which loads the trace from disk as
            another process would.
        function: the function.
        exact: the function with all casts replaced by casts to fp64.
    """

    seed: int
    source: str
    arguments: tuple[Argument, ...]
    sizes: tuple[dict[str, int], ...]
    used: tuple[bool, ...]
    second: bool
    batched: bool
    tiled: bool
    stored: bool
    function: Callable[..., Any] = field(init=False)
    exact: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        self.function = _compiled(self.source, f"<random function {self.seed}>")
        self.exact = _compiled(_in_fp64(self.source), f"<random function {self.seed} in fp64>")

    @property
    def is_harsh(self) -> bool:
        """Whether any of its arguments has faults."""
        return any(argument.faults for argument in self.arguments)

    @property
    def has_parts(self) -> bool:
        """Whether it may use only some of the columns."""
        return bool(re.search(r"chunk|split|unbind|narrow|\[\.\.\., |gather", self.source))

    @property
    def has_short_norms(self) -> bool:
        """Whether it has norms of few columns, which may be nearly equal.

        The differences from the mean are then small. LayerNorm divides them by no less than the
        root of its eps, so it magnifies their rounding errors by up to 316.
        """
        rows = [argument.axes for argument in self.arguments if argument.axes]
        is_short = any(
            math.prod([sizes[axis] for axis in axes if axis in "mn"]) <= 3
            for axes in rows
            for sizes in self.sizes
        )
        return is_short and bool(re.search("norm|var|std|cosine", self.source))

    def tensors(self, call: int = 0, device: torch.device | str = "cpu") -> list[Tensor]:
        """Random arguments for the call with this index: the same each time."""
        rng = random.Random(f"{self.seed} {call}")
        return [
            _laid_out(_values(argument, self.sizes[call], rng), argument.layout, device)
            for argument in self.arguments
        ]


def random_function(seed: int) -> RandomFunction:
    """Returns the function that a seed generates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _Writer(random.Random(seed), seed).written()


def _compiled(source: str, path: str) -> Callable[..., Any]:
    """Compiles the source, and lets `inspect` read it under the made-up path."""
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    namespace: dict[str, Any] = {
        "torch": torch,
        "F": F,
        "Clip": Clip,
        "Rounded": Rounded,
        "hardsigmoid": hardsigmoid,
    }
    exec(compile(source, path, "exec"), namespace)
    return namespace["function"]  # type: ignore[no-any-return]


def _in_fp64(source: str) -> str:
    """Returns the source of the same function in fp64.

    Casts become casts to fp64. A cast to 16 bits and back to fp32 rounds, so it becomes `Rounded`.
    Two functions that PyTorch does not compute exactly are replaced: `hardsigmoid`, and the mean of
    `var_mean`, which Welford's updates make NaN if an element is infinite.
    """
    source = source.replace("F.hardsigmoid(", "hardsigmoid(")
    source = re.sub(
        r"torch\.var_mean\((\w+), (.+), keepdim=True\)\[1\]", r"\1.mean(\2, keepdim=True)", source
    )
    source = re.sub(
        r"(\w+)\.(half|bfloat16)\(\)\.float\(\)", r"Rounded.apply(\1, torch.\2)", source
    )
    source = re.sub(r"\.(float|half|bfloat16)\(\)", ".double()", source)
    return source.replace("torch.float32", "torch.float64")


# --- tensors --------------------------------------------------------------------------------------


def _values(argument: Argument, sizes: dict[str, int], rng: random.Random) -> Tensor:
    """Random values of an argument, contiguous and on the CPU."""
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    shape = [sizes.get(axis, 1) for axis in argument.axes]
    if argument.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.6
    if not argument.dtype.is_floating_point:
        return torch.randint(0, 3, shape, generator=generator).to(argument.dtype)
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(argument.dtype)
    if argument.faults:
        rows = values.view(-1, values.shape[-1] if values.dim() else 1)
        for _ in range(rng.choice((1, 2, 3))):
            rng.choice(_FAULTS)(rows[rng.randrange(len(rows))], rng)
    return values


def _somewhere(*numbers: float) -> Callable[[Tensor, random.Random], None]:
    """Returns a fault that writes each number to a random element of a row."""

    def fault(row: Tensor, rng: random.Random) -> None:
        for number in numbers:
            row[rng.randrange(len(row))] = (
                min(max(number, -6e4), 6e4) if row.dtype == torch.float16 else number
            )

    return fault


def _everywhere(*numbers: float) -> Callable[[Tensor, random.Random], None]:
    """Returns a fault that fills a row with one of the numbers."""

    def fault(row: Tensor, rng: random.Random) -> None:
        row.fill_(rng.choice(numbers))

    return fault


def _tied(row: Tensor, rng: random.Random) -> None:
    """A fault: two elements of the row become equal, then another element the largest."""
    row[rng.randrange(len(row))] = row.clone()[rng.randrange(len(row))]
    row[rng.randrange(len(row))] = row.max()


_FAULTS: tuple[Callable[[Tensor, random.Random], None], ...] = (
    _somewhere(float("inf")),
    _somewhere(float("-inf")),
    _somewhere(float("nan")),
    _somewhere(float("inf"), float("-inf")),
    _somewhere(1e8),
    _somewhere(-1e8),
    _somewhere(1e4, -1e4),
    _somewhere(0.0, -0.0),
    _somewhere(1e-18),  # not smaller: PyTorch's variance in fp64 on the CPU has its square
    _everywhere(0.0, -0.0),
    _everywhere(0.0),
    _everywhere(0.1, 0.7, -0.3, 3.0),
    _everywhere(float("-inf")),
    _tied,
    _tied,
)


def _laid_out(tensor: Tensor, layout: str, device: torch.device | str) -> Tensor:
    """The tensor on ``device``, with the same values in this layout in memory."""
    tensor = tensor.to(device)
    if not tensor.dim() or layout == "contiguous":
        return tensor
    if layout == "steps":
        return torch.stack((tensor, tensor), -1)[..., 0]
    if layout == "expanded":  # all rows are the first
        return tensor[:1].expand_as(tensor)
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "moved":  # by one element, so that vector loads are not aligned
        return torch.cat((tensor.flatten()[:1], tensor.flatten()))[1:].view(tensor.shape)
    if layout == "negative":
        return torch._neg_view(-tensor) if tensor.is_floating_point() else tensor
    return torch.cat((tensor, tensor), -1)[..., : tensor.shape[-1]]


# --- statements -----------------------------------------------------------------------------------


class _Writer:
    """Writes one random function.

    Attributes:
        lines: the statements so far.
        pool: the tensors that a statement may use, by name.
        namespace: the globals and locals of the statements.
    """

    def __init__(self, rng: random.Random, seed: int) -> None:
        self.rng, self.seed = rng, seed
        self.lines: list[str] = []
        self.pool: dict[str, Tensor] = {}
        self.namespace: dict[str, Any] = {"torch": torch, "F": F, "Clip": Clip}

    def written(self) -> RandomFunction:
        """Draws the arguments, the statements, the outputs, and how the function is called."""
        rng = self.rng
        self.rows = rng.choice(
            ((), ("s",), ("s",), ("b", "s"), ("b", "s"), ("b", "s"), ("a", "b", "s"))
        )
        self.columns = ("m", "n") if rng.random() < 0.07 else ("n",)
        self.row_dims = "(-2, -1)" if len(self.columns) > 1 or rng.random() < 0.03 else "-1"
        sizes = self._sizes()
        inputs = self._arguments()
        for argument in inputs:
            values = _values(argument, sizes, rng)
            self.namespace[argument.name] = self.pool[argument.name] = values
        self.originals = {argument.name: self.pool[argument.name].clone() for argument in inputs}
        categories = list(_CATEGORIES)
        weights = [weight for _, weight in _CATEGORIES.values()]
        count = rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 12))
        index_of_odd = rng.randrange(count) if rng.random() < 0.1 else -1
        for index in range(count):
            if index == index_of_odd:
                self._step(_ODD)
            else:
                templates, _ = _CATEGORIES[rng.choices(categories, weights)[0]]
                self._step(templates)
        returned = self._outputs([argument.name for argument in inputs])
        parameters = ", ".join([argument.name for argument in inputs])
        lines = [f"def function({parameters}):", *[f"    {line}" for line in self.lines]]
        lines.append(f"    return {returned}")
        return RandomFunction(
            self.seed,
            source="\n".join(lines) + "\n",
            arguments=self._varied(inputs),
            sizes=(sizes, *self._sizes_of_second_call(sizes)),
            used=tuple([rng.random() < 0.85 for _ in range(4)]),
            second=rng.random() < 0.12,
            batched=rng.random() < 0.08,
            tiled=rng.random() < 0.1,
            stored=rng.random() < 0.15,
        )

    def _sizes(self) -> dict[str, int]:
        """Draws the size of each axis: a, b and s count rows, m and n columns."""
        rng = self.rng
        return {
            "a": rng.choice((1, 2)),
            "b": rng.choice((1, 2, 2, 3)),
            "s": rng.choice((1, 2, 3, 3, 5, 18)),
            "m": rng.choice((1, 2, 3)),
            "n": rng.choice((1, 2, 3, 4, 5, 8, 8, 12, 16, 16, 16, 24, 40)),
        }

    def _sizes_of_second_call(self, sizes: dict[str, int]) -> list[dict[str, int]]:
        """Draws the sizes of a second call; the list is empty if there is no second call."""
        rng, second_sizes = self.rng, dict(sizes)
        for axis in "abs":
            if rng.random() < 0.6:
                second_sizes[axis] = rng.choice((1, 1, 2, 4, 17))
        if rng.random() < 0.4:
            second_sizes["n"] = rng.choice(
                (1, sizes["n"] * 2, max(sizes["n"] // 2, 1), sizes["n"] + 4)
            )
        if second_sizes == sizes or rng.random() >= 0.6:
            return []
        return [second_sizes]

    def _arguments(self) -> list[Argument]:
        """Draws the arguments: mostly whole rows (x), and smaller tensors, masks and integers."""
        rng, full = self.rng, (*self.rows, *self.columns)
        ones = ("1",) * len(self.columns)
        group = (*self.rows[:1], *["1"] * len(self.rows[1:]))
        axes_of = {
            "v": self.columns,  # a vector
            "r": (*self.rows, *ones),  # a number of each row
            "g": (*group, *self.columns),  # a vector of each group
            "i": full[1:],  # rows without the first dimension
            "h": (*group, *ones),  # a number of each group
            "k": (*self.rows[1:], *ones),  # numbers of rows without the first dimension
            "t": (),  # a single number
            "o": ("1",),
        }
        number_of_rows = 0 if rng.random() < 0.08 else rng.choice((1, 1, 2, 3))
        kinds = [("x", full)] * number_of_rows
        for letter, probability in (
            ("v", 0.9),
            ("r", 0.4),
            ("g", 0.5),
            ("i", 0.25),
            ("h", 0.25),
            ("k", 0.25),
            ("t", 0.25),
            ("o", 0.1),
        ):
            if rng.random() < probability:
                kinds.append((letter, axes_of[letter]))
        kinds = kinds or [("x", full)]
        common_dtype = rng.choices(_DTYPES, (6, 2, 1, 1))[0]
        mixes_dtypes = rng.random() < 0.3
        arguments = []
        for number, (letter, axes) in enumerate(kinds):
            is_other = mixes_dtypes and rng.random() < 0.5
            dtype = rng.choice(_DTYPES) if is_other else common_dtype
            arguments.append(Argument(f"{letter}{number}", axes, dtype))
        axes_of_others = rng.choice([full, full, axes_of["v"], axes_of["r"], axes_of["g"]])
        if rng.random() < 0.25:
            arguments.append(Argument("mask", axes_of_others, torch.bool))
        if rng.random() < 0.15:
            axes = rng.choice([axes_of["r"], axes_of_others])
            dtype = rng.choice((torch.int64, torch.int64, torch.int32))
            arguments.append(Argument("number", axes, dtype))
        if rng.random() < 0.1:
            arguments.append(Argument("unused", axes_of_others, common_dtype))
        rng.shuffle(arguments)
        return arguments

    def _varied(self, arguments: Sequence[Argument]) -> tuple[Argument, ...]:
        """Draws layouts, faults and gradients of the arguments; no statement depends on these."""
        rng = self.rng
        has_layouts, has_faults = rng.random() < 0.3, rng.random() < 0.25
        lacks_gradients = rng.random() < 0.4
        results = []
        for argument in arguments:
            is_floating = argument.dtype.is_floating_point
            is_laid_out = has_layouts and rng.random() < 0.6
            layout = rng.choice(_LAYOUTS) if is_laid_out else "contiguous"
            is_whole = self.rows and set(argument.axes) >= {*self.rows, *self.columns}
            is_faulty = has_faults and rng.random() < (0.8 if is_whole else 0.15)
            has_gradient = is_floating and not (lacks_gradients and rng.random() < 0.5)
            results.append(
                replace(
                    argument,
                    layout=layout,
                    faults=is_faulty and is_floating,
                    differentiated=has_gradient,
                )
            )
        return tuple(results)

    def _step(self, templates: Sequence[str]) -> None:
        """Adds a statement of one of the templates, if one of twelve attempts is valid."""
        for _ in range(12):
            name = f"y{len(self.lines)}"
            filled = self._filled(self.rng.choice(templates), name)
            if filled is not None and (result := self._run(filled, name)) is not None:
                self.lines += filled.split("\n")
                self.pool[name] = self.namespace[name] = result
                return

    def _filled(self, template: str, name: str) -> str | None:
        """Fills a template with names, preferably of newer values; None if a kind has no value."""
        template = template if "{out}" in template else f"{{out}} = {template}"
        kinds: dict[str, Callable[[Tensor], bool]] = {
            **dict.fromkeys("xyz", torch.is_floating_point),
            "m": lambda t: t.dtype == torch.bool,
            "v": lambda t: t.is_floating_point() and t.dim() == 1,
            "i": lambda t: not t.is_floating_point() and t.dtype != torch.bool,
        }
        values = {"out": name, "d": self.row_dims}
        for letter, is_of_kind in kinds.items():
            if f"{{{letter}}}" not in template:
                continue
            names = [name for name, tensor in self.pool.items() if is_of_kind(tensor)]
            if not names:
                return None
            newest = names[-3:]
            values[letter] = self.rng.choice(newest if self.rng.random() < 0.6 else names)
        return template.format(**values)

    def _run(self, text: str, name: str) -> Tensor | None:
        """Runs a statement, and returns its result.

        Returns None if it raises an error, or if the result is empty, too large or not finite.
        """
        scope = dict(self.namespace)
        try:
            exec(text, scope)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            return None
        result = scope[name]
        for argument, original in self.originals.items():
            if not torch.equal(self.pool[argument], original):
                raise AssertionError(f"a statement changes an argument: {text}")
        if not result.numel() or result.numel() > _MOST_ELEMENTS or result.dim() > 5:
            return None
        if result.is_floating_point() and not (
            result.isfinite().all() and result.abs().max() < _LARGEST
        ):
            return None
        return result  # type: ignore[no-any-return]

    def _outputs(self, names: Sequence[str]) -> str:
        """Returns the expression of the outputs. ``names`` are those of the arguments.

        The first output is a sum of the values that no statement used, where they can be added.
        Further outputs are other values, mostly of as many rows.
        """
        rng = self.rng
        text = "\n".join(line.partition("=")[2] for line in self.lines)
        unused = [
            name for name in self.pool if not re.search(rf"\b{name}\b", text) and name != "unused"
        ]
        if rng.random() < 0.15:  # leave some arguments or statements without any effect
            unused = unused[-1:]
        total = f"y{len(self.lines)}"
        rows_of_x = [name for name in names if name[0] == "x"]
        start = rows_of_x[0] if rows_of_x else rng.choice(list(self.pool))
        expression, not_added = f"{start} * 0.5", list[str]()
        for name in unused:
            term = None if name == start else self._addend(name, expression, total)
            if term is None:
                not_added.append(name)
            else:
                expression = f"{expression} + {term}"
        first = self._run(f"{total} = {expression}", total)
        if first is None:
            return start
        self.pool[total] = self.namespace[total] = first
        self.lines.append(f"{total} = {expression}")
        results = [name for name in self.pool if name[0] == "y" and name != total]
        candidates = []
        for name in results:
            row_shapes = [t.shape[: len(self.rows)] for t in (self.pool[name], first)]
            if row_shapes[0] == row_shapes[1] or rng.random() < 0.05:
                candidates.append(name)
        outputs = [total]
        if candidates and rng.random() < 0.35:
            outputs.append(rng.choice(candidates))
        not_added = [name for name in not_added if name in candidates]
        if not_added and rng.random() < 0.5:
            outputs.append(rng.choice(not_added))
        if rng.random() < 0.03:
            outputs.append(rng.choice(names))
        outputs = [self._viewed(name) for name in outputs]
        rng.shuffle(outputs)
        if len(outputs) == 1 and rng.random() < 0.9:
            return outputs[0]
        return f"[{', '.join(outputs)}]" if rng.random() < 0.1 else f"({', '.join(outputs)},)"

    def _addend(self, name: str, expression: str, total: str) -> str | None:
        """Returns a term of ``name`` that can be added to ``expression``, or None."""
        dims = len(self.rows) + len(self.columns)
        terms = [name]
        if self.pool[name].dim() == dims:
            terms += [f"{name}.mean(-1, keepdim=True)", f"{name}.chunk(2, -1)[0]"]
        for term in terms:
            result = self._run(f"{total} = {expression} + {term}", total)
            if result is not None and result.dim() <= dims:
                return term
        return None

    def _viewed(self, name: str) -> str:
        """Returns an output, or seldom a view or a reduction of it."""
        if self.rng.random() > 0.15:
            return name
        view = self.rng.choice(
            (
                ".sum(-1)",
                ".mean(-1)",
                ".flatten(0, 1)",
                ".unsqueeze(1)",
                "[..., 0]",
                ".squeeze(-1)",
                ".amax(-1, keepdim=True)",
                ".unsqueeze(-1)",
                ".transpose(0, 1)",
                ".bfloat16()",
                ".float()",
                ".detach()",
                " > 0.0",
                "[None]",
                ".logsumexp(-1)",
                ".argmax(-1)",
                ".flatten()",
            )
        )
        return f"{name}{view}" if self._run(f"out = {name}{view}", "out") is not None else name
