"""Hooks on all modules at once: a fused model calls each of its modules as PyTorch would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn
from torch.nn.modules import module as torch_module

import fusedops
from sample_models import ModelSpec
from zoo import SAMPLES, build, every, inputs, run

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
