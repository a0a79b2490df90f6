"""`fusedops.rowwise`: repeated calls, and different calls in between.

A repeated call skips all checks, and its launches do not compare shapes. So a call must count as a
repetition only if everything that a launch depends on is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops.core.launches import launch
from rowwise_checks import kernels, randn
from support import DEVICE
from wrappers import Wrapper

pytestmark = kernels

ROWS, COLS = 5, 24


class _Subclass(Tensor):
    pass


class _Operators(TorchDispatchMode):
    """Collects the calls of registered operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fusedops":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def _scaled(x: Tensor, weight: Tensor) -> Tensor:
    return F.silu(x) * weight


def _silu(x: Tensor) -> Tensor:
    return F.silu(x)


def _halved(x: Tensor) -> Tensor:
    return x * 0.5


def _strided(x: Tensor) -> Tensor:
    return torch.cat([x, x], -1)[:, : x.shape[1]].requires_grad_(x.requires_grad)


# Differences between two calls: a function that changes a tensor, and a context around the call.
_CHANGES: dict[
    str, tuple[Callable[[Tensor], Tensor], Callable[[], AbstractContextManager[Any]]]
] = {
    "nothing": (lambda x: x, nullcontext),
    "no gradient": (lambda x: x.detach(), nullcontext),
    "a parameter": (lambda x: nn.Parameter(x.detach()), nullcontext),
    "a subclass": (lambda x: x.detach().as_subclass(_Subclass), nullcontext),
    "rows": (lambda x: x.detach()[:3].clone().requires_grad_(), nullcontext),
    "one row": (lambda x: x.detach()[:1].clone().requires_grad_(), nullcontext),
    "no rows": (lambda x: x.detach()[:0].clone().requires_grad_(), nullcontext),
    "dimensions": (lambda x: x.detach()[None].clone().requires_grad_(), nullcontext),
    "columns": (lambda x: x.detach()[:, :1].clone().requires_grad_(), nullcontext),
    "strides": (lambda x: _strided(x.detach()).requires_grad_(), nullcontext),
    "dtype": (lambda x: x.detach().double().requires_grad_(), nullcontext),
    "no_grad": (lambda x: x, torch.no_grad),
    "inference mode": (lambda x: x, torch.inference_mode),
    "a dispatch mode": (lambda x: x, _Operators),
}


# The changes that apply to a captured vector.
_OF_VECTORS = ("nothing", "no gradient", "a parameter", "a subclass", "dtype", "no_grad")


@pytest.mark.parametrize(
    ("changed_name", "change"),
    [("x", change) for change in _CHANGES] + [("weight", change) for change in _OF_VECTORS],
)
def test_alternating_calls_match_pytorch(changed_name: str, change: str) -> None:
    """Two different calls alternate. Results and gradients of each are those of PyTorch.

    The function captures the weight.
    """
    first = {"x": randn(ROWS, COLS).requires_grad_(), "weight": randn(COLS).requires_grad_()}
    state = dict(first)

    def plain(x: Tensor) -> Tensor:
        return _scaled(x, state["weight"])

    function = fusedops.rowwise(plain)
    changed, context_of_second = _CHANGES[change]
    second = {**first, changed_name: changed(first[changed_name])}
    for tensors, context in ((first, nullcontext), (second, context_of_second)) * 3:
        state.update(tensors)
        with context():
            got, want = function(state["x"]), plain(state["x"])
        assert _properties(got) == _properties(want)
        torch.testing.assert_close(got, want)
        leaves = [t for t in tensors.values() if t.requires_grad and got.requires_grad]
        dy = torch.ones_like(want)
        for leaf in leaves:
            dx, expected = (
                torch.autograd.grad(y, leaf, dy, retain_graph=True) for y in (got, want)
            )
            torch.testing.assert_close(dx, expected)


def _properties(t: Tensor) -> tuple[Any, ...]:
    return type(t), t.shape, t.dtype, t.device, t.requires_grad, t.is_inference()


def test_each_call_of_plain_tensors_launches_one_kernel() -> None:
    function, x, weight = fusedops.rowwise(_scaled), randn(ROWS, COLS), randn(COLS)
    for requires_grad in (False, True, False, True):
        with launch.record() as names:
            y = function(x.clone().requires_grad_(requires_grad), weight)
        assert len(names) == 1
        assert y.requires_grad == requires_grad


@pytest.mark.parametrize("captures", [False, True])
def test_subclass_after_plain_tensors_dispatches_the_operator(captures: bool) -> None:
    x, weight = randn(ROWS, COLS), randn(COLS)
    state = {"weight": weight}
    args = (x,) if captures else (x, weight)

    def plain(x: Tensor, weight: Tensor | None = None) -> Tensor:
        return _scaled(x, state["weight"])

    function = fusedops.rowwise(plain if captures else _scaled)
    for _ in range(2):
        function(*args)
    state["weight"] = Wrapper(weight)
    Wrapper.log.clear()
    y = function(*args) if captures else function(Wrapper(x), weight)
    assert isinstance(y, Wrapper)
    assert any(name.startswith("fusedops.") for name in Wrapper.log)
    torch.testing.assert_close(y.held, _scaled(x, weight))


def test_no_gradient_is_written_for_an_unused_input() -> None:
    """Also if autograd does not say which gradients are needed, as under compiled autograd."""

    def first(x: Tensor, other: Tensor) -> Tensor:
        return F.silu(x)

    function, x = fusedops.rowwise(first), randn(ROWS, COLS)
    function(x, x)
    ((match,),) = function._programs.known.values()
    for requires_grad in ((True, True), (True, False), (False, True)):
        needed = match.program.needed(None, None, requires_grad)
        assert needed == (requires_grad[0], False)


def test_change_of_the_default_dtype_is_seen() -> None:
    """The product of a float and an integer tensor has the default dtype."""
    function, x = fusedops.rowwise(_halved), torch.arange(ROWS * COLS, device=DEVICE).view(ROWS, -1)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64) * 2:
            torch.set_default_dtype(dtype)
            got = function(x)
            assert got.dtype == dtype
            assert torch.equal(got, _halved(x))
    finally:
        torch.set_default_dtype(before)


def test_calls_alternate_between_meta_and_real_tensors() -> None:
    """Tensors on meta have no device index, like those on the CPU; they launch no kernel."""
    function, x = fusedops.rowwise(_silu), randn(ROWS, COLS)
    for t in (x, x.to("meta"), x, x.to("meta")):
        with launch.record() as names:
            y = function(t)
        assert (len(names), y.device) == (not t.is_meta, t.device)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace_is_refused() -> None:
    function = fusedops.rowwise(_scaled)
    function(randn(ROWS, COLS), randn(COLS))
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace is not supported"):
        torch.jit.trace(function, (randn(ROWS, COLS), randn(COLS)), check_trace=False)


def test_registered_operators_compare_shapes() -> None:
    """Anyone may call them, with any tensors; the kernels would read beyond a smaller one."""
    function, x, weight = fusedops.rowwise(_scaled), randn(ROWS, COLS), randn(COLS)
    for _ in range(2):  # the launches of repeated calls do not compare shapes
        function(x, weight)
    with _Operators() as operators:
        function(x, weight)
    ((operator, (_, _, *constants)),) = operators.calls
    torch.testing.assert_close(operator(x, weight, *constants)[0], _scaled(x, weight))
    for tensors in ((x[:, :-1].clone(), weight), (x, weight[:-1].clone())):
        with pytest.raises(RuntimeError, match=r"has the shape \(.*\), but its program is for"):
            operator(*tensors, *constants)


def test_saved_tensor_with_other_data_is_detected() -> None:
    """Autograd does not detect that `data` changes; the backward would read beyond the tensor."""
    function, x, weight = fusedops.rowwise(_scaled), randn(ROWS, COLS), randn(COLS)
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        y = function(leaf, weight)
        leaf.data = randn(ROWS - 2, COLS)
        with pytest.raises(RuntimeError, match="has the shape"):
            torch.autograd.grad(y, leaf, torch.ones_like(y))
