"""The registered operators' short way: compiled code reaches the kernels past the dispatcher, and nobody else does."""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

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
from fusedops.core import launch, operators
from fusedops.core.spec import Spec
from support import ALL_SPECS, Case, as_tuple, cases, covers_the_schema, random_like

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
every = pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)

_OURS, _DISPATCHER = "implementation", "dispatcher"


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _within_vmap() -> Iterator[None]:
    """The body of a mapped function: `torch.func.vmap` is in force."""
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
    """Another thread profiles, perhaps all threads."""
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


def _way(*args: Any, read: int | None = None, **named: Any) -> str:
    def dispatched(*_: Any, **__: Any) -> str:
        return _DISPATCHER

    def function(*_: Any) -> str:
        return _OURS

    return str(operators._shortened(dispatched, function, len(args) if read is None else read)(*args, **named))


def test_ordinary_arguments_go_the_short_way() -> None:
    t = torch.randn(3)
    with torch.no_grad():
        assert _way(t, None, torch.nn.Parameter(t), 3, "call", 1e-6, True) == _OURS
    with torch.inference_mode():
        assert _way(torch.randn(3), 3) == _OURS


@pytest.mark.parametrize(
    "watch", [torch.enable_grad, _DispatchMode, _FunctionMode, FakeTensorMode, _within_vmap, _profile, _profile_elsewhere,
              forward_ad.dual_level],
    ids=lambda watch: watch.__name__,
)  # fmt: skip
def test_who_watches_sees_the_call(watch: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    t = torch.randn(3)
    with torch.no_grad(), watch():
        assert _way(t, 3) == _DISPATCHER
    with torch.no_grad():
        assert _way(t, 3) == _OURS


def test_a_trace_has_the_call() -> None:
    seen: list[str] = []

    def body(t: Tensor) -> Tensor:
        seen.append(_way(t, 3))
        return t + 1.0

    with torch.no_grad():
        torch.jit.trace(body, (torch.randn(3),), check_trace=False)
    assert seen == [_DISPATCHER]


def _negative() -> Tensor:
    return torch.randn(3, dtype=torch.complex64).conj().imag


def _left_by_a_transform() -> Tensor:
    left: list[Tensor] = []

    def body(t: Tensor) -> Tensor:
        left.append(t * 2.0)
        return t.sum()

    with torch.enable_grad():
        torch.func.grad(body)(torch.randn(3))
    return left[0]


@pytest.mark.parametrize(
    "make",
    [_negative, lambda: torch.empty(3, device="meta"), lambda: TwoTensor(torch.randn(3), torch.randn(3)),
     lambda: torch._efficientzerotensor(3), lambda: torch._to_functional_tensor(torch.randn(3)), _left_by_a_transform,
     lambda: torch.eye(3).to_sparse(), lambda: [torch.randn(3)], lambda: torch.float32],
    ids=["negative", "meta", "subclass", "zeros", "functional", "left", "sparse", "list", "dtype"],
)  # fmt: skip
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_no_plain_memory_is_dispatched(make: Callable[[], Any], place: int) -> None:
    args: list[Any] = [torch.randn(3), None]
    args[place] = make()
    with torch.no_grad():
        assert _way(*args) == _DISPATCHER


def test_a_batch_in_disguise_is_dispatched() -> None:
    """Gradients that `torch.autograd.grad` maps in its older way, by no transform that says it is there."""
    seen: list[str] = []

    def look(gradient: Tensor) -> None:
        with torch.no_grad():
            seen.append(_way(None, gradient))

    x = torch.randn(3, requires_grad=True)
    y = x * 2.0
    y.register_hook(look)
    torch.autograd.grad(y, [x], torch.randn(4, 3), is_grads_batched=True)
    assert seen == [_DISPATCHER]


def test_names_are_dispatched() -> None:
    with torch.no_grad():
        assert _way(torch.randn(3), p=3) == _DISPATCHER


def test_only_what_is_read_is_looked_into() -> None:
    """What is written has whatever in it; but what kind of thing it is matters as everywhere."""
    with torch.no_grad():
        assert _way(torch.randn(3), _negative(), read=1) == _OURS
        assert _way(torch.randn(3), TwoTensor(torch.randn(3), torch.randn(3)), read=1) == _DISPATCHER


def _registered() -> list[Any]:
    names = [name.removeprefix("fusedops::") for name in torch._C._dispatch_get_all_op_names() if "fusedops::" in name]
    return [getattr(torch.ops.fusedops, name).default for name in names]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, the compiler makes the outputs, whatever the device."""
    monkeypatch.setattr(operators, "_planned", lambda tensors: True)


def _planner(seen: list[str]) -> Callable[..., Any]:
    """A backend that does of Inductor's work what concerns calls that write, with no compiler of another language.

    What runs in the end is put into ``seen``.
    """

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        decompose_auto_functionalized(graph.graph)
        graph.recompile()
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=compiler)


@every
@pytest.mark.kernels
@pytest.mark.usefixtures("plans")
def test_compiled_code_goes_the_short_way(spec: Spec, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward and one backward of a compiled call: no operator is dispatched, but for those with lists of tensors."""
    sample = spec.benchmark((6, 40), torch.float32, device)
    tensors = {name: t if t is None else t.requires_grad_() for name, t in sample.tensors.items()}
    backend = "inductor" if device.type == "cuda" else _planner([])
    compiled = torch.compile(lambda **given: spec.call(**given, **sample.options), fullgraph=True, backend=backend)

    def step() -> None:
        outputs = as_tuple(compiled(**tensors))
        torch.autograd.grad(outputs, [t for t in tensors.values() if t is not None], random_like(outputs))

    step()  # traces, the backward too
    met: list[str] = []
    for operator in _registered():
        if "Tensor[]" in str(operator._schema).partition("->")[0]:
            continue
        if inspect.isbuiltin(operator._op):
            monkeypatch.setattr(operator, "_op", _noting(operator, operator._op, met))
        else:
            cell = _dispatcher_of(operator)
            monkeypatch.setattr(cell, "cell_contents", _noting(operator, cell.cell_contents, met))
    with launch.record() as names:
        step()
    assert names and met == []


@pytest.mark.kernels
@pytest.mark.usefixtures("plans")
@cases((torch.float32, torch.bfloat16), covers_the_schema)
def test_outputs_made_by_the_compiler(case: Case, device: torch.device) -> None:
    """The same bits, shapes and strides as of an eager call, from calls that all write into what they are given."""
    spec, sample, seen = case.spec, case.sample(), list[str]()
    options = {**sample.options, **({"p": 0.0} if spec.has_dropout else {})}  # compiled calls draw other states
    torch._dynamo.reset()

    def results(function: Callable[..., Any]) -> list[Tensor]:
        tensors = {name: t if t is None else t.detach().requires_grad_() for name, t in sample.tensors.items()}
        outputs = as_tuple(function(**tensors))
        leaves = [t for t in tensors.values() if t is not None]
        cotangents = [torch.linspace(-1.0, 1.0, y.numel(), device=device).view(y.shape).to(y.dtype) for y in outputs]
        return [*outputs, *torch.autograd.grad(outputs, leaves, cotangents)]

    def function(**given: Any) -> Any:
        return spec.call(**given, **options)

    found = results(torch.compile(function, fullgraph=True, backend=_planner(seen)))
    for a, b in zip(found, results(function), strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert torch.equal(a, b)
    ours = [target for target in seen if target.startswith("fusedops.") and "slices" not in target]
    assert all("_out" in target for target in ours)


def test_calls_are_read_as_they_were_written() -> None:
    """Types too, although 1, 1.0 and True are equal; and no character needs care where a compiler prints the string."""
    tensors = (torch.empty(1), None, torch.empty(1, dtype=torch.bfloat16), torch.empty(2, dtype=torch.int64))
    constants = (0, 1, True, False, 0.0, 1.0, 1e-5, math.inf, 2**40, "", "layer once 1.0.dev3")
    call = operators._call((*tensors, *constants), len(tensors))
    assert not set(call) & set("\"'\\\n?%{}")
    device_index, dtypes, *read = operators.Calls(lambda *given: given)[call, 3]
    assert (device_index, dtypes) == (3, (torch.float32, None, torch.bfloat16, None))
    assert list(map(repr, read)) == list(map(repr, constants))


@every
@pytest.mark.kernels
@pytest.mark.usefixtures("plans")
def test_a_tensor_subclass_sees_the_operator_that_returns(
    spec: Spec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one with rules of its own about operators, as DTensor has."""
    seen: list[str] = []
    dispatch = TwoTensor.__torch_dispatch__

    def look(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(str(func))
        return dispatch(func, types, args, kwargs)

    monkeypatch.setattr(TwoTensor, "__torch_dispatch__", classmethod(look))
    sample = spec.benchmark((6, 40), torch.float32, device)
    options = {**sample.options, **({"p": 0.0} if spec.has_dropout else {})}
    tensors = {name: t if t is None else TwoTensor(t, 2.0 * t) for name, t in sample.tensors.items()}
    with torch.no_grad():
        torch.compile(lambda **given: spec.call(**given, **options), fullgraph=True, backend="aot_eager")(**tensors)
    ours = [target for target in seen if target.startswith("fusedops.")]
    assert ours and not any("_out" in target for target in ours)


@every
@pytest.mark.kernels
@pytest.mark.usefixtures("plans")
def test_an_exported_program_keeps_the_operators_that_return(spec: Spec, device: torch.device) -> None:
    sample = spec.benchmark((6, 40), torch.float32, device)
    names = [name for name, t in sample.tensors.items() if t is not None]

    class Module(torch.nn.Module):
        def forward(self, *values: Tensor) -> Any:
            given = {**dict.fromkeys(sample.tensors), **dict(zip(names, values, strict=True))}
            return spec.call(**given, **sample.options)

    program = torch.export.export(Module(), tuple(sample.tensors[name] for name in names))
    for graph in (program.graph, program.run_decompositions().graph):
        targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        assert any("_forward" in target for target in targets)
        assert not any("_out" in target or "auto_functionalized" in target for target in targets)


@every
def test_a_release_has_its_own_constants(
    spec: Spec, device: torch.device, monkeypatch: pytest.MonkeyPatch, kernel_path: bool
) -> None:
    """PyTorch keeps compiled functions on disk by the forward's graph: another release's must not be found there."""
    sample = spec.benchmark((6, 40), torch.float32, device)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    for version in ("1.0", "1.0", "1.1"):
        monkeypatch.setattr(operators, "__version__", version)
        torch._dynamo.reset()
        torch.compile(lambda: spec.call(**sample.tensors, **sample.options), fullgraph=True, backend=backend)()
    assert graphs[0] == graphs[1]
    assert not kernel_path or graphs[1] != graphs[2]


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("packed", "needs"),
    [("", (True, True)), ("", (True, False)), ("", (False, True)), ("", (False, False)),
     ("gate", (True, False)), ("gate", (False, False))],
)  # fmt: skip
def test_unneeded_gradients(packed: str, needs: tuple[bool, bool], device: torch.device) -> None:
    """The fake gradients are as many, and of the shapes, that the kernels return: of a packed unit always one.

    It has no second tensor.
    """
    dy, x = torch.randn(6, 20, device=device), torch.randn(6, 40 if packed else 20, device=device)
    other = None if packed else torch.randn(6, 20, device=device)
    kind = "packed" if packed else "glu"
    given = (dy, x, other, None, *needs, packed, 0, f"{kind} silu 0", 20)
    made = torch.ops.fusedops.activation_backward(*given)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ops.fusedops.activation_backward(*given)
    assert [t.shape for t in made] == [t.shape for t in fake]


@pytest.mark.kernels
def test_a_gradient_of_zeros_without_memory(device: torch.device) -> None:
    """The dispatcher makes them; there is nothing at their address."""
    x = torch.randn(6, 40, device=device, requires_grad=True)
    y = torch.compile(fusedops.gelu, fullgraph=True, backend=_planner([]))(x)
    (dx,) = torch.autograd.grad(y, [x], torch._efficientzerotensor(6, 40, device=device))
    assert torch.equal(dx, torch.zeros_like(x))


def _dispatcher_of(operator: Any) -> Any:
    """The cell of a shortened operator that holds the way through the dispatcher."""
    cells = dict(zip(operator._op.__code__.co_freevars, operator._op.__closure__, strict=True))
    return cells["dispatched"]


def _noting(operator: Any, way: Callable[..., Any], met: list[str]) -> Callable[..., Any]:
    def note(*args: Any, **named: Any) -> Any:
        met.append(str(operator))
        return way(*args, **named)

    return note


def test_operators_that_write_into_what_is_not_theirs_are_dispatched() -> None:
    """The dispatcher counts the versions of what is written."""
    assert inspect.isbuiltin(torch.ops.fusedops.no_repeat_ngram_forward_.default._op)
