"""Kernel launches: as many as the spec says, none on the plain CPU.

A new number of rows builds no new variant.
"""

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

# Rows enough for several programs of the backward at the widths below.
ROWS = 300 if not INTERPRETED else 70


def _sample(
    spec: Spec, rows: int, cols: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Sample:
    return spec.benchmark((rows, cols), dtype, device)


def _launches(
    spec: Spec, sample: Sample, names: list[str] | None = None
) -> tuple[list[str], list[str]]:
    """Names of the kernels that a forward and a backward (for ``names``, default all tensors) launch."""
    tensors = tensors_of(spec, sample)
    leaves = [
        t.detach().requires_grad_(names is None or name in names) for name, t in tensors.items()
    ]
    values = {**sample.tensors, **dict(zip(tensors, leaves, strict=True))}
    with launch.record() as forward:
        outputs = as_tuple(spec.call(**values, **sample.options))
    # The other outputs depend on none of these leaves.
    learned = [output for output in outputs if output.requires_grad]
    with launch.record() as backward:
        torch.autograd.grad(
            learned, [leaf for leaf in leaves if leaf.requires_grad], random_like(learned)
        )
    return forward, backward


@every
@pytest.mark.kernels
@pytest.mark.parametrize("cols", [64, 136])
def test_as_many_as_the_spec_says(spec: Spec, cols: int, device: torch.device) -> None:
    forward, backward = _launches(spec, _sample(spec, ROWS, cols, device))
    assert (len(forward), len(backward)) == spec.launches
    assert all("forward" in name or "dropout" in name for name in forward)
    assert "backward" in backward[0]


@every
@pytest.mark.kernels
def test_few_rows_need_no_second_launch(spec: Spec, device: torch.device) -> None:
    """One program sees all rows and writes the parameter gradients itself."""
    for rows in (1, 4):
        forward, backward = _launches(spec, _sample(spec, rows, 64, device))
        assert (len(forward), len(backward)) == (spec.launches[0], 1)


@every
@pytest.mark.kernels
def test_no_reduction_where_no_parameter_learns(spec: Spec, device: torch.device) -> None:
    _, backward = _launches(spec, _sample(spec, ROWS, 64, device), [spec.tensors[0]])
    assert len(backward) == 1


@every
@pytest.mark.kernels
def test_wide_rows(spec: Spec, device: torch.device) -> None:
    """One launch each way. Where programs of a norm's backward cannot wait for one another, two."""
    forward, backward = _launches(spec, _sample(spec, 2, 20000, device))
    assert len(forward) == spec.launches[0]
    assert len(backward) == 1 + (
        backward[0] == "norm_backward_kernel" and INTERPRETED and spec.name != "bias_dropout_add"
    )


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
def test_new_row_counts_build_no_variant(spec: Spec, cols: int, device: torch.device) -> None:
    """A batch size is no part of any key.

    1 and multiples of 16 are what Triton would specialise on by itself.

    Which config is chosen may depend on the bucket of rows: a new bucket builds at most one set,
    the variants that a forward and a backward launch, and the reduction, which the first number of
    rows may do without.
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
        one_more = spec.launches[1] > 1 and "sum_partials_kernel" not in backward
        assert built - before <= len(forward) + len(backward) + one_more
        for rows in others:
            _launches(spec, _sample(spec, rows, cols, device))
        assert launch.variants() == built


@every
@pytest.mark.kernels
def test_another_probability_builds_no_variant(spec: Spec, device: torch.device) -> None:
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
    """A grid's axis ends at 65535; with a shorter one, rows must not get lost.

    Two roundings of fp32 each way.
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
def test_another_width_or_dtype_builds_its_own(
    spec: Spec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is not too coarse either; and a variant is built once. Vectors have no width."""
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
def test_the_plain_cpu_launches_nothing(
    spec: Spec, kernel_path: bool, device: torch.device
) -> None:
    """The kernel path launches kernels: neither falls back to the other silently."""
    forward, backward = _launches(spec, _sample(spec, 5, 40, device))
    assert bool(forward) == bool(backward) == kernel_path


@pytest.mark.kernels
def test_recorders_nest(device: torch.device) -> None:
    """Each sees what is launched while it is open, though their contents are equal when the inner one closes."""
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
def test_as_many_as_the_profiler_sees(spec: Spec, device: torch.device) -> None:
    """On the GPU nothing else runs: no hidden copy, fill or cast."""
    sample = _sample(spec, 4096, 1024, device, torch.bfloat16)
    leaves = [t.requires_grad_() for t in tensors_of(spec, sample).values()]

    def step(cotangents: list[torch.Tensor] | None) -> list[torch.Tensor]:
        outputs = as_tuple(spec.call(**sample.tensors, **sample.options))
        cotangents = cotangents or random_like(outputs)
        torch.autograd.grad(outputs, leaves, cotangents)
        return cotangents

    # The poison that fills fresh memory in these tests is itself a kernel.
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
def test_a_small_gelu_is_pytorchs_own(
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
def test_small_norms_are_pytorchs_own(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At few elements a norm alone goes to PyTorch's, in the cases that PyTorch has, and to the kernel above."""
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


def test_where_shared_memory_is_short_less_is_taken_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ordinary launcher, too, lowers the number of stages.

    Where nothing is taken ahead any more, the error is the user's to see.
    """
    errors = pytest.importorskip("triton.runtime.errors")
    tried: list[int] = []

    class Ordinary:
        fn = SimpleNamespace(__name__="kernel")
        arg_names = ("STAGES",)

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            def run(*_: object, STAGES: int, num_stages: int, **options: object) -> None:
                assert num_stages == STAGES
                tried.append(STAGES)
                if least < STAGES:
                    raise errors.OutOfResources(300_000, 232_448, "shared memory")

            return run

    def variant(stages: int) -> launch.Variant:
        config = tuning.Config(16, rows=1, warps=1, stages=stages)
        request = launch.Request(Ordinary(), {}, {"STAGES": stages}, config, {})
        return launch.specialise(request, -1)

    least, launched = 2, variant(4)
    launched(1, 1)
    launched(1, 1)
    assert tried == [4, 3, 2, 2]
    least, launched = 0, variant(2)
    with pytest.raises(errors.OutOfResources):
        launched(1, 1)
