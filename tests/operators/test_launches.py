"""Kernel launches: the number that the spec has, none without kernels, and few compilations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import fusedops
from fusedops.core.configs import tuning
from fusedops.core.launches import launch
from fusedops.core.spec import Sample, Spec
from support import ALL_SPECS, INTERPRETED, as_tuple, random_like, tensors_of

every = pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)

# Enough rows for several programs of the backward at the widths of the tests.
ROWS = 300 if not INTERPRETED else 70


def _sample(
    spec: Spec, rows: int, cols: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Sample:
    return spec.benchmark((rows, cols), dtype, device)


def _launches(
    spec: Spec, sample: Sample, names: list[str] | None = None
) -> tuple[list[str], list[str]]:
    """Returns the names of the kernels that a forward and a backward launch.

    The backward computes the gradients of ``names``, by default of all tensors.
    """
    tensors = tensors_of(spec, sample)
    leaves = [
        t.detach().requires_grad_(names is None or name in names) for name, t in tensors.items()
    ]
    values = {**sample.tensors, **dict(zip(tensors, leaves, strict=True))}
    with launch.record() as forward:
        outputs = as_tuple(spec.call(**values, **sample.options))
    # The other outputs depend on none of these leaves.
    differentiable = [output for output in outputs if output.requires_grad]
    variables = [leaf for leaf in leaves if leaf.requires_grad]
    with launch.record() as backward:
        torch.autograd.grad(differentiable, variables, random_like(differentiable))
    return forward, backward


@every
@pytest.mark.kernels
@pytest.mark.parametrize("cols", [64, 136])
def test_number_of_launches_is_the_specs(spec: Spec, cols: int, device: torch.device) -> None:
    forward, backward = _launches(spec, _sample(spec, ROWS, cols, device))
    assert (len(forward), len(backward)) == spec.launches
    assert all("forward" in name or "dropout" in name for name in forward)
    assert "backward" in backward[0]


@every
@pytest.mark.kernels
def test_backward_of_few_rows_is_one_launch(spec: Spec, device: torch.device) -> None:
    """One program processes all rows, and writes the gradients of the parameters itself."""
    for rows in (1, 4):
        forward, backward = _launches(spec, _sample(spec, rows, 64, device))
        assert (len(forward), len(backward)) == (spec.launches[0], 1)


@every
@pytest.mark.kernels
def test_backward_without_gradients_of_parameters_is_one_launch(
    spec: Spec, device: torch.device
) -> None:
    _, backward = _launches(spec, _sample(spec, ROWS, 64, device), [spec.tensors[0]])
    assert len(backward) == 1


@every
@pytest.mark.kernels
def test_backward_of_wide_rows_is_one_launch(spec: Spec, device: torch.device) -> None:
    """A norm's backward is two launches if its programs cannot wait for one another."""
    forward, backward = _launches(spec, _sample(spec, 2, 20000, device))
    assert len(forward) == spec.launches[0]
    is_norm = backward[0] == "norm_backward_kernel" and spec.name != "bias_dropout_add"
    # The interpreter runs programs one after another, so none can wait.
    assert len(backward) == (2 if is_norm and INTERPRETED else 1)


@every
@pytest.mark.kernels
def test_inference_launches_the_forward_alone(spec: Spec, device: torch.device) -> None:
    sample = _sample(spec, 6, 64, device)
    with launch.record() as names:
        spec.call(**sample.tensors, **sample.options)
    assert len(names) == spec.launches[0]


@every
@pytest.mark.kernels
@pytest.mark.parametrize("cols", [48, 520])
def test_other_numbers_of_rows_compile_no_variant(
    spec: Spec, cols: int, device: torch.device
) -> None:
    """The keys of variants do not contain the number of rows.

    By default Triton would specialise on 1 and on multiples of 16. The config may depend on the
    bucket of rows. So the first call of a bucket compiles at most the variants of one forward and
    one backward. It also compiles the reduction, even if it does not launch it.
    """
    tuning.forget()
    buckets = (
        ((7, 1), (65, 16))
        if INTERPRETED
        else ((7, 1, 3), (65, 16, 100), (1001, 256, 1000), (5000, 4096, 4099))
    )
    for first, *others in buckets:
        assert len({tuning.BUCKET[rows.bit_length()] for rows in (first, *others)}) == 1
        before = launch.variants()
        forward, backward = _launches(spec, _sample(spec, first, cols, device))
        built = launch.variants()
        reduction_is_not_launched = spec.launches[1] > 1 and "sum_partials_kernel" not in backward
        launches = len(forward) + len(backward)
        assert built - before <= launches + reduction_is_not_launched
        for rows in others:
            _launches(spec, _sample(spec, rows, cols, device))
        assert launch.variants() == built


@every
@pytest.mark.kernels
def test_another_probability_compiles_no_variant(spec: Spec, device: torch.device) -> None:
    if not spec.has_dropout:
        return
    sample = _sample(spec, 9, 48, device)
    _launches(spec, sample)
    built = launch.variants()
    for p in (0.01, 0.5, 0.9, 1.0):
        _launches(spec, Sample(sample.name, sample.tensors, {**sample.options, "p": p}))
    assert launch.variants() == built


@every
@pytest.mark.kernels
def test_more_tiles_than_an_axis_holds(
    spec: Spec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An axis of the grid has at most 65535 programs, here 2. All rows are processed.

    The tolerance is a few roundings of fp32.
    """
    if spec.has_dropout:
        return
    sample = _sample(spec, ROWS, 64, device)
    expected = as_tuple(spec.eager(**sample.tensors, **sample.options))
    monkeypatch.setattr(launch, "MOST_TILES", 2)
    outputs = as_tuple(spec.call(**sample.tensors, **sample.options))
    for output, want in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, want, rtol=1e-5, atol=1e-5)


@every
@pytest.mark.kernels
def test_another_width_or_dtype_compiles_another_variant(
    spec: Spec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each variant is compiled once. Elementwise operators have no width."""
    monkeypatch.setattr(launch, "_built", {})  # whatever other tests have built
    tuning.forget()
    _launches(spec, _sample(spec, 5, 36, device))
    counts = [launch.variants()]
    for cols, dtype in (
        (37, torch.float32),
        (36, torch.float16),
        (36, torch.float64),
        (36, torch.float16),
    ):
        _launches(spec, _sample(spec, 5, cols, device, dtype))
        counts.append(launch.variants())
    vectors = spec.name in ("gelu", "geglu", "glu", "swiglu")
    assert counts[0] == counts[1] if vectors else counts[0] < counts[1]
    assert counts[1] < counts[2] < counts[3] == counts[4]


@every
@pytest.mark.kernels
def test_no_rows_launch_nothing(spec: Spec, device: torch.device) -> None:
    with launch.record() as names:
        forward, backward = _launches(spec, _sample(spec, 0, 64, device))
    assert names == forward == backward == []


@every
def test_kernels_are_launched_only_on_the_kernel_path(
    spec: Spec, kernel_path: bool, device: torch.device
) -> None:
    """Neither path falls back to the other silently."""
    forward, backward = _launches(spec, _sample(spec, 5, 40, device))
    assert bool(forward) == bool(backward) == kernel_path


@pytest.mark.kernels
def test_nested_recorders_record_the_launches_of_their_own_blocks(device: torch.device) -> None:
    """When the inner block ends, both lists are equal, but the outer block still records."""
    spec = ALL_SPECS[0]
    sample = _sample(spec, 5, 40, device)
    with launch.record() as outer:
        with launch.record() as inner:
            pass
        spec.call(**sample.tensors, **sample.options)
    assert inner == []
    assert len(outer) == spec.launches[0]


@every
@pytest.mark.gpu
def test_profiler_records_no_other_kernels(spec: Spec, device: torch.device) -> None:
    """A step has no further copies, fills or casts on the GPU."""
    sample = _sample(spec, 4096, 1024, device, torch.bfloat16)
    leaves = [t.requires_grad_() for t in tensors_of(spec, sample).values()]

    def step(cotangents: list[torch.Tensor] | None) -> list[torch.Tensor]:
        outputs = as_tuple(spec.call(**sample.tensors, **sample.options))
        cotangents = cotangents or random_like(outputs)
        torch.autograd.grad(outputs, leaves, cotangents)
        return cotangents

    # Filling new memory with NaN, as these tests do, is a kernel, too.
    torch.use_deterministic_algorithms(False)
    cotangents = step(None)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        step(cotangents)
        torch.cuda.synchronize()
    kernels = [
        event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    assert len(kernels) == sum(spec.launches), kernels


@pytest.mark.gpu
def test_small_gelu_runs_pytorchs_kernel(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusedops.core.calls.operator.Operator.native_elements", 1024)
    for approximate in ("none", "tanh"):
        x = torch.randn(9, 128, device=device)
        with launch.record() as names:
            y = fusedops.gelu(x[:8], approximate)
        assert names == []
        assert torch.equal(y, torch.nn.functional.gelu(x[:8], approximate=approximate))
        with launch.record() as names:
            fusedops.gelu(x, approximate)
            fusedops.bias_gelu(x[:8], x[8], approximate)
        assert len(names) == 2


@pytest.mark.gpu
def test_small_norms_run_pytorchs_kernels(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to a number of elements, norms without a sum run PyTorch's kernels, if it has them."""
    monkeypatch.setattr("fusedops.core.calls.operator.Operator.native_elements", 1024)
    for rows, launches in ((8, 0), (9, 1)):
        x, weight = torch.randn(rows, 128, device=device), torch.randn(128, device=device)
        with launch.record() as names:
            y = fusedops.layer_norm(x, (128,), weight)
            fusedops.rms_norm(x, (128,), weight)
        assert len(names) == 2 * launches
        torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (128,), weight))
    with launch.record() as names:
        fusedops.rms_norm(x[:2], (128,), weight, weight_offset=1.0)
        fusedops.layer_norm(x[:2], (128,), weight.half())
    assert len(names) == 2


def test_launcher_lowers_the_number_of_stages_if_shared_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a single stage does not fit either, the error is raised."""
    errors = pytest.importorskip("triton.runtime.errors")
    tried: list[int] = []

    class Ordinary:
        fn = SimpleNamespace(__name__="kernel")
        arg_names = ("STAGES",)

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            def run(*_: object, STAGES: int, num_stages: int, **options: object) -> None:
                assert num_stages == STAGES
                tried.append(STAGES)
                if most_stages < STAGES:
                    raise errors.OutOfResources(300_000, 232_448, "shared memory")

            return run

    def variant(stages: int) -> launch.Variant:
        config = tuning.Config(block_n=16, rows=1, warps=1, stages=stages)
        request = launch.Request(Ordinary(), {}, {"STAGES": stages}, config, {})
        return launch.specialise(request, -1)

    most_stages, launched = 2, variant(4)
    launched(1, 1)
    launched(1, 1)
    assert tried == [4, 3, 2, 2]
    most_stages, launched = 0, variant(2)
    with pytest.raises(errors.OutOfResources):
        launched(1, 1)
