"""Hooks on all modules at once: a fused model calls each of its modules as PyTorch would."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import fusedops
from fusedops.core.compat import modules
from sample_models import ModelSpec
from support import DEVICE
from zoo import SAMPLES, build, counted, every, inputs, making_kernels, outputs, run, undropped

# The warnings are PyTorch's: about hooks on modules whose outputs are not tensors, and about
# backward hooks of the deprecated kind.
pytestmark = [
    pytest.mark.once,  # which modules are called does not depend on the kernels
    pytest.mark.filterwarnings("ignore:For backward hooks to be called"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:Using (a )?non-full backward hook"),
]

_FORWARD = (
    torch_module.register_module_forward_pre_hook,
    torch_module.register_module_forward_hook,
)
_BACKWARD = (
    torch_module.register_module_full_backward_pre_hook,
    torch_module.register_module_full_backward_hook,
)
# The last kind is deprecated, and cannot be combined with full backward hooks.
_KINDS = (*_FORWARD, *_BACKWARD, torch_module.register_module_backward_hook)
kinds = pytest.mark.parametrize("register", _KINDS, ids=lambda register: register.__name__)
_SOME = [s for s in SAMPLES if s.name in ("torch_post_norm", "bert", "gpt2", "t5", "llama")]
some = pytest.mark.parametrize("spec", _SOME, ids=lambda spec: spec.name)


@contextmanager
def _recorded(
    model: nn.Module, *registers: Callable[[Any], Any]
) -> Iterator[list[tuple[str, str]]]:
    """Record the calls of global hooks: the name of the kind, and the module's name in the model.

    Args:
        model: the model whose modules are named.
        registers: PyTorch's functions that register the kinds of hooks.
    """
    names = {module: name for name, module in model.named_modules()}
    calls: list[tuple[str, str]] = []

    def hook_of(kind: str) -> Callable[..., None]:
        def hook(module: nn.Module, *args: Any) -> None:
            calls.append((kind, names.get(module, type(module).__name__)))

        return hook

    handles = [register(hook_of(register.__name__)) for register in registers]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _original_and_fused(
    spec: ModelSpec, make: Callable[[ModelSpec], nn.Module] = build
) -> tuple[nn.Module, nn.Module]:
    """Return two equal models, of which the second is fused."""
    original, fused = make(spec), make(spec)
    fusedops.fuse_model(fused)
    return original, fused


@every
def test_global_forward_hooks_are_called_for_every_module(spec: ModelSpec) -> None:
    results = []
    for model in _original_and_fused(spec):
        with _recorded(model, *_FORWARD) as calls:
            model(**inputs(spec))
        results.append(calls)
    assert results[0]
    assert results[1] == results[0]


@every
def test_global_forward_hooks_are_called_for_every_module_under_autocast(spec: ModelSpec) -> None:
    """Without hooks, layers of a model in training mode are packed and cast together there."""
    results = []
    for model in _original_and_fused(spec, undropped):
        with (
            _recorded(model, *_FORWARD) as calls,
            making_kernels(),
            torch.autocast(DEVICE.type, torch.bfloat16),
        ):
            model(**inputs(spec))
        results.append(calls)
    assert results[0]
    assert results[1] == results[0]


@every
def test_global_backward_hooks_are_called_for_every_module(spec: ModelSpec) -> None:
    """The order of calls may differ, because autograd determines it."""
    results = []
    for model in _original_and_fused(spec):
        with _recorded(model, *_BACKWARD) as calls:
            run(model, inputs(spec))
        results.append(sorted(calls))
    assert results[0]
    assert results[1] == results[0]


@some
@kinds
def test_each_kind_of_global_hook_makes_blocks_call_every_module(
    spec: ModelSpec, register: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # PyTorch stores for the whole process which kind of backward hook was registered first.
    monkeypatch.setattr(torch_module, "_global_is_full_backward_hook", None)
    results = []
    for model in _original_and_fused(spec):
        with _recorded(model, register) as calls:
            run(model, inputs(spec))
        results.append(sorted(calls))
    assert results[0]
    assert results[1] == results[0]


@some
def test_model_calls_fused_operators_again_after_the_hook_is_removed(spec: ModelSpec) -> None:
    _, model = _original_and_fused(spec)
    model.train()
    with _recorded(model, *_FORWARD), counted() as hooked:
        model(**inputs(spec))
    with counted() as calls:
        model(**inputs(spec))
    assert calls == spec.calls
    assert hooked != calls


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(
            spec,
            id=spec.name,
            marks=[] if spec.name == "torch_post_norm" else pytest.mark.full,
        )
        for spec in _SOME
    ],
)
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_calls_global_hooks(spec: ModelSpec) -> None:
    """It calls hooks that were registered before the model is compiled.

    PyTorch's compiled code does not call later ones either.
    """
    results = []
    for model in _original_and_fused(spec, undropped):
        torch._dynamo.reset()
        model.compile(backend="eager")
        with _recorded(model, torch_module.register_module_forward_hook) as calls:
            model(**inputs(spec))
        results.append(calls)
    assert results[0]
    assert results[1] == results[0]


@some
def test_without_pytorchs_private_names_blocks_call_every_module(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a hook on all modules, results are right, but the model is slower."""
    original, model = _original_and_fused(spec)
    location = importlib.util.spec_from_file_location(
        f"{modules.__package__}.without", modules.__file__
    )
    assert location is not None
    assert location.loader is not None
    # A second copy of the module `modules`, which does not find PyTorch's private names.
    without_names = importlib.util.module_from_spec(location)
    with mock.patch.object(torch.nn.modules, "module", object()):
        location.loader.exec_module(without_names)
    monkeypatch.setattr("fusedops.models.hooks.has_global_hooks", without_names.has_global_hooks)
    assert without_names.has_global_hooks()
    assert not modules.has_global_hooks()
    calls: list[list[str]] = []
    results: list[list[Tensor]] = []
    for called in (original, model):
        names: list[str] = []
        for name, module in called.named_modules():
            module.register_forward_hook(lambda *_, name=name, names=names: names.append(name))
        results.append(outputs(called(**inputs(spec))))
        calls.append(names)
    assert calls[1] == calls[0]
    for expected, result in zip(*results, strict=True):
        atol = 1e-5 * float(expected.detach().abs().max())
        torch.testing.assert_close(result, expected, rtol=0, atol=atol)
