"""`fusedops.compile(rest="eager")`: regions are kernels, and PyTorch's eager operators run the rest."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedops
from backends import PostNorm, check, randn, results
from fusedops.backend import eager, entry, selection, storing
from fusedops.backend.options import EAGER, INDUCTOR
from fusedops.backend.prediction import machine_of
from fusedops.core.compat.bindings import binding
from fusedops.core.compat.dispatch import DispatchMode
from fusedops.core.launches import launch
from support import DEVICE

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

_WIDTH, _EPS, _EPS_BF16 = 24, 2.0**-24, 2.0**-9


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test in which Inductor compiles a graph."""

    def fail(*args: Any) -> Any:
        raise AssertionError("Inductor was called")

    monkeypatch.setattr(entry, "compile_by_inductor", fail)
    # Regions of small tensors become operators in inference, too.
    monkeypatch.setattr(selection, "BYTES_OF_LAUNCH", 0)


def _blocks(p: float = 0.0) -> nn.Module:
    return nn.Sequential(PostNorm(_WIDTH, p), PostNorm(_WIDTH, p)).to(DEVICE)


def _forwards(names: list[str]) -> int:
    """Return how many of the launched kernels are forwards of regions."""
    return sum("forward" in name for name in names)


class Checkpointed(nn.Module):
    """Blocks that are computed again in the backward."""

    def __init__(self, use_reentrant: bool, p: float = 0.0) -> None:
        super().__init__()
        self.blocks, self.use_reentrant = _blocks(p), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:  # type: ignore[attr-defined]
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class MixedPrecision(nn.Module):
    """A block with a product in fp32 within a region of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.scores = PostNorm(_WIDTH), nn.Linear(_WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        with torch.autocast(DEVICE.type, enabled=False):
            return self.scores(y.to(self.scores.weight.dtype))


class Heads(nn.Module):
    """Products of the same rows, with biases: with autocast they become one product."""

    def __init__(self) -> None:
        super().__init__()
        self.block = PostNorm(_WIDTH)
        self.parts = nn.ModuleList(nn.Linear(_WIDTH, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        query, key, value = [part(y) for part in self.parts]
        return F.scaled_dot_product_attention(query, key, value)


class Broken(nn.Module):
    """Two blocks with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = PostNorm(_WIDTH), PostNorm(_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


# --- results --------------------------------------------------------------------------------------


@pytest.mark.kernels
@pytest.mark.pairs("build autocast")
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize(
    "build",
    [
        _blocks,
        lambda: Checkpointed(False),
        lambda: Checkpointed(True),
        MixedPrecision,
        Heads,
        Broken,
    ],
    ids=["blocks", "checkpointed", "re-entrant", "mixed", "heads", "broken"],
)
def test_training_is_as_exact_as_eager(build: Callable[[], nn.Module], autocast: bool) -> None:
    module, x = build().to(DEVICE), randn(2, 5, _WIDTH)
    compiled = fusedops.compile(module, rest="eager")
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        cotangent = torch.randn_like(module(x.clone().requires_grad_()).detach())
        with launch.record() as names:
            ours = results(compiled, module, [x], cotangent)
        eps = _EPS_BF16 if autocast else _EPS
        # With re-entrance eager PyTorch has no `torch.autograd.grad`.
        if isinstance(module, Checkpointed):
            module.use_reentrant = False
        check(ours, module, [x], cotangent, eps)
    # Two regions in each block, and once more in the backward of a checkpointed one.
    assert _forwards(names) >= 2 * (4 if isinstance(module, Checkpointed) else 1)


@pytest.mark.kernels
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_has_eager_values_and_saves_nothing(context: Callable[[], Any]) -> None:
    module, x = _blocks().eval(), randn(2, 5, _WIDTH)
    compiled = fusedops.compile(module, rest="eager")
    with context(), launch.record() as names:
        y = compiled(x)
    torch.testing.assert_close(y, module(x).detach())
    assert not y.requires_grad
    assert _forwards(names) == 4
    assert not [name for name in names if "backward" in name]


@pytest.mark.kernels
def test_lengths_that_change_are_one_graph() -> None:
    module = _blocks()
    compiled = fusedops.compile(module, rest="eager", dynamic=True)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for length in (5, 7, 3):
        x = randn(2, length, _WIDTH)
        cotangent = randn(2, length, _WIDTH)
        check(results(compiled, module, [x], cotangent), module, [x], cotangent, _EPS)
    assert graphs["unique_graphs"] - before == 1


@pytest.mark.kernels
def test_derivatives_of_second_order_are_eager_ones() -> None:
    module, x = _blocks(), randn(2, 3, _WIDTH).requires_grad_()
    compiled, weight = fusedops.compile(module, rest="eager"), randn(2, 3, _WIDTH)
    both = []
    for call in (compiled, module):
        (slope,) = torch.autograd.grad((call(x) * weight).sum(), x, create_graph=True)
        both.append(torch.autograd.grad((slope * weight).sum(), x)[0])
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4)


@pytest.mark.kernels
@pytest.mark.parametrize("norm", [F.rms_norm, fusedops.rms_norm], ids=["region", "operator"])
def test_forward_mode_has_eager_tangents(norm: Callable[..., Tensor]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return norm(x, x.shape[-1:], w) @ x.T

    x, w, direction = randn(4, _WIDTH), randn(_WIDTH), randn(4, _WIDTH)
    tangents = []
    for call in (fusedops.compile(function, rest="eager"), function):
        with forward_ad.dual_level():
            dual = call(forward_ad.make_dual(x, direction), w)
            tangents.append(forward_ad.unpack_dual(dual).tangent)
    torch.testing.assert_close(*tangents, rtol=1e-4, atol=1e-4)


# --- dropout --------------------------------------------------------------------------------------


@pytest.mark.kernels
@pytest.mark.parametrize("build", [lambda p: _blocks(p)[1], lambda p: Checkpointed(False, p)])
def test_backward_has_the_masks_of_the_forward(build: Callable[[float], nn.Module]) -> None:
    """Dropped elements get no gradient; a seed repeats the masks, and others differ.

    The residual is not dropped, so a bias that only the dropped part reads shows the mask.
    """
    module = build(0.5).double()
    compiled = fusedops.compile(module, rest="eager")
    x, direction = randn(2, 5, _WIDTH).double(), randn(2, 5, _WIDTH).double()

    def loss(seed: int, offset: float) -> Tensor:
        torch.manual_seed(seed)
        return (compiled(x + offset * direction) * direction).sum()

    torch.manual_seed(3)
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad((compiled(leaf) * direction).sum(), leaf)
    step = 1e-6
    quotient = (loss(3, step) - loss(3, -step)) / (2 * step)
    torch.testing.assert_close((slope * direction).sum(), quotient, rtol=1e-5, atol=1e-5)
    assert loss(3, 0.0) == loss(3, 0.0)
    assert loss(3, 0.0) != loss(4, 0.0)


@pytest.mark.kernels
def test_dropout_outside_of_regions_is_eager_dropout() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        # The second makes the graph one with operators of this library.
        return F.dropout(x @ w, 0.5) @ w + F.rms_norm(x, x.shape[-1:], w[0])

    x, w = randn(4, _WIDTH), randn(_WIDTH, _WIDTH)
    compiled = fusedops.compile(function, rest="eager")
    compiled(x, w)
    drawn = []
    for call in (function, compiled):
        torch.manual_seed(5)
        drawn.append(call(x, w))
    torch.testing.assert_close(*drawn)


# --- models that are changed, copied and saved ----------------------------------------------------


@pytest.mark.kernels
def test_hooks_are_called_before_and_after_compiling() -> None:
    module, x = _blocks(), randn(2, 5, _WIDTH)
    module[0].up.register_forward_hook(lambda module, args, output: output * 2)
    compiled = fusedops.compile(module, rest="eager")
    torch.testing.assert_close(compiled(x), module(x))
    handle = module[1].norm.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    torch.testing.assert_close(compiled(x), module(x))
    handle.remove()
    torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.kernels
@pytest.mark.parametrize("first", ["adapters", "compile"])
def test_adapters_are_trained(first: str) -> None:
    peft = pytest.importorskip("peft")
    module, x, cotangent = _blocks(), randn(2, 5, _WIDTH), randn(2, 5, _WIDTH)
    config = peft.LoraConfig(target_modules=["up"], r=2, init_lora_weights=False)
    if first == "compile":
        module.compile(backend=entry.backend, options={"fusedops.rest": "eager"})
    adapted = peft.get_peft_model(module, config)
    if first == "adapters":
        adapted.compile(backend=entry.backend, options={"fusedops.rest": "eager"})
    ours = results(adapted, adapted, [x], cotangent)
    plain = copy.deepcopy(adapted)
    for part in plain.modules():
        part._compiled_call_impl = None
    check(ours, plain, [x], cotangent, _EPS)


@pytest.mark.kernels
def test_copies_and_pickles_of_a_compiled_module_are_eager_modules_of_equal_values() -> None:
    module, x = _blocks(), randn(2, 5, _WIDTH)
    keys = list(module.state_dict())
    module.compile(backend=entry.backend, options={"fusedops.rest": "eager"})
    y = module(x)
    assert list(module.state_dict()) == keys
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(other(x), y)
    wrapped = fusedops.compile(_blocks(), rest="eager")
    y = wrapped(x)
    torch.testing.assert_close(copy.deepcopy(wrapped)(x), y)


# --- graphs ---------------------------------------------------------------------------------------


@pytest.mark.kernels
def test_a_graph_that_is_read_from_disk_has_the_same_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, x, cotangent = MixedPrecision().to(DEVICE), randn(2, 5, _WIDTH), randn(2, 5, 8)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        first = results(fusedops.compile(module, rest="eager"), module, [x], cotangent)
        torch._dynamo.reset()
        read = list[Any]()
        original = storing.read
        monkeypatch.setattr(storing, "read", lambda *a: read.append(original(*a)) or read[-1])
        second = results(fusedops.compile(module, rest="eager"), module, [x], cotangent)
    assert [graph is None for graph in read] == [False]
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_a_stored_graph_is_for_one_way_to_run_the_rest() -> None:
    paths = list[Any]()

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        paths.extend(storing.stored_at(gm, inputs, rest) for rest in (INDUCTOR, EAGER))
        return gm.forward

    torch.compile(F.relu, backend=backend)(torch.ones(3))
    assert None not in paths
    assert len(set(paths)) == 2


class _Passing(DispatchMode):  # type: ignore[misc]
    """A dispatch mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.kernels
def test_modes_see_registered_operators_with_the_masks_of_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = list[Callable[..., Any]]()
    inputs = list[Any]()
    original = entry.runnable

    def runnable(gm: torch.fx.GraphModule) -> Callable[..., Any]:
        calls.append(original(gm))

        def run(*args: Any) -> Any:
            inputs.append(args)
            return calls[-1](*args)

        return run

    monkeypatch.setattr(entry, "runnable", runnable)
    fusedops.compile(_blocks(0.3)[0], rest="eager")(randn(4, 5, _WIDTH))
    ((run,), (args,)) = calls, inputs
    drawn = []
    for mode in (nullcontext(), _Passing()):
        with mode:
            torch.manual_seed(7)
            drawn.append(run(*args)[0])
    torch.testing.assert_close(*drawn)


@pytest.mark.kernels
def test_linear_layers_are_one_call_each(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = list[torch.fx.GraphModule]()
    original = eager._lower
    monkeypatch.setattr(eager, "_lower", lambda gm: (original(gm), graphs.append(gm)))
    fusedops.compile(_blocks(), rest="eager")(randn(2, 5, _WIDTH))
    ((graph,),) = [[gm.graph for gm in graphs]]
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert called.count(F.linear) == 4
    # The others are regions and their results.
    assert len(called) == 4 + 2 * 4


@pytest.mark.kernels
def test_elementwise_operators_are_one_kernel() -> None:
    """Inductor would compile this region. A single operator has one kernel in PyTorch already."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.relu((F.silu(x) * y) @ y.T)

    report = fusedops.explain(function, randn(400, 6), randn(400, 6), rest="eager")
    assert [region.operators for region in report.fused] == [("silu", "mul")]
    assert "(relu)" not in str(report)
    left = [region.reason for region in report.regions if region.reason]
    assert left == ["it is one operator of PyTorch"]
    # One by one, the operators read and write five tensors; there are no gradients.
    microseconds = 5 * 400 * 6 * 4 / machine_of().bandwidth * 1e6
    assert f"for operators instead of {microseconds:.1f} µs, " in str(report)
    assert not fusedops.explain(function, randn(400, 6), randn(400, 6)).fused


def _rotated(x: Tensor, cos: Tensor) -> Tensor:
    first, second = x[..., :8], x[..., 8:]
    return x * cos + torch.cat((-second, first), -1) * cos


def _gated(x: Tensor, scale: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.gelu(gate) * up * scale[:, :8]


def _of_packed(x: Tensor, scale: Tensor) -> Tensor:
    query, key, _ = x.unbind(2)
    return F.silu(query) * scale * key


@pytest.mark.kernels
def test_a_split_with_other_readers_is_outside_of_the_region() -> None:
    """Its gradient is put together once, from those of the region's inputs and of the values."""

    def attended(x: Tensor) -> Tensor:
        query, key, value = x.unbind(2)
        return (F.silu(query) * key) @ value.mT

    (region,) = fusedops.explain(attended, randn(2, 5, 3, 16).requires_grad_(), rest="eager").fused
    assert region.operators == ("silu", "mul")


@pytest.mark.kernels
def test_parts_of_a_smaller_tensor_are_inputs() -> None:
    """A split of which another region has items is in neither region."""

    def modulated(x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = condition.chunk(3, -1)
        y = F.layer_norm(x, (16,)) * (1 + scale[:, None]) + shift[:, None]
        return torch.relu(y @ y.mT) @ (x * gate[:, None]).relu()

    report = fusedops.explain(modulated, randn(2, 5, 16), randn(2, 48), rest="eager")
    assert len(report.fused) == 2


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("function", "shape"),
    [(_rotated, (2, 5, 16)), (_gated, (2, 5, 16)), (_of_packed, (2, 5, 3, 16))],
)
def test_parts_of_a_tensor_have_one_gradient(
    function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    """Parts are read in the kernel: as views of the tensor they would have gradients, too."""
    x, scale = randn(*shape).requires_grad_(), randn(5, 16)
    compiled, gradients = fusedops.compile(function, rest="eager"), []
    cotangent = torch.randn_like(function(x, scale))
    for call in (function, compiled):
        y = call(x, scale)
        gradients += [y.detach(), *torch.autograd.grad(y, x, cotangent)]
    torch.testing.assert_close(gradients[:2], gradients[2:])
    assert y.grad_fn is not None
    # One edge: from the region to the leaf.
    edges = [edge for edge, _ in y.grad_fn.next_functions if edge is not None]
    assert [type(edge).__name__ for edge in edges] == ["AccumulateGrad"]


@pytest.mark.kernels
def test_halves_of_a_row_are_not_its_alternate_columns() -> None:
    """Two regions whose parts and columns have the same numbers, two each, are two programs."""

    def of_heads(rotated: Callable[[Tensor], Tensor], x: Tensor, cos: Tensor) -> Tensor:
        heads = x.view(2, 5, 3, 8).transpose(1, 2)
        turned = heads[..., :4] * cos + rotated(heads[..., :4]) * cos
        return torch.cat((turned, heads[..., 4:]), -1)

    def halves(x: Tensor, cos: Tensor) -> Tensor:
        return of_heads(lambda x: torch.cat((-x[..., 2:], x[..., :2]), -1), x, cos)

    def pairs(x: Tensor, cos: Tensor) -> Tensor:
        return of_heads(lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2), x, cos)

    x, cos, cotangent = randn(2, 5, 24).requires_grad_(), randn(5, 4), randn(2, 3, 5, 8)
    for function in (pairs, halves):
        expected = function(x, cos)
        actual = fusedops.compile(function, rest="eager")(x, cos)
        torch.testing.assert_close(actual, expected)
        gradients = [torch.autograd.grad(y, x, cotangent) for y in (actual, expected)]
        torch.testing.assert_close(*gradients)


@pytest.mark.kernels
def test_a_graph_that_cannot_be_captured_runs_as_it_is() -> None:
    @torch.compiler.allow_in_graph
    def unknown(x: Tensor) -> Tensor:
        return x + 1

    def function(x: Tensor, w: Tensor) -> Tensor:
        return fusedops.layer_norm(unknown(x) @ x.T, (4,), w, w)

    x, w = randn(4, 6), randn(4)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        message = "fusedops leaves a graph to eager PyTorch: it calls"
        with pytest.warns(RuntimeWarning, match=message):
            y = fusedops.compile(function, rest="eager")(x, w)
        torch.testing.assert_close(y, function(x, w))
        report = fusedops.explain(function, x, w, rest="eager")
    assert "a graph is left to eager PyTorch" in str(report)


@pytest.mark.kernels
def test_an_error_within_no_grad_restores_the_gradient_mode() -> None:
    def function(x: Tensor, index: Tensor) -> Tensor:
        with torch.no_grad():
            y = F.rms_norm(x, x.shape[-1:], x[0])[index]
        return y + x[0]

    compiled = fusedops.compile(function, rest="eager")
    x = randn(4, 6).requires_grad_()
    compiled(x, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    if DEVICE.type == "cpu":  # on a GPU the index is an error of the device
        with pytest.raises(IndexError):
            compiled(x, torch.full((2,), 9))
        assert torch.is_grad_enabled()


@pytest.mark.kernels
def test_a_model_that_ends_in_another_gradient_mode_leaves_it() -> None:
    def function(x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return F.rms_norm(x, x.shape[-1:], x[0])

    compiled = fusedops.compile(function, rest="eager")
    with torch.enable_grad():
        compiled(randn(4, 6))
        assert not torch.is_grad_enabled()


@pytest.mark.plain
def test_without_kernels_the_model_runs_as_it_is() -> None:
    module, x = _blocks().cpu(), torch.randn(2, 5, _WIDTH)
    compiled = fusedops.compile(module, rest="eager", fullgraph=True)
    assert torch.equal(compiled(x), module(x))


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "max-autotune"}, "do not apply: mode='max-autotune'"),
        ({"options": {"max_autotune": True}}, "do not apply: max_autotune"),
        ({"options": {"fusedops.memory": "low"}}, "do not apply: fusedops.memory='low'"),
        ({"options": {"fusedops.rest": "inductor"}}, "option 'fusedops.rest' is 'inductor'"),
    ],
)
def test_what_is_for_inductor_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fusedops.compile(nn.LayerNorm(4), rest="eager", **arguments)


def test_unknown_rest_is_refused() -> None:
    for call in (fusedops.compile, fusedops.explain):
        with pytest.raises(ValueError, match="must be one of 'inductor', 'eager', got 'aot'"):
            call(nn.LayerNorm(4), rest="aot")  # type: ignore[operator]
    with pytest.raises(ValueError, match="must be one of 'inductor', 'eager', got 'aot'"):
        fusedops.compile(nn.LayerNorm(4), options={"fusedops.rest": "aot"})
    with pytest.raises(ValueError, match="the option 'rest' is written"):
        fusedops.compile(nn.LayerNorm(4), options={"rest": "eager"})


def test_mode_default_is_accepted() -> None:
    assert callable(fusedops.compile(nn.LayerNorm(4), rest="eager", mode="default"))


# --- functions of Python --------------------------------------------------------------------------

_META = torch.empty(0, device="meta")
_ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("operator", "args", "kwargs", "function"),
    [
        (_ATEN.add.Tensor, (_META, _META), {}, torch.add),
        (_ATEN.view.default, (_META, [0, 1]), {}, Tensor.view),
        (_ATEN.reshape.default, (_META, [2, 9]), {}, torch.reshape),
        (_ATEN.gelu.default, (_META,), {"approximate": "tanh"}, torch._C._nn.gelu),
        (_ATEN._to_copy.default, (_META,), {"dtype": torch.float16}, Tensor.to),
        (_ATEN.linear.default, (_META, _META), {}, F.linear),
        # The function's default is another: it returns the losses, and the operator their mean.
        (_ATEN.mse_loss.default, (_META, _META), {}, None),
        # It has none.
        (_ATEN.slice.Tensor, (_META, 1, 0, 2), {}, None),
        # Its function is written in Python, and does more than dispatch.
        (_ATEN.split.Tensor, (_META, 2), {}, None),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)
def test_functions_dispatch_to_the_operator(
    operator: Any, args: Any, kwargs: Any, function: Any
) -> None:
    bound = binding(operator, args, kwargs)
    assert (bound and bound[0]) == function


def test_operators_of_other_libraries_are_called_as_they_are() -> None:
    library = torch.library.Library("fusedops_tests_of_bindings", "DEF")
    library.define("relu(Tensor x) -> Tensor")
    library.impl("relu", lambda x: x + 1, "CompositeImplicitAutograd")
    operator = torch.ops.fusedops_tests_of_bindings.relu.default
    assert binding(operator, (_META,), {}) is None


def test_a_cast_to_the_same_dtype_is_a_copy() -> None:
    bound = binding(_ATEN._to_copy.default, (_META,), {"dtype": torch.float16})
    assert bound is not None
    function, kwargs = bound
    x = torch.ones(3, dtype=torch.float16)
    assert function(x, **kwargs).data_ptr() != x.data_ptr()
