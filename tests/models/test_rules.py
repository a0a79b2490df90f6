"""Which classes the rules know: all that they were written for, and no look-alike."""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.metadata
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedops
from fusedops.models.fingerprint import canonical, fingerprint
from fusedops.models.rule import Family, Rule
from fusedops.models.rules import RULES
from fusedops.models.tricks.packing import _PACKABLE
from sample_models import MODELS, ModelSpec
from support import KERNEL_PATH
from zoo import (
    HAS_TRANSFORMERS,
    SAMPLES,
    build,
    every,
    inputs,
    observed,
    outputs,
    transformers_only,
    undropped,
)

pytestmark = pytest.mark.once

# Classes known by themselves, by their code or as norms, by the module of Transformers that has
# them. What is known by what its forward does with its children (blocks, MLPs, attentions) is
# looked for in models.
_CLASSES = {
    "activations": {
        "GELUActivation": "gelu_activation",
        "NewGELUActivation": "new_gelu",
        "FastGELUActivation": "new_gelu",
        "QuickGELUActivation": "quick_gelu",
        "AccurateGELUActivation": "accurate_gelu",
        "GELUTanh": "gelu_tanh",
        "PytorchGELUTanh": "gelu_tanh",
        "ReLUSquaredActivation": "relu_squared",
    },
    "models.bert.modeling_bert": {
        "BertSelfOutput": "bert_output",
        "BertOutput": "bert_output",
        "BertIntermediate": "dense_act",
        "BertSelfAttention": "bert_self_attention",
        "BertAttention": "bert_attention",
        "BertLayer": "bert_layer",
    },
    "models.roberta.modeling_roberta": {
        "RobertaSelfOutput": "bert_output",
        "RobertaOutput": "bert_output",
        "RobertaIntermediate": "dense_act",
        "RobertaSelfAttention": "bert_self_attention",
        "RobertaAttention": "bert_attention",
        "RobertaLayer": "bert_layer",
    },
    "models.electra.modeling_electra": {
        "ElectraSelfOutput": "bert_output",
        "ElectraOutput": "bert_output",
        "ElectraIntermediate": "dense_act",
        "ElectraSelfAttention": "bert_self_attention",
        "ElectraAttention": "bert_attention",
        "ElectraLayer": "bert_layer",
    },
    "models.distilbert.modeling_distilbert": {"FFN": "distilbert_ffn"},
    "models.t5.modeling_t5": {
        "T5LayerNorm": "norm",
        "T5Block": "t5_block",
        "T5LayerFF": "t5_feed_forward",
        "T5LayerSelfAttention": "t5_self_attention",
        "T5LayerCrossAttention": "t5_cross_attention",
        "T5DenseActDense": "t5_dense",
        "T5DenseGatedActDense": "t5_gated_dense",
        "T5Attention": "t5_attention",
    },
    "models.llama.modeling_llama": {"LlamaRMSNorm": "norm"},
    "models.mistral.modeling_mistral": {"MistralRMSNorm": "norm"},
    "models.qwen2.modeling_qwen2": {"Qwen2RMSNorm": "norm"},
    "models.qwen3.modeling_qwen3": {"Qwen3RMSNorm": "norm"},
    "models.gemma.modeling_gemma": {"GemmaRMSNorm": "norm"},
    "models.gemma2.modeling_gemma2": {"Gemma2RMSNorm": "norm"},
    "models.gemma3.modeling_gemma3": {"Gemma3RMSNorm": "norm"},
    "models.olmo2.modeling_olmo2": {"Olmo2RMSNorm": "norm"},
    "models.phi3.modeling_phi3": {"Phi3RMSNorm": "norm"},
}
# What models have besides that a rule could be about, and why there is none.
_LEFT = {
    "BertCrossAttention",
    "RobertaCrossAttention",
    "ElectraCrossAttention",  # attention alone
    "ClippedGELUActivation",
}
_BLOCKS = re.compile(
    r"(Norm|MLP|FFN|Attention|Output|Intermediate|Layer|LayerFF|Block|Dense|GELU\w*)$"
)
# A class may be absent from a release; then there is nothing to leave.
_NAMED = [
    (module, name, rule)
    for module, names in _CLASSES.items()
    for name, rule in names.items()
    if HAS_TRANSFORMERS
]
named = pytest.mark.parametrize("module, name, rule", _NAMED, ids=str)


def _release() -> tuple[int, ...]:
    version = importlib.metadata.version("transformers") if HAS_TRANSFORMERS else "0.0"
    return tuple(map(int, version.split(".")[:2]))


def _known_by(cls: type) -> list[str]:
    results = [rule.name for rule in RULES if isinstance(rule, Rule) and rule.knows(cls)]
    return results or [
        rule.name
        for rule in map(_norm, [cls] if cls.__name__.endswith("Norm") else [])
        if rule is not None
    ]


def _norm(cls: type) -> Rule | None:
    return next(rule for rule in RULES if rule.name == "norm")(cls(16))


@named
def test_the_installed_transformers_is_known(module: str, name: str, rule: str) -> None:
    """No class that a rule is meant for is left.

    Neither untouched in silence, nor taken by two rules.
    """
    cls = getattr(importlib.import_module(f"transformers.{module}"), name, None)
    if cls is not None and _release() >= (5, 12):
        assert _known_by(cls) == [rule]


@named
@pytest.mark.parametrize("as_it_is", [True, False], ids=["", "reads differently"])
def test_none_is_left_in_silence(
    module: str, name: str, rule: str, as_it_is: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaced, or the report names the rule that one would expect.

    So also in a release where it reads differently.
    """
    if not as_it_is:
        monkeypatch.setattr("fusedops.models.rule.fingerprint", lambda cls, methods: "another")
    cls = getattr(importlib.import_module(f"transformers.{module}"), name, None)
    if cls is None:
        return
    bare = cls.__new__(cls)
    nn.Module.__init__(bare)
    (line,) = fusedops.fuse_model(bare, dry_run=True).modules
    expected = {f"its forward is not the one that rule {rule} knows"}
    if as_it_is:
        # Nothing was put in it.
        expected |= {
            "",
            "its act is not a GELU",
            "its weight is no vector",
            "its activation is none of the operators'",
            "none of the norms behind its branches is fused",
            "not all of its layers are fused",
            "its attention does not leave its last sum and norm to it",
        }
    if rule == "norm":
        assert re.fullmatch(r"it has no (variance_epsilon|eps|weight)", line.reason)
        return
    assert line.reason in expected
    assert line.rule in ("", rule)


# The modules of Transformers whose classes are all in the table.
_WHOLE = (
    "activations",
    *(f"models.{name}.modeling_{name}" for name in ("bert", "roberta", "electra", "t5")),
)


@pytest.mark.parametrize("module", _WHOLE if HAS_TRANSFORMERS else [])
def test_no_class_was_overlooked(module: str) -> None:
    """All classes of these models that a rule could be about are named above, with their rule or among those left."""
    result = importlib.import_module(f"transformers.{module}")
    classes = [
        cls for cls in vars(result).values() if isinstance(cls, type) and issubclass(cls, nn.Module)
    ]
    named = {
        cls.__name__
        for cls in classes
        if cls.__module__ == result.__name__ and _BLOCKS.search(cls.__name__)
    }
    assert named
    assert named <= set(_CLASSES[module]) | _LEFT


# Blocks and attentions in the samples that are left.
_LEFT_IN_MODELS = {
    "bert_decoder": {"BertCrossAttention"},  # attention alone
    "gptj": {"GPTJAttention"},  # whose output waits for the MLP beside it
    "olmo2": {"Olmo2DecoderLayer", "Olmo2Attention"},  # norms before the sums
}


@pytest.mark.pairs("spec")
@every
def test_no_module_was_overlooked(spec: ModelSpec) -> None:
    """In a model: all modules that a rule could be about are replaced, or their classes are named above."""
    report = fusedops.fuse_model(build(spec))
    left = {line.type for line in report.left if _BLOCKS.search(line.type)}
    assert left == _LEFT_IN_MODELS.get(spec.name, set())
    assert {line.reason for line in report.left if line.type in left} <= {"no rule"}


@pytest.mark.parametrize("name", ["Gemma2", "Gemma3"] if HAS_TRANSFORMERS else [])
def test_modules_of_models_without_a_sample(name: str) -> None:
    module: Any = importlib.import_module(
        f"transformers.models.{name.lower()}.modeling_{name.lower()}"
    )
    config = getattr(module, f"{name}{'Text' * (name == 'Gemma3')}Config")(
        hidden_size=8, intermediate_size=16
    )
    (line, *_) = fusedops.fuse_model(getattr(module, f"{name}MLP")(config)).modules
    assert (line.rule, line.calls) == ("mlp", "gated_act")


@pytest.mark.parametrize(
    "name",
    sorted(
        {
            name
            for spec in SAMPLES
            for name, rule in spec.rules.items()
            if rule in ("block", "mlp", "attention")
        }
    ),
)
def test_no_structure_is_known_by_its_class_alone(name: str) -> None:
    """An instance with nothing in it is none of these."""
    cls = next(
        type(m)
        for spec in SAMPLES
        if name in spec.rules
        for m in build(spec).modules()
        if type(m).__name__ == name
    )
    bare = cls.__new__(cls)
    nn.Module.__init__(bare)
    assert [line.reason for line in fusedops.fuse_model(bare).modules] == ["no rule"]


@pytest.mark.parametrize(
    "cls, rule",
    [
        (nn.LayerNorm, "layer_norm"),
        (nn.RMSNorm, "rms_norm"),
        (nn.GELU, "gelu"),
        (nn.MultiheadAttention, "multihead_attention"),
        (nn.TransformerEncoderLayer, "encoder_layer"),
        (nn.TransformerDecoderLayer, "decoder_layer"),
    ],
)
def test_torch_nn_is_known(cls: type, rule: str) -> None:
    assert _known_by(cls) == [rule]


def test_every_rule_has_a_model() -> None:
    """Whoever adds a rule adds a sample that it fuses."""
    names = {
        name
        for rule in RULES
        for name in (rule.names if isinstance(rule, Family) else (rule.name,))
    }
    assert names == {name for spec in MODELS for name in spec.rules.values()}
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_each_fingerprint_is_met() -> None:
    """None is left of a class that nobody has.

    Each is that of a class in the sample models, or named above.
    """
    classes = {type(module) for spec in SAMPLES for module in spec.build().modules()}
    classes |= {
        getattr(importlib.import_module(f"transformers.{module}"), name, None)
        for module, name, _ in _NAMED
    }
    for rule in RULES:
        if isinstance(rule, Rule) and rule.base is None and HAS_TRANSFORMERS:
            met = {fingerprint(cls, rule.known) for cls in classes}
            assert len(set(rule.fingerprints) - met) == len(_OTHERS & set(rule.fingerprints)), (
                rule.name
            )
    if HAS_TRANSFORMERS:
        missed = set(_PACKABLE) - {fingerprint(cls) for cls in classes}
        assert len(missed) == len(_OTHERS & set(_PACKABLE))


# Of forwards that Transformers 5.24 wraps, so that a rule has two fingerprints of them: here as
# they were before.
_OTHERS = {
    "f1adf76ab4fc",
    "0b57e6dd92b0",
    "5280870db47f",
    "867f0a59cdd9",
    "3ace0c45d839",
    "12564b5b1c2f",
    "b17f62b6035b",
    "f434310b8181",
    "3099567ec98b",
    "79e198db90db",
}


@transformers_only
def test_how_far_it_reaches() -> None:
    """The Llama norm is that of most models of Transformers.

    A change of its text must not go by unseen.
    """
    known = 0
    for module in (
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "phi3",
        "granite",
        "cohere2",
        "deepseek_v3",
        "smollm3",
    ):
        path = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        known += any(
            _known_by(cls) == ["norm"]
            for name, cls in vars(path).items()
            if name.endswith("RMSNorm")
        )
    assert known == 9


# --- look-alikes ----------------------------------------------------------------------------------


class MyNorm(nn.Module):
    """Llama's norm under another name, with other words in its documentation and other annotations."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states):
        """Normalise."""
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        # What the mean square is called is part of the code; what a comment says is not.
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class LlamaRMSNorm(MyNorm):
    """As Transformers' of that name, but for a mean that is subtracted."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32) - hidden_states.mean()
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class Unwidened(MyNorm):
    """A norm whose squares are of the rows' dtype."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


class RMSNorm(Unwidened):
    """The same under a name that a rule knows."""


class Doubled(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Renamed(nn.LayerNorm):
    """A subclass that does what its base does."""


class GELU(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input


def _reasons(*modules: nn.Module) -> list[str]:
    model = nn.Sequential(*modules)
    x = torch.randn(3, 4)
    before = model(x)
    report = fusedops.fuse_model(model)
    assert torch.allclose(model(x), before, atol=1e-6)
    return [module.reason for module in report.modules[1:]]


def test_another_forward_under_the_same_name() -> None:
    assert _reasons(LlamaRMSNorm(4)) == [
        "it computes no LayerNorm or RMSNorm of the last dimension"
    ]
    assert _reasons(GELU()) == ["no rule"]


def test_another_rounding_under_any_name() -> None:
    reason = "it rounds as none of the operators does; they compute in fp32, and round the result to the input's dtype"
    assert _reasons(Unwidened(4), RMSNorm(4)) == [reason, reason]


def test_the_same_forward_under_another_name() -> None:
    assert _reasons(MyNorm(4)) == [""]


def test_subclass_with_another_forward_is_left() -> None:
    assert _reasons(Doubled(4)) == ["its forward is not the one that rule layer_norm knows"]
    assert _reasons(Renamed(4)) == [""]


def test_a_forward_of_the_instance() -> None:
    module = nn.LayerNorm(4)
    module.forward = lambda input: input + 1  # type: ignore[method-assign]
    assert _reasons(module) == ["its forward was replaced on the instance"]


def test_a_patched_class(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _reasons(MyNorm(4)) == [""]
    monkeypatch.setattr(MyNorm, "forward", LlamaRMSNorm.forward)
    assert _reasons(MyNorm(4)) == ["it computes no LayerNorm or RMSNorm of the last dimension"]
    monkeypatch.undo()
    assert _reasons(MyNorm(4)) == [""]


def test_parametrized_module_is_left() -> None:
    module = torch.nn.utils.parametrize.register_parametrization(
        nn.LayerNorm(4), "weight", nn.Softplus()
    )
    assert _reasons(module) == ["its parameters are parametrized", *3 * ["no rule"]]


def test_a_class_without_source() -> None:
    namespace: dict[str, Any] = {"nn": nn}
    exec("class Norm(nn.Module):\n    def forward(self, x):\n        return x", namespace)
    assert fingerprint(namespace["Norm"]) == ""
    assert _reasons(namespace["Norm"]()) == ["its forward cannot be read"]


def test_names_that_mean_something_else(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text, but its ``torch`` is another: not the same code."""
    source = re.search(
        r"class MyNorm.*?\n\n\n", Path(__file__).read_text(encoding="utf-8"), re.DOTALL
    )
    assert source is not None
    (tmp_path / "other_torch.py").write_text(
        f"from torch import Tensor, nn\nimport torch as real\nclass torch:\n    float32 = real.float64\n    ones = real.ones\n"
        f"    rsqrt = real.sqrt\n{source[0]}"
    )
    monkeypatch.syspath_prepend(tmp_path)
    other = importlib.import_module("other_torch").MyNorm
    assert fingerprint(MyNorm) != ""
    assert fingerprint(other) == ""


@transformers_only
def test_an_activation_whose_function_was_exchanged() -> None:
    from transformers.activations import GELUActivation, GELUTanh

    for made in (GELUActivation(), GELUTanh()):
        made.act = torch.sin
        assert _reasons(made) == ["its act is not a GELU"]


# --- fingerprints ---------------------------------------------------------------------------------


def _text(source: str) -> str:
    return canonical(ast.parse(source).body)


def test_what_a_fingerprint_overlooks() -> None:
    plain = _text("def forward(self, x):\n    return x + 1")
    assert (
        _text("def forward(self, x: Tensor) -> Tensor:\n    '''Doc.'''\n    # why\n    return x+1")
        == plain
    )
    assert _text("def f():\n    raise ValueError('a')") == _text(
        "def f():\n    raise ValueError(f'b{c}')"
    )


@pytest.mark.parametrize(
    "source",
    [
        "def forward(self, x):\n    return x + 2",
        "def forward(self, x):\n    return x - 1",
        "def forward(self, y):\n    return y + 1",
        "def forward(self, x, z=1):\n    return x + 1",
        "@wrapped\ndef forward(self, x):\n    return x + 1",
        "def forward(self, x):\n    x = x\n    return x + 1",
        "def forward(self, x):\n    return x + 1.0",
        "def forward(self, x):\n    return self.x + 1",
    ],
)
def test_what_it_sees(source: str) -> None:
    assert _text(source) != _text("def forward(self, x):\n    return x + 1")


# --- rules of one's own ---------------------------------------------------------------------------


def _tripled(self: Any, input: Tensor) -> Tensor:
    return 3 * nn.GELU.forward(self, input)


def test_a_rule_of_the_users_comes_first() -> None:
    rule = Rule(name="triple", calls="nothing", methods={"forward": _tripled}, base=nn.GELU)
    model = nn.Sequential(nn.GELU(), nn.LayerNorm(4))
    x = torch.randn(2, 4)
    expected = model[1](3 * nn.functional.gelu(x))
    report = fusedops.fuse_model(model, rules=[rule])
    assert [m.rule for m in report] == ["triple", "layer_norm"]
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), expected)


def test_base_without_a_known_method_is_not_matched() -> None:
    """As in a release of its package from before or after the method."""
    base = "torch.nn.modules.activation.GELU"
    rule = Rule(name="other", methods={"forward": _tripled}, base=base, known=("forward", "other"))
    report = fusedops.fuse_model(nn.Sequential(nn.GELU()), rules=[rule])
    assert [line.rule for line in report] == ["gelu"]


def test_copy_of_a_model_with_a_rule_of_the_users_has_the_same_classes() -> None:
    rule = Rule(name="triple", calls="nothing", methods={"forward": _tripled}, base=nn.GELU)
    model = nn.Sequential(nn.GELU(), nn.GELU())
    fusedops.fuse_model(model, rules=[rule])
    copied = copy.deepcopy(model)
    assert [type(module) for module in copied] == [type(module) for module in model]


# --- forwards that are put in place later ---------------------------------------------------------


def _attention_of(spec_name: str) -> tuple[nn.Module, dict[str, Any], Any]:
    """A fused model, its arguments, and one attention in it whose forward the model's own block does not replace."""
    spec = next(spec for spec in SAMPLES if spec.name == spec_name)
    model, arguments = undropped(spec), inputs(spec)
    fusedops.fuse_model(model)
    names = (
        "BertSelfAttention",
        "T5Attention",
        "ViTAttention",
        "GPT2Attention",
        "MultiheadAttention",
    )
    return model, arguments, next(m for m in model.modules() if type(m).__name__ in names)


_ATTENTIVE = pytest.mark.parametrize(
    "name",
    [
        s.name
        for s in SAMPLES
        if s.name in ("bert", "vit", "gpt2", "t5_gated", "torch_post_norm", "torch_pre_norm")
    ],
)


@_ATTENTIVE
def test_a_forward_that_is_patched_after_fusing_is_called(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the class that the module was made of, as ever; and no longer when the patch is undone."""
    model, arguments, attention = _attention_of(name)
    calls: list[str] = []
    cls = type(attention).__mro__[1]
    original = cls.forward

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(self, *args, **kwargs)

    # The module is called like one with hooks, and so adds its last bias itself.
    if name in ("gpt2", "vit"):
        handles = [
            m.register_forward_hook(lambda *_: None)
            for m in model.modules()
            if type(m) is type(attention)
        ]
        expected = outputs(model(**arguments))
        for handle in handles:
            handle.remove()
    else:
        expected = outputs(model(**arguments))
    with monkeypatch.context() as patch:
        patch.setattr(cls, "forward", patched)
        result = outputs(model(**arguments))
    assert calls
    assert all(map(torch.equal, result, expected))
    seen = len(calls)
    model(**arguments)
    assert len(calls) == seen


@_ATTENTIVE
def test_a_forward_on_top_of_a_fused_class_is_called(name: str) -> None:
    """The forward is of a subclass that replaces the fused class, and calls super()."""
    model, arguments, attention = _attention_of(name)
    expected = outputs(model(**arguments))
    calls: list[str] = []

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return super(attention.__class__, self).forward(*args, **kwargs)

    attention.__class__ = type(type(attention).__name__, (type(attention),), {"forward": forward})
    result = outputs(model(**arguments))
    assert calls == [name]
    for y, e in zip(result, expected, strict=True):
        torch.testing.assert_close(y, e, rtol=0, atol=1e-5 * float(e.detach().abs().max()))


# --- gate and up in one projection ----------------------------------------------------------------


class _Packed(nn.Module):
    """As Phi 3's MLP, by whose code the rule knows it."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = (
            nn.Linear(12, 32, bias=False),
            nn.Linear(16, 12, bias=False),
        )
        self.activation_fn = activation

    def forward(self, hidden_states: torch.FloatTensor) -> torch.FloatTensor:
        up_states = self.gate_up_proj(hidden_states)

        gate, up_states = up_states.chunk(2, dim=-1)
        up_states = up_states * self.activation_fn(gate)

        return self.down_proj(up_states)


@pytest.mark.parametrize(
    "activation, fused",
    [(nn.SiLU(), True), (nn.GELU(), True), (nn.Hardswish(), False)],
    ids=lambda value: type(value).__name__,
)
def test_a_packed_projection_has_one_gradient(
    activation: nn.Module, fused: bool, device: torch.device
) -> None:
    """Backward joins no halves, and the gradients are the original's."""
    model = _Packed(activation).to(device)
    original = copy.deepcopy(model)
    assert fusedops.fuse_model(model).modules[0].rule == ("mlp" if fused else "")
    x, weights = torch.randn(5, 12, device=device), torch.randn(5, 12, device=device)
    shapes: list[tuple[int, ...] | None] = []

    def observe(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name == "gated_act":
            assert args[1] is None
            shapes.append(tuple(args[0].shape))

    with (
        observed(observe),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        (model(x) * weights).sum().backward()
    assert shapes == ([(5, 32)] if fused else [])
    if fused and KERNEL_PATH:  # elsewhere PyTorch's operators are the operator
        assert not {event.key for event in profile.key_averages()} & {
            "aten::cat",
            "aten::slice_backward",
        }
    (original(x) * weights).sum().backward()
    for a, b in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
