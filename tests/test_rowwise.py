"""`fusedops.rowwise`: functions from models against PyTorch in fp64, and everything that a call may be part of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops.core import launch
from fusedops.core.tuning_key import Config
from rowwise_functions import DROP, FUNCTIONS, SAMPLES, RowwiseFunction, named, subsets
from support import DEVICE, INTERPRETED, KERNEL_PATH, OFFSET, SEED, as_tuple, drop_threshold, fixed_draw, keep_mask
from tolerances import a_rounding_away, unit_roundoff

kernels = pytest.mark.kernels
every = pytest.mark.parametrize("sample", FUNCTIONS, ids=lambda sample: sample.name)


def of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("sample", named(*names), ids=lambda sample: sample.name)


# --- the oracle ---------------------------------------------------------------------------------------------------------


@contextmanager
def masks(sample: RowwiseFunction) -> Iterator[None]:
    """Within it `F.dropout` has the masks that the kernels draw: a part of a row is a row to them."""
    count, parts = 0, sample.parts

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        nonlocal count
        rows, cols = input.numel() // input.shape[-1], input.shape[-1] // (parts if sample.drops_whole else 1)
        keep = keep_mask(SEED, OFFSET + (count << 48), rows * parts, cols, p, device=input.device)
        count += 1
        scale = 1.0 / (1.0 - drop_threshold(p) / 65536)
        keep = keep.view(rows, parts, cols) if sample.drops_whole else keep.view(rows, parts, cols)[:, 0]
        return input * (keep.reshape(input.shape) * scale).to(input.dtype)

    with mock.patch.object(F, "dropout", dropout):
        yield


def cotangents_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device, out.dtype)
            for out in outputs]  # fmt: skip


def results(function: Callable[..., Any], tensors: dict[str, Tensor], cotangents: Sequence[Tensor] | None = None,
            names: Sequence[str] | None = None) -> tuple[list[Tensor], dict[str, Tensor]]:  # fmt: skip
    """The outputs, and the gradients for some of the tensors, by default all that may have one."""
    names = [name for name, t in tensors.items() if t.is_floating_point()] if names is None else names
    leaves = {name: t.detach().requires_grad_(name in names) for name, t in tensors.items()}
    outputs = list(as_tuple(function(*leaves.values())))
    cotangents = cotangents_of(outputs) if cotangents is None else [c.to(o.dtype) for c, o in zip(cotangents, outputs)]  # noqa: B905
    grads = torch.autograd.grad(outputs[: len(cotangents)], [leaves[name] for name in names], cotangents)
    return [out.detach() for out in outputs], dict(zip(names, grads, strict=True))


def wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}


def assert_as_good(got: Tensor, exact: Tensor, eager: Sequence[Tensor], what: str, units: float = 8.0) -> None:
    """The error is at most twice eager PyTorch's, its largest of a few, or some units of roundoff of the largest value.

    A unit for each of the few operators on a value's way from the inputs; those of a sum of n terms are a tree's, of depth
    log2 n. The interpreter rounds fp32 to bf16 towards zero: an error of two units where there is one.
    """
    assert got.shape == exact.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    assert got.dtype == eager[0].dtype, f"{what}: {got.dtype}, expected {eager[0].dtype}"
    assert torch.equal(got.isfinite(), exact.isfinite()), f"{what}: not finite"
    if got.dtype in (torch.bfloat16, torch.float16) and INTERPRETED:
        units *= 2
    error, *natives = ((t.double() - exact).nan_to_num().abs().max().item() for t in (got, *eager))
    native, finite = max(natives), exact[exact.isfinite()]
    floor = units * unit_roundoff(got.dtype) * (finite.abs().max().item() if finite.numel() else 0.0)
    assert error <= 2 * native + floor, f"{what}: error {error:.3g}, eager's {native:.3g}, floor {floor:.3g}"


def check(sample: RowwiseFunction, function: Callable[..., Any], tensors: dict[str, Tensor],
          names: Sequence[str] | None = None) -> None:  # fmt: skip
    """Values and gradients of a function made of the sample's, held to the sample's own in fp64."""
    with fixed_draw():
        outputs, grads = results(function, tensors, names=names)
    cotangents = cotangents_of(outputs)
    with masks(sample):
        exact, exact_grads = results(sample.function, wide(tensors), cotangents, names)
    with masks(sample), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        near = [{name: a_rounding_away(t, draw) for name, t in tensors.items()} for draw in range(3)]
        eager = [results(sample.function, given, cotangents, names) for given in (tensors, *near)]
    for number, (got, want) in enumerate(zip(outputs, exact, strict=True)):
        assert_as_good(got, want, [natives[number] for natives, _ in eager], f"{sample.name}: output {number}")
    for name, got in grads.items():
        # The largest gradient of a vector is the sum of many.
        assert_as_good(
            got, exact_grads[name], [natives[name] for _, natives in eager], f"{sample.name}: gradient of {name}", 16.0
        )


def rowwise(sample: RowwiseFunction) -> Any:
    return fusedops.rowwise(sample.function, strict=True)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, device=DEVICE)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


# --- values and launches ------------------------------------------------------------------------------------------------


@kernels
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


@kernels
@every
def test_one_kernel_each_way(sample: RowwiseFunction) -> None:
    function, tensors = rowwise(sample), sample.tensors(torch.float32, DEVICE)
    # Of cosines and the like, which a model never trains, gradients are written whole and summed by PyTorch.
    names = [name for name in sample.floating() if name not in ("cos", "sin")]
    with launch.record() as launched:
        results(function, tensors, names=names)
    assert launched == ["forward_kernel", "backward_kernel", *(["reduce_kernel"] if sample.sums else [])]
    with launch.record() as launched, torch.no_grad():
        function(*tensors.values())
    assert launched == ["forward_kernel"]


@kernels
@every
def test_new_numbers_of_rows_build_nothing(sample: RowwiseFunction) -> None:
    function = rowwise(sample)
    results(function, sample.tensors(torch.float32, DEVICE))
    before = launch.variants()
    least = 16 if "grouped" in sample.name or sample.name == "gate_and_residual" else 1  # fewer run another kernel
    for rows in (sample.rows + 2, least):
        check(sample, function, sample.tensors(torch.float32, DEVICE, rows))
    assert launch.variants() == before


@kernels
@of("gemma_norm", "norm_and_rotary", "adaptive_layer_norm_indexed", "cross_entropy")
def test_first_call_with_one_row(sample: RowwiseFunction) -> None:
    function = rowwise(sample)
    for rows in (1, 4):
        check(sample, function, sample.tensors(torch.float32, DEVICE, rows))


@kernels
def test_batch_dimensions_merged_in_the_function() -> None:
    """``view(-1, N)``: another batch is no other kernel."""

    @fusedops.rowwise(strict=True)
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.view(-1, x.shape[-1]), x.shape[-1:], weight).view(x.shape)

    weight, built = randn(24), []
    for shape in ((2, 3, 24), (4, 5, 24), (7, 3, 24)):
        x = randn(*shape)
        torch.testing.assert_close(function(x, weight), F.rms_norm(x, (24,), weight), rtol=1e-5, atol=1e-5)
        built.append(launch.variants())
    assert len(set(built)) == 1


@pytest.mark.skipif(KERNEL_PATH, reason="of devices without the kernels")
@every
def test_without_kernels_the_function_runs(sample: RowwiseFunction) -> None:
    tensors = sample.tensors()
    with launch.record() as launched:
        torch.manual_seed(3)
        outputs, grads = results(rowwise(sample), tensors)
    torch.manual_seed(3)
    expected, wanted = results(sample.function, tensors)
    assert launched == []
    for got, want in zip((*outputs, *grads.values()), (*expected, *wanted.values()), strict=True):
        assert torch.equal(got, want)


# --- long rows ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def short_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program holds 16 columns: rows are passed over in tiles."""
    monkeypatch.setattr("fusedops.compiler.operator.LONGEST_ROW", 16)
    monkeypatch.setattr("fusedops.compiler.configs._WHOLE", 16)
    monkeypatch.setattr("fusedops.compiler.configs._of_long_rows", lambda key: Config(16, 2, 1, 1, 1))


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
        if sample.name not in (
            "layer_scale",
            "dynamic_tanh",
            "softcap",
            "dropped_geglu",
            "partial_rotary",
        ):  # without reductions
            assert launched[0] == "forward_moments_kernel"


@kernels
@pytest.mark.usefixtures("short_programs")
def test_reductions_that_follow_each_other_in_long_rows() -> None:
    """Each takes a pass over the row of its own."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        y = F.softmax(F.layer_norm(x, x.shape[-1:], weight), -1)
        return (y - y.amax(-1, keepdim=True)) * torch.logsumexp(x * y, -1, keepdim=True)

    sample = RowwiseFunction("reductions", function, lambda rows: {"x": (rows, 40), "weight": (40,)})
    check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE))


@kernels
@pytest.mark.usefixtures("short_programs")
@pytest.mark.parametrize("where", ["first", "last", "both", "all"])
@pytest.mark.parametrize("case", ["softmax", "log_softmax", "logsumexp", "amax"])
def test_long_rows_that_are_masked(case: str, where: str) -> None:
    """A tile of nothing but -inf has no largest element to subtract."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": lambda x: torch.softmax(x, -1),
        "log_softmax": lambda x: torch.log_softmax(x, -1),
        "logsumexp": lambda x: torch.logsumexp(x, -1),
        "amax": lambda x: x.amax(-1),
    }
    x, ends = randn(3, 48), {"first": (0, 16), "last": (32, 48), "both": (0, 32), "all": (0, 48)}
    x[1, slice(*ends[where])] = float("-inf")
    got = fusedops.rowwise(functions[case], strict=True)(x)
    torch.testing.assert_close(got, functions[case](x), rtol=1e-5, atol=1e-5, equal_nan=True)


@kernels
@pytest.mark.usefixtures("short_programs")
@pytest.mark.parametrize("case", ["layer_norm", "logsumexp", "norm"])
@pytest.mark.parametrize("shape", [(40,), (3, 1, 40)], ids=["vector", "groups"])
def test_reductions_of_long_vectors(case: str, shape: tuple[int, ...]) -> None:
    """Of what is the same in many rows."""
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
def test_integers_in_long_rows() -> None:
    x, i = randn(3, 48), torch.arange(2**40, 2**40 + 48, device=DEVICE)

    def function(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        j = i * (x == x)
        return x * 2, j.sum(-1), j.amax(-1), j.amin(-1)

    for got, want in zip(fusedops.rowwise(function, strict=True)(x, i), function(x, i), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


# --- how rows are held --------------------------------------------------------------------------------------------------


@pytest.fixture
def three_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows of 24 columns are three parts, as those of 1536 are."""
    monkeypatch.setattr("fusedops.compiler.structure._LEAST_PART", 4)
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))  # others are stored as one part


@kernels
@every
@pytest.mark.usefixtures("three_parts")
def test_three_parts(sample: RowwiseFunction) -> None:
    """The masks are those of rows in one part."""
    check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE))


@kernels
@of("dropout_add_layer_norm", "gated_residual_norm", "swiglu_norm")
def test_parts_of_ordinary_rows(sample: RowwiseFunction) -> None:
    """A tile of 512 columns is not read for 384, and what parts have in common is summed once."""
    tensors = {name: t.repeat_interleave(16, -1) for name, t in sample.tensors(torch.float32, DEVICE).items()}
    function = rowwise(sample)
    check(sample, function, tensors)
    explanation, source = function.explain(*tensors.values()), function.source(*tensors.values())
    assert (explanation.columns, explanation.parts) == (128, 3)
    alone = rowwise(sample).source(*sample.tensors(torch.float32, DEVICE).values())
    assert source.count("axis=1") == alone.count("axis=1")


@kernels
@pytest.mark.parametrize("cols", [48, 768])
def test_largest_elements_in_several_parts_share_a_gradient(cols: int) -> None:
    """Of parts that the function takes, and of those that rows of 384 columns have: in some places of several parts."""
    x = torch.randint(-3, 4, (3, cols), generator=torch.Generator().manual_seed(5)).to(DEVICE, torch.float32)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.cat([part * 2.0 for part in x.chunk(2, -1)], -1)
        return x / x.abs().amax(-1, keepdim=True), y.amax(-1), y.amin(-1)

    with launch.record() as launched:
        got, grads = results(fusedops.rowwise(function, strict=True), {"x": x})
    want, expected = results(function, {"x": x})
    assert launched == ["forward_kernel", "backward_kernel"]
    for one, other in zip((*got, *grads.values()), (*want, *expected.values()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@kernels
def test_longest_rows_in_three_parts() -> None:
    """More columns than a program holds are not held in three parts either."""
    function = fusedops.rowwise(lambda x: x - x.mean(-1, keepdim=True), strict=True)
    parts = [function.explain(torch.empty(2, cols, device=DEVICE)).parts for cols in (12288, 24576)]
    assert parts == [3, 1]


@kernels
@every
def test_vectors_that_are_loaded_again(sample: RowwiseFunction, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a backward's registers do not hold them from tile to tile."""
    monkeypatch.setattr("fusedops.compiler.codegen._REGISTERS", 0)
    check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE, 37))


# --- dropout ------------------------------------------------------------------------------------------------------------

DROPPING = [sample for sample in FUNCTIONS if sample.drops]
dropping = pytest.mark.parametrize("sample", DROPPING, ids=lambda sample: sample.name)


@dropping
def test_seed_repeats_the_mask(sample: RowwiseFunction) -> None:
    function, tensors = rowwise(sample), sample.tensors(torch.float32, DEVICE)

    def run(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        outputs, grads = results(function, tensors)
        return [*outputs, *grads.values()]

    first, again, other = run(1), run(1), run(2)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0])


@dropping
def test_same_bits_without_gradients(sample: RowwiseFunction) -> None:
    function, tensors = rowwise(sample), sample.tensors(torch.bfloat16, DEVICE)
    torch.manual_seed(1)
    outputs, _ = results(function, tensors)
    torch.manual_seed(1)
    with torch.no_grad():
        alone = as_tuple(function(*tensors.values()))
    assert all(map(torch.equal, outputs, alone))


@dropping
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
def test_checkpointing(sample: RowwiseFunction, reentrant: bool) -> None:
    function, tensors = rowwise(sample), sample.tensors(torch.float32, DEVICE)

    def run(call: Callable[..., Any]) -> list[Tensor]:
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors.values()]
        torch.manual_seed(1)
        outputs = as_tuple(call(*leaves))
        torch.autograd.backward(outputs, cotangents_of(outputs))
        return [*outputs, *[leaf.grad for leaf in leaves if leaf.grad is not None]]

    plain, again = run(function), run(lambda *given: checkpoint(function, *given, use_reentrant=reentrant))
    assert len(plain) == len(again) and all(map(torch.equal, plain, again))


@kernels
def test_mask_is_the_same_in_the_backward() -> None:
    x = ones(37, 40).requires_grad_()
    y = fusedops.rowwise(lambda x: F.dropout(x, 0.5), strict=True)(x)
    (grad,) = torch.autograd.grad(y, x, ones(37, 40))
    assert torch.equal(grad, y) and {0.0, 2.0} == set(y.flatten().tolist())


@kernels
def test_two_dropouts_differ() -> None:
    y, z = fusedops.rowwise(lambda x: (F.dropout(x, 0.5), F.dropout(x, 0.5)), strict=True)(ones(37, 40))
    assert 0.4 < (y != z).double().mean().item() < 0.6


@kernels
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate(p: float) -> None:
    y = fusedops.rowwise(lambda x, p: F.dropout(x, p), strict=True)(ones(128, 64), p)
    kept = (y != 0).double().mean().item()
    assert abs(kept - (1 - p)) <= 5 * (p * (1 - p) / y.numel()) ** 0.5
    torch.testing.assert_close(y.max().item(), 1 / (1 - p), rtol=1e-4, atol=0.0)


@kernels
@pytest.mark.parametrize("p", [0.0, 1.0])
def test_all_or_nothing(p: float) -> None:
    x = randn(5, 24).requires_grad_()
    y = fusedops.rowwise(lambda x, p: F.dropout(x, p) * 2, strict=True)(x, p)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y.detach(), x.detach() * 2 * (1 - p)) and torch.equal(grad, torch.full_like(x, 2 * (1 - p)))


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
    """What is registered for torch.compile is told apart by the probability as well."""

    def function(x: Tensor, p: float) -> Tensor:
        return F.dropout(x, p)

    made = fusedops.rowwise(function, strict=True)
    for p in (0.1, 0.75):
        made(ones(128, 64), p)
        compiled = torch.compile(lambda x, p=p: made(x, p), fullgraph=True, backend="aot_eager")
        assert abs((compiled(ones(128, 64)) == 0).double().mean().item() - p) < 0.05


# --- derivatives --------------------------------------------------------------------------------------------------------


@kernels
@every
def test_second_derivatives(sample: RowwiseFunction) -> None:
    tensors = sample.tensors(torch.float32, DEVICE)
    names = sample.floating()

    def twice(function: Callable[..., Any], given: dict[str, Tensor]) -> list[Tensor]:
        leaves = {name: t.detach().requires_grad_(name in names) for name, t in given.items()}
        outputs = as_tuple(function(*leaves.values()))
        inner = [leaves[name] for name in names]
        cotangents = [c.requires_grad_() for c in cotangents_of(outputs)]
        grads = torch.autograd.grad(outputs, inner, cotangents, create_graph=True)
        again = torch.autograd.grad(grads, [*inner, *cotangents], cotangents_of(grads), allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for g, t in zip(again, [*inner, *cotangents], strict=True)]

    with fixed_draw():
        got = twice(rowwise(sample), tensors)
    with masks(sample):
        exact = twice(sample.function, wide(tensors))
    with masks(sample):
        eager = twice(sample.function, tensors)
    for number, (a, b, c) in enumerate(zip(got, exact, eager, strict=True)):
        assert_as_good(a, b, [c], f"{sample.name}: second derivative {number}", 64.0)


@kernels
@pytest.mark.parametrize(
    ("sample", "names"),
    [
        pytest.param(sample, names, id="-".join((sample.name, *names)))
        for sample in named(
            "gated_residual_norm", "adaptive_layer_norm_grouped", "swiglu_norm", "norm_and_rotary", "group_norm"
        )
        for names in subsets(sample.floating())
    ],
)
@pytest.mark.pairs
def test_some_gradients(sample: RowwiseFunction, names: tuple[str, ...]) -> None:
    check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE), names)


@kernels
@of("gated_residual_norm", "gate_and_residual")
@pytest.mark.parametrize("used", [0, 1])
def test_one_output_unused(sample: RowwiseFunction, used: int) -> None:
    function = rowwise(sample)
    one = RowwiseFunction(sample.name, lambda *args: sample.function(*args)[used], sample.shapes)
    names = ["x", "residual"] if used else None  # the stream does not depend on what comes behind it
    check(one, lambda *args: function(*args)[used], sample.tensors(torch.float32, DEVICE), names)


@kernels
def test_output_that_is_the_same_for_a_whole_row() -> None:
    """Its cotangent is summed over the row."""

    def function(x: Tensor) -> Tensor:
        return x.mean(-1, keepdim=True) + torch.zeros_like(x)

    sample = RowwiseFunction("broadcast", function, lambda rows: {"x": (rows, 24)})
    check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE))


@kernels
@pytest.mark.parametrize("which", ["stack", "cat", "transpose"])
def test_outputs_whose_rows_are_not_outermost(which: str) -> None:
    functions: dict[str, Callable[..., Any]] = {
        "stack": lambda x, y: torch.stack((x, x * y), 0),
        "cat": lambda x, y: torch.cat((x, x * y), 0),
        "transpose": lambda x, y: (x * y).mT,
    }
    sample = RowwiseFunction(which, functions[which], lambda rows: {"x": (rows, 24), "y": (rows, 24)})
    try:
        function = rowwise(sample)
        check(sample, function, sample.tensors(torch.float32, DEVICE))
    except fusedops.NotRowwiseError as error:
        assert which[:4] in str(error) or "rows" in str(error)  # noqa: PT017 - it may be refused, but not be wrong


@kernels
def test_heads_transposed() -> None:
    """Of attention: the rows come out in another order."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, 1e-6).transpose(1, 2)

    sample = RowwiseFunction("heads", function, lambda rows: {"x": (2, rows, 3, 16), "weight": (16,)})
    check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE))


@kernels
def test_output_is_of_the_returned_sum() -> None:
    """Of the very numbers that are returned, rounded once, as the backward and the next layer see them."""

    def function(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        z = x * 3.0 + residual
        return F.layer_norm(z.float(), z.shape[-1:]), z

    x, residual = randn(5, 24, dtype=torch.bfloat16), randn(5, 24, dtype=torch.bfloat16)
    y, z = fusedops.rowwise(function, strict=True)(x, residual)
    assert (y.dtype, z.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(y, F.layer_norm(z.float(), (24,)), rtol=1e-5, atol=1e-5)


@kernels
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_ignored_class(smoothing: float) -> None:
    """One that is a column, too: its rows have neither loss nor gradient."""

    def function(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, ignore_index=3, reduction="none", label_smoothing=smoothing)

    sample = RowwiseFunction("ignored", function, SAMPLES["cross_entropy"].shapes)
    target = torch.tensor([3, 0, 3, 39, 1], device=DEVICE)
    check(sample, rowwise(sample), {**sample.tensors(torch.float32, DEVICE), "target": target}, ["logits"])


@kernels
@pytest.mark.parametrize("inside", ["detach", "no_grad"])
def test_what_has_no_gradient_in_the_function(inside: str) -> None:
    def detached(x: Tensor) -> Tensor:
        return x * x.exp().detach()

    def without(x: Tensor) -> Tensor:
        with torch.no_grad():
            factor = x.exp()
        return x * factor

    function = detached if inside == "detach" else without
    sample = RowwiseFunction(inside, function, lambda rows: {"x": (rows, 24)})
    try:
        check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE))
    except fusedops.NotRowwiseError as error:
        assert inside in str(error)  # noqa: PT017 - it may be refused, but not be wrong


# At these inputs PyTorch's derivatives are conventions, or need more than a formula.
_EDGES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "clamp": (lambda x: x.clamp(min=0.0), "zeros"),
    "clamp_between": (lambda x: torch.clamp(x, 0.0, 1.0), "zeros"),
    "hardtanh": (lambda x: F.hardtanh(x, 0.0, 1.0), "zeros"),
    "relu6": (lambda x: F.relu6(x), "zeros"),
    "relu": (lambda x: F.relu(x), "zeros"),
    "maximum": (lambda x: torch.maximum(x, torch.zeros_like(x)), "zeros"),
    "abs": (lambda x: x.abs(), "zeros"),
    "power": (lambda x: x.abs() ** 1.5, "zeros"),
    "square": (lambda x: x**2.0, "zeros"),
    "normalize": (lambda x: F.normalize(x, dim=-1), "zero row"),
    "norm": (lambda x: x * x.norm(dim=-1, keepdim=True), "zero row"),
    "std": (lambda x: x - x.std(-1, keepdim=True), "zero row"),
    "softmax": (lambda x: x.softmax(-1), "zero row"),
    "layer_norm": (lambda x: F.layer_norm(x, (24,)), "zero row"),
    "amax": (lambda x: x - x.amax(-1, keepdim=True), "ties"),
    "max": (lambda x: x - x.max(-1, keepdim=True).values, "ties"),
    "amin": (lambda x: x - x.amin(-1, keepdim=True), "ties"),
    "odd_power": (lambda x: x**17, "ties"),
    "even_power": (lambda x: x**20, "ties"),
    "softplus": (lambda x: F.softplus(x * 40), "ties"),
    "logsumexp": (lambda x: torch.logsumexp(x * 40, -1), "ties"),
    "log_softmax": (lambda x: torch.log_softmax(x * 40, -1), "ties"),
    "log1p": (lambda x: torch.log1p(x * 1e-6), "ties"),
    "expm1": (lambda x: torch.expm1(x * 1e-6), "ties"),
}


@kernels
@pytest.mark.parametrize("case", _EDGES)
def test_derivatives_at_edges(case: str) -> None:
    inner, edge = _EDGES[case]
    x = RowwiseFunction(case, inner, lambda rows: {"x": (rows, 24)}).tensors(torch.float32, DEVICE)["x"]
    if edge == "zeros":
        x[:, 3:9] = 0.0
    elif edge == "zero row":
        x[1] = 0.0
    else:
        x[:, 3:6] = 2.5
    sample = RowwiseFunction(case, inner, lambda rows: {"x": (rows, 24)})
    check(sample, rowwise(sample), {"x": x})


@kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("case", ["fmax", "fmin", "maximum", "relu", "clamp", "amax", "softmax", "logsumexp", "where"])
def test_not_a_number_spreads_as_in_pytorch(case: str, value: float) -> None:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "fmax": lambda x: torch.fmax(x, torch.zeros_like(x)),
        "fmin": lambda x: torch.fmin(x, torch.zeros_like(x)),
        "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
        "relu": F.relu,
        "clamp": lambda x: x.clamp(-1.0, 1.0),
        "amax": lambda x: x - x.amax(-1, keepdim=True),
        "softmax": lambda x: x.softmax(-1),
        "logsumexp": lambda x: torch.logsumexp(x, -1),
        "where": lambda x: torch.where(x > 0, x, 0.0),
    }
    x = randn(5, 24)
    x[1, 3], x[2] = value, value
    made = fusedops.rowwise(functions[case])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may be refused, but not be wrong
        got = made(x)
    torch.testing.assert_close(got, functions[case](x), rtol=1e-5, atol=1e-5, equal_nan=True)


# --- operators that PyTorch decomposes ----------------------------------------------------------------------------------

_POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(F, name) for name in ("leaky_relu", "elu", "selu", "celu", "hardswish", "hardsigmoid", "softplus",
                                           "mish", "logsigmoid", "gelu", "silu", "softsign", "tanhshrink", "glu")},
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "lerp": lambda x: torch.lerp(x, x.exp(), 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x.exp(), value=0.5),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.exp(), value=0.5),
    "mse_loss": lambda x: F.mse_loss(x, x.exp(), reduction="none").mean(-1),
    "exp2": torch.exp2,
    "base": lambda x: 2.0**x,
    "remainder": lambda x: x % 0.7,
    "std_mean": lambda x: torch.std_mean(x, -1, keepdim=True)[0] * x,
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "softmin": lambda x: F.softmin(x, -1),
    "var": lambda x: x * x.var(-1, unbiased=False, keepdim=True),
    "in_place": lambda x: (x * 2).add_(1.0).mul_(0.5).exp_(),
    "in_place_of_a_copy": lambda x: x.clone().mul_(0.5) * x + (x * 1).exp_(),
    "min_max": lambda x: (x - x.amin(-1, keepdim=True)) / (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)),
    "integers": lambda x: x * (x > 0).sum(-1, keepdim=True) - (x * 4).long().amax(-1, keepdim=True),
    "bits": lambda x: x * ((x > 0) & ~(x > 1) | (x < -1)),
    "one_hot": lambda x: x * F.one_hot((x.amax(-1) * 3).long().clamp(0, 23), 24),
    "unflatten": lambda x: F.softmax(x.unflatten(-1, (2, 12)), -1).flatten(-2),
    "parts": lambda x: torch.cat([part * (i + 1) for i, part in enumerate(x.chunk(3, -1))], -1).softmax(-1),
}  # fmt: skip
# PyTorch's table says how these decompose, so they are no reason to refuse a function.
_COVERED = frozenset(_POINTWISE) - {"remainder", "base", "exp2", "std_mean"}


@kernels
@pytest.mark.parametrize("name", _POINTWISE)
def test_operators(name: str) -> None:
    inner = _POINTWISE[name]

    def function(x: Tensor) -> Tensor:  # builtins have no signature
        return inner(x)

    sample = RowwiseFunction(name, function, lambda rows: {"x": (rows, 24)})
    tensors = sample.tensors(torch.float32, DEVICE)
    try:
        check(sample, rowwise(sample), tensors)
    except fusedops.NotRowwiseError:
        assert name not in _COVERED, f"{name} is refused"


# --- inputs -------------------------------------------------------------------------------------------------------------


@kernels
def test_mixed_dtypes() -> None:
    """PyTorch's promotion, in values and in the dtypes of outputs and gradients."""
    sample = RowwiseFunction("mixed", lambda x, residual, weight, scale: (residual + scale * F.silu(x) * weight, x * weight),
                             lambda rows: {"x": (rows, 24), "residual": (rows, 24), "weight": (24,), "scale": ()})  # fmt: skip
    tensors = sample.tensors(torch.float32, DEVICE)
    tensors["x"], tensors["weight"] = tensors["x"].bfloat16(), tensors["weight"].half()
    check(sample, rowwise(sample), tensors)


def _strided(how: str) -> Tensor:
    base = randn(48, 48)
    return {
        "rows": base[:8, :24],
        "columns": base[:8, ::2],
        "transposed": base[:24, :8].T,
        "expanded": base[:1, :24].expand(8, 24),
        "permuted": base.view(8, 12, 24).permute(1, 0, 2),
        "offset": base.flatten()[1 : 1 + 8 * 24].view(8, 24),
        "reversed": base[:8, :24].flip(0),
    }[how]


@kernels
@pytest.mark.parametrize("how", ["rows", "columns", "transposed", "expanded", "permuted", "offset", "reversed"])
def test_layouts(how: str) -> None:
    sample = SAMPLES["norm_then_add"]
    tensors = {"x": _strided(how), "residual": _strided(how), "weight": randn(48)[::2]}
    check(sample, rowwise(sample), tensors)


@kernels
def test_strided_rows_are_read_in_place() -> None:
    """As those of a packed projection are; a strided cotangent, too. Strided columns are copied."""
    function, weight = fusedops.rowwise(lambda x, weight: F.rms_norm(x, x.shape[-1:], weight), strict=True), randn(24)

    def clones(x: Tensor, cotangent: Tensor) -> int:
        x = x.detach().requires_grad_()
        torch.autograd.grad(function(x, weight), x, cotangent)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            torch.autograd.grad(function(x, weight), x, cotangent)
        return sum(event.count for event in profile.key_averages() if event.key == "aten::clone")

    whole, wide = randn(5, 24), randn(5, 48)
    assert clones(whole, whole) == clones(wide[:, :24], wide[:, 24:]) == 0
    assert clones(wide[:, ::2], whole) > 0


@kernels
def test_strided_cotangents() -> None:
    sample = SAMPLES["norm_then_add"]
    tensors = {name: t.requires_grad_() for name, t in sample.tensors(torch.float32, DEVICE).items()}
    for cotangent in (randn(24, 5).T, randn(1, 1).expand(5, 24), randn(5, 48)[:, ::2]):
        grads = [torch.autograd.grad(f(*tensors.values()), list(tensors.values()), cotangent)
                 for f in (rowwise(sample), sample.function)]  # fmt: skip
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@kernels
def test_layout_of_a_later_call() -> None:
    """Found in the call cache by its shapes, it may still be strided otherwise."""
    sample = SAMPLES["gemma_norm"]
    function, weight = rowwise(sample), randn(24)
    for x in (randn(8, 24), _strided("rows"), _strided("transposed"), _strided("offset")):
        torch.testing.assert_close(function(x, weight), sample.function(x, weight), rtol=1e-5, atol=1e-5)


@kernels
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool], ids=str)
def test_integer_inputs(dtype: torch.dtype) -> None:
    values = (torch.arange(24, device=DEVICE) % 5).to(dtype)
    sample = RowwiseFunction("integers", lambda x, i: torch.where(i > 1, x * i, x - 1), lambda rows: {"x": (rows, 24)})
    check(sample, rowwise(sample), {**sample.tensors(torch.float32, DEVICE), "i": values})


@kernels
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("case", ["add", "sub", "mul", "neg", "cast"])
def test_integers_wrap_as_in_pytorch(case: str, dtype: torch.dtype) -> None:
    """Or the function is refused."""
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "add": lambda x, i: x * (i + i),
        "sub": lambda x, i: x * (i - 5),
        "mul": lambda x, i: x * (i * i),
        "neg": lambda x, i: x * -i,
        "cast": lambda x, i: x * (x * 1000).long().to(i.dtype),
    }
    x, top = randn(5, 24), torch.iinfo(dtype).max
    i = torch.tensor([1, 2, top - 1, top], device=DEVICE).to(dtype).repeat(6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = fusedops.rowwise(functions[case])(x, i)
    torch.testing.assert_close(got, functions[case](x, i), rtol=1e-5, atol=1e-5)


@kernels
@pytest.mark.parametrize("value", [2**24 + 1, 2**40 + 1])
def test_integers_beyond_the_digits_of_floats(value: int) -> None:
    """They are compared, summed and returned as integers."""
    x, i = randn(5, 24), torch.full((5, 24), value, device=DEVICE)

    def function(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        same = (i == value) & (i != value - 1)
        return torch.where(same, x, 0.0), i + same, (i + same).sum(-1), (i - 2 * value * same).amax(-1)

    for got, want in zip(fusedops.rowwise(function, strict=True)(x, i), function(x, i), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


@kernels
@pytest.mark.parametrize("rows", [3, 20])
def test_one_element_of_each_row(rows: int) -> None:
    """Of rows and of a vector of each group."""

    def function(x: Tensor, shared: Tensor, place: Tensor, common: Tensor) -> Tensor:
        return x * shared.gather(-1, common) - x.gather(-1, place)

    x, shared = randn(3, rows, 24), randn(3, 1, 24)
    place = torch.arange(3 * rows, device=DEVICE).remainder(24).view(3, rows, 1)
    tensors = {"x": x, "shared": shared, "place": place, "common": place[:, :1]}
    got, grads = results(fusedops.rowwise(function, strict=True), tensors)
    want, expected = results(function, tensors)
    for one, other in zip((*got, *grads.values()), (*want, *expected.values()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@kernels
def test_integer_output_beside_a_float() -> None:
    x, i = randn(5, 24).requires_grad_(), torch.arange(24, device=DEVICE)
    y, mask, places = fusedops.rowwise(lambda x, i: (x * 2, x > 0, i + (x > 0)), strict=True)(x, i)
    assert torch.equal(mask, x > 0) and torch.equal(places, i + (x > 0)) and not mask.requires_grad
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.full_like(grad, 2.0))


@kernels
def test_scalars() -> None:
    """0-dim tensors beside rows, with gradients; and a row alone, and a number alone."""
    sample = RowwiseFunction("scalars", lambda x, scale, row: x * scale + row,
                             lambda rows: {"x": (rows, 24), "scale": (), "row": (rows, 1)})  # fmt: skip
    check(sample, rowwise(sample), sample.tensors(torch.float32, DEVICE))
    x = randn(24)
    function = fusedops.rowwise(lambda x: F.rms_norm(x, x.shape[-1:]))
    torch.testing.assert_close(function(x), F.rms_norm(x, (24,)))


@kernels
def test_single_number() -> None:
    """A 0-dim tensor alone has no rows: it is computed or refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fusedops.rowwise(lambda x: x * 2)(torch.tensor(3.0, device=DEVICE))
    assert found.item() == 6.0 and found.shape == ()


def test_empty_rows() -> None:
    x = randn(0, 24).requires_grad_()
    y = fusedops.rowwise(SAMPLES["gemma_norm"].function)(x, randn(24))
    assert y.shape == (0, 24) and torch.autograd.grad(y.sum(), x)[0].shape == (0, 24)


def test_numbers_and_keywords() -> None:
    @fusedops.rowwise(strict=True)
    def function(
        x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, scale: float = 1.0, how: str = "rms"
    ) -> Tensor:
        y = (
            F.rms_norm(x, x.shape[-1:], weight, eps)
            if how == "rms"
            else F.layer_norm(x, x.shape[-1:], weight, None, eps)
        )
        return y * scale

    x, weight = randn(5, 24), randn(24)
    plain = function.function
    for args, kwargs in (((x,), {}), ((x, weight), {}), ((x,), {"eps": 0.5}), ((x,), {"scale": 3.0, "weight": weight}),
                         ((x, None, 1), {"how": "layer"}), ((x,), {"scale": True}), ((x,), {"scale": 2})):  # fmt: skip
        torch.testing.assert_close(function(*args, **kwargs), plain(*args, **kwargs), rtol=1e-5, atol=1e-5)


@kernels
def test_numbers_that_are_equal_but_not_the_same() -> None:
    """0.0 and -0.0, 1 and True and 1.0 are equal to a dictionary."""
    function = fusedops.rowwise(lambda x, s: torch.where(x > 0, s, x), strict=True)
    x = randn(5, 24)
    assert not torch.signbit(function(x, 0.0)[x > 0]).any()
    assert torch.signbit(function(x, -0.0)[x > 0]).all()
    kind = fusedops.rowwise(lambda x, s: (x > 0) * s, strict=True)
    assert [kind(x, s).dtype for s in (1, 1.0, True)] == [torch.int64, torch.float32, torch.bool]


@pytest.mark.parametrize("given", [[24], (24,), torch.Size([24])], ids=["list", "tuple", "size"])
def test_arguments_that_are_sequences(given: Any) -> None:
    """Of numbers: a normalised shape."""
    x = randn(5, 24)
    got = fusedops.rowwise(lambda x, shape: F.layer_norm(x, shape))(x, given)
    torch.testing.assert_close(got, F.layer_norm(x, (24,)), rtol=1e-5, atol=1e-5)


@kernels
@pytest.mark.parametrize("kind", [tuple, list], ids=["tuple", "list"])
def test_tensors_within_arguments_are_refused(kind: type) -> None:
    """No silent fall-back: a tuple of tensors is not looked into."""
    with pytest.raises((fusedops.NotRowwiseError, TypeError), match=r"pair|tuple|list"):
        fusedops.rowwise(lambda pair: pair[0] * pair[1], strict=True)(kind((randn(5, 24), randn(24))))


@kernels
def test_not_a_number_as_an_argument() -> None:
    """It equals no other, and is still traced once."""
    function, x = fusedops.rowwise(lambda x, s: torch.where(x > 0, x, s), strict=True), randn(5, 24)
    function(x, float("nan"))
    with mock.patch("fusedops.compiler.programs.trace", side_effect=AssertionError("traced again")):
        assert function(x, float("nan"))[x <= 0].isnan().all()


# --- what a function captures -------------------------------------------------------------------------------------------


def test_captured_tensors() -> None:
    """Of a closure and of a module: with gradients, and as they are at each call."""
    module = nn.Module()
    module.weight, bias = nn.Parameter(randn(24)), randn(24).requires_grad_()

    @fusedops.rowwise(strict=True)
    def function(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], module.weight, bias)

    def verify() -> None:
        x = randn(5, 24).requires_grad_()
        leaves = [x, module.weight, bias]
        with launch.record() as launched:
            got = [function(x), *torch.autograd.grad(function(x).square().sum(), leaves)]
        want = [function.function(x), *torch.autograd.grad(function.function(x).square().sum(), leaves)]
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert not KERNEL_PATH or "backward_kernel" in launched

    verify()
    with torch.no_grad():
        module.weight.mul_(2.0)
    verify()
    module.weight = nn.Parameter(randn(24))
    verify()
    bias = randn(24).requires_grad_()
    verify()


@kernels
@pytest.mark.parametrize("change", ["dtype", "shape", "none"])
def test_captured_tensor_of_another_kind(change: str) -> None:
    """A module's parameter that was cast or replaced is not read as what it was."""
    module = nn.Module()
    module.weight = nn.Parameter(randn(24))

    @fusedops.rowwise
    def function(x: Tensor) -> Tensor:
        y = F.rms_norm(x, x.shape[-1:])
        return y if module.weight is None else y * module.weight

    x = randn(5, 24)
    function(x)
    module.weight = {"dtype": nn.Parameter(randn(24).double()), "shape": nn.Parameter(randn()), "none": None}[change]
    want = function.function(x)
    got = function(x)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@kernels
def test_captured_number_that_changes() -> None:
    scale = 2.0
    function, x = fusedops.rowwise(lambda x: x * scale, strict=True), randn(5, 24)
    assert torch.equal(function(x), x * 2)
    scale = 3.0
    assert torch.equal(function(x), x * 3)


class _Block(nn.Module):
    """With a row-wise method."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(24))
        self.eps = 1e-6

    @fusedops.rowwise
    def norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def test_method() -> None:
    """Two instances have two weights; without kernels for it, it says so."""
    x, blocks = randn(5, 24), [_Block(), _Block()]
    with warnings.catch_warnings(record=True) as caught, launch.record() as launched:
        warnings.simplefilter("always")
        for block in blocks:
            want = F.rms_norm(x, (24,), block.weight, 1e-6)
            torch.testing.assert_close(block.norm(x), want, rtol=1e-5, atol=1e-5)
        blocks[0].eps = 10.0
        want = F.rms_norm(x, (24,), blocks[0].weight, 10.0)
        torch.testing.assert_close(blocks[0].norm(x), want, rtol=1e-5, atol=1e-5)
    assert not KERNEL_PATH or launched or caught, "it fell back silently"


# --- modes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sample",
    [
        pytest.param(sample, id=sample.name, marks=() if sample.name == "layer_scale" else kernels)
        for sample in named("gate_and_residual", "norm_and_rotary", "cross_entropy", "layer_scale")
    ],
)
def test_compiled_with_changing_rows(sample: RowwiseFunction, fresh_dynamo: None) -> None:
    function, graphs = rowwise(sample), []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
    for rows in (20, 23):
        tensors = sample.tensors(torch.float32, DEVICE, rows)
        torch.manual_seed(1)
        outputs, grads = results(compiled, tensors)
        if sample.drops:
            assert all(t.isfinite().all() for t in (*outputs, *grads.values()))
            continue
        want, wanted = results(sample.function, tensors)
        for a, b in zip((*outputs, *grads.values()), (*want, *wanted.values()), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1


@of("gated_norm", "adaptive_layer_norm_indexed", "cross_entropy")
def test_transforms(sample: RowwiseFunction) -> None:
    function, tensors = rowwise(sample), sample.tensors(torch.float32, DEVICE)
    first, *rest = tensors.values()

    def loss(function: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda x: function(x, *rest).square().sum()

    for transform in (torch.func.grad, lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).square().sum())):
        got, want = transform(loss(function))(first), transform(loss(sample.function))(first)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    many = torch.stack((first, first * 2))
    got, want = (torch.func.vmap(f, in_dims=(0, *[None] * len(rest)))(many, *rest) for f in (function, sample.function))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    tangent = torch.ones_like(first)
    got, want = (torch.func.jvp(lambda x, f=f: f(x, *rest), (first,), (tangent,)) for f in (function, sample.function))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


class _Recorder(TorchDispatchMode):
    """Keeps every call of the library's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fusedops":
            self.calls.append((func, tree_map_only(Tensor, lambda t: t.detach().clone(), args), dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


@kernels
@of("gate_and_residual", "swiglu_norm", "norm_and_rotary", "cross_entropy")
def test_opcheck(sample: RowwiseFunction) -> None:
    tensors = sample.tensors(torch.float32, DEVICE)
    with _Recorder() as recorder:
        results(rowwise(sample), tensors)
    assert len(recorder.calls) == 2
    for func, args, kwargs in recorder.calls:
        if "backward" not in str(func):
            args = tree_map_only(Tensor, lambda t: t.requires_grad_(t.is_floating_point()), args)
        torch.library.opcheck(func, args, kwargs,
                              test_utils=["test_schema", "test_autograd_registration", "test_faketensor"])  # fmt: skip


@kernels
@of("gated_norm", "dropout_add_layer_norm")
def test_a_dispatch_mode_changes_no_bit(sample: RowwiseFunction) -> None:
    function, tensors = rowwise(sample), sample.tensors(torch.float32, DEVICE)
    with fixed_draw():
        outputs, grads = results(function, tensors)
        with _Recorder():
            outputs_again, grads_again = results(function, tensors)
    assert all(map(torch.equal, (*outputs, *grads.values()), (*outputs_again, *grads_again.values())))


@of("gated_norm", "alibi_softmax", "cross_entropy")
def test_autocast(sample: RowwiseFunction) -> None:
    """The dtypes that PyTorch's operators have under autocast."""
    function, tensors = rowwise(sample), sample.tensors(torch.bfloat16, DEVICE)
    for _ in range(2):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            got, want = function(*tensors.values()), sample.function(*tensors.values())
        assert got.dtype == want.dtype
        torch.testing.assert_close(got.float(), want.float(), rtol=0.05, atol=0.05)
        got, want = function(*tensors.values()), sample.function(*tensors.values())
        assert got.dtype == want.dtype


def test_function_is_called_like_itself() -> None:
    """Its name, its signature, and errors in PyTorch's words."""
    function = fusedops.rowwise(SAMPLES["gemma_norm"].function)
    assert function.__name__ == "gemma_norm" and function.__doc__ == SAMPLES["gemma_norm"].function.__doc__
    assert "gemma_norm" in repr(function)
    with pytest.raises(TypeError, match="missing"):
        function(randn(5, 24))
    with pytest.raises(TypeError, match="unexpected"):
        function(randn(5, 24), randn(24), scale=1.0)


@kernels
def test_source_has_the_users_names() -> None:
    sample = SAMPLES["gated_residual_norm"]
    source = rowwise(sample).source(*sample.tensors(torch.float32, DEVICE).values())
    assert all(f"{name}" in source for name in ("gamma", "residual", "weight", "z = "))
    assert source.count("@triton.jit") == 2
    assert DROP == 0.25
