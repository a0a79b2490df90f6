"""From tensors to launches: builds the variant a call needs, allocates its outputs, launches.

Nothing here knows about autograd; `ops` does. A call's variant depends on dtypes, absences, hidden size, alignment
and device, never on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core import launch, tuning
from ..core.launch import Variant
from ..core.rng import Seed
from . import configs
from .reference import NormRule, accumulator

__all__ = ["Options", "backward", "forward"]

_TRITON_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


@dataclass(frozen=True, eq=False)
class Options:
    """What of a call stays the same from step to step; `ops` keeps one object for each, so identity is equality.

    Attributes:
        rule: the norm and its constants.
        cols: the hidden size N.
        dims: how many trailing dimensions of the first argument make up N.
        save: what is kept for backward: "sum", "output" or "inputs".
        store_sum: whether the forward writes the sum out, because it is returned or kept.
        out_dtype: the output's dtype, None for the rule's own.
    """

    rule: NormRule
    cols: int
    dims: int
    save: str
    store_sum: bool
    out_dtype: torch.dtype | None


@dataclass(frozen=True)
class _Forward:
    variant: Variant
    rows: int
    tiles: int
    y_dtype: torch.dtype
    z_dtype: torch.dtype
    acc: torch.dtype


@dataclass(frozen=True)
class _Backward:
    variant: Variant
    stats: Variant | None
    stats_rows: int
    reduce: Variant | None
    reduce_block: int
    rows: int
    tiles: int
    programs: int
    sums: int
    acc: torch.dtype


_forwards: dict[Any, _Forward] = tuning.register_cache({})
_backwards: dict[Any, _Backward] = tuning.register_cache({})


def _as_rows(t: Tensor, dims: int, cols: int) -> tuple[Tensor, int]:
    """The tensor with its trailing ``dims`` dimensions contiguous and its rows one stride apart, and that stride."""
    if t.is_contiguous():
        return t, cols
    sizes, strides = t.shape, t.stride()
    if dims == 1 and (strides[-1] == 1 or cols == 1):
        lead = [(size, stride) for size, stride in zip(sizes[:-1], strides[:-1], strict=True) if size != 1]
        if not lead:
            return t, cols
        if all(a[1] == b[0] * b[1] for a, b in zip(lead, lead[1:], strict=False)):
            return t, lead[-1][1]
    return t.contiguous(), cols


def _vector(t: Tensor | None) -> Tensor | None:
    return t if t is None or t.is_contiguous() else t.contiguous()


def _dtype(t: Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def _pointer(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else launch.pointer_type(dtype)


def _triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return getattr(tl, {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}.get(
        dtype, "float64"))  # fmt: skip


def _seed_types(seed: str) -> dict[str, str | None]:
    """Types of the seed and offset arguments: absent, two scalars, or one tensor that holds both."""
    return {
        "none": {"seed": None, "offset": None},
        "scalars": {"seed": "i64", "offset": "i64"},
        "tensor": {"seed": "*i64", "offset": None},
    }[seed]


def _seed_arguments(seed: Seed | None) -> tuple[str, Any, Any]:
    if seed is None:
        return "none", None, None
    if isinstance(seed, Tensor):
        return "tensor", seed, None
    return "scalars", seed[0], seed[1]


def _vector_width(*dtypes: torch.dtype | None) -> int:
    """Neighbouring columns a thread holds: 16 bytes of the narrowest tensor, as Triton's coalescing has it."""
    return 8 if min(d.itemsize for d in dtypes if d is not None) == 2 else 4


def _key(*parts: Any) -> str:
    return "|".join(_TRITON_NAMES[p] if isinstance(p, torch.dtype) else str(p) for p in parts)


def forward(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    ln_bias: Tensor | None,
    seed: Seed | None,
    threshold: int,
    options: Options,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``(y, z, stats)`` from one launch; z is None unless ``options.store_sum``, stats None for no norm."""
    device_index = x.get_device()
    if device_index >= 0 and device_index != launch.current_device():
        with torch.cuda.device(device_index):
            return forward(x, bias, residual, weight, ln_bias, seed, threshold, options)
    cols = options.cols
    x, x_stride = _as_rows(x, options.dims, cols)
    bits = x.data_ptr() | (x_stride << 1)
    residual_stride = 0
    if residual is not None:
        residual, residual_stride = _as_rows(residual, options.dims, cols)
        bits |= residual.data_ptr() | (residual_stride << 1)
    bias, weight, ln_bias = _vector(bias), _vector(weight), _vector(ln_bias)
    for vector in (bias, weight, ln_bias):
        if vector is not None:
            bits |= vector.data_ptr()
    kind, seed_argument, offset = _seed_arguments(seed)
    key = (options, x.dtype, _dtype(bias), _dtype(residual), _dtype(weight), _dtype(ln_bias), kind, device_index,
           bits & 15 == 0)  # fmt: skip
    plan = _forwards.get(key)
    if plan is None:
        plan = _forwards[key] = _plan_forward(*key)

    rows = x.numel() // cols
    y = torch.empty_like(x, dtype=plan.y_dtype, memory_format=torch.contiguous_format)
    z = stats = None
    scalars = (seed_argument, offset, threshold, x_stride, residual_stride, rows)
    grid_x = -(-rows // plan.rows)
    if options.rule.kind == "none":
        plan.variant(grid_x, plan.tiles, (x, bias, residual, y), scalars)
        return y, None, None
    if options.store_sum:
        z = torch.empty_like(x, dtype=plan.z_dtype, memory_format=torch.contiguous_format)
    stats = torch.empty((2 if options.rule.kind == "layer" else 1, rows), dtype=plan.acc, device=x.device)
    plan.variant(grid_x, 1, (x, bias, residual, weight, ln_bias, y, z, stats), scalars)
    return y, z, stats


def _plan_forward(
    options: Options,
    x: torch.dtype,
    bias: torch.dtype | None,
    residual: torch.dtype | None,
    weight: torch.dtype | None,
    ln_bias: torch.dtype | None,
    seed: str,
    device_index: int,
    aligned: bool,
) -> _Forward:
    from . import kernels

    rule, cols = options.rule, options.cols
    z_dtype = x
    for other in (bias, residual):
        if other is not None:
            z_dtype = torch.promote_types(z_dtype, other)
    acc = accumulator(z_dtype)
    y_dtype = options.out_dtype or rule.output_dtype(z_dtype, weight)
    normalizes = rule.kind != "none"
    name = "norm_forward" if normalizes else "dropout_add"
    heuristic = (lambda: configs.forward(cols, x.itemsize)) if normalizes else lambda: configs.dropout_add(
        cols, x.itemsize)  # fmt: skip
    config = tuning.choose(name, _key(rule.kind, x, seed != "none", cols), device_index, heuristic)
    types = {
        "x": _pointer(x),
        "bias": _pointer(bias),
        "residual": _pointer(residual),
        "weight": _pointer(weight),
        "ln_bias": _pointer(ln_bias),
        "y": _pointer(y_dtype),
        "z": _pointer(z_dtype) if options.store_sum else None,
        "stats": _pointer(acc),
        **_seed_types(seed),
        "threshold": "i32",
        "x_stride": "i64",
        "residual_stride": "i64",
        "M": "i64",
    }
    constants: dict[str, Any] = {
        "ACC": _triton_dtype(acc),
        "N": cols,
        "BLOCK_N": config.block_n,
        "ROWS": config.rows,
        "VECTOR": _vector_width(x, residual),
    }
    if normalizes:
        constants |= {
            "KIND": rule.kind,
            "EPS": float(rule.eps),
            "WEIGHT_OFFSET": float(rule.weight_offset),
            "SUM": _triton_dtype(acc if rule.rounding == "once" else z_dtype),
            "HAT": _triton_dtype(rule.hat_dtype(z_dtype, weight)),
        }
    kernel = kernels.norm_forward_kernel if normalizes else kernels.dropout_add_kernel
    variant = _build(kernel, types, constants, config, device_index, aligned)
    return _Forward(variant, config.rows, -(-cols // config.block_n), y_dtype, z_dtype, acc)


def _build(
    kernel: Any,
    types: dict[str, str | None],
    constants: dict[str, Any],
    config: tuning.Config,
    device_index: int,
    aligned: bool,
) -> Variant:
    """Builds a variant; with ``aligned`` every address is a multiple of 16 and every stride of 8."""
    divisible = {name: 16 if kind[0] == "*" else 8 for name, kind in types.items()
                 if kind and (kind[0] == "*" or name.endswith("_stride"))}  # fmt: skip
    return Variant(
        kernel,
        types,
        {name: constants[name] for name in kernel.arg_names if name in constants},
        num_warps=config.warps,
        num_stages=config.stages,
        device_index=device_index,
        divisible=divisible if aligned else {},
    )


@dataclass(frozen=True, eq=False)
class Needs:
    """Which gradients a backward must give; `ops` keeps one object for each combination."""

    x: bool
    bias: bool
    residual: bool
    weight: bool
    ln_bias: bool


@dataclass(frozen=True, eq=False)
class Dtypes:
    """The dtypes of the arguments whose gradients are asked; one object for each combination."""

    x: torch.dtype
    bias: torch.dtype | None
    residual: torch.dtype | None


def backward(
    dy: Tensor | None,
    dsum: Tensor | None,
    kept: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    ln_bias: Tensor | None,
    stats: Tensor | None,
    seed: Seed | None,
    threshold: int,
    needs: Needs,
    dtypes: Dtypes,
    options: Options,
) -> tuple[Tensor | None, ...]:
    """``(dx, dbias, dresidual, dweight, dln_bias)``, None where not needed.

    ``kept`` is the sum, the output or x, as ``options.save`` says; ``bias`` and ``residual`` are given where x is.
    """
    first = dy if dy is not None else dsum
    assert first is not None
    device_index = first.get_device()
    if device_index >= 0 and device_index != launch.current_device():
        with torch.cuda.device(device_index):
            return backward(dy, dsum, kept, bias, residual, weight, ln_bias, stats, seed, threshold, needs, dtypes,
                            options)  # fmt: skip
    cols, dims = options.cols, options.dims
    strides = [0, 0, 0, 0]
    wide = [dy, dsum, kept, residual]
    bits = 0
    for i, t in enumerate(wide):
        if t is not None:
            wide[i], strides[i] = _as_rows(t, dims, cols)
            bits |= wide[i].data_ptr() | (strides[i] << 1)  # type: ignore[union-attr]
    dy, dsum, kept, residual = wide
    bias, weight, ln_bias = _vector(bias), _vector(weight), _vector(ln_bias)
    for vector in (bias, weight, ln_bias):
        if vector is not None:
            bits |= vector.data_ptr()
    kind, seed_argument, offset = _seed_arguments(seed)
    key = (options, needs, dtypes, _dtype(dy), _dtype(dsum), _dtype(kept), _dtype(weight), _dtype(ln_bias), kind,
           device_index, bits & 15 == 0)  # fmt: skip
    plan = _backwards.get(key)
    if plan is None:
        plan = _backwards[key] = _plan_backward(*key)

    rows = first.numel() // cols
    dx = dresidual = dbias = dweight = dln_bias = moments = partials = None
    if needs.residual:
        dresidual = torch.empty_like(first, dtype=dtypes.residual, memory_format=torch.contiguous_format)
    # Without dropout both get the same gradient; equal dtypes share one tensor, as in PyTorch's add.
    shared = needs.residual and seed is None and dtypes.x == dtypes.residual
    if needs.x and not shared:
        dx = torch.empty_like(first, dtype=dtypes.x, memory_format=torch.contiguous_format)
    if needs.bias:
        dbias = torch.empty(cols, dtype=dtypes.bias, device=first.device)
    if needs.weight:
        dweight = torch.empty_like(weight)  # type: ignore[arg-type]
    if needs.ln_bias:
        dln_bias = torch.empty_like(ln_bias)  # type: ignore[arg-type]
    tiles = -(-rows // plan.rows)
    programs = 1 if tiles <= 2 else min(tiles, plan.programs)
    if plan.sums and programs > 1:
        partials = torch.empty((programs, plan.sums, cols), dtype=plan.acc, device=first.device)
    scalars = (seed_argument, offset, threshold, *strides, rows)
    if plan.stats is not None:
        moments = torch.empty_like(stats)  # type: ignore[arg-type]
        grid_x = -(-rows // plan.stats_rows)
        plan.stats(grid_x, 1, (dy, kept, bias, residual, weight, ln_bias, stats, moments),
                   (seed_argument, offset, threshold, strides[0], strides[2], strides[3], rows))  # fmt: skip
    # With one program nothing is partial; the argument must still be an address.
    plan.variant(
        programs,
        plan.tiles,
        (dy, dsum, kept, bias, residual, weight, ln_bias, stats, moments, dx, dresidual, dbias, dweight, dln_bias,
         partials if partials is not None else (stats if stats is not None else first)),
        scalars,
    )  # fmt: skip
    if partials is not None and plan.reduce is not None:
        plan.reduce(-(-cols // plan.reduce_block), plan.sums, (partials, dbias, dweight, dln_bias), (programs,))
    if shared and needs.x:
        dx = dresidual
    return dx, dbias, dresidual, dweight, dln_bias


def _plan_backward(
    options: Options,
    needs: Needs,
    dtypes: Dtypes,
    dy: torch.dtype | None,
    dsum: torch.dtype | None,
    kept: torch.dtype | None,
    weight: torch.dtype | None,
    ln_bias: torch.dtype | None,
    seed: str,
    device_index: int,
    aligned: bool,
) -> _Backward:
    from . import kernels

    rule, cols, save = options.rule, options.cols, options.save
    normalizes = rule.kind != "none" and dy is not None
    shared = needs.residual and seed == "none" and dtypes.x == dtypes.residual
    sums = needs.bias + needs.weight + needs.ln_bias
    sum_dtype = dtypes.x
    for other in (dtypes.bias, dtypes.residual):
        if other is not None:
            sum_dtype = torch.promote_types(sum_dtype, other)
    acc = accumulator(sum_dtype)
    widths = [d for d in (dy, dsum, kept) if d is not None]
    narrowest = min(d.itemsize for d in widths)
    key = _key(rule.kind, dtypes.x, seed != "none", sums, cols)
    config = tuning.choose("norm_backward", key, device_index,
                           lambda: configs.backward(cols, narrowest, sums, normalizes))  # fmt: skip
    apart = normalizes and config.block_n < cols
    inputs = normalizes and save == "inputs"
    common: dict[str, str | None] = {
        "dy": _pointer(dy),
        "kept": _pointer(kept) if normalizes else None,
        "bias": _pointer(dtypes.bias) if inputs else None,
        "residual": _pointer(dtypes.residual) if inputs else None,
        "weight": _pointer(weight) if normalizes else None,
        "ln_bias": _pointer(ln_bias) if normalizes and save == "output" else None,
        "stats": _pointer(acc) if normalizes else None,
        "moments": _pointer(acc) if apart else None,
        **_seed_types(seed),
        "threshold": "i32",
        "dy_stride": "i64",
        "kept_stride": "i64",
        "residual_stride": "i64",
        "M": "i64",
    }
    types = common | {
        "dsum": _pointer(dsum),
        "dx": _pointer(dtypes.x) if needs.x and not shared else None,
        "dresidual": _pointer(dtypes.residual) if needs.residual else None,
        "dbias": _pointer(dtypes.bias) if needs.bias else None,
        "dweight": _pointer(weight) if needs.weight else None,
        "dln_bias": _pointer(ln_bias) if needs.ln_bias else None,
        "partials": _pointer(acc),
        "dsum_stride": "i64",
    }
    constants: dict[str, Any] = {
        "KIND": rule.kind if normalizes else "none",
        "SAVED": save,
        "WEIGHT_OFFSET": float(rule.weight_offset),
        "ACC": _triton_dtype(acc),
        "N": cols,
        "VECTOR": _vector_width(*widths),
    }

    def build(kernel: Any, config: tuning.Config, types: dict[str, str | None]) -> Variant:
        every = constants | {"BLOCK_N": config.block_n, "ROWS": config.rows, "STAGES": config.stages}
        return _build(kernel, types, every, config, device_index, aligned)

    tiles = -(-cols // config.block_n)
    stats = None
    stats_config = tuning.choose("norm_backward_stats", key, device_index,
                                 lambda: configs.backward_stats(cols, narrowest))  # fmt: skip
    if apart:
        stats = build(kernels.norm_backward_stats_kernel, stats_config, common)
    variant = build(kernels.norm_backward_kernel, config, types)
    reduce = None
    reduce_config = configs.sum_partials(cols)
    if sums:
        pointers = {name: types[name] for name in ("partials", "dbias", "dweight", "dln_bias")}
        reduce = build(kernels.sum_partials_kernel, reduce_config, {**pointers, "programs": "i32"})
    programs = max(1, launch.processors(device_index) * config.per_sm // tiles)
    return _Backward(variant, stats, stats_config.rows, reduce, reduce_config.block_n, config.rows, tiles, programs,
                     sums, acc)  # fmt: skip
