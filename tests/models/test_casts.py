"""Fused models under autocast and torch.compile cast the weights of several linear layers at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache

import fusedops
from fusedops.models.cast import Cast
from fusedops.models.compiling import makes_kernels
from fusedops.models.parts import linear
from fusedops.models.tricks.casts import cast_as_one, cast_together
from fusedops.models.tricks.packing import packed
from sample_models import ModelSpec
from support import DEVICE, KERNEL_PATH
from tolerances import unit_roundoff
from zoo import SAMPLES, Counting, every, handed_on, inputs, making_kernels, run, undropped

# What a model calls does not depend on the kernels, whose values the operators' own tests check.
pytestmark = pytest.mark.once

LOW = torch.bfloat16
# For each model, the number of casts that joining saves in a forward. n tensors that are cast at
# once save n - 1 casts:
# - In a self-attention, the packed weight and the packed bias of query, key and value are cast with
#   the weight of the last layer.
# - In a cross-attention, the query is not packed: its weight and bias are cast with those three.
# - In a feed-forward part, two weights are cast with the bias that the activation's kernel adds.
# - Without biases, one cast less is saved, or two in a cross-attention. T5's gated part has a third
#   weight.
# - A fused T5 does not cast its rows to the dtype of a weight that autocast casts anyway.
_ATTENTION, _CROSS, _TWO, _ROWS = 2, 4, 2, 1
_LAYER = _ATTENTION + _TWO
_SAVED_CASTS = {
    **dict.fromkeys(
        ("bert", "roberta", "electra", "bert_decoder", "distilbert", "vit"), 2 * _LAYER
    ),
    **dict.fromkeys(("opt", "opt_post_norm"), 2 * (_CROSS + _TWO)),
    **dict.fromkeys(("bart", "marian", "mbart"), 4 * _LAYER + 2 * _CROSS),
    **dict.fromkeys(("gpt2", "gpt2_decoder", "gpt_neo", "gptj"), 2 * _TWO),
    **dict.fromkeys(("torch_pre_norm", "torch_post_norm", "whisper"), 4 * _TWO),
    "clip": 4 * _LAYER,
    "siglip": 4 * _LAYER + _TWO,  # it has a head of its own
    "torch_unbiased": 4 * (_TWO - 1),
    "t5": 4 * (_LAYER - 2 + _ROWS) + 2 * (_CROSS - 2),
    "t5_gated": 4 * (_LAYER - 1 + _ROWS) + 2 * (_CROSS - 2),
}
# One model of each kind, for slower tests.
_SOME = [s for s in SAMPLES if s.name in ("torch_pre_norm", "bert", "gpt2", "vit", "t5_gated")]
some = pytest.mark.parametrize("spec", _SOME, ids=lambda spec: spec.name)


def _is_cast(func: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether the operator is a cast to autocast's dtype."""
    return func.overloadpacket is torch.ops.aten._to_copy and kwargs.get("dtype") is LOW


def _fused(spec: ModelSpec) -> nn.Module:
    model = undropped(spec)
    assert fusedops.fuse_model(model)
    return model


def _casts(model: nn.Module, arguments: dict[str, Any]) -> int:
    """Return the number of casts to autocast's dtype in a forward."""
    with Counting(_is_cast) as casts, torch.autocast(DEVICE.type, LOW, cache_enabled=False):
        model(**arguments)
    return casts.count


@every
def test_joining_saves_casts(spec: ModelSpec) -> None:
    model, arguments = _fused(spec), inputs(spec)
    single_casts = _casts(model, arguments)
    with making_kernels():
        joined_casts = _casts(model, arguments)
    assert single_casts - joined_casts == _SAVED_CASTS.get(spec.name, 0)


@every
def test_joined_casts_have_the_same_values_and_gradients(spec: ModelSpec) -> None:
    """Weights have the same bits, but products may add in another order.

    PyTorch's products may choose another kernel if a weight has another address. So outputs and
    gradients may differ by eight units of their norms. A wrong weight or bias makes a difference
    some hundred times as large.
    """
    model, arguments = _fused(spec), inputs(spec)
    with torch.autocast(DEVICE.type, LOW):
        expected_outputs, expected_gradients = run(model, arguments)
        with making_kernels():
            outputs, gradients = run(model, arguments)
    assert gradients.keys() == expected_gradients.keys()
    pairs = list(zip(outputs, expected_outputs, strict=True))
    pairs += [(gradient, expected_gradients[name]) for name, gradient in gradients.items()]
    for ours, expected in pairs:
        assert ours.dtype == expected.dtype
        assert ours.is_contiguous() == expected.is_contiguous()
        assert (ours - expected).norm() <= 8 * unit_roundoff(LOW) * expected.norm()


# --- which tensors are cast -----------------------------------------------------------------------


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, device=DEVICE))


def _groups() -> list[list[nn.Parameter]]:
    """Return groups of parameters; the cast of a group is one tensor, concatenated along rows."""
    return [
        [_parameter(4, 6), _parameter(8, 6)],
        [_parameter(8, 5)],
        [_parameter(4), _parameter(3)],
        [_parameter(7)],
    ]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("low", [LOW, torch.float16], ids=str)
def test_joined_casts_have_the_bits_of_single_casts(low: torch.dtype, compiled: bool) -> None:
    """Casts and gradients have the bits of a cast of each parameter."""
    groups = _groups()
    function = cast_as_one
    if compiled:
        function = torch.compile(cast_as_one, backend="aot_eager", fullgraph=True)
    casts = function(groups, low)
    expected = [torch.cat([t.detach() for t in group]).to(low) for group in groups]
    assert all(map(torch.equal, casts, expected))
    cotangents = [torch.randn_like(cast) for cast in casts]
    tensors = [t for group in groups for t in group]
    gradients = torch.autograd.grad(casts, tensors, cotangents)
    expected_gradients: list[Tensor] = []
    for cotangent, group in zip(cotangents, groups, strict=True):
        expected_gradients += cotangent.float().split([len(t) for t in group])
    assert all(map(torch.equal, gradients, expected_gradients))
    assert all(g.dtype == torch.float32 for g in gradients)
    # Matrix products load 16 bytes at once.
    assert all(cast.data_ptr() % 16 == 0 for cast in casts if cast.dim() > 1)


# Changes after which the groups are not cast as one.
_LEFT: dict[str, Callable[[list[list[nn.Parameter]]], object]] = {
    "one is frozen": lambda groups: groups[1][0].requires_grad_(False),
    "only biases are trained": lambda groups: [
        t.requires_grad_(False) for group in groups[:2] for t in group
    ],
    "the next would not be aligned": lambda groups: groups.insert(0, [_parameter(3, 5)]),
    "too many": lambda groups: groups.append([_parameter(4) for _ in range(3)]),
    "another device": lambda groups: groups.append([nn.Parameter(torch.empty(4, device="meta"))]),
}


@pytest.mark.parametrize("change", _LEFT.values(), ids=_LEFT)
def test_tensors_are_not_cast_as_one(change: Callable[[list[list[nn.Parameter]]], object]) -> None:
    groups = _groups()
    assert cast_as_one(groups, LOW) is not None
    change(groups)
    assert cast_as_one(groups, LOW) is None


def test_frozen_tensors_are_cast_as_one_and_stay_frozen() -> None:
    groups = [[t.requires_grad_(False) for t in group] for group in _groups()]
    parts = cast_as_one(groups, LOW)
    assert parts is not None
    assert not any(part.requires_grad for part in parts)


# --- which layers' weights are cast together ------------------------------------------------------


class _Two(nn.Module):
    """The linear layers of a feed-forward part."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16, bias=bias, device=DEVICE)
        self.second = nn.Linear(16, 8, bias=bias, device=DEVICE)


def _cast_layers(module: Any, x: Tensor | None = None) -> tuple[Any, ...]:
    """Return what `cast_together` returns for the layers: `Cast`s, or the layers themselves."""
    x = torch.randn(3, 8, device=DEVICE) if x is None else x
    with torch.autocast(DEVICE.type, LOW):
        return cast_together(module, x, module.first, module.second)


def test_each_cast_layer_has_its_own_bias() -> None:
    layers = [nn.Linear(8, 8, bias=biased, device=DEVICE) for biased in (True, False, True, True)]
    x = torch.randn(3, 8, device=DEVICE)
    with making_kernels(), torch.autocast(DEVICE.type, LOW):
        casts = cast_together(None, x, *layers)
        assert all(
            torch.equal(cast(x), layer(x)) for cast, layer in zip(casts, layers, strict=True)
        )


@pytest.mark.parametrize(("inner", "outer"), [(0, 8), (16, 0)])
def test_layers_without_elements_are_cast_together(inner: int, outer: int) -> None:
    first, second = nn.Linear(8, inner, device=DEVICE), nn.Linear(inner, outer, device=DEVICE)
    x = torch.randn(3, 8, device=DEVICE)
    with making_kernels(), torch.autocast(DEVICE.type, LOW):
        casts = cast_together(None, x, first, second)
        assert type(casts[0]) is Cast
        assert torch.equal(casts[1](casts[0](x)), second(first(x)))


@pytest.mark.parametrize("bias", [True, False])
def test_cast_layers_give_the_results_of_the_layers(bias: bool) -> None:
    """This holds with the layer's own bias, and if the caller adds the bias.

    The bias of the last layer is not cast.
    """
    module, x = _Two(bias=bias), torch.randn(3, 8, device=DEVICE)
    with making_kernels(), torch.autocast(DEVICE.type, LOW):
        first, second = _cast_layers(module, x)
        assert type(first) is type(second) is Cast
        calls = (
            (first, module.first, x),
            (second, module.second, torch.randn(3, 16, device=DEVICE)),
        )
        for cast, layer, rows in calls:
            assert torch.equal(cast(rows), layer(rows))
            # `linear` leaves the bias to the caller.
            result, expected = linear(cast, rows), linear(layer, rows)
            assert torch.equal(result.product, expected.product)
            assert result.product.dtype == LOW
    if bias:
        assert torch.equal(first.bias, module.first.bias.to(LOW))
        assert second.bias is module.second.bias
    else:
        assert first.bias is second.bias is None


class _Adapter(nn.Linear):
    """A subclass, as adapters of other libraries are."""


_CHANGES: dict[str, Callable[[Any], object]] = {
    "hook": lambda m: m.second.register_forward_hook(lambda *_: None),
    "pre-hook": lambda m: m.first.register_forward_pre_hook(lambda *_: None),
    "forward on the instance": lambda m: setattr(m.first, "forward", lambda x: x),
    "compiled by itself": lambda m: m.second.compile(backend="eager"),
    "adapter": lambda m: setattr(m, "second", _Adapter(16, 8, device=DEVICE)),
    "no layer": lambda m: setattr(m, "second", None),
    "half precision": lambda m: m.first.to(LOW),
    "a bias in half precision": lambda m: setattr(
        m.first, "bias", nn.Parameter(m.first.bias.detach().to(LOW))
    ),
    "one is frozen": lambda m: m.second.requires_grad_(False),
    "only biases are trained": lambda m: (
        m.first.weight.requires_grad_(False),
        m.second.weight.requires_grad_(False),
    ),
    "parametrized": lambda m: torch.nn.utils.parametrizations.weight_norm(m.second),
}


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
def test_changed_layers_are_not_cast_together(change: Callable[[Any], object]) -> None:
    module = _Two()
    with making_kernels():
        first, _ = _cast_layers(module)
        assert type(first) is Cast
        change(module)
        assert _cast_layers(module) == (module.first, module.second)


def test_layers_are_not_cast_if_autocast_casts_nothing() -> None:
    """Autocast is off, the rows are fp64, or autocast's dtype is fp32."""
    module, x = _Two(), torch.randn(3, 8, device=DEVICE)
    layers = (module.first, module.second)
    with making_kernels():
        assert cast_together(None, x, *layers) == layers
        assert _cast_layers(module, x.double()) == layers
        with mock.patch.object(torch, "get_autocast_dtype", return_value=torch.float32):
            assert _cast_layers(module, x) == layers


def test_eager_calls_leave_casts_to_autocast() -> None:
    module = _Two()
    assert _cast_layers(module) == (module.first, module.second)
    attention = _Attention()
    assert attention.last() is attention.o


class _Attention(nn.Module):
    """The linear layers of an attention."""

    layer_idx = 3

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, device=DEVICE) for _ in range(4))

    def last(self, crosses: bool = False, cache: Any = None, can_cast_query: bool = True) -> Any:
        """Pack and cast the layers, check the results, and return what stands for the last layer.

        Args:
            crosses: whether keys and values come from other rows than queries.
            cache: the cache of keys and values.
            can_cast_query: whether the query's layer may be packed or cast.
        """
        x, others = torch.randn(3, 8, device=DEVICE), torch.randn(5, 8, device=DEVICE)
        key_rows = others if crosses else None
        with torch.autocast(DEVICE.type, LOW):
            layers, last = packed(self, ("q", "k", "v"), x, key_rows, self.o, cache)
            for name, layer in layers.items():
                rows = others if crosses and name != "q" else x
                assert torch.equal(layer(rows), getattr(self, name)(rows))
        is_cast = last is not self.o
        if not layers:
            assert not is_cast
        elif crosses:  # the query is not packed, and is only replaced if it is cast
            assert ("q" in layers) == (can_cast_query and is_cast)
        else:
            assert ("q" in layers) == can_cast_query
        return last


# Changes of the last layer, or of others, after which the last layer is not cast.
_LAST: dict[str, Callable[[Any], object]] = {
    "hook": lambda m: m.o.register_forward_hook(lambda *_: None),
    "pre-hook": lambda m: m.o.register_forward_pre_hook(lambda *_: None),
    "compiled by itself": lambda m: m.o.compile(backend="eager"),
    "forward on the instance": lambda m: setattr(m.o, "forward", lambda x: x),
    "adapter": lambda m: setattr(m, "o", _Adapter(8, 8, device=DEVICE)),
    "no layer": lambda m: setattr(m, "o", None),
    "half precision": lambda m: m.o.to(LOW),
    "frozen": lambda m: m.o.requires_grad_(False),
    "the others are frozen": lambda m: m.requires_grad_(False).o.requires_grad_(True),
    "another is hooked": lambda m: m.k.register_forward_hook(lambda *_: None),
    "evaluation": lambda m: m.eval(),
}


@pytest.mark.parametrize("crosses", [False, True])
@pytest.mark.parametrize("change", _LAST.values(), ids=_LAST)
def test_changed_last_layer_is_not_cast_with_the_others(
    change: Callable[[Any], object], crosses: bool
) -> None:
    """The results of the other layers do not depend on that."""
    with making_kernels():
        module = _Attention()
        last = module.last(crosses)
        assert type(last) is Cast
        assert torch.equal(last.weight, module.o.weight.to(LOW))
        assert last.bias is module.o.bias
        change(module)
        assert module.last(crosses) is module.o


# Changes after which the query's layer is neither packed nor cast.
_QUERIES: dict[str, Callable[[Any], object]] = {
    "hook": lambda m: m.q.register_forward_hook(lambda *_: None),
    "frozen": lambda m: m.q.requires_grad_(False),
    "adapter": lambda m: setattr(m, "q", _Adapter(8, 8, device=DEVICE)),
    "no layer": lambda m: setattr(m, "q", None),
}


@pytest.mark.parametrize("change", _QUERIES.values(), ids=_QUERIES)
def test_layers_of_a_cross_attention_are_cast_without_a_changed_query(
    change: Callable[[Any], object],
) -> None:
    """With such a query, the last layer of a self-attention is not cast."""
    module = _Attention()
    change(module)
    with making_kernels():
        assert module.last(crosses=False) is module.o
        assert type(module.last(crosses=True, can_cast_query=False)) is Cast


class _Cache:
    """A cache of keys and values that is filled for some layers, as Transformers marks it."""

    def __init__(self, *filled_layers: int) -> None:
        self.is_updated = dict.fromkeys(filled_layers, True)


@pytest.mark.parametrize(
    ("cache", "joins"),
    [(None, True), (object(), True), (_Cache(), True), (_Cache(2), True), (_Cache(3), False)],
    ids=["none", "of one part", "empty", "of another layer", "filled"],
)
def test_cached_cross_attention_is_not_cast(cache: Any, joins: bool) -> None:
    """A cross-attention whose keys and values are cached does not call the layers of these.

    A self-attention always calls them.
    """
    module = _Attention()
    with making_kernels():
        assert (type(module.last(crosses=True, cache=cache)) is Cast) == joins
        assert type(module.last(crosses=False, cache=cache)) is Cast


@pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name in ("t5", "t5_gated", "bart")], ids=lambda spec: spec.name
)
def test_gradients_with_a_cache_are_those_without_joined_casts(spec: ModelSpec) -> None:
    """Layers that are not called, because their results are cached, have no gradients."""
    model, arguments = _fused(spec), inputs(spec)
    results = []
    for joining in (False, True):
        with making_kernels(joining), torch.autocast(DEVICE.type, LOW):
            with torch.no_grad():
                first = model(**inputs(spec), use_cache=True)
            arguments["decoder_input_ids"] = arguments["input_ids"][:, -1:]
            y = model(**arguments, **handed_on(first)).logits
            parameters = dict(model.named_parameters())
            result = torch.autograd.grad(
                y.float().square().sum(), list(parameters.values()), allow_unused=True
            )
            results.append(
                {name: g for name, g in zip(parameters, result, strict=True) if g is not None}
            )
    expected, joined = results
    assert joined.keys() == expected.keys()
    cached_layers = {
        name
        for name in parameters
        if "EncDecAttention.k." in name or "encoder_attn.k_proj." in name
    }
    assert cached_layers
    assert not joined.keys() & cached_layers
    for name, g in joined.items():
        assert (g - expected[name]).norm() <= 8 * unit_roundoff(LOW) * expected[name].norm()


def test_makes_kernels_is_true_only_in_compiled_code_on_a_gpu() -> None:
    """With the interpreter, a CPU counts as a GPU."""
    x = torch.zeros(1, device=DEVICE)

    def one_if_kernels(x: Tensor) -> Tensor:
        return x + 1 if makes_kernels(x) else x

    assert float(one_if_kernels(x)) == 0.0
    compiled = torch.compile(one_if_kernels, backend="eager", fullgraph=True)
    assert float(compiled(x)) == float(KERNEL_PATH)


# --- compiled -------------------------------------------------------------------------------------


class _Graphs:
    """A backend that runs the graphs of forward and backward, and records their casts."""

    def __init__(self) -> None:
        self.casts: list[list[torch.dtype]] = []  # of the forward and of the backward

    def __call__(self, graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        return aot_autograd(fw_compiler=self._record, bw_compiler=self._record)(graph, example)

    def _record(self, graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        self.casts.append(
            [
                node.kwargs["dtype"]
                for node in graph.graph.nodes
                if node.target is torch.ops.aten._to_copy.default
            ]
        )
        return make_boxed_func(graph.forward)


def _not_joined(*args: Any) -> None:
    """Replace `cast_as_one`. Dynamo traces a function, but not a mock."""


def _casts_joined(joined: bool) -> Any:
    """Return a context in which casts are joined or not; other tricks do not change."""
    if joined:
        return nullcontext()
    return mock.patch("fusedops.models.tricks.casts.cast_as_one", _not_joined)


@pytest.mark.once
@pytest.mark.parametrize(
    "spec",
    [pytest.param(s, id=s.name, marks=[] if s.name == "bert" else pytest.mark.full) for s in _SOME],
)
def test_compiled_model_is_one_graph_with_fewer_casts(spec: ModelSpec) -> None:
    """Forward and backward each have fewer casts; outputs and gradients are the same."""
    results, casts = [], []
    for joining in (False, True):
        model, arguments = _fused(spec), inputs(spec)
        if spec.transformers and spec.name not in ("bert", "vit"):
            arguments["use_cache"] = False
        graphs = _Graphs()
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=graphs, fullgraph=True)
        with making_kernels(), _casts_joined(joining), torch.autocast(DEVICE.type, LOW):
            ys, gradients = run(compiled, arguments)
        results.append((ys, {name.removeprefix("_orig_mod."): g for name, g in gradients.items()}))
        forward, backward = graphs.casts
        casts.append((forward.count(LOW), backward.count(torch.float32)))
    (forward_single, backward_single), (forward_joined, backward_joined) = casts
    assert forward_single - forward_joined == _SAVED_CASTS[spec.name]
    assert backward_single - backward_joined == _SAVED_CASTS[spec.name]
    (expected_outputs, expected_gradients), (outputs, gradients) = results
    assert gradients.keys() == expected_gradients.keys()
    pairs = list(zip(outputs, expected_outputs, strict=True))
    pairs += [(gradient, expected_gradients[name]) for name, gradient in gradients.items()]
    for ours, expected in pairs:
        assert (ours - expected).norm() <= 8 * unit_roundoff(LOW) * expected.norm()


def test_compiled_vmap_casts_each_set_of_parameters_as_alone() -> None:
    sets = [torch.randn(2, *t.shape, device=DEVICE) for group in _groups() for t in group]

    def cast(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(cast_as_one([[t] for t in tensors], LOW) or ())

    parts = torch.compile(torch.vmap(cast), backend="aot_eager")(*sets)
    assert all(torch.equal(part, t.to(LOW)) for part, t in zip(parts, sets, strict=True))


_HOOKED = (
    "attention.self",
    "attention.output",
    "attention.output.dense",
    "intermediate",
    "intermediate.dense",
    "output",
    "output.dense",
)


@pytest.mark.parametrize("path", _HOOKED)
@pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name == "bert"], ids=lambda spec: spec.name
)
def test_module_with_a_hook_is_called_and_others_are_cast_together(
    spec: ModelSpec, path: str
) -> None:
    model, arguments = _fused(spec), inputs(spec)
    single_casts = _casts(model, arguments)
    with making_kernels():
        joined_casts = _casts(model, arguments)
    calls: list[str] = []
    for name, module in model.named_modules():
        if name.endswith(f"layer.0.{path}"):
            module.register_forward_hook(lambda module, args, output, name=name: calls.append(name))
    with making_kernels():
        casts_with_hook = _casts(model, arguments)
    assert len(calls) == 1
    assert joined_casts < casts_with_hook < single_casts


@pytest.mark.skipif(DEVICE.type != "cuda", reason="Inductor generates one kernel only on GPUs")
def test_inductor_casts_the_largest_group_by_one_kernel_each_way() -> None:
    """No more than eight tensors are cast as one."""
    groups = [*_groups(), [_parameter(4), _parameter(4)]]
    tensors = [t for group in groups for t in group]
    with fresh_cache():  # kernels from a cache would not be counted
        metrics.reset()
        parts = torch.compile(cast_as_one, fullgraph=True)(groups, LOW)
        assert metrics.generated_kernel_count == 1
        torch.autograd.grad(parts, tensors, [torch.ones_like(part) for part in parts])
        assert metrics.generated_kernel_count == 2
