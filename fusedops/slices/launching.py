"""Launches of the slices kernels: the addresses of the rows, the plan for the call, the launch.

A compiled variant depends on dtypes, absences, widths, alignment and device, never on the number of
rows; a plan also on the rows' bucket, in which the best config may be another.
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
from ..core.random.rng import State
from . import configs
from .addresses import Addresses, gather
from .site import SliceSite
from .widths import Groups, Widths

__all__ = ["backward", "forward"]


class _Plan(NamedTuple):
    """A compiled kernel, and everything about its launch that does not depend on the call.

    Attributes:
        variant: the kernel.
        rows: the rows of the shortest tile, whose group has the most tiles.
        groups: the first axis of the grid.
        programs: the most along its second axis.
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
# A bit is set wherever an address, or a row stride, has it: alignment is judged by them. The
# tensors that addresses lead to must live until the launch.
_Rows: TypeAlias = tuple[Tensor | None, int, Addresses | None, int, int, Any]


def _joint(t: Tensor, cols: int, dims: int) -> _Rows:
    """One tensor, whose trailing ``dims`` dimensions hold the slices side by side."""
    if dims == 2 and not t.is_contiguous():
        t = t.flatten(-2)  # rows with gaps between them can then be read in place
    t, stride, _ = as_rows(t, cols)
    return t, stride, None, t.data_ptr(), stride, None


def _buffer(t: Tensor, cols: int) -> _Rows:
    """One contiguous tensor with slices one after the other."""
    t, bits = vector(t)
    return t, cols, None, bits, 0, None


def _separate(slices: Sequence[Tensor | None], site: SliceSite, device: torch.device) -> _Rows:
    """A tensor for each slice; None, for a gradient that is zero, has the address 0."""
    pointers, strides = None, None
    contiguous = [t for t in slices if t is not None and t.is_contiguous()]
    # The usual case, without Python's work for each slice. A tensor with the negative bit set is
    # not in memory as it reads.
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
    """The number of rows, the slices, the parameters, and the bits of their addresses."""
    weight, bits = vector(tensors[0])
    bias, more = vector(tensors[1])
    first = tensors[2]
    dims = site.constants.dims
    if dims:
        return first.numel() // site.cols, _joint(first, site.cols, dims), weight, bias, bits | more
    rows = first.numel() // site.widths.sizes[0]
    return rows, _separate(tensors[2:], site, first.device), weight, bias, bits | more


def forward(site: SliceSite, tensors: Any, outs: Any, state: State) -> None:
    """One launch, from ``(weight, bias, *slices)`` to ``(y,)``."""
    (y,) = outs
    rows, (x, x_stride, addresses, x_bits, strides, _read), weight, bias, bits = _inputs(
        site, tensors
    )
    table, strided = (None, False) if addresses is None else (addresses.table, addresses.strided)
    widths, total = site.widths, site.cols
    # Whether all addresses are multiples of 16, and all row strides multiples of the widths' common
    # factor. Then the kernel counts columns and distances in that unit.
    aligned = (bits | x_bits) & 15 == 0 and strides & (widths.align - 1) == 0
    unit = widths.align if aligned else 1
    # Everything that selects the compiled code, and the bucket, which selects its config.
    key = (site, aligned, strided, (strides | total) < _FAR, BUCKET[rows.bit_length()])
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
    """One launch, and a second that adds partial sums of the parameter gradients of many rows.

    ``grads`` are one tensor, or, where the outputs are separate, their gradients, None for zero.
    ``outs`` are ``(dweight, dbias, dx)``, None where not needed; dx of a sequence is a buffer.

    The partial sums, for each of the parameters that have gradients::

        slices with their own parameters   partials[program, parameter, column of all slices]
        slices that share the parameters   partials[program and group, parameter, column of D]

    The second launch adds them along the first dimension, in a fixed order. With a single program
    there are none: it stores the gradients itself.
    """
    dweight, dbias, dx = outs
    rows, (x, x_stride, addresses, x_bits, strides, _read), weight, bias, bits = _inputs(
        site, saved
    )
    table, strided = (None, False) if addresses is None else (addresses.table, addresses.strided)
    constants, widths, total = site.constants, site.widths, site.cols
    like = saved[2]
    dy_dtype = site.y
    cotangents: _Rows
    if len(grads) > 1:
        cotangents = _separate(grads, site, like.device)
    else:
        (dy,) = grads
        dy_dtype = dy.dtype
        dims = 1 if constants.concat else constants.dims
        cotangents = _buffer(dy, total) if constants.separate() else _joint(dy, total, dims)
    # The last one holds references: the tensors must live until the launch.
    g, g_stride, g_addresses, g_bits, g_strides, _dys = cotangents
    g_table, g_strided, separate = None, False, 0
    if g_addresses is not None:
        g_table, g_strided = g_addresses.table, g_addresses.strided
        separate = 1 + g_addresses.absent  # 1 for a table of gradients, 2 for one with gaps
    strides |= g_strides
    aligned = (bits | x_bits | g_bits) & 15 == 0 and strides & (widths.align - 1) == 0
    unit = widths.align if aligned else 1
    needs = (dweight is not None, dbias is not None, dx is not None)
    key = (
        site,
        needs,
        dy_dtype,
        separate,
        aligned,
        strided,
        g_strided,
        (strides | total) < _FAR,
        BUCKET[rows.bit_length()],
    )
    plan = _backwards.get(key)
    if plan is None:
        plan = tuning.plan(_backwards, key, _plan_backward, like.device)
    row_tiles = -(-rows // plan.rows)
    # Few rows are one program's work: it stores the parameter gradients itself.
    programs = min(row_tiles, plan.programs) if row_tiles > launch.MOST_ALONE else 1
    parts = programs * plan.groups if constants.shared else programs
    partials, cols = None, widths.uniform if constants.shared else total
    if plan.reduce is not None and parts > 1:
        partials = like.new_empty(parts, plan.sums, cols, dtype=site.acc)
    # Without partial sums the kernel does not use their address: any tensor does.
    unused = dweight if dbias is None else dbias
    plan.variant(
        plan.groups,
        programs,
        g,
        g_table,
        x,
        table,
        plan.table,
        weight,
        bias,
        dx,
        dweight,
        dbias,
        unused if partials is None else partials,
        g_stride // unit,
        x_stride // unit,
        total // unit,
        widths.count,
        rows,
    )
    if partials is not None and plan.reduce is not None:
        plan.reduce(-(-cols // plan.reduce_block), plan.sums, partials, dweight, dbias, None, parts)


# --- the variants behind the keys -----------------------------------------------------------------

# Rows closer than this have all of a tile's elements, of which there are fewer than 2**15, within
# 32 bits.
_FAR = 1 << 16


tuning.register(configs, "slices_forward", "slices_backward")


def _tuning_key(site: SliceSite, kernel: str, bucket: int) -> tuning.TuningKey:
    """The key of a kernel's configs, whose columns are the widest slice's."""
    widths = site.widths
    variant = (
        "one" if site.constants.dims else "sequence",
        "equal" if widths.uniform else "mixed",
        "vectors" if widths.align > 1 else "elements",
    )
    return tuning.TuningKey(kernel, variant, tuning.widths(site.x.itemsize), widths.widest, bucket)


@functools.lru_cache(maxsize=1024)
def _groups(widths: Widths, config: tuning.Config, itemsize: int) -> Groups:
    vector = min(widths.align, 16 // itemsize)
    return Groups.of(widths, config.block_n, config.rows, vector, config.warps)


@functools.lru_cache(maxsize=1024)
def _group_table(table: tuple[int, ...], device: torch.device) -> Tensor | None:
    return torch.tensor(table, dtype=torch.int32, device="cpu").to(device) if table else None


# The registers that a backward needs for each element of a tile if it carries the next rows: with
# fewer it spills.
_REGISTERS_EACH = 9


def _is_one_by_one(widths: Widths, itemsize: int, aligned: bool) -> bool:
    """Whether a thread's neighbouring elements are too few bytes for an asynchronous copy.

    Such a copy has at least four bytes.
    """
    return (widths.align if aligned else 1) * itemsize < 4


def _common(
    site: SliceSite, groups: Groups, aligned: bool, strided: bool, near: bool
) -> tuple[dict[str, str | None], dict[str, Any]]:
    """Types and constants of both kernels."""
    types: dict[str, str | None] = {
        "x": pointer_type(site.x) if site.constants.dims else None,
        "x_addresses": None if site.constants.dims else pointer_type(torch.int64),
        "table": "*i32" if groups.table else None,
        "weight": pointer_type(site.dtypes[0]),
        "bias": pointer_type(site.dtypes[1]),
        **dict.fromkeys(("dy_stride", "x_stride", "total", "M"), "i64"),
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
        "INDEX": triton_dtype(torch.int32 if near else torch.int64),
        "ALIGN": site.widths.align if aligned else 0,
    }
    return types, constants


def _plan_forward(
    site: SliceSite, aligned: bool, strided: bool, near: bool, bucket: int, device: torch.device
) -> _Plan:
    from .kernels import slices_forward_kernel

    widths = site.widths
    config = tuning.choose(_tuning_key(site, "slices_forward", bucket), site.device_index)
    groups = _groups(widths, config, site.x.itemsize)
    types, constants = _common(site, groups, aligned, strided, near)
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
    programs = 2**31 - 1  # one for each tile
    if config.per_sm:
        # The groups share the programs that run at once.
        programs = max(1, launch.processors(site.device_index) * config.per_sm // groups.count)
    return _Plan(
        variant, groups.shortest, groups.count, programs, _group_table(groups.table, device)
    )


def _plan_backward(
    site: SliceSite,
    needs: tuple[bool, bool, bool],
    dy: torch.dtype,
    separate: int,
    aligned: bool,
    strided: bool,
    dy_strided: bool,
    near: bool,
    bucket: int,
    device: torch.device,
) -> _Plan:
    from ..core.kernels import sum_partials_kernel
    from .kernels import slices_backward_kernel

    widths = site.widths
    needs_weight, needs_bias, needs_x = needs
    config = tuning.choose(_tuning_key(site, "slices_backward", bucket), site.device_index)
    groups = _groups(widths, config, site.x.itemsize)
    # With several widths, more programs hide the loads better than registers that carry rows.
    registers = 32 * config.warps * (config.registers or 128)
    fits = groups.most * _REGISTERS_EACH <= registers
    is_one_by_one = _is_one_by_one(widths, min(site.x.itemsize, dy.itemsize), aligned)
    carries = widths.uniform > 0 and fits and is_one_by_one
    types, constants = _common(site, groups, aligned, strided, near)
    sums = needs_weight + needs_bias
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
        "DERIVATIVE": device_functions(site.activation.name)[1],
        "DY": triton_dtype(dy),
        "DY_APART": site.constants.separate() and not separate,
        "DX_APART": site.constants.dims == 0,
        "DY_STRIDED": dy_strided,
        "UNUSED": separate == 2,
        "CARRIED": carries,
    }

    def build(kernel: Any, config: tuning.Config, cols: int, **more: Any) -> Variant:
        return launch.build(
            kernel,
            types | more,
            constants,
            config,
            device_index=site.device_index,
            acc=site.acc,
            cols=cols,
            aligned=aligned,
        )

    more = {
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
        reduce=build(sum_partials_kernel, reduce_config, columns, **more) if sums else None,
        reduce_block=reduce_config.block_n,
        sums=sums,
    )
