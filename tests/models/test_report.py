"""The report of fuse_model, and the arguments that say what is to be left."""

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


def _fused(report: Any) -> list[str]:
    return [module.name for module in report]


@every
def test_lists_every_module(spec: ModelSpec) -> None:
    model = build(spec)
    modules = dict(model.named_modules())
    report = fusedops.fuse_model(model)
    assert [m.name for m in report.modules] == list(modules)
    assert [m.type for m in report.modules] == [
        type(module).__name__ for module in modules.values()
    ]
    for line in report.modules:
        assert (
            bool(line.rule)
            == (bool(line.calls) != bool(line.helps))
            == (line.reason == "")
            == line.replaced
        )
        assert line.fused == bool(line.calls)
        assert line.replaced == hasattr(type(modules[line.name]), "_fusedops_original")
    assert {m.name for m in report.replaced} | {m.name for m in report.left} == set(modules)
    assert len(report) == len(report.replaced) > 0


def test_prints_as_a_table() -> None:
    report = fusedops.fuse_model(_model(), exclude=["1"])
    lines = report.table().splitlines()
    assert lines[0].split() == ["module", "type", "replaced", "by,", "or", "why", "left"]
    assert lines[1].split() == ["(the", "model)", "Sequential", "left:", "no", "rule"]
    assert lines[3].split() == ["0.norm", "LayerNorm", "layer_norm"]
    assert lines[7].split() == ["1.norm", "LayerNorm", "left:", "excluded"]
    assert (
        len(
            {
                line.index(word)
                for line, word in zip(lines[2:5], ("_Block", "LayerNorm", "GELU"), strict=True)
            }
        )
        == 1
    )


def test_nothing_to_fuse() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    types = [type(m) for m in model.modules()]
    report = fusedops.fuse_model(model)
    assert not report
    assert len(report) == 0
    assert list(report) == []
    assert [m.reason for m in report.left] == 3 * ["no rule"]
    assert [type(m) for m in model.modules()] == types


@every
def test_a_dry_run_changes_nothing(spec: ModelSpec) -> None:
    model = build(spec)
    types, before = [type(m) for m in model.modules()], run(model, inputs(spec))
    dry = fusedops.fuse_model(model, dry_run=True)
    assert [type(m) for m in model.modules()] == types
    assert all(map(torch.equal, before[0], run(model, inputs(spec))[0]))
    assert dry == fusedops.fuse_model(model)


@pytest.mark.parametrize(
    "exclude, left",
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
def test_excluded_modules_are_left_and_reported(exclude: Any, left: list[str]) -> None:
    model = _model()
    report = fusedops.fuse_model(model, exclude=exclude)
    assert _fused(report) == left
    modules = dict(model.named_modules())
    assert [name for name, m in modules.items() if hasattr(type(m), "_fusedops_original")] == left
    assert {m.reason for m in report.left} <= {
        "no rule",
        "excluded",
        "excluded, with rule layer_norm",
        "excluded, with rule gelu",
    }


def test_the_rule_that_was_excluded() -> None:
    report = fusedops.fuse_model(_model(), exclude=["1", "layer_norm", "gelu"])
    reasons = {m.name: m.reason for m in report.left}
    assert (
        reasons["0.norm"] == "excluded, with rule layer_norm"
        and reasons["0.act"] == "excluded, with rule gelu"
    )
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
def test_bad_exclude(exclude: Any, error: type[Exception], match: str) -> None:
    model = _model()
    with pytest.raises(error, match=match):
        fusedops.fuse_model(model, exclude=exclude)
    assert not any(hasattr(type(m), "_fusedops_original") for m in model.modules())


@every
def test_a_block_without_its_norms(spec: ModelSpec) -> None:
    """A fused block calls what was excluded from it as it is."""
    model, original = build(spec), build(spec)
    norms = [name for name, m in model.named_modules() if "norm" in type(m).__name__.lower()]
    fusedops.fuse_model(model, exclude=norms)
    expected = run(original, inputs(spec))[0]
    for a, b in zip(expected, run(model, inputs(spec))[0], strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-5 * float(a.detach().abs().max()))


def test_modules_that_only_help_are_not_counted() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    report = fusedops.fuse_model(layer)
    (attention,) = (m for m in report if m.rule == "multihead_attention")
    assert not attention.fused
    assert attention.replaced
    assert len(report) == 4
    assert "MultiheadAttention               leaves its last bias to the block" in report.table()


def test_prints_as_a_summary() -> None:
    """Each kind once, however many modules; and so in a notebook."""
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


def _made(model: nn.Module, arguments: dict[str, Any]) -> tuple[set[str], dict[str, set[str]]]:
    """The modules within whose methods operators are called in a forward.

    Which operators get a module's parameters.
    """
    names = {module: name for name, module in model.named_modules()}
    owners = {
        id(p): names[m] for m in model.modules() for p in m._parameters.values() if p is not None
    }
    within: set[str] = set()
    given: dict[str, set[str]] = {}

    def observe(operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        frame = sys._getframe(1)
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module in names:
                within.add(names[module])
            frame = frame.f_back  # type: ignore[assignment]
        for owner in {
            owners[id(value)] for value in (*args, *kwargs.values()) if id(value) in owners
        }:
            given.setdefault(owner, set()).add(operator)

    with observed(observe):
        model(**arguments)
    return within, given


# Norms behind a sum in the text of their block that is none of two tensors of a shape (positions,
# for all rows the same), or none at all as the model is configured (OPT's norm stands before its
# attention or behind).
_OTHERWISE = {
    **dict.fromkeys(("bert", "bert_decoder", "electra", "distilbert"), "embeddings.LayerNorm"),
    "opt": "self_attn_layer_norm",
}


@every
@pytest.mark.parametrize(
    "look", [fusedops.fuse_model, fusedops.fusion_status], ids=["report", "status"]
)
def test_what_is_reported_is_what_runs(spec: ModelSpec, look: Any) -> None:
    """A module calls an operator if the report names one, and a norm that its block does gets none of its own."""
    model = build(spec).train()
    report = fusedops.fuse_model(model)
    report = report if look is fusedops.fuse_model else look(model)
    within, given = _made(model, inputs(spec))
    # The rule "generation" calls its operators in `generate`.
    named = {m.name for m in report.modules if m.calls and m.rule != "generation"}
    assert named <= within
    done = {m.name for m in report.modules if m.by is not None}
    for name in {
        name for name in done & given.keys() if not name.endswith(_OTHERWISE.get(spec.name, "none"))
    }:
        assert not given[name] & {"layer_norm", "rms_norm"}
    norms = {
        m.name for m in report.modules if m.fused and m.calls.startswith(("layer_norm", "rms_norm"))
    }
    for name in norms:
        assert given.get(name, {"layer_norm"}) & {"layer_norm", "rms_norm"}
    blocks = {m.name for m in report.modules if m.fused}
    assert {m.by for m in report.modules if m.by is not None} <= blocks | done | {
        m.name for m in report.modules if m.helps
    }


class _Left:
    """Records the steps that modules leave to their blocks in a forward, by module."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[nn.Module, str] = {}
        for cls in {
            type(module) for module in model.modules() if hasattr(module, "_fusedops_branch")
        }:
            monkeypatch.setattr(cls, "_fusedops_branch", self._observed(cls._fusedops_branch))  # type: ignore[attr-defined]

    def _observed(self, original: Any) -> Any:
        def branch(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = original(module, *args, **kwargs)
            end = result[0]
            self.found[module] = " and ".join(
                ["its last bias"] * (end.bias is not None) + ["its dropout"] * end.drops
            )
            return result

        return branch


def _reported(report: Any, model: nn.Module) -> dict[nn.Module, str]:
    modules = dict(model.named_modules())
    return {
        modules[line.name]: line.helps.removeprefix("leaves ").removesuffix(" to the block")
        for line in report
        if line.helps.endswith(" to the block")
    }


@every
@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
def test_what_is_left_to_the_block(
    spec: ModelSpec, hooked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last bias, a dropout, both or neither: as in a forward.

    Nothing of a linear layer that has hooks.
    """
    model = build(spec).train()
    for name, module in model.named_modules():
        if hooked and name.endswith(
            ("attention.out_proj", "attn.out_proj", "c_proj", ".o_proj", "out_lin")
        ):
            module.register_forward_hook(lambda *args: None)
        if isinstance(module, nn.Dropout):
            module.p = 0.25
    report = fusedops.fuse_model(model)
    left = _Left(model, monkeypatch)
    model(**inputs(spec))
    reported = _reported(report, model)
    modules = dict(model.named_modules())
    # The other modules report their operators instead.
    helping = {modules[line.name] for line in report if line.helps}
    for module in left.found.keys() & helping:
        expected = reported.get(module, "")
        if expected.startswith("what "):  # it hands on
            inner = module.get_submodule(expected.removeprefix("what ").removesuffix(" leaves"))
            assert left.found[module] == left.found[inner]
        else:
            assert left.found[module] == expected
    # No fused block has them.
    assert {type(module).__name__ for module in reported.keys() - left.found.keys()} <= _ALONE


# Modules that end in a linear layer, and stand alone.
_ALONE = {
    "MultiheadAttention",
    "BertLMPredictionHead",
    "BertOnlyMLMHead",
    "RobertaLMHead",
    "ViTEmbeddings",
}


def _table(report: FusionReport) -> dict[str, str]:
    return {
        m.name: "computed by its block" if m.by is not None else m.calls or m.helps or m.reason
        for m in report.modules
    }


def test_status_of_what_changed_since() -> None:
    """A norm with hooks calls its own operator again.

    A layer under another forward, and a class on top, call none.
    """
    model = nn.Sequential(
        *[nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)], nn.LayerNorm(8)
    )
    assert not fusedops.fusion_status(model)
    fused = fusedops.fuse_model(model)
    before = {
        name: "not fused" if what == "no rule" else what for name, what in _table(fused).items()
    }
    assert _table(fusedops.fusion_status(model)) == before
    handle = model[0].norm1.register_forward_hook(lambda *_: None)
    model[1].forward = functools.partial(model[1].forward)
    model[3].__class__ = type("Wrapped", (type(model[3]),), {})
    now = _table(fusedops.fusion_status(model))
    assert now["0.norm1"] == "layer_norm" and now["0.norm2"] == "computed by its block"
    assert now["1"] == "its forward was replaced on the instance after it was fused"
    assert now["1.norm1"] == "layer_norm" and now["1.linear1"] == "not fused"
    assert now["3"] == "its class was changed after it was fused"
    handle.remove()
    assert _table(fusedops.fusion_status(model))["0.norm1"] == "computed by its block"
    with pytest.raises(
        TypeError, match=r"fusion_status: model must be a torch\.nn\.Module, got str"
    ):
        fusedops.fusion_status("model")  # type: ignore[arg-type]


@transformers_only
def test_block_whose_norms_are_not_fused() -> None:
    """There is nothing to join."""
    table = _table(
        fusedops.fuse_model(
            build(next(spec for spec in MODELS if spec.name == "llama")), exclude=["norm"]
        )
    )
    assert table["model.layers.0"] == "what it would join is not there"
    assert table["model.layers.0.mlp"] == "gated_act"


def test_an_attention_with_hooks() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layer.self_attn.register_forward_hook(lambda *args: None)
    (attention,) = (m for m in fusedops.fuse_model(layer) if m.rule == "multihead_attention")
    assert attention.helps == "leaves nothing to the block while it has hooks"


@transformers_only
def test_an_attention_without_a_bias() -> None:
    spec = next(spec for spec in MODELS if spec.name == "llama")
    model = build(spec)
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *args: None)
    helps = {m.name: m.helps for m in fusedops.fuse_model(model) if m.rule == "attention"}
    assert helps["model.layers.0.self_attn"] == "takes its rows in autocast's dtype"
    assert helps["model.layers.1.self_attn"] == "leaves nothing to the block as its layers are"


@transformers_only
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_berts_attention_that_casts_its_input(name: str) -> None:
    """It does not where one of its linear layers has hooks."""
    model = build(next(spec for spec in MODELS if spec.name == "bert"))
    path = "bert.encoder.layer.1.attention.self"
    model.get_submodule(f"{path}.{name}").register_forward_hook(lambda *_: None)
    helps = {line.name: line.helps for line in fusedops.fuse_model(model)}
    assert helps[path] == "nothing as its layers are"
    assert helps[path.replace("1", "0")] == "casts its input once under autocast"


@transformers_only
def test_t5s_attentions_with_a_fast_path() -> None:
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
    assert (
        helps["0.layer.1.EncDecAttention"]
        == helps["1.layer.0.SelfAttention"]
        == "has a fast path for one token"
    )
    assert helps["1.layer.1.EncDecAttention"] == "nothing while it has hooks, or as its layers are"


@pytest.mark.parametrize("name", ["dry_run", "compile_rest"])
@pytest.mark.parametrize("value", ["no", {}, 1, None], ids=repr)
def test_flags_are_true_or_false(name: str, value: Any) -> None:
    model = _model()
    with pytest.raises(TypeError, match=f"fuse_model: {name} must be True or False, got {value!r}"):
        fusedops.fuse_model(model, **{name: value})
    assert type(model[2]) is nn.RMSNorm and model._compiled_call_impl is None


@pytest.mark.parametrize(
    "rules", [3, "layer_norm", ["layer_norm"], [nn.LayerNorm], nn.LayerNorm], ids=str
)
def test_bad_rules(rules: Any) -> None:
    model = _model()
    with pytest.raises(TypeError, match="fuse_model: rules must"):
        fusedops.fuse_model(model, rules=rules)
    assert type(model[2]) is nn.RMSNorm


def test_one_rule_that_is_no_sequence() -> None:
    rule = Rule(name="mine", calls="", methods={}, base=nn.GELU)
    with pytest.raises(TypeError, match="rules must be a sequence of Rule, got Rule"):
        fusedops.fuse_model(_model(), rules=rule)  # type: ignore[arg-type]
