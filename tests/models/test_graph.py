"""``fuse_model(model, graph=True)``: a model runs as a graph of the backend, whatever happens to it."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import fusedops
from backends import PostNorm, select_as_large
from fusedops.backend import entry
from fusedops.core.compat import dynamo
from fusedops.core.launches import launch
from fusedops.models import graph
from sample_models import ModelSpec
from support import DEVICE
from zoo import SAMPLES, build, inputs, run, transformers_only, undropped

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]

_WIDTH = 24


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small regions become operators, and Inductor fails the test."""
    select_as_large(monkeypatch.setattr)

    def fail(*args: Any) -> Any:
        raise AssertionError("Inductor was called")

    monkeypatch.setattr(entry, "compile_by_inductor", fail)


def _blocks(p: float = 0.0) -> Any:
    """Return a model with two regions in each of two blocks."""
    return nn.Sequential(PostNorm(_WIDTH, p), PostNorm(_WIDTH, p)).to(DEVICE)


def _fused(p: float = 0.0, **options: Any) -> tuple[Any, Any]:
    """Return a model, and a fused copy of it."""
    model = _blocks(p)
    fused = copy.deepcopy(model)
    fusedops.fuse_model(fused, graph=True, **options)
    return model, fused


def _rows(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 5)), _WIDTH, device=DEVICE)


def _gradients(model: nn.Module, *args: Any) -> list[Tensor]:
    """Return the output and the gradients of the parameters that are trained."""
    y = model(*args)
    trained = [p for p in model.parameters() if p.requires_grad]
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y, *torch.autograd.grad(y, trained, cotangent)]


def _agree(model: nn.Module, fused: nn.Module, *args: Any, launches: bool = True) -> None:
    """Check that a step of both has the same results, and whether the second launches kernels.

    Results of some tens of operations differ by some ``eps`` of fp32.
    """
    expected = _gradients(model, *args)
    with launch.record() as names:
        results = _gradients(fused, *args)
    assert bool(_of_regions(names)) == launches
    for result, exact in zip(results, expected, strict=True):
        atol = 1e-5 * float(exact.detach().abs().max())
        torch.testing.assert_close(result, exact, rtol=0, atol=atol)


def _of_regions(names: list[str]) -> int:
    """Return how many kernels are those of regions, and not those of norms by themselves."""
    return sum(name in ("forward_kernel", "backward_kernel") for name in names)


def _launches(function: Callable[..., Any], *args: Any) -> int:
    with launch.record() as names:
        function(*args)
    return _of_regions(names)


# --- values ---------------------------------------------------------------------------------------

# Those with other kinds of arguments, outputs and blocks.
_SHORT = ("leaves", "bert", "t5_gated")


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(s, id=s.name, marks=() if s.name in _SHORT else pytest.mark.full)
        for s in SAMPLES
    ],
)
def test_model_has_the_values_and_gradients_of_the_original(spec: ModelSpec) -> None:
    original, fused, arguments = undropped(spec), undropped(spec), inputs(spec)
    fusedops.fuse_model(fused, graph=True)
    (outputs, gradients) = run(original, arguments)
    with launch.record() as names:
        results, own = run(fused, arguments)
    assert names or spec.name == "vocabulary"  # which has no region
    assert own.keys() == gradients.keys()
    largest = max(float(g.abs().max()) for g in gradients.values())
    for result, exact in zip(results, outputs, strict=True):
        torch.testing.assert_close(result, exact, rtol=0, atol=1e-5 * float(exact.abs().max()))
    for name, exact in gradients.items():
        torch.testing.assert_close(own[name], exact, rtol=0, atol=2e-5 * largest)


def test_inference_of_many_rows_is_a_graph_and_of_few_is_not() -> None:
    """A step of training is a graph whatever its rows: a checkpointed part draws masks again."""
    _, fused = _fused()
    fused.eval()
    with torch.no_grad():
        assert _launches(fused, _rows(graph.FEW_ROWS)) == 0
        assert _launches(fused, _rows(graph.FEW_ROWS + 1)) > 0
        assert _launches(fused.train(), _rows(graph.FEW_ROWS)) > 0
    assert _launches(fused.eval(), _rows(graph.FEW_ROWS)) > 0


class _Conditioned(nn.Module):
    """A model with a number for each row of a batch before the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = _blocks()

    def forward(self, time: Tensor, x: Tensor) -> Any:
        return self.blocks(x + time[:, None, None])


@pytest.mark.parametrize("keywords", [False, True])
def test_rows_are_those_of_the_argument_with_the_most(keywords: bool) -> None:
    fused = _Conditioned().to(DEVICE).eval()
    fusedops.fuse_model(fused)
    time, x = torch.randn(2, device=DEVICE), _rows(2, graph.FEW_ROWS)
    call = (lambda: fused(time=time, x=x)) if keywords else (lambda: fused(time, x))
    with torch.no_grad():
        assert _launches(call) > 0


def test_nested_tensors_run_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()).to(DEVICE)
    nested = torch.nested.nested_tensor([_rows(2), _rows(3)])
    with torch.no_grad():
        expected = model(nested).unbind()
        fusedops.fuse_model(model)
        assert all(map(torch.equal, model.eval()(nested).unbind(), expected))


class _Counting(nn.Module):
    """A block with a number, which it counts up, behind a graph break."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.block = number, PostNorm(_WIDTH, 0.0)

    def forward(self, x: Tensor) -> Any:
        torch._dynamo.graph_break()
        self.number += 1
        return self.block(x) * self.number


def test_numbers_of_many_layers_and_calls_do_not_end_the_graphs() -> None:
    """PyTorch's limit is eight compilations of a code object."""
    fused = nn.Sequential(*map(_Counting, range(10))).to(DEVICE)
    fusedops.fuse_model(fused)
    assert min([_launches(fused, _rows()) for _ in range(10)]) >= 10


def test_norm_is_part_of_a_region_in_a_graph_and_calls_its_operator_beside_it() -> None:
    _, fused = _fused()
    with launch.record() as names:
        fused(_rows())
    assert set(names) == {"forward_kernel"}
    with launch.record() as names, torch.no_grad():
        fused.eval()(_rows())
    assert names == ["norm_forward_kernel"] * 2


@transformers_only
def test_tokens_of_a_generation_run_as_they_are() -> None:
    """The prompt's tokens are counted, and not the encoder's rows or masks, which come first."""
    (spec,) = (s for s in SAMPLES if s.name == "t5_gated")
    model = build(spec)
    fusedops.fuse_model(model, graph=True)
    prompt = torch.randint(1, 30, (graph.FEW_ROWS + 1, 2), device=DEVICE)
    token = {"attention_mask": torch.ones_like(prompt), "decoder_input_ids": prompt[:, :1]}
    with torch.no_grad():
        states = model.encoder(input_ids=prompt)  # no unit by itself
        token["encoder_outputs"] = states
        assert _launches(lambda: model(**token)) == 0
        token["decoder_input_ids"] = prompt
        assert _launches(lambda: model(**token)) > 0
    assert graph._gains(_blocks().eval(), prompt[:, :1])  # it generates nothing


def test_device_without_kernels_runs_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fused = _fused()
    monkeypatch.setattr(launch, "runs_kernels", lambda kind: False)
    monkeypatch.setattr(graph, "_compiled_function", None)
    _agree(model, fused, _rows(), launches=False)


# --- other tracers and modes ----------------------------------------------------------------------


def test_outer_compilation_takes_the_whole_model() -> None:
    _, fused = _fused()
    graphs = []

    def record(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in gm.graph.nodes])
        return gm.forward

    x = _rows()
    compiled: Any = torch.compile(fused, backend=record, fullgraph=True)
    assert _launches(compiled, x) == 0
    (targets,) = graphs
    assert sum("linear" in target for target in targets) == 4


_x = _rows(65)
_OBSERVERS: dict[str, Callable[[Any], Any]] = {
    "jit": lambda model: torch.jit.trace(model, _x, check_trace=False)(_x),
    "export": lambda model: torch.export.export(model, (_x,)).module()(_x),
    "fx": lambda model: torch.fx.symbolic_trace(model)(_x),
    "vmap": lambda model: torch.func.vmap(model)(_x.view(65, 1, _WIDTH)),
    "func": lambda model: torch.func.jvp(model, (_x,), (_x,)),
}


@pytest.mark.parametrize("observer", _OBSERVERS.values(), ids=_OBSERVERS)
def test_tracers_and_transforms_see_the_original(
    observer: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, fused = _fused()
    monkeypatch.setattr(graph, "_compiled_function", None)
    expected, result = observer(model.eval()), observer(fused.eval())
    torch.testing.assert_close(result, expected)


def test_modes_and_forward_derivatives_see_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fused = _fused()
    monkeypatch.setattr(graph, "_compiled_function", None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert fused(torch.empty(2, 5, _WIDTH, device=DEVICE)).shape == (2, 5, _WIDTH)
    with forward_ad.dual_level():
        dual = fused(forward_ad.make_dual(_rows(), _rows()))
        assert forward_ad.unpack_dual(dual).tangent is not None


def test_replica_of_data_parallel_runs_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call makes new replicas, which would be compiled each time."""
    _, fused = _fused()
    fused._is_replica = True
    assert _launches(fused, _rows()) == 0


# --- hooks ----------------------------------------------------------------------------------------

_HOOKS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "forward": lambda module, hook: module.register_forward_hook(hook),
    "pre": lambda module, hook: module.register_forward_pre_hook(hook),
    "backward": lambda module, hook: module.register_full_backward_hook(hook),
    "global": lambda module, hook: nn.modules.module.register_module_forward_hook(hook),
}


@pytest.mark.parametrize("register", _HOOKS.values(), ids=_HOOKS)
@pytest.mark.parametrize("path", ["", "1", "1.norm"])
def test_hook_after_the_first_call_runs_and_is_removed(
    register: Callable[[nn.Module, Any], Any], path: str
) -> None:
    model, fused = _fused()
    x, calls = _rows(), list[nn.Module]()
    fused(x)
    handle = register(fused.get_submodule(path), lambda module, *_: calls.append(module))
    _gradients(fused, x)
    assert fused.get_submodule(path) in calls
    handle.remove()
    calls.clear()
    _agree(model, fused, x)
    assert not calls


def test_hook_changes_the_output() -> None:
    models, x = _fused(), _rows()
    models[1](x)
    for model in models:
        model[0].norm.register_forward_hook(lambda module, args, y: 3.0 * y)
    _agree(*models, x)


def test_model_that_cannot_be_compiled_runs_as_it_is_and_pytorch_logs_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a bug of the compiler")

    monkeypatch.setattr(graph, "backend", fail)
    model, fused = _fused()
    _agree(model, fused, _rows(), launches=False)
    assert "a bug of the compiler" in caplog.text


def test_without_pytorchs_option_for_hooks_the_original_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hooks that come later could not run in a graph."""
    model, fused = _fused()
    monkeypatch.setattr(dynamo, "_OPTIONS", {"an option of another release": False})
    dynamo.skips_hooks.cache_clear()
    _agree(model, fused, _rows(), launches=False)


# --- changed models -------------------------------------------------------------------------------


def _replace_a_layer(model: Any) -> None:
    torch.manual_seed(5)
    model[0].up = nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.Tanh()).to(DEVICE)


def _patch_a_forward(model: Any) -> None:
    model[1].forward = lambda x: 2.0 * PostNorm.forward(model[1], x)


_CHANGES: dict[str, Callable[[Any], Any]] = {
    "layer": _replace_a_layer,
    "forward": _patch_a_forward,
    "parametrization": lambda model: parametrizations.weight_norm(model[0].up),
    "frozen": lambda model: model[0].requires_grad_(False),
    "dtype": lambda model: model.to(torch.float64),
    "weights": lambda model: model[1].norm.weight.data.mul_(3.0),
    "mode": lambda model: model.eval(),
    "data": lambda model: model.load_state_dict(
        {k: 2 * v for k, v in model.state_dict().items()}, assign=True
    ),
}


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_changed_model_runs_what_changed(change: Callable[[Any], Any], when: str) -> None:
    model, x = _blocks(), _rows()
    fused = copy.deepcopy(model)
    if when == "before":
        change(model)
        change(fused)
    fusedops.fuse_model(fused, graph=True)
    _gradients(fused, x.to(next(fused.parameters()).dtype))
    if when == "after":
        change(model)
        change(fused)
    _agree(model, fused, x.to(next(model.parameters()).dtype))


def test_class_that_is_patched_after_the_first_call_runs_the_patch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = PostNorm(_WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x)  # type: ignore[no-any-return]

    model = Model().to(DEVICE)
    fused = copy.deepcopy(model)
    fusedops.fuse_model(fused, graph=True)
    _agree(model, fused, _rows())
    monkeypatch.setattr(Model, "forward", lambda self, x: 2.0 * self.block(x))
    _agree(model, fused, _rows())


def test_forward_on_the_instance_leaves_the_model_to_its_parts() -> None:
    """As from Accelerate before fusing. The parts are units then."""
    model = _blocks()
    model.forward = lambda x: model[1](model[0](x))
    report = fusedops.fuse_model(model, graph=True)
    assert [line.name for line in report if line.rule == "graph"] == ["0", "1"]


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "re-entrant"])
def test_checkpointed_model_draws_the_same_masks(use_reentrant: bool) -> None:
    """Without dropout the gradients are eager ones. With it, both passes have the same output."""
    model, fused = _fused()
    x = _rows().requires_grad_()
    for each in (model, fused):
        checkpoint(each, x, use_reentrant=use_reentrant).square().sum().backward()
    for ours, theirs in zip(fused.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    outputs = []
    _, fused = _fused(0.5)
    fused.register_forward_hook(lambda module, args, y: outputs.append(y.detach()))
    checkpoint(fused, x, use_reentrant=use_reentrant).sum().backward()
    assert len(outputs) == 2 or not use_reentrant
    torch.testing.assert_close(outputs[-1], outputs[0])


def test_autocast_is_that_of_the_call() -> None:
    model, fused = _fused()
    x = _rows()
    for enabled in (False, True, False):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=enabled):
            y, z = model(x), fused(x)
        assert y.dtype == z.dtype
        eps = 2.0**-6 if enabled else 1e-5
        torch.testing.assert_close(z, y, rtol=0, atol=eps * float(y.detach().abs().max()))


# --- the module stays what it is ------------------------------------------------------------------


def test_copies_and_pickles_are_fused_and_have_graphs_of_their_own() -> None:
    model, fused = _fused()
    x = _rows()
    fused(x)
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert type(other) is type(fused)
        assert other.state_dict().keys() == model.state_dict().keys()
        assert vars(other).keys() == vars(model).keys()
        _agree(model, other, x)
        with torch.no_grad():
            other[0].up.weight.mul_(2.0)
        _agree(model, fused, x)


def test_unfused_model_runs_the_original_and_may_be_fused_again() -> None:
    model, fused = _fused()
    x = _rows()
    fused(x)
    fusedops.unfuse_model(fused)
    assert type(fused) is nn.Sequential
    assert vars(fused).keys() == vars(model).keys()
    _agree(model, fused, x, launches=False)
    fusedops.fuse_model(fused, graph=True)
    _agree(model, fused, x)


def test_model_is_freed_after_a_call() -> None:
    _, fused = _fused()
    fused(_rows()).sum().backward()
    reference = weakref.ref(fused)
    del fused
    gc.collect()
    assert reference() is None


def test_each_of_many_models_is_compiled() -> None:
    """Dynamo compiles a code object eight times, and then no more."""
    models = list[nn.Module]()
    for count in range(1, torch._dynamo.config.recompile_limit + 3):
        model = nn.Sequential(*[nn.Identity()] * count, PostNorm(_WIDTH)).to(DEVICE)
        fusedops.fuse_model(model, graph=True)
        assert _launches(model, _rows()) == 2
        models.append(model)  # its code would be freed with it


@transformers_only
def test_signature_is_the_originals() -> None:
    """Transformers' trainer and `generate` read it."""
    (spec,) = (s for s in SAMPLES if s.name == "bert")
    model = build(spec)
    expected = inspect.signature(model.forward)
    fusedops.fuse_model(model, graph=True)
    assert inspect.signature(model.forward) == expected


# --- units, rules and reports ---------------------------------------------------------------------


def test_excluded_module_is_in_no_graph() -> None:
    model, fused = _fused(exclude=["0.norm"])
    lines = {line.name: line for line in fusedops.fusion_status(fused).modules}
    assert [name for name, line in lines.items() if line.rule == "graph"] == ["1"]
    assert lines["1.norm"].by == "1"
    seen = list[bool]()
    fused[0].norm.register_forward_hook(lambda *_: seen.append(torch.compiler.is_compiling()))
    _agree(model, fused, _rows())
    assert seen == [False]


@pytest.mark.parametrize("exclude", [["graph"], [""], [nn.Sequential]])
def test_excluded_rule_and_excluded_model_have_no_graph(exclude: list[Any]) -> None:
    _, fused = _fused(exclude=exclude)
    assert not [line for line in fusedops.fusion_status(fused) if line.rule == "graph"]


def test_norms_beside_units_call_operators() -> None:
    model = nn.ModuleList([PostNorm(_WIDTH), nn.LayerNorm(_WIDTH)])
    report = fusedops.fuse_model(model, graph=True)
    calls = {line.name: line.calls for line in report if "norm" in line.rule}
    assert calls == {"0.norm": "in the graph; elsewhere layer_norm", "1": "layer_norm"}


def test_unit_that_was_fused_before_is_left_and_runs_in_the_outer_graph() -> None:
    model = _blocks()
    fused = copy.deepcopy(model)
    fusedops.fuse_model(fused[0], graph=True)
    fusedops.fuse_model(fused, graph=True)
    again = fusedops.fuse_model(fused, graph=True)
    assert {m.reason for m in again.modules if m.name in ("", "0")} == {"fused already"}
    assert not again
    _agree(model, fused, _rows())


def test_status_with_inputs_has_the_regions_of_each_unit() -> None:
    """Of a unit in a model, too, whose inputs are those of the model's call."""
    _, fused = _fused(exclude=["0.norm"])
    state = {name: t.clone() for name, t in fused.state_dict().items()}
    with launch.record() as names:
        status = fusedops.fusion_status(fused, _rows())
    assert not _of_regions(names)
    assert list(status.graphs) == ["1"]
    regions = status.graphs["1"].fused
    assert {name for region in regions for name in region.modules} >= {"up", "down", "norm"}
    assert all("backends.py:" in line for region in regions for line in region.lines)
    assert f"1: {status.graphs['1']}" in str(status)
    assert status.graphs["1"].runner == "eager"
    assert all(torch.equal(t, state[name]) for name, t in fused.state_dict().items())
    assert not fusedops.fusion_status(fused).graphs


def test_status_names_units_whose_call_is_small() -> None:
    """They run it without their graph, which is listed all the same."""
    _, fused = _fused(exclude=["0.norm"])
    fused.eval()
    note = "\n  this call is small: the module runs without this graph"
    for rows, is_small in ((graph.FEW_ROWS, True), (graph.FEW_ROWS + 1, False)):
        with torch.no_grad():
            status = fusedops.fusion_status(fused, _rows(rows))
            assert (_launches(fused, _rows(rows)) == 0) == is_small
        assert status.small == (("1",) if is_small else ())
        assert status.graphs["1"].fused
        assert (note in str(status)) == is_small
    assert not fusedops.fusion_status(fused, _rows(graph.FEW_ROWS)).small  # with gradients


@transformers_only
def test_status_of_a_token_says_that_the_model_runs_without_its_graph() -> None:
    model = _causal().eval()
    fusedops.fuse_model(model, exclude=["generation"])
    token = torch.ones(graph.FEW_ROWS + 1, 1, dtype=torch.long, device=DEVICE)
    with torch.no_grad():
        status = fusedops.fusion_status(model, token)
    assert status.small == ("",)
    assert "  this call is small: the model runs without this graph" in str(status).splitlines()
    fusedops.unfuse_model(model)
    fusedops.fuse_model(model, compile_rest=True)  # Inductor compiles each call
    with torch.no_grad():
        assert not fusedops.fusion_status(model, token).small


@pytest.mark.parametrize("dry_run", [False, True])
def test_check_compares_the_whole_model(dry_run: bool) -> None:
    model, fused = _blocks(), _blocks()
    x = _rows()
    with launch.record() as names:
        report = fusedops.fuse_model(fused, graph=True, check=x, dry_run=dry_run)
    assert names
    assert report.difference is not None
    assert report.difference.passes
    assert report.modules[0].difference is not None
    assert fused not in graph._compiled
    assert (type(fused) is type(model)) is dry_run


def test_check_restores_a_unit_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_call", lambda forward, module, x: 2.0 * forward(module, x))
    model = _blocks()
    report = fusedops.fuse_model(model, graph=True, check=_rows())
    assert report.modules[0].reason == "graph differs from it"
    assert type(model) is nn.Sequential


def _causal(**options: Any) -> Any:
    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        **options,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(DEVICE)


@transformers_only
def test_loss_and_generation_are_in_the_graphs_rule() -> None:
    """They survive pickling, and the processor of `generate` is this library's."""
    model = _causal().train()
    ids = torch.randint(1, 40, (2, 7), device=DEVICE)
    expected = model(input_ids=ids, labels=ids).loss
    report = fusedops.fuse_model(model, graph=True, loss=True)
    assert "linear_cross_entropy" in report.modules[0].calls
    assert "no_repeat_ngram" in report.modules[0].calls
    for each in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        output = each(input_ids=ids, labels=ids)
        assert output.logits is None
        torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=0)
    model.eval()
    options = {"max_new_tokens": 5, "do_sample": False, "no_repeat_ngram_size": 2}
    tokens = model.generate(ids, **options)
    fusedops.unfuse_model(model)
    assert torch.equal(tokens, model.generate(ids, **options))


@transformers_only
def test_reason_why_a_loss_is_left_is_in_the_units_line() -> None:
    model = _causal()
    model.lm_head = nn.Sequential(model.lm_head)
    report = fusedops.fuse_model(model, graph=True, loss=True)
    assert "head" in report.modules[0].calls


@transformers_only
@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_of_peft_run(when: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    ids = torch.randint(1, 40, (2, 7), device=DEVICE)
    expected = peft.get_peft_model(_causal(), config)
    model = _causal()
    if when == "after":
        fusedops.fuse_model(model, graph=True)
        model(input_ids=ids)
    fused = peft.get_peft_model(model, config)
    fused.load_state_dict(expected.state_dict())
    if when == "before":
        fusedops.fuse_model(fused, graph=True)
    for adapted in (True, False):
        if not adapted:
            for each in (fused, expected):
                each.base_model.disable_adapter_layers()
        with launch.record() as names:
            result = fused(input_ids=ids).logits
        assert names
        torch.testing.assert_close(result, expected(input_ids=ids).logits, rtol=0, atol=1e-4)


def test_compile_rest_runs_the_rest_by_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor compiles for devices without kernels, and few rows, too."""
    calls = list[str]()

    def compiled(gm: torch.fx.GraphModule, *_: Any) -> Any:
        calls.append("")
        return gm.forward

    monkeypatch.setattr(entry, "compile_by_inductor", compiled)
    model, fused = _fused(compile_rest=True)
    _agree(model, fused, _rows())
    with torch.no_grad():
        fused.eval()(_rows(1))
    assert len(calls) == 2
    pickle.loads(pickle.dumps(fused))(_rows())
    assert len(calls) == 3
    fusedops.unfuse_model(fused)
    fusedops.fuse_model(fused, graph=True)
    fused(_rows())
    assert len(calls) == 3


@pytest.fixture(autouse=True)
def cleared() -> Iterator[None]:
    yield
    graph._compiled.clear()
    dynamo.skips_hooks.cache_clear()
