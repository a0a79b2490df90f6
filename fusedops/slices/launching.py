"""Launches the slices kernels: gets the rows' addresses, looks up the call's plan, and launches.

A compiled variant depends on dtypes, absent arguments, widths, alignment and device, never on the
number of rows. A plan also depends on the bucket of the number of rows, because buckets may have
different best configs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..core.activations import device_functions
from ..core.configs import tuning
from ..core.configs.tuning import BUCKET
from ..core.launches import launch
from ..core.launches.launch import Variant, pointer_type, triton_dtype
from ..core.launches.operand import rows as as_rows
from ..core.launches.operand import vector
from ..core.launches.tables import Addresses, constants, gather
from ..core.random.rng import State
from . import configs
from .site import SliceSite
from .widths import Groups, Widths

__all__ = ["backward", "forward"]


class _Plan(NamedTuple):
    """The plan of a call's launches.

    Attributes:
        variant: the compiled kernel.
        rows: the fewest rows of a tile.
        groups: the groups of slices: see `Groups`. They are axis 0 of the grid.
        programs: the most programs along the rows, axis 1 of the grid.
        table: `Groups.table` on the device.
        reduce: a backward's second kernel, which adds the programs' partial sums.
        reduce_block: the columns of a program of that kernel.
        sums: the number of parameters with gradients.
    """

    variant: Variant
    rows: int
    groups: int
    programs: int
    table: Tensor | None
    reduce: Variant | None = None
    reduce_block: int = 0
    sums: int = 0


_forwards: dict[Any, _Plan] = tuning.register_cache({})
_backwards: dict[Any, _Plan] = tuning.register_cache({})


# Rows that a kernel reads, in one of two forms:
#
#     one tensor      (tensor, row stride, None,      address bits, stride bits, None)
#     many tensors    (None,   0,          addresses, address bits, stride bits, tensors)
#
# Address bits are the bitwise or of all addresses, stride bits that of all row strides: their
# lowest bits tell the alignment. The tuple holds the tensors because they must live until the
# launch.
_Rows: TypeAlias = tuple[Tensor | None, int, Addresses | None, int, int, Any]


def _joint(t: Tensor, cols: int, dims: int) -> _Rows:
    """Returns the rows of one tensor whose trailing ``dims`` dimensions hold the slices."""
    if dims == 2 and not t.is_contiguous():
        t = t.flatten(-2)  # so rows with gaps between them can be read in place
    t, stride, _ = as_rows(t, cols)
    return t, stride, None, t.data_ptr(), stride, None


def _buffer(t: Tensor, cols: int) -> _Rows:
    """Returns the rows of a buffer, which holds the slices one after the other."""
    t, bits = vector(t)
    return t, cols, None, bits, 0, None


def _separate(slices: Sequence[Tensor | None], site: SliceSite, device: torch.device) -> _Rows:
    """Returns the rows of a tensor for each slice.

    None stands for a gradient that is zero; its address is 0.
    """
    pointers, strides = None, None
    contiguous = [t for t in slices if t is not None and t.is_contiguous()]
    # The usual case, without a loop in Python over the slices. The memory of a tensor with the
    # negative bit does not have its values.
    if len(contiguous) == len(slices) and not any(map(Tensor.is_neg, contiguous)):
        pointers = tuple(map(Tensor.data_ptr, contiguous))
    if pointers is None or 0 in pointers:
        sizes = site.widths.sizes
        readable: list[Tensor | None] = []
        distances: list[int] = []
        for t, size in zip(slices, sizes, strict=True):
            stride = size
            if t is not None:
                t, stride, _ = as_rows(t, size)
            readable.append(t)
            distances.append(stride)
        slices = readable
        pointers = tuple([0 if t is None else t.data_ptr() for t in slices])
        strides = None if tuple(distances) == sizes else tuple(distances)
    addresses = gather(site.device_index, device, pointers, strides)
    return None, 0, addresses, addresses.bits, addresses.strides, slices


def _inputs(site: SliceSite, tensors: Any) -> tuple[int, _Rows, Tensor | None, Tensor | None, int]:
    """Returns the number of rows, the slices, weight and bias, and the bits of their addresses."""
    weight, weight_bits = vector(tensors[0])
    bias, bias_bits = vector(tensors[1])
    bits = weight_bits | bias_bits
    first = tensors[2]
    dims = site.constants.dims
    if dims:
        return first.numel() // site.cols, _joint(first, site.cols, dims), weight, bias, bits
    rows = first.numel() // site.widths.sizes[0]
    return rows, _separate(tensors[2:], site, first.device), weight, bias, bits


def forward(site: SliceSite, tensors: Any, outs: Any, state: State) -> None:
    """Launches one kernel, which computes ``(y,)`` from ``(weight, bias, *slices)``."""
    (y,) = outs
    rows, x_rows, weight, bias, bits = _inputs(site, tensors)
    x, x_stride, addresses, x_bits, strides, _ = x_rows
    table, strided = (None, False) if addresses is None else (addresses.table, addresses.strided)
    widths, total = site.widths, site.cols
    # Whether all addresses are multiples of 16 bytes, and all row strides multiples of the widths'
    # common factor. Then columns and distances are passed to the kernel in units of that factor.
    aligned = (bits | x_bits) & 15 == 0 and strides & (widths.align - 1) == 0
    unit = widths.align if aligned else 1
    # Whether row distances are short. They bound the offsets within a tile: see `_FAR`.
    small_offsets = (strides | total) < _FAR
    key = (site, aligned, strided, small_offsets, BUCKET[rows.bit_length()])
    plan = _forwards.get(key)
    if plan is None:
        plan = tuning.plan(_forwards, key, _plan_forward, y.device)
    programs = min(-(-rows // plan.rows), plan.programs)
    plan.variant(
        plan.groups,
        programs,
        x,
        table,
        plan.table,
        weight,
        bias,
        y,
        x_stride // unit,
        total // unit,
        widths.count,
        rows,
    )


def backward(site: SliceSite, grads: Any, saved: Any, outs: Any, state: State) -> None:
    """Launches one kernel, and for many rows a second that adds partial sums.

    ``grads`` has one tensor; or, if the outputs are separate, the gradient of each output, None for
    a gradient of zeros. ``outs`` are ``(dweight, dbias, dx)``, None where not needed; for a
    sequence, dx is a buffer.

    The partial sums are of the parameter gradients::

        slices with their own parameters   partials[program, parameter, column of all slices]
        slices that share the parameters   partials[program and group, parameter, column of D]

    The second kernel adds them along the first dimension, in a fixed order. A single program stores
    the gradients itself, and there are no partial sums.
    """
    dweight, dbias, dx = outs
    rows, x_rows, weight, bias, bits = _inputs(site, saved)
    x, x_stride, addresses, x_bits, strides, _ = x_rows
    table, strided = (None, False) if addresses is None else (addresses.table, addresses.strided)
    constants, widths, total = site.constants, site.widths, site.cols
    like = saved[2]
    dy_dtype = site.y
    cotangents: _Rows
    if len(grads) > 1:
        cotangents = _separate(grads, site, like.device)
    else:
        (cotangent,) = grads
        dy_dtype = cotangent.dtype
        dims = 1 if constants.concat else constants.dims
        if constants.separate():
            cotangents = _buffer(cotangent, total)
        else:
            cotangents = _joint(cotangent, total, dims)
    dy, dy_stride, dy_addresses, dy_bits, dy_strides, _ = cotangents
    dy_table, dy_strided, separate = None, False, 0
    if dy_addresses is not None:
        dy_table, dy_strided = dy_addresses.table, dy_addresses.strided
        # 1 for a table with all gradients, 2 for a table with some absent ones.
        separate = 1 + dy_addresses.absent
    strides |= dy_strides
    aligned = (bits | x_bits | dy_bits) & 15 == 0 and strides & (widths.align - 1) == 0
    unit = widths.align if aligned else 1
    small_offsets = (strides | total) < _FAR
    needs = (dweight is not None, dbias is not None, dx is not None)
    key = (
        site,
        needs,
        dy_dtype,
        separate,
        aligned,
        strided,
        dy_strided,
        small_offsets,
        BUCKET[rows.bit_length()],
    )
    plan = _backwards.get(key)
    if plan is None:
        plan = tuning.plan(_backwards, key, _plan_backward, like.device)
    row_tiles = -(-rows // plan.rows)
    # If there are few rows, one program processes them all and stores the parameter gradients.
    programs = min(row_tiles, plan.programs) if row_tiles > launch.MOST_ALONE else 1
    partials, parts, cols = None, programs, total
    if constants.shared:
        parts, cols = programs * plan.groups, widths.uniform
    if plan.reduce is not None and parts > 1:
        partials = like.new_empty(parts, plan.sums, cols, dtype=site.acc)
    # Without partial sums nothing is written to their address, so any tensor will do.
    unused = dweight if dbias is None else dbias
    plan.variant(
        plan.groups,
        programs,
        dy,
        dy_table,
        x,
        table,
        plan.table,
        weight,
        bias,
        dx,
        dweight,
        dbias,
        unused if partials is None else partials,
        dy_stride // unit,
        x_stride // unit,
        total // unit,
        widths.count,
        rows,
    )
    if partials is not None and plan.reduce is not None:
        plan.reduce(-(-cols // plan.reduce_block), plan.sums, partials, dweight, dbias, None, parts)


# --- plans ----------------------------------------------------------------------------------------

# If rows are less far apart than this, offsets within a tile fit in 32 bits: a tile has fewer than
# 2**15 elements.
_FAR = 1 << 16


tuning.register(configs, "slices_forward", "slices_backward")


def _tuning_key(site: SliceSite, kernel: str, bucket: int) -> tuning.TuningKey:
    """Returns the tuning key of a kernel; its columns are those of the widest slice."""
    widths = site.widths
    variant = (
        "one" if site.constants.dims else "sequence",
        "equal" if widths.uniform else "mixed",
        "vectors" if widths.align > 1 else "elements",
    )
    return tuning.TuningKey(kernel, variant, tuning.widths(site.x.itemsize), widths.widest, bucket)


@functools.lru_cache(maxsize=1024)
def _groups(widths: Widths, config: tuning.Config, itemsize: int) -> Groups:
    """Returns the groups of slices for a config, and their tiles."""
    vector = min(widths.align, 16 // itemsize)
    return Groups.of(widths, config.block_n, config.rows, vector, config.warps)


def _group_table(table: tuple[int, ...], device: torch.device) -> Tensor | None:
    """Returns `Groups.table` on the device, None if it is empty."""
    return constants(table, device, torch.int32) if table else None


# The registers that a backward needs per element of a tile if it holds the next rows in registers
# (``CARRIED``). With fewer it spills.
_REGISTERS_EACH = 9


def _is_one_by_one(widths: Widths, itemsize: int, aligned: bool) -> bool:
    """Returns whether a thread's adjacent elements are too few bytes for an asynchronous copy.

    Such a copy has at least four bytes.
    """
    return (widths.align if aligned else 1) * itemsize < 4


def _common(
    site: SliceSite, groups: Groups, aligned: bool, strided: bool, small_offsets: bool
) -> tuple[dict[str, str | None], dict[str, Any]]:
    """Returns the argument types and constants that forward and backward share, by name."""
    types: dict[str, str | None] = {
        "x": pointer_type(site.x) if site.constants.dims else None,
        "x_addresses": None if site.constants.dims else pointer_type(torch.int64),
        "table": "*i32" if groups.table else None,
        "weight": pointer_type(site.dtypes[0]),
        "bias": pointer_type(site.dtypes[1]),
        "dy_stride": "i64",
        "x_stride": "i64",
        "total": "i64",
        "M": "i64",
        "K": "i32",
    }
    constants = {
        "EPS": float(site.constants.eps),
        "X": triton_dtype(site.x),
        "D": site.widths.uniform,
        "TILES": tuple(map(tuple, groups.tiles)),
        "SHARED": site.constants.shared,
        "STRIDED": strided,
        "GROUPS": groups.count,
        "INDEX": triton_dtype(torch.int32 if small_offsets else torch.int64),
        "ALIGN": site.widths.align if aligned else 0,
    }
    return types, constants


def _plan_forward(
    site: SliceSite,
    aligned: bool,
    strided: bool,
    small_offsets: bool,
    bucket: int,
    device: torch.device,
) -> _Plan:
    from .kernels import slices_forward_kernel

    widths = site.widths
    config = tuning.choose(_tuning_key(site, "slices_forward", bucket), site.device_index)
    groups = _groups(widths, config, site.x.itemsize)
    types, constants = _common(site, groups, aligned, strided, small_offsets)
    types["y"] = pointer_type(site.y)
    value, _ = device_functions(site.activation.name, narrow=site.y.itemsize == 2)
    constants |= {
        "VALUE": value,
        "APART": site.constants.separate(),
        "PERSISTENT": config.per_sm > 0,
        "CARRIED": _is_one_by_one(widths, site.x.itemsize, aligned),
    }
    variant = launch.build(
        slices_forward_kernel,
        types,
        constants,
        config,
        device_index=site.device_index,
        acc=site.acc,
        cols=widths.total,
        aligned=aligned,
    )
    programs = 2**31 - 1  # no limit: one for each tile
    if config.per_sm:
        # Together, the programs of all groups are as many as run at the same time.
        programs = max(1, launch.processors(site.device_index) * config.per_sm // groups.count)
    return _Plan(
        variant=variant,
        rows=groups.shortest,
        groups=groups.count,
        programs=programs,
        table=_group_table(groups.table, device),
    )


def _plan_backward(
    site: SliceSite,
    needs: tuple[bool, bool, bool],
    dy: torch.dtype,
    separate: int,
    aligned: bool,
    strided: bool,
    dy_strided: bool,
    small_offsets: bool,
    bucket: int,
    device: torch.device,
) -> _Plan:
    from ..core.kernels import sum_partials_kernel
    from .kernels import slices_backward_kernel

    widths = site.widths
    needs_weight, needs_bias, needs_x = needs
    config = tuning.choose(_tuning_key(site, "slices_backward", bucket), site.device_index)
    groups = _groups(widths, config, site.x.itemsize)
    # The next rows are held in registers only if all widths are equal. With several widths, more
    # programs hide the loads better.
    registers = 32 * config.warps * (config.registers or 128)
    fits_registers = groups.most * _REGISTERS_EACH <= registers
    is_one_by_one = _is_one_by_one(widths, min(site.x.itemsize, dy.itemsize), aligned)
    carries = widths.uniform > 0 and fits_registers and is_one_by_one
    types, constants = _common(site, groups, aligned, strided, small_offsets)
    sums = needs_weight + needs_bias
    _, derivative = device_functions(site.activation.name)
    gradients = {
        "dweight": pointer_type(site.dtypes[0]) if needs_weight else None,
        "dbias": pointer_type(site.dtypes[1]) if needs_bias else None,
    }
    types |= gradients | {
        "dy": None if separate else pointer_type(dy),
        "dy_addresses": pointer_type(torch.int64) if separate else None,
        "dx": pointer_type(site.x) if needs_x else None,
        "partials": pointer_type(site.acc) if sums else None,
    }
    constants |= {
        "DERIVATIVE": derivative,
        "DY": triton_dtype(dy),
        "DY_APART": site.constants.separate() and not separate,
        "DX_APART": site.constants.dims == 0,
        "DY_STRIDED": dy_strided,
        "UNUSED": separate == 2,
        "CARRIED": carries,
    }

    def build(kernel: Any, config: tuning.Config, cols: int, **more_types: Any) -> Variant:
        return launch.build(
            kernel,
            types | more_types,
            constants,
            config,
            device_index=site.device_index,
            acc=site.acc,
            cols=cols,
            aligned=aligned,
        )

    sum_types = {
        "first": gradients["dweight"],
        "second": gradients["dbias"],
        "third": None,
        "programs": "i32",
    }
    programs = max(2, launch.processors(site.device_index) * config.per_sm // groups.count)
    if site.constants.shared:
        parts, columns = programs * groups.count, widths.uniform
    else:
        parts, columns = programs, widths.total
    reduce_config = tuning.config_of_sums(parts, columns)
    return _Plan(
        variant=build(slices_backward_kernel, config, widths.total),
        rows=groups.shortest,
        groups=groups.count,
        programs=programs,
        table=_group_table(groups.table, device),
        reduce=build(sum_partials_kernel, reduce_config, columns, **sum_types) if sums else None,
        reduce_block=reduce_config.block_n,
        sums=sums,
    )
