"""Exact operators: a copy and one launch, no synchronisation, and one node in any graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from exact import copies, every, expected, inplace, same, sized
from fusedops.core.launches import launch
from fusedops.core.spec import Sample, Spec
from fusedops.generation.configs import CONFIG
from fusedops.generation.reference import Rule, banned
from support import DEVICE, EXACT_SPECS, Case, as_tuple, cases

# --- launches -------------------------------------------------------------------------------------


@cases((torch.float32,), specs=EXACT_SPECS)
@pytest.mark.kernels
def test_number_of_launches_is_the_specs(case: Case) -> None:
    """There is no launch if the rows are too short for any ban."""
    sample = case.sample()
    with launch.record() as names:
        outputs = as_tuple(case.spec.call(**sample.tensors, **sample.options))
    assert len(outputs) == 1
    rule = Rule(**sample.options)
    too_short = banned(sample.tensors["input_ids"], cols=1, allowed=None, rule=rule) is None
    assert len(names) == (0 if too_short else case.spec.launches[0])


@every
def test_kernels_are_launched_only_on_the_kernel_path(spec: Spec, kernel_path: bool) -> None:
    """Neither path falls back to the other silently."""
    sample = sized(spec, (5, 40))
    with launch.record() as names:
        spec.call(**sample.tensors, **sample.options)
    assert len(names) == (spec.launches[0] if kernel_path else 0)


@every
@pytest.mark.kernels
def test_other_sizes_compile_no_variant(spec: Spec) -> None:
    """In a generation, rows grow by a token at each step, so no size may be part of a key."""

    def run(rows: int, cols: int, *, length: int, ngram_size: int) -> None:
        sample = sized(spec, (rows, cols))
        ids = sample.tensors["input_ids"][:, :length].contiguous()
        options = {**sample.options, "ngram_size": ngram_size}
        spec.call(**{**sample.tensors, "input_ids": ids}, **options)

    run(4, 48, length=9, ngram_size=3)
    before = launch.variants()
    for rows, cols in ((1, 48), (4, 49), (16, 16), (2, 5001), (1, 1), (2, 8192)):
        for length, ngram_size in ((1, 1), (2, 1), (16, 16), (100, 2)):
            run(rows, cols, length=length, ngram_size=ngram_size)
    assert launch.variants() == before


@every
@pytest.mark.kernels
def test_more_tiles_than_an_axis_holds(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    """An axis of the grid has at most 65535 programs, here 2. All windows are processed."""
    sample = sized(spec, (2, 90))
    windows = torch.arange(4 * CONFIG.block_n + 5, device=DEVICE)
    sample.tensors["input_ids"] = (windows // CONFIG.block_n * 9).expand(2, -1)
    monkeypatch.setattr(launch, "MOST_TILES", 2)
    (output,) = as_tuple(spec.call(**copies(sample.tensors), ngram_size=1))
    assert output.isinf().nonzero().tolist() == [
        [row, 9 * tile] for row in range(2) for tile in range(5)
    ]


@every
@pytest.mark.kernels
def test_no_elements_launch_nothing(spec: Spec) -> None:
    for shape in ((0, 48), (4, 0)):
        scores = torch.randn(shape, device=DEVICE)
        ids = torch.zeros(shape[0], 9, dtype=torch.int64, device=DEVICE)
        with launch.record() as names:
            (output,) = as_tuple(spec.call(scores=scores, input_ids=ids, ngram_size=2))
        assert names == []
        assert output.shape == shape


@every
@pytest.mark.gpu
def test_call_runs_only_a_copy_and_a_kernel_without_synchronisation(spec: Spec) -> None:
    sample = sized(spec, (64, 32128))
    torch.use_deterministic_algorithms(False)  # filling new memory with NaN is a kernel, too
    spec.call(**sample.tensors, **sample.options)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        torch.cuda.set_sync_debug_mode("error")
        try:
            spec.call(**sample.tensors, **sample.options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    kernels = [
        event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    assert len(kernels) == (1 if inplace(spec) else 2), kernels


@every
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(40, 50257), (300, 4096), (2, 70001)], ids=str)
def test_bans_are_not_overwritten_by_the_copy(spec: Spec, shape: tuple[int, int]) -> None:
    """Many programs run many times, to detect a race of copied scores with bans."""
    sample = sized(spec, shape)
    sample.tensors["input_ids"] = torch.randint(
        4, sample.tensors["input_ids"].shape, device=DEVICE
    ) * (shape[1] // 4)
    (want,) = spec.reference(**copies(sample.tensors), **sample.options)
    for _ in range(50):
        assert torch.equal(as_tuple(spec.call(**copies(sample.tensors), **sample.options))[0], want)


@every
@pytest.mark.gpu
def test_cuda_graph_reads_the_tokens_at_replay(spec: Spec) -> None:
    sample = sized(spec, (8, 1000))
    ids, scores = sample.tensors["input_ids"], sample.tensors["scores"]
    clean = scores.clone()
    spec.call(**sample.tensors, **sample.options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (output,) = as_tuple(spec.call(**sample.tensors, **sample.options))
    for tokens in (3, 30):
        scores.copy_(clean)
        ids.random_(0, tokens)
        graph.replay()
        assert torch.equal(output, spec.eager(clean.clone(), ids, **sample.options)[0])


@every
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("current", [0, 1])
def test_tensors_on_a_device_that_is_not_the_current_one(spec: Spec, current: int) -> None:
    sample = spec.benchmark((8, 1000), torch.float32, torch.device("cuda", 1 - current))
    wanted = expected(spec, sample)
    with torch.cuda.device(current):
        outputs = as_tuple(spec.call(**sample.tensors, **sample.options))
        assert torch.cuda.current_device() == current
    assert all(map(same, outputs, wanted))


@every
@pytest.mark.gpu
@pytest.mark.slow
def test_past_32_bits(spec: Spec) -> None:
    rows = 2**31 // 50257 + 9
    sample = spec.benchmark((rows, 50257), torch.bfloat16, DEVICE)
    parts = [slice(0, 2), slice(2**31 // 50257 - 2, 2**31 // 50257 + 2), slice(rows - 2, rows)]
    ids = sample.tensors["input_ids"]
    for part in parts:
        ids[part] = torch.randint(3, ids[part].shape, device=DEVICE) * 25000
    wanted = [
        spec.eager(sample.tensors["scores"][part].clone(), ids[part], **sample.options)[0]
        for part in parts
    ]
    (output,) = as_tuple(spec.call(**sample.tensors, **sample.options))
    for part, want in zip(parts, wanted, strict=True):
        assert want.isinf().any()
        assert same(output[part], want)


# --- tracing --------------------------------------------------------------------------------------


def _function(spec: Spec, sample: Sample) -> Callable[..., Any]:
    return lambda *tensors: spec.call(
        **dict(zip(spec.tensors, tensors, strict=True)), **sample.options
    )


def _traced(spec: Spec, sample: Sample) -> bool:
    return sample.name in (
        "shape 6x9x64, n=2",
        "allowed, padded",
        "padded, window and prompt",
        "n=16, length 15",
    )


@pytest.mark.usefixtures("fresh_dynamo")
@cases((torch.float32,), _traced, EXACT_SPECS)
def test_compiled_calls_are_one_graph_and_work_in_place(case: Case) -> None:
    """An operator in place changes its argument also in a compiled graph."""
    spec, sample = case.spec, case.sample()
    wanted = expected(spec, sample)
    backend = "inductor" if DEVICE.type == "cuda" else "aot_eager"
    compiled = torch.compile(_function(spec, sample), fullgraph=True, backend=backend)
    tensors = [sample.tensors.get(name) for name in spec.tensors]
    before = tensors[0].clone()
    (output,) = as_tuple(compiled(*tensors))
    assert same(output, wanted[0])
    assert same(tensors[0], wanted[0] if inplace(spec) else before)


@pytest.mark.usefixtures("fresh_dynamo")
@every
def test_new_lengths_do_not_recompile(spec: Spec) -> None:
    """A generation adds a token at each step. The second step compiles a graph for all others."""
    counter = CompileCounterWithBackend("aot_eager")
    sample = sized(spec, (3, 20))
    compiled = torch.compile(_function(spec, sample), fullgraph=True, backend=counter)
    for length in range(10, 20):
        tensors = {
            **copies(sample.tensors),
            "input_ids": sample.tensors["input_ids"][:, :length].contiguous(),
        }
        compiled(*(tensors.get(name) for name in spec.tensors))
    assert counter.frame_count == 2


class _Recorder(TorchDispatchMode):
    """Records the calls of the library's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fusedops":
            self.calls.append(
                (func, tuple(a.clone() if isinstance(a, Tensor) else a for a in args))
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.kernels
@cases((torch.float32,), _traced, EXACT_SPECS)
def test_opcheck(case: Case) -> None:
    sample = case.sample()
    wanted = expected(case.spec, sample)
    with _Recorder() as recorder:
        outputs = as_tuple(case.spec.call(**sample.tensors, **sample.options))
    assert all(map(same, outputs, wanted))
    ((func, args),) = recorder.calls
    torch.library.opcheck(func, args)


@every
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(spec: Spec, mode: str, kernel_path: bool) -> None:
    sample = sized(spec, (6, 40))
    tensors = [t for t in sample.tensors.values() if t is not None]
    names = [name for name, t in sample.tensors.items() if t is not None]
    wanted = expected(spec, sample)
    graph = make_fx(
        lambda *values: as_tuple(
            spec.call(**dict(zip(names, values, strict=True)), **sample.options)
        ),
        tracing_mode=mode,
    )(*(t.clone() for t in tensors))
    if kernel_path:
        assert sum("fusedops" in str(node.target) for node in graph.graph.nodes) == 1
    assert all(map(same, graph(*tensors), wanted))


@every
def test_fake_outputs_have_the_metadata_of_real_ones(spec: Spec) -> None:
    sample = sized(spec, (6, 40))
    for layout in (torch.clone, lambda t: t.t().contiguous().t()):
        tensors = {name: layout(t) for name, t in sample.tensors.items()}
        (real,) = as_tuple(spec.call(**tensors, **sample.options))
        tensors = {name: layout(t) for name, t in sample.tensors.items()}
        with FakeTensorMode() as mode, launch.record() as launched:
            tensors = {name: mode.from_tensor(t) for name, t in tensors.items()}
            (fake,) = as_tuple(spec.call(**tensors, **sample.options))
        assert launched == []
        assert (real.shape, real.dtype, real.device) == (fake.shape, fake.dtype, fake.device)
        assert real.stride() == fake.stride()
