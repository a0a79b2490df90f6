"""`fusedops.rowwise`: calls within everything that a call may be part of, several at once, and what happens between."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import fusedops
from fusedops.compiler.errors import NotRowwiseError
from fusedops.core.configs import tuning
from fusedops.core.launches import launch
from rowwise_checks import check, cotangents_of, every, kernels, of, randn, results, rowwise
from rowwise_functions import DROP, SAMPLES, RowwiseFunction, named
from support import DEVICE, as_tuple, fixed_draw

# --- modes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sample",
    [
        pytest.param(sample, id=sample.name, marks=() if sample.name == "layer_scale" else kernels)
        for sample in named("gate_and_residual", "norm_and_rotary", "cross_entropy", "layer_scale")
    ],
)
def test_compiled_with_changing_rows(sample: RowwiseFunction, fresh_dynamo: None) -> None:
    """The second number of rows compiles nothing.

    Of numbers around a function Dynamo may need two attempts at the first.
    """
    function, graphs, counts = rowwise(sample), [], []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
    for rows in (20, 23):
        tensors = sample.tensors(torch.float32, DEVICE, rows)
        torch.manual_seed(1)
        outputs, grads = results(compiled, tensors)
        counts.append(len(graphs))
        if sample.drops:
            assert all(t.isfinite().all() for t in (*outputs, *grads.values()))
            continue
        want, wanted = results(sample.function, tensors)
        for a, b in zip((*outputs, *grads.values()), (*want, *wanted.values()), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert counts[0] == counts[1]


@of("gated_norm", "adaptive_layer_norm_indexed", "cross_entropy")
def test_transforms_of_a_call_match_eager(sample: RowwiseFunction) -> None:
    function, tensors = rowwise(sample), sample.tensors(torch.float32, DEVICE)
    first, *rest = tensors.values()

    def loss(function: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda x: function(x, *rest).square().sum()

    for transform in (
        torch.func.grad,
        lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).square().sum()),
    ):
        got, want = transform(loss(function))(first), transform(loss(sample.function))(first)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    many = torch.stack((first, first * 2))
    got, want = (
        torch.func.vmap(f, in_dims=(0, *[None] * len(rest)))(many, *rest)
        for f in (function, sample.function)
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    tangent = torch.ones_like(first)
    got, want = (
        torch.func.jvp(lambda x, f=f: f(x, *rest), (first,), (tangent,))
        for f in (function, sample.function)
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


class _Recorder(TorchDispatchMode):
    """Keeps every call of the library's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fusedops":
            self.calls.append(
                (
                    func,
                    tree_map_only(Tensor, lambda t: t.detach().clone(), args),
                    dict(kwargs or {}),
                )
            )
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
        torch.library.opcheck(
            func,
            args,
            kwargs,
            test_utils=["test_schema", "test_autograd_registration", "test_faketensor"],
        )


@kernels
@of("gated_norm", "dropout_add_layer_norm")
def test_a_dispatch_mode_changes_no_bit(sample: RowwiseFunction) -> None:
    function, tensors = rowwise(sample), sample.tensors(torch.float32, DEVICE)
    with fixed_draw():
        outputs, grads = results(function, tensors)
        with _Recorder():
            outputs_again, grads_again = results(function, tensors)
    assert all(
        map(torch.equal, (*outputs, *grads.values()), (*outputs_again, *grads_again.values()))
    )


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
    assert (
        function.__name__ == "gemma_norm"
        and function.__doc__ == SAMPLES["gemma_norm"].function.__doc__
    )
    assert "gemma_norm" in repr(function)
    with pytest.raises(TypeError, match="missing"):
        function(randn(5, 24))
    with pytest.raises(TypeError, match="unexpected"):
        function(randn(5, 24), randn(24), scale=1.0)


def test_arguments_by_keyword_alone() -> None:
    function = fusedops.rowwise(lambda x, *, by: x * by, strict=True)
    x = randn(5, 24)
    for by in (2.0, 3.0):
        assert torch.equal(function(x, by=by), x * by)
    assert torch.equal(function(by=2.0, x=x), x * 2.0)
    with pytest.raises(TypeError, match="too many positional arguments"):
        function(x, 2.0)
    with pytest.raises(TypeError, match="missing a required"):
        function(x)
    with pytest.raises(TypeError, match="unexpected"):
        function(x, by=1.0, over=2.0)


class Scale(nn.Module):
    """Has a method that is fused."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(24))

    @fusedops.rowwise(strict=True)
    def scaled(self, x: Tensor, by: float = 2.0) -> Tensor:
        """Scales rows."""
        return x * self.weight * by

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x)


@kernels
def test_a_method_is_like_one_of_python(fresh_dynamo: None) -> None:
    module, other, x = Scale(), Scale(), randn(5, 24)
    method = module.scaled
    assert (method.__name__, method.__doc__, method.__self__) == ("scaled", "Scales rows.", module)
    assert str(inspect.signature(method)) == "(x: 'Tensor', by: 'float' = 2.0) -> 'Tensor'"
    assert method == module.scaled and method != other.scaled and len({method, module.scaled}) == 1
    assert "def forward_kernel(" in method.source(x, by=3.0) and method.explain(x).columns == 24
    for copied in (pickle.loads(pickle.dumps(method)), copy.deepcopy(method), copy.copy(method)):
        assert torch.equal(copied(x, by=3.0), module.scaled(x, by=3.0))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(Scale.scaled, protocol)) is Scale.scaled
    for called in (module, method):
        compiled = torch.compile(called, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), x * module.weight * 2.0)


@kernels
def test_a_transform_or_another_layout_leaves_other_calls_fused() -> None:
    """Also where the transform maps what the function captures."""
    module, x = Scale(), randn(5, 24)
    many = {"weight": randn(3, 24)}
    got = torch.func.vmap(lambda given: torch.func.functional_call(module, given, (x,)))(many)
    torch.testing.assert_close(got, x * many["weight"][:, None] * 2.0)
    with launch.record() as launched:
        module(x)
    assert len(launched) == 1
    doubled, sparse = fusedops.rowwise(lambda x: x * 2), torch.eye(24, device=DEVICE).to_sparse()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for given in (sparse, sparse.to_dense(), sparse):
            with launch.record() as launched:
                assert doubled(given).layout is given.layout
            assert len(launched) == (given.layout is torch.strided)


@kernels
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("called", [False, True], ids=["not_called", "called"])
def test_exported_programs_need_no_function(strict: bool, called: bool, fresh_dynamo: None) -> None:
    """They are in PyTorch's operators, which every process has.

    The module's own calls are fused, before and after.
    """
    module, x = Scale(), randn(5, 24)
    if called:
        module(x)
    exported = torch.export.export(module, (x,), strict=strict)
    calls = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert calls and all(target.namespace == "aten" for target in calls)  # type: ignore[union-attr]
    with launch.record() as launched:
        torch.testing.assert_close(exported.module()(x), module(x))
    assert len(launched) == 1


@kernels
def test_captured_methods_of_tensors() -> None:
    relu, add, x = Tensor.relu, Tensor.__add__, randn(5, 24)
    assert torch.equal(
        fusedops.rowwise(lambda x: add(relu(x), 1.0), strict=True)(x), x.relu() + 1.0
    )


@kernels
def test_source_has_the_users_names() -> None:
    sample = SAMPLES["gated_residual_norm"]
    source = rowwise(sample).source(*sample.tensors(torch.float32, DEVICE).values())
    assert all(f"{name}" in source for name in ("gamma", "residual", "weight", "z = "))
    assert source.count("@triton.jit") == 2
    assert DROP == 0.25


# --- memory and threads ---------------------------------------------------------------------------


@kernels
@every
def test_same_bits_again(sample: RowwiseFunction) -> None:
    """At once, and after other work; with masks drawn anew from one seed."""
    function, runs = rowwise(sample), []
    for again in range(3):
        if again == 2:  # addresses and caches move
            held = [randn(count) for count in (3, 1000, 77)]
            results(fusedops.rowwise(lambda x: x.softmax(-1) * 2), {"x": randn(3, 50)})
            del held
        torch.manual_seed(11)
        outputs, grads = results(function, sample.tensors(torch.float32, DEVICE, 37))
        runs.append([*outputs, *grads.values()])
    assert all(
        torch.equal(one, other)
        for again in runs[1:]
        for one, other in zip(runs[0], again, strict=True)
    )


@kernels
@every
def test_tensors_changed_after_the_forward_are_noticed(sample: RowwiseFunction) -> None:
    """Tensors that the backward reads must not have changed.

    Either it does not read it, or autograd objects.
    """
    function, originals, objected = rowwise(sample), sample.tensors(torch.float32, DEVICE), 0
    with fixed_draw():
        _, unchanged = results(function, originals)
        for name in sample.floating():
            leaves = {
                key: t.clone().requires_grad_(t.is_floating_point()) for key, t in originals.items()
            }
            outputs = as_tuple(function(*leaves.values()))
            with torch.no_grad():
                leaves[name].mul_(3.0)
            try:
                wanted = [leaves[key] for key in unchanged]
                got = torch.autograd.grad(outputs, wanted, cotangents_of(outputs))
            except RuntimeError as error:
                objected += "modified by an inplace operation" in str(error)
            else:
                assert all(map(torch.equal, got, unchanged.values())), (
                    f"a change of {name} went unnoticed"
                )
    assert objected or sample.name == "alibi_softmax"


@kernels
def test_one_tensor_as_two_arguments() -> None:
    (sample,) = named("dropout_add_layer_norm")
    tensors = sample.tensors(torch.float32, DEVICE)
    tensors |= {"residual": tensors["x"], "ln_bias": tensors["weight"]}
    function = rowwise(sample)
    with fixed_draw():
        outputs, apart = results(function, tensors)
        shared = {id(t): t.clone().requires_grad_() for t in tensors.values()}
        result = function(*[shared[id(t)] for t in tensors.values()])
        torch.autograd.backward(as_tuple(result), cotangents_of(outputs))
    assert torch.equal(shared[id(tensors["x"])].grad, apart["x"] + apart["residual"])
    assert torch.equal(shared[id(tensors["weight"])].grad, apart["weight"] + apart["ln_bias"])


@kernels
@of("gated_residual_norm", "swiglu_norm", "cross_entropy")
def test_saved_tensors_go_through_hooks(sample: RowwiseFunction) -> None:
    """As offloading has it: what the backward reads is what a hook has unpacked, contiguous or not."""
    function, tensors, packed = rowwise(sample), sample.tensors(torch.float32, DEVICE), []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t.clone()

    def unpack(t: Tensor) -> Tensor:
        return t.t().contiguous().t() if t.dim() == 2 else t.clone()

    with fixed_draw():
        outputs, grads = results(function, tensors)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            again, hooked = results(function, tensors)
    assert packed and all(map(torch.equal, (*outputs, *grads.values()), (*again, *hooked.values())))


@kernels
def test_threads_trace_and_build_at_once() -> None:
    """Four at once, each with widths that nobody had before.

    Functions are traced and kernels built in the race.
    """
    samples = named("dropout_add_layer_norm", "gated_norm", "swiglu_norm", "norm_then_add")
    functions = [rowwise(sample) for sample in samples]
    barrier = threading.Barrier(4)

    def tensors(which: int, turn: int) -> dict[str, Tensor]:
        cols = 26 + 2 * ((which + turn) % 4)
        made = samples[which].tensors(torch.float32, DEVICE)
        whole = made["weight"].shape[0]
        return {
            name: t[..., :1].expand(*t.shape[:-1], cols * t.shape[-1] // whole) * 1.0
            for name, t in made.items()
        }

    def step(which: int, turn: int) -> list[Tensor]:
        inputs = tensors(which, turn)
        outputs = as_tuple(functions[which](*[t.requires_grad_() for t in inputs.values()]))
        return [
            *outputs,
            *torch.autograd.grad(outputs, list(inputs.values()), cotangents_of(outputs)),
        ]

    def work(start: int) -> list[list[Tensor]]:
        barrier.wait()
        return [step((start + turn) % 4, turn) for turn in range(4)]

    with mock.patch.object(F, "dropout", lambda x, p: x * 0.5):
        with ThreadPoolExecutor(4) as pool:
            result = list(pool.map(work, range(4)))
        for start, many in enumerate(result):
            for turn, got in enumerate(many):
                assert all(map(torch.equal, got, step((start + turn) % 4, turn)))


# --- kernels that Triton cannot compile -----------------------------------------------------------


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the compiler fail for kernels of a name, with any or some configs."""
    specialise = launch.specialise

    def fail(name: str, warps: Callable[[int], bool] = lambda warps: True) -> None:
        def compiled(request: launch.Request, device_index: int) -> launch.Variant:
            if name in request.kernel.fn.__name__ and warps(request.config.warps):
                raise launch.NotCompiledError(
                    request.kernel.fn.__name__, RuntimeError("PassManager::run failed")
                )
            return specialise(request, device_index)

        monkeypatch.setattr(launch, "_built", {})
        monkeypatch.setattr(launch, "specialise", compiled)

    return fail


@kernels
@every
def test_without_kernels_pytorchs_operators_run(
    sample: RowwiseFunction, failing: Callable[..., None]
) -> None:
    """They draw the kernels' masks, and there is one warning."""
    failing("ward_kernel")
    with pytest.warns(
        RuntimeWarning, match=f"fusedops runs {sample.function.__name__} as plain PyTorch.*forward"
    ) as result:
        check(sample, fusedops.rowwise(sample.function), sample.tensors(device=DEVICE))
    assert len([w for w in result if "fusedops" in str(w.message)]) == 1


@kernels
@of("dropout_add_layer_norm", "norm_and_rotary", "masked_softmax")
def test_a_backward_without_kernels_takes_what_the_forward_saved(
    sample: RowwiseFunction, failing: Callable[..., None]
) -> None:
    failing("backward")
    with (
        launch.record() as launched,
        pytest.warns(RuntimeWarning, match=r"Triton cannot compile backward_kernel \(Run"),
    ):
        check(sample, fusedops.rowwise(sample.function), sample.tensors(device=DEVICE))
    assert launched[0] == "forward_kernel" and "backward_kernel" not in launched


@kernels
def test_another_config_comes_before_no_kernel(failing: Callable[..., None]) -> None:
    (sample,) = named("llama_norm")
    chosen: list[int] = []
    failing("forward", lambda warps: chosen.append(warps) or warps == chosen[0])
    with launch.record() as launched:
        check(sample, rowwise(sample), sample.tensors(device=DEVICE))
    assert len(set(chosen)) == 2 and launched[0] == "forward_kernel"


@kernels
def test_strict_functions_raise_where_no_kernel_compiles(failing: Callable[..., None]) -> None:
    (sample,) = named("llama_norm")
    failing("forward")
    tensors = sample.tensors(device=DEVICE).values()
    with pytest.raises(
        NotRowwiseError,
        match=r"^llama_norm: Triton cannot compile forward_kernel \(RuntimeError: PassManager::run failed\)$",
    ):
        rowwise(sample)(*tensors)
    lenient = fusedops.rowwise(sample.function)
    with pytest.warns(RuntimeWarning, match="llama_norm as plain PyTorch"):
        lenient(*tensors)
    assert "cannot compile forward_kernel" in lenient.explain(*tensors).reason
    with (
        tuning.forced("rowwise_forward", tuning.Config(32, 1, 1)),
        pytest.raises(launch.NotCompiledError),
    ):
        fusedops.rowwise(sample.function)(*tensors)  # what is measured is this config


def test_an_error_of_the_compiler_names_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("a trace")

    monkeypatch.setattr(launch, "compile_ahead", fails)
    kernel = SimpleNamespace(fn=SimpleNamespace(__name__="a_kernel"), arg_names=("x",))
    with pytest.raises(
        launch.NotCompiledError, match=r"^Triton cannot compile a_kernel \(ValueError: a trace\)$"
    ) as result:
        launch.compile_kernel(
            launch.Request(kernel, {"x": "*fp32"}, {}, tuning.Config(8, 1, 1), {})
        )
    assert isinstance(result.value.__cause__, ValueError)


def test_an_error_of_the_machine_is_none_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(launch, "compile_ahead", fails)
    kernel = SimpleNamespace(fn=SimpleNamespace(__name__="a_kernel"), arg_names=("x",))
    with pytest.raises(OSError, match="No space left"):
        launch.compile_kernel(
            launch.Request(kernel, {"x": "*fp32"}, {}, tuning.Config(8, 1, 1), {})
        )
