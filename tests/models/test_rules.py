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
from fusedops.models.rule import Rule
from fusedops.models.rules import RULES
from zoo import (
    HAS_TRANSFORMERS,
    SAMPLES,
    transformers_only,
)

pytestmark = pytest.mark.once

# Classes that are recognised by their code or as norms, by the module of Transformers in which they
# are, with their rules.
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
    "models.t5.modeling_t5": {"T5LayerNorm": "norm", "T5Attention": "one_token"},
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
# An activation without a rule.
_LEFT = {"ClippedGELUActivation"}
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
        }
    if rule == "norm":
        assert re.fullmatch(r"it has no (variance_epsilon|eps|weight)", line.reason)
        return
    assert line.reason in expected
    assert line.rule in ("", rule)


@transformers_only
def test_all_activations_that_a_rule_may_recognise_are_in_the_tables() -> None:
    """The tables are `_CLASSES` and `_LEFT`."""
    module = importlib.import_module("transformers.activations")
    names = {name for name in vars(module) if re.search(r"GELU\w*$", name)}
    assert names
    assert names <= set(_CLASSES["activations"]) | _LEFT


@pytest.mark.parametrize(
    "cls, rule",
    [
        (nn.LayerNorm, "layer_norm"),
        (nn.RMSNorm, "rms_norm"),
        (nn.GELU, "gelu"),
    ],
)
def test_one_rule_recognises_each_class_of_torch_nn(cls: type, rule: str) -> None:
    assert _rules_of(cls) == [rule]


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


# Transformers 5.24 wraps some forwards, so a rule has two fingerprints for each. These are the
# fingerprints of earlier releases; in each release one of the two is missing.
_OF_OTHER_RELEASES = {"12564b5b1c2f"}


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
    report = fusedops.fuse_model(model, graph=False)
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
    report = fusedops.fuse_model(model, rules=[rule], graph=False)
    assert [m.rule for m in report] == ["triple", "layer_norm"]
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), expected)


def test_base_without_a_known_method_is_not_matched() -> None:
    """The method may not exist in another release of the class's package."""
    base = "torch.nn.modules.activation.GELU"
    rule = Rule(name="other", methods={"forward": _tripled}, base=base, known=("forward", "other"))
    report = fusedops.fuse_model(nn.Sequential(nn.GELU()), rules=[rule], graph=False)
    assert [line.rule for line in report] == ["gelu"]


def test_copy_of_a_model_with_a_rule_of_the_users_has_the_same_classes() -> None:
    rule = Rule(name="triple", calls="nothing", methods={"forward": _tripled}, base=nn.GELU)
    model = nn.Sequential(nn.GELU(), nn.GELU())
    fusedops.fuse_model(model, rules=[rule], graph=False)
    copied = copy.deepcopy(model)
    assert [type(module) for module in copied] == [type(module) for module in model]
