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

# PyTorch's own, of hooks on modules whose outputs are no tensors and of hooks of the older kind.
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
# The kind that PyTorch deprecated: it does not go together with full backward hooks.
_KINDS = (*_FORWARD, *_BACKWARD, torch_module.register_module_backward_hook)
kinds = pytest.mark.parametrize("register", _KINDS, ids=lambda register: register.__name__)
_SOME = [s for s in SAMPLES if s.name in ("torch_post_norm", "bert", "gpt2", "t5", "llama")]
some = pytest.mark.parametrize("spec", _SOME, ids=lambda spec: spec.name)


@contextmanager
def _seen(model: nn.Module, *registers: Callable[[Any], Any]) -> Iterator[list[tuple[str, str]]]:
    """The calls of hooks of these kinds inside the block.

    The kind's place, and the module's name in the model.
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


def _both(
    spec: ModelSpec, modify: Callable[[ModelSpec], nn.Module] = build
) -> tuple[nn.Module, nn.Module]:
    original, fused = modify(spec), modify(spec)
    fusedops.fuse_model(fused)
    return original, fused


@every
def test_global_forward_hooks_see_every_call(spec: ModelSpec) -> None:
    results = []
    for model in _both(spec):
        with _seen(model, *_FORWARD) as calls:
            model(**inputs(spec))
        results.append(calls)
    assert results[0]
    assert results[1] == results[0]


@every
def test_global_forward_hooks_see_every_call_under_autocast(spec: ModelSpec) -> None:
    """In training, where layers are packed and cast together."""
    results = []
    for model in _both(spec, undropped):
        with (
            _seen(model, *_FORWARD) as calls,
            making_kernels(),
            torch.autocast(DEVICE.type, torch.bfloat16),
        ):
            model(**inputs(spec))
        results.append(calls)
    assert results[0]
    assert results[1] == results[0]


@every
def test_global_backward_hooks_see_every_call(spec: ModelSpec) -> None:
    """The order of a backward is autograd's, which a fused operator may change."""
    results = []
    for model in _both(spec):
        with _seen(model, *_BACKWARD) as calls:
            run(model, inputs(spec))
        results.append(sorted(calls))
    assert results[0]
    assert results[1] == results[0]


@some
@kinds
def test_one_kind_of_global_hook_is_enough(
    spec: ModelSpec, register: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # PyTorch remembers for the whole process which of the two kinds of backward hooks came first.
    monkeypatch.setattr(torch_module, "_global_is_full_backward_hook", None)
    results = []
    for model in _both(spec):
        with _seen(model, register) as calls:
            run(model, inputs(spec))
        results.append(sorted(calls))
    assert results[0]
    assert results[1] == results[0]


@some
def test_fused_again_when_the_hook_is_gone(spec: ModelSpec) -> None:
    _, model = _both(spec)
    model.train()
    with _seen(model, *_FORWARD), counted() as hooked:
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
    """Those registered before the model is compiled.

    PyTorch does not look for later ones either.
    """
    results = []
    for model in _both(spec, undropped):
        torch._dynamo.reset()
        model.compile(backend="eager")
        with _seen(model, torch_module.register_module_forward_hook) as calls:
            model(**inputs(spec))
        results.append(calls)
    assert results[0]
    assert results[1] == results[0]


@some
def test_without_the_private_names_nothing_inside_a_block_is_fused(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a hook on all modules: slower, and right."""
    original, model = _both(spec)
    location = importlib.util.spec_from_file_location(
        f"{modules.__package__}.without", modules.__file__
    )
    assert location is not None
    assert location.loader is not None
    without = importlib.util.module_from_spec(location)
    with mock.patch.object(torch.nn.modules, "module", object()):
        location.loader.exec_module(without)
    monkeypatch.setattr("fusedops.models.hooks.has_global_hooks", without.has_global_hooks)
    assert without.has_global_hooks()
    assert not modules.has_global_hooks()
    called: list[list[str]] = []
    results: list[list[Tensor]] = []
    for each in (original, model):
        called.append([])
        for name, module in each.named_modules():
            module.register_forward_hook(lambda *_, name=name, names=called[-1]: names.append(name))
        results.append(outputs(each(**inputs(spec))))
    assert called[1] == called[0]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-5 * float(a.detach().abs().max()))
