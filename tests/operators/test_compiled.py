"""Every kernel compiles for every target; on NVIDIA GPUs none spills, up to 8192 columns.

This needs no GPU: the variants that calls would launch are compiled for a named target, and spills
are read off the binary. Interpreted kernels cannot be compiled, so these tests are not interpreted.
"""

from __future__ import annotations

import importlib
import inspect
import random
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusedops.compiler import launching
from fusedops.compiler.operator import Program
from fusedops.compiler.planning import planned
from fusedops.compiler.rows import structured
from fusedops.compiler.tracing import trace
from fusedops.core.calls.operators import site_of
from fusedops.core.configs import cache, tuning
from fusedops.core.configs.tuning_key import Config
from fusedops.core.launches import launch
from fusedops.norms import launching as norms
from fusedops.norms.operator import NORM
from fusedops.norms.reference import Kind
from fusedops.norms.site import NormConstants
from rowwise_checks import every
from rowwise_functions import RowwiseFunction
from support import EVERY_SPEC, INTERPRETED, triton_version

triton = pytest.importorskip("triton")
compiler = pytest.importorskip("triton.backends.compiler")

pytestmark = pytest.mark.compiled

TARGETS = {
    **{
        f"sm_{arch}": compiler.GPUTarget("cuda", arch=arch, warp_size=32)
        for arch in (80, 89, 90, 100)
    },
    "gfx942": compiler.GPUTarget("hip", arch="gfx942", warp_size=64),
}
# The most bytes of shared memory for a program, by architecture. Among the architectures that
# Triton supports, sm_89 has the least.
SHARED = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}
Plans = dict[str, Callable[[], object]]


def plans(cols: int, dtype: torch.dtype, other: torch.dtype | None = None) -> Plans:
    """Functions that plan all launches of an operator, by name, from the families' specs.

    Args:
        cols: the number of columns.
        dtype: the dtype of the rows.
        other: the dtype of the other tensors; if it is given, only the plans that move the most
            bytes are returned.
    """
    results: Plans = {}
    for spec_module in dict.fromkeys(spec.samples.__module__ for spec in EVERY_SPEC):
        family = importlib.import_module(spec_module)
        if hasattr(family, "compiled_plans"):
            results |= family.compiled_plans(cols, dtype, other)
    return results


# Up to so many columns, no kernel may spill.
NO_SPILL = 8192
WIDTHS = (17, 256, 768, 1024, 1536, 2048, 4095, 4096, 5120, 6144, 8192, 12288, 16384, 65536)


class CompiledForTarget:
    """Replaces `launch.specialise`: compiles for ``target``, and records spills in ``spilled``."""

    target: Any = None
    spilled: list[str]

    def __init__(self, request: launch.Request, device_index: int) -> None:
        target = CompiledForTarget.target
        constants = dict(request.constants)
        is_cuda = target.backend == "cuda"
        overlaps = is_cuda and target.arch >= 90 and not constants.get("PERSISTENT")
        if overlaps and "OVERLAP" in constants:
            constants["OVERLAP"] = True
        config = request.config if is_cuda else replace(request.config, registers=0)
        request = replace(request, constants=constants, config=config)
        limit = SHARED.get(target.arch, 0)
        compiled = launch.compile_fitting(request, limit, target)
        if limit:
            assert compiled.metadata.shared <= limit, request
        # Programs that wait for one another need a cooperative launch, which starts all or none.
        # Such a launch must not overlap with the kernel before it.
        if is_cuda:
            waits = request.constants.get("EXCHANGE") == "wait"
            assert compiled.metadata.launch_cooperative_grid == waits
            assert not (waits and compiled.metadata.launch_pdl)
        if spilled(compiled):
            name = request.kernel.fn.__name__
            CompiledForTarget.spilled.append(f"{name} {config}: {spilled(compiled)}")


@pytest.fixture(autouse=True)
def _check_names_of_device_functions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Asserts that each specialisation of a device function has a separate name.

    Triton derives the name from the arguments' types, but ignores tuples around them. So
    ``f((x,), ())`` would call the function that was compiled for ``f((), (x,))``.
    """
    generator = importlib.import_module("triton.compiler.code_generator")
    call, mangled = generator.CodeGenerator.call_JitFunction, generator.mangle_fn
    calls: list[tuple[Any, str]] = []
    types_of_name: dict[tuple[Any, str], str] = {}
    collisions: list[str] = []

    def types(value: Any) -> str:
        value = value.value if isinstance(value, triton.language.constexpr) else value
        if isinstance(value, (tuple, triton.language.tuple)):
            return f"({', '.join(map(types, value))})"
        return str(getattr(value, "type", value))

    def called(self: Any, fn: Any, args: Any, kwargs: Any, *rest: Any) -> Any:
        calls.append(
            (self.module, types(tuple(inspect.getcallargs(fn.fn, *args, **kwargs).values())))
        )
        try:
            return call(self, fn, args, kwargs, *rest)
        finally:
            calls.pop()

    def mangle(*args: Any) -> str:
        name: str = mangled(*args)
        if calls:
            module, argument_types = calls[-1]
            first_types = types_of_name.setdefault((module, name), argument_types)
            if first_types != argument_types:
                collisions.append(f"{name} is {first_types} and {argument_types}")
        return name

    monkeypatch.setattr(generator.CodeGenerator, "call_JitFunction", called)
    monkeypatch.setattr(generator, "mangle_fn", mangle)
    yield
    assert not collisions


def spilled(compiled: Any) -> int:
    """Bytes of stack (NVIDIA) or registers (AMD) that the compiler spilled."""
    if "amdgcn" in compiled.asm:
        result = re.search(r"\.vgpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"])
        assert result
        return int(result[1])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(compiled.asm["cubin"])
        binary.flush()
        usage = subprocess.run(
            [tool, "-res-usage", binary.name], capture_output=True, text=True, check=True
        ).stdout
    result = re.search(r"STACK:(\d+)", usage)
    assert result, usage
    return int(result[1])


def build(plan: Callable[[], object], target: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compiles the kernels of a plan for a target; returns descriptions of those that spill."""
    assert not INTERPRETED
    CompiledForTarget.target, CompiledForTarget.spilled = TARGETS[target], []
    monkeypatch.setattr(launch, "specialise", CompiledForTarget)
    monkeypatch.setattr(launch, "_built", {})
    monkeypatch.setattr(launch, "processors", lambda index: 132)
    monkeypatch.setattr(
        launch, "waits", lambda index, acc, programs: target != "gfx942" and acc == torch.float32
    )
    plan()
    return CompiledForTarget.spilled


def each_plan(*kinds: tuple[Any, ...]) -> pytest.MarkDecorator:
    """Parametrises a test over ``kind`` (arguments of `plans`) and ``member`` (names of plans)."""
    results = [(member, kind) for kind in kinds for member in plans(*kind)]
    return pytest.mark.parametrize(
        ("member", "kind"), results, ids=lambda part: str(part).replace(" ", "")
    )


@each_plan(*((cols, dtype) for cols in WIDTHS for dtype in (torch.bfloat16, torch.float32)))
def test_compiles_for_hopper(
    member: str, kind: tuple[int, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    cols, dtype = kind
    result = build(plans(cols, dtype)[member], "sm_90", monkeypatch)
    assert cols > NO_SPILL or not result


@pytest.mark.parametrize("cols", [20480, 24576, 32767, 32768])
@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("kind", "adds"), [("layer", False), ("rms", False), ("layer", True), ("rms", True)]
)
def test_wide_rows_of_16_bits_do_not_spill(
    kind: Kind, adds: bool, parameters: torch.dtype, cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is the forward."""
    dtype, added = torch.bfloat16, torch.bfloat16 if adds else None
    dtypes = (dtype, added, added, parameters, parameters if kind == "layer" else None)
    constants = NormConstants("compiled", kind, "once", 1e-5, 0.0, None, "sum", adds)
    site = site_of(NORM, constants, dtypes, cols, device_index=-1, dropout=adds, saves=True)
    plan = lambda: norms._plan_forward(site, seed=int(adds), aligned=True, bucket=2)  # noqa: E731
    assert not build(plan, "sm_90", monkeypatch)


# From Triton 3.9 on, the assembler (ptxas of CUDA 13.4) needs too many registers for the second
# case, and spills the listed numbers of bytes. The assembler of 3.6 did not.
@pytest.mark.parametrize(
    ("kind", "save", "parameters", "cols", "from_3_9"),
    [
        ("layer", "sum", torch.bfloat16, 10240, []),
        ("rms", "sum", torch.bfloat16, 14336, [32]),
        ("layer", "output", torch.bfloat16, 12288, []),
        ("rms", "sum", torch.float32, 13312, []),
    ],
)
def test_backwards_of_wide_rows_of_16_bits_do_not_spill(
    kind: Kind,
    save: str,
    parameters: torch.dtype,
    cols: int,
    from_3_9: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The norm has no bias and no residual. Programs hold whole rows if registers suffice."""
    dtypes = (torch.bfloat16, None, None, parameters, parameters if kind == "layer" else None)
    constants = NormConstants("compiled", kind, "once", 1e-5, 0.0, None, save)
    site = site_of(NORM, constants, dtypes, cols, device_index=-1, dropout=False, saves=True)
    needs = (True, False, False, True, kind == "layer")

    def plan() -> object:
        options = {"seed": 0, "aligned": True, "multiprocessors": 0, "bucket": 2}
        return norms._plan_backward(site, needs, dy=site.y, dz=None, dcast=None, **options)

    results = [int(line.rpartition(" ")[2]) for line in build(plan, "sm_90", monkeypatch)]
    assert results == (from_3_9 if triton_version() >= (3, 9) else [])


@pytest.mark.parametrize(
    ("kind", "cols"), [("rms", 15131), ("layer", 15132), ("rms", 9001), ("rms", 20001)]
)
def test_backwards_of_unaligned_rows_that_programs_share_do_not_spill(
    kind: Kind, cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backwards have dropout and all gradients."""
    dtype = torch.bfloat16
    dtypes = (dtype, dtype, dtype, dtype, dtype if kind == "layer" else None)
    constants = NormConstants("compiled", kind, "once", 1e-5, 0.0, None, "sum")
    site = site_of(NORM, constants, dtypes, cols, device_index=-1, dropout=True, saves=True)
    needs = (True, True, True, True, kind == "layer")

    def plan() -> object:
        options = {"seed": 1, "aligned": True, "multiprocessors": 0, "bucket": 2}
        return norms._plan_backward(site, needs, dy=site.y, dz=None, dcast=None, **options)

    assert not build(plan, "sm_90", monkeypatch)


# `test_compiles_for_hopper` compiles every member. For other targets and shipped configs, the short
# suite compiles some.
@pytest.mark.shared("member", most=10)
@pytest.mark.pairs("kind.0 target", "kind.1 target")
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
@each_plan(
    (768, torch.float16),
    (4096, torch.bfloat16),
    (8192, torch.float32),
    (8192, torch.bfloat16),
    (1024, torch.float64),
)
def test_compiles_for_other_targets(
    member: str, kind: tuple[int, torch.dtype], target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = build(plans(*kind)[member], target, monkeypatch)
    assert target == "gfx942" or not result


def test_slices_of_different_widths_compile_in_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some slices have one tile and some several, with and without idle lanes."""
    member = plans(17, torch.float32)["slices without a common factor"]
    with (
        tuning.forced("slices_forward", Config(block_n=16, rows=1, warps=1)),
        tuning.forced("slices_backward", Config(block_n=16, rows=1, warps=1, per_sm=1)),
    ):
        assert not build(member, "sm_90", monkeypatch)


def modulated(
    x: Tensor, product: Tensor, bias: Tensor, gate: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """A branch of a diffusion transformer; four of its gradients are sums over rows."""
    z = x + gate * (product + bias)
    return z, (F.layer_norm(z, z.shape[-1:]) * (1 + scale) + shift).bfloat16()


def normed_twice(
    x: Tensor, product: Tensor, weight: Tensor, next_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """A branch of Gemma 2 with two norms; its backward reads and writes six tensors."""
    z = x + _normed(product, weight).bfloat16()
    return z, _normed(z, next_weight).bfloat16()


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + weight)


def requests_of(function: Callable[..., Any], inputs: list[Tensor]) -> list[launch.Request]:
    """The kernels of a row-wise function with gradients of all inputs."""
    names = list(inspect.signature(function).parameters)
    structure = structured(trace(function, inputs, function, names, lambda _: None))
    program = Program(function.__name__, function, planned(structure))
    return [request for _, request, _ in launching.chosen(program, -1, inputs)]


@pytest.mark.parametrize(
    ("function", "cols"),
    [*[(modulated, cols) for cols in (384, 768, 1024, 1152, 2048, 4096)], (normed_twice, 2304)],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_functions_of_many_tensors_do_not_spill(
    function: Callable[..., tuple[Tensor, Tensor]], cols: int
) -> None:
    """The kernel is the backward, which sums gradients in persistent programs.

    Some of the functions have a vector for each group of rows.
    """
    names = list(inspect.signature(function).parameters)
    shapes = {
        "x": (32, 256, cols),
        "product": (32, 256, cols),
        **dict.fromkeys(("gate", "shift", "scale"), (32, 1, cols)),
    }
    inputs = []
    for name in names:
        dtype = torch.float32 if name == "x" else torch.bfloat16
        inputs.append(torch.empty(shapes.get(name, (cols,)), dtype=dtype, device="meta"))
    requests = requests_of(function, inputs)
    assert len(requests) == 2
    (persistent,) = [request for request in requests if request.config.per_sm]
    assert not spilled(launch.compile_kernel(persistent, TARGETS["sm_90"]))


def layer_norm(x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, shift)


def dropout_add_layer_norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor
) -> Tensor:
    return layer_norm(F.dropout(x + bias, 0.1) + residual, weight, shift)


@pytest.mark.parametrize(
    ("function", "cols"),
    [
        (layer_norm, 12288),
        (dropout_add_layer_norm, 16384),
        (dropout_add_layer_norm, 32768),
    ],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_generated_backwards_of_wide_rows_do_not_spill(
    function: Callable[..., Tensor], cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program holds whole rows of `layer_norm`; several share a row of the other function."""
    monkeypatch.setattr(launch, "waits", lambda index, acc, programs: True)
    inputs = []
    for name in inspect.signature(function).parameters:
        shape = (2048, cols) if name in ("x", "residual") else (cols,)
        inputs.append(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
    _, backward = requests_of(function, inputs)
    assert (backward.config.columns >= cols) == (function is layer_norm)
    assert not spilled(launch.compile_kernel(backward, TARGETS["sm_90"]))


def quantised(x: Tensor, residual: Tensor, weight: Tensor, block: int) -> tuple[Tensor, ...]:
    """A norm in float8_e4m3fn, with a scale for each block of a row, and the pre-norm sum."""
    z = x + residual
    normed = F.rms_norm(z.float(), z.shape[-1:], weight.float()).unflatten(-1, (-1, block))
    scale = (normed.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
    return (normed / scale).to(torch.float8_e4m3fn).flatten(-2), scale.squeeze(-1), z


@pytest.mark.parametrize("cols", [4096, 7168, 16384, 32768])
@pytest.mark.parametrize("by_blocks", [True, False], ids=["blocks", "rows"])
def test_quantised_norms_do_not_spill_and_have_the_instruction_of_8_bits(
    cols: int, by_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that share the longest rows wait for one another in the backward."""

    def function(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return quantised(x, residual, weight, 128 if by_blocks else cols)

    monkeypatch.setattr(launch, "waits", lambda index, acc, programs: True)
    shapes = (2048, cols), (2048, cols), (cols,)
    inputs = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    for request in requests_of(function, inputs):
        compiled = launch.compile_kernel(request, TARGETS["sm_90"])
        if "forward" in request.kernel.fn.__name__:
            assert not spilled(compiled)
            assert "moments" in request.kernel.fn.__name__ or _E4M3 in compiled.asm["ptx"]


_E4M3 = "cvt.rn.satfinite.e4m3x2.f32"


@pytest.mark.shared("member", most=10)
@each_plan(
    *(
        (cols, dtype)
        for cols in (1024, 4096, 8192, 16384, 32768)
        for dtype in (torch.bfloat16, torch.float32)
    )
)
def test_shipped_configs_compile(
    member: str, kind: tuple[int, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configs are those of the shipped table, or the heuristic's for keys that it lacks."""
    monkeypatch.setattr(tuning, "device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(cache, "read", lambda key, device: None)
    build(plans(*kind)[member], "sm_90", monkeypatch)


@pytest.mark.pairs("kind.1 target")
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90"])
@each_plan(
    *(
        (cols, dtype, other)
        for cols in (8192, 16384)
        for dtype, other in (
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.float32),
            (torch.float64, torch.float64),
        )
    )
)
def test_shared_memory_suffices(
    member: str,
    kind: tuple[int, torch.dtype, torch.dtype],
    target: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The dtypes may be mixed, and all tensors are present and saved.

    A heuristic knows only one dtype.
    """
    build(plans(*kind)[member], target, monkeypatch)


# --- functions that users may write ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("cols", [64, 1024, 5120, 16384])
@every
def test_sample_functions_compile(sample: RowwiseFunction, cols: int, dtype: torch.dtype) -> None:
    for request in requests_of(sample.function, sample.without_memory(dtype, cols)):
        launch.compile_fitting(request, SHARED[90], TARGETS["sm_90"])


# Statistics of a row, and functions of a statistic. Each pair gives a softmax whose sum has a
# further term, like that of attention with a sink.
STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: x.amax(-1, keepdim=True),
    "amax from zero": lambda x: x.amax(-1, keepdim=True).clamp(min=0),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "norm": lambda x: x.norm(dim=-1, keepdim=True),
    "var": lambda x: x.var(-1, keepdim=True, unbiased=False),
    "logsumexp": lambda x: torch.logsumexp(x, -1, keepdim=True),
    "rms": lambda x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "sum of abs": lambda x: x.abs().sum(-1, keepdim=True),
    "amax - mean": lambda x: x.amax(-1, keepdim=True) - x.mean(-1, keepdim=True),
}
TERMS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp(-m)": lambda m: torch.exp(-m),
    "exp(m)": torch.exp,
    "exp(1 - m)": lambda m: torch.exp(1 - m),
    "a * m": lambda m: 0.5 * m,
    "m * m": lambda m: m * m,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "rsqrt": lambda m: torch.rsqrt(m.abs() + 1),
    "sqrt": lambda m: torch.sqrt(m.abs() + 1e-6),
    "softplus": F.softplus,
    "log": lambda m: torch.log(m.abs() + 1),
    "1 / m": lambda m: 1 / (m.abs() + 1),
    "sin": torch.sin,
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": torch.relu,
    "abs": lambda m: m.abs() + 0.1,
    "expm1": torch.expm1,
}


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("statistic", STATISTICS)
def test_reduction_that_reads_another_one_compiles(statistic: str, term: str) -> None:
    """The number of columns and the dtype are drawn at random for each case."""

    def function(x: Tensor) -> Tensor:
        m = STATISTICS[statistic](x)
        e = torch.exp(x - m)
        return e / (e.sum(-1, keepdim=True) + TERMS[term](m))

    draw = random.Random(f"{statistic} {term}")
    cols = draw.choice([16, 64, 256, 1024, 5120, 16384])
    dtype = draw.choice([torch.bfloat16, torch.float32, torch.float64])
    for request in requests_of(function, [torch.empty(4096, cols, dtype=dtype, device="meta")]):
        launch.compile_fitting(request, SHARED[90], TARGETS["sm_90"])


CONSTANTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "two compared": lambda a, b: torch.lerp(a, b, 0.3),
    "one rounded": lambda a, b: (a + b, torch.full_like(a, 0.3)),
    "one cast": lambda a, b: torch.full_like(a, 0.3).long().to(a.dtype) * b + a,
    "one of an activation": lambda a, b: F.silu(torch.full_like(a, 0.3)) * b + a,
    "products of ones": lambda a, b: (
        torch.full_like(a, 0.3).to(a.dtype) * a + torch.full_like(a, 0.7) * b
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("function", CONSTANTS.values(), ids=CONSTANTS)
def test_constants_compile(function: Callable[[Tensor, Tensor], Any], dtype: torch.dtype) -> None:
    """In fp64, a number that fp32 cannot represent is a tensor in the source.

    A constant that was cast is not a constant in the graph.
    """
    for request in requests_of(function, [torch.empty(64, 32, dtype=dtype, device="meta")] * 2):
        launch.compile_fitting(request, SHARED[90], TARGETS["sm_90"])


def test_products_are_rounded_forward_and_backward() -> None:
    """The largest product is subtracted from all products, so it must become exactly zero.

    The forward saves it rounded. If the difference were contracted into a fused multiply-add, its
    product would not be rounded.
    """

    def function(x: Tensor, scale: Tensor) -> Tensor:
        return (x * scale).softmax(-1)

    requests = requests_of(
        function, [torch.empty(64, 32, device="meta"), torch.empty(32, device="meta")]
    )
    assert len(requests) == 2
    for request in requests:
        code = launch.compile_kernel(request, TARGETS["sm_90"]).asm["ptx"]
        assert "mul" in code
        assert "sub" in code
        assert "fma" not in code
