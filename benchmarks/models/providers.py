"""The contenders: the model as it is, and what a user could do to it.

Each changes one instance, in place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

import fusedops
from fusedops.backend.entry import backend

from .text import Text
from .workloads import Workload

__all__ = [
    "COMPILING",
    "OURS",
    "PROVIDERS",
    "WITHOUT",
    "Contender",
    "contender",
    "offered",
    "prepare",
]

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Contender:
    """A model that a provider has changed, and its step.

    Attributes:
        in_force: a context within which the step must run; it holds what a provider changes besides
            the instance.
        step: the whole step, asynchronous.
        clear: frees what a step leaves.
    """

    model: nn.Module
    in_force: Context
    step: Callable[[], object]

    def clear(self) -> None:
        """Frees the gradients."""
        self.model.zero_grad(set_to_none=True)

    @property
    def own_bytes(self) -> int:
        """Its parameters and buffers."""
        tensors = {id(t): t.nbytes for t in (*self.model.parameters(), *self.model.buffers())}
        return sum(tensors.values())


def contender(name: str, workload: Workload, device: torch.device, text: Text) -> Contender:
    """The provider's model with its step, the batch drawn from a text that was just seeded."""
    model = workload.build(device)
    in_force = prepare(name, model)
    batch = workload.batch(text)
    if workload.mode == "train":
        return Contender(model, in_force, lambda: _train(model, batch, device))
    if workload.mode == "infer":
        return Contender(model, in_force, lambda: _infer(model, batch))
    new = workload.sizes[-1]
    return Contender(model, in_force, lambda: _generate(model, batch, new))


def prepare(name: str, model: nn.Module) -> Context:
    """Lets the provider change the model; returns the context in which it runs."""
    return PROVIDERS[name](model)


def offered(workload: Workload) -> list[str]:
    """The providers that are measured there unless others are named.

    Autotuning takes minutes a model: it is measured where the best of torch.compile counts.
    Generation is not compiled: its cache grows by a token a step, and the graphs are compiled again
    and again. A short training is not either, as its sizes are others than those that were
    compiled.
    """
    names = [
        name
        for name in PROVIDERS
        if name not in WITHOUT
        and name != "compile_autotune"
        and (name != "liger" or _has_liger(workload))
    ]
    names += ["compile_autotune"] if workload.name == "llama" else []
    return [name for name in names if name not in COMPILING or workload.mode in ("train", "infer")]


def _train(model: nn.Module, batch: dict[str, Any], device: torch.device) -> None:
    model.zero_grad(set_to_none=True)
    with torch.autocast(device.type, torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()


@torch.no_grad()
def _infer(model: nn.Module, batch: dict[str, Any]) -> None:
    model(**batch)


def _generate(model: Any, batch: dict[str, Any], new: int) -> Any:
    return model.generate(
        **batch, do_sample=False, no_repeat_ngram_size=3, min_new_tokens=new, max_new_tokens=new
    )


def _eager(model: nn.Module) -> Context:
    return nullcontext


def _fused(model: nn.Module, **options: Any) -> Context:
    if not fusedops.fuse_model(model, **options):
        raise RuntimeError("fuse_model found nothing to fuse")
    return nullcontext


def _compile(model: nn.Module, **options: Any) -> Context:
    model.compile(**options)
    return nullcontext


def _fused_backend(model: nn.Module) -> Context:
    """Fused by rules, and what they leave by the backend."""
    _fused(model)
    return _compile(model, backend=backend)


def _liger(model: nn.Module) -> Context:
    """Liger-Kernel's patch of an instance.

    What it also sets in the model's module is in force only for its steps.
    """
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    apply_liger_kernel_to_llama(model=model)
    changed = {name: value for name, value in vars(module).items() if before.get(name) is not value}
    for name in changed:
        setattr(module, name, before[name])
    return lambda: mock.patch.multiple(module, **changed)


def _has_liger(workload: Workload) -> bool:
    return workload.name == "llama" and workload.mode != "generate"


# Fused, but for one trick: its name, where it is at work, and the provider that has it.
WITHOUT = {
    "fused_without_packing": ("packing", "fused"),
    "fused_without_padded_linear": ("padded_linear", "fused"),
    "fused_without_one_token": ("one_token", "fused"),
    "fused_compile_without_packing": ("packing", "fused_compile"),
    "fused_compile_without_casts": ("casts", "fused_compile"),
    "fused_compile_without_masks": ("masks", "fused_compile"),
}
PROVIDERS: dict[str, Callable[[nn.Module], Context]] = {
    "eager": _eager,
    "fused": _fused,
    "liger": _liger,
    "compile": _compile,
    "compile_autotune": partial(_compile, mode="max-autotune-no-cudagraphs"),
    "fused_compile": partial(_fused, compile_rest=True),
    "backend": partial(_compile, backend=backend),
    "fused_backend": _fused_backend,
    **{
        name: partial(_fused, exclude=[trick], compile_rest=other == "fused_compile")
        for name, (trick, other) in WITHOUT.items()
    },
}
COMPILING = tuple([name for name in PROVIDERS if "compile" in name or "backend" in name])
# Of ours a run must have a row; it may lack a peer's.
OURS = frozenset(name for name in PROVIDERS if name.startswith("fused") or "backend" in name)
