"""Gradients of many tables from those of looked-up rows, in a fixed order of additions.

Three kernels and a sort of PyTorch's compute the gradients of all tables of an operator::

    index of each table ──keys──▶ row of all tables ──sort──▶ runs of equal rows

    runs    a a b b | b b b b | b b c d     chunks of lookups
            a                       c d     stored to the gradient
                b     b         b           partial sums, which are added up in the order of chunks

No sum depends on the order in which programs run, so the same inputs give the same bits. A run may
have all lookups of a table: so its chunks are summed at the same time, and the partial sums after.
The gradients are the parts of one buffer, which is filled with zeros first.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.calls.buffers import separated
from ...core.calls.function import on_device
from ...core.calls.registration import implement
from ...core.configs import tuning
from ...core.configs.tuning import Config
from ...core.launches import launch
from ...core.launches.launch import Variant, pointer_type, triton_dtype
from ...core.launches.tables import constants, gather
from .lookups import Lookup

__all__ = ["LEAST", "gradients_of_tables", "prepare"]

# The fewest tables. PyTorch's operator is compiled to two launches for a table; these are three,
# and a sort, which has about ten.
LEAST = 4
# The lookups of a chunk. A longer one has fewer partial sums, and fewer chunks keep a GPU busy.
_LENGTH = 32
# The columns of a tile are so many bytes of a row.
_BYTES = 128
_KEYS = Config(block_n=1024, rows=1, warps=4)
# Rows of a tile are chunks. A thread has 16 bytes of a tile.
_ROWS, _WARPS = 8, 2
_CROSSING_ROWS, _CROSSING_WARPS = 32, 1


class _Table(NamedTuple):
    """A table, and where its lookups are.

    Attributes:
        rows: its rows.
        width: its columns.
        first: the columns of all slices before, in the gradients of rows.
        padding: the row that gets no gradient; -1 for none.
    """

    rows: int
    width: int
    first: int
    padding: int


@dataclass(frozen=True, eq=False)
class _Site:
    """The properties of a call that stay the same from step to step.

    `_site_of` returns one object for equal properties, so sites are compared by identity.

    Attributes:
        tables: the tables.
        elements: the number of elements of all tables.
        dtype: the dtype of the gradients.
        index_dtype: the dtype of the indices.
        device_index: the index of the GPU; -1 under the interpreter.
    """

    tables: tuple[_Table, ...]
    elements: int
    dtype: torch.dtype
    index_dtype: torch.dtype
    device_index: int


@functools.lru_cache(maxsize=1024)
def _site_of(
    numbers: tuple[int, ...], dtype: torch.dtype, index_dtype: torch.dtype, device_index: int
) -> _Site:
    """Return the site of a call, from the numbers of its tables."""
    tables = _tables_of(numbers)
    return _Site(tables, _elements(tables), dtype, index_dtype, device_index)


def _tables_of(numbers: Sequence[int]) -> tuple[_Table, ...]:
    """Return the tables from their numbers, four of each."""
    return tuple(itertools.starmap(_Table, zip(*[iter(numbers)] * 4, strict=True)))


def _elements(tables: Sequence[_Table]) -> int:
    return sum([table.rows * table.width for table in tables])


@dataclass(frozen=True)
class _Plan:
    """The compiled kernels of a call, and their tables.

    Attributes:
        write_keys, sum_runs, sum_crossing_runs: the kernels.
        key_dtype: the dtype of keys.
        acc: the dtype of sums.
        block_n: the columns of a unit.
        count: the number of units.
        tables, units: the kernels' tables.
    """

    write_keys: Variant
    sum_runs: Variant
    sum_crossing_runs: Variant
    key_dtype: torch.dtype
    acc: torch.dtype
    block_n: int
    count: int
    tables: Tensor
    units: Tensor


def gradients_of_tables(
    lookup: Lookup,
    widths: Sequence[int],
    buffer: Tensor,
    needed: Sequence[bool],
    indices: Sequence[Tensor],
) -> list[Tensor | None]:
    """Return the gradients of an operator's tables; None for those that are not needed.

    Args:
        lookup: the input.
        widths: the columns of each table.
        buffer: the gradients of the rows of all slices, one slice after the other.
        needed: for each table, whether its gradient is needed.
        indices: ``(rows,)`` of each slice.
    """
    firsts = itertools.accumulate(widths, initial=0)
    tables = list(map(_Table, lookup.rows, widths, firsts, lookup.padding))
    own = list(itertools.compress(tables, needed))
    whole = torch.ops.fusedops.table_gradients(
        buffer, list(itertools.compress(indices, needed)), list(itertools.chain(*own))
    )
    parts = iter(separated(whole, [(table.rows, table.width) for table in own]))
    return [next(parts) if need else None for need in needed]


def prepare(lookup: Lookup, widths: Sequence[int], dtype: torch.dtype, device: Any) -> None:
    """Compile the kernels for the gradients of all tables of an operator.

    Raises:
        NotCompiledError: Triton cannot compile one.
    """
    firsts = itertools.accumulate(widths, initial=0)
    numbers = itertools.chain(*map(_Table, lookup.rows, widths, firsts, lookup.padding))
    index = launch.current_device() if device.type == "cuda" else -1
    site = _site_of(tuple(numbers), dtype, getattr(torch, lookup.dtype), index)
    _plan_of(site, aligned=True, device=device)


# --- launches -------------------------------------------------------------------------------------

_plans: dict[Any, _Plan] = tuning.register_cache({})


def _sum(site: _Site, grads: Tensor, indices: Sequence[Tensor], out: Tensor) -> None:
    """Launch the kernels, which write the rows of ``out`` that were looked up."""
    lookups = indices[0].shape[0]
    plan = _plan_of(site, aligned=grads.data_ptr() % 16 == 0, device=grads.device)
    pointers = tuple([index.data_ptr() for index in indices])
    strides = tuple([index.stride(0) for index in indices])
    addresses = gather(site.device_index, grads.device, pointers, strides).table
    keys = grads.new_empty(len(indices) * lookups, dtype=plan.key_dtype)
    tiles = -(-lookups // _KEYS.block_n)
    plan.write_keys(len(indices), tiles, keys, addresses, plan.tables, lookups)
    # It is stable, so the lookups of a row are in their order.
    keys, order = torch.sort(keys, stable=True)
    chunks = -(-lookups // _LENGTH)
    partials = grads.new_empty(plan.count * chunks * 2 * plan.block_n, dtype=plan.acc)
    sums = plan.units, out, partials, lookups, chunks
    plan.sum_runs(plan.count, -(-chunks // _ROWS), grads, keys, order, *sums)
    plan.sum_crossing_runs(plan.count, chunks, keys, *sums)


def _plan_of(site: _Site, *, aligned: bool, device: torch.device) -> _Plan:
    """Return the kernels of a call; ``aligned`` is whether addresses are multiples of 16."""
    plan = _plans.get((site, aligned))
    if plan is None:
        plan = _plans[site, aligned] = _new_plan(site, aligned, device)
    return plan


def _new_plan(site: _Site, aligned: bool, device: torch.device) -> _Plan:
    from . import kernels

    tables = site.tables
    widest = max([table.width for table in tables])
    block_n = min(_BYTES // site.dtype.itemsize, 1 << (widest - 1).bit_length())
    align = math.gcd(16, *[table.width for table in tables]) if aligned else 1
    firsts = [0, *itertools.accumulate([table.rows for table in tables])]
    key_dtype = torch.int32 if firsts[-1] < 2**31 else torch.int64
    acc = torch.promote_types(site.dtype, torch.float32)
    units = _units_of(tables, block_n, align)
    types = {
        "grads": pointer_type(site.dtype),
        "out": pointer_type(site.dtype),
        "keys": pointer_type(key_dtype),
        "partials": pointer_type(acc),
    }
    types |= dict.fromkeys(("addresses", "tables", "order", "units"), "*i64")
    types |= dict.fromkeys(("M", "chunks"), "i64")
    values = {
        "INDEX": triton_dtype(site.index_dtype),
        "TABLES": len(tables),
        "ALIGN": align,
        "LENGTH": _LENGTH,
    }

    def built(kernel: Any, config: Config, *, aligned: bool) -> Variant:
        return launch.build(
            kernel,
            {name: types[name] for name in kernel.arg_names if name in types},
            values,
            config,
            device_index=site.device_index,
            acc=acc,
            cols=0,
            aligned=aligned,
        )

    runs = Config(block_n=block_n, rows=_ROWS, warps=_WARPS)
    crossing = Config(block_n=block_n, rows=_CROSSING_ROWS, warps=_CROSSING_WARPS)
    rows_of_tables = [table.rows for table in tables]
    return _Plan(
        # The table of addresses may begin at any number of its memory.
        built(kernels.key_lookups_kernel, _KEYS, aligned=False),
        built(kernels.sum_runs_kernel, runs, aligned=aligned),
        built(kernels.sum_crossing_runs_kernel, crossing, aligned=aligned),
        key_dtype,
        acc,
        block_n,
        len(units),
        constants((*firsts[:-1], *rows_of_tables), device, torch.int64),
        constants(tuple(itertools.chain(*units)), device, torch.int64),
    )


def _units_of(tables: Sequence[_Table], block_n: int, align: int) -> list[tuple[int, ...]]:
    """Return the numbers of all units: see `kernels`."""
    units: list[tuple[int, ...]] = []
    start = first_key = 0
    for number, (rows, width, first, padding) in enumerate(tables):
        without = first_key + padding if padding >= 0 else -1
        sizes = width // align, first // align, start // align
        parts = range(-(-width // block_n))
        units += [(number, part, *sizes, first_key, without) for part in parts]
        start += rows * width
        first_key += rows
    return units


# --- the registered operator ----------------------------------------------------------------------


def _empty(grads: Tensor, indices: Sequence[Tensor], tables: Sequence[int]) -> Tensor:
    return grads.new_empty(_elements(_tables_of(tables)))


def _gradients(grads: Tensor, indices: Sequence[Tensor], tables: Sequence[int]) -> Tensor:
    site = _site_of(tuple(tables), grads.dtype, indices[0].dtype, grads.get_device())
    out = grads.new_zeros(site.elements)
    if indices[0].shape[0]:
        on_device(site, _sum, grads, indices, out)  # type: ignore[arg-type]
    return out


_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")
_LIBRARY.define("table_gradients(Tensor grads, Tensor[] indices, int[] tables) -> Tensor")
implement(_LIBRARY, "table_gradients", _gradients, _empty)
