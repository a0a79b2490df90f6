"""The report of `fuse_model`, `fusion_status`, and the arguments that exclude modules."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
from torch import nn

import fusedops
from fusedops.models import Rule
from sample_models import ModelSpec
from zoo import build, every, inputs, run

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
        # A replaced module has a rule and operators, and no reason.
        assert bool(line.rule) == bool(line.calls) == line.replaced == line.fused
        assert (line.reason == "") == line.replaced
        assert line.replaced or line.by == ""
        assert line.replaced == hasattr(type(modules[line.name]), "_fusedops_original")
    assert {m.name for m in report.replaced} | {m.name for m in report.left} == set(modules)
    assert len(report) == len(report.replaced) > 0


def test_table_has_a_line_for_each_module_and_aligned_columns() -> None:
    report = fusedops.fuse_model(_model(), exclude=["1"], graph=False)
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
    report = fusedops.fuse_model(model, graph=False)
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
    report = fusedops.fuse_model(model, exclude=exclude, graph=False)
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
    report = fusedops.fuse_model(_model(), exclude=["1", "layer_norm", "gelu"], graph=False)
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


def test_printed_report_has_a_line_for_each_kind_of_module() -> None:
    """A notebook displays the same text."""
    model = _model()
    report = fusedops.fuse_model(model, exclude=["1.linear", "2"])
    assert str(report) == repr(report)
    lines = str(report).splitlines()
    assert lines == [
        "6 of 10 modules are in graphs or call fused operators",
        "  1 x _Block      operators in the regions of its graph, by fusion_status(model, *inputs)",
        "  1 x LayerNorm   in the graph; elsewhere layer_norm",
        "  1 x GELU        in the graph; elsewhere gelu",
        "  1 x LayerNorm   layer_norm",
        "  1 x GELU        gelu",
        "  1 x Sequential  left: excluded in part",
        "  1 x _Block      left: excluded in part",
        "  1 x Linear      left: excluded",
        "  1 x RMSNorm     left: excluded",
        "no kernels run on cpu, only on a GPU",
        "table() has a line for each module",
    ]
    again = fusedops.fuse_model(model, exclude=["1.linear", "2"])
    assert not again
    first, *rest = str(again).splitlines()
    assert first == lines[0] and "  1 x _Block      fused already" in rest
    without = fusedops.fuse_model(_model(), graph=False)
    assert str(without).splitlines()[0] == "5 of 10 modules call fused operators"


def test_report_of_modules_that_are_left_ends_in_a_next_step() -> None:
    class OtherNorm(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / x.abs().mean()

    step = "fusedops.compile fuses row-wise code that is left, and fusedops.rowwise your own"
    assert step in str(fusedops.fuse_model(OtherNorm())).splitlines()
    # In a graph, its code is in a region.
    assert step not in str(fusedops.fuse_model(nn.Sequential(OtherNorm())))


def test_status_reports_changes_after_fusing() -> None:
    """A module whose forward or class was replaced calls no operator."""
    model = _model()
    assert not fusedops.fusion_status(model)
    report = fusedops.fuse_model(model, exclude=["1.linear"])
    status = fusedops.fusion_status(model)
    assert [(m.name, m.calls, m.by) for m in status] == [(m.name, m.calls, m.by) for m in report]
    model[0].norm.forward = functools.partial(model[0].norm.forward)
    model[2].__class__ = type("Wrapped", (type(model[2]),), {})
    reasons = {m.name: m.reason for m in fusedops.fusion_status(model).modules}
    assert reasons["0.norm"] == "its forward was replaced on the instance after it was fused"
    assert reasons["0"] == reasons["0.act"] == ""
    assert reasons["1"] == "not fused"
    assert reasons["2"] == "its class was changed after it was fused"
    with pytest.raises(
        TypeError, match=r"fusion_status: model must be a torch\.nn\.Module, got str"
    ):
        fusedops.fusion_status("model")  # type: ignore[arg-type]


def _other_forward(self: Any, *args: Any) -> Any:
    return type(self).forward(self, *args)


def _of_liger(name: str) -> Any:
    """Return a forward whose code is in a module of Liger-Kernel."""
    code = _other_forward.__code__
    return types.FunctionType(code, {"__name__": f"liger_kernel.transformers.{name}"})


def _replace(module: nn.Module, forward: Any) -> None:
    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


def test_forwards_that_are_replaced_in_a_graph_are_reported_with_their_module() -> None:
    """Those of fused modules and others, on the instance or of a class of Liger-Kernel."""
    model = _model()
    model[1].act = type("LigerGELU", (nn.GELU,), {"forward": _of_liger("geglu")})()
    fusedops.fuse_model(model)
    _replace(model[0].norm, _of_liger("layer_norm"))
    # A wrapper has the ``__module__`` of what it wraps; Accelerate's hooks are partial functions.
    _replace(model[0].linear, functools.wraps(nn.Linear.forward)(lambda self, x: x))
    hooked = functools.partial(_other_forward, model[2])
    model[2].forward = functools.update_wrapper(hooked, model[2].forward)
    model[1].norm.forward = model[1].norm.forward  # its own
    status = fusedops.fusion_status(model)
    forwards = {m.name: m.forward for m in status.modules if m.forward}
    assert forwards == {
        "0.norm": "liger_kernel.transformers.layer_norm",
        "0.linear": __name__,
        "1.act": "liger_kernel.transformers.geglu",
        "2": __name__,
    }
    prefix = "in the graph, with a forward of"
    assert str(status).splitlines()[1:-2] == [
        "  1 x Sequential  operators in the regions of its graph, by fusion_status(model, *inputs)",
        "  1 x GELU        in the graph; elsewhere gelu",
        "  1 x LayerNorm   in the graph; elsewhere layer_norm",
        f"  1 x LayerNorm   {prefix} liger_kernel.transformers.layer_norm",
        f"  1 x Linear      {prefix} {__name__}",
        f"  1 x LigerGELU   {prefix} liger_kernel.transformers.geglu",
        f"  1 x RMSNorm     {prefix} {__name__}",
    ]
    assert f"Linear      {prefix} {__name__}\n" in status.table()


def test_unit_with_a_forward_of_liger_kernel_runs_no_graph() -> None:
    """Another forward may call the one that it replaces."""
    model = _model()
    fusedops.fuse_model(model)
    _replace(model, _other_forward)
    assert fusedops.fusion_status(model).modules[1].by == ""
    _replace(model, _of_liger("model.llama"))
    first, second, *_ = fusedops.fusion_status(model).modules
    origin = "liger_kernel.transformers.model.llama"
    assert first.reason == f"its forward was replaced by one of {origin}, which runs no graph"
    assert second.by is None


@pytest.mark.parametrize("compiles", [False, True])
def test_report_says_that_options_of_a_second_call_change_nothing(compiles: bool) -> None:
    model = _model()
    fusedops.fuse_model(model)
    hints = fusedops.fuse_model(model, compile_rest=compiles).hints
    assert any("unfuse_model comes first" in hint for hint in hints) == compiles


@pytest.mark.parametrize("compiles", [False, True])
def test_status_says_that_a_model_is_compiled_from_outside(compiles: bool) -> None:
    model, x = _model(), torch.randn(2, 3, 4)
    fusedops.fuse_model(model)
    if compiles:
        model.compile(backend="eager")
    hints = fusedops.fusion_status(model, x).hints
    assert any("model.compile" in hint for hint in hints) == compiles


@pytest.mark.parametrize("name", ["dry_run", "graph", "compile_rest"])
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
