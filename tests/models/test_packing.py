"""Fused models under autocast compute an attention's query, key and value as one product."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fusedops
from fusedops.models.parts import replacing
from fusedops.models.tricks.packing import packed, packed_linear
from sample_models import ModelSpec
from support import DEVICE
from tolerances import unit_roundoff
from zoo import SAMPLES, Counting, every, inputs, outputs, run, undropped, unpacked

# What a model calls does not depend on the kernels, whose values the operators' own tests check.
pytestmark = pytest.mark.once

LOW = torch.bfloat16
# For each model, the number of products that packing saves in a forward: two for each
# self-attention, or one if its query is not packed, and one for each cross-attention. In models
# that are not listed, packing saves none.
_SAVED_PRODUCTS = {
    **dict.fromkeys(("bert", "roberta", "electra", "distilbert", "vit", "bert_decoder"), 2 * 2),
    **dict.fromkeys(("bart", "marian", "mbart", "t5", "t5_gated"), 2 * 2 + 2 * (2 + 1)),
    **dict.fromkeys(("clip", "siglip"), 2 * 2 + 2 * 2),
    **dict.fromkeys(("opt", "opt_post_norm"), 2 * 1),
}
packing = pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name in _SAVED_PRODUCTS], ids=lambda spec: spec.name
)
some = pytest.mark.parametrize(
    "spec",
    [s for s in SAMPLES if s.name in ("bert", "vit", "t5", "bart")],
    ids=lambda spec: spec.name,
)


def _is_product(func: Any, kwargs: dict[str, Any]) -> bool:
    return func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)


def _products(model: nn.Module, arguments: dict[str, Any]) -> Counter[str]:
    """Return the numbers of matrix products of the forward and of the backward."""
    with Counting(_is_product) as products:
        ys = outputs(model(**arguments))
        counts = Counter(forward=products.count)
        sum(y.float().square().sum() for y in ys if y.requires_grad).backward()
        counts["backward"] = products.count - counts["forward"]
    return counts


def _fused(spec: ModelSpec) -> nn.Module:
    model = undropped(spec)
    assert fusedops.fuse_model(model)
    return model


@every
def test_packing_saves_products_in_forward_and_backward(
    spec: ModelSpec, device: torch.device
) -> None:
    """For each product of the forward, two of the backward are saved.

    These are the gradients of the rows and of the weight.
    """
    model, arguments = _fused(spec), inputs(spec)
    with torch.autocast(device.type, LOW):
        result = _products(model, arguments)
        with unpacked():
            expected = _products(model, arguments)
    assert expected["forward"] - result["forward"] == _SAVED_PRODUCTS.get(spec.name, 0)
    assert expected["backward"] - result["backward"] == 2 * _SAVED_PRODUCTS.get(spec.name, 0)


@some
def test_layers_are_packed_only_under_autocast_and_in_training_mode(
    spec: ModelSpec, device: torch.device
) -> None:
    """Autocast copies weights anyway; otherwise packing would be the only reason for copies.

    It does not matter whether gradients are recorded.
    """
    model, arguments = _fused(spec), inputs(spec)
    for autocast, training, grad in ((False, True, True), (True, False, True), (True, True, False)):
        model.train(training)
        with torch.autocast(device.type, LOW, enabled=autocast), torch.set_grad_enabled(grad):
            with Counting(_is_product) as result:
                model(**arguments)
            with unpacked(), Counting(_is_product) as expected:
                model(**arguments)
        assert expected.count - result.count == (
            _SAVED_PRODUCTS[spec.name] if autocast and training else 0
        )


@packing
def test_packed_models_are_at_most_twice_as_wrong_as_unpacked_ones(
    spec: ModelSpec, device: torch.device
) -> None:
    """Errors are norms of the differences from fp32, of all outputs and of all gradients.

    With and without packing, errors are sums of many roundings, so they differ by chance: a factor
    of two is allowed. A wrong weight, bias or index gives some hundred times the error.
    """
    model, arguments = _fused(spec), inputs(spec)
    exact_outputs, exact_gradients = run(model, arguments)
    with torch.autocast(device.type, LOW):
        packed_outputs, packed_gradients = run(model, arguments)
        with unpacked():
            unpacked_outputs, unpacked_gradients = run(model, arguments)
    assert packed_gradients.keys() == unpacked_gradients.keys() == exact_gradients.keys()

    def squared_error(results: Iterable[Tensor], exact: Iterable[Tensor]) -> float:
        return sum(
            float((y - e).double().square().sum()) for y, e in zip(results, exact, strict=True)
        )

    exact = list(exact_gradients.values())
    packed_error = squared_error(packed_gradients.values(), exact)
    assert 0.0 < packed_error <= 2**2 * squared_error(unpacked_gradients.values(), exact)
    packed_error = squared_error(packed_outputs, exact_outputs)
    assert 0.0 < packed_error <= 2**2 * squared_error(unpacked_outputs, exact_outputs)
    for name, gradient in packed_gradients.items():
        assert gradient.dtype == exact_gradients[name].dtype
        assert gradient.is_contiguous()


# --- the product itself ---------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("low", [LOW, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, LOW, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(5, 7, 24), (24,), (0, 24)], ids=str)
def test_packed_layers_round_like_a_product(
    shape: tuple[int, ...], dtype: torch.dtype, low: torch.dtype, bias: bool, device: torch.device
) -> None:
    """Outputs and gradients are within the bound of one product's roundings.

    They are compared with fp64 results from the numbers that autocast rounds. A product of K terms
    is added up in fp32 and rounded once to the low dtype. So its error is at most u |y| plus K fp32
    roundings of the sum of the terms' magnitudes. K is the number of inputs and the bias for
    outputs, the number of all outputs for the gradient of the rows, and the number of rows for
    gradients of weights and biases. The gradient of the rows is rounded once more to their dtype.
    """
    layers = [nn.Linear(24, 16, bias=bias, device=device) for _ in range(3)]
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    ys = packed_linear(x, layers, low)
    dys = [torch.randn_like(y) for y in ys]
    parameters = [p for layer in layers for p in layer.parameters()]
    result = torch.autograd.grad(ys, [x, *parameters], dys)
    rows = x.detach().to(low).double().reshape(-1, 24)
    dx, magnitude_of_dx = torch.zeros_like(rows), torch.zeros_like(rows)
    gradients = iter(result[1:])
    for layer, y, cotangent in zip(layers, ys, dys, strict=True):
        weight = layer.weight.detach().to(low).double()
        dy = cotangent.double().reshape(-1, len(weight))
        b = torch.zeros(16, dtype=torch.float64, device=device)
        if bias:
            b = layer.bias.detach().to(low).double()
        assert y.dtype == low
        assert y.shape == (*shape[:-1], len(weight))
        magnitude = rows.abs() @ weight.abs().T + b.abs()
        _close(y.reshape(dy.shape), rows @ weight.T + b, magnitude, 25, low)
        _close(next(gradients), dy.T @ rows, dy.abs().T @ rows.abs(), len(rows), low)
        if bias:
            _close(next(gradients), dy.sum(0), dy.abs().sum(0), len(rows), low)
        dx = dx + dy @ weight
        magnitude_of_dx = magnitude_of_dx + dy.abs() @ weight.abs()
    _close(result[0].reshape(rows.shape), dx, magnitude_of_dx, 48, low, dtype)
    assert [g.dtype for g in result] == [dtype, *[torch.float32] * len(parameters)]


# Half the distance between subnormal numbers.
_SUBNORMAL_ROUNDOFF = {torch.float16: 2.0**-25, LOW: 0.0, torch.float32: 0.0}


def _close(
    result: Tensor, expected: Tensor, magnitude: Tensor, terms: int, *dtypes: torch.dtype
) -> None:
    """Check that the error of a sum is within the bound of its roundings.

    Args:
        result: the computed sum.
        expected: the exact sum.
        magnitude: the sum of the terms' magnitudes.
        terms: the number of terms, each of which adds a rounding in fp32.
        dtypes: the dtypes to which the sum is rounded, one after the other.
    """
    bound = terms * unit_roundoff(torch.float32) * magnitude
    for dtype in dtypes:
        bound = bound + unit_roundoff(dtype) * expected.abs() + _SUBNORMAL_ROUNDOFF[dtype]
    # 1.01 covers products of roundings.
    assert ((result.double() - expected).abs() <= 1.01 * bound).all()


def test_in_place_change_of_one_part_does_not_change_the_others(device: torch.device) -> None:
    """Outputs of linear layers may be changed in place, too."""
    layers = [nn.Linear(8, 4, device=device) for _ in range(3)]
    x = torch.randn(5, 8, device=device)
    q, k, v = packed_linear(x, layers, LOW)
    expected = [k.clone(), v.clone()]
    q.view(5, 2, 2).transpose(0, 1).mul_(0.5)
    assert torch.equal(k, expected[0])
    assert torch.equal(v, expected[1])
    q_gradient, k_gradient = torch.autograd.grad(
        [q, k], [layers[0].weight, layers[1].weight], [torch.ones_like(q), torch.ones_like(k)]
    )
    assert torch.equal(q_gradient, 0.5 * k_gradient)


# --- which layers are packed ----------------------------------------------------------------------

_NAMES = ("q", "k", "v")


class _Three(nn.Module):
    """Linear layers for the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 4, device=DEVICE) for _ in _NAMES)


def _packed_layers(
    module: nn.Module, dtype: torch.dtype = torch.float32, low: torch.dtype = LOW
) -> dict[str, Any]:
    """Return what stands for the layers in a call on rows of this dtype, by name; empty if none."""
    with torch.autocast(DEVICE.type, low):
        layers, _ = packed(module, _NAMES, torch.randn(3, 8, device=DEVICE, dtype=dtype))
        return layers


class _Adapter(nn.Linear):
    """A subclass, as adapters of other libraries are."""


class _TensorSubclass(Tensor):
    pass


def _replaced(**layers: Any) -> Callable[[Any], Any]:
    """Return a function that replaces layers of a module."""

    def change(module: nn.Module) -> None:
        for name, layer in layers.items():
            setattr(module, name, layer.to(DEVICE) if layer is not None else None)

    return change


# Changes after which the layers are not packed.
_CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": lambda m: m.k.register_forward_hook(lambda *_: None),
    "pre-hook": lambda m: m.q.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda m: m.v.register_full_backward_hook(lambda *_: None),
    "forward on the instance": lambda m: setattr(m.v, "forward", lambda x: x),
    "adapter": _replaced(k=_Adapter(8, 4)),
    "no layer": _replaced(v=None),
    "one without bias": _replaced(k=nn.Linear(8, 4, bias=False)),
    "other rows": _replaced(k=nn.Linear(9, 4)),
    "more outputs": _replaced(k=nn.Linear(8, 5)),
    "one is frozen": lambda m: m.k.weight.requires_grad_(False),
    "evaluation": lambda m: m.eval(),
    "half precision": _replaced(k=nn.Linear(8, 4, dtype=LOW)),
    "a bias in half precision": lambda m: setattr(
        m.v, "bias", nn.Parameter(m.v.bias.detach().to(LOW))
    ),
    "a bias of a tensor subclass": lambda m: setattr(
        m.v, "bias", nn.Parameter(m.v.bias.detach().as_subclass(_TensorSubclass))
    ),
    "double precision": _replaced(k=nn.Linear(8, 4, dtype=torch.float64)),
    "parametrized": lambda m: torch.nn.utils.parametrizations.weight_norm(m.q),
    "a weight of a tensor subclass": lambda m: setattr(
        m.q, "weight", nn.Parameter(m.q.weight.detach().as_subclass(_TensorSubclass))
    ),
}


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
def test_changed_layers_are_not_packed(change: Callable[[Any], Any]) -> None:
    module = _Three()
    assert _packed_layers(module).keys() == set(_NAMES)
    change(module)
    assert not _packed_layers(module)


def test_layers_are_not_packed_for_rows_that_autocast_does_not_cast() -> None:
    """It does not cast fp64, and nothing if it is on for another kind of device."""
    assert _packed_layers(_Three(), dtype=LOW)
    assert not _packed_layers(_Three(), dtype=torch.float64)
    module, x = _Three(), torch.randn(3, 8, device=DEVICE)
    other_device = "cuda" if DEVICE.type == "cpu" else "cpu"
    torch.set_autocast_enabled(other_device, True)
    try:
        assert packed(module, _NAMES, x) == ({}, None)
    finally:
        torch.set_autocast_enabled(other_device, False)


@pytest.mark.parametrize("low", [LOW, torch.float16], ids=str)
def test_packed_layers_return_autocasts_dtype(low: torch.dtype) -> None:
    layers = _packed_layers(_Three(), low=low)
    assert layers["q"](torch.randn(3, 8, device=DEVICE)).dtype == low


def test_layers_are_not_packed_under_autocast_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing would be the only reason to copy weights."""
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.float32)
    assert not _packed_layers(_Three())


def test_frozen_layers_without_biases_are_packed() -> None:
    module = _Three()
    for name in _NAMES:
        getattr(module, name).bias = None
    module.requires_grad_(False)
    assert _packed_layers(module).keys() == set(_NAMES)


def test_packed_layers_called_on_other_rows_or_again_give_the_layers_results() -> None:
    """This holds in any order of calls, and if a result is changed in place."""
    module, x, other_rows = _Three(), *torch.randn(2, 3, 8, device=DEVICE)
    with torch.autocast(DEVICE.type, LOW), Counting(_is_product) as products:
        layers, _ = packed(module, _NAMES, x)
        assert products.count == 0
        calls = [("k", x), ("q", other_rows), ("v", x), ("k", other_rows), ("q", x), ("k", x)]
        results = [layers[name](rows) for name, rows in calls]
        results[0].zero_()  # a layer that is called again computes its result again
        results.append(layers["k"](x))
        calls.append(("k", x))
    # One packed product, two products of other rows, and two more calls of k on x.
    assert products.count == 1 + 2 + 2
    for (name, rows), y in list(zip(calls, results, strict=True))[1:]:
        layer = getattr(module, name)
        assert layers[name].weight is layer.weight
        assert layers[name].bias is layer.bias
        rows, weight, bias = (t.detach().to(LOW).double() for t in (rows, layer.weight, layer.bias))
        magnitude = rows.abs() @ weight.abs().T + bias.abs()
        _close(y.detach(), rows @ weight.T + bias, magnitude, 9, LOW)


# --- packing in models, compiled, checkpointed, and with other attention functions ----------------


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(s, id=s.name, marks=[] if s.name == "vit" else pytest.mark.full)
        for s in SAMPLES
        if s.name in ("bert", "vit", "t5", "bart")
    ],
)
def test_compiled_model_is_one_graph_with_packed_products(
    spec: ModelSpec, device: torch.device, fresh_dynamo: None
) -> None:
    """The graph is run without being compiled.

    On a GPU cuDNN may add up ViT's convolution in another order, and later layers enlarge the
    difference. So eight units of the largest output are allowed, as for other models under
    autocast.
    """
    model, arguments = _fused(spec), inputs(spec)
    if spec.name in ("t5", "bart"):
        arguments["use_cache"] = False
    products: list[Any] = []

    def backend(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        products.extend(node for node in graph.graph.nodes if node.target is torch._C._nn.linear)
        return graph.forward

    for module in model.modules():
        # In training mode, layerdrop draws a number, also for a probability of zero, and breaks the
        # graph.
        if hasattr(module, "layerdrop"):
            module.training = False
    with torch.autocast(device.type, LOW):
        with Counting(_is_product) as eager_products:
            expected = outputs(model(**arguments))
        result = outputs(torch.compile(model, backend=backend, fullgraph=True)(**arguments))
    assert len(products) == eager_products.count
    for eager, compiled in zip(expected, result, strict=True):
        atol = 8 * unit_roundoff(LOW) * float(eager.detach().abs().max())
        torch.testing.assert_close(compiled, eager, rtol=0, atol=atol)


@contextmanager
def _recorded_packs() -> Iterator[list[Any]]:
    """Record the layers of each packed product."""
    packs: list[Any] = []

    def recording(x: Tensor, layers: list[Any], *args: Any) -> Any:
        packs.append(layers)
        return packed_linear(x, layers, *args)

    with mock.patch("fusedops.models.tricks.packing.packed_linear", recording):
        yield packs


def _one_part_changed(x: Tensor, layers: list[Any]) -> Tensor:
    q, k, v = packed_linear(x, layers, LOW)
    q.mul_(0.5)
    return (q * k + v).float()


def test_compiled_packing_returns_the_same_bits(device: torch.device, fresh_dynamo: None) -> None:
    """AOTAutograd traces forward and backward, with an in-place change of one part."""
    layers = [nn.Linear(8, 4, device=device) for _ in range(3)]
    x = torch.randn(5, 8, device=device, requires_grad=True)
    parameters = [x, *[p for layer in layers for p in layer.parameters()]]
    results = []
    compiled = torch.compile(_one_part_changed, backend="aot_eager", fullgraph=True)
    for function in (_one_part_changed, compiled):
        y = function(x, layers)
        results.append((y, *torch.autograd.grad(y, parameters, y.detach() + 1.0)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name in ("bert", "vit")], ids=lambda spec: spec.name
)
def test_checkpointed_layers_are_packed_in_both_runs_with_the_same_gradients(
    spec: ModelSpec, reentrant: bool, frozen: bool, device: torch.device
) -> None:
    model, arguments = _fused(spec), inputs(spec)
    packed_names = ("query", "key", "value", "q_proj", "k_proj", "v_proj")
    for name, module in model.named_modules():
        if frozen and name.split(".")[-1] in packed_names:
            module.requires_grad_(False)
    results, counts = [], []
    for is_checkpointed in (False, True):
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        with torch.autocast(device.type, LOW), _recorded_packs() as packs:
            ys = outputs(model(**arguments))
            counts.append(len(packs))
            sum(y.float().square().sum() for y in ys).backward()
            counts.append(len(packs))
        results.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    # The two layers are packed in the forward. With checkpointing the backward packs them again.
    assert counts == [2, 2, 2, 4]
    expected, checkpointed = results
    assert checkpointed.keys() == expected.keys()
    assert all(torch.equal(g, checkpointed[name]) for name, g in expected.items())


def _attention(scale: Callable[[Tensor, float], Tensor]) -> Callable[..., Any]:
    """Return an attention function that counts its calls in an attribute of the module."""

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        scaling: float = 1.0,
        **kwargs: Any,
    ) -> Any:
        module.call_count = getattr(module, "call_count", 0) + 1
        bias = kwargs.get("position_bias")
        y = nn.functional.scaled_dot_product_attention(
            scale(query, scaling), key, value, bias, scale=1.0
        )
        return y.transpose(1, 2).contiguous(), None

    return attention


@pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name in ("bert", "vit", "t5")], ids=lambda spec: spec.name
)
def test_attention_functions_may_change_the_query_and_attributes_of_the_module(
    spec: ModelSpec, device: torch.device
) -> None:
    """A function may scale the query in place: autograd does not forbid it.

    An attribute that it sets on its module, which is a proxy, is set on the module itself.
    """
    from transformers import AttentionInterface

    model, arguments = _fused(spec), inputs(spec)
    for module in model.modules():  # T5's encoder and decoder have configurations of their own
        if hasattr(module, "config"):
            module.config._attn_implementation = "scaled"
    results = []
    for scale in (Tensor.mul_, Tensor.mul):
        AttentionInterface.register("scaled", _attention(scale))
        try:
            with torch.autocast(device.type, LOW), _recorded_packs() as packs:
                results.append(run(model, arguments))
        finally:
            AttentionInterface._global_mapping.pop("scaled")
        assert packs
    # Both run the same operations. On a GPU PyTorch may add in another order, for which eight units
    # of each norm are allowed.
    (in_place_outputs, in_place_gradients), (expected_outputs, expected_gradients) = results
    pairs = list(zip(in_place_outputs, expected_outputs, strict=True))
    pairs += [(g, expected_gradients[name]) for name, g in in_place_gradients.items()]
    for result, expected in pairs:
        assert (result - expected).norm() <= 8 * unit_roundoff(LOW) * expected.norm()
    counts = [module.call_count for module in model.modules() if hasattr(module, "call_count")]
    assert set(counts) == {2}
    assert len(counts) == len(packs)


def test_proxy_of_a_module_reads_and_writes_the_modules_attributes() -> None:
    """The proxy has its own values of the attributes that it replaces. It can be copied."""
    module = _Three()
    proxy = replacing(module, {"k": "another"})
    assert (proxy.k, proxy.q, proxy.training) == ("another", module.q, True)
    proxy.eval()
    assert not proxy.training
    proxy.left = 1
    assert module.left == 1
    del proxy.left
    assert not hasattr(proxy, "left")
    assert not hasattr(module, "left")
    assert copy.copy(proxy).q is module.q
    proxy.q = nn.Linear(8, 4)
    assert proxy.q is module.q
