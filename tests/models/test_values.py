"""A fused model computes what it did.

Forward and gradients, with dropout and without, by the operators it says.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedops
from fusedops.core.launches import launch
from sample_models import MODELS, ModelSpec
from support import INTERPRETED, KERNEL_PATH
from tolerances import unit_roundoff
from zoo import HAS_TRANSFORMERS, SAMPLES, build, counted, every, inputs, outputs, run

# What a model calls does not depend on the kernels, whose values the operators' own tests hold.
pytestmark = pytest.mark.once

# How many roundings lie between two uses of parameters, which the sensitivity below counts as one:
# of T5's gated unit by tanh, the longest such stretch, eleven elementwise steps and a sum.
_ROUNDINGS = 12
_STEP = 2.0**-18


def _doubled(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double()


def _widened(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in arguments.items()
    }


def _flat(result: tuple[list[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    return {**{f"output {index}": y for index, y in enumerate(result[0])}, **result[1]}


def _distances(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {
        name: float((found[name].double() - value).abs().max()) for name, value in exact.items()
    }


def _moved(
    model: nn.Module, arguments: dict[str, Any], seed: int
) -> tuple[nn.Module, dict[str, Any]]:
    """Both with every number a little larger or smaller at random, by 2⁻¹⁸ of it or by a unit in its last place."""
    generator = torch.Generator().manual_seed(seed)

    def move(x: Tensor) -> Tensor:
        signs = torch.randint(0, 2, x.shape, generator=generator).to(x.device) * 2 - 1
        return (x.double() * (1 + max(_STEP, torch.finfo(x.dtype).eps) * signs)).to(x.dtype)

    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(move(parameter))
    return other, {
        k: move(v) if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in arguments.items()
    }


def _bounds(
    model: nn.Module, arguments: dict[str, Any], exact: dict[str, Tensor]
) -> dict[str, float]:
    """How far each result of a fused model may be from the fp64 one.

    Twice eager's error, and `_ROUNDINGS` times what one rounding of each parameter and input makes
    of the result. Eager's is the largest over moved models too: gradients that are zero but for
    rounding (that of a key's bias, say) have an error that no perturbation explains, and it differs
    from run to run.
    """
    u = unit_roundoff(next(model.parameters()).dtype if list(model.parameters()) else torch.float32)
    errors, changes = _distances(_flat(run(model, arguments)), exact), dict.fromkeys(exact, 0.0)
    for seed in range(3):
        other, values = _moved(model, arguments, seed)
        there = _flat(run(_doubled(other), _widened(values)))
        for name, error in _distances(_flat(run(other, values)), there).items():
            errors[name] = max(errors[name], error)
        for name, change in _distances(there, exact).items():
            changes[name] = max(changes[name], change / max(_STEP, 2 * u))
    return {
        name: 2 * errors[name] + _ROUNDINGS * u * changes[name] + u * float(value.abs().max())
        for name, value in exact.items()
    }


def _check(spec: ModelSpec, dtype: torch.dtype) -> None:
    model, arguments = build(spec, dtype), inputs(spec, dtype)
    exact = _flat(run(_doubled(model), _widened(arguments)))
    bounds = _bounds(model, arguments, exact)
    eager = _flat(run(model, arguments))
    assert fusedops.fuse_model(model)
    result = _flat(run(model, arguments))
    assert result.keys() == exact.keys()
    assert {name: (x.shape, x.dtype) for name, x in result.items()} == {
        n: (x.shape, x.dtype) for n, x in eager.items()
    }
    for name, error in _distances(result, exact).items():
        assert error <= bounds[name], f"{name}: off by {error:.3g}, allowed {bounds[name]:.3g}"


@pytest.mark.pairs("spec")
@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_same_values(spec: ModelSpec, dtype: torch.dtype) -> None:
    _check(spec, dtype)


@every
def test_calls_what_it_says(spec: ModelSpec) -> None:
    """Each operator as often as the spec says: no block falls back unseen."""
    model = build(spec).train()
    fusedops.fuse_model(model)
    with counted() as calls:
        model(**inputs(spec))
    assert dict(calls) == spec.calls


@every
@pytest.mark.kernels
def test_launches_a_kernel_a_call(spec: ModelSpec) -> None:
    model = build(spec).train()
    fusedops.fuse_model(model)
    with launch.record() as names, counted() as calls:
        model(**inputs(spec))
    assert len(names) == sum(calls.values())


@every
def test_every_rule_reported_was_met(spec: ModelSpec) -> None:
    report = fusedops.fuse_model(build(spec))
    results: dict[str, set[str]] = {}
    for module in report.modules:
        results.setdefault(module.type, set()).add(module.rule)
    assert {name: results.get(name) for name in spec.rules} == {
        name: {rule} for name, rule in spec.rules.items()
    }


def _drops(model: nn.Module) -> bool:
    """Whether a model drops anything in training.

    By a module, or by a number that some models have instead.
    """
    chances = [
        module.p if isinstance(module, nn.Dropout) else getattr(module, "dropout", 0)
        for module in model.modules()
    ]
    return any(isinstance(p, float) and p > 0 for p in chances)


@every
def test_seeds_rule_the_masks(spec: ModelSpec) -> None:
    """One seed, one result; another, another.

    On a CPU the masks are those that the model drew before it was fused.
    """
    model, arguments = build(spec).train(), inputs(spec)
    eager = run(model, arguments, seed=3)[0]
    fusedops.fuse_model(model)
    result, again, other = (run(model, arguments, seed=seed)[0] for seed in (3, 3, 4))
    assert all(map(torch.equal, result, again))
    assert _drops(model) == any(not torch.equal(a, b) for a, b in zip(result, other, strict=True))
    if not KERNEL_PATH:
        for a, b in zip(eager, result, strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=1e-5 * float(a.abs().max()))


class _Output(nn.Module):
    """BERT's output, with attributes of the same names in the same forward."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(64, 64)
        self.dropout = nn.Dropout(0.25)
        self.LayerNorm = nn.LayerNorm(64)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.LayerNorm(hidden_states + input_tensor)
        return hidden_states  # noqa: RET504, it must read as BERT's does


def test_dropout_drops_as_it_did(device: torch.device) -> None:
    """Means and deviations over many masks agree within five standard errors.

    A seed gives one mask; eval drops none.
    """
    draws = 400 if not INTERPRETED else 60
    module = _Output().to(device)
    x, residual = torch.randn(2, 4, 64, device=device)
    means, deviations = [], []
    for fuse in (False, True):
        if fuse:
            assert [m.rule for m in fusedops.fuse_model(module)] == ["bert_output", "layer_norm"]
        torch.manual_seed(9)
        with torch.no_grad():
            values = torch.stack([module(x, residual) for _ in range(draws)])
        assert len(values.unique(dim=0)) == draws
        torch.manual_seed(9)
        assert torch.equal(module(x, residual), values[0])
        means.append(values.mean(0))
        deviations.append(values.std(0))
    error = (deviations[0].square() + deviations[1].square()).sqrt() / draws**0.5
    assert ((means[0] - means[1]).abs() <= 5 * error).all()
    # The deviation's own standard error: normal values' is 0.71 of the mean's; heavier tails' at
    # most twice that here.
    assert ((deviations[0] - deviations[1]).abs() <= 5 * 1.5 * error).all()
    module.eval()
    state = torch.get_rng_state()
    assert torch.equal(module(x, residual), module(x, residual))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "spec",
    [s for s in SAMPLES if s.name in ("gpt2", "bert", "t5", "t5_gated", "llama")],
    ids=lambda spec: spec.name,
)
def test_autocast(spec: ModelSpec, device: torch.device) -> None:
    """In training, with no dropout.

    The dtypes that eager has, and no further from the fp32 results than twice eager.

    Or 8 roundings more, where eager happens to be lucky.
    """
    model, arguments = build(spec).train(), inputs(spec)
    _no_dropout(model)
    exact = _flat(run(model, arguments))
    results = []
    for fuse in (False, True):
        if fuse:
            fusedops.fuse_model(model)
        with torch.autocast(device.type, torch.bfloat16):
            results.append(_flat(run(model, arguments)))
    eager, found = results
    assert {name: x.dtype for name, x in found.items()} == {
        name: x.dtype for name, x in eager.items()
    }
    errors, eagers = (
        _distances(result, {k: v.double() for k, v in exact.items()}) for result in (found, eager)
    )
    for name in (name for name in exact if name.startswith("output")):
        slack = 8 * unit_roundoff(torch.bfloat16) * float(exact[name].abs().max())
        assert errors[name] <= 2 * eagers[name] + slack, (name, errors[name], eagers[name])


def _no_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):  # T5's attention
            module.dropout = 0.0


@pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name in ("gpt2", "bert", "t5")], ids=lambda spec: spec.name
)
def test_checkpointed(spec: ModelSpec) -> None:
    """Recomputed activations: the same gradients, dropout included (with another mask they differ throughout).

    T5 without its cache, which checkpointing turns off, multiplies other matrices: the same but for
    fp32's roundings.
    """
    model, arguments = build(spec).train(), inputs(spec)
    fusedops.fuse_model(model)
    expected = run(model, arguments, seed=3)[1]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    result = run(model, arguments, seed=3)[1]
    for name, gradient in expected.items():
        torch.testing.assert_close(
            result[name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()), msg=name
        )


@pytest.mark.parametrize(
    "name, layer, part, factor, size",
    [
        ("t5_gated", "T5Block", "layer.0.SelfAttention.o", 2e3, 6e4),
        ("bart", "BartEncoderLayer", "final_layer_norm", 3e4, 1.0),
        ("mbart", "MBartEncoderLayer", "fc2", 2e3, 6e4),
    ][: 3 * HAS_TRANSFORMERS],
)
def test_infinities_of_fp16_are_clamped(
    name: str, layer: str, part: str, factor: float, size: float, device: torch.device
) -> None:
    """T5's blocks, and BART's and MBart's encoder layers clamp fp16's infinities.

    So do the fused ones.
    """
    spec = next(s for s in MODELS if s.name == name)
    module = next(m for m in build(spec, torch.float16).modules() if type(m).__name__ == layer)
    x = (torch.randn(2, 5, 32, device=device).sign() * size).half()
    results = []
    with torch.no_grad():
        module.get_submodule(part).weight.mul_(factor)
        for fuse in (False, True):
            if fuse:
                assert any(line.name == "" for line in fusedops.fuse_model(module))
            results.append(outputs(module(x, attention_mask=None))[0])
    assert torch.isfinite(results[0]).all()
    assert (results[0].abs() >= 64504).any()
    assert results[0].unique().numel() > 10
    bound = 16 * torch.finfo(torch.float16).eps * 65504
    torch.testing.assert_close(results[1].float(), results[0].float(), rtol=0, atol=bound)


_ROUNDED = ("LlamaRMSNorm", "Olmo2RMSNorm", "T5LayerNorm", "GemmaRMSNorm")


@pytest.mark.parametrize("name", _ROUNDED if HAS_TRANSFORMERS else [])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
    ids=lambda dtypes: "-".join(str(d).removeprefix("torch.") for d in dtypes),
)
def test_norms_round_where_transformers_does(
    name: str, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device
) -> None:
    """The same dtype, and the same bits but for a few, where the statistics' last bit tips a rounding."""
    model = build(next(s for s in MODELS if name in s.rules))
    norm = next(m for m in model.modules() if type(m).__name__ == name).to(dtypes[1])
    x = torch.randn(256, norm.weight.shape[0], device=device).to(dtypes[0])
    eager = norm(x)
    (line,) = fusedops.fuse_model(norm)
    assert line.rule == "norm"
    result = norm(x)
    assert result.dtype == eager.dtype
    if eager.dtype == torch.float32:
        torch.testing.assert_close(result, eager)
    else:
        assert float((result != eager).float().mean()) < 2e-3


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fast_path_is_taken_as_before(
    norm_first: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In evaluation with no gradient, on a padded batch too.

    Not where a gradient is asked for, nor in training.
    """
    taken = []
    original = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *args: taken.append(1) or original(*args)
    )
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=norm_first).to(
        device
    )
    x, padding = (
        torch.randn(2, 5, 16, device=device),
        torch.zeros(2, 5, dtype=torch.bool, device=device),
    )
    padding[1, 3:] = True
    counts, results, fused = [], [], []
    for fuse in (False, True):
        if fuse:
            fusedops.fuse_model(layer)
        for training, grad in ((False, False), (False, True), (True, False)):
            layer.train(training)
            with torch.set_grad_enabled(grad), counted() as calls:
                results.append((layer(x), layer(x, src_key_padding_mask=padding)[0]))
            counts.append(len(taken))
            fused.append(calls["bias_dropout_add_ln"] > 0)
            taken.clear()
    assert counts == [2, 0, 0, 2, 0, 0]
    assert fused == [False, False, False, False, True, True]
    for before, after in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(after, before)


def test_a_frozen_attention_in_evaluation(device: torch.device) -> None:
    """PyTorch's attention then takes a fast path of its own, which needs its last bias."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True).to(device).eval()
    layer.self_attn.requires_grad_(False)
    x = torch.randn(2, 5, 16, device=device)
    before = layer(x)
    fusedops.fuse_model(layer)
    torch.testing.assert_close(layer(x), before)


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_narrow_stream_stays_narrow(norm_first: bool, device: torch.device) -> None:
    """Under autocast, with a residual stream in bf16.

    The fp32 bias that the block takes over does not widen it.
    """
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=norm_first).to(
        device
    )
    x = torch.randn(2, 5, 16, device=device, dtype=torch.bfloat16)
    seen = []
    with torch.autocast(device.type, torch.bfloat16):
        for fuse in (False, True):
            if fuse:
                fusedops.fuse_model(layer)
            seen.append(layer(x))
    assert seen[0].dtype == seen[1].dtype
    torch.testing.assert_close(
        seen[1], seen[0], rtol=0, atol=8 * 2.0**-8 * float(seen[0].detach().float().abs().max())
    )


# Their models look at tokens, which have no values there.
_LOOKS = ("bart", "mbart", "marian")


@pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name not in _LOOKS], ids=lambda spec: spec.name
)
def test_on_the_meta_device(spec: ModelSpec) -> None:
    """Shapes without values, as for an estimate of a model's size.

    The fused model gives those of the original.
    """
    model = build(spec).to("meta")
    # Transformers looks into masks.
    arguments = {
        k: v.to("meta")
        for k, v in inputs(spec).items()
        if isinstance(v, Tensor) and "mask" not in k
    }
    try:
        model(**arguments)
    except RuntimeError:
        # Without a mask the model makes its own. With eager attention no code reads its values.
        model.set_attn_implementation("eager")
    expected = [t.shape for t in outputs(model(**arguments))]
    assert fusedops.fuse_model(model)
    assert [t.shape for t in outputs(model(**arguments))] == expected
