"""`fusedops.rowwise`: calls under modes, transforms, export, hooks and threads; failed kernels."""

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

_SMALL = tuning.Config(block_n=8, rows=1, warps=1)

# --- modes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sample",
    [
        pytest.param(sample, id=sample.name, marks=() if sample.name == "layer_scale" else kernels)
        for sample in named("gate_and_residual", "norm_and_rotary", "cross_entropy", "layer_scale")
    ],
)
def test_compiled_function_is_not_compiled_for_other_rows(
    sample: RowwiseFunction, fresh_dynamo: None
) -> None:
    """The second number of rows compiles no graph; the first may compile two."""
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
        expected, expected_grads = results(sample.function, tensors)
        for result, value in zip(
            (*outputs, *grads.values()), (*expected, *expected_grads.values()), strict=True
        ):
            torch.testing.assert_close(result, value, rtol=1e-4, atol=1e-4)
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
    batch = torch.stack((first, first * 2))
    got, want = (
        torch.func.vmap(f, in_dims=(0, *[None] * len(rest)))(batch, *rest)
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
    """Records the calls of the library's operators, with copies of their tensors."""

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
def test_dispatch_mode_changes_no_bit(sample: RowwiseFunction) -> None:
    function, tensors = rowwise(sample), sample.tensors(torch.float32, DEVICE)
    with fixed_draw():
        plain_outputs, plain_grads = results(function, tensors)
        with _Recorder():
            outputs, grads = results(function, tensors)
    plain, recorded = (*plain_outputs, *plain_grads.values()), (*outputs, *grads.values())
    assert all(map(torch.equal, plain, recorded))


@of("gated_norm", "alibi_softmax", "cross_entropy")
def test_autocast_has_pytorchs_dtypes(sample: RowwiseFunction) -> None:
    """Calls alternate between autocast and none."""
    function, tensors = rowwise(sample), sample.tensors(torch.bfloat16, DEVICE)
    for _ in range(2):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            got, want = function(*tensors.values()), sample.function(*tensors.values())
        assert got.dtype == want.dtype
        torch.testing.assert_close(got.float(), want.float(), rtol=0.05, atol=0.05)
        got, want = function(*tensors.values()), sample.function(*tensors.values())
        assert got.dtype == want.dtype


def test_fused_function_has_name_and_signature_of_the_plain_one() -> None:
    plain = SAMPLES["gemma_norm"].function
    function = fusedops.rowwise(plain)
    assert function.__name__ == "gemma_norm"
    assert function.__doc__ == plain.__doc__
    assert "gemma_norm" in repr(function)
    with pytest.raises(TypeError, match="missing"):
        function(randn(5, 24))
    with pytest.raises(TypeError, match="unexpected"):
        function(randn(5, 24), randn(24), scale=1.0)


def test_keyword_only_arguments() -> None:
    function = fusedops.rowwise(lambda x, *, factor: x * factor, strict=True)
    x = randn(5, 24)
    for factor in (2.0, 3.0):
        assert torch.equal(function(x, factor=factor), x * factor)
    assert torch.equal(function(factor=2.0, x=x), x * 2.0)
    with pytest.raises(TypeError, match="too many positional arguments"):
        function(x, 2.0)
    with pytest.raises(TypeError, match="missing a required"):
        function(x)
    with pytest.raises(TypeError, match="unexpected"):
        function(x, factor=1.0, divisor=2.0)


class Scale(nn.Module):
    """A module with a fused method."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(24))

    @fusedops.rowwise(strict=True)
    def scaled(self, x: Tensor, factor: float = 2.0) -> Tensor:
        """Scales rows."""
        return x * self.weight * factor

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x)


@kernels
def test_fused_method_behaves_like_a_bound_method(fresh_dynamo: None) -> None:
    """It can be inspected, compared, hashed, copied, pickled and compiled."""
    module, other, x = Scale(), Scale(), randn(5, 24)
    method = module.scaled
    assert (method.__name__, method.__doc__, method.__self__) == ("scaled", "Scales rows.", module)
    assert str(inspect.signature(method)) == "(x: 'Tensor', factor: 'float' = 2.0) -> 'Tensor'"
    assert method == module.scaled
    assert method != other.scaled
    assert len({method, module.scaled}) == 1
    assert "def forward_kernel(" in method.source(x, factor=3.0)
    assert method.explain(x).columns == 24
    for copied in (pickle.loads(pickle.dumps(method)), copy.deepcopy(method), copy.copy(method)):
        assert torch.equal(copied(x, factor=3.0), module.scaled(x, factor=3.0))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(Scale.scaled, protocol)) is Scale.scaled
    for called in (module, method):
        compiled = torch.compile(called, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), x * module.weight * 2.0)


@kernels
def test_call_is_fused_after_calls_in_a_transform_or_of_sparse_tensors() -> None:
    """The transform maps over the weight that the method reads."""
    module, x = Scale(), randn(5, 24)
    batch = {"weight": randn(3, 24)}
    got = torch.func.vmap(lambda parameters: torch.func.functional_call(module, parameters, (x,)))(
        batch
    )
    torch.testing.assert_close(got, x * batch["weight"][:, None] * 2.0)
    with launch.record() as launched:
        module(x)
    assert len(launched) == 1
    doubled, sparse = fusedops.rowwise(lambda x: x * 2), torch.eye(24, device=DEVICE).to_sparse()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for tensor, kernels_launched in ((sparse, 0), (sparse.to_dense(), 1), (sparse, 0)):
            with launch.record() as launched:
                assert doubled(tensor).layout is tensor.layout
            assert len(launched) == kernels_launched


@kernels
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("called", [False, True], ids=["not_called", "called"])
def test_exported_programs_contain_pytorchs_operators_only(
    strict: bool, called: bool, fresh_dynamo: None
) -> None:
    """A process without the function can run them. The module's own call is still fused."""
    module, x = Scale(), randn(5, 24)
    if called:
        module(x)
    exported = torch.export.export(module, (x,), strict=strict)
    calls = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert calls
    assert all(target.namespace == "aten" for target in calls)  # type: ignore[union-attr]
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
    assert all(name in source for name in ("gamma", "residual", "weight", "z = "))
    assert source.count("@triton.jit") == 2
    assert DROP == 0.25


# --- memory and threads ---------------------------------------------------------------------------


@kernels
@every
def test_repeated_calls_have_the_same_bits(sample: RowwiseFunction) -> None:
    """The third call follows other work. Each call draws its masks from the same seed."""
    function, runs = rowwise(sample), []
    for number in range(3):
        if number == 2:  # other work moves addresses and changes caches
            allocated = [randn(count) for count in (3, 1000, 77)]
            results(fusedops.rowwise(lambda x: x.softmax(-1) * 2), {"x": randn(3, 50)})
            del allocated
        torch.manual_seed(11)
        outputs, grads = results(function, sample.tensors(torch.float32, DEVICE, rows=37))
        runs.append([*outputs, *grads.values()])
    for run in runs[1:]:
        for first, repeated in zip(runs[0], run, strict=True):
            assert torch.equal(first, repeated)


@kernels
@every
def test_input_that_changes_after_the_forward_is_detected(sample: RowwiseFunction) -> None:
    """If the backward reads the changed input, autograd raises. If not, the gradients are right."""
    function, originals, errors = rowwise(sample), sample.tensors(torch.float32, DEVICE), 0
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
                differentiated = [leaves[key] for key in unchanged]
                grads = torch.autograd.grad(outputs, differentiated, cotangents_of(outputs))
            except RuntimeError as error:
                errors += "modified by an inplace operation" in str(error)
            else:
                assert all(map(torch.equal, grads, unchanged.values())), (
                    f"a change of {name} went unnoticed"
                )
    assert errors or sample.name == "alibi_softmax"


@kernels
def test_one_tensor_as_two_arguments_gets_both_gradients() -> None:
    (sample,) = named("dropout_add_layer_norm")
    tensors = sample.tensors(torch.float32, DEVICE)
    tensors |= {"residual": tensors["x"], "ln_bias": tensors["weight"]}
    function = rowwise(sample)
    with fixed_draw():
        outputs, separate = results(function, tensors)
        shared = {id(t): t.clone().requires_grad_() for t in tensors.values()}
        result = function(*[shared[id(t)] for t in tensors.values()])
        torch.autograd.backward(as_tuple(result), cotangents_of(outputs))
    assert torch.equal(shared[id(tensors["x"])].grad, separate["x"] + separate["residual"])
    assert torch.equal(shared[id(tensors["weight"])].grad, separate["weight"] + separate["ln_bias"])


@kernels
@of("gated_residual_norm", "swiglu_norm", "cross_entropy")
def test_saved_tensors_go_through_hooks(sample: RowwiseFunction) -> None:
    """The backward reads the unpacked tensors, as with offloading; these are not contiguous."""
    function, tensors, packed = rowwise(sample), sample.tensors(torch.float32, DEVICE), []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t.clone()

    def unpack(t: Tensor) -> Tensor:
        return t.t().contiguous().t() if t.dim() == 2 else t.clone()

    with fixed_draw():
        outputs, grads = results(function, tensors)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            hooked_outputs, hooked_grads = results(function, tensors)
    plain, hooked = (*outputs, *grads.values()), (*hooked_outputs, *hooked_grads.values())
    assert packed
    assert all(map(torch.equal, plain, hooked))


@kernels
def test_threads_trace_and_compile_at_the_same_time() -> None:
    """Four threads race to trace functions and to compile kernels for new widths."""
    samples = named("dropout_add_layer_norm", "gated_norm", "swiglu_norm", "norm_then_add")
    functions = [rowwise(sample) for sample in samples]
    barrier = threading.Barrier(4)

    def tensors(index: int, turn: int) -> dict[str, Tensor]:
        """The tensors of a sample, with a width that depends on the turn."""
        cols = 26 + 2 * ((index + turn) % 4)
        originals = samples[index].tensors(torch.float32, DEVICE)
        original_cols = originals["weight"].shape[0]
        return {
            name: t[..., :1].expand(*t.shape[:-1], cols * t.shape[-1] // original_cols) * 1.0
            for name, t in originals.items()
        }

    def step(index: int, turn: int) -> list[Tensor]:
        """Outputs and gradients of one call of a function."""
        inputs = tensors(index, turn)
        outputs = as_tuple(functions[index](*[t.requires_grad_() for t in inputs.values()]))
        return [
            *outputs,
            *torch.autograd.grad(outputs, list(inputs.values()), cotangents_of(outputs)),
        ]

    def work(thread: int) -> list[list[Tensor]]:
        barrier.wait()
        return [step((thread + turn) % 4, turn) for turn in range(4)]

    with mock.patch.object(F, "dropout", lambda x, p: x * 0.5):
        with ThreadPoolExecutor(4) as pool:
            result = list(pool.map(work, range(4)))
        for thread, steps in enumerate(result):
            for turn, got in enumerate(steps):
                assert all(map(torch.equal, got, step((thread + turn) % 4, turn)))


# --- kernels that Triton cannot compile -----------------------------------------------------------


@pytest.fixture
def fail_to_compile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that makes Triton's compiler fail.

    It fails for kernels whose names contain ``name``, if ``fails_with(warps)`` is true.
    """
    specialise = launch.specialise

    def fail(name: str, fails_with: Callable[[int], bool] = lambda warps: True) -> None:
        def compiled(request: launch.Request, device_index: int) -> launch.Variant:
            if name in request.kernel.fn.__name__ and fails_with(request.config.warps):
                raise launch.NotCompiledError(
                    request.kernel.fn.__name__, RuntimeError("PassManager::run failed")
                )
            return specialise(request, device_index)

        monkeypatch.setattr(launch, "_built", {})
        monkeypatch.setattr(launch, "specialise", compiled)

    return fail


@kernels
@every
def test_pytorchs_operators_run_if_no_kernel_compiles(
    sample: RowwiseFunction, fail_to_compile: Callable[..., None]
) -> None:
    """They draw the kernels' masks, and there is one warning."""
    fail_to_compile("ward_kernel")  # forward and backward
    with pytest.warns(
        RuntimeWarning, match=f"fusedops runs {sample.function.__name__} as plain PyTorch.*forward"
    ) as caught:
        check(sample, fusedops.rowwise(sample.function), sample.tensors(device=DEVICE))
    assert len([w for w in caught if "fusedops" in str(w.message)]) == 1


@kernels
@of("dropout_add_layer_norm", "norm_and_rotary", "masked_softmax")
def test_backward_in_pytorch_reads_the_tensors_that_the_forward_kernel_saved(
    sample: RowwiseFunction, fail_to_compile: Callable[..., None]
) -> None:
    fail_to_compile("backward")
    with (
        launch.record() as launched,
        pytest.warns(RuntimeWarning, match=r"Triton cannot compile backward_kernel \(Run"),
    ):
        check(sample, fusedops.rowwise(sample.function), sample.tensors(device=DEVICE))
    assert launched[0] == "forward_kernel" and "backward_kernel" not in launched


@kernels
def test_another_config_is_tried_if_the_first_does_not_compile(
    fail_to_compile: Callable[..., None],
) -> None:
    (sample,) = named("llama_norm")
    tried: list[int] = []

    def is_first(warps: int) -> bool:
        tried.append(warps)
        return warps == tried[0]

    fail_to_compile("forward", is_first)
    with launch.record() as launched:
        check(sample, rowwise(sample), sample.tensors(device=DEVICE))
    assert len(set(tried)) == 2
    assert launched[0] == "forward_kernel"


@kernels
def test_strict_function_raises_if_no_kernel_compiles(fail_to_compile: Callable[..., None]) -> None:
    (sample,) = named("llama_norm")
    fail_to_compile("forward")
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
    # A forced config has no fallback, because a benchmark would measure something else.
    with (
        tuning.forced("rowwise_forward", tuning.Config(block_n=32, rows=1, warps=1)),
        pytest.raises(launch.NotCompiledError),
    ):
        fusedops.rowwise(sample.function)(*tensors)


def test_compilers_error_names_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("a trace")

    monkeypatch.setattr(launch, "compile_ahead", fails)
    kernel = SimpleNamespace(fn=SimpleNamespace(__name__="a_kernel"), arg_names=("x",))
    with pytest.raises(
        launch.NotCompiledError, match=r"^Triton cannot compile a_kernel \(ValueError: a trace\)$"
    ) as caught:
        launch.compile_kernel(launch.Request(kernel, {"x": "*fp32"}, {}, _SMALL, {}))
    assert isinstance(caught.value.__cause__, ValueError)


def test_error_of_the_operating_system_is_not_the_compilers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(launch, "compile_ahead", fails)
    kernel = SimpleNamespace(fn=SimpleNamespace(__name__="a_kernel"), arg_names=("x",))
    with pytest.raises(OSError, match="No space left"):
        launch.compile_kernel(launch.Request(kernel, {"x": "*fp32"}, {}, _SMALL, {}))
