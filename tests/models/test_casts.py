"""Fused models under autocast and torch.compile.

The weights of a branch's linear layers are cast in one pass.
"""

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

# What a model calls does not depend on the kernels, whose values the operators' own tests hold.
pytestmark = pytest.mark.once

LOW = torch.bfloat16
# For each model, how many casts a forward is spared. Of an attention whose query, key and value are
# packed to one weight and one bias, its last weight joins them; where the query goes its own way,
# as in a cross-attention, so do its weight and bias. Of two layers with an activation between that
# takes the bias along, two weights and that bias are one. Without biases it is one less, or two in
# a cross-attention. T5's gated part has a third weight, and a fused T5 no longer takes its rows to
# the dtype of a weight that autocast casts anyway.
_ATTENTION, _CROSS, _TWO, _ROWS = 2, 4, 2, 1
_LAYER = _ATTENTION + _TWO
_SPARED = {
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
# Of each kind, for what takes longer.
_SOME = [s for s in SAMPLES if s.name in ("torch_pre_norm", "bert", "gpt2", "vit", "t5_gated")]
some = pytest.mark.parametrize("spec", _SOME, ids=lambda spec: spec.name)


def _is_cast(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the operator is a cast to autocast's dtype."""
    return func.overloadpacket is torch.ops.aten._to_copy and kwargs.get("dtype") is LOW


def _fused(spec: ModelSpec) -> nn.Module:
    model = undropped(spec)
    assert fusedops.fuse_model(model)
    return model


def _casts(model: nn.Module, arguments: dict[str, Any]) -> int:
    with Counting(_is_cast) as casts, torch.autocast(DEVICE.type, LOW, cache_enabled=False):
        model(**arguments)
    return casts.count


@every
def test_joining_spares_casts(spec: ModelSpec) -> None:
    model, arguments = _fused(spec), inputs(spec)
    apart = _casts(model, arguments)
    with making_kernels():
        assert apart - _casts(model, arguments) == _SPARED.get(spec.name, 0)


@every
def test_joined_casts_have_the_same_values_and_gradients(spec: ModelSpec) -> None:
    """Outputs and gradients are made of the very same numbers.

    What multiplies them may add in another order for weights that lie elsewhere in memory: eight
    units in the norm of each, as for attention functions, where a wrong weight or bias is some
    hundred times as much.
    """
    model, arguments = _fused(spec), inputs(spec)
    with torch.autocast(DEVICE.type, LOW):
        expected = run(model, arguments)
        with making_kernels():
            result = run(model, arguments)
    assert result[1].keys() == expected[1].keys()
    for y, e in (
        *zip(result[0], expected[0], strict=True),
        *((g, expected[1][name]) for name, g in result[1].items()),
    ):
        assert y.dtype == e.dtype
        assert y.is_contiguous() == e.is_contiguous()
        assert (y - e).norm() <= 8 * unit_roundoff(LOW) * e.norm()


# --- what is cast ---------------------------------------------------------------------------------


def _learning(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, device=DEVICE))


def _groups() -> list[list[nn.Parameter]]:
    return [
        [_learning(4, 6), _learning(8, 6)],
        [_learning(8, 5)],
        [_learning(4), _learning(3)],
        [_learning(7)],
    ]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("low", [LOW, torch.float16], ids=str)
def test_joined_casts_have_the_bits_of_single_casts(low: torch.dtype, compiled: bool) -> None:
    """The same bits as a cast of each: forward, and of each gradient."""
    groups = _groups()
    function = (
        torch.compile(cast_as_one, backend="aot_eager", fullgraph=True) if compiled else cast_as_one
    )
    parts = function(groups, low)
    expected = [torch.cat([t.detach() for t in group]).to(low) for group in groups]
    assert all(map(torch.equal, parts, expected))
    dys = [torch.randn_like(part) for part in parts]
    tensors = [t for group in groups for t in group]
    gradients = torch.autograd.grad(parts, tensors, dys)
    columns = [
        dy.float().split([len(t) for t in group]) for dy, group in zip(dys, groups, strict=True)
    ]
    assert all(map(torch.equal, gradients, [g for split in columns for g in split]))
    assert all(g.dtype == torch.float32 for g in gradients)
    # Each where a matrix product can load it.
    assert all(part.data_ptr() % 16 == 0 for part in parts if part.dim() > 1)


_LEFT: dict[str, Callable[[list[list[nn.Parameter]]], object]] = {
    "one is frozen": lambda groups: groups[1][0].requires_grad_(False),
    "a bias alone learns": lambda groups: [
        t.requires_grad_(False) for group in groups[:2] for t in group
    ],
    "the next would lie badly": lambda groups: groups.insert(0, [_learning(3, 5)]),
    "too many": lambda groups: groups.append([_learning(4) for _ in range(3)]),
    "another device": lambda groups: groups.append([nn.Parameter(torch.empty(4, device="meta"))]),
}


@pytest.mark.parametrize("change", _LEFT.values(), ids=_LEFT)
def test_tensors_that_are_cast_apart(change: Callable[[list[list[nn.Parameter]]], object]) -> None:
    groups = _groups()
    assert cast_as_one(groups, LOW) is not None
    change(groups)
    assert cast_as_one(groups, LOW) is None


def test_frozen_tensors_are_cast_as_one_and_stay_frozen() -> None:
    groups = [[t.requires_grad_(False) for t in group] for group in _groups()]
    parts = cast_as_one(groups, LOW)
    assert parts is not None
    assert not any(part.requires_grad for part in parts)


# --- whose ----------------------------------------------------------------------------------------


class _Two(nn.Module):
    """The linear layers of a feed-forward part."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16, bias=bias, device=DEVICE)
        self.second = nn.Linear(16, 8, bias=bias, device=DEVICE)


def _stand_ins(module: Any, x: Tensor | None = None) -> tuple[Any, ...]:
    x = torch.randn(3, 8, device=DEVICE) if x is None else x
    with torch.autocast(DEVICE.type, LOW):
        return cast_together(module, x, module.first, module.second)


def test_several_biases() -> None:
    """Each layer has its own."""
    layers = [nn.Linear(8, 8, bias=biased, device=DEVICE) for biased in (True, False, True, True)]
    x = torch.randn(3, 8, device=DEVICE)
    with making_kernels(), torch.autocast(DEVICE.type, LOW):
        casts = cast_together(None, x, *layers)
        assert all(
            torch.equal(cast(x), layer(x)) for cast, layer in zip(casts, layers, strict=True)
        )


@pytest.mark.parametrize(("inner", "outer"), [(0, 8), (16, 0)])
def test_empty_layers(inner: int, outer: int) -> None:
    first, second = nn.Linear(8, inner, device=DEVICE), nn.Linear(inner, outer, device=DEVICE)
    x = torch.randn(3, 8, device=DEVICE)
    with making_kernels(), torch.autocast(DEVICE.type, LOW):
        casts = cast_together(None, x, first, second)
        assert type(casts[0]) is Cast
        assert torch.equal(casts[1](casts[0](x)), second(first(x)))


@pytest.mark.parametrize("bias", [True, False])
def test_stand_ins(bias: bool) -> None:
    """They give what the layers give, whether their bias is left to the caller or not.

    The last one's is not cast.
    """
    module, x = _Two(bias=bias), torch.randn(3, 8, device=DEVICE)
    with making_kernels(), torch.autocast(DEVICE.type, LOW):
        casts = _stand_ins(module, x)
        assert [type(cast) for cast in casts] == [Cast, Cast]
        calls = (
            (casts[0], module.first, x),
            (casts[1], module.second, torch.randn(3, 16, device=DEVICE)),
        )
        for cast, layer, rows in calls:
            y, branch, expected = cast(rows), linear(cast, rows), linear(layer, rows)
            assert torch.equal(y, layer(rows))
            assert torch.equal(branch.product, expected.product)
            assert branch.product.dtype == LOW
    if bias:
        assert torch.equal(casts[0].bias, module.first.bias.to(LOW))
        assert casts[1].bias is module.second.bias
    else:
        assert casts[0].bias is casts[1].bias is None


class _Adapter(nn.Linear):
    """No plain linear layer."""


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
    "biases alone learn": lambda m: (
        m.first.weight.requires_grad_(False),
        m.second.weight.requires_grad_(False),
    ),
    "parametrized": lambda m: torch.nn.utils.parametrizations.weight_norm(m.second),
}


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
def test_layers_that_are_left(change: Callable[[Any], object]) -> None:
    module = _Two()
    with making_kernels():
        assert type(_stand_ins(module)[0]) is Cast
        change(module)
        assert _stand_ins(module) == (module.first, module.second)


def test_where_autocast_casts_nothing() -> None:
    module, x = _Two(), torch.randn(3, 8, device=DEVICE)
    layers = (module.first, module.second)
    with making_kernels():
        assert cast_together(None, x, *layers) == layers
        assert _stand_ins(module, x.double()) == layers
        with mock.patch.object(torch, "get_autocast_dtype", return_value=torch.float32):
            assert _stand_ins(module, x) == layers


def test_eager_calls_use_the_casts_of_autocast() -> None:
    module = _Two()
    assert _stand_ins(module) == (module.first, module.second)
    attention = _Attention()
    assert attention.last() is attention.o


class _Attention(nn.Module):
    """The linear layers of an attention."""

    layer_idx = 3

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, device=DEVICE) for _ in range(4))

    def last(self, crosses: bool = False, cache: Any = None, query: bool = True) -> Any:
        x, others = torch.randn(3, 8, device=DEVICE), torch.randn(5, 8, device=DEVICE)
        with torch.autocast(DEVICE.type, LOW):
            parts, last = packed(
                self, ("q", "k", "v"), x, others if crosses else None, self.o, cache
            )
            for name, part in parts.items():
                rows = others if crosses and name != "q" else x
                assert torch.equal(part(rows), getattr(self, name)(rows))
        assert (
            ("q" in parts) == (query and (not crosses or last is not self.o))
            if parts
            else last is self.o
        )
        return last


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
def test_last_layers_that_are_left(change: Callable[[Any], object], crosses: bool) -> None:
    """Whatever becomes of it, the others are what they are."""
    with making_kernels():
        module = _Attention()
        last = module.last(crosses)
        assert type(last) is Cast
        assert torch.equal(last.weight, module.o.weight.to(LOW))
        assert last.bias is module.o.bias
        change(module)
        assert module.last(crosses) is module.o


_QUERIES: dict[str, Callable[[Any], object]] = {
    "hook": lambda m: m.q.register_forward_hook(lambda *_: None),
    "frozen": lambda m: m.q.requires_grad_(False),
    "adapter": lambda m: setattr(m, "q", _Adapter(8, 8, device=DEVICE)),
    "no layer": lambda m: setattr(m, "q", None),
}


@pytest.mark.parametrize("change", _QUERIES.values(), ids=_QUERIES)
def test_queries_that_are_left(change: Callable[[Any], object]) -> None:
    """Where a query is not packed, the others are cast together without it."""
    module = _Attention()
    change(module)
    with making_kernels():
        assert module.last(crosses=False) is module.o
        assert type(module.last(crosses=True, query=False)) is Cast


class _Cache:
    def __init__(self, *filled: int) -> None:
        self.is_updated = dict.fromkeys(filled, True)


@pytest.mark.parametrize(
    ("cache", "joins"),
    [(None, True), (object(), True), (_Cache(), True), (_Cache(2), True), (_Cache(3), False)],
    ids=["none", "of one part", "empty", "of another layer", "filled"],
)
def test_cached_cross_attention_is_not_cast(cache: Any, joins: bool) -> None:
    """A cross-attention does not call its own layers if its keys and values are cached.

    Others call theirs.
    """
    module = _Attention()
    with making_kernels():
        assert (type(module.last(crosses=True, cache=cache)) is Cast) == joins
        assert type(module.last(crosses=False, cache=cache)) is Cast


@pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name in ("t5", "t5_gated", "bart")], ids=lambda spec: spec.name
)
def test_gradients_with_a_cache(spec: ModelSpec) -> None:
    """Layers that are not called have none.

    The same parameters have gradients, and the same ones, as without casts.
    """
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
    kept = [
        name
        for name in parameters
        if "EncDecAttention.k." in name or "encoder_attn.k_proj." in name
    ]
    assert kept
    assert not joined.keys() & set(kept)
    for name, g in joined.items():
        assert (g - expected[name]).norm() <= 8 * unit_roundoff(LOW) * expected[name].norm()


def test_where_it_is_done() -> None:
    """Compiled, where Inductor writes kernels.

    That is not on a CPU, unless the interpreter makes it a GPU.
    """
    x = torch.zeros(1, device=DEVICE)

    def made(x: Tensor) -> Tensor:
        return x + 1 if makes_kernels(x) else x

    assert float(made(x)) == 0.0
    assert float(torch.compile(made, backend="eager", fullgraph=True)(x)) == float(KERNEL_PATH)


# --- compiled -------------------------------------------------------------------------------------


class _Graphs:
    """A backend that runs the graphs of forward and backward as they are, and keeps their casts."""

    def __init__(self) -> None:
        self.casts: list[list[torch.dtype]] = []

    def __call__(self, graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        return aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)(graph, example)

    def _keep(self, graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        self.casts.append(
            [
                node.kwargs["dtype"]
                for node in graph.graph.nodes
                if node.target is torch.ops.aten._to_copy.default
            ]
        )
        return make_boxed_func(graph.forward)


def _apart(*args: Any) -> None:
    return None


def _casts_joined(joined: bool) -> Any:
    """A context in which casts are joined, or else single, with all other tricks as they are."""
    return (
        nullcontext() if joined else mock.patch("fusedops.models.tricks.casts.cast_as_one", _apart)
    )


@pytest.mark.once
@pytest.mark.parametrize(
    "spec",
    [pytest.param(s, id=s.name, marks=[] if s.name == "bert" else pytest.mark.full) for s in _SOME],
)
def test_compiled_model_is_one_graph_with_fewer_casts(spec: ModelSpec) -> None:
    """One graph.

    Forward and backward each have as many casts fewer as are spared; outputs and gradients are the
    same.
    """
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
    spared = _SPARED[spec.name]
    assert casts[0][0] - casts[1][0] == spared
    assert casts[0][1] - casts[1][1] == spared
    expected, result = results
    assert result[1].keys() == expected[1].keys()
    for y, e in (
        *zip(result[0], expected[0], strict=True),
        *((g, expected[1][name]) for name, g in result[1].items()),
    ):
        assert (y - e).norm() <= 8 * unit_roundoff(LOW) * e.norm()


def test_mapped_over_parameters() -> None:
    """A compiled `torch.vmap` casts several sets of parameters, each as it is cast alone."""
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
def test_a_module_with_a_hook_is_called(spec: ModelSpec, path: str) -> None:
    """A module of BERT with a hook is called, and the rest is still cast together."""
    model, arguments = _fused(spec), inputs(spec)
    apart = _casts(model, arguments)
    with making_kernels():
        plain = _casts(model, arguments)
    seen: list[str] = []
    for name, module in model.named_modules():
        if name.endswith(f"layer.0.{path}"):
            module.register_forward_hook(lambda module, args, output, name=name: seen.append(name))
    with making_kernels():
        hooked = _casts(model, arguments)
    assert len(seen) == 1
    assert plain < hooked < apart


@pytest.mark.skipif(DEVICE.type != "cuda", reason="Inductor makes one kernel of it on GPUs alone")
def test_one_kernel_each_way() -> None:
    """As many tensors as are ever cast as one."""
    groups = [*_groups(), [_learning(4), _learning(4)]]
    tensors = [t for group in groups for t in group]
    with fresh_cache():  # nothing is counted that was compiled before
        metrics.reset()
        parts = torch.compile(cast_as_one, fullgraph=True)(groups, LOW)
        assert metrics.generated_kernel_count == 1
        torch.autograd.grad(parts, tensors, [torch.ones_like(part) for part in parts])
        assert metrics.generated_kernel_count == 2
