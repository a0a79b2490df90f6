"""Fused models under autocast: rows that only linear layers consume have autocast's dtype.

The linear layers then get the same numbers as before, each cast once.
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

# What a model calls does not depend on the kernels, whose values the operators' own tests check.
pytestmark = pytest.mark.once

LOW = torch.bfloat16
# For each pre-norm model, the number of norms that return autocast's dtype: those of a layer times
# the layers, of the encoder and of the decoder.
_LOW_NORMS = {
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
    "spec", [s for s in SAMPLES if s.name in _LOW_NORMS], ids=lambda spec: spec.name
)
# For each post-norm model, the number of norms that return fp32 for the residual stream and a
# low-precision copy for linear layers.
_COPIES = {
    **dict.fromkeys(("bert", "roberta", "electra", "distilbert"), 2),
    "opt_post_norm": 0,  # it reshapes the rows between the norm and the linear layer
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
    """Return a fused model in training mode without dropout: PyTorch's fast paths do not run."""
    model = undropped(spec)
    assert fusedops.fuse_model(model)
    return model


@contextmanager
def _without_low_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make norms return fp32, so that each linear layer casts its input, as in unfused modules."""
    with monkeypatch.context() as patch:
        for module in ("autocast", "parts"):
            patch.setattr(f"fusedops.models.{module}.low_dtype", lambda x, modules: None)
        yield


@contextmanager
def _low_norms(option: str = "out_dtype") -> Iterator[list[torch.dtype | None]]:
    """Record the values of an option in calls of norms.

    Args:
        option: "out_dtype", of the output, or "cast_dtype", of its low-precision copy.
    """
    dtypes: list[torch.dtype | None] = []

    def record(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name.endswith(("norm", "ln")):
            dtypes.append(kwargs.get(option))

    with observed(record):
        yield dtypes


def _low_count(dtypes: list[Any]) -> int:
    return sum(dtype == LOW for dtype in dtypes)


@pre_norm
def test_low_rows_give_the_bits_of_fp32_rows_that_linear_layers_cast(
    spec: ModelSpec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds in training and in evaluation mode."""
    model, arguments = _fused(spec), inputs(spec)
    for training in (True, False):
        model.train(training)
        with torch.autocast(device.type, LOW):
            result = outputs(model(**arguments))
            with _without_low_rows(monkeypatch), _low_norms() as dtypes:
                expected = outputs(model(**arguments))
        assert not _low_count(dtypes)
        assert [y.dtype for y in result] == [y.dtype for y in expected]
        assert all(map(torch.equal, result, expected))


@pre_norm
def test_norms_of_blocks_return_low_rows_under_autocast(
    spec: ModelSpec, device: torch.device
) -> None:
    """These are the norms before attention and before the feed-forward part.

    The last norm of a model, and all norms without autocast, return fp32.
    """
    model, arguments = _fused(spec), inputs(spec)
    with _low_norms() as dtypes:
        model(**arguments)
    assert not _low_count(dtypes)
    with torch.autocast(device.type, LOW), _low_norms() as dtypes:
        model(**arguments)
    assert _low_count(dtypes) == _LOW_NORMS[spec.name]
    with torch.autocast(device.type, LOW, enabled=False), _low_norms() as dtypes:
        model(**arguments)
    assert not _low_count(dtypes)


def _row_casts(model: nn.Module, arguments: dict[str, Any], device: torch.device) -> int:
    """Return how often rows are cast to the low dtype in one forward."""
    with torch.autocast(device.type, LOW), torch.profiler.profile(record_shapes=True) as profile:
        model(**arguments)
    rows = arguments["input_ids"].numel()
    shapes = [e.input_shapes[0] for e in profile.events() if e.name == "aten::_to_copy"]
    return sum(len(shape) > 1 and math.prod(shape[:-1]) == rows for shape in shapes)


@cast_once
def test_rows_of_an_attention_are_cast_once(
    spec: ModelSpec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the rows stay fp32 for the residual, one cast serves query, key and value.

    This saves two casts for each self-attention. A cross-attention, whose key and value are one
    product, casts the encoder's rows once.
    """
    model, arguments = _fused(spec), inputs(spec)
    casts = _row_casts(model, arguments, device)
    with unpacked(), torch.autocast(device.type, LOW):
        result = outputs(model(**arguments))
    with _without_low_rows(monkeypatch), unpacked():
        casts_before = _row_casts(model, arguments, device)
        with torch.autocast(device.type, LOW):
            assert all(map(torch.equal, result, outputs(model(**arguments))))
    modules = dict(model.named_modules())
    self_attentions = sum(
        "SelfAttention" in type(m).__name__ or name.endswith("self_attn")
        for name, m in modules.items()
    )
    cross_attentions = sum(name.endswith("encoder_attn") for name in modules)
    assert self_attentions >= 2
    # With kernels, a norm's kernel writes the low-precision copy, and no cast is needed.
    copies = _COPIES[spec.name] if KERNEL_PATH else 0
    assert casts_before - casts == 2 * self_attentions + cross_attentions + copies


@post_norm
def test_norms_within_a_post_norm_block_also_return_a_low_precision_copy(
    spec: ModelSpec, device: torch.device
) -> None:
    """Linear layers of the block consume the copy.

    The residual stream and the output of the block stay fp32.
    """
    model, arguments = _fused(spec), inputs(spec)
    for enabled in (True, False):
        with torch.autocast(device.type, LOW, enabled=enabled), _low_norms("cast_dtype") as dtypes:
            model(**arguments)
        assert _low_count(dtypes) == (_COPIES[spec.name] if enabled else 0)


# --- modules with hooks ---------------------------------------------------------------------------


def _input_dtypes(module: nn.Module) -> list[torch.dtype]:
    """Record the dtypes of a module's first argument in later calls, by a hook."""
    dtypes: list[torch.dtype] = []
    module.register_forward_pre_hook(lambda module, args: dtypes.append(args[0].dtype))
    return dtypes


def _last(model: nn.Module, name: str) -> nn.Module:
    """Return the last module of a model with this name."""
    return next(
        module
        for path, module in reversed(list(model.named_modules()))
        if path.split(".")[-1] == name
    )


# For each model, a consumer of the first norm's output in a layer, and one of the second norm's. A
# consumer is a linear layer, or a module that contains it.
_PRE_NORM_CONSUMERS = {
    "gpt2": ("c_attn", "mlp"),
    "t5": ("q", "wi"),
    "t5_gated": ("SelfAttention", "wi_1"),
    "vit": ("k_proj", "fc1"),
    "llama": ("v_proj", "up_proj"),
    "torch_pre_norm": ("self_attn", "linear1"),
}
_HOOKED = [(s, name) for s in SAMPLES for name in _PRE_NORM_CONSUMERS.get(s.name, ())]


@pytest.mark.parametrize("spec, name", _HOOKED, ids=lambda value: getattr(value, "name", value))
def test_hooked_consumer_gets_fp32(spec: ModelSpec, name: str, device: torch.device) -> None:
    """If a consumer of its output has a hook, a norm returns fp32. Other norms do not change."""
    model, arguments = _fused(spec), inputs(spec)
    consumer = _last(model, name)
    if name == "SelfAttention":  # T5 may pass the rows by keyword, which a pre-hook does not get
        dtypes: list[torch.dtype] = []
        consumer.register_forward_hook(lambda module, args, output: dtypes.append(args[0].dtype))
    else:
        dtypes = _input_dtypes(consumer)
    with torch.autocast(device.type, LOW), _low_norms() as norm_dtypes:
        model(**arguments)
    assert dtypes == [torch.float32]
    assert _low_count(norm_dtypes) == _LOW_NORMS[spec.name] - 1


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
    """The norm then returns one tensor, so that a hook on it gets the whole gradient."""
    model, arguments = _fused(spec), inputs(spec)
    hooked = model.get_submodule(f"bert.encoder.layer.1.{path}")
    tensors: list[Tensor] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        """Record the output of the block's first norm, where the module gets or returns it."""
        if path.startswith("intermediate"):
            rows = args[0]
        elif path == "output":
            rows = args[1]  # the residual
        else:
            rows = output[0] if isinstance(output, tuple) else output
        rows.retain_grad()
        tensors.append(rows)

    hooked.register_forward_hook(record)
    gradients = []
    for low in (True, False):
        tensors.clear()
        with torch.autocast(device.type, LOW, enabled=low), _low_norms("cast_dtype") as dtypes:
            total = sum(y.float().square().sum() for y in outputs(model(**arguments)))
        assert _low_count(dtypes) == (_COPIES["bert"] - 1 if low else 0)
        assert tensors[0].dtype == torch.float32
        total.backward()
        gradients.append(tensors[0].grad)
    under_autocast, in_fp32 = gradients
    # Without the gradient from the feed-forward part, a fifth would be missing.
    assert (under_autocast - in_fp32).norm() < 0.05 * in_fp32.norm()


_POST_NORM_CONSUMERS = {
    "opt_post_norm": "model.decoder.layers.1.fc1",
    "bart": "model.decoder.layers.1.fc1",
    "distilbert": "distilbert.transformer.layer.1.ffn.lin1",
    "torch_post_norm": "transformer.decoder.layers.1.linear1",
}
consumers = pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name in _POST_NORM_CONSUMERS], ids=lambda spec: spec.name
)


@consumers
def test_input_of_a_hooked_consumer_has_the_residuals_gradient_too(
    spec: ModelSpec, device: torch.device
) -> None:
    """A linear layer with hooks gets the residual itself, as in the original, not a view of it."""
    model, arguments = build(spec), inputs(spec)
    tensors: list[Tensor] = []
    model.get_submodule(_POST_NORM_CONSUMERS[spec.name]).register_forward_pre_hook(
        lambda module, args: tensors.append(args[0])
    )
    gradients = []
    for fuse in (False, True):
        if fuse:
            assert fusedops.fuse_model(model)
        tensors.clear()
        total = sum(y.square().sum() for y in outputs(model(**arguments)))
        gradients += torch.autograd.grad(total, tensors)
    original, fused = gradients
    torch.testing.assert_close(fused, original, rtol=1e-3, atol=1e-3 * float(original.abs().max()))


class _Adapter(nn.Linear):
    """A linear layer of another class, which records the dtype of its input."""

    input_dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:
        self.input_dtype = input.dtype
        return super().forward(input)


@pytest.mark.parametrize("name", ["q_proj", "gate_proj"] if HAS_TRANSFORMERS else [])
def test_adapter_gets_fp32(name: str, device: torch.device) -> None:
    spec = next(s for s in MODELS if s.name == "llama")
    model = _fused(spec)
    layer = _last(model, name)
    layer.__class__ = _Adapter
    with torch.autocast(device.type, LOW):
        model(**inputs(spec))
    assert layer.input_dtype == torch.float32


def test_norm_outside_a_block_returns_fp32(device: torch.device) -> None:
    """The consumers of its output are not known."""
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
def test_low_rows_equal_the_norms_own_output_cast_to_the_low_dtype(
    name: str, stream: torch.dtype, weight: torch.dtype, device: torch.device
) -> None:
    """This holds for all dtypes, also if the norm's own dtype is another half dtype."""
    spec = next(s for s in MODELS if name in s.rules)
    norm = next(m for m in build(spec).modules() if type(m).__name__ == name).to(device, weight)
    fusedops.fuse_model(norm)
    linear = nn.Linear(norm.weight.shape[-1], 3, device=device)
    x = torch.randn(64, norm.weight.shape[-1], device=device).to(stream)
    with torch.autocast(device.type, LOW):
        results = [normed(norm, x, linear), norm(x)]
    # Autocast does not cast fp64.
    results = [rows if rows.dtype == torch.float64 else rows.to(LOW) for rows in results]
    assert torch.equal(*results)


# --- gradients ------------------------------------------------------------------------------------


def _gradients(
    norm: nn.Module,
    layers: list[nn.Linear],
    x: Tensor,
    dys: list[Tensor],
    normalise: Callable[[Tensor], Tensor],
) -> Any:
    """Return the gradients of x and of the norm's parameters, through a norm and linear layers."""
    x = x.detach().requires_grad_()
    with torch.autocast(x.device.type, LOW):
        y = normalise(x)
        results = [layer(y) for layer in layers]
    return torch.autograd.grad(results, [x, norm.weight, norm.bias], dys)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_gradients_of_low_rows_are_within_the_bound_of_their_roundings(
    count: int, device: torch.device
) -> None:
    """The gradients of the rows from several layers are added in the low dtype.

    This takes count - 1 roundings of partial sums. So the gradient of the rows has an error of at
    most (count - 1) u times the sum of the terms' magnitudes, where u is the unit roundoff. (The
    factor 1.1 covers terms in u².) The gradient of x has an error of at most this error times the
    magnitudes of the norm's derivative. The norm's backward adds up the same numbers in fp32, for
    which eight roundings in fp32 are added.
    """
    norm = nn.LayerNorm(16).to(device)
    with torch.no_grad():
        norm.weight.add_(torch.randn_like(norm.weight))
    layers = [nn.Linear(16, 24, device=device) for _ in range(count)]
    x = torch.randn(40, 16, device=device)
    dys = [torch.randn(40, 24, device=device, dtype=LOW) for _ in layers]
    fusedops.fuse_model(norm)
    expected_gradients = _gradients(norm, layers, x, dys, norm)
    gradients = _gradients(norm, layers, x, dys, lambda x: normed(norm, x, *layers))
    terms = [(dy @ layer.weight.to(LOW)).double() for dy, layer in zip(dys, layers, strict=True)]
    magnitude = torch.stack(terms).abs().sum(0)
    low_error = 1.1 * (count - 1) * unit_roundoff(LOW)
    fp32_error = 8 * unit_roundoff(torch.float32) * 40
    error = (low_error + fp32_error) * magnitude  # of the gradient of the norm's output
    exact = nn.LayerNorm(16).to(device, torch.float64)
    exact.load_state_dict(norm.state_dict())
    jacobian = torch.stack(
        [torch.autograd.functional.jacobian(exact, row) for row in x.double()]
    ).abs()
    z_hat = nn.functional.layer_norm(x.double(), (16,)).abs()
    x_bound = torch.einsum("rij,ri->rj", jacobian, error)
    bounds = [x_bound, (error * z_hat).sum(0), error.sum(0)]
    for result, expected, bound in zip(gradients, expected_gradients, bounds, strict=True):
        assert result.dtype == expected.dtype == torch.float32
        assert ((result - expected).double().abs() <= bound).all()
    if count > 1:
        assert not torch.equal(gradients[0], expected_gradients[0])


@pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name in {*_LOW_NORMS, *_COPIES}], ids=lambda spec: spec.name
)
def test_gradients_of_models_are_at_most_twice_as_wrong_as_with_fp32_rows(
    spec: ModelSpec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is the norm of the difference of all gradients from those in fp32."""
    model, arguments = _fused(spec), inputs(spec)
    _, exact = run(model, arguments)
    with torch.autocast(device.type, LOW):
        _, with_low_rows = run(model, arguments)
        with _without_low_rows(monkeypatch):
            _, with_fp32_rows = run(model, arguments)

    def error(gradients: dict[str, Tensor]) -> float:
        squares = [(gradients[name] - g).double().square().sum() for name, g in exact.items()]
        return float(sum(squares)) ** 0.5

    assert 0.0 < error(with_low_rows) <= 2 * error(with_fp32_rows)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(s, id=s.name, marks=[] if s.name == "gpt2" else pytest.mark.full)
        for s in SAMPLES
        if s.name in ("torch_pre_norm", "gpt2", "bert", "llama")
    ],
)
def test_compiled_model_under_autocast_is_one_graph(spec: ModelSpec, device: torch.device) -> None:
    model = _fused(spec)
    arguments = inputs(spec)
    if spec.name in ("gpt2", "llama"):
        arguments["use_cache"] = False
    torch._dynamo.reset()
    with torch.autocast(device.type, LOW):
        expected = outputs(model(**arguments))
        result = outputs(torch.compile(model, backend="eager", fullgraph=True)(**arguments))
    for eager, compiled in zip(expected, result, strict=True):
        atol = 8 * unit_roundoff(LOW) * float(eager.detach().abs().max())
        torch.testing.assert_close(compiled, eager, rtol=0, atol=atol)


def test_low_dtype_requires_that_all_consumers_are_linear_layers(device: torch.device) -> None:
    """Without consumers, or with one that does not cast, there is no low dtype."""
    x = torch.ones(1, device=device)
    with torch.autocast(device.type, LOW):
        assert autocast.low_dtype(x, ()) is None
        assert autocast.low_dtype(x, (nn.Linear(1, 1), nn.ReLU())) is None
        assert autocast.low_dtype(x, (nn.Linear(1, 1),)) == LOW


def test_rows_in_fp64_are_not_narrowed(device: torch.device) -> None:
    """Autocast does not cast fp64 either."""
    linear = nn.Linear(2, 2, device=device)
    with torch.autocast(device.type, LOW):
        for dtype, expected in ((torch.float32, LOW), (LOW, LOW), (torch.float64, torch.float64)):
            x = torch.ones(1, 2, device=device, dtype=dtype)
            assert autocast.narrowed(x, linear).dtype == expected


def test_consumer_with_a_tensor_subclass_as_weight_has_no_low_dtype() -> None:
    """A quantised weight, for example, handles its input before autocast casts it."""

    class Own(torch.Tensor):
        pass

    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    with torch.autocast("cpu", LOW):
        assert autocast.low_dtype(x, (layer,)) == LOW
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Own))
        assert type(layer.weight) is not nn.Parameter
        assert autocast.low_dtype(x, (layer,)) is None
