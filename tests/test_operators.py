"""The registered operators' short way: compiled code reaches the kernels past the dispatcher, and nobody else does."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops.core import launch, operators
from fusedops.core.spec import Spec
from support import ALL_SPECS, as_tuple, random_like

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


def _way(*args: Any, **named: Any) -> str:
    def dispatched(*_: Any, **__: Any) -> str:
        return _DISPATCHER

    def function(*_: Any) -> str:
        return _OURS

    return str(operators._shortened(dispatched, function)(*args, **named))


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


def _registered() -> list[Any]:
    names = [name.removeprefix("fusedops::") for name in torch._C._dispatch_get_all_op_names() if "fusedops::" in name]
    return [getattr(torch.ops.fusedops, name).default for name in names]


@every
@pytest.mark.kernels
def test_compiled_code_goes_the_short_way(spec: Spec, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward and one backward of a compiled call: no operator is dispatched, but for those with lists of tensors."""
    sample = spec.benchmark((6, 40), torch.float32, device)
    tensors = {name: t if t is None else t.requires_grad_() for name, t in sample.tensors.items()}
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(lambda **given: spec.call(**given, **sample.options), fullgraph=True, backend=backend)

    def step() -> None:
        outputs = as_tuple(compiled(**tensors))
        torch.autograd.grad(outputs, [t for t in tensors.values() if t is not None], random_like(outputs))

    step()  # traces, the backward too
    met: list[str] = []
    for operator in _registered():
        if not operator._schema.is_mutable and "Tensor[]" not in str(operator._schema).partition("->")[0]:
            monkeypatch.setattr(_dispatcher_of(operator), "cell_contents", _noting(operator, met))
    with launch.record() as names:
        step()
    assert names and met == []


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
    given = (dy, x, other, *needs, packed, None, 0, kind, "silu", 20)
    made = torch.ops.fusedops.activation_backward(*given)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ops.fusedops.activation_backward(*given)
    assert [t.shape for t in made] == [t.shape for t in fake]


@pytest.mark.kernels
def test_a_gradient_of_zeros_without_memory(device: torch.device) -> None:
    """The dispatcher makes them; there is nothing at their address."""
    x = torch.randn(6, 40, device=device, requires_grad=True)
    y = torch.compile(fusedops.gelu, fullgraph=True, backend="aot_eager")(x)
    (dx,) = torch.autograd.grad(y, [x], torch._efficientzerotensor(6, 40, device=device))
    assert torch.equal(dx, torch.zeros_like(x))


def _dispatcher_of(operator: Any) -> Any:
    """The cell of a shortened operator that holds the way through the dispatcher."""
    cells = dict(zip(operator._op.__code__.co_freevars, operator._op.__closure__, strict=True))
    return cells["dispatched"]


def _noting(operator: Any, met: list[str]) -> Callable[..., Any]:
    dispatched = _dispatcher_of(operator).cell_contents

    def note(*args: Any, **named: Any) -> Any:
        met.append(str(operator))
        return dispatched(*args, **named)

    return note


def test_operators_that_write_into_their_arguments_are_dispatched() -> None:
    """The dispatcher counts the versions of what is written."""
    for operator in _registered():
        assert inspect.isbuiltin(operator._op) == operator._schema.is_mutable, operator
