"""From tensors to launches: builds the variant a call needs, allocates its outputs, launches.

Nothing here knows about autograd; `function` and `operators` do. A variant depends on dtypes, absences, hidden size,
alignment and device, never on the number of rows; a plan also on the rows' bucket, in which the best config may be
another. These functions run at every step: they count nanoseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core import launch, tuning
from ..core.launch import SEED_TYPES, Variant, pointer_type, triton_dtype, vector_width
from ..core.layout import as_rows, empty
from ..core.rng import Seed
from ..core.tuning import BUCKET, Question, widths
from . import configs
from .reference import NormRule, accumulator

__all__ = ["Site", "backward", "forward", "site_of"]

_Dtype = torch.dtype | None


@dataclass(frozen=True, eq=False)
class Site:
    """What of a call stays the same from step to step; `site_of` keeps one for each, so identity is equality.

    Attributes:
        rule: the norm and its constants.
        cols: the hidden size N.
        dims: how many trailing dimensions of the first argument make up N.
        save: what is kept for backward: "sum", "output" or "inputs".
        device_index: the GPU, -1 under the interpreter.
        x, bias, residual, weight, ln_bias: the arguments' dtypes, None where absent.
        y, z, acc: the dtypes of output, sum and statistics.
        twin: the dtype of the output's twin, None for no twin.
    """

    rule: NormRule
    cols: int
    dims: int
    save: str
    device_index: int
    x: torch.dtype
    bias: _Dtype
    residual: _Dtype
    weight: _Dtype
    ln_bias: _Dtype
    y: torch.dtype
    z: torch.dtype
    acc: torch.dtype
    twin: _Dtype

    @functools.cached_property
    def pointers(self) -> dict[str, str | None]:
        """Triton's pointer types of the arguments."""
        return {
            name: pointer_type(getattr(self, name))
            for name in ("x", "bias", "residual", "weight", "ln_bias", "y", "z", "twin")
        }

    @functools.cached_property
    def native(self) -> bool:
        """Whether PyTorch's own norm does exactly this on this device."""
        plain = self.rule.rounding == "once" and self.rule.weight_offset == 0.0 and self.normalizes
        plain = plain and (self.weight is not None or self.ln_bias is None)  # as in `reference.normalize`
        dtypes = {d for d in (self.x, self.weight, self.ln_bias, self.y) if d is not None}
        return plain and len(dtypes) == 1 and self.device_index >= 0 and self.bias is None and self.residual is None

    @property
    def normalizes(self) -> bool:
        """Whether there is a norm."""
        return self.rule.kind != "none"


@functools.lru_cache(maxsize=4096)
def site_of(rule: NormRule, cols: int, dims: int, save: str, out_dtype: _Dtype, device_index: int, x: torch.dtype,
            bias: _Dtype, residual: _Dtype, weight: _Dtype, ln_bias: _Dtype, twin: _Dtype = None) -> Site:  # fmt: skip
    """The one site for these choices; an output that has the twin's dtype is its own twin."""
    z = x
    for other in (bias, residual):
        if other is not None:
            z = torch.promote_types(z, other)
    y = out_dtype or rule.output_dtype(z, weight)
    return Site(rule, cols, dims, save, device_index, x, bias, residual, weight, ln_bias, y, z, accumulator(z),
                twin if twin is not y else None)  # fmt: skip


@dataclass(frozen=True)
class _Forward:
    variant: Variant
    rows: int
    tiles: int
    programs: int


@dataclass(frozen=True)
class _Backward:
    variant: Variant
    rows: int
    tiles: int
    programs: int
    rest: Variant | None
    rest_tiles: int
    rest_programs: int
    reduce: Variant | None
    reduce_block: int
    sums: int


_forwards: dict[Any, _Forward] = tuning.register_cache({})
_backwards: dict[Any, _Backward] = tuning.register_cache({})


def forward(
    site: Site,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    ln_bias: Tensor | None,
    seed: Seed | None,
    threshold: int,
    store_sum: bool,
    outs: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """``(y, z, twin, stats)`` from one launch, into ``outs`` where the caller has made them.

    z is None unless ``store_sum``, the twin unless the site has one, stats for no norm.
    """
    if site.device_index >= 0 and site.device_index != launch.current_device():
        with torch.cuda.device(site.device_index):
            return forward(site, x, bias, residual, weight, ln_bias, seed, threshold, store_sum, outs)
    cols = x_stride = residual_stride = site.cols
    if not x.is_contiguous():
        x, x_stride = as_rows(x, site.dims, cols)
    bits = x.data_ptr() | (x_stride << 1)
    if residual is not None:
        if not residual.is_contiguous():
            residual, residual_stride = as_rows(residual, site.dims, cols)
        bits |= residual.data_ptr() | (residual_stride << 1)
    if bias is not None:
        bias = bias if bias.is_contiguous() else bias.contiguous()
        bits |= bias.data_ptr()
    if weight is not None:
        weight = weight if weight.is_contiguous() else weight.contiguous()
        bits |= weight.data_ptr()
    if ln_bias is not None:
        ln_bias = ln_bias if ln_bias.is_contiguous() else ln_bias.contiguous()
        bits |= ln_bias.data_ptr()
    first, second = (seed, None) if seed is None or isinstance(seed, Tensor) else seed
    kind = 0 if seed is None else 1 if second is not None else 2
    rows = x.numel() // cols
    key = (site, kind, bits & 15 == 0, store_sum, BUCKET[rows.bit_length()])
    plan = _forwards.get(key)
    if plan is None:
        plan = tuning.plan(_forwards, key, _plan_forward)

    grid_x = -(-rows // plan.rows)
    if grid_x > plan.programs:
        grid_x = plan.programs
    if site.rule.kind == "none":
        y = empty(x, site.y) if outs is None else outs[0]
        plan.variant(plan.tiles, grid_x, x, bias, residual, y, first, second, threshold, x_stride, residual_stride,
                     rows)  # fmt: skip
        return y, None, None, None
    if outs is None:
        y = empty(x, site.y)
        z = empty(x, site.z) if store_sum else None
        twin = None if site.twin is None else empty(x, site.twin)
        stats = x.new_empty((2 if site.rule.kind == "layer" else 1, rows), dtype=site.acc)
    else:
        y, z, twin, stats = outs  # type: ignore[assignment]
    plan.variant(grid_x, 1, x, bias, residual, weight, ln_bias, y, twin, z, stats, first, second, threshold, x_stride,
                 residual_stride, rows)  # fmt: skip
    return y, z, twin, stats


def backward(  # noqa: C901, one flat path a step, on purpose
    site: Site,
    dy: Tensor | None,
    dsum: Tensor | None,
    dtwin: Tensor | None,
    kept: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    ln_bias: Tensor | None,
    stats: Tensor | None,
    seed: Seed | None,
    threshold: int,
    needs: tuple[bool, bool, bool, bool, bool],
    outs: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """``(dx, dbias, dresidual, dweight, dln_bias)``, None where not needed; into ``outs`` where the caller made them.

    What x and residual share is dresidual's place in ``outs``.
    ``kept`` is the sum, the output or x, as ``site.save`` says; ``bias`` and ``residual`` are given where it is x.
    ``dy`` and ``dtwin`` are gradients of the same numbers.
    """
    if dy is None:
        dy, dtwin = dtwin, None
    if site.device_index >= 0 and site.device_index != launch.current_device():
        with torch.cuda.device(site.device_index):
            return backward(site, dy, dsum, dtwin, kept, bias, residual, weight, ln_bias, stats, seed, threshold, needs,
                            outs)  # fmt: skip
    cols = dy_stride = dsum_stride = dtwin_stride = kept_stride = residual_stride = site.cols
    bits = 0
    if dy is not None:
        if not dy.is_contiguous():
            dy, dy_stride = as_rows(dy, site.dims, cols)
        bits |= dy.data_ptr() | (dy_stride << 1)
    if dsum is not None:
        if not dsum.is_contiguous():
            dsum, dsum_stride = as_rows(dsum, site.dims, cols)
        bits |= dsum.data_ptr() | (dsum_stride << 1)
    if dtwin is not None:
        if not dtwin.is_contiguous():
            dtwin, dtwin_stride = as_rows(dtwin, site.dims, cols)
        bits |= dtwin.data_ptr() | (dtwin_stride << 1)
    if kept is not None:
        if not kept.is_contiguous():
            kept, kept_stride = as_rows(kept, site.dims, cols)
        bits |= kept.data_ptr() | (kept_stride << 1)
    if residual is not None:
        if not residual.is_contiguous():
            residual, residual_stride = as_rows(residual, site.dims, cols)
        bits |= residual.data_ptr() | (residual_stride << 1)
    if bias is not None:
        bias = bias if bias.is_contiguous() else bias.contiguous()
        bits |= bias.data_ptr()
    if weight is not None:
        weight = weight if weight.is_contiguous() else weight.contiguous()
        bits |= weight.data_ptr()
    if ln_bias is not None:
        ln_bias = ln_bias if ln_bias.is_contiguous() else ln_bias.contiguous()
        bits |= ln_bias.data_ptr()
    first, second = (seed, None) if seed is None or isinstance(seed, Tensor) else seed
    kind = 0 if seed is None else 1 if second is not None else 2
    like: Tensor = dy if dy is not None else dsum  # type: ignore[assignment]
    rows = like.numel() // cols
    key = (site, needs, None if dy is None else dy.dtype, None if dsum is None else dsum.dtype,
           None if dtwin is None else dtwin.dtype, kind, bits & 15 == 0, BUCKET[rows.bit_length()])  # fmt: skip
    plan = _backwards.get(key)
    if plan is None:
        plan = tuning.plan(_backwards, key, _plan_backward)

    needs_x, needs_bias, needs_residual, needs_weight, needs_ln_bias = needs
    # Without dropout x and residual get the same gradient; equal dtypes share one tensor, as in PyTorch's add.
    shared = needs_residual and seed is None and site.x is site.residual
    if outs is None:
        dx = empty(like, site.x) if needs_x and not shared else None
        dresidual = empty(like, site.residual) if needs_residual else None
        dbias = like.new_empty(cols, dtype=site.bias) if needs_bias else None
        # Where only the sum has a gradient, the norm's parameters did not make it.
        dweight = torch.empty_like(weight) if needs_weight and dy is not None else None  # type: ignore[arg-type]
        dln_bias = torch.empty_like(ln_bias) if needs_ln_bias and dy is not None else None  # type: ignore[arg-type]
    else:
        dx, dbias, dresidual, dweight, dln_bias = outs
    moments = partials = None
    row_tiles = -(-rows // plan.rows)
    programs = rest_programs = 1
    # Few rows are one program's work: it stores the column sums itself.
    if row_tiles > 2:
        programs, rest_programs = min(row_tiles, plan.programs), plan.rest_programs
        if plan.reduce is not None:
            partials = like.new_empty((max(programs, rest_programs), plan.sums, cols), dtype=site.acc)
    if plan.rest is not None:
        moments = torch.empty_like(stats)  # type: ignore[arg-type]
    arguments = (dy, dtwin, dsum, kept, bias, residual, weight, ln_bias, stats, moments, dx, dresidual, dbias, dweight,
                 dln_bias, partials if partials is not None else like, first, second, threshold, dy_stride,
                 dtwin_stride, dsum_stride, kept_stride, residual_stride, rows)  # fmt: skip
    plan.variant(programs, plan.tiles, *arguments)
    if plan.rest is not None:
        plan.rest(rest_programs, plan.rest_tiles, *arguments)
    if partials is not None:
        plan.reduce(-(-cols // plan.reduce_block), plan.sums, partials, dbias, dweight, dln_bias, programs,
                    rest_programs)  # type: ignore[misc]  # fmt: skip
    return dresidual if shared and needs_x else dx, dbias, dresidual, dweight, dln_bias


# --- the variants behind the keys ---------------------------------------------------------------------------------


tuning.register(configs, "norm_forward", "dropout_add", "norm_backward", "norm_backward_rest")


def _build(kernel: Any, types: dict[str, str | None], constants: dict[str, Any], config: tuning.Config, site: Site,
           aligned: bool) -> Variant:  # fmt: skip
    return launch.build(kernel, types, constants, config, device_index=site.device_index, acc=site.acc, cols=site.cols,
                        aligned=aligned)  # fmt: skip


def _plan_forward(site: Site, seed: int, aligned: bool, store_sum: bool, bucket: int) -> _Forward:
    from . import kernels

    rule, cols = site.rule, site.cols
    types = {
        **site.pointers,
        "z": site.pointers["z"] if store_sum else None,
        "stats": pointer_type(site.acc),
        **SEED_TYPES[seed],
        "threshold": "i32",
        "x_stride": "i64",
        "residual_stride": "i64",
        "M": "i64",
    }
    # Whether the sum is written is not asked: training and inference take one config, and so compute the same bits.
    parts = ("dropout" if seed else "plain", "alone" if site.residual is None else "adds")
    moved = widths(site.x.itemsize, site.z.itemsize, site.y.itemsize)
    width = vector_width(site.x, site.residual)
    if not site.normalizes:
        config = tuning.choose(Question("dropout_add", parts, moved, cols, bucket), site.device_index)
        variant = _build(kernels.dropout_add_kernel, types, {"VECTOR": width}, config, site, aligned)
        return _Forward(variant, config.rows, -(-cols // config.block_n), 2**31 - 1)
    config = tuning.choose(Question("norm_forward", (rule.kind, *parts), moved, cols, bucket), site.device_index)
    constants = {
        "KIND": rule.kind,
        "EPS": float(rule.eps),
        "WEIGHT_OFFSET": float(rule.weight_offset),
        "WEIGHT": triton_dtype(site.weight or site.acc),
        "SUM": triton_dtype(site.z),
        "HAT": triton_dtype(rule.hat_dtype(site.z, site.weight)),
        "VECTOR": width,
        "PERSISTENT": config.per_sm > 0,
    }
    variant = _build(kernels.norm_forward_kernel, types, constants, config, site, aligned)
    programs = launch.processors(site.device_index) * config.per_sm if config.per_sm else 2**31 - 1
    return _Forward(variant, config.rows, 1, programs)


def _backward_question(site: Site, seed: int, sums: int, bucket: int, moved: tuple[_Dtype, ...]) -> Question:
    """``moved`` are the dtypes of the large tensors, in and out: what a backward's traffic is."""
    there = [dtype for dtype in moved if dtype is not None]
    # Without dy there is nothing to normalise, whatever the forward did.
    kind = "none" if moved[0] is None else site.rule.kind
    parts = (kind, "dropout" if seed else "plain", f"{sums} sums", f"{len(there)} moved")
    return Question("norm_backward", parts, widths(*sorted({d.itemsize for d in there})), site.cols, bucket)


def _plan_backward(site: Site, needs: tuple[bool, ...], dy: _Dtype, dsum: _Dtype, dtwin: _Dtype, seed: int,
                   aligned: bool, bucket: int) -> _Backward:  # fmt: skip
    from ..core.kernels import sum_partials_kernel
    from . import kernels

    rule, cols = site.rule, site.cols
    normalizes = site.normalizes and dy is not None
    needs_x, needs_bias, needs_residual, needs_weight, needs_ln_bias = needs
    shared = needs_residual and seed == 0 and site.x is site.residual
    sums = needs_bias + (needs_weight + needs_ln_bias if dy is not None else 0)
    kept = {"sum": site.z, "output": site.y, "inputs": site.x}[site.save] if normalizes else None
    inputs = normalizes and site.save == "inputs"
    read = [d for d in (dy, dtwin, dsum, kept) if d is not None]
    question = _backward_question(site, seed, sums, bucket, (
        dy, dtwin, dsum, kept, site.residual if inputs else None, site.x if needs_x and not shared else None,
        site.residual if needs_residual else None))  # fmt: skip
    config = rest_config = tuning.choose(question, site.device_index)
    cut = normalizes and config.block_n < cols
    if cut:
        rest_config = tuning.choose(replace(question, kernel="norm_backward_rest"), site.device_index)
    reduce_config = configs.sum_partials(config.block_n)
    pointers = site.pointers
    types: dict[str, str | None] = {
        "dy": pointer_type(dy),
        "dtwin": pointer_type(dtwin),
        "dsum": pointer_type(dsum),
        "kept": pointer_type(kept),
        "bias": pointers["bias"] if inputs else None,
        "residual": pointers["residual"] if inputs else None,
        "weight": pointers["weight"] if normalizes else None,
        "ln_bias": pointers["ln_bias"] if normalizes and site.save == "output" else None,
        "stats": pointer_type(site.acc) if normalizes else None,
        "moments": pointer_type(site.acc) if cut else None,
        "dx": pointers["x"] if needs_x and not shared else None,
        "dresidual": pointers["residual"] if needs_residual else None,
        "dbias": pointers["bias"] if needs_bias else None,
        "dweight": pointers["weight"] if needs_weight and dy is not None else None,
        "dln_bias": pointers["ln_bias"] if needs_ln_bias and dy is not None else None,
        "partials": pointer_type(site.acc),
        **SEED_TYPES[seed],
        "threshold": "i32",
        **dict.fromkeys(("dy_stride", "dtwin_stride", "dsum_stride", "kept_stride", "residual_stride", "M"), "i64"),
        **dict.fromkeys(("programs", "rest_programs"), "i32"),
    }
    gradients = {place: types[name] for place, name in
                 (("first", "dbias"), ("second", "dweight"), ("third", "dln_bias"))}  # fmt: skip
    constants = {
        "KIND": rule.kind if normalizes else "none",
        "SAVED": site.save,
        "SUM": triton_dtype(site.z),
        "WEIGHT_OFFSET": float(rule.weight_offset),
        "VECTOR": vector_width(*read),
        "FIRST_COL": 0,
        "REST_COL": config.block_n if cut else cols,
    }

    def build(kernel: Callable[..., Any], config: tuning.Config, **more: int) -> Variant:
        return _build(kernel, types | gradients, constants | more, config, site, aligned)

    processors = launch.processors(site.device_index)
    tiles = 1 if normalizes else launch.column_tiles(cols, config.block_n)
    rest_tiles = launch.column_tiles(cols - config.block_n, rest_config.block_n) if cut else 1
    return _Backward(
        variant=build(kernels.norm_backward_kernel, config),
        rows=config.rows,
        tiles=tiles,
        programs=max(2, processors * config.per_sm // tiles),
        rest=build(kernels.norm_backward_kernel, rest_config, FIRST_COL=config.block_n) if cut else None,
        rest_tiles=rest_tiles,
        rest_programs=max(2, processors * rest_config.per_sm // rest_tiles),
        reduce=build(sum_partials_kernel, reduce_config) if sums else None,
        reduce_block=reduce_config.block_n,
        sums=sums,
    )
