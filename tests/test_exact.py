"""Operators that compute nothing with floating-point numbers: right to the last bit, in every layout, in one launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fusedops.core import launch
from fusedops.core.spec import Sample, Spec
from support import DEVICE, DTYPES, EXACT_SPECS, Case, as_tuple, cases, rows_of, tensors_of

every = pytest.mark.parametrize("spec", EXACT_SPECS, ids=lambda spec: spec.name)

Tensors = dict[str, Tensor | None]


def _bits(t: Tensor) -> Tensor:
    """The numbers as integers: NaN equals itself, and zero is not minus zero."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.contiguous().view(integers[t.itemsize]) if t.is_floating_point() else t


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _copies(tensors: Tensors) -> Tensors:
    return {name: None if t is None else t.clone() for name, t in tensors.items()}


def _expected(spec: Spec, sample: Sample) -> tuple[Tensor, ...]:
    return spec.eager(**_copies(sample.tensors), **sample.options)


def _inplace(spec: Spec) -> bool:
    return spec.name.endswith(("_inplace", "_inplace_32k"))


def _check(spec: Spec, sample: Sample) -> None:
    """The definition's outputs, and no input changed but the one that an operator in place gives back."""
    expected, before = _expected(spec, sample), _copies(sample.tensors)
    outputs = as_tuple(spec.call(**sample.tensors, **sample.options))
    for i, (output, want) in enumerate(zip(outputs, expected, strict=True)):
        assert output.device == want.device
        assert _same(output, want), f"output {i}: {int((_bits(output) != _bits(want)).sum())} elements differ"
    for name, tensor in tensors_of(spec, sample).items():
        if _inplace(spec) and name == spec.tensors[0]:
            assert outputs[0] is tensor
            continue
        assert all(output.data_ptr() != tensor.data_ptr() or not output.numel() for output in outputs)
        assert _same(tensor, before[name]), f"{name} was changed"


# --- values -------------------------------------------------------------------------------------------------------


def _in_its_dtype(spec: Spec, sample: Sample) -> bool:
    """What depends on no token alone: the copy, and that each dtype has its minus infinity."""
    fp32 = rows_of(spec, sample).dtype == torch.float32
    return fp32 or sample.name.endswith((", n=2", " columns", "int32 tokens", "allowed, padded"))


@cases(DTYPES, _in_its_dtype, EXACT_SPECS)
def test_values(case: Case) -> None:
    _check(case.spec, case.sample())


@cases((torch.float32,), specs=EXACT_SPECS)
def test_the_formula_is_the_definition(case: Case) -> None:
    spec, sample = case.spec, case.sample()
    outputs = spec.reference(**_copies(sample.tensors), **sample.options)
    assert all(map(_same, outputs, _expected(spec, sample)))


@every
def test_samples_are_not_in_vain(spec: Spec) -> None:
    """Most samples change some elements and leave others, else right values would show little."""
    parts = []
    for sample in spec.samples(DEVICE, torch.float32):
        changed = _expected(spec, sample)[0] != rows_of(spec, sample)
        parts.append(float(changed.double().mean()))
    assert sum(0.0 < part < 1.0 for part in parts) >= 0.6 * len(parts)


def _small(spec: Spec, sample: Sample) -> bool:
    return sample.name in ("shape 6x9x64, n=2", "shape 33x20x131, n=1", "allowed, padded")


@cases(DTYPES, _small, EXACT_SPECS)
def test_every_bit_pattern_is_kept(case: Case) -> None:
    """NaN with whatever payload, infinities, minus zero, numbers below the normal ones."""
    spec, sample = case.spec, case.sample()
    rows = rows_of(spec, sample)
    integers = _bits(rows).dtype
    limits = torch.iinfo(integers)
    generator = torch.Generator().manual_seed(3)
    random = torch.randint(limits.min, limits.max, rows.shape, generator=generator, dtype=integers)
    small = torch.randint(-2, 3, rows.shape, generator=generator, dtype=integers)
    patterns = torch.where(torch.rand(rows.shape, generator=generator) < 0.5, random, small).to(DEVICE)
    _check(spec, dataclasses.replace(sample, tensors={**sample.tensors, spec.tensors[0]: patterns.view(rows.dtype)}))


@cases((torch.float32,), lambda spec, sample: sample.name == "allowed, padded", EXACT_SPECS)
def test_checks_after_a_good_call(case: Case) -> None:
    """Calls that were checked once are not checked again: a mask of another width is no such call."""
    spec, sample = case.spec, case.sample()
    spec.call(**sample.tensors, **sample.options)
    mask = sample.tensors["allowed"]
    for wrong, error in ((mask[:-1], ValueError), (mask[None], ValueError), (mask.int(), TypeError)):
        with pytest.raises(error, match="no_repeat_ngram: allowed has"):
            spec.call(**{**sample.tensors, "allowed": wrong}, **sample.options)


# --- layouts ------------------------------------------------------------------------------------------------------


def _garbage(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """What a view's gaps hold: for tokens a valid one, which would ban if it were read."""
    value = float("nan") if like.is_floating_point() else 1
    return torch.full(shape, value, dtype=like.dtype, device=like.device)


def _wider(t: Tensor) -> Tensor:
    return torch.cat((_garbage((*t.shape[:-1], 3), t), t, _garbage((*t.shape[:-1], 2), t)), -1)[..., 3:-2]


def _padded(t: Tensor) -> Tensor:
    """Rows that each begin at a multiple of 16 bytes."""
    return torch.cat((t, _garbage((*t.shape[:-1], -t.shape[-1] % 16 + 16), t)), -1)[..., : t.shape[-1]]


def _every_second_row(t: Tensor) -> Tensor:
    return torch.stack((t, _garbage(tuple(t.shape), t)), 1)[:, 0]


def _every_second_column(t: Tensor) -> Tensor:
    return torch.stack((t, _garbage(tuple(t.shape), t)), -1)[..., 0]


def _transposed(t: Tensor) -> Tensor:
    return t.t().contiguous().t() if t.dim() == 2 else _every_second_column(t)


def _unaligned(t: Tensor) -> Tensor:
    return torch.cat((_garbage((1,), t), t.flatten()))[1:].view(t.shape)


def _expanded(t: Tensor) -> Tensor:
    return t[:1].expand_as(t)


LAYOUTS = [_wider, _padded, _every_second_row, _every_second_column, _transposed, _unaligned]


def _roomy(spec: Spec, sample: Sample) -> bool:
    return sample.name in ("shape 4x40x17, n=2", "shape 6x9x64, n=1", "allowed, padded", "4097 columns")


@cases((torch.float32, torch.bfloat16), _roomy, EXACT_SPECS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__.strip("_"))
def test_layouts(case: Case, layout: Callable[[Tensor], Tensor]) -> None:
    """Each tensor in turn, then all; and where the scores are written to, nothing between and around them is."""
    spec, sample = case.spec, case.sample()
    names = list(tensors_of(spec, sample))
    for chosen in (*([name] for name in names), names):
        fresh = case.sample()
        tensors = {name: layout(t) if t is not None and name in chosen and t.shape[0] > 1 else t
                   for name, t in fresh.tensors.items()}  # fmt: skip
        rows = tensors[spec.tensors[0]]
        whole = torch.empty(0, dtype=rows.dtype, device=rows.device).set_(rows.untyped_storage())
        outside = torch.ones_like(whole, dtype=torch.bool)
        outside.as_strided(rows.shape, rows.stride(), rows.storage_offset()).zero_()
        around = whole[outside].clone()
        _check(spec, dataclasses.replace(fresh, tensors=tensors))
        assert _same(whole[outside], around)


@cases((torch.float32,), _roomy, EXACT_SPECS)
def test_expanded(case: Case) -> None:
    """One row in the place of all: what is only read may be."""
    spec = case.spec
    for name, tensor in tensors_of(spec, case.sample()).items():
        sample = case.sample()
        sample = dataclasses.replace(sample, tensors={**sample.tensors, name: _expanded(tensor)})
        if _inplace(spec) and name == spec.tensors[0]:
            with pytest.raises(ValueError, match="scores is expanded"):
                spec.call(**sample.tensors, **sample.options)
        else:
            _check(spec, sample)


# --- launches -----------------------------------------------------------------------------------------------------


def _sized(spec: Spec, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Sample:
    return spec.benchmark(shape, dtype, DEVICE)


@cases((torch.float32,), specs=EXACT_SPECS)
@pytest.mark.kernels
def test_at_most_as_many_launches_as_the_spec_says(case: Case) -> None:
    sample = case.sample()
    with launch.record() as names:
        outputs = as_tuple(case.spec.call(**sample.tensors, **sample.options))
    assert len(outputs) == 1
    # In place nothing need be launched where no token can be banned.
    assert len(names) == case.spec.launches[0] or (_inplace(case.spec) and not names)


@every
def test_the_plain_cpu_launches_nothing(spec: Spec, kernel_path: bool) -> None:
    """And the kernel path does: no silent fall-back in either direction."""
    sample = _sized(spec, (5, 40))
    with launch.record() as names:
        spec.call(**sample.tensors, **sample.options)
    assert len(names) == (spec.launches[0] if kernel_path else 0)


@every
@pytest.mark.kernels
def test_new_sizes_build_no_variant(spec: Spec) -> None:
    """Rows grow by a token a step: no size is in any key, but whether rows are aligned."""

    def run(rows: int, cols: int, length: int, n: int) -> None:
        sample = _sized(spec, (rows, cols))
        ids = sample.tensors["input_ids"][:, :length].contiguous()
        spec.call(**{**sample.tensors, "input_ids": ids}, **{**sample.options, "ngram_size": n})

    run(4, 48, 9, 3)
    run(4, 49, 9, 3)
    built = launch.variants()
    for rows, cols in ((1, 48), (16, 16), (2, 5001), (1, 1), (2, 8192)):
        for length, n in ((1, 1), (2, 1), (16, 16), (100, 2)):
            run(rows, cols, length, n)
    assert launch.variants() == built


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
def test_one_kernel_and_no_waiting(spec: Spec) -> None:
    """On the GPU nothing else runs, no hidden copy or fill, and the host does not wait for the device."""
    sample = _sized(spec, (64, 32128))
    torch.use_deterministic_algorithms(False)  # the poison of fresh memory is itself a kernel
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
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, kernels


@every
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(40, 50257), (300, 4096), (2, 70001)], ids=str)
def test_under_races(spec: Spec, shape: tuple[int, int]) -> None:
    """Copy and bans meet in one launch: at many programs, and again and again, no copy lands on a ban."""
    sample = _sized(spec, shape)
    sample.tensors["input_ids"] = torch.randint(4, sample.tensors["input_ids"].shape, device=DEVICE) * (shape[1] // 4)
    (want,) = spec.reference(**_copies(sample.tensors), **sample.options)
    for _ in range(50):
        assert torch.equal(as_tuple(spec.call(**_copies(sample.tensors), **sample.options))[0], want)


@every
@pytest.mark.gpu
def test_graph_capture(spec: Spec) -> None:
    """A replay sees the tokens that are there at the time."""
    sample = _sized(spec, (8, 1000))
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
def test_another_device(spec: Spec, current: int) -> None:
    sample = spec.benchmark((8, 1000), torch.float32, torch.device("cuda", 1 - current))
    expected = _expected(spec, sample)
    with torch.cuda.device(current):
        outputs = as_tuple(spec.call(**sample.tensors, **sample.options))
        assert torch.cuda.current_device() == current
    assert all(map(_same, outputs, expected))


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
    expected = [spec.eager(sample.tensors["scores"][part].clone(), ids[part], **sample.options)[0] for part in parts]
    (output,) = as_tuple(spec.call(**sample.tensors, **sample.options))
    for part, want in zip(parts, expected, strict=True):
        assert want.isinf().any()
        assert _same(output[part], want)


# --- autograd -----------------------------------------------------------------------------------------------------


@cases((torch.float64,), _small, EXACT_SPECS)
def test_gradient(case: Case) -> None:
    """It goes through where the score did, and is zero where it did not."""
    spec, sample = case.spec, case.sample()
    (want,) = _expected(spec, sample)
    leaf = rows_of(spec, sample).requires_grad_()
    for scale in (1.0, 3.0):
        (output,) = as_tuple(spec.call(**{**sample.tensors, spec.tensors[0]: leaf * scale}, **sample.options))
        (grad,) = torch.autograd.grad(output, leaf, torch.full_like(output, 2.0))
        assert torch.equal(grad, torch.where(want.isneginf(), 0.0, 2.0 * scale))


@every
def test_a_change_in_place_is_noticed(spec: Spec) -> None:
    """Autograd refuses a backward that needs what was overwritten."""
    sample = _sized(spec, (4, 8))  # so few tokens that some are banned
    scores = rows_of(spec, sample)
    weight = torch.ones((), device=DEVICE, requires_grad=True)
    product = weight * scores
    (output,) = as_tuple(spec.call(**sample.tensors, **sample.options))
    assert output.isinf().any()
    if _inplace(spec):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
    else:
        product.sum().backward()


@every
def test_inference_mode(spec: Spec) -> None:
    sample = _sized(spec, (4, 8))
    expected = _expected(spec, sample)
    with torch.inference_mode():
        fresh = _copies(sample.tensors)
        outputs = as_tuple(spec.call(**fresh, **sample.options))
    assert all(map(_same, outputs, expected))


@cases((torch.float32,), _small, EXACT_SPECS)
def test_scores_with_a_lazy_sign(case: Case) -> None:
    """Memory holds the negatives: a kernel that copied it would be wrong."""
    spec, sample = case.spec, case.sample()
    rows = rows_of(spec, sample)
    lazy = torch.complex(torch.zeros_like(rows), -rows).conj().imag
    assert lazy.is_neg()
    (want,) = _expected(spec, sample)
    (output,) = as_tuple(spec.call(**{**sample.tensors, spec.tensors[0]: lazy}, **sample.options))
    assert torch.equal(output, want)


# --- tracing ------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _function(spec: Spec, sample: Sample) -> Callable[..., Any]:
    return lambda *tensors: spec.call(**dict(zip(spec.tensors, tensors, strict=True)), **sample.options)


def _traced(spec: Spec, sample: Sample) -> bool:
    return sample.name in ("shape 6x9x64, n=2", "allowed, padded", "padded, window and prompt", "n=16, length 15")


@pytest.mark.usefixtures("fresh_dynamo")
@cases((torch.float32,), _traced, EXACT_SPECS)
def test_compiled(case: Case) -> None:
    """One graph; an operator in place changes its argument there too."""
    spec, sample = case.spec, case.sample()
    expected = _expected(spec, sample)
    backend = "inductor" if DEVICE.type == "cuda" else "aot_eager"
    compiled = torch.compile(_function(spec, sample), fullgraph=True, backend=backend)
    tensors = [sample.tensors.get(name) for name in spec.tensors]
    before = tensors[0].clone()
    (output,) = as_tuple(compiled(*tensors))
    assert _same(output, expected[0])
    assert _same(tensors[0], expected[0] if _inplace(spec) else before)


@pytest.mark.usefixtures("fresh_dynamo")
@every
def test_new_lengths_do_not_recompile(spec: Spec) -> None:
    """A generation adds a token a step: the second step makes the graph dynamic, for good."""
    counter = CompileCounterWithBackend("aot_eager")
    sample = _sized(spec, (3, 20))
    compiled = torch.compile(_function(spec, sample), fullgraph=True, backend=counter)
    for length in range(10, 20):
        tensors = {**_copies(sample.tensors), "input_ids": sample.tensors["input_ids"][:, :length].contiguous()}
        compiled(*(tensors.get(name) for name in spec.tensors))
    assert counter.frame_count == 2


class _Recorder(TorchDispatchMode):
    """Keeps every call of the library's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fusedops":
            self.calls.append((func, tuple(a.clone() if isinstance(a, Tensor) else a for a in args)))
        return func(*args, **(kwargs or {}))


@pytest.mark.kernels
@cases((torch.float32,), _traced, EXACT_SPECS)
def test_opcheck(case: Case) -> None:
    sample = case.sample()
    expected = _expected(case.spec, sample)
    with _Recorder() as recorder:
        outputs = as_tuple(case.spec.call(**sample.tensors, **sample.options))
    assert all(map(_same, outputs, expected))
    ((func, args),) = recorder.calls
    torch.library.opcheck(func, args)


@every
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(spec: Spec, mode: str, kernel_path: bool) -> None:
    sample = _sized(spec, (6, 40))
    tensors = [t for t in sample.tensors.values() if t is not None]
    names = [name for name, t in sample.tensors.items() if t is not None]
    expected = _expected(spec, sample)
    graph = make_fx(lambda *values: as_tuple(spec.call(**dict(zip(names, values, strict=True)), **sample.options)),
                    tracing_mode=mode)(*(t.clone() for t in tensors))  # fmt: skip
    if kernel_path:
        assert sum("fusedops" in str(node.target) for node in graph.graph.nodes) == 1
    assert all(map(_same, graph(*tensors), expected))


@every
def test_fake_outputs_look_real(spec: Spec) -> None:
    sample = _sized(spec, (6, 40))
    for layout in (torch.clone, _transposed):
        tensors = {name: layout(t) for name, t in sample.tensors.items()}
        (real,) = as_tuple(spec.call(**tensors, **sample.options))
        tensors = {name: layout(t) for name, t in sample.tensors.items()}
        with FakeTensorMode() as mode, launch.record() as launched:
            tensors = {name: mode.from_tensor(t) for name, t in tensors.items()}
            (fake,) = as_tuple(spec.call(**tensors, **sample.options))
        assert launched == []
        assert (real.shape, real.dtype, real.device) == (fake.shape, fake.dtype, fake.device)
        assert real.stride() == fake.stride()


@cases((torch.float32,), _small, EXACT_SPECS)
def test_vmap(case: Case) -> None:
    """Over a batch of scores, as over a loop."""
    spec, sample = case.spec, case.sample()
    rows = rows_of(spec, sample)
    many = torch.stack((rows, rows + 1.0, -rows))
    one = lambda scores: spec.call(**{**sample.tensors, spec.tensors[0]: scores}, **sample.options)  # noqa: E731
    expected = torch.stack([as_tuple(one(scores.clone()))[0] for scores in many])
    assert torch.equal(torch.vmap(one)(many), expected)
