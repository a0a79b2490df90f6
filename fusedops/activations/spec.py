"""The activation family's samples, bad samples, bytes moved and benchmark shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.activations import ACTIVATIONS
from ..core.calls.operators import site_of
from ..core.configs.tuning_key import Grid
from ..core.spec import BadSample, Maker, Sample, Shape, Spec, Sweep, masked
from . import launching, ops, reference
from .operator import ACTIVATION
from .site import ActivationConstants, Kind

__all__ = ["GRID", "SPECS", "compiled_plans"]

_HALF = (torch.float16, torch.bfloat16)
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
# For operators that are calls of another one with a fixed activation.
_FEW_SHAPES = [(6, 64), (5, 1), (7, 17), (2, 3, 96), (3, 1000), (64,), (2, 20000)]

Samples = Callable[[torch.device, torch.dtype], Iterator[Sample]]
BadSamples = Callable[[torch.device], Iterator[BadSample]]


def _joined(shape: tuple[int, ...]) -> str:
    """Returns a shape as a part of a sample's name, for example ``6x64``."""
    return "x".join(map(str, shape))


# --- gelu, bias_gelu, bias_act --------------------------------------------------------------------


def _bias_samples(tensors: tuple[str, ...], options: tuple[str, ...] = ()) -> Samples:
    """Returns the samples of an operator with a bias, or of `gelu`.

    ``options`` are the operator's keywords beyond the tensors: "approximate", "activation", "p".
    Samples drop other keywords: several have p, which only `bias_act` takes.
    """
    x_name, takes_bias = tensors[0], len(tensors) > 1

    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        def sample(
            name: str,
            shape: tuple[int, ...],
            without_bias: bool = False,
            bias_dtype: torch.dtype | None = None,
            scale: float = 1.5,
            shift: float = 0.2,
            **keywords: Any,
        ) -> Sample:
            make = Maker(name, device, dtype)
            arguments: dict[str, Tensor | None] = {x_name: make(*shape, shift=shift, scale=scale)}
            if takes_bias:
                arguments["bias"] = None if without_bias else make(shape[-1], dtype=bias_dtype)
            accepted = {key: value for key, value in keywords.items() if key in options}
            return Sample(name, arguments, accepted)

        shapes = [*_SHAPES, *_WIDE_SHAPES] if "activation" in options else _FEW_SHAPES
        for shape in shapes:
            yield sample(f"shape {_joined(shape)}", shape, p=0.2)
        yield sample("from tail to tail", (5, 80), scale=8.0)
        # Inputs at GELU's minimum, where the derivative is zero and a change of x changes no
        # output.
        yield sample(
            "where it is flat", (64, 4), without_bias=True, shift=-0.7518, scale=1e-3, p=0.1
        )
        if takes_bias:
            yield sample("without bias", (9, 48), without_bias=True)
            yield sample("without bias, wide", (2, 20000), without_bias=True, p=0.3)
            if dtype in _HALF:
                yield sample("fp32 bias", (6, 80), bias_dtype=torch.float32, p=0.1)
                yield sample("fp32 bias, wide", (2, 16500), bias_dtype=torch.float32)
        if "approximate" in options:
            for approximate in ("none", "tanh"):
                yield sample(f"approximate {approximate}", (6, 72), approximate=approximate)
        if "activation" in options:
            for activation in ACTIVATIONS:
                yield sample(f"activation {activation}", (6, 72), activation=activation)
                yield sample(
                    f"activation {activation}, p=0.4", (6, 72), activation=activation, p=0.4
                )
        if "p" in options:
            for p in (0.0, 0.9, 1.0):
                yield sample(f"p={p}", (9, 56), p=p)
            # `sample` would drop ``training``, which is not among the options.
            tensors = sample("not training", (5, 24)).tensors
            yield Sample("not training", tensors, {"p": 0.5, "training": False})

    return samples


def _bias_act_reference(
    x: Tensor,
    bias: Tensor | None,
    activation: str = "gelu",
    *,
    p: float = 0.0,
    training: bool = True,
    keep: Tensor | None = None,
    keep_probability: float = 1.0,
) -> tuple[Tensor]:
    formula = ACTIVATIONS[activation].formula
    return (reference.bias_act(x, bias, formula, masked(keep, keep_probability)),)


def _bias_gelu_reference(
    x: Tensor,
    bias: Tensor | None,
    approximate: str = "none",
    *,
    keep: Tensor | None = None,
    keep_probability: float = 1.0,
) -> tuple[Tensor]:
    return _bias_act_reference(x, bias, "gelu_tanh" if approximate == "tanh" else "gelu")


def _gelu_reference(input: Tensor, approximate: str = "none", **_: Any) -> tuple[Tensor]:
    return _bias_gelu_reference(input, None, approximate)


def _bias_act_eager(
    x: Tensor,
    bias: Tensor | None,
    activation: str = "gelu",
    *,
    p: float = 0.0,
    training: bool = True,
) -> tuple[Tensor]:
    h = x if bias is None else x + bias
    return (F.dropout(ACTIVATIONS[activation].formula(h), p, training),)


def _bias_gelu_eager(x: Tensor, bias: Tensor | None, approximate: str = "none") -> tuple[Tensor]:
    h = x if bias is None else x + bias
    return (F.gelu(h, approximate=approximate),)


def _gelu_eager(input: Tensor, approximate: str = "none") -> tuple[Tensor]:
    return (F.gelu(input, approximate=approximate),)


def _bias_bad_samples(tensors: tuple[str, ...], options: tuple[str, ...] = ()) -> BadSamples:
    """Returns the bad samples of an operator with a bias, or of `gelu`: see `_bias_samples`."""
    x_name, takes_bias = tensors[0], len(tensors) > 1

    def bad_samples(device: torch.device) -> Iterator[BadSample]:
        def bad(
            name: str,
            error: type[Exception],
            match: str,
            *,
            options: dict[str, Any] | None = None,
            **overrides: Any,
        ) -> BadSample:
            good: dict[str, Any] = {x_name: torch.randn(4, 8, device=device)}
            if takes_bias:
                good["bias"] = torch.randn(8, device=device)
            return BadSample(name, {**good, **overrides}, options or {}, error, match)

        x: dict[str, Any] = {x_name: [1.0]}
        yield bad("no tensor", TypeError, f"{x_name} must be a torch.Tensor, got list", **x)
        x = {x_name: torch.ones(4, 8, dtype=torch.int64, device=device)}
        yield bad("integers", TypeError, rf"{x_name} has dtype torch\.int64", **x)
        if takes_bias:
            x = {x_name: torch.randn((), device=device)}
            yield bad("scalar", ValueError, f"{x_name} must have at least one dimension", **x)
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
                "integer bias",
                TypeError,
                r"bias has dtype torch\.int32",
                bias=torch.ones(8, dtype=torch.int32, device=device),
            )
            yield bad(
                "bias is no tensor", TypeError, "bias must be a torch.Tensor, got float", bias=1.0
            )
            yield bad(
                "bias on another device",
                RuntimeError,
                "bias is on meta, expected",
                bias=torch.randn(8, device="meta"),
            )
        if "approximate" in options:
            yield bad(
                "unknown approximate",
                ValueError,
                "approximate must be one of 'none', 'tanh', got 'fast'",
                options={"approximate": "fast"},
            )
            yield bad(
                "approximate is no name",
                ValueError,
                "approximate must be one of 'none', 'tanh', got True",
                options={"approximate": True},
            )
        if "activation" in options:
            yield bad(
                "unknown activation",
                ValueError,
                "activation must be one of 'gelu', .*, got 'mish'",
                options={"activation": "mish"},
            )
            yield bad(
                "activation in a list",
                ValueError,
                r"activation must be one of 'gelu', .*, got \['relu'\]",
                options={"activation": ["relu"]},
            )
        if "p" in options:
            yield bad(
                "p above one", ValueError, r"p must be in \[0, 1\], got 1.5", options={"p": 1.5}
            )
            yield bad(
                "p is nan",
                ValueError,
                r"p must be in \[0, 1\], got nan",
                options={"p": float("nan")},
            )
            yield bad(
                "p above one in evaluation",
                ValueError,
                r"p must be in \[0, 1\], got 1.5",
                options={"p": 1.5, "training": False},
            )
            yield bad(
                "p is no number", TypeError, "p must be a number, got str", options={"p": "0.1"}
            )

    return bad_samples


def _benchmark(*names: str, **options: Any) -> Callable[[Shape, torch.dtype, torch.device], Sample]:
    """Returns a function that makes a benchmark's sample with the named tensors."""

    def benchmark(shape: Shape, dtype: torch.dtype, device: torch.device) -> Sample:
        rows, cols = map(int, shape)
        make = partial(torch.randn, dtype=dtype, device=device)
        tensors = {name: make(cols) if name == "bias" else make(rows, cols) for name in names}
        return Sample(f"{rows}x{cols}", dict(tensors), options)

    return benchmark


# --- gated units ----------------------------------------------------------------------------------


def _glu_samples(option: str = "", values: tuple[str, ...] = ()) -> Samples:
    """Returns the samples of a gated unit: ``option`` is its keyword, with its ``values``."""

    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        def sample(
            name: str,
            shape: tuple[int, ...],
            packed: bool = False,
            up_dtype: torch.dtype | None = None,
            scale: float = 1.5,
            options: dict[str, Any] | None = None,
        ) -> Sample:
            make = Maker(name, device, dtype)
            gate = make(*shape, shift=0.2, scale=scale)
            up = None if packed else make(*shape, dtype=up_dtype, shift=-0.1)
            return Sample(name, {"gate": gate, "up": up}, options or {})

        shapes = [*_SHAPES, *_WIDE_SHAPES] if option == "activation" else _FEW_SHAPES
        for shape in shapes:
            yield sample(f"shape {_joined(shape)}", shape)
        for shape in ((6, 64), (5, 2), (7, 34), (2, 3, 96), (10,), (2, 20000)):
            yield sample(f"packed {_joined(shape)}", shape, packed=True)
        yield sample("from tail to tail", (5, 80), scale=8.0)
        for value in values:
            yield sample(f"{option} {value}", (6, 72), options={option: value})
            yield sample(f"{option} {value}, packed", (6, 72), packed=True, options={option: value})
        if dtype in _HALF:
            yield sample("fp32 up", (6, 80), up_dtype=torch.float32)
            yield sample("fp32 up, wide", (2, 16500), up_dtype=torch.float32)

    return samples


def _glu_reference(
    gate: Tensor, up: Tensor | None, activation: str = "silu", **_: Any
) -> tuple[Tensor]:
    return (reference.glu(gate, up, ACTIVATIONS[activation].formula),)


def _geglu_reference(
    gate: Tensor, up: Tensor | None, approximate: str = "none", **_: Any
) -> tuple[Tensor]:
    return _glu_reference(gate, up, "gelu_tanh" if approximate == "tanh" else "gelu")


def _glu_eager(gate: Tensor, up: Tensor | None, activation: str = "silu") -> tuple[Tensor]:
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return (ACTIVATIONS[activation].formula(gate) * up,)


def _geglu_eager(gate: Tensor, up: Tensor | None, approximate: str = "none") -> tuple[Tensor]:
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return (F.gelu(gate, approximate=approximate) * up,)


def _swiglu_eager(gate: Tensor, up: Tensor | None) -> tuple[Tensor]:
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return (F.silu(gate) * up,)


def _glu_bad_samples(*options: str) -> BadSamples:
    """Returns the bad samples of a gated unit with the keywords ``options``."""

    def bad_samples(device: torch.device) -> Iterator[BadSample]:
        def bad(
            name: str,
            error: type[Exception],
            match: str,
            *,
            options: dict[str, Any] | None = None,
            **overrides: Any,
        ) -> BadSample:
            good = {
                "gate": torch.randn(4, 8, device=device),
                "up": torch.randn(4, 8, device=device),
            }
            return BadSample(name, {**good, **overrides}, options or {}, error, match)

        yield bad(
            "gate is no tensor", TypeError, "gate must be a torch.Tensor, got list", gate=[1.0]
        )
        yield bad(
            "integer gate",
            TypeError,
            r"gate has dtype torch\.int64",
            gate=torch.ones(4, 8, dtype=torch.int64, device=device),
        )
        yield bad(
            "scalar gate",
            ValueError,
            "gate must have at least one dimension",
            gate=torch.randn((), device=device),
        )
        yield bad(
            "up of another width",
            ValueError,
            r"up has shape \(4, 7\), expected \(4, 8\)",
            up=torch.randn(4, 7, device=device),
        )
        yield bad(
            "up of other rows",
            ValueError,
            r"up has shape \(1, 8\), expected \(4, 8\)",
            up=torch.randn(1, 8, device=device),
        )
        yield bad(
            "integer up",
            TypeError,
            r"up has dtype torch\.int32",
            up=torch.ones(4, 8, dtype=torch.int32, device=device),
        )
        yield bad(
            "up on another device",
            RuntimeError,
            "up is on meta, expected",
            up=torch.randn(4, 8, device="meta"),
        )
        yield bad(
            "odd packed width",
            ValueError,
            r"gate has shape \(4, 7\), expected an even last dimension",
            gate=torch.randn(4, 7, device=device),
            up=None,
        )
        if "approximate" in options:
            yield bad(
                "unknown approximate",
                ValueError,
                "approximate must be one of 'none', 'tanh', got 'fast'",
                options={"approximate": "fast"},
            )
        if "activation" in options:
            yield bad(
                "unknown activation",
                ValueError,
                "activation must be one of 'gelu', .*, got 'mish'",
                options={"activation": "mish"},
            )

    return bad_samples


# --- Liger-Kernel's operators, for the benchmark --------------------------------------------------


def _liger_swiglu() -> Callable[..., Any]:
    from liger_kernel.transformers.functional import liger_swiglu

    return lambda gate, up: (liger_swiglu(gate, up),)


def _liger_geglu() -> Callable[..., Any]:
    from liger_kernel.transformers.functional import liger_geglu

    # Liger-Kernel has the tanh form only.
    return lambda gate, up, approximate: (liger_geglu(gate, up),)


# --- what the tests compile without a GPU ---------------------------------------------------------


_BUCKET = 3  # of the number of rows: 4,096 to 65,535


def compiled_plans(
    cols: int, dtype: torch.dtype, other: torch.dtype | None = None
) -> dict[str, Callable[[], object]]:
    """Returns functions that build all variants of an operator, by name.

    If the second tensor has another dtype, ``other``, only the variants that load and hold most are
    returned. Tiles have at most 1024 columns, so most widths share their variants with another
    width. For these widths the result is empty.
    """
    if other is not None and cols == 8192:
        cols = 4096
    if cols not in (17, 64, 256, 1024, 4096):
        return {}

    def build(
        kind: Kind, activation: str, second: torch.dtype | None, *, dropout: bool = False
    ) -> None:
        constants = ActivationConstants("compiled", kind, activation)
        dtypes = (dtype, second)
        site = site_of(
            ACTIVATION, constants, dtypes, cols, device_index=-1, dropout=dropout, saves=True
        )
        needs_second = second is not None
        if site.vector is not None:
            launching._plan_pointwise_forward(site.vector, aligned=True, bucket=_BUCKET)
            launching._plan_pointwise_backward(
                site.vector,
                aligned=True,
                dy=site.y,
                needs_x=True,
                needs_up=needs_second,
                bucket=_BUCKET,
            )
        if kind == "bias" and second is None and not dropout:
            return
        # An index in `launch.SEED_TYPES`: no seed, or one as numbers.
        seed = 1 if dropout else 0
        launching._plan_forward(site, seed, aligned=True, bucket=_BUCKET)
        needs = (True, needs_second)
        launching._plan_backward(site, needs, site.y, seed, aligned=True, bucket=_BUCKET)

    mixed: dict[str, Callable[[], object]] = {
        "bias_act, dropout": partial(build, "bias", "gelu", other or dtype, dropout=True),
        "geglu": partial(build, "glu", "gelu", other or dtype),
    }
    if other is not None:
        return mixed
    return mixed | {
        "gelu": partial(build, "bias", "gelu", None),
        "bias_gelu_erf": partial(build, "bias", "gelu", dtype),
        "bias_gelu_tanh": partial(build, "bias", "gelu_tanh", dtype),
        "geglu_tanh": partial(build, "glu", "gelu_tanh", dtype),
        "swiglu": partial(build, "glu", "silu", dtype),
        "swiglu, packed": partial(build, "packed", "silu", None),
    }


_BF16, _FP32 = torch.bfloat16, torch.float32
_BIAS_BENCHMARKS = (
    ((8, 256), _BF16),
    ((8192, 4096), _BF16),
    ((8192, 4096), _FP32),
    ((8192, 16384), _BF16),
)
_GLU_BENCHMARKS = (((8, 256), _BF16), ((8192, 11008), _BF16))
_BIAS_PASSES = {"fwd": 2, "fwd_bwd": 5}
_GLU_PASSES = {"fwd": 3, "fwd_bwd": 8}
# The operators are elementwise, so the width of a row matters little. Widths that are powers of two
# suffice, 256 to 65536, and one width that is timed with several numbers of rows.
_SWEEP = Sweep(hidden=tuple((1 << exponent,) for exponent in range(8, 17)), rows=((4096,),))


def _bias_gelu_spec(name: str, approximate: ops.Approximate) -> Spec:
    return Spec(
        name=name,
        functional="bias_gelu",
        call=partial(ops.bias_gelu, approximate=approximate),
        reference=partial(_bias_gelu_reference, approximate=approximate),
        eager=partial(_bias_gelu_eager, approximate=approximate),
        tensors=("x", "bias"),
        promoted=("bias",),
        has_dropout=False,
        samples=_bias_samples(("x", "bias")),
        bad_samples=_bias_bad_samples(("x", "bias"), ("approximate",)),
        benchmark=_benchmark("x", "bias"),
        passes=_BIAS_PASSES,
        launches=(1, 2),
        saved=0,
        shapes=_BIAS_BENCHMARKS,
        sweep=_SWEEP,
    )


# The operators are elementwise: neither width nor number of rows matters much. The first width is
# `configs.VECTOR`, at which vectors are tuned.
GRID = Grid(
    tails=((1024,), (128,), (512,), (2048,), (8192,), (32768,), (65536,)),
    coarse=((1024,), (16384,)),
    buckets=(1, 3),
    # The key has the width of the output. Packed rows are twice as wide.
    tails_of=lambda cols: ((cols,), (2 * cols,)),
)

SPECS = (
    Spec(
        name="gelu",
        call=ops.gelu,
        reference=_gelu_reference,
        eager=_gelu_eager,
        tensors=("input",),
        has_dropout=False,
        samples=_bias_samples(("input",), ("approximate",)),
        bad_samples=_bias_bad_samples(("input",), ("approximate",)),
        benchmark=_benchmark("input"),
        passes=_BIAS_PASSES,
        launches=(1, 1),
        saved=0,
        shapes=_BIAS_BENCHMARKS[:2],
        sweep=_SWEEP,
    ),
    _bias_gelu_spec("bias_gelu_erf", "none"),
    _bias_gelu_spec("bias_gelu_tanh", "tanh"),
    Spec(
        name="bias_act",
        call=ops.bias_act,
        reference=_bias_act_reference,
        eager=_bias_act_eager,
        tensors=("x", "bias"),
        promoted=("bias",),
        has_dropout=True,
        samples=_bias_samples(("x", "bias"), ("activation", "p")),
        bad_samples=_bias_bad_samples(("x", "bias"), ("activation", "p")),
        benchmark=_benchmark("x", "bias", activation="gelu", p=0.1),
        passes=_BIAS_PASSES,
        launches=(1, 2),
        saved=0,
        shapes=_BIAS_BENCHMARKS[:2],
        sweep=_SWEEP,
    ),
    Spec(
        name="geglu",
        call=ops.geglu,
        reference=_geglu_reference,
        eager=_geglu_eager,
        tensors=("gate", "up"),
        promoted=("up",),
        has_dropout=False,
        samples=_glu_samples("approximate", ("none", "tanh")),
        bad_samples=_glu_bad_samples("approximate"),
        benchmark=_benchmark("gate", "up", approximate="tanh"),
        passes=_GLU_PASSES,
        launches=(1, 1),
        saved=0,
        shapes=_GLU_BENCHMARKS,
        sweep=_SWEEP,
        liger=_liger_geglu,
    ),
    Spec(
        name="swiglu",
        call=ops.swiglu,
        reference=_glu_reference,
        eager=_swiglu_eager,
        tensors=("gate", "up"),
        promoted=("up",),
        has_dropout=False,
        samples=_glu_samples(),
        bad_samples=_glu_bad_samples(),
        benchmark=_benchmark("gate", "up"),
        passes=_GLU_PASSES,
        launches=(1, 1),
        saved=0,
        shapes=_GLU_BENCHMARKS,
        sweep=_SWEEP,
        liger=_liger_swiglu,
    ),
    Spec(
        name="glu",
        functional="gated_act",
        call=ops.gated_act,
        reference=_glu_reference,
        eager=_glu_eager,
        tensors=("gate", "up"),
        promoted=("up",),
        has_dropout=False,
        samples=_glu_samples("activation", tuple(ACTIVATIONS)),
        bad_samples=_glu_bad_samples("activation"),
        benchmark=_benchmark("gate", "up", activation="quick_gelu"),
        passes=_GLU_PASSES,
        launches=(1, 1),
        saved=0,
        shapes=_GLU_BENCHMARKS[:1],
        sweep=_SWEEP,
    ),
)
