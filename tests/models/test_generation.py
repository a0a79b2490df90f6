"""`generate` of a fused model gives the same tokens.

The fused logits processor replaces that of Transformers, and T5 has a fast path for one token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops.generation import FusedNoRepeatNGramLogitsProcessor
from fusedops.models.rules import one_token
from support import DEVICE
from tolerances import unit_roundoff
from zoo import SAMPLES, build, handed_on, inputs, transformers_only

# What a model calls does not depend on the kernels, whose values the operators' own tests check.
pytestmark = pytest.mark.once

_NAMES = ("gpt2", "bart", "t5", "t5_gated", "llama")


@pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name in _NAMES], ids=lambda spec: spec.name
)
@pytest.mark.parametrize(
    "options",
    [{}, {"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 3, "num_beams": 2}],
    ids=str,
)
def test_fused_model_generates_the_same_tokens_with_the_fused_processor(
    spec: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(spec)
    arguments = {
        name: value for name, value in inputs(spec).items() if not name.startswith("decoder")
    }
    ngram_sizes: list[int] = []  # of the calls of the fused processor
    original = FusedNoRepeatNGramLogitsProcessor.__call__

    def recording(self: FusedNoRepeatNGramLogitsProcessor, *tensors: Tensor) -> Tensor:
        ngram_sizes.append(self.ngram_size)
        return original(self, *tensors)

    def generate() -> Tensor:
        tokens: Tensor = model.generate(**arguments, max_new_tokens=10, do_sample=False, **options)
        return tokens

    monkeypatch.setattr(FusedNoRepeatNGramLogitsProcessor, "__call__", recording)
    expected = generate()
    assert not ngram_sizes
    report = fusedops.fuse_model(model)
    assert "no_repeat_ngram" in report.modules[0].calls
    assert torch.equal(generate(), expected)
    if "no_repeat_ngram_size" in options:
        assert set(ngram_sizes) == {options["no_repeat_ngram_size"]}
    else:
        assert not ngram_sizes
    ngram_sizes.clear()
    fusedops.unfuse_model(model)
    assert torch.equal(generate(), expected)
    assert not ngram_sizes


@transformers_only
def test_exclude_leaves_only_the_processor_in_generate() -> None:
    spec = next(s for s in SAMPLES if s.name == "gpt2")
    report = fusedops.fuse_model(build(spec), exclude=["generation"])
    assert report.modules[0].calls.endswith("excluded, with rule generation")
    assert {m.rule for m in report} >= {"graph", "layer_norm"}


# --- T5's attention, which has a fast path for one token ------------------------------------------

_T5 = [s for s in SAMPLES if s.name in ("t5", "t5_gated")]
_LAYERS, _STEPS = 2, 12
t5 = pytest.mark.parametrize("spec", _T5, ids=lambda spec: spec.name)


def _generate(model: Any, spec: Any, **options: Any) -> Any:
    """Generate `_STEPS` tokens, and return them with their logits."""
    arguments = {
        name: value for name, value in inputs(spec).items() if not name.startswith("decoder")
    }
    torch.manual_seed(3)
    arguments |= {
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
        **options,
    }
    return model.generate(**arguments, min_new_tokens=_STEPS, max_new_tokens=_STEPS)


@contextmanager
def _fast_paths() -> Iterator[Counter[Any]]:
    """Count the calls of the fast path, by attention module."""
    fast_calls: Counter[Any] = Counter()
    original = one_token._next_token

    def counting(self: Any, *args: Any) -> Any:
        fast_calls[self] += 1
        return original(self, *args)

    with mock.patch.object(one_token, "_next_token", counting):
        yield fast_calls


def _fuse_attention_only(model: nn.Module) -> None:
    """Fuse a T5 without norms and activations, so that it computes the same bits."""
    assert fusedops.fuse_model(model, exclude=["norm", "new_gelu"])


_GENERATION_MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 2},
    "sampled": {"do_sample": True},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "attention weights": {"output_attentions": True},
}


@pytest.mark.skipif(
    DEVICE.type != "cpu", reason="on a GPU a mask's strides may decide which attention runs"
)
@pytest.mark.parametrize("mode", _GENERATION_MODES)
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, "autocast"], ids=["fp32", "bf16", "autocast"]
)
@t5
def test_t5_fast_path_has_the_same_bits(spec: Any, dtype: Any, padded: bool, mode: str) -> None:
    autocast = dtype == "autocast"
    model = build(spec, torch.float32 if autocast else dtype)
    options = _GENERATION_MODES[mode] | ({} if padded else {"attention_mask": None})
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        expected = _generate(model, spec, **options)
        _fuse_attention_only(model)
        with _fast_paths() as fast_calls:
            result = _generate(model, spec, **options)
    assert torch.equal(result.sequences, expected.sequences)
    assert all(map(torch.equal, result.logits, expected.logits))
    # A cross-attention takes the fast path after the first step, which fills its cache. A
    # self-attention takes it in all steps.
    expected_counts = [_STEPS - 1] * _LAYERS + [_STEPS] * _LAYERS
    if mode == "attention weights":  # Transformers adds hooks to the attentions
        expected_counts = []
    elif mode == "static cache":
        # The self-attention of the first layer needs the length of the cache, which is a tensor
        # after the first step.
        expected_counts = [1, _STEPS - 1, _STEPS]
    assert sorted(fast_calls.values()) == expected_counts


def _step_logits(model: Any, spec: Any) -> Tensor:
    """Return the logits of a decoder that gets the tokens of the inputs one by one."""
    arguments = inputs(spec)
    tokens, cache, logits = arguments["input_ids"], {}, []
    with torch.no_grad():
        encoded = model.encoder(input_ids=tokens, attention_mask=arguments["attention_mask"])
        for position in range(tokens.shape[1]):
            result = model(
                encoder_outputs=encoded,
                attention_mask=arguments["attention_mask"],
                use_cache=True,
                decoder_input_ids=tokens[:, position : position + 1],
                **cache,
            )
            cache = handed_on(result)
            logits.append(result.logits.double())
    return torch.cat(logits, 1)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, "autocast"], ids=str
)
@t5
def test_t5_fast_path_errors_are_at_most_twice_those_of_the_original(spec: Any, dtype: Any) -> None:
    """Errors are distances from fp64; eight roundings are allowed in addition.

    PyTorch may run any of its attentions.
    """
    exact = _step_logits(build(spec).double(), spec)
    low = torch.bfloat16 if dtype == "autocast" else dtype
    model = build(spec).to(torch.float32 if dtype == "autocast" else dtype)
    errors = []
    for fuse in (False, True):
        if fuse:
            fusedops.fuse_model(model)
        with (
            _fast_paths() as fast_calls,
            torch.autocast(DEVICE.type, torch.bfloat16, enabled=dtype == "autocast"),
        ):
            errors.append(float((_step_logits(model, spec) - exact).abs().max()))
    assert len(fast_calls) == 2 * _LAYERS
    original_error, fused_error = errors
    rounding = unit_roundoff(low) * float(exact.abs().max())
    assert fused_error <= 2 * original_error + 8 * rounding


def _with_another_linear_class(attention: Any) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    attention.v.__class__ = Doubled


def _with_a_hook(attention: Any) -> None:
    attention.o.register_forward_hook(
        lambda module, args, output: output + float(args[0].dim() == 3)
    )


def _with_a_bias(attention: Any) -> None:
    attention.o.bias = nn.Parameter(torch.ones_like(attention.o.weight[:, 0]))


def _in_training_mode(attention: Any) -> None:
    # The dropout mask would depend on the attention that PyTorch runs.
    attention.dropout = 0.0
    attention.train()
    with torch.no_grad():
        attention.o.weight.mul_(2.0)


@pytest.mark.parametrize(
    "change",
    [_with_another_linear_class, _with_a_hook, _with_a_bias, _in_training_mode],
    ids=lambda change: change.__name__,
)
@t5
def test_t5_changed_attention_does_not_take_the_fast_path(
    spec: Any, change: Callable[[Any], None]
) -> None:
    """The other attentions take it."""
    model = build(spec)
    before = _generate(model, spec)
    changed = model.decoder.block[1].layer[0].SelfAttention
    change(changed)
    expected = _generate(model, spec)
    assert not torch.allclose(expected.logits[-1], before.logits[-1])
    _fuse_attention_only(model)
    with _fast_paths() as fast_calls:
        result = _generate(model, spec)
    assert changed not in fast_calls
    assert len(fast_calls) == 2 * _LAYERS - 1
    torch.testing.assert_close(result.logits, expected.logits)


@t5
def test_t5_does_not_take_the_fast_path_if_gradients_are_recorded(spec: Any) -> None:
    model = build(spec)
    _fuse_attention_only(model)
    tokens = inputs(spec)["input_ids"]
    with torch.no_grad():
        cache = handed_on(model(input_ids=tokens, decoder_input_ids=tokens[:, :3], use_cache=True))
    with _fast_paths() as fast_calls:
        loss = model(input_ids=tokens, decoder_input_ids=tokens[:, 3:4], **cache).logits.sum()
    assert not fast_calls
    loss.backward()
    attention = model.decoder.block[0].layer[0].SelfAttention
    assert all(p.grad is not None for p in attention.parameters())


@t5
def test_t5_replicas_of_data_parallel_have_the_same_logits(spec: Any) -> None:
    """The parameters of a replica are not registered, so it does not take the fast path."""
    model = build(spec)
    arguments = {
        **inputs(spec),
        "decoder_input_ids": inputs(spec)["input_ids"][:, :1],
        "use_cache": True,
    }
    expected = model(**arguments).logits
    _fuse_attention_only(model)
    for module in [m for m in model.modules() if type(m) is nn.Linear]:
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            setattr(module, name, parameter.detach())
    with torch.no_grad():
        torch.testing.assert_close(model(**arguments).logits, expected)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@t5
def test_t5_calls_the_configured_attention_function(
    spec: Any, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It calls the function of the configured implementation, also one that a user registers."""
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    model = build(spec)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = implementation
    functions = modeling.ALL_ATTENTION_FUNCTIONS
    configured = functions.get_interface(implementation, modeling.eager_attention_forward)
    assert one_token._is_sdpa(configured) == (implementation == "sdpa")
    calls = []

    def doubled(module: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(module)
        y, weights = configured(module, *args, **kwargs)
        return 2 * y, weights

    expected = _generate(model, spec)
    _fuse_attention_only(model)
    with _fast_paths() as fast_calls:
        result = _generate(model, spec)
    assert sum(fast_calls.values()) == _LAYERS * (2 * _STEPS - 1)
    torch.testing.assert_close(result.logits, expected.logits)
    monkeypatch.setitem(functions, implementation, doubled)
    with_doubled = _generate(model, spec)
    assert len(calls) == _LAYERS + 2 * _LAYERS * _STEPS
    fusedops.unfuse_model(model)
    torch.testing.assert_close(with_doubled.logits, _generate(model, spec).logits)
    assert not torch.allclose(with_doubled.logits[-1], expected.logits[-1])


class _OperatorCounts(TorchDispatchMode):
    """Counts the calls of PyTorch's operators, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@t5
def test_t5_fast_path_calls_fewer_operators(spec: Any) -> None:
    """A step computes the mask once for all layers, and does not transpose or reshape heads."""
    model = build(spec)
    _fuse_attention_only(model)
    layers = len(model.decoder.block)
    cache = handed_on(model(**inputs(spec), use_cache=True))
    step = {**inputs(spec), "decoder_input_ids": inputs(spec)["input_ids"][:, :1], **cache}
    step["encoder_outputs"] = model.encoder(inputs(spec)["input_ids"])
    with torch.no_grad(), _OperatorCounts() as fused:
        model(**step)
    fusedops.unfuse_model(model)
    with torch.no_grad(), _OperatorCounts() as original:
        model(**step)
    saved = original.counts - fused.counts
    assert saved["where"] == layers - 1  # for the mask of the cross-attention
    # Transposes of the heads of queries and outputs in both attentions, and of new keys and values.
    # On a GPU the original's attention consists of separate operators, and has some more.
    assert saved["transpose"] >= layers * (2 * 2 + 2)
    assert saved["_unsafe_view"] >= layers * 6  # of the rows of the six linear layers


def test_t5_sum_of_mask_and_bias_is_computed_once_for_each_mask_and_dtype() -> None:
    bias = torch.randn(1, 2, 1, 5, device=DEVICE)
    setattr(bias, one_token._JOINED, (None, None, None))
    first, second = (
        torch.tensor([True] * n + [False] * (5 - n), device=DEVICE)[None, None, None]
        for n in (3, 4)
    )
    lowest = torch.finfo(torch.float32).min
    for mask in (first, second):
        masked = one_token._masked(bias, mask, torch.float32)
        assert torch.equal(masked, bias.masked_fill(~mask, lowest))
        assert one_token._masked(bias, mask, torch.float32) is masked
    assert one_token._masked(bias, mask, torch.bfloat16).min() == torch.finfo(torch.bfloat16).min
    assert torch.equal(one_token._masked(bias, bias.sin(), torch.float32), bias + bias.sin())
    # The sum is not stored for a caller's bias, because the caller may change the mask in place.
    callers_bias = bias.clone()
    masked = one_token._masked(callers_bias, first, torch.float32)
    assert torch.equal(masked, callers_bias.masked_fill(~first, lowest))
    first.fill_(True)
    assert torch.equal(one_token._masked(callers_bias, first, torch.float32), callers_bias)
