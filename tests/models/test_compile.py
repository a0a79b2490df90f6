"""Fused models under torch.compile: one graph with whole operators and few guards."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

import fusedops
from sample_models import ModelSpec
from support import DEVICE, KERNEL_PATH, torch_version
from zoo import SAMPLES, counted, inputs, making_kernels, outputs, undropped

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
    """Parametrize over models. Dynamo takes seconds for each, so the short suite runs ``short``."""
    return pytest.mark.parametrize(
        "spec",
        [
            pytest.param(spec, id=spec.name, marks=[] if spec.name in short else pytest.mark.full)
            for spec in SAMPLES
            if spec.name in _NAMES
        ],
    )


class _Recorder:
    """A backend that runs graphs without compiling them, and records their operators."""

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
    """Return the inputs of a model, without a cache, so that Dynamo traces less."""
    arguments = inputs(spec)
    if spec.transformers and spec.name not in ("bert", "distilbert", "vit"):
        arguments["use_cache"] = False
    return arguments


@some("leaves", "torch_pre_norm", "llama")
def test_fused_model_is_one_graph_with_whole_operators(spec: ModelSpec) -> None:
    """The model is in training mode without dropout, so that results can be compared."""
    model, arguments = undropped(spec), _arguments(spec)
    fusedops.fuse_model(model)
    with counted() as calls:
        expected = outputs(model(**arguments))
    recorder = _Recorder()
    result = outputs(torch.compile(model, backend=recorder, fullgraph=True)(**arguments))
    assert recorder.graphs == 1
    for eager, compiled in zip(expected, result, strict=True):
        atol = 1e-5 * float(eager.detach().abs().max())
        torch.testing.assert_close(compiled, eager, rtol=0, atol=atol)
    if KERNEL_PATH:
        operators = [name for name in recorder.targets if name.startswith("fusedops.")]
        assert len(operators) == sum(calls.values()), operators


# Patterns for the text of Dynamo's guards:
#
# - the name of a module;
# - a guard on a module, and whether the guard may be skipped;
# - a guard on a base of a module's class, and the base's index in ``__mro__``.
_NAME = re.compile(r"_modules\['([^']+)'\]")
_MODULE_GUARD = re.compile(r"source=L\['self'\](\S*_modules\['[^']+'\]), .*tag_safe=\((\w+)")
_BASE_GUARD = re.compile(r"source=type\(L\['self'\](\S*_modules\['[^']+'\])\)\.__mro__\[(\d+)\], ")


def _skipping_guards() -> Any:
    """Return a context in which Dynamo skips guards of modules whose dictionaries did not change.

    This is the default in PyTorch 2.11, but not in 2.13.
    """
    return torch._dynamo.config.patch(use_recursive_dict_tags_for_guards=True)


skips_guards = pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "use_recursive_dict_tags_for_guards"),
    reason="this PyTorch checks each module in any case",
)


class _Guards(NamedTuple):
    """The modules on which Dynamo has guards.

    Attributes:
        skipped: names of modules that are not checked before a step if they did not change.
        checked: names of modules that are checked before each step.
        bases: names of modules with a guard on a base of their class, with the base's index.
    """

    skipped: set[str]
    checked: set[str]
    bases: set[tuple[str, int]]


def _guards(model: nn.Module, arguments: dict[str, Any]) -> _Guards:
    """Compile a model and return its guards."""
    torch._dynamo.reset()
    with _skipping_guards(), making_kernels():
        torch.compile(model, backend="eager")(**arguments)
    (entry,) = _debug_get_cache_entry_list(type(model).forward.__code__)
    text = str(entry.guard_manager)
    module_guards = [(_name(source), safe) for source, safe in _MODULE_GUARD.findall(text)]
    return _Guards(
        skipped={name for name, safe in module_guards if safe == "True"},
        checked={name for name, safe in module_guards if safe == "False"},
        bases={(_name(source), int(index)) for source, index in _BASE_GUARD.findall(text)},
    )


def _name(source: str) -> str:
    return ".".join(_NAME.findall(source))


@pytest.mark.once
@skips_guards
@pytest.mark.skipif(
    torch_version() >= (2, 15),
    reason="PyTorch 2.15 checks further modules if it skips guards, which is not its default",
)
@some("leaves", "bert")  # a model without blocks, and one with blocks
def test_guards_of_a_fused_model_check_no_more_modules(spec: ModelSpec) -> None:
    """Before a step, they check the same modules as the guards of the original model.

    Blocks, and the modules around them, are an exception: Transformers looks up an attribute of
    the class of a block that may be checkpointed.
    """
    model, arguments = undropped(spec), _arguments(spec)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        original = _guards(model, arguments)
        fusedops.fuse_model(model)
        fused = _guards(model, arguments)
    blocks = [
        name for name, m in model.named_modules() if hasattr(type(m), "gradient_checkpointing")
    ]
    # The patterns have matched: a block has guards on the bases of its class.
    assert fused.skipped
    assert fused.bases or not blocks
    # The first base of a fused class is the original class. Guards on further bases are additional.
    with_further_bases = {name for name, index in fused.bases if index >= 2}
    additional = fused.checked - original.checked
    additional |= with_further_bases - {name for name, _ in original.bases}
    for name in additional:
        assert any(f"{block}.".startswith(f"{name}.") for block in blocks), name


@pytest.mark.once
@skips_guards
@some("leaves")
def test_fusing_and_unfusing_compile_again(spec: ModelSpec) -> None:
    """Guards detect that the model, or a module of it, was fused or unfused."""
    model, arguments = undropped(spec), _arguments(spec)
    recorder = _Recorder()
    compiled = torch.compile(model, backend=recorder)
    with _skipping_guards(), torch.autocast(DEVICE.type, torch.bfloat16), making_kernels():
        compiled(**arguments)
        compiled(**arguments)
        original_graphs = recorder.graphs
        report = fusedops.fuse_model(model)
        compiled(**arguments)
        compiled(**arguments)
        fused_graphs = recorder.graphs
        assert fused_graphs > original_graphs
        names = [entry.name for entry in report if entry.rule and entry.name]
        innermost = next(
            name for name in names if not any(other.startswith(f"{name}.") for other in names)
        )
        fusedops.unfuse_model(model.get_submodule(innermost))
        compiled(**arguments)
        assert recorder.graphs > fused_graphs
    with _skipping_guards(), torch.autocast(DEVICE.type, torch.bfloat16), making_kernels():
        torch._dynamo.reset()
        fusedops.fuse_model(model)
        compiled(**arguments)
        fused_graphs = recorder.graphs
        fusedops.unfuse_model(model)
        compiled(**arguments)
        assert recorder.graphs > fused_graphs


def test_unfuse_model_does_not_undo_the_users_compile() -> None:
    model = nn.Sequential(nn.LayerNorm(4))
    fusedops.fuse_model(model)
    model.compile(backend="eager")
    fusedops.unfuse_model(model)
    assert type(model[0]) is nn.LayerNorm
    assert model._compiled_call_impl is not None
