"""Registered operators as compiled graphs call them: past the dispatcher, and writing to outputs.

If nothing observes a call, compiled code calls the kernels without the dispatcher (the fast path).
"""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops.activations.operator import ACTIVATION
from fusedops.activations.site import ActivationConstants
from fusedops.core.calls import operators, registration, words
from fusedops.core.calls.operator import Operator
from fusedops.core.launches import launch, operand
from fusedops.core.spec import Spec
from fusedops.norms.operator import NORM
from fusedops.slices.operator import SLICES
from support import ALL_SPECS, Case, as_tuple, cases, covers_the_schema, of_families, random_like

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
every = pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)

_FAST_PATH, _DISPATCHER = "fast path", "dispatcher"


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _within_vmap() -> Iterator[None]:
    """Within this context, code runs as in the body of a function under `torch.func.vmap`."""
    level = torch._C._functorch._vmap_increment_nesting(2, "error")
    assert level > 0
    try:
        yield
    finally:
        torch._C._functorch._vmap_decrement_nesting()


@contextlib.contextmanager
def _profile() -> Iterator[None]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        yield


@contextlib.contextmanager
def _profile_elsewhere() -> Iterator[None]:
    """Within this context, another thread profiles; PyTorch may then profile all threads."""
    on, off = threading.Event(), threading.Event()

    def work() -> None:
        with _profile():
            on.set()
            off.wait(60.0)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert on.wait(60.0)
        yield
    finally:
        off.set()
        thread.join()


def _path(*args: Any, read: int | None = None, **kwargs: Any) -> str:
    """Returns which path a call with these arguments takes.

    The operator reads the first ``read`` arguments, by default all, and writes to the others.
    """

    def dispatched(*_: Any, **__: Any) -> str:
        return _DISPATCHER

    def function(*_: Any) -> str:
        return _FAST_PATH

    operator = registration.shortened(dispatched, function, len(args) if read is None else read)
    return str(operator(*args, **kwargs))


def test_plain_arguments_take_the_fast_path() -> None:
    t = torch.randn(3)
    with torch.no_grad():
        assert _path(t, None, torch.nn.Parameter(t), 3, "call", 1e-6, True) == _FAST_PATH
    with torch.inference_mode():
        assert _path(torch.randn(3), 3) == _FAST_PATH


@pytest.mark.parametrize(
    "observe",
    [
        torch.enable_grad,
        _DispatchMode,
        _FunctionMode,
        FakeTensorMode,
        _within_vmap,
        _profile,
        _profile_elsewhere,
        forward_ad.dual_level,
    ],
    ids=lambda observe: observe.__name__,
)
def test_observed_calls_are_dispatched(
    observe: Callable[[], contextlib.AbstractContextManager[Any]],
) -> None:
    t = torch.randn(3)
    with torch.no_grad(), observe():
        assert _path(t, 3) == _DISPATCHER
    with torch.no_grad():
        assert _path(t, 3) == _FAST_PATH


def test_calls_in_a_jit_trace_are_dispatched() -> None:
    paths: list[str] = []

    def body(t: Tensor) -> Tensor:
        paths.append(_path(t, 3))
        return t + 1.0

    with torch.no_grad():
        torch.jit.trace(body, (torch.randn(3),), check_trace=False)
    assert paths == [_DISPATCHER]


def _negative() -> Tensor:
    return torch.randn(3, dtype=torch.complex64).conj().imag


def _leaked_from_a_transform() -> Tensor:
    leaked: list[Tensor] = []

    def body(t: Tensor) -> Tensor:
        leaked.append(t * 2.0)
        return t.sum()

    with torch.enable_grad():
        torch.func.grad(body)(torch.randn(3))
    return leaked[0]


@pytest.mark.parametrize(
    "make",
    [
        _negative,
        lambda: torch.empty(3, device="meta"),
        lambda: TwoTensor(torch.randn(3), torch.randn(3)),
        lambda: torch._efficientzerotensor(3),
        lambda: torch._to_functional_tensor(torch.randn(3)),
        _leaked_from_a_transform,
        lambda: torch.eye(3).to_sparse(),
        lambda: [torch.randn(3)],
        lambda: torch.float32,
    ],
    ids=[
        "negative",
        "meta",
        "subclass",
        "zeros",
        "functional",
        "leaked",
        "sparse",
        "list",
        "dtype",
    ],
)
@pytest.mark.parametrize("position", [0, 1])
def test_arguments_that_are_no_plain_tensors_are_dispatched(
    make: Callable[[], Any], position: int
) -> None:
    args: list[Any] = [torch.randn(3), None]
    args[position] = make()
    with torch.no_grad():
        assert _path(*args) == _DISPATCHER


def test_batched_gradients_are_dispatched() -> None:
    """For them `torch.autograd.grad` uses an older vmap, which is not visible as a transform."""
    paths: list[str] = []

    def record(gradient: Tensor) -> None:
        with torch.no_grad():
            paths.append(_path(None, gradient))

    x = torch.randn(3, requires_grad=True)
    y = x * 2.0
    y.register_hook(record)
    torch.autograd.grad(y, [x], torch.randn(4, 3), is_grads_batched=True)
    assert paths == [_DISPATCHER]


def test_keyword_arguments_are_dispatched() -> None:
    with torch.no_grad():
        assert _path(torch.randn(3), p=3) == _DISPATCHER


def test_outputs_may_be_lazy_but_not_subclasses() -> None:
    """Lazy negations are tested for tensors that are read only, types for all."""
    subclass = TwoTensor(torch.randn(3), torch.randn(3))
    with torch.no_grad():
        assert _path(torch.randn(3), _negative(), read=1) == _FAST_PATH
        assert _path(torch.randn(3), subclass, read=1) == _DISPATCHER


def _registered() -> list[Any]:
    names = [
        name.removeprefix("fusedops::")
        for name in torch._C._dispatch_get_all_op_names()
        if "fusedops::" in name
    ]
    return [getattr(torch.ops.fusedops, name).default for name in names]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler allocates the outputs, as on a GPU, on any device."""
    monkeypatch.setattr(registration, "is_planned", lambda tensors: True)


def _planner(targets: list[str]) -> Callable[..., Any]:
    """A backend with Inductor's pass for operators that write, and without code generation.

    It appends the targets of all calls in the graphs to ``targets``.
    """

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        decompose_auto_functionalized(graph.graph)
        graph.recompile()
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=compiler)


@of_families
@pytest.mark.kernels
@pytest.mark.usefixtures("plans")
def test_compiled_code_takes_the_fast_path(
    spec: Spec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No operator is dispatched in a compiled forward and backward, but those of tensor lists."""
    sample = spec.benchmark((6, 40), torch.float32, device)
    tensors = {name: t if t is None else t.requires_grad_() for name, t in sample.tensors.items()}
    backend = "inductor" if device.type == "cuda" else _planner([])
    compiled = torch.compile(
        lambda **inputs: spec.call(**inputs, **sample.options), fullgraph=True, backend=backend
    )

    def step() -> None:
        outputs = as_tuple(compiled(**tensors))
        torch.autograd.grad(
            outputs, [t for t in tensors.values() if t is not None], random_like(outputs)
        )

    step()  # traces forward and backward
    dispatched: list[str] = []
    for operator in _registered():
        if "Tensor[]" in str(operator._schema).partition("->")[0]:
            continue
        if inspect.isbuiltin(operator._op):
            recorded = _recorded(operator, operator._op, dispatched)
            monkeypatch.setattr(operator, "_op", recorded)
        else:
            cell = _dispatcher_of(operator)
            recorded = _recorded(operator, cell.cell_contents, dispatched)
            monkeypatch.setattr(cell, "cell_contents", recorded)
    with launch.record() as names:
        step()
    assert names
    assert dispatched == []


@pytest.mark.kernels
@pytest.mark.usefixtures("plans")
@cases((torch.float32, torch.bfloat16), covers_the_schema)
def test_outputs_allocated_by_the_compiler_equal_eager_ones(
    case: Case, device: torch.device
) -> None:
    """Bits, shapes and strides are equal. Every operator in the graph writes to its arguments."""
    spec, sample, targets = case.spec, case.sample(), list[str]()
    # Without dropout, because compiled calls draw other random states.
    options = {**sample.options, **({"p": 0.0} if spec.has_dropout else {})}
    torch._dynamo.reset()

    def results(function: Callable[..., Any]) -> list[Tensor]:
        tensors = {
            name: t if t is None else t.detach().requires_grad_()
            for name, t in sample.tensors.items()
        }
        outputs = as_tuple(function(**tensors))
        leaves = [t for t in tensors.values() if t is not None]
        cotangents = [
            torch.linspace(-1.0, 1.0, y.numel(), device=device).view(y.shape).to(y.dtype)
            for y in outputs
        ]
        return [*outputs, *torch.autograd.grad(outputs, leaves, cotangents)]

    def function(**inputs: Any) -> Any:
        return spec.call(**inputs, **options)

    compiled = results(torch.compile(function, fullgraph=True, backend=_planner(targets)))
    for result, expected in zip(compiled, results(function), strict=True):
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        assert result.stride() == expected.stride()
        assert torch.equal(result, expected)
    ours = [
        target for target in targets if target.startswith("fusedops.") and "slices" not in target
    ]
    assert all("_out" in target for target in ours)


def test_constants_as_text_are_restored_with_their_types() -> None:
    """1 stays an int and 1.0 a float. The text needs no escaping when a compiler prints it."""
    constants = (0, 1, 0.0, 1.0, 1e-5, math.inf, -2.5, 2**40, "", "layer once 1.0.dev3")
    call = registration.as_text(constants)
    assert not set(call) & set("\"'\\\n?%{}")
    assert list(map(repr, registration._constants(call))) == list(map(repr, constants))


class _Calls(TorchDispatchMode):
    """Records the calls of operators with constants: the operator's name, and the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        if func.namespace == "fusedops" and "call" in names:
            self.calls.append(
                (func._schema.name.removeprefix("fusedops::"), dict(zip(names, args, strict=True)))
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.kernels
@cases((torch.float32, torch.bfloat16), covers_the_schema)
def test_arguments_of_a_registered_operator_determine_the_site(case: Case) -> None:
    """Constants and dtypes are encoded as a string and numbers, and decoded from them."""
    known: dict[str, Operator] = {f"{op.name}_forward": op for op in (NORM, ACTIVATION, SLICES)}
    sample = case.sample()
    with _Calls() as mode:
        case.spec.call(**sample.tensors, **sample.options)
    assert len(mode.calls) == 1
    ((name, arguments),) = mode.calls
    op, call = known[name], arguments["call"]
    numbers = tuple(arguments[name] for name in op.constants.numbered)
    site = operators.site_from(
        op, -1, arguments["seed"] is not None, arguments["cols"], call, numbers
    )
    assert callable(getattr(fusedops, site.constants.op))
    assert site.constants.numbers() == numbers
    assert words.encode(site.constants, site.dtypes, site.saves) == site.call == call
    inputs = [arguments[tensor] for tensor in op.tensors]
    assert site.dtypes == operators.dtypes_of(
        op, [t[0] if isinstance(t, list) else t for t in inputs]
    )


@of_families
@pytest.mark.kernels
@pytest.mark.usefixtures("plans")
def test_tensor_subclass_dispatches_the_operator_that_returns(
    spec: Spec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Subclasses such as DTensor have rules for these operators, not for those that write."""
    targets: list[str] = []
    dispatch = TwoTensor.__torch_dispatch__

    def record(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        targets.append(str(func))
        return dispatch(func, types, args, kwargs)

    monkeypatch.setattr(TwoTensor, "__torch_dispatch__", classmethod(record))
    sample = spec.benchmark((6, 40), torch.float32, device)
    options = {**sample.options, **({"p": 0.0} if spec.has_dropout else {})}
    tensors = {
        name: t if t is None else TwoTensor(t, 2.0 * t) for name, t in sample.tensors.items()
    }
    with torch.no_grad():
        torch.compile(
            lambda **inputs: spec.call(**inputs, **options), fullgraph=True, backend="aot_eager"
        )(**tensors)
    ours = [target for target in targets if target.startswith("fusedops.")]
    assert ours
    assert not any("_out" in target for target in ours)


@of_families
@pytest.mark.kernels
@pytest.mark.usefixtures("plans")
def test_exported_program_has_the_operators_that_return(spec: Spec, device: torch.device) -> None:
    sample = spec.benchmark((6, 40), torch.float32, device)
    names = [name for name, t in sample.tensors.items() if t is not None]

    class Module(torch.nn.Module):
        def forward(self, *values: Tensor) -> Any:
            inputs = {**dict.fromkeys(sample.tensors), **dict(zip(names, values, strict=True))}
            return spec.call(**inputs, **sample.options)

    program = torch.export.export(Module(), tuple(sample.tensors[name] for name in names))
    for graph in (program.graph, program.run_decompositions().graph):
        targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        assert any("_forward" in target for target in targets)
        assert not any("_out" in target or "auto_functionalized" in target for target in targets)


@pytest.mark.kernels
@every
def test_a_release_has_its_own_constants(
    spec: Spec,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """PyTorch caches compiled functions on disk, by the graph of the forward.

    So the graph must differ between releases of fusedops.
    """
    # Cached sites contain their constants as a string, which contains the release.
    request.addfinalizer(operators._cached_site.cache_clear)
    sample = spec.benchmark((6, 40), torch.float32, device)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    for version in ("1.0", "1.0", "1.1"):
        monkeypatch.setattr(words, "__version__", version)
        torch._dynamo.reset()
        torch.compile(
            lambda: spec.call(**sample.tensors, **sample.options), fullgraph=True, backend=backend
        )()
    assert graphs[0] == graphs[1]
    assert graphs[1] != graphs[2]


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("kind", "needs"), [("glu", "11"), ("glu", "10"), ("glu", "01"), ("packed", "10")]
)
def test_gradients_that_are_not_needed_are_empty(
    kind: Any, needs: str, device: torch.device
) -> None:
    """Fake gradients have the number and shapes of real ones."""
    dy, other = torch.randn(6, 20, device=device), torch.randn(6, 20, device=device)
    tensors = (other, other) if kind == "glu" else (torch.cat((other, other), -1), None)
    call = words.encode(
        ActivationConstants("glu", kind, "silu"), operators.dtypes_of(ACTIVATION, tensors), True
    )
    inputs = (dy, *tensors, None, 0, needs, 20, call)
    real = torch.ops.fusedops.activation_backward(*inputs)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ops.fusedops.activation_backward(*inputs)
    expected = [t.shape if need == "1" else (0,) for t, need in zip(tensors, needs, strict=True)]
    assert [t.shape for t in real] == expected
    assert [t.shape for t in fake] == expected


@pytest.mark.kernels
def test_cotangent_of_zeros_without_memory(device: torch.device) -> None:
    """PyTorch's dispatcher creates such tensors; their address is null."""
    x = torch.randn(6, 40, device=device, requires_grad=True)
    y = torch.compile(fusedops.gelu, fullgraph=True, backend=_planner([]))(x)
    (dx,) = torch.autograd.grad(y, [x], torch._efficientzerotensor(6, 40, device=device))
    assert torch.equal(dx, torch.zeros_like(x))


def _dispatcher_of(operator: Any) -> Any:
    """The closure's cell, in an operator with a fast path, that contains the dispatched call."""
    cells = dict(zip(operator._op.__code__.co_freevars, operator._op.__closure__, strict=True))
    return cells["dispatched"]


def _recorded(operator: Any, call: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """A call that also appends the operator's name to ``calls``."""

    def recorded(*args: Any, **kwargs: Any) -> Any:
        calls.append(str(operator))
        return call(*args, **kwargs)

    return recorded


def test_operators_that_write_to_a_callers_tensor_are_dispatched() -> None:
    """The dispatcher increments the version of a tensor that is written to."""
    assert inspect.isbuiltin(torch.ops.fusedops.no_repeat_ngram_forward_.default._op)


def test_numbers_of_constants_have_the_names_of_their_fields() -> None:
    """One field is not a number, and is not passed on."""

    @words.dispatched
    class Constants(NamedTuple):
        op: str
        token: object
        eps: float

    constants: Any = Constants
    assert constants.numbered == ("eps",)
    assert Constants("op", None, 1e-5).numbers() == (1e-5,)  # type: ignore[attr-defined]


@pytest.mark.kernels
def test_derivative_in_an_eager_graph_is_launched_on_the_device_of_its_tensors(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    indices = list[int]()
    backward: Callable[..., None] = NORM.backward

    def recorded(site: Any, *args: Any) -> None:
        indices.append(site.device_index)
        backward(site, *args)

    monkeypatch.setattr(NORM, "backward", recorded)
    x = torch.randn(6, 24, device=device, requires_grad=True)
    compiled = torch.compile(lambda x: fusedops.layer_norm(x, (24,)), backend="eager")
    compiled(x).sum().backward()
    assert indices == [x.get_device()]


@fusedops.rowwise
def _softmax_of_double(x: Tensor) -> Tensor:
    return torch.softmax(2 * x, -1)


@pytest.mark.kernels
@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize(
    "function", [lambda x: fusedops.layer_norm(x, (24,)), _softmax_of_double], ids=["norm", "rows"]
)
def test_graph_has_the_copies_of_transposed_tensors(
    function: Callable[..., Tensor], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transposed input and cotangent are copied by the compiler, and by no launch."""
    x = torch.randn(2, 24, 5, device=device, requires_grad=True)

    def transposed(x: Tensor) -> Tensor:
        return function(x.transpose(1, 2)).transpose(1, 2) * x

    def results(call: Callable[..., Tensor]) -> list[Tensor]:
        y = call(x)
        return [y, *torch.autograd.grad(y, x, torch.ones_like(y))]

    expected = results(transposed)

    def refuse(*args: Any) -> Any:
        raise AssertionError("a launch copies")

    monkeypatch.setattr(operand, "_evenly_spaced", refuse)
    compiled = torch.compile(transposed, fullgraph=True, backend=_planner([]))
    for result, exact in zip(results(compiled), expected, strict=True):
        assert torch.equal(result, exact)
