"""Fused models under autocast.

Rows that only linear layers take come in their dtype, with the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedops
from fusedops.models import autocast
from fusedops.models.parts import normed
from sample_models import MODELS, ModelSpec
from support import KERNEL_PATH
from tolerances import unit_roundoff
from zoo import (
    HAS_TRANSFORMERS,
    SAMPLES,
    build,
    inputs,
    observed,
    outputs,
    run,
    undropped,
    unpacked,
)

# What a model calls does not depend on the kernels, whose values the operators' own tests hold.
pytestmark = pytest.mark.once

LOW = torch.bfloat16
# For each pre-norm model, how many norms of a layer give low rows, and how many layers there are:
# encoder, decoder.
_NARROW = {
    **dict.fromkeys(("torch_pre_norm", "mbart", "whisper", "t5", "t5_gated"), 2 * 2 + 3 * 2),
    "clip": 2 * 2 + 2 * 2,
    "siglip": 2 * 2 + 2 * 2 + 1,  # the norm before its pooling head's MLP
    **dict.fromkeys(
        (
            "gpt2",
            "opt",
            "vit",
            "gpt_neo",
            "llama",
            "llama_biased",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma",
        ),
        2 * 2,
    ),
    "gpt2_decoder": 3 * 2,
}
pre_norm = pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name in _NARROW], ids=lambda spec: spec.name
)
# For each post-norm model, how many norms give their rows twice, low ones to linear layers beside
# the residual stream.
_COPIES = {
    **dict.fromkeys(("bert", "roberta", "electra", "distilbert"), 2),
    "opt_post_norm": 0,  # whose rows are reshaped between the norm and the linear layer
    **dict.fromkeys(("bart", "marian", "torch_post_norm"), 2 + 2 * 2),
    "bert_decoder": 2,
}
post_norm = pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name in _COPIES], ids=lambda spec: spec.name
)
_CAST_ONCE = ("bert", "roberta", "distilbert", "bart", "marian", "opt_post_norm")
cast_once = pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name in _CAST_ONCE], ids=lambda spec: spec.name
)


def _fused(spec: ModelSpec) -> nn.Module:
    """In training, so that PyTorch's fast paths are out of play; nothing is dropped."""
    model = undropped(spec)
    assert fusedops.fuse_model(model)
    return model


@contextmanager
def _wide(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows as the unfused modules get them: each linear layer casts for itself."""
    with monkeypatch.context() as patch:
        for module in ("autocast", "parts"):
            patch.setattr(f"fusedops.models.{module}.low_dtype", lambda x, modules: None)
        yield


@contextmanager
def _low_norms(option: str = "out_dtype") -> Iterator[list[torch.dtype | None]]:
    """The values of this option in calls of norms.

    Of the output's dtype, or of its low-precision copy's.
    """
    seen: list[torch.dtype | None] = []

    def see(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name.endswith(("norm", "ln")):
            seen.append(kwargs.get(option))

    with observed(see):
        yield seen


def _narrow(seen: list[Any]) -> int:
    return sum(dtype == LOW for dtype in seen)


@pre_norm
def test_the_same_bits(
    spec: ModelSpec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with fp32 rows that the linear layers cast; and so it is in evaluation."""
    model, arguments = _fused(spec), inputs(spec)
    for training in (True, False):
        model.train(training)
        with torch.autocast(device.type, LOW):
            result = outputs(model(**arguments))
            with _wide(monkeypatch), _low_norms() as seen:
                expected = outputs(model(**arguments))
        assert not _narrow(seen)
        assert [y.dtype for y in result] == [y.dtype for y in expected]
        assert all(map(torch.equal, result, expected))


@pre_norm
def test_each_norm_of_a_block_is_narrow(spec: ModelSpec, device: torch.device) -> None:
    """Those before attention and those before the feed-forward part.

    Not a model's last norm, nor any without autocast.
    """
    model, arguments = _fused(spec), inputs(spec)
    with _low_norms() as seen:
        model(**arguments)
    assert not _narrow(seen)
    with torch.autocast(device.type, LOW), _low_norms() as seen:
        model(**arguments)
    assert _narrow(seen) == _NARROW[spec.name]
    with torch.autocast(device.type, LOW, enabled=False), _low_norms() as seen:
        model(**arguments)
    assert not _narrow(seen)


def _casts(model: nn.Module, arguments: dict[str, Any], device: torch.device) -> int:
    """How often rows are cast to the low dtype in one forward."""
    with torch.autocast(device.type, LOW), torch.profiler.profile(record_shapes=True) as profile:
        model(**arguments)
    rows, casts = (
        arguments["input_ids"].numel(),
        [e for e in profile.events() if e.name == "aten::_to_copy"],
    )
    return sum(
        len(e.input_shapes[0]) > 1 and math.prod(e.input_shapes[0][:-1]) == rows for e in casts
    )


@cast_once
def test_rows_are_cast_once(
    spec: ModelSpec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cast serves q, k and v, where the rows stay fp32 for the residual.

    Two casts a self-attention less.

    A cross-attention, whose key and value are one product, casts the encoder's rows once.
    """
    model, arguments = _fused(spec), inputs(spec)
    result = _casts(model, arguments, device)
    with unpacked(), torch.autocast(device.type, LOW):
        y = outputs(model(**arguments))
    with _wide(monkeypatch), unpacked():
        expected = _casts(model, arguments, device)
        with torch.autocast(device.type, LOW):
            assert all(map(torch.equal, y, outputs(model(**arguments))))
    modules = dict(model.named_modules())
    layers = sum(
        "SelfAttention" in type(m).__name__ or name.endswith("self_attn")
        for name, m in modules.items()
    )
    crosses = sum(name.endswith("encoder_attn") for name in modules)
    assert layers >= 2
    # A kernel writes the low-precision copy without a cast.
    assert expected - result == 2 * layers + crosses + KERNEL_PATH * _COPIES[spec.name]


@post_norm
def test_each_norm_within_a_block_also_returns_a_low_precision_copy(
    spec: ModelSpec, device: torch.device
) -> None:
    """Its linear layers get their rows from the norm.

    The residual stream, and what leaves the block, stays fp32.
    """
    model, arguments = _fused(spec), inputs(spec)
    for enabled in (True, False):
        with torch.autocast(device.type, LOW, enabled=enabled), _low_norms("cast_dtype") as seen:
            model(**arguments)
        assert _narrow(seen) == (_COPIES[spec.name] if enabled else 0)


# --- modules with hooks ---------------------------------------------------------------------------


def _seen_by(module: nn.Module) -> list[torch.dtype]:
    seen: list[torch.dtype] = []
    module.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    return seen


def _last(model: nn.Module, name: str) -> nn.Module:
    return next(
        module
        for path, module in reversed(list(model.named_modules()))
        if path.split(".")[-1] == name
    )


# Of the layers, one each: the linear layers, or what holds them, behind the first norm and behind
# the second.
_CONSUMERS = {
    "gpt2": ("c_attn", "mlp"),
    "t5": ("q", "wi"),
    "t5_gated": ("SelfAttention", "wi_1"),
    "vit": ("k_proj", "fc1"),
    "llama": ("v_proj", "up_proj"),
    "torch_pre_norm": ("self_attn", "linear1"),
}
_HOOKED = [(s, name) for s in SAMPLES for name in _CONSUMERS.get(s.name, ())]


@pytest.mark.parametrize("spec, name", _HOOKED, ids=lambda value: getattr(value, "name", value))
def test_hooked_consumer_gets_fp32(spec: ModelSpec, name: str, device: torch.device) -> None:
    """A hook on a consumer of the rows switches it off for that norm, and for no other."""
    model, arguments = _fused(spec), inputs(spec)
    seen = _seen_by(_last(model, name)) if name != "SelfAttention" else []
    if name == "SelfAttention":  # its rows come by keyword or by position
        _last(model, name).register_forward_hook(
            lambda module, args, output: seen.append(args[0].dtype)
        )
    with torch.autocast(device.type, LOW), _low_norms() as norms:
        model(**arguments)
    assert seen == [torch.float32]
    assert _narrow(norms) == _NARROW[spec.name] - 1


_BERT = [s for s in SAMPLES if s.name == "bert"]


@pytest.mark.parametrize("spec", _BERT, ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    "path",
    [
        "attention",
        "attention.output",
        "attention.output.LayerNorm",
        "intermediate",
        "intermediate.dense",
        "output",
    ],
)
def test_hooked_module_of_a_block_gets_the_only_output(
    spec: ModelSpec, path: str, device: torch.device
) -> None:
    """Else the gradient that a hook on a tensor gets would lack the low-precision copy's."""
    model, arguments = _fused(spec), inputs(spec)
    hooked = model.get_submodule(f"bert.encoder.layer.1.{path}")
    tensors: list[Tensor] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        rows = output[0] if isinstance(output, tuple) else output
        tensors.append(
            args[0] if path.startswith("intermediate") else args[1] if path == "output" else rows
        )
        tensors[-1].retain_grad()

    hooked.register_forward_hook(record)
    gradients = []
    for low in (True, False):
        tensors.clear()
        with torch.autocast(device.type, LOW, enabled=low), _low_norms("cast_dtype") as seen:
            total = sum(y.float().square().sum() for y in outputs(model(**arguments)))
        assert _narrow(seen) == (_COPIES["bert"] - 1 if low else 0)
        assert tensors[0].dtype == torch.float32
        total.backward()
        gradients.append(tensors[0].grad)
    # A fifth of it is lost without the feed-forward part's.
    assert (gradients[0] - gradients[1]).norm() < 0.05 * gradients[1].norm()


_CONSUMERS = {
    "opt_post_norm": "model.decoder.layers.1.fc1",
    "bart": "model.decoder.layers.1.fc1",
    "distilbert": "distilbert.transformer.layer.1.ffn.lin1",
    "torch_post_norm": "transformer.decoder.layers.1.linear1",
}
consumers = pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name in _CONSUMERS], ids=lambda spec: spec.name
)


@consumers
def test_hooked_consumer_gets_the_residuals_gradient_too(
    spec: ModelSpec, device: torch.device
) -> None:
    """A linear layer with hooks takes the residual itself, as in the original, and no view of it."""
    model, arguments = build(spec), inputs(spec)
    path, tensors = _CONSUMERS[spec.name], list[Tensor]()
    model.get_submodule(path).register_forward_pre_hook(
        lambda module, args: tensors.append(args[0])
    )
    gradients = []
    for fuse in (False, True):
        assert not fuse or fusedops.fuse_model(model)
        tensors.clear()
        total = sum(y.square().sum() for y in outputs(model(**arguments)))
        gradients += torch.autograd.grad(total, tensors)
    torch.testing.assert_close(
        gradients[1], gradients[0], rtol=1e-3, atol=1e-3 * float(gradients[0].abs().max())
    )


class _Adapter(nn.Linear):
    """No plain linear layer: it looks at its input's dtype."""

    seen: torch.dtype

    def forward(self, input: Tensor) -> Tensor:
        self.seen = input.dtype
        return super().forward(input)


@pytest.mark.parametrize("name", ["q_proj", "gate_proj"] if HAS_TRANSFORMERS else [])
def test_an_adapter_sees_fp32(name: str, device: torch.device) -> None:
    spec = next(s for s in MODELS if s.name == "llama")
    model = _fused(spec)
    layer = _last(model, name)
    layer.__class__ = _Adapter
    with torch.autocast(device.type, LOW):
        model(**inputs(spec))
    assert layer.seen == torch.float32


def test_a_norm_alone_stays_fp32(device: torch.device) -> None:
    """The consumers of its output are not known there."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)).to(device)
    fusedops.fuse_model(model)
    with torch.autocast(device.type, LOW):
        assert model[0](torch.randn(3, 8, device=device)).dtype == torch.float32


# --- dtypes ---------------------------------------------------------------------------------------


_NORMS = (
    "LayerNorm",
    "RMSNorm",
    *(("LlamaRMSNorm", "T5LayerNorm", "GemmaRMSNorm") if HAS_TRANSFORMERS else ()),
)


@pytest.mark.parametrize("name", _NORMS)
@pytest.mark.parametrize(
    "stream", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_never_rounded_twice_otherwise(
    name: str, stream: torch.dtype, weight: torch.dtype, device: torch.device
) -> None:
    """Whatever the dtypes: the same numbers as by way of the norm's own dtype, also where that is another half one."""
    spec = next(s for s in MODELS if name in s.rules)
    norm = next(m for m in build(spec).modules() if type(m).__name__ == name).to(device, weight)
    fusedops.fuse_model(norm)
    linear = nn.Linear(norm.weight.shape[-1], 3, device=device)
    x = torch.randn(64, norm.weight.shape[-1], device=device).to(stream)
    results = []
    with torch.autocast(device.type, LOW):
        for low in (True, False):
            rows = normed(norm, x, linear) if low else norm(x)
            results.append(rows if rows.dtype == torch.float64 else rows.to(LOW))
    assert torch.equal(*results)


# --- gradients ------------------------------------------------------------------------------------


def _gradients(
    norm: nn.Module,
    layers: list[nn.Linear],
    x: Tensor,
    dys: list[Tensor],
    rows: Callable[[Tensor], Tensor],
) -> Any:
    x = x.detach().requires_grad_()
    with torch.autocast(x.device.type, LOW):
        y = rows(x)
        results = [layer(y) for layer in layers]
    return torch.autograd.grad(results, [x, norm.weight, norm.bias], dys)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_gradients(count: int, device: torch.device) -> None:
    """The gradients of the rows are added in the low dtype.

    Count - 1 roundings, each of a partial sum.

    So the rows' gradient differs by no more than (count - 1) u times the sum of their magnitudes
    (and u² of it, which the factor 1.1 covers), and what the norm makes of it by the magnitudes of
    its derivative times that; and by eight fp32 roundings of the same, as the norm's backward adds
    the same numbers in fp32.
    """
    norm = nn.LayerNorm(16).to(device)
    with torch.no_grad():
        norm.weight.add_(torch.randn_like(norm.weight))
    layers = [nn.Linear(16, 24, device=device) for _ in range(count)]
    x = torch.randn(40, 16, device=device)
    dys = [torch.randn(40, 24, device=device, dtype=LOW) for _ in layers]
    fusedops.fuse_model(norm)
    wide = _gradients(norm, layers, x, dys, norm)
    low = _gradients(norm, layers, x, dys, lambda x: normed(norm, x, *layers))
    each = [(dy @ layer.weight.to(LOW)).double() for dy, layer in zip(dys, layers, strict=True)]
    total = torch.stack(each).abs().sum(0)
    error = (1.1 * (count - 1) * unit_roundoff(LOW) + 8 * unit_roundoff(torch.float32) * 40) * total
    exact = nn.LayerNorm(16).to(device, torch.float64)
    exact.load_state_dict(norm.state_dict())
    jacobian = torch.stack(
        [torch.autograd.functional.jacobian(exact, row) for row in x.double()]
    ).abs()
    hat = nn.functional.layer_norm(x.double(), (16,)).abs()
    bounds = [torch.einsum("rij,ri->rj", jacobian, error), (error * hat).sum(0), error.sum(0)]
    for result, expected, bound in zip(low, wide, bounds, strict=True):
        assert result.dtype == expected.dtype == torch.float32
        assert ((result - expected).double().abs() <= bound).all()
    if count > 1:
        assert not torch.equal(low[0], wide[0])


@pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name in {*_NARROW, *_COPIES}], ids=lambda spec: spec.name
)
def test_gradients_of_models(
    spec: ModelSpec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No further from fp32's than twice what fp32 rows give.

    In the norm of all gradients together.
    """
    model, arguments = _fused(spec), inputs(spec)
    exact = run(model, arguments)[1]
    with torch.autocast(device.type, LOW):
        results = run(model, arguments)[1]
        with _wide(monkeypatch):
            wide = run(model, arguments)[1]
    error, allowed = (
        sum(float((result[name] - g).double().square().sum()) for name, g in exact.items()) ** 0.5
        for result in (results, wide)
    )
    assert 0.0 < error <= 2 * allowed


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(s, id=s.name, marks=[] if s.name == "gpt2" else pytest.mark.full)
        for s in SAMPLES
        if s.name in ("torch_pre_norm", "gpt2", "bert", "llama")
    ],
)
def test_one_graph(spec: ModelSpec, device: torch.device) -> None:
    """Under torch.compile too, with no graph break."""
    model = _fused(spec)
    arguments = {**inputs(spec), **({"use_cache": False} if spec.name in ("gpt2", "llama") else {})}
    torch._dynamo.reset()
    with torch.autocast(device.type, LOW):
        expected = outputs(model(**arguments))
        result = outputs(torch.compile(model, backend="eager", fullgraph=True)(**arguments))
    for a, b in zip(expected, result, strict=True):
        torch.testing.assert_close(
            b, a, rtol=0, atol=8 * unit_roundoff(LOW) * float(a.detach().abs().max())
        )


def test_low_dtype_needs_known_consumers(device: torch.device) -> None:
    """Without consumers, or with one that does not cast, there is no low dtype."""
    with torch.autocast(device.type, LOW):
        assert autocast.low_dtype(torch.ones(1, device=device), ()) is None
        assert (
            autocast.low_dtype(torch.ones(1, device=device), (nn.Linear(1, 1), nn.ReLU())) is None
        )
        assert autocast.low_dtype(torch.ones(1, device=device), (nn.Linear(1, 1),)) == LOW


def test_what_autocast_leaves_is_left(device: torch.device) -> None:
    """It casts no fp64."""
    linear = nn.Linear(2, 2, device=device)
    with torch.autocast(device.type, LOW):
        for dtype, expected in ((torch.float32, LOW), (LOW, LOW), (torch.float64, torch.float64)):
            assert (
                autocast.narrowed(torch.ones(1, 2, device=device, dtype=dtype), linear).dtype
                == expected
            )


def test_weights_with_ways_of_their_own_get_what_they_got() -> None:
    """A quantised weight, say, sees its rows before autocast does."""

    class Own(torch.Tensor):
        pass

    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    with torch.autocast("cpu", LOW):
        assert autocast.low_dtype(x, (layer,)) == LOW
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Own))
        assert type(layer.weight) is not nn.Parameter
        assert autocast.low_dtype(x, (layer,)) is None
