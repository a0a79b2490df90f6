"""`fusedops.rowwise`: functions from models against PyTorch in fp64, with each layout of tiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import einops
import pytest
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops.compiler import configs
from fusedops.compiler.launching import chosen, kernels_of
from fusedops.core.configs.tuning import forced
from fusedops.core.configs.tuning_key import Config, TuningKey
from fusedops.core.launches import launch
from fusedops.core.launches.usage import usage_of
from rowwise_checks import (
    assert_matches_eager,
    check,
    cotangents_of,
    every,
    kernels,
    of,
    ones,
    randn,
    results,
    rowwise,
)
from rowwise_functions import FUNCTIONS, SAMPLES, RowwiseFunction
from support import DEVICE, KERNEL_PATH, as_tuple

# Tiles of two rows and 16 columns, in one persistent program for each multiprocessor.
_TILES_OF_16 = Config(block_n=16, rows=2, warps=1, per_sm=1)

# --- values and launches --------------------------------------------------------------------------


@kernels
@pytest.mark.pairs("sample")
@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients(sample: RowwiseFunction, dtype: torch.dtype) -> None:
    check(sample, rowwise(sample), sample.tensors(dtype, DEVICE))


@kernels
@pytest.mark.full
@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_values_in_other_dtypes(sample: RowwiseFunction, dtype: torch.dtype) -> None:
    check(sample, rowwise(sample), sample.tensors(dtype, DEVICE))


@pytest.fixture
def several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program processes at most two rows at a time, and two tiles already have two programs."""
    heuristic = configs.heuristic

    def of_few_rows(key: TuningKey) -> Config:
        config = heuristic(key)
        return replace(config, rows=min(config.rows, 2))

    monkeypatch.setattr(configs, "heuristic", of_few_rows)
    monkeypatch.setattr("fusedops.compiler.launcher.MOST_ALONE", 1)


@kernels
@every
@pytest.mark.usefixtures("several_programs")
def test_partial_sums_of_several_programs(sample: RowwiseFunction) -> None:
    """Without the fixture, only many rows have several programs with partial sums."""
    check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE))


@kernels
def test_one_program_stores_the_gradients_of_few_rows() -> None:
    sample = SAMPLES["llama_norm"]
    with launch.record() as launched:
        results(rowwise(sample), sample.tensors(torch.float32, DEVICE, rows=5))
    assert launched == ["forward_kernel", "backward_kernel"]


@kernels
@pytest.mark.parametrize("name", ["per_head_norm_grouped", "per_channel_norm_grouped"])
def test_each_program_of_a_backward_has_rows_of_one_head(name: str) -> None:
    """It sums the gradient of the weight of this head (or channel) in registers."""
    sample = SAMPLES[name]
    tensors = sample.tensors(torch.float32, DEVICE)
    check(sample, rowwise(sample), tensors)
    with launch.record() as launched:
        results(rowwise(sample), tensors)
    assert launched == ["forward_kernel", "backward_kernel", "reduce_kernel"]


# Functions whose products may, or may not, be contracted into fused multiply-adds.
_CONTRACTED = {
    "layer_norm": lambda x, y: F.layer_norm(x, x.shape[-1:]) * y,
    "softmax": lambda x, y: torch.softmax(x, -1) * y,
    "clamped": lambda x, y: x.clamp(-1.0) * y,
    "sum of a product again": lambda x, y: F.layer_norm(x * y + y, x.shape[-1:]),
    "difference of constants": lambda x, y: x * y * ((x * x).detach() - (y * y).detach()).sqrt(),
    "sum along a row again": lambda x, y: x * (y / (y * y).sum().sqrt()),
    "smooth function of a sum": lambda x, y: torch.tanh(x * y + y),
    "gate of a sum": lambda x, y: F.silu(x * y + y),
    "other function of a sum": lambda x, y: F.relu(x * y + y),
    "sum that is read otherwise": lambda x, y: torch.tanh(x * y + y) * (x * y + y),
    "square and epsilon": lambda x, y: x * (y * y + 1e-5).rsqrt(),
    "product and epsilon": lambda x, y: x * (x * y + 1e-5).rsqrt(),
}
_MAY_CONTRACT = {"layer_norm", "smooth function of a sum", "gate of a sum", "square and epsilon"}


@pytest.mark.parametrize("name", _CONTRACTED)
def test_only_some_backwards_contract_products(name: str) -> None:
    """A contracted product is not rounded before it is added.

    Forwards round all products. So do backwards that compare values, or recompute a sum which may
    cancel, unless a smooth function alone reads it.
    """
    programs = fusedops.rowwise(_CONTRACTED[name], strict=True)._programs
    shape = (300,) if name == "sum along a row again" else (4, 300)
    tensors = [torch.randn(4, 300), torch.randn(shape)]
    kernels = kernels_of(programs.find(tensors, autocast=False).program, tensors)
    contracted = [kernel.contracts for kernel in kernels]
    assert contracted == [False, name in _MAY_CONTRACT]


@pytest.mark.parametrize(
    ("function", "dtype", "is_narrow"),
    [
        (lambda x: x.tanh(), torch.bfloat16, True),
        (lambda x: x.tanh(), torch.float16, True),
        (lambda x: x.tanh(), torch.float32, False),
        (lambda x: x.tanh() * x, torch.bfloat16, False),
    ],
)
def test_tanh_of_16_bits_has_fewer_instructions(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, is_narrow: bool
) -> None:
    """It does if nothing but the rounding reads it."""
    tensors = [torch.randn(4, 300, dtype=dtype)]
    program = fusedops.rowwise(function)._programs.find(tensors, autocast=False).program
    forward, *_ = kernels_of(program, tensors)
    assert ("= tanh_in_16_bits(" in forward.source) == is_narrow


@kernels
def test_tanh_of_a_negative_zero_in_16_bits() -> None:
    x = torch.full((4, 24), -0.0, device=DEVICE, dtype=torch.bfloat16)
    assert fusedops.rowwise(lambda x: x.tanh())(x).signbit().all()


@kernels
def test_differences_of_equal_values() -> None:
    """They are zero without a sign, or NaN for values that are not finite."""
    x = torch.tensor([[3.0, -3.0, 0.0, -0.0, math.inf, -math.inf, math.nan]], device=DEVICE)
    found = fusedops.rowwise(lambda x: x * 0.1 - x * 0.1, strict=True)(x)
    expected = torch.tensor([[0.0] * 4 + [math.nan] * 3], device=DEVICE)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert not found[~found.isnan()].signbit().any()


@kernels
@every
@pytest.mark.usefixtures("several_programs")
def test_forward_and_backward_launch_one_kernel_each(sample: RowwiseFunction) -> None:
    """A backward with sums over the rows launches a reduction, too."""
    function, tensors = rowwise(sample), sample.tensors(torch.float32, DEVICE)
    # Gradients of cosines and sines, which models do not train, are written for each row, and
    # PyTorch sums them.
    names = [name for name in sample.floating() if name not in ("cos", "sin")]
    with launch.record() as launched:
        results(function, tensors, names=names)
    assert launched == [
        "forward_kernel",
        "backward_kernel",
        *(["reduce_kernel"] if sample.sums else []),
    ]
    with launch.record() as launched, torch.no_grad():
        function(*tensors.values())
    assert launched == ["forward_kernel"]


@kernels
@every
def test_other_numbers_of_rows_compile_no_kernel(sample: RowwiseFunction) -> None:
    function = rowwise(sample)
    results(function, sample.tensors(torch.float32, DEVICE))
    before = launch.variants()
    if "grouped" in sample.name or sample.name == "gate_and_residual":
        numbers = (sample.rows + 2, 16)  # groups of fewer rows have another kernel
    elif "windowed" in sample.name:
        numbers = (sample.rows - 2, 2)  # more rows have another kernel; one is another function
    else:
        numbers = (sample.rows + 2, 1)
    for rows in numbers:
        check(sample, function, sample.tensors(torch.float32, DEVICE, rows))
    assert launch.variants() == before


@kernels
@of("gemma_norm", "norm_and_rotary", "adaptive_layer_norm_indexed", "cross_entropy")
def test_first_call_with_one_row(sample: RowwiseFunction) -> None:
    function = rowwise(sample)
    for rows in (1, 4):
        check(sample, function, sample.tensors(torch.float32, DEVICE, rows))


@kernels
@pytest.mark.parametrize("name", ["rearrange", "einops.rearrange"])
def test_heads_split_by_einops(name: str) -> None:
    """By `rearrange` or `einops.rearrange`; other batch sizes run the same kernel."""

    def directly(x: Tensor, weight: Tensor) -> Tensor:
        heads = rearrange(x, "b t (h d) -> b h t d", d=8)
        return rearrange(F.rms_norm(heads, (8,), weight, 1e-6), "b h t d -> b t (h d)")

    def by_package(x: Tensor, weight: Tensor) -> Tensor:
        heads = einops.rearrange(x, "b t (h d) -> b h t d", d=8)
        return einops.rearrange(F.rms_norm(heads, (8,), weight, 1e-6), "b h t d -> b t (h d)")

    function = fusedops.rowwise(directly if name == "rearrange" else by_package, strict=True)
    weight, built = randn(8), []
    for shape in ((2, 3, 24), (4, 5, 24)):
        x = randn(*shape)
        expected = F.rms_norm(x.unflatten(-1, (3, 8)), (8,), weight, 1e-6).flatten(-2)
        torch.testing.assert_close(function(x, weight), expected, rtol=1e-5, atol=1e-5)
        built.append(launch.variants())
    assert built[0]
    assert built[0] == built[1]


@kernels
def test_batch_dimensions_merged_in_the_function() -> None:
    """The function calls ``view(-1, N)``; other batch sizes run the same kernel."""

    @fusedops.rowwise(strict=True)
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.view(-1, x.shape[-1]), x.shape[-1:], weight).view(x.shape)

    weight, built = randn(24), []
    for shape in ((2, 3, 24), (4, 5, 24), (7, 3, 24)):
        x = randn(*shape)
        torch.testing.assert_close(
            function(x, weight), F.rms_norm(x, (24,), weight), rtol=1e-5, atol=1e-5
        )
        built.append(launch.variants())
    assert len(set(built)) == 1


@pytest.mark.skipif(KERNEL_PATH, reason="for devices without the kernels")
@every
def test_without_kernels_the_plain_function_runs(sample: RowwiseFunction) -> None:
    tensors = sample.tensors()
    with launch.record() as launched:
        torch.manual_seed(3)
        outputs, grads = results(rowwise(sample), tensors)
    torch.manual_seed(3)
    expected, wanted = results(sample.function, tensors)
    assert launched == []
    for got, want in zip((*outputs, *grads.values()), (*expected, *wanted.values()), strict=True):
        assert torch.equal(got, want)


@pytest.mark.compiled
@pytest.mark.parametrize("cols", [40, 384, 20000])
@of("dropout_add_layer_norm", "masked_softmax", "adaptive_layer_norm_grouped")
def test_compiles_for_hopper(sample: RowwiseFunction, cols: int) -> None:
    """Compiles, without a GPU, the kernels of the heuristics' configs; they have few spills.

    The widths are those of whole rows, of rows in three parts, and of long rows.
    """
    compiler = pytest.importorskip("triton.backends.compiler")
    tensors = [
        t[..., :1].expand(*t.shape[:-1], cols).contiguous() if t.shape[-1] > 1 else t
        for t in sample.tensors(torch.bfloat16).values()
    ]
    program = rowwise(sample)._programs.find(tensors, autocast=False).program
    hopper = compiler.GPUTarget("cuda", arch=90, warp_size=32)
    for _, request, _ in chosen(program, device_index=-1, tensors=tensors):
        usage = usage_of(launch.compile_fitting(request, 232_448, hopper))
        assert usage.registers and usage.spills <= 128, request


# --- long rows ------------------------------------------------------------------------------------


@pytest.fixture
def short_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows longer than 16 columns are processed in tiles of 16."""
    monkeypatch.setattr("fusedops.compiler.operator.LONGEST_ROW", 16)
    monkeypatch.setattr("fusedops.compiler.configs._of_long_rows", lambda key: _TILES_OF_16)


@kernels
@every
@pytest.mark.usefixtures("short_programs")
def test_long_rows(sample: RowwiseFunction) -> None:
    function, tensors = rowwise(sample), sample.tensors(torch.float32, DEVICE)
    check(sample, function, tensors)
    if max(t.shape[-1] for t in tensors.values()) > 16 * sample.parts:
        with launch.record() as launched:
            results(function, tensors)
        assert len(launched) <= 5
        without_reductions = {
            "layer_scale",
            "dynamic_tanh",
            "softcap",
            "dropped_geglu",
            "partial_rotary",
        }
        if sample.name not in without_reductions:
            assert launched[0] == "forward_moments_kernel"


@kernels
@pytest.mark.usefixtures("short_programs")
def test_successive_reductions_of_long_rows() -> None:
    """Each reduction takes its own pass over the row."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        y = F.softmax(F.layer_norm(x, x.shape[-1:], weight), -1)
        return (y - y.amax(-1, keepdim=True)) * torch.logsumexp(x * y, -1, keepdim=True)

    sample = RowwiseFunction(
        "reductions", function, lambda rows: {"x": (rows, 40), "weight": (40,)}
    )
    check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE))


@kernels
@pytest.mark.usefixtures("short_programs")
def test_long_rows_split_into_even_and_odd_columns() -> None:
    def function(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Tensor:
        y = F.rms_norm(x, x.shape[-1:], weight, 1e-6)
        even, odd = y[..., ::2], y[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

    sample = RowwiseFunction(
        "alternating",
        function,
        lambda rows: {"x": (rows, 80), "cos": (40,), "sin": (40,), "weight": (80,)},
    )
    check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE))


@kernels
@pytest.mark.usefixtures("short_programs")
@pytest.mark.parametrize("masked", ["first", "last", "both", "all"])
@pytest.mark.parametrize("case", ["softmax", "log_softmax", "logsumexp", "amax"])
def test_long_rows_with_tiles_that_are_masked(case: str, masked: str) -> None:
    """All elements of these tiles are -inf, so the largest one must not be subtracted."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": lambda x: torch.softmax(x, -1),
        "log_softmax": lambda x: torch.log_softmax(x, -1),
        "logsumexp": lambda x: torch.logsumexp(x, -1),
        "amax": lambda x: x.amax(-1),
    }
    columns = {
        "first": slice(0, 16),
        "last": slice(32, 48),
        "both": slice(0, 32),
        "all": slice(0, 48),
    }
    x = randn(3, 48)
    x[1, columns[masked]] = float("-inf")
    got = fusedops.rowwise(functions[case], strict=True)(x)
    torch.testing.assert_close(got, functions[case](x), rtol=1e-5, atol=1e-5, equal_nan=True)


@kernels
@pytest.mark.usefixtures("short_programs")
@pytest.mark.parametrize("case", ["layer_norm", "logsumexp", "norm"])
@pytest.mark.parametrize("shape", [(40,), (3, 1, 40)], ids=["vector", "groups"])
def test_reductions_of_long_vectors(case: str, shape: tuple[int, ...]) -> None:
    """Many rows share the vector that is reduced."""
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "layer_norm": lambda x, v: x * F.layer_norm(v, v.shape[-1:]),
        "logsumexp": lambda x, v: x * v + torch.logsumexp(v, -1, keepdim=True),
        "norm": lambda x, v: x * v * v.norm(dim=-1, keepdim=True),
    }
    sample = RowwiseFunction(case, functions[case], lambda rows: {"x": (3, rows, 40), "v": shape})
    for rows in (5, 20):
        check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE, rows))


@kernels
@pytest.mark.usefixtures("short_programs")
def test_integers_beyond_32_bits_in_long_rows() -> None:
    x, i = randn(3, 48), torch.arange(2**40, 2**40 + 48, device=DEVICE)

    def function(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        j = i * (x == x)
        return x * 2, j.sum(-1), j.amax(-1), j.amin(-1)

    for got, want in zip(
        fusedops.rowwise(function, strict=True)(x, i), function(x, i), strict=True
    ):
        assert got.dtype == want.dtype and torch.equal(got, want)


@kernels
def test_minimum_of_rows_with_the_least_integer() -> None:
    """The least integer has no negative, so the minimum is not that of a maximum of negatives."""
    i = torch.arange(80, device=DEVICE).view(2, 40)
    i[:, 3] = torch.iinfo(torch.int64).min

    def function(i: Tensor) -> tuple[Tensor, ...]:
        return i.amin(-1), i.argmin(-1), *i.min(-1)

    for got, want in zip(fusedops.rowwise(function, strict=True)(i), function(i), strict=True):
        assert torch.equal(got, want)


# --- layouts of tiles -----------------------------------------------------------------------------


@pytest.fixture
def own_operators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators are registered under the test's name, since their kernels differ from other tests'.

    A process registers an operator once, and never removes it.
    """
    monkeypatch.setattr(
        "fusedops.compiler.operator._identifier", lambda name: request.node.originalname
    )


@pytest.fixture
def narrow_tiles(own_operators: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 24 columns are held in several tiles side by side, as rows of more than 256 are."""
    monkeypatch.setattr("fusedops.compiler.codegen.WIDEST_TILE", 8)
    monkeypatch.setattr("fusedops.compiler.configs.WIDEST_TILE", 8)


@kernels
@every
@pytest.mark.usefixtures("narrow_tiles")
def test_tiles_side_by_side(sample: RowwiseFunction) -> None:
    config = Config(block_n=16, rows=2, warps=1, parts=2)
    with forced("rowwise_forward", config), forced("rowwise_backward", replace(config, per_sm=1)):
        check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE))


@kernels
@every
@pytest.mark.usefixtures("narrow_tiles")
def test_rows_that_programs_share(sample: RowwiseFunction, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has two programs, if the kernel allows it; the second one has idle lanes."""
    monkeypatch.setattr(launch, "waits", lambda index, acc, programs: False)
    with forced("rowwise_backward", _TILES_OF_16):
        check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE))


@kernels
@pytest.mark.parametrize("parts", [3, 5])
@of("dropout_add_layer_norm", "gated_residual_norm", "swiglu_norm")
def test_widths_without_idle_lanes(sample: RowwiseFunction, parts: int) -> None:
    """Rows of 384 or 640 columns are held in tiles of 128, not in one of 512 or 1024."""
    tensors = {}
    for name, t in sample.tensors(torch.float32, DEVICE).items():
        # Each 24 columns of a tensor become 128 columns for each part. A single column becomes none.
        widened = torch.cat([t.repeat_interleave(16, -1)] * 2, -1)
        tensors[name] = widened[..., : t.shape[-1] // 24 * 128 * parts]
    function = rowwise(sample)
    check(sample, function, tensors)
    configs = [kernel.config for kernel in function.explain(*tensors.values()).kernels]
    assert [config.columns for config in configs] == [128 * parts] * 2


@kernels
@pytest.mark.parametrize("cols", [48, 768])
def test_equal_largest_elements_in_several_parts_share_the_gradient(cols: int) -> None:
    """In rows of small integers the largest occurs several times, also in several parts of a row.

    The function splits a row in two, and the kernel splits each 384 columns into parts again.
    """
    x = torch.randint(-3, 4, (3, cols), generator=torch.Generator().manual_seed(5)).to(
        DEVICE, torch.float32
    )

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.cat([part * 2.0 for part in x.chunk(2, -1)], -1)
        return x / x.abs().amax(-1, keepdim=True), y.amax(-1), y.amin(-1)

    with launch.record() as launched:
        assert_matches_eager(function, {"x": x}, rtol=1e-6, atol=1e-6)
    assert launched == ["forward_kernel", "backward_kernel"]


@kernels
@pytest.mark.parametrize(
    ("dtype", "cols", "forwards"),
    [
        (torch.bfloat16, 32768, 1),
        (torch.bfloat16, 32769, 2),
        (torch.float32, 16384, 1),
        (torch.float32, 16385, 2),
    ],
)
def test_longest_rows_that_one_forward_kernel_holds(
    dtype: torch.dtype, cols: int, forwards: int
) -> None:
    function = fusedops.rowwise(lambda x: x - x.mean(-1, keepdim=True), strict=True)
    x = torch.empty(2, cols, device=DEVICE, dtype=dtype)
    names = [kernel.name for kernel in function.explain(x).kernels]
    assert [name.startswith("forward") for name in names].count(True) == forwards


@kernels
@pytest.mark.parametrize("cols", [64, 512])
def test_vector_that_is_cast_to_16_bits(cols: int) -> None:
    """As a bias is under autocast; rows of 512 columns hold their vectors."""
    function = fusedops.rowwise(lambda x, b: F.relu(x + b.to(torch.bfloat16)), strict=True)
    x, b = randn(20, cols).bfloat16().requires_grad_(), randn(cols).requires_grad_()
    y = function(x, b)
    cotangent = randn(20, cols).bfloat16()
    dx, db = torch.autograd.grad(y, (x, b), cotangent)
    total = x.double() + b.double()  # the cast changes gradients alone
    # One rounding to bf16; the interpreter truncates.
    torch.testing.assert_close(y.double(), total.relu(), rtol=2.0**-7, atol=0)
    passed = cotangent.double() * (total > 0)
    assert torch.equal(dx.double(), passed)
    # A sum of 20 rows in fp32, and the rounding of the cast bias's gradient.
    torch.testing.assert_close(db.double(), passed.sum(0), rtol=2.0**-7, atol=20 * 20 * 2.0**-24)


@kernels
@every
@pytest.mark.usefixtures("own_operators")
def test_vectors_are_loaded_for_each_tile_if_registers_are_too_few(
    sample: RowwiseFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusedops.compiler.codegen._REGISTERS", 0)
    check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE, rows=37))


@kernels
@every
@pytest.mark.usefixtures("own_operators")
def test_backward_in_tiles(sample: RowwiseFunction, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward holds whole rows; the backward needs more registers, and processes tiles."""
    monkeypatch.setattr("fusedops.compiler.codegen._MOST_LIVE", 0)
    monkeypatch.setattr("fusedops.compiler.configs._of_long_rows", lambda key: _TILES_OF_16)
    function, tensors = rowwise(sample), sample.tensors(torch.float32, DEVICE)
    check(sample, function, tensors)
    with launch.record() as launched:
        results(function, tensors)
    assert launched[0] == "forward_kernel" and launched.count("backward_kernel") == 1


@kernels
@pytest.mark.usefixtures("own_operators")
def test_backward_that_cannot_be_computed_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function sums integers along rows. The kernel holds whole rows, even if it spills."""
    monkeypatch.setattr("fusedops.compiler.codegen._MOST_LIVE", 0)
    sample = RowwiseFunction(
        "count", lambda x: x * x * (x > 0).sum(-1, keepdim=True), lambda rows: {"x": (rows, 24)}
    )
    function, tensors = rowwise(sample), sample.tensors(torch.float32, DEVICE)
    check(sample, function, tensors)
    with launch.record() as launched:
        results(function, tensors)
    assert launched == ["forward_kernel", "backward_kernel"]


# --- dropout --------------------------------------------------------------------------------------

DROPPING = [sample for sample in FUNCTIONS if sample.drops]
dropping = pytest.mark.parametrize("sample", DROPPING, ids=lambda sample: sample.name)


@dropping
def test_same_seed_draws_the_same_mask(sample: RowwiseFunction) -> None:
    function, tensors = rowwise(sample), sample.tensors(torch.float32, DEVICE)

    def run(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        outputs, grads = results(function, tensors)
        return [*outputs, *grads.values()]

    first, repeated, other = run(seed=1), run(seed=1), run(seed=2)
    assert all(map(torch.equal, first, repeated))
    assert not torch.equal(first[0], other[0])


@dropping
def test_outputs_under_no_grad_have_the_same_bits(sample: RowwiseFunction) -> None:
    function, tensors = rowwise(sample), sample.tensors(torch.bfloat16, DEVICE)
    torch.manual_seed(1)
    outputs, _ = results(function, tensors)
    torch.manual_seed(1)
    with torch.no_grad():
        outputs_under_no_grad = as_tuple(function(*tensors.values()))
    assert all(map(torch.equal, outputs, outputs_under_no_grad))


@dropping
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
def test_checkpointing_recomputes_the_same_mask(sample: RowwiseFunction, reentrant: bool) -> None:
    function, tensors = rowwise(sample), sample.tensors(torch.float32, DEVICE)

    def run(call: Callable[..., Any]) -> list[Tensor]:
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors.values()]
        torch.manual_seed(1)
        outputs = as_tuple(call(*leaves))
        torch.autograd.backward(outputs, cotangents_of(outputs))
        return [*outputs, *[leaf.grad for leaf in leaves if leaf.grad is not None]]

    plain = run(function)
    checkpointed = run(lambda *args: checkpoint(function, *args, use_reentrant=reentrant))
    assert len(plain) == len(checkpointed)
    assert all(map(torch.equal, plain, checkpointed))


@kernels
def test_mask_is_the_same_in_the_backward() -> None:
    x = ones(37, 40).requires_grad_()
    y = fusedops.rowwise(lambda x: F.dropout(x, 0.5), strict=True)(x)
    (grad,) = torch.autograd.grad(y, x, ones(37, 40))
    assert torch.equal(grad, y) and {0.0, 2.0} == set(y.flatten().tolist())


@kernels
def test_two_dropouts_in_a_function_draw_different_masks() -> None:
    y, z = fusedops.rowwise(lambda x: (F.dropout(x, 0.5), F.dropout(x, 0.5)), strict=True)(
        ones(37, 40)
    )
    assert 0.4 < (y != z).double().mean().item() < 0.6


@kernels
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_expected_share(p: float) -> None:
    """The share is within five standard deviations of its mean."""
    y = fusedops.rowwise(lambda x, p: F.dropout(x, p), strict=True)(ones(128, 64), p)
    share = (y != 0).double().mean().item()
    assert abs(share - (1 - p)) <= 5 * (p * (1 - p) / y.numel()) ** 0.5
    torch.testing.assert_close(y.max().item(), 1 / (1 - p), rtol=1e-4, atol=0.0)


@kernels
@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_no_or_all_elements(p: float) -> None:
    x = randn(5, 24).requires_grad_()
    y = fusedops.rowwise(lambda x, p: F.dropout(x, p) * 2, strict=True)(x, p)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y.detach(), x.detach() * 2 * (1 - p)) and torch.equal(
        grad, torch.full_like(x, 2 * (1 - p))
    )


@kernels
def test_dropout_follows_its_module() -> None:
    """A module's ``training`` is read in every call, as PyTorch reads it."""
    drop, x = nn.Dropout(0.5), randn(37, 24)
    function = fusedops.rowwise(lambda x: drop(x) * 2.0, strict=True)
    assert not torch.equal(function(x), x * 2)
    drop.eval()
    assert torch.equal(function(x), x * 2)
    drop.train()
    assert not torch.equal(function(x), x * 2)


@kernels
def test_functions_that_differ_in_p_share_no_operator(fresh_dynamo: None) -> None:
    """The operators that are registered for torch.compile have the probability in their key."""

    def function(x: Tensor, p: float) -> Tensor:
        return F.dropout(x, p)

    fused = fusedops.rowwise(function, strict=True)
    for p in (0.1, 0.75):
        fused(ones(128, 64), p)
        compiled = torch.compile(lambda x, p=p: fused(x, p), fullgraph=True, backend="aot_eager")
        assert abs((compiled(ones(128, 64)) == 0).double().mean().item() - p) < 0.05


@pytest.mark.parametrize(
    "number", [torch.finfo(torch.float64).min, 1e300, -1e-300, 3.3e39, 1e-40, 0.1]
)
def test_numbers_in_fp64_are_exact(number: float) -> None:
    """Also beyond fp32's range: attention masks contain the least number of their dtype."""

    @fusedops.rowwise(strict=True)
    def filled(x: Tensor) -> Tensor:
        return torch.where(x > 0, number, x)

    x = torch.randn(3, 8, dtype=torch.float64, device=DEVICE)
    assert torch.equal(filled(x), torch.where(x > 0, number, x))


@pytest.mark.kernels
def test_numbers_under_a_default_device() -> None:
    """The default device is meta, on which a constant could not be rounded to fp32."""
    x = randn(3, 24).double()
    function = fusedops.rowwise(lambda x: x * 0.1 + x.float(), strict=True)
    with torch.device("meta"):
        result = function(x)
    torch.testing.assert_close(result, function.function(x))
