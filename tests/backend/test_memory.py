"""Backwards compute again what only the gradients of weights read."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch.nn import functional as F

import fusedops
from backends import Backend, PostNorm, randn
from fusedops.backend import entry, joint
from fusedops.backend.fx import JointPass, _joined
from fusedops.core.calls import registration
from support import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]

_WIDTH = 32


class Gated(nn.Module):
    """A feed-forward part of a decoder: a norm, and a gated unit."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.activation = activation
        self.norm = nn.RMSNorm(_WIDTH)
        self.gate, self.up = (nn.Linear(_WIDTH, 2 * _WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * _WIDTH, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(self.activation(self.gate(y)) * self.up(y))


def _gated() -> nn.Module:
    return nn.Sequential(Gated(), Gated())


def _post_norm() -> nn.Module:
    """Biases and GELU are a region, and so are dropout, residual and norm."""
    return nn.Sequential(PostNorm(_WIDTH, 0.25), PostNorm(_WIDTH, 0.25), nn.Linear(_WIDTH, 8))


class _Run:
    """A step of a compiled model.

    Attributes:
        tensors: the output, and the gradients of the input and the parameters.
        saved: the bytes of the tensors that the forward returns, in order of size.
        again: how many operators of the backward compute a result again.
    """

    def __init__(self, model: nn.Module, memory: str, dtype: torch.dtype = torch.float32) -> None:
        model = copy.deepcopy(model).to(DEVICE)
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).to(DEVICE)
        x = torch.randn(4, 6, _WIDTH, generator=generator).to(DEVICE).requires_grad_()
        torch._dynamo.reset()
        backend = Backend(memory)
        torch.manual_seed(5)
        with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
            output = torch.compile(model, backend=backend)(x)
        cotangent = torch.randn(output.shape, generator=generator).to(output)
        wanted = [x, *filter(lambda p: p.requires_grad, model.parameters())]
        self.tensors = [output, *torch.autograd.grad(output, wanted, cotangent)]
        self.saved = sorted(tensor.nbytes for tensor in backend.saved)
        targets = [str(node.target) for graph in backend.backwards for node in graph.nodes]
        self.again = sum("rowwise_again" in target for target in targets)
        assert not backend.report.left


@pytest.mark.parametrize("is_planned", [False, True], ids=["allocating", "functionalized"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "build, results",
    [
        pytest.param(_gated, 2, id="norms of two layers"),
        pytest.param(_post_norm, 4, id="two norms and two activations with a bias"),
    ],
)
def test_results_computed_again_have_the_same_bits(
    build: Callable[[], nn.Module],
    results: int,
    dtype: torch.dtype,
    is_planned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_planned:  # as on GPUs
        monkeypatch.setattr(registration, "is_planned", lambda args: True)
    torch.manual_seed(1)
    model = build()
    plain, low = _Run(model, "speed", dtype), _Run(model, "low", dtype)
    for expected, actual in zip(plain.tensors, low.tensors, strict=True):
        assert torch.equal(actual, expected)
    assert (plain.again, low.again) == (0, results)
    assert sum(low.saved) < sum(plain.saved)


def _no_longer_saved(model: nn.Module, memory: str) -> list[int]:
    """The bytes of the tensors that are saved with "speed" only."""
    plain, run = (_Run(model, choice, torch.bfloat16) for choice in ("speed", memory))
    rest = Counter(plain.saved) - Counter(run.saved)
    assert not Counter(run.saved) - Counter(plain.saved)
    return sorted(rest.elements())


_ROWS = 24
_BYTES_OF_GATED = _ROWS * 2 * _WIDTH * 2
_BYTES_OF_NORMED = _ROWS * _WIDTH * 2


@pytest.mark.parametrize("activation", [F.silu, F.gelu], ids=lambda f: f.__name__)
def test_memory_option_decides_by_bytes(activation: Callable[[Tensor], Tensor]) -> None:
    """With "auto" nothing is computed again that costs more bytes than it saves.

    A gated unit is written once more, by the kernel that reads gate and up for their gradients. To
    compute a norm's result again, a kernel has to read its input, too.
    """
    model = Gated(activation)
    assert _no_longer_saved(model, "auto") == [_BYTES_OF_GATED]
    assert _no_longer_saved(model, "low") == [_BYTES_OF_NORMED, _BYTES_OF_GATED]


class Convolved(Gated):
    """Reads the gated unit's result by a convolution, too, which is no product."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        z = F.silu(self.gate(y)) * self.up(y)
        return torch.cat([self.down(z), F.conv1d(z, z.new_ones(6, 6, 1))], -1)


def test_gated_results_with_other_readers_are_saved() -> None:
    assert _no_longer_saved(Convolved(), "auto") == []


def test_casts_of_weights_are_computed_again() -> None:
    """Parameters are in memory anyway."""
    model = nn.Sequential(nn.RMSNorm(_WIDTH), nn.Linear(_WIDTH, 3 * _WIDTH, bias=False))
    assert _no_longer_saved(model, "auto") == []
    assert _no_longer_saved(model, "low") == [_BYTES_OF_NORMED, 3 * _WIDTH * _WIDTH * 2]


def test_nothing_is_computed_again_for_frozen_weights() -> None:
    model = Gated()
    for linear in (model.gate, model.up, model.down):
        linear.weight.requires_grad_(False)
    assert _no_longer_saved(model, "low") == []
    assert _Run(model, "low").again == 0


class Steps(nn.Module):
    """A product of a result whose derivative is zero, so that no other reader saves its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.floor(self.first(x) + self.second(x))
        return torch.cat([self.last(y), self.first(x), self.second(x)], -1)


def test_nothing_more_is_saved_to_compute_a_result_again() -> None:
    assert _no_longer_saved(Steps(), "low") == []


def test_results_of_regions_without_a_backward_are_saved() -> None:
    """Of two equal norms the first has no gradients, so that nothing is saved for it."""
    width = 1040  # of longer rows than Inductor holds in registers: a region without gradients
    norms = nn.RMSNorm(width).requires_grad_(False), nn.RMSNorm(width)
    linears = [nn.Linear(width, width, bias=False) for _ in range(2)]
    model = nn.Sequential(norms[0], linears[0], norms[1], linears[1]).to(DEVICE)
    backend = Backend("low")
    torch.compile(model, backend=backend)(randn(6, width)).sum().backward()
    assert [region.program is not None for region in backend.report.regions] == [True, True]
    targets = [str(node.target) for graph in backend.backwards for node in graph.nodes]
    assert sum("rowwise_again" in target for target in targets) == 1


class Normed(nn.Module):
    """Reads a norm's result by a product, and by another function."""

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.use = use
        self.norm, self.linear = nn.RMSNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return torch.cat([self.linear(y), self.use(y)], -1)


@pytest.mark.parametrize(
    "use, again",
    [
        pytest.param(lambda y: y, 1, id="a copy in the forward"),
        pytest.param(lambda y: F.conv1d(y, y.new_ones(6, 6, 1)), 0, id="a convolution"),
        pytest.param(torch.special.i0, 0, id="an elementwise reader"),
    ],
)
def test_results_with_other_readers_are_saved(use: Callable[[Tensor], Tensor], again: int) -> None:
    assert _Run(Normed(use), "low").again == again


class Frame(nn.Module):
    """Returns a norm's result and a product of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        return self.linear(y), y


def test_returned_results_are_not_computed_again() -> None:
    """They are in memory anyway."""
    backend = Backend("low")
    model = Frame().to(DEVICE)
    results = torch.compile(model, backend=backend)(randn(4, 6, _WIDTH))
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])
    graphs = "".join(map(str, backend.backwards))
    assert "_backward" in graphs
    assert "rowwise_again" not in graphs


@pytest.mark.parametrize("memory", ["speed", "low"])
def test_dropout_draws_equal_masks_under_a_memory_budget(memory: str) -> None:
    """PyTorch recomputes beside the pass, and the masks of the backward are the forward's."""
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Dropout(0.5), nn.LayerNorm(_WIDTH))
    model = nn.Sequential(model, nn.Linear(_WIDTH, _WIDTH), nn.Dropout(0.5)).to(DEVICE)
    expected = _Run(model, memory).tensors
    with functorch_config.patch(activation_memory_budget=0.3):
        actual = _Run(model, memory).tensors
    # Of other masks the gradients would be other numbers; recomputed products are the same.
    for ours, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, want)


# --- the option -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["high", None, ["low"]])
def test_option_is_checked(value: Any) -> None:
    with pytest.raises(ValueError, match="must be one of 'speed', 'auto', 'low', got "):
        fusedops.compile(Gated(), options={"fusedops.memory": value})


def test_unknown_option_of_this_backend_is_named() -> None:
    """Inductor's error lists all of Inductor's options, and not this one."""
    with pytest.raises(ValueError, match=r"no option 'fusedops.memry'; .* 'fusedops.memory'"):
        fusedops.compile(Gated(), options={"fusedops.memry": "low"})


@pytest.mark.parametrize(
    "options, memory, of_inductor",
    [
        (None, "auto", None),
        ({"fusedops.memory": "low"}, "low", None),
        ({"fusedops.memory": "speed", "max_autotune": True}, "speed", {"max_autotune": True}),
    ],
)
def test_option_reaches_the_pass(
    options: dict[str, Any] | None,
    memory: str,
    of_inductor: dict[str, Any] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, JointPass]] = []

    def compile_(gm: torch.fx.GraphModule, inputs: Any, mode: Any, rest: Any, change: Any) -> Any:
        calls.append((rest, change))
        return gm.forward

    monkeypatch.setattr(entry, "compile_by_inductor", compile_)
    fusedops.compile(Gated().to(DEVICE), options=options)(randn(2, _WIDTH))
    ((rest, change),) = calls
    assert rest == of_inductor
    assert change.key.endswith(f" {memory}")


def test_passes_of_the_user_run_first() -> None:
    order: list[str] = []
    change = JointPass(lambda graph: order.append("ours"), "key")
    joined = _joined(lambda graph: order.append("theirs"), change)
    joined(torch.fx.Graph())
    assert order == ["theirs", "ours"]
    assert joined.uuid() is None  # a pass without a key: PyTorch caches nothing
    assert _joined(joined, change).uuid() is None
    assert _joined(_joined(None, change), change).uuid() == (("key",), "key")


def test_joint_graph_need_not_be_sorted() -> None:
    """Inductor replaces attentions by nodes that come before their arguments."""
    graph, value = fx.Graph(), torch.ones(2, device=DEVICE)
    first = graph.placeholder("primals_1")
    inner = graph.call_function(torch.ops.aten.exp.default, (first,))
    outer = graph.call_function(torch.ops.aten.relu.default, (inner,))
    graph.output((outer,))
    for node in (first, inner, outer):
        node.meta["val"] = value
    outer.append(inner)
    joint.recompute(graph, "auto")
    graph.lint()
