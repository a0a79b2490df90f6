"""The report of `fuse_model`, `fusion_status`, and the arguments that exclude modules."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
from torch import nn

import fusedops
from fusedops.models import FusionReport, Rule
from sample_models import MODELS, ModelSpec
from zoo import build, every, inputs, observed, run, transformers_only

pytestmark = pytest.mark.once


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.act = nn.GELU()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(self.act(self.norm(x)))
        return y


def _model() -> nn.Module:
    return nn.Sequential(_Block(), _Block(), nn.RMSNorm(4))


def _fused_names(report: Any) -> list[str]:
    return [module.name for module in report]


@every
def test_report_lists_every_module_in_order(spec: ModelSpec) -> None:
    model = build(spec)
    modules = dict(model.named_modules())
    report = fusedops.fuse_model(model)
    assert [m.name for m in report.modules] == list(modules)
    assert [m.type for m in report.modules] == [
        type(module).__name__ for module in modules.values()
    ]
    for line in report.modules:
        # A replaced module has a rule, either operators or help for its block, and no reason.
        assert bool(line.rule) == line.replaced
        assert (bool(line.calls) != bool(line.helps)) == line.replaced
        assert (line.reason == "") == line.replaced
        assert line.fused == bool(line.calls)
        assert line.replaced == hasattr(type(modules[line.name]), "_fusedops_original")
    assert {m.name for m in report.replaced} | {m.name for m in report.left} == set(modules)
    assert len(report) == len(report.replaced) > 0


def test_table_has_a_line_for_each_module_and_aligned_columns() -> None:
    report = fusedops.fuse_model(_model(), exclude=["1"])
    lines = report.table().splitlines()
    assert lines[0].split() == ["module", "type", "replaced", "by,", "or", "why", "left"]
    assert lines[1].split() == ["(the", "model)", "Sequential", "left:", "no", "rule"]
    assert lines[3].split() == ["0.norm", "LayerNorm", "layer_norm"]
    assert lines[7].split() == ["1.norm", "LayerNorm", "left:", "excluded"]
    types = ("_Block", "LayerNorm", "GELU")
    type_columns = {line.index(name) for line, name in zip(lines[2:5], types, strict=True)}
    assert len(type_columns) == 1


def test_report_without_fused_modules_is_false_and_empty() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    types = [type(m) for m in model.modules()]
    report = fusedops.fuse_model(model)
    assert not report
    assert len(report) == 0
    assert list(report) == []
    assert [m.reason for m in report.left] == 3 * ["no rule"]
    assert [type(m) for m in model.modules()] == types


@every
def test_dry_run_changes_nothing_and_returns_the_report_of_fusing(spec: ModelSpec) -> None:
    model = build(spec)
    types = [type(m) for m in model.modules()]
    outputs_before, _ = run(model, inputs(spec))
    planned = fusedops.fuse_model(model, dry_run=True)
    assert [type(m) for m in model.modules()] == types
    outputs_after, _ = run(model, inputs(spec))
    assert all(map(torch.equal, outputs_before, outputs_after))
    assert planned == fusedops.fuse_model(model)


@pytest.mark.parametrize(
    "exclude, fused",
    [
        ((), ["0.norm", "0.act", "1.norm", "1.act", "2"]),
        (["1"], ["0.norm", "0.act", "2"]),
        (["0.norm", "2"], ["0.act", "1.norm", "1.act"]),
        (["*.act"], ["0.norm", "1.norm", "2"]),
        (["?.norm"], ["0.act", "1.act", "2"]),
        (["LayerNorm"], ["0.act", "1.act", "2"]),
        (["_Block"], ["2"]),
        (["layer_norm"], ["0.act", "1.act", "2"]),
        (["gelu", "1"], ["0.norm", "2"]),
        (["generation"], ["0.norm", "0.act", "1.norm", "1.act", "2"]),
        ([nn.LayerNorm, nn.GELU], ["2"]),
        ([_Block], ["2"]),
        (["0", nn.RMSNorm], ["1.norm", "1.act"]),
        ([""], []),
    ],
)
def test_excluded_modules_are_left_and_reported(exclude: Any, fused: list[str]) -> None:
    model = _model()
    report = fusedops.fuse_model(model, exclude=exclude)
    assert _fused_names(report) == fused
    modules = dict(model.named_modules())
    assert [name for name, m in modules.items() if hasattr(type(m), "_fusedops_original")] == fused
    assert {m.reason for m in report.left} <= {
        "no rule",
        "excluded",
        "excluded, with rule layer_norm",
        "excluded, with rule gelu",
    }


def test_reason_of_an_excluded_module_names_the_excluded_rule() -> None:
    report = fusedops.fuse_model(_model(), exclude=["1", "layer_norm", "gelu"])
    reasons = {m.name: m.reason for m in report.left}
    assert reasons["0.norm"] == "excluded, with rule layer_norm"
    assert reasons["0.act"] == "excluded, with rule gelu"
    assert reasons["1.norm"] == "excluded"
    assert "left: excluded, with rule layer_norm\n" in report.table()


@pytest.mark.parametrize(
    "exclude, error, match",
    [
        (["0.nrom"], ValueError, "exclude names '0.nrom'.*did you mean '0.norm'"),
        (["LayerNrom"], ValueError, "did you mean 'LayerNorm'"),
        (["encoder.*"], ValueError, "exclude names 'encoder.\\*', which is no module"),
        (
            ["completely different"],
            ValueError,
            "which is no module of this model, no class in it and no rule; the report of a dry_run",
        ),
        (["layer_nrom"], ValueError, "did you mean 'layer_norm'"),
        (
            "0.norm",
            TypeError,
            r"exclude must be a sequence of names and classes, got '0\.norm'; .* pass \['0\.norm'\]$",
        ),
        (
            nn.LayerNorm,
            TypeError,
            r"exclude must be a sequence .*, got LayerNorm; .* pass \[LayerNorm\]$",
        ),
        (3, TypeError, "exclude must be a sequence of names and classes, got 3$"),
        ([3], TypeError, "exclude takes names and subclasses"),
        ([int], TypeError, "exclude takes names and subclasses"),
        (
            [nn.LayerNorm, nn.BatchNorm1d],
            ValueError,
            r"the class torch\.nn\.modules\.batchnorm\.BatchNorm1d, of which this model",
        ),
    ],
)
def test_bad_exclude_is_an_error_and_fuses_nothing(
    exclude: Any, error: type[Exception], match: str
) -> None:
    model = _model()
    with pytest.raises(error, match=match):
        fusedops.fuse_model(model, exclude=exclude)
    assert not any(hasattr(type(m), "_fusedops_original") for m in model.modules())


@every
def test_fused_block_with_excluded_norms_has_the_results_of_the_original(spec: ModelSpec) -> None:
    """The block calls the norms as they are."""
    model, original = build(spec), build(spec)
    norms = [name for name, m in model.named_modules() if "norm" in type(m).__name__.lower()]
    fusedops.fuse_model(model, exclude=norms)
    expected_outputs, _ = run(original, inputs(spec))
    results, _ = run(model, inputs(spec))
    for result, expected in zip(results, expected_outputs, strict=True):
        atol = 1e-5 * float(expected.detach().abs().max())
        torch.testing.assert_close(result, expected, rtol=0, atol=atol)


def test_modules_that_only_help_their_block_are_not_counted_as_fused() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    report = fusedops.fuse_model(layer)
    (attention,) = (m for m in report if m.rule == "multihead_attention")
    assert not attention.fused
    assert attention.replaced
    assert len(report) == 4
    assert "MultiheadAttention               leaves its last bias to the block" in report.table()


def test_printed_report_has_a_line_for_each_kind_of_module() -> None:
    """A notebook displays the same text."""
    model = nn.Sequential(
        *[nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)], nn.GELU()
    )
    report = fusedops.fuse_model(model, exclude=["gelu"])
    assert str(report) == repr(report)
    assert str(report).splitlines() == [
        "3 of 32 modules call fused operators, 9 more are computed inside them or support them",
        "  3 x TransformerEncoderLayer  bias_act, bias_dropout_add_ln",
        "  3 x MultiheadAttention       leaves its last bias to the block",
        "  6 x LayerNorm                computed by its block",
        "  1 x GELU                     left: excluded, with rule gelu",
        "4 left as they are: no rule matches",
        "table() has a line for each module",
    ]


def test_report_of_modules_that_are_left_ends_in_a_next_step() -> None:
    class OtherNorm(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / x.abs().mean()

    step = "fusedops.compile fuses row-wise code that is left, and fusedops.rowwise your own"
    assert step in str(fusedops.fuse_model(OtherNorm())).splitlines()
    assert step not in str(fusedops.fuse_model(nn.Sequential(nn.LayerNorm(4))))


def _called_operators(
    model: nn.Module, arguments: dict[str, Any]
) -> tuple[set[str], dict[str, set[str]]]:
    """Run a forward and observe the calls of operators.

    Returns:
        The names of the modules whose methods call operators, also indirectly; and by module, the
        operators that get one of its parameters.
    """
    names = {module: name for name, module in model.named_modules()}
    owners = {
        id(p): names[m] for m in model.modules() for p in m._parameters.values() if p is not None
    }
    calling: set[str] = set()
    operators_of_owner: dict[str, set[str]] = {}

    def observe(operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        frame = sys._getframe(1)
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module in names:
                calling.add(names[module])
            frame = frame.f_back  # type: ignore[assignment]
        for value in (*args, *kwargs.values()):
            if id(value) in owners:
                operators_of_owner.setdefault(owners[id(value)], set()).add(operator)

    with observed(observe):
        model(**arguments)
    return calling, operators_of_owner


# Norms that a block could fuse with a sum, by its source, but calls alone when it runs. For the
# embeddings' norm, the operands of the sum have different shapes: positions are the same in all
# samples of a batch. OPT's norm follows a sum only in a model of another configuration.
_NORMS_CALLED_ALONE = {
    **dict.fromkeys(("bert", "bert_decoder", "electra", "distilbert"), "embeddings.LayerNorm"),
    "opt": "self_attn_layer_norm",
}


@every
@pytest.mark.parametrize(
    "look", [fusedops.fuse_model, fusedops.fusion_status], ids=["report", "status"]
)
def test_modules_call_the_operators_that_report_and_status_name(spec: ModelSpec, look: Any) -> None:
    """A norm that is computed by its block has no call of its own."""
    model = build(spec).train()
    report = fusedops.fuse_model(model)
    report = report if look is fusedops.fuse_model else look(model)
    calling, operators_of = _called_operators(model, inputs(spec))
    # The rule "generation" calls its operators in `generate`.
    reported = {m.name for m in report.modules if m.calls and m.rule != "generation"}
    assert reported <= calling
    norm_operators = {"layer_norm", "rms_norm"}
    computed_by_block = {m.name for m in report.modules if m.by is not None}
    called_alone = _NORMS_CALLED_ALONE.get(spec.name)
    for name in computed_by_block & operators_of.keys():
        if called_alone is None or not name.endswith(called_alone):
            assert not operators_of[name] & norm_operators
    for line in report.modules:
        is_norm = line.fused and line.calls.startswith(("layer_norm", "rms_norm"))
        # Norms without parameters do not occur in `operators_of`.
        if is_norm and line.name in operators_of:
            assert operators_of[line.name] & norm_operators
    blocks = {m.name for m in report.modules if m.fused or m.helps} | computed_by_block
    assert {m.by for m in report.modules if m.by is not None} <= blocks


class _RecordedSteps:
    """Records the steps that modules leave to their blocks in a forward, by module."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: dict[nn.Module, str] = {}
        for cls in {
            type(module) for module in model.modules() if hasattr(module, "_fusedops_branch")
        }:
            monkeypatch.setattr(cls, "_fusedops_branch", self._observed(cls._fusedops_branch))  # type: ignore[attr-defined]

    def _observed(self, original: Any) -> Any:
        def branch(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = original(module, *args, **kwargs)
            end = result[0]
            steps = []
            if end.bias is not None:
                steps.append("its last bias")
            if end.drops:
                steps.append("its dropout")
            self.steps[module] = " and ".join(steps)
            return result

        return branch


def _reported_steps(report: Any, model: nn.Module) -> dict[nn.Module, str]:
    """Return the steps that modules leave to their blocks by the report."""
    modules = dict(model.named_modules())
    return {
        modules[line.name]: line.helps.removeprefix("leaves ").removesuffix(" to the block")
        for line in report
        if line.helps.endswith(" to the block")
    }


@every
@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
def test_report_names_the_steps_that_modules_leave_to_their_block(
    spec: ModelSpec, hooked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These are a last bias, a dropout, both, or neither if a linear layer has hooks."""
    model = build(spec).train()
    last_layers = ("attention.out_proj", "attn.out_proj", "c_proj", ".o_proj", "out_lin")
    for name, module in model.named_modules():
        if hooked and name.endswith(last_layers):
            module.register_forward_hook(lambda *args: None)
        if isinstance(module, nn.Dropout):
            module.p = 0.25
    report = fusedops.fuse_model(model)
    recorded = _RecordedSteps(model, monkeypatch)
    model(**inputs(spec))
    reported = _reported_steps(report, model)
    modules = dict(model.named_modules())
    # Modules that do not only help report their operators instead.
    helping = {modules[line.name] for line in report if line.helps}
    for module in recorded.steps.keys() & helping:
        expected = reported.get(module, "")
        if expected.startswith("what "):  # "what <inner> leaves": the steps of an inner module
            inner = module.get_submodule(expected.removeprefix("what ").removesuffix(" leaves"))
            assert recorded.steps[module] == recorded.steps[inner]
        else:
            assert recorded.steps[module] == expected
    not_called = reported.keys() - recorded.steps.keys()
    assert {type(module).__name__ for module in not_called} <= _OUTSIDE_BLOCKS


# Modules that end in a linear layer, but are not in a fused block of the sample models.
_OUTSIDE_BLOCKS = {
    "MultiheadAttention",
    "BertLMPredictionHead",
    "BertOnlyMLMHead",
    "RobertaLMHead",
    "ViTEmbeddings",
}


def _descriptions(report: FusionReport) -> dict[str, str]:
    """Return what the table says about each module, by name."""
    descriptions = {}
    for line in report.modules:
        descriptions[line.name] = line.calls or line.helps or line.reason
        if line.by is not None:
            descriptions[line.name] = "computed by its block"
    return descriptions


def test_status_reports_changes_after_fusing() -> None:
    """A norm with hooks calls its own operator instead of being computed by its block.

    A layer whose forward or class was replaced calls none.
    """
    model = nn.Sequential(
        *[nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)], nn.LayerNorm(8)
    )
    assert not fusedops.fusion_status(model)
    before = _descriptions(fusedops.fuse_model(model))
    # `fusion_status` does not look up rules.
    before = {
        name: "not fused" if description == "no rule" else description
        for name, description in before.items()
    }
    assert _descriptions(fusedops.fusion_status(model)) == before
    handle = model[0].norm1.register_forward_hook(lambda *_: None)
    model[1].forward = functools.partial(model[1].forward)
    model[3].__class__ = type("Wrapped", (type(model[3]),), {})
    after = _descriptions(fusedops.fusion_status(model))
    assert after["0.norm1"] == "layer_norm"
    assert after["0.norm2"] == "computed by its block"
    assert after["1"] == "its forward was replaced on the instance after it was fused"
    assert after["1.norm1"] == "layer_norm"
    assert after["1.linear1"] == "not fused"
    assert after["3"] == "its class was changed after it was fused"
    handle.remove()
    assert _descriptions(fusedops.fusion_status(model))["0.norm1"] == "computed by its block"
    with pytest.raises(
        TypeError, match=r"fusion_status: model must be a torch\.nn\.Module, got str"
    ):
        fusedops.fusion_status("model")  # type: ignore[arg-type]


@transformers_only
def test_block_without_fused_norms_is_left() -> None:
    """It has no norm with which it could fuse a sum."""
    spec = next(spec for spec in MODELS if spec.name == "llama")
    descriptions = _descriptions(fusedops.fuse_model(build(spec), exclude=["norm"]))
    assert descriptions["model.layers.0"] == "what it would join is not there"
    assert descriptions["model.layers.0.mlp"] == "gated_act"


def test_attention_with_hooks_leaves_nothing_to_its_block() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layer.self_attn.register_forward_hook(lambda *args: None)
    (attention,) = (m for m in fusedops.fuse_model(layer) if m.rule == "multihead_attention")
    assert attention.helps == "leaves nothing to the block while it has hooks"


@transformers_only
def test_attention_without_a_bias_takes_autocasts_dtype_if_no_layer_has_hooks() -> None:
    spec = next(spec for spec in MODELS if spec.name == "llama")
    model = build(spec)
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *args: None)
    helps = {m.name: m.helps for m in fusedops.fuse_model(model) if m.rule == "attention"}
    assert helps["model.layers.0.self_attn"] == "takes its rows in autocast's dtype"
    assert helps["model.layers.1.self_attn"] == "leaves nothing to the block as its layers are"


@transformers_only
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_berts_attention_casts_its_input_once_if_no_layer_has_hooks(name: str) -> None:
    model = build(next(spec for spec in MODELS if spec.name == "bert"))
    path = "bert.encoder.layer.1.attention.self"
    model.get_submodule(f"{path}.{name}").register_forward_hook(lambda *_: None)
    helps = {line.name: line.helps for line in fusedops.fuse_model(model)}
    assert helps[path] == "nothing as its layers are"
    assert helps[path.replace("1", "0")] == "casts its input once under autocast"


@transformers_only
def test_t5s_attentions_have_a_fast_path_if_they_and_their_layers_have_no_hooks() -> None:
    model = build(next(spec for spec in MODELS if spec.name == "t5"))
    blocks = model.decoder.block
    blocks[0].layer[0].SelfAttention.o.register_forward_hook(lambda *args: None)
    blocks[1].layer[1].EncDecAttention.register_forward_hook(lambda *args: None)
    helps = {
        m.name.removeprefix("decoder.block."): m.helps
        for m in fusedops.fuse_model(model)
        if m.rule == "t5_attention"
    }
    assert helps["encoder.block.0.layer.0.SelfAttention"] == (
        "lays its position bias out once, and has a fast path for one token"
    )
    assert helps["0.layer.0.SelfAttention"] == "lays its position bias out once"
    for unhooked in ("0.layer.1.EncDecAttention", "1.layer.0.SelfAttention"):
        assert helps[unhooked] == "has a fast path for one token"
    assert helps["1.layer.1.EncDecAttention"] == "nothing while it has hooks, or as its layers are"


@pytest.mark.parametrize("name", ["dry_run", "compile_rest"])
@pytest.mark.parametrize("value", ["no", {}, 1, None], ids=repr)
def test_flags_other_than_true_and_false_are_errors(name: str, value: Any) -> None:
    model = _model()
    with pytest.raises(TypeError, match=f"fuse_model: {name} must be True or False, got {value!r}"):
        fusedops.fuse_model(model, **{name: value})
    assert type(model[2]) is nn.RMSNorm
    assert model._compiled_call_impl is None


@pytest.mark.parametrize(
    "rules", [3, "layer_norm", ["layer_norm"], [nn.LayerNorm], nn.LayerNorm], ids=str
)
def test_bad_rules_are_an_error_and_fuse_nothing(rules: Any) -> None:
    model = _model()
    with pytest.raises(TypeError, match="fuse_model: rules must"):
        fusedops.fuse_model(model, rules=rules)
    assert type(model[2]) is nn.RMSNorm


def test_single_rule_instead_of_a_sequence_is_an_error() -> None:
    rule = Rule(name="mine", calls="", methods={}, base=nn.GELU)
    with pytest.raises(TypeError, match="rules must be a sequence of Rule, got Rule"):
        fusedops.fuse_model(_model(), rules=rule)  # type: ignore[arg-type]
