"""Fused models under autocast: an attention's query, key and value are one product of its rows."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
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

# What a model calls does not depend on the kernels, whose values the operators' own tests hold.
pytestmark = pytest.mark.once

LOW = torch.bfloat16
# For each model, how many products a forward is spared: two a self-attention, or one where its
# query goes its own way, and one a cross-attention of a known class. None in all others.
_SPARED = {
    **dict.fromkeys(("bert", "roberta", "electra", "distilbert", "vit", "bert_decoder"), 2 * 2),
    **dict.fromkeys(("bart", "marian", "mbart", "t5", "t5_gated"), 2 * 2 + 2 * (2 + 1)),
    **dict.fromkeys(("clip", "siglip"), 2 * 2 + 2 * 2),
    **dict.fromkeys(("opt", "opt_post_norm"), 2 * 1),
}
packing = pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name in _SPARED], ids=lambda spec: spec.name
)
some = pytest.mark.parametrize(
    "spec",
    [s for s in SAMPLES if s.name in ("bert", "vit", "t5", "bart")],
    ids=lambda spec: spec.name,
)


def _is_product(func: Any, kwargs: dict[str, Any]) -> bool:
    return func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)


def _products(model: nn.Module, arguments: dict[str, Any]) -> Counter[str]:
    """Forward and backward."""
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
def test_packing_spares_products_in_forward_and_backward(
    spec: ModelSpec, device: torch.device
) -> None:
    """Each that is spared takes two of the backward with it.

    The gradient of the rows, and of the weight.
    """
    model, arguments = _fused(spec), inputs(spec)
    with torch.autocast(device.type, LOW):
        result = _products(model, arguments)
        with unpacked():
            expected = _products(model, arguments)
    assert expected["forward"] - result["forward"] == _SPARED.get(spec.name, 0)
    assert expected["backward"] - result["backward"] == 2 * _SPARED.get(spec.name, 0)


@some
def test_only_under_autocast_and_in_training(spec: ModelSpec, device: torch.device) -> None:
    """Elsewhere the weights are not copied, and are not to be.

    Whether gradients are recorded makes no difference.
    """
    model, arguments = _fused(spec), inputs(spec)
    for autocast, training, grad in ((False, True, True), (True, False, True), (True, True, False)):
        model.train(training)
        with torch.autocast(device.type, LOW, enabled=autocast), torch.set_grad_enabled(grad):
            with Counting(_is_product) as result:
                model(**arguments)
            with unpacked(), Counting(_is_product) as expected:
                model(**arguments)
        assert expected.count - result.count == (_SPARED[spec.name] if autocast and training else 0)


@packing
def test_gradients(spec: ModelSpec, device: torch.device) -> None:
    """Outputs and gradients are roundings of the same as with three products, and no further from fp32's than these.

    Both errors are sums of many roundings, so each is known but for chance: here the norm of all
    may be twice the other's, where a wrong weight, bias or place is some hundred times.
    """
    model, arguments = _fused(spec), inputs(spec)
    exact = run(model, arguments)
    with torch.autocast(device.type, LOW):
        found = run(model, arguments)
        with unpacked():
            apart = run(model, arguments)
    assert found[1].keys() == apart[1].keys() == exact[1].keys()
    for expected, *results in zip(
        *[(ys, list(gradients.values())) for ys, gradients in (exact, found, apart)], strict=True
    ):
        error, allowed = (
            sum(
                float((y - e).double().square().sum())
                for y, e in zip(result, expected, strict=True)
            )
            for result in results
        )
        assert 0.0 < error <= 4 * allowed
    assert all(
        g.dtype == exact[1][name].dtype and g.is_contiguous() for name, g in found[1].items()
    )


# --- the product itself ---------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("low", [LOW, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, LOW, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(5, 7, 24), (24,), (0, 24)], ids=str)
def test_packed_layers_round_like_a_product(
    shape: tuple[int, ...], dtype: torch.dtype, low: torch.dtype, bias: bool, device: torch.device
) -> None:
    """Against fp64, from the numbers as autocast rounds them.

    A product of K terms is added in fp32 and rounded once to the low dtype: u |y|, and K fp32
    roundings of the terms' magnitudes. That is so for the outputs (the inputs, and the bias), for
    the rows' gradient (all outputs together), for a weight's and a bias's (all rows). The rows'
    gradient is rounded once more to their own dtype.
    """
    layers = [nn.Linear(24, 16, bias=bias, device=device) for _ in range(3)]
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    ys = packed_linear(x, layers, low)
    dys = [torch.randn_like(y) for y in ys]
    parameters = [p for layer in layers for p in layer.parameters()]
    result = torch.autograd.grad(ys, [x, *parameters], dys)
    rows = x.detach().to(low).double().reshape(-1, 24)
    expected, terms = torch.zeros_like(rows), torch.zeros_like(rows)
    gradients = iter(result[1:])
    for layer, y, dy in zip(layers, ys, dys, strict=True):
        weight, dy = (
            layer.weight.detach().to(low).double(),
            dy.double().reshape(-1, len(layer.weight)),
        )
        b = (
            layer.bias.detach().to(low).double()
            if bias
            else torch.zeros(16, dtype=torch.float64, device=device)
        )
        assert y.dtype == low
        assert y.shape == (*shape[:-1], len(weight))
        _close(
            y.reshape(dy.shape), rows @ weight.T + b, rows.abs() @ weight.abs().T + b.abs(), 25, low
        )
        _close(next(gradients), dy.T @ rows, dy.abs().T @ rows.abs(), len(rows), low)
        if bias:
            _close(next(gradients), dy.sum(0), dy.abs().sum(0), len(rows), low)
        expected, terms = expected + dy @ weight, terms + dy.abs() @ weight.abs()
    _close(result[0].reshape(rows.shape), expected, terms, 48, low, dtype)
    assert [g.dtype for g in result] == [dtype, *[torch.float32] * len(parameters)]


# Half the distance between the subnormal numbers.
_TINY = {torch.float16: 2.0**-25, LOW: 0.0, torch.float32: 0.0}


def _close(
    found: Tensor, expected: Tensor, terms: Tensor, count: int, *rounded: torch.dtype
) -> None:
    """``count`` fp32 roundings of the terms, then one to each of these dtypes.

    1.01 covers the products of roundings.
    """
    slack = count * unit_roundoff(torch.float32) * terms
    for dtype in rounded:
        slack = slack + unit_roundoff(dtype) * expected.abs() + _TINY[dtype]
    assert ((found.double() - expected).abs() <= 1.01 * slack).all()


def test_parts_may_be_changed_in_place(device: torch.device) -> None:
    """As what linear layers give may be, and each change meets one of them alone."""
    layers = [nn.Linear(8, 4, device=device) for _ in range(3)]
    x = torch.randn(5, 8, device=device)
    q, k, v = packed_linear(x, layers, LOW)
    expected = [k.clone(), v.clone()]
    q.view(5, 2, 2).transpose(0, 1).mul_(0.5)
    assert torch.equal(k, expected[0])
    assert torch.equal(v, expected[1])
    result = torch.autograd.grad(
        [q, k], [layers[0].weight, layers[1].weight], [torch.ones_like(q), torch.ones_like(k)]
    )
    assert torch.equal(result[0], 0.5 * result[1])


# --- who is packed --------------------------------------------------------------------------------

_NAMES = ("q", "k", "v")


class _Three(nn.Module):
    """Linear layers for the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 4, device=DEVICE) for _ in _NAMES)


def _parts(
    module: nn.Module, dtype: torch.dtype = torch.float32, low: torch.dtype = LOW
) -> dict[str, Any]:
    with torch.autocast(DEVICE.type, low):
        return packed(module, _NAMES, torch.randn(3, 8, device=DEVICE, dtype=dtype))[0]


class _Adapter(nn.Linear):
    """No plain linear layer."""


class _Own(Tensor):
    """No plain tensor."""


def _replaced(**layers: Any) -> Callable[[Any], Any]:
    def change(module: nn.Module) -> None:
        for name, layer in layers.items():
            setattr(module, name, layer.to(DEVICE) if layer is not None else None)

    return change


_CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": lambda m: m.k.register_forward_hook(lambda *_: None),
    "pre-hook": lambda m: m.q.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda m: m.v.register_full_backward_hook(lambda *_: None),
    "forward on the instance": lambda m: setattr(m.v, "forward", lambda x: x),
    "adapter": _replaced(k=_Adapter(8, 4)),
    "no layer": _replaced(v=None),
    "one bias less": _replaced(k=nn.Linear(8, 4, bias=False)),
    "other rows": _replaced(k=nn.Linear(9, 4)),
    "more outputs": _replaced(k=nn.Linear(8, 5)),
    "one is frozen": lambda m: m.k.weight.requires_grad_(False),
    "evaluation": lambda m: m.eval(),
    "half precision": _replaced(k=nn.Linear(8, 4, dtype=LOW)),
    "a bias in half precision": lambda m: setattr(
        m.v, "bias", nn.Parameter(m.v.bias.detach().to(LOW))
    ),
    "a bias of its own": lambda m: setattr(
        m.v, "bias", nn.Parameter(m.v.bias.detach().as_subclass(_Own))
    ),
    "double precision": _replaced(k=nn.Linear(8, 4, dtype=torch.float64)),
    "parametrized": lambda m: torch.nn.utils.parametrizations.weight_norm(m.q),
    "a tensor of its own": lambda m: setattr(
        m.q, "weight", nn.Parameter(m.q.weight.detach().as_subclass(_Own))
    ),
}


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
def test_layers_that_are_not_packed(change: Callable[[Any], Any]) -> None:
    module = _Three()
    assert _parts(module).keys() == set(_NAMES)
    change(module)
    assert not _parts(module)


def test_rows_that_are_not_packed() -> None:
    """Autocast casts no fp64, and none where it is on for another kind of device."""
    assert _parts(_Three(), LOW)
    assert not _parts(_Three(), torch.float64)
    module, x = _Three(), torch.randn(3, 8, device=DEVICE)
    other = "cuda" if DEVICE.type == "cpu" else "cpu"
    torch.set_autocast_enabled(other, True)
    try:
        assert packed(module, _NAMES, x) == ({}, None)
    finally:
        torch.set_autocast_enabled(other, False)


@pytest.mark.parametrize("low", [LOW, torch.float16], ids=str)
def test_the_dtype_is_autocasts(low: torch.dtype) -> None:
    parts = _parts(_Three(), low=low)
    assert parts["q"](torch.randn(3, 8, device=DEVICE)).dtype == low


def test_no_weight_is_copied_for_autocast_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is the dtype of autocast, which asks for no copy of fp32 weights."""
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.float32)
    assert not _parts(_Three())


def test_without_biases_and_frozen() -> None:
    module = _Three()
    for name in _NAMES:
        getattr(module, name).bias = None
    module.requires_grad_(False)
    assert _parts(module).keys() == set(_NAMES)


def test_other_rows_are_a_layers_own() -> None:
    """Whatever is called first, and whatever comes later, each stand-in gives what its layer does."""
    module, x, other = _Three(), *torch.randn(2, 3, 8, device=DEVICE)
    with torch.autocast(DEVICE.type, LOW), Counting(_is_product) as products:
        parts, _ = packed(module, _NAMES, x)
        assert products.count == 0
        calls = [("k", x), ("q", other), ("v", x), ("k", other), ("q", x), ("k", x)]
        results = [parts[name](rows) for name, rows in calls]
        results[0].zero_()  # its own: the layer that is called again computes again
        results.append(parts["k"](x))
        calls.append(("k", x))
    assert products.count == 1 + 2 + 2
    for (name, rows), y in list(zip(calls, results, strict=True))[1:]:
        layer = getattr(module, name)
        assert parts[name].weight is layer.weight
        assert parts[name].bias is layer.bias
        rows, weight, bias = (t.detach().to(LOW).double() for t in (rows, layer.weight, layer.bias))
        _close(y.detach(), rows @ weight.T + bias, rows.abs() @ weight.abs().T + bias.abs(), 9, LOW)


# --- what runs it ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(s, id=s.name, marks=[] if s.name == "vit" else pytest.mark.full)
        for s in SAMPLES
        if s.name in ("bert", "vit", "t5", "bart")
    ],
)
def test_one_graph(spec: ModelSpec, device: torch.device, fresh_dynamo: None) -> None:
    """Under torch.compile too, with as few products.

    The graph is run as it is. On a GPU cuDNN may sum ViT's convolution in another order, which the
    layers behind it carry on: eight units of the largest output, as for other models under
    autocast.
    """
    model, arguments = (
        _fused(spec),
        {**inputs(spec), **({"use_cache": False} if spec.name in ("t5", "bart") else {})},
    )
    products: list[Any] = []

    def backend(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        products.extend(node for node in graph.graph.nodes if node.target is torch._C._nn.linear)
        return graph.forward

    for module in model.modules():
        if hasattr(module, "layerdrop"):  # drawn for at a chance of zero too, which no graph holds
            module.training = False
    with torch.autocast(device.type, LOW):
        with Counting(_is_product) as eagerly:
            expected = outputs(model(**arguments))
        result = outputs(torch.compile(model, backend=backend, fullgraph=True)(**arguments))
    assert len(products) == eagerly.count
    for a, b in zip(expected, result, strict=True):
        torch.testing.assert_close(
            b, a, rtol=0, atol=8 * unit_roundoff(LOW) * float(a.detach().abs().max())
        )


@contextmanager
def _calls() -> Iterator[list[Any]]:
    """The layers of each packed product."""
    seen: list[Any] = []

    def counting(x: Tensor, layers: list[Any], *args: Any) -> Any:
        seen.append(layers)
        return packed_linear(x, layers, *args)

    with mock.patch("fusedops.models.tricks.packing.packed_linear", counting):
        yield seen


def _changed(x: Tensor, layers: list[Any]) -> Tensor:
    q, k, v = packed_linear(x, layers, LOW)
    q.mul_(0.5)
    return (q * k + v).float()


def test_compiled_packing_returns_the_same_bits(device: torch.device, fresh_dynamo: None) -> None:
    """Through AOTAutograd, where a part is changed in place too.

    The same bits, forward and backward.
    """
    layers = [nn.Linear(8, 4, device=device) for _ in range(3)]
    x = torch.randn(5, 8, device=device, requires_grad=True)
    parameters = [x, *[p for layer in layers for p in layer.parameters()]]
    results = []
    for function in (_changed, torch.compile(_changed, backend="aot_eager", fullgraph=True)):
        y = function(x, layers)
        results.append((y, *torch.autograd.grad(y, parameters, y.detach() + 1.0)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name in ("bert", "vit")], ids=lambda spec: spec.name
)
def test_checkpointed(spec: ModelSpec, reentrant: bool, frozen: bool, device: torch.device) -> None:
    """A layer is packed when it is computed for the first time and when again, and gives the same gradients."""
    model, arguments = _fused(spec), inputs(spec)
    for name, module in model.named_modules():
        if frozen and name.split(".")[-1] in (
            "query",
            "key",
            "value",
            "q_proj",
            "k_proj",
            "v_proj",
        ):
            module.requires_grad_(False)
    results, counts = [], []
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        with torch.autocast(device.type, LOW), _calls() as packs:
            ys = outputs(model(**arguments))
            counts.append(len(packs))
            sum(y.float().square().sum() for y in ys).backward()
            counts.append(len(packs))
        results.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    # Without checkpointing nothing is computed in the backward; with it all is, once more.
    assert counts == [2, 2, 2, 4]
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(g, results[1][name]) for name, g in results[0].items())


def _attention(scale: Callable[[Tensor, float], Tensor]) -> Callable[..., Any]:
    """A function for attention that counts its calls on the module."""

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        scaling: float = 1.0,
        **kwargs: Any,
    ) -> Any:
        module.calls_seen = getattr(module, "calls_seen", 0) + 1
        bias = kwargs.get("position_bias")
        y = nn.functional.scaled_dot_product_attention(
            scale(query, scaling), key, value, bias, scale=1.0
        )
        return y.transpose(1, 2).contiguous(), None

    return attention


@pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name in ("bert", "vit", "t5")], ids=lambda spec: spec.name
)
def test_functions_for_attention(spec: ModelSpec, device: torch.device) -> None:
    """The query may be scaled in place, which no autograd view forbids.

    What is left with the module arrives.
    """
    from transformers import AttentionInterface

    model, arguments = _fused(spec), inputs(spec)
    for module in model.modules():  # T5's stacks have configurations of their own
        if hasattr(module, "config"):
            module.config._attn_implementation = "scaled"
    results = []
    for scale in (Tensor.mul_, Tensor.mul):
        AttentionInterface.register("scaled", _attention(scale))
        try:
            with torch.autocast(device.type, LOW), _calls() as packs:
                results.append(run(model, arguments))
        finally:
            AttentionInterface._global_mapping.pop("scaled")
        assert packs
    # The same operations; on a GPU PyTorch may add in another order, which eight units in the norm
    # of each cover.
    for result, expected in (
        *zip(*(ys for ys, _ in results), strict=True),
        *((g, results[1][1][name]) for name, g in results[0][1].items()),
    ):
        assert (result - expected).norm() <= 8 * unit_roundoff(LOW) * expected.norm()
    seen = [module.calls_seen for module in model.modules() if hasattr(module, "calls_seen")]
    assert set(seen) == {2}
    assert len(seen) == len(packs)


def test_a_stand_in_is_its_module_to_the_forward() -> None:
    """The stand-in has the module's changed and deleted attributes, and can be copied."""
    module = _Three()
    seen = replacing(module, {"k": "another"})
    assert (seen.k, seen.q, seen.training) == ("another", module.q, True)
    seen.eval()
    assert not seen.training
    seen.left = 1
    assert module.left == 1
    del seen.left
    assert not hasattr(seen, "left")
    assert not hasattr(module, "left")
    assert copy.copy(seen).q is module.q
    seen.q = nn.Linear(8, 4)
    assert seen.q is module.q
