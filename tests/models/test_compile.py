"""Fused models under torch.compile: one graph, the operators whole in it; and compile_rest."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

import fusedops
from sample_models import ModelSpec
from support import DEVICE, KERNEL_PATH, torch_version
from zoo import SAMPLES, build, counted, inputs, making_kernels, outputs, undropped

_NAMES = (
    "leaves",
    "torch_post_norm",
    "torch_pre_norm",
    "bert",
    "distilbert",
    "bart",
    "gpt2",
    "opt",
    "vit",
    "t5",
    "t5_gated",
    "llama",
    "gemma",
)
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def some(*short: str) -> pytest.MarkDecorator:
    """Models; ``short`` are those of the short suite, as Dynamo takes seconds for each."""
    return pytest.mark.parametrize(
        "spec",
        [
            pytest.param(spec, id=spec.name, marks=[] if spec.name in short else pytest.mark.full)
            for spec in SAMPLES
            if spec.name in _NAMES
        ],
    )


# What Dynamo asks of classes depends on what kinds of blocks a model has.
each_kind = some("leaves", "bert")


class _Recorder:
    """A backend that runs graphs as they are, and keeps the operators in them."""

    def __init__(self) -> None:
        self.targets: list[str] = []
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        self.graphs += 1
        self.targets += [
            str(node.target) for node in graph.graph.nodes if node.op == "call_function"
        ]
        return graph.forward


def _arguments(spec: ModelSpec) -> dict[str, Any]:
    # A cache is a Python object that Transformers fills on the way; without it there is less to
    # trace.
    return {
        **inputs(spec),
        **(
            {"use_cache": False}
            if spec.transformers and spec.name not in ("bert", "distilbert", "vit")
            else {}
        ),
    }


@some("leaves", "torch_pre_norm", "llama")
def test_one_graph(spec: ModelSpec) -> None:
    """In training mode; dropout off, so that there is something to compare with."""
    model, arguments = undropped(spec), _arguments(spec)
    fusedops.fuse_model(model)
    with counted() as calls:
        expected = outputs(model(**arguments))
    recorder = _Recorder()
    result = outputs(torch.compile(model, backend=recorder, fullgraph=True)(**arguments))
    assert recorder.graphs == 1
    for a, b in zip(expected, result, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-5 * float(a.detach().abs().max()))
    if KERNEL_PATH:
        whole = [name for name in recorder.targets if name.startswith("fusedops.")]
        assert len(whole) == sum(calls.values()), whole


_NAME = re.compile(r"_modules\['([^']+)'\]")
_GUARDED = re.compile(r"source=L\['self'\](\S*_modules\['[^']+'\]), .*tag_safe=\((\w+)")
_BASES = re.compile(r"source=type\(L\['self'\](\S*_modules\['[^']+'\])\)\.__mro__\[(\d+)\], ")


def _passes_over() -> Any:
    """Modules are passed over of which no dictionary was changed.

    That is so by default in 2.11, no longer in 2.13.
    """
    return torch._dynamo.config.patch(use_recursive_dict_tags_for_guards=True)


passing_over = pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "use_recursive_dict_tags_for_guards"),
    reason="this PyTorch checks each module in any case",
)


def _guards(
    model: nn.Module, arguments: dict[str, Any]
) -> tuple[set[str], set[str], set[tuple[str, int]]]:
    """The modules that are passed over before a step while nothing changes them, those that are checked anew, and those for
    which something is looked for in the bases of their class, with the base's place."""
    torch._dynamo.reset()
    with _passes_over(), making_kernels():
        torch.compile(model, backend="eager")(**arguments)
    (entry,) = _debug_get_cache_entry_list(type(model).forward.__code__)
    text = str(entry.guard_manager)
    results = [(_name(source), safe) for source, safe in _GUARDED.findall(text)]
    passed, checked = (
        {name for name, safe in results if safe == kind} for kind in ("True", "False")
    )
    return passed, checked, {(_name(source), int(place)) for source, place in _BASES.findall(text)}


def _name(source: str) -> str:
    return ".".join(_NAME.findall(source))


@pytest.mark.once
@passing_over
@pytest.mark.skipif(
    torch_version() >= (2, 15), reason="a check of two modules for one class is of both"
)
@each_kind
def test_fused_model_adds_few_guards(spec: ModelSpec) -> None:
    """Guards of a fused model check no more modules before a step than those of the model as it was.

    But for its blocks, and so what they are in: Transformers looks up the class of one that may be
    checkpointed.
    """
    model, arguments = undropped(spec), _arguments(spec)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        _, checked, bases = _guards(model, arguments)
        fusedops.fuse_model(model)
        passed, checked_fused, bases_fused = _guards(model, arguments)
    blocks = [
        name for name, m in model.named_modules() if hasattr(type(m), "gradient_checkpointing")
    ]
    assert passed
    assert bases_fused or not blocks
    # A fused class has its original for its first base.
    more = (checked_fused - checked) | (
        {name for name, place in bases_fused if place >= 2} - {name for name, _ in bases}
    )
    assert not {
        name for name in more if not any(f"{block}.".startswith(f"{name}.") for block in blocks)
    }


@pytest.mark.once
@passing_over
@some("leaves")
def test_changes_of_class(spec: ModelSpec) -> None:
    """Compiled code notices that the model, or a module of it, was fused or is no longer."""
    model, arguments = undropped(spec), _arguments(spec)
    recorder = _Recorder()
    compiled = torch.compile(model, backend=recorder)
    with _passes_over(), torch.autocast(DEVICE.type, torch.bfloat16), making_kernels():
        compiled(**arguments)
        compiled(**arguments)
        before = recorder.graphs
        report = fusedops.fuse_model(model)
        compiled(**arguments)
        compiled(**arguments)
        fused = recorder.graphs
        assert fused > before
        names = [entry.name for entry in report if entry.rule and entry.name]
        modules = dict(model.named_modules())
        last = next(
            modules[name]
            for name in names
            if not any(other.startswith(f"{name}.") for other in names)
        )
        fusedops.unfuse_model(last)
        compiled(**arguments)
        assert recorder.graphs > fused
    with _passes_over(), torch.autocast(DEVICE.type, torch.bfloat16), making_kernels():
        torch._dynamo.reset()
        fusedops.fuse_model(model)
        compiled(**arguments)
        graphs = recorder.graphs
        fusedops.unfuse_model(model)
        compiled(**arguments)
        assert recorder.graphs > graphs


@some("gpt2")
def test_compile_rest(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model is compiled in place, forward and backward; unfuse_model takes that back."""
    recorder = _Recorder()
    monkeypatch.setattr(nn.Module, "compile", _with_backend(recorder))
    model, arguments = build(spec), _arguments(spec)
    original = build(spec)
    expected = outputs(original(**arguments))
    report = fusedops.fuse_model(model, compile_rest=True)
    assert report
    assert type(model).__name__ == type(original).__name__
    result = outputs(model(**arguments))
    assert recorder.graphs >= 1
    for a, b in zip(expected, result, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-5 * float(a.detach().abs().max()))
    sum(y.sum() for y in result).backward()
    graphs = recorder.graphs
    fusedops.unfuse_model(model)
    assert vars(model).keys() == vars(original).keys()
    assert all(map(torch.equal, outputs(model(**arguments)), expected))
    assert recorder.graphs == graphs


def _with_backend(backend: Any) -> Any:
    original = nn.Module.compile

    def compile(self: nn.Module) -> None:  # noqa: A001, the method's name
        original(self, backend=backend)

    return compile


def test_a_compilation_of_the_users_is_kept() -> None:
    model = nn.Sequential(nn.LayerNorm(4))
    fusedops.fuse_model(model)
    model.compile(backend="eager")
    fusedops.unfuse_model(model)
    assert type(model[0]) is nn.LayerNorm
    assert model._compiled_call_impl is not None


def test_a_dry_run_compiles_nothing() -> None:
    model = nn.Sequential(nn.LayerNorm(4))
    fusedops.fuse_model(model, dry_run=True, compile_rest=True)
    assert model._compiled_call_impl is None
