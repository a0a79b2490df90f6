"""From tensors to launches: builds the variant a call needs, allocates its outputs, launches.

Nothing here knows about autograd; `function` and `operators` do. A variant depends on dtypes, absences, row length,
alignment and device, never on the number of rows; a plan also on the rows' bucket, in which the best config may be
another. These functions run at every step: they count nanoseconds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..core import launch, tuning
from ..core.activations import ACTIVATIONS, Activation, device_functions
from ..core.launch import SEED_TYPES, Variant, pointer_type, vector_width
from ..core.layout import as_rows, empty
from ..core.rng import Seed
from ..core.tuning import BUCKET, Question, widths
from . import configs
from .reference import accumulator

__all__ = ["Kind", "Packed", "Site", "backward", "forward", "site_of"]

# "bias": activation(x + bias), dropped out. "glu": activation(gate) * up. "packed": the same, up behind gate in x.
Kind = Literal["bias", "glu", "packed"]
# Where a gated unit's gradients go: two tensors, or one with the gate's half first, or second.
Packed = Literal["", "gate", "up"]

_Dtype = torch.dtype | None


@dataclass(frozen=True, eq=False)
class Site:
    """What of a call stays the same from step to step; `site_of` keeps one for each, so identity is equality.

    Attributes:
        kind: which formula.
        activation: the activation's entry in the table.
        cols: the length N of an output's row.
        device_index: the GPU, -1 under the interpreter.
        x, other: the dtypes of the first tensor (x or gate) and of the second (bias or up), None where absent.
        y, acc: the dtypes of the output and of what is computed.
    """

    kind: Kind
    activation: Activation
    cols: int
    device_index: int
    x: torch.dtype
    other: _Dtype
    y: torch.dtype
    acc: torch.dtype

    @property
    def native(self) -> bool:
        """Whether PyTorch has one operator that does exactly this on this device."""
        alone = self.kind == "bias" and self.other is None and self.device_index >= 0
        return alone and self.activation.name in ("gelu", "gelu_tanh")


@functools.lru_cache(maxsize=4096)
def site_of(kind: Kind, activation: str, cols: int, device_index: int, x: torch.dtype, other: _Dtype) -> Site:
    """The one site for these choices."""
    y = x if other is None else torch.promote_types(x, other)
    return Site(kind, ACTIVATIONS[activation], cols, device_index, x, other, y, accumulator(y))


@dataclass(frozen=True)
class _Plan:
    variant: Variant
    rows: int
    tiles: int
    programs: int = 0
    reduce: Variant | None = None
    reduce_block: int = 0


_forwards: dict[Any, _Plan] = tuning.register_cache({})
_backwards: dict[Any, _Plan] = tuning.register_cache({})


def _halved(packed: Tensor, cols: int) -> Tensor:
    """An uninitialised output for packed rows: half as wide."""
    return packed.new_empty((*packed.shape[:-1], cols))


def forward(site: Site, x: Tensor, other: Tensor | None, seed: Seed | None, threshold: int,
            y: Tensor | None = None) -> Tensor:  # fmt: skip
    """The output, from one launch; into ``y`` where the caller has made it."""
    if site.device_index >= 0 and site.device_index != launch.current_device():
        with torch.cuda.device(site.device_index):
            return forward(site, x, other, seed, threshold, y)
    cols = site.cols
    packed = site.kind == "packed"
    x_stride = other_stride = cols * 2 if packed else cols
    if not x.is_contiguous():
        x, x_stride = as_rows(x, 1, x_stride)
    bits = x.data_ptr() | (x_stride << 1)
    if other is not None:
        if not other.is_contiguous():
            if site.kind == "bias":
                other = other.contiguous()
            else:
                other, other_stride = as_rows(other, 1, cols)
        bits |= other.data_ptr() | (other_stride << 1)
    first, second = (seed, None) if seed is None or isinstance(seed, Tensor) else seed
    rows = x.numel() // (2 * cols if packed else cols)
    key = (site, 0 if seed is None else 1 if second is not None else 2, bits & 15 == 0, BUCKET[rows.bit_length()])
    plan = _forwards.get(key)
    if plan is None:
        plan = tuning.plan(_forwards, key, _plan_forward)
    if y is None:
        y = _halved(x, cols) if packed else empty(x, site.y)
    if site.kind == "bias":
        plan.variant(plan.tiles, -(-rows // plan.rows), x, other, y, first, second, threshold, x_stride, rows)
    else:
        plan.variant(plan.tiles, -(-rows // plan.rows), x, other, y, x_stride, other_stride, rows)
    return y


def backward(  # noqa: C901, one flat path a step, on purpose
    site: Site,
    dy: Tensor,
    x: Tensor,
    other: Tensor | None,
    seed: Seed | None,
    threshold: int,
    needs: tuple[bool, bool],
    packed: Packed = "",
    outs: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """``(dx, dother)``, into ``outs`` where the caller has made them.

    With ``packed`` dx is one contiguous tensor for both, in rows twice as wide.

    One launch, and for a bias gradient of more than a few rows a second that sums its parts.
    """
    if site.device_index >= 0 and site.device_index != launch.current_device():
        with torch.cuda.device(site.device_index):
            return backward(site, dy, x, other, seed, threshold, needs, packed, outs)
    cols = site.cols
    x_stride = other_stride = cols * 2 if site.kind == "packed" else cols
    dy_stride = cols
    if not dy.is_contiguous():
        dy, dy_stride = as_rows(dy, 1, cols)
    if not x.is_contiguous():
        x, x_stride = as_rows(x, 1, x_stride)
    bits = dy.data_ptr() | x.data_ptr() | (dy_stride << 1) | (x_stride << 1)
    if other is not None:
        if not other.is_contiguous():
            if site.kind == "bias":
                other = other.contiguous()
            else:
                other, other_stride = as_rows(other, 1, cols)
        bits |= other.data_ptr() | (other_stride << 1)
    first, second = (seed, None) if seed is None or isinstance(seed, Tensor) else seed
    kind = 0 if seed is None else 1 if second is not None else 2
    rows = dy.numel() // cols
    key = (site, needs, packed, dy.dtype, kind, bits & 15 == 0, BUCKET[rows.bit_length()])
    plan = _backwards.get(key)
    if plan is None:
        plan = tuning.plan(_backwards, key, _plan_backward)
    row_tiles = -(-rows // plan.rows)
    if outs is not None:
        dx, dother = outs
    elif packed:
        dx, dother = dy.new_empty((*dy.shape[:-1], 2 * cols), dtype=site.x), None
    else:
        dx = empty(dy, site.x) if needs[0] else None
        dother = None
        if needs[1]:
            dother = dy.new_empty(cols, dtype=site.other) if site.kind == "bias" else empty(dy, site.other)
    if site.kind != "bias":
        plan.variant(plan.tiles, row_tiles, dy, x, other, dx, dother, dy_stride, x_stride, other_stride, rows)
        return dx, dother
    partials = None
    programs = row_tiles
    if plan.reduce is not None:
        # Few rows are one program's work: it stores the sums itself.
        programs = 1
        if row_tiles > 2:
            programs = min(row_tiles, plan.programs)
            partials = dy.new_empty((programs, cols), dtype=site.acc)
    plan.variant(plan.tiles, programs, dy, x, other, dx, dother, dy if partials is None else partials, first, second,
                 threshold, dy_stride, x_stride, rows)  # fmt: skip
    if partials is not None:
        plan.reduce(-(-cols // plan.reduce_block), 1, partials, dother, None, None, programs, programs)  # type: ignore[misc]
    return dx, dother


# --- the variants behind the keys ---------------------------------------------------------------------------------


tuning.register(configs, "bias_act_forward", "bias_act_backward", "glu_forward", "glu_backward")


def _question(site: Site, half: str, bucket: int, seed: int, other: torch.dtype, *parts: str) -> Question:
    """``half`` is forward or backward, ``other`` the dtype of what comes out or back: of packed rows as of others."""
    family = "glu"
    variant: tuple[str, ...] = (site.activation.name,)
    if site.kind == "bias":
        given = ("dropout" if seed else "plain", "alone" if site.other is None else "bias")
        family, variant = "bias_act", (*variant, *given, *parts)
    return Question(f"{family}_{half}", variant, widths(site.x.itemsize, other.itemsize), site.cols, bucket)


def _types(site: Site, seed: int) -> dict[str, str | None]:
    """Of the arguments that both passes share."""
    x, other = pointer_type(site.x), pointer_type(site.other)
    strides = dict.fromkeys(("dy_stride", "x_stride", "gate_stride", "up_stride", "M"), "i64")
    return {"x": x, "gate": x, "bias": other, "up": other, **SEED_TYPES[seed], "threshold": "i32", **strides}


def _plan_forward(site: Site, seed: int, aligned: bool, bucket: int) -> _Plan:
    from . import kernels

    types = _types(site, seed) | {"y": pointer_type(site.y)}
    value, _ = device_functions(site.activation.name)
    constants = {"VALUE": value, "VECTOR": vector_width(site.x)}
    kernel = kernels.bias_act_forward_kernel if site.kind == "bias" else kernels.glu_forward_kernel
    config = tuning.choose(_question(site, "forward", bucket, seed, site.y), site.device_index)
    variant = launch.build(kernel, types, constants, config, device_index=site.device_index, acc=site.acc,
                           cols=site.cols, aligned=aligned)  # fmt: skip
    return _Plan(variant, config.rows, -(-site.cols // config.block_n))


def _plan_backward(site: Site, needs: tuple[bool, bool], packed: Packed, dy: torch.dtype, seed: int,
                   aligned: bool, bucket: int) -> _Plan:  # fmt: skip
    from ..core.kernels import sum_partials_kernel
    from . import kernels

    value, derivative = device_functions(site.activation.name)
    dother = pointer_type(site.other) if needs[1] else None
    types = _types(site, seed) | {"dy": pointer_type(dy), "dup": dother, "dbias": dother}
    types["dx"] = types["dgate"] = pointer_type(site.x) if needs[0] or packed else None
    types |= {"partials": pointer_type(site.acc), "first": dother, "second": None, "third": None}
    types |= {"programs": "i32", "rest_programs": "i32"}
    sums = site.kind == "bias" and needs[1]
    constants = {"VALUE": value, "DERIVATIVE": derivative, "PACKED": packed, "VECTOR": vector_width(site.x, dy),
                 "REST_COL": site.cols, "PERSISTENT": sums}  # fmt: skip
    if packed:
        types["dup"] = None
    kernel = kernels.bias_act_backward_kernel if site.kind == "bias" else kernels.glu_backward_kernel
    question = _question(site, "backward", bucket, seed, dy, f"{int(sums)} sums")
    config = tuning.choose(question, site.device_index)

    def build(kernel: Any, config: tuning.Config, constants: dict[str, Any]) -> Variant:
        return launch.build(kernel, types, constants, config, device_index=site.device_index, acc=site.acc,
                            cols=site.cols, aligned=aligned)  # fmt: skip

    tiles = -(-site.cols // config.block_n)
    variant = build(kernel, config, constants)
    if not sums:
        return _Plan(variant, config.rows, tiles)
    programs = max(2, launch.processors(site.device_index) * max(config.per_sm, 1) // tiles)
    reduce_config = configs.sum_partials(config.block_n)
    reduce = build(sum_partials_kernel, reduce_config, constants | {"PERSISTENT": False})
    return _Plan(variant, config.rows, tiles, programs, reduce, reduce_config.block_n)
