"""Sums over rows: each program writes partial sums, and one more kernel adds them up.

Floating-point atomics would add the programs' sums in another order in each call. Here the order
is fixed, so that the same inputs give the same bits::

    program 0   slot 0: sums of N columns | slot 1 | ...
    program 1   slot 0                    | slot 1 | ...
    ...
    programs of the next group of rows
    ---------------------------------------------------- added up along the programs
    gradient    slot 0                    | slot 1 | ...

A slot is one part of one input's gradient. If there are few rows, one program stores the gradients
itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from .addresses import SPREAD, Addresses, Argument
from .kernel import Kernel, slice_source, source_of
from .layouts import offsets_along, row_layout, strides_of
from .planning import Plan
from .structure import Operand, Part, Structure
from .text import indented

__all__ = ["reduce_kernel", "slice_reduction", "stores_of_sums"]


def stores_of_sums(
    addresses: Addresses, sums: Sequence[tuple[int, Part]], subscript: str = ""
) -> list[str]:
    """Return the lines that store a program's sums over rows.

    They are partial sums, as in the picture above. But if one program has all rows, it stores the
    gradients. (With groups of rows, there are always several programs.)

    Args:
        addresses: the addresses of the kernel; they get the gradients' arguments.
        sums: the inputs whose gradients are sums over rows, with their parts, by slot.
        subscript: selects the sums of one tile, if a program has several tiles side by side.
    """
    structure = addresses.structure
    partial, total = [], []
    for slot, (index, part) in enumerate(sums):
        operand = structure.inputs[index]
        value, mask = f"sum{slot}", "in_cols & (cols < 1)"
        if structure.has_columns(operand):
            value, mask = f"sum{slot}{subscript}", "in_cols"
        address = f"partials + (partial_row * {len(sums)} + {slot}) * N + cols"
        if addresses.spreads:
            address += f" + {SPREAD}"
            rows = "< BLOCK_K" if addresses.joins else "== 0"
            mask += f" & (tl.arange(0, ROWS) {rows})[:, None]"
        partial.append(f"tl.store({address}, {value}, mask={mask})")
        if not addresses.group:
            gradient = addresses.argument("gradient", index, f"grad_{operand.name}")
            address = f"{gradient} + {' + '.join(_offsets(structure, operand, part))}"
            if addresses.spreads:
                address += f" + {SPREAD}"
            total.append(f"tl.store({address}, {_rounded(value, gradient)}, mask={mask})")
    if not total:
        return partial
    return ["if programs == 1:", *indented(total), "else:", *indented(partial)]


def _offsets(structure: Structure, operand: Operand, part: Part) -> list[str]:
    """Return the terms of the offset from a gradient's address to the columns of a part."""
    strides, _ = strides_of(structure, operand)
    offset = sum([strides[axis] * position for axis, position in part])
    return [offsets_along(structure, strides) or "cols", str(offset)]


def _rounded(value: str, gradient: str) -> str:
    return f"{value}.to({gradient}.dtype.element_ty)"


def reduce_kernel(plan: Plan, kernel: Kernel) -> Kernel:
    """Return the kernel that adds up the partial sums of a backward.

    Axis 0 of the grid is tiles of columns. Axes 1 and 2 are slots and groups: a program adds up one
    slot, of the programs of one group or of all::

        partials = (programs, slots, N) -> total of a slot = (N,)
    """
    slots = len(kernel.sums)
    inputs = dict.fromkeys(index for index, _ in kernel.sums)
    arguments = [
        Argument("partials", "partials"),
        *[Argument(f"grad{index}", "gradient", index) for index in inputs],
        Argument("chunks", "chunks"),
        Argument("programs", "programs"),
    ]
    grouped_slots = []
    stores = list[str]()
    for slot, (index, part) in enumerate(kernel.sums):
        operand = plan.structure.inputs[index]
        in_group = row_layout(plan.structure, operand, kernel.group) == "group"
        if in_group:
            grouped_slots.append(slot)
        stores.append(f"if slot == {slot}:")
        stores.append(f"    {_total_store(plan.structure, index, part, in_group)}")
    is_grouped = " | ".join([f"(slot == {slot})" for slot in grouped_slots])
    # A slot of the groups is summed over the programs of each group. Any other slot is summed over
    # all programs of the backward, by this kernel's programs of group 0. Its other programs add
    # nothing.
    #
    #   programs of the backward    0 1 2 | 3 4 5 | 6 7 8      three groups, chunks = 3
    #   slot of groups              group 0, 1, 2: three each
    #   slot of all                 group 0: all nine
    count_of_all = "tl.where(group == 0, programs, 0)"
    # Rows of this tile are programs, ROWS at a time, and columns are the row's.
    mask = "(part < count)[:, None] & (cols < N)[None, :]"
    body = [
        "await_predecessor(OVERLAP)",
        "place = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)",
        f"slot = place % {slots}",
        f"group = (place // {slots}).to(tl.int64)",
        "in_group = tl.full((BLOCK_N,), group, tl.int64)",
        "cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)",
        f"grouped = {is_grouped or 'slot < 0'}",
        "first = tl.where(grouped, group * chunks, 0)",
        f"count = tl.where(grouped, tl.minimum(chunks, programs - first), {count_of_all})",
        "sums = tl.zeros((ROWS, BLOCK_N), ACC)",
        "for start in range(0, count, ROWS):",
        "    part = start + tl.arange(0, ROWS)",
        f"    at = ((first + part) * {slots} + slot)[:, None] * N + cols[None, :]",
        f"    sums += tl.load(partials + at, mask={mask}, other=0.0)",
        "total = tl.sum(sums, axis=0)",
        *stores,
    ]
    source = source_of("reduce_kernel", arguments, ("ACC", "N", "BLOCK_N", "ROWS", "OVERLAP"), body)
    return Kernel("reduce_kernel", source, tuple(arguments), kernel.group, sums=kernel.sums)


def slice_reduction(plan: Plan, kernel: Kernel) -> Kernel:
    """Return the function that adds up the partial sums of one slice of many: see `horizontal`.

    Its argument ``program`` is a slot. ``programs`` is the number of programs that the slice had.
    """
    slots = len(kernel.sums)
    inputs = dict.fromkeys(index for index, _ in kernel.sums)
    arguments = [
        Argument("partials", "partials"),
        *[Argument(f"grad{index}", "gradient", index) for index in inputs],
    ]
    stores = list[str]()
    for slot, (index, part) in enumerate(kernel.sums):
        stores.append(f"if program == {slot}:")
        stores.append(f"    {_total_store(plan.structure, index, part, grouped=None)}")
    body = [
        "cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)",
        "sums = tl.zeros((ROWS, BLOCK_N), ACC)",
        "for start in range(0, programs, ROWS):",
        "    part = (start + tl.arange(0, ROWS)).to(tl.int64)",
        f"    at = (part * {slots} + program)[:, None] * N + cols[None, :]",
        "    mask = (part < programs)[:, None] & (cols < N)[None, :]",
        "    sums += tl.load(partials + at, mask=mask, other=0.0)",
        "total = tl.sum(sums, axis=0)",
        *stores,
    ]
    constants = ("ACC", "N", "BLOCK_N", "ROWS")
    source = slice_source("reduce_slice", arguments, constants, body)
    return Kernel("reduce_slice", source, tuple(arguments), sums=kernel.sums)


def _total_store(structure: Structure, index: int, part: Part, grouped: bool | None) -> str:
    """Return the store of a slot's total into its part of an input's gradient.

    Args:
        structure: the structure of the function.
        index: the input.
        part: the part of its rows.
        grouped: whether the gradient has a row for each group; None if there are no groups.
    """
    operand = structure.inputs[index]
    terms = [f"grad{index}", *_offsets(structure, operand, part)]
    if grouped:
        _, size = strides_of(structure, operand)
        terms.append(f"group * {size}")
    # A gradient without columns is one number. A gradient that is not per group is stored by the
    # programs of the first group. Slices of one column, whose N is 1, may be beside longer ones.
    is_slice_of_one = grouped is None and not structure.columns
    is_vector = structure.has_columns(operand) or is_slice_of_one
    mask = f"(cols < {'N' if is_vector else 1})"
    if grouped is not None:
        mask += f" & (in_group {'< programs // chunks' if grouped else '== 0'})"
    value = _rounded("total", f"grad{index}")
    return f"tl.store({' + '.join(terms)}, {value}, mask={mask})"
