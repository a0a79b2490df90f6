"""Fused models under autocast: an attention's query, key and value are one product of its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops.models.packing import packed, packed_linear
from fusedops.models.spec import ModelSpec
from support import DEVICE
from tolerances import unit_roundoff
from zoo import SAMPLES, build, inputs, outputs, run, unpacked

LOW = torch.bfloat16
# For each model, how many products a forward is spared: two a self-attention, or one where its query goes its own way,
# and one a cross-attention.
_SPARED = {
    **dict.fromkeys(("bert", "roberta", "electra", "distilbert", "vit"), 2 * 2),
    **dict.fromkeys(("bart", "marian", "mbart", "t5", "t5_gated"), 2 * 2 + 2 * (2 + 1)),
    **dict.fromkeys(("clip", "siglip"), 2 * 2 + 2 * 2),
    "opt": 2 * 1,
    **dict.fromkeys(("gpt2", "gpt_neo", "whisper", "llama", "qwen3", "torch_pre_norm", "torch_post_norm"), 0),
}
models = pytest.mark.parametrize("spec", [s for s in SAMPLES if s.name in _SPARED], ids=lambda spec: spec.name)
some = pytest.mark.parametrize("spec", [s for s in SAMPLES if s.name in ("bert", "vit", "t5", "bart")],
                               ids=lambda spec: spec.name)  # fmt: skip


class _Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def _products(model: nn.Module, arguments: dict[str, Any]) -> Counter[str]:
    """Forward and backward."""
    with _Products() as products:
        ys = outputs(model(**arguments))
        counts = Counter(forward=products.count)
        sum(y.float().square().sum() for y in ys if y.requires_grad).backward()
        counts["backward"] = products.count - counts["forward"]
    return counts


def _fused(spec: ModelSpec) -> nn.Module:
    model = build(spec)
    assert fusedops.fuse_model(model)
    return model


@models
def test_products(spec: ModelSpec, device: torch.device) -> None:
    """Each that is spared takes two of the backward with it: the gradient of the rows, and of the weight."""
    model, arguments = _fused(spec), inputs(spec)
    with torch.autocast(device.type, LOW):
        found = _products(model, arguments)
        with unpacked():
            expected = _products(model, arguments)
    assert expected["forward"] - found["forward"] == _SPARED[spec.name]
    assert expected["backward"] - found["backward"] == 2 * _SPARED[spec.name]


@some
def test_only_under_autocast_and_for_gradients(spec: ModelSpec, device: torch.device) -> None:
    """Elsewhere the weights are not copied, and are not to be."""
    model, arguments = _fused(spec), inputs(spec)
    for autocast, grad in ((False, True), (True, False)):
        with torch.autocast(device.type, LOW, enabled=autocast), torch.set_grad_enabled(grad):
            with _Products() as found:
                model(**arguments)
            with unpacked(), _Products() as expected:
                model(**arguments)
        assert found.count == expected.count > 0


@models
def test_gradients(spec: ModelSpec, device: torch.device) -> None:
    """No further from fp32's than twice what products of their own give, in the norm of all gradients together."""
    model, arguments = _fused(spec), inputs(spec)
    exact_outputs, exact = run(model, arguments)
    with torch.autocast(device.type, LOW):
        found = run(model, arguments)
        with unpacked():
            apart = run(model, arguments)
    for results, expected in ((found, exact), (apart, exact)):
        assert results[1].keys() == expected.keys()
    for place, exact_ones in enumerate((exact_outputs, list(exact.values()))):
        error, allowed = (
            sum(float((y - e).double().square().sum()) for y, e in zip(_listed(result[place]), exact_ones, strict=True))
            for result in (found, apart)
        )
        assert 0.0 < error <= 4 * allowed
    assert all(g.dtype == exact[name].dtype and g.is_contiguous() for name, g in found[1].items())


def _listed(results: Any) -> list[Tensor]:
    return list(results.values()) if isinstance(results, dict) else results


# --- the product itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, LOW, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(5, 7, 24), (24,), (0, 24)], ids=str)
def test_values(shape: tuple[int, ...], dtype: torch.dtype, bias: bool, device: torch.device) -> None:
    """Against fp64, from the numbers as autocast rounds them.

    A product of K terms is added in fp32 or wider and rounded once: u |y|, and K fp32 roundings of the terms'
    magnitudes. That is so for the outputs (K inputs and the bias), for the rows' gradient (all outputs together) and
    for a weight's (all rows); the rows' gradient is rounded once more where their own dtype is another. A bias's
    gradient is one sum of the rows; PyTorch's is rounded once.
    """
    layers = [nn.Linear(24, n, bias=bias, device=device) for n in (16, 8, 40)]
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    ys = packed_linear(x, layers, LOW)
    dys = [torch.randn_like(y) for y in ys]
    parameters = [p for layer in layers for p in layer.parameters()]
    found = torch.autograd.grad(ys, [x, *parameters], dys)
    rows = x.detach().to(LOW).double().reshape(-1, 24)
    expected, terms = torch.zeros_like(rows), torch.zeros_like(rows)
    gradients = iter(found[1:])
    for layer, y, dy in zip(layers, ys, dys, strict=True):
        weight, dy = layer.weight.detach().to(LOW).double(), dy.double().reshape(-1, len(layer.weight))
        b = layer.bias.detach().to(LOW).double() if bias else 0.0
        assert y.dtype == LOW
        assert y.shape == (*shape[:-1], len(weight))
        _close(y.reshape(dy.shape), rows @ weight.T + b, rows.abs() @ weight.abs().T + abs(b), 25)
        _close(next(gradients), dy.T @ rows, dy.abs().T @ rows.abs(), len(rows))
        if bias:
            _close(next(gradients), dy.sum(0), dy.abs().sum(0), len(rows))
        expected, terms = expected + dy @ weight, terms + dy.abs() @ weight.abs()
    _close(found[0].reshape(rows.shape), expected, terms, 64)
    assert [g.dtype for g in found] == [dtype, *[torch.float32] * len(parameters)]


def _close(found: Tensor, expected: Tensor, terms: Tensor, count: int) -> None:
    """Two roundings to the low dtype, or to fp16, which is finer above its subnormal numbers, whose spacing is 2⁻²⁴."""
    slack = 2 * unit_roundoff(LOW) * expected.abs() + count * unit_roundoff(torch.float32) * terms + 2.0**-25
    assert ((found.double() - expected).abs() <= slack).all()


# --- who is packed --------------------------------------------------------------------------------------------------

_NAMES = ("q", "k", "v")


class _Three(nn.Module):
    """Linear layers for the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, n, device=DEVICE) for n in (8, 4, 12))


def _parts(module: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    with torch.autocast(DEVICE.type, LOW):
        return packed(module, _NAMES, torch.randn(3, 8, device=DEVICE, dtype=dtype))


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
    "half precision": _replaced(k=nn.Linear(8, 4, dtype=LOW)),
    "double precision": _replaced(k=nn.Linear(8, 4, dtype=torch.float64)),
    "parametrized": lambda m: torch.nn.utils.parametrizations.weight_norm(m.q),
    "a tensor of its own": lambda m: setattr(m.q, "weight", nn.Parameter(m.q.weight.detach().as_subclass(_Own))),
}


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
def test_layers_that_are_not_packed(change: Callable[[Any], Any]) -> None:
    module = _Three()
    assert _parts(module).keys() == set(_NAMES)
    change(module)
    assert not _parts(module)


def test_rows_that_are_not_packed() -> None:
    """Autocast casts no fp64."""
    assert _parts(_Three(), LOW)
    assert not _parts(_Three(), torch.float64)


def test_without_biases_and_frozen() -> None:
    module = _Three()
    for name in _NAMES:
        getattr(module, name).bias = None
    module.requires_grad_(False)
    assert _parts(module).keys() == set(_NAMES)


def test_other_rows_are_a_layers_own() -> None:
    """Whatever is called first, and whichever rows come later, each stand-in gives what its layer does."""
    module, x, other = _Three(), *torch.randn(2, 3, 8, device=DEVICE)
    with torch.autocast(DEVICE.type, LOW), _Products() as products:
        parts = packed(module, _NAMES, x)
        assert products.count == 0
        calls = [("k", x), ("q", other), ("v", x), ("k", other), ("q", x), ("k", x)]
        found = [parts[name](rows) for name, rows in calls]
        assert products.count == 1 + 2
        for (name, rows), y in zip(calls, found, strict=True):
            layer = getattr(module, name)
            assert parts[name].weight is layer.weight
            assert parts[name].bias is layer.bias
            torch.testing.assert_close(y, layer(rows), rtol=2 * unit_roundoff(LOW), atol=2.0**-14)


# --- what runs it ---------------------------------------------------------------------------------------------------


@some
def test_one_graph(spec: ModelSpec, device: torch.device, fresh_dynamo: None) -> None:
    """Under torch.compile too, with as few products."""
    model, arguments = _fused(spec), {**inputs(spec), **({"use_cache": False} if spec.name in ("t5", "bart") else {})}
    products: list[Any] = []

    def backend(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        products.extend(node for node in graph.graph.nodes if node.target is torch._C._nn.linear)
        return graph.forward

    with torch.autocast(device.type, LOW):
        with _Products() as eagerly:
            expected = outputs(model(**arguments))
        found = outputs(torch.compile(model, backend=backend, fullgraph=True)(**arguments))
    assert len(products) == eagerly.count
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=8 * unit_roundoff(LOW) * float(a.detach().abs().max()))


@pytest.mark.parametrize("spec", [s for s in SAMPLES if s.name in ("bert", "vit")], ids=lambda spec: spec.name)
def test_checkpointed(spec: ModelSpec, device: torch.device) -> None:
    """A layer that is computed again gives the same gradients."""
    model, arguments = _fused(spec).train(), inputs(spec)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    results = []
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with torch.autocast(device.type, LOW):
            results.append(run(model, arguments)[1])
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(g, results[1][name]) for name, g in results[0].items())
