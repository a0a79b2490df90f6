"""Launches the activation kernels: gets the row strides, looks up the call's plan, and launches.

Without bias and dropout, an activation or a gated unit of dense tensors does not depend on rows and
columns. Its kernels read the tensors as vectors, whose length is a run-time argument. In all other
calls a compiled variant depends on the row length, never on the number of rows. A plan also depends
on the bucket of the number of rows, because buckets may have different best configs.
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
    """The plan of a call's launches.

    Attributes:
        variant: the compiled kernel.
        rows: the rows of a tile; its elements if tensors are read as vectors.
        tiles: the tiles of a row.
        programs: with a bias gradient, the most programs along the rows.
        reduce: the kernel that adds partial sums of a bias gradient; None without one.
        reduce_block: the columns of each of its programs.
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
    """Returns whether all tensors are dense and have the same order of elements.

    Then kernels can read them as vectors.
    """
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
    """Launches one kernel, which computes ``outs``, ``(y,)``, from ``tensors``, ``(x, other)``."""
    x, other = tensors
    (y,) = outs
    if site.vector is not None and _alike(x, other, y):
        _forward_vectors(site.vector, x, other, y)
        return
    seed, offset, threshold = state
    seed_type = 0 if seed is None else seed_kind(offset)  # an index in `SEED_TYPES`
    cols, kind = site.cols, site.kind
    # The bits of all addresses and strides: if the lowest four are zero, the variant may rely on
    # vectors of 16 bytes. A bias is passed as one row.
    x, x_stride, bits = as_rows(x, cols * 2 if kind == "packed" else cols)
    other, other_stride, other_bits = as_rows(other, cols)
    bits |= other_bits
    rows = y.numel() // cols
    key = (site, seed_type, bits & 15 == 0, BUCKET[rows.bit_length()])
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
    """Returns the output if it is contiguous, else a contiguous tensor, to be copied into it."""
    if out.is_contiguous():
        return out
    return torch.empty_like(out, memory_format=torch.contiguous_format)


def _forward_vectors(site: ActivationSite, x: Any, other: Any, y: Tensor) -> None:
    """Launches the forward of dense tensors that all have one layout."""
    x, bits = dense(x)
    other, other_bits = dense(other)
    elements = y.numel()
    key = (
        site,
        (bits | other_bits) & 15 == 0,
        BUCKET[(elements // configs.VECTOR).bit_length()],
    )
    plan = _forwards.get(key)
    if plan is None:
        plan = tuning.plan(_forwards, key, _plan_pointwise_forward)
    plan.variant(-(-elements // plan.rows), 1, x, other, y, elements)


def backward(site: ActivationSite, grads: Any, saved: Any, outs: Any, state: State) -> None:
    """Launches one kernel, and for a bias gradient of many rows a second that adds partial sums.

    The gradient of packed rows is one packed tensor.
    """
    (dy,) = grads
    x, other = saved
    dx, dother = outs
    if site.vector is not None and _alike(x, other, dx, dother):
        _backward_vectors(site.vector, dy, x, other, outs)
        return
    cols, kind = site.cols, site.kind
    seed, offset, threshold = state
    seed_type = 0 if seed is None else seed_kind(offset)  # an index in `SEED_TYPES`
    dy, dy_stride, bits = as_rows(dy, cols)
    x, x_stride, x_bits = as_rows(x, cols * 2 if kind == "packed" else cols)
    other, other_stride, other_bits = as_rows(other, cols)
    bits |= x_bits | other_bits
    rows = dy.numel() // cols
    key = (
        site,
        (dx is not None, dother is not None),
        dy.dtype,
        seed_type,
        bits & 15 == 0,
        BUCKET[rows.bit_length()],
    )
    plan = _backwards.get(key)
    if plan is None:
        plan = tuning.plan(_backwards, key, _plan_backward)
    row_tiles = -(-rows // plan.rows)
    if kind != "bias":
        # The kernel writes contiguous rows, which are copied into outputs of another layout.
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
        # If there are few rows, one program processes them all and stores the bias gradient.
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
        # Without partial sums nothing is written to this address, so any tensor will do.
        dy if partials is None else partials,
        seed,
        offset,
        threshold,
        dy_stride,
        x_stride,
        rows,
    )
    if partials is not None and plan.reduce is not None:
        column_tiles = -(-cols // plan.reduce_block)
        # The kernel adds up to three gradients; here there is only that of the bias.
        plan.reduce(column_tiles, 1, partials, dother, None, None, programs)


def _backward_vectors(site: ActivationSite, dy: Tensor, x: Any, other: Any, outs: Any) -> None:
    """Launches the backward of dense tensors that all have one layout, except perhaps dy."""
    dx, dother = outs
    if not _alike(x, dy):
        dy = empty_dense(x, dy.dtype).copy_(dy)
    dy, bits = dense(dy)
    x, x_bits = dense(x)
    other, other_bits = dense(other)
    elements = dy.numel()
    key = (
        site,
        (bits | x_bits | other_bits) & 15 == 0,
        dy.dtype,
        dx is not None,
        dother is not None,
        BUCKET[(elements // configs.VECTOR).bit_length()],
    )
    plan = _backwards.get(key)
    if plan is None:
        plan = tuning.plan(_backwards, key, _plan_pointwise_backward)
    plan.variant(-(-elements // plan.rows), 1, dy, x, other, dx, dother, elements)


# --- plans for vectors ----------------------------------------------------------------------------


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


def _vector_key(site: ActivationSite, direction: str, y: torch.dtype, bucket: int) -> TuningKey:
    """Returns the tuning key of vectors.

    ``direction`` is "forward" or "backward", and ``y`` the dtype of the output or its gradient.
    """
    x, up = site.dtypes
    assert x is not None
    variant = (site.activation.name, "alone" if up is None else "gated")
    moved = widths(x.itemsize, y.itemsize)
    return TuningKey(f"pointwise_{direction}", variant, moved, configs.VECTOR, bucket)


def _plan_pointwise(
    kernel: Any, types: dict[str, str | None], site: ActivationSite, aligned: bool, key: TuningKey
) -> _Plan:
    """Returns the plan of a kernel for vectors."""
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
    return _Plan(variant, rows=config.block_n, tiles=1)


# --- plans for rows -------------------------------------------------------------------------------


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
    site: ActivationSite, direction: str, bucket: int, seed: int, y: torch.dtype, *parts: str
) -> TuningKey:
    """Returns the tuning key of rows, packed or not.

    ``direction`` is "forward" or "backward", and ``y`` the dtype of the output or its gradient.
    ``parts`` are further parts of the variant of `bias_act`.
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
    moved = widths(x.itemsize, y.itemsize)
    return TuningKey(f"{family}_{direction}", variant, moved, site.cols, bucket)


def _types(site: ActivationSite, seed: int) -> dict[str, str | None]:
    """Returns Triton's types of the arguments of all kernels for rows, by name.

    A name that a kernel does not have is ignored.
    """
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
    return _Plan(variant, rows=config.rows, tiles=-(-site.cols // config.block_n))


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
    needs_x, needs_other = needs
    dx = pointer_type(x) if needs_x else None
    dother = pointer_type(other) if needs_other else None
    types = _types(site, seed) | {
        "dy": pointer_type(dy),
        "dx": dx,
        "dgate": dx,
        "dup": dother,
        "dbias": dother,
        "partials": pointer_type(site.acc),
        "first": dother,
        "second": None,
        "third": None,
        "programs": "i32",
    }
    sums = site.kind == "bias" and needs_other
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
        return _Plan(variant, rows=config.rows, tiles=tiles)
    # Together, the persistent programs of all column tiles are as many as run at the same time.
    programs = max(2, launch.processors(site.device_index) * max(config.per_sm, 1) // tiles)
    reduce_config = tuning.config_of_sums(programs, site.cols)
    reduce = build(sum_partials_kernel, reduce_config, constants | {"PERSISTENT": False})
    return _Plan(
        variant,
        rows=config.rows,
        tiles=tiles,
        programs=programs,
        reduce=reduce,
        reduce_block=reduce_config.block_n,
    )
