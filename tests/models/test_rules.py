"""The rules recognise all classes for which they were written, and no others."""

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

# Classes that are recognised by their code or as norms, by the module of Transformers in which they
# are, with their rules. Blocks, MLPs and attentions that are recognised by the steps of their
# forwards are tested in models.
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
# Classes without a rule whose names match `_BLOCKS`.
_LEFT = {
    "BertCrossAttention",
    "RobertaCrossAttention",
    "ElectraCrossAttention",  # an attention without the last linear layer
    "ClippedGELUActivation",
}
_BLOCKS = re.compile(
    r"(Norm|MLP|FFN|Attention|Output|Intermediate|Layer|LayerFF|Block|Dense|GELU\w*)$"
)
# A release of Transformers may lack some of these classes.
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


def _rules_of(cls: type) -> list[str]:
    """Return the names of the rules that recognise a class by its code, or else as a norm."""
    names = [rule.name for rule in RULES if isinstance(rule, Rule) and rule.knows(cls)]
    if not names and cls.__name__.endswith("Norm"):
        norm_rule = _norm_rule(cls)
        if norm_rule is not None:
            names.append(norm_rule.name)
    return names


def _norm_rule(cls: type) -> Rule | None:
    return next(rule for rule in RULES if rule.name == "norm")(cls(16))


@named
def test_one_rule_recognises_each_class_of_the_installed_transformers(
    module: str, name: str, rule: str
) -> None:
    cls = getattr(importlib.import_module(f"transformers.{module}"), name, None)
    if cls is not None and _release() >= (5, 12):
        assert _rules_of(cls) == [rule]


@named
@pytest.mark.parametrize("has_other_code", [False, True], ids=["", "reads differently"])
def test_report_names_the_rule_of_a_class_that_is_left(
    module: str, name: str, rule: str, has_other_code: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds also in a release in which the class has other code."""
    if has_other_code:
        monkeypatch.setattr("fusedops.models.rule.fingerprint", lambda cls, methods: "another")
    cls = getattr(importlib.import_module(f"transformers.{module}"), name, None)
    if cls is None:
        return
    empty = cls.__new__(cls)  # without children and attributes
    nn.Module.__init__(empty)
    (line,) = fusedops.fuse_model(empty, dry_run=True).modules
    expected = {f"its forward is not the one that rule {rule} knows"}
    if not has_other_code:
        # Reasons for which a rule leaves a module without children.
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


# The modules of Transformers of which all classes are in the table.
_COMPLETE_MODULES = (
    "activations",
    *(f"models.{name}.modeling_{name}" for name in ("bert", "roberta", "electra", "t5")),
)


@pytest.mark.parametrize("module", _COMPLETE_MODULES if HAS_TRANSFORMERS else [])
def test_all_classes_that_a_rule_may_recognise_are_in_the_tables(module: str) -> None:
    """The tables are `_CLASSES` and `_LEFT`."""
    python_module = importlib.import_module(f"transformers.{module}")
    names = {
        cls.__name__
        for cls in vars(python_module).values()
        if isinstance(cls, type)
        and issubclass(cls, nn.Module)
        and cls.__module__ == python_module.__name__
    }
    candidates = {name for name in names if _BLOCKS.search(name)}
    assert candidates
    assert candidates <= set(_CLASSES[module]) | _LEFT


# Blocks and attentions of the sample models that are left.
_LEFT_IN_MODELS = {
    "bert_decoder": {"BertCrossAttention"},  # an attention without the last linear layer
    "gptj": {"GPTJAttention"},  # its output is added together with that of a parallel MLP
    "olmo2": {"Olmo2DecoderLayer", "Olmo2Attention"},  # the norms are before the sums
}


@pytest.mark.pairs("spec")
@every
def test_all_modules_of_a_model_that_a_rule_may_recognise_are_replaced(spec: ModelSpec) -> None:
    """Classes in `_LEFT_IN_MODELS` are exceptions."""
    report = fusedops.fuse_model(build(spec))
    left = {line.type for line in report.left if _BLOCKS.search(line.type)}
    assert left == _LEFT_IN_MODELS.get(spec.name, set())
    assert {line.reason for line in report.left if line.type in left} <= {"no rule"}


@pytest.mark.parametrize("name", ["Gemma2", "Gemma3"] if HAS_TRANSFORMERS else [])
def test_gated_mlps_of_gemma_2_and_3_are_fused(name: str) -> None:
    module: Any = importlib.import_module(
        f"transformers.models.{name.lower()}.modeling_{name.lower()}"
    )
    config_name = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(module, config_name)(hidden_size=8, intermediate_size=16)
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
def test_module_without_children_is_not_recognised_by_its_class(name: str) -> None:
    """Blocks, MLPs and attentions are recognised by what their forwards do with children."""
    cls = next(
        type(m)
        for spec in SAMPLES
        if name in spec.rules
        for m in build(spec).modules()
        if type(m).__name__ == name
    )
    empty = cls.__new__(cls)
    nn.Module.__init__(empty)
    assert [line.reason for line in fusedops.fuse_model(empty).modules] == ["no rule"]


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
def test_one_rule_recognises_each_class_of_torch_nn(cls: type, rule: str) -> None:
    assert _rules_of(cls) == [rule]


def test_every_rule_has_a_sample_model() -> None:
    """To add a rule, also add a sample that it fuses."""
    names = {
        name
        for rule in RULES
        for name in (rule.names if isinstance(rule, Family) else (rule.name,))
    }
    assert names == {name for spec in MODELS for name in spec.rules.values()}
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_each_fingerprint_is_that_of_an_existing_class() -> None:
    """The class is in a sample model or in the table `_CLASSES`."""
    classes = {type(module) for spec in SAMPLES for module in spec.build().modules()}
    classes |= {
        getattr(importlib.import_module(f"transformers.{module}"), name, None)
        for module, name, _ in _NAMED
    }
    if not HAS_TRANSFORMERS:
        return
    for rule in RULES:
        if isinstance(rule, Rule) and rule.base is None:
            of_other_releases = _OF_OTHER_RELEASES & set(rule.fingerprints)
            missing = set(rule.fingerprints) - {fingerprint(cls, rule.known) for cls in classes}
            assert len(missing) == len(of_other_releases), rule.name
    missing = set(_PACKABLE) - {fingerprint(cls) for cls in classes}
    assert len(missing) == len(_OF_OTHER_RELEASES & set(_PACKABLE))


# Transformers 5.24 wraps some forwards, so a rule has two fingerprints for each. These are the
# fingerprints of earlier releases; in each release one of the two is missing.
_OF_OTHER_RELEASES = {
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
def test_rmsnorms_of_nine_models_are_recognised() -> None:
    """Most models of Transformers have Llama's norm; a change of its code must fail a test."""
    recognised = 0
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
        python_module = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        recognised += any(
            _rules_of(cls) == ["norm"]
            for name, cls in vars(python_module).items()
            if name.endswith("RMSNorm")
        )
    assert recognised == 9


# --- classes with other code or other names -------------------------------------------------------


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
    """A norm with the name of Transformers' class that also subtracts a mean."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32) - hidden_states.mean()
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class SquaresInRowDtype(MyNorm):
    """A norm that computes squares in the dtype of the rows."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


class RMSNorm(SquaresInRowDtype):
    """The same norm with the name of a class that has a rule."""


class Doubled(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Renamed(nn.LayerNorm):
    """A subclass that does what its base does."""


class GELU(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input


def _reasons(*modules: nn.Module) -> list[str]:
    """Fuse modules, check that results stay the same, and return why each is left, or ""."""
    model = nn.Sequential(*modules)
    x = torch.randn(3, 4)
    before = model(x)
    report = fusedops.fuse_model(model)
    assert torch.allclose(model(x), before, atol=1e-6)
    return [module.reason for module in report.modules[1:]]


def test_class_with_a_known_name_and_another_forward_is_left() -> None:
    assert _reasons(LlamaRMSNorm(4)) == [
        "it computes no LayerNorm or RMSNorm of the last dimension"
    ]
    assert _reasons(GELU()) == ["no rule"]


def test_norm_with_another_rounding_is_left_whatever_its_name() -> None:
    reason = "it rounds as none of the operators does; they compute in fp32, and round the result to the input's dtype"
    assert _reasons(SquaresInRowDtype(4), RMSNorm(4)) == [reason, reason]


def test_class_with_a_known_forward_and_another_name_is_fused() -> None:
    assert _reasons(MyNorm(4)) == [""]


def test_subclass_with_another_forward_is_left() -> None:
    assert _reasons(Doubled(4)) == ["its forward is not the one that rule layer_norm knows"]
    assert _reasons(Renamed(4)) == [""]


def test_module_with_a_forward_on_the_instance_is_left() -> None:
    module = nn.LayerNorm(4)
    module.forward = lambda input: input + 1  # type: ignore[method-assign]
    assert _reasons(module) == ["its forward was replaced on the instance"]


def test_patched_class_is_left_until_the_patch_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_class_without_source_is_left() -> None:
    namespace: dict[str, Any] = {"nn": nn}
    exec("class Norm(nn.Module):\n    def forward(self, x):\n        return x", namespace)
    assert fingerprint(namespace["Norm"]) == ""
    assert _reasons(namespace["Norm"]()) == ["its forward cannot be read"]


def test_class_whose_global_names_mean_something_else_has_no_fingerprint(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the same text, but in its file ``torch`` is another object."""
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
def test_activation_with_another_function_is_left() -> None:
    from transformers.activations import GELUActivation, GELUTanh

    for activation in (GELUActivation(), GELUTanh()):
        activation.act = torch.sin
        assert _reasons(activation) == ["its act is not a GELU"]


# --- fingerprints ---------------------------------------------------------------------------------


def _text(source: str) -> str:
    return canonical(ast.parse(source).body)


def test_fingerprint_ignores_annotations_docstrings_comments_and_error_messages() -> None:
    plain = _text("def forward(self, x):\n    return x + 1")
    documented = (
        "def forward(self, x: Tensor) -> Tensor:\n    '''Doc.'''\n    # why\n    return x+1"
    )
    assert _text(documented) == plain
    error = _text("def f():\n    raise ValueError('a')")
    assert _text("def f():\n    raise ValueError(f'b{c}')") == error


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
def test_fingerprint_changes_with_code(source: str) -> None:
    assert _text(source) != _text("def forward(self, x):\n    return x + 1")


# --- rules of the user ----------------------------------------------------------------------------


def _tripled(self: Any, input: Tensor) -> Tensor:
    return 3 * nn.GELU.forward(self, input)


def test_rule_of_the_user_has_precedence() -> None:
    rule = Rule(name="triple", calls="nothing", methods={"forward": _tripled}, base=nn.GELU)
    model = nn.Sequential(nn.GELU(), nn.LayerNorm(4))
    x = torch.randn(2, 4)
    expected = model[1](3 * nn.functional.gelu(x))
    report = fusedops.fuse_model(model, rules=[rule])
    assert [m.rule for m in report] == ["triple", "layer_norm"]
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), expected)


def test_base_without_a_known_method_is_not_matched() -> None:
    """The method may not exist in another release of the class's package."""
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


# --- forwards that are replaced after fusing ------------------------------------------------------


def _attention_of(spec_name: str) -> tuple[nn.Module, dict[str, Any], Any]:
    """Return a fused model, its arguments, and one of its attentions."""
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


models_with_attention = pytest.mark.parametrize(
    "name",
    [
        s.name
        for s in SAMPLES
        if s.name in ("bert", "vit", "gpt2", "t5_gated", "torch_post_norm", "torch_pre_norm")
    ],
)


@models_with_attention
def test_class_forward_that_is_patched_after_fusing_is_called_until_the_patch_is_undone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward is patched on the module's original class."""
    model, arguments, attention = _attention_of(name)
    calls: list[str] = []
    cls = type(attention).__mro__[1]
    original = cls.forward

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(self, *args, **kwargs)

    # A patched module is called like one with hooks, and adds its last bias itself. For the same
    # bits, the expected outputs come from modules with hooks.
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
    calls.clear()
    model(**arguments)
    assert not calls


@models_with_attention
def test_forward_of_a_subclass_that_replaces_the_fused_class_is_called(name: str) -> None:
    """The forward calls super()."""
    model, arguments, attention = _attention_of(name)
    expected = outputs(model(**arguments))
    calls: list[str] = []

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return super(attention.__class__, self).forward(*args, **kwargs)

    attention.__class__ = type(type(attention).__name__, (type(attention),), {"forward": forward})
    result = outputs(model(**arguments))
    assert calls == [name]
    for ours, theirs in zip(result, expected, strict=True):
        atol = 1e-5 * float(theirs.detach().abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


# --- gate and up in one projection ----------------------------------------------------------------


class _PackedMLP(nn.Module):
    """An MLP with the code of Phi 3's."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(12, 32, bias=False)
        self.down_proj = nn.Linear(16, 12, bias=False)
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
def test_gradient_of_a_packed_projection_is_written_in_one_piece(
    activation: nn.Module, fused: bool, device: torch.device
) -> None:
    """The backward does not concatenate halves, and gradients are those of the original."""
    model = _PackedMLP(activation).to(device)
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
    if fused and KERNEL_PATH:  # without kernels the operator runs PyTorch's operators
        operators = {event.key for event in profile.key_averages()}
        assert not operators & {"aten::cat", "aten::slice_backward"}
    (original(x) * weights).sum().backward()
    for ours, theirs in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
