"""The norm family's samples, bad samples, bytes moved and benchmark shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.calls.operators import site_of
from ..core.configs.tuning_key import Grid
from ..core.spec import BadSample, Maker, Sample, Shape, Spec, Sweep, masked
from . import launching, ops, reference
from .operator import NORM
from .reference import Kind, NormRule
from .site import NormConstants

__all__ = ["GRID", "SPECS", "compiled_plans"]

_HALF = (torch.float16, torch.bfloat16)


# --- layer_norm and rms_norm ----------------------------------------------------------------------

_SHAPES = [
    (6, 64),
    (5, 1),
    (1, 3),
    (7, 17),
    (4, 127),
    (3, 1000),
    (2, 3, 96),
    (129, 40),
    (1, 1024),
    (64,),
]
_WIDE_SHAPES = [(3, 8192), (2, 12288), (2, 20000), (1, 65536), (1, 70001)]


def _norm_tensors(
    make: Maker, shape: tuple[int, ...], present: str, dims: int, dtype: torch.dtype, *, layer: bool
) -> dict[str, Any]:
    """Returns the tensors of a sample; absent parameters are None, and `rms_norm` has no bias.

    ``present`` has a "w" if there is a weight, and a "b" if there is a bias. The parameters are in
    ``dtype``.
    """
    tail = shape[-dims:]
    tensors: dict[str, Any] = {"input": make(*shape, shift=0.5, scale=1.5)}
    tensors["weight"] = make(*tail, dtype=dtype) if "w" in present else None
    if layer:
        tensors["bias"] = make(*tail, dtype=dtype) if "b" in present else None
    return tensors


def _norm_samples(layer: bool) -> Callable[[torch.device, torch.dtype], Iterator[Sample]]:
    """Returns the samples of `layer_norm` or `rms_norm`, as a function of device and dtype."""

    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        def sample(
            name: str,
            shape: tuple[int, ...],
            present: str = "wb",
            dims: int = 1,
            param_dtype: torch.dtype | None = None,
            **options: Any,
        ) -> Sample:
            make = Maker(name, device, dtype)
            tensors = _norm_tensors(make, shape, present, dims, param_dtype or dtype, layer=layer)
            return Sample(name, tensors, {"normalized_shape": shape[-dims:], **options})

        for shape in _SHAPES + _WIDE_SHAPES:
            yield sample("shape " + "x".join(map(str, shape)), shape)
        incomplete = ("", "w", "b") if layer else ("",)
        for present in incomplete:
            yield sample(f"parameters {present or 'none'}", (9, 48), present)
            yield sample(f"parameters {present or 'none'} wide", (2, 20000), present)
        yield sample("two normalised dimensions", (3, 4, 6, 8), dims=2)
        yield sample("all dimensions normalised", (4, 10), dims=2)
        yield sample("large eps", (5, 33), eps=0.3)
        if dtype in _HALF:
            yield sample("fp32 parameters", (6, 80), param_dtype=torch.float32)
            yield sample("fp32 parameters wide", (2, 16500), param_dtype=torch.float32)
        if not layer:
            yield sample("weight offset", (6, 72), weight_offset=1.0)
            for rounding in ("llama", "t5"):
                yield sample(f"{rounding} rounding", (6, 72), rounding=rounding)
                if dtype in _HALF:
                    yield sample(
                        f"{rounding} rounding, fp32 weight",
                        (6, 72),
                        rounding=rounding,
                        param_dtype=torch.float32,
                    )
        if dtype != torch.float64:
            yield sample("out dtype fp32", (6, 40), out_dtype=torch.float32)
            yield sample("out dtype bf16", (6, 40), out_dtype=torch.bfloat16)

    return samples


def _layer_norm_reference(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    keep: Tensor | None = None,
    keep_probability: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor]:
    return (_flat_norm(input, normalized_shape, weight, bias, NormRule("layer", eps), out_dtype),)


def _rms_norm_reference(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    rounding: Any = "once",
    keep: Tensor | None = None,
    keep_probability: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor]:
    return (
        _flat_norm(
            input,
            normalized_shape,
            weight,
            None,
            NormRule("rms", eps, weight_offset, rounding),
            out_dtype,
        ),
    )


def _flat_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None,
    bias: Tensor | None,
    rule: NormRule,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Returns the normalised input; the reference implementation takes rows of one dimension."""
    dims = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    flat = input.flatten(-dims)
    weight, bias = (None if t is None else t.flatten() for t in (weight, bias))
    y, _ = reference.forward((flat, None, None, weight, bias), rule, out_dtype=out_dtype)
    return y.view(input.shape)


def _layer_norm_eager(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor]:
    return (F.layer_norm(input, normalized_shape, weight, bias, eps),)


def _rms_norm_eager(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> tuple[Tensor]:
    return (F.rms_norm(input, normalized_shape, weight, eps),)


def _norm_bad_samples(layer: bool) -> Callable[[torch.device], Iterator[BadSample]]:
    """Returns the bad samples of `layer_norm` or `rms_norm`, as a function of the device."""

    def bad_samples(device: torch.device) -> Iterator[BadSample]:
        def bad(
            name: str,
            error: type[Exception],
            match: str,
            *,
            options: dict[str, Any] | None = None,
            **tensors: Any,
        ) -> BadSample:
            good = {
                "input": torch.randn(4, 8, device=device),
                "weight": torch.randn(8, device=device),
            }
            return BadSample(
                name,
                {**good, **tensors},
                {"normalized_shape": (8,), **(options or {})},
                error,
                match,
            )

        yield bad(
            "input is no tensor", TypeError, "input must be a torch.Tensor, got list", input=[1.0]
        )
        yield bad(
            "integer input",
            TypeError,
            r"input has dtype torch\.int64",
            input=torch.ones(4, 8, dtype=torch.int64, device=device),
        )
        yield bad(
            "weight of another width",
            ValueError,
            r"weight has shape \(9,\), expected \(8,\)",
            weight=torch.randn(9, device=device),
        )
        yield bad(
            "integer weight",
            TypeError,
            r"weight has dtype torch\.int32",
            weight=torch.ones(8, dtype=torch.int32, device=device),
        )
        yield bad(
            "normalized_shape mismatch",
            ValueError,
            r"input has shape \(4, 8\), expected \(\*, 4, 9\)",
            options={"normalized_shape": (4, 9)},
        )
        yield bad(
            "normalized_shape longer than input",
            ValueError,
            r"expected \(\*, 2, 4, 8\)",
            options={"normalized_shape": (2, 4, 8)},
        )
        yield bad(
            "empty normalized_shape",
            ValueError,
            "normalized_shape must name at least one dimension",
            options={"normalized_shape": ()},
        )
        yield bad(
            "negative eps", ValueError, "eps must be at least 0, got -1.0", options={"eps": -1.0}
        )
        yield bad(
            "integer out_dtype",
            TypeError,
            r"out_dtype must be one of .*, got torch\.int32",
            options={"out_dtype": torch.int32},
        )
        yield bad(
            "list of an out_dtype",
            TypeError,
            r"out_dtype must be one of .*, got \[torch\.float32\]",
            options={"out_dtype": [torch.float32]},
        )
        yield bad(
            "weight on another device",
            RuntimeError,
            "weight is on meta, expected",
            weight=torch.randn(8, device="meta"),
        )
        if layer:
            yield bad(
                "bias of another width",
                ValueError,
                r"bias has shape \(7,\), expected \(8,\)",
                bias=torch.randn(7, device=device),
            )
        else:
            yield bad(
                "unknown rounding",
                ValueError,
                "rounding must be one of .*, got 'up'",
                options={"rounding": "up"},
            )

    return bad_samples


def _norm_benchmark(layer: bool) -> Callable[[Shape, torch.dtype, torch.device], Sample]:
    def benchmark(shape: Shape, dtype: torch.dtype, device: torch.device) -> Sample:
        rows, cols = shape
        make = partial(torch.randn, dtype=dtype, device=device)
        tensors: dict[str, Tensor | None] = {"input": make(rows, cols), "weight": make(cols)}
        if layer:
            tensors["bias"] = make(cols)
        return Sample(f"{rows}x{cols}", tensors, {"normalized_shape": (cols,), "eps": 1e-5})

    return benchmark


# --- bias_dropout_add and its norms ---------------------------------------------------------------


def _fused_samples(kind: str) -> Callable[[torch.device, torch.dtype], Iterator[Sample]]:
    """Returns the samples of `bias_dropout_add` with a kind of norm."""
    params = {"layer": ("weight", "ln_bias"), "rms": ("weight",), "none": ()}[kind]
    optional = ("bias", "residual", *params)

    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        def sample(
            name: str,
            shape: tuple[int, ...],
            absent: tuple[str, ...] = (),
            p: float = 0.0,
            residual_dtype: torch.dtype | None = None,
            param_dtype: torch.dtype | None = None,
            **options: Any,
        ) -> Sample:
            make = Maker(name, device, dtype)
            tensors: dict[str, Tensor | None] = {
                "x": make(*shape, shift=0.2),
                "bias": make(shape[-1], dtype=param_dtype),
                "residual": make(*shape, dtype=residual_dtype, scale=1.5),
            }
            tensors |= {param: make(shape[-1], dtype=param_dtype) for param in params}
            if options.get("save") == "output":
                # The backward divides by the weight to invert the affine. Near zero that loses
                # digits, as documented, so this weight is at least 0.5.
                weight = make(shape[-1], dtype=param_dtype)
                tensors["weight"] = weight + 0.5 * weight.sign()
            tensors |= dict.fromkeys(absent)
            return Sample(name, tensors, {"p": p, **options})

        for shape in _SHAPES:
            yield sample("shape " + "x".join(map(str, shape)), shape, p=0.2)
        for shape in _WIDE_SHAPES:
            yield sample("shape " + "x".join(map(str, shape)), shape, p=0.1)
        for present in product((True, False), repeat=len(optional)):
            absent = tuple(
                name for name, is_present in zip(optional, present, strict=True) if not is_present
            )
            # Half of the combinations have dropout.
            p = 0.4 if sum(present) % 2 else 0.0
            yield sample(f"without {', '.join(absent) or 'nothing'}, p={p}", (6, 40), absent, p)
        for p in (0.0, 0.9, 1.0):
            yield sample(f"p={p}", (9, 56), p=p)
        yield sample("wide, p=0", (2, 20000), p=0.0)
        yield sample("wide, without residual", (2, 20000), ("residual",), p=0.3)
        yield sample("not training", (5, 24), p=0.5, training=False)
        if kind != "none":
            yield sample("sum returned", (6, 48), p=0.25, return_sum=True)
            yield sample("sum returned, wide", (2, 20000), p=0.25, return_sum=True)
            yield sample("sum returned, p=0", (6, 48), return_sum=True)
            yield sample("large eps", (5, 33), p=0.1, eps=0.3)
            for save in ("output", "inputs"):
                yield sample(f"save={save}", (6, 48), p=0.25, save=save)
                yield sample(f"save={save}, p=0", (6, 48), save=save)
                yield sample(f"save={save}, wide", (2, 20000), p=0.25, save=save)
            # The copy is the output rounded a second time. The output has the wider dtype here, so
            # that its rounding error is negligible compared with the copy's.
            dtypes: dict[str, Any] = {"cast_dtype": torch.float32}
            if dtype != torch.float64:
                dtypes = {"out_dtype": torch.float32, "cast_dtype": torch.bfloat16}
            yield sample("cast", (6, 48), p=0.25, **dtypes)
            yield sample("cast, sum returned", (6, 48), p=0.25, return_sum=True, **dtypes)
            yield sample("cast, save=output", (6, 48), p=0.25, save="output", **dtypes)
            yield sample("cast, wide", (2, 20000), p=0.25, **dtypes)
            yield sample("cast to the same dtype", (6, 48), p=0.25, cast_dtype=dtype)
        if kind == "rms":
            yield sample("weight offset", (6, 72), p=0.1, weight_offset=1.0)
            for rounding in ("llama", "t5"):
                yield sample(f"{rounding} rounding", (6, 72), p=0.1, rounding=rounding)
        if dtype in _HALF:
            yield sample("fp32 residual", (6, 48), p=0.2, residual_dtype=torch.float32)
            yield sample(
                "fp32 parameters and residual",
                (6, 48),
                p=0.2,
                residual_dtype=torch.float32,
                param_dtype=torch.float32,
            )
            yield sample("fp32 residual, wide", (2, 16500), p=0.2, residual_dtype=torch.float32)
        if dtype != torch.float64:
            yield sample("out dtype bf16", (6, 40), p=0.1, out_dtype=torch.bfloat16)
            yield sample("out dtype fp32", (6, 40), p=0.1, out_dtype=torch.float32)

    return samples


def _dropout_add_eager(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, training: bool
) -> Tensor:
    z = F.dropout(x if bias is None else x + bias, p, training)
    return z if residual is None else z + residual


def _bias_dropout_add_reference(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    p: float,
    training: bool = True,
    keep: Tensor | None = None,
    keep_probability: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor]:
    rule = NormRule("none")
    return reference.forward(
        (x, bias, residual, None, None),
        rule,
        dropout=masked(keep, keep_probability),
        out_dtype=out_dtype,
    )[:1]


def _outputs(
    y: Tensor, z: Tensor, return_sum: bool, cast_dtype: torch.dtype | None
) -> tuple[Tensor, ...]:
    """Returns the expected outputs of a call.

    The copy is not rounded to ``cast_dtype``: as the tests' oracle in fp64, it must be as exact as
    the output.
    """
    outputs = [y]
    if return_sum:
        outputs.append(z)
    if cast_dtype is not None:
        outputs.append(y.clone())
    return tuple(outputs)


def _bias_dropout_add_ln_reference(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    ln_bias: Tensor | None,
    *,
    p: float,
    training: bool = True,
    eps: float = 1e-5,
    return_sum: bool = False,
    save: str = "sum",
    keep: Tensor | None = None,
    keep_probability: float = 1.0,
    out_dtype: torch.dtype | None = None,
    cast_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    rule = NormRule("layer", eps)
    y, z = reference.forward(
        (x, bias, residual, weight, ln_bias),
        rule,
        dropout=masked(keep, keep_probability),
        out_dtype=out_dtype,
    )
    return _outputs(y, z, return_sum, cast_dtype)


def _bias_dropout_add_rms_norm_reference(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    p: float,
    training: bool = True,
    eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: Any = "once",
    return_sum: bool = False,
    save: str = "sum",
    keep: Tensor | None = None,
    keep_probability: float = 1.0,
    out_dtype: torch.dtype | None = None,
    cast_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    rule = NormRule("rms", eps, weight_offset, rounding)
    y, z = reference.forward(
        (x, bias, residual, weight, None),
        rule,
        dropout=masked(keep, keep_probability),
        out_dtype=out_dtype,
    )
    return _outputs(y, z, return_sum, cast_dtype)


def _bias_dropout_add_eager(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, *, p: float, training: bool = True
) -> tuple[Tensor]:
    return (_dropout_add_eager(x, bias, residual, p, training),)


def _bias_dropout_add_ln_eager(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    ln_bias: Tensor | None,
    *,
    p: float,
    training: bool = True,
    eps: float = 1e-5,
    return_sum: bool = False,
) -> tuple[Tensor, ...]:
    z = _dropout_add_eager(x, bias, residual, p, training)
    y = F.layer_norm(z, z.shape[-1:], weight, ln_bias, eps)
    return (y, z) if return_sum else (y,)


def _bias_dropout_add_rms_norm_eager(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    p: float,
    training: bool = True,
    eps: float | None = None,
    return_sum: bool = False,
) -> tuple[Tensor, ...]:
    z = _dropout_add_eager(x, bias, residual, p, training)
    y = F.rms_norm(z, z.shape[-1:], weight, eps)
    return (y, z) if return_sum else (y,)


def _fused_bad_samples(kind: str) -> Callable[[torch.device], Iterator[BadSample]]:
    """Returns the bad samples of `bias_dropout_add` with a kind of norm."""
    params = {"layer": ("weight", "ln_bias"), "rms": ("weight",), "none": ()}[kind]

    def bad_samples(device: torch.device) -> Iterator[BadSample]:
        def bad(
            name: str,
            error: type[Exception],
            match: str,
            *,
            options: dict[str, Any] | None = None,
            **tensors: Any,
        ) -> BadSample:
            good: dict[str, Any] = {
                param: torch.randn(8, device=device) for param in ("bias", *params)
            }
            good["x"] = torch.randn(4, 8, device=device)
            good["residual"] = torch.randn(4, 8, device=device)
            return BadSample(name, {**good, **tensors}, {"p": 0.1, **(options or {})}, error, match)

        yield bad("p above one", ValueError, r"p must be in \[0, 1\], got 1.5", options={"p": 1.5})
        yield bad(
            "p below zero", ValueError, r"p must be in \[0, 1\], got -0.1", options={"p": -0.1}
        )
        yield bad(
            "p is nan", ValueError, r"p must be in \[0, 1\], got nan", options={"p": float("nan")}
        )
        yield bad("p is no number", TypeError, "p must be a number, got str", options={"p": "0.1"})
        yield bad(
            "p is several numbers",
            TypeError,
            "p must be a number, got Tensor",
            options={"p": torch.zeros(2)},
        )
        yield bad(
            "residual of another shape",
            ValueError,
            r"residual has shape \(3, 8\), expected \(4, 8\)",
            residual=torch.randn(3, 8, device=device),
        )
        yield bad(
            "bias of another width",
            ValueError,
            r"bias has shape \(5,\), expected \(8,\)",
            bias=torch.randn(5, device=device),
        )
        yield bad(
            "bias of two dimensions",
            ValueError,
            r"bias has shape \(1, 8\), expected \(8,\)",
            bias=torch.randn(1, 8, device=device),
        )
        yield bad(
            "scalar x",
            ValueError,
            "x must have at least one dimension",
            x=torch.randn((), device=device),
        )
        yield bad(
            "integer x",
            TypeError,
            r"x has dtype torch\.int64",
            x=torch.ones(4, 8, dtype=torch.int64, device=device),
        )
        yield bad(
            "residual is no tensor",
            TypeError,
            "residual must be a torch.Tensor, got float",
            residual=1.0,
        )
        yield bad(
            "residual on another device",
            RuntimeError,
            "residual is on meta, expected",
            residual=torch.randn(4, 8, device="meta"),
        )
        if kind != "none":
            yield bad(
                "weight of another width",
                ValueError,
                r"weight has shape \(9,\), expected \(8,\)",
                weight=torch.randn(9, device=device),
            )
            yield bad(
                "negative eps",
                ValueError,
                "eps must be at least 0, got -0.5",
                options={"eps": -0.5},
            )
            yield bad(
                "unknown save",
                ValueError,
                "save must be one of .*, got 'mask'",
                options={"save": "mask"},
            )
            yield bad(
                "integer cast_dtype",
                TypeError,
                r"cast_dtype must be one of .*, got torch\.int8",
                options={"cast_dtype": torch.int8},
            )
            yield bad(
                "list of an out_dtype",
                TypeError,
                r"out_dtype must be one of .*, got \[1\]",
                options={"out_dtype": [1]},
            )
            yield bad(
                "list of a cast_dtype",
                TypeError,
                r"cast_dtype must be one of .*, got \[1\]",
                options={"cast_dtype": [1]},
            )

    return bad_samples


def _fused_benchmark(kind: str) -> Callable[[Shape, torch.dtype, torch.device], Sample]:
    params = {"layer": ("weight", "ln_bias"), "rms": ("weight",), "none": ()}[kind]

    def benchmark(shape: Shape, dtype: torch.dtype, device: torch.device) -> Sample:
        rows, cols = shape
        make = partial(torch.randn, dtype=dtype, device=device)
        tensors: dict[str, Tensor | None] = {
            "x": make(rows, cols),
            "bias": make(cols),
            "residual": make(rows, cols),
        }
        tensors |= {param: make(cols) for param in params}
        return Sample(f"{rows}x{cols}", tensors, {"p": 0.1})

    return benchmark


# --- Liger-Kernel's operators, for the benchmark --------------------------------------------------


def _liger_layer_norm() -> Callable[..., Any]:
    from liger_kernel.transformers.functional import liger_layer_norm

    return lambda input, normalized_shape, weight, bias, eps: (
        liger_layer_norm(input, weight, bias, eps),
    )


def _liger_rms_norm() -> Callable[..., Any]:
    from liger_kernel.transformers.functional import liger_rms_norm

    # The "gemma" mode rounds once, at the end, as F.rms_norm does; the default mode rounds as
    # Llama's module does. The 0.0 is the weight's offset.
    return lambda input, normalized_shape, weight, eps: (
        liger_rms_norm(input, weight, eps, 0.0, "gemma"),
    )


# --- what the tests compile without a GPU ---------------------------------------------------------


_BUCKET = 3  # of the number of rows: 4,096 to 65,535


def compiled_plans(
    cols: int, dtype: torch.dtype, other: torch.dtype | None = None
) -> dict[str, Callable[[], object]]:
    """Returns functions that build all variants of an operator, by name.

    If the residual has another dtype, ``other``, all variants are of `bias_dropout_add_ln` with all
    its inputs: one for each ``save``, with a gradient of the sum, and one with a low-precision copy
    and the seed of a shard.
    """

    def build(
        kind: Kind,
        *,
        adds: bool,
        save: str = "sum",
        residual: torch.dtype = dtype,
        has_dz: bool = False,
        cast: torch.dtype | None = None,
    ) -> None:
        normalizes, has_ln_bias = kind != "none", kind == "layer"
        dtypes = (
            dtype,
            dtype if adds else None,
            residual if adds else None,
            dtype if normalizes else None,
            dtype if has_ln_bias else None,
        )
        constants = NormConstants(
            op="compiled",
            kind=kind,
            rounding="once",
            eps=1e-5,
            weight_offset=0.0,
            shape=None,
            save=save,
            return_sum=adds and normalizes,
            cast_dtype=cast,
        )
        site = site_of(NORM, constants, dtypes, cols, device_index=-1, dropout=adds, saves=True)
        # An index in `launch.SEED_TYPES`: no seed, one as numbers, or a shard's, in tensors.
        seed = 0
        if adds:
            seed = 3 if cast else 1
        needs = (True, adds, adds, normalizes, has_ln_bias)
        launching._plan_forward(site, seed, aligned=True, bucket=_BUCKET)
        launching._plan_backward(
            site,
            needs,
            dy=site.y,
            dz=site.z if has_dz else None,
            dcast=site.cast,
            seed=seed,
            aligned=True,
            multiprocessors=0,
            bucket=_BUCKET,
        )

    if other is not None:
        build_ln = partial(build, "layer", adds=True, residual=other)
        plans: dict[str, Callable[[], object]] = {
            f"bias_dropout_add_ln, save={save}": partial(build_ln, save=save, has_dz=True)
            for save in ("sum", "inputs", "output")
        }
        plans["bias_dropout_add_ln, cast"] = partial(build_ln, cast=dtype)
        return plans
    return {
        "layer_norm": partial(build, "layer", adds=False),
        "rms_norm": partial(build, "rms", adds=False),
        "bias_dropout_add": partial(build, "none", adds=True),
        "bias_dropout_add_ln": partial(build, "layer", adds=True),
        "bias_dropout_add_rms_norm": partial(build, "rms", adds=True),
    }


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_NORM_BENCHMARKS = (
    ((8, 256), _BF16),
    ((8192, 1024), _BF16),
    ((8192, 1024), _FP32),
    ((8192, 4096), _BF16),
    ((4096, 8192), _BF16),
    ((2048, 16384), _BF16),
    ((1024, 32768), _BF16),
)
_FUSED_BENCHMARKS = (*_NORM_BENCHMARKS, ((16384, 768), _FP16))
# Hidden sizes of models, and two unaligned ones.
_SWEEP = Sweep(
    widths=tuple(
        (cols,)
        for cols in (
            1536,
            2560,
            2880,
            3072,
            3584,
            4608,
            5120,
            5376,
            6144,
            7168,
            9216,
            12288,
            13824,
            14336,
            18432,
            24576,
            4095,
            4097,
        )
    )
)

# 128, 192, 256, 384, … 65536: powers of two, and one width between each two. Then three widths of
# five tiles.
_POWERS = tuple(1 << exponent for exponent in range(7, 16))
_BETWEEN = tuple(3 * power // 2 for power in _POWERS)
_TUNED = (*sorted(_POWERS + _BETWEEN), 65536, 2560, 5120, 10240)
GRID = Grid(
    tails=tuple((cols,) for cols in _TUNED),
    coarse=((256,), (1024,), (4096,), (16384,), (65536,)),
    buckets=(0, 1, 2, 3, 4),
)

SPECS = (
    Spec(
        name="layer_norm",
        call=ops.layer_norm,
        reference=_layer_norm_reference,
        eager=_layer_norm_eager,
        tensors=("input", "weight", "bias"),
        has_dropout=False,
        samples=_norm_samples(layer=True),
        bad_samples=_norm_bad_samples(layer=True),
        benchmark=_norm_benchmark(layer=True),
        passes={"fwd": 2, "fwd_bwd": 5},
        launches=(1, 2),
        saved=0,
        shapes=_NORM_BENCHMARKS,
        sweep=_SWEEP,
        liger=_liger_layer_norm,
    ),
    Spec(
        name="rms_norm",
        call=ops.rms_norm,
        reference=_rms_norm_reference,
        eager=_rms_norm_eager,
        tensors=("input", "weight"),
        has_dropout=False,
        samples=_norm_samples(layer=False),
        bad_samples=_norm_bad_samples(layer=False),
        benchmark=_norm_benchmark(layer=False),
        passes={"fwd": 2, "fwd_bwd": 5},
        launches=(1, 2),
        saved=0,
        shapes=_NORM_BENCHMARKS,
        sweep=_SWEEP,
        liger=_liger_rms_norm,
    ),
    Spec(
        name="bias_dropout_add",
        call=ops.bias_dropout_add,
        reference=_bias_dropout_add_reference,
        eager=_bias_dropout_add_eager,
        tensors=("x", "bias", "residual"),
        promoted=("bias", "residual"),
        has_dropout=True,
        samples=_fused_samples("none"),
        bad_samples=_fused_bad_samples("none"),
        benchmark=_fused_benchmark("none"),
        passes={"fwd": 3, "fwd_bwd": 5},
        launches=(1, 2),
        saved=0,
        shapes=_FUSED_BENCHMARKS,
        sweep=_SWEEP,
    ),
    Spec(
        name="bias_dropout_add_ln",
        call=ops.bias_dropout_add_ln,
        reference=_bias_dropout_add_ln_reference,
        eager=_bias_dropout_add_ln_eager,
        tensors=("x", "bias", "residual", "weight", "ln_bias"),
        promoted=("bias", "residual"),
        has_dropout=True,
        samples=_fused_samples("layer"),
        bad_samples=_fused_bad_samples("layer"),
        benchmark=_fused_benchmark("layer"),
        passes={"fwd": 3, "fwd_bwd": 7},
        launches=(1, 2),
        saved=1,
        shapes=_FUSED_BENCHMARKS,
        sweep=_SWEEP,
    ),
    Spec(
        name="bias_dropout_add_rms_norm",
        call=ops.bias_dropout_add_rms_norm,
        reference=_bias_dropout_add_rms_norm_reference,
        eager=_bias_dropout_add_rms_norm_eager,
        tensors=("x", "bias", "residual", "weight"),
        promoted=("bias", "residual"),
        has_dropout=True,
        samples=_fused_samples("rms"),
        bad_samples=_fused_bad_samples("rms"),
        benchmark=_fused_benchmark("rms"),
        passes={"fwd": 3, "fwd_bwd": 7},
        launches=(1, 2),
        saved=1,
        shapes=_FUSED_BENCHMARKS,
        sweep=_SWEEP,
    ),
)
