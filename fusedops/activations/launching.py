"""Launches of the activation kernels: the row strides, the plan for the call, and the launch.

An activation or a gated unit of dense tensors, without bias and dropout, depends on no columns. It
is one vector, whose length is a run-time argument. In all other calls a variant depends on the row
length, never on the number of rows. A plan depends on the rows' bucket too, because the best config
may differ between buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.activations import device_functions
from ..core.configs import tuning
from ..core.configs.tuning import BUCKET, TuningKey, widths
from ..core.launches import launch
from ..core.launches.launch import SEED_TYPES, Variant, pointer_type, vector_width
from ..core.launches.operand import dense, empty_dense, is_dense
from ..core.launches.operand import rows as as_rows
from ..core.random.rng import State, seed_kind
from . import configs
from .site import ActivationSite

__all__ = ["backward", "forward"]


@dataclass(frozen=True)
class _Plan:
    """The launches of a call.

    Attributes:
        variant: the compiled kernel.
        rows: the rows of a tile; its elements if tensors are vectors.
        tiles: the tiles of a row.
        programs: at most, for the rows of a bias gradient.
        reduce: the kernel that adds partial sums of a bias gradient.
        reduce_block: columns of each of its programs.
    """

    variant: Variant
    rows: int
    tiles: int
    programs: int = 0
    reduce: Variant | None = None
    reduce_block: int = 0


_forwards: dict[Any, _Plan] = tuning.register_cache({})
_backwards: dict[Any, _Plan] = tuning.register_cache({})


def _alike(
    first: Tensor, second: Tensor | None, third: Tensor | None = None, fourth: Tensor | None = None
) -> bool:
    """Whether dense tensors have their elements in the same order, to be read as vectors."""
    # This runs in every call: no loop where all tensors are contiguous, as they usually are.
    if first.is_contiguous():
        if second is not None and not second.is_contiguous():
            return False
        if third is not None and not third.is_contiguous():
            return False
        return fourth is None or fourth.is_contiguous()
    if not is_dense(first):
        return False
    strides = first.stride()
    return all(t is None or t.stride() == strides for t in (second, third, fourth))


def forward(site: ActivationSite, tensors: Any, outs: Any, state: State) -> None:
    """Launches one kernel, from ``(x, other)`` to ``(y,)``."""
    x, other = tensors
    (y,) = outs
    if site.vector is not None and _alike(x, other, y):
        _forward_vectors(site.vector, x, other, y)
        return
    seed, offset, threshold = state
    seeded = 0 if seed is None else seed_kind(offset)
    cols, kind = site.cols, site.kind
    # The bits of all addresses and strides: if the lowest four are zero, the variant may rely on
    # vectors of 16 bytes. A bias is read as one row.
    x, x_stride, bits = as_rows(x, cols * 2 if kind == "packed" else cols)
    other, other_stride, of_other = as_rows(other, cols)
    bits |= of_other
    rows = y.numel() // cols
    key = (site, seeded, bits & 15 == 0, BUCKET[rows.bit_length()])
    plan = _forwards.get(key)
    if plan is None:
        plan = tuning.plan(_forwards, key, _plan_forward)
    out = _contiguous(y)
    row_tiles = -(-rows // plan.rows)
    if kind == "bias":
        plan.variant(plan.tiles, row_tiles, x, other, out, seed, offset, threshold, x_stride, rows)
    else:
        plan.variant(plan.tiles, row_tiles, x, other, out, x_stride, other_stride, rows)
    if out is not y:
        y.copy_(out)


def _contiguous(out: Tensor) -> Tensor:
    """The output, or if it is not contiguous, a tensor from which it is to be copied."""
    if out.is_contiguous():
        return out
    return torch.empty_like(out, memory_format=torch.contiguous_format)


def _forward_vectors(site: ActivationSite, x: Any, other: Any, y: Tensor) -> None:
    """Launches the forward of dense tensors of one layout."""
    x, bits = dense(x)
    other, of_other = dense(other)
    elements = y.numel()
    key = (
        site,
        (bits | of_other) & 15 == 0,
        BUCKET[(elements // configs.VECTOR).bit_length()],
    )
    plan = _forwards.get(key)
    if plan is None:
        plan = tuning.plan(_forwards, key, _plan_pointwise_forward)
    plan.variant(-(-elements // plan.rows), 1, x, other, y, elements)


def backward(site: ActivationSite, grads: Any, saved: Any, outs: Any, state: State) -> None:
    """Launches one kernel, and for a bias gradient of many rows a second that adds its parts.

    The gradient of packed rows is one tensor.
    """
    (dy,) = grads
    x, other = saved
    dx, dother = outs
    if site.vector is not None and _alike(x, other, dx, dother):
        _backward_vectors(site.vector, dy, x, other, outs)
        return
    cols, kind = site.cols, site.kind
    seed, offset, threshold = state
    seeded = 0 if seed is None else seed_kind(offset)
    dy, dy_stride, bits = as_rows(dy, cols)
    x, x_stride, of_x = as_rows(x, cols * 2 if kind == "packed" else cols)
    other, other_stride, of_other = as_rows(other, cols)
    bits |= of_x | of_other
    rows = dy.numel() // cols
    key = (
        site,
        (dx is not None, dother is not None),
        dy.dtype,
        seeded,
        bits & 15 == 0,
        BUCKET[rows.bit_length()],
    )
    plan = _backwards.get(key)
    if plan is None:
        plan = tuning.plan(_backwards, key, _plan_backward)
    row_tiles = -(-rows // plan.rows)
    if kind != "bias":
        # The kernel writes contiguous rows; outputs of another layout are copies of them.
        dgate, dup = (None if t is None else _contiguous(t) for t in outs)
        plan.variant(
            plan.tiles, row_tiles, dy, x, other, dgate, dup, dy_stride, x_stride, other_stride, rows
        )
        for out, written in ((dx, dgate), (dother, dup)):
            if out is not written:
                out.copy_(written)
        return
    partials = None
    programs = row_tiles
    if plan.reduce is not None:
        # One program processes few rows, and stores the sums itself.
        programs = 1
        if row_tiles > launch.MOST_ALONE:
            programs = min(row_tiles, plan.programs)
            partials = dy.new_empty(programs, cols, dtype=site.acc)
    plan.variant(
        plan.tiles,
        programs,
        dy,
        x,
        other,
        dx,
        dother,
        dy if partials is None else partials,
        seed,
        offset,
        threshold,
        dy_stride,
        x_stride,
        rows,
    )
    if partials is not None and plan.reduce is not None:
        plan.reduce(-(-cols // plan.reduce_block), 1, partials, dother, None, None, programs)


def _backward_vectors(site: ActivationSite, dy: Tensor, x: Any, other: Any, outs: Any) -> None:
    """Launches the backward of dense tensors of one layout, in which dy is copied if it differs."""
    dx, dother = outs
    dy, bits = dense(dy if _alike(x, dy) else empty_dense(x, dy.dtype).copy_(dy))
    x, of_x = dense(x)
    other, of_other = dense(other)
    elements = dy.numel()
    key = (
        site,
        (bits | of_x | of_other) & 15 == 0,
        dy.dtype,
        dx is not None,
        dother is not None,
        BUCKET[(elements // configs.VECTOR).bit_length()],
    )
    plan = _backwards.get(key)
    if plan is None:
        plan = tuning.plan(_backwards, key, _plan_pointwise_backward)
    plan.variant(-(-elements // plan.rows), 1, dy, x, other, dx, dother, elements)


# --- vectors --------------------------------------------------------------------------------------


def _plan_pointwise_forward(site: ActivationSite, aligned: bool, bucket: int) -> _Plan:
    from .kernels import pointwise_forward_kernel

    types = dict(zip(("x", "up", "y"), map(pointer_type, (*site.dtypes, site.y)), strict=True))
    key = _vector_key(site, "forward", site.y, bucket)
    return _plan_pointwise(pointwise_forward_kernel, types, site, aligned, key)


def _plan_pointwise_backward(
    site: ActivationSite, aligned: bool, dy: torch.dtype, needs_x: bool, needs_up: bool, bucket: int
) -> _Plan:
    from .kernels import pointwise_backward_kernel

    x, up = map(pointer_type, site.dtypes)
    types = {
        "dy": pointer_type(dy),
        "x": x,
        "up": up,
        "dx": x if needs_x else None,
        "dup": up if needs_up else None,
    }
    key = _vector_key(site, "backward", dy, bucket)
    return _plan_pointwise(pointwise_backward_kernel, types, site, aligned, key)


def _vector_key(site: ActivationSite, direction: str, other: torch.dtype, bucket: int) -> TuningKey:
    """The tuning key of vectors.

    ``direction`` is forward or backward, ``other`` the dtype of the output or its gradient.
    """
    x, up = site.dtypes
    assert x is not None
    variant = (site.activation.name, "alone" if up is None else "gated")
    moved = widths(x.itemsize, other.itemsize)
    return TuningKey(f"pointwise_{direction}", variant, moved, configs.VECTOR, bucket)


def _plan_pointwise(
    kernel: Any, types: dict[str, str | None], site: ActivationSite, aligned: bool, key: TuningKey
) -> _Plan:
    value, derivative = device_functions(site.activation.name)
    config = tuning.choose(key, site.device_index)
    variant = launch.build(
        kernel,
        {**types, "M": "i64"},
        {"VALUE": value, "DERIVATIVE": derivative},
        config,
        device_index=site.device_index,
        acc=site.acc,
        cols=0,
        aligned=aligned,
    )
    return _Plan(variant, config.block_n, 1)


# --- the variants behind the keys -----------------------------------------------------------------


tuning.register(
    configs,
    "bias_act_forward",
    "bias_act_backward",
    "glu_forward",
    "glu_backward",
    "pointwise_forward",
    "pointwise_backward",
)


def _tuning_key(
    site: ActivationSite, direction: str, bucket: int, seed: int, other: torch.dtype, *parts: str
) -> TuningKey:
    """The tuning key of rows, packed or not.

    ``direction`` is forward or backward, ``other`` the dtype of the output or its gradient.
    """
    family = "glu"
    x, second = site.dtypes
    assert x is not None
    variant: tuple[str, ...] = (site.activation.name,)
    if site.kind == "bias":
        family = "bias_act"
        mask = "dropout" if seed else "plain"
        inputs = "alone" if second is None else "bias"
        variant = (*variant, mask, inputs, *parts)
    moved = widths(x.itemsize, other.itemsize)
    return TuningKey(f"{family}_{direction}", variant, moved, site.cols, bucket)


def _types(site: ActivationSite, seed: int) -> dict[str, str | None]:
    """Triton's types of the arguments that forward and backward share."""
    x, other = map(pointer_type, site.dtypes)
    strides = dict.fromkeys(("dy_stride", "x_stride", "gate_stride", "up_stride", "M"), "i64")
    return {
        "x": x,
        "gate": x,
        "bias": other,
        "up": other,
        **SEED_TYPES[seed],
        "threshold": "i32",
        **strides,
    }


def _plan_forward(site: ActivationSite, seed: int, aligned: bool, bucket: int) -> _Plan:
    from . import kernels

    types = _types(site, seed) | {"y": pointer_type(site.y)}
    value, _ = device_functions(site.activation.name)
    constants = {"VALUE": value, "VECTOR": vector_width(site.dtypes[0])}
    kernel = kernels.bias_act_forward_kernel if site.kind == "bias" else kernels.glu_forward_kernel
    config = tuning.choose(_tuning_key(site, "forward", bucket, seed, site.y), site.device_index)
    variant = launch.build(
        kernel,
        types,
        constants,
        config,
        device_index=site.device_index,
        acc=site.acc,
        cols=site.cols,
        aligned=aligned,
    )
    return _Plan(variant, config.rows, -(-site.cols // config.block_n))


def _plan_backward(
    site: ActivationSite,
    needs: tuple[bool, bool],
    dy: torch.dtype,
    seed: int,
    aligned: bool,
    bucket: int,
) -> _Plan:
    from ..core.kernels import sum_partials_kernel
    from . import kernels

    value, derivative = device_functions(site.activation.name)
    x, other = site.dtypes
    dother = pointer_type(other) if needs[1] else None
    types = _types(site, seed) | {"dy": pointer_type(dy), "dup": dother, "dbias": dother}
    types["dx"] = types["dgate"] = pointer_type(x) if needs[0] else None
    types |= {"partials": pointer_type(site.acc), "first": dother, "second": None, "third": None}
    types |= {"programs": "i32"}
    sums = site.kind == "bias" and needs[1]
    constants = {
        "VALUE": value,
        "DERIVATIVE": derivative,
        "PACKED": site.kind == "packed",
        "VECTOR": vector_width(x, dy),
        "PERSISTENT": sums,
    }
    kernel = (
        kernels.bias_act_backward_kernel if site.kind == "bias" else kernels.glu_backward_kernel
    )
    key = _tuning_key(site, "backward", bucket, seed, dy, f"{int(sums)} sums")
    config = tuning.choose(key, site.device_index)

    def build(kernel: Any, config: tuning.Config, constants: dict[str, Any]) -> Variant:
        return launch.build(
            kernel,
            types,
            constants,
            config,
            device_index=site.device_index,
            acc=site.acc,
            cols=site.cols,
            aligned=aligned,
        )

    tiles = -(-site.cols // config.block_n)
    variant = build(kernel, config, constants)
    if not sums:
        return _Plan(variant, config.rows, tiles)
    # As many persistent programs as run at the same time, divided among the column tiles.
    programs = max(2, launch.processors(site.device_index) * max(config.per_sm, 1) // tiles)
    reduce_config = tuning.config_of_sums(programs, site.cols)
    reduce = build(sum_partials_kernel, reduce_config, constants | {"PERSISTENT": False})
    return _Plan(variant, config.rows, tiles, programs, reduce, reduce_config.block_n)
