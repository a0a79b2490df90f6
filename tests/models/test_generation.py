"""`generate` of a fused model.

The same tokens, with the fused processor in the place of Transformers' own.
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
from fusedops.models.tricks import one_token
from support import DEVICE
from tolerances import unit_roundoff
from zoo import SAMPLES, build, handed_on, inputs, transformers_only

# What a model calls does not depend on the kernels, whose values the operators' own tests hold.
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
def test_the_same_tokens(
    spec: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(spec)
    arguments = {
        name: value for name, value in inputs(spec).items() if not name.startswith("decoder")
    }
    made = []
    original = FusedNoRepeatNGramLogitsProcessor.__call__
    monkeypatch.setattr(
        FusedNoRepeatNGramLogitsProcessor,
        "__call__",
        lambda self, *tensors: made.append(self.ngram_size) or original(self, *tensors),
    )
    expected = model.generate(**arguments, max_new_tokens=10, do_sample=False, **options)
    assert not made
    report = fusedops.fuse_model(model)
    assert report.modules[0].rule == "generation"
    assert torch.equal(
        model.generate(**arguments, max_new_tokens=10, do_sample=False, **options), expected
    )
    assert set(made) == set(filter(None, [options.get("no_repeat_ngram_size")]))
    made.clear()
    fusedops.unfuse_model(model)
    assert torch.equal(
        model.generate(**arguments, max_new_tokens=10, do_sample=False, **options), expected
    )
    assert not made


@transformers_only
def test_it_can_be_left_by_itself() -> None:
    spec = next(s for s in SAMPLES if s.name == "gpt2")
    report = fusedops.fuse_model(build(spec), exclude=["generation"])
    assert report.modules[0].reason == "excluded, with rule generation"
    assert {m.rule for m in report} >= {"block", "layer_norm"}


# --- T5's attention, which has a fast path for one token ------------------------------------------

_T5 = [s for s in SAMPLES if "t5_attention" in s.rules.values()]
_LAYERS, _STEPS = 2, 12
t5 = pytest.mark.parametrize("spec", _T5, ids=lambda spec: spec.name)


def _generate(model: Any, spec: Any, **options: Any) -> Any:
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
    """Counts the calls of the fast path, by attention module."""
    taken: Counter[Any] = Counter()
    original = one_token._next_token

    def counting(self: Any, *args: Any) -> Any:
        taken[self] += 1
        return original(self, *args)

    with mock.patch.object(one_token, "_next_token", counting):
        yield taken


def _fused_but_for_norms(model: nn.Module) -> None:
    """So that what remains fused computes the very same numbers."""
    assert fusedops.fuse_model(model, exclude=["norm", "t5_gated_dense", "new_gelu"])


_WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 2},
    "sampled": {"do_sample": True},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "attention weights": {"output_attentions": True},
}


@pytest.mark.skipif(
    DEVICE.type != "cpu", reason="there PyTorch may choose another attention by a mask's strides"
)
@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, "autocast"], ids=["fp32", "bf16", "autocast"]
)
@t5
def test_t5_attends_to_the_same_bits(spec: Any, dtype: Any, padded: bool, way: str) -> None:
    autocast = dtype == "autocast"
    model = build(spec, torch.float32 if autocast else dtype)
    options = _WAYS[way] | ({} if padded else {"attention_mask": None})
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        expected = _generate(model, spec, **options)
        _fused_but_for_norms(model)
        with _fast_paths() as taken:
            result = _generate(model, spec, **options)
    assert torch.equal(result.sequences, expected.sequences)
    assert all(map(torch.equal, result.logits, expected.logits))
    # The first step fills the cross-attention's cache.
    times = {
        "attention weights": [],  # there are hooks
        # The first layer needs the cache's length, which is a tensor after the first step.
        "static cache": [1, _STEPS - 1, _STEPS],
    }.get(way, [_STEPS - 1] * _LAYERS + [_STEPS] * _LAYERS)
    assert sorted(taken.values()) == times


def _steps(model: Any, spec: Any) -> Tensor:
    """The logits of one token after the other, the tokens being given."""
    arguments = inputs(spec)
    tokens, cache, logits = arguments["input_ids"], {}, []
    with torch.no_grad():
        encoded = model.encoder(input_ids=tokens, attention_mask=arguments["attention_mask"])
        for place in range(tokens.shape[1]):
            result = model(
                encoder_outputs=encoded,
                attention_mask=arguments["attention_mask"],
                use_cache=True,
                decoder_input_ids=tokens[:, place : place + 1],
                **cache,
            )
            cache = handed_on(result)
            logits.append(result.logits.double())
    return torch.cat(logits, 1)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, "autocast"], ids=str
)
@t5
def test_t5_attends_to_the_same_numbers(spec: Any, dtype: Any) -> None:
    """Whichever attention PyTorch takes.

    From fp64's no further than twice what the original is, and eight roundings.
    """
    exact = _steps(build(spec).double(), spec)
    low = torch.bfloat16 if dtype == "autocast" else dtype
    model = build(spec).to(torch.float32 if dtype == "autocast" else dtype)
    errors = []
    for fuse in (False, True):
        if fuse:
            fusedops.fuse_model(model)
        with (
            _fast_paths() as taken,
            torch.autocast(DEVICE.type, torch.bfloat16, enabled=dtype == "autocast"),
        ):
            errors.append(float((_steps(model, spec) - exact).abs().max()))
    assert len(taken) == 2 * _LAYERS
    assert errors[1] <= 2 * errors[0] + 8 * unit_roundoff(low) * float(exact.abs().max())


def _another_linear(attention: Any) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    attention.v.__class__ = Doubled


def _hooked(attention: Any) -> None:
    attention.o.register_forward_hook(
        lambda module, args, output: output + float(args[0].dim() == 3)
    )


def _biased(attention: Any) -> None:
    attention.o.bias = nn.Parameter(torch.ones_like(attention.o.weight[:, 0]))


def _training(attention: Any) -> None:
    # Nothing is dropped: which numbers are depends on the attention that PyTorch takes.
    attention.dropout = 0.0
    attention.train()
    with torch.no_grad():
        attention.o.weight.mul_(2.0)


@pytest.mark.parametrize(
    "change", [_another_linear, _hooked, _biased, _training], ids=lambda change: change.__name__
)
@t5
def test_t5_takes_no_short_way_past_anything(spec: Any, change: Callable[[Any], None]) -> None:
    """A module that is not quite as the rule knows it is called as ever, and the others do not mind."""
    model = build(spec)
    before = _generate(model, spec)
    changed = model.decoder.block[1].layer[0].SelfAttention
    change(changed)
    expected = _generate(model, spec)
    assert not torch.allclose(expected.logits[-1], before.logits[-1])
    _fused_but_for_norms(model)
    with _fast_paths() as taken:
        result = _generate(model, spec)
    assert changed not in taken
    assert len(taken) == 2 * _LAYERS - 1
    torch.testing.assert_close(result.logits, expected.logits)


@t5
def test_t5_with_gradients_takes_its_own_forward(spec: Any) -> None:
    model = build(spec)
    _fused_but_for_norms(model)
    tokens = inputs(spec)["input_ids"]
    with torch.no_grad():
        cache = handed_on(model(input_ids=tokens, decoder_input_ids=tokens[:, :3], use_cache=True))
    with _fast_paths() as taken:
        loss = model(input_ids=tokens, decoder_input_ids=tokens[:, 3:4], **cache).logits.sum()
    assert not taken
    loss.backward()
    assert all(
        p.grad is not None for p in model.decoder.block[0].layer[0].SelfAttention.parameters()
    )


@t5
def test_t5_in_replicas(spec: Any) -> None:
    """DataParallel runs copies of modules whose parameters are no longer registered.

    They go the long way.
    """
    model = build(spec)
    arguments = {
        **inputs(spec),
        "decoder_input_ids": inputs(spec)["input_ids"][:, :1],
        "use_cache": True,
    }
    expected = model(**arguments).logits
    _fused_but_for_norms(model)
    for module in [m for m in model.modules() if type(m) is nn.Linear]:
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            setattr(module, name, parameter.detach())
    with torch.no_grad():
        torch.testing.assert_close(model(**arguments).logits, expected)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@t5
def test_t5_attends_by_the_configured_function(
    spec: Any, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own kind of attention, and a function that a user registered for it."""
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    model = build(spec)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = implementation
    functions = modeling.ALL_ATTENTION_FUNCTIONS
    own = functions.get_interface(implementation, modeling.eager_attention_forward)
    assert one_token._is_sdpa(own) == (implementation == "sdpa")
    calls = []

    def doubled(module: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(module)
        y, weights = own(module, *args, **kwargs)
        return 2 * y, weights

    expected = _generate(model, spec)
    _fused_but_for_norms(model)
    with _fast_paths() as taken:
        result = _generate(model, spec)
    assert sum(taken.values()) == _LAYERS * (2 * _STEPS - 1)
    torch.testing.assert_close(result.logits, expected.logits)
    monkeypatch.setitem(functions, implementation, doubled)
    again = _generate(model, spec)
    assert len(calls) == _LAYERS + 2 * _LAYERS * _STEPS
    fusedops.unfuse_model(model)
    torch.testing.assert_close(again.logits, _generate(model, spec).logits)
    assert not torch.allclose(again.logits[-1], expected.logits[-1])


class _Calls(TorchDispatchMode):
    """Counts PyTorch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@t5
def test_t5_makes_fewer_calls(spec: Any) -> None:
    """A step makes the mask once for all layers, and transposes and folds nothing in attention."""
    model = build(spec)
    _fused_but_for_norms(model)
    layers = len(model.decoder.block)
    cache = handed_on(model(**inputs(spec), use_cache=True))
    step = {**inputs(spec), "decoder_input_ids": inputs(spec)["input_ids"][:, :1], **cache}
    step["encoder_outputs"] = model.encoder(inputs(spec)["input_ids"])
    counts = []
    for unfuse in (False, True):
        if unfuse:
            fusedops.unfuse_model(model)
        with torch.no_grad(), _Calls() as calls:
            model(**step)
        counts.append(calls.counts)
    fewer = counts[1] - counts[0]
    assert fewer["where"] == layers - 1  # the mask of the cross-attention
    # Heads of queries, outputs, new keys and values; the rows of the six linear layers.
    # On a GPU the original's attention, of separate operators, has some more.
    assert fewer["transpose"] >= layers * (2 * 2 + 2)
    assert fewer["_unsafe_view"] >= layers * 6


@pytest.mark.parametrize("gradients", [False, True])
@t5
def test_t5_lays_its_position_bias_out(spec: Any, gradients: bool) -> None:
    """PyTorch's fused attention on GPUs wants a mask whose last stride is one, in training too."""
    model = build(spec)
    fusedops.fuse_model(model)
    attention = model.encoder.block[0].layer[0].SelfAttention
    with torch.set_grad_enabled(gradients):
        result = attention.compute_bias(5, 5)
        fusedops.unfuse_model(model)
        expected = attention.compute_bias(5, 5)
    assert torch.equal(result, expected)
    assert not expected.is_contiguous()
    assert result.is_contiguous()
    short = one_token._aligned(result[..., :3])
    assert torch.equal(short, expected[..., :3])
    assert all(stride % 8 == 0 for stride in short.stride()[:-1])


def test_t5_joins_each_mask_to_its_bias() -> None:
    """Once for a mask, and again for another mask or dtype."""
    bias = torch.randn(1, 2, 1, 5, device=DEVICE)
    setattr(bias, one_token._JOINED, (None, None, None))
    first, second = (
        torch.tensor([True] * n + [False] * (5 - n), device=DEVICE)[None, None, None]
        for n in (3, 4)
    )
    lowest = torch.finfo(torch.float32).min
    for mask in (first, second):
        both = one_token._masked(bias, mask, torch.float32)
        assert torch.equal(both, bias.masked_fill(~mask, lowest))
        assert one_token._masked(bias, mask, torch.float32) is both
    assert one_token._masked(bias, mask, torch.bfloat16).min() == torch.finfo(torch.bfloat16).min
    assert torch.equal(one_token._masked(bias, bias.sin(), torch.float32), bias + bias.sin())
    # A bias that a caller gives may be used again with a mask that has changed.
    arguments = bias.clone()
    assert torch.equal(
        one_token._masked(arguments, first, torch.float32), arguments.masked_fill(~first, lowest)
    )
    first.fill_(True)
    assert torch.equal(one_token._masked(arguments, first, torch.float32), arguments)
