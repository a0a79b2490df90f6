"""Launches the norm kernels: gets the row strides, looks up the call's plan, and launches.

A compiled variant depends on dtypes, absent arguments, hidden size, alignment and device, never on
the number of rows. A plan also depends on the bucket of the number of rows, because buckets may
have different best configs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..core.configs import tuning
from ..core.configs.tuning import BUCKET, TuningKey, widths
from ..core.launches import launch
from ..core.launches.launch import SEED_TYPES, Variant, pointer_type, triton_dtype, vector_width
from ..core.launches.operand import rows as as_rows
from ..core.launches.operand import vector
from ..core.launches.streams import plan_of_stream
from ..core.optional import without_none
from ..core.random.rng import State, seed_kind
from . import configs
from .site import NormSite

__all__ = ["backward", "forward"]

_Dtype = torch.dtype | None
# A backward whose threads have at most this many elements of a tile each may load the next tile
# into registers ahead: see `_plan_backward`.
_CARRIED = 16
# The most programs of a grid that needs no limit.
_UNLIMITED = 2**31 - 1


@dataclass(frozen=True)
class _Forward:
    """The plan of a forward's launch.

    Attributes:
        variant: the compiled kernel.
        rows: the rows of a tile.
        tiles: the programs that divide a row's columns; 1 with a norm.
        programs: the most programs along the rows.
    """

    variant: Variant
    rows: int
    tiles: int
    programs: int


@dataclass(frozen=True)
class _Backward:
    """The plan of a backward's launches.

    Attributes:
        post: with the exchange "read", the kernel that stores each program's sums over its columns.
        variant: the kernel that stores all gradients.
        rows: the rows of a tile.
        columns: the number of programs that a row's columns are divided among.
        programs: the most programs along the rows.
        exchange: how the programs of a row exchange sums, as ``EXCHANGE`` in the kernel: "none",
            "wait", or "read" after a launch of `post`.
        multiprocessors: the number of multiprocessors of the stream that this plan is for; 0 if it
            does not depend on them.
        reduce: the kernel that adds partial sums of parameter gradients.
        reduce_block: the columns of each of its programs.
        sums: the number of parameter gradients.
    """

    post: Variant | None
    variant: Variant
    rows: int
    columns: int
    programs: int
    exchange: str
    multiprocessors: int
    reduce: Variant | None
    reduce_block: int
    sums: int


_forwards: dict[Any, _Forward] = tuning.register_cache({})
_backwards: dict[Any, _Backward] = tuning.register_cache({})


def forward(site: NormSite, tensors: Any, outs: Any, state: State) -> None:
    """Launches one kernel, which computes ``outs`` from ``tensors``.

    ``tensors`` are ``(x, bias, residual, weight, ln_bias)``, and ``outs`` ``(y, z, cast, stats)``.
    """
    x, bias, residual, weight, ln_bias = tensors
    y, z, cast, stats = outs
    seed, offset, threshold = state
    seed_type = 0 if seed is None else seed_kind(offset)  # an index in `SEED_TYPES`
    cols = site.cols
    dims = site.dims
    # The bits of all addresses and strides: if the lowest four are zero, the variant may rely on
    # vectors of 16 bytes.
    x, x_stride, bits = as_rows(x, cols, dims)
    residual_stride = cols
    if residual is not None:
        residual, residual_stride, residual_bits = as_rows(residual, cols, dims)
        bits |= residual_bits
    if bias is not None:
        bias, bias_bits = vector(bias)
        bits |= bias_bits
    if weight is not None:
        weight, weight_bits = vector(weight)
        bits |= weight_bits
    if ln_bias is not None:
        ln_bias, ln_bias_bits = vector(ln_bias)
        bits |= ln_bias_bits
    rows = x.numel() // cols
    key = (site, seed_type, bits & 15 == 0, BUCKET[rows.bit_length()])
    plan = _forwards.get(key)
    if plan is None:
        plan = tuning.plan(_forwards, key, _plan_forward)
    grid_x = -(-rows // plan.rows)
    if grid_x > plan.programs:
        grid_x = plan.programs
    if stats is None:
        plan.variant(
            plan.tiles,
            grid_x,
            x,
            bias,
            residual,
            y,
            seed,
            offset,
            threshold,
            x_stride,
            residual_stride,
            rows,
        )
    else:
        plan.variant(
            grid_x,
            1,
            x,
            bias,
            residual,
            weight,
            ln_bias,
            y,
            cast,
            z,
            stats,
            seed,
            offset,
            threshold,
            x_stride,
            residual_stride,
            rows,
        )


def backward(site: NormSite, grads: Any, saved: Any, outs: Any, state: State) -> None:
    """Launches up to three kernels.

        post      stores each program's sums over its columns, if programs share rows and do not
                  wait for one another
        variant   stores all gradients; several programs along the rows store partial sums of
                  parameter gradients
        reduce    adds the partial sums

    Gradients that are None in ``outs`` are not computed.

    ``saved`` are ``(source, bias, residual, weight, ln_bias, stats)``. Depending on the site, the
    source is the pre-norm sum, the output or x; bias and residual are present only with x. ``dy``
    is the gradient of the output, and ``dcast`` that of its cast copy.
    """
    dy, dz, dcast = grads
    # The kernel differentiates the norm only if it has dy. Output and copy hold the same values, so
    # the copy's gradient alone can be passed as dy.
    if dy is None:
        dy, dcast = dcast, None
    source, bias, residual, weight, ln_bias, stats = saved
    dx, dbias, dresidual, dweight, dln_bias = outs
    seed, offset, threshold = state
    seed_type = 0 if seed is None else seed_kind(offset)  # an index in `SEED_TYPES`
    cols, dims = site.cols, site.dims
    dz_stride = dcast_stride = residual_stride = cols
    dy, dy_stride, bits = as_rows(dy, cols, dims)
    source, source_stride, source_bits = as_rows(source, cols, dims)
    bits |= source_bits
    if dz is not None:
        dz, dz_stride, dz_bits = as_rows(dz, cols, dims)
        bits |= dz_bits
    if dcast is not None:
        dcast, dcast_stride, dcast_bits = as_rows(dcast, cols, dims)
        bits |= dcast_bits
    if residual is not None:
        residual, residual_stride, residual_bits = as_rows(residual, cols, dims)
        bits |= residual_bits
    bias, bias_bits = vector(bias)
    weight, weight_bits = vector(weight)
    ln_bias, ln_bias_bits = vector(ln_bias)
    stats, stats_bits = vector(stats)
    bits |= bias_bits | weight_bits | ln_bias_bits | stats_bits
    like = dy if dy is not None else dz
    rows = like.numel() // cols
    needs = (
        dx is not None,
        dbias is not None,
        dresidual is not None,
        dweight is not None,
        dln_bias is not None,
    )
    key = (
        site,
        needs,
        None if dy is None else dy.dtype,
        None if dz is None else dz.dtype,
        None if dcast is None else dcast.dtype,
        seed_type,
        bits & 15 == 0,
        0,  # multiprocessors: see `_backward_of`
        BUCKET[rows.bit_length()],
    )
    plan = _backwards.get(key)
    # Programs that wait must all run at the same time, so their plan is for one number of
    # multiprocessors. A stream may have fewer than the device, so every call compares the current
    # stream's number with the plan's.
    if plan is None or plan.multiprocessors:
        plan = _backward_of(key)
    moments = partials = None
    row_tiles = -(-rows // plan.rows)
    programs = 1
    # If there are few rows, one program processes them all and stores the parameter gradients.
    if row_tiles > launch.MOST_ALONE:
        programs = min(row_tiles, plan.programs)
        if plan.reduce is not None:
            partials = like.new_empty(programs, plan.sums, cols, dtype=site.acc)
    # A program waits until a word is not zero, so the words must be zero before the launch.
    if plan.exchange == "wait":
        moments = like.new_zeros(plan.columns, rows, dtype=torch.int64)
    elif plan.exchange == "read":
        moments = like.new_empty(plan.columns, 2, rows, dtype=site.acc)
    arguments = (
        dy,
        dcast,
        dz,
        source,
        bias,
        residual,
        weight,
        ln_bias,
        stats,
        moments,
        dx,
        dresidual,
        dbias,
        dweight,
        dln_bias,
        # Without partial sums nothing is written to this address, so any tensor will do.
        partials if partials is not None else like,
        seed,
        offset,
        threshold,
        dy_stride,
        dcast_stride,
        dz_stride,
        source_stride,
        residual_stride,
        rows,
    )
    if plan.post is not None:
        plan.post(plan.columns, programs, *arguments)
    plan.variant(plan.columns, programs, *arguments)
    if partials is not None and plan.reduce is not None:
        column_tiles = -(-cols // plan.reduce_block)
        plan.reduce(column_tiles, plan.sums, partials, dbias, dweight, dln_bias, programs)


def _backward_of(key: tuple[Any, ...]) -> _Backward:
    """Returns the plan for the current stream.

    The key has 0 in place of the stream's number of multiprocessors: see `plan_of_stream`.
    """
    plan = _backwards.get(key) or tuning.plan(_backwards, key, _plan_backward)
    return plan_of_stream(plan, _backwards, key, _plan_backward)


# --- plans ----------------------------------------------------------------------------------------


tuning.register(configs, "norm_forward", "dropout_add", "norm_backward")


def _build(
    kernel: Any,
    types: dict[str, str | None],
    constants: dict[str, Any],
    config: tuning.Config,
    site: NormSite,
    aligned: bool,
) -> Variant:
    """Returns a compiled variant of a kernel, for arguments of ``types``."""
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


def _plan_forward(site: NormSite, seed: int, aligned: bool, bucket: int) -> _Forward:
    """Returns the plan for a key of `_forwards`; ``seed`` is the kind of seed: see `seed_kind`."""
    from . import kernels

    rule, cols = site.rule, site.cols
    x, _, residual, weight, _ = site.dtypes
    assert x is not None
    types = {
        **site.pointers,
        "z": site.pointers["z"] if site.outs[1] else None,
        "stats": pointer_type(site.acc),
        **SEED_TYPES[seed],
        "threshold": "i32",
        "x_stride": "i64",
        "residual_stride": "i64",
        "M": "i64",
    }
    # The tuning key does not tell whether the sum is written: training and inference share a
    # config, and so return the same bits.
    parts = ("dropout" if seed else "plain", "alone" if residual is None else "adds")
    moved = widths(x.itemsize, site.z.itemsize, site.y.itemsize)
    if not site.normalizes:
        config = tuning.choose(
            TuningKey("dropout_add", parts, moved, cols, bucket), site.device_index
        )
        width = vector_width(x, residual, config=config)
        variant = _build(
            kernels.dropout_add_kernel, types, {"VECTOR": width}, config, site, aligned
        )
        return _Forward(variant, config.rows, -(-cols // config.block_n), _UNLIMITED)
    config = tuning.choose(
        TuningKey("norm_forward", (rule.kind, *parts), moved, cols, bucket), site.device_index
    )

    constants = {
        "KIND": rule.kind,
        "EPS": rule.epsilon(site.z),
        "WEIGHT_OFFSET": float(rule.weight_offset),
        "WEIGHT": triton_dtype(weight or site.acc),
        "SUM": triton_dtype(site.z),
        "HAT": triton_dtype(rule.hat_dtype(site.z, weight)),
        "VECTOR": vector_width(x, residual, config=config),
        "PERSISTENT": config.per_sm > 0,
    }
    variant = _build(kernels.norm_forward_kernel, types, constants, config, site, aligned)
    programs = _UNLIMITED
    if config.per_sm:
        programs = launch.processors(site.device_index) * config.per_sm
    return _Forward(variant, config.rows, 1, programs)


def _backward_tuning_key(
    site: NormSite, seed: int, sums: int, bucket: int, moved: tuple[_Dtype, ...]
) -> TuningKey:
    """Returns a backward's tuning key.

    ``moved`` has the dtype of each tensor of rows that is read or written, None for an absent one.
    The first is that of dy.
    """
    present = without_none(moved)
    # Without dy there is nothing to normalise, even if the forward normalised.
    kind = "none" if moved[0] is None else site.rule.kind
    parts: tuple[str, ...] = (
        kind,
        "dropout" if seed else "plain",
        f"{sums} sums",
        f"{len(present)} moved",
    )
    sizes = sorted({dtype.itemsize for dtype in present})
    wide = site.cols > configs.MORE_HELD_ABOVE and sizes == [2]
    if wide and _holds_more_registers(site):
        parts += (configs.MORE_HELD,)
    return TuningKey("norm_backward", parts, widths(*sizes), site.cols, bucket)


def _holds_more_registers(site: NormSite) -> bool:
    """Returns whether a backward's parameters take more registers than one weight of 16 bits."""
    if site.constants.save == "output":
        return True
    parameters = site.dtypes[3:]
    return any(dtype is not None and dtype.itemsize > 2 for dtype in parameters)


def _plan_backward(
    site: NormSite,
    needs: tuple[bool, ...],
    dy: _Dtype,
    dz: _Dtype,
    dcast: _Dtype,
    seed: int,
    aligned: bool,
    multiprocessors: int,
    bucket: int,
) -> _Backward:
    """Returns the plan for a key of `_backwards`.

    ``multiprocessors`` is the number that the current stream has, or 0 if it is not known yet.
    Streams with different numbers have different plans.
    """
    from ..core.kernels import sum_partials_kernel
    from . import kernels

    rule, cols, save, device_index = site.rule, site.cols, site.constants.save, site.device_index
    x, _, residual, _, _ = site.dtypes
    normalizes = site.normalizes and dy is not None
    needs_x, needs_bias, needs_residual, needs_weight, needs_ln_bias = needs
    sums = needs_bias + needs_weight + needs_ln_bias
    source = {"sum": site.z, "output": site.y, "inputs": x}[save] if normalizes else None
    reads_inputs = normalizes and save == "inputs"
    read = [dtype for dtype in (dy, dcast, dz, source) if dtype is not None]
    moved = (
        dy,
        dcast,
        dz,
        source,
        residual if reads_inputs else None,
        x if needs_x else None,
        residual if needs_residual else None,
    )
    key = _backward_tuning_key(site, seed, sums, bucket, moved)
    config = tuning.choose(key, device_index)
    columns = -(-cols // config.columns)
    exchange = "none"
    if normalizes and columns > 1:
        exchange = "wait" if launch.waits(device_index, site.acc, columns) else "read"
        # The exchange depends on the current stream's number of multiprocessors. So a plan with
        # "read" has that number, too: on a stream with more of them, the programs may wait.
        if not multiprocessors and launch.may_wait(device_index, site.acc):
            multiprocessors = launch.multiprocessors(device_index)
    # The grid has as many programs as run at the same time; each loops over many tiles of rows.
    available = multiprocessors or launch.processors(device_index)
    programs = max(2, available * config.per_sm // columns)
    reduce_config = tuning.config_of_sums(programs, cols)
    types = _backward_types(site, needs, dy, dz, dcast, source, seed, exchange)
    # The pipeline's asynchronous copies have four bytes or more. If elements of 16 bits are loaded
    # one at a time, registers carry the next rows instead: see ``CARRIED`` in the kernel. Tiles in
    # fp32 would take too many registers. A tile is in fp32 if its tensor is, if it is the sum of dy
    # and dcast, or if it is the pre-norm sum computed again from the inputs.
    only_16bit = all(dtype.itemsize == 2 for dtype in read)
    has_16bit_tiles = normalizes and save != "inputs" and dcast is None and only_16bit
    is_unaligned = not aligned or cols % 2 != 0
    one_by_one = has_16bit_tiles and is_unaligned
    fits_registers = config.columns * config.rows <= _CARRIED * 32 * config.warps
    constants = {
        "KIND": rule.kind if normalizes else "none",
        "SAVED": save,
        "SUM": triton_dtype(site.z),
        "WEIGHT_OFFSET": float(rule.weight_offset),
        "VECTOR": vector_width(*read, config=config),
        "EXCHANGE": exchange,
        "CARRIED": one_by_one and fits_registers,
    }

    def build(types: dict[str, str | None], **changes: str) -> Variant:
        changed = constants | changes
        return _build(kernels.norm_backward_kernel, types, changed, config, site, aligned)

    variant = build(types)
    if exchange == "wait" and multiprocessors:
        # A cooperative launch has no more programs than run at the same time.
        programs = min(programs, multiprocessors * launch.resident(variant) // columns)
    post = reduce = None
    if exchange == "read":
        # A post launch stores sums only: the stores of gradients are not compiled if these pointers
        # are None.
        unused = ("dsum", "dx", "dresidual", "dbias", "dweight", "dln_bias")
        post = build(types | dict.fromkeys(unused), EXCHANGE="post")
    if sums:
        parameters = {
            "first": types["dbias"],
            "second": types["dweight"],
            "third": types["dln_bias"],
        }
        reduce = _build(
            sum_partials_kernel, types | parameters, constants, reduce_config, site, aligned
        )
    return _Backward(
        post=post,
        variant=variant,
        rows=config.rows,
        columns=columns,
        programs=programs,
        exchange=exchange,
        multiprocessors=multiprocessors,
        reduce=reduce,
        reduce_block=reduce_config.block_n,
        sums=sums,
    )


def _backward_types(
    site: NormSite,
    needs: tuple[bool, ...],
    dy: _Dtype,
    dz: _Dtype,
    dcast: _Dtype,
    source: _Dtype,
    seed: int,
    exchange: str,
) -> dict[str, str | None]:
    """Returns Triton's types of a backward's arguments, None for those that are absent."""
    save, pointers = site.constants.save, site.pointers
    normalizes = site.normalizes and dy is not None
    reads_inputs = normalizes and save == "inputs"
    needs_x, needs_bias, needs_residual, needs_weight, needs_ln_bias = needs
    moments = {"none": None, "wait": torch.int64, "read": site.acc}[exchange]
    strides = ("dy_stride", "dcast_stride", "dsum_stride", "source_stride", "residual_stride")
    return {
        "dy": pointer_type(dy),
        "dcast": pointer_type(dcast),
        "dsum": pointer_type(dz),
        "source": pointer_type(source),
        "bias": pointers["bias"] if reads_inputs else None,
        "residual": pointers["residual"] if reads_inputs else None,
        "weight": pointers["weight"] if normalizes else None,
        "ln_bias": pointers["ln_bias"] if normalizes and save == "output" else None,
        "stats": pointer_type(site.acc) if normalizes else None,
        "moments": pointer_type(moments),
        "dx": pointers["x"] if needs_x else None,
        "dresidual": pointers["residual"] if needs_residual else None,
        "dbias": pointers["bias"] if needs_bias else None,
        "dweight": pointers["weight"] if needs_weight else None,
        "dln_bias": pointers["ln_bias"] if needs_ln_bias else None,
        "partials": pointer_type(site.acc),
        **SEED_TYPES[seed],
        "threshold": "i32",
        **dict.fromkeys((*strides, "M"), "i64"),
        "programs": "i32",
    }
