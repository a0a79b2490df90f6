"""From tensors to launches: builds the variant a call needs, allocates its outputs, launches.

Nothing here knows about autograd; `function` and `operators` do. A variant depends on dtypes, absences, widths,
alignment and device, never on the number of rows; a plan also on the rows' bucket, in which the best config may be
another. These functions run at every step: they count nanoseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import launch, layout, tuning
from ..core.activations import ACTIVATIONS, Activation, device_functions
from ..core.launch import Variant, pointer_type, triton_dtype
from ..core.tuning import BUCKET
from . import configs
from .addresses import Addresses, gather
from .reference import accumulator
from .widths import Groups, Widths

__all__ = ["Site", "apart", "backward", "forward", "site_of"]

_Dtype = torch.dtype | None


@dataclass(frozen=True, eq=False)
class Site:
    """What of a call stays the same from step to step; `site_of` keeps one for each, so identity is equality.

    Attributes:
        widths: the widths of the slices.
        dims: trailing dimensions of the one tensor that hold the slices, 1 or 2; 0 for a sequence of tensors.
        concat: whether the output is one tensor with the slices side by side.
        eps: added to the variance.
        activation: what follows the norm.
        shared: whether all slices have the same parameters.
        device_index: the GPU, -1 under the interpreter.
        x, weight, bias: the arguments' dtypes, None where absent.
        y, acc: the dtypes of output and statistics.
    """

    widths: Widths
    dims: int
    concat: bool
    eps: float
    activation: Activation
    shared: bool
    device_index: int
    x: torch.dtype
    weight: _Dtype
    bias: _Dtype
    y: torch.dtype
    acc: torch.dtype

    @property
    def apart(self) -> bool:
        """Whether the outputs are tensors of their own."""
        return self.dims == 0 and not self.concat


@functools.lru_cache(maxsize=4096)
def site_of(widths: Widths, dims: int, concat: bool, eps: float, activation: str, shared: bool, out_dtype: _Dtype,
            device_index: int, x: torch.dtype, weight: _Dtype, bias: _Dtype) -> Site:  # fmt: skip
    """The one site for these choices."""
    return Site(widths, dims, concat, eps, ACTIVATIONS[activation], shared, device_index, x, weight, bias,
                out_dtype or x, accumulator(x))  # fmt: skip


class _Forward(NamedTuple):
    variant: Variant
    rows: int
    groups: int
    programs: int
    table: Tensor | None


class _Backward(NamedTuple):
    variant: Variant
    rows: int
    groups: int
    programs: int
    table: Tensor | None
    reduce: Variant | None
    reduce_block: int
    sums: int


_forwards: dict[Any, _Forward] = tuning.register_cache({})
_backwards: dict[Any, _Backward] = tuning.register_cache({})


class _Rows(NamedTuple):
    """Rows that a kernel reads: in one tensor, so far apart, or where a table says.

    ``bits`` and ``pitches`` have a bit set wherever an address and a distance between rows has one. ``kept`` are the
    tensors that a table leads to: they must live until the launch.
    """

    tensor: Tensor | None
    pitch: int
    addresses: Addresses | None
    bits: int
    pitches: int
    kept: Any

    @property
    def table(self) -> Tensor | None:
        return None if self.addresses is None else self.addresses.table

    @property
    def strided(self) -> bool:
        return self.addresses is not None and self.addresses.strided


def _joint(t: Tensor, dims: int, total: int) -> _Rows:
    """One tensor, whose trailing ``dims`` dimensions hold the slices side by side."""
    pitch = total
    if not t.is_contiguous():
        t, pitch = layout.as_rows(t.flatten(-2) if dims == 2 else t, 1, total)
    return _Rows(t, pitch, None, t.data_ptr(), pitch, None)


def _separate(slices: Sequence[Tensor | None], sizes: tuple[int, ...], site: Site, device: torch.device,
              known: Addresses | None) -> _Rows:  # fmt: skip
    """A tensor for each slice; None, for a gradient that is zero, has the address 0."""
    pitches = None
    plain = [t for t in slices if t is not None and t.is_contiguous()]
    if len(plain) == len(slices):
        pointers = tuple([t.data_ptr() for t in plain])
    else:
        laid = [t if t is None else layout.as_rows(t, 1, size) for t, size in zip(slices, sizes, strict=True)]
        pointers = tuple([0 if t is None else t[0].data_ptr() for t in laid])
        pitches = tuple([size if t is None else t[1] for t, size in zip(laid, sizes, strict=True)])
        pitches = None if pitches == sizes else pitches
        slices = [t if t is None else t[0] for t in laid]
    addresses = gather(site.device_index, device, pointers, pitches, known)
    return _Rows(None, 0, addresses, addresses.bits, addresses.pitches, slices)


def _aligned(site: Site, weight: Tensor | None, bias: Tensor | None, *rows: _Rows) -> bool:
    """Whether all addresses are multiples of 16, and all distances between rows of what the widths are multiples of."""
    bits = 0 if weight is None else weight.data_ptr()
    if bias is not None:
        bits |= bias.data_ptr()
    pitches = 0
    for each in rows:
        bits |= each.bits
        pitches |= each.pitches
    return bits & 15 == 0 and pitches & (site.widths.align - 1) == 0


def forward(site: Site, slices: Sequence[Tensor], weight: Tensor | None,
            bias: Tensor | None) -> tuple[Tensor, Addresses | None]:  # fmt: skip
    """The output from one launch, and where the slices lie; outputs that are `apart` come in one buffer."""
    if site.device_index >= 0 and site.device_index != launch.current_device():
        with torch.cuda.device(site.device_index):
            return forward(site, slices, weight, bias)
    widths, first = site.widths, slices[0]
    if site.dims:
        rows = first.numel() // widths.total
        x = _joint(first, site.dims, widths.total)
    else:
        rows = first.numel() // widths.sizes[0]
        x = _separate(slices, widths.sizes, site, first.device, None)
    weight = weight if weight is None or weight.is_contiguous() else weight.contiguous()
    bias = bias if bias is None or bias.is_contiguous() else bias.contiguous()
    aligned = _aligned(site, weight, bias, x)
    unit = widths.align if aligned else 1
    key = (site, aligned, x.strided, (x.pitches | widths.total) < _FAR, BUCKET[rows.bit_length()])
    plan = _forwards.get(key)
    if plan is None:
        plan = tuning.plan(_forwards, key, _plan_forward, first.device)
    if site.apart:
        y = first.new_empty(rows * widths.total, dtype=site.y)
    elif site.concat and site.dims != 1:
        y = first.new_empty((*first.shape[: -2 if site.dims else -1], widths.total), dtype=site.y)
    else:
        y = layout.empty(first, site.y)
    programs = min(-(-rows // plan.rows), plan.programs)
    plan.variant(plan.groups, programs, x.tensor, x.table, plan.table, weight, bias, y, x.pitch // unit,
                 widths.total // unit, len(widths), rows)  # fmt: skip
    return y, x.addresses


def apart(site: Site, buffer: Tensor, slices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors of which ``buffer`` holds one after the other, in the shapes of ``slices``.

    They share its memory, none of it twice, and nothing else: autograd is not to take them for views, whose change in
    place it would refuse, or take for a change of all.
    """
    with torch._C._AutoDispatchBelowADInplaceOrView():
        if site.widths.uniform:
            return buffer.view(len(slices), *slices[0].shape).unbind(0)
        return tuple(torch._C._nn.unflatten_dense_tensors(buffer, list(slices)))


def backward(
    site: Site,
    dy: Tensor | Sequence[Tensor | None],
    slices: Sequence[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    needs: tuple[bool, bool, bool],
    known: Addresses | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``(dx, dweight, dbias)``, None where not needed; dx of a sequence in one buffer, as `apart` takes it.

    ``dy`` is one tensor, a buffer of the slices' gradients if they are `apart`, or a sequence of these, None for zero.
    ``known`` is where the forward found the slices.
    """
    if site.device_index >= 0 and site.device_index != launch.current_device():
        with torch.cuda.device(site.device_index):
            return backward(site, dy, slices, weight, bias, needs, known)
    widths, first = site.widths, slices[0]
    total = widths.total
    if site.dims:
        rows = first.numel() // total
        x = _joint(first, site.dims, total)
    else:
        rows = first.numel() // widths.sizes[0]
        x = _separate(slices, widths.sizes, site, first.device, known)
    if isinstance(dy, Tensor):
        g = _joint(dy, 2 if site.dims == 2 and not site.concat else 1, dy.numel() if site.apart else total)
        g = g._replace(pitch=total, pitches=0) if site.apart else g
        dy_dtype = dy.dtype
    else:
        g = _separate(dy, widths.sizes, site, first.device, None)
        dy_dtype = site.y
    weight = weight if weight is None or weight.is_contiguous() else weight.contiguous()
    bias = bias if bias is None or bias.is_contiguous() else bias.contiguous()
    aligned = _aligned(site, weight, bias, x, g)
    unit = widths.align if aligned else 1
    near = (x.pitches | g.pitches | total) < _FAR
    # 1 for a table of gradients, 2 for one with gaps.
    separate = 0 if g.addresses is None else 1 + g.addresses.absent
    key = (site, needs, dy_dtype, separate, aligned, x.strided, g.strided, near, BUCKET[rows.bit_length()])
    plan = _backwards.get(key)
    if plan is None:
        plan = tuning.plan(_backwards, key, _plan_backward, first.device)

    needs_x, needs_weight, needs_bias = needs
    dx = None
    if needs_x:
        dx = layout.empty(first, site.x) if site.dims else first.new_empty(rows * total)
    dweight = torch.empty_like(weight) if needs_weight else None  # type: ignore[arg-type]
    dbias = torch.empty_like(bias) if needs_bias else None  # type: ignore[arg-type]
    row_tiles = -(-rows // plan.rows)
    # Few rows are one program's work: it stores the parameter gradients itself.
    programs = min(row_tiles, plan.programs) if row_tiles > 2 else 1
    parts = programs * plan.groups if site.shared else programs
    partials = None
    if plan.reduce is not None and parts > 1:
        partials = first.new_empty((parts, plan.sums, widths.uniform if site.shared else total), dtype=site.acc)
    unused = dweight if dbias is None else dbias
    plan.variant(plan.groups, programs, g.tensor, g.table, x.tensor, x.table, plan.table, weight, bias, dx, dweight,
                 dbias, unused if partials is None else partials, g.pitch // unit, x.pitch // unit,
                 total // unit, len(widths), rows)  # fmt: skip
    if partials is not None:
        plan.reduce(-(-partials.shape[2] // plan.reduce_block), plan.sums, partials, dweight, dbias, None, parts,
                    0)  # type: ignore[misc]  # fmt: skip
    return dx, dweight, dbias


# --- the variants behind the keys ---------------------------------------------------------------------------------

# Rows closer than this have all of a tile's elements, of which there are fewer than 2**15, within 32 bits.
_FAR = 1 << 16


tuning.register(configs, "slices_forward", "slices_backward")


def _question(site: Site, kernel: str, bucket: int) -> tuning.Question:
    """The widest slice stands for the columns."""
    widths = site.widths
    variant = ("one" if site.dims else "sequence", "equal" if widths.uniform else "mixed",
               "vectors" if widths.align > 1 else "elements")  # fmt: skip
    return tuning.Question(kernel, variant, tuning.widths(site.x.itemsize), widths.widest, bucket)


@functools.lru_cache(maxsize=1024)
def _groups(widths: Widths, config: tuning.Config) -> Groups:
    return Groups.of(widths, config.block_n, config.rows)


@functools.lru_cache(maxsize=1024)
def _group_table(table: tuple[int, ...], device: torch.device) -> Tensor | None:
    return torch.tensor(table, dtype=torch.int32, device="cpu").to(device) if table else None


def _common(
    site: Site, groups: Groups, aligned: bool, strided: bool, near: bool
) -> tuple[dict[str, str | None], dict[str, Any]]:
    """Types and constants that both kernels have."""
    types: dict[str, str | None] = {
        "x": pointer_type(site.x) if site.dims else None,
        "x_addresses": None if site.dims else pointer_type(torch.int64),
        "table": "*i32" if groups.table else None,
        "weight": pointer_type(site.weight),
        "bias": pointer_type(site.bias),
        **dict.fromkeys(("dy_pitch", "x_pitch", "total", "M"), "i64"),
        "K": "i32",
    }
    constants = {
        "EPS": float(site.eps),
        "X": triton_dtype(site.x),
        "D": site.widths.uniform,
        "CLASSES": groups.classes,
        "SHARED": site.shared,
        "STRIDED": strided,
        "GROUPS": groups.count,
        "INDEX": triton_dtype(torch.int32 if near else torch.int64),
        "ALIGN": site.widths.align if aligned else 0,
    }
    return types, constants


def _plan_forward(site: Site, aligned: bool, strided: bool, near: bool, bucket: int,
                  device: torch.device) -> _Forward:  # fmt: skip
    from .kernels import slices_forward_kernel

    widths = site.widths
    config = tuning.choose(_question(site, "slices_forward", bucket), site.device_index)
    groups = _groups(widths, config)
    types, constants = _common(site, groups, aligned, strided, near)
    types["y"] = pointer_type(site.y)
    constants |= {"VALUE": device_functions(site.activation.name)[0], "APART": site.apart,
                  "PERSISTENT": config.per_sm > 0}  # fmt: skip
    variant = launch.build(slices_forward_kernel, types, constants, config, device_index=site.device_index,
                           acc=site.acc, cols=widths.total, aligned=aligned)  # fmt: skip
    programs = 2**31 - 1
    if config.per_sm:
        programs = max(1, launch.processors(site.device_index) * config.per_sm // groups.count)
    return _Forward(variant, groups.shortest, groups.count, programs, _group_table(groups.table, device))


def _plan_backward(site: Site, needs: tuple[bool, bool, bool], dy: torch.dtype, separate: int, aligned: bool,
                   strided: bool, dy_strided: bool, near: bool, bucket: int,
                   device: torch.device) -> _Backward:  # fmt: skip
    from ..core.kernels import sum_partials_kernel
    from .kernels import slices_backward_kernel

    widths = site.widths
    needs_x, needs_weight, needs_bias = needs
    config = tuning.choose(_question(site, "slices_backward", bucket), site.device_index)
    groups = _groups(widths, config)
    types, constants = _common(site, groups, aligned, strided, near)
    sums = needs_weight + needs_bias
    gradients = {"dweight": pointer_type(site.weight) if needs_weight else None,
                 "dbias": pointer_type(site.bias) if needs_bias else None}  # fmt: skip
    types |= gradients | {
        "dy": None if separate else pointer_type(dy),
        "dy_addresses": pointer_type(torch.int64) if separate else None,
        "dx": pointer_type(site.x) if needs_x else None,
        "partials": pointer_type(site.acc) if sums else None,
    }
    constants |= {"DERIVATIVE": device_functions(site.activation.name)[1], "DY": triton_dtype(dy),
                  "DY_APART": site.apart and not separate, "DX_APART": site.dims == 0,
                  "DY_STRIDED": dy_strided, "UNUSED": separate == 2}  # fmt: skip

    def build(kernel: Any, config: tuning.Config, cols: int, **more: Any) -> Variant:
        return launch.build(kernel, types | more, constants | {"REST_COL": cols}, config,
                            device_index=site.device_index, acc=site.acc, cols=cols, aligned=aligned)  # fmt: skip

    reduce_config = configs.sum_partials()
    more = {"first": gradients["dweight"], "second": gradients["dbias"], "third": None,
            **dict.fromkeys(("programs", "rest_programs"), "i32")}  # fmt: skip
    reduced = widths.uniform if site.shared else widths.total
    return _Backward(
        variant=build(slices_backward_kernel, config, widths.total),
        rows=groups.shortest,
        groups=groups.count,
        programs=max(2, launch.processors(site.device_index) * config.per_sm // groups.count),
        table=_group_table(groups.table, device),
        reduce=build(sum_partials_kernel, reduce_config, reduced, **more) if sums else None,
        reduce_block=reduce_config.block_n,
        sums=sums,
    )
